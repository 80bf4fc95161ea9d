"""Attention over a `PackedBatch`, for models of transformers.

Everything else in a model acts on each token by itself; attention is told, through the interface of
transformers, which tokens belong to which row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

from evenhand.core.arrays import IntArray
from evenhand.core.errors import require
from evenhand.rollout.model import text_config
from evenhand.training.batching import Row, Targets
from evenhand.training.packing import Attention, PackedBatch, packed

torch: Any = require("torch", "train", "training")

Tensor = Any
Model = Any

NAME = "evenhand_shared"
"""Name of the attention in transformers."""


class _Plan:
    """A packed batch as tensors, made once for all layers.

    Attributes:
        calls: how many layers have attended.
    """

    def __init__(self, batch: PackedBatch, dtype: Any) -> None:
        self.queries = _places([group.queries for group in batch.attentions])
        self.keys = _places([group.keys for group in batch.attentions])
        self.outputs = torch.from_numpy(batch.outputs)
        self.shapes = [(group.queries.shape, group.keys.shape) for group in batch.attentions]
        self.masks = [_mask(group, dtype) for group in batch.attentions]
        self.calls = 0


_PLAN: ContextVar[_Plan | None] = ContextVar("plan", default=None)


def _places(groups: list[IntArray]) -> Tensor:
    return torch.from_numpy(np.concatenate([group.ravel() for group in groups]))


def _mask(group: Attention, dtype: Any) -> Tensor | None:
    """Return the additive mask `[B, 1, S, L]`; `None` for plain causal attention."""
    if not group.seen.any():
        return None
    query = group.seen[:, None] + np.arange(group.queries.shape[1])
    hidden = np.arange(group.keys.shape[1]) > query[..., None]
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))[:, None]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 the interface
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return `[1, N, heads, size]` for `[1, heads, N, size]`; no dropout, as in all training."""
    plan = _PLAN.get()
    assert plan is not None
    plan.calls += 1
    rows = [
        states[0].transpose(0, 1).index_select(0, places)
        for states, places in ((query, plan.queries), (key, plan.keys), (value, plan.keys))
    ]
    n_queries = [b * s for (b, s), _ in plan.shapes]
    n_keys = [b * s for _, (b, s) in plan.shapes]
    grouped = getattr(module, "num_key_value_groups", 1) > 1
    found = []
    for q, k, v, (shape, seen), mask in zip(
        rows[0].split(n_queries), rows[1].split(n_keys), rows[2].split(n_keys), plan.shapes,
        plan.masks, strict=True,
    ):  # fmt: skip
        heads = torch.nn.functional.scaled_dot_product_attention(
            q.view(*shape, *q.shape[1:]).transpose(1, 2),
            k.view(*seen, *k.shape[1:]).transpose(1, 2),
            v.view(*seen, *v.shape[1:]).transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        found.append(heads.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).index_select(0, plan.outputs).unsqueeze(0), None


@cache
def _register() -> None:
    require("transformers", "train", "training").AttentionInterface.register(NAME, _attend)


@contextmanager
def shared_attention(model: Model, batch: PackedBatch) -> Iterator[_Plan]:
    """Let every layer of `model` attend within the rows of `batch`."""
    _register()
    config = text_config(model)
    plan = _Plan(batch, model.get_input_embeddings().weight.dtype)
    before, token = config._attn_implementation, _PLAN.set(plan)
    config._attn_implementation = NAME
    try:
        yield plan
    finally:
        config._attn_implementation = before
        _PLAN.reset(token)


def can_share(model: Model) -> bool:
    """Whether `model` gives with shared beginnings what it gives row by row.

    Only models on a CPU are considered: there, tokens saved are time saved. Two short rows are
    tried both ways, because what a layer does cannot be told from outside: it may mix tokens by
    other means than attention.
    """
    weight, config = model.get_input_embeddings().weight, text_config(model)
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (
        weight.device.type != "cpu"
        or getattr(config, "_attn_implementation", None) != "sdpa"
        or "position_ids" not in inspect.signature(bare.forward).parameters
        or _has_window(config)
    ):
        return False
    batch = packed([_row((1, 0, 1, 0), len(weight)), _row((1, 0, 1, 1, 0), len(weight))])
    with torch.no_grad():
        try:
            with shared_attention(model, batch) as plan:
                found = model(
                    input_ids=torch.from_numpy(batch.ids)[None],
                    position_ids=torch.from_numpy(batch.positions)[None],
                    use_cache=False,
                ).logits[0, torch.from_numpy(batch.predictors[batch.pairs])]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # whatever a model does instead of what it was asked
        alone = [model(input_ids=torch.from_numpy(row.ids)[None], use_cache=False).logits[0]
                 for row in batch.members]  # fmt: skip
    expected = torch.cat(alone)
    scale = max(1.0, float(expected.abs().max()))
    return plan.calls > 0 and float((found - expected).abs().max()) < 1e-4 * scale


def _has_window(config: Any) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds:
        return kinds != {"full_attention"}
    window = getattr(config, "sliding_window", None)
    return window is not None and getattr(config, "use_sliding_window", True) is not False


def _row(tokens: Sequence[int], vocabulary: int) -> Row:
    ids = np.array(tokens) % vocabulary
    values = np.zeros(len(ids))
    place = np.arange(1, len(ids) + 1)
    return Row(0, "trial", ids, Targets(place, ids, *[values] * 5), len(ids))
