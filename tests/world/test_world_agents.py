from __future__ import annotations

import numpy as np
import pytest

from evenhand.core.errors import DataError
from evenhand.credit.evidence import silver_documents, step_scores
from evenhand.task import as_tokenizer
from evenhand.task.rewards import exact_match, get_reward, score_trajectory
from evenhand.trajectory.protocol import Document
from evenhand.world import Agent, NameSplit, Skill, demonstrate, generate_world, template
from evenhand.world.demonstrations import LIMITS
from evenhand.world.language import told_value
from evenhand.world.skills import understand

pytest.importorskip("bm25s")
pytest.importorskip("tokenizers")

from evenhand.world import build_retriever, build_tokenizer

TOKENIZER = as_tokenizer(build_tokenizer())


def play(world, questions, skill, seed=0):
    retriever = build_retriever(world)
    random = np.random.default_rng(seed)
    return [
        demonstrate(question, skill, retriever=retriever, tokenizer=TOKENIZER, random=random)
        for question in questions
    ]


@pytest.fixture(scope="module")
def world():
    return generate_world(5, size=300, split=NameSplit.EVAL)


@pytest.fixture(scope="module")
def questions(world):
    return world.questions(400)


@pytest.fixture(scope="module")
def solved(world, questions):
    return play(world, questions, Skill.SOLVER)


def test_the_solver_answers_every_question_right_in_the_real_environment(solved):
    assert [exact_match(rollout) for rollout in solved] == [1.0] * 400


@pytest.mark.parametrize(("seed", "size"), [(0, 24), (1, 2000)])
def test_the_solver_answers_every_question_of_small_and_large_worlds(seed, size):
    world = generate_world(seed, size=size)
    rollouts = play(world, world.questions(150), Skill.SOLVER)
    assert [exact_match(rollout) for rollout in rollouts] == [1.0] * 150


def test_the_solver_obeys_the_format_and_searches_once_a_fact(questions, solved):
    assert all(rollout.format_ok for rollout in solved)
    assert [len(rollout.executed_searches()) for rollout in solved] == [q.hops for q in questions]


def test_the_solver_is_shown_every_supporting_page(questions, solved):
    for question, rollout in zip(questions, solved, strict=True):
        shown = {d.title for s in rollout.segments for d in s.documents or ()}
        if question.hops:
            assert set(question.supporting_titles) <= shown


def test_every_search_of_the_solver_gets_a_step_score_above_zero(solved):
    scored = [score_trajectory(rollout, get_reward("exact_match")) for rollout in solved]
    several = [rollout for rollout in scored if len(rollout.executed_searches()) > 1]
    scores = [step_scores(rollout, silver_documents([rollout])) for rollout in several]
    later = [score for of_rollout in scores for score in of_rollout[1:]]
    assert len(later) > 200
    # A passage may be shown twice; then the later of two searches shares documents.
    assert sum(score > 0 for score in later) / len(later) > 0.95


def test_a_rollout_fits_the_limits_with_room_to_spare(solved):
    longest = max(sum(s.n_tokens for s in rollout.segments) for rollout in solved)
    assert longest < 0.7 * LIMITS.max_context


def test_hasty_agents_search_once_and_are_right_about_one_hop(world, questions):
    rollouts = play(world, questions, Skill.HASTY)
    for question, rollout in zip(questions, rollouts, strict=True):
        assert len(rollout.executed_searches()) == min(1, question.hops)
        if question.metadata["kind"].startswith("hop"):
            assert exact_match(rollout) == (question.hops == 1)


def test_clumsy_agents_keep_the_format_and_are_sometimes_wrong(world, questions):
    rollouts = play(world, questions, Skill.CLUMSY)
    hard = [r for q, r in zip(questions, rollouts, strict=True) if q.hops >= 2]
    right = sum(exact_match(rollout) for rollout in hard) / len(hard)
    assert 0.3 < right < 0.9
    assert sum(rollout.format_ok for rollout in hard) / len(hard) > 0.8


def test_guessers_never_search_for_what_is_not_famous(world, questions):
    rollouts = play(world, questions, Skill.GUESSER)
    assert not any(rollout.executed_searches() for rollout in rollouts)


def test_famous_facts_are_answered_from_memory(world, questions):
    famous = [q for q in questions if q.hops == 0]
    assert all(exact_match(rollout) == 1.0 for rollout in play(world, famous, Skill.HASTY))


def test_the_same_seed_gives_the_same_demonstrations(world, questions):
    one = play(world, questions[:50], Skill.CLUMSY, seed=1)
    other = play(world, questions[:50], Skill.CLUMSY, seed=1)
    assert [[s.text for s in r.segments] for r in one] == [
        [s.text for s in r.segments] for r in other
    ]


def test_an_agent_that_is_shown_nothing_still_answers():
    agent = Agent("What is Balo Barban home?", Skill.SOLVER, np.random.default_rng(0))
    assert agent.turn(None) == (
        "<think> Balo Barban home</think><search> Balo Barban home</search>"
    )
    assert agent.turn([]).endswith("</answer>")


def test_a_fact_is_read_from_the_page_of_its_own_entity():
    pages = [
        Document("1", "Balo Cordok", "Balo Cordok home Demu Gathok. Balo Cordok year 1901."),
        Document("2", "Balo Barban", "Known: Balo Barban home Fozu Holmak; Balo Barban year 1902."),
    ]
    assert told_value(pages, "Balo Barban", "home") == "Fozu Holmak"
    assert told_value(pages, "Balo Barban", "year") == "1902"
    assert told_value(pages, "Balo Barban", "mayor") is None


@pytest.mark.parametrize(
    "question",
    ["Who is it?", "What is Balo Barban?", "What is Balo Barban colour?",
     "Is Balo Barban home same as Demu Gathok year?"],
)  # fmt: skip
def test_a_question_of_another_wording_is_refused(question):
    with pytest.raises(DataError, match="the toy world does not ask"):
        understand(question)


def test_the_prompt_is_the_question_alone():
    assert template("Find Balo Barban home?") == "Question: Find Balo Barban home?\n"
