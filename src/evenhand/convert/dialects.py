"""The two ways in which policies ask for a search: tags, and tool calls.

Tags are our own protocol (`evenhand.trajectory.protocol`). A tool call is written as XML
(`<tool_call><function=search><parameter=query>…`) or as Hermes JSON
(`<tool_call>{"name": "search", "arguments": {"query": …}}</tool_call>`); its results come back in
`<tool_response>` blocks.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any

from evenhand.convert.documents import RESPONSE_OPEN
from evenhand.trajectory.protocol import (
    ANSWER_CLOSE,
    SEARCH_CLOSE,
    SEARCH_OPEN,
    Action,
    ActionKind,
    first_action,
    is_well_formed,
)

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

_STOP = re.compile(r"</(tool_call|answer)>")
_TOOL_TAG = re.compile(r"</?tool_(?:call|response)>")
_FUNCTION = re.compile(r"<function=([^<>]*)>")
_PARAMETER = re.compile(r"<parameter=(?:query|queries|query_list)>")
_QUERY_NAMES = ("query", "queries", "query_list")

_END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>", "<eos>")


class Dialect(StrEnum):
    """How a policy writes its actions."""

    TAGS = "tags"
    """`<search>query</search>`; results in `<information>`."""
    TOOLS = "tools"
    """`<tool_call>…</tool_call>`; results in `<tool_response>`."""


def recognise_dialect(prompt: str, response: str) -> Dialect:
    """Return the dialect that the prompt asks for; without a clue there, the one that is spoken."""
    if CALL_OPEN in prompt or "<tools>" in prompt:
        return Dialect.TOOLS
    if SEARCH_OPEN in prompt:
        return Dialect.TAGS
    if RESPONSE_OPEN in response or (CALL_OPEN in response and SEARCH_CLOSE not in response):
        return Dialect.TOOLS
    return Dialect.TAGS


def act(text: str, dialect: Dialect) -> Action | None:
    """Return the first complete action of a policy turn in its dialect, or `None`.

    In the tool dialect the first closing `</tool_call>` or `</answer>` decides, as the first
    closing tag does in ours. A call is a search if its function has "search" in its name and a
    query.
    """
    if dialect is Dialect.TAGS:
        return first_action(text)
    closing = _STOP.search(text)
    if closing is None:
        return None
    opening = f"<{closing.group(1)}>"
    start = text.rfind(opening, 0, closing.start())
    if start < 0:
        return None
    content = text[start + len(opening) : closing.start()]
    if closing.group(1) == "answer":
        return Action(ActionKind.ANSWER, content.strip(), start, closing.end())
    query = query_of_call(content)
    if query is None:
        return None
    return Action(ActionKind.SEARCH, query, start, closing.end())


def query_of_call(content: str) -> str | None:
    """Return the query of a tool call's inside, or `None` if it is not a search."""
    function = _FUNCTION.search(content)
    if function is None:
        try:
            call = json.loads(content)
        except (ValueError, RecursionError):
            return None
        return query_of_json(call)
    parameter = _PARAMETER.search(content, function.end())
    if parameter is None or not _is_search(function.group(1)):
        return None
    value = content[parameter.end() :].partition("</parameter>")[0]
    return value.partition("</function>")[0].strip()


def query_of_json(call: Any) -> str | None:
    """Return the query of a call `{"name": …, "arguments": {…}}`, or `None`.

    Several queries in one call are joined by `; `. Arguments may be an object or its JSON text.
    """
    if not isinstance(call, dict) or not _is_search(call.get("name")):
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    for name in _QUERY_NAMES:
        value = arguments.get(name)
        if isinstance(value, str):
            return value.strip()
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return "; ".join(item.strip() for item in value)
    return None


def _is_search(name: Any) -> bool:
    return isinstance(name, str) and "search" in name.casefold()


def well_formed(text: str, dialect: Dialect, *, think_open: bool, last: bool) -> bool:
    """Whether a policy turn obeys the grammar of its dialect.

    The tool dialect's grammar is ours with one tool call in the place of `<search>…</search>`: a
    thought, `</think>`, then one call of a search with a query or `<answer>…</answer>`, only blanks
    between and after. End-of-turn tokens that a dump spells out at the end do not count.

    Args:
        text: the turn.
        dialect: how actions are written.
        think_open: the text before the turn ends with an open `<think>`.
        last: the turn is the last of its rollout.
    """
    text = without_end_of_turn(text)
    if dialect is Dialect.TOOLS:
        action = act(text, dialect)
        if action is None:
            return False
        before, after = text[: action.start], text[action.end :]
        if _TOOL_TAG.search(before) or _TOOL_TAG.search(after):
            return False
        if action.kind is ActionKind.SEARCH:
            text = f"{before}{SEARCH_OPEN}{action.content}{SEARCH_CLOSE}{after}"
    return is_well_formed(text, think_in_prompt=think_open, last=last)


def without_end_of_turn(text: str) -> str:
    """Return a turn without blanks and spelled-out end-of-turn tokens at its end."""
    while True:
        text = text.rstrip()
        token = next((end for end in _END_OF_TURN if text.endswith(end)), None)
        if token is None:
            return text
        text = text[: -len(token)]


def has_answer(text: str) -> bool:
    """Whether a complete `<answer>…</answer>` stands anywhere in a text."""
    end = text.rfind(ANSWER_CLOSE)
    return end >= 0 and text.rfind("<answer>", 0, end) >= 0
