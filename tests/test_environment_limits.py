"""Budgets: what is cut, what is dropped and where the episode ends."""

from __future__ import annotations

import pytest

from evenhand.core.errors import ConfigError, DataError
from evenhand.task import Episode, Limits
from evenhand.task.prompts import Notices
from evenhand.trajectory import StopReason, Trajectory
from evenhand.trajectory.protocol import render_information
from searching import CHARACTERS, Found, answer, bare, document, kinds, play, search

DOCUMENTS = (document(1, "one"), document(2, "two"), document(3, "three"))


def length(count: int) -> int:
    return len(render_information(DOCUMENTS[:count]))


def shown(trajectory: Trajectory) -> int | None:
    documents = trajectory.segments[2].documents if len(trajectory.segments) > 2 else None
    return None if documents is None else len(documents)


# --- an observation and its budget (verl #6309) --------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_an_observation_that_exactly_fills_its_budget_is_kept(count: int) -> None:
    limits = Limits(max_observation_tokens=length(count))
    trajectory = play([search(), answer()], Found(DOCUMENTS[:count]), limits=limits)
    assert shown(trajectory) == count
    assert trajectory.segments[2].n_tokens == length(count)


@pytest.mark.parametrize("count", [2, 3])
def test_one_token_too_many_costs_one_document(count: int) -> None:
    limits = Limits(max_observation_tokens=length(count) - 1)
    trajectory = play([search(), answer()], Found(DOCUMENTS[:count]), limits=limits)
    assert shown(trajectory) == count - 1
    assert trajectory.segments[2].text == render_information(DOCUMENTS[: count - 1])
    assert trajectory.segments[2].documents == DOCUMENTS[: count - 1]


@pytest.mark.parametrize("budget", range(1, 130))
def test_every_budget_gives_whole_documents_and_a_closing_tag_or_no_search(budget: int) -> None:
    trajectory = play([search(), answer()], Found(DOCUMENTS),
                      limits=Limits(max_observation_tokens=budget))  # fmt: skip
    fits = [count for count in (1, 2, 3) if length(count) <= budget]
    if fits:
        assert trajectory.segments[2].text == render_information(DOCUMENTS[: max(fits)])
        assert trajectory.stop_reason is StopReason.ANSWERED
    else:
        assert kinds(trajectory) == ["search"]
        assert trajectory.stop_reason is StopReason.CONTEXT_LIMIT
        assert trajectory.executed_searches() == []


def test_an_observation_that_exactly_fills_the_context_is_kept() -> None:
    used = len("Q?") + len(search()) + length(3)
    trajectory = play([search(), answer()], Found(DOCUMENTS), limits=Limits(max_context=used))
    assert shown(trajectory) == 3
    assert kinds(trajectory) == ["search", "information"]
    assert trajectory.stop_reason is StopReason.CONTEXT_LIMIT


def test_an_observation_is_cut_where_the_context_ends() -> None:
    used = len("Q?") + len(search()) + length(3) - 1
    trajectory = play([search(), answer()], Found(DOCUMENTS), limits=Limits(max_context=used))
    assert shown(trajectory) == 2


def test_rows_are_cut_by_their_own_length() -> None:
    # Nothing is shared between episodes: a long neighbour cuts nobody else's observation.
    limits = Limits(max_observation_tokens=length(2))
    short = play([search(), answer()], Found(DOCUMENTS[:1]), limits=limits)
    long = play([search(), answer()], Found(DOCUMENTS), limits=limits)
    assert (shown(short), shown(long)) == (1, 2)


def test_a_search_that_cannot_be_shown_is_not_even_asked() -> None:
    asked = []
    episode = Episode("Q?", tokenizer=CHARACTERS, template=bare,
                      limits=Limits(max_observation_tokens=length(0) - 1))  # fmt: skip
    episode.feed_turn(CHARACTERS.encode(search()))
    asked.append(type(episode.next()).__name__)
    assert asked == ["Done"]


def test_the_opening_think_counts_as_part_of_the_observation() -> None:
    turns = [search().removeprefix("<think>")]
    exact = Limits(max_observation_tokens=length(3) + len("<think>"))
    assert shown(play(turns, Found(DOCUMENTS), limits=exact, think_in_prompt=True)) == 3
    less = Limits(max_observation_tokens=length(3) + len("<think>") - 1)
    assert shown(play(turns, Found(DOCUMENTS), limits=less, think_in_prompt=True)) == 2


def test_the_notice_after_the_last_search_has_its_room() -> None:
    base = len("Q?") + len(search()) + len(Notices().answer_now)
    for documents, spare in [(3, 0), (2, -1)]:
        limits = Limits(max_searches=1, max_context=base + length(3) + spare)
        trajectory = play([search(), answer()], Found(DOCUMENTS), limits=limits)
        assert kinds(trajectory)[:3] == ["search", "information", "notice"]
        assert shown(trajectory) == documents


# --- turns ---------------------------------------------------------------------------------------


