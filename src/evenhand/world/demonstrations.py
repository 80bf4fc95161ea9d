"""Demonstrations: scripted agents in the real environment, as sequences to learn from."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.random import Generator

from evenhand.datasets import Question
from evenhand.retrieval import Bm25Retriever, Retriever, SearchResult
from evenhand.task import (
    Generate,
    Labels,
    Limits,
    SearchOutcome,
    Tokenizer,
    Turn,
    run_episode,
)
from evenhand.task.episode import Episode
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import Document
from evenhand.world import language
from evenhand.world.generator import World
from evenhand.world.skills import Agent, Skill

LIMITS = Limits(
    max_searches=5,
    max_turn_tokens=32,
    max_observation_tokens=120,
    max_context=512,
    max_invalid=1,
)
"""The toy world's rules: one search more than its longest questions need, little context."""

DOCUMENTS_SHOWN = 2
"""Passages of a search."""


def build_retriever(world: World) -> Bm25Retriever:
    """Return the search engine over a world's passages."""
    return Bm25Retriever.build(world.documents)


class AgentPolicy:
    """Lets an agent play an episode: it is both the policy and the search that it overhears."""

    def __init__(self, agent: Agent, tokenizer: Tokenizer, retriever: Retriever) -> None:
        self._agent = agent
        self._tokenizer = tokenizer
        self._retriever = retriever
        self._documents: tuple[Document, ...] | None = None

    def policy(self, context_ids: Sequence[int], request: Generate) -> Turn:  # noqa: ARG002 the protocol
        """Return the agent's next turn."""
        ids = list(self._tokenizer.encode(self._agent.turn(self._documents)))
        return Turn(ids[: request.max_tokens], finished=len(ids) <= request.max_tokens)

    def search(self, query: str) -> SearchOutcome:
        """Search, and keep what was found for the agent."""
        result: SearchResult = self._retriever.search([query], DOCUMENTS_SHOWN)[0]
        self._documents = result.documents
        return result


def labels_of(question: Question, group: str) -> Labels:
    """Return what a trajectory should know of its question."""
    return Labels(
        id=group,
        group=group,
        golden_answers=question.golden_answers,
        question_id=question.id,
        dataset=question.dataset,
        hops=question.hops,
        supporting_titles=question.supporting_titles,
    )


def demonstrate(
    question: Question,
    skill: Skill,
    *,
    retriever: Retriever,
    tokenizer: Tokenizer,
    random: Generator,
    limits: Limits = LIMITS,
) -> Trajectory:
    """Return the rollout of a scripted agent in the real environment."""
    player = AgentPolicy(Agent(question.question, skill, random), tokenizer, retriever)
    episode = Episode(
        question.question,
        tokenizer=tokenizer,
        limits=limits,
        template=language.template,
        notices=language.notices(),
        labels=labels_of(question, question.id),
    )
    return run_episode(episode, player.policy, player.search)
