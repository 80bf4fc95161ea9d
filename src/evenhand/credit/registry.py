"""The table of estimators by name: what `evenhand credit --estimator NAME` can say.

Each entry takes `CreditInputs` (arrays of one batch) and returns `advantage[S]`. The functions here
only chain the pieces of the sibling modules and spread trajectories to segments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from evenhand.core.arrays import FloatArray, count_vector, float_vector, same_length
from evenhand.core.errors import ConfigError, DataError, EvenhandError
from evenhand.core.plugins import did_you_mean, is_object_spec, load_object
from evenhand.credit import outcome, stratified
from evenhand.credit.calibrated import rebalance, soften_negative

ENTRY_POINT_GROUP = "evenhand.estimators"
NEEDS = ("stratum", "n_tokens", "step_score")


@dataclass(frozen=True, slots=True)
class CreditInputs:
    """The arrays of a batch: `N` trajectories with `S` policy segments between them.

    Attributes:
        rewards: `[N]`; `nan` = unscored.
        group: `[N]` labels.
        owner: `[S]` index of the trajectory that a segment belongs to.
        is_answer: `[S]` whether the segment is the last policy segment of its trajectory.
        n_tokens: `[S]` lengths, or `None`.
        stratum: `[N]` labels, or `None`.
        step_score: `[S]` step correctness in [0, 1], 0 where a segment has none, or `None`.
    """

    rewards: ArrayLike
    group: ArrayLike
    owner: ArrayLike
    is_answer: ArrayLike
    n_tokens: ArrayLike | None = None
    stratum: ArrayLike | None = None
    step_score: ArrayLike | None = None

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit together, with both lengths."""
        rewards = np.asarray(self.rewards)
        owner, is_answer = np.asarray(self.owner), np.asarray(self.is_answer)
        same_length(rewards=rewards, group=np.asarray(self.group))
        same_length(owner=owner, is_answer=is_answer)
        if self.stratum is not None:
            same_length(rewards=rewards, stratum=np.asarray(self.stratum))
        if self.n_tokens is not None:
            same_length(owner=owner, n_tokens=count_vector(self.n_tokens, "n_tokens"))
        if self.step_score is not None:
            scores = float_vector(self.step_score, "step_score", low=0.0, high=1.0)
            same_length(owner=owner, step_score=scores)
        if owner.size and (owner.dtype.kind not in "iu" or owner.min() < 0):
            raise DataError("owner must hold indices of trajectories, whole numbers from 0")
        if owner.size and owner.max() >= len(rewards):
            raise DataError(
                f"owner names trajectory {owner.max()}, but there are {len(rewards)} rewards"
            )
        if is_answer.size and is_answer.dtype.kind != "b":
            raise DataError(f"is_answer must be true or false, got dtype {is_answer.dtype}")

    def spread(self, advantage: FloatArray) -> FloatArray:
        """Give each segment the advantage of its trajectory: `[N]` to `[S]`."""
        return advantage[np.asarray(self.owner, dtype=np.int64)]


@dataclass(frozen=True, slots=True)
class Estimator:
    """One named way to assign credit.

    Attributes:
        function: takes `CreditInputs` and keywords, returns `advantage[S]`.
        formula: one line for the reader of a table.
        source: paper, or who invented it.
        needs: which optional arrays of `CreditInputs` it reads, a subset of `NEEDS`.
        whole_batch: given the settings, whether groups depend on one another.
    """

    function: Callable[..., FloatArray]
    formula: str
    source: str
    needs: frozenset[str] = frozenset()
    whole_batch: Callable[[Mapping[str, Any]], bool] = field(default=lambda settings: False)  # noqa: ARG005

    @property
    def defaults(self) -> dict[str, Any]:
        """The keywords that the function takes, with their default values."""
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }

    def __call__(self, inputs: CreditInputs, **settings: Any) -> FloatArray:
        """Return `[S]` advantages, after checking needs and the names of settings.

        Raises:
            ConfigError: an unknown setting, a need that `inputs` does not have, or a function that
                raises or returns something other than `[S]` finite numbers.
        """
        for name in settings:
            if name not in self.defaults:
                raise ConfigError(unknown_setting(name, self.defaults))
        for need in NEEDS:
            if need in self.needs and getattr(inputs, need) is None:
                raise ConfigError(_MISSING[need])
        try:
            result = np.asarray(self.function(inputs, **settings))
        except EvenhandError:
            raise
        except Exception as error:  # whatever a third party's function raises
            raise ConfigError(
                f"the estimator '{self.formula}' failed with {type(error).__name__}: {error}"
            ) from error
        expected = np.asarray(inputs.owner).shape
        if result.shape != expected or result.dtype.kind not in "iuf":
            raise ConfigError(
                f"the estimator '{self.formula}' must return one number a segment, shape "
                f"{expected}, got {result.dtype} of shape {result.shape}"
            )
        result = result.astype(np.float64, copy=False)
        if not np.isfinite(result).all():
            raise ConfigError(
                f"the estimator '{self.formula}' returned {int((~np.isfinite(result)).sum())} "
                "values that are not finite"
            )
        return result


