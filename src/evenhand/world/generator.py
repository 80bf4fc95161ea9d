"""Worlds from a seed: entities, passages and questions whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.random import Generator

from evenhand.core.errors import ConfigError
from evenhand.datasets import Question
from evenhand.trajectory.protocol import Document
from evenhand.world import language
from evenhand.world.names import FIRST, LAST, NameSplit, allowed_names
from evenhand.world.schema import (
    FACTS_OF_ENTITY,
    FAMOUS,
    RELATIONS,
    YEAR,
    YEARS,
    Entity,
    EntityType,
)

MIN_SIZE, MAX_SIZE = 24, 4000
_MOST_HOPS = 4
_TYPE_SHARES = {
    EntityType.PERSON: 0.4,
    EntityType.CITY: 0.25,
    EntityType.COMPANY: 0.25,
    EntityType.WORK: 0.1,
}


class QuestionKind(StrEnum):
    """What a question needs."""

    FAMOUS = "famous"
    """A famous fact: 0 hops."""
    HOP1 = "hop1"
    """One fact of one passage."""
    HOP2 = "hop2"
    """A fact of the value of a fact."""
    HOP3 = "hop3"
    """A chain of three facts."""
    HOP4 = "hop4"
    """A chain of four facts."""
    COMPARISON = "comparison"
    """Which of two entities is older or newer: two facts, the answer is a name."""
    YES_NO = "yes_no"
    """Whether one is older or newer, or two facts have the same value: two facts, yes or no."""


DEFAULT_SHARES: Mapping[QuestionKind, float] = MappingProxyType(
    {
        QuestionKind.FAMOUS: 0.10,
        QuestionKind.HOP1: 0.20,
        QuestionKind.HOP2: 0.25,
        QuestionKind.HOP3: 0.15,
        QuestionKind.HOP4: 0.10,
        QuestionKind.COMPARISON: 0.10,
        QuestionKind.YES_NO: 0.10,
    }
)
"""How many questions of each kind, if nothing else is asked for."""

CHAIN_LENGTH = {
    QuestionKind.HOP1: 1,
    QuestionKind.HOP2: 2,
    QuestionKind.HOP3: 3,
    QuestionKind.HOP4: 4,
}


@dataclass(frozen=True)
class World:
    """An encyclopedia.

    Attributes:
        seed: what it was made from.
        split: whose names it has.
        entities: name to entity, famous ones last.
        documents: one passage an entity, in the same order; the title is the name.
    """

    seed: int
    split: NameSplit
    entities: Mapping[str, Entity]
    documents: tuple[Document, ...]

    @cached_property
    def own(self) -> tuple[Entity, ...]:
        """The entities that are not famous."""
        return tuple(self.entities.values())[: len(self.entities) - len(FAMOUS)]

    def value(self, name: str, relation: str) -> str:
        """Return a fact."""
        return self.entities[name].facts[relation]

    def questions(
        self,
        count: int,
        *,
        seed: int = 0,
        shares: Mapping[QuestionKind, float] | None = None,
    ) -> list[Question]:
        """Return different questions with their golds and supporting titles.

        `metadata` holds `kind` and `plan`, a list of `[name, relation]` to look up: for a chain the
        name of each later fact is the value of the one before.

        Args:
            count: how many.
            seed: another seed, other questions.
            shares: relative frequency of each kind. A kind of which no more different questions
                are found is replaced by the others.

        Raises:
            ConfigError: the world does not hold so many different questions, or no share is
                positive.
        """
        shares = DEFAULT_SHARES if shares is None else shares
        kinds = [kind for kind, share in shares.items() if share > 0]
        if not kinds:
            raise ConfigError(f"shares of question kinds must have a positive one, got {shares}")
        weights = np.array([shares[kind] for kind in kinds], dtype=float)
        random = np.random.default_rng([self.seed, seed, 1])
        drawn = random.choice(len(kinds), size=count, p=weights / weights.sum())
        makers = {kind: _MAKERS[kind](self, random, kind) for kind in kinds}
        seen: set[str] = set()
        out = []
        for number, at in enumerate(drawn):
            kind = kinds[at]
            question = _fresh(makers[kind], seen) if kind in makers else None
            while question is None:
                makers.pop(kind, None)
                if not makers:
                    raise ConfigError(
                        f"the world has only {number} different questions of these kinds, got "
                        f"count={count}; ask for fewer, or generate a larger world"
                    )
                kind = list(makers)[random.integers(len(makers))]
                question = _fresh(makers[kind], seen)
            out.append(
                Question(
                    id=f"{self.split}-{self.seed}-{seed}-{number}",
                    question=question.question,
                    golden_answers=question.golden_answers,
                    dataset="toyworld",
                    hops=question.hops,
                    supporting_titles=question.supporting_titles,
                    metadata=question.metadata,
                )
            )
        return out


def generate_world(
    seed: int, *, size: int = 300, split: NameSplit | str = NameSplit.TRAIN
) -> World:
    """Return the world of a seed.

    Args:
        seed: a whole number, not negative.
        size: entities besides the famous ones.
        split: whose names it has; worlds of different splits share no name.

    Raises:
        ConfigError: a size out of range, or an unknown split.
    """
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ConfigError(f"a world has {MIN_SIZE} to {MAX_SIZE} entities, got size={size}")
    if split not in list(NameSplit):
        raise ConfigError(f"split must be one of {', '.join(NameSplit)}, got {split!r}")
    split = NameSplit(split)
    random = np.random.default_rng([seed, list(NameSplit).index(split), size])
    names = _draw_names(size, split, random)
    types = _draw_types(size, random)
    by_type = {kind: [n for n, t in zip(names, types, strict=True) if t is kind] for kind in types}
    entities = {
        name: Entity(name, kind, _draw_facts(name, kind, by_type, random))
        for name, kind in zip(names, types, strict=True)
    }
    entities.update((famous.name, famous) for famous in FAMOUS)
    documents = tuple(
        Document(
            id=f"{split}-{seed}-{at}",
            title=entity.name,
            text=language.passage_text(entity.name, entity.facts, random),
        )
        for at, entity in enumerate(entities.values())
    )
    return World(seed, split, MappingProxyType(entities), documents)


def _draw_names(size: int, split: NameSplit, random: Generator) -> list[str]:
    # A small grid of tokens makes near-namesakes: every first token is shared by several entities.
    allowed = allowed_names(split)
    side = min(len(FIRST), math.ceil(math.sqrt(6 * size)))
    while True:
        first = random.permutation(len(FIRST))[:side]
        last = random.permutation(len(LAST))[:side]
        grid = [(FIRST[a], LAST[b]) for a in first for b in last]
        pairs = [pair for pair in grid if pair in allowed]
        if len(pairs) >= size:
            break
        side = min(len(FIRST), side + 1)
    chosen = random.permutation(len(pairs))[:size]
    return [" ".join(pairs[at]) for at in chosen]


def _draw_types(size: int, random: Generator) -> list[EntityType]:
    kinds = list(_TYPE_SHARES)
    rest = random.choice(len(kinds), size=size - 3 * len(kinds), p=list(_TYPE_SHARES.values()))
    return [*kinds * 3, *(kinds[at] for at in rest)]


def _draw_facts(
    name: str,
    kind: EntityType,
    by_type: Mapping[EntityType, Sequence[str]],
    random: Generator,
) -> dict[str, str]:
    relations = list(RELATIONS[kind].items())
    facts = {}
    for at in random.permutation(len(relations))[:FACTS_OF_ENTITY]:
        relation, target = relations[at]
        others = by_type[target]
        value = name
        while value == name:
            value = others[int(random.integers(len(others)))]
        facts[relation] = value
    facts[YEAR] = YEARS[random.integers(len(YEARS))]
    return facts


# --- questions -----------------------------------------------------------------------------------


def _fresh(maker: Iterator[Question], seen: set[str]) -> Question | None:
    """Return a question that was not asked before, or `None` if none turns up."""
    for _ in range(200):
        question = next(maker)
        key = str((question.metadata["kind"], question.metadata["plan"], question.golden_answers))
        if question.hops == 0:  # famous facts are few: another wording counts as another question
            key = question.question
        if key not in seen:
            seen.add(key)
            return question
    return None


def _question(
    kind: QuestionKind, text: str, gold: str, plan: list[list[str]], hops: int
) -> Question:
    titles = tuple(dict.fromkeys(name for name, _ in plan))
    return Question("", text, (gold,), hops=hops, supporting_titles=titles,
                    metadata={"kind": str(kind), "plan": plan})  # fmt: skip


def _asking(random: Generator) -> str:
    return language.ASKING[random.integers(len(language.ASKING))]


def _famous(world: World, random: Generator, kind: QuestionKind) -> Iterator[Question]:  # noqa: ARG001
    while True:
        entity = FAMOUS[random.integers(len(FAMOUS))]
        relation = list(entity.facts)[random.integers(len(entity.facts))]
        text = language.chain_question(entity.name, [relation], _asking(random))
        yield _question(kind, text, entity.facts[relation], [[entity.name, relation]], 0)


def _chains(world: World, random: Generator, kind: QuestionKind) -> Iterator[Question]:
    length = CHAIN_LENGTH[kind]
    while True:
        plan = _walk(world, random, length)
        if plan is None:
            continue
        text = language.chain_question(plan[0][0], [step[1] for step in plan], _asking(random))
        yield _question(kind, text, world.value(*plan[-1]), plan, length)


def _walk(world: World, random: Generator, length: int) -> list[list[str]] | None:
    """Return a chain without a repeated relation or entity, or `None` for a dead end."""
    name = world.own[random.integers(len(world.own))].name
    plan: list[list[str]] = []
    names, used = {name}, set()
    for step in range(length):
        facts = world.entities[name].facts
        last = step == length - 1
        open_ = [r for r, value in facts.items() if r not in used and value not in names
                 and (last or r != YEAR)]  # fmt: skip
        if not open_:
            return None
        relation = open_[random.integers(len(open_))]
        plan.append([name, relation])
        used.add(relation)
        name = facts[relation]
        names.add(name)
    return plan


def _pair(world: World, random: Generator) -> tuple[Entity, Entity]:
    one, other = random.permutation(len(world.own))[:2]
    return world.own[one], world.own[other]


def _ordered_pairs(world: World, random: Generator) -> Iterator[tuple[str, str, str, bool]]:
    """Yield two names, `older` or `newer`, and whether that holds of the first."""
    while True:
        one, other = _pair(world, random)
        years = int(one.facts[YEAR]), int(other.facts[YEAR])
        if years[0] == years[1]:
            continue
        order = (language.OLDER, language.NEWER)[random.integers(2)]
        yield one.name, other.name, order, (years[0] < years[1]) == (order == language.OLDER)


def _comparisons(world: World, random: Generator, kind: QuestionKind) -> Iterator[Question]:
    for one, other, order, holds in _ordered_pairs(world, random):
        text = language.comparison_question(one, other, order)
        plan = [[one, YEAR], [other, YEAR]]
        yield _question(kind, text, one if holds else other, plan, 2)


def _yes_no(world: World, random: Generator, kind: QuestionKind) -> Iterator[Question]:
    orders = _ordered_pairs(world, random)
    while True:
        if random.random() < 0.5:
            one, other, order, holds = next(orders)
            text, relation = language.order_question(one, other, order), YEAR
        else:
            wanted = bool(random.random() < 0.5)
            found = _same(world, random, wanted)
            if found is None:
                continue
            (one, other, relation), holds = found, wanted
            text = language.same_question(one, other, relation)
        plan = [[one, relation], [other, relation]]
        yield _question(kind, text, language.YES if holds else language.NO, plan, 2)


def _same(world: World, random: Generator, wanted: bool) -> tuple[str, str, str] | None:
    first, _ = _pair(world, random)
    relation = [r for r in first.facts if r != YEAR][random.integers(FACTS_OF_ENTITY)]
    fits = [
        entity.name
        for entity in world.own
        if entity.name != first.name
        and relation in entity.facts
        and (entity.facts[relation] == first.facts[relation]) == wanted
    ]
    return (first.name, fits[random.integers(len(fits))], relation) if fits else None


_MAKERS: dict[QuestionKind, Callable[[World, Generator, QuestionKind], Iterator[Question]]] = {
    QuestionKind.FAMOUS: _famous,
    **dict.fromkeys(CHAIN_LENGTH, _chains),
    QuestionKind.COMPARISON: _comparisons,
    QuestionKind.YES_NO: _yes_no,
}
