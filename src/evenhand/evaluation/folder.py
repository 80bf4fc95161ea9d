"""The folder of an evaluation on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evenhand.errors import DataError
from evenhand.trajectory import Trajectory, read_trajectories

MANIFEST = "evaluation.json"
TRAJECTORIES = "trajectories"


def is_evaluation(path: Path) -> bool:
    """Whether a folder was written by an evaluation."""
    return (path / MANIFEST).is_file()


def read_evaluation(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of an evaluation, set by set.

    Raises:
        DataError: there are none, or a file is damaged.
    """
    files = sorted((path / TRAJECTORIES).glob("*.jsonl"))
    if not files:
        raise DataError(
            f"{path} holds no trajectories yet; wait for the evaluation, or run it again"
        )
    for file in files:
        yield from read_trajectories(file)
