from __future__ import annotations

import numpy as np
import pytest

from evenhand.task import as_tokenizer
from evenhand.task.prompts import Notices
from evenhand.trajectory.protocol import THINK_OPEN, render_information
from evenhand.world import DOCUMENTS_SHOWN, Skill, demonstrate, generate_world
from evenhand.world.language import TAGS
from evenhand.world.tokenizer import UNKNOWN, vocabulary

pytest.importorskip("bm25s")
pytest.importorskip("tokenizers")

from evenhand.world import build_retriever, build_tokenizer

TOKENIZER = as_tokenizer(build_tokenizer())


def is_lossless(text: str) -> bool:
    ids = TOKENIZER.encode(text)
    return TOKENIZER.decode(ids) == text and vocabulary()[UNKNOWN] not in ids


@pytest.mark.parametrize("skill", list(Skill))
def test_every_segment_of_a_rollout_is_encoded_without_loss(skill):
    world = generate_world(2, size=100)
    retriever, random = build_retriever(world), np.random.default_rng(0)
    for question in world.questions(60):
        rollout = demonstrate(
            question, skill, retriever=retriever, tokenizer=TOKENIZER, random=random
        )
        for segment in rollout.segments:
            assert is_lossless(segment.text)
            assert list(segment.token_ids) == list(TOKENIZER.encode(segment.text))


def test_information_of_any_number_of_passages_is_encoded_without_loss():
    documents = generate_world(2, size=24).documents
    for count in range(9 + 1):
        assert is_lossless(render_information(documents[:count]) + THINK_OPEN)


@pytest.mark.parametrize("text", [Notices().invalid, Notices().answer_now])
def test_a_notice_is_one_token_between_two_line_breaks(text):
    assert is_lossless(text)
    assert len(TOKENIZER.encode(text)) == 3


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_is_one_token_wherever_it_stands(tag):
    assert TOKENIZER.encode(f"{tag}{tag}") == [vocabulary()[tag]] * 2


def test_a_name_has_the_same_tokens_in_question_query_title_and_passage():
    ids = TOKENIZER.encode(
        "Question: Find Balo Barban home?\n<search> Balo Barban</search>"
        "Doc 1(Title: Balo Barban) Balo Barban home Demu Gathok."
    )
    assert ids.count(vocabulary()[" Balo"]) == ids.count(vocabulary()[" Barban"]) == 4


def test_a_word_from_elsewhere_becomes_the_unknown_token():
    assert TOKENIZER.encode(" Paris") == [vocabulary()[UNKNOWN]]


def test_an_observation_is_short():
    documents = generate_world(2, size=200).documents
    shown = [documents[at : at + DOCUMENTS_SHOWN] for at in range(0, 200, DOCUMENTS_SHOWN)]
    assert max(len(TOKENIZER.encode(render_information(two))) for two in shown) <= 60
