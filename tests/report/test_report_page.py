"""The report of runs: what stands on the page, whatever the folders hold."""

from __future__ import annotations

import html
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from evenhand.cli import main
from evenhand.core.errors import DataError
from evenhand.pages.curves import Curve, line_plot, over_seeds, points, smooth, window_for
from evenhand.pages.outcome import before_after, summary
from evenhand.pages.run_page import write_run_report
from evenhand.pages.runs import State, families, find_runs, read_run
from evenhand.pages.strata import curves, read_rollouts
from evenhand.trajectory import write_trajectories
from run_builder import group, write_alarms, write_results, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def page_of(*runs: Path, evaluations: tuple[Path, ...] = ()) -> str:
    out = runs[0].parent / "report.html"
    write_run_report(out, runs, evaluations)
    return out.read_text(encoding="utf-8")


def write_family(folder: Path, values: list[float], **settings: object) -> Path:
    for seed, value in enumerate(values):
        own = {"seed": seed, **settings}
        write_run(folder / f"seed-{seed}", after=value, settings=own, trajectories=False)
    return folder


# --- the page ------------------------------------------------------------------------------------


def test_a_page_loads_nothing_from_elsewhere(run: Path) -> None:
    page = page_of(run)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "@import" not in page
    assert "url(" not in page


def test_the_only_script_that_a_page_allows_is_its_own(run: Path) -> None:
    page = html.unescape(page_of(run))
    assert "script-src 'sha256-" in page
    assert "script-src 'unsafe-inline'" not in page
    assert page.count("<script") == 1


def test_markup_in_a_rollout_is_text(run: Path) -> None:
    evil = "<script>alert(1)</script>"
    write_trajectories(run / "trajectories/step-000006.jsonl.gz", group(6, 0, text=evil))
    page = page_of(run)
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_single_run_shows_curves_strata_credit_and_a_pair_of_rollouts(run: Path) -> None:
    page = page_of(run)
    for title in ("Learning", "Strata", "Credit balance", "Language and optimisation",
                  "Rollouts to read", "First and last evaluation"):  # fmt: skip
        assert f"<h2>{title}" in page
    assert page.count('class="card trajectory"') == 2


def test_an_alarm_stands_on_the_time_axis_and_in_the_table(run: Path) -> None:
    write_alarms(run)
    page = page_of(run)
    assert 'class="mark s0"' in page
    assert "raise balance" in page
    assert "Alarms: collapse in run, first at step 4." in page


def test_a_run_without_alarms_says_so(run: Path) -> None:
    assert "No alarm fired." in page_of(run)


def test_evaluation_folders_become_tables_with_intervals(run: Path, tmp_path: Path) -> None:
    page = page_of(run, evaluations=(write_results(tmp_path / "one"),))
    assert "0.400 [0.300, 0.500] of 100" in page
    assert "a-model" in page


def test_an_evaluation_with_hops_has_a_table_by_hops(run: Path, tmp_path: Path) -> None:
    folder = write_results(tmp_path / "one")
    results = json.loads((folder / "results.json").read_text())
    cell = {"value": 0.25, "low": 0.1, "high": 0.5, "n": 8}
    results["sets"]["hotpotqa"]["hops"] = {"1": {"exact_match": cell}, "2": {"f1": cell}}
    (folder / "results.json").write_text(json.dumps(results))
    page = page_of(run, evaluations=(folder,))
    assert "hotpotqa, 1 hop<" in page
    assert "0.250 [0.100, 0.500] of 8" in page


def test_a_damaged_evaluation_is_a_note(run: Path, tmp_path: Path) -> None:
    folder = write_results(tmp_path / "one")
    (folder / "results.json").write_text('{"sets": [1')
    page = page_of(run, evaluations=(folder, tmp_path / "none"))
    assert "cut or damaged" in page
    assert "no results.json" in page


