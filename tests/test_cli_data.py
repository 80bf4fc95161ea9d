"""`evenhand data` as a user runs it: output, files, exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenhand import cli
from evenhand.cli import data as data_commands
from evenhand.datasets import read_questions

if not any(group.name == "data" for group in cli.app.registered_groups):
    cli.app.add_typer(data_commands.app, name="data")

PARIS = {"id": "n-0", "title": "Paris", "text": "The Louvre is in Paris."}
LOUVRE = {
    "id": "t0",
    "question": "Where is the Louvre?",
    "golden_answers": ["Paris"],
    "metadata": {"answer_in_corpus": True, "supporting_titles": ["Paris"], "hops": 1, "level": "x"},
}
SEINE = {"id": "t1", "question": "Which river?", "golden_answers": ["Seine", "La Seine"],
         "metadata": {"answer_in_corpus": True}}  # fmt: skip


def write(path: Path, *rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "[data]"  # square brackets are Rich's markup
    write(here / "questions/nq_test.jsonl", LOUVRE, SEINE)
    write(here / "questions/bamboogle_test.jsonl", {**LOUVRE, "golden_answers": "Paris"})
    write(here / "corpora/nq_corpus.jsonl", PARIS)
    write(here / "corpora/extra_corpus.jsonl", {**PARIS, "id": "e-0"},
          {"id": "e-1", "title": "Seine", "text": ""})  # fmt: skip
    monkeypatch.setenv("EVENHAND_DATA", str(here))
    monkeypatch.chdir(tmp_path)
    return here


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["data", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_list_says_what_is_there_and_where(run: Any, folder: Path) -> None:
    code, out, _ = run("list")
    lines = [cells(line) for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["set", "split", "where", "questions", "golds each", "own corpus"]
    path = folder / "questions/nq_test.jsonl"
    assert ["nq", "test", str(path), "2", "1.5", "1"] in lines
    assert ["nq", "train", "not found", "-", "-", "-"] in lines
    assert f"further corpus: {folder / 'corpora/extra_corpus.jsonl'} (2 passages)" in out


def test_list_never_points_to_the_hub_if_a_folder_was_given(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also if it is the one that is looked at when none is given.
    monkeypatch.delenv("EVENHAND_DATA")
    here = tmp_path / "deep" / "er"
    here.mkdir(parents=True)
    (tmp_path / "deep" / "shared").mkdir()
    folder.rename(tmp_path / "deep" / "shared" / "data")
    monkeypatch.chdir(here)
    for arguments, expected in (((), "hub"), (("--data", "../shared/data"), "not found")):
        lines = [cells(line) for line in run("list", *arguments)[1].splitlines()]
        assert ["nq", "train", expected, "-", "-", "-"] in lines


def test_list_says_on_a_terminal_that_it_works(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from evenhand.cli import run; run()", "data", "list"]
    environment = {**os.environ, "TERM": "xterm", "EVENHAND_DATA": str(folder)}
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=theirs, check=True, timeout=60
    )
    os.close(theirs)
    assert b"counting questions and passages" in os.read(ours, 10_000)
    os.close(ours)


def test_list_without_a_folder_points_to_the_hub(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVENHAND_DATA")
    code, out, _ = run("list")
    lines = [cells(line) for line in out.splitlines()]
    assert code == 0
    assert ["nq", "test", "hub", "-", "-", "-"] in lines
    assert ["2wikimultihopqa", "dev_inferred", "not found", "-", "-", "-"] in lines


def test_show_prints_question_and_answers(run: Any) -> None:
    code, out, err = run("show", "nq", "--n", "1")
    assert code == 0
    assert out.splitlines() == [
        "t0: Where is the Louvre?",
        "  golden answers: Paris",
        "  supporting titles: Paris",
        "  set nq, hops 1, answer in corpus yes, has level",
    ]
    assert err == "1 of 2 questions\n"


def test_show_lets_no_control_character_through(run: Any, folder: Path) -> None:
    texts = {"question": "a\x1b[31mb\x9b1mc :cat: [d] e\\", "golden_answers": ["f\x07"]}
    write(folder / "questions/nq_test.jsonl", {**LOUVRE, **texts, "id": "t\x1b0"})
    out = run("show", "nq")[1]
    assert out.startswith("t\ufffd0: a\ufffd[31mb\ufffd1mc :cat: [d] e\\\n")
    assert "golden answers: f\ufffd" in out
    assert json.loads(run("show", "nq", "--json")[1])["id"] == "t\x1b0"


def test_check_lets_no_control_character_through(run: Any, folder: Path) -> None:
    write(folder / "questions/nq_test.jsonl", {**SEINE, "id": "x\x1b[2J"})
    assert "(x\ufffd[2J)" in run("check", "nq")[1]


def test_show_finds_an_id(run: Any) -> None:
    assert "golden answers: Seine | La Seine" in run("show", "nq", "--id", "t1")[1]
    code, _, err = run("show", "nq", "--id", "t9")
    assert code == 2
    assert "no question with id 't9'" in err


def test_show_gives_json_lines_that_read_back(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "shown.jsonl"
    path.write_text(run("show", "nq", "--json")[1], encoding="utf-8")
    questions = list(read_questions(path))
    assert [question.id for question in questions] == ["t0", "t1"]
    assert questions[0].metadata == {"level": "x"}


def test_check_counts_and_notes_and_leaves_zero(run: Any) -> None:
    code, out, err = run("check", "nq")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert cells(lines[1]) == ["nq", "nq (1)", "1:1 ?:1", "2", "3", "1", "1/2 (50.0 %)",
                               "1/2 (50.0 %)", "2"]  # fmt: skip
    assert lines[2:] == [
        "note: nq: answer not in nq: 1 (t1)",
        "note: nq: flag answer_in_corpus is wrong: 1 (t1)",
    ]


def test_check_looks_in_the_corpus_that_is_asked_for(run: Any, folder: Path) -> None:
    extra = str(folder / "corpora/extra_corpus.jsonl")
    for corpora, name in (([extra], extra), (["nq", extra], f"nq + {extra}"), (["union"], "union")):
        options = [part for corpus in corpora for part in ("--corpus", corpus)]
        code, out, _ = run("check", "nq:test", *options)
        assert code == 0
        assert cells(out.splitlines()[1])[1:3] == [f"{name} (2)", "1:1 ?:1"]
        assert cells(out.splitlines()[1])[6:] == ["2/2 (100.0 %)", "-", "0"]


def test_check_does_without_a_corpus(run: Any, folder: Path) -> None:
    for arguments in (
        ["nq", "--corpus", "none"],
        ["bamboogle"],
        [str(folder / "questions/nq_test.jsonl")],
    ):
        code, out, _ = run("check", *arguments)
        assert code == 0
        assert cells(out.splitlines()[1])[-3:] == ["-", "-", "0"]


def test_check_all_goes_through_every_split_and_the_union(run: Any) -> None:
    code, out, _ = run("check", "all")
    assert code == 0
    assert [cells(line)[0] for line in out.splitlines()[1:3]] == ["nq:test", "bamboogle:test"]
    assert "union: 2 passages from 2 corpora (1 duplicates removed)" in out
    assert "note: union: passage without text: 1 (e-1)" in out


def test_check_all_goes_on_after_a_broken_set_and_leaves_two(run: Any, folder: Path) -> None:
    write(folder / "questions/nq_test.jsonl", LOUVRE, {**SEINE, "golden_answers": []})
    code, out, err = run("check", "all")
    assert code == 2
    assert re.fullmatch(
        r"evenhand: error: .*nq_test\.jsonl, line 2, field golden_answers: .*empty.*\n", err
    )
    assert "bamboogle:test" in out


def test_a_note_names_five_ids_and_counts_the_rest(run: Any, folder: Path) -> None:
    rows = [{**SEINE, "id": f"x{at}", "question": f"q{at}"} for at in range(7)]
    write(folder / "questions/nq_test.jsonl", *rows)
    assert "answer not in nq: 7 (x0, x1, x2, x3, x4, and 2 more)" in run("check", "nq")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "hotpot"], "did you mean 'hotpotqa'"),
        (["check", "nq:trian"], "did you mean 'train'"),
        (["check", "popqa"], "popqa:test is not in"),
        (["check", "nq", "--corpus", "popqa"], "no corpus 'popqa'"),
        (["check", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["show", "nq", "--data", "nowhere"], "the data folder nowhere is not a directory"),
        (["export", "nq", "--to", "verl", "-o", "-"], "standard output"),
        (["export", "nq", "--to", "csv", "-o", "x"], "csv"),
        (["export", "nq", "nq", "--to", "jsonl", "-o", "x"], "nq, field id: 't0' occurs a second"),
        (["export", "nq", "--to", "jsonl", "-o", "x", "--template", "plain"], "--template is of"),
        (["export", "nq", "--to", "jsonl", "-o", "x", "--split", "dev"], "--split is of no use"),
        (["export", "nq", "--to", "jsonl", "-o", "x", "--data-source", "m"], "--data-source is of"),
        (["export", "nowhere.jsonl", "--to", "jsonl", "-o", "no/x"], "folder no does not exist"),
    ],
)
def test_a_wrong_call_is_one_line_and_leaves_two(
    run: Any, arguments: list[str], message: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_standard_input_given_twice_is_an_error(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO(json.dumps(LOUVRE).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    code, _, err = run("export", "-", "-", "--to", "jsonl", "-o", "x")
    assert code == 2
    assert "standard input is closed or was read already; give - once" in err


def test_check_all_without_any_set_is_an_error(run: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = run("check", "all", "--data", "empty")
    assert code == 2
    assert "holds none of the standard sets" in err


@pytest.mark.parametrize(("layout", "source"), [("verl", "searchR1_nq"), ("searchr1", "nq")])
def test_export_writes_the_parquet_of_each_framework(
    run: Any, tmp_path: Path, layout: str, source: str
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    code, out, err = run("export", "nq", "bamboogle", "--to", layout, "-o", "out.parquet")
    assert (code, out, err) == (0, "", "3 questions written to out.parquet\n")
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert rows[0]["data_source"] == source
    assert [row["extra_info"]["split"] for row in rows] == ["test"] * 3
    (message,) = rows[0]["prompt"]
    assert message["role"] == "user"
    assert "Where is the Louvre?" in message["content"]
    assert "<search>" in message["content"]


def test_export_takes_template_split_and_source_of_the_user(run: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "mine.txt").write_text("Q: {question}", encoding="utf-8")
    run("export", "nq", "--to", "verl", "-o", "out.parquet", "--template", "mine.txt",
        "--split", "train", "--data-source", "mine")  # fmt: skip
    row = parquet.read_table(tmp_path / "out.parquet").to_pylist()[0]
    assert row["prompt"] == [{"role": "user", "content": "Q: Where is the Louvre?"}]
    assert (row["extra_info"]["split"], row["data_source"]) == ("train", "mine")


def test_export_with_an_unknown_template_writes_nothing(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    code, _, err = run("export", "nq", "--to", "verl", "-o", "out.parquet", "--template", "serchr1")
    assert code == 2
    assert "searchr1" in err
    assert not list(tmp_path.glob("*.parquet*"))


def test_export_to_json_lines_reads_back_equal(run: Any, folder: Path, tmp_path: Path) -> None:
    assert run("export", "nq", "--to", "jsonl", "-o", "out.jsonl.gz")[0] == 0
    source = list(read_questions(folder / "questions/nq_test.jsonl", dataset="nq"))
    assert list(read_questions(tmp_path / "out.jsonl.gz")) == source
    code, out, _ = run("export", "nq", "--to", "jsonl", "-o", "-")
    assert code == 0
    assert len(out.splitlines()) == 2
