"""Trajectories as JSON lines. Reading checks everything; an error names file, line and field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from evenhand.core.arrays import MAX_REWARD
from evenhand.core.errors import DataError
from evenhand.core.files import atomic_write, numbered_lines
from evenhand.trajectory.fields import FieldReader, name_of
from evenhand.trajectory.protocol import Document, first_action
from evenhand.trajectory.records import POLICY_KINDS, Kind, Segment, Source, StopReason, Trajectory

SCHEMA = "evenhand.trajectory/1"

_REQUIRED = ("id", "group", "question", "golden_answers", "reward", "format_ok", "stop_reason",
             "segments")  # fmt: skip
_OPTIONAL = ("step", "question_id", "dataset", "hops", "supporting_titles", "scores",
             "think_in_prompt")  # fmt: skip
_SEGMENT_FIELDS = ("source", "kind", "text", "n_tokens", "query", "documents", "error", "token_ids",
                   "logprobs", "step_score", "advantage", "metadata")  # fmt: skip


def read_trajectories(path: Path | str) -> Iterator[Trajectory]:
    """Yield the trajectories of a file one by one; the file is never held whole.

    Raises:
        DataError: at the first line that breaks the format, naming file, line and field; for an id
            that occurs twice; for a file without a trajectory.
    """
    path = Path(path)
    seen: set[int] = set()
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        trajectory = parse_line(line, where)
        # Hashes instead of the ids: 8 bytes each on files of many millions of lines.
        key = hash(trajectory.id)
        if key in seen:
            raise DataError(f"{where}, field id: {trajectory.id!r} occurs a second time; ids are "
                            "unique in a file")  # fmt: skip
        seen.add(key)
        yield trajectory
    if not seen:
        raise DataError(f"{path} holds no trajectory; the file is empty")


def parse_json(line: bytes | str, where: str) -> dict[str, Any]:
    """Parse one line as a JSON object or raise a `DataError` that starts with `where`."""
    try:
        # A mark of byte order, which some editors write, is no part of the line.
        text = line if isinstance(line, str) else line.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        reason = "nested too deeply" if is_deep else getattr(error, "msg", "a number is too long")
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"{where}: not JSON: {reason}{column}; the line is cut or damaged"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_line(line: bytes | str, where: str) -> Trajectory:
    """Return the trajectory that a line holds; errors start with `where`."""
    return trajectory_from_dict(parse_json(line, where), where)


def trajectory_from_dict(data: Mapping[str, Any], where: str = "trajectory") -> Trajectory:
    """Build and check a trajectory from the fields of the file format.

    Raises:
        DataError: a field is missing or has a wrong value; the message starts with `where`.
    """
    read = FieldReader(data, where)
    schema = data.get("schema")
    if schema != SCHEMA:
        raise DataError(
            f"{where}, field schema: expected {SCHEMA!r}, got {schema!r}; convert dumps of other "
            "tools with: evenhand convert IN -o OUT"
        )
    missing = [name for name in _REQUIRED if name not in data]
    if missing:
        raise DataError(f"{where}: field {missing[0]} is missing")
    known = {"schema", "metadata", *_REQUIRED, *_OPTIONAL}
    metadata = read.mapping("metadata")
    extra = {key: value for key, value in data.items() if key not in known}
    stop_reason = read.choice("stop_reason", StopReason)
    reward = read.number("reward", -MAX_REWARD, MAX_REWARD)
    if stop_reason is StopReason.FAILED and reward is not None:
        read.fail("reward", f"a failed rollout has reward null, got {reward:g}")
    segments = data["segments"]
    if not isinstance(segments, list):
        read.fail("segments", f"expected a list, got {name_of(segments)}")
    parsed = tuple(
        _segment(item, f"{where}, field segments[{at}]") for at, item in enumerate(segments)
    )
    for at, segment in enumerate(parsed):
        if segment.kind is Kind.INFORMATION and (at == 0 or parsed[at - 1].kind is not Kind.SEARCH):
            read.fail(f"segments[{at}]", "an information segment must follow a search")
    scores = read.mapping("scores") if data.get("scores") is not None else None
    if scores is not None:
        inner = FieldReader(scores, f"{where}, field scores")
        scores = {name: inner.number(name) for name in scores}
    return Trajectory(
        id=read.label("id"),
        group=read.label("group"),
        question=read.text("question"),
        golden_answers=read.answers("golden_answers"),
        reward=reward,
        format_ok=read.flag("format_ok"),
        stop_reason=stop_reason,
        segments=parsed,
        step=read.integer("step"),
        question_id=None if data.get("question_id") is None else read.label("question_id"),
        dataset=None if data.get("dataset") is None else read.text("dataset"),
        hops=read.integer("hops"),
        supporting_titles=read.texts("supporting_titles"),
        scores=scores,
        think_in_prompt=data.get("think_in_prompt") is not None and read.flag("think_in_prompt"),
        metadata={**extra, **metadata},
    )


def _segment(data: Any, where: str) -> Segment:
    if not isinstance(data, dict):
        raise DataError(f"{where}: expected an object, got {name_of(data)}")
    read = FieldReader(data, where)
    for name in ("source", "kind", "text", "n_tokens"):
        if name not in data:
            raise DataError(f"{where}: field {name} is missing")
    source, kind = read.choice("source", Source), read.choice("kind", Kind)
    if (source is Source.POLICY) != (kind in POLICY_KINDS):
        read.fail("kind", f"{kind.value!r} cannot be a segment of the {source.value}")
    n_tokens = read.integer("n_tokens")
    if n_tokens is None:
        read.fail("n_tokens", "expected a whole number, got null")
    text = read.text("text")
    query = None if data.get("query") is None else read.text("query")
    if kind is Kind.SEARCH and query is None:
        action = first_action(text)
        query = action.content if action else ""
    documents = None
    if kind is Kind.INFORMATION:
        if not isinstance(data.get("documents"), list):
            read.fail("documents", "an information segment lists the documents it showed")
        documents = tuple(
            _document(item, f"{where}.documents[{at}]") for at, item in enumerate(data["documents"])
        )
    token_ids = read.array("token_ids", np.int64, n_tokens)
    logprobs = read.array("logprobs", np.float64, n_tokens)
    return Segment(
        source=source,
        kind=kind,
        text=text,
        n_tokens=n_tokens,
        query=query,
        documents=documents,
        error=None if data.get("error") is None else read.text("error"),
        token_ids=token_ids,
        logprobs=logprobs,
        step_score=read.number("step_score", 0.0, 1.0),
        advantage=read.number("advantage"),
        metadata={
            **{key: value for key, value in data.items() if key not in _SEGMENT_FIELDS},
            **read.mapping("metadata"),
        },
    )


def _document(data: Any, where: str) -> Document:
    if not isinstance(data, dict):
        raise DataError(f"{where}: expected an object, got {name_of(data)}")
    read = FieldReader(data, where)
    for name in ("id", "title", "text"):
        if name not in data:
            raise DataError(f"{where}: field {name} is missing")
    return Document(read.label("id"), read.text("title"), read.text("text"), read.number("score"))


def trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of the file format, leaving out optional ones that are not set."""
    data: dict[str, Any] = {"schema": SCHEMA}
    for name in _REQUIRED[:-1]:
        data[name] = getattr(trajectory, name)
    if trajectory.golden_answers is not None:
        data["golden_answers"] = list(trajectory.golden_answers)
    for name in _OPTIONAL:
        value = getattr(trajectory, name)
        if value is not None and value is not False:
            data[name] = list(value) if isinstance(value, tuple) else value
    data["segments"] = [_segment_to_dict(segment) for segment in trajectory.segments]
    if trajectory.metadata:
        data["metadata"] = dict(trajectory.metadata)
    return data


