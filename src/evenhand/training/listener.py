"""Who watches a run: the command line shows what it is told here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evenhand.diagnostics.alarms import Alarm
from evenhand.rollout import Progress as RolloutProgress
from evenhand.training.checkpoint import Progress
from evenhand.training.config import Recipe
from evenhand.training.sources import QuestionStream


class Listener:
    """Does nothing at every event; override what you want to see."""

    def started(self, recipe: Recipe, progress: Progress, stream: QuestionStream) -> None:
        """The first (or next) step is about to begin."""

    def rollouts(self, progress: RolloutProgress) -> None:
        """Rollouts of a step go on."""

    def evaluating(self, progress: RolloutProgress) -> None:
        """Rollouts of an evaluation go on."""

    def updating(self, update: int, updates: int) -> None:
        """An optimiser step of the batch begins; `update` counts from 1."""

    def stepped(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """A training step is recorded."""

    def alarmed(self, alarm: Alarm) -> None:
        """An alarm fired after a training step."""

    def evaluated(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""

    def saved(self, progress: Progress, path: Path) -> None:
        """A checkpoint is whole."""

    def finished(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """The last step is done; `metrics` are those of the last evaluation."""

    def closed(self) -> None:
        """The trainer is closed, after an error or an interrupt too."""
