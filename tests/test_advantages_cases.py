"""Published and worked-out values: tests/data/cases (see the README there)."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import evenhand.credit
from evenhand.core.errors import SingleMemberGroupsWarning
from evenhand.credit import CreditInputs, get_estimator, grpo, rloo, stratified

CASES = Path(__file__).parent / "data" / "cases"
ADVANTAGES = json.loads((CASES / "advantages.json").read_text())
REPORTS = {row["reported"]: row for row in json.loads((CASES / "reports.json").read_text())}


@pytest.mark.parametrize("case", ADVANTAGES, ids=lambda case: case["name"])
def test_a_case_gives_its_expected_values(case: dict) -> None:
    function = getattr(evenhand.credit, case["estimator"])
    by_kind = inspect.signature(function).parameters
    arguments = dict(case["arguments"])
    keywords = {
        name: arguments.pop(name)
        for name in list(arguments)
        if by_kind[name].kind is inspect.Parameter.KEYWORD_ONLY
    }
    result = function(*arguments.values(), **keywords)
    if case["estimator"] == "cross_stratum":
        for name, expected in case["expected"].items():
            np.testing.assert_allclose(getattr(result, name), expected, atol=1e-5)
    else:
        np.testing.assert_allclose(result, case["expected"], atol=1e-5)


def test_groups_of_one_give_zeros_and_one_warning_that_names_the_cause() -> None:
    given = REPORTS["PeterGriffinJin/Search-R1 #88"]["input"]
    with pytest.warns(SingleMemberGroupsWarning, match="every group has a single member") as caught:
        result = grpo(given["rewards"], given["group"])
    assert result.tolist() == [0, 0, 0, 0]
    assert len(caught) == 1


@pytest.mark.parametrize("name", ["grpo", "stratified", "calibadv", "stratified_calibadv"])
def test_the_warning_comes_once_also_from_a_chain_of_steps(name: str) -> None:
    two = np.arange(2)
    inputs = CreditInputs([1, 0], ["a", "b"], two, two >= 0, [3, 3], [1, 2], [0, 0])
    with pytest.warns(SingleMemberGroupsWarning) as caught:
        get_estimator(name)(inputs)
    assert len(caught) == 1


def test_nearly_equal_rewards_keep_their_scale() -> None:
    given = REPORTS["verl-project/verl #6348"]["input"]
    np.testing.assert_allclose(grpo(**given), [-0.6195, 0.6195], atol=1e-4)


@pytest.mark.parametrize("value", [0.35, 0.1, 1 / 3, 1e-30, 123456.7])
@pytest.mark.parametrize("n", [2, 3, 7, 8, 64, 1000])
@pytest.mark.parametrize("estimator", [rloo, grpo])
def test_equal_float32_rewards_give_exactly_zero(estimator, n: int, value: float) -> None:
    rewards = np.full(n, value, dtype=np.float32)
    assert estimator(rewards, np.zeros(n, dtype=int)).tolist() == [0.0] * n


def test_uneven_groups_stay_groups() -> None:
    given = REPORTS["THUDM/slime #1414"]["input"]
    np.testing.assert_allclose(grpo(**given), [-0.7071, 0.7071, 0], atol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_baseline"])
def test_a_trajectory_of_many_rows_counts_once(name: str) -> None:
    def advantages(rows_of_b: int) -> list[float]:
        owner = np.array([0] + [1] * rows_of_b + [2])
        last = np.append(owner[1:] != owner[:-1], True)
        inputs = CreditInputs([1.0, 0.0, 0.0], [7, 7, 7], owner, last)
        result = get_estimator(name)(inputs)
        return [result[0], result[1], result[-1]]

    assert advantages(4) == advantages(1)


def test_a_lone_stratum_gives_zero_instead_of_nan() -> None:
    given = REPORTS["a public stratified estimator"]["input"]
    np.testing.assert_allclose(stratified(**given), [0.7071, -0.7071, 0, 0], atol=1e-4)
