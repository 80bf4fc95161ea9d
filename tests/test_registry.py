"""Names of estimators: ours, those of installed packages, those of users."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evenhand.core.errors import ConfigError, DataError
from evenhand.credit import CreditInputs, get_estimator

MODULE = """
import numpy as np
from evenhand.credit import Estimator

def shares(inputs, *, scale=1.0):
    return scale * inputs.spread(np.nan_to_num(np.asarray(inputs.rewards, dtype=float)))

def fails(inputs):
    raise KeyError("x")

short = Estimator(lambda inputs: np.zeros(1), "too short", "a test")
nans = Estimator(lambda inputs: inputs.spread(np.full(len(inputs.rewards), np.nan)), "nan", "t")
texts = Estimator(lambda inputs: ["a"] * len(inputs.owner), "texts", "a test")
raises = Estimator(fails, "raises", "a test")
mine = Estimator(shares, "scale * r", "a test")
other = shares
"""
TWO = np.arange(2)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package that registers two estimators, as pip would lay it out."""
    (tmp_path / "their_estimators.py").write_text(MODULE)
    info = tmp_path / "their_estimators-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-estimators\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[evenhand.estimators]\nshares = their_estimators:mine\nbroken = their_estimators:nothing\n"
        "grpo = their_estimators:mine\n"
    )
    return tmp_path


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "evenhand", *arguments], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(package)}, cwd=package,
    )  # fmt: skip


def test_a_package_adds_an_estimator_but_cannot_replace_ours(package: Path) -> None:
    listed = run(package, "estimators")
    assert "scale * r" in listed.stdout
    assert "(r - mean) / (std + eps) in the group" in listed.stdout
    assert listed.returncode == 0


def test_a_package_that_cannot_be_loaded_is_named(package: Path) -> None:
    sample = Path(__file__).parents[1] / "examples" / "rollouts.jsonl.gz"
    done = run(package, "credit", str(sample), "-e", "broken")
    assert done.returncode == 2
    assert "estimator 'broken' of an installed package cannot be loaded" in done.stderr
    audit = run(package, "audit", str(sample))
    assert audit.returncode == 0
    assert "Estimator broken could not be run" in audit.stdout
    assert "shares" in audit.stdout


def test_an_own_estimator_is_named_by_module_and_object(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package)
    inputs = CreditInputs([1.0, 2.0], [0, 0], TWO, TWO >= 0)
    found = get_estimator("their_estimators:mine")
    assert found(inputs, scale=2.0).tolist() == [2.0, 4.0]
    assert found.defaults == {"scale": 1.0}
    with pytest.raises(ConfigError, match="is a function, expected an Estimator"):
        get_estimator("their_estimators:other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "must return one number a segment, shape (2,), got float64 of shape (1,)"),
        ("nans", "returned 2 values that are not finite"),
        ("texts", "must return one number a segment"),
        ("raises", "failed with KeyError"),
    ],
)
def test_a_faulty_estimator_of_ones_own_is_one_line(package: Path, name: str, message: str) -> None:
    sample = Path(__file__).parents[1] / "examples" / "rollouts.jsonl.gz"
    done = run(package, "credit", str(sample), "-e", f"their_estimators:{name}", "-o", "out")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (package / "out").exists()


def test_a_missing_need_is_named_with_what_to_do() -> None:
    inputs = CreditInputs([1.0, 2.0], [0, 0], TWO, TWO >= 0)
    for name, words in (
        ("stratified", "needs a stratum for each trajectory"),
        ("calibadv", "weighs segments by their tokens"),
    ):
        with pytest.raises(ConfigError, match=words):
            get_estimator(name)(inputs)
    with pytest.raises(ConfigError, match="needs the step correctness of each search"):
        get_estimator("calibadv")(CreditInputs([1.0, 2.0], [0, 0], TWO, TWO >= 0, [1, 1]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": [0]}, "group has 1 entries and rewards has 2"),
        ({"owner": [0, 2]}, "owner names trajectory 2, but there are 2 rewards"),
        ({"owner": [0.5, 1]}, "owner must hold indices"),
        ({"is_answer": [True]}, "is_answer has 1 entries and owner has 2"),
        ({"is_answer": [0, 1]}, "is_answer must be true or false"),
        ({"n_tokens": [1, -1]}, r"n_tokens must lie in \[0"),
        ({"step_score": [0, 2]}, r"step_score must lie in \[0, 1\]"),
        ({"stratum": [1]}, "stratum has 1 entries"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(fields: dict, message: str) -> None:
    good = {"rewards": [1.0, 2.0], "group": [0, 0], "owner": TWO, "is_answer": TWO >= 0}
    with pytest.raises(DataError, match=message):
        CreditInputs(**{**good, **fields})


@pytest.mark.parametrize("name", ["grpo", "stratified", "calibadv"])
def test_lists_are_taken_as_arrays(name: str) -> None:
    lists = CreditInputs([1, 0], ["a", "a"], [0, 1], [True, True], [2, 2], ["x", "y"], [0, 0])
    assert get_estimator(name)(lists).shape == (2,)
