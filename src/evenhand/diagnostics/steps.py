"""The figures of one training step, from its rollouts and their credit.

The trainer computes them after every step, `evenhand audit` for every step that a file names. Names
are those of verl where it has one. Figures that cannot be computed (no log-probability, no search,
no credit) are left out, so that every value is a finite number. The order of the rollouts does not
matter. `docs/diagnostics.md` lists them all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from evenhand.core.arrays import BoolArray, Dense, FloatArray, IntArray, dense, divide, size, total
from evenhand.credit import CreditBatch
from evenhand.credit.bridge import NO_STEP
from evenhand.diagnostics.credit import group_counts, mass_by_kind, mis_penalised
from evenhand.diagnostics.language import LanguageBatch, is_garbled, select_language
from evenhand.diagnostics.strata import between_strata, strata_shape
from evenhand.trajectory import Kind, StopReason, Trajectory

Figures = dict[str, float]

REPLACED = "replaced"
"""Key in a trajectory's metadata: its group had no spread and another was trained on instead."""


def step_figures(
    trajectories: Sequence[Trajectory],
    batch: CreditBatch,
    columns: LanguageBatch,
    advantage: FloatArray | None = None,
    *,
    threshold: float = 0.7,
) -> Figures:
    """Return all figures of the rollouts of one step.

    Args:
        trajectories: the rollouts.
        batch: their arrays, in the same order.
        columns: what their policy wrote.
        advantage: `[S]` credit; without it the figures of credit are left out.
        threshold: the reward that counts as a success.
    """
    return (
        outcome_figures(trajectories)
        | group_figures(batch, threshold=threshold)
        | strata_figures(batch)
        | search_figures(batch, advantage)
        | (credit_figures(batch, advantage) if advantage is not None else {})
        | language_figures(batch, columns)
    )


def outcome_figures(trajectories: Sequence[Trajectory]) -> Figures:
    """Return scores, lengths and how episodes ended."""
    n = len(trajectories)
    if n == 0:
        return {"rollouts/n": 0}
    rewards = np.array([t.reward for t in trajectories if t.reward is not None], dtype=np.float64)
    policy = np.array([sum(s.n_tokens for s in t.segments if s.is_policy) for t in trajectories])
    everything = np.array([sum(s.n_tokens for s in t.segments) for t in trajectories])
    truncated = [any(s.kind is Kind.TRUNCATED for s in t.segments) for t in trajectories]
    exact = [value for t in trajectories
             if (value := (t.scores or {}).get("exact_match")) is not None]  # fmt: skip
    found: Figures = {
        "rollouts/n": n,
        "rollouts/unscored": n - len(rewards),
        "rollouts/environment_tokens": float((everything - policy).mean()),
        "response_length/mean": float(policy.mean()),
        "response_length/max": float(policy.max()),
        "response_length/min": float(policy.min()),
        "response_length/clip_ratio": float(np.mean(truncated)),
    }
    if len(rewards):
        found |= {
            "critic/score/mean": float(rewards.mean()),
            "critic/score/max": float(rewards.max()),
            "critic/score/min": float(rewards.min()),
        }
    if exact:
        found["rollouts/exact_match"] = float(np.mean(np.array(exact, dtype=np.float64)))
    stops = Counter(trajectory.stop_reason for trajectory in trajectories)
    return found | {f"stop/{reason.value}": stops[reason] / n for reason in StopReason}


def group_figures(batch: CreditBatch, *, threshold: float = 0.7) -> Figures:
    """Return the groups by what outcome credit can learn from them."""
    groups = group_counts(batch, threshold=threshold)
    found: Figures = {
        "groups/effective": groups.effective,
        "groups/too_easy": groups.too_easy,
        "groups/too_hard": groups.too_hard,
        "groups/lone": groups.lone,
        "groups/unscored": groups.unscored,
    }
    if groups.total:
        found["groups/silver_size"] = float(batch.silver_size.mean())
    return found


def strata_figures(batch: CreditBatch) -> Figures:
    """Return how much reward lies between strata beside chance, and strata that teach nothing."""
    between = between_strata(*_in_canonical_order(batch))
    shape = strata_shape(batch)
    return _finite({
        "strata/between": between.share,
        "strata/between_by_chance": between.expected,
        "strata/between_by_chance_low": between.low,
        "strata/between_by_chance_high": between.high,
        "strata/lone": shape.lone.value if shape.lone.n else math.nan,
        "strata/flat": shape.flat.value if shape.flat.n else math.nan,
    })  # fmt: skip


def _in_canonical_order(batch: CreditBatch) -> tuple[FloatArray, IntArray, IntArray]:
    """Return rewards, groups and strata sorted: permutations are drawn in the order of the rows."""
    _, stratum = batch.strata()
    by_name = np.argsort(np.argsort(np.array(batch.group_names))) if batch.group_names else None
    group = batch.group if by_name is None else by_name[batch.group].astype(np.int64)
    order = np.lexsort((batch.rewards, stratum, group))
    return batch.rewards[order], group[order], stratum[order]


