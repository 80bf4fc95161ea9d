"""The figures of a step, from trajectories and their credit; names are those of verl if it has any.

`actor/entropy` is an estimate that costs nothing: minus the mean log-probability, under the
sampler's full softmax, of the tokens it sampled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from evenhand.arrays import FloatArray
from evenhand.credit import CreditBatch
from evenhand.diagnostics.credit import group_counts, mass_by_kind, mis_penalised
from evenhand.diagnostics.intervals import proportion
from evenhand.diagnostics.strata import between_strata, strata_shape
from evenhand.rewards import REWARD_ERROR
from evenhand.trajectory import Kind, StopReason, Trajectory

GARBLED = 50.0
"""Perplexity of a policy segment from which it counts as garbled (CalibAdv's monitor)."""

Metrics = dict[str, float]


def step_metrics(
    trajectories: Sequence[Trajectory], batch: CreditBatch, advantage: FloatArray, threshold: float
) -> Metrics:
    """Return the figures of a batch of rollouts; those that cannot be computed are left out."""
    found = _outcomes(trajectories, batch)
    found |= _credit(batch, advantage, threshold)
    found |= _language(trajectories)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _outcomes(trajectories: Sequence[Trajectory], batch: CreditBatch) -> Metrics:
    rewards = batch.rewards[~np.isnan(batch.rewards)]
    n = len(trajectories)
    stops = Counter(trajectory.stop_reason for trajectory in trajectories)
    exact = [s["exact_match"] for t in trajectories if (s := t.scores or {}).get("exact_match")
             is not None]  # fmt: skip
    tokens = np.array([sum(s.n_tokens for s in t.segments if s.is_policy) for t in trajectories])
    found: Metrics = {
        "rollouts/n": n,
        "rollouts/unscored": n - len(rewards),
        "rollouts/reward_errors": sum(REWARD_ERROR in t.metadata for t in trajectories),
        "rollouts/searches": float(batch.searches.mean()) if n else math.nan,
        "rollouts/format_ok": float(batch.format_ok.mean()) if n else math.nan,
        "rollouts/environment_tokens": float(batch.environment_tokens.mean()) if n else math.nan,
        "response_length/mean": float(tokens.mean()) if n else math.nan,
    }
    if len(rewards):
        found |= {
            "critic/score/mean": float(rewards.mean()),
            "critic/score/max": float(rewards.max()),
            "critic/score/min": float(rewards.min()),
        }
    if exact:
        found["rollouts/exact_match"] = float(np.mean(np.array(exact, dtype=np.float64)))
    for reason in StopReason:
        found[f"stop/{reason.value}"] = stops[reason] / max(n, 1)
    return found


def _credit(batch: CreditBatch, advantage: FloatArray, threshold: float) -> Metrics:
    groups = group_counts(batch, threshold=threshold)
    between = between_strata(batch.rewards, batch.group, batch.strata()[1])
    shape = strata_shape(batch)
    punished = mis_penalised(batch, advantage)
    found: Metrics = {
        "groups/effective": groups.effective,
        "groups/too_easy": groups.too_easy,
        "groups/too_hard": groups.too_hard,
        "groups/lone": groups.lone,
        "groups/unscored": groups.unscored,
        "groups/silver_size": float(batch.silver_size.mean()) if groups.total else math.nan,
        "strata/between": between.share,
        "strata/between_by_chance": between.expected,
        "strata/between_by_chance_low": between.low,
        "strata/between_by_chance_high": between.high,
        "strata/lone": shape.lone.value if shape.lone.n else math.nan,
        "strata/flat": shape.flat.value if shape.flat.n else math.nan,
        "credit/mis_penalised": punished.value if punished.n else math.nan,
        "credit/mis_penalised_n": punished.n,
    }
    if len(advantage):
        found |= {
            "critic/advantages/mean": float(advantage.mean()),
            "critic/advantages/max": float(advantage.max()),
            "critic/advantages/min": float(advantage.min()),
        }
    masses = mass_by_kind(batch, advantage)
    for name, kinds in (
        ("search", [Kind.SEARCH]),
        ("answer", [Kind.ANSWER]),
        ("all", list(masses)),
    ):
        positive = sum(masses[kind].positive for kind in kinds)
        negative = sum(masses[kind].negative for kind in kinds)
        found[f"credit/negative_to_positive/{name}"] = negative / positive if positive else math.nan
    return found


def _language(trajectories: Sequence[Trajectory]) -> Metrics:
    total, tokens, garbled, segments = 0.0, 0, 0, 0
    queries, repeated = 0, 0
    for trajectory in trajectories:
        seen: set[str] = set()
        for segment in trajectory.segments:
            if not segment.is_policy:
                continue
            if segment.query is not None:
                query = " ".join(segment.query.lower().split())
                repeated += query in seen
                queries += 1
                seen.add(query)
            if segment.logprobs is not None and segment.n_tokens:
                total -= float(segment.logprobs.sum())
                tokens += segment.n_tokens
                garbled += float(-segment.logprobs.mean()) >= math.log(GARBLED)
                segments += 1
    return {
        "actor/entropy": total / tokens if tokens else math.nan,
        "language/garbled": garbled / segments if segments else math.nan,
        "language/repeated_queries": repeated / queries if queries else math.nan,
    }


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
