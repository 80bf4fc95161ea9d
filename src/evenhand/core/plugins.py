"""Names that users give to their own code: `module:function`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evenhand.core.errors import ConfigError


def is_object_spec(name: str) -> bool:
    """Whether `name` is written as `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(p.isidentifier() for p in [*module.split("."), attribute])


def load_object(spec: str, what: str) -> Any:
    """Import the object that `module:attribute` names.

    The current folder is searched too, as `python -m` would: users keep their reward or stratum
    function beside their recipe.

    Args:
        spec: `package.module:attribute`.
        what: what the object is for ("stratum function"), used in messages.

    Raises:
        ConfigError: the spec is malformed, the module cannot be imported or lacks the attribute.
    """
    if not is_object_spec(spec):
        raise ConfigError(f"{what} {spec!r} is not of the form module:function")
    module_name, _, attribute = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{what} {spec!r}: importing {module_name!r} failed with "
            f"{type(error).__name__}: {error}; check the name and that it is on the Python path"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"{what} {spec!r}: module {module_name!r} has no {attribute!r}"
            + did_you_mean(attribute, vars(module))
        ) from None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest valid name, else an empty string."""
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
