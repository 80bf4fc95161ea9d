"""One forward pass of a causal language model over rows of a `RowCache`."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.core.errors import ConfigError, require
from evenhand.rollout.cache import RowCache

torch: Any = require("torch", "train", "the transformers back end")

Tensor = Any
IntArray = NDArray[np.int64]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_MASKED_ATTENTION = ("sdpa", "eager")


class CachedModel:
    """A model of transformers whose rows may be of any length and at any position.

    It hands the model explicit positions and explicit masks, so whatever a model does by itself
    about padding or cache offsets does not matter. Layers with a sliding window see the window.
    """

    def __init__(self, model: Any, length: int = 0) -> None:
        """Look at the signature and the layers of `model`; the cache starts with `length` places.

        Raises:
            ConfigError: the model has layers whose state is no list of keys and values, takes no
                positions or no cache, or an attention that reads no mask.
        """
        self._model = model
        config = text_config(model)
        parameters = inspect.signature(_bare(model).forward).parameters
        self._cache_name = _first(parameters, ("cache", "past_key_values"))
        self._keep_name = _first(parameters, ("logits_to_keep", "num_logits_to_keep"))
        if self._cache_name is None or "position_ids" not in parameters:
            raise ConfigError(f"{type(_bare(model)).__name__} takes no cache or no position_ids; "
                              "use a causal language model with attention layers")  # fmt: skip
        kinds = set(getattr(config, "layer_types", None) or ())
        if not kinds <= {_FULL, _SLIDING} or getattr(_bare(model), "_is_stateful", False):
            raise ConfigError(
                f"{type(_bare(model)).__name__} has layers of the kinds {sorted(kinds)}; only full "
                "and sliding-window attention can be cached row by row"
            )
        attention = getattr(config, "_attn_implementation", "eager")
        if attention not in _MASKED_ATTENTION:
            raise ConfigError(
                f"rollouts need an attention that reads masks, got {attention!r}; load the model "
                "with attn_implementation='sdpa'"
            )
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        self._window: int | None = window if not kinds or _SLIDING in kinds else None
        # Models with layer types look their mask up by type; the others take the mask itself.
        self._by_kind = _SLIDING in kinds
        embedding = model.get_input_embeddings().weight
        self.vocabulary = int(embedding.shape[0])
        self.device = embedding.device
        self._dtype = embedding.dtype
        self.cache = RowCache(self.device, length)
        lowest = torch.finfo(self._dtype).min
        self._seen, self._unseen = torch.tensor(
            [0.0, lowest], dtype=self._dtype, device=self.device
        )

    def forward(self, ids: IntArray | Tensor, positions: IntArray, slots: IntArray) -> Tensor:
        """Return the logits `[n, V]` after the last column.

        Args:
            ids: `[n, S]` tokens, right-aligned.
            positions: `[n, S]` their positions; -1 where there is none (padding on the left).
            slots: `[n]` rows of the cache.
        """
        read = int(positions.max()) + 1
        if isinstance(ids, np.ndarray):
            ids = torch.from_numpy(ids).to(self.device)
        places = torch.from_numpy(positions).to(self.device)
        where = places
        if positions.min() < 0:
            where = places.where(places >= 0, torch.full_like(places, self.cache.scratch))
            places = places.clamp(min=0)
        self.cache.plan(slots, where, read)
        keywords: dict[Any, Any] = {
            self._cache_name: self.cache,
            "attention_mask": self._mask(places, read),
            "position_ids": places,
            "use_cache": True,
        }
        if self._keep_name is not None:
            keywords[self._keep_name] = 1
        return self._model(input_ids=ids, **keywords).logits[:, -1]

    def _mask(self, places: Tensor, read: int) -> Any:
        keys = torch.arange(read, device=self.device)
        seen = keys <= places[..., None]
        full = self._additive(seen)
        if self._window is None:
            return full
        sliding = self._additive(seen & (keys > places[..., None] - self._window))
        return {_FULL: full, _SLIDING: sliding} if self._by_kind else sliding

    def _additive(self, seen: Tensor) -> Tensor:
        return torch.where(seen, self._seen, self._unseen)[:, None]


def text_config(model: Any) -> Any:
    """Return the configuration of the language part of a model."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _bare(model: Any) -> Any:
    """The model inside an adapter of peft, whose own signature hides the names."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _first(parameters: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in parameters), None)
