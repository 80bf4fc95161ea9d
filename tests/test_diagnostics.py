"""The figures of the audit on batches with known values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from builders import rollout
from evenhand.advantages import cross_stratum
from evenhand.credit import BridgeSettings, CreditRule, gather
from evenhand.diagnostics.audit import AuditCollector
from evenhand.diagnostics.credit import (
    GroupCounts,
    advantage_by_stratum,
    group_counts,
    live_token_share,
    mass_by_kind,
    mis_penalised,
    negative_to_positive,
)
from evenhand.diagnostics.findings import Level
from evenhand.diagnostics.intervals import mean, proportion, ratio
from evenhand.diagnostics.strata import between_strata, strata_shape, stratum_rows
from evenhand.trajectory import Kind

QUESTIONS, ROLLOUTS = 300, 8


def simulate(seed: int, difference: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Binary rewards of 300 questions x 8 rollouts; strata two apart by `difference`."""
    generator = np.random.default_rng(seed)
    n = QUESTIONS * ROLLOUTS
    group = np.repeat(np.arange(QUESTIONS), ROLLOUTS)
    stratum = generator.integers(1, 4, size=n) if difference == 0 else generator.integers(1, 3, n)
    difficulty = generator.uniform(0.1, 0.9 - difference, size=QUESTIONS)[group]
    chance = difficulty + difference * (stratum == 2)
    return (generator.random(n) < chance).astype(float), group, stratum


def evidence_rate(files: int, difference: float) -> float:
    found = [
        between_strata(*simulate(seed, difference)).has_evidence for seed in range(1, files + 1)
    ]
    return float(np.mean(found))


def test_independent_strata_seldom_look_like_structure_and_real_ones_mostly_do() -> None:
    assert evidence_rate(60, 0.0) <= 0.07
    assert evidence_rate(20, 0.4) >= 0.95


@pytest.mark.slow
def test_no_structure_is_found_in_at_most_seven_percent_of_500_files_without_any() -> None:
    assert evidence_rate(500, 0.0) <= 0.07


@pytest.mark.slow
def test_a_difference_of_0_4_is_found_in_at_least_95_percent_of_500_files() -> None:
    assert evidence_rate(500, 0.4) >= 0.95


def test_the_share_is_the_added_variance_over_the_variance() -> None:
    rewards, group, stratum = simulate(3, 0.4)
    added = cross_stratum(rewards, group, stratum).added_variance * ROLLOUTS
    centred = rewards - rewards.reshape(-1, ROLLOUTS).mean(1)[group]
    found = between_strata(rewards, group, stratum, draws=200)
    assert found.share == pytest.approx(added.sum() / (centred**2).sum())


def test_the_expectation_is_the_mean_of_the_permutations() -> None:
    rewards, group, stratum = simulate(4, 0.0)
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(300):
        order = np.argsort(group + generator.random(len(group)), kind="stable")
        shares.append(between_strata(rewards[order], group, stratum, draws=2).share)
    found = between_strata(rewards, group, stratum)
    assert np.mean(shares) == pytest.approx(found.expected, abs=0.002)
    assert np.quantile(shares, 0.975) == pytest.approx(found.high, abs=0.006)


def test_the_chance_level_is_a_function_of_its_arguments() -> None:
    data = simulate(5, 0.0)
    assert between_strata(*data) == between_strata(*data)


def test_unscored_rollouts_and_uneven_groups_leave_the_chance_level_alone() -> None:
    rewards, group, stratum = simulate(6, 0.0)
    extra = (np.append(rewards, np.nan), np.append(group, 0), np.append(stratum, 9))
    assert between_strata(*extra, draws=50) == between_strata(rewards, group, stratum, draws=50)
    assert between_strata(rewards[5:], group[5:], stratum[5:], draws=50).trajectories <= 2395


def test_without_spread_nothing_is_claimed() -> None:
    found = between_strata([1, 1, 1], [0, 0, 0], [1, 2, 3])
    assert math.isnan(found.share)
    assert not found.has_evidence
    assert found.groups == 0


def test_rounding_is_no_evidence_where_every_permutation_gives_the_same_share() -> None:
    generator = np.random.default_rng(0)
    rewards = generator.random(400)
    pairs = np.repeat(np.arange(200), 2)
    for stratum in (np.zeros(400), np.tile([1, 2], 200)):
        found = between_strata(rewards, pairs, stratum)
        assert found.share == pytest.approx(float(stratum.any()))
        assert not found.has_evidence
    assert between_strata(rewards, pairs, np.zeros(400)).share == 0


def test_wilson_intervals_have_their_published_values() -> None:
    # Newcombe (1998), table I: 81 of 263 and 0 of 20.
    found = proportion(81, 263)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    found = proportion(0, 20)
    assert (found.value, found.low) == (0, 0)
    assert found.high == pytest.approx(0.1611, abs=5e-5)
    assert math.isnan(proportion(0, 0).value)


def test_clustered_means_cover_their_target() -> None:
    generator = np.random.default_rng(0)
    from evenhand.arrays import dense

    group = dense(np.repeat(np.arange(60), 5))
    hits = 0
    for _ in range(400):
        values = generator.normal(size=60)[group.ids] + generator.normal(size=300)
        found = mean(values, group)
        hits += found.low <= 0 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def test_ratios_have_positive_intervals_and_known_edges() -> None:
    found = ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    assert ratio(np.ones(2), np.zeros(2)).value == math.inf
    assert math.isnan(ratio(np.zeros(2), np.zeros(2)).value)
    assert ratio(np.zeros(2), np.ones(2)).value == 0


