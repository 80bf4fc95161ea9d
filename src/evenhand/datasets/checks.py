"""What `evenhand data check` finds in question sets and corpora."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from evenhand.datasets.questions import Question
from evenhand.task.scoring import folded, is_closed_answer, normalise
from evenhand.trajectory.protocol import Document

LONG_ANSWER = 20
"""A gold of more words than this is doubtful: exact match will hardly ever be reached."""

_WRITTEN_LIST = re.compile(r"""^\s*\[\s*(["']).*\1\s*\]\s*$""", re.DOTALL)


class CorpusIndex:
    """A corpus prepared for asking whether it holds an answer or a title.

    Title and text of a passage are normalised together (`squad`). An answer is found if a passage
    holds its normalised words in a row.

    Attributes:
        name: what the corpus is called.
        n_passages: how many passages it has.
        empty: ids of passages without text.
    """

    def __init__(self, documents: Iterable[Document], name: str = "corpus") -> None:
        self.name = name
        self.n_passages = 0
        self.empty: list[str] = []
        self._titles: set[str] = set()
        self._words: set[str] = set()
        passages: list[str] = []
        for document in documents:
            self.n_passages += 1
            if not document.text.strip():
                self.empty.append(document.id)
            self._titles.add(folded(document.title))
            text = normalise(f"{document.title} {document.text}")
            self._words.update(text.split())
            passages.append(f" {text} ")
        # One long text: substring search in it is far faster than a loop over passages. The line
        # break between two passages keeps a match from crossing.
        self._text = "\n".join(passages)

    def holds_title(self, title: str) -> bool:
        """Whether a passage has that title (Unicode form C, case folded, blanks squeezed)."""
        return folded(title) in self._titles

    def holds_answer(self, golds: Sequence[str]) -> bool:
        """Whether a passage holds one of the golds as whole words."""
        return any(self._holds(normalise(gold)) for gold in golds)

    def _holds(self, answer: str) -> bool:
        # A word that occurs nowhere rules most misses out without a walk through the text.
        return bool(answer) and (
            self._words.issuperset(answer.split()) and f" {answer} " in self._text
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth a look.

    Attributes:
        message: what was found, with its number.
        ids: the questions (or passages) concerned, in order.
    """

    message: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuestionReport:
    """Counts and findings over one question set.

    Attributes:
        n_questions: how many questions.
        n_golds: how many accepted answers in all.
        hops: number of questions by hops (`None`: not known).
        n_with_titles: questions whose supporting titles are known.
        n_closed: questions with only yes/no golds, for which being findable means nothing.
        n_findable: questions whose answer the corpus holds; `None` without a corpus.
        n_asked: questions that this was asked of (all but the closed ones).
        n_agreeing: of those with a flag `answer_in_corpus`, how many the search agrees with.
        n_flagged: how many have the flag and are not closed.
        findings: what is worth a look.
    """

    n_questions: int
    n_golds: int
    hops: dict[int | None, int]
    n_with_titles: int
    n_closed: int
    n_findable: int | None = None
    n_asked: int | None = None
    n_agreeing: int | None = None
    n_flagged: int | None = None
    findings: tuple[Finding, ...] = ()


def check_questions(
    questions: Sequence[Question],
    corpus: CorpusIndex | None = None,
    *,
    compare_flags: bool = True,
) -> QuestionReport:
    """Count and look for what harms training or evaluation.

    Looked for: blank golds; golds that normalise to nothing (their F1 is always 0); golds of more
    than 20 words; lists that were written as text; the same question twice, with the same or with
    other answers; and, given a corpus, answers that it lacks, flags `answer_in_corpus` that
    disagree, supporting titles that it lacks.

    Args:
        questions: the set.
        corpus: the corpus to look answers and titles up in.
        compare_flags: compare `answer_in_corpus` with what is found; the flags are about the set's
            own corpus.
    """
    hops = Counter(question.hops for question in questions)
    asked = [question for question in questions if not is_closed_answer(question.golden_answers)]
    report = QuestionReport(
        n_questions=len(questions),
        n_golds=sum(len(question.golden_answers) for question in questions),
        hops=dict(sorted(hops.items(), key=lambda item: (item[0] is None, item[0] or 0))),
        n_with_titles=sum(bool(question.supporting_titles) for question in questions),
        n_closed=len(questions) - len(asked),
        findings=(*_gold_findings(questions), *_duplicates(questions)),
    )
    if corpus is None:
        return report
    holds = [corpus.holds_answer(question.golden_answers) for question in asked]
    missing = [question for question, found in zip(asked, holds, strict=True) if not found]
    lacking = [
        question
        for question in questions
        if not all(map(corpus.holds_title, question.supporting_titles or ()))
    ]
    report = replace(
        report,
        n_findable=sum(holds),
        n_asked=len(asked),
        findings=(
            *report.findings,
            *_finding(f"answer not in {corpus.name}", missing),
            *_finding(f"supporting title not in {corpus.name}", lacking),
        ),
    )
    return _with_flags(report, asked, holds) if compare_flags else report


def _with_flags(
    report: QuestionReport, asked: Sequence[Question], holds: Sequence[bool]
) -> QuestionReport:
    flagged = [
        (question, found)
        for question, found in zip(asked, holds, strict=True)
        if question.answer_in_corpus is not None
    ]
    wrong = [question for question, found in flagged if question.answer_in_corpus is not found]
    return replace(
        report,
        n_agreeing=len(flagged) - len(wrong),
        n_flagged=len(flagged),
        findings=(*report.findings, *_finding("flag answer_in_corpus is wrong", wrong)),
    )


def _finding(what: str, questions: Sequence[Question]) -> list[Finding]:
    if not questions:
        return []
    ids = tuple(question.id for question in questions)
    return [Finding(f"{what}: {len(ids)}", ids)]


def _gold_findings(questions: Sequence[Question]) -> list[Finding]:
    blank: list[Question] = []
    nothing: list[Question] = []
    long: list[Question] = []
    written: list[Question] = []
    for question in questions:
        golds = question.golden_answers
        if any(not gold.strip() for gold in golds):
            blank.append(question)
        elif any(not normalise(gold) for gold in golds):
            nothing.append(question)
        if any(len(normalise(gold).split()) > LONG_ANSWER for gold in golds):
            long.append(question)
        if any(_WRITTEN_LIST.match(gold) for gold in golds):
            written.append(question)
    return [
        *_finding("blank gold", blank),
        *_finding("gold that normalises to nothing, so that its F1 is always 0", nothing),
        *_finding(f"gold of more than {LONG_ANSWER} words", long),
        *_finding("gold that looks like a list written as text", written),
    ]


def _duplicates(questions: Sequence[Question]) -> list[Finding]:
    first: dict[str, Question] = {}
    same: list[Question] = []
    other: list[Question] = []
    for question in questions:
        earlier = first.setdefault(normalise(question.question), question)
        if earlier is question:
            continue
        answers = {normalise(gold) for gold in question.golden_answers}
        agree = answers == {normalise(gold) for gold in earlier.golden_answers}
        (same if agree else other).append(question)
    return [
        *_finding("same question as an earlier one, same answers", same),
        *_finding("same question as an earlier one, other answers", other),
    ]
