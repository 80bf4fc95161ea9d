"""The figures of the audit on batches with known values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from builders import rollout
from evenhand.credit import BridgeSettings, CreditRule, cross_stratum, gather
from evenhand.diagnostics.audit import AuditCollector, estimator_rows
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
from evenhand.diagnostics.intervals import mean, proportion, ratio, share, t95
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
    # Above the 97.5 % quantile lie 2.5 % of the files.
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
    assert np.quantile(shares, 0.975) == pytest.approx(found.high, abs=0.004)
    assert np.quantile(shares, 0.025) == pytest.approx(found.low, abs=0.004)


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


@pytest.mark.parametrize("groups", [3, 6, 12, 60])
def test_intervals_cover_their_target_when_rollouts_of_a_question_are_alike(groups: int) -> None:
    generator = np.random.default_rng(groups)
    cluster = np.repeat(np.arange(groups), 8)
    hits = {"mean": 0, "share": 0, "ratio": 0}
    for _ in range(400):
        difficulty = generator.beta(0.5, 0.5, size=groups)
        flags = generator.random(8 * groups) < difficulty[cluster]
        found = mean(generator.normal(size=groups)[cluster] + generator.normal(size=8 * groups),
                     cluster)  # fmt: skip
        hits["mean"] += found.low <= 0 <= found.high
        part = share(flags, cluster)
        hits["share"] += part.low <= 0.5 <= part.high
        over, under = generator.gamma(4.0, size=groups), generator.gamma(4.0, 0.5, size=groups)
        quotient = ratio(over, under)
        hits["ratio"] += quotient.low <= 2 <= quotient.high
    for name, count in hits.items():
        assert 0.9 <= count / 400 <= 0.99, f"{name} covers {count / 400}"


def test_independent_rollouts_lose_little_to_the_clusters() -> None:
    generator = np.random.default_rng(0)
    flags, cluster = generator.random(2000) < 0.3, np.repeat(np.arange(250), 8)
    plain, careful = proportion(int(flags.sum()), 2000), share(flags, cluster)
    assert careful.value == plain.value
    assert (careful.high - careful.low) == pytest.approx(plain.high - plain.low, rel=0.15)


def test_no_interval_of_width_zero_is_ever_claimed() -> None:
    groups = np.repeat(np.arange(4), 2)
    assert math.isnan(mean(np.ones(8), groups).low)
    assert math.isnan(mean(np.array([1.0, 2.0]), np.zeros(2, dtype=int)).low)
    assert math.isnan(ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0])).low)
    all_alike = share(np.ones(8, dtype=bool), groups)
    assert all_alike.value == 1.0
    assert all_alike.low < 0.6
    assert math.isnan(share(np.ones(2, dtype=bool), np.zeros(2, dtype=int)).low)
    assert share(np.zeros(0, dtype=bool), np.zeros(0, dtype=int)).n == 0


def test_the_t_quantiles_have_their_tabled_values() -> None:
    for freedom, value in ((1, 12.706), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042)):
        assert t95(freedom) == pytest.approx(value, abs=2e-3)
    assert t95(0) == math.inf


def test_ratios_have_known_edges() -> None:
    found = ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    assert found.value == pytest.approx(2)
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
    assert counts == GroupCounts(effective=1, too_easy=1, too_hard=1, lone=1, unscored=1, single=2)
    assert counts.total == 5
    assert not counts.has_wrong_ids
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


def test_strata_are_described_over_the_scored_rollouts() -> None:
    rows = stratum_rows(BATCH)
    assert [(row.label, row.share.value * 7, row.reward.n) for row in rows] == [
        (0, pytest.approx(4), 4), (1, pytest.approx(2), 2), (2, pytest.approx(1), 1),
    ]  # fmt: skip
    shape = strata_shape(BATCH)
    assert shape.strata == 6
    assert (shape.lone.value * shape.lone.n, shape.lone.n) == (pytest.approx(5), 7)
    assert (shape.flat.value, shape.flat.n) == (1.0, 1)


def test_credit_by_stratum_is_a_token_mean() -> None:
    found = advantage_by_stratum(BATCH, GRPO)
    assert found == pytest.approx([0, 18 / 36 / math.sqrt(2), -1 / math.sqrt(2)], rel=1e-5)
    assert live_token_share(BATCH, GRPO).value == pytest.approx(46 / 96)


def test_the_rows_of_estimators_have_their_figures() -> None:
    cut = rollout("cut", "q1", 0.0, results=[["a"]])
    cut = replace(cut, segments=(*cut.segments[:2], replace(
        cut.segments[2], kind=Kind.TRUNCATED, n_tokens=100)))  # fmt: skip
    batch = gather([*ROWS, cut], BridgeSettings())
    rows, failures = estimator_rows(batch, BridgeSettings())
    assert failures == []
    grpo, calibadv = (next(row for row in rows if row.name == n) for n in ("grpo", "calibadv"))
    # grpo: +2/sqrt(3) for one of three, -1/sqrt(3) for two; searches of 10, answers of 8 tokens.
    assert grpo.search_ratio.value == pytest.approx((10 + 10 + 10) / (2 * 10))
    assert grpo.answer_ratio.value == pytest.approx(8 / (2 * 8))
    assert grpo.other_ratio.value == math.inf
    assert grpo.total_ratio.value == pytest.approx((30 + 8 + 100) / (2 * 18))
    assert (grpo.mis_penalised.value, grpo.mis_penalised.n) == (pytest.approx(2 / 3), 3)
    assert grpo.penalty_kept == 1
    # Step scores of the punished searches: 0.5 (one of two documents) and 1.0.
    assert calibadv.penalty_kept == pytest.approx(10 * 0.5 / 20)
    assert calibadv.mis_penalised.value == pytest.approx(1 / 3)


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
    said = " ".join(collect(ROWS).finish().unknown)
    assert "Rollouts without a reward: 1." in said
    assert "Groups without silver documents: 4 of 5" in said
    assert "no training step" in said
    unknown = [replace(t, golden_answers=None, metadata={"n_tokens_unit": "characters"})
               for t in ROWS]  # fmt: skip
    said = " ".join(collect(unknown).finish().unknown)
    assert "8 of 8 rollouts carry no accepted answers" in said
    assert "counted in characters" in said


def test_unscored_rollouts_are_left_out_of_what_the_policy_did() -> None:
    lost = [rollout(f"lost{n}", "q1", None, format_ok=False) for n in range(6)]
    audit, without = collect([*ROWS, *lost]).finish(), collect(ROWS[:-1]).finish()
    assert audit.unscored == 7
    for name in ("reward", "success", "format_ok", "searches", "correct", "strata", "shape"):
        assert getattr(audit, name) == getattr(without, name), name
    assert [row.live for row in audit.estimators] == [row.live for row in without.estimators]


def sentences(rows: list) -> dict[Level, str]:
    found = collect(rows).finish().findings
    return {level: " ".join(f.text for f in found if f.level is level) for level in Level}


def many(n: int, **options: Any) -> list:
    """`n` questions with four rollouts each, half of them right; options of the wrong ones."""
    return [
        rollout(f"q{q}r{r}", f"q{q}", float(r % 2), results=[["a"]], **({} if r % 2 else options))
        for q in range(n)
        for r in range(4)
    ]


def test_structure_stands_out() -> None:
    structured = [
        rollout(f"q{q}r{r}", f"q{q}", float(r % 2), results=[["a"]] * (1 + r % 2))
        for q in range(30)
        for r in range(8)
    ]
    assert "lies between strata" in sentences(structured)[Level.WARNING]
    said = sentences(many(10))
    assert "nothing can be said about structure" in said[Level.NOTE]
    mixed = [replace(t, segments=t.segments * (1 + n % 3 % 2)) for n, t in enumerate(many(40))]
    assert "no evidence of structure" in sentences(mixed)[Level.NOTE]


def test_rollouts_that_are_each_a_stratum_of_their_own_are_no_evidence() -> None:
    generator = np.random.default_rng(0)
    group = np.repeat(np.arange(50), 4)
    found = between_strata(generator.random(200), group, np.tile(np.arange(4), 50))
    assert (found.share, found.low, found.groups) == (pytest.approx(1), pytest.approx(1), 0)
    assert not found.has_evidence


def test_groups_of_one_stand_out_and_are_told_from_groups_with_one_score() -> None:
    alone = [rollout(f"r{n}", f"g{n}", float(n % 2)) for n in range(5)]
    with pytest.warns(UserWarning, match="single member"):
        assert "must share their group id" in sentences(alone)[Level.WARNING]
    failed = [rollout(f"g{g}r{r}", f"g{g}", 1.0 if r == 0 else None)
              for g in range(3) for r in range(5)]  # fmt: skip
    said = sentences(failed)
    assert "must share" not in said[Level.WARNING]
    assert "fewer than two scored rollouts: 3" in said[Level.WARNING]


def test_a_broken_format_and_a_lack_of_searches_stand_out() -> None:
    assert "obey the protocol" not in sentences(many(10))[Level.WARNING]
    assert "Only 50.0 %" in sentences(many(10, format_ok=False))[Level.WARNING]
    silent = [rollout(f"q{q}r{r}", f"q{q}", float(r % 2)) for q in range(5) for r in range(4)]
    assert "No search was executed" in sentences(silent)[Level.WARNING]
    assert "No search was executed" not in sentences(many(5))[Level.WARNING]


def test_punished_searches_and_long_wrong_answers_stand_out() -> None:
    said = sentences(many(10))[Level.WARNING]
    assert "grpo punishes 50.0 %" in said
    assert "calibadv keeps 0 % of that penalty" in said
    assert "more tokens than right ones" not in said
    long = [
        replace(t, segments=(*t.segments[:-1], replace(t.segments[-1], n_tokens=20 + n % 7)))
        if t.reward == 0 else t
        for n, t in enumerate(many(10))
    ]  # fmt: skip
    assert "more tokens than right ones" in sentences(long)[Level.WARNING]
