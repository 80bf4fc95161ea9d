"""Small run folders for tests of the report and the viewer, written without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from builders import answer, rollout
from evenhand.diagnostics.intervals import proportion
from evenhand.training.config import Recipe
from evenhand.training.recipes import recipe_from, write_recipe
from evenhand.training.run_folder import RunFolder
from evenhand.trajectory import Segment, Trajectory

QUESTIONS = 40


def recipe(**settings: Any) -> Recipe:
    return recipe_from({"name": "small", "steps": 6, **settings})


def credited(trajectory: Trajectory, advantage: float) -> Trajectory:
    """The same rollout with an advantage on its policy segments and half a step score."""
    segments: list[Segment] = []
    for at, segment in enumerate(trajectory.segments):
        score = 0.5 if trajectory.is_executed(at) else None
        mine = advantage if segment.is_policy else 0.0
        segments.append(replace(segment, advantage=mine, step_score=score))
    return replace(trajectory, segments=tuple(segments))


def group(step: int, question: int, *, text: str = "Who built it?") -> list[Trajectory]:
    """Four rollouts of one question: two right, with none, one or two searches."""
    found = []
    for at in range(4):
        right = at % 2 == 0
        made = rollout(
            f"s{step}-q{question}-r{at}",
            f"s{step}-q{question}",
            float(right),
            results=[[f"d{question}", f"e{k}"] for k in range(at % 3)],
            step=step,
        )
        made = replace(
            made,
            question=f"{text} Number {question}",
            question_id=f"q{question}",
            dataset="made",
            hops=1,
            supporting_titles=(f"title d{question}",),
            segments=(*made.segments[:-1], answer("x" if right else "other")),
            scores={"exact_match": float(right)},
        )
        found.append(credited(made, 1.0 if right else -1.0))
    return found


def metrics(step: int, exact: float | None = None) -> dict[str, float]:
    row: dict[str, float] = {
        "critic/score/mean": 0.3 + 0.05 * step,
        "rollouts/exact_match": 0.3 + 0.05 * step,
        "rollouts/searches": 1.0 + 0.1 * step,
        "rollouts/format_ok": 1.0,
        "response_length/mean": 20.0,
        "actor/entropy": 0.5 - 0.05 * step,
        "actor/grad_norm": 0.4,
        "credit/negative_to_positive/all": 1.2,
        "credit/mis_penalised": 0.25,
        "timing_s/step": 2.0,
    }
    if exact is not None:
        n = QUESTIONS
        share = proportion(round(exact * n), n)
        row |= {
            "eval/n": n,
            "eval/exact_match": share.value,
            "eval/exact_match_low": share.low,
            "eval/exact_match_high": share.high,
            "eval/searches": 1.0 + step / 10,
            "eval/hops_1/n": n,
            "eval/hops_1/exact_match": share.value,
        }
    return row


def write_run(
    path: Path,
    *,
    steps: int = 6,
    after: float = 0.6,
    settings: Mapping[str, Any] | None = None,
    groups: int = 2,
    trajectories: bool = True,
) -> Path:
    """Write a run of `steps` steps: evaluations at 0 and at the end, rollouts of every step."""
    run = RunFolder.create(path)
    run.begin(recipe(**(settings or {})))
    run.write_metrics(0, {k: v for k, v in metrics(0, 0.3).items() if k.startswith("eval/")})
    for step in range(1, steps + 1):
        if trajectories:
            rows = [t for question in range(groups) for t in group(step, question)]
            run.write_trajectories(step, rows)
        run.write_metrics(step, metrics(step, after if step == steps else None))
    run.unlock()
    return path


def write_alarms(path: Path, steps: Sequence[int] = (4,)) -> None:
    lines = [
        {
            "step": step,
            "alarm": "collapse",
            "action": "warn",
            "message": "entropy rose and fell",
            "cause": "negative mass",
            "remedy": "raise balance",
            "figures": {"actor/entropy": 0.1},
        }
        for step in steps
    ]
    (path / "alarms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_results(folder: Path, model: str = "a-model") -> Path:
    folder.mkdir()
    cell = {"value": 0.4, "low": 0.3, "high": 0.5, "n": 100}
    results = {
        "model": model,
        "sets": {"nq": {"exact_match": cell, "f1": None}, "hotpotqa": {"exact_match": cell}},
        "averages": {"all": {"exact_match": {**cell, "n": None}}, "multi_hop": {}},
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


__all__ = [
    "credited", "group", "metrics", "recipe", "write_alarms", "write_recipe", "write_results",
    "write_run",
]  # fmt: skip
