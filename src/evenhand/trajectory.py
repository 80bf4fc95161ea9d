"""The record of one rollout, and the JSON-lines file that holds many.

The file is UTF-8, one trajectory a line, gzip by suffix. `docs/trajectory-file.md` describes every
field. Reading checks all of it: an error names file, line and field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenhand.arrays import MAX_REWARD
from evenhand.errors import DataError
from evenhand.files import atomic_write, numbered_lines
from evenhand.protocol import Document, first_action

SCHEMA = "evenhand.trajectory/1"

_E = TypeVar("_E", bound=StrEnum)


class Source(StrEnum):
    """Who wrote a segment."""

    POLICY = "policy"
    """Sampled by the model: the only text that carries credit."""
    ENVIRONMENT = "environment"
    """Prompt, retrieved documents, notices: never trained."""


class Kind(StrEnum):
    """What a segment is."""

    SEARCH = "search"
    """The policy asks the search engine; executed if an information segment follows."""
    ANSWER = "answer"
    """The policy's final answer."""
    INVALID = "invalid"
    """A policy turn without a usable action."""
    TRUNCATED = "truncated"
    """A policy turn that a limit cut."""
    PROMPT = "prompt"
    """What the environment opened with."""
    INFORMATION = "information"
    """The documents that a search returned, as shown."""
    NOTICE = "notice"
    """Any other message of the environment."""


POLICY_KINDS = frozenset({Kind.SEARCH, Kind.ANSWER, Kind.INVALID, Kind.TRUNCATED})


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """The policy answered."""
    SEARCH_LIMIT = "search_limit"
    """The policy searched again when no search was left."""
    TOKEN_LIMIT = "token_limit"
    """A turn or the rollout used up its tokens."""
    CONTEXT_LIMIT = "context_limit"
    """Nothing more fits into the context."""
    INVALID_ACTION = "invalid_action"
    """Too many turns without a usable action."""
    FAILED = "failed"
    """An environment fault: the reward is null and the rollout leaves every statistic."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text by one author.

    Attributes:
        source: policy or environment.
        kind: what it is.
        text: the text as it stood in the context.
        n_tokens: its length in tokens (or in the unit that `metadata["n_tokens_unit"]` names).
        query: what a search asked for.
        documents: on information, the documents that were shown, in order.
        error: on a notice, what went wrong.
        token_ids: `[n_tokens]` ids, if recorded.
        logprobs: `[n_tokens]` log-probabilities of the sampler, if recorded.
        step_score: written by `credit` on executed searches, in [0, 1].
        advantage: written by `credit`; 0 on the environment's segments.
        metadata: whatever else the file had.
    """

    source: Source
    kind: Kind
    text: str
    n_tokens: int
    query: str | None = None
    documents: tuple[Document, ...] | None = None
    error: str | None = None
    token_ids: NDArray[np.int64] | None = field(default=None, compare=False)
    logprobs: NDArray[np.float64] | None = field(default=None, compare=False)
    step_score: float | None = None
    advantage: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_policy(self) -> bool:
        """Whether the policy sampled it."""
        return self.source is Source.POLICY


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout.

    Attributes:
        id: unique in its file.
        group: the rollouts that are compared with one another share it; unique per step and
            question.
        question: the question.
        golden_answers: accepted answers; `None` where the source does not tell.
        reward: a number of magnitude at most 1e6; `None` if it could not be scored.
        format_ok: whether the policy obeyed the protocol.
        stop_reason: why the episode ended.
        segments: in order.
        step: training step.
        question_id: identity of the question in its data set.
        dataset: name of the data set.
        hops: how many facts the question needs.
        supporting_titles: titles of the pages that hold them.
        scores: further scores by name.
        think_in_prompt: the environment writes the opening `<think>`.
        metadata: free; unknown top-level fields end up here.
    """

    id: str
    group: str
    question: str
    golden_answers: tuple[str, ...] | None
    reward: float | None
    format_ok: bool
    stop_reason: StopReason
    segments: tuple[Segment, ...]
    step: int | None = None
    question_id: str | None = None
    dataset: str | None = None
    hops: int | None = None
    supporting_titles: tuple[str, ...] | None = None
    scores: Mapping[str, float | None] | None = None
    think_in_prompt: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def is_executed(self, at: int) -> bool:
        """Whether segment `at` is a search that an information segment follows."""
        segments = self.segments
        return (
            segments[at].kind is Kind.SEARCH
            and at + 1 < len(segments)
            and segments[at + 1].kind is Kind.INFORMATION
        )

    def executed_searches(self) -> list[int]:
        """Return the indices of the executed searches, in order."""
        return [at for at in range(len(self.segments)) if self.is_executed(at)]

    def policy_segments(self) -> list[int]:
        """Return the indices of the policy's segments, in order."""
        return [at for at, segment in enumerate(self.segments) if segment.is_policy]


