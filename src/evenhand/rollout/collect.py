"""All episodes of a step, driven together.

The loop has fixed points: the policy returns turns, these are fed, and the queries among them go to
the search engine in one call. What happens at a fixed point depends on tokens only. With `overlap`
a call runs beside the policy, and its documents join at the *next* fixed point, early or late as
they may have arrived; so no delay changes a result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

from evenhand.core.errors import ConfigError, DataError
from evenhand.datasets import Question
from evenhand.rollout.policy import Policy, RowKey, Sampling, Session, TurnRequest
from evenhand.task import (
    Done,
    Episode,
    Generate,
    Labels,
    Limits,
    PromptTokenizer,
    Search,
    SearchOutcome,
    Tokenizer,
)
from evenhand.task.prompts import Notices, Prompt, Template
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import Document


class Searcher(Protocol):
    """The part of a retriever that a rollout uses."""

    def search(self, queries: Sequence[str], k: int) -> Sequence[SearchOutcome]:
        """Return one outcome a query, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEnvironment:
    """What surrounds the policy in every episode.

    Attributes:
        retriever: the search engine; each query gets `k` documents.
        k: see `retriever`.
        limits: the rules; `max_context` is lowered to what the policy can take.
        template: the prompt (`evenhand.task.prompts.resolve_template`).
        think_in_prompt: the environment writes the opening `<think>`.
        notices: the environment's messages.
    """

    retriever: Searcher
    k: int = 3
    limits: Limits = field(default_factory=Limits)
    template: str | Template = "searchr1"
    think_in_prompt: bool = False
    notices: Notices = field(default_factory=Notices)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a collection is.

    Attributes:
        total: rollouts asked for.
        finished: rollouts that have ended.
        turns: turns of the policy so far.
        tokens: tokens sampled so far.
        searches: queries asked so far.
    """

    total: int
    finished: int = 0
    turns: int = 0
    tokens: int = 0
    searches: int = 0


ProgressCallback = Callable[[Progress], None]
"""Called after every fixed point."""


@dataclass(frozen=True, slots=True)
class _Failure:
    error: str
    documents: tuple[Document, ...] = ()


def collect(
    questions: Sequence[Question],
    policy: Policy,
    environment: SearchEnvironment,
    *,
    group_size: int = 1,
    sampling: Sampling | None = None,
    step: int | None = None,
    overlap: bool = False,
    progress: ProgressCallback | None = None,
) -> list[Trajectory]:
    """Roll out every question `group_size` times.

    At most `policy.max_rows` episodes are open at a time. A rollout depends on the seed, the step,
    its question, its number and the documents it is shown, on nothing beside it (rounding aside: a
    matrix product may differ in its last bits with the number of rows).

    Args:
        questions: each once. Two of the same data set and id are refused.
        policy: the model.
        environment: search engine, rules, prompt.
        group_size: rollouts of a question.
        sampling: how tokens are drawn; `None` for the defaults.
        step: training step, part of group, id and random numbers; `None` outside training.
        overlap: let the policy go on with other rows while a search runs. For slow search engines:
            it runs in a thread of its own.
        progress: see `ProgressCallback`.

    Returns:
        The trajectories, unscored, by question, then by rollout. Group is `step:dataset/id` and id
        is `group:rollout`, without what is `None`. An episode whose search fails is `failed`.

    Raises:
        DataError: a question occurs twice, or its prompt leaves no room for a turn (nothing has
            been generated then).
        ConfigError: `group_size` is below 1, or a part of the environment cannot be used.
    """
    if group_size < 1:
        raise ConfigError(f"group_size must be a whole number of at least 1, got {group_size!r}")
    episodes = _episodes(questions, policy, environment, group_size, step)
    with ExitStack() as stack:
        session = stack.enter_context(policy.session(sampling or Sampling()))
        worker = stack.enter_context(ThreadPoolExecutor(1)) if overlap else None
        loop = _Loop(episodes, session, environment, policy.max_rows, worker, progress)
        return loop.run()


def group_name(question: Question, step: int | None = None) -> str:
    """Return the group of a question's rollouts in a step."""
    return (f"{step}:" if step is not None else "") + _name(question)


