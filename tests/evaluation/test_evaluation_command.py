"""`evenhand eval` from the command line: sets, sampling, settings, faults; without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playing import MAKERS, PASSAGES, THINGS

from completions_server import CompletionsServer, serving
from evenhand.cli import main
from evenhand.cli.eval_parts import sampled
from evenhand.datasets import Question
from evenhand.evaluation.folder import read_evaluation

SETS = ("nq", "musique")


def agent(body: dict[str, Any]) -> dict[str, Any]:
    """Search for the thing, then say who made it; no one made the mill."""
    asked = body["prompt"].rsplit("Question: who made the ", 1)[1]
    thing = asked.partition("?")[0]
    if "<information>Doc 1" in body["prompt"] or "search" not in body["prompt"]:
        name = MAKERS[THINGS.index(thing)] if thing != "mill" else "nobody"
        return {"text": f"<think>so</think><answer>{name}"}
    return {"text": f"<think>look</think><search>{thing}"}


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    with serving(agent) as running:
        yield running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "questions").mkdir(parents=True)
    (folder / "corpora").mkdir()
    for name, split in (("nq", "test"), ("musique", "dev")):
        rows = [
            {
                "id": f"{name}-{at}",
                "question": f"who made the {thing}?",
                "golden_answers": [MAKERS[at]],
                "metadata": {"hops": 2 + at % 2, "supporting_titles": [thing]}
                if name == "musique"
                else {},
            }
            for at, thing in enumerate(THINGS)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "questions" / f"{name}_{split}.jsonl").write_text(text)
    with (folder / "corpora" / "nq_corpus.jsonl").open("w") as file:
        for each in PASSAGES:
            file.write(json.dumps({"id": each.id, "title": each.title, "text": each.text}) + "\n")
    return folder


def evaluate(data: Path, server: CompletionsServer, *more: str, sets: str = "nq,musique") -> int:
    return main(
        ["eval", "--model", f"openai:{server.url}", "--sets", sets, "--data", str(data),
         "--set", "retrieval.settings.backend=numpy", *more]
    )  # fmt: skip


def results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "results.json").read_text())
    return found


def test_two_sets_are_measured_with_the_union_of_the_corpora(
    data: Path, server: CompletionsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert evaluate(data, server, "-o", str(out)) == 0
    found = results(out)
    assert found["sets"]["nq"]["exact_match"]["value"] == 7 / 8
    assert found["sets"]["musique"]["hops"]["3"]["exact_match"]["value"] == 3 / 4
    assert found["sets"]["musique"]["recall_titles_1"]["value"] == 1
    assert found["averages"]["all"]["searches"]["value"] == 1
    assert found["tokens_unit"] == "pieces"
    manifest = json.loads((out / "evaluation.json").read_text())
    assert manifest["retriever"]["nq"]["passages"] == 8
    assert manifest["sets"]["musique"]["n"] == 8
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert any(line.startswith("mean, 2 of 7") for line in lines)


def test_the_same_command_again_asks_nothing_new(
    data: Path, server: CompletionsServer, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    assert evaluate(data, server, "-o", out) == 0
    before = len(server.requests)
    assert evaluate(data, server, "-o", out) == 0
    assert len(server.requests) == before


def test_other_settings_in_the_same_folder_are_one_line(
    data: Path, server: CompletionsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert evaluate(data, server, "-o", out) == 0
    assert evaluate(data, server, "-o", out, "--max-searches", "1") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "environment.limits.max_searches = null, and 1 was asked for" in error


def test_the_search_budget_is_a_setting(
    data: Path, server: CompletionsServer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert evaluate(data, server, "-o", str(out), "--max-searches", "0", sets="nq") == 0
    assert results(out)["sets"]["nq"]["searches"]["value"] == 0


@pytest.mark.parametrize("baseline", ["direct", "retrieve_once", "gold_passages"])
def test_baselines_come_from_the_same_command(
    baseline: str, data: Path, server: CompletionsServer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert evaluate(data, server, "-o", str(out), "--baseline", baseline) == 0
    found = results(out)
    assert found["baseline"] == baseline
    assert found["sets"]["musique"]["exact_match"]["value"] == 7 / 8
    # NQ names no supporting titles here.
    left = {"nq": {"without a gold passage": 8}, "musique": {}}
    assert found["left_out"] == (left if baseline == "gold_passages" else {"nq": {}, "musique": {}})
    assert ("recall_titles_1" in found["sets"]["nq"]) is False


def test_the_solver_needs_no_model_and_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from evenhand.cli import main\n"
        "sys.exit(main(['eval', '--baseline', 'solver', '--limit', '30', '-o', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert results(tmp_path)["sets"]["world"]["exact_match"]["value"] == 1
    assert results(tmp_path)["sets"]["world"]["exact_match"]["n"] == 30


def test_an_evaluation_and_itself_show_no_difference(
    data: Path, server: CompletionsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert evaluate(data, server, "-o", out) == 0
    capsys.readouterr()
    assert main(["compare", out, out, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert not any(row["differs"] for row in rows)
    assert {row["dataset"] for row in rows} == {"nq", "musique", None}


def test_a_file_of_questions_is_a_set(
    data: Path, server: CompletionsServer, tmp_path: Path
) -> None:
    file = data / "questions" / "nq_test.jsonl"
    out = tmp_path / "out"
    corpus = str(data / "corpora" / "nq_corpus.jsonl")
    assert evaluate(data, server, "--corpus", corpus, "-o", str(out), sets=str(file)) == 0
    assert list(results(out)["sets"]) == ["nq_test"]
    assert len(list(read_evaluation(out))) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "{url}", "--sets", "ng"], "unknown question set 'ng'"),
        (["--model", "{url}", "--sets", "nq,nq:test"], "--sets takes different sets"),
        (["--model", "{url}", "--sets", "popqa", "--data", "{data}"], "popqa:test is not in"),
        (["--model", "{url}", "--sets", "nq", "--data", "{data}/none"], "is not a directory"),
        (["--sets", "nq"], "give --model"),
        (["--baseline", "solver", "--model", "toy"], "leave --model out"),
        (["--baseline", "solver", "--sets", "nq", "--data", "{data}"], "the toy world only"),
        (["--model", "{url}", "--sets", "nq", "--data", "{data}", "--set", "rollout.x=1"],
         "unknown key 'rollout.x'"),
        (["--model", "{url}", "--sets", "nq", "--data", "{data}", "--retriever", "nowhere"],
         "no retriever 'nowhere'"),
        (["--model", "openai:nowhere", "--sets", "nq", "--data", "{data}"], "a model's address"),
        (["--model", "openai:http://127.0.0.1:9/v1#m", "--sets", "nq", "--data", "{data}",
          "--set", "retrieval.settings.backend=numpy"], "all 8 questions of a batch of nq failed"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line(
    arguments: list[str],
    message: str,
    data: Path,
    server: CompletionsServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evenhand.retrieval.http.JsonClient._pause", lambda *_: 0.0)
    filled = [a.format(url=f"openai:{server.url}", data=data) for a in arguments]
    assert main(["eval", *filled, "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert error[-1].startswith("evenhand: error: ")


def test_a_folder_that_is_no_model_is_said_before_any_question_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--model", str(tmp_path), "--sets", "nq", "--data", "nowhere"]) == 2
    assert "is neither a model nor a run" in capsys.readouterr().err


def test_a_wrong_option_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", "toy", "--baseline", "solvr"]) == 2
    error = capsys.readouterr().err
    assert "Value error" not in error
    assert error.endswith("'solver'. See: evenhand eval --help\n")


def test_a_wrong_number_ends_in_a_full_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", "toy", "--limit", "0"]) == 2
    assert capsys.readouterr().err.endswith("equal to 1. See: evenhand eval --help\n")


def test_a_limit_takes_the_same_questions_whatever_else_is_in_the_file() -> None:
    asked = [Question(f"q{at}", "?", ("a",)) for at in range(100)]
    five, twenty = sampled(asked, 5), sampled(asked, 20)
    assert len(five) == 5
    assert [question for question in twenty if question in five] == five
    assert sampled(asked[::-1], 5) == five[::-1]
    assert sampled(asked, 1000) == sampled(asked, None) == asked
    # Not the first ones: files are often sorted.
    assert five != asked[:5]
