"""`evenhand eval` and `compare` with a model of transformers: folders and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import settings

from evenhand.cli import main
from evenhand.evaluation import compare
from evenhand.evaluation.folder import read_evaluation
from evenhand.training.recipes import recipe_from, write_recipe
from evenhand.trajectory import read_trajectories

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.train, pytest.mark.usefixtures("one_thread")]

LIMITS = (
    "environment.limits={ max_turn_tokens = 10, max_observation_tokens = 24, max_context = 120, "
    "max_invalid = 1, max_searches = 2 }"
)


@pytest.fixture(scope="module")
def run(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    recipe = recipe_from(settings(tiny_world, steps=1, optimizer__lr=1e-4, evaluation__questions=8))
    write_recipe(folder / "r.toml", recipe)
    assert main(["train", str(folder / "r.toml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "results.json").read_text())
    return found


def test_a_folder_is_evaluated_on_a_file_of_questions(tiny_world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        "eval", "--model", str(tiny_world / "model"), "--sets", str(tiny_world / "questions.jsonl"),
        "--corpus", str(tiny_world / "passages.jsonl"), "-o", str(out),
        "--set", "environment.template=tiny:template", "--set", LIMITS,
        "--set", "retrieval.settings.backend=numpy", "--set", "retrieval.documents=1",
    ]  # fmt: skip
    assert main(arguments) == 0
    found = results(out)
    assert found["sets"]["questions"]["exact_match"]["n"] == 8
    assert set(found["sets"]["questions"]["hops"]) == {"1", "2"}
    rollouts = list(read_evaluation(out))
    assert rollouts[0].segments[0].token_ids is not None


def test_a_run_is_evaluated_as_it_was_trained_and_compares_with_its_own_evaluations(
    run: Path, tiny_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    sets = str(tiny_world / "questions.jsonl")
    assert main(["eval", "--model", str(run), "--sets", sets, "-o", str(out)]) == 0
    assert results(out)["model"] == f"{run}@1"
    own = read_trajectories(run / "evaluations" / "step-000001.jsonl.gz")
    same = compare(own, read_evaluation(out))
    assert (same.paired, same.only_first, same.only_second) == (8, 0, 0)
    assert same.of().ties == 8
    capsys.readouterr()
    assert main(["compare", f"{run}@0", str(out)]) == 0
    assert "8 questions compared" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_one_line(
    tiny_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "eval", "--model", str(tmp_path / "nowhere"), "-o", str(tmp_path / "out"),
        "--sets", str(tiny_world / "questions.jsonl"),
        "--corpus", str(tiny_world / "passages.jsonl"),
        "--set", "retrieval.settings.backend=numpy",
    ]  # fmt: skip
    assert main(arguments) == 2
    assert "is no folder" in capsys.readouterr().err
