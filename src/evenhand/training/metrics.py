"""The figures that only a trainer has: of the update, and of its evaluations.

Those of a step's rollouts are in `evenhand.diagnostics.steps`. Names are those of verl where it has
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from evenhand.core.arrays import FloatArray
from evenhand.credit import CreditBatch
from evenhand.diagnostics.intervals import proportion
from evenhand.diagnostics.language import gather_language
from evenhand.diagnostics.steps import Figures, step_figures
from evenhand.task.rewards import REWARD_ERROR
from evenhand.trajectory import StopReason, Trajectory

Metrics = Figures


def step_metrics(
    trajectories: Sequence[Trajectory], batch: CreditBatch, advantage: FloatArray, threshold: float
) -> Metrics:
    """Return the figures of a step's rollouts; those that cannot be computed are left out."""
    columns = gather_language(trajectories)
    failed = sum(REWARD_ERROR in trajectory.metadata for trajectory in trajectories)
    found = step_figures(trajectories, batch, columns, advantage, threshold=threshold)
    return found | {"rollouts/reward_errors": failed}


def update_metrics(sums: Mapping[str, float], norms: Sequence[float], steps: int) -> Metrics:
    """Return the figures of the optimiser steps of a batch.

    Args:
        sums: of `losses.SUMS` over all tokens and steps.
        norms: gradient norm of each step before clipping.
        steps: how many optimiser steps were made.
    """
    tokens = max(sums["tokens"], 1.0)
    found = {
        "actor/pg_loss": sums["pg_loss"] / max(steps, 1),
        "actor/pg_clipfrac": sums["clipped_high"] / tokens,
        "actor/pg_clipfrac_lower": sums["clipped_low"] / tokens,
        "actor/ppo_kl": sums["log_ratio"] / tokens,
        "actor/kl_loss": sums["kl"] / tokens,
        "actor/sampler_gap": sums["sampler_gap"] / tokens,
        "actor/importance_capped": sums["importance_capped"] / tokens,
        "actor/loss_tokens": sums["tokens"],
        "actor/grad_norm": float(np.mean(norms)) if len(norms) else 0.0,
    }
    return {name: float(value) for name, value in found.items()}


def reference_metrics(logprobs: Sequence[FloatArray]) -> Metrics:
    """Return how a reference policy finds the rollouts; it costs nothing where the loss has it.

    Args:
        logprobs: `[n]` of each row, the reference's log-probabilities of its trained tokens.
    """
    tokens = sum(map(len, logprobs))
    if tokens == 0:
        return {}
    mean = sum(float(row.sum()) for row in logprobs) / tokens
    # Beyond exp(700) a double overflows; nobody tells such perplexities apart.
    return {"actor/reference_perplexity": math.exp(min(-mean, 700.0))}


def evaluation_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the figures of a greedy evaluation, one rollout a question.

    Policy faults count as wrong; environment faults are left out and counted in `eval/failed`.
    Exact match comes with its 95 % Wilson interval.
    """
    scored = [t for t in trajectories if t.stop_reason is not StopReason.FAILED]
    found: Metrics = {
        "eval/n": len(scored),
        "eval/failed": len(trajectories) - len(scored),
    }
    if not scored:
        return found
    exact = np.array([_score(t, "exact_match") for t in scored])
    share = proportion(int(exact.sum()), len(exact))
    searches = np.array([len(t.executed_searches()) for t in scored])
    found |= {
        "eval/exact_match": share.value,
        "eval/exact_match_low": share.low,
        "eval/exact_match_high": share.high,
        "eval/f1": float(np.mean([_score(t, "f1") for t in scored])),
        "eval/searches": float(searches.mean()),
        "eval/format_ok": float(np.mean([t.format_ok for t in scored])),
    }
    hops = np.array([-1 if t.hops is None else t.hops for t in scored])
    for count in sorted(set(hops.tolist()) - {-1}):
        mine = hops == count
        found[f"eval/hops_{count}/n"] = int(mine.sum())
        found[f"eval/hops_{count}/exact_match"] = float(exact[mine].mean())
        found[f"eval/hops_{count}/searches"] = float(searches[mine].mean())
    return found


def _score(trajectory: Trajectory, name: str) -> float:
    value = (trajectory.scores or {}).get(name)
    return 0.0 if value is None else float(value)
