"""Strata over time: share, reward and advantage by number of searches, from credited rollouts."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.core.arrays import FloatArray, IntArray
from evenhand.core.errors import DataError
from evenhand.core.files import numbered_lines
from evenhand.diagnostics.intervals import NOTHING, Estimate, mean, share
from evenhand.pages.curves import Curve
from evenhand.pages.runs import Family, Run
from evenhand.training.run_folder import RunFolder

MAX_FILES = 60
"""Steps of a run whose rollouts are read, evenly spaced."""

BINS = 10
"""Points of a curve: rollouts of neighbouring steps are pooled."""

MIN_ROLLOUTS, MIN_GROUPS = 5, 4
"""A point needs so many rollouts, its interval so many questions: fewer say nothing."""

TOP_STRATUM = 6
"""This many searches and more are one stratum."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Columns of the rollouts of a family, one entry a rollout.

    Attributes:
        step: `[N]` training step.
        searches: `[N]` executed searches, at most `TOP_STRATUM`.
        reward: `[N]`, `nan` if unscored.
        advantage: `[N]` mean over its policy tokens, `nan` if there is none.
        cluster: `[N]` dense ids of the groups.
    """

    step: IntArray
    searches: IntArray
    reward: FloatArray
    advantage: FloatArray
    cluster: IntArray


def step_files(run: Run) -> list[tuple[int, Path]]:
    """Return the files of rollouts of a run with their steps, in order."""
    found = []
    try:
        names = list(RunFolder(run.path).trajectories.iterdir())
    except OSError:
        return []
    for path in names:
        number = path.name.removeprefix("step-").split(".")[0]
        if path.name.startswith("step-") and number.isdigit():
            found.append((int(number), path))
    return sorted(found)


def read_rollouts(family: Family) -> tuple[Rollouts, list[str]]:
    """Read the rollouts of a family; a file that cannot be read gives a note and is left out."""
    rows: list[tuple[int, int, float, float, int]] = []
    notes: list[str] = []
    clusters: dict[tuple[int, str], int] = {}
    for seed, run in enumerate(family.runs):
        files = step_files(run)
        if len(files) > MAX_FILES:
            at = np.linspace(0, len(files) - 1, MAX_FILES).round().astype(int)
            files = [files[i] for i in sorted(set(at.tolist()))]
        for step, path in files:
            number = 0
            try:
                for number, line in numbered_lines(path):  # noqa: B007 - named in the note below
                    row = _row(json.loads(line), step)
                    group = clusters.setdefault((seed, f"{step}/{row[0]}"), len(clusters))
                    rows.append((step, *row[1:], group))
            except DataError as error:
                notes.append(str(error))
            except (ValueError, TypeError, KeyError, RecursionError, zlib.error):
                notes.append(f"{path}, line {number}: not a rollout; the file was left out from "
                             "there on")  # fmt: skip
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    return (
        Rollouts(
            np.array(columns[0], dtype=np.int64),
            np.array(columns[1], dtype=np.int64),
            np.array(columns[2], dtype=np.float64),
            np.array(columns[3], dtype=np.float64),
            np.array(columns[4], dtype=np.int64),
        ),
        notes,
    )


def _row(data: dict[str, Any], step: int) -> tuple[str, int, float, float]:
    segments = data["segments"]
    kinds = [segment["kind"] for segment in segments]
    searches = sum(pair == ("search", "information") for pair in pairwise(kinds))
    credit = tokens = 0.0
    for segment in segments:
        if segment["source"] == "policy" and segment.get("advantage") is not None:
            credit += segment["advantage"] * segment["n_tokens"]
            tokens += segment["n_tokens"]
    reward = data["reward"]
    return (
        str(data.get("group", step)),
        min(searches, TOP_STRATUM),
        math.nan if reward is None else float(reward),
        credit / tokens if tokens else math.nan,
    )


def label(stratum: int) -> str:
    """Return how a stratum is called in legends."""
    if stratum >= TOP_STRATUM:
        return f"{stratum} or more searches"
    return "1 search" if stratum == 1 else f"{stratum} searches"


def curves(rollouts: Rollouts) -> dict[str, list[Curve]]:
    """Return curves of `share`, `reward` and `advantage`, one a stratum.

    Each point pools neighbouring steps and all seeds; intervals treat the groups as independent.
    """
    steps = np.unique(rollouts.step)
    edges = np.array_split(steps, min(BINS, len(steps))) if len(steps) else []
    inside = [(float(part.mean()), np.isin(rollouts.step, part)) for part in edges]
    found: dict[str, list[Curve]] = {"share": [], "reward": [], "advantage": []}
    scored = ~np.isnan(rollouts.reward)
    credited = ~np.isnan(rollouts.advantage)
    for stratum in np.unique(rollouts.searches).tolist():
        mine = rollouts.searches == stratum
        cells: dict[str, list[tuple[float, Estimate]]] = {name: [] for name in found}
        for x, part in inside:
            at = part & scored
            cells["share"].append((x, share(mine[at], _dense(rollouts.cluster[at]))))
            at = part & mine & scored
            cells["reward"].append((x, _mean(rollouts.reward[at], rollouts.cluster[at])))
            at = part & mine & credited
            cells["advantage"].append((x, _mean(rollouts.advantage[at], rollouts.cluster[at])))
        for name, estimates in cells.items():
            curve = _curve(stratum, estimates)
            if curve is not None:
                found[name].append(curve)
    return found


def _mean(values: FloatArray, cluster: IntArray) -> Estimate:
    if len(values) < MIN_ROLLOUTS:
        return NOTHING
    found = mean(values, _dense(cluster))
    if len(np.unique(cluster)) < MIN_GROUPS:
        return Estimate(found.value, math.nan, math.nan, found.n)
    return found


def _dense(ids: IntArray) -> IntArray:
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


def _curve(stratum: int, cells: Sequence[tuple[float, Estimate]]) -> Curve | None:
    kept = [(x, e.value, e.low, e.high) for x, e in cells if not math.isnan(e.value)]
    if not kept:
        return None
    table = np.array(kept, dtype=np.float64)
    return Curve(
        f"k{stratum}", label(stratum), table[:, 0], table[:, 1], table[:, 2], table[:, 3]
    )  # fmt: skip
