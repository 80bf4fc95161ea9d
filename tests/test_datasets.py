"""Questions from every layout, corpora, their union, splits, and names in a data folder."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand import datasets
from evenhand.core.errors import ConfigError, DataError
from evenhand.datasets import (
    SETS,
    Question,
    catalogue,
    question_from_dict,
    question_to_dict,
    read_corpus,
    read_questions,
    split,
    union,
    write_questions,
)
from evenhand.datasets.corpora import document_from_dict
from evenhand.trajectory.protocol import Document

ROW = {"id": "7", "question": "Where is the Louvre?", "golden_answers": ["Paris"]}


def write(path: Path, *rows: Mapping[str, Any] | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    text = "".join(line + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


# --- questions -----------------------------------------------------------------------------------


def test_flashrags_layout_is_read_with_its_metadata(tmp_path: Path) -> None:
    row = {
        **ROW,
        "metadata": {
            "hops": 2,
            "supporting_titles": ["Louvre", "Paris"],
            "answer_in_corpus": True,
            "level": "hard",
        },
    }
    assert list(read_questions(write(tmp_path / "museum_dev.jsonl.gz", row))) == [
        Question(
            id="7",
            question="Where is the Louvre?",
            golden_answers=("Paris",),
            dataset="museum_dev",
            hops=2,
            supporting_titles=("Louvre", "Paris"),
            answer_in_corpus=True,
            metadata={"level": "hard"},
        )
    ]


def test_unknown_fields_are_kept() -> None:
    question = question_from_dict({**ROW, "topic": "art", "metadata": {"level": "hard"}})
    assert question.metadata == {"topic": "art", "level": "hard"}


@pytest.mark.parametrize(
    ("golds", "right"),
    [
        ("Paris", ("Paris",)),
        (np.array(["Paris", "City of Paris"], dtype=object), ("Paris", "City of Paris")),
        (np.array(["Paris", "City of Paris"]), ("Paris", "City of Paris")),
        (["Paris"], ("Paris",)),
    ],
)
@pytest.mark.parametrize("place", ["golden_answers", "reward_model"])
def test_golds_come_as_text_list_or_array(place: str, golds: Any, right: tuple[str, ...]) -> None:
    row: dict[str, Any] = {"question": "q"}
    if place == "golden_answers":
        row[place] = golds
    else:
        row[place] = {"style": "rule", "ground_truth": {"target": golds}}
    assert question_from_dict(row).golden_answers == right


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "golden_answers": []}, "field golden_answers: the list of accepted"),
        ({**ROW, "golden_answers": [1972]}, "field golden_answers: expected a list of texts"),
        ({**ROW, "golden_answers": None}, "field golden_answers is missing"),
        ({"id": "7", "question": "q"}, "field golden_answers is missing"),
        ({"question": "q", "reward_model": {"ground_truth": {"target": []}}},
         "field reward_model.ground_truth.target: the list of accepted answers is empty"),
        ({"question": "q", "reward_model": {"ground_truth": 3}},
         "field reward_model.ground_truth: expected a list of texts"),
        ({"question": "q", "reward_model": {"style": "rule"}},
         "field reward_model.ground_truth is missing"),
        ({"golden_answers": ["x"]}, "field question is missing"),
        ({**ROW, "question": " "}, "field question: expected a text that is not empty"),
        ({**ROW, "question": 3}, "field question: expected a text"),
        ({**ROW, "id": ""}, "field id: expected a text or a whole number"),
        ({**ROW, "id": True}, "field id: expected a text or a whole number"),
        ({**ROW, "metadata": ["hops"]}, "field metadata: expected an object"),
        ({**ROW, "metadata": {"hops": "two"}}, "field hops: expected a whole number"),
        ({**ROW, "metadata": {"hops": -1}}, "field hops: expected a whole number"),
        ({**ROW, "supporting_titles": "Paris"}, "field supporting_titles: expected a list"),
        ({**ROW, "supporting_titles": [1]}, "field supporting_titles: expected a list"),
        ({**ROW, "answer_in_corpus": "yes"}, "field answer_in_corpus: expected true, false"),
        ({"prompt": [{"role": "system", "content": "x"}], "golden_answers": ["x"]},
         "field prompt: no message of the user"),
    ],
)  # fmt: skip
def test_a_broken_row_is_named_with_file_line_and_field(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "set.jsonl", {**ROW, "id": "first"}, "", row)
    with pytest.raises(DataError) as caught:
        list(read_questions(path))
    assert str(caught.value).startswith(f"{path}, line 3")
    assert message in str(caught.value)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: not JSON"):
        list(read_questions(write(tmp_path / "set.jsonl", '{"question": ')))


def test_an_id_that_occurs_twice_is_an_error_within_one_set_only(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2, field id: '7' occurs a second time"):
        list(read_questions(write(tmp_path / "a.jsonl", ROW, ROW)))
    rows = [{**ROW, "dataset": "nq"}, {**ROW, "dataset": "bamboogle"}]
    assert len(list(read_questions(write(tmp_path / "b.jsonl", *rows)))) == 2


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no question"):
        list(read_questions(write(tmp_path / "set.jsonl")))


def test_a_plain_file_gets_ids_that_do_not_depend_on_other_rows(tmp_path: Path) -> None:
    plain = [{"question": f"q{at}", "golden_answers": [str(at)]} for at in range(5)]
    first = {q.question: q.id for q in read_questions(write(tmp_path / "a.jsonl", *plain))}
    later = {q.question: q.id for q in read_questions(write(tmp_path / "b.jsonl", *plain[::-2]))}
    assert later == {question: first[question] for question in ("q4", "q2", "q0")}
    assert len(set(first.values())) == 5


def test_the_same_question_with_other_answers_gets_another_id() -> None:
    ids = {question_from_dict({"question": "q", "golden_answers": [g]}).id for g in ("a", "b")}
    assert len(ids) == 2


@pytest.mark.parametrize(
    "facts",
    [
        {"title": ["Louvre", "Paris", "Louvre"], "sent_id": [0, 1, 2]},
        [["Louvre", 0], ["Paris", 1], ["Louvre", 2]],
    ],
)
def test_supporting_facts_name_the_supporting_titles(facts: Any) -> None:
    question = question_from_dict({**ROW, "metadata": {"supporting_facts": facts}})
    assert question.supporting_titles == ("Louvre", "Paris")


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "user", "content": "Answer. Question: Where is the Louvre?\n"}],
        [{"role": "system", "content": "Question: x"},
         {"role": "user", "content": "Where is the Louvre?"}],
        "Question: no. Question: Where is the Louvre? ",
    ],
)  # fmt: skip
def test_verls_rows_are_read_with_the_question_from_the_prompt(prompt: Any) -> None:
    row = {
        "data_source": "searchR1_nq",
        "prompt": prompt,
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}},
        "extra_info": {"split": "train", "index": 3},
    }
    assert question_from_dict(row) == Question(
        id="nq-train-3",
        question="Where is the Louvre?",
        golden_answers=("Paris",),
        dataset="nq",
        metadata={"extra_info": {"split": "train", "index": 3}},
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["ground_truth", "target", "role", "content", "title", "index", "id"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["id", "question", "golden_answers", "metadata", "prompt", "reward_model", "extra_info",
     "data_source", "dataset", "hops", "supporting_titles", "answer_in_corpus", "supporting_facts",
     "title", "text", "contents"]
)  # fmt: skip


@given(st.dictionaries(FIELDS, JSON, max_size=6), st.booleans())
def test_no_row_of_any_shape_raises_anything_but_a_data_error(
    row: dict[str, Any], with_basics: bool
) -> None:
    row = {**ROW, **row} if with_basics else row
    for read in (question_from_dict, document_from_dict):
        with contextlib.suppress(DataError):
            read(row)


@pytest.mark.parametrize("field", ["id", "question", "golden_answers", "supporting_titles"])
def test_half_a_surrogate_pair_is_named(field: str) -> None:
    broken: Any = "x\ud800"
    row = {**ROW, field: [broken] if field.endswith("s") else broken}
    with pytest.raises(DataError, match=f"field {field}: half a surrogate pair at character 1"):
        question_from_dict(row)
    with pytest.raises(DataError, match="field text: half a surrogate pair"):
        document_from_dict({"id": "1", "text": broken})


def test_metadata_that_text_cannot_carry_is_escaped(tmp_path: Path) -> None:
    question = question_from_dict({**ROW, "metadata": {"raw": "\ud800"}}, dataset="nq")
    write_questions(tmp_path / "out.jsonl", [question])
    assert list(read_questions(tmp_path / "out.jsonl")) == [question]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
QUESTIONS = st.builds(
    Question,
    id=TEXT,
    question=TEXT.filter(str.strip),
    golden_answers=st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    dataset=st.sampled_from(["nq", "mine"]),
    hops=st.none() | st.integers(0, 4),
    supporting_titles=st.none() | st.lists(TEXT, max_size=3, unique=True).map(tuple),
    answer_in_corpus=st.none() | st.booleans(),
    metadata=st.dictionaries(st.sampled_from(["level", "source"]), TEXT, max_size=2),
)


@given(QUESTIONS)
def test_a_question_survives_writing_and_reading(question: Question) -> None:
    line = json.dumps(question_to_dict(question))
    assert question_from_dict(json.loads(line)) == question


def test_a_written_file_reads_back_equal(tmp_path: Path) -> None:
    questions = [question_from_dict({**ROW, "id": str(at)}, dataset="nq") for at in range(3)]
    path = tmp_path / "out.jsonl.gz"
    assert write_questions(path, questions) == 3
    assert list(read_questions(path)) == questions


# --- splits --------------------------------------------------------------------------------------


def numbered(n: int) -> list[Question]:
    return [Question(f"id{at}", "q", ("a",)) for at in range(n)]


def test_a_split_divides_everything_in_about_the_shares_asked_for() -> None:
    parts = split(numbered(4000), {"train": 0.9, "dev": 0.1})
    assert list(parts) == ["train", "dev"]
    assert len(parts["train"]) + len(parts["dev"]) == 4000
    # Four standard deviations of a binomial with n = 4000, p = 0.1.
    assert abs(len(parts["dev"]) - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5


@given(st.sets(st.integers(0, 500)), st.integers(0, 3), st.floats(0.05, 0.95))
def test_further_rows_never_move_a_question(rows: set[int], seed: int, share: float) -> None:
    shares = {"train": share, "dev": 1 - share}
    everything = split(numbered(501), shares, seed=seed)
    some = split([q for at, q in enumerate(numbered(501)) if at in rows], shares, seed=seed)
    for name, part in some.items():
        assert part == [q for q in everything[name] if int(q.id[2:]) in rows]


def test_a_split_is_the_same_on_every_machine() -> None:
    # The ids at which the digest printed by `printf 0:idN | sha256sum` starts with 8 to f.
    parts = split(numbered(12), {"train": 0.5, "dev": 0.5})
    assert [q.id for q in parts["dev"]] == ["id3", "id4", "id5", "id8", "id10"]


def test_another_seed_divides_otherwise() -> None:
    shares = {"train": 0.5, "dev": 0.5}
    assert split(numbered(50), shares, seed=1) != split(numbered(50), shares)


@pytest.mark.parametrize("shares", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": float("nan")}])
def test_shares_must_be_positive_and_add_up_to_one(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="add up to 1"):
        split(numbered(3), shares)


def test_shares_that_add_up_with_rounding_lose_nobody() -> None:
    parts = split(numbered(2000), dict.fromkeys("abcdefghij", 0.1))
    assert sum(map(len, parts.values())) == 2000


# --- corpora -------------------------------------------------------------------------------------


def test_both_layouts_of_a_corpus_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "corpus.jsonl.gz",
        {"id": "a", "title": "Paris", "text": "The capital."},
        {"id": 1, "contents": '"Rome"\nAlso a capital.\nOf Italy.'},
        {"id": "b", "contents": '""Weird Al" Yankovic"\nA musician.'},
        {"id": "c", "contents": "Oslo\nNorway."},
        {"id": "d", "contents": "No title here."},
        {"id": "e", "text": "Neither here.", "contents": '"x"\ny'},
    )
    assert list(read_corpus(path)) == [
        Document("a", "Paris", "The capital."),
        Document("1", "Rome", "Also a capital.\nOf Italy."),
        Document("b", '"Weird Al" Yankovic', "A musician."),
        Document("c", "Oslo", "Norway."),
        Document("d", "", "No title here."),
        Document("e", "", "Neither here."),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "x", "text": "y"}, "field id"),
        ({"id": "", "text": "y"}, "field id"),
        ({"id": True, "text": "y"}, "field id"),
        ({"id": "2"}, "neither field text nor field contents"),
        ({"id": "2", "title": 3, "text": "y"}, "field title: expected text"),
        ({"id": "2", "text": None}, "field text: expected text"),
        ({"id": "2", "contents": ["y"]}, "field contents: expected text"),
        ({"id": "1", "text": "other"}, "field id: '1' occurs a second time"),
    ],
)
def test_a_broken_passage_is_named_with_file_line_and_field(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "corpus.jsonl", {"id": "1", "text": "x"}, row)
    with pytest.raises(DataError) as caught:
        list(read_corpus(path))
    assert str(caught.value).startswith(f"{path}, line 2")
    assert message in str(caught.value)


def test_a_corpus_without_a_passage_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no passage"):
        list(read_corpus(write(tmp_path / "corpus.jsonl")))


def test_a_union_keeps_the_first_of_equal_passages() -> None:
    first = [Document("a", "Café", "Open  late."), Document("b", "Café", "Closed.")]
    second = [Document("c", "CAFE\u0301", "open late.\n"), Document("d", "Bar", "Open late.")]
    assert [document.id for document in union([first, second])] == ["a", "b", "d"]


def test_a_union_does_not_confuse_title_and_text() -> None:
    assert len(list(union([[Document("a", "x y", "z")], [Document("b", "x", "y z")]]))) == 2


def test_a_union_refuses_an_id_with_two_contents() -> None:
    with pytest.raises(DataError, match=r"'a' names two different passages"):
        list(union([[Document("a", "x", "y")], [Document("a", "x", "z")]]))


# --- names ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("EVENHAND_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "data"
    write(here / "questions/nq_test.jsonl", {**ROW, "id": "n"})
    write(here / "hotpotqa/train.jsonl.gz", {**ROW, "id": "h"})
    write(here / "corpora/nq_corpus.jsonl.gz", {"id": "n-0", "title": "Paris", "text": "x"})
    write(here / "corpora/extra_corpus.jsonl", {"id": "e-0", "title": "paris", "text": "X"},
          {"id": "e-1", "text": "y"})  # fmt: skip
    return here


def test_the_seven_sets_are_known() -> None:
    assert list(SETS) == [
        "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle",
    ]  # fmt: skip
    assert {name for name, each in SETS.items() if each.multi_hop} == set(list(SETS)[3:])


def test_a_set_is_found_in_both_layouts_of_a_folder(folder: Path) -> None:
    (one,) = datasets.load_questions("nq", data=folder)
    (two,) = datasets.load_questions("hotpotqa:train", data=folder)
    assert (one.id, one.dataset, two.id, two.dataset) == ("n", "nq", "h", "hotpotqa")


def test_the_folder_may_come_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENHAND_DATA", str(folder))
    assert datasets.load_questions("nq")[0].id == "n"
    monkeypatch.setenv("EVENHAND_DATA", str(folder / "nowhere"))
    with pytest.raises(DataError, match=r"nowhere \(from EVENHAND_DATA\) is not a directory"):
        datasets.load_questions("nq")


def test_the_shared_folder_beside_the_checkout_is_the_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "shared").mkdir()
    folder.rename(folder.parent / "shared/data")
    (folder.parent / "checkout").mkdir()
    monkeypatch.chdir(folder.parent / "checkout")
    assert datasets.load_questions("nq")[0].id == "n"
    assert len(list(datasets.load_corpus("union"))) == 2


def test_a_given_folder_without_the_set_is_an_error_that_names_both(folder: Path) -> None:
    with pytest.raises(DataError, match=r"popqa:test is not in .*data; expected questions/popqa"):
        datasets.load_questions("popqa", data=folder)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("hotpotq", "did you mean 'hotpotqa'"), ("nq:tset", "did you mean 'test'")],
)
def test_a_wrong_name_is_answered_with_the_nearest(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        datasets.load_questions(spec, data=folder)


def test_a_path_is_read_as_a_file(folder: Path) -> None:
    path = folder / "questions/nq_test.jsonl"
    assert datasets.load_questions(str(path))[0].dataset == "nq_test"
    with pytest.raises(DataError, match="does not exist"):
        datasets.load_questions("nowhere.jsonl")


def test_corpora_are_found_by_set_union_and_path(folder: Path) -> None:
    path = str(folder / "corpora/extra_corpus.jsonl")
    for specs, ids in [
        (["nq"], ["n-0"]),
        (["union"], ["e-0", "e-1"]),
        ([path], ["e-0", "e-1"]),
        (["nq", path], ["n-0", "e-1"]),
    ]:
        assert [d.id for d in datasets.load_corpus(*specs, data=folder)] == ids
    with pytest.raises(DataError, match=r"no corpus 'popqa' in .*; expected corpora/popqa_corpus"):
        list(datasets.load_corpus("popqa", data=folder))
    with pytest.raises(DataError, match="no data folder to find the corpus 'nq' in"):
        list(datasets.load_corpus("nq"))


def test_every_split_of_the_table_can_be_named() -> None:
    for name, each in SETS.items():
        assert catalogue.find_set(name) == (each, each.splits[0])
        for part in each.splits:
            assert catalogue.find_set(f"{name}:{part}") == (each, part)
