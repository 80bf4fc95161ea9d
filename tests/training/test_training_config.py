"""Recipes: defaults, unknown keys, values, TOML there and back, warnings. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.core.errors import ConfigError
from evenhand.training.config import Recipe
from evenhand.training.recipes import (
    differences,
    load_recipe,
    recipe_from,
    recipe_to_toml,
    valid_keys,
    write_recipe,
)


def test_the_defaults_are_a_recipe() -> None:
    assert load_recipe() == Recipe()


def test_a_recipe_is_read_without_torch() -> None:
    code = (
        "import sys; import evenhand.training.recipes as r; r.load_recipe(); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rollout.group_sise", "rollout.group_size"),
        ("optimizer.learning_rate_", "optimizer.lr"),
        ("group_size", "rollout.group_size"),
        ("loss.lr", "optimizer.lr"),
        ("rolout.group_size", "rollout.group_size"),
        ("model.lora.rang", "model.lora.rank"),
        ("stepz", "steps"),
        ("los.clip_low", "loss.clip_low"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(key: str, nearest: str) -> None:
    if "learning_rate" in key:
        pattern = r"unknown key 'optimizer\.learning_rate_'; did you mean 'optimizer\."
    else:
        pattern = f"unknown key '{key}'; did you mean '{nearest}'"
        pattern = pattern.replace(".", r"\.")
        if key.startswith("rolout"):
            pattern = r"unknown key 'rolout'"
        if key.startswith("los."):
            pattern = r"unknown key 'los'"
    with pytest.raises(ConfigError, match=pattern):
        load_recipe(settings=[f"{key}=1"])


def test_a_misspelt_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[loss]\nclip_hihg = 0.3\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: unknown key 'loss\.clip_hihg'; did you "
                                          r"mean 'loss\.clip_high'"):  # fmt: skip
        load_recipe(path)


@given(st.sampled_from([key for key in valid_keys() if "." in key]), st.integers(0, 20), st.data())
def test_any_single_slip_in_a_key_is_refused(key: str, at: int, data: st.DataObject) -> None:
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_"))
    place = at % len(key)
    slip = key[:place] + letter + key[place + 1 :]
    if slip in valid_keys() or any(slip.startswith(f"{known}.") for known in valid_keys()):
        return
    with pytest.raises(ConfigError, match="unknown key|is a value, not a section"):
        load_recipe(settings=[f"{slip}=1"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.group_size=0", r"rollout\.group_size: .*got 0"),
        ("optimizer.lr=-1", r"optimizer\.lr: .*got -1"),
        ("loss.aggregation=mean", r"loss\.aggregation: .*token_mean.*got 'mean'"),
        ("optimizer.lr=nan", r"optimizer\.lr"),
        ("steps=many", r"steps: .*got 'many'"),
        ("optimizer.betas=[0.9, 1.0]", "betas must lie in"),
        ("reward.name=exact", "unknown reward 'exact'"),
        ("credit.estimator=stratifed", "did you mean 'stratified'"),
        ("credit.settings.alhpa=1", "unknown setting 'alhpa'; did you mean 'alpha'"),
        ("environment.template=searchr2", "did you mean 'searchr1'"),
        ("environment.preset=search", "unknown limits 'search'"),
        ("environment.limits.max_searches=-1", "limit max_searches"),
        ("loss.minibatches=9", "a mini-batch holds whole groups"),
        ("loss.importance_cap=2", 'needs loss.old = "trainer"'),
        ("data.train=hotpotqa:train", "retrieval.corpus is missing"),
        ("name=a/b", "name"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_loaded(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(settings=[setting])


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_serches"):
        load_recipe(settings=["environment.limits.max_serches=3"])


def test_settings_are_read_as_toml_and_the_last_one_wins() -> None:
    recipe = load_recipe(
        settings=["optimizer.lr=1e-4", "optimizer.lr=2e-4", "optimizer.max_grad_norm=none",
                  'data.train=["a.jsonl", "b.jsonl"]', "retrieval.corpus=c.jsonl",
                  "rollout.filter_groups=true", "credit.settings.alpha=0.25"]
    )  # fmt: skip
    assert recipe.optimizer.lr == 2e-4
    assert recipe.optimizer.max_grad_norm is None
    assert recipe.data.train == ["a.jsonl", "b.jsonl"]
    assert recipe.rollout.filter_groups is True
    assert recipe.credit.rule().settings == {"alpha": 0.25}


def test_a_file_that_is_not_toml_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("steps = \n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML"):
        load_recipe(path)


def test_the_resolved_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = load_recipe(
        settings=["model.lora.rank=8", "credit.settings.stratum=searches_capped:3",
                  "environment.limits.max_searches=2", 'name="with.dot-1"',
                  "data.world.size=100", "optimizer.lr=1e-05", "loss.clip_high=0.28"]
    )  # fmt: skip
    write_recipe(tmp_path / "r.toml", recipe)
    assert load_recipe(tmp_path / "r.toml") == recipe


@given(st.text(max_size=20), st.floats(1e-12, 1e3, allow_nan=False))
def test_any_text_and_number_survives_the_resolved_recipe(text: str, lr: float) -> None:
    import tomllib

    recipe = recipe_from({"data": {"world": {text: text}}, "optimizer": {"lr": lr}})
    assert recipe_from(tomllib.loads(recipe_to_toml(recipe))) == recipe


@pytest.mark.parametrize(
    "key",
    ["data.evaluate", "evaluation.questions", "evaluation.every", "optimizer.max_grad_norm",
     "retrieval.corpus", "environment.limits.max_turns", "loss.importance_cap",
     "credit.settings.max_think_similarity"],
)  # fmt: skip
def test_none_switches_an_optional_setting_off_and_survives_the_file(
    key: str, tmp_path: Path
) -> None:
    recipe = load_recipe(settings=["environment.preset=searchr1", f"{key}=none"])
    value: object = recipe
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert value is None
    write_recipe(tmp_path / "r.toml", recipe)
    assert load_recipe(tmp_path / "r.toml").environment.rules() == recipe.environment.rules()
    assert load_recipe(tmp_path / "r.toml") == recipe


def test_none_stays_a_text_where_it_is_a_name() -> None:
    recipe = load_recipe(settings=["retrieval.settings.stemmer=none"])
    assert recipe.retrieval.settings == {"stemmer": "none"}


def test_none_is_no_value_of_a_setting_that_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_size"):
        load_recipe(settings=["rollout.group_size=none"])


def test_every_setting_stands_in_the_resolved_recipe() -> None:
    text = recipe_to_toml(Recipe())
    for key in valid_keys():
        assert key.rpartition(".")[2] in text


def test_differences_name_the_keys() -> None:
    other = load_recipe(settings=["steps=7", "loss.kl=0.1"])
    assert differences(Recipe(), other) == ["loss.kl", "steps"]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["credit.estimator=calibadv", "loss.aggregation=sequence_mean"], "balances sums"),
        (["rollout.top_p=0.95"], "biased"),
        (["rollout.top_k=5"], "biased"),
        (["rollout.group_size=1"], "every group-relative advantage is 0"),
        (["optimizer.warmup=100"], "never reached"),
    ],
)
def test_a_doubtful_combination_is_warned_about(settings: list[str], part: str) -> None:
    (warning,) = load_recipe(settings=settings).warnings()
    assert part in warning


def test_plain_defaults_warn_of_nothing() -> None:
    assert Recipe().warnings() == []


def test_grpo_with_sequence_mean_is_no_reason_to_warn() -> None:
    settings = ["credit.estimator=grpo", "loss.aggregation=sequence_mean"]
    assert load_recipe(settings=settings).warnings() == []


def test_without_torch_train_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from evenhand.cli import main; "
        f"sys.exit(main(['train', '--set', 'steps=1', '--out', {str(tmp_path / 'run')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install 'evenhand[train]'" in done.stderr
    assert not (tmp_path / "run").exists()
