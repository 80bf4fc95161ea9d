"""What `evenhand train` says at the end of a run: what changed, what it cost, where things are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from evenhand.cli.common import console, plain_table
from evenhand.cli.compare import LEGEND, rich_table
from evenhand.core.errors import EvenhandError
from evenhand.evaluation import Comparison, compare
from evenhand.evaluation.tables import comparison_tables, coverage_line, with_interval
from evenhand.training.run_folder import RunFolder
from evenhand.trajectory import read_trajectories

REPORT = "report.html"
"""Name of the page in the folder of a run or of a family of runs."""

_METRICS = ("exact_match", "searches")


@dataclass(frozen=True, slots=True)
class Clock:
    """When work began: `Clock.start()`, later `clock.text()`.

    Attributes:
        wall: seconds of the machine's clock.
        cpu: seconds that this process has computed on all its threads.
    """

    wall: float
    cpu: float

    @classmethod
    def start(cls) -> Clock:
        """Return the time now."""
        return cls(time.perf_counter(), time.process_time())

    def text(self) -> str:
        """Return how long it took."""
        wall = time.perf_counter() - self.wall
        return f"{_minutes(wall)} on the clock, {time.process_time() - self.cpu:.0f} CPU seconds"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


@dataclass(frozen=True, slots=True)
class Change:
    """The first and the last evaluation of a run, question by question.

    Attributes:
        first: step of the first.
        last: step of the last.
        comparison: exact match and searches, last minus first.
    """

    first: int
    last: int
    comparison: Comparison


def change_of(run: RunFolder) -> Change | None:
    """Compare the first evaluation of a run with its last; `None` if there are no two.

    Raises:
        EvenhandError: a file of theirs is damaged.
    """
    steps = run.evaluated_steps()
    if len(steps) < 2:
        return None
    sides = [read_trajectories(run.evaluation_path(step)) for step in (steps[0], steps[-1])]
    found = compare(*sides)
    rows = tuple(row for row in found.rows if row.metric in _METRICS)
    return Change(steps[0], steps[-1], replace(found, rows=rows))


def show_summary(run: RunFolder, clock: Clock) -> None:
    """Print what changed, the cost of this process, and where the run and its report are."""
    screen = console()
    with _warning("no comparison of evaluations"):
        change = change_of(run)
        if change is not None:
            _show_change(screen, change)
    screen.print(f"took: {clock.text()}")
    screen.print(f"run folder: {run.path}", soft_wrap=True)
    _write_report(screen, run.path / REPORT, [run.path])


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """The run itself is whole: what cannot be shown must not look like a failed training."""
    try:
        yield
    except EvenhandError as error:
        console(err=True).print(f"warning: {what}: {error}", style="yellow", soft_wrap=True)


def _write_report(screen: Console, page: Path, folders: Sequence[Path]) -> None:
    from evenhand.pages.run_page import write_run_report

    with _warning("no report"):
        for line in write_run_report(page, folders):
            console(err=True).print(f"note: {line}", style="yellow", soft_wrap=True)
        screen.print(f"report with plots: {page}", soft_wrap=True)


def _show_change(screen: Console, change: Change) -> None:
    screen.print()
    screen.print(
        f"held-out questions before (A, step {change.first}) and after (B, step {change.last}): "
        f"{coverage_line(change.comparison)}",
        soft_wrap=True,
    )
    for table in comparison_tables(change.comparison, narrow=True):
        screen.print()
        screen.print(rich_table(table))
    screen.print()
    screen.print(LEGEND)


def show_family(folder: Path, runs: Sequence[tuple[int, RunFolder]]) -> None:
    """Print one line a seed, with the paired interval, and the median over seeds; write a report.

    Args:
        folder: of the family; its report goes there.
        runs: seeds and their runs.
    """
    screen = console()
    table = plain_table("seed", "exact match", "after", "paired difference [95 %]", "n", "searches",
                        "after")  # fmt: skip
    gains = []
    for seed, run in runs:
        change = None
        with _warning(f"no comparison of evaluations of seed {seed}"):
            change = change_of(run)
        if change is None:
            continue
        exact, searches = (change.comparison.of(metric) for metric in _METRICS)
        gains.append(exact.difference.value)
        difference = exact.difference
        table.add_row(
            str(seed),
            f"{exact.first:.3f}",
            f"{exact.second:.3f}",
            with_interval(difference, 3, sign=True),
            f"{difference.n:,}",
            f"{searches.first:.2f}",
            f"{searches.second:.2f}",
        )
    if gains:
        screen.print()
        screen.print(table)
        screen.print(f"median gain in exact match over {len(gains)} seeds: {median(gains):+.3f}")
    _write_report(screen, folder / REPORT, [run.path for _, run in runs])
