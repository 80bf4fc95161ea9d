"""Small trajectories for tests."""

from __future__ import annotations

from collections.abc import Sequence

from evenhand.trajectory import Kind, Segment, Source, StopReason, Trajectory
from evenhand.trajectory.protocol import Document, render_information


def search(query: str = "q", *, think: str = "so", n_tokens: int = 10) -> Segment:
    text = f"<think>{think}</think>\n<search>{query}</search>"
    return Segment(Source.POLICY, Kind.SEARCH, text, n_tokens, query=query)


def information(*ids: str, n_tokens: int = 20) -> Segment:
    documents = tuple(Document(i, f"title {i}", f"text of {i}") for i in ids)
    text = render_information(documents)
    return Segment(Source.ENVIRONMENT, Kind.INFORMATION, text, n_tokens, documents=documents)


def answer(text: str = "x", *, n_tokens: int = 8) -> Segment:
    full = f"<think>done</think>\n<answer>{text}</answer>"
    return Segment(Source.POLICY, Kind.ANSWER, full, n_tokens)


def rollout(
    name: str,
    group: str = "g",
    reward: float | None = 0.0,
    *,
    results: Sequence[Sequence[str]] = (),
    format_ok: bool = True,
    step: int | None = None,
) -> Trajectory:
    """A rollout that searches once for each list of document ids, then answers."""
    segments: list[Segment] = []
    for at, ids in enumerate(results):
        segments += [search(f"query {at}", think=f"a{at}{name} b{at}{name} c{at}")]
        segments += [information(*ids)]
    return Trajectory(
        id=name,
        group=group,
        question="who?",
        golden_answers=("x",),
        reward=reward,
        format_ok=format_ok,
        stop_reason=StopReason.ANSWERED if reward is not None else StopReason.FAILED,
        segments=(*segments, answer()),
        step=step,
    )
