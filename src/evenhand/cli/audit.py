"""`evenhand audit`: what a user should know about rollouts before changing anything."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from evenhand.cli.common import (
    InMemory,
    Inputs,
    Settings,
    Source,
    Tokenizer,
    console,
    plain_table,
    read_settings,
    with_progress,
)
from evenhand.convert import open_trajectories
from evenhand.core.errors import SingleMemberGroupsWarning
from evenhand.core.files import check_output
from evenhand.credit import CreditRule, whole_groups
from evenhand.diagnostics.audit import REFERENCE, Audit, AuditCollector
from evenhand.diagnostics.findings import Level, language_rows, number, percent, plain
from evenhand.diagnostics.intervals import Estimate

WIDE = 110
"""Columns from which on every interval is shown; below it, most are left to the page."""

_MARK = {Level.WARNING: ("!", "yellow"), Level.NOTE: ("-", "")}


def audit(
    files: Inputs,
    html: Annotated[
        Path | None, typer.Option(help="Also write one self-contained page.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    settings: Settings = None,
    source: Source = None,
    tokenizer: Tokenizer = None,
    in_memory: InMemory = False,
) -> None:
    """Say how a run's rollouts are structured, who is punished, and what switching would change.

    Settings: stratum, step_score, threshold, max_think_similarity.
    """
    # An estimator without settings of its own: an audit takes those of the bridge only.
    bridge = CreditRule.from_settings("dr_grpo", read_settings(settings)).bridge
    if html is not None:
        check_output(html)
    collector = AuditCollector(bridge)
    stream = open_trajectories(files, source=source, tokenizer=tokenizer)
    with warnings.catch_warnings():
        # A finding says it, once.
        warnings.simplefilter("ignore", SingleMemberGroupsWarning)
        for part in whole_groups(with_progress(stream, "rollouts"), in_memory=in_memory):
            collector.add(part)
        with console(err=True).status("computing the figures"):
            result = collector.finish()
    if as_json:
        typer.echo(json.dumps(_figures(result), indent=1))
    else:
        show(result, console())
    if html is not None:
        from evenhand.pages.audit import write_audit_page

        write_audit_page(html, result, [str(file) for file in files])
        console(err=True).print(f"wrote {html}")


def show(result: Audit, out: Console) -> None:
    """Print an audit."""
    _overview(result, out)
    _strata(result, out)
    _language(result, out)
    _estimators(result, out)
    out.print("\nWhat stands out", style="bold")
    for finding in result.findings:
        out.print(Text.assemble(" ", _MARK[finding.level], f" {finding.text}"))
    if result.alarms:
        out.print("\nAlarms, had they watched these steps", style="bold")
        for alarm in result.alarms:
            out.print(f" ! {alarm.name} after step {alarm.step}: {alarm.message}", markup=False)
    if result.unknown:
        out.print("\nWhat these files cannot tell", style="bold")
        for note in result.unknown:
            out.print(f" ? {note}")


def _overview(result: Audit, out: Console) -> None:
    groups = result.groups
    low, middle, high = result.group_size
    size = f"{low}" if low == high else f"{low} to {high} (median {middle:g})"
    steps = f", steps {_spans(result.steps)}" if result.steps else ""
    unit = " and ".join(result.units)
    stops = ", ".join(f"{name} {count:,}" for name, count in result.stop_reasons.items())
    rows = [
        ("rollouts", f"{result.trajectories:,} in {groups.total:,} groups of {size}{steps}"),
        (
            "groups",
            f"{groups.effective:,} effective, {groups.too_easy:,} too easy, "
            f"{groups.too_hard:,} too hard, {groups.lone:,} with one scored rollout, "
            f"{groups.unscored:,} unscored",
        ),
        ("reward", f"mean {number(result.reward, 3)}, n {result.reward.n:,}"),
        ("success", f"{percent(result.success)} reach {result.threshold:g}"),
        ("format obeyed", percent(result.format_ok)),
        ("searches", f"{number(result.searches)} a rollout, n {result.searches.n:,}"),
        ("correct searches", _correct(result)),
        ("silver documents", _silver(result)),
        (unit, f"policy {result.policy_tokens:,}, environment {result.environment_tokens:,}"),
        ("ended by", stops),
    ]
    table = plain_table("", "")
    table.show_header = False
    table.columns[1].justify = "left"
    table.columns[0].style = "bold"
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _correct(result: Audit) -> str:
    if result.correct.n == 0:
        return "unknown: no search could be judged"
    return f"{percent(result.correct)} judged ones found new silver documents"


def _silver(result: Audit) -> str:
    text = f"in {percent(result.silver_groups)} groups"
    if len(result.silver_size):
        text += f", median {np.median(result.silver_size):g} a set"
    return text


def _spans(steps: tuple[int, ...]) -> str:
    if len(steps) <= 4:
        return ", ".join(map(str, steps))
    return f"{steps[0]} to {steps[-1]} ({len(steps)} of them)"


def _strata(result: Audit, out: Console) -> None:
    between = result.between
    table = plain_table(f"stratum ({result.stratum})", "share of rollouts", "mean reward", "scored")
    for row in result.strata:
        table.add_row(str(row.label), percent(row.share), number(row.reward), f"{row.reward.n:,}")
    out.print()
    out.print(table)
    if not math.isnan(between.share):
        verdict = "evidence of structure" if between.has_evidence else "no evidence of structure"
        out.print(
            f"reward variance between strata {between.share:.3f}; by chance {between.expected:.3f} "
            f"[{between.low:.3f}, {between.high:.3f}]: {verdict} (n {between.groups:,} groups)"
        )
    out.print(
        f"alone in their stratum: {percent(result.shape.lone)} rollouts; "
        f"without spread: {percent(result.shape.flat)} strata of two or more"
    )


def _language(result: Audit, out: Console) -> None:
    table = plain_table("", "")
    table.show_header = False
    table.columns[1].justify = "left"
    table.columns[0].style = "bold"
    for row in language_rows(result):
        table.add_row(*row)
    out.print()
    out.print(table)


def _estimators(result: Audit, out: Console) -> None:
    wide = out.width >= WIDE
    table = plain_table(
        "under each estimator",
        f"{' and '.join(result.units)} with credit",
        "correct searches punished",
        f"penalty on them ({REFERENCE} = 1)",
    )
    ratios = plain_table("neg/pos credit", "searches", "answers", "no action", "all")
    for row in result.estimators:
        table.add_row(
            row.name,
            f"{100 * row.live.value:.1f} %" if row.live.n else "-",
            percent(row.mis_penalised) if wide else _share(row.mis_penalised),
            "-" if math.isnan(row.penalty_kept) else f"{row.penalty_kept:.2f}",
        )
        cells = (row.search_ratio, row.answer_ratio, row.other_ratio)
        shown = (number(cell) if wide else _value(cell) for cell in cells)
        ratios.add_row(row.name, *shown, number(row.total_ratio))
    out.print()
    out.print(table)
    out.print()
    out.print(ratios)


def _value(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.value) else plain(estimate.value, 2)


def _share(estimate: Estimate) -> str:
    if estimate.n == 0:
        return "unknown (0)"
    return f"{100 * estimate.value:.1f} % of {estimate.n:,}"


def _figures(result: Audit) -> dict[str, Any]:
    """Return what `--json` prints: everything but the examples, long arrays summed up."""
    figures = {key: item for key, item in _plain(asdict(result)).items() if key != "examples"}
    labels = [str(row.label) for row in result.strata]
    for row in figures["estimators"]:
        row["by_stratum"] = dict(zip(labels, row["by_stratum"], strict=True))
    for name in ("silver_size", "step_scores"):
        values, counts = np.unique(getattr(result, name).round(6), return_counts=True)
        figures[name] = dict(zip(values.astype(str).tolist(), counts.tolist(), strict=True))
    return figures


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else None  # nan is what could not be known
    return value
