"""Shared by the tests of the environment: outcomes of searches, short turns, a driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand.task import Episode, Limits, ScriptedPolicy, Turn, run_episode
from evenhand.testing.tokenizers import CharacterTokenizer, ChunkTokenizer
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import Document

CHARACTERS = CharacterTokenizer()


@dataclass(frozen=True, slots=True)
class Found:
    """What `retrieval.base.SearchResult` looks like."""

    documents: tuple[Document, ...] = ()
    error: str | None = None


def document(number: int = 1, text: str = "text", title: str = "Title") -> Document:
    return Document(f"d{number}", title, text)


def search(query: str = "q") -> str:
    return f"<think>t</think><search>{query}</search>"


def answer(text: str = "a") -> str:
    return f"<think>t</think><answer>{text}</answer>"


def bare(question: str) -> str:
    """A template whose length in characters is that of the question."""
    return question


def play(
    turns: Iterable[str],
    results: Sequence[Found] | Found = Found((document(),)),  # noqa: B008 frozen
    *,
    question: str = "Q?",
    limits: Limits | None = None,
    **options: Any,
) -> Trajectory:
    """Run an episode of characters; the results are given in order, or one is repeated."""
    episode = Episode(
        question,
        tokenizer=CHARACTERS,
        limits=limits,
        template=options.pop("template", bare),
        **options,
    )
    queue = iter(results) if isinstance(results, list | tuple) else None

    def find(_: str) -> Found:
        return results if queue is None else next(queue)  # type: ignore[return-value]

    return run_episode(episode, ScriptedPolicy(CHARACTERS, turns), find)


def kinds(trajectory: Trajectory) -> list[str]:
    """Kinds of the segments after the prompt."""
    return [segment.kind.value for segment in trajectory.segments[1:]]


def play_chunks(turns: Sequence[Sequence[str]], result: Found = Found()) -> Trajectory:
    """Run an episode whose turns are given token by token, however the tokens split the tags."""
    tokenizer = ChunkTokenizer()
    episode = Episode("Q?", tokenizer=tokenizer, template=bare)
    queue = [tokenizer.ids(turn) for turn in turns]
    return run_episode(
        episode, lambda _context, _request: Turn(queue.pop(0) if queue else []), lambda _: result
    )
