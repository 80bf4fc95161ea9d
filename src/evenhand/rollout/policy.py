"""What a policy is to the rollout: token ids in; token ids, log-probabilities and a stop out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from evenhand.core.errors import ConfigError, DataError
from evenhand.task import Tokenizer
from evenhand.trajectory.protocol import STOP_TAGS


class RowKey(NamedTuple):
    """Who a row is. With the seed it keys the row's random numbers, so it is unique in a session.

    Attributes:
        step: training step; -1 outside training.
        question: identity of the question.
        rollout: number of the rollout of that question.
    """

    step: int
    question: str
    rollout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token, the first of equal ones.
        top_p: draw from the smallest set of likeliest tokens whose mass reaches this; 1 is off.
        top_k: draw from this many likeliest tokens, more if the last ones are equal; `None` is off.
        seed: of the random numbers, with the key of the row.

    Log-probabilities are always those of the full softmax of `logits / temperature`, before `top_k`
    and `top_p`; at temperature 0 those of `softmax(logits)`.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, or None for off, got {self.top_k}")


class Stop(StrEnum):
    """Why a turn ended."""

    TAG = "tag"
    """A stop tag is complete."""
    EOS = "eos"
    """The policy sampled an end-of-sequence token; it is the last one kept."""
    LENGTH = "length"
    """The turn used up its tokens."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn that a row waits for.

    Attributes:
        key: the row.
        context_ids: all tokens so far, at least one.
        max_tokens: how many tokens the turn may have, at least one.
        stop_tags: texts that end it. The token that completes one is kept whole and is the last.
    """

    key: RowKey
    context_ids: Sequence[int]
    max_tokens: int
    stop_tags: tuple[str, ...] = STOP_TAGS


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn.

    Attributes:
        key: the row.
        token_ids: `[n]` sampled ids.
        logprobs: `[n]` their log-probabilities (see `Sampling`).
        stop: why it ended.
        error: why there is no turn, where a server was to sample it and failed; its tokens are
            ignored, and the episode ends as `failed`.
    """

    key: RowKey
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    stop: Stop
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the policy ended the turn itself."""
        return self.stop is not Stop.LENGTH


class Session(Protocol):
    """A set of rows that go through turns together; what was computed of a row may be kept."""

    def generate(self, turns: Sequence[TurnRequest]) -> list[SampledTurn]:
        """Take up `turns`; return turns that are complete, in the order of their first request.

        At least one is returned if any is pending; the others go on with the next call, which may
        bring no new turn. When a call returns depends on the tokens alone, never on time.

        The context of a row usually continues what it was plus what was sampled. It need not: a
        row is always continued after `context_ids` as given.

        Raises:
            DataError: a request cannot be met.
        """
        ...

    def release(self, keys: Iterable[RowKey]) -> None:
        """Forget rows that have ended. A row unknown to the session is ignored."""
        ...


class Policy(Protocol):
    """A model that continues token ids."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        ...

    @property
    def max_context(self) -> int | None:
        """The longest context, sampled tokens included; `None` if there is no bound."""
        ...

    @property
    def max_rows(self) -> int | None:
        """How many rows a session should hold at a time; `None` if it does not matter."""
        ...

    def session(self, sampling: Sampling) -> AbstractContextManager[Session]:
        """Open a session. The weights must not change before it is closed."""
        ...


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop_tags: tuple[str, ...] = STOP_TAGS,
) -> list[SampledTurn]:
    """Continue each prompt by one turn; results are in the order of the prompts.

    Row `i` has the key `RowKey(-1, "prompt", i)`.

    Raises:
        DataError: a prompt is empty or too long.
    """
    keys = [RowKey(-1, "prompt", at) for at in range(len(prompts))]
    found: dict[RowKey, SampledTurn] = {}
    most = policy.max_rows or max(1, len(prompts))
    with policy.session(sampling) as session:
        for start in range(0, len(prompts), most):
            turns = [
                TurnRequest(key, prompt, max_tokens, stop_tags)
                for key, prompt in zip(
                    keys[start : start + most], prompts[start : start + most], strict=True
                )
            ]
            waiting = {turn.key for turn in turns}
            while waiting:
                done = session.generate(turns)
                turns = []
                found.update((turn.key, turn) for turn in done)
                waiting -= {turn.key for turn in done}
                session.release(turn.key for turn in done)
    return [found[key] for key in keys]


def check_request(turn: TurnRequest, max_context: int | None) -> None:
    """Raise a `DataError` for a request that no back end can meet."""
    if not len(turn.context_ids):
        raise DataError(f"row {tuple(turn.key)} has an empty context; a prompt needs at least one "
                        "token")  # fmt: skip
    if turn.max_tokens < 1:
        raise DataError(f"row {tuple(turn.key)} asks for {turn.max_tokens} tokens; ask for at "
                        "least 1")  # fmt: skip
    if max_context is not None and len(turn.context_ids) >= max_context:
        raise DataError(
            f"the context of row {tuple(turn.key)} has {len(turn.context_ids)} tokens and the "
            f"model takes {max_context}; set the limit max_context to at most {max_context}"
        )
