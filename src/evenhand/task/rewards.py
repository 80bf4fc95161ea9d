"""Rewards over a finished rollout, by name or `module:function`.

A reward is a function of one `Trajectory`. What it scores is the policy's own answer, parsed from
the last answer segment that the policy wrote: text of the environment is never read for an answer.

Policy faults (no answer, a broken format, truncation) are scored; an environment fault
(`stop_reason` failed) is not: its reward is null and it leaves every statistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, Protocol

from evenhand.core.arrays import MAX_REWARD
from evenhand.core.errors import ConfigError, DataError, MissingExtraError
from evenhand.core.plugins import did_you_mean, is_object_spec, load_object
from evenhand.task import scoring
from evenhand.trajectory import Kind, StopReason, Trajectory
from evenhand.trajectory.protocol import ActionKind, first_action

Reward = Callable[[Trajectory], float]
"""Maps a finished rollout to a number of magnitude at most 1e6, or `None` to leave it unscored."""

REWARD_ERROR = "reward_error"
"""Key of `Trajectory.metadata` that says why a reward is null although the episode ended well."""

STARTER_ANSWER, STARTER_FORMAT, STARTER_SEARCH = 0.8, 0.1, 0.1
"""Weights of the starter reward. A right answer alone outweighs all the rest together."""


class _Named(Protocol):
    def __call__(self, trajectory: Trajectory, *, convention: str = ...) -> float: ...


@dataclass(frozen=True, slots=True)
class NamedReward:
    """An entry of the table of rewards.

    Attributes:
        function: the reward, with the scoring convention as keyword.
        formula: the formula in one line, with F1 and EM in [0, 1].
        bounds: smallest and largest value.
        source: whose reward it is.
    """

    function: _Named
    formula: str
    bounds: tuple[float, float]
    source: str


# --- what a reward looks at ----------------------------------------------------------------------


def answer_of(trajectory: Trajectory) -> str | None:
    """Return the policy's answer without surrounding blanks, or `None` if it gave none.

    It is read by `protocol.first_action` from the last segment that the policy wrote as an answer.
    An answer inside retrieved text, or after another action of the same turn, is not one.
    """
    for segment in reversed(trajectory.segments):
        if segment.is_policy and segment.kind is Kind.ANSWER:
            action = first_action(segment.text)
            return action.content if action and action.kind is ActionKind.ANSWER else None
    return None


def found_useful_document(trajectory: Trajectory) -> bool:
    """Whether an executed search returned a document that helps to answer the question.

    Helps: its title is one of the supporting titles (compared in Unicode form C, case folded). If
    no supporting titles are known: its text holds an accepted answer as whole words; but never for
    questions whose golds are yes, no or noanswer, where that says nothing.
    """
    shown = [
        document
        for at in trajectory.executed_searches()
        for document in trajectory.segments[at + 1].documents or ()
    ]
    if trajectory.supporting_titles:
        wanted = {scoring.folded(title) for title in trajectory.supporting_titles}
        return any(scoring.folded(document.title) in wanted for document in shown)
    golds = [gold for gold in trajectory.golden_answers or () if not scoring.is_closed_answer(gold)]
    return bool(golds) and any(scoring.contains(document.text, golds) for document in shown)


def _golds(trajectory: Trajectory) -> tuple[str, ...]:
    if not trajectory.golden_answers:
        raise DataError(
            f"trajectory {trajectory.id!r} has no golden answers, so its answer cannot be scored; "
            "give them in the field golden_answers, or keep the rewards that the file holds"
        )
    return trajectory.golden_answers


# --- the named rewards ---------------------------------------------------------------------------


def exact_match(trajectory: Trajectory, *, convention: str = "squad") -> float:
    """Return EM: 1 for a right answer, else 0. The format plays no part.

    Source: Search-R1 (arXiv 2503.09516), section 3.4.
    """
    return scoring.exact_match(answer_of(trajectory), _golds(trajectory), convention=convention)


def contains(trajectory: Trajectory, *, convention: str = "squad") -> float:
    """Return 1 if the answer holds a gold as whole words, else 0. The format plays no part.

    An answer that lists many candidates is rewarded too: use it to evaluate rather than to train.
    """
    return scoring.contains(answer_of(trajectory), _golds(trajectory), convention=convention)


def f1_format(trajectory: Trajectory, *, convention: str = "squad") -> float:
    """Return `F1 * format * searched`, in [0, 1].

    `format` is 1 if the rollout obeys the protocol (`format_ok`), `searched` is 1 if at least one
    search was executed; else they are 0. A right answer without a search earns nothing.

    Source: CalibAdv (arXiv 2604.18235), as released.
    """
    if not (trajectory.format_ok and trajectory.executed_searches()):
        _golds(trajectory)
        return 0.0
    return scoring.f1(answer_of(trajectory), _golds(trajectory), convention=convention)


def f1_plus(trajectory: Trajectory, *, convention: str = "squad") -> float:
    """Return `F1 - 0.1 [no executed search] - 0.1 [no answer]`, in [-0.2, 1].

    A blank answer is no answer. The format plays no part beyond that. Ours.
    """
    answer = answer_of(trajectory)
    score = scoring.f1(answer, _golds(trajectory), convention=convention)
    # Added up in tenths, so that 1 - 0.1 and its like come out as the nearest double.
    penalty = (not trajectory.executed_searches()) + (not answer)
    return score - penalty / 10


def starter(trajectory: Trajectory, *, convention: str = "squad") -> float:
    """Return `0.8 F1 + 0.1 format + 0.1 useful`, in [0, 1]: dense, for policies that rarely answer.

    `format` is 1 if the rollout obeys the protocol (`format_ok`), `useful` is 1 if an executed
    search found a useful document (`found_useful_document`); a second one adds nothing. Without a
    right answer at most 0.2 can be earned, a right answer alone earns 0.8. Where neither supporting
    titles nor a findable gold tell what is useful, that term is 0 for every rollout of the
    question. Ours: switch to a stricter reward once the policy answers at all.
    """
    score = scoring.f1(answer_of(trajectory), _golds(trajectory), convention=convention)
    return (
        STARTER_ANSWER * score
        + STARTER_FORMAT * trajectory.format_ok
        + STARTER_SEARCH * found_useful_document(trajectory)
    )


REWARDS: dict[str, NamedReward] = {
    "exact_match": NamedReward(exact_match, "EM", (0.0, 1.0), "Search-R1"),
    "contains": NamedReward(
        contains, "1 if the answer holds a gold as whole words", (0.0, 1.0), "common"
    ),
    "f1_format": NamedReward(
        f1_format, "F1 x format x at least one search", (0.0, 1.0), "CalibAdv"
    ),
    "f1_plus": NamedReward(
        f1_plus, "F1 - 0.1 for no search - 0.1 for no answer", (-0.2, 1.0), "evenhand"
    ),
    "starter": NamedReward(
        starter, "0.8 F1 + 0.1 format + 0.1 useful search", (0.0, 1.0), "evenhand"
    ),
}


def get_reward(name: str, *, convention: str = "squad") -> Reward:
    """Return the reward of that name, or the function that `module:function` names.

    Args:
        name: one of `REWARDS`, or `package.module:function` of your own.
        convention: scoring convention of a named reward; a function of your own chooses itself.

    Raises:
        ConfigError: unknown name or convention, a module that cannot be imported, an object that
            cannot be called, or a convention for a function of your own.
    """
    scoring.get_convention(convention)
    if name in REWARDS:
        return partial(REWARDS[name].function, convention=convention)
    if not is_object_spec(name):
        raise ConfigError(
            f"unknown reward {name!r}; valid: {', '.join(REWARDS)}, or module:function of your own"
            + did_you_mean(name, REWARDS)
        )
    if convention != "squad":
        raise ConfigError(
            f"the scoring convention {convention!r} does not reach the reward {name!r}; "
            "call evenhand.task.scoring with it inside your function"
        )
    function = load_object(name, "reward")
    if not callable(function):
        raise ConfigError(f"reward {name!r} is {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


# --- scoring a rollout ---------------------------------------------------------------------------


_SCORES: dict[str, Callable[..., float]] = {
    "exact_match": scoring.exact_match,
    "f1": scoring.f1,
    "contains": scoring.contains,
}


def score_trajectory(
    trajectory: Trajectory, reward: str | Reward, *, convention: str = "squad"
) -> Trajectory:
    """Return the rollout with `reward` and `scores` set.

    `scores` gets `exact_match`, `f1` and `contains` of the answer beside the names that it holds
    already. Special cases:

    * An environment fault (`stop_reason` failed): the reward and these scores are `None`.
    * The function raises, or returns something other than a number of magnitude at most 1e6
      (`nan` and `None` included): the reward is `None` and `metadata["reward_error"]` says why. A
      bad rollout is data, not a crash. Errors in the setting rather than in the rollout
      (`ConfigError`, `MissingExtraError`) are raised.

    Args:
        trajectory: a finished rollout.
        reward: a name, `module:function`, or the function itself.
        convention: scoring convention of the scores and of a named reward.

    A function of your own may judge without golden answers; the scores are then `None`.

    Raises:
        DataError: a named reward, and the rollout has no golden answers.
        ConfigError: unknown reward or convention.
    """
    function = reward
    is_named = isinstance(function, str) and function in REWARDS
    if isinstance(function, str):
        function = get_reward(function, convention=convention if is_named else "squad")
    scoring.get_convention(convention)
    metadata = {key: value for key, value in trajectory.metadata.items() if key != REWARD_ERROR}
    failed = trajectory.stop_reason is StopReason.FAILED
    golds = _golds(trajectory) if is_named and not failed else trajectory.golden_answers
    answer = answer_of(trajectory)
    scores = dict(trajectory.scores or {}) | {
        name: None if failed or not golds else score(answer, golds, convention=convention)
        for name, score in _SCORES.items()
    }
    if failed:
        return replace(trajectory, reward=None, scores=scores, metadata=metadata)
    value, problem = _call(function, trajectory)
    if problem is not None:
        metadata[REWARD_ERROR] = problem
    return replace(trajectory, reward=value, scores=scores, metadata=metadata)


def _call(
    function: Callable[[Trajectory], Any], trajectory: Trajectory
) -> tuple[float | None, str | None]:
    try:
        raw = function(trajectory)
    except (ConfigError, MissingExtraError):
        raise
    except Exception as error:  # whatever a user's function raises concerns this rollout alone
        return None, f"the reward raised {type(error).__name__}: {error}"
    try:
        raw = raw.item() if hasattr(raw, "item") else raw  # a scalar of numpy or torch
        value = float(raw) if isinstance(raw, Real) else None
    except Exception:  # an array with several entries, an integer beyond every float
        value = None
    if value is None:
        return None, f"the reward returned {raw!r:.40}, expected a number"
    if not math.isfinite(value) or abs(value) > MAX_REWARD:
        return None, (
            f"the reward returned {value:g}, expected a number of magnitude at most {MAX_REWARD:g}"
        )
    return value, None