def _segment_to_dict(segment: Segment) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name in _SEGMENT_FIELDS:
        value = getattr(segment, name)
        if value is None or (name == "metadata" and not value):
            continue
        if isinstance(value, np.ndarray):
            value = value.tolist()
        elif name == "documents":
            value = [_document_to_dict(document) for document in value]
        data[name] = value
    return data


def _document_to_dict(document: Document) -> dict[str, Any]:
    data: dict[str, Any] = {"id": document.id, "title": document.title, "text": document.text}
    if document.score is not None:
        data["score"] = document.score
    return data


def to_line(trajectory: Trajectory) -> str:
    """Return the JSON line of a trajectory, without a line break.

    A number in `metadata` that is not finite becomes null.
    """
    data = trajectory_to_dict(trajectory)
    try:
        line = json.dumps(data, ensure_ascii=False, allow_nan=False)
    except ValueError:  # JSON has no nan; unknown fields of other tools may hold one
        data = _without_nan(data)
        line = json.dumps(data, ensure_ascii=False, allow_nan=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # garbled rollouts hold half surrogate pairs; escapes carry them
        line = json.dumps(data, allow_nan=False)
    return line


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_trajectories(path: Path | str, trajectories: Iterable[Trajectory]) -> int:
    """Write a file that appears whole or not at all; return how many trajectories it holds."""
    with atomic_write(Path(path)) as file:
        return write_lines(file, trajectories)


def write_lines(file: IO[str], trajectories: Iterable[Trajectory]) -> int:
    """Write trajectories to an open text file; return how many."""
    count = 0
    for trajectory in trajectories:
        file.write(to_line(trajectory) + "\n")
        count += 1
    return count
