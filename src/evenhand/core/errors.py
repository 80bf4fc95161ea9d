"""Every error that evenhand raises on purpose, and the one place that says what to install.

A message states what is wrong, what was found and what to do about it, in that order. The command
line prints it as one line and leaves with exit code 2.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class EvenhandError(Exception):
    """Base class: anything a caller may want to catch from evenhand."""


class ConfigError(EvenhandError):
    """A setting, a name or a combination of options cannot be used."""


class DataError(EvenhandError):
    """Input data (a file, a line, an array) breaks its contract."""


class RetrievalError(EvenhandError):
    """A search could not be answered after its retries (an environment fault)."""


class SingleMemberGroupsWarning(UserWarning):
    """Every group of a batch has one member, so every group-relative advantage is 0."""


class MissingExtraError(EvenhandError):
    """A feature needs a package that the base install leaves out."""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional `module` or say how to install it.

    Args:
        module: dotted name of the module to import.
        extra: the extra of evenhand that brings it.
        purpose: what needs it, as a noun phrase for the message.

    Raises:
        MissingExtraError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is there but lacks a dependency of its own must not be reported as absent.
        if error.name is not None and not module.startswith(error.name.split(".")[0]):
            raise
        raise MissingExtraError(
            f"{purpose} needs the package '{module.split('.')[0]}', which is not installed; "
            f"run: pip install 'evenhand[{extra}]'"
        ) from error
