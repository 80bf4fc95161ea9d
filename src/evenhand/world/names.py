"""The closed list of name tokens, and which pairs of them each kind of world may use.

A name is two tokens, a first and a last one. Every pair belongs to exactly one `NameSplit`, by a
hash, so that worlds of different splits share no name although they share all name tokens: a policy
has seen every token and no evaluated name.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import cache

_FIRST_HEADS = ("Ba", "De", "Fo", "Gu", "Ka", "Le", "Mo", "Nu", "Pa", "Re", "So", "Tu")
_FIRST_TAILS = ("lo", "mu", "ra", "vo", "nka", "zu", "dra", "go", "pla", "to", "xo", "ba")
_LAST_HEADS = ("Bar", "Cor", "Dul", "Fen", "Gar", "Hol", "Jun", "Kel", "Lom", "Mer", "Pol", "Tel")
_LAST_TAILS = ("ban", "dok", "fum", "gat", "hok", "jam", "kov", "lund", "mak", "nop", "rup", "zan")

FIRST = tuple(head + tail for head in _FIRST_HEADS for tail in _FIRST_TAILS)
"""First tokens of names."""

LAST = tuple(head + tail for head in _LAST_HEADS for tail in _LAST_TAILS)
"""Last tokens of names."""

FAMOUS_FIRST = tuple(f"Astra{tail}" for tail in _FIRST_TAILS)
"""First tokens of famous names; no other entity has them."""

FAMOUS_LAST = tuple(f"Ulm{tail}" for tail in _LAST_TAILS)
"""Last tokens of famous names."""


class NameSplit(StrEnum):
    """Which names a world takes."""

    PRETRAIN = "pretrain"
    """Half of all pairs: what the warm-start policy saw."""
    TRAIN = "train"
    """A quarter: for reinforcement learning."""
    EVAL = "eval"
    """A quarter: for evaluation only."""


_SHARES = (NameSplit.PRETRAIN, NameSplit.PRETRAIN, NameSplit.TRAIN, NameSplit.EVAL)


def split_of(first: str, last: str) -> NameSplit:
    """Return the split that a pair of name tokens belongs to."""
    digest = hashlib.blake2b(f"{first} {last}".encode(), digest_size=1).digest()
    return _SHARES[digest[0] % len(_SHARES)]


@cache
def allowed_names(split: NameSplit) -> frozenset[tuple[str, str]]:
    """Return all pairs of a split: about 10,000 of `PRETRAIN`, 5,000 of each other."""
    return frozenset((a, b) for a in FIRST for b in LAST if split_of(a, b) is split)
