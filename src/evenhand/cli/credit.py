"""`evenhand credit`: write the credit of every segment, or show its summary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenhand.cli.common import (
    InMemory,
    Input,
    Settings,
    Source,
    Tokenizer,
    console,
    plain_table,
    read_settings,
    with_progress,
    write_to,
)
from evenhand.convert import open_trajectories
from evenhand.core.arrays import dense
from evenhand.core.errors import SingleMemberGroupsWarning
from evenhand.core.files import STANDARD_STREAM
from evenhand.credit import Credited, CreditRule, credit_stream
from evenhand.credit.bridge import POLICY_KIND_ORDER
from evenhand.credit.registry import estimator_names
from evenhand.diagnostics.credit import (
    GroupCounts,
    Mass,
    add_masses,
    group_counts,
    mass_by_kind,
)
from evenhand.trajectory import Kind, Trajectory


def credit(
    source_file: Input,
    estimator: Annotated[
        str,
        typer.Option(
            "--estimator", "-e", show_default=False,
            help="Name of an estimator; `evenhand estimators` lists them.",
            autocompletion=estimator_names,
        ),
    ],
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", show_default=False,
            help="Where to write the credited trajectories (.gz compresses); - is standard output.",
        ),
    ] = None,
    source: Source = None,
    tokenizer: Tokenizer = None,
    in_memory: InMemory = False,
) -> None:  # fmt: skip
    """Give every segment of every rollout its advantage.

    Without --out only the summary is shown. With `-o -` the trajectories go to standard output and
    the summary to standard error. Settings are those of the estimator and stratum, step_score,
    threshold, max_think_similarity.
    """
    rule = CreditRule.from_settings(estimator, read_settings(settings))
    tally = Tally(rule)
    stream = with_progress(
        open_trajectories([source_file], source=source, tokenizer=tokenizer), "rollouts"
    )
    with warnings.catch_warnings():
        # Said once for the whole file instead of once a batch.
        warnings.simplefilter("ignore", SingleMemberGroupsWarning)
        credited = tally.over(credit_stream(stream, rule, in_memory=in_memory))
        if out is None:
            for _ in credited:
                pass
        else:
            write_to(out, _written(credited))
    tally.show(console(err=out == STANDARD_STREAM))
    if out is not None and out != STANDARD_STREAM:
        console(err=True).print(f"wrote {out}")


def _written(batches: Iterator[Credited]) -> Iterator[Trajectory]:
    for batch in batches:
        yield from batch.written()


@dataclass
class Tally:
    """Adds up the summary while batches pass."""

    rule: CreditRule
    rollouts: int = 0
    unscored: int = 0
    strata: int = 0
    steps: set[int] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    groups: GroupCounts = field(default_factory=lambda: GroupCounts(0, 0, 0, 0, 0))
    masses: dict[Kind, Mass] = field(
        default_factory=lambda: {kind: Mass() for kind in POLICY_KIND_ORDER}
    )

    def over(self, batches: Iterator[Credited]) -> Iterator[Credited]:
        """Pass batches on, counting them."""
        for item in batches:
            batch = item.batch
            self.rollouts += len(batch.rewards)
            self.unscored += int(np.isnan(batch.rewards).sum())
            _, code = batch.strata()
            self.strata += dense(batch.group * (code.max(initial=0) + 1) + code).n
            self.steps |= set(batch.step.tolist())
            self.units |= {
                str(t.metadata.get("n_tokens_unit", "tokens")) for t in item.trajectories
            }
            self.groups += group_counts(batch, threshold=self.rule.bridge.evidence.threshold)
            self.masses = add_masses(self.masses, mass_by_kind(batch, item.advantage))
            yield item

    def show(self, out: Console) -> None:
        """Print the summary."""
        groups, bridge = self.groups, self.rule.bridge
        settings = {**self.rule.function.defaults, **self.rule.settings, "stratum": bridge.stratum}
        shown = ", ".join(f"{key}={value}" for key, value in settings.items())
        out.print(Text.assemble((self.rule.estimator, "bold"), f" ({shown})"))
        unscored = f", {self.unscored:,} unscored" if self.unscored else ""
        out.print(
            f"{self.rollouts:,} rollouts{unscored}, {groups.total:,} groups, {self.strata:,} strata"
        )
        out.print(
            f"groups: {groups.effective:,} effective, {groups.too_easy:,} too easy, "
            f"{groups.too_hard:,} too hard, {groups.lone:,} with one scored rollout, "
            f"{groups.unscored:,} unscored"
        )
        if self.rule.whole_batch:
            out.print(f"normalised over whole batches: {len(self.steps):,} (one a step)")
        unit = " and ".join(sorted(self.units))
        table = plain_table(
            "credit by segment", "segments", unit, "positive", "negative", "neg/pos"
        )
        for kind in POLICY_KIND_ORDER:
            if self.masses[kind].segments:
                _mass_row(table, kind.value, self.masses[kind])
        _mass_row(table, "all", sum(self.masses.values(), Mass()))
        out.print(table)
        if groups.has_wrong_ids:
            out.print(
                "warning: every group has a single member, so every advantage is 0; rollouts of "
                "one question and step must share their group id",
                style="yellow",
            )


def _mass_row(table: Table, name: str, mass: Mass) -> None:
    ratio = "inf" if mass.negative else "-"
    if mass.positive:
        ratio = f"{mass.negative / mass.positive:.2f}"
    table.add_row(
        name, f"{mass.segments:,}", f"{mass.tokens:,}", f"{mass.positive:,.1f}",
        f"{mass.negative:,.1f}", ratio,
    )  # fmt: skip
