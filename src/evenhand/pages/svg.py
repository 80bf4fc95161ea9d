"""Small inline SVG plots. Colours come from the page's CSS, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from evenhand.diagnostics.intervals import Estimate

ROW = 26
LABEL = 136
WIDTH = 500
VALUE = 138
"""Pixels of the viewBox: height of a row, width of labels, of the plot, of the value column."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels, linearly or by logarithm.

    Attributes:
        low: value at the left end.
        high: value at the right end.
        log: whether equal factors have equal lengths.
    """

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values outside land on the nearer end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        plot = WIDTH - LABEL - VALUE
        return LABEL + plot * ((at - low) / (high - low) if high > low else 0.5)

    def ticks(self) -> list[float]:
        """Return three to six round values inside the scale."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            reach = self.high / self.low
            fine = (1, 1.5, 2, 3, 5, 7) if reach < 6 else (1, 2, 5)
            steps = fine if reach < 30 else (1, 3) if reach < 500 else (1,)
            values = [step * 10.0**decade for decade in decades for step in steps]
            return [value for value in values if self.low <= value <= self.high]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step = 10.0 ** math.floor(math.log10(span))
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if span / s <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _finite(estimates: Sequence[Estimate]) -> list[float]:
    ends = [end for e in estimates for end in (e.value, e.low, e.high)]
    return [end for end in ends if math.isfinite(end)]


def linear_scale(estimates: Sequence[Estimate], *, low: float, high: float) -> Scale:
    """Return a scale over `[low, high]`, widened to hold every estimate with its interval."""
    ends = [low, high, *_finite(estimates)]
    return Scale(min(ends), max(ends))


def ratio_scale(estimates: Sequence[Estimate]) -> Scale:
    """Return a logarithmic scale around 1 that holds every positive estimate."""
    ends = [end for end in _finite(estimates) if end > 0]
    reach = max([2.0, *(max(end, 1 / end) for end in ends)])
    reach = min(reach, 1000.0)
    return Scale(1 / reach, reach, log=True)


def interval_rows(
    rows: Sequence[tuple[str, Estimate, str]],
    scale: Scale,
    *,
    title: str,
    reference: float | None = None,
) -> Markup:
    """Draw one dot with its 95 % interval a row.

    Args:
        rows: label, estimate, and the text that stands at the end of the row.
        scale: of the horizontal axis.
        title: said to screen readers.
        reference: value of a vertical line.
    """
    height = ROW * len(rows) + 24
    parts = [_axis(scale, height)]
    if reference is not None:
        x = scale(reference)
        parts.append(
            f'<line class="reference" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 20}"/>'
        )
    for at, (label, estimate, text) in enumerate(rows):
        y = ROW * at + ROW / 2
        parts.append(_label(label, y))
        if math.isfinite(estimate.value):
            if math.isfinite(estimate.low):
                parts.append(
                    f'<line class="interval" x1="{scale(estimate.low):.1f}" '
                    f'x2="{scale(estimate.high):.1f}" y1="{y}" y2="{y}"/>'
                )
            parts.append(f'<circle class="dot" cx="{scale(estimate.value):.1f}" cy="{y}" r="4.5"/>')
        parts.append(_value(text, y))
    return _svg(parts, height, title)


def bar_rows(rows: Sequence[tuple[str, float, str]], *, title: str, high: float) -> Markup:
    """Draw one bar from 0 a row.

    Args:
        rows: label, length, and the text that stands at the end of the row.
        title: said to screen readers.
        high: value at the right end of the axis.
    """
    scale = Scale(0.0, high or 1.0)
    height = ROW * len(rows)
    parts = []
    for at, (label, length, text) in enumerate(rows):
        y = ROW * at + ROW / 2
        width = scale(length) - scale(0.0)
        parts.append(_label(label, y))
        parts.append(
            f'<rect class="bar" x="{LABEL}" y="{y - 8}" width="{width:.1f}" height="16" rx="2"/>'
        )
        parts.append(_value(text, y))
    return _svg(parts, height, title)


def chance_plot(share: float, expected: float, low: float, high: float) -> Markup:
    """Draw a share beside its expectation and 95 % range by chance."""
    scale = Scale(0.0, 1.0)
    height = 58
    y = 18.0
    parts = [
        _axis(scale, height),
        f'<rect class="band" x="{scale(low):.1f}" y="{y - 10}" '
        f'width="{scale(high) - scale(low):.1f}" height="20" rx="3"/>',
        f'<line class="reference" x1="{scale(expected):.1f}" x2="{scale(expected):.1f}" '
        f'y1="{y - 10}" y2="{y + 10}"/>',
        f'<circle class="dot" cx="{scale(share):.1f}" cy="{y}" r="5.5"/>',
        _label("between strata", y),
        _value(f"{share:.3f}, chance {expected:.3f}", y),
    ]
    return _svg(parts, height, "Reward variance between strata and its chance level")


def _axis(scale: Scale, height: float) -> str:
    parts = []
    for tick in scale.ticks():
        x = scale(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 20}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 6}">{tick:g}</text>')
    return "".join(parts)


def _label(text: str, y: float) -> str:
    return _text("label", LABEL - 10, y, text, 19)


def _value(text: str, y: float) -> str:
    return _text("value", WIDTH - VALUE + 10, y, text, 22)


def _text(kind: str, x: float, y: float, text: str, room: int) -> str:
    """A text that is shortened to `room` characters; the whole of it shows on hovering."""
    short = text if len(text) <= room else text[: room - 1] + "…"
    title = "" if short == text else f"<title>{escape(text)}</title>"
    return f'<text class="{kind}" x="{x}" y="{y + 4}">{title}{escape(short)}</text>'


def _svg(parts: Sequence[str], height: float, title: str) -> Markup:
    # Every text above went through `escape`; numbers are formatted here.
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
