"""NeMo-RL's training data: `train_data_step{step}.jsonl`.

Each record is a batch of one rollout: `content` (the texts of its messages in order),
`token_loss_mask` (1 on tokens of the policy), `token_ids`, `generation_logprobs`, `rewards`,
`input_lengths` (arrays are padded beyond it) and `sample_loss_mask`. The author of each message is
known: the k-th message holds the k-th run of equal values of the mask. There are no group ids and
no accepted answers; rollouts of one question share the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.convert import fields
from evenhand.convert.context import Context, Rollout, assemble
from evenhand.convert.dialects import act, recognise_dialect
from evenhand.convert.documents import RESPONSE_OPEN
from evenhand.convert.flat import question_of
from evenhand.convert.rows import Row
from evenhand.convert.segments import Turn, build
from evenhand.core.arrays import IntArray, mask_runs
from evenhand.core.errors import DataError
from evenhand.trajectory import StopReason, Trajectory
from evenhand.trajectory.protocol import INFORMATION_OPEN

_ARRAYS = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs", "advantages")
_USED = ("content", "rewards", "input_lengths", "sample_loss_mask", *_ARRAYS)
_CHAT_START = "<|im_start|>"


def is_nemo_rl(data: Mapping[str, Any]) -> bool:
    """Whether a record has the keys of NeMo-RL's training data."""
    return {"content", "token_loss_mask"} <= data.keys()


def read_nemo_rl(rows: Iterator[Row], context: Context) -> Iterator[Trajectory]:
    """Yield a trajectory for each record; a group shares step (of the file's name) and prompt."""
    for row in rows:
        yield _trajectory(row, context)


def _trajectory(row: Row, context: Context) -> Trajectory:
    data, where = row.data, row.where
    mask = _array(data, "token_loss_mask", where)
    if mask is None:
        raise DataError(f"{where}, field token_loss_mask: expected a list, got null")
    length = _length(data, len(mask), where)
    mask = mask[:length] != 0
    edges = _edges(mask)
    policy = [bool(mask[start]) for start in edges[:-1]]
    contents, shown_all = _contents(data, policy, where)
    ids = _array(data, "token_ids", where, length)
    logprobs = _array(data, "generation_logprobs", where, length, kind=np.float64)
    turns = [
        _turn(text, is_policy, slice(start, stop), ids, logprobs)
        for text, is_policy, start, stop in zip(
            contents, policy, edges[:-1], edges[1:], strict=True
        )
    ]
    prompt = None if policy[0] else turns.pop(0)
    prompt_text = prompt.text if prompt else ""
    dialect = recognise_dialect(prompt_text, "".join(turn.text for turn in turns))
    cut = _cut(turns, ended=_ended(prompt, turns), length=length, shown_all=shown_all)
    if cut is not None and turns and not turns[-1].policy:
        turns[-1] = _marked_cut(turns[-1], cut)
    if turns and turns[-1].policy and cut is not None and act(turns[-1].text, dialect) is not None:
        cut = cut if cut is StopReason.CONTEXT_LIMIT else None
    built = build(turns, prompt=prompt, dialect=dialect, count=context.count, cut=cut)
    step = row.step_from_file(r"step_?([0-9]{1,12})")
    reward = _single(data.get("rewards"), where, "rewards")
    rollout = Rollout(
        row=row,
        group=fields.group_name(step, prompt_text),
        question=question_of(prompt_text),
        golden_answers=None,
        reward=fields.reward(reward, where, "rewards"),
        step=step,
        metadata=_metadata(data, mask, where),
    )
    return assemble(rollout, built, context, counted=False)


def _edges(mask: NDArray[np.bool_]) -> list[int]:
    """Return the starts of the runs of equal values and the end of the last one."""
    runs = mask_runs(mask)
    edges = np.unique(np.concatenate([[0, len(mask)], runs.start, runs.stop]))
    return [int(edge) for edge in edges]


def _contents(
    data: Mapping[str, Any], policy: Sequence[bool], where: str
) -> tuple[list[str], bool]:
    """Return one text for each run of the mask, and whether every text has tokens.

    An empty text has no tokens: at the end it is dropped, between two texts it parts messages of
    one author. Texts that are too many are the first ones (a system and a user message make one
    prompt), except for a last block of results for which there was no room.
    """
    texts = data.get("content")
    if isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], list):
        texts = texts[0]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{where}, field content: expected one list of texts, got {fields.describe(texts)}"
        )
    merged: list[str] = []
    joined = False
    for text in texts:
        if not text:
            joined = bool(merged)
        elif joined:
            merged[-1] += text
            joined = False
        else:
            merged.append(text)
    shown_all = True
    if len(merged) > len(policy) and policy[-1] and _starts_results(merged[-1]):
        merged.pop()
        shown_all = False
    surplus = len(merged) - len(policy)
    if surplus > 0 and not policy[0]:
        merged[: surplus + 1] = ["".join(merged[: surplus + 1])]
    if len(merged) != len(policy):
        raise DataError(
            f"{where}, field content: holds {len(merged)} texts and token_loss_mask "
            f"{len(policy)} runs; they must be parallel"
        )
    return merged, shown_all


