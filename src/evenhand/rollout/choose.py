"""From logits to tokens and log-probabilities, one row independent of the others."""

from __future__ import annotations

from typing import Any

from evenhand.core.errors import require
from evenhand.rollout.policy import Sampling

torch: Any = require("torch", "train", "sampling from a model")

Tensor = Any


def choose(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return tokens `[n]` and their log-probabilities `[n]` (float32) for logits `[n, V]`.

    The token of a row is the first whose cumulated mass, in the order of ids, exceeds `u` times the
    whole: one random number a row, whatever the size of the vocabulary.

    Args:
        logits: `[n, V]`.
        uniforms: `[n]` numbers in [0, 1); not read at temperature 0.
        sampling: see `Sampling`.
    """
    scaled, top, mass = softmax_parts(logits, sampling.temperature)
    if sampling.temperature == 0:
        tokens = scaled.argmax(-1, keepdim=True)
    else:
        tokens = _draw(_nucleus(mass, sampling), uniforms)
    logprobs = scaled.gather(-1, tokens) - top - mass.sum(-1, keepdim=True).log()
    return tokens.squeeze(-1), logprobs.squeeze(-1)


def softmax_parts(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled logits `[n, V]`, their largest `[n, 1]`, and `exp(scaled - largest)`."""
    scaled = logits.float()
    if temperature not in (0, 1):
        scaled = scaled / temperature
    top = scaled.amax(-1, keepdim=True)
    return scaled, top, (scaled - top).exp_()


def _draw(mass: Tensor, uniforms: Tensor) -> Tensor:
    cumulated = mass.cumsum(-1)
    whole = cumulated[:, -1:]
    # Rounding may lift u * whole to the whole itself, which no token exceeds.
    below = torch.nextafter(whole, torch.zeros_like(whole))
    target = torch.minimum(uniforms[:, None].to(whole.dtype) * whole, below)
    # The clamp acts on rows with a logit that is no number; their log-probability tells.
    return torch.searchsorted(cumulated, target, right=True).clamp(max=mass.shape[-1] - 1)


def _nucleus(mass: Tensor, sampling: Sampling) -> Tensor:
    """Set the mass of the tokens that `top_k` and then `top_p` leave out to 0."""
    if sampling.top_k is not None and sampling.top_k < mass.shape[-1]:
        least = mass.topk(sampling.top_k, dim=-1).values[:, -1:]
        mass = mass.where(mass >= least, torch.zeros_like(mass))
    if sampling.top_p < 1:
        ordered, order = mass.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        kept = before < sampling.top_p * ordered.sum(-1, keepdim=True)
        kept[:, 0] = True
        mass = mass * torch.zeros_like(kept).scatter(-1, order, kept)
    return mass
