"""Run folders as a report reads them: whatever is there, and a line for whatever is not.

Nothing here raises because of what a run folder holds, and nothing is written into it: a run that
is broken, was cut by a kill or is still being written gives what can be read and a note.
"""

from __future__ import annotations

import json
import math
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from evenhand.core.errors import DataError
from evenhand.training.run_folder import RunFolder

LIVE_SECONDS = 300.0
"""A run that lacks steps is called running if its figures are younger than this."""

ALARMS = "alarms.jsonl"
_SEED_FOLDER = re.compile(r"seed-\d+")
_SAME_ANYWAY = ("seed", "name", "checkpoint.", "tracking.", "model.device", "model.threads")
"""Settings that do not make another series: they change nothing but seed, name or bookkeeping."""


class State(StrEnum):
    """How far a run is."""

    FINISHED = "finished"
    """Every step of its recipe stands in its figures."""
    RUNNING = "running"
    """Steps are missing and the figures grew a moment ago."""
    STOPPED = "stopped"
    """Steps are missing and nothing was written for a while."""
    UNKNOWN = "unknown"
    """The recipe or the figures cannot be read."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One line of `alarms.jsonl`.

    Attributes:
        step: when it fired.
        alarm: its name.
        action: `warn` or `stop`.
        message: what it saw.
        cause: what usually causes it.
        remedy: what to try.
    """

    step: int
    alarm: str
    action: str
    message: str
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Run:
    """What could be read of a run folder.

    Attributes:
        path: the folder.
        rows: the lines of `metrics.jsonl`, finite numbers only.
        settings: dotted settings of the recipe; empty if it cannot be read.
        versions: of `versions.json`; may be empty.
        alarms: that fired, in order.
        state: how far it is.
        notes: one sentence for each thing that could not be read.
    """

    path: Path
    rows: tuple[Mapping[str, float], ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]
    alarms: tuple[Alarm, ...]
    state: State
    notes: tuple[str, ...]

    @property
    def last_step(self) -> int:
        """The last step with figures, 0 if there is none."""
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def steps(self) -> int | None:
        """Steps that the recipe asks for."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) else None

    def evaluations(self) -> list[Mapping[str, float]]:
        """Return the rows that hold an evaluation."""
        return [row for row in self.rows if "eval/exact_match" in row]


@dataclass(frozen=True, slots=True)
class Family:
    """Runs of one recipe that differ in their seed: one series of a plot.

    Attributes:
        label: shown in legends and tables; unique in a report.
        runs: at least one.
    """

    label: str
    runs: tuple[Run, ...]


def find_runs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the run folders that paths stand for, and a note for each path without one.

    A path is a run folder, or a folder with run folders in it (such as `seed-0`, `seed-1`) or one
    level further down.

    Raises:
        DataError: no path leads to a run.
    """
    found: list[Path] = []
    notes = []
    for path in paths:
        inside = [path] if _is_run(path) else _runs_in(path)
        if not inside:
            notes.append(f"{path}: {_why_no_run(path)}")
        found += [run for run in inside if run not in found]
    if not found:
        raise DataError("; ".join(notes) or "no run was given; give the folder of a run")
    return found, notes


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / n).is_file() for n in ("recipe.toml", "metrics.jsonl"))