_MISSING = {
    "stratum": "this estimator needs a stratum for each trajectory, got none; pass "
    "CreditInputs(stratum=...), for example the number of searches",
    "n_tokens": "this estimator weighs segments by their tokens, got none; pass "
    "CreditInputs(n_tokens=...)",
    "step_score": "this estimator needs the step correctness of each search, got none; pass "
    "CreditInputs(step_score=...), see evenhand.credit.evidence",
}


def unknown_setting(name: str, valid: Mapping[str, Any]) -> str:
    """Return the message for a setting that does not exist."""
    known = ", ".join(valid) or "none"
    return f"unknown setting {name!r}{did_you_mean(name, valid)}; known: {known}"


def _grpo(inputs: CreditInputs, *, ddof: int = 1, eps: float = 1e-6) -> FloatArray:
    return inputs.spread(outcome.grpo(inputs.rewards, inputs.group, ddof=ddof, eps=eps))


def _dr_grpo(inputs: CreditInputs) -> FloatArray:
    return inputs.spread(outcome.dr_grpo(inputs.rewards, inputs.group))


def _rloo(inputs: CreditInputs) -> FloatArray:
    return inputs.spread(outcome.rloo(inputs.rewards, inputs.group))


def _reinforce_baseline(inputs: CreditInputs, *, eps: float = 1e-6) -> FloatArray:
    return inputs.spread(outcome.reinforce_baseline(inputs.rewards, inputs.group, eps=eps))


def _stratified(
    inputs: CreditInputs,
    *,
    alpha: float = 0.5,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
    scope: str = "group",
) -> FloatArray:
    assert inputs.stratum is not None
    return inputs.spread(
        stratified.stratified(
            inputs.rewards, inputs.group, inputs.stratum,
            alpha=alpha, ddof=ddof, eps=eps, lone=lone, scope=scope,
        )
    )  # fmt: skip


def _san(
    inputs: CreditInputs,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
    scope: str = "group",
) -> FloatArray:
    return _stratified(inputs, alpha=1.0, ddof=ddof, eps=eps, lone=lone, scope=scope)


def _stratified_shrunk(
    inputs: CreditInputs,
    *,
    kappa: float = 2.0,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
) -> FloatArray:
    assert inputs.stratum is not None
    return inputs.spread(
        stratified.stratified_shrunk(
            inputs.rewards, inputs.group, inputs.stratum,
            kappa=kappa, ddof=ddof, eps=eps, lone=lone,
        )
    )  # fmt: skip


def calibrate(
    inputs: CreditInputs,
    advantage: FloatArray,
    *,
    balance: float = 1.0,
    rescale: str = "positive",
    only_when_negative_dominates: bool = False,
) -> FloatArray:
    """Soften the searches and rebalance the answers of `advantage[S]`; blocks are groups.

    Answer segments are never softened, searches never rebalanced.
    """
    assert inputs.step_score is not None
    assert inputs.n_tokens is not None
    answer = np.asarray(inputs.is_answer, dtype=bool)
    result = soften_negative(advantage, inputs.step_score)
    at = np.flatnonzero(answer)
    result[at] = rebalance(
        advantage[at],
        np.asarray(inputs.n_tokens)[at],
        np.asarray(inputs.group)[np.asarray(inputs.owner, dtype=np.int64)[at]],
        balance=balance,
        rescale=rescale,
        only_when_negative_dominates=only_when_negative_dominates,
    )
    return result


