"""The bridge: cases, streaming, strata, evidence."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import information, rollout, search
from evenhand.core.errors import ConfigError, DataError, SingleMemberGroupsWarning
from evenhand.credit import (
    ESTIMATORS,
    BridgeSettings,
    CreditRule,
    concatenate,
    credit,
    credit_stream,
    gather,
    whole_groups,
)
from evenhand.credit.bridge import BATCH_SIZE
from evenhand.credit.evidence import EvidenceSettings, silver_documents, step_scores
from evenhand.credit.strata import get_stratum
from evenhand.trajectory import Kind, Trajectory, read_trajectories, trajectory_from_dict

CASES = Path(__file__).parent / "data" / "cases"
CALIBADV = json.loads((CASES / "calibadv" / "cases.json").read_text())
EVIDENCE = json.loads((CASES / "evidence.json").read_text())


def close(value: float, expected: float) -> bool:
    return abs(value - expected) <= 1e-4 * abs(expected) + 2e-5


def credits_match(trajectories: Iterable[Trajectory]) -> int:
    """Compare with `metadata.expected` (values computed by the method's original code)."""
    count = 0
    for trajectory in trajectories:
        expected = trajectory.metadata["expected"]
        scores = [s.step_score for s in trajectory.segments if s.step_score is not None]
        pairs = [
            *zip([s.advantage for s in trajectory.segments], expected["advantages"], strict=True),
            *zip(scores, expected["step_scores"], strict=True),
        ]
        for value, wanted in pairs:
            assert close(value, wanted), f"{trajectory.id}: {value} instead of {wanted}"
        count += 1
    return count


@pytest.mark.parametrize("case", CALIBADV, ids=lambda case: case["file"])
def test_calibadv_reproduces_the_original_code(case: dict) -> None:
    options = {key: value for key, value in case.items() if key != "file"}
    trajectories = list(read_trajectories(CASES / "calibadv" / case["file"]))
    assert credits_match(credit(trajectories, "calibadv", **options)) == 40


@pytest.mark.parametrize("case", EVIDENCE, ids=lambda case: case["name"])
def test_step_scores_follow_the_rules(case: dict) -> None:
    group = [trajectory_from_dict(item) for item in case["trajectories"]]
    settings = EvidenceSettings(**case["settings"])
    silver = silver_documents(group, threshold=settings.threshold)
    for trajectory, expected in zip(group, case["expected"], strict=True):
        found = step_scores(trajectory, silver, settings)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_count_scores_weigh_documents_by_how_many_best_rollouts_found_them() -> None:
    group = [
        rollout("b1", reward=1.0, results=[["a", "b"]]),
        rollout("b2", reward=1.0, results=[["a"]]),
        rollout("w", reward=0.0, results=[["b", "z"], ["a", "y", "x"]]),
    ]
    silver = silver_documents(group)
    assert dict(silver) == {"a": 2, "b": 1}
    by_max = step_scores(group[2], silver, EvidenceSettings("count_max"))
    by_mean = step_scores(group[2], silver, EvidenceSettings("count_mean"))
    assert by_max == [0.5, 1.0]
    np.testing.assert_allclose(by_mean, [0.25, 1 / 3])


def make_groups(n_groups: int, size: int = 4, steps: int = 1) -> list[Trajectory]:
    generator = np.random.default_rng(0)
    return [
        rollout(
            f"g{g}-r{r}",
            f"g{g}",
            float(generator.choice([0.0, 0.5, 1.0])),
            results=[[f"d{generator.integers(4)}"] for _ in range(generator.integers(0, 3))],
            step=g * steps // n_groups if steps > 1 else None,
        )
        for g in range(n_groups)
        for r in range(size)
    ]


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_a_stream_gives_what_everything_at_once_gives(name: str) -> None:
    # Groups of five never end where a batch is full.
    trajectories = make_groups(BATCH_SIZE // 5 + 50, size=5, steps=3)
    rule = CreditRule(name)
    parts = list(credit_stream(iter(trajectories), rule))
    assert len(parts) == (3 if rule.whole_batch else 2)
    streamed = [trajectory for part in parts for trajectory in part.written()]
    assert [t.id for t in streamed] == [t.id for t in trajectories]
    for old, new in zip(credit(trajectories, name), streamed, strict=True):
        for first, second in zip(old.segments, new.segments, strict=True):
            assert first.advantage == pytest.approx(second.advantage, abs=1e-12)
            assert first.step_score == second.step_score


def test_scattered_groups_are_refused_with_the_remedy_and_read_in_memory() -> None:
    rows = make_groups(2)
    scattered = [rows[0], rows[4], rows[1], rows[5]]
    with pytest.raises(DataError, match="group 'g0' comes back .*--in-memory"):
        list(credit_stream(scattered, CreditRule("grpo")))
    (part,) = credit_stream(scattered, CreditRule("grpo"), in_memory=True)
    direct = {t.id: t for t in credit([rows[0], rows[1], rows[4], rows[5]], "grpo")}
    assert list(part.written()) == [direct[t.id] for t in scattered]


def test_a_whole_batch_estimator_takes_scattered_groups_but_not_scattered_steps() -> None:
    rows = make_groups(4, steps=2)
    inside = [rows[0], rows[4], rows[1], rows[5], *rows[8:]]
    rule = CreditRule("reinforce_baseline")
    assert len(list(credit_stream(inside, rule))) == 2
    with pytest.raises(DataError, match="step 0 comes back"):
        list(credit_stream([rows[0], rows[8], rows[1]], rule))


def test_a_group_that_spans_two_steps_is_refused() -> None:
    rows = [rollout("a", step=1), rollout("b", step=2)]
    for in_memory in (False, True):
        with pytest.raises(DataError, match="step 1 and of step 2; a group id must be unique"):
            list(whole_groups(rows, in_memory=in_memory))


def test_batches_join_to_what_they_are_together() -> None:
    rows = make_groups(6, steps=2)
    whole = gather(rows, BridgeSettings())
    joined = concatenate([gather(rows[:8], BridgeSettings()), gather(rows[8:], BridgeSettings())])
    for name in whole.__slots__:
        assert np.array_equal(getattr(whole, name), getattr(joined, name)), name


def test_the_environment_gets_no_credit_whatever_it_says() -> None:
    rows = [
        rollout("a", reward=1.0, results=[["d"]]),
        rollout("b", reward=0.0, results=[["d"]]),
    ]
    before = credit(rows, "stratified_calibadv")
    other = replace(
        rows[1], segments=(rows[1].segments[0], information("d", n_tokens=999), rows[1].segments[2])
    )
    after = credit([rows[0], other], "stratified_calibadv")
    for old, new in zip(before, after, strict=True):
        assert [s.advantage for s in old.segments] == [s.advantage for s in new.segments]
        assert all(s.advantage == 0 for s in new.segments if not s.is_policy)


def test_the_last_policy_segment_is_the_answer_and_is_never_softened() -> None:
    good = rollout("good", reward=1.0, results=[["a"]])
    cut = rollout("cut", reward=0.0, results=[["a"]])
    cut = replace(cut, segments=(*cut.segments[:2], search("again", think="other words")))
    batch = gather([good, cut], BridgeSettings())
    assert batch.is_answer.tolist() == [False, True, False, True]
    assert batch.is_executed.tolist() == [True, False, True, False]
    ends_with_result = replace(cut, segments=cut.segments[:2])
    batch = gather([good, ends_with_result], BridgeSettings())
    assert batch.is_answer.tolist() == [False, True, True]
    assert batch.advantage(CreditRule("calibadv"))[2] < 0


def test_an_unscored_rollout_gets_zero_and_changes_nothing() -> None:
    rows = make_groups(1)
    lost = rollout("lost", "g0", None, results=[["a"]])
    with_lost = credit([*rows, lost], "stratified_calibadv")
    assert with_lost[:-1] == credit(rows, "stratified_calibadv")
    assert [s.advantage for s in with_lost[-1].segments] == [0, 0, 0]


def test_a_group_without_a_scored_member_gets_zeros() -> None:
    rows = [rollout(name, reward=None) for name in "ab"]
    for name in ESTIMATORS:
        assert all(s.advantage == 0 for t in credit(rows, name) for s in t.segments)


def test_a_rollout_without_policy_text_is_allowed() -> None:
    empty = replace(rollout("e", reward=0.0), segments=())
    (_, second) = credit([rollout("a", reward=1.0), empty], "calibadv")
    assert second.segments == ()


def test_groups_of_one_warn_once() -> None:
    rows = [rollout(f"r{n}", f"g{n}", float(n % 2)) for n in range(4)]
    with pytest.warns(SingleMemberGroupsWarning) as caught:
        result = credit(rows, "stratified_calibadv")
    assert len(caught) == 1
    assert all(s.advantage == 0 for t in result for s in t.segments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"balence": 1}, "unknown setting 'balence'; did you mean 'balance'"),
        ({"balance": "lots"}, "balance must be a number, got 'lots'"),
        ({"balance": 0}, r"balance must be a number in \[1e-06"),
        ({"balance": "nan"}, "balance must be a number in"),
        ({"rescale": "both"}, "rescale must be one of positive, negative"),
        ({"only_when_negative_dominates": "maybe"}, "must be true or false"),
        ({"ddof": "2"}, "ddof must be 0"),
        ({"ddof": "0.5"}, "ddof must be a whole number"),
        ({"eps": "-1"}, "eps must be a number in"),
        ({"step_score": "sum"}, "step_score must be one of fraction, count_max, count_mean"),
        ({"threshold": "none"}, "threshold must be a number"),
        ({"only_when_negative_dominates": "none"}, "must be true or false"),
        ({"stratum": "none"}, "unknown stratum 'none'"),
        ({"stratum": "searches_capped:²"}, "needs a whole number from 1"),
        ({"max_think_similarity": "2"}, "max_think_similarity must be a number in"),
        ({"stratum": "serches"}, "unknown stratum 'serches'; did you mean 'searches'"),
        ({"stratum": "searches_capped:0"}, "needs a whole number from 1"),
        ({"stratum": "no_such_module:f"}, "importing 'no_such_module' failed"),
        ({"stratum": "math:nothing"}, "has no 'nothing'"),
        ({"stratum": "math:pi"}, "is a float, expected a function"),
    ],
)
def test_a_bad_setting_fails_before_any_data_is_read(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CreditRule.from_settings("calibadv", settings)


def test_an_unknown_estimator_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown estimator 'stratifid'; did you mean 'strat"):
        CreditRule("stratifid")


def test_settings_may_be_texts_as_on_the_command_line() -> None:
    rule = CreditRule.from_settings(
        "calibadv", {"max_think_similarity": "none", "balance": "2", "ddof": "0"}
    )
    assert rule.bridge.evidence.max_think_similarity is None
    assert rule.settings == {"balance": 2.0, "ddof": 0}


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=3), max_size=6), st.integers(1, 4))
def test_strata_count_executed_searches(results: list[list[str]], cap: int) -> None:
    one = rollout("r", results=results)
    assert get_stratum("searches")(one) == len(results)
    assert get_stratum(f"searches_capped:{cap}")(one) == min(len(results), cap)
    assert get_stratum("stop_reason")(one) == "answered"


