"""The back end for causal language models of transformers, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from evenhand.core.errors import ConfigError, require
from evenhand.rollout.model import CachedModel, text_config
from evenhand.rollout.policy import Sampling
from evenhand.rollout.session import AdjustLogits, CachedSession
from evenhand.rollout.stops import StopTags, token_table
from evenhand.task import Tokenizer, as_tokenizer

torch: Any = require("torch", "train", "the transformers back end")


class TransformersPolicy:
    """Samples many rows together and keeps their keys and values from turn to turn.

    Device and number format are those of the model. Weights may change between sessions. The model
    is in evaluation mode while a session is open.

    Attributes:
        tokenizer: the tokenizer as the environment uses it.
        max_context: the longest context of the model; `None` if its configuration has none.
        max_rows: rows that a session should hold at a time.
        stop_token_ids: tokens that end a turn wherever they occur.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_rows: int = 256,
        rejoin: float | None = None,
        chunk_tokens: int | None = None,
        stop_token_ids: Iterable[int] | None = None,
        adjust_logits: AdjustLogits | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: a causal language model of transformers, adapters of peft included.
            tokenizer: its tokenizer (see `as_tokenizer`).
            max_rows: rows at a time. The cache holds `max_rows` x the longest row x layers x
                key/value heads x head size x 2 numbers.
            rejoin: rows that have finished a turn are handed out, and may come back, when they make
                up this share of the rows that decode, in (0, 1]. Small: the batch stays full, and
                searches come in small batches. 1: all rows finish first. Default 0.25.
            chunk_tokens: tokens of one forward pass over prompts or documents. Default: 512 on a
                CPU, where more only adds padding, else 8192.
            stop_token_ids: default: the end-of-sequence tokens of the model's generation
                configuration and of the tokenizer.
            adjust_logits: changes logits before anything is drawn, to forbid or to force tokens;
                log-probabilities are those of the changed logits.

        Raises:
            ConfigError: an option is out of range, or the model cannot be used (`CachedModel`).
        """
        if max_rows < 1:
            raise ConfigError(f"max_rows must be a whole number of at least 1, got {max_rows!r}")
        rejoin = 0.25 if rejoin is None else rejoin
        if not 0 < rejoin <= 1:
            raise ConfigError(f"rejoin must be above 0 and at most 1, got {rejoin}")
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        self._vocabulary = CachedModel(model).vocabulary
        self.tokenizer: Tokenizer = as_tokenizer(tokenizer)
        self.max_context: int | None = getattr(text_config(model), "max_position_embeddings", None)
        self.max_rows: int | None = max_rows
        self._model = model
        self._rejoin = rejoin
        self._chunk_tokens = chunk_tokens
        self._adjust_logits = adjust_logits
        if stop_token_ids is None:
            stop_token_ids = _end_tokens(model, tokenizer)
        self.stop_token_ids = tuple(sorted(set(stop_token_ids)))
        # What the last session needed: the cache of the next one rarely has to grow.
        self._length = 0
        self._tags: dict[tuple[str, ...], StopTags] = {}

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[CachedSession]:
        """Open a session; its cache is dropped when it is closed."""
        model = self._model
        was_training = model.training
        model.eval()
        try:
            # Not inference mode: a model may keep what it computes, such as scaled rotary tables.
            with torch.no_grad():
                cached = CachedModel(model, self._length)
                yield CachedSession(
                    cached,
                    sampling,
                    stop_tags=self.stop_tags,
                    stop_tokens=token_table(self.stop_token_ids, self._vocabulary),
                    max_context=self.max_context,
                    adjust_logits=self._adjust_logits,
                    rejoin=self._rejoin,
                    chunk_tokens=self._chunk_tokens
                    or (512 if cached.device.type == "cpu" else 8192),
                )
                self._length = cached.cache.length
        finally:
            model.train(was_training)

    def stop_tags(self, tags: tuple[str, ...]) -> StopTags:
        """Return the detector for `tags`, made once."""
        if tags not in self._tags:
            self._tags[tags] = StopTags(self.tokenizer, tags, self._vocabulary)
        return self._tags[tags]


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    generation = getattr(model, "generation_config", None)
    found: set[int] = set()
    for source in (generation, tokenizer, text_config(model)):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else (ids,))
    return found
