"""Where figures go besides `metrics.jsonl`: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evenhand.core.errors import require
from evenhand.training.checkpoint import disk_errors_named
from evenhand.training.config import Recipe


class Trackers:
    """The trackers that a recipe asks for; any of them may be absent."""

    def __init__(self, recipe: Recipe, folder: Path, *, step: int) -> None:
        """Open them.

        Args:
            recipe: its section `tracking` decides.
            folder: where TensorBoard writes.
            step: steps done; what TensorBoard has of later ones is purged.

        Raises:
            MissingExtraError: one that was asked for is not installed.
        """
        section = recipe.tracking
        self._board: Any = None
        self._summary: Any = None
        self._wandb: Any = None
        is_there = importlib.util.find_spec("tensorboard") is not None
        if section.tensorboard == "on" or (section.tensorboard == "auto" and is_there):
            require("tensorboard", "train", "tracking with TensorBoard")
            with warnings.catch_warnings():
                # TensorBoard's own imports warn about other packages; nobody here can act on it.
                warnings.simplefilter("ignore")
                module = require("torch.utils.tensorboard", "train", "tracking with TensorBoard")
                self._summary = require(
                    "tensorboard.compat.proto.summary_pb2", "train", "tracking with TensorBoard"
                ).Summary
            self._board = module.SummaryWriter(str(folder), purge_step=step + 1)
        if section.wandb is not None:
            wandb = require("wandb", "wandb", "tracking with Weights & Biases")
            # A resumed run keeps its id; steps it has already seen are ignored there.
            name = folder.parent.name
            self._wandb = wandb.init(
                project=section.wandb,
                name=name,
                id=name,
                resume="allow",
                config=recipe.model_dump(),
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the figures of a step.

        Raises:
            DataError: TensorBoard's folder cannot be written.
        """
        if self._board is not None:
            with disk_errors_named("TensorBoard's figures cannot be written"):
                # One event for all figures: each costs a hand-over to the thread that writes.
                values = [
                    self._summary.Value(tag=name, simple_value=float(value))
                    for name, value in metrics.items()
                ]
                self._board.file_writer.add_summary(self._summary(value=values), step)
                self._board.flush()
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def close(self) -> None:
        """Flush and close."""
        if self._board is not None:
            # A disk that is full has been reported; closing would only hide that.
            with suppress(OSError):
                self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
