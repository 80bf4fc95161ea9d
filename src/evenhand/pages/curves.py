"""Figures over training steps: curves with intervals, drawn as inline SVG.

A family of runs is one curve: its mean over seeds with a 95 % interval (Student's t over the
seeds), each seed as a faint line. Colours are classes (`s0`, `s1`, ...; `k0`, ... for strata), so
that pages can switch a series off and follow light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from evenhand.core.arrays import FloatArray
from evenhand.diagnostics.intervals import t95
from evenhand.pages.svg import Scale

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 26
"""Pixels of the viewBox and its margins."""

MAX_POINTS = 240
"""Longer curves are averaged in bins of equal width."""

Points = tuple[FloatArray, FloatArray]
"""Steps `[P]` in increasing order and values `[P]`."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot.

    Attributes:
        style: CSS class of its colour.
        label: said in the legend and on hovering.
        x: `[P]` steps in increasing order.
        y: `[P]` values.
        low: `[P]` lower ends of the 95 % intervals, `nan` where there is none.
        high: `[P]` upper ends.
        members: faint lines below it, one a seed.
    """

    style: str
    label: str
    x: FloatArray
    y: FloatArray
    low: FloatArray
    high: FloatArray
    members: tuple[Points, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a step.

    Attributes:
        step: where.
        style: CSS class of its colour, that of the series it belongs to.
        text: shown on hovering.
    """

    step: float
    style: str
    text: str