# --- reading -------------------------------------------------------------------------------------

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
        reason = getattr(error, "msg", "nested too deeply")
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
    read = _Reader(data, where)
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
        read.fail("segments", f"expected a list, got {_name(segments)}")
    parsed = tuple(
        _segment(item, f"{where}, field segments[{at}]") for at, item in enumerate(segments)
    )
    for at, segment in enumerate(parsed):
        if segment.kind is Kind.INFORMATION and (at == 0 or parsed[at - 1].kind is not Kind.SEARCH):
            read.fail(f"segments[{at}]", "an information segment must follow a search")
    scores = read.mapping("scores") if data.get("scores") is not None else None
    if scores is not None:
        inner = _Reader(scores, f"{where}, field scores")
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
        raise DataError(f"{where}: expected an object, got {_name(data)}")
    read = _Reader(data, where)
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
        raise DataError(f"{where}: expected an object, got {_name(data)}")
    read = _Reader(data, where)
    for name in ("id", "title", "text"):
        if name not in data:
            raise DataError(f"{where}: field {name} is missing")
    return Document(read.label("id"), read.text("title"), read.text("text"), read.number("score"))


class _Reader:
    """Typed access to the fields of one JSON object; every failure names the field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def fail(self, name: str, message: str) -> NoReturn:
        raise DataError(f"{self.where}, field {name}: {message}")

    def text(self, name: str) -> str:
        value = self.data[name]
        if not isinstance(value, str):
            self._wrong(name, "text", value)
        return value

    def label(self, name: str) -> str:
        value = self.data[name]
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            self._wrong(name, "a text that is not empty", value)
        return value

    def flag(self, name: str) -> bool:
        value = self.data[name]
        if not isinstance(value, bool):
            self._wrong(name, "true or false", value)
        return value

    def integer(self, name: str) -> int | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
            self._wrong(name, "a whole number, not negative", value)
        return int(value)

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(name, "a number or null", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail(name, f"expected a finite number, got {value!r:.40}; write null for a value "
                      "that could not be computed")  # fmt: skip
        if not low <= number <= high:
            self.fail(name, f"expected a number in [{low:g}, {high:g}], got {number:g}")
        return number

    def choice(self, name: str, kind: type[_E]) -> _E:
        value = self.data[name]
        try:
            return kind(value)
        except ValueError:
            self._wrong(name, "one of " + ", ".join(kind), value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._wrong(name, "an object", value)
        return dict(value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong(name, "a list of texts", value)
        return tuple(value)

    def answers(self, name: str) -> tuple[str, ...] | None:
        value = self.data[name]
        if value is None:
            return None
        try:
            return golden_answers(value)
        except DataError as error:
            self.fail(name, str(error))

    def array(self, name: str, dtype: type, n_tokens: int) -> NDArray[Any] | None:
        value = self.data.get(name)
        if value is None:
            return None
        try:
            array: NDArray[Any] = np.asarray(value, dtype=dtype)
        except (TypeError, ValueError, OverflowError):
            self._wrong(name, "a list of numbers", value)
        if array.shape != (n_tokens,):
            self.fail(name, f"has shape {list(array.shape)} and n_tokens is {n_tokens}")
        return array

    def _wrong(self, name: str, expected: str, value: Any) -> NoReturn:
        self.fail(name, f"expected {expected}, got {_name(value)}")


def golden_answers(value: Any) -> tuple[str, ...]:
    """Return accepted answers as a tuple; a bare string is one answer, an array is a list.

    Raises:
        DataError: empty, or not made of texts.
    """
    if isinstance(value, str):
        return (value,)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise DataError(f"expected a list of texts, got {_name(value)}")
    if not value:
        raise DataError("the list of accepted answers is empty; give at least one answer")
    return tuple(value)


def _name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


# --- writing -------------------------------------------------------------------------------------


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
    """Return the JSON line of a trajectory, without a line break."""
    data = trajectory_to_dict(trajectory)
    line = json.dumps(data, ensure_ascii=False, allow_nan=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # garbled rollouts hold half surrogate pairs; escapes carry them
        line = json.dumps(data, allow_nan=False)
    return line


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
