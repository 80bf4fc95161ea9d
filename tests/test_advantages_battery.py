"""One battery over the whole registry, and the identities of each family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenhand.core.errors import DataError
from evenhand.credit import (
    ESTIMATORS,
    CreditInputs,
    Estimator,
    cross_stratum,
    dr_grpo,
    grpo,
    rebalance,
    san,
    soften_negative,
    stratified,
    stratified_shrunk,
)
from evenhand.testing import estimators as battery
from evenhand.testing import reference

pytestmark = pytest.mark.filterwarnings("ignore::evenhand.core.errors.SingleMemberGroupsWarning")

# Multiples of 1/64: sums and shifts by whole numbers are exact, so identities are exact too.
GRID = st.integers(-64, 64).map(lambda k: k / 64)
NASTY = st.sampled_from(
    [0.0, 1.0, 0.35, 1.0 + 1e-5, 1.0 + 1e-16, 1e6, -1e6, 1e6 - 1e-9, 5e-324, -5e-324, 1e-300]
)
REWARD = st.one_of(st.sampled_from([0.0, 1.0]), GRID, NASTY, st.floats(-1e6, 1e6))
MAYBE = st.one_of(REWARD, st.just(float("nan")))
EPS = st.sampled_from([0.0, 1e-6, 1e-4, 1.0, 1e6])


@st.composite
def batches(draw: st.DrawFn, reward: st.SearchStrategy[float] = MAYBE) -> CreditInputs:
    """Trajectories in uneven, interleaved groups, some without a segment."""
    n = draw(st.integers(0, 10))
    groups = st.sampled_from(["q1", "q2", "q3"]) if draw(st.booleans()) else st.integers(-2, 1)
    per = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    owner = np.repeat(np.arange(n), per).astype(np.int64)
    last = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    unit = st.one_of(st.sampled_from([0.0, 1.0, 1 / 3]), st.floats(0, 1))

    def column(strategy: st.SearchStrategy[Any], size: int) -> list[Any]:
        return draw(st.lists(strategy, min_size=size, max_size=size))

    score = np.array(column(unit, len(owner)), dtype=np.float64)
    return CreditInputs(
        rewards=np.array(column(reward, n), dtype=np.float64),
        group=np.array(column(groups, n)),
        stratum=np.array(column(st.integers(0, 3), n), dtype=np.int64),
        owner=owner,
        is_answer=last.astype(bool),
        n_tokens=np.array(column(st.integers(0, 2000), len(owner)), dtype=np.int64),
        step_score=np.where(last, 0.0, score),
    )


@st.composite
def settings_of(draw: st.DrawFn, estimator: Estimator) -> dict[str, Any]:
    """Any settings that the estimator takes."""
    choices: dict[str, st.SearchStrategy[Any]] = {
        "alpha": st.floats(0, 1),
        "ddof": st.sampled_from([0, 1]),
        "eps": EPS,
        "lone": st.sampled_from(["zero", "global"]),
        "scope": st.sampled_from(["group", "batch"]),
        "kappa": st.one_of(st.just(0.0), st.floats(0, 1e6)),
        "balance": st.sampled_from([1e-6, 0.5, 1.0, 2.0, 1e6]),
        "rescale": st.sampled_from(["positive", "negative"]),
        "only_when_negative_dominates": st.booleans(),
    }
    return {name: draw(choices[name]) for name in estimator.defaults}


EVERY = pytest.mark.parametrize("name", list(ESTIMATORS))


@EVERY
@pytest.mark.parametrize("check", battery.CHECKS, ids=lambda check: check.__name__)
@given(data=st.data())
def test_the_property_holds(name: str, check: Any, data: st.DataObject) -> None:
    estimator = ESTIMATORS[name]
    check(estimator, data.draw(batches()), data.draw(settings_of(estimator)))


@EVERY
@given(data=st.data())
def test_the_order_of_rows_is_irrelevant(name: str, data: st.DataObject) -> None:
    estimator, inputs = ESTIMATORS[name], data.draw(batches(st.one_of(GRID, st.just(np.nan))))
    order = data.draw(st.permutations(range(len(np.asarray(inputs.rewards)))))
    battery.expect_order_free(estimator, inputs, data.draw(settings_of(estimator)), order)


@EVERY
@given(data=st.data())
def test_shifting_all_rewards_changes_nothing(name: str, data: st.DataObject) -> None:
    estimator, inputs = ESTIMATORS[name], data.draw(batches(st.one_of(GRID, st.just(np.nan))))
    settings = data.draw(settings_of(estimator))
    moved = CreditInputs(
        **{slot: getattr(inputs, slot) for slot in CreditInputs.__slots__ if slot != "rewards"},
        rewards=np.asarray(inputs.rewards) + data.draw(st.integers(-1000, 1000)),
    )
    np.testing.assert_allclose(
        battery.run(estimator, moved, settings),
        battery.run(estimator, inputs, settings),
        rtol=1e-9,
        atol=1e-9,
    )


def slow(name: str, inputs: CreditInputs, settings: dict[str, Any]) -> list[float]:
    """The registry once more through the plain references."""
    columns = {slot: np.asarray(getattr(inputs, slot)).tolist() for slot in CreditInputs.__slots__}
    rewards, group, stratum = columns["rewards"], columns["group"], columns["stratum"]
    settings = dict(settings)
    outcome_name = {"calibadv": "grpo", "stratified_calibadv": "stratified"}.get(name, name)
    function = getattr(reference, outcome_name)
    own = {k: settings.pop(k) for k in list(settings) if k in ESTIMATORS[outcome_name].defaults}
    needs_stratum = "stratum" in ESTIMATORS[outcome_name].needs
    outcome = function(rewards, group, *([stratum] if needs_stratum else []), **own)
    if outcome_name == name:
        return [outcome[index] for index in columns["owner"]]
    rest = [columns[key] for key in ("owner", "is_answer", "n_tokens", "step_score")]
    return reference.calibrated(outcome, group, *rest, **settings)


@EVERY
@given(data=st.data())
def test_it_equals_the_slow_plain_reference(name: str, data: st.DataObject) -> None:
    estimator, inputs = ESTIMATORS[name], data.draw(batches())
    settings = data.draw(settings_of(estimator))
    if settings.get("only_when_negative_dominates"):
        # At P = balance * N both answers are right and rounding chooses; stay off the border.
        settings["balance"] = 0.7310585786300049
    result = battery.run(estimator, inputs, settings)
    expected = np.array(slow(name, inputs, settings))
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(result, expected, rtol=1e-7, atol=1e-9 * scale)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {}),
        ("dr_grpo", {}),
        ("rloo", {}),
        ("reinforce_baseline", {}),
        ("stratified", {}),
        ("san", {}),
    ],
)
@given(inputs=batches(st.one_of(GRID, st.just(np.nan))))
def test_outcome_advantages_sum_to_zero_in_each_group(
    name: str, settings: dict[str, Any], inputs: CreditInputs
) -> None:
    function = getattr(__import__("evenhand.credit", fromlist=[name]), name)
    needs_stratum = "stratum" in ESTIMATORS[name].needs
    extra = [inputs.stratum] if needs_stratum else []
    result = function(inputs.rewards, inputs.group, *extra, **settings)
    for label in np.unique(np.asarray(inputs.group)):
        assert abs(result[np.asarray(inputs.group) == label].sum()) < 1e-9


TABLE = batches(st.one_of(GRID, st.just(np.nan)))


@given(TABLE, EPS)
def test_alpha_zero_is_grpo(inputs: CreditInputs, eps: float) -> None:
    result = stratified(inputs.rewards, inputs.group, inputs.stratum, alpha=0.0, eps=eps)
    assert np.array_equal(result, grpo(inputs.rewards, inputs.group, eps=eps))


@given(TABLE, st.floats(0, 1))
def test_one_stratum_is_grpo_for_any_alpha(inputs: CreditInputs, alpha: float) -> None:
    one = np.full(len(np.asarray(inputs.rewards)), 3)
    result = stratified(inputs.rewards, inputs.group, one, alpha=alpha)
    np.testing.assert_allclose(result, grpo(inputs.rewards, inputs.group), rtol=1e-12, atol=1e-12)
    shrunk = stratified_shrunk(inputs.rewards, inputs.group, one, kappa=alpha)
    np.testing.assert_allclose(shrunk, grpo(inputs.rewards, inputs.group), rtol=1e-12, atol=1e-12)


@given(TABLE)
def test_san_has_mean_zero_in_every_stratum_of_every_group(inputs: CreditInputs) -> None:
    result = san(inputs.rewards, inputs.group, inputs.stratum)
    cells = list(zip(np.asarray(inputs.group).tolist(), np.asarray(inputs.stratum), strict=True))
    for cell in set(cells):
        assert abs(sum(result[at] for at, other in enumerate(cells) if other == cell)) < 1e-9


@given(TABLE, st.sampled_from([0.5, 2.0, 8.0]), st.integers(-50, 50))
def test_san_is_invariant_under_positive_affine_maps_at_eps_zero(
    inputs: CreditInputs, factor: float, shift: int
) -> None:
    result = san(inputs.rewards, inputs.group, inputs.stratum, eps=0.0)
    mapped = san(np.asarray(inputs.rewards) * factor + shift, inputs.group, inputs.stratum, eps=0.0)
    np.testing.assert_allclose(mapped, result, rtol=1e-9, atol=1e-9)


@given(TABLE)
def test_cross_stratum_is_the_difference_of_the_variances(inputs: CreditInputs) -> None:
    rewards, group = np.asarray(inputs.rewards), np.asarray(inputs.group)
    assume(len(rewards) > 0)
    found = cross_stratum(rewards, group, inputs.stratum)
    cells = np.array([f"{g}/{s}" for g, s in zip(group, np.asarray(inputs.stratum), strict=True)])
    inside = dr_grpo(rewards, cells)
    overall = dr_grpo(rewards, group)
    scored = ~np.isnan(rewards)
    np.testing.assert_allclose((overall - inside)[scored], found.offset[scored], atol=1e-12)
    assert (found.added_variance >= 0).all()
    for at, label in enumerate(np.unique(group)):
        mine = (group == label) & scored
        if mine.any():
            difference = overall[mine].var() - inside[mine].var()
            assert found.added_variance[at] == pytest.approx(difference, abs=1e-12)


@st.composite
def segments(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = draw(st.integers(0, 12))
    columns = [
        draw(st.lists(strategy, min_size=n, max_size=n))
        for strategy in (st.floats(-100, 100), st.integers(1, 50), st.integers(0, 2))
    ]
    return tuple(np.array(column) for column in columns)  # type: ignore[return-value]


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 1))))
def test_softening_spares_positives_and_only_shrinks_negatives(rows: list) -> None:
    advantage = np.array([row[0] for row in rows], dtype=float)
    score = np.array([row[1] for row in rows], dtype=float)
    result = soften_negative(advantage, score)
    positive = advantage >= 0
    assert np.array_equal(result[positive], advantage[positive])
    assert (result[~positive] <= 0).all()
    assert (result[~positive] >= advantage[~positive]).all()
    full = soften_negative(advantage, np.ones(len(advantage)))
    assert not full[~positive].any()


@given(segments(), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from(["positive", "negative"]))
def test_after_rebalancing_the_positive_mass_is_balance_times_the_negative(
    rows: tuple, balance: float, rescale: str
) -> None:
    advantage, n_tokens, block = rows
    result = rebalance(advantage, n_tokens, block, balance=balance, rescale=rescale)
    for label in np.unique(block):
        mine = block == label
        weighted = (result * n_tokens)[mine]
        positive, negative = weighted[weighted > 0].sum(), -weighted[weighted < 0].sum()
        assert positive == pytest.approx(balance * negative, rel=1e-9, abs=1e-300)
    fixed = advantage < 0 if rescale == "positive" else advantage > 0
    changed = fixed & (result != advantage)
    assert not result[changed].any(), "the side that is not rescaled moved without becoming 0"


@EVERY
def test_the_shipped_contract_accepts_it(name: str) -> None:
    battery.check_estimator(ESTIMATORS[name], batches=10)


def test_the_shipped_contract_refuses_an_estimator_that_mixes_groups() -> None:
    def mixes(inputs: CreditInputs) -> np.ndarray:
        rewards = np.nan_to_num(np.asarray(inputs.rewards, dtype=float))
        return inputs.spread(rewards - rewards.mean())

    with pytest.raises(AssertionError, match="unscored"):
        battery.check_estimator(Estimator(mixes, "r - mean", "a test"))


def test_rebalancing_is_finite_for_extreme_advantages_and_refuses_what_is_beyond() -> None:
    tokens, block = [2**50, 2**50, 1], [0, 0, 0]
    for extreme in (1e9, 1e-300, 5e-324):
        result = rebalance([extreme, -1e9, -extreme], tokens, block, balance=1e6)
        assert np.isfinite(result).all()
    with pytest.raises(DataError, match=r"advantage must lie in \[-1e\+09"):
        rebalance([1e308, -1e308], [1000, 1000], [0, 0])


def test_a_segment_without_tokens_gets_nothing_from_rebalancing() -> None:
    result = rebalance([1.0, 2.0, -1.0, -2.0], [10, 0, 10, 0], [0, 0, 0, 0])
    assert result.tolist() == [1.0, 0.0, -1.0, 0.0]


def test_a_masked_reward_is_an_unscored_one() -> None:
    masked = np.ma.array([1.0, 9.0, 0.0], mask=[False, True, False])
    np.testing.assert_allclose(grpo(masked, [0, 0, 0]), grpo([1.0, np.nan, 0.0], [0, 0, 0]))