def search_figures(batch: CreditBatch, advantage: FloatArray | None = None) -> Figures:
    """Return how often the policy searches, and what each number of searches earns.

    `searches/gain` is the mean, over the groups that hold both, of the mean reward of rollouts with
    two or more executed searches minus that of rollouts with fewer; `searches/gain_square` the mean
    of its squares, so that steps can be pooled (`gain_groups` is the number of such groups).
    """
    n = len(batch.rewards)
    if n == 0:
        return {}
    found: Figures = {"rollouts/searches": float(batch.searches.mean())}
    tokens = batch.n_tokens.astype(np.float64)
    kinds = {str(count): batch.searches == count for count in np.unique(batch.searches).tolist()}
    kinds |= {"0": batch.searches == 0, "1": batch.searches == 1, "several": batch.searches > 1}
    for name, mine in kinds.items():
        found[f"searches/{name}/share"] = float(mine.mean())
        scored = mine & ~np.isnan(batch.rewards)
        if scored.any():
            found[f"searches/{name}/reward"] = float(batch.rewards[scored].mean())
        weight = np.where(mine[batch.owner], tokens, 0.0)
        if advantage is not None and weight.sum() > 0:
            found[f"searches/{name}/advantage"] = float((weight * advantage).sum() / weight.sum())
    gains = gain_of_several(batch)
    found["searches/gain_groups"] = len(gains)
    if len(gains):
        found["searches/gain"] = float(gains.mean())
        found["searches/gain_square"] = float(np.square(gains).mean())
    return found


def gain_of_several(batch: CreditBatch) -> FloatArray:
    """Return, for each group that has both, the reward of several searches minus that of fewer.

    Rollouts of one question are compared with one another, so that hard questions, which get more
    searches, do not count against searching.
    """
    scored = ~np.isnan(batch.rewards)
    groups = Dense(batch.group, len(batch.group_names))
    rewards = np.where(scored, batch.rewards, 0.0)
    means, counts = [], []
    for mine in (batch.searches > 1, batch.searches <= 1):
        rows = (mine & scored).astype(np.float64)
        counts.append(total(rows, groups))
        means.append(divide(total(rewards * rows, groups), counts[-1]))
    both = (counts[0] > 0) & (counts[1] > 0)
    return np.sort((means[0] - means[1])[both])


def credit_figures(batch: CreditBatch, advantage: FloatArray) -> Figures:
    """Return whom the credit rewards and punishes."""
    punished = mis_penalised(batch, advantage)
    found: Figures = {
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
        ("other", [Kind.INVALID, Kind.TRUNCATED]),
        ("all", list(masses)),
    ):
        positive = sum(masses[kind].positive for kind in kinds)
        negative = sum(masses[kind].negative for kind in kinds)
        found[f"credit/negative_to_positive/{name}"] = negative / positive if positive else math.nan
    return _finite(found)


def language_figures(batch: CreditBatch, columns: LanguageBatch) -> Figures:
    """Return the figures of `evenhand.diagnostics.language`, without intervals."""
    known = ~np.isnan(columns.surprise) & (batch.n_tokens > 0)
    surprise, tokens = columns.surprise[known], batch.n_tokens[known].astype(np.float64)
    ngrams, queries = int(columns.ngrams.sum()), int(columns.is_query.sum())
    found: Figures = {}
    if len(batch.format_ok):
        found["rollouts/format_ok"] = float(batch.format_ok.mean())
    if known.any():
        found["actor/entropy"] = float(surprise.sum() / tokens.sum())
        found["language/garbled"] = float(is_garbled(surprise, tokens).mean())
    if ngrams:
        found["language/repetition"] = int(columns.repeated.sum()) / ngrams
    if queries:
        found["language/repeated_queries"] = int(columns.is_duplicate.sum()) / queries
    return found


def _finite(figures: Mapping[str, float]) -> Figures:
    return {name: value for name, value in figures.items() if math.isfinite(value)}


# --- the steps of a file --------------------------------------------------------------------------


def series(
    batch: CreditBatch,
    columns: LanguageBatch,
    advantage: FloatArray,
    is_replaced: BoolArray,
    *,
    threshold: float = 0.7,
) -> Iterator[Figures]:
    """Yield the figures that alarms look at, for every training step that a batch names, in order.

    Args:
        batch: rollouts of any number of steps; those without a step are left out.
        columns: what their policy wrote.
        advantage: `[S]` credit as recorded, `nan` where it is not; a step without all of it has no
            figures of credit.
        is_replaced: `[N]` rollouts that were not trained on (`REPLACED`); they are left out.
        threshold: the reward that counts as a success.
    """
    for step in np.unique(batch.step).tolist():
        rows = (batch.step == step) & ~is_replaced
        if step == NO_STEP or not rows.any():
            continue
        segments = rows[batch.owner]
        part, credit = select(batch, rows), advantage[segments]
        known = None if np.isnan(credit).any() else credit
        yield (
            {"step": step, "rollouts/n": int(rows.sum())}
            | group_figures(part, threshold=threshold)
            | search_figures(part, known)
            | (credit_figures(part, known) if known is not None else {})
            | language_figures(part, select_language(columns, segments))
        )


def select(batch: CreditBatch, rows: BoolArray) -> CreditBatch:
    """Return the batch of the trajectories for which `rows` (`[N]`) holds; groups must be whole."""
    segments = rows[batch.owner]
    present = size(Dense(batch.group[rows], len(batch.group_names))) > 0
    return replace(
        batch,
        group_names=tuple(
            name for name, there in zip(batch.group_names, present, strict=True) if there
        ),
        group=dense(batch.group[rows]).ids,
        stratum=tuple(label for label, there in zip(batch.stratum, rows, strict=True) if there),
        silver_size=batch.silver_size[present],
        owner=(np.cumsum(rows) - 1)[batch.owner[segments]],
        **{name: getattr(batch, name)[rows] for name in _OF_ROLLOUTS},
        **{name: getattr(batch, name)[segments] for name in _OF_SEGMENTS},
    )


_OF_ROLLOUTS = ("rewards", "step", "searches", "format_ok", "environment_tokens")
_OF_SEGMENTS = ("position", "kind", "is_answer", "is_executed", "n_tokens", "step_score")