def points(rows: Sequence[Mapping[str, float]], name: str) -> Points:
    """Return the steps that have a figure and its values."""
    found = [(float(row["step"]), float(row[name])) for row in rows if name in row]
    table = np.array(found, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def window_for(steps: float) -> int:
    """Return over how many steps figures of single batches are smoothed: a twentieth, odd."""
    return max(1, 2 * round(steps / 40) + 1) if steps >= 20 else 1


def smooth(line: Points, window: int) -> Points:
    """Return the centred moving mean over `window` points; shorter at the ends."""
    x, y = line
    if window <= 1 or len(y) < 3:
        return line
    half = window // 2
    sums = np.concatenate(([0.0], np.cumsum(y)))
    at = np.arange(len(y))
    # The reach is the same to both sides, so that the ends are not dragged inwards.
    reach = np.minimum(half, np.minimum(at, len(y) - 1 - at))
    return x, (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)


def over_seeds(
    lines: Sequence[Points], *, style: str, label: str, window: int = 1, faint: bool = True
) -> Curve | None:
    """Return the mean of lines with its 95 % interval, at every step that one of them has.

    The interval is `mean +/- t s / sqrt(n)` over the lines that have the step, none for one line.

    Args:
        lines: one a seed.
        style: CSS class of the colour.
        label: of the curve.
        window: of `smooth`, applied to each line before anything else.
        faint: keep the lines themselves, not smoothed, as members.
    """
    thin = [shorten(line) for line in lines if len(line[0])]
    if not thin:
        return None
    smoothed = [smooth(line, window) for line in thin]
    x = np.unique(np.concatenate([line[0] for line in smoothed]))
    table = np.full((len(smoothed), len(x)), math.nan)
    for row, (at, y) in zip(table, smoothed, strict=True):
        row[np.searchsorted(x, at)] = y
    there = ~np.isnan(table)
    n = there.sum(axis=0)
    y = np.where(there, table, 0.0).sum(axis=0) / n
    spread = np.where(there, (table - y) ** 2, 0.0).sum(axis=0)
    quantile = np.array([t95(int(count) - 1) for count in n])
    half = np.full(len(x), math.nan)
    several = n > 1
    half[several] = quantile[several] * np.sqrt(spread[several] / (n - 1)[several] / n[several])
    members = tuple(thin) if faint and (len(thin) > 1 or window > 1) else ()
    return Curve(style, label, x, y, y - half, y + half, members)


def shorten(line: Points) -> Points:
    """Return at most `MAX_POINTS` points: means over bins of neighbours."""
    x, y = line
    if len(x) <= MAX_POINTS:
        return line
    edges = np.linspace(0, len(x), MAX_POINTS + 1).astype(np.int64)[:-1]
    size = np.diff(np.append(edges, len(x)))
    return x[edges], np.add.reduceat(y, edges) / size


@dataclass(frozen=True, slots=True)
class _Frame:
    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> tuple[float, float]:
        span = self.x.high - self.x.low
        left = LEFT + (WIDTH - LEFT - RIGHT) * ((x - self.x.low) / span if span > 0 else 0.5)
        return left, TOP + (HEIGHT - TOP - BOTTOM) * (1 - self.share(y))

    def share(self, y: float) -> float:
        low, high, y = self.y.low, self.y.high, min(max(y, self.y.low), self.y.high)
        if self.y.log:
            low, high, y = math.log(low), math.log(high), math.log(y)
        return (y - low) / (high - low) if high > low else 0.5


def line_plot(
    curves: Sequence[Curve],
    *,
    title: str,
    unit: tuple[float | None, float | None] = (None, None),
    log: bool = False,
    marks: Sequence[Mark] = (),
    reference: float | None = None,
) -> Markup:
    """Draw curves over steps.

    Args:
        curves: at least one, each with a point.
        title: said to screen readers.
        unit: values that the vertical axis includes at least, and ends at where intervals
            go beyond (a share: 0 and 1); `None` leaves an end to the data.
        log: logarithmic vertical axis; values that are not positive lie on its lower end.
        marks: vertical lines.
        reference: value of a horizontal line.
    """
    frame = _frame(curves, unit, log, reference)
    parts = [_grid(frame)]
    if reference is not None:
        _, y = frame.at(0, reference)
        parts.append(f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
                     f'y1="{y:.1f}" y2="{y:.1f}"/>')  # fmt: skip
    for mark in marks:
        x, _ = frame.at(mark.step, frame.y.low)
        parts.append(
            f'<g class="mark {mark.style}"><title>{escape(mark.text)}</title>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<path d="M{x - 5:.1f} {TOP - 8}h10l-5 8z"/></g>'
        )
    parts += [_curve(curve, frame) for curve in curves]
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    return Markup(
        f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" data-plot="{escape(_data(curves, frame))}">'
        f"{''.join(parts)}</svg>"
    )


def _frame(
    curves: Sequence[Curve], unit: tuple[float | None, float | None], log: bool,
    reference: float | None,
) -> _Frame:  # fmt: skip
    x = np.concatenate([curve.x for curve in curves])
    y = np.concatenate([line for c in curves for line in (c.y, *(m[1] for m in c.members))])
    y = y[np.isfinite(y) & ((y > 0) | (not log))]
    low, high = (float(y.min()), float(y.max())) if len(y) else (0.5, 1.0)
    if reference is not None:
        low, high = min(low, reference), max(high, reference)
    # Intervals may widen the axis, by half its height at most: two seeds have very wide ones.
    ends = np.concatenate([end for c in curves for end in (c.low, c.high)])
    ends = ends[np.isfinite(ends)]
    if len(ends) and not log:
        reach = 0.5 * ((high - low) or abs(high) or 1.0)
        low = max(float(min(ends.min(), low)), low - reach)
        high = min(float(max(ends.max(), high)), high + reach)
    if unit[0] is not None:
        low = unit[0]
    if unit[1] is not None:
        high = unit[1]
    if log:
        low, high = low / 1.1, high * 1.1
    elif high <= low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    else:
        margin = 0.04 * (high - low)
        low = low if unit[0] is not None else low - margin
        high = high if unit[1] is not None else high + margin
    return _Frame(Scale(float(x.min()), float(x.max())), Scale(low, high, log=log))


def _grid(frame: _Frame) -> str:
    parts = []
    for tick in frame.y.ticks():
        _, y = frame.at(0, tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick left" x="{LEFT - 6}" y="{y + 4:.1f}">{_short(tick)}</text>'
        )
    for tick in frame.x.ticks():
        if tick != round(tick):
            continue
        x, _ = frame.at(tick, frame.y.low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}">{tick:g}</text>')
    return "".join(parts)


def _short(value: float) -> str:
    if abs(value) >= 1e4:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"
    return f"{value:.3g}"


def _curve(curve: Curve, frame: _Frame) -> str:
    parts = [f'<g class="series {curve.style}">']
    for bottom, top, x in _stretches(curve):
        up = [frame.at(a, b) for a, b in zip(x, top, strict=True)]
        down = [frame.at(a, b) for a, b in zip(x, bottom, strict=True)][::-1]
        if len(x) == 1:
            (left, high), (_, low) = up[0], down[0]
            parts.append(f'<path class="whisker" d="M{left:.1f} {high:.1f}V{low:.1f}"/>')
        else:
            parts.append(f'<path class="range" d="{_path([*up, *down])}Z"/>')
    for x, y in curve.members:
        parts.append(f'<path class="member" d="{_line(frame, x, y)}"/>')
    parts.append(f'<path class="line" d="{_line(frame, curve.x, curve.y)}"/>')
    if len(curve.x) <= 12:
        for across, up_to in (frame.at(a, b) for a, b in zip(curve.x, curve.y, strict=True)):
            parts.append(f'<circle class="point" cx="{across:.1f}" cy="{up_to:.1f}" r="3"/>')
    return "".join(parts) + "</g>"


def _stretches(curve: Curve) -> list[tuple[FloatArray, FloatArray, FloatArray]]:
    """Return low, high and steps of each run of neighbouring points that have an interval."""
    there = np.flatnonzero(np.isfinite(curve.low) & np.isfinite(curve.high))
    if not len(there):
        return []
    cuts = np.flatnonzero(np.diff(there) > 1) + 1
    return [(curve.low[p], curve.high[p], curve.x[p]) for p in np.split(there, cuts)]


def _line(frame: _Frame, x: FloatArray, y: FloatArray) -> str:
    return _path([frame.at(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)])


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners) if corners else ""


def _data(curves: Sequence[Curve], frame: _Frame) -> str:
    """What the page's script needs to show values on hovering."""

    def values(line: FloatArray) -> list[float | None]:
        return [float(f"{v:.4g}") if math.isfinite(v) else None for v in line.tolist()]

    return json.dumps(
        {
            "x": [frame.x.low, frame.x.high, LEFT, WIDTH - RIGHT, WIDTH],
            "curves": [
                {
                    "style": curve.style,
                    "label": curve.label,
                    "x": values(curve.x),
                    "y": values(curve.y),
                    "low": values(curve.low) if np.isfinite(curve.low).any() else None,
                    "high": values(curve.high) if np.isfinite(curve.high).any() else None,
                }
                for curve in curves
            ],
        },
        separators=(",", ":"),
    )