def test_a_turn_that_its_limit_cut_is_truncated_and_ends_the_episode() -> None:
    trajectory = play([answer("long")], limits=Limits(max_turn_tokens=10))
    assert kinds(trajectory) == ["truncated"]
    assert trajectory.stop_reason is StopReason.TOKEN_LIMIT
    assert trajectory.segments[1].text == answer("long")[:10]


def test_an_answer_that_exactly_fills_the_turn_counts() -> None:
    trajectory = play([answer("a")], limits=Limits(max_turn_tokens=len(answer("a"))))
    assert trajectory.stop_reason is StopReason.ANSWERED


def test_an_answer_that_exactly_fills_the_context_counts() -> None:
    trajectory = play([answer("a")], limits=Limits(max_context=2 + len(answer("a"))))
    assert trajectory.stop_reason is StopReason.ANSWERED


def test_a_turn_that_the_context_cut_ends_with_the_context_limit() -> None:
    trajectory = play([answer("a")], limits=Limits(max_context=2 + len(answer("a")) - 1))
    assert kinds(trajectory) == ["truncated"]
    assert trajectory.stop_reason is StopReason.CONTEXT_LIMIT


def test_a_turn_that_the_context_cut_is_not_retried() -> None:
    limits = Limits(retry_truncated=True, max_invalid=0, max_context=10)
    assert play([answer()], limits=limits).stop_reason is StopReason.CONTEXT_LIMIT


def test_tokens_beyond_those_that_were_asked_for_are_dropped() -> None:
    episode = Episode("Q?", tokenizer=CHARACTERS, template=bare, limits=Limits(max_turn_tokens=5))
    episode.feed_turn(CHARACTERS.encode(answer()))
    assert len(episode.context_ids) == 2 + 5


def test_the_response_budget_counts_everything_after_the_prompt() -> None:
    turn = search()
    limits = Limits(max_response_tokens=len(turn) + length(1) + 5)
    trajectory = play([turn, answer()], Found(DOCUMENTS), question="Q" * 300, limits=limits)
    assert shown(trajectory) == 1
    assert kinds(trajectory) == ["search", "information", "truncated"]
    assert trajectory.segments[3].n_tokens == 5
    assert trajectory.stop_reason is StopReason.TOKEN_LIMIT


@pytest.mark.parametrize("spare", range(8))
def test_a_notice_that_does_not_fit_is_left_out(spare: int) -> None:
    room = 2 + 1 + len(Notices().invalid) - 1
    trajectory = play(["x"], limits=Limits(max_context=room - spare))
    assert kinds(trajectory) == ["invalid"]
    assert trajectory.stop_reason is StopReason.CONTEXT_LIMIT


def test_a_notice_that_does_not_fit_the_response_is_the_token_limit() -> None:
    trajectory = play(["x"], limits=Limits(max_response_tokens=10))
    assert kinds(trajectory) == ["invalid"]
    assert trajectory.stop_reason is StopReason.TOKEN_LIMIT


# --- prompt --------------------------------------------------------------------------------------


@pytest.mark.parametrize("excess", [0, 1, 50])
def test_a_question_is_never_cut(excess: int) -> None:
    with pytest.raises(DataError, match=r"has 40 tokens, which leaves none for a turn"):
        Episode("Q" * 40, tokenizer=CHARACTERS, template=bare,
                limits=Limits(max_context=40 - min(excess, 38)))  # fmt: skip


def test_one_token_after_the_prompt_is_enough_to_start() -> None:
    episode = Episode("Q" * 40, tokenizer=CHARACTERS, template=bare, limits=Limits(max_context=41))
    assert episode.next().max_tokens == 1  # type: ignore[union-attr]


# --- the limits themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_searches", -1),
        ("max_turns", 0),
        ("max_turn_tokens", 0),
        ("max_observation_tokens", 0),
        ("max_context", 1),
        ("max_response_tokens", 0),
        ("max_invalid", -1),
        ("max_searches", 2.0),
        ("max_searches", True),
        ("max_context", None),
        ("max_turn_tokens", "500"),
        ("retry_truncated", 1),
        ("announce_last", None),
    ],
)
def test_a_limit_out_of_range_is_named_with_its_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"limit {name} must be .*, got {value!r}"):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_the_defaults_are_those_of_the_design() -> None:
    limits = Limits()
    assert (limits.max_searches, limits.max_invalid) == (4, 2)
    assert (limits.max_turn_tokens, limits.max_observation_tokens) == (500, 500)


@pytest.mark.parametrize("max_turns", [None, 1, 3])
def test_the_most_turns_are_reached_and_not_exceeded(max_turns: int | None) -> None:
    limits = Limits(max_searches=3, max_invalid=2, max_turns=max_turns)
    trajectory = play(["x", search(), "x", search(), search(), search()], limits=limits)
    turns = sum(segment.is_policy for segment in trajectory.segments)
    assert turns == limits.most_turns
