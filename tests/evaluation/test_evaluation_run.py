"""The driver of evaluations: results, faults, the folder, and going on after a kill."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answered import answered, failed
from playing import Engine, agent, answers_at_once, questions

from evenhand.core.errors import ConfigError, DataError, RetrievalError
from evenhand.datasets import Question
from evenhand.diagnostics.intervals import Estimate, proportion
from evenhand.evaluation.folder import EvaluationFolder, question_hash, read_evaluation
from evenhand.evaluation.run import EvaluationSet, PolicyAnswerer, evaluate
from evenhand.evaluation.summary import average, summarise


def manifest(sets: Iterable[EvaluationSet] = (), **changes: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "baseline": None,
        "retriever": {"kind": "engine"},
        "settings": {"limits": {"max_searches": 3}},
        "seed": 0,
        "sets": {
            s.name: {"n": len(s.questions), "questions": question_hash(s.questions)} for s in sets
        },
        **changes,
    }


def run(
    folder: Path, answerer: Any = None, *, asked: Sequence[Question] | None = None,
    name: str = "nq", batch: int = 3, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    part = EvaluationSet(name, questions() if asked is None else asked, answerer or agent())
    with closing(EvaluationFolder.open(folder, manifest([part], **changes))) as opened:
        return evaluate([part], opened, batch=batch)


def test_results_hold_every_metric_with_its_interval_and_n(tmp_path: Path) -> None:
    results = run(tmp_path / "out")
    nq = results["sets"]["nq"]
    share = proportion(4, 8)
    assert nq["exact_match"] == {"value": 0.5, "low": share.low, "high": share.high, "n": 8}
    assert nq["searches"]["value"] == 1.5
    assert nq["duplicate_searches"]["value"] == 0.5
    assert nq["recall_titles_1"]["value"] == 1.0
    assert nq["recall_titles_1"]["low"] is None
    assert nq["format_ok"]["value"] == 1.0
    assert nq["seconds"]["value"] > 0
    assert results["excluded"] == {"nq": 0}
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results


def test_rollouts_are_in_our_format_and_scored(tmp_path: Path) -> None:
    run(tmp_path / "out")
    rollouts = list(read_evaluation(tmp_path / "out"))
    assert [t.question_id for t in rollouts] == [f"q{at}" for at in range(8)]
    assert rollouts[0].scores == {"exact_match": 1.0, "f1": 1.0, "contains": 1.0}
    assert rollouts[1].reward == 0.0


def test_tables_are_written_for_people_and_spreadsheets(tmp_path: Path) -> None:
    run(tmp_path / "out", asked=[*questions(4, hops=1), *questions(8, hops=2)[4:]])
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| nq | 8 | 0.500 [0.215, 0.785] |" in text
    assert "| nq, hops 2 | 4 |" in text
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines()))
    assert {"part": "nq", "metric": "searches", "value": "1.5", "n": "8"}.items() <= rows[3].items()


def test_a_policy_fault_counts_as_wrong(tmp_path: Path) -> None:
    results = run(tmp_path / "out", agent(lambda _: ["no tags at all"] * 9))
    assert results["sets"]["nq"]["exact_match"]["value"] == 0
    assert results["sets"]["nq"]["exact_match"]["n"] == 8


def test_an_environment_fault_is_excluded_and_counted(tmp_path: Path) -> None:
    engine = Engine(broken=lambda query: "lamp" in query or "clock" in query)
    results = run(tmp_path / "out", agent(engine=engine))
    assert results["excluded"] == {"nq": 2}
    assert results["sets"]["nq"]["exact_match"]["n"] == 6
    assert "2 failed" in (tmp_path / "out" / "table.md").read_text()


def test_a_batch_that_fails_as_a_whole_stops_and_is_not_kept(tmp_path: Path) -> None:
    broken = Engine(broken=lambda query: "lamp" not in query)
    with pytest.raises(RetrievalError, match="all 4 questions of a batch of nq failed.*down"):
        run(tmp_path / "out", agent(engine=broken), batch=4, asked=questions()[1:])
    results = run(tmp_path / "out", batch=4, asked=questions()[1:])
    assert results["sets"]["nq"]["exact_match"]["n"] == 7


def test_a_prompt_without_room_is_left_out_and_counted(tmp_path: Path) -> None:
    long = questions()[0]
    asked = [*questions()[1:], Question("q0", "x" * 9000, long.golden_answers, dataset="nq")]
    results = run(tmp_path / "out", asked=asked)
    assert results["left_out"] == {"nq": {"prompt too long": 1}}
    assert results["sets"]["nq"]["f1"]["n"] == 7


def test_the_batch_size_changes_no_result(tmp_path: Path) -> None:
    def without_time(results: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in results["sets"]["nq"].items() if k != "seconds"}

    one, all_ = (run(tmp_path / str(batch), batch=batch) for batch in (1, 8))
    assert without_time(one) == without_time(all_)


# --- averages ------------------------------------------------------------------------------------


def test_averages_are_unweighted_and_name_the_sets_that_are_missing() -> None:
    by_set = {
        "nq": [answered(at, right=at < 9) for at in range(10)],
        "popqa": [answered(at, right=False, dataset="popqa") for at in range(90)],
        "musique": [answered(at, right=at < 5, dataset="musique") for at in range(10)],
    }
    results = summarise(by_set, model="m")
    assert results["averages"]["single_hop"]["exact_match"]["value"] == pytest.approx(0.45)
    assert results["averages"]["all"]["exact_match"]["value"] == pytest.approx(1.4 / 3)
    assert results["averages"]["all"]["exact_match"]["n"] == 110
    assert results["average_sets"]["single_hop"]["missing"] == ["triviaqa"]
    assert "multi_hop" not in results["averages"]


def test_an_average_adds_squares_of_what_lies_below_and_above() -> None:
    found = average([Estimate(0.0, 0.0, 0.3, 10), Estimate(0.5, 0.1, 0.9, 10)])
    assert found.value == 0.25
    assert found.low == pytest.approx(0.25 - 0.4 / 2)
    assert found.high == pytest.approx(0.25 + math.hypot(0.3, 0.4) / 2)
    assert found.n == 20


def test_a_part_without_variation_adds_no_width_and_one_without_a_value_no_number() -> None:
    flat = Estimate(1.0, math.nan, math.nan, 5)
    wide = average([flat, Estimate(0.5, 0.3, 0.7, 5)])
    assert (wide.low, wide.high) == (pytest.approx(0.65), pytest.approx(0.85))
    assert math.isnan(average([flat, flat]).low)
    assert math.isnan(average([flat, Estimate(math.nan, math.nan, math.nan, 0)]).value)


def test_a_set_in_which_all_failed_has_nulls_and_no_share() -> None:
    results = summarise({"nq": [failed(1)]}, model="m")
    assert results["sets"]["nq"]["exact_match"] == {
        "value": None,
        "low": None,
        "high": None,
        "n": 0,
    }
    assert results["excluded"] == {"nq": 1}


def test_intervals_of_scores_stay_inside_their_bounds() -> None:
    scores = [{"exact_match": 1.0, "f1": 1.0 - 0.02 * (at == 0)} for at in range(5)]
    rollouts = [answered(at, scores=each) for at, each in enumerate(scores)]
    f1 = summarise({"nq": rollouts}, model="m")["sets"]["nq"]["f1"]
    assert f1["low"] < f1["value"] < f1["high"] == 1.0


@pytest.mark.slow
def test_the_interval_of_an_average_over_sets_covers_within_two_points() -> None:
    generator = np.random.default_rng(0)
    chances, sizes = np.array([0.05, 0.3, 0.5, 0.8]), np.array([200, 300, 200, 250])
    covered, cases = 0, 20_000
    for hits in generator.binomial(sizes, chances, size=(cases, 4)):
        found = average([proportion(int(h), int(n)) for h, n in zip(hits, sizes, strict=True)])
        covered += found.low <= chances.mean() <= found.high
    assert abs(covered / cases - 0.95) <= 0.02


# --- going on ------------------------------------------------------------------------------------


class Counting:
    """Counts the questions that reach the agent, and is killed when its time has come."""

    def __init__(self, inner: PolicyAnswerer, dies_after: int | None = None) -> None:
        self.inner, self.dies_after = inner, dies_after
        self.asked: list[str] = []

    def refuses(self, question: Question) -> str | None:
        return self.inner.refuses(question)

    def answer(self, asked: Sequence[Question], progress: Any = None) -> Any:
        if self.dies_after is not None and len(self.asked) >= self.dies_after:
            raise KeyboardInterrupt
        self.asked += [question.id for question in asked]
        return self.inner.answer(asked, progress)


def test_an_interrupted_evaluation_asks_only_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", Counting(agent(), dies_after=6))
    again = Counting(agent())
    results = run(tmp_path / "out", again)
    assert again.asked == ["q6", "q7"]
    assert results["sets"]["nq"]["exact_match"]["n"] == 8


def test_a_half_line_is_dropped_and_its_question_asked_again(tmp_path: Path) -> None:
    run(tmp_path / "out")
    file = tmp_path / "out" / "trajectories" / "nq.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    again = Counting(agent())
    run(tmp_path / "out", again)
    assert again.asked == ["q7"]
    assert len(file.read_bytes().splitlines()) == 8


def test_a_damaged_whole_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    run(tmp_path / "out")
    file = tmp_path / "out" / "trajectories" / "nq.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"{}\n" + lines[2])
    with pytest.raises(DataError, match=r"nq\.jsonl, line 2"):
        run(tmp_path / "out")


def test_failed_questions_are_asked_again(tmp_path: Path) -> None:
    run(tmp_path / "out", agent(engine=Engine(broken=lambda query: "lamp" in query)))
    again = Counting(agent())
    results = run(tmp_path / "out", again)
    assert again.asked == ["q0"]
    assert results["excluded"] == {"nq": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, 'model = "scripted", and "other" was asked for'),
        ({"settings": {"limits": {"max_searches": 5}}}, "settings.limits.max_searches = 3, and 5"),
        ({"seed": 1}, "seed = 0"),
        ({"baseline": "direct"}, "baseline = null"),
    ],
)
def test_other_settings_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run(tmp_path / "out")
    with pytest.raises(ConfigError) as error:
        run(tmp_path / "out", **changes)
    assert message in str(error.value)


def test_other_questions_of_a_set_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "out")
    with pytest.raises(ConfigError, match="sets.nq.n = 8"):
        run(tmp_path / "out", asked=questions(4))


def test_a_set_may_be_added_and_the_results_hold_both(tmp_path: Path) -> None:
    run(tmp_path / "out")
    results = run(tmp_path / "out", name="popqa", asked=questions(dataset="popqa"))
    assert list(results["sets"]) == ["nq", "popqa"]
    assert results["average_sets"]["single_hop"]["sets"] == ["nq", "popqa"]


def test_two_processes_cannot_write_into_one_folder(tmp_path: Path) -> None:
    with (
        closing(EvaluationFolder.open(tmp_path / "out", manifest())),
        pytest.raises(ConfigError, match="another process is evaluating"),
    ):
        EvaluationFolder.open(tmp_path / "out", manifest())


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out" / "trajectories").mkdir(parents=True)
    (tmp_path / "out" / "trajectories" / "nq.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"no evaluation\.json"):
        EvaluationFolder.open(tmp_path / "out", manifest())
    (tmp_path / "out" / "evaluation.json").write_text("{ not json")
    with pytest.raises(DataError, match="damaged"):
        EvaluationFolder.open(tmp_path / "out", manifest())
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        EvaluationFolder.open(tmp_path / "file", manifest())


def test_a_batch_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        run(tmp_path / "out", batch=0)


KILLED = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from playing import agent
import test_evaluation_run as own

class Slow(own.Counting):
    def answer(self, asked, progress=None):
        time.sleep(0.15)
        return super().answer(asked, progress)

own.run(Path(sys.argv[1]), Slow(agent()), batch=1)
"""


def test_a_killed_process_is_continued_to_the_same_rollouts(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run(whole, batch=1)
    here = Path(__file__).parent
    script = KILLED.format(paths=[str(here), str(here.parent)])
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "cut")])
    file = tmp_path / "cut" / "trajectories" / "nq.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        file.exists() and file.read_bytes().count(b"\n") > 2
    ):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 2 < file.read_bytes().count(b"\n") < 8
    again = Counting(agent())
    run(tmp_path / "cut", again, batch=1)
    assert 0 < len(again.asked) < 6

    def plain(path: Path) -> list[Any]:
        return [(t.id, t.scores, t.segments) for t in read_evaluation(path)]

    assert plain(tmp_path / "cut") == plain(whole)


def test_an_agent_that_never_searches_has_recall_0(tmp_path: Path) -> None:
    results = run(tmp_path / "out", agent(answers_at_once))
    assert results["sets"]["nq"]["recall_titles_1"]["value"] == 0
    assert results["sets"]["nq"]["exact_match"]["value"] == 1
