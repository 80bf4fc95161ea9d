"""The real question sets and corpora that lie beside the checkout, where they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from evenhand import datasets
from evenhand.datasets import CorpusIndex, Question, check_questions
from evenhand.task import rewards
from evenhand.trajectory import Kind, Segment, Source, StopReason, Trajectory
from evenhand.trajectory.protocol import Document, render_information

SHARED = Path(__file__).parents[1] / "../shared/data"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")

COUNTS = {
    "nq:test": 3610, "triviaqa:test": 1000, "popqa:test": 1936, "hotpotqa:dev": 1434,
    "hotpotqa:train": 1218, "2wikimultihopqa:dev": 164, "2wikimultihopqa:dev_inferred": 1170,
    "2wikimultihopqa:train": 500, "musique:dev": 645, "musique:train": 100, "bamboogle:test": 125,
}  # fmt: skip


@cache
def corpus(name: str) -> tuple[Document, ...]:
    return tuple(datasets.load_corpus(name, data=SHARED))


def flags_agree(spec: str) -> bool:
    index = CorpusIndex(corpus(spec.partition(":")[0]))
    report = check_questions(datasets.load_questions(spec, data=SHARED), index)
    return bool(report.n_flagged) and report.n_agreeing == report.n_flagged


@pytest.mark.parametrize("spec", COUNTS)
def test_every_set_loads_in_full(spec: str) -> None:
    questions = datasets.load_questions(spec, data=SHARED)
    assert len(questions) == COUNTS[spec]
    assert {question.dataset for question in questions} == {spec.partition(":")[0]}


@pytest.mark.parametrize("spec", ["bamboogle:test", "musique:train", "musique:dev"])
def test_what_is_findable_agrees_with_the_files_own_flags(spec: str) -> None:
    assert flags_agree(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", sorted(set(COUNTS) - {"bamboogle:test", "musique:train", "musique:dev"})
)
def test_what_is_findable_agrees_with_every_files_own_flags(spec: str) -> None:
    assert flags_agree(spec)


@pytest.mark.slow
def test_the_union_of_the_corpora_is_about_76000_passages_with_unique_ids() -> None:
    seen: set[str] = set()
    for document in datasets.load_corpus("union", data=SHARED):
        seen.add(document.id)
    assert len(seen) == 76_474


def test_popqa_holds_questions_that_occur_again_with_other_answers() -> None:
    report = check_questions(datasets.load_questions("popqa", data=SHARED))
    assert [(finding.message, finding.ids[:1]) for finding in report.findings] == [
        ("same question as an earlier one, same answers: 4", ("test_7757",)),
        ("same question as an earlier one, other answers: 12", ("popqa_np_413",)),
    ]


# --- a scripted policy that searches the supporting titles and answers the gold ------------------


def scripted(question: Question, passages: dict[str, list[Document]]) -> Trajectory:
    segments: list[Segment] = []
    for title in question.supporting_titles or ():
        query = f"<think>Look up {title}.</think><search>{title}</search>"
        segments.append(Segment(Source.POLICY, Kind.SEARCH, query, 1, query=title))
        shown = tuple(passages[title][:3])
        text = render_information(shown)
        segments.append(Segment(Source.ENVIRONMENT, Kind.INFORMATION, text, 1, documents=shown))
    last = f"<think>Done.</think><answer>{question.golden_answers[0]}</answer>"
    segments.append(Segment(Source.POLICY, Kind.ANSWER, last, 1))
    return Trajectory(
        id=question.id,
        group=question.id,
        question=question.question,
        golden_answers=question.golden_answers,
        reward=None,
        format_ok=True,
        stop_reason=StopReason.ANSWERED,
        segments=tuple(segments),
        supporting_titles=question.supporting_titles,
    )


def by_title(documents: Iterable[Document]) -> dict[str, list[Document]]:
    found: dict[str, list[Document]] = {}
    for document in documents:
        found.setdefault(document.title, []).append(document)
    return found


def with_titles(name: str, n: int) -> Iterator[Trajectory]:
    passages = by_title(corpus(name))
    known = [
        question
        for question in datasets.load_questions(name, data=SHARED)
        if question.supporting_titles and all(t in passages for t in question.supporting_titles)
    ]
    assert len(known) >= n
    return (scripted(question, passages) for question in known[:n])


@pytest.mark.parametrize("name", ["hotpotqa", "musique"])
def test_searching_the_titles_and_answering_the_gold_earns_one_under_every_reward(
    name: str,
) -> None:
    for trajectory in with_titles(name, 200):
        for reward in rewards.REWARDS:
            scored = rewards.score_trajectory(trajectory, reward)
            assert scored.reward == 1.0, (trajectory.id, reward)
            assert scored.scores == {"exact_match": 1.0, "f1": 1.0, "contains": 1.0}
