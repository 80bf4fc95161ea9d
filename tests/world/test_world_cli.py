from __future__ import annotations

import json

import pytest

from evenhand.cli.world import app
from evenhand.core.errors import ConfigError
from evenhand.datasets import read_corpus, read_questions
from evenhand.world import generate_world

pytest.importorskip("bm25s")
pytest.importorskip("tokenizers")


def world(*arguments: str) -> None:
    app(args=list(arguments), standalone_mode=False)


def test_generate_writes_a_corpus_and_a_question_set_that_read_back(tmp_path):
    world("generate", "-o", str(tmp_path / "new"), "--size", "40", "--questions", "20",
          "--seed", "3", "--split", "eval")  # fmt: skip
    made = generate_world(3, size=40, split="eval")
    assert tuple(read_corpus(tmp_path / "new/corpus.jsonl")) == made.documents
    assert list(read_questions(tmp_path / "new/questions.jsonl")) == made.questions(20)


def test_check_reports_the_solver_by_kind_of_question(capsys):
    world("check", "--size", "60", "--questions", "60", "--json")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["exact_match"] for row in rows] == [1.0] * len(rows)
    assert rows[0]["kind"] == "all"
    assert rows[0]["n"] == sum(row["n"] for row in rows[1:]) == 60


def test_check_prints_a_table_with_n_and_intervals(capsys):
    world("check", "--size", "60", "--questions", "30")
    out = capsys.readouterr().out
    assert "scripted solver" in out
    assert "100.0%" in out
    assert "88.6% to 100.0%" in out


def test_show_prints_whole_episodes(capsys):
    world("show", "--size", "60", "--questions", "2", "--skill", "hasty")
    out = capsys.readouterr().out
    assert out.count("Question: ") == out.count("right: ") == 2
    assert "<answer>" in out


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        world("generate", "-o", str(tmp_path / "file"), "--size", "40")


def test_too_many_questions_for_a_small_world_are_refused():
    with pytest.raises(ConfigError, match="different questions of these kinds"):
        world("check", "--size", "24", "--questions", "5000")
