"""The loss of one micro-batch: a sum over tokens whose weights hold every denominator.

Arrays have one entry a trained token (`[n]`); `evenhand.training.batching.weighted` made the
weights. A sum over micro-batches is therefore the loss of the optimiser step, however it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from evenhand.core.errors import require
from evenhand.training.config import LossSection

torch: Any = require("torch", "train", "training")

Tensor = Any

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to +-20 before the exponential, so that no token can overflow the loss."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss reads, as `[n]` tensors without gradient; see `batching.Targets`."""

    advantage: Tensor
    sampled: Tensor
    old: Tensor
    reference: Tensor
    weight: Tensor


class LossParts(NamedTuple):
    """A loss and what it was made of.

    Attributes:
        loss: scalar with gradient; the sum over the tokens of the micro-batch.
        sums: `[len(SUMS)]` without gradient, each a plain sum over tokens, in the order of `SUMS`.
    """

    loss: Tensor
    sums: Tensor


SUMS = ("tokens", "pg_loss", "clipped_high", "clipped_low", "log_ratio", "entropy", "kl",
        "sampler_gap", "importance_capped")  # fmt: skip
"""Names of `LossParts.sums`. `pg_loss` is weighted as in the loss; else every token counts 1."""


def policy_gradient(new: Tensor, old: Tensor, advantage: Tensor, *, low: float, high: float) -> Any:
    """Return the clipped surrogate of each token, to be minimised.

        r_t    = exp(new_t - old_t)
        loss_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)

    With `new` equal to `old` the value is `-A_t` and the gradient that of `-A_t new_t`: the plain
    policy gradient. A token whose ratio left the interval in the direction of its advantage has no
    gradient. Separate bounds are those of DAPO (arXiv 2503.14476); PPO (arXiv 1707.06347) has
    `low = high`.

    Args:
        new: `[n]` log-probabilities of the policy, with gradient.
        old: `[n]` log-probabilities that the ratio is taken to.
        advantage: `[n]` credit.
        low: the ratio counts down to `1 - low`.
        high: and up to `1 + high`.

    Returns:
        `[n]` losses and `[n]` ratios.
    """
    ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * advantage, clipped * advantage), ratio


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Return `[n]` estimates of `KL(policy || reference)` at tokens that the policy sampled.

        k3_t = exp(reference_t - new_t) - (reference_t - new_t) - 1

    Never negative, 0 where both agree, unbiased for tokens drawn from the policy (Schulman,
    "Approximating KL divergence", 2020).
    """
    difference = (reference - new).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1


def importance(old: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """Return `[n]` truncated weights `min(exp(old_t - sampled_t), cap)`, without gradient.

    They correct for a sampler that is not exactly the trainer's policy (other kernels, other
    precision, a cut distribution); the cap bounds the variance. 1 where both agree.
    """
    gap = (old - sampled).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return gap.exp().clamp(max=cap).detach()


def token_loss(
    new: Tensor, entropy: Tensor | None, batch: TokenBatch, settings: LossSection
) -> LossParts:
    """Return the loss of a micro-batch.

        L = sum_t w_t (m_t pg_t + kl k3_t - entropy H_t)

    `w_t` is the weight of the aggregation, `pg_t` the clipped surrogate, `m_t` the truncated
    importance weight (1 if off), `H_t` the entropy of the policy at the token. The gradient of the
    k3 term is that of the estimate itself.

    Args:
        new: `[n]` log-probabilities of the policy, with gradient.
        entropy: `[n]` entropies of the full softmax, or `None` if the bonus is off.
        batch: the rest.
        settings: clips, weights of the terms, the cap.
    """
    surrogate, ratio = policy_gradient(
        new, batch.old, batch.advantage, low=settings.clip_low, high=settings.clip_high
    )
    capped = torch.zeros_like(ratio)
    if settings.importance_cap is not None:
        weight = importance(batch.old, batch.sampled, settings.importance_cap)
        surrogate = surrogate * weight
        capped = (weight >= settings.importance_cap).to(ratio.dtype)
    loss = surrogate
    divergence = torch.zeros_like(ratio)
    if settings.kl:
        divergence = k3(new, batch.reference)
        loss = loss + settings.kl * divergence
    if entropy is not None and settings.entropy:
        loss = loss - settings.entropy * entropy
    with torch.no_grad():
        is_high = (ratio > 1 + settings.clip_high) & (batch.advantage > 0)
        is_low = (ratio < 1 - settings.clip_low) & (batch.advantage < 0)
        columns = (
            torch.ones_like(ratio),
            surrogate * batch.weight,
            is_high.to(ratio.dtype),
            is_low.to(ratio.dtype),
            batch.old - new,
            torch.zeros_like(ratio) if entropy is None else entropy,
            divergence,
            (new - batch.sampled).abs(),
            capped,
        )
        sums = torch.stack([column.double().sum() for column in columns])
    return LossParts((loss * batch.weight).sum(), sums)
