"""The audit of a real training run: `../shared/data/rollouts`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from evenhand.cli import main


@pytest.fixture(scope="module")
def figures(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    files = sorted((shared / "data" / "rollouts").glob("*.jsonl.gz"))
    assert len(files) == 3
    page = tmp_path_factory.mktemp("audit") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("typer.echo", lambda text="", **_: lines.append(str(text)))
        assert main(["audit", *map(str, files), "--json", "--html", str(page)]) == 0
    return {**json.loads("\n".join(lines)), "page": page.read_text()}


def test_groups_steps_and_rewards_are_the_runs_own(figures: dict) -> None:
    assert figures["trajectories"] == 60
    assert figures["groups"] == {
        "effective": 4, "too_easy": 0, "too_hard": 8, "lone": 0, "unscored": 0, "single": 0,
    }  # fmt: skip
    assert figures["group_size"] == [5, 5.0, 5]
    assert figures["steps"] == [1, 2, 3]
    # Counted in the dump: one rollout of reward 1, two of 0.8, three of 0.2, five of 0.1.
    assert figures["reward"]["value"] * 60 == pytest.approx(1 + 2 * 0.8 + 3 * 0.2 + 5 * 0.1)


def test_tokens_are_counted_from_the_mask(figures: dict, shared: Path) -> None:
    policy = everything = 0
    for path in (shared / "data" / "rollouts").glob("*.jsonl.gz"):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            row = json.loads(line)
            policy += sum(row["token_loss_mask"][0])
            everything += row["input_lengths"][0]
    assert figures["policy_tokens"] == policy
    assert figures["policy_tokens"] + figures["environment_tokens"] == everything
    assert figures["units"] == ["tokens"]


def test_invented_information_is_no_search(figures: dict) -> None:
    by_label = {row["label"]: row["share"] for row in figures["strata"]}
    assert by_label[0]["value"] * 60 == pytest.approx(19)


def test_credit_differs_between_estimators(figures: dict) -> None:
    rows = {row["name"]: row for row in figures["estimators"]}
    assert rows["grpo"]["total_ratio"]["value"] == pytest.approx(1.78, abs=0.01)
    assert rows["calibadv"]["total_ratio"]["value"] == pytest.approx(1.20, abs=0.01)
    assert rows["grpo"]["live"]["n"] == figures["policy_tokens"]


def test_what_it_cannot_know_is_said(figures: dict) -> None:
    said = " ".join(figures["unknown"])
    assert "60 of 60 rollouts carry no accepted answers" in said
    assert "Groups without silver documents: 12 of 12" in said
    assert figures["correct"]["n"] == 0
    assert "What these files cannot tell" in figures["page"]
