"""How long a text is, where the dump does not say: in tokens if a tokenizer is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evenhand.core.errors import DataError, require

CHARACTERS, TOKENS = "characters", "tokens"


class Counter:
    """Counts texts in one unit.

    Attributes:
        unit: `"tokens"` or `"characters"`.
    """

    def __init__(self, tokenizer: Path | None = None) -> None:
        self._count: Callable[[str], int] = len
        self.unit = CHARACTERS
        if tokenizer is not None:
            self._count = _token_counter(tokenizer)
            self.unit = TOKENS

    def __call__(self, text: str) -> int:
        """Return the length of a text."""
        return self._count(text)


def _token_counter(path: Path) -> Callable[[str], int]:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file} does not exist; give a tokenizer.json or the folder that holds it")
    tokenizers = require("tokenizers", "tokenizer", "--tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        reason = " ".join(str(error).split())
        raise DataError(f"{file} is not a tokenizer: {reason:.200}") from error

    def count(text: str) -> int:
        # Half surrogate pairs, which garbled rollouts hold, have no UTF-8 form.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        return len(tokenizer.encode(clean, add_special_tokens=False).ids)

    return count
