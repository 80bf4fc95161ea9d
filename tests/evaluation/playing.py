"""A small question set, a search engine and scripted policies for evaluations without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from evenhand.datasets import Question
from evenhand.evaluation.run import PolicyAnswerer
from evenhand.retrieval import SearchResult
from evenhand.rollout import RowKey, ScriptedRollouts, SearchEnvironment
from evenhand.task import Limits
from evenhand.testing.tokenizers import CharacterTokenizer
from evenhand.trajectory.protocol import Document

THINGS = ("lamp", "clock", "bridge", "mill", "boat", "chair", "globe", "harp")
MAKERS = ("Anna", "Berta", "Clara", "Dora", "Emma", "Frida", "Gerda", "Hanna")


def questions(n: int = 8, dataset: str = "nq", **fields: Any) -> list[Question]:
    return [
        Question(
            id=f"q{at}",
            question=f"who made the {THINGS[at]}?",
            golden_answers=(MAKERS[at],),
            dataset=dataset,
            supporting_titles=(THINGS[at],),
            **fields,
        )
        for at in range(n)
    ]


PASSAGES = [
    Document(f"d{at}", thing, f"{MAKERS[at]} made the {thing}.") for at, thing in enumerate(THINGS)
]


class Engine:
    """Finds the passage whose title is in the query; fails where `broken` says so."""

    def __init__(self, broken: Callable[[str], bool] = lambda _: False) -> None:
        self.broken = broken
        self.asked: list[str] = []

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        self.asked += queries
        return [self._one(query, k) for query in queries]

    def _one(self, query: str, k: int) -> SearchResult:
        if self.broken(query):
            return SearchResult(error="the engine is down")
        return SearchResult(tuple(d for d in PASSAGES if d.title in query)[:k])


def thing_of(key: RowKey) -> int:
    return int(key.question.rsplit("q", 1)[1])


def searches_then_answers(key: RowKey) -> list[str]:
    """Right for even questions; odd ones search twice for the same and answer nonsense."""
    at = thing_of(key)
    look = f"<think>look</think><search>{THINGS[at]}</search>"
    if at % 2 == 0:
        return [look, f"<think>so</think><answer>{MAKERS[at]}</answer>"]
    return [look, look, "<think>hm</think><answer>nobody</answer>"]


def answers_at_once(key: RowKey) -> list[str]:
    return [f"<think>so</think><answer>{MAKERS[thing_of(key)]}</answer>"]


def agent(
    script: Callable[[RowKey], list[str]] = searches_then_answers,
    *,
    engine: Engine | None = None,
    **limits: Any,
) -> PolicyAnswerer:
    environment = SearchEnvironment(
        retriever=engine or Engine(), k=2, limits=Limits(**{"max_searches": 3, **limits})
    )
    return PolicyAnswerer(
        policy=ScriptedRollouts(CharacterTokenizer(), script), environment=environment
    )
