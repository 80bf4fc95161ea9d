"""Alarms on synthetic series: those that should fire, those that should not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from evenhand.diagnostics.alarms import (
    Action,
    Alarm,
    AlarmRules,
    Alarms,
    CollapseRule,
    DeadGroupsRule,
    StagnationRule,
    replay,
)

Row = dict[str, float]


def healthy(step: int, generator: np.random.Generator | None = None) -> Row:
    """A step of a run that goes well, with the noise of 64 rollouts."""
    noise = (lambda: 0.0) if generator is None else generator.normal
    return {
        "step": step,
        "rollouts/searches": min(0.95 + 0.06 * step, 2.0) + 0.15 * noise(),
        "searches/several/share": 0.6,
        "searches/gain": 0.3 + 0.1 * noise(),
        "searches/gain_square": 0.25,
        "searches/gain_groups": 5,
        "actor/entropy": 0.11 * (1 + 0.2 * noise()),
        "language/garbled": max(0.0, 0.001 * noise()),
        "language/repetition": max(0.0, 0.06 + 0.01 * noise()),
        "rollouts/format_ok": min(1.0, 0.97 + 0.015 * noise()),
        "credit/negative_to_positive/all": 0.9 + 0.1 * noise(),
        "credit/negative_to_positive/answer": 1.0 + 0.05 * noise(),
        "credit/negative_to_positive/search": 0.9 + 0.1 * noise(),
        "groups/effective": 5,
        "groups/too_easy": 1,
        "groups/too_hard": 2,
        "groups/lone": 0,
        "groups/unscored": 0,
    }


def run(steps: int, change: Callable[[int], Row], seed: int | None = None) -> list[Row]:
    generator = None if seed is None else np.random.default_rng(seed)
    return [healthy(step, generator) | change(step) for step in range(1, steps + 1)]


def names(alarms: list[Alarm]) -> set[str]:
    return {alarm.name for alarm in alarms}


def ramp(step: int, start: int, low: float, high: float, length: int = 10) -> float:
    return low + (high - low) * float(np.clip((step - start) / length, 0, 1))


NEGATIVE = "credit/negative_to_positive/answer"

# --- collapse ------------------------------------------------------------------------------------

COLLAPSES: dict[str, Callable[[int], Row]] = {
    "entropy rises under negative mass": lambda s: {
        "actor/entropy": ramp(s, 20, 0.11, 0.4),
        NEGATIVE: 3.0,
    },
    "entropy rises, then garbled turns": lambda s: {
        "actor/entropy": ramp(s, 20, 0.11, 1.5),
        "language/garbled": ramp(s, 25, 0.0, 0.2),
    },
    "entropy rises, then plunges into repetition": lambda s: {
        "actor/entropy": ramp(s, 20, 0.11, 0.5, 5) if s < 28 else 0.02,
        "language/repetition": 0.06 if s < 28 else 0.7,
    },
    "format falls under negative mass": lambda s: {
        "rollouts/format_ok": ramp(s, 20, 0.98, 0.4),
        "credit/negative_to_positive/all": ramp(s, 15, 1.0, 4.0),
    },
    "format falls into repetition": lambda s: {
        "rollouts/format_ok": ramp(s, 20, 0.98, 0.4),
        "language/repetition": ramp(s, 20, 0.06, 0.6),
    },
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", COLLAPSES)
def test_a_collapse_fires_after_its_signs_begin_and_before_they_are_full(
    kind: str, seed: int
) -> None:
    (alarm,) = replay(run(45, COLLAPSES[kind], seed))
    assert alarm.name == "collapse"
    assert 20 < alarm.step <= 35


ALONE: dict[str, Callable[[int], Row]] = {
    "negative mass alone": lambda _: {
        NEGATIVE: 20.0,
        "credit/negative_to_positive/all": 5.0,
    },
    "entropy alone": lambda s: {"actor/entropy": ramp(s, 20, 0.11, 0.5)},
    "repetition alone": lambda s: {"language/repetition": ramp(s, 20, 0.06, 0.5)},
    "format that was never good": lambda _: {"rollouts/format_ok": 0.3},
    "one step without positive credit": lambda s: {
        "actor/entropy": ramp(s, 20, 0.11, 0.5),
        NEGATIVE: 500.0 if s == 30 else 1.0,
    },
    "one bad step": lambda s: (
        {"actor/entropy": 0.5, "rollouts/format_ok": 0.6, NEGATIVE: 1.6} if s == 30 else {}
    ),
}


@pytest.mark.parametrize("kind", ALONE)
def test_one_sign_or_one_bad_step_is_no_collapse(kind: str) -> None:
    assert "collapse" not in names(replay(run(60, ALONE[kind])))


def test_healthy_runs_are_left_alone() -> None:
    fired = [alarm for seed in range(200) for alarm in replay(run(60, lambda _: {}, seed))]
    assert fired == []


def test_a_message_says_what_was_seen_and_the_figures_stand_beside_it() -> None:
    (alarm,) = replay(run(45, COLLAPSES["entropy rises under negative mass"]))
    assert "entropy rose to" in alarm.message
    assert "negative credit is 3.00 times positive on answers" in alarm.message
    assert alarm.figures["actor/entropy"] >= 1.75 * alarm.figures["actor/entropy/normal"]
    assert "balance" in alarm.remedy
    assert alarm.as_plain().keys() == {
        "step", "alarm", "action", "message", "cause", "remedy", "figures"
    }  # fmt: skip


def test_entropy_that_only_falls_is_no_plunge() -> None:
    rows = run(60, lambda s: {"actor/entropy": ramp(s, 10, 0.4, 0.02), NEGATIVE: 3.0})
    assert replay(rows) == []


def test_unknown_figures_raise_no_alarm() -> None:
    bare = {"step", "rollouts/n", "rollouts/format_ok"}
    rows = [{k: v for k, v in row.items() if k in bare} for row in run(40, lambda _: {})]
    assert replay(rows) == []
    falls = [row | {"rollouts/format_ok": ramp(int(row["step"]), 20, 1.0, 0.0)} for row in rows]
    rules = AlarmRules(collapse=CollapseRule(signs=1))
    assert names(replay(falls, rules)) == {"collapse"}


# --- stagnation ----------------------------------------------------------------------------------


def stagnant(step: int) -> Row:
    return {
        "rollouts/searches": 1.03 + 0.02 * (step % 2),
        "searches/several/share": 0.04,
        "searches/gain": 0.3,
        "searches/gain_square": 0.2,
        "searches/gain_groups": 2,
    }


def test_one_search_a_question_while_several_earn_more_is_stagnation() -> None:
    (alarm,) = replay(run(45, stagnant))
    assert (alarm.name, alarm.step) == ("stagnation", 20)
    assert "several earned 0.300 more reward" in alarm.message
    # 40 groups with mean 0.3 and mean square 0.2.
    error = np.sqrt((0.2 - 0.09) * 40 / 39 / 40)
    assert alarm.figures["searches/gain_low"] == pytest.approx(0.3 - 2.0227 * error, abs=1e-3)


NOT_STAGNANT: dict[str, Callable[[int], Row]] = {
    "several searches do not pay": lambda s: {
        **stagnant(s), "searches/gain": 0.02, "searches/gain_square": 0.2
    },
    "too few groups tell": lambda s: {
        **stagnant(s), "searches/gain_groups": 1 if s % 10 == 0 else 0,
    },
    "the policy moves": lambda s: {**stagnant(s), "rollouts/searches": 1.0 + 0.008 * s},
    "it searches often": lambda s: {**stagnant(s), "rollouts/searches": 1.5},
    "nobody tries several": lambda s: {**stagnant(s), "searches/gain_groups": 0},
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_STAGNANT)
def test_what_is_no_stagnation(kind: str) -> None:
    assert replay(run(25, NOT_STAGNANT[kind])) == []


def test_a_gain_that_is_chance_fires_seldom() -> None:
    fired = 0
    for seed in range(300):
        generator = np.random.default_rng(seed)
        rows = []
        for step in range(1, 21):
            gains = generator.normal(0, 0.4, size=2)
            own = {"searches/gain": gains.mean(), "searches/gain_square": np.square(gains).mean()}
            rows.append(healthy(step) | stagnant(step) | own)
        fired += bool(replay(rows))
    # One-sided 97.5 %.
    assert fired / 300 <= 0.045


# --- dead groups ---------------------------------------------------------------------------------


def groups(effective: float, too_easy: float, too_hard: float) -> Row:
    return {"groups/effective": effective, "groups/too_easy": too_easy,
            "groups/too_hard": too_hard}  # fmt: skip


def test_dead_groups_fire_and_tell_easy_from_hard() -> None:
    (hard,) = replay(run(20, lambda s: groups(8 * (s == 1), 0, 8 * (s > 1))))
    assert (hard.name, hard.step) == ("dead_groups", 11)
    assert "too hard for the policy" in hard.cause
    (easy,) = replay(run(12, lambda _: groups(0, 7, 1)))
    assert "nothing to learn" in easy.cause


def test_groups_that_refills_did_not_find_count_as_dead() -> None:
    rows = run(20, lambda _: {**groups(1, 0, 0), "groups/missing": 15})
    assert names(replay(rows)) == {"dead_groups"}


def test_a_tenth_of_the_groups_is_enough() -> None:
    assert replay(run(40, lambda _: groups(1, 4, 5))) == []


# --- when they fire ------------------------------------------------------------------------------


def test_an_alarm_fires_once_and_again_only_after_a_quiet_window() -> None:
    def on_and_off(step: int) -> Row:
        return groups(0, 0, 8) if step <= 15 or step > 40 else groups(8, 0, 0)

    fired = [alarm.step for alarm in replay(run(60, on_and_off))]
    assert fired == [10, 50]


def test_an_alarm_that_is_off_is_not_watched_for() -> None:
    rules = AlarmRules(dead_groups=DeadGroupsRule(action=Action.OFF))
    assert replay(run(20, lambda _: groups(0, 0, 8)), rules) == []


def test_window_threshold_and_action_are_settings() -> None:
    rule = DeadGroupsRule(action=Action.STOP, window=4, share=0.5)
    (alarm,) = replay(run(9, lambda _: groups(3, 1, 4)), AlarmRules(dead_groups=rule))
    assert (alarm.step, alarm.action) == (4, Action.STOP)


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (StagnationRule, {"window": 1}),
        (CollapseRule, {"signs": 6}),
        (CollapseRule, {"entropy": 1.0}),
        (CollapseRule, {"entrapy": 2.0}),
        (DeadGroupsRule, {"share": 1.5}),
        (DeadGroupsRule, {"action": "halt"}),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(rule: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        rule(**values)


@given(st.integers(1, 44), st.sampled_from(sorted(COLLAPSES)), st.integers(0, 50))
def test_feeding_the_lines_again_restores_the_state(cut: int, kind: str, seed: int) -> None:
    rows = run(45, COLLAPSES[kind], seed)
    resumed = Alarms()
    for row in rows[:cut]:
        resumed.update(int(row["step"]), row)
    late = [alarm for row in rows[cut:] for alarm in resumed.update(int(row["step"]), row)]
    assert late == [alarm for alarm in replay(rows) if alarm.step > cut]


def test_the_evaluation_before_training_is_no_step() -> None:
    rows = [{"step": 0, "eval/exact_match": 0.4}, *run(20, lambda _: groups(0, 0, 8))]
    assert [alarm.step for alarm in replay(rows)] == [10]
