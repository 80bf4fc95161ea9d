"""Reading a recipe: a TOML file, settings on top, checked as a whole, and written down again."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from evenhand.core.errors import ConfigError
from evenhand.core.files import atomic_write, check_input
from evenhand.core.settings import split_setting
from evenhand.training.config import Recipe

FREE = ("data.world", "retrieval.settings", "environment.limits", "credit.settings",
        "optimizer.schedule_settings")  # fmt: skip
"""Tables whose keys belong to what they configure; it checks them itself."""


def load_recipe(path: Path | str | None = None, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `a.b=c` settings; a later one wins.

    Args:
        path: the TOML file; `None` starts from the defaults.
        settings: dotted keys. A value is read as TOML (`0.5`, `true`, `["a", "b"]`), else as text;
            `none` switches an optional setting off.

    Raises:
        ConfigError: a file that is not TOML, an unknown key (with the nearest valid one), a value
            of the wrong type or out of range, or values that do not go together.
        DataError: the file cannot be read.
    """
    data: dict[str, Any] = {}
    where = "settings"
    if path is not None:
        file = check_input(Path(path))
        where = str(path)
        try:
            data = tomllib.loads(file.read_bytes().decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} is not TOML: {error}") from None
    for text in settings:
        key, value = split_setting(text)
        _put(data, key, _value(value))
    return recipe_from(data, where)


def recipe_from(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Check a nested table as a recipe; errors start with `where`."""
    for key in _leaves(data):
        _check_key(key, where)
    try:
        return Recipe.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(f"{where}: {_sentence(error)}") from None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    table = data
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"setting {key!r}: {section!r} is a value, not a section")
        table = inner
    table[name] = value


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in FREE:
            yield key
            yield from _leaves(value, f"{key}.")
        else:
            yield key


@cache
def valid_keys() -> tuple[str, ...]:
    """Return every dotted key of a recipe, sections included."""
    return tuple(_keys(Recipe, ""))


def _keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")


def _check_key(key: str, where: str) -> None:
    known = valid_keys()
    if key in known or any(key.startswith(f"{free}.") for free in FREE):
        return
    raise ConfigError(f"{where}: unknown key {key!r}{_nearest(key, known)}")


def _nearest(key: str, known: Sequence[str]) -> str:
    """Return the nearest valid key: the name itself in another section, else the closest text."""
    name = key.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    near = same_name or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    by_name = {other.rpartition(".")[2]: other for other in known}
    section = key.rpartition(".")[0]
    siblings = {o.rpartition(".")[2]: o for o in known if o.rpartition(".")[0] == section}
    if not same_name:
        for pool in (siblings, by_name):
            close = difflib.get_close_matches(name, list(pool), n=1, cutoff=0.6)
            if close:
                near = [pool[close[0]]]
                break
    return f"; did you mean {near[0]!r}?"


def _sentence(error: ValidationError) -> str:
    found = error.errors()[0]
    key = ".".join(str(part) for part in found["loc"])
    message = str(found["msg"]).removeprefix("Value error, ")
    if found["type"] == "value_error":
        return f"{key}: {message}" if key else message
    message = message[0].lower() + message[1:]
    return f"{key}: {message}, got {found['input']!r:.60}"


# --- writing -------------------------------------------------------------------------------------


def recipe_to_toml(recipe: Recipe) -> str:
    """Return the whole recipe, defaults included, as TOML that `load_recipe` reads back.

    Settings that are `None` stand as the text `none`: TOML has no such value.
    """
    lines: list[str] = []
    _table(recipe.model_dump(), "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], prefix: str, lines: list[str]) -> None:
    inner = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            inner[name] = value
        elif value is None:
            lines.append(f'{_key(name)} = "none"')
        else:
            lines.append(f"{_key(name)} = {_toml(value)}")
    for name, value in inner.items():
        path = f"{prefix}{_key(name)}"
        lines += ["", f"[{path}]"]
        _table(value, f"{path}.", lines)


def _key(name: str) -> str:
    bare = name.replace("_", "").replace("-", "")
    return name if bare.isascii() and bare.isalnum() else _text(name)


def _text(value: str) -> str:
    # TOML's basic strings are JSON's, but for escapes of half surrogates and a bare DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    raise ConfigError(f"{value!r} cannot be written to a recipe; use numbers, texts, lists")


def write_recipe(path: Path, recipe: Recipe) -> None:
    """Write `recipe_to_toml`; the file appears whole."""
    with atomic_write(path) as file:
        file.write(recipe_to_toml(recipe))


def differences(first: Recipe, second: Recipe) -> list[str]:
    """Return the dotted keys in which two recipes differ."""
    return sorted(_differing(first.model_dump(), second.model_dump(), ""))


def _differing(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name in first.keys() | second.keys():
        key, one, other = f"{prefix}{name}", first.get(name), second.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differing(one, other, f"{key}.")
        elif one != other:
            yield key