def _runs_in(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    inside = sorted(child for child in path.iterdir() if child.is_dir())
    runs = [child for child in inside if _is_run(child)]
    return runs or [run for child in inside for run in sorted(child.iterdir()) if _is_run(run)]


def _why_no_run(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    if path.is_file():
        return "is a file; give the folder of a run"
    if (path / "evaluation.json").is_file():
        return "is an evaluation; give a run, and this with --evaluation"
    return "is no run: neither recipe.toml nor metrics.jsonl is in it"


def read_run(path: Path) -> Run:
    """Read a run folder, finished or not, whole or not."""
    notes: list[str] = []
    settings = _settings(path, notes)
    rows = _rows(path, notes)
    run = Run(
        path=path,
        rows=tuple(rows),
        settings=settings,
        versions=_versions(path, notes),
        alarms=tuple(read_alarms(path, notes)),
        state=State.UNKNOWN,
        notes=(),
    )
    state = _state(run)
    if state is State.RUNNING:
        notes.append(f"still being written: step {run.last_step} of {run.steps}")
    elif state is State.STOPPED:
        notes.append(f"stopped at step {run.last_step} of {run.steps}; go on with: "
                     f"evenhand train --resume {path}")  # fmt: skip
    return Run(
        run.path, run.rows, run.settings, run.versions, run.alarms, state,
        tuple(f"{path}: {note}" for note in notes),
    )  # fmt: skip


def _settings(path: Path, notes: list[str]) -> dict[str, Any]:
    file = RunFolder(path).recipe_path
    try:
        settings = dict(_flat(tomllib.loads(file.read_bytes().decode())))
    except FileNotFoundError:
        notes.append("recipe.toml is missing; settings are unknown")
    except (OSError, ValueError) as error:  # TOML and UTF-8 errors are ValueErrors
        notes.append(f"recipe.toml cannot be read ({_reason(error)}); settings are unknown")
    else:
        if not settings:
            notes.append("recipe.toml is empty; settings are unknown")
        return settings
    return {}


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _rows(path: Path, notes: list[str]) -> list[Mapping[str, float]]:
    folder = RunFolder(path)
    try:
        lines = folder.metrics.read_bytes().splitlines(keepends=True)
        rows = folder.rows()
    except FileNotFoundError:
        notes.append("metrics.jsonl is missing: no step was finished")
        return []
    except OSError as error:
        notes.append(f"metrics.jsonl cannot be read ({_reason(error)})")
        return []
    half = bool(lines) and not lines[-1].endswith(b"\n")
    damaged = sum(bool(line.strip()) for line in lines) - half - len(rows)
    if half:
        notes.append("the last line of metrics.jsonl is half written and was left out")
    if damaged > 0:
        notes.append(f"metrics.jsonl: {damaged} damaged line(s) were left out")
    if not rows and not half and not damaged:
        notes.append("metrics.jsonl is empty: no step was finished")
    latest = {row["step"]: row for row in rows}
    return [_numbers(latest[step]) for step in sorted(latest)]


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _versions(path: Path, notes: list[str]) -> dict[str, Any]:
    file = path / "versions.json"
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        notes.append("versions.json is missing")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"versions.json cannot be read ({_reason(error)})")
        return {}
    return value if isinstance(value, dict) else {}


def read_alarms(path: Path, notes: list[str]) -> list[Alarm]:
    """Return the alarms of a run folder; a note is added for lines that cannot be read."""
    try:
        lines = (path / ALARMS).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{ALARMS} cannot be read ({_reason(error)})")
        return []
    found = []
    damaged = 0
    for line in lines:
        try:
            data = json.loads(line)
            texts = [str(data.get(n) or "") for n in ("action", "message", "cause", "remedy")]
            found.append(Alarm(int(data["step"]), str(data["alarm"]), *texts))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged += line.endswith(b"\n") and bool(line.strip())
    if damaged:
        notes.append(f"{ALARMS}: {damaged} damaged line(s) were left out")
    return found


def _state(run: Run) -> State:
    if run.steps is None:
        return State.UNKNOWN
    if run.last_step >= run.steps:
        return State.FINISHED
    try:
        age = time.time() - max(
            file.stat().st_mtime for file in run.path.iterdir() if file.is_file()
        )
    except (OSError, ValueError):
        return State.UNKNOWN
    return State.RUNNING if age < LIVE_SECONDS else State.STOPPED


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return " ".join((text or type(error).__name__).split())


# --- families ------------------------------------------------------------------------------------


def families(runs: Sequence[Run]) -> list[Family]:
    """Group runs whose recipes differ in nothing but the seed (and bookkeeping), in given order."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    members = list(groups.values())
    labels = [_label(group[0].path) for group in members]
    for at, group in enumerate(members):
        if labels.count(labels[at]) > 1:
            labels[at] = f"{labels[at]} ({_base(group[0].path).parent.name})"
    for at, label in enumerate(labels):
        if labels.count(label) > 1:
            labels[at] = f"{label} #{labels[: at + 1].count(label)}"
    return [Family(label, tuple(group)) for label, group in zip(labels, members, strict=True)]


def _identity(run: Run) -> Any:
    if not run.settings:
        return str(run.path)
    own = {k: v for k, v in run.settings.items() if not k.startswith(_SAME_ANYWAY)}
    return json.dumps(own, sort_keys=True, default=str)


def _base(path: Path) -> Path:
    full = path.resolve()
    return full.parent if _SEED_FOLDER.fullmatch(full.name) else full


def _label(path: Path) -> str:
    return _base(path).name


def differing_settings(found: Sequence[Family]) -> list[tuple[str, list[str]]]:
    """Return the settings in which families differ, each with its value in each family.

    Where the seeds of a family differ among themselves, all its values are named.
    """
    names = sorted({name for f in found for run in f.runs for name in run.settings})
    rows = []
    for name in names:
        values = [_values(family, name) for family in found]
        if len(set(values)) > 1 or (name == "seed" and any("," in value for value in values)):
            rows.append((name, values))
    return rows


def _values(family: Family, name: str) -> str:
    values = [str(run.settings.get(name, "–")) for run in family.runs if run.settings]
    return ", ".join(dict.fromkeys(values)) or "unknown"
