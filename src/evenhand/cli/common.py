"""What commands share: options, consoles, progress."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from evenhand.core.files import STANDARD_STREAM
from evenhand.core.settings import split_setting
from evenhand.trajectory import Trajectory, write_lines, write_trajectories

T = TypeVar("T")

PROGRESS_AFTER = 1.0
"""Seconds of work before a progress line appears."""

Input = Annotated[
    Path,
    typer.Argument(
        help="Rollouts in any known format; - reads standard input.", show_default=False
    ),
]
Inputs = Annotated[
    list[Path],
    typer.Argument(help="Files of rollouts in any known format.", show_default=False),
]
Source = Annotated[
    str | None,
    typer.Option("--from", help="Format of the input; recognised when left out.", metavar="NAME"),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="tokenizer.json (or its folder) to count tokens a dump does not give."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting; may be repeated.", metavar="KEY=VALUE"),
]
InMemory = Annotated[
    bool,
    typer.Option("--in-memory", help="Read everything first: groups may then be scattered."),
]


def read_settings(settings: list[str] | None) -> dict[str, str]:
    """Read repeated `key=value`; a later one wins."""
    return dict(split_setting(text) for text in settings or [])


def console(*, err: bool = False) -> Console:
    """Return a console: colours on a terminal, plain text of any length into a pipe.

    What files say is shown as it is: rich's markup and emoji codes are off.
    """
    stream = sys.stderr if err else sys.stdout
    # A pipe has no width: rows stay on one line each, so that they can be cut and searched.
    width = None if stream.isatty() else 1000
    return Console(stderr=err, width=width, highlight=False, markup=False, emoji=False)


def plain_table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table: the first column to the left, the others to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for at, column in enumerate(columns):
        first = at == 0
        justify: Literal["left", "right"] = "left" if first else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=first)
    return table


def write_to(out: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write trajectories to a file that appears whole, or line by line to standard output (`-`)."""
    if out != STANDARD_STREAM:
        write_trajectories(out, trajectories)
        return
    # The locale's encoding may not hold every character; the file format is UTF-8 everywhere.
    text = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="\n")
    try:
        write_lines(text, trajectories)
        text.flush()
    finally:
        text.detach()


def with_progress(items: Iterable[T], noun: str) -> Iterator[T]:
    """Yield `items`; after a second of work show on standard error how many went by.

    Nothing is shown if standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:,.0f} " + noun),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = progress.add_task(noun, total=None, rate=0.0)
    started = shown = time.monotonic()
    try:
        for count, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            if now - shown > 0.1:
                shown = now
                progress.update(task, completed=count, rate=count / (now - started))
                if now - started > PROGRESS_AFTER and not progress.live.is_started:
                    progress.start()
    finally:
        progress.stop()


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return `text` with U+FFFD for control characters, which could drive a terminal.

    Tabs and line feeds stay.
    """
    return _CONTROLS.sub("\ufffd", text)
