"""Which sampled tokens may end a turn, looked up without a text in almost every case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from evenhand.task import Tokenizer

WINDOW = 32
"""Tokens that are decoded to find a tag; a tag has nine characters and is far shorter."""


class StopTags:
    """Finds the token that completes a stop tag.

    A tag may be one token or several, and a token may carry more than the tag. Only a token whose
    own text holds the last character of a tag can complete one, so only after such tokens the end
    of the turn is decoded.
    """

    def __init__(self, tokenizer: Tokenizer, tags: tuple[str, ...], vocabulary: int) -> None:
        """Look at each of the `vocabulary` tokens once."""
        self._tokenizer = tokenizer
        self._tags = tags
        last = {tag[-1] for tag in tags}
        self.may_complete: NDArray[np.bool_] = np.fromiter(
            (not last.isdisjoint(tokenizer.decode([token])) for token in range(vocabulary)),
            dtype=np.bool_,
            count=vocabulary,
        )

    def completed(self, tail: Sequence[int]) -> bool:
        """Whether the last tokens of a turn hold a complete tag."""
        text = self._tokenizer.decode(tail)
        return any(tag in text for tag in self._tags)


def token_table(tokens: Iterable[int], vocabulary: int) -> NDArray[np.bool_]:
    """Return `[vocabulary]`, true at `tokens`; ids outside the vocabulary are left out."""
    table = np.zeros(vocabulary, dtype=np.bool_)
    table[[token for token in tokens if 0 <= token < vocabulary]] = True
    return table
