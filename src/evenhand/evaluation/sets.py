"""The order of question sets in tables, and the averages over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evenhand.datasets import SETS

UNNAMED = "questions"
"""Set of trajectories that name none."""


@dataclass(frozen=True, slots=True)
class Average:
    """An unweighted average over sets.

    Attributes:
        name: `single_hop`, `multi_hop` or `all`.
        sets: the sets that are there, in the usual order.
        missing: standard sets of the average that are not there.
    """

    name: str
    sets: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name in tables; it says how many sets are there if some are missing."""
        whole = {"single_hop": "single-hop mean", "multi_hop": "multi-hop mean", "all": "mean"}
        total = len(self.sets) + len(self.missing)
        return whole[self.name] + (f", {len(self.sets)} of {total}" if self.missing else "")


_MEMBERS = {
    "single_hop": tuple(name for name, each in SETS.items() if not each.multi_hop),
    "multi_hop": tuple(name for name, each in SETS.items() if each.multi_hop),
    "all": tuple(SETS),
}


def in_order(names: Iterable[str]) -> list[str]:
    """Return set names in the usual order (NQ first), others after them by name."""
    usual = list(SETS)
    return sorted(set(names), key=lambda n: (usual.index(n) if n in SETS else len(usual), n))


def averages(names: Iterable[str]) -> list[Average]:
    """Return the averages that can be formed: single-hop, multi-hop, all standard sets.

    One that would be over fewer than two of the sets present, or over the same sets as one before
    it, is left out. Other sets than the seven standard ones are in none of them.
    """
    present = in_order(names)
    found: list[Average] = []
    for name, members in _MEMBERS.items():
        here = tuple(each for each in present if each in members)
        if len(here) < 2 or any(here == other.sets for other in found):
            continue
        missing = tuple(each for each in members if each not in here)
        found.append(Average(name, here, missing))
    return found
