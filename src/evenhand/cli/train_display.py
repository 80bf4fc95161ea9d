"""What `evenhand train` shows: live figures on a terminal, one plain line a step in a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from evenhand.cli.common import console
from evenhand.diagnostics.alarms import Action, Alarm
from evenhand.rollout import Progress as RolloutProgress
from evenhand.training.checkpoint import Progress as RunProgress
from evenhand.training.config import Recipe
from evenhand.training.listener import Listener
from evenhand.training.sources import QuestionStream

Metrics = Mapping[str, float]

_COLUMNS = (
    ("critic/score/mean", "reward", "{:.3f}"),
    ("rollouts/exact_match", "EM", "{:.3f}"),
    ("rollouts/searches", "searches", "{:.2f}"),
    ("rollouts/format_ok", "format", "{:.2f}"),
    ("groups/effective", "effective", "{:.0f}"),
    ("actor/entropy", "entropy", "{:.2f}"),
    ("actor/grad_norm", "grad", "{:.2g}"),
    ("timing_s/step", "s", "{:.1f}"),
)


def step_line(step: int, steps: int, metrics: Metrics) -> str:
    """Return the line of a training step."""
    cells = [
        f"{label} {form.format(metrics[name])}" for name, label, form in _COLUMNS if name in metrics
    ]
    return f"step {step}/{steps}  " + "  ".join(cells)


def evaluation_lines(step: int, metrics: Metrics) -> list[str]:
    """Return the lines of an evaluation: all questions, then by number of hops."""
    if "eval/exact_match" not in metrics:
        return [f"evaluation after step {step}: no question could be scored"]
    failed = f", {metrics['eval/failed']:.0f} failed" if metrics["eval/failed"] else ""
    lines = [
        f"evaluation after step {step}: exact match {metrics['eval/exact_match']:.3f} "
        f"[{metrics['eval/exact_match_low']:.3f}, {metrics['eval/exact_match_high']:.3f}], "
        f"F1 {metrics['eval/f1']:.3f}, searches {metrics['eval/searches']:.2f}, "
        f"n {metrics['eval/n']:.0f}{failed}"
    ]
    hops = sorted(
        int(name.split("/")[1].removeprefix("hops_"))
        for name in metrics
        if name.startswith("eval/hops_") and name.endswith("/n")
    )
    for count in hops:
        key = f"eval/hops_{count}"
        lines.append(
            f"  {count} hops: exact match {metrics[f'{key}/exact_match']:.3f}, "
            f"searches {metrics[f'{key}/searches']:.2f}, n {metrics[f'{key}/n']:.0f}"
        )
    return lines


def alarm_line(alarm: Alarm) -> str:
    """Return the line of an alarm."""
    end = "; the run ends here" if alarm.action is Action.STOP else ""
    return (
        f"alarm {alarm.name} after step {alarm.step}: {alarm.message}. Usual cause: {alarm.cause}. "
        f"Try: {alarm.remedy}{end}."
    )


class PlainDisplay(Listener):
    """One line a step."""

    def __init__(self) -> None:
        self._out = console()
        self._steps = 0

    def started(self, recipe: Recipe, progress: RunProgress, stream: QuestionStream) -> None:  # noqa: ARG002 the protocol
        """Say where the run begins."""
        self._steps = recipe.steps
        if progress.step:
            self._line(f"resumed after step {progress.step}")

    def stepped(self, progress: RunProgress, metrics: Metrics) -> None:
        """Print the step."""
        self._line(step_line(progress.step, self._steps, metrics))

    def alarmed(self, alarm: Alarm) -> None:
        """Print the alarm."""
        self._out.print(alarm_line(alarm), style="yellow", markup=False)
        self._out.file.flush()

    def evaluated(self, progress: RunProgress, metrics: Metrics) -> None:
        """Print the evaluation."""
        for line in evaluation_lines(progress.step, metrics):
            self._line(line)

    def _line(self, text: str) -> None:
        self._out.print(text, markup=False)
        self._out.file.flush()


class LiveDisplay(PlainDisplay):
    """The same lines, above a bar that shows what is going on right now."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            console=self._out,
            transient=True,
        )
        self._task = self._bar.add_task("steps", total=None, now="")

    def started(self, recipe: Recipe, progress: RunProgress, stream: QuestionStream) -> None:
        """Show the bar."""
        super().started(recipe, progress, stream)
        self._bar.update(self._task, total=recipe.steps, completed=progress.step)
        self._bar.start()

    def rollouts(self, progress: RolloutProgress) -> None:
        """Show how far the rollouts are."""
        self._now(
            f"rollouts {progress.finished}/{progress.total}, {progress.tokens:,} tokens, "
            f"{progress.searches:,} searches"
        )

    def evaluating(self, progress: RolloutProgress) -> None:
        """Show how far the evaluation is."""
        self._now(f"evaluating {progress.finished}/{progress.total}")

    def updating(self, update: int, updates: int) -> None:
        """Show which optimiser step it is."""
        self._now(f"update {update}/{updates}")

    def stepped(self, progress: RunProgress, metrics: Metrics) -> None:
        """Print the step and move the bar."""
        super().stepped(progress, metrics)
        self._bar.update(self._task, completed=progress.step)

    def saved(self, progress: RunProgress, path: Path) -> None:
        """Say where the checkpoint is."""
        self._now(f"saved {path.name} ({progress.updates} updates)")

    def closed(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def _now(self, text: str) -> None:
        self._bar.update(self._task, now=text)
