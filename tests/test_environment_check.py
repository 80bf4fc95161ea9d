"""The executable contract: each broken promise is found and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenhand.core.errors import ConfigError, RetrievalError
from evenhand.task import (
    CheckSummary,
    GoldCase,
    Limits,
    check_environment,
    check_record,
    preset,
)
from evenhand.task.prompts import Notices
from evenhand.testing.tokenizers import CharacterTokenizer
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import Document, first_action
from searching import Found, answer, play, search

CASES = [
    GoldCase("Who wrote it?", ("Ann",), ("It", "Ann")),
    GoldCase("Is it <answer>old</answer>?", ("yes", "Yes")),
]


def title_search(query: str) -> Found:
    return Found((Document("1", query, f"About {query}."), Document("2", "Other", "Other.")))


def exact(trajectory: Trajectory) -> float:
    last = first_action(trajectory.segments[-1].text)
    given = None if last is None else last.content
    return float(given in (trajectory.golden_answers or ()))


def check(cases: Sequence[GoldCase] = CASES, **changes: Any) -> CheckSummary:
    options: dict[str, Any] = {
        "search": title_search,
        "reward": exact,
        "tokenizer": CharacterTokenizer(),
        **changes,
    }
    return check_environment(cases, **options)


def test_the_defaults_pass_and_say_what_was_seen() -> None:
    summary = check()
    assert summary[:3] == (2, 2, 4)
    assert summary.longest > 600


@pytest.mark.parametrize("name", ["default", "searchr1", "calibadv"])
@pytest.mark.parametrize("think_in_prompt", [False, True])
@pytest.mark.parametrize("template", ["searchr1", "plain"])
def test_every_preset_and_template_passes(name: str, think_in_prompt: bool, template: str) -> None:
    summary = check(limits=preset(name), think_in_prompt=think_in_prompt, template=template)
    assert summary.searches == 2


def test_queries_beyond_the_limits_are_left_out() -> None:
    assert check(limits=Limits(max_searches=1)).searches == 1
    assert check(limits=Limits(max_turns=2)).searches == 1
    assert check(limits=Limits(max_searches=0)).searches == 0


def test_a_template_that_loses_the_question_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Who wrote it.*does not hold the question"):
        check(template=lambda question: question.upper())
    path = tmp_path / "prompt.txt"
    path.write_text("Q: {question}", encoding="utf-8")
    assert check(template=str(path)).episodes == 2


def test_limits_too_tight_for_the_gold_episode_are_found() -> None:
    with pytest.raises(ConfigError, match="ended with context_limit"):
        check(limits=Limits(max_observation_tokens=10))
    with pytest.raises(ConfigError, match="ended with token_limit"):
        check(limits=Limits(max_turn_tokens=20))


def test_blanks_around_a_question_are_no_part_of_it() -> None:
    assert check([GoldCase(" who wrote X?  ", ("Ann",))], template="searchr1").episodes == 1


def long_search(query: str) -> Found:
    return Found((Document("1", query, "long " * 200),)) if query == "It" else title_search(query)


def test_an_episode_that_a_too_long_first_passage_ends_is_counted() -> None:
    summary = check(search=long_search)
    assert (summary.episodes, summary.too_long) == (1, 1)


def test_first_passages_that_are_all_too_long_are_found() -> None:
    with pytest.raises(ConfigError, match=r"all gold episodes \(1\) .*max_observation_tokens 500"):
        check(CASES[:1], search=long_search)


def test_a_reward_that_refuses_the_gold_answer_is_found() -> None:
    with pytest.raises(ConfigError, match=r"'Ann' has reward 0.5, not 1.0"):
        check(reward=lambda _: 0.5)
    with pytest.raises(ConfigError, match="has reward None"):
        check(reward=lambda _: None)


def test_a_reward_that_reads_the_passages_is_found() -> None:
    def anywhere(trajectory: Trajectory) -> float:
        text = "".join(segment.text for segment in trajectory.segments)
        return float(any(gold in text for gold in trajectory.golden_answers or ()))

    with pytest.raises(ConfigError, match="an episode without an answer has reward 1"):
        check(reward=anywhere)


def test_a_search_that_fails_is_a_retrieval_error() -> None:
    with pytest.raises(RetrievalError, match="a search failed: no route"):
        check(search=lambda _: Found((), "no route"))


def test_a_gold_answer_that_holds_a_tag_is_found() -> None:
    with pytest.raises(ConfigError, match="breaks the format"):
        check([GoldCase("Q?", ("a<think>",))])


def test_no_case_is_no_check() -> None:
    with pytest.raises(ConfigError, match="at least one case, got none"):
        check([])


class Opening(CharacterTokenizer):
    def encode(self, text: str) -> list[int]:
        return [1, *super().encode(text)]


class Lossy(CharacterTokenizer):
    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([item for item in ids if item != ord("/")])


class Trimming(CharacterTokenizer):
    def encode(self, text: str) -> list[int]:
        return super().encode(text.replace("</information>", ""))


class Hasty(CharacterTokenizer):
    def decode(self, ids: Sequence[int]) -> str:
        text = super().decode(ids)
        return text + ">" if text.endswith("</answer") else text


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (Hasty, "not those that were sampled"),
        (Opening, "adds tokens to an empty text"),
        (Trimming, "not opened and closed once in its decoded tokens"),
        (Lossy, "not with an answer|not opened and closed once"),
    ],
)
def test_a_tokenizer_that_does_not_keep_text_is_found(
    tokenizer: Callable[[], CharacterTokenizer], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(tokenizer=tokenizer())


def test_other_notices_can_be_checked_too() -> None:
    notices = Notices(answer_now="\nAnswer.\n")
    assert check(limits=Limits(max_searches=2), notices=notices).searches == 2


def test_documents_that_the_file_cannot_hold_are_found() -> None:
    found = Document("1", "T", "t", float("nan"))
    with pytest.raises(RetrievalError, match="a search failed: .* no finite number"):
        check(search=lambda _: Found((found,)))


# --- one record, from whatever loop --------------------------------------------------------------

TIGHT = Limits(max_searches=1, max_turns=2, max_context=400, max_response_tokens=390)


def with_segment(at: int, **changes: Any) -> Trajectory:
    trajectory = play([search("q"), answer("a")], limits=TIGHT)
    segments = list(trajectory.segments)
    segments[at] = replace(segments[at], **changes)
    return replace(trajectory, segments=tuple(segments))


def test_a_record_of_ours_passes() -> None:
    check_record(with_segment(0), limits=TIGHT, tokenizer=CharacterTokenizer())


def encoded(text: str) -> dict[str, Any]:
    ids = np.array(CharacterTokenizer().encode(text))
    return {"text": text, "token_ids": ids, "n_tokens": len(ids)}


@pytest.mark.parametrize(
    ("at", "changes", "message"),
    [
        (1, {"token_ids": None}, "search segment has no token ids"),
        (1, {"n_tokens": 3}, "token ids and n_tokens 3"),
        (2, {"logprobs": np.zeros(1)}, "information segment of the environment has log-prob"),
        (1, {"text": "other"}, "is not that of its tokens"),
        (1, encoded(search("a") + "."), "goes on after the token that completes"),
        (2, encoded("<information>Doc 1"), "not opened and closed once in its text"),
        (2, encoded("<information></information> <information></information>"), "closed once"),
        (2, encoded("<information></information><answer>a</answer>"), "closed once"),
    ],
)
def test_a_broken_segment_is_named(at: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_record(with_segment(at, **changes), limits=TIGHT, tokenizer=CharacterTokenizer())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_searches", 0),
        ("max_turns", 1),
        ("max_turn_tokens", 33),
        ("max_observation_tokens", 20),
        ("max_context", 150),
        ("max_response_tokens", 150),
    ],
)
def test_a_limit_that_was_exceeded_is_named(name: str, value: int) -> None:
    limits = replace(TIGHT, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name} is {value} and the episode used"):
        check_record(with_segment(0), limits=limits, tokenizer=CharacterTokenizer())
