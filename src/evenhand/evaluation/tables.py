"""Tables of evaluations and comparisons as Markdown, CSV and plain data."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evenhand.diagnostics.intervals import Estimate
from evenhand.diagnostics.paired import PairedDifference
from evenhand.evaluation.comparison import ComparedRow, Comparison
from evenhand.evaluation.measures import find_metric

NO_VALUE = "-"
"""What stands in a table where there is no number."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of texts.

    Attributes:
        columns: headings.
        rows: one text a column each.
        title: what stands above it.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


def markdown(table: TextTable) -> str:
    """Return the table in Markdown, the first column to the left, the others to the right."""
    lines = [f"**{table.title}**", ""] if table.title else []
    lines.append(_line(table.columns))
    lines.append(_line(["---"] + ["---:"] * (len(table.columns) - 1)))
    lines += [_line(row) for row in table.rows]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return comma-separated values; a number that there is not is an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if _is_nothing(v) else v for v in row] for row in rows])
    return out.getvalue()


def without_nan(value: Any) -> Any:
    """Return plain data in which numbers that are not finite are `None`, for JSON."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if _is_nothing(value) else value


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def number(value: float, digits: int, *, sign: bool = False) -> str:
    """Return a number, or `-` if there is none."""
    if not math.isfinite(value):
        return NO_VALUE
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def with_interval(estimate: Estimate, digits: int, *, sign: bool = False) -> str:
    """Return a value with its interval behind it, if it has one."""
    value = number(estimate.value, digits, sign=sign)
    if math.isnan(estimate.low):
        return value
    ends = (number(end, digits, sign=sign) for end in (estimate.low, estimate.high))
    return f"{value} [{', '.join(ends)}]"


# --- comparisons ---------------------------------------------------------------------------------

COMPARISON_FIELDS = (
    "metric", "part", "dataset", "hops", "average", "n", "first", "second", "difference", "low",
    "high", "p_value", "differs", "better", "worse", "ties",
)  # fmt: skip
"""Columns of a comparison in CSV, and fields of its rows in JSON."""


def comparison_tables(comparison: Comparison, *, narrow: bool = False) -> list[TextTable]:
    """Return one table a metric.

    Args:
        comparison: what to show.
        narrow: for 80 columns: without the p value, and ties alone instead of better/worse/ties.
    """
    last = ("ties",) if narrow else ("p", "better / worse / ties")
    columns = ("questions", "n", "A", "B", "B - A [95 %]", *last)
    return [
        TextTable(
            columns,
            tuple(_comparison_row(r, narrow) for r in comparison.rows if r.metric == metric),
            find_metric(metric).title,
        )
        for metric in comparison.metrics
    ]


def _comparison_row(row: ComparedRow, narrow: bool) -> tuple[str, ...]:
    digits, result = find_metric(row.metric).digits, row.result
    mark = " *" if result.differs else "  " if narrow else ""
    head = (row.part, f"{result.n}", number(result.first, digits), number(result.second, digits))
    difference = with_interval(result.difference, digits, sign=True) + mark
    if narrow:
        return (*head, difference, f"{result.ties}")
    counts = f"{result.better} / {result.worse} / {result.ties}"
    return (*head, difference, p_text(result), counts)


def p_text(result: PairedDifference) -> str:
    """Return a p value to three digits."""
    return "<0.001" if result.p_value < 0.001 else f"{result.p_value:.3f}"


def comparison_records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rows of a comparison as plain data, with `COMPARISON_FIELDS`."""
    records = []
    for row in comparison.rows:
        result = asdict(row.result)
        difference = result.pop("difference")
        records.append(
            {
                "metric": row.metric,
                "part": row.part,
                "dataset": row.dataset,
                "hops": row.hops,
                "average": row.average,
                **result,
                "n": difference["n"],
                "difference": difference["value"],
                "low": difference["low"],
                "high": difference["high"],
                "differs": row.result.differs,
            }
        )
    return [{name: record[name] for name in COMPARISON_FIELDS} for record in records]


def coverage_line(comparison: Comparison) -> str:
    """Return how many questions were compared and how many were left out, as one line."""
    parts = [f"{comparison.paired - comparison.failed} questions compared"]
    for count, what in (
        (comparison.only_first, "only in A"),
        (comparison.only_second, "only in B"),
        (comparison.failed, "left out (environment fault on a side)"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return ", ".join(parts)
