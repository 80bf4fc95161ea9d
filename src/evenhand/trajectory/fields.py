"""Typed access to the fields of one JSON object; every failure names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenhand.core.errors import DataError

_E = TypeVar("_E", bound=StrEnum)


class FieldReader:
    """One JSON object and where it stands; absent and null are the same for optional fields."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def fail(self, name: str, message: str) -> NoReturn:
        """Raise a `DataError` about a field."""
        raise DataError(f"{self.where}, field {name}: {message}")

    def text(self, name: str) -> str:
        """Return a text."""
        value = self.data[name]
        if not isinstance(value, str):
            self._wrong(name, "text", value)
        return value

    def label(self, name: str) -> str:
        """Return a text that is not empty; a whole number becomes its text."""
        value = self.data[name]
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            self._wrong(name, "a text that is not empty", value)
        return value

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.data[name]
        if not isinstance(value, bool):
            self._wrong(name, "true or false", value)
        return value

    def integer(self, name: str) -> int | None:
        """Return a whole number that is not negative; `None` if absent or null."""
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
            self._wrong(name, "a whole number, not negative", value)
        return int(value)

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        """Return a finite number in `[low, high]`; `None` if absent or null."""
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
        """Return a member of an enum by its value."""
        value = self.data[name]
        try:
            return kind(value)
        except ValueError:
            self._wrong(name, "one of " + ", ".join(kind), value)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object; empty if absent or null."""
        value = self.data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._wrong(name, "an object", value)
        return dict(value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of texts; `None` if absent or null."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong(name, "a list of texts", value)
        return tuple(value)

    def answers(self, name: str) -> tuple[str, ...] | None:
        """Return accepted answers; `None` if null."""
        value = self.data[name]
        if value is None:
            return None
        try:
            return golden_answers(value)
        except DataError as error:
            self.fail(name, str(error))

    def array(self, name: str, dtype: type, n_tokens: int) -> NDArray[Any] | None:
        """Return `[n_tokens]` numbers; `None` if absent or null."""
        value = self.data.get(name)
        if value is None:
            return None
        try:
            array: NDArray[Any] = np.asarray(value)
            whole = array.size == 0 or array.dtype.kind in "iu"
            fits = whole or (dtype is np.float64 and array.dtype.kind == "f")
            array = array.astype(dtype) if fits else array
        except (TypeError, ValueError, OverflowError):
            fits = False
        if not fits:
            noun = "whole numbers" if dtype is np.int64 else "numbers"
            self._wrong(name, f"a list of {noun}", value)
        if not np.isfinite(array).all():
            self.fail(name, "has values that are not finite")
        if array.shape != (n_tokens,):
            self.fail(name, f"has shape {list(array.shape)} and n_tokens is {n_tokens}")
        return array

    def _wrong(self, name: str, expected: str, value: Any) -> NoReturn:
        self.fail(name, f"expected {expected}, got {name_of(value)}")


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
        raise DataError(f"expected a list of texts, got {name_of(value)}")
    if not value:
        raise DataError("the list of accepted answers is empty; give at least one answer")
    return tuple(value)


def name_of(value: Any) -> str:
    """Return a short text of a JSON value for messages."""
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
