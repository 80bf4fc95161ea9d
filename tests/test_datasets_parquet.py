"""Parquet in and out, with the real pyarrow: verl's and Search-R1's columns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from evenhand.core.errors import DataError
from evenhand.datasets import Question, read_questions, verl_rows, write_parquet

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

QUESTIONS = [
    Question("t0", "Where is the Louvre?", ("Paris", "City of Paris"), "nq"),
    Question("t0", "Same river twice?", ("no",), "bamboogle", 2, ("Heraclitus",), None),
    Question("m0", "Mine?", ("yes",), "mine"),
]


def render(question: str) -> str:
    return f"Answer. Question: {question}\n"


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def test_the_columns_are_those_that_verl_and_search_r1_read(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    assert write_parquet(path, verl_rows(QUESTIONS, render, part="dev")) == 3
    rows = parquet.read_table(path).to_pylist()
    assert rows[0] == {
        "data_source": "searchR1_nq",
        "prompt": [{"role": "user", "content": "Answer. Question: Where is the Louvre?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris", "City of Paris"]}},
        "extra_info": {
            "split": "dev", "index": 0, "id": "t0", "dataset": "nq",
            "question": "Where is the Louvre?", "hops": None, "supporting_titles": None,
        },
    }  # fmt: skip
    assert [row["data_source"] for row in rows] == ["searchR1_nq", "searchR1_bamboogle", "mine"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]


def test_the_data_source_follows_the_framework_or_the_user() -> None:
    bare = [row["data_source"] for row in verl_rows(QUESTIONS, render, prefix="")]
    assert bare == ["nq", "bamboogle", "mine"]
    own = [row["data_source"] for row in verl_rows(QUESTIONS, render, data_source="x")]
    assert own == ["x"] * 3


def test_messages_of_a_template_are_kept() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (row, *_) = verl_rows(QUESTIONS, lambda _: chat)
    assert row["prompt"] == chat


def test_an_exported_file_reads_back_with_ids_answers_and_titles(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_parquet(path, verl_rows(QUESTIONS, render))
    for before, after in zip(QUESTIONS, read_questions(path), strict=True):
        for name in ("id", "question", "golden_answers", "dataset", "hops", "supporting_titles"):
            assert getattr(after, name) == getattr(before, name)


def test_ids_of_different_sets_stay_apart_under_one_data_source(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_parquet(path, verl_rows(QUESTIONS, render, data_source="mine"))
    read = list(read_questions(path))
    assert [(question.dataset, question.id) for question in read] == [
        ("nq", "t0"), ("bamboogle", "t0"), ("mine", "m0"),
    ]  # fmt: skip
    assert [question.metadata["extra_info"] for question in read] == [
        {"split": "train", "index": at} for at in range(3)
    ]


def test_columns_keep_their_type_where_the_first_rows_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_parquet(path, verl_rows(QUESTIONS[:1], render))
    extra = parquet.read_schema(path).field("extra_info").type
    assert extra.field("hops").type == arrow.int64()
    assert extra.field("supporting_titles").type == arrow.list_(arrow.string())


def test_many_rows_are_written_in_order(tmp_path: Path) -> None:
    many = [Question(str(at), f"q{at}", (str(at),), "nq") for at in range(2500)]
    path = tmp_path / "train.parquet"
    assert write_parquet(path, verl_rows(many, render)) == 2500
    assert [question.id for question in read_questions(path)] == [q.id for q in many]


@pytest.mark.parametrize("target", ["Paris", ["Paris"]])
def test_golds_in_a_column_of_texts_or_of_lists(tmp_path: Path, target: Any) -> None:
    rows = [{"question": "q", "reward_model": {"ground_truth": {"target": target}}}]
    (question,) = read_questions(table(tmp_path / "x.parquet", rows))
    assert question.golden_answers == ("Paris",)


def test_search_r1s_published_columns_are_read(tmp_path: Path) -> None:
    # The rows of FlashRAG's set, with the columns of Search-R1's preparation added.
    row = {
        "id": "train_0", "question": "where is it", "golden_answers": ["Paris"],
        "data_source": "nq", "prompt": [{"role": "user", "content": "Question: where is it?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}},
        "extra_info": {"split": "train", "index": 0},
        "metadata": {"level": None, "kind": "x"},
    }  # fmt: skip
    (question,) = read_questions(table(tmp_path / "x.parquet", [row]))
    assert question == Question(
        "train_0", "where is it", ("Paris",), "nq",
        metadata={"extra_info": {"split": "train", "index": 0}, "kind": "x"},
    )  # fmt: skip


def test_an_empty_list_of_golds_names_the_row(tmp_path: Path) -> None:
    rows = [
        {"question": "q", "golden_answers": ["x"]},
        {"question": "r", "golden_answers": []},
    ]
    with pytest.raises(DataError, match=r"x\.parquet, row 2, field golden_answers: .* is empty"):
        list(read_questions(table(tmp_path / "x.parquet", rows)))


@pytest.mark.parametrize("keep", [8, 200])
def test_a_cut_file_is_a_data_error(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, verl_rows(QUESTIONS, render))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"x\.parquet: reading failed after row 0"):
        list(read_questions(path))


def test_a_failed_export_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"earlier")

    def fails(question: str) -> str:
        if question.startswith("Mine"):
            raise ValueError(question)
        return question

    with pytest.raises(ValueError, match="Mine"):
        write_parquet(path, verl_rows(QUESTIONS, fails))
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot write"):
        write_parquet(tmp_path / "no/x.parquet", [])
    with pytest.raises(DataError, match="is a directory"):
        write_parquet(tmp_path, [])


def test_a_pipe_is_refused_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(DataError, match="give the name of a regular file"):
        write_parquet(pipe, verl_rows(QUESTIONS, render))
    os.close(reader)
    assert pipe.is_fifo()


def test_an_exported_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    path, other = tmp_path / "x.parquet", tmp_path / "other"
    write_parquet(path, verl_rows(QUESTIONS, render))
    other.write_text("x", encoding="utf-8")
    assert path.stat().st_mode == other.stat().st_mode
