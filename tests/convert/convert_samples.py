"""The hand-made samples, one a format, and what they should come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenhand.convert import open_trajectories
from evenhand.trajectory import Kind, Trajectory

DATA = Path(__file__).parents[1] / "data" / "convert"
SHARED = Path(__file__).parents[2] / "../shared/data/rollouts"

SAMPLES = {
    "searchr1": "searchr1.jsonl",
    "calibadv": "rollout_12.json",
    "verl": "7.jsonl",
    "trl": "trl_text.json",
    "nemo-rl": "train_data_step3.jsonl",
}


def converted(name: str) -> list[Trajectory]:
    return list(open_trajectories(DATA / name))


def kinds(trajectory: Trajectory) -> list[str]:
    return [segment.kind.value for segment in trajectory.segments]


def documents(trajectory: Trajectory) -> list[list[tuple[str, str]]]:
    return [
        [(document.title, document.text) for document in segment.documents or ()]
        for segment in trajectory.segments
        if segment.kind is Kind.INFORMATION
    ]


def write_parquet(path: Path, rows: str) -> Path:
    """Write the rows of a JSON sample as a parquet table, as TRL does."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(json.loads((DATA / rows).read_text("utf-8")))
    parquet.write_table(table, path)
    return path


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
