"""Tables of evaluations and comparisons as Markdown, CSV and plain data."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evenhand.diagnostics.intervals import Estimate
from evenhand.diagnostics.paired import PairedDifference
from evenhand.evaluation.comparison import ComparedRow, Comparison
from evenhand.evaluation.measures import RECALL, find_metric
from evenhand.evaluation.sets import Average
from evenhand.evaluation.summary import estimate_of

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


# --- results -------------------------------------------------------------------------------------

Results = Mapping[str, Any]
"""What `evenhand.evaluation.summary.summarise` returns."""

_PLAIN_COLUMNS = ("exact_match", "f1", "contains", "searches", "duplicate_searches",
                  "empty_searches", "format_ok", "tokens", "seconds")  # fmt: skip
_WITH_INTERVAL = ("exact_match", "f1", "contains")

RESULT_FIELDS = ("part", "dataset", "hops", "average", "metric", "value", "low", "high", "n")
"""Columns of `table.csv`."""


def result_parts(results: Results) -> list[tuple[str, str | None, int | None, str | None, Any]]:
    """Return the parts of the results: `(title, dataset, hops, average, metrics)`."""
    parts: list[tuple[str, str | None, int | None, str | None, Any]] = []
    for name, block in results["sets"].items():
        figures = {key: value for key, value in block.items() if key != "hops"}
        parts.append((name, name, None, None, figures))
        for hops, inner in block.get("hops", {}).items():
            parts.append((f"{name}, hops {hops}", name, int(hops), None, inner))
    for name, figures in results["averages"].items():
        over = results["average_sets"][name]
        title = Average(name, tuple(over["sets"]), tuple(over["missing"])).title
        parts.append((title, None, None, name, figures))
    return parts


def results_table(results: Results, *, narrow: bool = False) -> TextTable:
    """Return the table of an evaluation.

    Args:
        results: of `summarise`.
        narrow: for 80 columns: exact match with its interval, F1, searches, format.
    """
    names = ("exact_match", "f1", "searches", "format_ok") if narrow else _PLAIN_COLUMNS
    spans = ("exact_match",) if narrow else _WITH_INTERVAL
    rows = []
    for title, dataset, _, _, figures in result_parts(results):
        n = figures["exact_match"]["n"]
        cells = [title, f"{n}", *(_cell(figures.get(x), x, x in spans) for x in names)]
        if not narrow:
            recalls = [key for key in figures if key.startswith(RECALL)]
            cells.append(_recall(figures, recalls))
            cells.append(_missing(results, dataset, title))
        rows.append(tuple(cells))
    heads = [find_metric(name).title for name in names]
    more = [] if narrow else ["title recall after each search", "not counted"]
    return TextTable(("questions", "n", *heads, *more), tuple(rows))


def _cell(plain: Mapping[str, Any] | None, name: str, span: bool) -> str:
    if plain is None:
        return NO_VALUE
    estimate, digits = estimate_of(plain), find_metric(name).digits
    return with_interval(estimate, digits) if span else number(estimate.value, digits)


def _recall(figures: Mapping[str, Any], names: Sequence[str]) -> str:
    values = [number(estimate_of(figures[name]).value, 2) for name in names]
    if not values:
        return NO_VALUE
    return f"{', '.join(values)} (n {figures[names[0]]['n']})"


def _missing(results: Results, dataset: str | None, title: str) -> str:
    """Return what is not in n: environment faults, and questions that could not be asked."""
    if dataset is None or title != dataset:
        return ""
    counts = {"failed": results["excluded"][dataset], **results["left_out"][dataset]}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def missing_lines(results: Results) -> list[str]:
    """Return one line for each set of which something is not in n."""
    texts = {name: _missing(results, name, name) for name in results["sets"]}
    return [f"{name}: {text} (not counted in n)" for name, text in texts.items() if text]


def results_files(results: Results) -> dict[str, str]:
    """Return `table.md` and `table.csv`."""
    head = f"Model: `{results['model']}`"
    if results["baseline"]:
        head += f", baseline: {results['baseline']}"
    unit = results["tokens_unit"]
    note = (
        "Shares with 95 % Wilson intervals, F1 with Student's t; means are unweighted over sets; "
        f"searches, tokens ({unit}) and seconds are a question."
    )
    rows = [
        (title, dataset, hops, average, name, each["value"], each["low"], each["high"], each["n"])
        for title, dataset, hops, average, figures in result_parts(results)
        for name, each in figures.items()
    ]
    return {
        "table.md": f"{head}\n\n{markdown(results_table(results))}\n{note}\n",
        "table.csv": as_csv(RESULT_FIELDS, rows),
    }
