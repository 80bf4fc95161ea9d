"""Filters and sorting of the viewer, as parameters of one SQL query."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from evenhand.core.errors import ConfigError

PAGE = 60
"""Rows of one page of the list."""

SORTS = {
    "newest": "step DESC, file DESC, grp, key",
    "oldest": "step, file, grp, key",
    "reward": "reward DESC, key",
    "worst": "reward IS NULL, reward, key",
    "advantage": "abs(advantage) DESC, key",
    "searches": "searches DESC, key",
    "longest": "tokens DESC, key",
    "question": "question COLLATE NOCASE, step, key",
}
"""Name of an order to its SQL."""

_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_EXACT = re.compile(_NUMBER)
_BETWEEN = re.compile(rf"{_NUMBER}(?:-|to|\.\.){_NUMBER}")
_BOUND = re.compile(rf"\s*(<=|>=|<|>){_NUMBER}")


@dataclass(frozen=True, slots=True)
class Filter:
    """What the list is narrowed to; an empty text leaves a field alone.

    Attributes:
        text: words that occur in question, thoughts, queries, answer, titles or id.
        question: words that occur in the question.
        step: `12`, `10-20`, `>10`, `none`.
        searches: the stratum, written likewise.
        reward: written likewise.
        stop: a stop reason.
        source: part of a file's name (`trajectories`, `evaluations`, a file).
        alarm: `any` or the name of an alarm: the steps at which it fired.
        flag: `punished`, `format`.
        group: a group.
        sort: a name of `SORTS`.
    """

    text: str = ""
    question: str = ""
    step: str = ""
    searches: str = ""
    reward: str = ""
    stop: str = ""
    source: str = ""
    alarm: str = ""
    flag: str = ""
    group: str = ""
    sort: str = "newest"


def where(wanted: Filter, alarm_steps: Collection[int]) -> tuple[str, list[object]]:
    """Return the condition of a filter and its parameters.

    Args:
        wanted: the filter.
        alarm_steps: the steps that `wanted.alarm` stands for.

    Raises:
        ConfigError: a condition on a number cannot be read, or an unknown flag or order.
    """
    parts: list[str] = []
    values: list[object] = []
    for name in ("step", "searches", "reward"):
        text = getattr(wanted, name).strip()
        if text:
            part, numbers = _condition(name, text)
            parts.append(part)
            values += numbers
    if wanted.text.strip():
        parts.append("key IN (SELECT key FROM texts WHERE text LIKE ? ESCAPE '\\')")
        values.append(_like(wanted.text))
    if wanted.question.strip():
        parts.append("question LIKE ? ESCAPE '\\'")
        values.append(_like(wanted.question))
    for column, value in (("stop", wanted.stop), ("grp", wanted.group)):
        if value:
            parts.append(f"{column} = ?")
            values.append(value)
    if wanted.source:
        parts.append("file IN (SELECT id FROM files WHERE name LIKE ? ESCAPE '\\')")
        values.append(f"{_like(wanted.source)[1:-1]}%")
    if wanted.alarm:
        steps = sorted(alarm_steps)
        parts.append(f"step IN ({', '.join('?' * len(steps))})")
        values += steps
    if wanted.flag:
        if wanted.flag not in ("punished", "format"):
            raise ConfigError(f"unknown flag {wanted.flag!r}; known: punished, format")
        parts.append("punished > 0" if wanted.flag == "punished" else "format_ok = 0")
    if wanted.sort not in SORTS:
        raise ConfigError(f"unknown order {wanted.sort!r}; known: {', '.join(SORTS)}")
    return " AND ".join(parts) or "1", values


def _condition(name: str, text: str) -> tuple[str, Sequence[object]]:
    if text.lower() == "none":
        return f"{name} IS NULL", ()
    if match := _EXACT.fullmatch(text):
        return f"{name} = ?", (float(match.group(1)),)
    if match := _BETWEEN.fullmatch(text):
        return f"{name} BETWEEN ? AND ?", (float(match.group(1)), float(match.group(2)))
    if match := _BOUND.fullmatch(text):
        return f"{name} {match.group(1)} ?", (float(match.group(2)),)
    raise ConfigError(f"{name} {text!r} is no condition; write 3, 2-5, >3, <=0.5 or none")


def _like(text: str) -> str:
    escaped = re.sub(r"([%_\\])", r"\\\1", text.strip())
    return f"%{escaped}%"
