"""The recipes that come with the project: they read, they agree, and what can run here runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenhand.training.recipes import differences, load_recipe
from evenhand.world import DOCUMENTS_SHOWN, LIMITS

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.toml"))
TOY = ("toy-grpo", "toy-stratified", "toy-calibadv", "toy-stratified-calibadv")


def test_all_recipes_are_there() -> None:
    assert {"quickstart", "hotpotqa-smollm2", "paper-stratified-qwen2.5-3b",
            "paper-calibadv-qwen2.5-3b", *TOY} == set(RECIPES)  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reads_and_is_named_after_its_file(name: str) -> None:
    assert load_recipe(FOLDER / f"{name}.toml").name == name


@pytest.mark.parametrize("name", TOY[1:])
def test_toy_recipes_differ_in_name_and_estimator_only(name: str) -> None:
    first, other = (load_recipe(FOLDER / f"{each}.toml") for each in (TOY[0], name))
    assert differences(first, other) == ["credit.estimator", "name"]


@pytest.mark.parametrize("name", ["quickstart", *TOY])
def test_toy_recipes_have_the_rules_of_the_world(name: str) -> None:
    recipe = load_recipe(FOLDER / f"{name}.toml")
    assert recipe.environment.rules() == LIMITS
    assert recipe.retrieval.documents == DOCUMENTS_SHOWN


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("paper")])
def test_every_setting_of_a_paper_recipe_is_marked(name: str) -> None:
    marks = ("paper", "release", "ours")
    above = False
    for line in (FOLDER / f"{name}.toml").read_text().splitlines():
        is_comment = line.startswith("#")
        if "=" in line and not is_comment and not line.startswith("name"):
            comment = line.rpartition("#")[2].strip() if "#" in line else ""
            assert comment.startswith(marks) or above, line
        above = is_comment and (above or any(f"{mark}:" in line for mark in marks))


@pytest.mark.train
@pytest.mark.parametrize("name", ["quickstart", "toy-grpo"])
def test_a_toy_recipe_trains(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from evenhand.training.setup import new_trainer
    from evenhand.world import build_fast_tokenizer, new_policy

    # A policy without a past: what is tested is that recipe, world and trainer fit.
    model = new_policy(hidden=96, layers=2)
    model.save_pretrained(tmp_path / "model")
    build_fast_tokenizer().save_pretrained(tmp_path / "model")
    small = [f"model.path={tmp_path / 'model'}", "steps=1", "rollout.questions=2",
             "rollout.group_size=2", "evaluation.questions=4", "tracking.tensorboard=off",
             "environment.limits.max_searches=1"]  # fmt: skip
    recipe = load_recipe(FOLDER / f"{name}.toml", small)
    trainer = new_trainer(recipe, tmp_path / "run")
    trainer.run()
    trainer.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["eval/n"] == 4
