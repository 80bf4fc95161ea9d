"""From a line to what the index keeps of it; tolerant, as showing checks the line in full."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from evenhand.trajectory import SCHEMA
from evenhand.trajectory.protocol import first_action

_STEP = re.compile(r"step-(\d+)")
_LARGEST = 2**53
MAX_TEXT = 20_000
"""Characters of a rollout that a search for text looks at."""


@dataclass(frozen=True, slots=True)
class Record:
    """The columns of a rollout in the index.

    Attributes:
        id: of the rollout.
        grp: its group.
        step: training step, from the rollout or the name of its file.
        question: the question.
        dataset: where the question is from.
        hops: facts that it needs.
        reward: `None` if unscored.
        searches: executed searches.
        format_ok: 1 if the format was obeyed.
        stop: stop reason.
        tokens: policy tokens.
        advantage: that with the largest magnitude, `None` if uncredited.
        punished: searches with a positive step score and a negative advantage.
        answer: what it answered.
        strip: `tokens:advantage` of its policy segments.
        text: question, thoughts, queries, answers and titles, for searching.
    """

    id: str
    grp: str
    step: int | None
    question: str
    dataset: str
    hops: int | None
    reward: float | None
    searches: int
    format_ok: int
    stop: str
    tokens: int
    advantage: float | None
    punished: int
    answer: str
    strip: str
    text: str


COLUMNS = tuple(field.name for field in fields(Record))


class NotARolloutError(ValueError):
    """A line that is no trajectory of this package's format."""


def record(line: bytes, file_name: str) -> Record:
    """Return the columns of a line.

    Raises:
        NotARolloutError: the line is cut or damaged, or no trajectory.
    """
    try:
        data = json.loads(line)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise NotARolloutError("no trajectory")
        return _record(data, file_name)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise NotARolloutError(str(error)) from None


def _record(data: Mapping[str, Any], file_name: str) -> Record:
    segments = data["segments"]
    kinds = [segment["kind"] for segment in segments]
    mine = [s for s in segments if s["source"] == "policy"]
    values = [_number(s["advantage"]) for s in mine if s.get("advantage") is not None]
    answer = next((s["text"] for s in reversed(mine) if s["kind"] == "answer"), "")
    action = first_action(answer)
    step = data.get("step")
    if step is None and (found := _STEP.search(file_name)):
        step = int(found.group(1))
    titles = [d["title"] for s in segments for d in s.get("documents") or ()]
    text = "\n".join([data["question"], *(s["text"] for s in mine), *titles, data["id"]])
    reward = data["reward"]
    return Record(
        id=clean(str(data["id"])),
        grp=clean(str(data["group"])),
        step=_whole(step),
        question=clean(data["question"]),
        dataset=clean(str(data.get("dataset") or "")),
        hops=_whole(data.get("hops")),
        reward=None if reward is None else _number(reward),
        searches=sum(pair == ("search", "information") for pair in pairwise(kinds)),
        format_ok=int(bool(data["format_ok"])),
        stop=clean(str(data["stop_reason"])),
        tokens=_whole(sum(int(s["n_tokens"]) for s in mine)) or 0,
        advantage=max(values, key=abs, default=None),
        punished=sum((s.get("step_score") or 0) > 0 > (s.get("advantage") or 0) for s in mine),
        answer=clean(action.content if action else "")[:200],
        strip=" ".join(
            f"{int(s['n_tokens'])}:{_number(s.get('advantage') or 0):.3g}" for s in mine
        ),
        text=clean(text)[:MAX_TEXT],
    )


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise NotARolloutError("a number is not finite")
    return number


def _whole(value: Any) -> int | None:
    if value is None:
        return None
    number = int(value)
    if abs(number) >= _LARGEST:
        raise NotARolloutError("a number is too large")
    return number


def clean(text: str) -> str:
    """Return text as SQLite can hold it: without half surrogate pairs and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
