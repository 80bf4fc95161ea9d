"""What every estimator must satisfy, as functions: for ours, and for those you add.

Each `expect_*` takes an estimator, inputs and settings and raises an `AssertionError` that says
what broke. `check_estimator` runs all of them on random batches:

    from evenhand.testing.estimators import check_estimator
    check_estimator(my_estimator)
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.core.arrays import FloatArray
from evenhand.core.errors import SingleMemberGroupsWarning
from evenhand.credit.registry import CreditInputs, Estimator

TOLERANCE = 1e-9
"""Relative to the largest advantage of the batch."""


def run(estimator: Estimator, inputs: CreditInputs, settings: dict[str, Any]) -> FloatArray:
    """Call an estimator; the warning about groups of one is expected on random batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SingleMemberGroupsWarning)
        return estimator(inputs, **settings)


def _close(first: NDArray[Any], second: NDArray[Any]) -> bool:
    scale = max(1.0, float(np.abs(second).max(initial=0.0)))
    return bool(np.allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE * scale))


def take(inputs: CreditInputs, rows: Sequence[int] | NDArray[Any]) -> tuple[CreditInputs, Any]:
    """Return the trajectories `rows` in that order, and the indices of their segments."""
    rows = np.asarray(rows, dtype=np.int64)
    owner = np.asarray(inputs.owner, dtype=np.int64)
    pieces = [np.flatnonzero(owner == row) for row in rows]
    segments = np.concatenate([np.zeros(0, dtype=np.int64), *pieces])
    new_owner = np.repeat(np.arange(len(rows)), [len(piece) for piece in pieces])

    def pick(values: Any, index: NDArray[Any]) -> Any:
        return None if values is None else np.asarray(values)[index]

    return CreditInputs(
        rewards=pick(inputs.rewards, rows),
        group=pick(inputs.group, rows),
        stratum=pick(inputs.stratum, rows),
        owner=new_owner.astype(np.int64),
        is_answer=pick(inputs.is_answer, segments),
        n_tokens=pick(inputs.n_tokens, segments),
        step_score=pick(inputs.step_score, segments),
    ), segments


def expect_finite(estimator: Estimator, inputs: CreditInputs, settings: dict[str, Any]) -> None:
    """The result is `[S]` float64 without nan or infinity."""
    result = run(estimator, inputs, settings)
    assert result.shape == np.asarray(inputs.owner).shape, f"shape {result.shape}"
    assert result.dtype == np.float64, f"dtype {result.dtype}"
    assert np.isfinite(result).all(), f"not finite: {result}"


def expect_unscored_out(
    estimator: Estimator, inputs: CreditInputs, settings: dict[str, Any]
) -> None:
    """Unscored trajectories get 0, and leaving them out changes nothing for the others."""
    scored = ~np.isnan(np.asarray(inputs.rewards, dtype=float))
    result = run(estimator, inputs, settings)
    assert not result[~scored[np.asarray(inputs.owner)]].any(), "an unscored trajectory has credit"
    without, segments = take(inputs, np.flatnonzero(scored))
    assert _close(run(estimator, without, settings), result[segments]), (
        "an unscored trajectory changes the credit of others"
    )


def expect_order_free(
    estimator: Estimator, inputs: CreditInputs, settings: dict[str, Any], order: Sequence[int]
) -> None:
    """Rows in another order get the same credit."""
    permuted, segments = take(inputs, order)
    result = run(estimator, inputs, settings)
    assert _close(run(estimator, permuted, settings), result[segments]), "the order of rows matters"


def expect_groups_independent(
    estimator: Estimator, inputs: CreditInputs, settings: dict[str, Any]
) -> None:
    """Each group alone gets what it gets in company (unless the estimator pools the batch)."""
    if estimator.whole_batch(settings):
        return
    result = run(estimator, inputs, settings)
    group = np.asarray(inputs.group)
    for label in np.unique(group):
        alone, segments = take(inputs, np.flatnonzero(group == label))
        assert _close(run(estimator, alone, settings), result[segments]), (
            f"group {label} depends on others"
        )


def expect_flat_groups_zero(
    estimator: Estimator, inputs: CreditInputs, settings: dict[str, Any]
) -> None:
    """A group with one scored member, or with equal rewards, gets exactly 0.

    Estimators that pool strata over the batch compare such a group with others: not for them.
    """
    if settings.get("scope") == "batch":
        return
    result = run(estimator, inputs, settings)
    rewards, group = np.asarray(inputs.rewards, dtype=float), np.asarray(inputs.group)
    for label in np.unique(group):
        values = rewards[(group == label) & ~np.isnan(rewards)]
        if len(np.unique(values)) < 2:
            mine = (group == label)[np.asarray(inputs.owner)]
            assert (result[mine] == 0).all(), f"group {label} without spread has credit"


def expect_inputs_unchanged(
    estimator: Estimator, inputs: CreditInputs, settings: dict[str, Any]
) -> None:
    """The arrays that went in are the same afterwards."""
    before = copy.deepcopy(inputs)
    run(estimator, inputs, settings)
    for name in CreditInputs.__slots__:
        old, new = getattr(before, name), getattr(inputs, name)
        same = old is None or np.array_equal(old, new, equal_nan=np.asarray(old).dtype.kind == "f")
        assert same, f"{name} was changed"


def expect_float32_exact(
    estimator: Estimator, inputs: CreditInputs, settings: dict[str, Any]
) -> None:
    """Rewards as float32 give what the same values give as float64."""
    narrow = np.asarray(inputs.rewards, dtype=np.float32)
    wide = narrow.astype(np.float64)
    first = run(estimator, replace(inputs, rewards=narrow), settings)
    second = run(estimator, replace(inputs, rewards=wide), settings)
    assert np.array_equal(first, second), "float32 rewards are treated differently"


CHECKS: tuple[Callable[[Estimator, CreditInputs, dict[str, Any]], None], ...] = (
    expect_finite,
    expect_unscored_out,
    expect_groups_independent,
    expect_flat_groups_zero,
    expect_inputs_unchanged,
    expect_float32_exact,
)
"""What holds for any estimator on any valid inputs (`expect_order_free` wants an order too)."""


def random_inputs(generator: np.random.Generator, n: int = 24) -> CreditInputs:
    """Return a random batch of `n` trajectories with uneven groups, unscored and lone members."""
    rewards = generator.choice([0.0, 0.0, 1.0, 0.5, np.nan, generator.normal()], size=n)
    per = generator.integers(1, 5, size=n)
    owner = np.repeat(np.arange(n), per)
    last = np.cumsum(per) - 1
    is_answer = np.zeros(len(owner), dtype=bool)
    is_answer[last] = True
    score = generator.choice([0.0, 0.0, 1 / 3, 1.0], size=len(owner))
    return CreditInputs(
        rewards=rewards,
        group=generator.integers(0, 5, size=n),
        stratum=per - 1,
        owner=owner,
        is_answer=is_answer,
        n_tokens=generator.integers(0, 60, size=len(owner)),
        step_score=np.where(is_answer, 0.0, score),
    )


def check_estimator(estimator: Estimator, *, batches: int = 50, seed: int = 0) -> None:
    """Run every check on random batches, with the estimator's default settings.

    Raises:
        AssertionError: the first property that does not hold, in one sentence.
    """
    generator = np.random.default_rng(seed)
    for _ in range(batches):
        inputs = random_inputs(generator)
        for check in CHECKS:
            check(estimator, inputs, {})
        order = generator.permutation(len(np.asarray(inputs.rewards))).tolist()
        expect_order_free(estimator, inputs, {}, order)
