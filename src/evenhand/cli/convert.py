"""`evenhand convert`: rollouts that other projects wrote -> our trajectory file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli.common import Inputs, Source, Tokenizer, console, with_progress, write_to
from evenhand.convert import open_trajectories
from evenhand.core.files import STANDARD_STREAM
from evenhand.trajectory import Trajectory


def convert(
    files: Inputs,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", show_default=False,
            help="Where to write the trajectories (.gz compresses); - is standard output.",
        ),
    ],
    source: Source = None,
    tokenizer: Tokenizer = None,
) -> None:  # fmt: skip
    """Convert rollouts of other projects into one trajectory file.

    Known formats: evenhand, nemo-rl, verl, trl (parquet), calibadv, searchr1. What was read goes to
    standard error as one line.
    """
    tally = Tally()
    opened = open_trajectories(files, source=source, tokenizer=tokenizer)
    trajectories = tally.over(with_progress(opened, "rollouts"))
    write_to(out, trajectories)
    wrote = "" if out == STANDARD_STREAM else f"; wrote {out}"
    console(err=True).print(f"{tally}{wrote}", markup=False)


@dataclass
class Tally:
    """Counts what passes by, for the line that ends the command."""

    rollouts: int = 0
    unscored: int = 0
    without_answers: int = 0
    groups: set[int] = field(default_factory=set)
    formats: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)

    def over(self, trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
        """Pass trajectories on, counting them."""
        for trajectory in trajectories:
            self.rollouts += 1
            self.unscored += trajectory.reward is None
            self.without_answers += trajectory.golden_answers is None
            # Hashes instead of the names: 8 bytes each on files of many millions of lines.
            self.groups.add(hash(trajectory.group))
            self.formats.add(str(trajectory.metadata.get("source_format", "evenhand")))
            self.units.add(str(trajectory.metadata.get("n_tokens_unit", "tokens")))
            yield trajectory

    def __str__(self) -> str:
        parts = [
            f"{self.rollouts:,} rollouts in {len(self.groups):,} groups",
            "from " + " and ".join(sorted(self.formats)),
            "n_tokens in " + " and ".join(sorted(self.units)),
        ]
        if self.unscored:
            parts.append(f"{self.unscored:,} without a reward")
        if self.without_answers:
            parts.append(f"{self.without_answers:,} without accepted answers")
        return "; ".join(parts)
