"""The report of runs as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from evenhand.diagnostics.findings import number
from evenhand.pages.curves import Curve, Mark, line_plot, over_seeds, points, window_for
from evenhand.pages.evaluations import evaluation_tables
from evenhand.pages.examples import examples
from evenhand.pages.outcome import before_after, summary
from evenhand.pages.render import write_page
from evenhand.pages.runs import (
    Family,
    differing_settings,
    families,
    find_runs,
    read_run,
)
from evenhand.pages.strata import curves, read_rollouts

SERIES = 8
"""Colours of series; further ones begin again."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot of the report.

    Attributes:
        title: above it.
        name: of the figure in `metrics.jsonl`.
        low: vertical axis includes this value.
        high: vertical axis includes this value.
        log: logarithmic axis.
        reference: horizontal line.
        note: one line below it.
    """

    title: str
    name: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    reference: float | None = None
    note: str = ""


LEARNING = (
    Figure("Exact match, held-out questions", "eval/exact_match", 0, 1, note="greedy answers"),
    Figure("Reward", "critic/score/mean", note="sampled training rollouts"),
    Figure("Exact match, training rollouts", "rollouts/exact_match", 0, 1, note="sampled"),
    Figure("Searches a question, held-out", "eval/searches", 0, note="greedy answers"),
    Figure("Searches a rollout", "rollouts/searches", 0, note="sampled training rollouts"),
    Figure("F1, held-out questions", "eval/f1", 0, 1, note="greedy answers"),
)
HEALTH = (
    Figure("Entropy", "actor/entropy", 0, note="nats a token, estimated from what was sampled"),
    Figure("Response length", "response_length/mean", 0, note="policy tokens a rollout"),
    Figure("Format obeyed", "rollouts/format_ok", None, 1, note="share of rollouts"),
    Figure("Gradient norm", "actor/grad_norm", 0, note="before clipping"),
    Figure("Garbled segments", "language/garbled", 0, note="perplexity 50 or more"),
    Figure("Repeated queries", "language/repeated_queries", 0, note="share of searches"),
    Figure("Clipped tokens", "actor/pg_clipfrac", 0, note="share, upper clip"),
    Figure("KL to the reference", "actor/kl_loss", 0),
    Figure("Groups that can teach", "groups/effective", 0, note="their rewards differ"),
)
CREDIT = (
    Figure("Negative over positive credit, all", "credit/negative_to_positive/all",
           log=True, reference=1, note="token mass; 1 is balanced"),
    Figure("Negative over positive, searches", "credit/negative_to_positive/search",
           log=True, reference=1, note="token mass; 1 is balanced"),
    Figure("Negative over positive, answers", "credit/negative_to_positive/answer",
           log=True, reference=1, note="token mass; 1 is balanced"),
    Figure("Correct searches punished", "credit/mis_penalised", 0, 1,
           note="share of searches that found silver documents"),
    Figure("Reward between strata", "strata/between", 0, 1,
           note="share of the variance inside questions; chance is in the next plot"),
    Figure("Reward between strata, by chance", "strata/between_by_chance", 0, 1,
           note="expectation when strata are shuffled inside groups"),
)  # fmt: skip
_KNOWN = {figure.name for figure in (*LEARNING, *HEALTH, *CREDIT)}
_NEVER_ZERO_PLOTS = {"language/garbled", "language/repeated_queries", "actor/pg_clipfrac",
                     "actor/kl_loss"}  # fmt: skip
"""Figures without a plot when they are 0 throughout."""


def write_run_report(
    path: Path, runs: Sequence[Path], evaluations: Sequence[Path] = ()
) -> list[str]:
    """Write the report of runs: one file that loads nothing from elsewhere.

    Runs whose recipes differ only in their seed are one series. Whatever of a run folder cannot be
    read stands as a note on the page. About one second of work for 50 steps of 128 rollouts.

    Args:
        path: the HTML file; it appears whole or not at all.
        runs: run folders, or folders that hold them (`seed-0`, `seed-1`, ...).
        evaluations: folders that `evenhand eval` wrote.

    Returns:
        The notes on the page.

    Raises:
        DataError: no path leads to a run, or the file cannot be written.
    """
    folders, notes = find_runs(runs)
    found = [read_run(folder) for folder in folders]
    groups = families(found)
    notes += [note for run in found for note in run.notes]
    strata = list(_strata(groups, notes))
    tables, more = evaluation_tables(evaluations)
    marks = _marks(groups)
    shown = examples(groups)
    write_page(
        path,
        "report.html.j2",
        title=_title(groups),
        summary=summary(groups),
        notes=[*notes, *more],
        families=[(f"s{at % SERIES}", family) for at, family in enumerate(groups)],
        rows=_run_rows(groups),
        learning=_figures(groups, LEARNING, marks),
        health=_figures(groups, HEALTH, marks),
        credit=_figures(groups, CREDIT, marks),
        others=_others(groups, marks),
        window=window_for(max((run.last_step for run in found), default=0)),
        strata=strata,
        alarms=[(_style(groups, f), f.label, run.path.name, alarm) for f in groups
                for run in f.runs for alarm in run.alarms],
        before_after=[(family, before_after(family)) for family in groups],
        evaluations=tables,
        examples=shown,
        settings=differing_settings(groups),
        recipe=_recipe(groups),
        versions=_versions(groups),
        number=number,
    )  # fmt: skip
    return [*notes, *more]


def _title(groups: Sequence[Family]) -> str:
    runs = sum(len(family.runs) for family in groups)
    if len(groups) == 1:
        return groups[0].label + (f", {runs} seeds" if runs > 1 else "")
    return f"{len(groups)} recipes, {runs} runs"


def _style(groups: Sequence[Family], family: Family) -> str:
    return f"s{next(at for at, f in enumerate(groups) if f is family) % SERIES}"


def _marks(groups: Sequence[Family]) -> list[Mark]:
    return [
        Mark(alarm.step, _style(groups, family), f"step {alarm.step}: {alarm.alarm} in "
             f"{family.label}, {run.path.name}: {alarm.message}")
        for family in groups for run in family.runs for alarm in run.alarms
    ]  # fmt: skip


def _figures(
    groups: Sequence[Family], figures: Sequence[Figure], marks: Sequence[Mark]
) -> list[tuple[Figure, Markup]]:
    made = []
    for figure in figures:
        plot = _plot(groups, figure, marks)
        if plot is not None:
            made.append((figure, plot))
    return made


def _plot(
    groups: Sequence[Family], figure: Figure, marks: Sequence[Mark], *, faint: bool = True
) -> Markup | None:
    found = []
    for at, family in enumerate(groups):
        curve = _curve(family, figure.name, f"s{at % SERIES}", faint=faint)
        if curve is not None:
            found.append(curve)
    if not found:
        return None
    if figure.name in _NEVER_ZERO_PLOTS and not any(curve.y.any() for curve in found):
        return None
    return line_plot(
        found,
        title=figure.title,
        unit=(figure.low, figure.high),
        log=figure.log,
        marks=marks,
        reference=figure.reference,
    )


def _curve(family: Family, name: str, style: str, *, faint: bool) -> Curve | None:
    lines = [points(run.rows, name) for run in family.runs]
    is_evaluation = name.startswith("eval/")
    # Figures of an evaluation come from many questions each: they are not smoothed.
    window = 1 if is_evaluation else window_for(max(len(line[0]) for line in lines))
    curve = over_seeds(lines, style=style, label=family.label, window=window, faint=faint)
    if curve is None or len(family.runs) > 1 or name != "eval/exact_match":
        return curve
    rows = family.runs[0].rows
    low, high = points(rows, f"{name}_low"), points(rows, f"{name}_high")
    if len(low[0]) != len(curve.x) or len(high[0]) != len(curve.x):
        return curve
    return Curve(style, family.label, curve.x, curve.y, low[1], high[1], curve.members)


def _others(groups: Sequence[Family], marks: Sequence[Mark]) -> list[tuple[Figure, Markup]]:
    """Plot every figure that has no place above and is not the same number throughout."""
    names = sorted({n for f in groups for run in f.runs for row in run.rows for n in row} - _KNOWN)
    made = []
    for name in names:
        if name == "step" or name.endswith(("_low", "_high", "/n", "exact_match_n")):
            continue
        values = {row[name] for f in groups for run in f.runs for row in run.rows if name in row}
        if len(values) < 2:
            continue
        plot = _plot(groups, Figure(name, name), marks, faint=False)
        if plot is not None:
            made.append((Figure(name, name), plot))
    return made


def _strata(
    groups: Sequence[Family], notes: list[str]
) -> Iterator[tuple[Family, list[tuple[str, str, Markup]], list[tuple[str, str]]]]:
    titles = (
        ("share", "Share of rollouts", "by number of searches"),
        ("reward", "Mean reward", "by number of searches"),
        ("advantage", "Mean advantage", "where the credit pushes"),
    )
    for family in groups:
        rollouts, problems = read_rollouts(family)
        notes += problems
        found = curves(rollouts)
        marks = [
            Mark(alarm.step, "alarm", f"step {alarm.step}: {alarm.alarm}")
            for run in family.runs for alarm in run.alarms
        ]  # fmt: skip
        plots = []
        for name, title, note in titles:
            if found[name]:
                unit = (0.0, 1.0) if name == "share" else (None, None)
                reference = 0.0 if name == "advantage" else None
                plots.append((title, note, line_plot(
                    found[name], title=f"{title} of {family.label}", unit=unit, marks=marks,
                    reference=reference)))  # fmt: skip
        if plots:
            yield family, plots, [(curve.style, curve.label) for curve in found["share"]]


def _run_rows(groups: Sequence[Family]) -> list[dict[str, Any]]:
    rows = []
    for family in groups:
        for run in family.runs:
            exact = run.evaluations()
            searches = [row["eval/searches"] for row in exact if "eval/searches" in row]
            rewards = [row["critic/score/mean"] for row in run.rows if "critic/score/mean" in row]
            seconds = sum(row.get("timing_s/step", 0.0) for row in run.rows)
            rows.append({
                "style": _style(groups, family),
                "family": family.label,
                "name": run.path.name,
                "seed": run.settings.get("seed", "–"),
                "state": run.state.value,
                "steps": f"{run.last_step} of {run.steps}" if run.steps else str(run.last_step),
                "exact": _arrow([row["eval/exact_match"] for row in exact]),
                "searches": _arrow(searches),
                "reward": f"{rewards[-1]:.3f}" if rewards else "–",
                "alarms": ", ".join(dict.fromkeys(a.alarm for a in run.alarms)) or "none",
                "minutes": f"{seconds / 60:.1f}" if seconds else "–",
            })  # fmt: skip
    return rows


def _arrow(values: Sequence[float]) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{values[0]:.3f} → {values[-1]:.3f}"


def _recipe(groups: Sequence[Family]) -> list[tuple[str, str]]:
    """Return the settings of a single family, which has nothing to differ from."""
    if len(groups) > 1:
        return []
    return [(name, str(value)) for name, value in groups[0].runs[0].settings.items()]


def _versions(groups: Sequence[Family]) -> list[tuple[str, str]]:
    found: dict[str, dict[str, None]] = {}
    for family in groups:
        for run in family.runs:
            for name, value in run.versions.items():
                if name != "started":
                    found.setdefault(str(name), {})[str(value)] = None
    return [(name, ", ".join(values)) for name, values in found.items()]
