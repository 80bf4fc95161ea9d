"""Baselines without training: what a model does without the search loop.

* `direct`: it answers from memory; nothing can be searched.
* `retrieve_once`: the question is searched as it is, and what comes back stands in the prompt.
* `gold_passages`: the supporting passages stand in the prompt: what is left is reading.

All of them ask for the usual format, so answers are parsed and scored like those of an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from evenhand.datasets import Question
from evenhand.evaluation.measures import PROMPT_DOCUMENTS
from evenhand.evaluation.run import TOO_LONG, PolicyAnswerer
from evenhand.rollout import (
    ProgressCallback,
    SearchEnvironment,
    group_name,
    leaves_room,
    new_episode,
)
from evenhand.rollout.text import TextTokenizer, as_text_only
from evenhand.task import Done, Labels, scoring
from evenhand.task.prompts import PLACEHOLDER, TEMPLATES, Prompt, Template, render_prompt
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import Document, render_information

DIRECT_TEXT = (
    "Answer the question. First think between <think> and </think>, then write a short answer "
    "between <answer> and </answer>. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)
"""Prompt of `direct`."""

GIVEN_TEXT = (
    "Answer the question with the help of these passages.{passages}First think between <think> and "
    "</think>, then write a short answer between <answer> and </answer>. For example, <answer> "
    "Beijing </answer>. Question: {question}\n"
)
"""Prompt of `retrieve_once` and `gold_passages`."""

PASSAGES = "{passages}"
"""Where the passages go in `GIVEN_TEXT`."""

NO_GOLD_PASSAGE = "without a gold passage"
"""Why a question is left out: no passage has one of its supporting titles, or none is known."""

PER_TITLE = 3
"""Gold passages of a page at most."""

Find = Callable[[Sequence[Question]], list[tuple[tuple[Document, ...], str | None]]]
"""Questions to `(documents, error)` each, in order."""


def prompt_with(base: str | Template, documents: Sequence[Document] | None) -> Template:
    """Return a template that gives passages, or (`None`) asks to answer from memory.

    The templates of evenhand are replaced by `DIRECT_TEXT` and `GIVEN_TEXT` (as a chat message
    where they are one). Any other template stays as it is, with the passages after it.
    """
    block = "" if documents is None else render_information(documents)

    def template(question: str) -> Prompt:
        prompt = render_prompt(base, question)
        if isinstance(base, str) and base in TEMPLATES:
            # Each part is filled by itself: passages and questions may hold anything.
            head, _, tail = (DIRECT_TEXT if documents is None else GIVEN_TEXT).rpartition(PASSAGES)
            filled = head + block + tail.replace(PLACEHOLDER, question)
            return filled if isinstance(prompt, str) else [{"role": "user", "content": filled}]
        if isinstance(prompt, str):
            return prompt + block
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + block}]

    return template


def without_search(
    environment: SearchEnvironment, documents: Sequence[Document] | None
) -> SearchEnvironment:
    """Return the environment in which nothing can be searched and the prompt says what is given."""
    base = environment.template
    named = isinstance(base, str) and base in TEMPLATES
    limits = replace(
        environment.limits,
        max_searches=0,
        # Our own prompts ask for an answer; any other is followed by the notice that says it.
        announce_last=environment.limits.announce_last and not named,
    )
    return replace(environment, limits=limits, template=prompt_with(base, documents))


def direct(agent: PolicyAnswerer) -> PolicyAnswerer:
    """Return the baseline `direct` of an agent."""
    return replace(agent, environment=without_search(agent.environment, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPassages:
    """An `Answerer` that puts passages into the prompt.

    Passages that do not fit are dropped from the end: the block holds at most
    `limits.max_observation_tokens`, and the prompt leaves room for a turn.

    Attributes:
        agent: policy, rules, sampling.
        find: the passages of questions.
        required: a question without a passage is refused (`NO_GOLD_PASSAGE`).
    """

    agent: PolicyAnswerer
    find: Find
    required: bool = False

    def refuses(self, question: Question) -> str | None:
        """See `Answerer`."""
        if not leaves_room(question, self.agent.policy, self._environment(())):
            return TOO_LONG
        if self.required and not self.find([question])[0][0]:
            return NO_GOLD_PASSAGE
        return None

    def answer(
        self, questions: Sequence[Question], progress: ProgressCallback | None = None
    ) -> list[Trajectory]:
        """See `Answerer`. A search that fails makes a failed rollout."""
        done: dict[str, Trajectory] = {}
        # A prompt is made from the text of a question alone, and two questions may share it.
        rounds: list[dict[str, tuple[Question, tuple[Document, ...]]]] = []
        for question, (documents, error) in zip(questions, self.find(questions), strict=True):
            if error is not None:
                done[question.id] = self._failed(question, error)
                continue
            given = (question, self._fitted(question, documents))
            free = next((each for each in rounds if question.question not in each), None)
            if free is None:
                rounds.append({question.question: given})
            else:
                free[question.question] = given
        for each in rounds:
            done |= self._round(each, progress)
        return [done[question.id] for question in questions]

    def _round(
        self,
        given: Mapping[str, tuple[Question, tuple[Document, ...]]],
        progress: ProgressCallback | None,
    ) -> dict[str, Trajectory]:
        base = self.agent.environment.template
        environment = replace(
            self._environment(()), template=lambda text: prompt_with(base, given[text][1])(text)
        )
        asked = [question for question, _ in given.values()]
        rollouts = replace(self.agent, environment=environment).answer(asked, progress)
        done = {}
        for (question, documents), rollout in zip(given.values(), rollouts, strict=True):
            shown = [{"id": d.id, "title": d.title} for d in documents]
            metadata = {**rollout.metadata, PROMPT_DOCUMENTS: shown}
            done[question.id] = replace(rollout, metadata=metadata)
        return done

    def _environment(self, documents: Sequence[Document]) -> SearchEnvironment:
        return without_search(self.agent.environment, documents)

    def _fitted(self, question: Question, documents: tuple[Document, ...]) -> tuple[Document, ...]:
        policy = self.agent.policy
        most = self.agent.environment.limits.max_observation_tokens
        for count in range(len(documents), 0, -1):
            shown = documents[:count]
            if len(policy.tokenizer.encode(render_information(shown))) > most:
                continue
            if leaves_room(question, policy, self._environment(shown)):
                return shown
        return ()

    def _failed(self, question: Question, error: str) -> Trajectory:
        name = group_name(question)
        labels = Labels(
            id=f"{name}:0",
            group=name,
            golden_answers=question.golden_answers,
            question_id=question.id,
            dataset=question.dataset,
            hops=question.hops,
            supporting_titles=question.supporting_titles,
        )
        episode = new_episode(question.question, self.agent.policy, self._environment(()), labels)
        episode.fail(error)
        request = episode.next()
        assert isinstance(request, Done)
        is_text = isinstance(self.agent.policy.tokenizer, TextTokenizer)
        return as_text_only(request.trajectory) if is_text else request.trajectory


def retrieve_once(agent: PolicyAnswerer) -> GivenPassages:
    """Return the baseline `retrieve_once`: the question is the query."""

    def find(questions: Sequence[Question]) -> list[tuple[tuple[Document, ...], str | None]]:
        environment = agent.environment
        results = environment.retriever.search([q.question for q in questions], environment.k)
        return [(tuple(result.documents), result.error) for result in results]

    return GivenPassages(agent=agent, find=find)


def gold_passages(agent: PolicyAnswerer, corpus: Iterable[Document]) -> GivenPassages:
    """Return the baseline `gold_passages`.

    Passages are found by title (Unicode form C, case folded): of each supporting title the first
    passages of the corpus, up to `PER_TITLE`; first one of every title, then the second ones.
    """
    by_title: dict[str, list[Document]] = {}
    for document in corpus:
        passages = by_title.setdefault(scoring.folded(document.title), [])
        if len(passages) < PER_TITLE:
            passages.append(document)

    def of(question: Question) -> tuple[Document, ...]:
        titles = dict.fromkeys(scoring.folded(title) for title in question.supporting_titles or ())
        pages = [by_title.get(title, []) for title in titles]
        return tuple(page[at] for at in range(PER_TITLE) for page in pages if at < len(page))

    def find(questions: Sequence[Question]) -> list[tuple[tuple[Document, ...], str | None]]:
        return [(of(question), None) for question in questions]

    return GivenPassages(agent=agent, find=find, required=True)
