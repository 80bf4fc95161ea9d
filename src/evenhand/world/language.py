"""The wording of the toy world: passages, questions, and what demonstrators think.

The language is telegraphic on purpose. A fact reads `Name relation value` wherever it stands, in a
passage as in a thought, so that a small transformer can learn within minutes to look a value up:
the two tokens before a value determine it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from numpy.random import Generator

from evenhand.task.prompts import Notices
from evenhand.trajectory.protocol import Document
from evenhand.world.names import FAMOUS_FIRST, FAMOUS_LAST, FIRST, LAST
from evenhand.world.schema import RELATION_WORDS, YEARS

OPENERS = ("", "", "Known:", "Here:", "Note:", "Records:")
SEPARATORS = (".", ";", ",")
ASKING = ("What is", "Find", "Name")

OLDER, NEWER = "older", "newer"
NEXT, DONE, AND = " next", " done", ","
"""Words of thoughts: another search follows; the answer follows; one more fact follows."""

YES, NO = "yes", "no"
LIST = "List"
"""Begins the questions of reading drills, which only pre-training asks."""


def template(question: str) -> str:
    """Return the prompt of a question: the shortest that still names it one."""
    return f"Question: {question}\n"


def notices() -> Notices:
    """Return the environment's default notices; the tokenizer has a token for each."""
    return Notices()


# --- texts ---------------------------------------------------------------------------------------


def passage_text(name: str, facts: Mapping[str, str], random: Generator) -> str:
    """Return the text of an entity's passage: its facts in random order and varied wording."""
    order = random.permutation(len(facts))
    items = list(facts.items())
    told = [f"{name} {items[at][0]} {items[at][1]}" for at in order]
    opener = OPENERS[random.integers(len(OPENERS))]
    separator = SEPARATORS[random.integers(len(SEPARATORS))]
    return f"{opener} {f'{separator} '.join(told)}.".strip()


def chain_question(name: str, relations: Sequence[str], asking: str) -> str:
    """Return `What is NAME relation relation …?`: the relations are followed from left to right."""
    return f"{asking} {name} {' '.join(relations)}?"


def comparison_question(one: str, other: str, order: str) -> str:
    """Return `Which is older, ONE or OTHER?` (or newer)."""
    return f"Which is {order}, {one} or {other}?"


def order_question(one: str, other: str, order: str) -> str:
    """Return `Is ONE older than OTHER?` (or newer)."""
    return f"Is {one} {order} than {other}?"


def same_question(one: str, other: str, relation: str) -> str:
    """Return `Is ONE relation same as OTHER relation?`."""
    return f"Is {one} {relation} same as {other} {relation}?"


def search_turn(thought: str, query: str) -> str:
    """Return a policy turn that searches."""
    return f"<think> {thought}</think><search> {query}</search>"


def answer_turn(thought: str, answer: str) -> str:
    """Return a policy turn that answers."""
    return f"<think> {thought}</think><answer> {answer}</answer>"


def told_value(documents: Sequence[Document], name: str, relation: str) -> str | None:
    """Return what shown passages tell of a fact, or `None`: the first `NAME relation VALUE`."""
    pattern = re.compile(rf"\b{re.escape(name)} {re.escape(relation)} (\w+(?: [A-Z]\w*)?)")
    for document in documents:
        found = pattern.search(document.text)
        if found:
            return found.group(1)
    return None


# --- vocabulary ----------------------------------------------------------------------------------

TAGS = tuple(
    f"<{slash}{tag}>" for tag in ("think", "search", "answer", "information") for slash in ("", "/")
)
MOST_DOCUMENTS = 9


def fixed_words() -> list[str]:
    """Return every token that is no name, in the order of the vocabulary."""
    texts = [*OPENERS, *ASKING, "Which is or Is than same as", OLDER, NEWER, LIST, YES, NO, DONE,
             NEXT, "Question:"]  # fmt: skip
    words = dict.fromkeys(f" {word}" for text in texts for word in text.split())
    phrases = [text.strip() for text in (notices().invalid, notices().answer_now)]
    heads = [f"Doc {number}(Title:" for number in range(1, MOST_DOCUMENTS + 1)]
    signs = ["\n\n", "\n", ")", "?", *SEPARATORS, "Question:", " "]
    relations = [f" {word}" for word in RELATION_WORDS]
    years = [f" {year}" for year in YEARS]
    return list(dict.fromkeys([*TAGS, *signs, *heads, *phrases, *words, *relations, *years]))


def name_words() -> list[str]:
    """Return the tokens of names, with the blank that always stands before them."""
    return [f" {word}" for word in (*FIRST, *LAST, *FAMOUS_FIRST, *FAMOUS_LAST)]