def _name(question: Question) -> str:
    return question.id if question.dataset is None else f"{question.dataset}/{question.id}"


def _episodes(
    questions: Sequence[Question],
    policy: Policy,
    environment: SearchEnvironment,
    group_size: int,
    step: int | None,
) -> dict[RowKey, Episode]:
    tokenizer = _remembering(policy.tokenizer)
    episodes: dict[RowKey, Episode] = {}
    for question in questions:
        group = group_name(question, step)
        first: Episode | None = None
        for rollout in range(group_size):
            key = RowKey(-1 if step is None else step, _name(question), rollout)
            if key in episodes:
                raise DataError(f"question {_name(question)!r} occurs twice in one collection; its "
                                "rollouts would share a group; give each once")  # fmt: skip
            labels = Labels(
                id=f"{group}:{rollout}",
                group=group,
                golden_answers=question.golden_answers,
                step=step,
                question_id=question.id,
                dataset=question.dataset,
                hops=question.hops,
                supporting_titles=question.supporting_titles,
            )
            if first is None:  # the prompt of a question is rendered and encoded once
                first = episodes[key] = new_episode(
                    question.question, policy, environment, labels, tokenizer=tokenizer
                )
            else:
                episodes[key] = first.again(labels)
    return episodes


def new_episode(
    question: str,
    policy: Policy,
    environment: SearchEnvironment,
    labels: Labels | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> Episode:
    """Return an episode at its beginning; its context is lowered to what the policy takes.

    Args:
        question: what is asked.
        policy: who will answer.
        environment: the rules.
        labels: fields of the trajectory that only the caller knows.
        tokenizer: gives what the policy's gives; `None`: the policy's.

    Raises:
        DataError: the prompt leaves no room for a turn.
    """
    limits = environment.limits
    if policy.max_context is not None and policy.max_context < limits.max_context:
        limits = replace(limits, max_context=policy.max_context)
    return Episode(
        question,
        tokenizer=tokenizer or policy.tokenizer,
        limits=limits,
        template=environment.template,
        think_in_prompt=environment.think_in_prompt,
        notices=environment.notices,
        labels=labels,
    )


def leaves_room(question: Question, policy: Policy, environment: SearchEnvironment) -> bool:
    """Whether the prompt of a question leaves room for a turn; it is never cut."""
    try:
        new_episode(question.question, policy, environment)
    except DataError:
        return False
    return True


class _Memory:
    """A tokenizer that encodes each text once: rollouts share prompts, and often documents."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> Sequence[int]:
        if text not in self._known:
            self._known[text] = list(self._tokenizer.encode(text))
        return self._known[text].copy()

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


class _PromptMemory(_Memory):
    """The same for one that knows how its model wants a prompt."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        super().__init__(tokenizer)
        self._of_prompts = tokenizer
        self._prompts: dict[tuple[bool, str], list[int]] = {}

    def encode_prompt(self, prompt: Prompt) -> Sequence[int]:
        name = isinstance(prompt, str), str(prompt)
        if name not in self._prompts:
            self._prompts[name] = list(self._of_prompts.encode_prompt(prompt))
        return self._prompts[name].copy()


def _remembering(tokenizer: Tokenizer) -> Tokenizer:
    if isinstance(tokenizer, PromptTokenizer):
        return _PromptMemory(tokenizer)
    return _Memory(tokenizer)


class _Loop:
    """The loop of `collect` and its state."""

    def __init__(
        self,
        episodes: dict[RowKey, Episode],
        session: Session,
        environment: SearchEnvironment,
        max_rows: int | None,
        worker: ThreadPoolExecutor | None,
        progress: ProgressCallback | None,
    ) -> None:
        self._order = list(episodes)
        self._queue = deque(episodes.items())
        self._open: dict[RowKey, Episode] = {}
        self._done: dict[RowKey, Trajectory] = {}
        self._session = session
        self._environment = environment
        self._max_rows = max_rows or len(episodes)
        self._worker = worker
        self._report = progress or (lambda _: None)
        self._progress = Progress(len(episodes))
        self._turns: list[TurnRequest] = []
        self._searches: dict[RowKey, str] = {}
        self._running: tuple[list[RowKey], Future[list[SearchOutcome]]] | None = None
        self._decoding = 0

    def run(self) -> list[Trajectory]:
        while self._queue or self._open:
            self._admit()
            self._policy_point()
            self._search_point()
            self._progress = replace(self._progress, finished=len(self._done))
            self._report(self._progress)
        return [self._done[key] for key in self._order]

    def _admit(self) -> None:
        while self._queue and len(self._open) < self._max_rows:
            key, episode = self._queue.popleft()
            self._open[key] = episode
            self._ask(key)

    def _policy_point(self) -> None:
        turns, self._turns = self._turns, []
        self._decoding += len(turns)
        if not self._decoding:
            return
        sampled = self._session.generate(turns)
        self._decoding -= len(sampled)
        for turn in sampled:
            episode = self._open[turn.key]
            if turn.error is not None:
                episode.fail(turn.error)
            else:
                episode.feed_turn(turn.token_ids, turn.logprobs, finished=turn.finished)
            self._ask(turn.key)
        seen = self._progress
        self._progress = replace(
            seen,
            turns=seen.turns + len(sampled),
            tokens=seen.tokens + sum(len(turn.token_ids) for turn in sampled),
        )

    def _search_point(self) -> None:
        asked, self._searches = self._searches, {}
        self._progress = replace(self._progress, searches=self._progress.searches + len(asked))
        keys, queries = list(asked), list(asked.values())
        if self._worker is None:
            self._feed(keys, self._search(queries))
            return
        before = self._running
        self._running = (keys, self._worker.submit(self._search, queries)) if keys else None
        if before is not None:
            self._feed(before[0], before[1].result())

    def _search(self, queries: list[str]) -> list[SearchOutcome]:
        environment = self._environment
        unique = list(dict.fromkeys(queries))
        found = dict(zip(unique, _outcomes(environment.retriever, unique, environment.k),
                         strict=True))  # fmt: skip
        return [found[query] for query in queries]

    def _feed(self, keys: list[RowKey], outcomes: Iterable[SearchOutcome]) -> None:
        for key, outcome in zip(keys, outcomes, strict=True):
            self._open[key].feed_result(outcome)
            self._ask(key)

    def _ask(self, key: RowKey) -> None:
        """File what an episode waits for."""
        request = self._open[key].next()
        if isinstance(request, Generate):
            self._turns.append(
                TurnRequest(key, self._open[key].context_ids, request.max_tokens, request.stop_tags)
            )
        elif isinstance(request, Search):
            self._searches[key] = request.query
        else:
            assert isinstance(request, Done)
            self._done[key] = request.trajectory
            del self._open[key]
            self._session.release([key])


def _outcomes(retriever: Searcher, queries: list[str], k: int) -> Iterator[SearchOutcome]:
    """Search a batch; if that raises, each query alone, so that a fault hits only its own."""
    if not queries:
        return
    try:
        results: Sequence[SearchOutcome] = list(retriever.search(queries, k))
    except (ConfigError, DataError):
        raise
    except Exception as error:  # whatever a user's retriever raises is a fault of the environment
        if len(queries) == 1:
            yield _Failure(f"{type(error).__name__}: {error}")
            return
        results = []
    if len(results) == len(queries):
        yield from results
    elif len(queries) == 1:
        yield _Failure(f"the retriever returned {len(results)} results for one query")
    else:
        for query in queries:
            yield from _outcomes(retriever, [query], k)
