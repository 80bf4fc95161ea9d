"""From token ids to text for showing, where a tokenizer is at hand; pages work without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenhand.core.errors import EvenhandError, require
from evenhand.pages.trajectory import Decode

TOY = "toy"
"""`model.path` of the warm start that ships with the package."""


def decoder(settings: Mapping[str, Any]) -> Decode | None:
    """Return how the tokens of a run are decoded, or `None` if that is not known here.

    Known are the toy world's tokenizer and `tokenizer.json` in the folder that `model.path` of the
    recipe names. Nothing is downloaded; without the package `tokenizers` the answer is `None`.

    Args:
        settings: dotted settings of the run's recipe.
    """
    path = settings.get("model.path")
    if not isinstance(path, str):
        return None
    return load_decoder(path)


def load_decoder(path: str) -> Decode | None:
    """Return the decoder of a model folder, a `tokenizer.json`, or `toy`; `None` if there is none.
    """  # fmt: skip
    try:
        tokenizer = _tokenizer(path)
    except (EvenhandError, OSError):
        return None
    except Exception as error:
        # The library raises bare `Exception` for a file it cannot read.
        if type(error) is not Exception:
            raise
        return None
    if tokenizer is None:
        return None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


def _tokenizer(path: str) -> Any:
    if path == TOY:
        from evenhand.world.tokenizer import build_tokenizer

        return build_tokenizer()
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        return None
    return require("tokenizers", "tokenizer", "showing tokens").Tokenizer.from_file(str(file))
