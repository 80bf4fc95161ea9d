"""Evaluated rollouts for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from builders import answer, information, search
from evenhand.trajectory import Segment, StopReason, Trajectory


def answered(
    question: str | int,
    *,
    dataset: str | None = "nq",
    right: bool = True,
    results: Sequence[Sequence[str]] = (),
    rollout: int = 0,
    **fields: Any,
) -> Trajectory:
    """A rollout that searches once for each list of document ids, then answers `gold` or not."""
    segments: list[Segment] = []
    for at, ids in enumerate(results):
        segments += [search(f"query {at}"), information(*ids)]
    name = f"{dataset}/{question}"
    made = Trajectory(
        id=f"{name}:{rollout}",
        group=name,
        question=f"question {question}?",
        golden_answers=("gold",),
        reward=float(right),
        format_ok=True,
        stop_reason=StopReason.ANSWERED,
        segments=(*segments, answer("gold" if right else "bad")),
        question_id=str(question),
        dataset=dataset,
    )
    return replace(made, **fields)


def failed(question: str | int, **fields: Any) -> Trajectory:
    """A rollout that an environment fault ended."""
    return answered(question, reward=None, stop_reason=StopReason.FAILED, segments=(), **fields)


def policy_of_chances(
    chances: np.ndarray, generator: np.random.Generator, dataset: str = "nq"
) -> list[Trajectory]:
    """One evaluation of a policy that is right on question `i` with chance `chances[i]`."""
    right = generator.random(len(chances)) < chances
    return [answered(at, dataset=dataset, right=bool(hit)) for at, hit in enumerate(right)]
