"""From the rollouts of an evaluation to its figures: what `results.json` holds.

Policy faults count as wrong, environment faults are left out and counted beside n. Shares get
Wilson intervals, means those of Student's t, and averages over sets combine the sets' intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evenhand.diagnostics.intervals import NOTHING, Estimate, mean, proportion
from evenhand.evaluation.measures import METRICS, RECALL, SECONDS, measures
from evenhand.evaluation.sets import averages, in_order
from evenhand.trajectory import StopReason, Trajectory

SCHEMA = "evenhand.results/1"

BATCH = "batch"
"""Key of `Trajectory.metadata`: which questions were asked together."""

_UNIT = ("exact_match", "f1", "contains", "format_ok")
"""Metrics in [0, 1]."""

Figures = dict[str, Estimate]
"""Metric to its estimate."""


def figures(trajectories: Sequence[Trajectory]) -> Figures:
    """Return the metrics of the rollouts of a set, one rollout a question.

    `recall_titles_j` is over the questions whose supporting titles are known, `j` up to the most
    searches that a rollout made. The interval of `seconds` takes the batch as the unit.
    """
    scored = [t for t in trajectories if t.stop_reason is not StopReason.FAILED]
    most = max((len(t.executed_searches()) for t in scored), default=0)
    rows = [measures(t, searches=max(most, 1)) for t in scored]
    names = [name for name in METRICS if name != SECONDS]
    names += sorted(
        {name for row in rows for name in row if name.startswith(RECALL)},
        key=lambda name: int(name.removeprefix(RECALL)),
    )
    found = {name: _estimate(name, [r[name] for r in rows if name in r]) for name in names}
    timed = [
        (row[SECONDS], t.metadata.get(BATCH, t.id))
        for row, t in zip(rows, scored, strict=True)
        if SECONDS in row
    ]
    if timed:
        batch = np.unique([str(each) for _, each in timed], return_inverse=True)[1]
        found[SECONDS] = mean(np.array([value for value, _ in timed]), batch)
    return found


def _estimate(name: str, values: Sequence[float]) -> Estimate:
    array = np.array(values, dtype=np.float64)
    whole = set(np.unique(array).tolist()) <= {0.0, 1.0}
    if name in METRICS and METRICS[name].is_share and whole:
        return proportion(int(array.sum()), len(array))
    found = mean(array, np.arange(len(array)))
    if not (name in _UNIT or name.startswith(RECALL)):
        return found
    # Student's interval knows no bounds; a score has them.
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))


def average(parts: Sequence[Estimate]) -> Estimate:
    r"""Return the unweighted average of independent estimates with an interval.

    .. math:: \bar\theta - \tfrac1K \sqrt{\textstyle\sum (\theta_k - l_k)^2},\quad
              \bar\theta + \tfrac1K \sqrt{\textstyle\sum (u_k - \theta_k)^2}

    which keeps the lopsided ends of Wilson intervals. A part without an interval (it showed no
    variation) adds no width; if no part has one, the average has none. A part without a value makes
    the average one without a value. `n` is the sum.

    Source: Zou and Donner 2008 ("square and add", after Newcombe 1998).
    """
    if not parts:
        return NOTHING
    n = sum(part.n for part in parts)
    value = float(np.mean([part.value for part in parts]))
    known = [part for part in parts if not math.isnan(part.low)]
    if not known or math.isnan(value):
        return Estimate(value, math.nan, math.nan, n)
    below = math.sqrt(sum((part.value - part.low) ** 2 for part in known)) / len(parts)
    above = math.sqrt(sum((part.high - part.value) ** 2 for part in known)) / len(parts)
    return Estimate(value, value - below, value + above, n)


def summarise(
    by_set: Mapping[str, Sequence[Trajectory]],
    *,
    model: str,
    baseline: str | None = None,
    left_out: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """Return the figures of an evaluation as plain data; a number that there is not is `None`.

    Args:
        by_set: the rollouts of each set.
        model: name of the model.
        baseline: what answered instead of the agent, if something did.
        left_out: questions of a set that could not be asked, by reason.

    The result: `sets`, each a metric to `value`, `low`, `high`, `n`, with the same by number of
    hops under `hops` where a set has several; `averages` over the sets that have a scored question
    (`average_sets` names them and those that are missing); `excluded`, the environment faults of
    each set; `left_out`; `tokens_unit`, what tokens are counted in.
    """
    names = in_order(by_set)
    by_name = {name: figures(by_set[name]) for name in names}
    over = averages(name for name in names if by_name[name]["exact_match"].n)
    units = {str(t.metadata.get("n_tokens_unit", "tokens")) for name in names for t in by_set[name]}
    return {
        "schema": SCHEMA,
        "model": model,
        "baseline": baseline,
        "sets": {name: _plain(by_name[name]) | _hops(by_set[name]) for name in names},
        "averages": {
            each.name: _plain(_average([by_name[name] for name in each.sets])) for each in over
        },
        "average_sets": {
            each.name: {"sets": list(each.sets), "missing": list(each.missing)} for each in over
        },
        "excluded": {
            name: sum(t.stop_reason is StopReason.FAILED for t in by_set[name]) for name in names
        },
        "left_out": {name: dict((left_out or {}).get(name, {})) for name in names},
        "tokens_unit": ", ".join(sorted(units)) or "tokens",
    }


def _average(parts: Sequence[Figures]) -> Figures:
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: average([part[name] for part in parts]) for name in shared}


def _hops(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    by_hops: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.hops is not None:
            by_hops.setdefault(trajectory.hops, []).append(trajectory)
    if len(by_hops) < 2:
        return {}
    return {"hops": {str(hops): _plain(figures(by_hops[hops])) for hops in sorted(by_hops)}}


def _plain(found: Figures) -> dict[str, Any]:
    return {
        name: {
            "value": _finite(each.value),
            "low": _finite(each.low),
            "high": _finite(each.high),
            "n": each.n,
        }
        for name, each in found.items()
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def estimate_of(plain: Mapping[str, Any]) -> Estimate:
    """Return the estimate that `results.json` holds as plain data."""
    value, low, high = (math.nan if plain[key] is None else float(plain[key])
                        for key in ("value", "low", "high"))  # fmt: skip
    return Estimate(value, low, high, int(plain["n"]))
