"""The trajectory component: what its template needs, from a credited trajectory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from evenhand.protocol import Document
from evenhand.trajectory import Kind, Segment, Trajectory


@dataclass(frozen=True, slots=True)
class DocumentView:
    """A document as shown.

    Attributes:
        document: the document.
        is_silver: a best rollout of the group returned it.
        is_gold: it is one of the supporting pages.
    """

    document: Document
    is_silver: bool
    is_gold: bool


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment as shown.

    Attributes:
        segment: the segment.
        documents: its documents with their marks.
        shade: strength of the advantage's colour, percent of the full colour.
        sign: `pos`, `neg` or `none`.
        credit: text of its advantage and step score, empty for the environment's.
    """

    segment: Segment
    documents: list[DocumentView]
    shade: int
    sign: str
    credit: str


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """A trajectory as shown: `trajectory` and its segments without the prompt."""

    trajectory: Trajectory
    segments: list[SegmentView]


def trajectory_view(trajectory: Trajectory, *, silver: Collection[str] = ()) -> TrajectoryView:
    """Prepare a credited trajectory for the template; `silver` are identities of documents."""
    largest = max((abs(s.advantage or 0.0) for s in trajectory.segments), default=0.0) or 1.0
    gold = {title.casefold() for title in trajectory.supporting_titles or ()}
    views = []
    for segment in trajectory.segments:
        if segment.kind is Kind.PROMPT:
            continue
        advantage = segment.advantage or 0.0
        credit = ""
        if segment.is_policy and segment.advantage is not None:
            credit = f"A {advantage:+.3f}"
            if segment.step_score is not None:
                credit += f", c {segment.step_score:.2f}"
        views.append(
            SegmentView(
                segment=segment,
                documents=[
                    DocumentView(d, d.id in silver, d.title.casefold() in gold)
                    for d in segment.documents or ()
                ],
                shade=round(30 * abs(advantage) / largest),
                sign="pos" if advantage > 0 else "neg" if advantage < 0 else "none",
                credit=credit,
            )
        )
    return TrajectoryView(trajectory, views)
