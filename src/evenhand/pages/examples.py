"""Rollouts worth reading: the best and the worst of the question that divides a step most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.core.errors import DataError
from evenhand.credit.evidence import silver_documents
from evenhand.pages.runs import Family
from evenhand.pages.strata import step_files
from evenhand.pages.tokens import decoder
from evenhand.pages.trajectory import TrajectoryView, trajectory_view
from evenhand.trajectory import Trajectory, read_trajectories

MAX_FAMILIES = 4


@dataclass(frozen=True, slots=True)
class ReportExample:
    """Two rollouts of one question.

    Attributes:
        label: the series and step they are from.
        views: the best and the worst.
    """

    label: str
    views: list[TrajectoryView]


def examples(families: Sequence[Family]) -> list[ReportExample]:
    """Return one pair for each of the first families that has one in its last readable step."""
    found = []
    for family in families[:MAX_FAMILIES]:
        example = _example(family)
        if example is not None:
            found.append(example)
    return found


def _example(family: Family) -> ReportExample | None:
    files = step_files(family.runs[0])
    if not files:
        return None
    step, path = files[-1]
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    try:
        for trajectory in read_trajectories(path):
            groups[trajectory.group].append(trajectory)
    except DataError:  # strata have said so already
        return None
    scored = [
        [t for t in group if t.reward is not None] for group in groups.values()
    ]  # fmt: skip
    divided = [group for group in scored if len({t.reward for t in group}) > 1]
    if not divided:
        return None
    # The question with most structure: differing rewards, then the most searches.
    chosen = max(
        divided, key=lambda g: (_spread(g), sum(len(t.executed_searches()) for t in g), g[0].group)
    )
    ordered = sorted(chosen, key=lambda t: (-(t.reward or 0.0), t.id))
    name = f", {family.runs[0].path.name}" if len(family.runs) > 1 else ""
    decode = decoder(family.runs[0].settings)
    silver = silver_documents(groups[chosen[0].group])
    return ReportExample(
        f"{family.label}{name}, step {step}",
        [trajectory_view(t, silver=silver, decode=decode) for t in (ordered[0], ordered[-1])],
    )


def _spread(group: Sequence[Trajectory]) -> float:
    """How evenly a group divides into better and worse: 1 for halves."""
    rewards = [t.reward or 0.0 for t in group]
    best = sum(reward == max(rewards) for reward in rewards) / len(rewards)
    return 1 - abs(2 * best - 1)
