"""From a trajectory to the label of its structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from evenhand.core.errors import ConfigError
from evenhand.core.plugins import did_you_mean, is_object_spec, load_object
from evenhand.trajectory import Trajectory

Label: TypeAlias = int | str
StratumFunction: TypeAlias = Callable[[Trajectory], Label]


def searches(trajectory: Trajectory) -> int:
    """Return the number of executed searches, the structure that arXiv 2510.06214 stratifies by."""
    return len(trajectory.executed_searches())


def stop_reason(trajectory: Trajectory) -> str:
    """Return why the episode ended."""
    return trajectory.stop_reason.value


STRATA: dict[str, StratumFunction] = {"searches": searches, "stop_reason": stop_reason}
_CAPPED = "searches_capped"


def get_stratum(name: str) -> StratumFunction:
    """Return the function that a name stands for.

    Names: `searches` (executed searches), `searches_capped:K` (K and more count as K),
    `stop_reason`, or `module:function` of the user's own, which takes a `Trajectory` and returns an
    integer or a text.

    Raises:
        ConfigError: unknown name, or `K` is not a whole number from 1.
    """
    if name in STRATA:
        return STRATA[name]
    head, _, cap = name.partition(":")
    if head == _CAPPED:
        if not (cap.isascii() and cap.isdigit()) or int(cap) < 1:
            raise ConfigError(f"stratum {name!r} needs a whole number from 1: {_CAPPED}:4")
        limit = int(cap)
        return lambda trajectory: min(searches(trajectory), limit)
    if is_object_spec(name):
        return _checked(name, load_object(name, "stratum function"))
    known = [*STRATA, f"{_CAPPED}:K", "module:function"]
    raise ConfigError(
        f"unknown stratum {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
    )


def _checked(name: str, function: Callable[[Trajectory], object]) -> StratumFunction:
    if not callable(function):
        raise ConfigError(f"stratum {name!r} is a {type(function).__name__}, expected a function")

    def stratum(trajectory: Trajectory) -> Label:
        try:
            label = function(trajectory)
        except Exception as error:
            raise ConfigError(
                f"stratum {name!r} failed on trajectory {trajectory.id!r} with "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(label, bool) or not isinstance(label, int | str):
            raise ConfigError(
                f"stratum {name!r} returned {label!r} for trajectory {trajectory.id!r}; "
                "expected an integer or a text"
            )
        return label

    return stratum
