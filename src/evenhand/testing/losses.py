"""The loss of an optimiser step once more, slowly and plainly: one trajectory, one token at a time.

Full logits of every position, no padding, no micro-batches, no hook: written from the equations of
`evenhand.training.losses`, without its code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from evenhand.core.errors import require
from evenhand.training.config import LossSection
from evenhand.trajectory import StopReason, Trajectory

torch: Any = require("torch", "train", "the reference loss")


def reference_loss(
    model: Any,
    trajectories: Sequence[Trajectory],
    loss: LossSection,
    *,
    temperature: float = 1.0,
    reference: Any = None,
) -> Any:
    """Return the loss of one optimiser step over all `trajectories`, with gradient.

    The ratio is taken to the sampler's log-probabilities (`loss.old = "sampler"`).
    """
    cut = (StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT)
    kept = [
        t
        for t in trajectories
        if t.reward is not None and not (loss.mask_truncated and t.stop_reason in cut)
    ]
    kept = [t for t in kept if _policy_tokens(t)]
    all_tokens = sum(_policy_tokens(t) for t in kept)
    total = torch.zeros((), dtype=torch.float64)
    for trajectory in kept:
        own = _policy_tokens(trajectory)
        denominator = {
            "token_mean": all_tokens,
            "sequence_mean": len(kept) * own,
            "constant": len(kept) * loss.constant_length,
        }[loss.aggregation]
        terms = _terms(model, trajectory, loss, temperature, reference)
        total = total + sum(terms) / denominator
    return total


def _policy_tokens(trajectory: Trajectory) -> int:
    return sum(segment.n_tokens for segment in trajectory.segments if segment.is_policy)


def _terms(
    model: Any, trajectory: Trajectory, loss: LossSection, temperature: float, reference: Any
) -> list[Any]:
    ids = [int(i) for segment in trajectory.segments for i in segment.token_ids]  # type: ignore[union-attr]
    inputs = torch.tensor([ids])
    logits = model(input_ids=inputs).logits[0] / temperature
    if reference is not None:
        with torch.no_grad():
            other = reference(input_ids=inputs).logits[0] / temperature
    terms = []
    at = 0
    for segment in trajectory.segments:
        for number in range(segment.n_tokens):
            if segment.is_policy:
                row = torch.log_softmax(logits[at - 1], dim=-1)
                new = row[ids[at]]
                old = float(segment.logprobs[number])  # type: ignore[index]
                credit = float(segment.advantage or 0.0)
                ratio = torch.exp(new - old)
                low, high = 1 - loss.clip_low, 1 + loss.clip_high
                # Held where the ratio has left the interval on the side that the credit favours.
                is_held = (credit > 0 and ratio.item() > high) or (
                    credit < 0 and ratio.item() < low
                )
                value = -ratio * credit
                if is_held:
                    value = -torch.tensor(high if credit > 0 else low) * credit
                if loss.kl:
                    gap = torch.log_softmax(other[at - 1], dim=-1)[ids[at]].item() - new
                    value = value + loss.kl * (torch.exp(gap) - gap - 1)
                if loss.entropy:
                    value = value + loss.entropy * (torch.exp(row) * row).sum()
                assert math.isfinite(value.item())
                terms.append(value)
            at += 1
    return terms
