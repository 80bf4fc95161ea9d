"""The folder of a run, and what is written into it step by step.

    recipe.toml           the resolved recipe, before the first step
    versions.json         packages, Python, machine, git revision
    metrics.jsonl         one line a step; step 0 is the evaluation before training
    trajectories/         step-000001.jsonl.gz: the credited rollouts of a step
    alarms.jsonl          one line an alarm
    alarms/step-000012/   the rollouts of the last steps before that alarm
    evaluations/          step-000050.jsonl.gz: the greedy rollouts of an evaluation
    checkpoints/          see `evenhand.training.checkpoint`
    tensorboard/          if TensorBoard is installed

A resumed run drops the lines and files of steps after its checkpoint: those steps are done again,
so that every step stands once.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from evenhand.core.errors import ConfigError, DataError
from evenhand.core.files import atomic_write
from evenhand.core.versions import versions
from evenhand.training.config import Recipe
from evenhand.training.recipes import load_recipe, write_recipe
from evenhand.trajectory import Trajectory, write_trajectories


class RunFolder:
    """One run on disk.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make the folder of a new run and lock it; it is a run once `begin` was called.

        Raises:
            DataError: it cannot be written, or holds a run already.
            ConfigError: another process is making it.
        """
        run = cls(path)
        with _plain_errors(f"run folder {path} cannot be written"):
            path.mkdir(parents=True, exist_ok=True)
        if run.recipe_path.exists():
            raise DataError(
                f"{path} holds a run already; continue it with --resume {path}, or give "
                "another --out"
            )
        run.lock()
        return run

    def begin(self, recipe: Recipe) -> None:
        """Write down what the run is; from here on it can be resumed.

        Raises:
            DataError: the folder cannot be written.
        """
        with _plain_errors(f"run folder {self.path} cannot be written"):
            self.trajectories.mkdir(exist_ok=True)
            self.evaluations.mkdir(exist_ok=True)
            _write_json(self.path / "versions.json", versions())
            write_recipe(self.recipe_path, recipe)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run.

        Raises:
            DataError: it is none.
        """
        run = cls(path)
        if not run.recipe_path.is_file():
            raise DataError(f"{path} is no run: it has no recipe.toml; give the folder that "
                            "`evenhand train` wrote")  # fmt: skip
        return run

    @property
    def recipe_path(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def metrics(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def alarms(self) -> Path:
        """One line an alarm."""
        return self.path / "alarms.jsonl"

    @property
    def kept(self) -> Path:
        """Folder of what alarms put aside."""
        return self.path / "alarms"

    @property
    def trajectories(self) -> Path:
        """Folder of rollouts."""
        return self.path / "trajectories"

    @property
    def evaluations(self) -> Path:
        """Folder of the rollouts of evaluations."""
        return self.path / "evaluations"

    def evaluation_path(self, step: int) -> Path:
        """File of the rollouts of the evaluation after a step."""
        return self.evaluations / _step_file(step)

    def evaluated_steps(self) -> list[int]:
        """Return the steps after which the policy was evaluated, rising."""
        names = [path.name for path in self.evaluations.glob("step-*.jsonl.gz")]
        numbers = [name.removeprefix("step-").removesuffix(".jsonl.gz") for name in names]
        return sorted(int(number) for number in numbers if number.isdigit())

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's events."""
        return self.path / "tensorboard"

    def recipe(self) -> Recipe:
        """Return the resolved recipe of the run."""
        return load_recipe(self.recipe_path)

    def lock(self) -> None:
        """Keep other processes from writing here; the lock ends with this process.

        Raises:
            ConfigError: another process trains here.
        """
        with _plain_errors(f"run folder {self.path} cannot be written"):
            file = (self.path / ".lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ConfigError(
                f"another process is training in {self.path}; wait for it or stop it"
            ) from None
        self._lock = file

    def unlock(self) -> None:
        """Let others write again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def rewind(self, step: int) -> None:
        """Drop what later steps than `step` left, and half lines; -1 drops everything."""
        with _plain_errors(f"run folder {self.path} cannot be written"):
            for table in (self.metrics, self.alarms):
                lines = [json.dumps(row) for row in _whole_rows(table) if row["step"] <= step]
                if table.exists():
                    with atomic_write(table) as file:
                        file.writelines(line + "\n" for line in lines)
            for folder in (self.trajectories, self.evaluations):
                folder.mkdir(exist_ok=True)
                for path in folder.iterdir():
                    if path.name.startswith(".") or _step_of(path) > step:
                        path.unlink()
            for path in self.kept.glob("*"):
                if _step_of(path) > step:
                    shutil.rmtree(path)
            if step < 0:
                shutil.rmtree(self.tensorboard, ignore_errors=True)

    def rows(self) -> list[dict[str, Any]]:
        """Return the whole lines of `metrics.jsonl`; a last line cut by a kill is left out."""
        return _whole_rows(self.metrics)

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step.

        Raises:
            DataError: it cannot be written.
        """
        with _plain_errors(f"{self.metrics} cannot be written"), self.metrics.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def write_alarms(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append alarms.

        Raises:
            DataError: they cannot be written.
        """
        with _plain_errors(f"{self.alarms} cannot be written"), self.alarms.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def keep(self, step: int, rollouts: Mapping[int, Sequence[Trajectory] | None]) -> None:
        """Put rollouts of the last steps aside, under the step of an alarm.

        Args:
            step: of the alarm.
            rollouts: by step; `None` copies the file that the step has left.

        Raises:
            DataError: they cannot be written.
        """
        folder = self.kept / f"step-{step:06d}"
        with _plain_errors(f"{folder} cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            for number, trajectories in rollouts.items():
                name = _step_file(number)
                if trajectories is not None:
                    write_trajectories(folder / name, trajectories)
                elif (self.trajectories / name).is_file():
                    shutil.copyfile(self.trajectories / name, folder / name)

    def drop_trajectories(self, step: int) -> None:
        """Delete the rollouts of steps up to `step`."""
        with _plain_errors(f"{self.trajectories} cannot be written"):
            for path in self.trajectories.glob("step-*"):
                if 0 <= _step_of(path) <= step:
                    path.unlink()

    def write_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write the rollouts of a step; the file appears whole."""
        write_trajectories(self.trajectories / _step_file(step), trajectories)

    def write_evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write the rollouts of the evaluation after a step; the file appears whole."""
        write_trajectories(self.evaluation_path(step), trajectories)


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _step_file(step: int) -> str:
    return f"step-{step:06d}.jsonl.gz"


def _step_of(path: Path) -> int:
    """Return the step in the name of a file or folder; -1 if it has none."""
    number = path.name.removeprefix("step-").split(".")[0]
    return int(number) if number.isdigit() else -1


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        json.dump(value, file, indent=1)
        file.write("\n")


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{what}: {error.strerror or error}; free some space or choose another folder"
        ) from error
