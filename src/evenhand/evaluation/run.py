"""Running an evaluation: question sets through an answerer, batch by batch, into a folder."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evenhand.core.errors import ConfigError, RetrievalError
from evenhand.datasets import Question
from evenhand.evaluation.folder import EvaluationFolder
from evenhand.evaluation.measures import SECONDS
from evenhand.evaluation.summary import BATCH, summarise
from evenhand.evaluation.tables import results_files
from evenhand.rollout import (
    Policy,
    ProgressCallback,
    Sampling,
    SearchEnvironment,
    collect,
    leaves_room,
)
from evenhand.rollout.text import TextTokenizer, as_text_only
from evenhand.task.rewards import score_trajectory
from evenhand.trajectory import StopReason, Trajectory

TOO_LONG = "prompt too long"
"""Why a question is left out: its prompt leaves no room for a turn."""

_HOPELESS = 4
"""If a batch of at least so many questions fails as a whole, the evaluation stops."""


class Answerer(Protocol):
    """What answers questions."""

    def refuses(self, question: Question) -> str | None:
        """Return why a question cannot be asked, or `None`."""
        ...

    def answer(
        self, questions: Sequence[Question], progress: ProgressCallback | None = None
    ) -> list[Trajectory]:
        """Return one rollout a question, in order; an environment fault is a failed rollout."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAnswerer:
    """A policy as a search agent, one rollout a question.

    Attributes:
        policy: the model.
        environment: search engine, rules, prompt.
        sampling: how tokens are drawn; greedy by default.
        context: entered around the sampling (autocast).
    """

    policy: Policy
    environment: SearchEnvironment
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def refuses(self, question: Question) -> str | None:
        """See `Answerer`: a question whose prompt leaves no room for a turn; none is ever cut."""
        return None if leaves_room(question, self.policy, self.environment) else TOO_LONG

    def answer(
        self, questions: Sequence[Question], progress: ProgressCallback | None = None
    ) -> list[Trajectory]:
        """See `Answerer`."""
        with self.context():
            rollouts = collect(
                questions, self.policy, self.environment, sampling=self.sampling, progress=progress
            )
        if isinstance(self.policy.tokenizer, TextTokenizer):
            return [as_text_only(rollout) for rollout in rollouts]
        return rollouts


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A set of questions and what answers them.

    Attributes:
        name: of the set; the name of its file.
        questions: each once.
        answerer: what answers them.
    """

    name: str
    questions: Sequence[Question]
    answerer: Answerer


@dataclass(frozen=True, slots=True)
class EvaluationProgress:
    """How far an evaluation is.

    Attributes:
        dataset: the set at work.
        finished: questions answered, those of an earlier run included.
        total: questions to answer in all.
        earlier: questions that an earlier run had answered.
    """

    dataset: str
    finished: int
    total: int
    earlier: int


def evaluate(
    sets: Sequence[EvaluationSet],
    folder: EvaluationFolder,
    *,
    batch: int = 64,
    convention: str = "squad",
    progress: Callable[[EvaluationProgress], None] | None = None,
) -> dict[str, Any]:
    """Answer every question that the folder lacks, and return the results (`summarise`).

    Each batch is scored and on disk before the next begins, so a kill loses one batch at most.
    Results and tables are written at the end, over all sets of the folder.

    `metadata["seconds"]` of a rollout is the wall time of its batch divided by its questions: what
    a question costs at this batch size, not how long one waits for it. With `batch=1` it is both.

    Args:
        sets: what to ask.
        folder: an open folder.
        batch: questions that are answered together.
        convention: of scoring.
        progress: told now and then.

    Raises:
        ConfigError: `batch` is below 1.
        RetrievalError: every question of a batch of four or more failed: the search engine or the
            model's server is down. The batch is not kept.
    """
    if batch < 1:
        raise ConfigError(f"the batch must be a whole number of at least 1, got {batch!r}")
    asked: dict[str, list[Question]] = {}
    left_out: dict[str, dict[str, int]] = {}
    known: dict[str, dict[str, Trajectory]] = {}
    for each in sets:
        reasons = {question.id: each.answerer.refuses(question) for question in each.questions}
        asked[each.name] = [q for q in each.questions if reasons[q.id] is None]
        left_out[each.name] = dict(Counter(why for why in reasons.values() if why))
        known[each.name] = folder.resume(each.name)
    total = sum(map(len, asked.values()))
    earlier = sum(map(len, known.values()))
    done = earlier
    for each in sets:
        missing = [q for q in asked[each.name] if q.id not in known[each.name]]
        for start in range(0, len(missing), batch):
            questions = missing[start : start + batch]
            report = _reporter(progress, each.name, done, total, earlier)
            report(0)
            rollouts = _batch(each, questions, convention, report)
            folder.append(each.name, rollouts)
            known[each.name].update((str(t.question_id), t) for t in rollouts)
            done += len(rollouts)
            report(0)
    by_set = {each.name: _in_order(asked[each.name], known[each.name]) for each in sets}
    before = folder.earlier_results().get("left_out", {})
    left_out = {**before, **left_out}
    results = summarise(
        {**folder.others(by_set), **by_set},
        model=str(folder.manifest["model"]),
        baseline=folder.manifest.get("baseline"),
        left_out=left_out,
    )
    folder.write_results(results, results_files(results))
    return results


def _batch(
    part: EvaluationSet,
    questions: Sequence[Question],
    convention: str,
    report: Callable[[int], None],
) -> list[Trajectory]:
    began = time.perf_counter()
    rollouts = part.answerer.answer(questions, lambda p: report(p.finished))
    seconds = (time.perf_counter() - began) / len(questions)
    failed = [t for t in rollouts if t.stop_reason is StopReason.FAILED]
    if len(failed) == len(questions) >= _HOPELESS:
        reason = failed[0].segments[-1].error if failed[0].segments else "no reason"
        raise RetrievalError(
            f"all {len(failed)} questions of a batch of {part.name} failed, the first with: "
            f"{reason}; they are not kept: repair it and run the same command again"
        )
    kept = []
    for rollout in rollouts:
        scored = score_trajectory(rollout, "exact_match", convention=convention)
        timing = {SECONDS: round(seconds, 6), BATCH: f"{part.name}/{questions[0].id}"}
        kept.append(replace(scored, metadata={**scored.metadata, **timing}))
    return kept


def _reporter(
    progress: Callable[[EvaluationProgress], None] | None,
    dataset: str,
    done: int,
    total: int,
    earlier: int,
) -> Callable[[int], None]:
    def report(more: int) -> None:
        if progress is not None:
            progress(EvaluationProgress(dataset, done + more, total, earlier))

    return report


def _in_order(questions: Sequence[Question], known: Mapping[str, Trajectory]) -> list[Trajectory]:
    return [known[question.id] for question in questions if question.id in known]
