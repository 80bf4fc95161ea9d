"""The audit as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.diagnostics.audit import Audit, EstimatorRow, Example
from evenhand.diagnostics.findings import language_rows, number, percent, plain
from evenhand.diagnostics.intervals import Estimate
from evenhand.pages.render import write_page
from evenhand.pages.svg import (
    bar_rows,
    chance_plot,
    interval_rows,
    linear_scale,
    ratio_scale,
)
from evenhand.pages.trajectory import trajectory_view


def write_audit_page(path: Path, audit: Audit, files: Sequence[str]) -> None:
    """Write the page of an audit.

    Args:
        path: where; the page appears whole or not at all.
        audit: the figures.
        files: names of the files that were read, shown at the top.
    """
    write_page(
        path,
        "audit.html.j2",
        audit=audit,
        files=files,
        plots=_plots(audit),
        tiles=_tiles(audit),
        rows=_rows(audit),
        percent=percent,
        language=language_rows(audit),
        unit=" and ".join(audit.units),
        examples=[_example(example) for example in audit.examples],
    )


def _tiles(audit: Audit) -> list[tuple[str, str, str]]:
    groups = audit.groups
    low, middle, high = audit.group_size
    size = f"{low}" if low == high else f"{low}–{high}, median {middle:g}"
    everything = audit.policy_tokens + audit.environment_tokens
    share = 100 * audit.policy_tokens / everything if everything else 0.0
    return [
        ("rollouts", f"{audit.trajectories:,}", f"{groups.total:,} groups of {size}"),
        (
            "groups that can teach",
            f"{groups.effective:,}",
            f"{groups.too_hard:,} too hard, {groups.too_easy:,} too easy, "
            f"{groups.lone + groups.unscored:,} other",
        ),
        (
            "mean reward",
            _value(audit.reward, 3),
            f"{_interval(audit.reward, 3)}; {percent(audit.success)} reach {audit.threshold:g}",
        ),
        (
            "searches a rollout",
            _value(audit.searches, 2),
            f"{_interval(audit.searches, 2)}, n {audit.searches.n:,}",
        ),
        (
            "format obeyed",
            f"{100 * audit.format_ok.value:.1f} %" if audit.format_ok.n else "unknown",
            percent(audit.format_ok).partition(" % ")[2],
        ),
        (
            f"policy {' / '.join(audit.units)}",
            f"{audit.policy_tokens:,}",
            f"{share:.0f} % of {everything:,}; the rest is the environment's",
        ),
    ]


def _value(estimate: Estimate, digits: int) -> str:
    return "unknown" if math.isnan(estimate.value) else plain(estimate.value, digits)


def _interval(estimate: Estimate, digits: int) -> str:
    return number(estimate, digits).partition(" ")[2] or "no interval"


def _plots(audit: Audit) -> dict[str, Any]:
    rewards = [row.reward for row in audit.strata]
    between = audit.between
    plots: dict[str, Any] = {
        "strata_share": bar_rows(
            [
                (str(row.label), row.share.value, f"{100 * row.share.value:.1f} %")
                for row in audit.strata
                if row.share.n
            ],
            title="Share of rollouts by stratum",
            high=max((row.share.value for row in audit.strata if row.share.n), default=1.0),
        ),
        "strata_reward": interval_rows(
            [(str(row.label), row.reward, number(row.reward)) for row in audit.strata],
            linear_scale(rewards, low=0.0, high=1.0),
            title="Mean reward by stratum",
        ),
        "chance": None,
        "step_scores": None,
    }
    if not math.isnan(between.share):
        plots["chance"] = chance_plot(between.share, between.expected, between.low, between.high)
    if len(audit.step_scores):
        plots["step_scores"] = _step_scores(audit)
    for name in ("search", "answer"):
        estimates = [getattr(row, f"{name}_ratio") for row in audit.estimators]
        plots[f"{name}_ratio"] = interval_rows(
            [(row.name, e, number(e)) for row, e in zip(audit.estimators, estimates, strict=True)],
            ratio_scale(estimates),
            title=f"Negative over positive credit: {name} segments",
            reference=1.0,
        )
    return plots


def _step_scores(audit: Audit) -> Any:
    scores = audit.step_scores
    edges = [("0", scores == 0)]
    for low, high in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
        edges.append((f"over {low:g} to {high:g}", (scores > low) & (scores <= high)))
    shares = [(label, float(np.mean(inside)), int(inside.sum())) for label, inside in edges]
    return bar_rows(
        [(label, share, f"{100 * share:.1f} % ({count:,})") for label, share, count in shares],
        title="Step scores of searches",
        high=max(share for _, share, _ in shares),
    )


def _rows(audit: Audit) -> list[dict[str, Any]]:
    largest = max((abs(value) for row in audit.estimators for value in row.by_stratum), default=0.0)
    return [_row(row, largest) for row in audit.estimators]


def _row(row: EstimatorRow, largest: float) -> dict[str, Any]:
    shades = [
        (
            f"{value:+.2f}".replace("-0.00", "0.00").replace("+0.00", "0.00"),
            "pos" if value > 0 else "neg",
            round(70 * abs(value) / (largest or 1)),
        )
        for value in row.by_stratum
    ]
    return {
        "name": row.name,
        "live": f"{100 * row.live.value:.1f} %" if row.live.n else "–",
        "mis_penalised": percent(row.mis_penalised),
        "kept": "–" if math.isnan(row.penalty_kept) else f"{row.penalty_kept:.2f}",
        "total": number(row.total_ratio),
        "shades": shades,
    }


def _example(example: Example) -> dict[str, Any]:
    return {
        "view": trajectory_view(example.trajectory, silver=example.silver),
        "penalty": example.penalty,
    }
