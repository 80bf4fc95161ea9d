"""Checks of single settings, and their text form on the command line (`key=value`)."""

from __future__ import annotations

import math
from typing import Any

from evenhand.core.errors import ConfigError


def check_number(value: float, name: str, low: float, high: float) -> float:
    """Return `value` as a float if it is a number in `[low, high]`, else raise a `ConfigError`."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        raise ConfigError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}")
    return number


def check_ddof(ddof: int) -> int:
    """Return `ddof` if it is 0 (population deviation) or 1 (sample deviation)."""
    if isinstance(ddof, bool) or ddof not in (0, 1):
        raise ConfigError(f"ddof must be 0 (population) or 1 (sample), got {ddof!r}")
    return int(ddof)


def check_choice(value: str, name: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`, else raise a `ConfigError`."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def split_setting(text: str) -> tuple[str, str]:
    """Split `key=value`; the value stays as it is, blanks included (a prefix may end in one).

    Raises:
        ConfigError: no equals sign or no key.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"expected key=value, got {text!r}")
    return key.strip(), value


def parse_setting(name: str, text: str, default: Any, *, nullable: bool = False) -> Any:
    """Read the text of a setting as the type of its default.

    Args:
        name: of the setting, for messages.
        text: what the user wrote.
        default: its default value.
        nullable: whether `none` stands for `None`.

    Raises:
        ConfigError: the text is not of that type.
    """
    if nullable and text.strip().lower() == "none":
        return None
    if isinstance(default, bool):
        choices = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
        if text.strip().lower() not in choices:
            raise ConfigError(f"{name} must be true or false, got {text!r}")
        return choices[text.strip().lower()]
    if isinstance(default, int | float):
        kind = int if isinstance(default, int) else float
        try:
            return kind(text)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{name} must be {noun}, got {text!r}") from None
    return text
