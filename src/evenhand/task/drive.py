"""The simplest loop around an episode, and the arrays that a trainer wants of its record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenhand.core.errors import DataError, RetrievalError
from evenhand.task.episode import Episode
from evenhand.task.requests import Done, FailedSearch, Generate, SearchOutcome
from evenhand.task.tokens import Tokenizer
from evenhand.trajectory import Kind, Trajectory


@dataclass(frozen=True, slots=True)
class Turn:
    """What a policy sampled in one turn.

    Attributes:
        token_ids: `[n]` sampled ids.
        logprobs: `[n]` log-probabilities of the sampler, if known.
        finished: the policy ended the turn itself; false if a limit cut it.
    """

    token_ids: ArrayLike
    logprobs: ArrayLike | None = None
    finished: bool = True


TurnPolicy = Callable[[Sequence[int], Generate], Turn]
"""`policy(context_ids, request)` returns a turn."""

SearchFunction = Callable[[str], SearchOutcome]
"""A query to its outcome; with a `Retriever`: `lambda query: retriever.search([query], k=3)[0]`."""


def run_episode(episode: Episode, policy: TurnPolicy, search: SearchFunction) -> Trajectory:
    """Drive one episode to its end and return its record.

    A `RetrievalError` of `search` ends the episode as `failed`, like an outcome with an error. Any
    other exception is a mistake of the program and passes through. An asynchronous loop has the
    same three branches (`docs/environment.md`).
    """
    while True:
        request = episode.next()
        if isinstance(request, Done):
            return request.trajectory
        if isinstance(request, Generate):
            turn = policy(episode.context_ids, request)
            episode.feed_turn(turn.token_ids, turn.logprobs, finished=turn.finished)
        else:
            episode.feed_result(_outcome(search, request.query))


def _outcome(search: SearchFunction, query: str) -> SearchOutcome:
    try:
        return search(query)
    except RetrievalError as error:
        return FailedSearch(str(error) or type(error).__name__)


class ScriptedPolicy:
    """A policy that plays given texts turn by turn, and says nothing once they are used up.

    It honours `Generate.max_tokens` and never looks at the context. Every token has log-probability
    0. `sampled` holds the ids of each turn, as an independent record for checks.
    """

    def __init__(self, tokenizer: Tokenizer, turns: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._turns = iter(turns)
        self.sampled: list[list[int]] = []

    def __call__(self, context_ids: Sequence[int], request: Generate) -> Turn:  # noqa: ARG002 the protocol
        """Return the next text as a turn."""
        ids = list(self._tokenizer.encode(next(self._turns, "")))
        kept = ids[: request.max_tokens]
        self.sampled.append(kept)
        return Turn(kept, np.zeros(len(kept)), finished=len(kept) == len(ids))


class ResponseTokens(NamedTuple):
    """A trajectory as the flat arrays of trainers that split prompt and response.

    Attributes:
        prompt_ids: `[P]` ids of the prompt.
        response_ids: `[T]` ids of all that follows.
        policy_mask: `[T]` true where the policy sampled the token: the loss is taken there only.
        logprobs: `[T]` the sampler's log-probabilities; 0 where there are none.
    """

    prompt_ids: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    policy_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float64]


def response_tokens(trajectory: Trajectory) -> ResponseTokens:
    """Concatenate the segments of a trajectory.

    Raises:
        DataError: a segment has no token ids.
    """
    prompt = [np.zeros(0, dtype=np.int64)]
    ids = [np.zeros(0, dtype=np.int64)]
    mask = [np.zeros(0, dtype=np.bool_)]
    logprobs = [np.zeros(0)]
    for at, segment in enumerate(trajectory.segments):
        if segment.token_ids is None:
            raise DataError(f"segment {at} of trajectory {trajectory.id!r} has no token_ids; "
                            "record them during the rollout")  # fmt: skip
        if segment.kind is Kind.PROMPT:
            prompt.append(segment.token_ids)
            continue
        n = segment.n_tokens
        ids.append(segment.token_ids)
        mask.append(np.full(n, segment.is_policy))
        logprobs.append(np.zeros(n) if segment.logprobs is None else segment.logprobs)
    return ResponseTokens(
        np.concatenate(prompt), np.concatenate(ids), np.concatenate(mask), np.concatenate(logprobs)
    )
