from __future__ import annotations

import numpy as np
import pytest

from evenhand.task import as_tokenizer
from evenhand.world import NameSplit, Skill, demonstrate, generate_world
from evenhand.world.language import name_words
from evenhand.world.names import split_of
from evenhand.world.sequences import (
    PASSAGE_WEIGHT,
    VALUE_WEIGHT,
    batches,
    copy_drill,
    from_trajectory,
    reading_drill,
)
from evenhand.world.tokenizer import EOS, vocabulary

pytest.importorskip("bm25s")
pytest.importorskip("tokenizers")

from evenhand.world import build_retriever, build_tokenizer

TOKENIZER = as_tokenizer(build_tokenizer())
WORDS = {at: token for token, at in vocabulary().items()}


@pytest.fixture(scope="module")
def rollouts():
    world = generate_world(0, size=100, split=NameSplit.PRETRAIN)
    retriever, random = build_retriever(world), np.random.default_rng(0)
    return [
        demonstrate(q, skill, retriever=retriever, tokenizer=TOKENIZER, random=random)
        for q, skill in zip(world.questions(60), list(Skill) * 15, strict=True)
    ]


def test_a_sequence_is_the_rollout_and_an_end_token(rollouts):
    for rollout in rollouts:
        text = "".join(segment.text for segment in rollout.segments)
        assert TOKENIZER.decode(from_trajectory(rollout).ids.tolist()) == text + EOS


def test_only_policy_tokens_and_repeated_names_of_passages_are_learnt(rollouts):
    names = {vocabulary()[word] for word in name_words()}
    for rollout in rollouts:
        sequence, at = from_trajectory(rollout), 0
        for segment in rollout.segments:
            for _ in range(segment.n_tokens):
                before = set(sequence.ids[:at].tolist())
                token, weight = int(sequence.ids[at]), sequence.weight[at]
                if segment.is_policy:
                    assert weight in (1.0, VALUE_WEIGHT)
                elif segment.kind == "information" and token in names and token in before:
                    assert weight == np.float32(PASSAGE_WEIGHT)
                else:
                    assert weight == 0
                at += 1


def test_values_are_what_follows_a_relation_in_a_thought_and_stood_in_the_context(rollouts):
    told = 0
    for rollout in rollouts:
        sequence = from_trajectory(rollout)
        for at in np.flatnonzero(sequence.value):
            assert sequence.ids[at] in sequence.ids[:at]
            assert sequence.weight[at] == VALUE_WEIGHT
        told += int(sequence.value.sum())
    assert told > 50


def test_a_copy_drill_weighs_only_what_its_first_half_determines():
    random = np.random.default_rng(0)
    for _ in range(50):
        drill = copy_drill(random, 4)
        middle = drill.ids.tolist().index(vocabulary()["\n"])
        assert not drill.weight[: middle + 2].any()
        first, second = drill.ids[:middle], drill.ids[middle + 1 :]
        assert sorted(first.tolist()) == sorted(second.tolist())
        assert drill.value.sum() == sum(WORDS[at] == "." for at in second.tolist())
        assert (drill.weight[drill.value] == 1).all()


def test_copy_drills_take_their_names_from_the_pretraining_split():
    random = np.random.default_rng(0)
    for _ in range(50):
        words = [WORDS[at].strip() for at in copy_drill(random, 4).ids.tolist()]
        assert split_of(words[0], words[1]) is NameSplit.PRETRAIN


def test_a_reading_drill_tells_every_fact_that_was_shown():
    world = generate_world(0, size=100, split=NameSplit.PRETRAIN)
    drill = reading_drill(
        world,
        retriever=build_retriever(world),
        tokenizer=TOKENIZER,
        random=np.random.default_rng(0),
    )
    text = TOKENIZER.decode(drill.ids.tolist())
    assert text.startswith("Question: List ")
    passages, thought = text.split("</information>")
    for sentence in passages.split(") ")[1:]:
        assert sentence.split(" year ")[1][:4] in thought
    assert drill.value.sum() == 6


def test_batches_hold_every_sequence_once_within_the_token_budget():
    random = np.random.default_rng(0)
    drills = [copy_drill(random, 6) for _ in range(100)]
    cut = batches(drills, tokens=500, random=random)
    assert all(batch.ids.size <= 500 for batch in cut)
    rows = [row[: np.flatnonzero(row)[-1] + 1].tolist() for batch in cut for row in batch.ids]
    assert sorted(rows) == sorted(drill.ids.tolist() for drill in drills)
    assert sum(batch.weight.sum() for batch in cut) == pytest.approx(
        sum(drill.weight.sum() for drill in drills)
    )


def test_a_sequence_longer_than_the_budget_is_a_batch_of_its_own():
    random = np.random.default_rng(0)
    drills = [copy_drill(random, 4) for _ in range(3)]
    assert [len(batch.ids) for batch in batches(drills, tokens=1, random=random)] == [1, 1, 1]
