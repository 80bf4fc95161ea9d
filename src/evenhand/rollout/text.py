"""Text where the tokens of a model are not known: for models behind a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

from evenhand.trajectory import Trajectory

PIECES = "pieces"
"""Unit of `n_tokens` where the tokens of the server are not known."""

_PIECE = re.compile(r" ?[^\W\d_]{1,12}| ?\d{1,3}|\s+|.", re.DOTALL)


class TextTokenizer:
    """Text as numbers without the tokenizer of a model: an id a piece, given when first seen.

    A piece is up to twelve letters or three digits with the blank before them, a run of white
    space, or any other character. English has somewhat fewer pieces than tokens, so a turn that the
    server kept within a number of tokens seldom has more pieces. Decoding gives the text back.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []
        self._lock = Lock()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        with self._lock:
            return [self._id(piece) for piece in _PIECE.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return "".join(self._pieces[at] for at in ids)

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


def as_text_only(trajectory: Trajectory) -> Trajectory:
    """Return a rollout without token ids and log-probabilities, its lengths marked as pieces."""
    segments = tuple(replace(s, token_ids=None, logprobs=None) for s in trajectory.segments)
    metadata = {**trajectory.metadata, "n_tokens_unit": PIECES}
    return replace(trajectory, segments=segments, metadata=metadata)
