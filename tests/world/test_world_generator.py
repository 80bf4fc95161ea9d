from __future__ import annotations

import re

import pytest

from evenhand.core.errors import ConfigError
from evenhand.world import NameSplit, QuestionKind, generate_world
from evenhand.world.generator import MAX_SIZE
from evenhand.world.names import FAMOUS_FIRST, FAMOUS_LAST, FIRST, LAST, allowed_names, split_of
from evenhand.world.schema import FAMOUS, RELATION_WORDS, YEAR


def own_names(seed: int, split: NameSplit, size: int = 300) -> set[str]:
    return {entity.name for entity in generate_world(seed, size=size, split=split).own}


def test_the_same_seed_gives_the_same_world_and_questions():
    one, other = generate_world(3, size=80), generate_world(3, size=80)
    assert one.documents == other.documents
    assert one.questions(50, seed=1) == other.questions(50, seed=1)


def test_another_seed_gives_another_world_and_other_questions():
    world = generate_world(3, size=80)
    assert world.documents != generate_world(4, size=80).documents
    assert world.questions(50, seed=1) != world.questions(50, seed=2)


@pytest.mark.parametrize("other", [NameSplit.TRAIN, NameSplit.PRETRAIN])
def test_worlds_for_evaluation_share_no_name_with_others(other):
    evaluated = set().union(*(own_names(seed, NameSplit.EVAL) for seed in range(3)))
    assert not evaluated & set().union(*(own_names(seed, other) for seed in range(6)))


def test_every_pair_of_name_tokens_belongs_to_one_split():
    pairs = [allowed_names(split) for split in NameSplit]
    assert sum(map(len, pairs)) == len(FIRST) * len(LAST) == len(frozenset().union(*pairs))
    assert split_of("Balo", "Barban") is split_of("Balo", "Barban")


def test_all_name_tokens_occur_in_every_split():
    for split in NameSplit:
        firsts, lasts = zip(*allowed_names(split), strict=True)
        assert set(firsts) == set(FIRST)
        assert set(lasts) == set(LAST)


def test_famous_names_are_used_by_no_other_entity():
    assert not set(FAMOUS_FIRST) & set(FIRST)
    assert not set(FAMOUS_LAST) & set(LAST)
    assert len({entity.name for entity in FAMOUS}) == len(FAMOUS)
    known = {entity.name for entity in FAMOUS}
    for entity in FAMOUS:
        values = {v for r, v in entity.facts.items() if r != YEAR}
        assert values <= known - {entity.name}


def test_the_search_engine_tells_all_words_apart():
    stemmer = pytest.importorskip("Stemmer").Stemmer("english")
    words = [word.lower() for word in (*FIRST, *LAST, *FAMOUS_FIRST, *FAMOUS_LAST)]
    words += RELATION_WORDS
    assert len(set(stemmer.stemWords(words))) == len(words)


@pytest.mark.parametrize("size", [24, 100, 1000])
def test_a_world_has_the_size_that_was_asked_for_and_one_passage_an_entity(size):
    world = generate_world(0, size=size)
    assert len(world.own) == size
    assert [d.title for d in world.documents] == list(world.entities)
    assert len({d.id for d in world.documents}) == size + len(FAMOUS)


def test_every_split_has_names_for_the_largest_world():
    assert all(len(own_names(0, split, MAX_SIZE)) == MAX_SIZE for split in NameSplit)


def test_a_passage_tells_each_fact_of_its_entity_once():
    world = generate_world(0, size=60)
    for document in world.documents:
        entity = world.entities[document.title]
        for relation, value in entity.facts.items():
            assert document.text.count(f"{entity.name} {relation} {value}") == 1


def test_passages_vary_in_wording_and_order():
    documents = generate_world(0, size=200).documents
    assert len({re.split(r"[A-Z]\w+ [A-Z]\w+", d.text)[0] for d in documents}) >= 4
    assert len({sign for d in documents for sign in ".;," if f"{sign} " in d.text}) == 3
    assert len({d.text.split(YEAR)[0].count(" ") for d in documents}) > 3


def test_most_entities_have_near_namesakes():
    firsts = [entity.name.split()[0] for entity in generate_world(0, size=300).own]
    assert sum(firsts.count(first) > 1 for first in firsts) / len(firsts) > 0.9


def test_questions_are_different_and_have_ids_of_their_own():
    questions = generate_world(0).questions(800)
    assert len({q.question for q in questions}) == 800
    searched = [str(q.metadata) + q.golden_answers[0] for q in questions if q.hops]
    assert len(set(searched)) == len(searched)
    assert len({q.id for q in questions}) == 800


def test_questions_of_every_kind_state_their_hops_and_supporting_titles():
    questions = generate_world(0).questions(400)
    hops = {q.metadata["kind"]: q.hops for q in questions}
    assert hops == {"famous": 0, "hop1": 1, "hop2": 2, "hop3": 3, "hop4": 4, "comparison": 2,
                    "yes_no": 2}  # fmt: skip
    for q in questions:
        assert len(q.supporting_titles) == max(1, q.hops)


def test_golds_follow_from_the_facts_of_the_world():
    world = generate_world(0)
    shares = dict.fromkeys([QuestionKind.FAMOUS, QuestionKind.HOP1, QuestionKind.HOP4], 1.0)
    for q in world.questions(200, shares=shares):
        for (name, relation), following in zip(
            q.metadata["plan"], q.metadata["plan"][1:], strict=False
        ):
            assert world.value(name, relation) == following[0]
        assert q.golden_answers == (world.value(*q.metadata["plan"][-1]),)


def test_yes_and_no_are_about_equally_frequent():
    questions = generate_world(0).questions(400, shares={QuestionKind.YES_NO: 1.0})
    assert 0.4 < sum(q.golden_answers == ("yes",) for q in questions) / 400 < 0.6


def test_more_questions_than_the_world_holds_are_refused():
    with pytest.raises(ConfigError, match="has only 2.. different questions"):
        generate_world(0, size=24).questions(300, shares={QuestionKind.FAMOUS: 1.0})


def test_a_kind_that_is_used_up_is_replaced_by_the_others():
    shares = {QuestionKind.FAMOUS: 0.9, QuestionKind.HOP1: 0.1}
    questions = generate_world(0).questions(600, shares=shares)
    kinds = [q.metadata["kind"] for q in questions]
    assert 150 < kinds.count("famous") <= 216
    assert kinds.count("hop1") == 600 - kinds.count("famous")


def test_shares_without_a_positive_one_are_refused():
    with pytest.raises(ConfigError, match="must have a positive one"):
        generate_world(0, size=24).questions(1, shares={QuestionKind.HOP1: 0.0})


@pytest.mark.parametrize("size", [23, MAX_SIZE + 1])
def test_a_size_out_of_range_is_refused(size):
    with pytest.raises(ConfigError, match=f"got size={size}"):
        generate_world(0, size=size)


def test_an_unknown_split_is_refused():
    with pytest.raises(ConfigError, match="split must be one of pretrain, train, eval"):
        generate_world(0, split="test")
