"""Checkpoints that are whole or absent: safetensors and JSON, renamed into place.

A checkpoint is written to a hidden folder, every file and the folder are flushed to disk, and the
folder is renamed to `step-000010`. A kill at any moment leaves the earlier checkpoints untouched
and at most a hidden folder, which the next start removes. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.core.errors import DataError, require
from evenhand.training.models import LoadedModel
from evenhand.training.optimizer import (
    load_optimizer_tensors,
    load_schedule_state,
    optimizer_tensors,
    schedule_state,
)

torch: Any = require("torch", "train", "training")
safetensors: Any = require("safetensors", "train", "checkpoints")
safetensors_torch: Any = require("safetensors.torch", "train", "checkpoints")

FORMAT = "evenhand.checkpoint/1"
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_RNG = "generator."


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is.

    Attributes:
        step: training steps done.
        drawn: questions drawn from the stream so far.
        updates: optimiser steps done.
    """

    step: int = 0
    drawn: int = 0
    updates: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """Everything that changes while training, besides `Progress`."""

    loaded: LoadedModel
    optimizer: Any
    schedule: Any


class Checkpoints:
    """The folder of checkpoints of one run.

    Attributes:
        folder: holds one folder a checkpoint.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, rising."""
        found = self.folder.glob("step-*") if self.folder.is_dir() else ()
        return sorted(int(path.name[5:]) for path in found if path.name[5:].isdigit())

    def path(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.folder / f"step-{step:06d}"

    def remove_debris(self) -> None:
        """Remove what killed runs left half written."""
        for path in self.folder.glob(".*") if self.folder.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True)

    def save(self, trained: Trained, progress: Progress) -> Path:
        """Write a checkpoint and remove the oldest beyond `keep`.

        Raises:
            DataError: the disk is full or cannot be written; earlier checkpoints stay whole.
        """
        target = self.path(progress.step)
        draft = self.folder / f".{target.name}.{os.getpid()}"
        try:
            with disk_errors_named(f"checkpoint {target} could not be written"):
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
                _write(draft, trained, progress)
                _flush(draft)
                if target.exists():
                    self._remove(target)
                draft.rename(target)
                _flush(self.folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        for step in self.steps()[: -self.keep]:
            self._remove(self.path(step))
        return target

    def newest(self) -> Path | None:
        """Return the folder of the newest checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def load(self, trained: Trained) -> Progress:
        """Put the newest checkpoint into the objects of a run.

        Returns:
            Where it was; `Progress()` if there is no checkpoint yet, and nothing is changed then.

        Raises:
            DataError: a damaged checkpoint, or one of another model.
        """
        path = self.newest()
        if path is None:
            return Progress()
        state = _read_state(path)
        load_weights(trained.loaded, path)
        parameters = trained.loaded.trainable()
        tensors = _read_tensors(path / OPTIMIZER)
        generators = {key: tensors.pop(key) for key in list(tensors) if key.startswith(_RNG)}
        try:
            load_optimizer_tensors(trained.optimizer, parameters, tensors)
            load_schedule_state(trained.schedule, state["schedule"])
            progress = Progress(**state["progress"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} does not fit this run: {error!r}") from error
        _set_generators(generators)
        return progress

    def _remove(self, path: Path) -> None:
        # Renamed first: a kill while files vanish must not leave half a checkpoint with its name.
        hidden = path.with_name(f".removed-{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def load_weights(loaded: LoadedModel, path: Path) -> None:
    """Copy the weights of a checkpoint folder into a model.

    Raises:
        DataError: damaged, or of another model.
    """
    tensors = _read_tensors(path / WEIGHTS)
    parameters = loaded.trainable()
    if tensors.keys() != parameters.keys():
        odd = sorted(tensors.keys() ^ parameters.keys())[0]
        raise DataError(f"{path} holds the weights of another model: {odd!r} is only on one side")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise DataError(
                    f"{path} holds the weights of another model: {name!r} has shape "
                    f"{tuple(tensors[name].shape)}, the model has {tuple(parameter.shape)}"
                )
            parameter.copy_(tensors[name])


def _write(draft: Path, trained: Trained, progress: Progress) -> None:
    parameters = trained.loaded.trainable()
    weights = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
    safetensors_torch.save_file(weights, draft / WEIGHTS)
    state = optimizer_tensors(trained.optimizer, parameters) | _generators()
    safetensors_torch.save_file(
        {name: value.detach().cpu().contiguous() for name, value in state.items()},
        draft / OPTIMIZER,
    )
    text = json.dumps(
        {
            "format": FORMAT,
            "progress": {name: getattr(progress, name) for name in Progress.__slots__},
            "schedule": schedule_state(trained.schedule),
        },
        indent=1,
    )
    (draft / STATE).write_text(text, encoding="utf-8")


def _generators() -> dict[str, Any]:
    found = {f"{_RNG}torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        for at, state in enumerate(torch.cuda.get_rng_state_all()):
            found[f"{_RNG}cuda.{at}"] = state
    return found


def _set_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states[f"{_RNG}torch"])
    if torch.cuda.is_available():
        for at in range(torch.cuda.device_count()):
            if f"{_RNG}cuda.{at}" in states:
                torch.cuda.set_rng_state(states[f"{_RNG}cuda.{at}"], at)


def _read_state(path: Path) -> Mapping[str, Any]:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no checkpoint of evenhand: {error}") from error
    if state.get("format") != FORMAT:
        raise DataError(f"{path} has format {state.get('format')!r}, this version reads {FORMAT!r}")
    return state  # type: ignore[no-any-return]


def _read_tensors(path: Path) -> dict[str, Any]:
    try:
        return safetensors_torch.load_file(path)  # type: ignore[no-any-return]
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _flush(folder: Path) -> None:
    """Flush a folder and the files in it to disk."""
    for path in [*(p for p in folder.iterdir() if p.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def disk_errors_named(what: str) -> Iterator[None]:
    """Turn a failed write into a `DataError` that begins with `what` and says what to do."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(f"{what}: {reason}; free some space or choose another folder") from error