def test_settings_that_differ_are_listed_and_equal_ones_are_not(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", trajectories=False)
    two = write_run(tmp_path / "two", settings={"loss": {"clip_high": 0.3}}, trajectories=False)
    page = page_of(one, two)
    assert "loss.clip_high" in page
    assert "loss.clip_low" not in page


def test_a_page_of_fifty_steps_takes_under_two_seconds_of_work(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=50, groups=32, settings={"steps": 50})
    write_run_report(tmp_path / "warm.html", [path])
    began = time.process_time()
    write_run_report(tmp_path / "report.html", [path])
    assert time.process_time() - began < 2.0


# --- broken, partial, still written --------------------------------------------------------------


def test_a_half_written_last_line_is_left_out_with_a_note(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "critic/sc')
    found = read_run(run)
    assert found.last_step == 6
    assert any("half written" in note for note in found.notes)
    page_of(run)


def test_damaged_lines_are_counted_and_the_others_kept(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2] = "{damaged"
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = read_run(run)
    assert [row["step"] for row in found.rows] == [0, 1, 3, 4, 5, 6]
    assert any("1 damaged line" in note for note in found.notes)


def test_figures_that_are_no_finite_numbers_are_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "actor/entropy": NaN, "critic/score/mean": "x", "a": 1}\n')
    assert read_run(run).rows[-1] == {"step": 7, "a": 1}


@pytest.mark.parametrize("name", ["recipe.toml", "versions.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", [None, "", "\x00{[", "[]"])
def test_a_missing_or_damaged_file_still_gives_a_page(
    run: Path, name: str, content: str | None
) -> None:
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    assert name in page_of(run) or content == "[]"


def test_a_damaged_file_of_rollouts_is_a_note(run: Path) -> None:
    file = run / "trajectories/step-000003.jsonl.gz"
    file.write_bytes(file.read_bytes()[:100])
    assert "step-000003.jsonl.gz" in page_of(run)


def test_alarms_that_cannot_be_read_are_a_note(run: Path) -> None:
    (run / "alarms.jsonl").write_text('{"step": 1}\n[]\n{"step": 2, "alarm": "x"}\n{"st')
    found = read_run(run)
    assert [alarm.step for alarm in found.alarms] == [2]
    assert any("2 damaged" in note for note in found.notes)


def test_a_run_with_missing_steps_is_running_then_stopped(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=4)
    assert read_run(path).state is State.RUNNING
    old = time.time() - 3600
    for file in path.iterdir():
        os.utime(file, (old, old))
    found = read_run(path)
    assert found.state is State.STOPPED
    assert any("--resume" in note for note in found.notes)


def test_a_run_before_its_first_step_gives_a_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=0)
    (path / "metrics.jsonl").write_text("")
    assert "no step was finished" in page_of(path)


def test_reading_writes_nothing_into_the_run(run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    write_run_report(tmp_path / "out.html", [run])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_path_without_a_run_beside_one_with_a_run_is_a_note(run: Path, tmp_path: Path) -> None:
    page = page_of(run, tmp_path / "nowhere")
    assert "nowhere: does not exist" in page


def test_an_evaluation_in_place_of_a_run_names_its_option(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "one")
    (folder / "evaluation.json").write_text("{}")
    with pytest.raises(DataError, match="is an evaluation; give a run, and this with --evaluation"):
        find_runs([folder])


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_only_paths_without_a_run_are_one_clear_error(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_text("")
    if kind == "empty":
        path.mkdir()
    assert main(["report", str(path), "-o", str(tmp_path / "r.html")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(path) in error


def test_the_command_writes_the_page_and_names_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    assert "wrote" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


# --- families and sentences ----------------------------------------------------------------------


def test_seeds_of_one_recipe_are_one_family_and_other_recipes_are_others(tmp_path: Path) -> None:
    write_family(tmp_path / "all/a", [0.5, 0.6])
    write_family(tmp_path / "all/b", [0.5], credit={"estimator": "rloo"})
    found = families([read_run(path) for path in find_runs([tmp_path / "all"])[0]])
    assert [(f.label, len(f.runs)) for f in found] == [("a", 2), ("b", 1)]


def test_families_with_one_name_get_different_labels(tmp_path: Path) -> None:
    write_family(tmp_path / "x/same", [0.5])
    write_family(tmp_path / "y/same", [0.5], credit={"estimator": "rloo"})
    found = families([read_run(p) for p in find_runs([tmp_path / "x", tmp_path / "y"])[0]])
    assert len({f.label for f in found}) == 2


def test_a_run_given_twice_counts_once(run: Path) -> None:
    assert find_runs([run, run])[0] == [run]


def test_no_runs_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="no run was given"):
        find_runs([])


def test_a_clear_rise_is_called_one_and_a_small_change_is_not(tmp_path: Path) -> None:
    clear = families([read_run(write_run(tmp_path / "a", after=0.9, trajectories=False))])
    small = families([read_run(write_run(tmp_path / "b", after=0.35, trajectories=False))])
    assert "rose from 0.300" in summary(clear)[0]
    assert "went from 0.300" in summary(small)[0]


def test_a_change_over_seeds_has_an_interval_paired_by_seed(tmp_path: Path) -> None:
    write_family(tmp_path / "a", [0.5, 0.6, 0.7])
    (family,) = families([read_run(p) for p in find_runs([tmp_path / "a"])[0]])
    exact = before_after(family)[0]
    assert exact.after.value == pytest.approx(0.6)
    assert exact.change.value == pytest.approx(0.3)
    # t(2) * sd / sqrt(3), sd = 0.1
    assert exact.change.high - exact.change.value == pytest.approx(4.302653 * 0.1 / 3**0.5)


def test_two_families_are_compared_at_the_last_common_step(tmp_path: Path) -> None:
    write_family(tmp_path / "all/a", [0.5, 0.5, 0.55])
    write_family(tmp_path / "all/b", [0.8, 0.8, 0.9], credit={"estimator": "rloo"})
    found = families([read_run(p) for p in find_runs([tmp_path / "all"])[0]])
    text = summary(found)[-2]
    assert "b is highest (0.833), ahead of a by 0.317" in text
    assert "paired by seed" in text


def test_single_seeds_are_not_ranked(tmp_path: Path) -> None:
    write_family(tmp_path / "all/a", [0.5])
    write_family(tmp_path / "all/b", [0.8], credit={"estimator": "rloo"})
    found = families([read_run(p) for p in find_runs([tmp_path / "all"])[0]])
    assert "nothing can be said against a" in summary(found)[-2]


# --- curves and strata ---------------------------------------------------------------------------


def test_the_mean_over_seeds_has_students_interval() -> None:
    x = np.array([1.0, 2.0])
    curve = over_seeds([(x, np.array([1.0, 2.0])), (x, np.array([3.0, 2.0]))], style="s0",
                       label="a")  # fmt: skip
    assert curve is not None
    np.testing.assert_allclose(curve.y, [2.0, 2.0])
    np.testing.assert_allclose(curve.high, [2 + 12.706205 * 2**0.5 / 2**0.5, 2.0])


def test_a_seed_that_ended_early_leaves_the_later_steps_to_the_others() -> None:
    one = (np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    two = (np.array([1.0]), np.array([3.0]))
    curve = over_seeds([one, two], style="s0", label="a")
    assert curve is not None
    np.testing.assert_allclose(curve.y, [2.0, 1.0])
    assert np.isnan(curve.low[1])


def test_smoothing_keeps_a_straight_line() -> None:
    x = np.arange(20.0)
    np.testing.assert_allclose(smooth((x, 3 * x), 5)[1], 3 * x)
    assert window_for(10) == 1
    assert window_for(100) == 5


def test_figures_of_steps_without_it_are_passed_over() -> None:
    x, y = points([{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": 4.0}], "a")
    np.testing.assert_array_equal(x, [1, 3])
    np.testing.assert_array_equal(y, [2, 4])


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [0.0, 0.0], [1e-9, 1e9]])
@pytest.mark.parametrize("log", [False, True])
def test_plots_of_degenerate_curves_hold_finite_numbers(values: list[float], log: bool) -> None:
    y = np.array(values)
    nothing = np.full(len(y), np.nan)
    curve = Curve("s0", "a", np.arange(1.0, len(y) + 1), y, nothing, nothing)
    svg = line_plot([curve], title="t", log=log)
    assert "nan" not in svg
    assert "inf" not in svg.replace("information", "")


def test_what_the_script_reads_is_escaped_json() -> None:
    y = np.array([1.0, 2.0])
    curve = Curve("s0", '"><script>', np.array([1.0, 2.0]), y, y, y)
    svg = str(line_plot([curve], title="t"))
    assert "<script>" not in svg
    data = re.search('data-plot="([^"]*)"', svg)
    assert data is not None
    label = json.loads(data.group(1).replace("&#34;", '"').replace("&gt;", ">").replace(
        "&lt;", "<"))["curves"][0]["label"]  # fmt: skip
    assert label == '"><script>'


def test_strata_pool_seeds_and_add_up_to_all_rollouts(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", groups=4)
    (family,) = families([read_run(path)])
    rollouts, notes = read_rollouts(family)
    assert notes == []
    assert len(rollouts.step) == 6 * 4 * 4
    found = curves(rollouts)
    shares = {curve.label: curve.y for curve in found["share"]}
    np.testing.assert_allclose(sum(shares.values()), 1.0)
    # Of four rollouts two have no search: one right (A = 1), one wrong (A = -1).
    np.testing.assert_allclose(shares["0 searches"], 0.5)
    advantage = {curve.label: curve.y for curve in found["advantage"]}
    np.testing.assert_allclose(advantage["0 searches"], 0.0, atol=1e-12)
