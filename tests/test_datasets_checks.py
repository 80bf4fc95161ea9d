"""What the check of a question set finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.datasets import CorpusIndex, Question, check_questions
from evenhand.task import scoring
from evenhand.trajectory.protocol import Document

CORPUS = CorpusIndex(
    [
        Document("1", "Café de Flore", "A café in Paris, France."),
        Document("2", "Rome", "The capital of Italy"),
        Document("3", "", "  "),
    ],
    "places",
)


def question(identity: str, *golds: str, text: str | None = None, **fields: object) -> Question:
    return Question(identity, text or f"question {identity}", golds, **fields)  # type: ignore[arg-type]


def messages(*questions: Question, corpus: CorpusIndex | None = None) -> dict[str, tuple[str, ...]]:
    report = check_questions(questions, corpus)
    return {finding.message: finding.ids for finding in report.findings}


def test_a_clean_set_has_no_finding() -> None:
    clean = question("a", "Paris", answer_in_corpus=True, supporting_titles=("Rome",))
    assert messages(clean, corpus=CORPUS) == {}


def test_counts_are_those_of_the_set() -> None:
    report = check_questions(
        [
            question("a", "Paris", "Lutetia", hops=2, supporting_titles=("Rome",)),
            question("b", "yes", hops=1),
            question("c", "Oslo", hops=1, supporting_titles=()),
            question("d", "Nuuk"),
        ]
    )
    assert (report.n_questions, report.n_golds, report.n_with_titles, report.n_closed) == (
        4, 5, 1, 1,
    )  # fmt: skip
    assert list(report.hops.items()) == [(1, 2), (2, 1), (None, 1)]
    assert report.n_findable is report.n_asked is report.n_agreeing is report.n_flagged is None


def test_doubtful_golds_are_found() -> None:
    found = messages(
        question("a", "Paris", " "),
        question("b", "---", "minus"),
        question("c", "A+"),
        question("d", "word " * 21),
        question("e", "word " * 20),
        question("f", '["Paris", "Lutetia"]'),
        question("g", "['Paris']"),
        question("h", "[sic] Paris"),
    )
    assert found == {
        "blank gold: 1": ("a",),
        "gold that normalises to nothing, so that its F1 is always 0: 2": ("b", "c"),
        "gold of more than 20 words: 1": ("d",),
        "gold that looks like a list written as text: 2": ("f", "g"),
    }


def test_duplicates_are_told_apart_by_their_answers() -> None:
    found = messages(
        question("a", "Paris", text="Which city?"),
        question("b", "paris", text="which city"),
        question("c", "Rome", text="Which  city ?"),
        question("d", "Paris", "Rome", text="Which city?"),
        question("e", "Paris", text="Which town?"),
    )
    assert found == {
        "same question as an earlier one, same answers: 1": ("b",),
        "same question as an earlier one, other answers: 2": ("c", "d"),
    }


def test_answers_and_titles_are_looked_up_in_the_corpus() -> None:
    questions = [
        question("a", "paris", answer_in_corpus=True),
        question("b", "Oslo", "Par", answer_in_corpus=True),
        question("c", "the Capital of  Italy!", answer_in_corpus=False),
        question("d", "Nuuk", supporting_titles=("CAFE\u0301 de flore", "Atlantis")),
        question("e", "yes", answer_in_corpus=None),
    ]
    report = check_questions(questions, CORPUS)
    assert (report.n_findable, report.n_asked) == (2, 4)
    assert (report.n_agreeing, report.n_flagged) == (1, 3)
    assert [(f.message, f.ids) for f in report.findings] == [
        ("answer not in places: 2", ("b", "d")),
        ("supporting title not in places: 1", ("d",)),
        ("flag answer_in_corpus is wrong: 2", ("b", "c")),
    ]
    other = check_questions(questions, CORPUS, compare_flags=False)
    assert other.n_flagged is None
    assert len(other.findings) == 2


def test_an_answer_does_not_reach_from_one_passage_into_the_next() -> None:
    assert CORPUS.holds_answer(["Italy"])
    assert not CORPUS.holds_answer(["France Rome", "of Italy of"])


def test_a_title_is_part_of_its_passage() -> None:
    assert CORPUS.holds_answer(["Flore"])
    assert CORPUS.holds_answer(["Rome: the capital"])


def test_a_gold_that_normalises_to_nothing_is_nowhere() -> None:
    assert not CORPUS.holds_answer(["the", "---", ""])


def test_passages_without_text_are_counted() -> None:
    assert (CORPUS.n_passages, CORPUS.empty) == (3, ["3"])


WORDS = st.lists(st.sampled_from(["paris", "par", "is", "rome", "The", "new-york"]), max_size=4)


@given(st.lists(WORDS.map(" ".join), min_size=1, max_size=4), WORDS.map(" ".join))
def test_the_lookup_agrees_with_containment_passage_by_passage(texts: list[str], gold: str) -> None:
    index = CorpusIndex(Document(str(at), "", text) for at, text in enumerate(texts))
    expected = any(scoring.contains(text, gold) for text in texts)
    if scoring.normalise(gold):
        assert index.holds_answer([gold]) == expected


def test_the_report_needs_no_questions() -> None:
    report = check_questions([], CORPUS)
    assert (report.n_questions, report.n_asked, report.findings) == (0, 0, ())


@pytest.mark.parametrize("gold", ["yes", "No", "noanswer."])
def test_closed_answers_are_not_looked_up(gold: str) -> None:
    assert check_questions([question("a", gold, answer_in_corpus=False)], CORPUS).n_flagged == 0
