"""`evenhand compare`: two evaluations of the same questions, paired."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli.common import console, plain_table, with_progress
from evenhand.core.errors import ConfigError, DataError
from evenhand.core.files import STANDARD_STREAM, atomic_write
from evenhand.evaluation import Comparison, compare
from evenhand.evaluation.folder import is_evaluation, read_evaluation
from evenhand.evaluation.tables import (
    COMPARISON_FIELDS,
    TextTable,
    as_csv,
    comparison_records,
    comparison_tables,
    coverage_line,
    markdown,
    without_nan,
)
from evenhand.training.run_folder import RunFolder
from evenhand.trajectory import Trajectory, read_trajectories

MAIN_METRICS = ("exact_match", "f1", "searches", "format_ok")
"""Compared if no metric is asked for, as far as both sides have them."""

LEGEND = (
    "Means are unweighted over sets. * marks a difference: the interval excludes 0\n"
    "and the sign-flip test gives p <= 0.05."
)


class Format(StrEnum):
    """How a table is written."""

    TABLE = "table"
    """For a terminal, within 80 columns."""
    MARKDOWN = "markdown"
    """For a page."""
    CSV = "csv"
    """One row a number, all digits."""
    JSON = "json"
    """The same as one object."""


Side = typer.Argument(
    help="An evaluation folder, a file of trajectories, or a run (its last evaluation; RUN@STEP "
    "for that of a step).",
    show_default=False,
)


def compare_command(
    first: Annotated[str, Side],
    second: Annotated[str, Side],
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            help="May be repeated; all for every one. Default: exact match, F1, searches, format.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How to write it.")] = Format.TABLE,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="File to write; - is standard output.")
    ] = STANDARD_STREAM,
    seed: Annotated[int, typer.Option(min=0, help="Of the resamples.")] = 0,
) -> None:
    """Say whether the second evaluation is better than the first, question by question."""
    found = _compare(_read(first), _read(second), metrics, seed)
    if form is Format.TABLE and out == STANDARD_STREAM:
        _show(found, first, second)
        return
    text = _text(found, first, second, form)
    if out == STANDARD_STREAM:
        typer.echo(text, nl=False)
        return
    with atomic_write(out) as file:
        file.write(text)


def _compare(
    first: Iterable[Trajectory], second: Iterable[Trajectory], metrics: list[str] | None, seed: int
) -> Comparison:
    asked = None if not metrics or "all" in metrics else metrics
    found = compare(with_progress(first, "rollouts"), second, metrics=asked, seed=seed)
    if metrics:
        return found
    return replace(found, rows=tuple(row for row in found.rows if row.metric in MAIN_METRICS))


def _read(spec: str) -> Iterable[Trajectory]:
    path, step = Path(spec), None
    if not path.exists() and "@" in spec:
        name, _, number = spec.rpartition("@")
        if not number.isdigit():
            raise ConfigError(f"the step in {spec!r} is no whole number; write RUN@40")
        path, step = Path(name), int(number)
    if path.is_file():
        return read_trajectories(path)
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give an evaluation folder, a file of trajectories "
                        "or a run")  # fmt: skip
    if is_evaluation(path):
        if step is not None:
            raise ConfigError(f"{path} is an evaluation and has no steps; leave out @{step}")
        return read_evaluation(path)
    return read_trajectories(_file_of_run(path, step))


def _file_of_run(path: Path, step: int | None) -> Path:
    run = RunFolder(path)
    if not run.recipe_path.is_file():
        raise DataError(f"{path} is neither an evaluation nor a run: it has no evaluation.json and "
                        "no recipe.toml")  # fmt: skip
    steps = run.evaluated_steps()
    if not steps:
        raise DataError(f"the run {path} holds no evaluation; train with evaluation.every set and "
                        "tracking.trajectories on, or use evenhand eval --model RUN")  # fmt: skip
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise DataError(f"the run {path} has no evaluation after step {step}; it has those after "
                        f"{', '.join(map(str, steps))}")  # fmt: skip
    return run.evaluation_path(step)


def _show(found: Comparison, first: str, second: str) -> None:
    screen = console()
    screen.print(f"A  {first}\nB  {second}", soft_wrap=True)
    screen.print(coverage_line(found))
    for table in comparison_tables(found, narrow=True):
        screen.print()
        screen.print(rich_table(table))
    screen.print()
    screen.print(LEGEND)


def rich_table(table: TextTable) -> object:
    """Return a table for the console."""
    made = plain_table(*table.columns, title=table.title or None)
    for row in table.rows:
        made.add_row(*row)
    return made


def _text(found: Comparison, first: str, second: str, form: Format) -> str:
    records = comparison_records(found)
    if form is Format.CSV:
        return as_csv(COMPARISON_FIELDS, [list(record.values()) for record in records])
    if form is Format.JSON:
        data = {
            "first": first,
            "second": second,
            "paired": found.paired,
            "only_first": found.only_first,
            "only_second": found.only_second,
            "failed": found.failed,
            "rows": records,
        }
        return json.dumps(without_nan(data), indent=1, ensure_ascii=False) + "\n"
    tables = "\n".join(markdown(table) for table in comparison_tables(found))
    head = f"A: `{first}`, B: `{second}`. {coverage_line(found)}.\n"
    return f"{head}\n{tables}\n{LEGEND.replace('*', chr(92) + '*', 1)}\n"
