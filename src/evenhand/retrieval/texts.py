"""Settings of retrievers as texts (`key=value` of the command line), read by signatures."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from evenhand.core.errors import ConfigError
from evenhand.core.settings import parse_setting

_EXAMPLES: dict[str, Any] = {"bool": False, "int": 0, "float": 0.0}


def read_texts(
    texts: Mapping[str, str], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Read each text as the type of the parameter of its name.

    The annotation says the type, else the default value. A text stays as it is, blanks included;
    `none` is `None` where the annotation allows it. A parameter of another type, or without any, is
    read as JSON, and is the text itself where it is none.

    Raises:
        ConfigError: the text is not of the type, or a number that is not finite.
    """
    return {name: _read(name, text, parameters.get(name)) for name, text in texts.items()}


def _read(name: str, text: str, parameter: inspect.Parameter | None) -> Any:
    kinds = _kinds(parameter)
    if "None" in kinds and text.lower() == "none":
        return None
    if kinds & {"str", "Path"}:
        return text
    for kind, example in _EXAMPLES.items():
        if kind in kinds:
            value = parse_setting(name, text, example)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name} must be a finite number, got {text!r}")
            return value
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _kinds(parameter: inspect.Parameter | None) -> set[str]:
    """Return the names of the types of a parameter, as far as they are simple."""
    if parameter is None:
        return set()
    annotation = parameter.annotation
    if annotation is parameter.empty:
        default = parameter.default
        return set() if default in (None, parameter.empty) else {type(default).__name__}
    if isinstance(annotation, type):
        return {annotation.__name__}
    outside_brackets = re.sub(r"\[.*?\]", "", str(annotation))
    return {part.strip() for part in outside_brackets.split("|")}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
