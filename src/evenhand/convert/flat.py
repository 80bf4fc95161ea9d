"""Flat text: finding who wrote which part of a transcript.

Flat text cannot prove its author. The rules are those of the environments that write it: a block
of results counts only straight after the tag that asked for it, with nothing but blanks (and chat
markers, in the tool dialect) between. Everything else is the policy's own words.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from evenhand.convert.dialects import CALL_CLOSE, Dialect, act
from evenhand.convert.documents import RESPONSE_CLOSE, RESPONSE_OPEN
from evenhand.convert.segments import Turn
from evenhand.trajectory.protocol import INFORMATION_CLOSE, INFORMATION_OPEN, THINK_OPEN, ActionKind

# What Search-R1's environment tells a policy after a turn without an action. The sentence quotes
# the tags, which must not be taken for actions.
_NOTICE = r"\n?My previous action is invalid\. If I want to search[^\n]*Let me try again\.\n?"
_STOP = re.compile(rf"</(?P<tag>search|answer)>|{_NOTICE}")
_RESULTS = re.compile(rf"\s*{INFORMATION_OPEN}")
_GAP = re.compile(r"\n{0,2}")
_OPEN_THINK = re.compile(rf"\s*{THINK_OPEN}\n?")

_CALL_RESULTS = re.compile(
    rf"{CALL_CLOSE}(?:\s|<\|im_end\|>|<\|im_start\|>|user\b|tool\b)*{RESPONSE_OPEN}"
)
_NEXT_RESPONSE = re.compile(rf"\s*{RESPONSE_OPEN}")
_NEXT_TURN = re.compile(r"\s*(?:<\|im_end\|>\s*)?(?:<\|im_start\|>)?assistant\n|\s*<\|im_end\|>\s*")

_ASSISTANT = re.compile(
    r"<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n"
)
_BARE_ASSISTANT = re.compile(r"\nassistant\n")
_QUESTION = "Question:"
_QUESTION_END = re.compile(r"<\|im_end\|>|<\|eot_id\|>|</s>|\nassistant\b|\nAssistant:|\n<think>")
_USER = re.compile(r"<\|im_start\|>user\n|(?:^|\n)user\n")


class Transcript(NamedTuple):
    """A flat text in two parts."""

    prompt: str
    response: str


def split_prompt(text: str) -> Transcript:
    """Cut a whole transcript into prompt and response.

    The prompt ends after the first marker of the assistant's turn, else after the line that holds
    `Question:` (Search-R1's template); a text with neither has no prompt. Example tags inside a
    prompt are therefore never read as actions.
    """
    marker = _ASSISTANT.search(text)
    if marker is None and text.startswith(("system\n", "user\n")):  # special tokens left out
        marker = _BARE_ASSISTANT.search(text)
    if marker is not None:
        return Transcript(text[: marker.end()], text[marker.end() :])
    start = text.find(_QUESTION)
    if start < 0 or text.lstrip().startswith(THINK_OPEN):
        return Transcript("", text)
    end = text.find("\n", start)
    end = len(text) if end < 0 else end + 1
    return Transcript(text[:end], text[end:])


def question_of(prompt: str) -> str:
    """Return the question that a prompt asks.

    It is what follows the last `Question:` up to the end of the user's turn; without that word, the
    user's last turn, or the whole prompt.
    """
    _, found, rest = prompt.rpartition(_QUESTION)
    if not found:
        users = list(_USER.finditer(prompt))
        rest = prompt[users[-1].end() :] if users else prompt
    end = _QUESTION_END.search(rest)
    return (rest[: end.start()] if end else rest).strip()


def opens_think(text: str) -> bool:
    """Whether a text of the environment ends with an open `<think>`."""
    return text.rstrip().endswith(THINK_OPEN)


def split_turns(response: str, dialect: Dialect, *, think_open: bool) -> list[Turn]:
    """Cut a response into turns of the policy and the environment, in order.

    The texts of the turns, joined, are the response. A turn of the policy ends at its first
    action; after an answer everything that follows belongs to the answer's turn. A response
    without a word is one empty turn.

    Args:
        response: what follows the prompt.
        dialect: how the policy writes its actions.
        think_open: the environment writes the opening `<think>`, also after its results.
    """
    split = _split_tags if dialect is Dialect.TAGS else _split_calls
    turns, at = split(response, think_open)
    rest = response[at:]
    if not turns or rest.strip():
        turns.append(Turn(policy=True, text=rest))
    elif rest:
        last = turns[-1]
        turns[-1] = Turn(policy=last.policy, text=last.text + rest)
    return turns


def _split_tags(text: str, think_open: bool) -> tuple[list[Turn], int]:
    turns: list[Turn] = []
    at = 0
    for stop in _STOP.finditer(text):
        if stop.start() < at:  # inside a block of results
            continue
        if stop.group("tag") is None:
            # A notice answers a turn of the policy, also one without a word.
            if text[at : stop.start()].strip() or not turns or not turns[-1].policy:
                turns.append(Turn(policy=True, text=text[at : stop.start()]))
                at = stop.start()
            turns.append(Turn(policy=False, text=text[at : stop.end()]))
            at = stop.end()
            continue
        action = act(text[at : stop.end()], Dialect.TAGS)
        if action is not None and action.kind is ActionKind.ANSWER:
            break
        turns.append(Turn(policy=True, text=text[at : stop.end()]))
        at = stop.end()
        if action is not None and _RESULTS.match(text, at):
            end = _end_of_results(text, at, think_open)
            turns.append(Turn(policy=False, text=text[at:end]))
            at = end
    return turns, at


def _end_of_results(text: str, at: int, think_open: bool) -> int:
    inside = text.index(INFORMATION_OPEN, at) + len(INFORMATION_OPEN)
    limit = text.find(INFORMATION_OPEN, inside)
    limit = len(text) if limit < 0 else limit
    close = _closing_tag(text, inside, limit)
    if close < 0:
        # The observation was cut and lost its closing tag: the policy resumes with a thought.
        think = text.find(THINK_OPEN, inside, limit)
        end = limit if think < 0 else think
    else:
        gap = _GAP.match(text, close)
        end = gap.end() if gap else close
    thought = _OPEN_THINK.match(text, end) if think_open else None
    return thought.end() if thought else end


def _closing_tag(text: str, start: int, limit: int) -> int:
    """Return the index past the `</information>` that ends a block, or -1.

    A passage may hold that tag itself. The environment's own one is followed by an empty line, the
    next thought or the end of the text, so such a one is preferred to the first.
    """
    first = -1
    at = text.find(INFORMATION_CLOSE, start, limit)
    while at >= 0:
        end = at + len(INFORMATION_CLOSE)
        first = end if first < 0 else first
        following = text[end : end + 64]
        if following.startswith("\n\n") or following.lstrip().startswith(THINK_OPEN):
            return end
        if not following.strip() and len(following) < 64:
            return end
        at = text.find(INFORMATION_CLOSE, end, limit)
    return first


def _split_calls(text: str, think_open: bool) -> tuple[list[Turn], int]:
    turns: list[Turn] = []
    at = 0
    while (results := _CALL_RESULTS.search(text, at)) is not None:
        call_end = results.start() + len(CALL_CLOSE)
        end = _end_of_responses(text, results.end())
        thought = _OPEN_THINK.match(text, end) if think_open else None
        end = thought.end() if thought else end
        turns.append(Turn(policy=True, text=text[at:call_end]))
        turns.append(Turn(policy=False, text=text[call_end:end]))
        at = end
    return turns, at


def _end_of_responses(text: str, at: int) -> int:
    while True:
        close = text.find(RESPONSE_CLOSE, at)
        if close < 0:  # cut: everything that is left was shown
            return len(text)
        at = close + len(RESPONSE_CLOSE)
        again = _NEXT_RESPONSE.match(text, at)
        if again is None:
            following = _NEXT_TURN.match(text, at)
            return following.end() if following else at
        at = again.end()
