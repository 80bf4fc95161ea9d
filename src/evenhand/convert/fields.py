"""Reading the fields of peers' records: rewards, accepted answers, leftovers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from evenhand.core.arrays import MAX_REWARD
from evenhand.core.errors import DataError

MAX_METADATA = 500
"""Longest JSON text of a field that has no home in a trajectory and is still kept."""


def first_field(data: Mapping[str, Any], names: Iterable[str]) -> tuple[str, Any]:
    """Return `(name, value)` of the first of `names` that is present and not null."""
    for name in names:
        if data.get(name) is not None:
            return name, data[name]
    return "", None


def text_field(data: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that must hold text."""
    value = data.get(name)
    if not isinstance(value, str):
        raise DataError(f"{where}, field {name}: expected text, got {describe(value)}")
    return value


def number(value: Any, where: str, name: str, limit: float = math.inf) -> float | None:
    """Return a number; null and `NaN` (not computed) give `None`.

    Raises:
        DataError: not a number, infinite, or of larger magnitude than `limit`.
    """
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise DataError(f"{where}, field {name}: expected a number or null, got {describe(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if math.isnan(result):
        return None
    if math.isinf(result) or abs(result) > limit:
        allowed = "a finite number" if limit == math.inf else f"a number in ±{limit:g}"
        raise DataError(f"{where}, field {name}: expected {allowed}, got {describe(value)}")
    return result


def reward(value: Any, where: str, name: str) -> float | None:
    """Return a reward; null, `NaN` and an absent one give `None` (not scored)."""
    return number(value, where, name, MAX_REWARD)


def step(value: Any, where: str, name: str = "step") -> int | None:
    """Return a training step; older TRL tables hold it as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        value = int(value)
    result = number(value, where, name)
    if result is None:
        return None
    if result < 0 or result >= 2**53 or result != int(result):
        raise DataError(f"{where}, field {name}: expected a whole number, got {describe(value)}")
    return int(result)


def accepted_answers(value: Any, where: str, name: str) -> tuple[str, ...] | None:
    """Return accepted answers; `None` where the dump does not tell (null or an empty text).

    An object is looked into for `ground_truth` and `target`, as Search-R1's data has them.
    Numbers become text.

    Raises:
        DataError: an empty list, or something that holds no answers.
    """
    while isinstance(value, dict):
        _, value = first_field(value, ("ground_truth", "target"))
    if value is None or value == "":
        return None
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise DataError(
            f"{where}, field {name}: the list of accepted answers is empty; give at least one, or "
            "null where they are not known"
        )
    answers = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise DataError(
                f"{where}, field {name}: expected texts as accepted answers, got {describe(item)}"
            )
        answers.append(item if isinstance(item, str) else json.dumps(item))
    return tuple(answers)


def leftovers(data: Mapping[str, Any], used: Iterable[str]) -> dict[str, Any]:
    """Return the fields that are not in `used`, as far as they are small."""
    taken = frozenset(used)
    kept = {}
    for name, value in data.items():
        if name in taken or value is None:
            continue
        try:
            text = json.dumps(value, default=str)
        except (ValueError, TypeError, RecursionError):
            continue
        if len(text) <= MAX_METADATA:
            kept[name] = json.loads(text, parse_constant=lambda _: None)  # NaN has no JSON form
    return kept


def scores(
    data: Mapping[str, Any], used: Iterable[str], where: str
) -> dict[str, float | None] | None:
    """Return the numeric fields that are not in `used`; true and false count as 1 and 0."""
    taken = frozenset(used)
    found = {
        name: number(value, where, name)
        for name, value in data.items()
        if name not in taken and isinstance(value, int | float)
    }
    return found or None


def digest(*parts: Any) -> str:
    """Return a short stable hash of JSON-like values."""
    try:
        text = json.dumps(parts, sort_keys=True, default=str)
    except (ValueError, TypeError, RecursionError):
        text = repr(parts)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def group_name(step_number: int | None, *parts: Any) -> str:
    """Return the name of a group: its step, if known, and a hash of what its members share."""
    prefix = "" if step_number is None else f"step{step_number}-"
    return prefix + digest(*parts)


def describe(value: Any) -> str:
    """Return a short form of a value for a message."""
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
