"""Supervised sequences: token ids, loss weights, and which tokens are values that must be read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from evenhand.datasets import Question
from evenhand.retrieval import Retriever
from evenhand.task import Limits, ScriptedPolicy, Tokenizer, run_episode
from evenhand.task.episode import Episode
from evenhand.trajectory import Kind, Trajectory
from evenhand.world import language
from evenhand.world.demonstrations import DOCUMENTS_SHOWN, demonstrate
from evenhand.world.generator import World
from evenhand.world.names import NameSplit, allowed_names
from evenhand.world.schema import RELATION_WORDS, YEAR, YEARS
from evenhand.world.skills import Skill
from evenhand.world.tokenizer import EOS, vocabulary

VALUE_WEIGHT = 2.0
PASSAGE_WEIGHT = 0.2

_LAST_NAME_WEIGHT = 0.3
_SUBJECT = 3


class LearningSequence(NamedTuple):
    """One sequence to learn from.

    Attributes:
        ids: `[T]` token ids.
        weight: `[T]` loss weight of predicting each token; 0 for what cannot be known.
        value: `[T]` true for the first token of a value that the context tells.
    """

    ids: NDArray[np.int64]
    weight: NDArray[np.float32]
    value: NDArray[np.bool_]


class _Kinds(NamedTuple):
    relation: NDArray[np.bool_]
    name: NDArray[np.bool_]
    value: NDArray[np.bool_]


@cache
def _kinds() -> _Kinds:
    words = vocabulary()
    kinds = _Kinds(*(np.zeros(len(words), dtype=np.bool_) for _ in range(3)))
    kinds.relation[[words[f" {word}"] for word in RELATION_WORDS]] = True
    kinds.name[[words[word] for word in language.name_words()]] = True
    kinds.value[:] = kinds.name
    kinds.value[[words[f" {year}"] for year in YEARS]] = True
    return kinds


def from_trajectory(trajectory: Trajectory) -> LearningSequence:
    """Return a rollout as a sequence: its own tokens, and what is predictable of the passages.

    The weight is 1 on policy tokens, `VALUE_WEIGHT` on values read from a passage, and
    `PASSAGE_WEIGHT` on names in passages that stood in the context before: other words of passages
    are random, and learning to guess them would be wasted.
    """
    parts = [np.asarray(segment.token_ids) for segment in trajectory.segments]
    ids = np.concatenate([*parts, [vocabulary()[EOS]]]).astype(np.int64)
    policy = np.concatenate(
        [np.full(s.n_tokens, s.is_policy) for s in trajectory.segments] + [[True]]
    )
    passage = np.concatenate(
        [np.full(s.n_tokens, s.kind is Kind.INFORMATION) for s in trajectory.segments] + [[False]]
    )
    return _weighted(ids, policy, passage)


def _weighted(
    ids: NDArray[np.int64], policy: NDArray[np.bool_], passage: NDArray[np.bool_]
) -> LearningSequence:
    kinds = _kinds()
    first_place = np.unique(ids, return_index=True)[1]
    seen = np.ones(len(ids), dtype=np.bool_)
    seen[first_place] = False
    value = np.zeros(len(ids), dtype=np.bool_)
    value[1:] = policy[1:] & kinds.relation[ids[:-1]] & kinds.value[ids[1:]] & seen[1:]
    weight = policy.astype(np.float32)
    weight[passage & kinds.name[ids] & seen] = PASSAGE_WEIGHT
    weight[value] = VALUE_WEIGHT
    return LearningSequence(ids, weight, value)


def copy_drill(random: Generator, most: int) -> LearningSequence:
    """Return some facts about different entities and the same facts again, in another order.

    The shortest text from which looking up a value can be learnt: induction forms within a few
    hundred small steps. Learnt are only the tokens of the second half that the first determines.
    """
    words = vocabulary()
    names = _drill_names(random)
    count = int(random.integers(1, most + 1))
    relations = random.permutation(len(RELATION_WORDS))[: int(random.integers(2, 7))]
    cells = [(name, RELATION_WORDS[at]) for name in names for at in relations]
    facts = []
    for at in random.permutation(len(cells))[:count]:
        name, word = cells[at]
        if word == YEAR:
            value = [words[f" {YEARS[random.integers(len(YEARS))]}"]]
        else:
            value = _pairs()[random.integers(len(_pairs()))].tolist()
        facts.append([*name, words[f" {word}"], *value])
    told = [token for fact in facts for token in [*fact, words["."]]]
    weight = [0.0] * (len(told) + 1)
    again: list[int] = []
    for at in random.permutation(len(facts)):
        answers = len(facts[at]) - _SUBJECT
        # Which fact comes next is chance; learning to guess it drowns what can be learnt.
        weight += [0.0, _LAST_NAME_WEIGHT, 0.0, *[1.0] * answers, 0.0]
        again += [*facts[at], words["."]]
    ids = np.array([*told, words["\n"], *again], dtype=np.int64)
    recited = np.arange(len(ids)) > len(told)
    looked_up = np.zeros(len(ids), dtype=np.bool_)
    looked_up[1:] = recited[1:] & _kinds().relation[ids[:-1]]
    return LearningSequence(ids, np.array(weight, dtype=np.float32), looked_up)


def _drill_names(random: Generator) -> list[tuple[int, int]]:
    """Return one to four names; half the time they share their first or last tokens."""
    pairs = _pairs()
    count = int(random.integers(1, 5))
    one = pairs[random.integers(len(pairs))]
    others = pairs
    if random.random() < 0.5:
        others = pairs[(pairs == one).any(axis=1)]
    chosen = random.permutation(len(others))[:count]
    return list(
        dict.fromkeys([(int(one[0]), int(one[1]))] + [(int(a), int(b)) for a, b in others[chosen]])
    )


@cache
def _pairs() -> NDArray[np.int64]:
    words = vocabulary()
    pairs = sorted(allowed_names(NameSplit.PRETRAIN))
    return np.array([(words[f" {first}"], words[f" {last}"]) for first, last in pairs])


_DRILL_LIMITS = Limits(max_turn_tokens=100, max_observation_tokens=200, max_context=512)


def reading_drill(
    world: World, *, retriever: Retriever, tokenizer: Tokenizer, random: Generator
) -> LearningSequence:
    """Return an episode that searches a name and then tells every fact of what it was shown."""
    name = world.own[random.integers(len(world.own))].name
    result = retriever.search([name], DOCUMENTS_SHOWN)[0]
    facts = [
        f" {document.title} {relation} {value}"
        for document in result.documents
        for relation, value in world.entities[document.title].facts.items()
    ]
    told = language.AND.join(facts[at] for at in random.permutation(len(facts))).strip()
    turns = [
        language.search_turn(name, name),
        language.answer_turn(f"{told}{language.DONE}", name),
    ]
    episode = Episode(
        f"{language.LIST} {name}?",
        tokenizer=tokenizer,
        limits=_DRILL_LIMITS,
        template=language.template,
    )
    return from_trajectory(run_episode(episode, ScriptedPolicy(tokenizer, turns), lambda _: result))


def demonstration(
    question: Question,
    skill: Skill,
    *,
    retriever: Retriever,
    tokenizer: Tokenizer,
    random: Generator,
) -> LearningSequence:
    """Return a scripted agent's rollout as a sequence."""
    return from_trajectory(
        demonstrate(question, skill, retriever=retriever, tokenizer=tokenizer, random=random)
    )


def batches(
    sequences: Sequence[LearningSequence], *, tokens: int, random: Generator
) -> list[LearningSequence]:
    """Return padded batches `[B, T]` of about equally long sequences, in random order.

    Args:
        sequences: in any order; all are used once.
        tokens: how many tokens a batch holds at most, padding included (at least one sequence).
        random: shuffles the batches.
    """
    ordered = sorted(sequences, key=lambda sequence: len(sequence.ids), reverse=True)
    out = []
    start = 0
    while start < len(ordered):
        longest = len(ordered[start].ids)
        size = max(1, tokens // longest)
        out.append(_padded(ordered[start : start + size], longest))
        start += size
    return [out[at] for at in random.permutation(len(out))]


def _padded(sequences: Sequence[LearningSequence], longest: int) -> LearningSequence:
    shape = (len(sequences), longest)
    padded = LearningSequence(
        np.zeros(shape, dtype=np.int64),
        np.zeros(shape, dtype=np.float32),
        np.zeros(shape, dtype=np.bool_),
    )
    for row, sequence in enumerate(sequences):
        length = len(sequence.ids)
        padded.ids[row, :length] = sequence.ids
        padded.weight[row, :length] = sequence.weight
        padded.value[row, :length] = sequence.value
    return padded
