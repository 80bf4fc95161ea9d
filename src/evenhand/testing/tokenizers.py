"""Small exact tokenizers for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class CharacterTokenizer:
    """One token a character; its id is the code point. Special tokens do not exist."""

    def encode(self, text: str) -> list[int]:
        """Return the code points of `text`."""
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of code points; U+FFFD for a number that is none."""
        return "".join(chr(item) if 0 <= item < 0x110000 else "\ufffd" for item in ids)


class ChunkTokenizer(CharacterTokenizer):
    """Characters, and tokens of any text: `add("</search> and more")` makes a new one.

    A test can so sample turns whose tokens split tags or carry more than a tag.
    """

    first_id = 0x110000
    """Ids from here on are chunks."""

    def __init__(self) -> None:
        self._chunks: list[str] = []

    def add(self, chunk: str) -> int:
        """Return the id of a new token whose text is `chunk`."""
        self._chunks.append(chunk)
        return self.first_id + len(self._chunks) - 1

    def ids(self, chunks: Iterable[str]) -> list[int]:
        """Return one new token for each chunk."""
        return [self.add(chunk) for chunk in chunks]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return "".join(
            self._chunks[item - self.first_id]
            if self.first_id <= item < self.first_id + len(self._chunks)
            else super(ChunkTokenizer, self).decode([item])
            for item in ids
        )
