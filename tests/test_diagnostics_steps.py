"""The figures of a step on hand-made rollouts with known values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import answer, information, rollout, search
from evenhand.credit import BridgeSettings, CreditRule, concatenate, gather
from evenhand.diagnostics.audit import AuditCollector
from evenhand.diagnostics.findings import language_rows
from evenhand.diagnostics.language import (
    concatenate_language,
    gather_language,
    language,
    repeated_ngrams,
    select_language,
)
from evenhand.diagnostics.steps import (
    gain_of_several,
    search_figures,
    select,
    series,
    step_figures,
)
from evenhand.trajectory import Kind, Segment, Source, StopReason, Trajectory

BRIDGE = BridgeSettings()


def figures(rollouts: list[Trajectory], estimator: str = "grpo") -> dict[str, float]:
    batch = gather(rollouts, BRIDGE)
    advantage = batch.advantage(CreditRule(estimator))
    return step_figures(rollouts, batch, gather_language(rollouts), advantage)


def with_logprobs(segment: Segment, *values: float) -> Segment:
    return replace(segment, logprobs=np.array(values), n_tokens=len(values))


def of(*segments: Segment, **changes: Any) -> Trajectory:
    return replace(rollout("r"), segments=segments, **changes)


# --- language ------------------------------------------------------------------------------------


def test_entropy_is_minus_the_mean_sampled_log_probability() -> None:
    rollouts = [
        of(with_logprobs(search(), -1.0, -2.0), information("a"), with_logprobs(answer(), -3.0)),
        replace(of(with_logprobs(answer(), -4.0)), id="s"),
    ]
    assert figures(rollouts)["actor/entropy"] == pytest.approx(10 / 4)


def test_a_turn_is_garbled_from_perplexity_50_on() -> None:
    edge = math.log(50)
    turns = [(-edge, -edge), (-edge - 0.1, -edge + 0.1), (-edge + 0.01, -edge), (-9.0, 0.0)]
    rollouts = [
        replace(of(with_logprobs(answer(), *turn)), id=str(at)) for at, turn in enumerate(turns)
    ]
    assert figures(rollouts)["language/garbled"] == pytest.approx(3 / 4)


def test_without_log_probabilities_entropy_and_garbled_are_left_out() -> None:
    found = figures([rollout("r")])
    assert "actor/entropy" not in found
    assert "language/garbled" not in found
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize(
    ("text", "total", "repeated"),
    [
        ("a b c", 0, 0),
        ("a b c d", 1, 0),
        ("a a a a a a", 3, 2),
        ("a b c d a b c d", 5, 1),
        ("<a><a><a>", 6, 3),
        ("", 0, 0),
    ],
)
def test_repeated_4_grams_are_those_that_stood_earlier(
    text: str, total: int, repeated: int
) -> None:
    assert repeated_ngrams(text) == (total, repeated)


def test_repetition_is_counted_inside_turns_only() -> None:
    turn = replace(answer(), text="w x y z")
    assert figures([of(turn, turn)])["language/repetition"] == 0
    looping = replace(answer(), text="w w w w w")
    assert figures([of(looping, turn)])["language/repetition"] == pytest.approx(1 / 3)


def test_a_query_is_a_duplicate_if_the_rollout_asked_it_before_but_for_case_and_blanks() -> None:
    asked = ["Who  is it", "who is IT", "else", "", " "]
    segments = [part for query in asked for part in (search(query), information("a"))]
    other = replace(of(search("else"), information("a"), answer()), id="s")
    found = figures([of(*segments, answer()), other])
    assert found["language/repeated_queries"] == pytest.approx(1 / 4)


def test_language_has_intervals_over_groups() -> None:
    rollouts = [
        replace(
            of(with_logprobs(answer(), *([-5.0 if at % 3 == 0 else -0.1] * 3))),
            id=str(at),
            group=f"g{at // 4}",
            format_ok=at % 2 == 0,
        )
        for at in range(40)
    ]
    found = language(gather(rollouts, BRIDGE), gather_language(rollouts))
    assert found.garbled.value == pytest.approx(14 / 40)
    assert found.garbled.low < 14 / 40 < found.garbled.high
    assert found.entropy.n == 40
    assert found.entropy.low < found.entropy.value < found.entropy.high
    assert found.format_ok.value == 0.5
    assert found.duplicate_queries.n == 0


def test_a_failed_rollout_does_not_count_against_the_format() -> None:
    rollouts = [rollout("a"), replace(rollout("b", reward=None), format_ok=False)]
    found = language(gather(rollouts, BRIDGE), gather_language(rollouts))
    assert (found.format_ok.value, found.format_ok.n) == (1.0, 1)


# --- searches ------------------------------------------------------------------------------------


def searched(name: str, group: str, times: int, reward: float | None) -> Trajectory:
    return rollout(name, group, reward, results=[["a"]] * times)


SEARCHED = [
    searched("a", "g", 0, 0.0),
    searched("b", "g", 1, 0.5),
    searched("c", "g", 2, 1.0),
    searched("d", "g", 3, 1.0),
    searched("e", "h", 2, 0.0),
    searched("f", "h", 1, 1.0),
    searched("g", "i", 2, 1.0),
    searched("h", "i", 2, None),
]


def test_shares_and_rewards_by_number_of_searches() -> None:
    found = figures(SEARCHED)
    assert found["rollouts/searches"] == pytest.approx(13 / 8)
    shares = {"0": 1 / 8, "1": 2 / 8, "2": 4 / 8, "3": 1 / 8, "several": 5 / 8}
    assert {n: found[f"searches/{n}/share"] for n in shares} == shares
    rewards = {"0": 0.0, "1": 0.75, "2": 2 / 3, "3": 1.0, "several": 3 / 4}
    assert {n: found[f"searches/{n}/reward"] for n in rewards} == pytest.approx(rewards)


def test_the_gain_of_several_searches_compares_rollouts_of_one_question() -> None:
    batch = gather(SEARCHED, BRIDGE)
    # Group g: 1.0 - 0.25; group h: 0 - 1; group i has no rollout with fewer.
    assert gain_of_several(batch).tolist() == [-1.0, 0.75]
    found = search_figures(batch)
    assert found["searches/gain_groups"] == 2
    assert found["searches/gain"] == pytest.approx(-0.125)
    assert found["searches/gain_square"] == pytest.approx((1 + 0.75**2) / 2)


def test_advantage_by_searches_is_a_token_mean() -> None:
    rollouts = SEARCHED[:4]
    batch = gather(rollouts, BRIDGE)
    advantage = np.arange(len(batch.owner), dtype=np.float64)
    found = search_figures(batch, advantage)
    # Searches have 10 tokens, answers 8; c owns segments 3, 4, 5.
    assert found["searches/2/advantage"] == pytest.approx((3 * 10 + 4 * 10 + 5 * 8) / 28)
    assert "searches/2/advantage" not in search_figures(batch)


# --- outcomes, groups, credit --------------------------------------------------------------------


def test_outcomes_lengths_and_ends_have_their_values() -> None:
    cut = Segment(Source.POLICY, Kind.TRUNCATED, "<think>so", 30)
    rollouts = [
        replace(rollout("a", "g", 1.0, results=[["x"]]), scores={"exact_match": 1.0}),
        replace(rollout("b", "g", 0.5), scores={"exact_match": 0.0}, format_ok=False),
        replace(of(cut), id="c", group="h", reward=0.0, stop_reason=StopReason.TOKEN_LIMIT),
        rollout("d", "h", None),
    ]
    found = figures(rollouts)
    expected = {
        "rollouts/n": 4, "rollouts/unscored": 1, "rollouts/format_ok": 0.75,
        "rollouts/environment_tokens": 5, "rollouts/exact_match": 0.5,
        "response_length/mean": (18 + 8 + 30 + 8) / 4, "response_length/max": 30,
        "response_length/min": 8, "response_length/clip_ratio": 0.25,
        "critic/score/mean": 0.5, "critic/score/max": 1, "critic/score/min": 0,
        "stop/answered": 0.5, "stop/token_limit": 0.25, "stop/failed": 0.25,
        "groups/effective": 1, "groups/lone": 1, "groups/too_easy": 0, "groups/too_hard": 0,
        "groups/unscored": 0, "groups/silver_size": 0.5,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_mis_penalised_and_masses_by_kind_have_their_values() -> None:
    rollouts = [
        rollout("a", "g", 1.0, results=[["x"]]),
        rollout("b", "g", 0.0, results=[["x"]]),
        rollout("c", "g", 0.0, results=[["y"]]),
    ]
    found = figures(rollouts, "dr_grpo")
    assert found["credit/mis_penalised"] == pytest.approx(1 / 2)
    assert found["credit/mis_penalised_n"] == 2
    assert found["credit/negative_to_positive/search"] == pytest.approx(1.0)
    assert found["credit/negative_to_positive/all"] == pytest.approx(1.0)
    assert "credit/negative_to_positive/other" not in found
    assert found["critic/advantages/max"] == pytest.approx(2 / 3)


def test_strata_stand_beside_chance() -> None:
    rewards = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    rollouts = [searched(str(at), "g", 1 + at // 4, reward) for at, reward in enumerate(rewards)]
    found = figures(rollouts)
    assert found["strata/between"] == pytest.approx(1.0)
    assert found["strata/between_by_chance"] == pytest.approx(1 / 7)
    assert found["strata/flat"] == 1
    assert found["strata/lone"] == 0


def test_nothing_at_all_has_no_figures_but_counts() -> None:
    found = step_figures([], gather([], BRIDGE), gather_language([]), np.zeros(0))
    assert found["rollouts/n"] == 0
    assert all(value == 0 for value in found.values())


# --- any file, any order -------------------------------------------------------------------------


def random_rollouts(seed: int, n: int = 24, steps: int = 1) -> list[Trajectory]:
    generator = np.random.default_rng(seed)
    made = []
    for at in range(n):
        times = int(generator.integers(0, 4))
        base = rollout(
            f"t{at}",
            f"g{at % 6}",
            None if generator.random() < 0.1 else float(generator.integers(0, 2)),
            results=[[str(i) for i in generator.integers(0, 5, size=2)] for _ in range(times)],
            format_ok=bool(generator.random() < 0.8),
            step=1 + at % 6 % steps,
        )
        segments = tuple(
            with_logprobs(s, *(-generator.exponential(2.0, size=3))) if s.is_policy else s
            for s in base.segments
        )
        made.append(replace(base, segments=segments))
    return made


@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_the_order_of_the_rollouts_is_irrelevant(seed: int, random: Any) -> None:
    rollouts = random_rollouts(seed)
    shuffled = list(rollouts)
    random.shuffle(shuffled)
    assert figures(shuffled) == pytest.approx(figures(rollouts), rel=1e-9, abs=1e-12)


def test_the_steps_of_a_file_have_the_figures_of_the_steps_alone() -> None:
    rollouts = random_rollouts(1, n=36, steps=3)
    batch, columns = gather(rollouts, BRIDGE), gather_language(rollouts)
    advantage = batch.advantage(CreditRule("grpo"))
    found = list(series(batch, columns, advantage, np.zeros(36, dtype=bool)))
    assert [row["step"] for row in found] == [1, 2, 3]
    for row in found:
        alone = figures([t for t in rollouts if t.step == row["step"]])
        assert {k: v for k, v in row.items() if k != "step"} == pytest.approx(
            {name: alone[name] for name in row if name != "step"}
        )


def test_credit_that_is_not_recorded_and_rollouts_that_were_replaced_are_left_out() -> None:
    rollouts = random_rollouts(2, n=12, steps=2)
    batch, columns = gather(rollouts, BRIDGE), gather_language(rollouts)
    advantage = np.where(batch.step[batch.owner] == 1, np.nan, 0.0)
    replaced = np.arange(12) == 1
    first, second = series(batch, columns, advantage, replaced)
    assert "critic/advantages/mean" not in first
    assert "critic/advantages/mean" in second
    assert second["rollouts/n"] == 5


def test_selecting_rollouts_is_gathering_them_alone() -> None:
    rollouts = random_rollouts(3)
    batch = gather(rollouts, BRIDGE)
    rows = np.isin(np.array([t.group for t in rollouts]), ["g1", "g4"])
    part = select(batch, rows)
    alone = gather([t for t in rollouts if t.group in ("g1", "g4")], BRIDGE)
    for name in batch.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(part, name), getattr(alone, name))


def test_columns_of_two_batches_join_and_part_again() -> None:
    first, second = random_rollouts(4), random_rollouts(5)
    whole = concatenate_language([gather_language(first), gather_language(second)])
    mine = np.arange(len(whole.ngrams)) < len(gather_language(first).ngrams)
    for name in whole.__dataclass_fields__:
        np.testing.assert_array_equal(
            getattr(select_language(whole, mine), name), getattr(gather_language(first), name)
        )
    assert len(concatenate([gather(first, BRIDGE), gather(second, BRIDGE)]).owner) == len(
        whole.ngrams
    )


# --- the audit -----------------------------------------------------------------------------------


def test_the_audit_shows_the_language_of_any_file() -> None:
    collector = AuditCollector(BRIDGE)
    collector.add(SEARCHED)
    rows = dict(language_rows(collector.finish()))
    assert rows["entropy"].startswith("unknown")
    assert "of 13 searches" in rows["duplicate queries"]
    assert "n 2 groups with both" in rows["several searches"]


def test_the_audit_of_a_files_steps_says_which_alarms_would_have_fired() -> None:
    rollouts = [
        rollout(f"{step}-{at}", f"{step}-{at % 2}", 0.0, step=step)
        for step in range(1, 12)
        for at in range(4)
    ]
    collector = AuditCollector(BRIDGE)
    collector.add(rollouts)
    (alarm,) = collector.finish().alarms
    assert (alarm.name, alarm.step) == ("dead_groups", 10)
    assert "100.0% too hard" in alarm.message
