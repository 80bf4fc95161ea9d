"""How long an episode may be, and what counts against it.

Order of checks. It matters where two limits meet in one turn, so it is fixed:

1. *Cut.* Tokens beyond the number that was asked for are dropped; then all tokens after the one
   that completes the first `</search>` or `</answer>`.
2. *Answer.* An answer ends the episode (`answered`), even if it uses up a limit.
3. *Search.* A query that is not empty: if no search is left, or this is the last turn, the episode
   ends (`search_limit`). Else, if not even an empty information block would fit, it ends
   (`context_limit`) and nobody is asked. Else the search is requested. A failed one ends the
   episode (`failed`); documents are shown as far as they fit, and if none of them fits the episode
   ends (`context_limit`).
4. *No action.* A turn that its limit cut ends the episode: with `context_limit` if the context is
   full, else with `token_limit`. Any other turn (end of sequence, an empty query, a closing tag
   without its opening) is invalid; so is a cut one under `retry_truncated`. One more invalid turn
   than `max_invalid` ends the episode, and so does one in the last turn (`invalid_action`).
5. *Before each turn.* The notice that is due must fit, and one token after it: else `context_limit`
   if the context is the tighter bound, `token_limit` if `max_response_tokens` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from evenhand.core.errors import ConfigError
from evenhand.core.plugins import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The rules of one episode; tokens are those of the policy's tokenizer.

    Attributes:
        max_searches: searches that are executed.
        max_turns: turns of the policy, whatever they hold; in the last one no search is executed.
            `None`: bounded by the searches and the invalid turns alone.
        max_turn_tokens: tokens of one turn.
        max_observation_tokens: tokens of one information segment, tags included.
        max_context: tokens of prompt, turns and observations together.
        max_response_tokens: tokens of all that follows the prompt, for trainers that pad prompt and
            response separately (verl's `response_length`, TRL's `max_completion_length`); `None`:
            only the context bounds it.
        max_invalid: turns without a usable action that get a notice and another turn; the next one
            ends the episode.
        retry_truncated: a turn that `max_turn_tokens` cut counts as invalid and goes on, instead of
            ending the episode.
        announce_last: tell the policy to answer when no search is left.

    Raises:
        ConfigError: a limit is not a whole number or is out of range.
    """

    max_searches: int = 4
    max_turns: int | None = None
    max_turn_tokens: int = 500
    max_observation_tokens: int = 500
    max_context: int = 8192
    max_response_tokens: int | None = None
    max_invalid: int = 2
    retry_truncated: bool = False
    announce_last: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"limit {name} must be a whole number of at least {least}"
                    f"{' or None' if name in _OPTIONAL else ''}, got {value!r}"
                )
        for name in ("retry_truncated", "announce_last"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"limit {name} must be true or false, got "
                                  f"{getattr(self, name)!r}")  # fmt: skip

    @property
    def most_turns(self) -> int:
        """The largest number of turns that an episode can have."""
        by_rules = self.max_searches + self.max_invalid + 1
        return by_rules if self.max_turns is None else min(by_rules, self.max_turns)


_LEAST = {
    "max_searches": 0,
    "max_turns": 1,
    "max_turn_tokens": 1,
    "max_observation_tokens": 1,
    "max_context": 2,
    "max_response_tokens": 1,
    "max_invalid": 0,
}
_OPTIONAL = {"max_turns", "max_response_tokens"}

PRESETS: Mapping[str, Limits] = MappingProxyType(
    {
        "default": Limits(),
        # Search-R1, scripts/nq_hotpotqa (all of v0.1 to v0.3 and evaluate.sh): max_turns 4 loop
        # turns, each a search or an invalid action, then one turn with search disabled; 500 tokens
        # a turn and an observation; data.max_prompt_length 4096 is what generation reads, so the
        # context reaches 4096 + 500. A turn that runs into its limit is an invalid action there,
        # and an invalid action gets a notice and goes on. Nothing announces the last turn.
        "searchr1": Limits(
            max_searches=4,
            max_turns=5,
            max_turn_tokens=500,
            max_observation_tokens=500,
            max_context=4096 + 500,
            max_invalid=4,
            retry_truncated=True,
            announce_last=False,
        ),
        # CalibAdv, train_grpo.sh: max_turns 4, max_response_length 1024, max_obs_length 2048,
        # max_prompt_length 16384; the first invalid action ends the rollout (its generation.py).
        "calibadv": Limits(
            max_searches=4,
            max_turns=5,
            max_turn_tokens=1024,
            max_observation_tokens=2048,
            max_context=16384 + 1024,
            max_invalid=0,
            announce_last=False,
        ),
    }
)
"""Rules by name: ours, and those of two projects (`docs/environment.md` lists what differs)."""


def preset(name: str) -> Limits:
    """Return the limits of a name.

    Raises:
        ConfigError: an unknown name; the message lists the valid ones.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(
            f"unknown limits {name!r}; valid names: {', '.join(PRESETS)}"
            + did_you_mean(name, PRESETS)
        ) from None