def test_a_stratum_of_the_users_own_is_loaded_and_its_faults_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_strata.py").write_text(
        "def kinds(t):\n    return '-'.join(s.kind for s in t.segments)\n"
        "def broken(t):\n    return 1 / 0\n"
        "def wrong(t):\n    return 1.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    one = rollout("r", results=[["a"]])
    assert get_stratum("my_strata:kinds")(one) == "search-information-answer"
    with pytest.raises(ConfigError, match="failed on trajectory 'r' with ZeroDivisionError"):
        get_stratum("my_strata:broken")(one)
    with pytest.raises(ConfigError, match="returned 1.5 .*expected an integer or a text"):
        get_stratum("my_strata:wrong")(one)


def test_a_notice_after_a_search_leaves_it_unexecuted() -> None:
    one = rollout("r", results=[["a"]])
    failed = replace(one.segments[1], kind=Kind.NOTICE, documents=None, error="timeout")
    assert get_stratum("searches")(replace(one, segments=(one.segments[0], failed))) == 0


def test_a_group_of_two_steps_is_refused_in_python_too() -> None:
    with pytest.raises(DataError, match="step 1 and of step 2"):
        credit([rollout("a", step=1), rollout("b", step=2)], "grpo")


def test_evidence_has_the_borders_of_the_rules() -> None:
    at_threshold = [rollout("b", reward=0.7, results=[["a"]]), rollout("w", results=[["a"]])]
    assert silver_documents(at_threshold) == {"a": 1}
    half_alike = rollout("w", reward=0.0)
    segments = [search(think="one two"), information("a"), search(think="one six"),
                information("b")]  # fmt: skip
    half_alike = replace(half_alike, segments=(*segments, *half_alike.segments))
    assert step_scores(half_alike, {"a": 1, "b": 1}) == [1.0, 1.0]
    assert step_scores(half_alike, {"a": 1, "b": 1}, EvidenceSettings(
        max_think_similarity=0.49)) == [1.0, 0.0]  # fmt: skip
