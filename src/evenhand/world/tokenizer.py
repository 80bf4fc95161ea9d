"""The word-level tokenizer of the toy world: one token a word, a tag, a document's head, a notice.

A word carries the blank before it. Every text of the toy world is encoded without loss, the
environment's notices included; a word from elsewhere becomes `<unk>`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from evenhand.core.errors import require
from evenhand.world.language import TAGS, fixed_words, name_words, notices

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


@cache
def vocabulary() -> dict[str, int]:
    """Return token to id: special tokens, fixed words, names."""
    tokens = [PAD, EOS, UNKNOWN, *fixed_words(), *name_words()]
    return {token: at for at, token in enumerate(tokens)}


def build_tokenizer() -> Any:
    """Return a `tokenizers.Tokenizer`."""
    library = require("tokenizers", "train", "the toy world's tokenizer")
    tokenizer = library.Tokenizer(library.models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    phrases = [re.escape(text.strip()) for text in (notices().invalid, notices().answer_now)]
    # Tags stay ordinary tokens: as special tokens an environment would have to encode them as text.
    pattern = "|".join(
        [*phrases, r"Doc [0-9]+\(Title:", *map(re.escape, TAGS), r"\n\n", r"\n",
         r" ?[A-Za-z0-9]+:?", r"[^ \nA-Za-z0-9]", " "]
    )  # fmt: skip
    split = library.pre_tokenizers.Split(library.Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = library.decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    return tokenizer


def build_fast_tokenizer() -> Any:
    """Return the same as a `PreTrainedTokenizerFast` of transformers."""
    transformers = require("transformers", "train", "the toy world's tokenizer")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
