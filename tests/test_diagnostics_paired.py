"""Paired differences: known values, degenerate cases, coverage and level on simulated data."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.core.errors import DataError
from evenhand.diagnostics.intervals import proportion
from evenhand.diagnostics.paired import paired_difference


def chances(n: int, generator: np.random.Generator) -> np.ndarray:
    """Chances of a right answer as policies have them: most questions are nearly sure."""
    return generator.beta(0.5, 0.7, size=n)


def test_the_difference_is_second_minus_first_with_its_counts() -> None:
    found = paired_difference([0, 0, 1, 1], [1, 0, 1, 0.5])
    assert (found.first, found.second) == (0.5, 0.625)
    assert found.difference.value == pytest.approx(0.125)
    assert (found.better, found.worse, found.ties, found.n) == (1, 1, 2, 4)


def test_the_interval_is_the_expanded_percentile_interval() -> None:
    # An independent bootstrap with explicit resamples; at n = 12 the quantiles are those of
    # Student's t with 11 degrees of freedom (2.201), not 1.96.
    generator = np.random.default_rng(5)
    first, second = generator.normal(size=(2, 12))
    delta = second - first
    chosen = generator.integers(0, 12, size=(200_000, 12))
    means = delta.mean() + math.sqrt(12 / 11) * (delta[chosen].mean(axis=1) - delta.mean())
    tail = 0.5 * math.erfc(2.200985 / math.sqrt(2))
    low, high = np.quantile(means, [tail, 1 - tail])
    found = paired_difference(first, second, draws=200_000)
    width = high - low
    assert found.difference.low == pytest.approx(low, abs=0.02 * width)
    assert found.difference.high == pytest.approx(high, abs=0.02 * width)


def test_scores_of_few_levels_are_redrawn_like_those_of_many() -> None:
    # 40 questions of three levels go through counts; jittered by 1e-9 they are 40 levels.
    generator = np.random.default_rng(2)
    second = generator.integers(0, 3, size=40) - 1.0
    plain = paired_difference(np.zeros(40), second, draws=100_000)
    jittered = paired_difference(1e-9 * generator.random(40), second, draws=100_000)
    assert plain.difference.low == pytest.approx(jittered.difference.low, abs=0.03)
    assert plain.difference.high == pytest.approx(jittered.difference.high, abs=0.03)


def test_the_test_on_right_and_wrong_is_the_sign_test() -> None:
    # 9 better, 1 worse: two-sided 2 (C(10,0) + C(10,1)) / 2^10.
    first = np.array([0] * 9 + [1] + [1] * 30)
    second = np.array([1] * 9 + [0] + [1] * 30)
    found = paired_difference(first, second, draws=200_000)
    assert found.p_value == pytest.approx(22 / 1024, abs=0.001)


def test_a_few_questions_that_differ_are_no_reported_difference() -> None:
    # Four of four better: a bootstrap interval would exclude 0, four coins show it once in eight.
    found = paired_difference(np.zeros(20), [1] * 4 + [0] * 16)
    assert found.p_value == pytest.approx(0.125, abs=0.02)
    assert not found.differs


def test_strata_weigh_the_same_whatever_their_size() -> None:
    second = np.array([1.0] * 2 + [0.0] * 98)
    stratum = np.array([0] * 2 + [1] * 98)
    found = paired_difference(np.zeros(100), second, stratum=stratum)
    assert found.difference.value == pytest.approx(0.5)
    assert paired_difference(np.zeros(100), second).difference.value == pytest.approx(0.02)


def test_no_question_gives_no_number_and_no_difference() -> None:
    found = paired_difference([], [])
    assert math.isnan(found.first)
    assert math.isnan(found.difference.value)
    assert (found.n, found.p_value, found.differs) == (0, 1.0, False)


def test_where_all_tie_there_is_no_interval_and_no_difference() -> None:
    found = paired_difference([1, 0, 1], [1, 0, 1])
    assert found.difference.value == 0
    assert math.isnan(found.difference.low)
    assert (found.p_value, found.differs) == (1.0, False)


def test_where_all_differ_alike_the_test_alone_decides() -> None:
    found = paired_difference(np.zeros(12), np.ones(12))
    assert math.isnan(found.difference.low)
    assert found.differs
    assert not paired_difference([0.0], [1.0]).differs


def test_float_residue_is_a_tie() -> None:
    found = paired_difference([0.1 + 0.2, 1.0], [0.3, 1.0])
    assert (found.ties, found.p_value) == (2, 1.0)


def test_the_same_seed_gives_the_same_numbers_and_a_generator_goes_on() -> None:
    first, second = np.random.default_rng(0).random((2, 50))
    assert paired_difference(first, second, seed=3) == paired_difference(first, second, seed=3)
    generator = np.random.default_rng(3)
    assert paired_difference(first, second, seed=generator) == paired_difference(
        first, second, seed=3
    )
    assert paired_difference(first, second, seed=generator) != paired_difference(
        first, second, seed=3
    )


@pytest.mark.parametrize(
    ("first", "second", "stratum"),
    [([0.0], [0.0, 1.0], None), ([0.0], [1.0], [0, 1]), ([0.0], [math.nan], None)],
)
def test_arrays_that_do_not_fit_are_refused(first: list, second: list, stratum: list) -> None:
    with pytest.raises(DataError, match="first has|finite"):
        paired_difference(first, second, stratum=stratum)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
def test_swapping_the_sides_flips_the_sign(pairs: list[tuple[float, float]]) -> None:
    first, second = np.array(pairs).T
    there = paired_difference(first, second, draws=200)
    back = paired_difference(second, first, draws=200)
    assert there.difference.value == pytest.approx(-back.difference.value, abs=1e-12)
    assert (there.better, there.worse, there.ties) == (back.worse, back.better, back.ties)


def test_memory_does_not_grow_with_draws_times_questions() -> None:
    # 10,000 draws of 20,000 questions are 1.6 GB if they are held at once.
    first, second = np.random.default_rng(0).random((2, 20_000))
    tracemalloc.start()
    paired_difference(first, second, draws=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150 * 2**20


# --- simulations ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n", [200, 600])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_wilson_covers_within_two_points_of_nominal(n: int, p: float) -> None:
    generator = np.random.default_rng([n, int(100 * p)])
    successes = generator.binomial(n, p, size=20_000)
    intervals = {k: proportion(int(k), n) for k in np.unique(successes)}
    covered = np.mean([intervals[k].low <= p <= intervals[k].high for k in successes])
    assert abs(covered - 0.95) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("n", [200, 600])
@pytest.mark.parametrize("gain", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["exact match", "F1"])
def test_the_bootstrap_interval_covers_within_two_points_of_nominal(
    n: int, gain: float, kind: str
) -> None:
    # Questions are drawn anew each time: the true difference is that of the population.
    generator = np.random.default_rng([n, int(10 * gain), len(kind)])
    covered, cases = 0, 3000
    for _ in range(cases):
        chance = 0.9 * chances(n, generator)
        first, second = generator.random((2, n))
        one, two = (first < chance) * 1.0, (second < chance + gain) * 1.0
        if kind == "F1":  # a wrong answer earns a part now and then
            one, two = (np.where(x > 0, x, generator.choice([0, 0, 0.4], size=n))
                        for x in (one, two))  # fmt: skip
        true = gain if kind == "exact match" else gain * (1 - 0.4 / 3)
        found = paired_difference(one, two, draws=1000, seed=generator).difference
        covered += found.low <= true <= found.high
    assert abs(covered / cases - 0.95) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 20, 60, 200, 600])
def test_the_same_policy_with_two_seeds_differs_in_at_most_five_percent(n: int) -> None:
    generator = np.random.default_rng(n)
    reported, cases = 0, 4000
    for _ in range(cases):
        chance = chances(n, generator)
        one, two = (generator.random((2, n)) < chance) * 1.0
        reported += paired_difference(one, two, draws=2000, seed=generator).differs
    error = math.sqrt(0.05 * 0.95 / cases)
    assert reported / cases <= 0.05 + 2 * error


@pytest.mark.slow
def test_a_gain_of_ten_points_is_found_in_most_of_600_questions() -> None:
    generator = np.random.default_rng(0)
    reported = 0
    for _ in range(200):
        chance = 0.9 * chances(600, generator)
        first, second = generator.random((2, 600))
        one, two = (first < chance) * 1.0, (second < chance + 0.1) * 1.0
        reported += paired_difference(one, two, draws=2000, seed=generator).differs
    assert reported / 200 >= 0.95
