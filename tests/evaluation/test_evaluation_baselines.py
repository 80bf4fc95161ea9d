"""Baselines: what stands in the prompt, what is recorded, and which questions are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from playing import PASSAGES, Engine, agent, answers_at_once, questions, searches_then_answers

from evenhand.datasets import Question
from evenhand.evaluation.baselines import (
    NO_GOLD_PASSAGE,
    direct,
    gold_passages,
    prompt_with,
    retrieve_once,
)
from evenhand.evaluation.measures import measures
from evenhand.evaluation.run import PolicyAnswerer
from evenhand.task.rewards import score_trajectory
from evenhand.trajectory import Kind, StopReason, Trajectory
from evenhand.trajectory.protocol import Document


def prompt_of(rollout: Trajectory) -> str:
    return "".join(s.text for s in rollout.segments if s.kind in (Kind.PROMPT, Kind.NOTICE))


def test_direct_asks_for_an_answer_and_executes_no_search() -> None:
    (found,) = direct(agent(answers_at_once)).answer(questions(1))
    assert "who made the lamp?" in prompt_of(found)
    assert "search" not in prompt_of(found)
    assert measures(score_trajectory(found, "exact_match"))["exact_match"] == 1
    (searched,) = direct(agent(searches_then_answers)).answer(questions(1))
    assert searched.stop_reason is StopReason.SEARCH_LIMIT


def test_retrieve_once_puts_what_the_question_finds_into_the_prompt() -> None:
    engine = Engine()
    answerer = retrieve_once(agent(answers_at_once, engine=engine))
    found = answerer.answer(questions(3))
    assert engine.asked == [question.question for question in questions(3)]
    assert "Doc 1(Title: lamp) Anna made the lamp." in prompt_of(found[0])
    assert "Berta" not in prompt_of(found[0])
    assert found[1].metadata["prompt_documents"] == [{"id": "d1", "title": "clock"}]
    assert measures(found[0])["searches"] == 0
    assert measures(found[0], searches=1)["recall_titles_1"] == 1


def test_a_search_that_fails_before_the_prompt_is_an_environment_fault() -> None:
    engine = Engine(broken=lambda query: "clock" in query)
    found = retrieve_once(agent(answers_at_once, engine=engine)).answer(questions(3))
    assert [t.stop_reason is StopReason.FAILED for t in found] == [False, True, False]
    assert found[1].question_id == "q1"
    assert "down" in found[1].segments[-1].error


def test_gold_passages_come_by_title_one_of_each_page_first() -> None:
    corpus = [
        *PASSAGES,
        Document("more", "LAMP", "The lamp is old."),
        Document("other", "moon", "Nothing."),
    ]
    asked = [replace(questions(1)[0], supporting_titles=("Lamp", "clock"))]
    (found,) = gold_passages(agent(answers_at_once), corpus).answer(asked)
    ids = [row["id"] for row in found.metadata["prompt_documents"]]
    assert ids == ["d0", "d1", "more"]


def test_a_question_without_a_gold_passage_is_refused() -> None:
    answerer = gold_passages(agent(answers_at_once), PASSAGES)
    known, unknown = questions(2)
    assert answerer.refuses(known) is None
    assert answerer.refuses(replace(unknown, supporting_titles=None)) == NO_GOLD_PASSAGE
    assert answerer.refuses(replace(unknown, supporting_titles=("moon",))) == NO_GOLD_PASSAGE


def test_passages_beyond_the_limit_are_dropped_whole() -> None:
    corpus = [Document("a", "lamp", "x" * 60), Document("b", "lamp", "y" * 60)]
    tight = agent(answers_at_once, max_observation_tokens=130)
    (found,) = gold_passages(tight, corpus).answer(questions(1))
    assert "x" * 60 in prompt_of(found)
    assert "yy" not in prompt_of(found)


def test_two_questions_of_one_text_get_their_own_passages() -> None:
    first = questions(1)[0]
    asked = [first, replace(first, id="other-q1", supporting_titles=("clock",))]
    found = gold_passages(agent(answers_at_once), PASSAGES).answer(asked)
    assert [t.metadata["prompt_documents"][0]["title"] for t in found] == ["lamp", "clock"]
    assert [t.question_id for t in found] == ["q0", "other-q1"]


def test_braces_in_passages_and_questions_stay_as_they_are() -> None:
    given = [Document("a", "t", "{question} {passages}")]
    prompt = prompt_with("plain", given)("what is {passages}?")
    assert isinstance(prompt, str)
    assert "{question} {passages}" in prompt
    assert prompt.endswith("Question: what is {passages}?\n")


def test_chat_templates_get_a_message_and_others_keep_their_words() -> None:
    given = [Document("a", "t", "text")]
    chat = prompt_with("searchr1-chat", given)("who?")
    assert isinstance(chat, list)
    assert [message["role"] for message in chat] == ["user"]
    assert "Doc 1(Title: t) text" in chat[0]["content"]
    own = prompt_with(lambda question: f"Q {question}", given)("who?")
    assert str(own).startswith("Q who?")
    assert "Doc 1(Title: t) text" in str(own)
    assert prompt_with(lambda question: f"Q {question}", None)("who?") == "Q who?"


def test_a_template_of_ones_own_is_followed_by_the_notice_to_answer() -> None:
    base = agent(answers_at_once)
    own = replace(base, environment=replace(base.environment, template=_own))
    (found,) = direct(own).answer(questions(1))
    assert "No search is left" in prompt_of(found)


def _own(question: str) -> str:
    return f"Q {question}"


def test_the_scripted_solver_answers_every_question_of_its_world() -> None:
    from evenhand.world import build_retriever, generate_world
    from evenhand.world.solver import SolverAnswerer

    world = generate_world(1, size=60, split="eval")
    asked: list[Question] = world.questions(20, seed=0)
    answerer = SolverAnswerer(build_retriever(world))
    found = answerer.answer(asked)
    assert all(score_trajectory(t, "exact_match").reward == 1 for t in found)
    assert [t.question_id for t in found] == [question.id for question in asked]
    # Its words depend on the question alone, so a resumed evaluation is the same.
    assert answerer.answer(asked[5:6])[0].segments == found[5].segments
    assert answerer.refuses(asked[0]) is None


@pytest.mark.parametrize("make", [direct, retrieve_once])
def test_a_prompt_without_room_is_refused(make: Any) -> None:
    answerer: PolicyAnswerer = make(agent(answers_at_once, max_context=300))
    long = replace(questions(1)[0], question="x" * 400)
    assert answerer.refuses(long) == "prompt too long"
