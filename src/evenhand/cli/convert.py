"""`evenhand convert`: rollouts that other projects wrote -> our trajectory file."""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from evenhand.convert import FORMATS, open_trajectories
from evenhand.errors import EvenhandError
from evenhand.files import STANDARD_STREAM
from evenhand.trajectory import Trajectory, write_lines, write_trajectories

PROGRESS_AFTER = 1.0
"""Seconds of work after which progress is shown."""


def convert(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="IN...", help="Rollout files; - is standard input."),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="OUT", help="File to write; - is standard output."),
    ],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help=f"Format of the input: {', '.join(FORMATS)}. Recognised when left out.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A tokenizer.json, or its folder, that counts tokens where the input does not.",
        ),
    ] = None,
) -> None:
    """Convert rollouts of other projects into a trajectory file."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    summary = _Summary()
    try:
        opened = open_trajectories(inputs, source=source, tokenizer=tokenizer)
        trajectories = summary.watch(_with_progress(opened, console))
        if output == STANDARD_STREAM:
            _write_to_standard_output(trajectories)
        else:
            write_trajectories(output, trajectories)
    except EvenhandError as error:
        console.print(f"error: {error}", markup=False, style="red")
        raise typer.Exit(2) from None
    console.print(f"{summary} -> {output}", markup=False)


class _Summary:
    """What passed by, for the line that ends the command."""

    def __init__(self) -> None:
        self.count = self.unscored = self.without_answers = 0
        self.groups: set[int] = set()
        self.formats: Counter[str] = Counter()
        self.units: Counter[str] = Counter()

    def watch(self, trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
        for trajectory in trajectories:
            self.count += 1
            self.unscored += trajectory.reward is None
            self.without_answers += trajectory.golden_answers is None
            self.groups.add(hash(trajectory.group))
            self.formats[str(trajectory.metadata.get("source_format", "evenhand"))] += 1
            self.units[str(trajectory.metadata.get("n_tokens_unit", "tokens"))] += 1
            yield trajectory

    def __str__(self) -> str:
        parts = [
            f"{self.count} trajectories in {len(self.groups)} groups",
            "format " + ", ".join(self.formats),
            "n_tokens in " + " and ".join(self.units),
        ]
        if self.unscored:
            parts.append(f"{self.unscored} without a reward")
        if self.without_answers:
            parts.append(f"{self.without_answers} without accepted answers")
        return "; ".join(parts)


def _with_progress(trajectories: Iterable[Trajectory], console: Console) -> Iterator[Trajectory]:
    """Pass trajectories on; on a terminal, show how many once that takes longer than a second."""
    if not console.is_terminal:
        yield from trajectories
        return
    shown = time.monotonic() + PROGRESS_AFTER
    with console.status("") as status:
        status.stop()
        for number, trajectory in enumerate(trajectories, start=1):
            now = time.monotonic()
            if now >= shown:
                status.start()
                status.update(f"{number} trajectories")
                shown = now + 0.2
            yield trajectory


def _write_to_standard_output(trajectories: Iterable[Trajectory]) -> None:
    # The locale's encoding may not hold every character; the file format is UTF-8 everywhere.
    text = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="\n", write_through=True)
    try:
        write_lines(text, trajectories)
    finally:
        text.detach()
