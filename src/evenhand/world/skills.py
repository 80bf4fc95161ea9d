"""Scripted agents of mixed skill, from a solver that is always right to one that guesses.

An agent sees what a policy sees: the question's text and the passages that it was shown. It never
looks at the world, so a right answer proves that the question can be answered by searching.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from numpy.random import Generator

from evenhand.core.errors import DataError
from evenhand.trajectory.protocol import Document
from evenhand.world import language
from evenhand.world.language import AND, DONE, NEXT
from evenhand.world.names import FAMOUS_FIRST
from evenhand.world.schema import FAMOUS, RELATION_WORDS, YEAR

_NAME = r"([A-Z]\w* [A-Z]\w*)"
_CHAIN = re.compile(rf"(?:{'|'.join(language.ASKING)}) {_NAME}((?: \w+)+)\?")
_COMPARISON = re.compile(rf"Which is (\w+), {_NAME} or {_NAME}\?")
_ORDER = re.compile(rf"Is {_NAME} (\w+) than {_NAME}\?")
_SAME = re.compile(rf"Is {_NAME} (\w+) same as {_NAME} (\w+)\?")
_ANY_NAME = re.compile(_NAME)
_MEMORY = {(entity.name, r): v for entity in FAMOUS for r, v in entity.facts.items()}


class Skill(StrEnum):
    """How an agent goes about a question."""

    SOLVER = "solver"
    """Looks up what is needed, in order, and answers right. Famous facts come from memory."""
    HASTY = "hasty"
    """One search, then an answer: right for one hop, the first value or a guess for more."""
    CLUMSY = "clumsy"
    """Several searches, one of them wrong or needless, or an end before the last fact."""
    GUESSER = "guesser"
    """No search, any name."""


@dataclass(frozen=True, slots=True)
class Task:
    """A question as it was understood.

    Attributes:
        names: the entities that it names, one (a chain) or two (a pair).
        relations: what to follow from the first name; for a pair the one relation of both.
        order: `older` or `newer` where years are compared.
        wants_name: a comparison, whose answer is one of the names.
    """

    names: tuple[str, ...]
    relations: tuple[str, ...]
    order: str | None = None
    wants_name: bool = False

    @property
    def is_pair(self) -> bool:
        """Whether two entities are compared."""
        return len(self.names) == 2


def understand(question: str) -> Task:
    """Read a question of the toy world.

    Raises:
        DataError: its wording is not one of the toy world's.
    """
    if found := _CHAIN.fullmatch(question):
        relations = tuple(found[2].split())
        if all(relation in RELATION_WORDS for relation in relations):
            return Task((found[1],), relations)
    if found := _COMPARISON.fullmatch(question):
        return Task((found[2], found[3]), (YEAR,), order=found[1], wants_name=True)
    if found := _ORDER.fullmatch(question):
        return Task((found[1], found[3]), (YEAR,), order=found[2])
    if (found := _SAME.fullmatch(question)) and found[2] == found[4]:
        return Task((found[1], found[3]), (found[2],))
    raise DataError(f"the toy world does not ask {question!r:.80}; see evenhand.world.language")


class Agent:
    """Plays one question turn by turn.

    Args:
        question: the question's text.
        skill: how it goes about it.
        random: draws guesses and slips; the solver draws nothing.
    """

    def __init__(self, question: str, skill: Skill, random: Generator) -> None:
        self._task = understand(question)
        self._skill = skill
        self._random = random
        self._facts: list[tuple[str, str, str]] = []
        self._asked: tuple[str, str] | None = None
        self._seen: list[str] = []
        self._repeats = 0
        self._slips = 1 if skill is Skill.CLUMSY else 0

    def turn(self, documents: Sequence[Document] | None) -> str:
        """Return the next turn, given what the last search showed (`None` before the first)."""
        if documents is None:
            return self._first()
        self._seen += [name for d in documents for name in _ANY_NAME.findall(d.text)]
        assert self._asked is not None
        name, relation = self._asked
        value = language.told_value(documents, name, relation)
        if value is None:
            return self._lost(documents, name, relation)
        self._facts.append((name, relation, value))
        if self._slips and self._random.random() < 0.4:
            slip = self._slip(name, relation)
            if slip is not None:
                return slip
        step = self._following()
        if step is None or (self._skill is Skill.HASTY):
            return self._answer()
        return self._search(*step)

    # --- turns ------------------------------------------------------------------------------------

    def _first(self) -> str:
        task = self._task
        name, relation = task.names[0], task.relations[0]
        known = _MEMORY.get((name, relation))
        if known is not None and (self._skill is not Skill.CLUMSY):
            return language.answer_turn(f"{name} {relation} {known}{DONE}", known)
        if self._skill is Skill.GUESSER and not name.startswith(FAMOUS_FIRST):
            return self._guess()
        self._asked = (name, relation)
        return language.search_turn(f"{name} {relation}", f"{name} {relation}")

    def _search(self, name: str, relation: str) -> str:
        told = " ".join(self._facts[-1])
        asked = f"{name} {relation}" if self._task.is_pair else relation
        self._asked = (name, relation)
        return language.search_turn(f"{told}{NEXT} {asked}", f"{name} {relation}")

    def _following(self) -> tuple[str, str] | None:
        """Return the next fact to look up, or `None` if all are known."""
        done = len(self._facts)
        if self._task.is_pair:
            return (self._task.names[1], self._task.relations[0]) if done == 1 else None
        if done >= len(self._task.relations):
            return None
        return self._facts[-1][2], self._task.relations[done]

    def _answer(self) -> str:
        thought = AND.join(f" {' '.join(fact)}" for fact in reversed(self._facts[-2:])).strip()
        if not self._task.is_pair:
            thought = " ".join(self._facts[-1])
        return language.answer_turn(f"{thought}{DONE}", self._conclusion())

    def _conclusion(self) -> str:
        task = self._task
        if not task.is_pair:
            return self._facts[-1][2]
        if len(self._facts) < 2:
            choices = task.names if task.wants_name else (language.YES, language.NO)
            return choices[self._random.integers(2)]
        first, second = self._facts[-2][2], self._facts[-1][2]
        if task.order is None:
            return language.YES if first == second else language.NO
        holds = (int(first) < int(second)) == (task.order == language.OLDER)
        if task.wants_name:
            return task.names[0] if holds else task.names[1]
        return language.YES if holds else language.NO

    # --- slips ------------------------------------------------------------------------------------

    def _slip(self, name: str, relation: str) -> str | None:
        self._slips = 0
        step = self._following()
        kind = self._random.integers(3)
        if kind == 0:  # the same search once more
            self._facts.pop()
            return language.search_turn(f"{name} {relation}", f"{name} {relation}")
        if kind == 1 and step is not None and self._seen:  # another entity of the passages
            other = self._seen[self._random.integers(len(self._seen))]
            return self._search(other, step[1])
        return self._answer() if kind == 2 else None

    def _lost(self, documents: Sequence[Document], name: str, relation: str) -> str:
        """Nothing shown tells the fact: look once more, or say any name that was shown."""
        if self._repeats == 0 and self._facts and self._random.random() < 0.5:
            self._repeats = 1
            step = self._following()
            if step is not None:
                return self._search(*step)
        titles = [document.title for document in documents] or [name]
        guess = titles[self._random.integers(len(titles))]
        return language.answer_turn(f"{name} {relation} {guess}{DONE}", guess)

    def _guess(self) -> str:
        task = self._task
        if task.is_pair:
            answer = self._conclusion()
            return language.answer_turn(f"{task.names[0]}{DONE}", answer)
        name = task.names[0]
        return language.answer_turn(f"{name}{DONE}", name)
