"""Comparisons of two evaluations: pairing, parts, counts, and the command."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from answered import answered, failed, policy_of_chances

from builders import information, search
from evenhand.cli import main
from evenhand.core.errors import ConfigError
from evenhand.evaluation import compare, measures
from evenhand.trajectory import write_trajectories


def test_questions_are_paired_by_set_and_id_whatever_their_order() -> None:
    first = [answered(1, right=False), answered(2), answered(1, dataset="popqa")]
    second = [answered(1, dataset="popqa", right=False), answered(2), answered(1)]
    found = compare(first, second)
    assert found.of(dataset="nq").difference.value == pytest.approx(0.5)
    assert found.of(dataset="popqa").difference.value == pytest.approx(-1.0)


def test_a_question_without_an_id_is_known_by_its_text() -> None:
    first = [answered(at, question_id=None, right=at == 0) for at in range(2)]
    assert compare(first, first[::-1]).of().ties == 2


def test_questions_on_one_side_only_are_left_out_and_counted() -> None:
    found = compare([answered(at) for at in range(5)], [answered(at) for at in range(3, 10)])
    assert (found.paired, found.only_first, found.only_second) == (2, 3, 5)
    assert found.of().n == 2


def test_an_environment_fault_on_a_side_leaves_the_question_out() -> None:
    first = [answered(1), failed(2), answered(3, right=False)]
    second = [answered(1), answered(2), failed(3)]
    found = compare(first, second)
    assert (found.paired, found.failed, found.of().n) == (3, 2, 1)


def test_several_rollouts_of_a_question_count_as_one() -> None:
    first = [answered(1, right=at < 1, rollout=at) for at in range(4)]
    second = [answered(1, right=at < 3, rollout=at) for at in range(4)]
    found = compare(first, second).of()
    assert (found.first, found.second, found.n) == (0.25, 0.75, 1)


def test_hops_are_compared_apart_where_a_set_has_several() -> None:
    first = [answered(at, dataset="musique", hops=2 + at % 2, right=False) for at in range(10)]
    second = [answered(at, dataset="musique", hops=2 + at % 2, right=at % 2 == 1)
              for at in range(10)]  # fmt: skip
    found = compare(first, second)
    assert found.of(hops=2).difference.value == 0
    assert found.of(hops=3).difference.value == 1
    assert found.of(hops=3).n == 5


def test_the_average_weighs_sets_alike_and_says_which_are_there() -> None:
    first = [answered(at, dataset=name, right=False)
             for name, n in (("nq", 30), ("musique", 10)) for at in range(n)]  # fmt: skip
    second = [answered(at, dataset=name, right=name == "nq")
              for name, n in (("nq", 30), ("musique", 10)) for at in range(n)]  # fmt: skip
    found = compare(first, second)
    assert found.of().difference.value == pytest.approx(0.5)
    assert [row.part for row in found.rows if row.average] == ["mean, 2 of 7"] * len(found.metrics)


def test_only_metrics_that_both_sides_have_are_compared() -> None:
    first = [answered(at, golden_answers=None) for at in range(3)]
    second = [answered(at) for at in range(3)]
    found = compare(first, second)
    assert "exact_match" not in found.metrics
    assert "searches" in found.metrics
    with pytest.raises(ConfigError, match="exact_match"):
        compare(first, second, metrics=["exact_match"])


def test_nothing_in_common_is_an_error_that_shows_both() -> None:
    with pytest.raises(ConfigError, match="nq/1 and popqa/1"):
        compare([answered(1)], [answered(1, dataset="popqa")])


def test_a_row_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="hops 7"):
        compare([answered(1)], [answered(1)]).of(hops=7)


# --- measures of a rollout -----------------------------------------------------------------------


def test_searches_are_those_executed_and_repeats_and_empty_ones_are_counted() -> None:
    segments = (
        search("Who"), information("a"), search(" who "), information(), search("other"),
    )  # fmt: skip
    found = measures(answered(1, segments=segments))
    assert (found["searches"], found["duplicate_searches"], found["empty_searches"]) == (2, 1, 1)


def test_recall_grows_from_search_to_search_and_stays_when_no_more_are_made() -> None:
    rollout = answered(1, results=[["a"], ["x"], ["b"]], supporting_titles=("Title A", "title b"))
    found = measures(rollout, searches=4)
    assert [found[f"recall_titles_{at}"] for at in range(1, 5)] == [0.5, 0.5, 1.0, 1.0]
    assert "recall_titles_1" not in measures(answered(1, results=[["a"]]), searches=4)
    assert measures(answered(1, supporting_titles=("t",)), searches=1)["recall_titles_1"] == 0


def test_recorded_scores_count_and_missing_ones_are_computed() -> None:
    assert measures(answered(1, scores={"f1": 0.25}))["f1"] == 0.25
    assert measures(answered(1, right=False))["exact_match"] == 0
    assert measures(answered(1))["contains"] == 1


def test_an_environment_fault_measures_nothing() -> None:
    assert measures(failed(1)) == {}


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    generator = np.random.default_rng(0)
    paths = []
    for name, chance in (("a", 0.2), ("b", 0.6)):
        rollouts = policy_of_chances(np.full(60, chance), generator)
        rollouts += policy_of_chances(np.full(60, 0.5), generator, "2wikimultihopqa")
        path = tmp_path / f"{name}.jsonl"
        write_trajectories(path, rollouts)
        paths.append(str(path))
    return paths[0], paths[1]


def test_the_table_fits_80_columns(files: tuple[str, str], capsys: pytest.CaptureFixture) -> None:
    assert main(["compare", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[2:])) <= 80
    row = next(line for line in lines if line.startswith("nq "))
    assert row.split()[-2] == "*"


def test_json_holds_every_number_and_no_nan(
    files: tuple[str, str], capsys: pytest.CaptureFixture
) -> None:
    assert main(["compare", *files, "--metric", "all", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["paired"] == 120
    row = next(r for r in data["rows"] if r["metric"] == "exact_match" and r["dataset"] == "nq")
    assert row["low"] < row["difference"] < row["high"]
    assert row["differs"] is True
    flat = next(r for r in data["rows"] if r["metric"] == "format_ok")
    assert flat["low"] is None


def test_csv_has_a_row_a_number(files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert main(["compare", *files, "--metric", "f1", "--format", "csv", "-o", str(out)]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["part"] for row in rows] == ["nq", "2wikimultihopqa", "mean, 2 of 7"]
    assert math.isfinite(float(rows[0]["p_value"]))


def test_markdown_names_both_sides(files: tuple[str, str], capsys: pytest.CaptureFixture) -> None:
    assert main(["compare", *files, "--format", "markdown", "--metric", "exact_match"]) == 0
    out = capsys.readouterr().out
    assert files[0] in out
    assert "| nq | 60 |" in out


def run_with_evaluations(folder: Path) -> Path:
    (folder / "evaluations").mkdir(parents=True)
    (folder / "recipe.toml").write_text("name = 'x'\n")
    for step, right in ((0, False), (40, True)):
        rollouts = [answered(at, right=right) for at in range(8)]
        write_trajectories(folder / "evaluations" / f"step-{step:06d}.jsonl.gz", rollouts)
    return folder


def test_a_run_stands_for_its_last_evaluation_or_that_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = str(run_with_evaluations(tmp_path / "run"))
    assert main(["compare", f"{run}@0", run, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["difference"] == 1.0


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{run}@7", "no evaluation after step 7; it has those after 0, 40"),
        ("{run}@x", "no whole number"),
        ("nowhere", "does not exist"),
        ("{empty}", "neither an evaluation nor a run"),
        ("{bare}", "holds no evaluation"),
    ],
)
def test_a_side_that_cannot_be_read_is_one_line(
    second: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = run_with_evaluations(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "recipe.toml").touch()
    spec = second.format(run=run, empty=tmp_path / "empty", bare=tmp_path / "bare")
    assert main(["compare", str(run), spec]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_same_policy_with_two_seeds_is_reported_as_different_in_at_most_five_percent() -> None:
    generator = np.random.default_rng(1)
    cases, reported = 1500, {"nq": 0, "musique": 0, None: 0}
    for case in range(cases):
        chance = {
            name: generator.beta(0.5, 0.7, size=n) for name, n in (("nq", 40), ("musique", 25))
        }
        sides = [
            [t for name, c in chance.items() for t in policy_of_chances(c, generator, name)]
            for _ in range(2)
        ]
        found = compare(*sides, metrics=["exact_match"], seed=case, draws=1000)
        for name in reported:
            reported[name] += found.of(dataset=name).differs
    limit = 0.05 + 2 * math.sqrt(0.05 * 0.95 / cases)
    assert all(count / cases <= limit for count in reported.values()), reported
