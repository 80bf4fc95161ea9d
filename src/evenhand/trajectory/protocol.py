"""The tag grammar that policy and environment speak.

Policy text is `<think>…</think>` followed by one action, `<search>query</search>` or
`<answer>text</answer>`. Environment text is `<information>Doc 1(Title: T) text⏎…</information>`,
with an empty line before and after.

Everything here reads one segment of one author at a time. Text that was retrieved is never parsed
for actions, so nothing in a passage can act.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
SEARCH_OPEN, SEARCH_CLOSE = "<search>", "</search>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
INFORMATION_OPEN, INFORMATION_CLOSE = "<information>", "</information>"

STOP_TAGS = (SEARCH_CLOSE, ANSWER_CLOSE)
"""Generation of a turn ends when one of these is complete."""

PROTOCOL_TAG = re.compile(r"</?(?:think|search|answer|information)>")
_STOP_TAG = re.compile(r"</(search|answer)>")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_DOCUMENT_HEAD = re.compile(r"(Doc \d+)(?=\(Title:)")


class ActionKind(StrEnum):
    """What a turn of the policy asks for."""

    SEARCH = "search"
    """A query for the search engine."""
    ANSWER = "answer"
    """The final answer; it ends the episode."""


@dataclass(frozen=True, slots=True)
class Action:
    """The first action of a policy turn.

    Attributes:
        kind: search or answer.
        content: what stands between the tags, without surrounding blanks.
        start: index of the opening tag in the turn's text.
        end: index just past the closing tag. What follows was carried by the token that completed
            the tag; it belongs to the segment's text and is ignored.
    """

    kind: ActionKind
    content: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Document:
    """A passage as it was shown to the policy.

    Attributes:
        id: the retriever's identity of the passage; decides whether two documents are the same.
        title: title of the page, possibly empty.
        text: the passage without its title.
        score: the retriever's score, if it gave one.
    """

    id: str
    title: str
    text: str
    score: float | None = None


def usable_document(document: Any) -> Document:
    """Return a document whose fields have the types that every later reader relies on.

    A score of another number type becomes a float, and a whole number as id its text. A document
    that is right already is returned as it is.

    Raises:
        ValueError: an id, title or text that is no text, an empty id, or a score that is no finite
            number; the message continues "a document whose ...".
    """
    name, score = document.id, document.score
    if not isinstance(name, str) and not isinstance(name, bool) and hasattr(name, "__index__"):
        name = str(int(name))
    for field, value in (("id", name), ("title", document.title), ("text", document.text)):
        if not isinstance(value, str):
            raise ValueError(f"{field} is no text: {value!r:.40}")
    if not name:
        raise ValueError("id is empty; an id tells passages apart")
    if score is not None and type(score) is not float:
        try:
            score = float(score)
        except (TypeError, ValueError, OverflowError):
            score = math.nan
    if score is not None and not math.isfinite(score):
        raise ValueError(f"score is no finite number: {document.score!r:.40}")
    if name is document.id and score is document.score and type(document) is Document:
        return document
    return Document(name, document.title, document.text, score)


def first_action(text: str) -> Action | None:
    """Return the first complete action of a policy turn, or `None` (the turn is invalid).

    The first closing `</search>` or `</answer>` decides: generation stops there, so whatever a
    longer text holds beyond it never happened. Its content starts at the nearest matching opening
    tag before it. A closing tag that no opening tag precedes leaves the turn without an action.
    """
    closing = _STOP_TAG.search(text)
    if closing is None:
        return None
    kind = ActionKind(closing.group(1))
    opening = f"<{kind}>"
    start = text.rfind(opening, 0, closing.start())
    if start < 0:
        return None
    content = text[start + len(opening) : closing.start()].strip()
    return Action(kind, content, start, closing.end())


def is_well_formed(text: str, *, think_in_prompt: bool, last: bool) -> bool:
    """Whether one policy segment obeys the grammar.

    It is a thought, `</think>`, then one action, with only blanks between and after; the action is
    an answer if and only if the segment is the last of its rollout; a query is not empty. Neither
    the thought nor the action may hold a protocol tag, so an invented `<information>` block breaks
    the format.

    Args:
        text: the segment's text. Cut it at `Action.end` first where the token that completed the
            closing tag may have carried more.
        think_in_prompt: the environment wrote the opening `<think>`: the segment must not.
        last: the segment is the last policy segment of its rollout.
    """
    rest = text.lstrip()
    if not think_in_prompt:
        if not rest.startswith(THINK_OPEN):
            return False
        rest = rest[len(THINK_OPEN) :]
    thought, closed, rest = rest.partition(THINK_CLOSE)
    if not closed or PROTOCOL_TAG.search(thought):
        return False
    action = first_action(rest)
    if action is None or rest[: action.start].strip() or rest[action.end :].strip():
        return False
    if last != (action.kind is ActionKind.ANSWER):
        return False
    if action.kind is ActionKind.SEARCH and not action.content:
        return False
    return not PROTOCOL_TAG.search(action.content)


def is_valid_format(turns: Sequence[str], *, think_in_prompt: bool = False) -> bool:
    """Whether the policy segments of a whole rollout, in order, obey the grammar.

    A search is not required. A rollout without a policy segment does not obey it.
    """
    return bool(turns) and all(
        is_well_formed(turn, think_in_prompt=think_in_prompt, last=at == len(turns) - 1)
        for at, turn in enumerate(turns)
    )


def thought(text: str) -> str:
    """Return the think of a policy segment: its text up to `</think>`, without an opening tag.

    A segment that never closes its think has none: the result is empty.
    """
    before, closed, _ = text.partition(THINK_CLOSE)
    if not closed:
        return ""
    _, opened, after = before.partition(THINK_OPEN)
    return after if opened else before


def render_information(documents: Sequence[Document]) -> str:
    """Return the environment's text for a list of documents, in Search-R1's layout.

    Line breaks inside a passage become blanks; protocol tags (`< /answer>`) and the head of a
    document (`Doc 2 (Title:`) lose their shape, so that neither a model nor a reader of flat text
    can take a passage for a boundary or an action. An empty list gives an empty block.
    """
    lines = "".join(
        f"Doc {number}(Title: {_plain(document.title)}) {_plain(document.text)}\n"
        for number, document in enumerate(documents, start=1)
    )
    return f"\n\n{INFORMATION_OPEN}{lines}{INFORMATION_CLOSE}\n\n"


def valid_unicode(text: str) -> str:
    """Return `text` with U+FFFD for each half of a surrogate pair, which no tokenizer can read.

    JSON may hold such halves (`"\\ud800"`), so questions and passages from files may too.
    """
    return _HALF_PAIR.sub("\ufffd", text)


def _plain(text: str) -> str:
    flat = " ".join(valid_unicode(text).split())
    # Inserting a blank, unlike deleting the tag, cannot join its neighbours into a new tag.
    flat = PROTOCOL_TAG.sub(lambda tag: f"< {tag.group()[1:]}", flat)
    return _DOCUMENT_HEAD.sub(r"\1 ", flat)