def _starts_results(text: str) -> bool:
    for marker in ("<|im_end|>", "<|im_start|>user"):
        text = text.lstrip().removeprefix(marker)
    return text.lstrip().startswith((INFORMATION_OPEN, RESPONSE_OPEN))


def _turn(
    text: str,
    policy: bool,
    tokens: slice,
    ids: IntArray | None,
    logprobs: NDArray[np.float64] | None,
) -> Turn:
    # The sampler says nothing about the environment's tokens; the dump holds zeros there.
    own = logprobs[tokens] if policy and logprobs is not None else None
    extra = {}
    if own is not None and not np.isfinite(own).all():
        own, extra = None, {"logprobs": "left out: not finite"}
    return Turn(
        policy=policy,
        text=text,
        n_tokens=tokens.stop - tokens.start,
        token_ids=None if ids is None else ids[tokens],
        logprobs=own,
        metadata=extra,
    )


def _ended(prompt: Turn | None, turns: Sequence[Turn]) -> bool | None:
    """Whether the last turn of the policy holds the end-of-turn token; `None` if it is unknown.

    Its id is learned from a ChatML prompt: the first token opens a message, and the end of the
    message before stands one or two tokens ahead of the last token of that kind.
    """
    if prompt is None or prompt.token_ids is None or not prompt.text.startswith(_CHAT_START):
        return None
    if not turns or turns[-1].token_ids is None:
        return None
    ids = prompt.token_ids
    start = ids[0]
    opens = np.flatnonzero(ids == start)
    if len(opens) < 2 or opens[-1] < 2:
        return None
    end = ids[opens[-1] - 2]
    return bool((turns[-1].token_ids == end).any())


def _cut(
    turns: Sequence[Turn], *, ended: bool | None, length: int, shown_all: bool
) -> StopReason | None:
    """Return the limit that ended a rollout, as far as its record shows one.

    The dump does not name its limits. A rollout whose length is a round number (a multiple of 256
    or 500) filled its context; else a turn without an end-of-turn token used up its own tokens, and
    results that nothing follows were the last turn allowed.
    """
    full = length % 256 == 0 or length % 500 == 0
    if not shown_all:
        return StopReason.CONTEXT_LIMIT
    if turns and not turns[-1].policy:
        return StopReason.CONTEXT_LIMIT if full else StopReason.SEARCH_LIMIT
    if ended is None:
        return StopReason.CONTEXT_LIMIT if full else None
    if ended:
        return None
    return StopReason.CONTEXT_LIMIT if full else StopReason.TOKEN_LIMIT


def _marked_cut(turn: Turn, cut: StopReason) -> Turn:
    if cut is not StopReason.CONTEXT_LIMIT:
        return turn
    return Turn(
        policy=False,
        text=turn.text,
        n_tokens=turn.n_tokens,
        token_ids=turn.token_ids,
        metadata={**turn.metadata, "cut": True},
    )


def _metadata(data: Mapping[str, Any], mask: NDArray[np.bool_], where: str) -> dict[str, Any]:
    metadata = fields.leftovers(data, _USED)
    weight = fields.number(
        _single(data.get("sample_loss_mask"), where, "sample_loss_mask"), where, "sample_loss_mask"
    )
    if weight is not None and weight != 1:
        metadata["sample_loss_mask"] = weight
    advantages = _array(data, "advantages", where, len(mask), kind=np.float64)
    own = advantages[mask] if advantages is not None else np.zeros(0)
    if len(own) and np.isfinite(own).all() and (own == own[0]).all():
        metadata["advantage"] = float(own[0])
    return metadata


def _length(data: Mapping[str, Any], available: int, where: str) -> int:
    name = "input_lengths"
    value = fields.step(_single(data.get(name), where, name), where, name)
    length = available if value is None else value
    if not 0 < length <= available:
        raise DataError(
            f"{where}, field {name}: got {length}, and token_loss_mask has {available} entries"
        )
    return length


def _single(value: Any, where: str, name: str) -> Any:
    """Return the only entry of a batch of one."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise DataError(
            f"{where}, field {name}: expected a batch of one rollout, got {len(value)} entries"
        )
    return value[0]


def _array(
    data: Mapping[str, Any],
    name: str,
    where: str,
    length: int | None = None,
    *,
    kind: type[np.generic] = np.int64,
) -> NDArray[Any] | None:
    """Return an array of a batch of one, cut to `length`; `None` if the dump has none."""
    value = data.get(name)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if value is None:
        return None
    try:
        array = np.asarray(value)
        good = array.ndim == 1 and (array.dtype.kind in "iuf" or array.size == 0)
        with np.errstate(invalid="ignore"):  # nan has no integer: the comparison finds it
            result = array.astype(kind) if good else array
        good = good and (kind is np.float64 or bool((result == array).all()))
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise DataError(f"{where}, field {name}: expected one list of numbers")
    if length is not None and len(result) < length:
        raise DataError(
            f"{where}, field {name}: has {len(result)} entries and the rollout {length} tokens"
        )
    return result[:length]
