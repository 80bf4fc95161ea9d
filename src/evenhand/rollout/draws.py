"""Random numbers that belong to a row and a position, whatever else is computed beside them."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

from evenhand.rollout.policy import RowKey

BLOCK = 64
"""Positions whose numbers are made at a time."""


def uniform_block(
    seed: int, key: RowKey, block: int, philox: np.random.Philox | None = None
) -> NDArray[np.float64]:
    """Return the `[BLOCK]` numbers of positions `block * BLOCK` onwards, in [0, 1).

    The number at a position is a function of seed, key and position alone (Philox is a
    counter-based generator, Salmon et al., SC 2011; it makes four numbers a count).

    Args:
        seed, key, block: see above.
        philox: any generator; its state is replaced. A new one asks the system for entropy that
            nobody uses, which costs more than the numbers.
    """
    name = json.dumps([seed, *key]).encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    philox = philox or np.random.Philox(0)
    philox.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.array([block * BLOCK // 4, 0, 0, 0], dtype=np.uint64),
            "key": np.frombuffer(digest, dtype="<u8").astype(np.uint64),
        },
        "buffer": np.zeros(4, dtype=np.uint64),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    raw: NDArray[np.uint64] = philox.random_raw(BLOCK)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Draws:
    """The numbers that the rows in the slots of a batch use next."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._philox = np.random.Philox(0)
        self._keys: list[RowKey | None] = []
        self._block = np.zeros(0, dtype=np.int64)
        self._values = np.zeros((0, BLOCK))

    def place(self, slot: int, key: RowKey | None) -> None:
        """Put a row into a slot."""
        if slot >= len(self._keys):
            more = slot + 1 - len(self._keys)
            self._keys += [None] * more
            self._block = np.concatenate([self._block, np.full(more, -1)])
            self._values = np.concatenate([self._values, np.zeros((more, BLOCK))])
        self._keys[slot] = key
        self._block[slot] = -1

    def at(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the `[n]` numbers of rows in `slots` for tokens at `positions`."""
        blocks = positions // BLOCK
        for at in np.flatnonzero(self._block[slots] != blocks):
            slot = int(slots[at])
            key = self._keys[slot]
            assert key is not None
            self._values[slot] = uniform_block(self._seed, key, int(blocks[at]), self._philox)
            self._block[slot] = blocks[at]
        return self._values[slots, positions % BLOCK]
