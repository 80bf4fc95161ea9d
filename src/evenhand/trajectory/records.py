"""The record of one rollout: frozen dataclasses and the enums they use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.trajectory.protocol import Document


class Source(StrEnum):
    """Who wrote a segment."""

    POLICY = "policy"
    """Sampled by the model: the only text that carries credit."""
    ENVIRONMENT = "environment"
    """Prompt, retrieved documents, notices: never trained."""


class Kind(StrEnum):
    """What a segment is."""

    SEARCH = "search"
    """The policy asks the search engine; executed if an information segment follows."""
    ANSWER = "answer"
    """The policy's final answer."""
    INVALID = "invalid"
    """A policy turn without a usable action."""
    TRUNCATED = "truncated"
    """A policy turn that a limit cut."""
    PROMPT = "prompt"
    """What the environment opened with."""
    INFORMATION = "information"
    """The documents that a search returned, as shown."""
    NOTICE = "notice"
    """Any other message of the environment."""


POLICY_KINDS = frozenset({Kind.SEARCH, Kind.ANSWER, Kind.INVALID, Kind.TRUNCATED})


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """The policy answered."""
    SEARCH_LIMIT = "search_limit"
    """The policy searched again when no search was left."""
    TOKEN_LIMIT = "token_limit"
    """A turn or the rollout used up its tokens."""
    CONTEXT_LIMIT = "context_limit"
    """Nothing more fits into the context."""
    INVALID_ACTION = "invalid_action"
    """Too many turns without a usable action."""
    FAILED = "failed"
    """An environment fault: the reward is null and the rollout leaves every statistic."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text by one author.

    Attributes:
        source: policy or environment.
        kind: what it is.
        text: the text as it stood in the context.
        n_tokens: its length in tokens (or in the unit that `metadata["n_tokens_unit"]` names).
        query: what a search asked for.
        documents: on information, the documents that were shown, in order.
        error: on a notice, what went wrong.
        token_ids: `[n_tokens]` ids, if recorded.
        logprobs: `[n_tokens]` log-probabilities of the sampler, if recorded.
        step_score: written by `credit` on executed searches, in [0, 1].
        advantage: written by `credit`; 0 on the environment's segments.
        metadata: whatever else the file had.
    """

    source: Source
    kind: Kind
    text: str
    n_tokens: int
    query: str | None = None
    documents: tuple[Document, ...] | None = None
    error: str | None = None
    token_ids: NDArray[np.int64] | None = field(default=None, compare=False)
    logprobs: NDArray[np.float64] | None = field(default=None, compare=False)
    step_score: float | None = None
    advantage: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_policy(self) -> bool:
        """Whether the policy sampled it."""
        return self.source is Source.POLICY


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout.

    Attributes:
        id: unique in its file.
        group: the rollouts that are compared with one another share it; unique per step and
            question.
        question: the question.
        golden_answers: accepted answers; `None` where the source does not tell.
        reward: a number of magnitude at most 1e6; `None` if it could not be scored.
        format_ok: whether the policy obeyed the protocol.
        stop_reason: why the episode ended.
        segments: in order.
        step: training step.
        question_id: identity of the question in its data set.
        dataset: name of the data set.
        hops: how many facts the question needs.
        supporting_titles: titles of the pages that hold them.
        scores: further scores by name.
        think_in_prompt: the environment writes the opening `<think>`.
        metadata: free; unknown top-level fields end up here.
    """

    id: str
    group: str
    question: str
    golden_answers: tuple[str, ...] | None
    reward: float | None
    format_ok: bool
    stop_reason: StopReason
    segments: tuple[Segment, ...]
    step: int | None = None
    question_id: str | None = None
    dataset: str | None = None
    hops: int | None = None
    supporting_titles: tuple[str, ...] | None = None
    scores: Mapping[str, float | None] | None = None
    think_in_prompt: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def is_executed(self, at: int) -> bool:
        """Whether segment `at` is a search that an information segment follows."""
        segments = self.segments
        return (
            segments[at].kind is Kind.SEARCH
            and at + 1 < len(segments)
            and segments[at + 1].kind is Kind.INFORMATION
        )

    def executed_searches(self) -> list[int]:
        """Return the indices of the executed searches, in order."""
        return [at for at in range(len(self.segments)) if self.is_executed(at)]

    def policy_segments(self) -> list[int]:
        """Return the indices of the policy's segments, in order."""
        return [at for at, segment in enumerate(self.segments) if segment.is_policy]
