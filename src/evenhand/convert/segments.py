"""Turns of the policy and the environment -> the segments of a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.convert.dialects import Dialect, act, has_answer, well_formed
from evenhand.convert.documents import RESPONSE_OPEN, is_result, shown_documents
from evenhand.trajectory import Kind, Segment, Source, StopReason
from evenhand.trajectory.protocol import INFORMATION_OPEN, THINK_OPEN, ActionKind


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch of text by one author.

    Attributes:
        policy: the policy wrote it.
        text: the text.
        n_tokens: its length, if the dump tells; else it is counted.
        token_ids: `[n_tokens]` ids, if recorded.
        logprobs: `[n_tokens]` log-probabilities of the sampler, if recorded.
        result: the environment's text is the bare content of a tool's message.
        metadata: what the segment keeps.
    """

    policy: bool
    text: str
    n_tokens: int | None = None
    token_ids: NDArray[np.int64] | None = None
    logprobs: NDArray[np.float64] | None = None
    result: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Built(NamedTuple):
    """What the turns of a rollout come to."""

    segments: tuple[Segment, ...]
    format_ok: bool
    stop_reason: StopReason
    think_in_prompt: bool


def build(
    turns: Sequence[Turn],
    *,
    prompt: Turn | None,
    dialect: Dialect,
    count: Callable[[str], int],
    think_open: bool | None = None,
    cut: StopReason | None = None,
) -> Built:
    """Return the segments of a rollout, with what our protocol says about them.

    A text of the environment is information if it shows results and the turn before it is a
    search by our protocol; any other one is a notice. What the policy wrote itself, an invented
    `<information>` block included, is never information. The opening `<think>` of a turn is
    required unless the text before the turn ends with an open one.

    Args:
        turns: policy and environment in order, without the prompt.
        prompt: the environment's opening, if the dump has it.
        dialect: how the policy writes its actions.
        count: length of a text whose turn does not tell its own.
        think_open: whether the prompt ends with an open `<think>`; `None`: look at `prompt`.
        cut: a limit ended the rollout: a last turn without an action is `truncated` instead of
            `invalid`, and this is the reason to stop unless the policy answered.
    """
    segments: list[Segment] = []
    if prompt is not None:
        segments.append(_segment(prompt, Source.ENVIRONMENT, Kind.PROMPT, count))
        if think_open is None:
            think_open = prompt.text.rstrip().endswith(THINK_OPEN)
    think_open = bool(think_open)
    opened = [at == 0 and think_open for at in range(len(turns))]
    last_policy = max((at for at, turn in enumerate(turns) if turn.policy), default=-1)
    format_ok = last_policy >= 0
    for at, turn in enumerate(turns):
        if not turn.policy:
            segments.append(_environment(turn, segments, count))
            if at + 1 < len(turns):
                opened[at + 1] = turn.text.rstrip().endswith(THINK_OPEN)
            continue
        ends = at == len(turns) - 1
        shown = not ends and not turns[at + 1].policy and _shows(turns[at + 1])
        segments.append(_policy(turn, dialect, count, shown=shown, cut=ends and cut is not None))
        format_ok = format_ok and well_formed(
            turn.text, dialect, think_open=opened[at], last=at == last_policy
        )
    return Built(tuple(segments), format_ok, _stop_reason(segments, dialect, cut), think_open)


def _shows(turn: Turn) -> bool:
    return turn.result or is_result(turn.text)


def _policy(
    turn: Turn, dialect: Dialect, count: Callable[[str], int], *, shown: bool, cut: bool
) -> Segment:
    action = act(turn.text, dialect)
    query = None
    if action is None:
        kind = Kind.TRUNCATED if cut else Kind.INVALID
    elif action.kind is ActionKind.ANSWER:
        kind = Kind.ANSWER
    elif action.content or shown:
        kind, query = Kind.SEARCH, action.content
    else:  # an empty query is no action, unless the environment of the dump answered it
        kind = Kind.INVALID
    invented = turn.text.count(INFORMATION_OPEN) + turn.text.count(RESPONSE_OPEN)
    extra = {"invented_information": invented} if invented else {}
    return _segment(turn, Source.POLICY, kind, count, query=query, extra=extra)


def _environment(turn: Turn, before: Sequence[Segment], count: Callable[[str], int]) -> Segment:
    if _shows(turn) and before and before[-1].kind is Kind.SEARCH:
        documents = shown_documents(turn.text)
        return _segment(turn, Source.ENVIRONMENT, Kind.INFORMATION, count, documents=documents)
    error = "invalid action" if "action is invalid" in turn.text else None
    return _segment(turn, Source.ENVIRONMENT, Kind.NOTICE, count, error=error)


def _segment(
    turn: Turn,
    source: Source,
    kind: Kind,
    count: Callable[[str], int],
    *,
    extra: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Segment:
    return Segment(
        source=source,
        kind=kind,
        text=turn.text,
        n_tokens=count(turn.text) if turn.n_tokens is None else turn.n_tokens,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        metadata={**turn.metadata, **(extra or {})},
        **fields,
    )


def _stop_reason(
    segments: Sequence[Segment], dialect: Dialect, cut: StopReason | None
) -> StopReason:
    last = segments[-1] if segments else None
    if last is None or last.kind in (Kind.PROMPT, Kind.NOTICE, Kind.INVALID):
        return StopReason.INVALID_ACTION
    if last.kind is Kind.INFORMATION:
        return cut or StopReason.CONTEXT_LIMIT
    if last.kind is Kind.ANSWER:
        return StopReason.ANSWERED
    if last.kind is Kind.SEARCH:
        # By our protocol the first action counts, but an environment that reads on to the answer
        # ended the episode there.
        action = act(last.text, dialect)
        if action is not None and has_answer(last.text[action.end :]):
            return StopReason.ANSWERED
        return cut or StopReason.SEARCH_LIMIT
    return cut or StopReason.TOKEN_LIMIT