ROWS = [
    rollout("best", "q1", 1.0, results=[["a", "b"]]),
    rollout("wrong", "q1", 0.0, results=[["a", "z"], ["y"]]),
    rollout("easy1", "q2", 0.9),
    rollout("easy2", "q2", 0.9),
    rollout("hard1", "q3", 0.1, results=[["c"]]),
    rollout("hard2", "q3", 0.1),
    rollout("alone", "q4", 1.0),
    rollout("lost", "q5", None),
]
BATCH = gather(ROWS, BridgeSettings())
GRPO = BATCH.advantage(CreditRule("grpo"))


def test_groups_are_counted_by_what_they_can_teach() -> None:
    counts = group_counts(BATCH)
    assert counts == GroupCounts(effective=1, too_easy=1, too_hard=1, lone=1, unscored=1)
    assert counts.total == 5
    assert group_counts(BATCH, threshold=0.95).too_hard == 2


def test_masses_are_tokens_times_advantage_by_kind() -> None:
    masses = mass_by_kind(BATCH, GRPO)
    a = 1 / math.sqrt(2)
    assert masses[Kind.SEARCH].segments == 4
    assert masses[Kind.SEARCH].tokens == 40
    assert masses[Kind.SEARCH].positive == pytest.approx(10 * a, rel=1e-5)
    assert masses[Kind.SEARCH].negative == pytest.approx(20 * a, rel=1e-5)
    assert masses[Kind.ANSWER].negative == pytest.approx(8 * a, rel=1e-5)
    assert masses[Kind.INVALID].segments == 0
    assert negative_to_positive(BATCH, GRPO).value == pytest.approx(28 / 18)
    assert negative_to_positive(BATCH, GRPO, ~BATCH.is_answer).value == pytest.approx(2)


def test_correct_searches_that_are_punished_are_counted() -> None:
    assert BATCH.step_score[BATCH.is_executed].tolist() == [1.0, 0.5, 0.0, 0.0]
    found = mis_penalised(BATCH, GRPO)
    assert (found.value, found.n) == (0.5, 2)
    softened = BATCH.advantage(CreditRule("calibadv"))
    wrong = (BATCH.owner == 1) & BATCH.is_executed
    np.testing.assert_allclose(softened[wrong] / GRPO[wrong], [0.5, 1.0])


def test_strata_are_described() -> None:
    rows = stratum_rows(BATCH)
    assert [(row.label, row.share.value * 8, row.reward.n) for row in rows] == [
        (0, 5, 4), (1, 2, 2), (2, 1, 1),
    ]  # fmt: skip
    shape = strata_shape(BATCH)
    assert shape.strata == 6
    assert (shape.lone.value * shape.lone.n, shape.lone.n) == (5, 7)
    assert (shape.flat.value, shape.flat.n) == (1.0, 1)


def test_credit_by_stratum_is_a_token_mean() -> None:
    found = advantage_by_stratum(BATCH, GRPO)
    assert found["0"] == 0
    assert found["2"] == pytest.approx(-1 / math.sqrt(2), rel=1e-5)
    assert found["1"] == pytest.approx(18 / 36 / math.sqrt(2), rel=1e-5)
    assert live_token_share(BATCH, GRPO).value == pytest.approx(46 / 104)


def collect(rows: list) -> AuditCollector:
    collector = AuditCollector(BridgeSettings())
    collector.add(rows)
    return collector


def test_the_audit_keeps_the_rollouts_whose_correct_searches_suffer_most() -> None:
    (example,) = collect(ROWS).finish().examples
    assert example.trajectory.id == "wrong"
    assert example.silver == {"a", "b"}
    assert example.penalty == pytest.approx(10 / math.sqrt(2), rel=1e-5)


def test_what_a_file_cannot_tell_is_said() -> None:
    audit = collect(ROWS).finish()
    said = " ".join(audit.unknown)
    assert "1 rollouts have no reward" in said
    assert "4 of 5 groups have no silver documents" in said
    assert "no training step" in said
    from dataclasses import replace

    unknown = [replace(t, golden_answers=None, metadata={"n_tokens_unit": "characters"})
               for t in ROWS]  # fmt: skip
    said = " ".join(collect(unknown).finish().unknown)
    assert "8 of 8 rollouts carry no accepted answers" in said
    assert "counted in characters" in said


def test_structure_and_groups_of_one_stand_out() -> None:
    structured = [
        rollout(f"q{q}r{r}", f"q{q}", float(r % 2), results=[["a"]] * (1 + r % 2))
        for q in range(30)
        for r in range(8)
    ]
    found = collect(structured).finish().findings
    assert any(f.level is Level.WARNING and "lies between strata" in f.text for f in found)
    alone = [rollout(f"r{n}", f"g{n}", float(n % 2)) for n in range(5)]
    with pytest.warns(UserWarning, match="single member"):
        found = collect(alone).finish().findings
    assert found[0].level is Level.WARNING
    assert "Every group has a single scored member" in found[0].text
