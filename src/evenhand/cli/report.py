"""`evenhand report`: what happened in one or more runs, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli.common import console
from evenhand.core.files import check_output


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders, or folders that hold them.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder that `evenhand eval` wrote; may be repeated.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write one self-contained page about runs: curves, strata, credit, alarms, evaluations.

    Runs whose recipes differ only in their seed are one series with an interval; others are series
    of the same plots. A run that is still being written can be reported on at any time.
    """
    from evenhand.pages.run_page import write_run_report

    check_output(out)
    for line in write_run_report(out, runs, evaluation or ()):
        console(err=True).print(f"note: {line}", style="yellow")
    console(err=True).print(f"wrote {out}")
