"""Keys and values of many rows of different lengths, kept between their turns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.core.errors import require

torch: Any = require("torch", "train", "the transformers back end")

Tensor = Any
IntArray = NDArray[np.int64]


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Numbers of a given size that numpy has too (it has no bfloat16)."""


class RowCache:
    """A cache as the models of transformers use it: they call `update` in every layer.

    Each layer holds `[rows, heads, length + 1, size]`, allocated before it is needed and grown by
    half; threefold on a CPU, where memory costs nothing before it is written. Token `p` of a row
    stands at place `p`: nothing is padded on the left, and no row depends on the length of another.
    The extra last place takes what padding writes; nobody reads it.
    """

    is_compileable = False

    def __init__(self, device: Any, length: int = 0) -> None:
        """Start with room for `length` tokens a row once rows are reserved."""
        self._device = device
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows = 0
        self._length = length
        self._slots: Tensor | None = None
        self._count = 0
        self._where: tuple[Tensor, slice, Tensor] | None = None
        self._read = self._filled = 0

    @property
    def rows(self) -> int:
        """How many rows have a place."""
        return self._rows

    @property
    def length(self) -> int:
        """How many tokens a row may have before the cache grows."""
        return self._length

    @property
    def scratch(self) -> int:
        """Where padding is written."""
        return self._length

    def reserve(self, rows: int, length: int, kept: IntArray | None = None) -> None:
        """Make room for `rows` rows of `length` tokens.

        Args:
            rows, length: see above.
            kept: rows whose tokens are still needed; `None`: all.
        """
        if rows <= self._rows and length <= self._length:
            return
        if length > self._length:
            grown = self._length * 3 if self._device.type == "cpu" else self._length * 3 // 2
            length = -(-max(length, grown) // 64) * 64
        rows, length = max(rows, self._rows), max(length, self._length)
        kept = np.arange(self._rows) if kept is None else kept[kept < self._rows]
        stay = torch.from_numpy(kept).to(self._device)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = _zeros((rows, old.shape[1], length + 1, old.shape[3]), old)
                new[stay, :, : self._filled] = old[stay, :, : self._filled]
                tensors[layer] = new
        self._rows, self._length = rows, length

    def plan(self, slots: IntArray, positions: Tensor, read: int) -> None:
        """Say what the next forward pass writes and reads.

        Args:
            slots: `[n]` the rows.
            positions: `[n, S]` places of its tokens; `scratch` for padding.
            read: places `0 .. read - 1` are returned to the attention.
        """
        n = len(slots)
        self._count, self._read = n, read
        self._filled = max(self._filled, read)
        rows = torch.from_numpy(slots).to(self._device)
        self._slots = None if np.array_equal(slots, np.arange(n)) else rows
        self._where = (rows[:, None], slice(None), positions)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write `[n, heads, S, size]` and return all that the planned rows may attend to."""
        found = []
        for tensors, states in ((self._keys, key_states), (self._values, value_states)):
            if layer_idx == len(tensors):
                heads, size = states.shape[1], states.shape[3]
                # Zeros, because what is masked is still multiplied by 0.
                tensors.append(_zeros((self._rows, heads, self._length + 1, size), states))
            held = tensors[layer_idx]
            held[self._where] = states.transpose(1, 2)
            seen = held[:, :, : self._read]
            found.append(seen[: self._count] if self._slots is None else seen[self._slots])
        return found[0], found[1]

    def copy(self, source: IntArray, target: IntArray, length: int) -> None:
        """Copy the first `length` tokens of rows `source[i]` to rows `target[i]`, all at once.

        A row may be both: what is read is what stood there before.
        """
        if not len(source):
            return
        if self._device.type == "cpu":
            # numpy moves whole rows where torch goes number by number.
            for held in (*self._keys, *self._values):
                words = held.view(_WORDS[held.element_size()]).numpy()
                words[target, :, :length] = words[source, :, :length]
            return
        reads = torch.from_numpy(source).to(self._device)
        writes = torch.from_numpy(target).to(self._device)
        for held in (*self._keys, *self._values):
            held[writes, :, :length] = held[reads, :, :length]

    def extend(self, source: IntArray, target: IntArray, start: IntArray, stop: IntArray) -> None:
        """Copy the tokens `start[i] .. stop[i] - 1` of row `source[i]` to row `target[i]`.

        No row may be both source and target. A target must hold the same tokens up to `start[i]`.
        """
        if not len(source):
            return
        if self._device.type != "cpu":
            self.copy(source, target, int(stop.max()))
            return
        places = [slice(*ends) for ends in zip(start.tolist(), stop.tolist(), strict=True)]
        pairs = list(zip(source.tolist(), target.tolist(), places, strict=True))
        for held in (*self._keys, *self._values):
            words = held.view(_WORDS[held.element_size()]).numpy()
            for one, other, where in pairs:
                words[other, :, where] = words[one, :, where]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 the interface
        """Return 0: positions and masks are always given, so no model needs to derive them."""
        return 0


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros; on a CPU, memory that is never written costs nothing."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    # numpy asks the system for zeroed pages; torch writes every zero.
    memory = np.zeros(math.prod(shape) * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(memory).view(like.dtype).view(shape)