def _calibadv(
    inputs: CreditInputs,
    *,
    balance: float = 1.0,
    rescale: str = "positive",
    only_when_negative_dominates: bool = False,
    ddof: int = 1,
    eps: float = 1e-6,
) -> FloatArray:
    return calibrate(
        inputs, _grpo(inputs, ddof=ddof, eps=eps),
        balance=balance, rescale=rescale,
        only_when_negative_dominates=only_when_negative_dominates,
    )  # fmt: skip


def _stratified_calibadv(
    inputs: CreditInputs,
    *,
    alpha: float = 0.5,
    balance: float = 1.0,
    rescale: str = "positive",
    only_when_negative_dominates: bool = False,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
    scope: str = "group",
) -> FloatArray:
    return calibrate(
        inputs,
        _stratified(inputs, alpha=alpha, ddof=ddof, eps=eps, lone=lone, scope=scope),
        balance=balance, rescale=rescale,
        only_when_negative_dominates=only_when_negative_dominates,
    )  # fmt: skip


def _pools_batch(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("scope", "group") == "batch")


_STRATUM = frozenset({"stratum"})
_STEPS = frozenset({"n_tokens", "step_score"})

ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(_grpo, "(r - mean) / (std + eps) in the group", "arXiv 2402.03300"),
    "dr_grpo": Estimator(_dr_grpo, "r - mean in the group", "arXiv 2503.20783"),
    "rloo": Estimator(_rloo, "r - mean of the others in the group", "arXiv 2402.14740"),
    "reinforce_baseline": Estimator(
        _reinforce_baseline,
        "(r - group mean) / (std of these in the batch + eps)",
        "arXiv 2501.03262",
        whole_batch=lambda settings: True,  # noqa: ARG005
    ),
    "stratified": Estimator(
        _stratified,
        "alpha SAN + (1 - alpha) grpo; SAN = grpo inside a stratum of the group",
        "arXiv 2510.06214",
        needs=_STRATUM,
        whole_batch=_pools_batch,
    ),
    "san": Estimator(
        _san,
        "(r - mean) / (std + eps) inside a stratum of the group",
        "arXiv 2510.06214",
        needs=_STRATUM,
        whole_batch=_pools_batch,
    ),
    "stratified_shrunk": Estimator(
        _stratified_shrunk,
        "stratified with alpha = n / (n + kappa), n the stratum's members",
        "evenhand",
        needs=_STRATUM,
    ),
    "calibadv": Estimator(
        _calibadv,
        "grpo; searches with A < 0 times (1 - c); answers: P = balance N",
        "arXiv 2604.18235",
        needs=_STEPS,
    ),
    "stratified_calibadv": Estimator(
        _stratified_calibadv,
        "stratified, then the two steps of calibadv",
        "evenhand: arXiv 2510.06214 with 2604.18235",
        needs=_STRATUM | _STEPS,
        whole_batch=_pools_batch,
    ),
}


@cache
def _installed() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def estimator_names() -> list[str]:
    """Return the names of all estimators, ours first, then those of installed packages."""
    return [*ESTIMATORS, *(name for name in sorted(_installed()) if name not in ESTIMATORS)]


def get_estimator(name: str) -> Estimator:
    """Return the estimator of that name; `module:object` names one of the user's own.

    Packages add estimators through the entry-point group `evenhand.estimators`; a name of the
    table cannot be replaced.

    Raises:
        ConfigError: unknown name (with the nearest valid one), or the object is no `Estimator`.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if is_object_spec(name):
        found = load_object(name, "estimator")
    elif name in _installed():
        try:
            found = _installed()[name].load()
        except Exception as error:
            raise ConfigError(
                f"estimator {name!r} of an installed package cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
    else:
        names = estimator_names()
        raise ConfigError(
            f"unknown estimator {name!r}{did_you_mean(name, names)}; known: {', '.join(names)}"
        )
    if not isinstance(found, Estimator):
        raise ConfigError(f"estimator {name!r} is a {type(found).__name__}, expected an Estimator")
    return found
