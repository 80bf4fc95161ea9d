"""The folder of an evaluation: what was asked, every rollout as it ends, and the results.

    evaluation.json          the manifest: model, sets, search engine, settings, seed, versions
    trajectories/SET.jsonl   the rollouts of a set, appended batch by batch
    results.json             metrics with intervals
    table.md, table.csv      the same for people and spreadsheets

An evaluation that was stopped goes on with the same command: whole lines are kept, a half line is
dropped, and questions that an environment fault ended are asked again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from evenhand.core.errors import ConfigError, DataError
from evenhand.core.files import atomic_write
from evenhand.core.versions import versions
from evenhand.datasets import Question
from evenhand.trajectory import (
    StopReason,
    Trajectory,
    parse_line,
    read_trajectories,
    to_line,
    write_trajectories,
)

SCHEMA = "evenhand.evaluation/1"
MANIFEST = "evaluation.json"
RESULTS = "results.json"
TRAJECTORIES = "trajectories"

_MUST_MATCH = ("model", "baseline", "retriever", "settings", "seed")


def is_evaluation(path: Path) -> bool:
    """Whether a folder was written by an evaluation."""
    return (path / MANIFEST).is_file()


def read_evaluation(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of an evaluation, set by set.

    Raises:
        DataError: there are none, or a file is damaged.
    """
    files = sorted((path / TRAJECTORIES).glob("*.jsonl"))
    if not files:
        raise DataError(f"{path} holds no trajectories yet; wait for the evaluation")
    for file in files:
        yield from read_trajectories(file)


def question_hash(questions: Iterable[Question]) -> str:
    """Return a hash of ids, texts and accepted answers, in order."""
    digest = hashlib.sha256()
    for question in questions:
        row = [question.dataset, question.id, question.question, list(question.golden_answers)]
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


class EvaluationFolder:
    """An evaluation on disk; open it with `open`, and close it.

    Attributes:
        path: the folder.
        manifest: what was asked.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: IO[str]) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock

    @classmethod
    def open(cls, path: Path, manifest: Mapping[str, Any]) -> EvaluationFolder:
        """Begin an evaluation, or go on with one of the same settings.

        Sets may be added to an earlier evaluation.

        Args:
            path: the folder.
            manifest: `model`, `baseline`, `retriever`, `settings`, `seed`, and `sets`: a set to
                its number of questions `n` and their hash `questions`.

        Raises:
            ConfigError: it holds an evaluation with other settings (the message says which), or
                another process is writing there.
            DataError: it cannot be written, or holds something else.
        """
        with _plain_errors(path):
            (path / TRAJECTORIES).mkdir(parents=True, exist_ok=True)
            lock = (path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigError(
                f"another process is evaluating into {path}; wait for it or give another -o"
            ) from None
        try:
            merged = _merged(path, json.loads(json.dumps(manifest)))
            _write_json(path / MANIFEST, merged)
        except BaseException:
            lock.close()
            raise
        return cls(path, merged, lock)

    def close(self) -> None:
        """Let others write again."""
        self._lock.close()

    def trajectories(self, dataset: str) -> Path:
        """Return the file of a set."""
        return self.path / TRAJECTORIES / f"{dataset}.jsonl"

    def resume(self, dataset: str) -> dict[str, Trajectory]:
        """Return the rollouts of a set by question id, and put the file right.

        A last line without its end is dropped, and so are rollouts that an environment fault ended.

        Raises:
            DataError: a whole line is damaged.
        """
        path = self.trajectories(dataset)
        if not path.exists():
            return {}
        with _plain_errors(path):
            lines = path.read_bytes().splitlines(keepends=True)
        kept: dict[str, Trajectory] = {}
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                continue
            where = f"{path}, line {number}"
            trajectory = parse_line(line, where)
            if trajectory.question_id is None or trajectory.question_id in kept:
                raise DataError(f"{where}: question {trajectory.question_id!r} is missing or "
                                "stands twice; remove the file and evaluate again")  # fmt: skip
            if trajectory.stop_reason is not StopReason.FAILED:
                kept[trajectory.question_id] = trajectory
        if len(kept) < len(lines):
            write_trajectories(path, kept.values())
        return kept

    def others(self, names: Iterable[str]) -> dict[str, list[Trajectory]]:
        """Return the rollouts of earlier sets that are not among `names`."""
        more = [name for name in self.manifest["sets"] if name not in set(names)]
        return {
            name: list(read_trajectories(path))
            for name in more
            if (path := self.trajectories(name)).is_file()
        }

    def earlier_results(self) -> dict[str, Any]:
        """Return the results that were written last; empty if there are none."""
        path = self.path / RESULTS
        try:
            found = json.loads(path.read_bytes()) if path.is_file() else {}
        except ValueError:
            found = {}
        return found if isinstance(found, dict) else {}

    def append(self, dataset: str, trajectories: Sequence[Trajectory]) -> None:
        """Append rollouts; they are on disk when this returns.

        Raises:
            DataError: the disk is full or cannot be written.
        """
        data = "".join(to_line(each) + "\n" for each in trajectories).encode()
        path = self.trajectories(dataset)
        with _plain_errors(path), path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def write_results(self, results: Mapping[str, Any], tables: Mapping[str, str]) -> None:
        """Write the results and the tables (file name to text); each appears whole."""
        _write_json(self.path / RESULTS, results)
        for name, text in tables.items():
            with atomic_write(self.path / name) as file:
                file.write(text)


def _merged(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    fresh = {"schema": SCHEMA, **manifest, "versions": versions()}
    if not is_evaluation(path):
        if any((path / TRAJECTORIES).iterdir()):
            raise DataError(f"{path} holds trajectories and no {MANIFEST}, so nobody knows how "
                            "they came about; give another -o")  # fmt: skip
        return fresh
    try:
        before = json.loads((path / MANIFEST).read_bytes())
    except ValueError:
        raise DataError(
            f"{path / MANIFEST} is damaged; remove the folder or give another -o"
        ) from (None)
    if not isinstance(before, dict) or before.get("schema") != SCHEMA:
        raise DataError(f"{path} was written by another version (schema is not {SCHEMA!r}); give "
                        "another -o")  # fmt: skip
    old_sets, new_sets = before.get("sets", {}), manifest["sets"]
    pairs = [(name, before.get(name), manifest[name]) for name in _MUST_MATCH]
    pairs += [
        (f"sets.{name}", old_sets[name], new_sets[name]) for name in new_sets.keys() & old_sets
    ]
    for name, old, new in pairs:
        key, was, given = _first_difference(name, old, new)
        if key is not None:
            raise ConfigError(
                f"{path} holds an evaluation with {key} = {was}, and {given} was asked for; give "
                "another -o, or the same settings to go on"
            )
    return {**fresh, "sets": {**old_sets, **new_sets}}


def _first_difference(name: str, old: Any, new: Any) -> tuple[str | None, str, str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            found = _first_difference(f"{name}.{key}", old.get(key), new.get(key))
            if found[0] is not None:
                return found
        return None, "", ""
    if old == new:
        return None, "", ""
    return name, f"{json.dumps(old):.60}", f"{json.dumps(new):.60}"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        json.dump(value, file, indent=1, allow_nan=False, ensure_ascii=False)
        file.write("\n")


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}; free some space or choose "
            "another folder"
        ) from error
