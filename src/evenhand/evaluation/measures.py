"""What is measured of one rollout: the metrics of evaluations and comparisons, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from evenhand.task import scoring
from evenhand.task.rewards import answer_of
from evenhand.trajectory import StopReason, Trajectory

SECONDS = "seconds"
"""Metric, and key of `Trajectory.metadata`: wall seconds that a question took."""

PROMPT_DOCUMENTS = "prompt_documents"
"""Key of `Trajectory.metadata`: id and title of the passages that stood in a baseline's prompt."""

RECALL = "recall_titles_"
"""Beginning of the metrics `recall_titles_1`, `recall_titles_2`, ...: see `measures`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: the name in files and options.
        title: the name in tables.
        is_share: it is 0 or 1 for a question, so its mean is a proportion.
        digits: digits after the point in tables.
    """

    name: str
    title: str
    is_share: bool = False
    digits: int = 3


METRICS: dict[str, Metric] = {
    each.name: each
    for each in (
        Metric("exact_match", "exact match", is_share=True),
        Metric("f1", "F1"),
        Metric("contains", "contains", is_share=True),
        Metric("searches", "searches", digits=2),
        Metric("duplicate_searches", "duplicate searches", digits=2),
        Metric("empty_searches", "empty searches", digits=2),
        Metric("format_ok", "format", is_share=True),
        Metric("tokens", "tokens", digits=1),
        Metric(SECONDS, "seconds", digits=2),
    )
}
"""The metrics that every question has, in the order of tables."""

_SCORES = {"exact_match": scoring.exact_match, "f1": scoring.f1, "contains": scoring.contains}


def find_metric(name: str) -> Metric:
    """Return a metric by name; one that is not in `METRICS` is a mean."""
    if name.startswith(RECALL):
        return Metric(name, f"recall {name.removeprefix(RECALL)}")
    return METRICS.get(name, Metric(name, name))


def measures(trajectory: Trajectory, *, searches: int = 0) -> dict[str, float]:
    """Return the metrics of a rollout; those that it cannot have are left out.

    * `exact_match`, `f1`, `contains`: the rollout's `scores`; computed by the convention `squad`
      where it has none; left out without golden answers. A policy fault scores 0.
    * `searches`: executed ones. `duplicate_searches`: of these, such whose query an earlier one of
      the rollout had (case and blanks aside). `empty_searches`: such that brought no document.
    * `recall_titles_j`: share of the supporting titles among all documents that the first `j`
      searches showed, `j` from 1 to `searches` (or as many as were made); a rollout with fewer
      searches keeps its last value. Passages that stood in the prompt count from the start. Left
      out without supporting titles.
    * `format_ok`: 0 or 1. `tokens`: of the policy. `seconds`: if they were recorded.

    An environment fault has no metrics at all.
    """
    if trajectory.stop_reason is StopReason.FAILED:
        return {}
    found = _scores(trajectory)
    executed = trajectory.executed_searches()
    queries = [" ".join((trajectory.segments[at].query or "").split()).lower() for at in executed]
    shown = [trajectory.segments[at + 1].documents or () for at in executed]
    found |= {
        "searches": float(len(executed)),
        "duplicate_searches": float(len(queries) - len(set(queries))),
        "empty_searches": float(sum(not documents for documents in shown)),
        "format_ok": float(trajectory.format_ok),
        "tokens": float(sum(s.n_tokens for s in trajectory.segments if s.is_policy)),
    }
    wanted = {scoring.folded(title) for title in trajectory.supporting_titles or ()}
    seen = _titles_in_prompt(trajectory) & wanted
    for at in range(max(searches, len(shown)) if wanted else 0):
        if at < len(shown):
            seen |= {scoring.folded(document.title) for document in shown[at]} & wanted
        found[f"{RECALL}{at + 1}"] = len(seen) / len(wanted)
    seconds = trajectory.metadata.get(SECONDS)
    if isinstance(seconds, int | float) and math.isfinite(seconds):
        found[SECONDS] = float(seconds)
    return found


def _titles_in_prompt(trajectory: Trajectory) -> set[str]:
    given = trajectory.metadata.get(PROMPT_DOCUMENTS)
    rows = given if isinstance(given, list) else []
    return {scoring.folded(str(row.get("title", ""))) for row in rows if isinstance(row, dict)}


def _scores(trajectory: Trajectory) -> dict[str, float]:
    known: Mapping[str, float | None] = trajectory.scores or {}
    golds = trajectory.golden_answers
    answer = answer_of(trajectory)
    found: dict[str, float] = {}
    for name, score in _SCORES.items():
        value = known.get(name)
        if value is not None:
            found[name] = float(value)
        elif golds:
            found[name] = score(answer, golds)
    return found
