"""Micro-batches in which a token that several rows share is computed once.

Rollouts of a question begin alike: the prompt, and often the first query and what it found. Causal
attention makes whatever is computed for a token a function of the tokens up to it, so equal
beginnings have equal hidden states, and their gradients add up. A packed batch holds each of these
tokens once, in one line without padding; only attention sees rows. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenhand.core.arrays import IntArray
from evenhand.training.batching import Row, Targets, joined

WASTE = 0.3
"""Share of the products of an attention that padding may make up."""
FEW = 4096
"""So many products of padding cost less than one more attention."""
MASKED = 1 << 21
"""Most entries of one attention mask."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The new tokens of some rows, which attend to all tokens of their rows.

    Attributes:
        queries: `[B, S]` places of the tokens of each row that attend: the new ones at least;
            padded on the right with its last.
        keys: `[B, L]` places of all tokens of each row, padded likewise.
        seen: `[B]` how many tokens of a row come before those. All 0: plain causal attention,
            `L == S`.
    """

    queries: IntArray
    keys: IntArray
    seen: IntArray


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows that were laid over each other.

    Attributes:
        ids: `[N]` different tokens of the rows.
        positions: `[N]` their positions, from 0.
        attentions: each of the `N` tokens is a query at least once.
        outputs: `[N]` where it is, among the queries of all attentions, one after the other, row
            by row, padding included.
        predictors: `[p]` places of the tokens that predict a target; equal pairs of predictor and
            target stand once.
        predicted: `[p]` ids of these targets.
        pairs: `[n]` pair of each target.
        targets: the `n` targets of all rows, row by row.
        members: the rows.
    """

    ids: IntArray
    positions: IntArray
    attentions: tuple[Attention, ...]
    outputs: IntArray
    predictors: IntArray
    predicted: IntArray
    pairs: IntArray
    targets: Targets
    members: tuple[Row, ...]


def packed_batches(rows: Sequence[Row], max_tokens: int) -> list[PackedBatch]:
    """Cut rows into packed batches whose rows have at most `max_tokens` tokens, shared ones too.

    Rows are sorted by their tokens, so that those that begin alike come together. A row longer than
    the budget goes alone. The cut is the same in every run.
    """
    # Big-endian bytes sort as the ids do.
    order = sorted(rows, key=lambda row: row.ids.astype(">i8").tobytes())
    result: list[PackedBatch] = []
    current: list[Row] = []
    held = 0
    for row in order:
        if current and held + len(row.ids) > max_tokens:
            result.append(packed(current))
            current, held = [], 0
        current.append(row)
        held += len(row.ids)
    if current:
        result.append(packed(current))
    return result


def packed(rows: Sequence[Row]) -> PackedBatch:
    """Lay rows, sorted by their tokens, over each other."""
    ids: list[IntArray] = []
    positions: list[IntArray] = []
    paths: list[IntArray] = []
    seen: list[int] = []
    count = 0
    for at, row in enumerate(rows):
        shared = _common(row.ids, rows[at - 1].ids) if at else 0
        new = np.arange(count, count + len(row.ids) - shared)
        paths.append(np.concatenate([paths[-1][:shared], new]) if at else new)
        ids.append(row.ids[shared:])
        positions.append(np.arange(shared, len(row.ids)))
        seen.append(shared)
        count += len(new)
    targets = joined([row.targets for row in rows])
    predictors = np.concatenate(
        [path[row.targets.position - 1] for row, path in zip(rows, paths, strict=True)]
    )
    both, pairs = np.unique(np.stack([predictors, targets.ids]), axis=1, return_inverse=True)
    attentions = _attentions(paths, seen)
    outputs = np.zeros(count, dtype=np.int64)
    flat = np.concatenate([group.queries.ravel() for group in attentions])
    # A token may be a query several times, with the same result: the first one counts.
    outputs[flat[::-1]] = np.arange(len(flat))[::-1]
    return PackedBatch(
        ids=np.concatenate(ids),
        positions=np.concatenate(positions),
        attentions=tuple(attentions),
        outputs=outputs,
        predictors=both[0],
        predicted=both[1],
        pairs=pairs.reshape(-1),
        targets=targets,
        members=tuple(rows),
    )


def _common(first: IntArray, second: IntArray) -> int:
    """How many tokens two rows have in common at their beginning."""
    n = min(len(first), len(second))
    differs = np.flatnonzero(first[:n] != second[:n])
    return int(differs[0]) if len(differs) else n


def _attentions(paths: Sequence[IntArray], seen: Sequence[int]) -> list[Attention]:
    """Group rows of similar size, those that need no mask apart."""
    own = [len(path) - before for path, before in zip(paths, seen, strict=True)]
    work = [n * len(path) for n, path in zip(own, paths, strict=True)]
    result: list[Attention] = []
    for is_causal in (True, False):
        members = [at for at in range(len(paths)) if own[at] and (seen[at] == 0) is is_causal]
        members.sort(key=lambda at: (-work[at], -own[at]))
        group: list[int] = []
        wide = long = real = 0
        for at in members:
            wide, long = max(wide, own[at]), max(long, len(paths[at]))
            real += work[at]
            size = (len(group) + 1) * wide * long
            if group and (size - real > max(WASTE * size, FEW) or size > MASKED):
                result.append(_attention(group, paths, seen))
                group, wide, long, real = [], own[at], len(paths[at]), work[at]
            group.append(at)
        if group:
            result.append(_attention(group, paths, seen))
    return result


def _attention(group: Sequence[int], paths: Sequence[IntArray], seen: Sequence[int]) -> Attention:
    return Attention(
        queries=_padded([paths[at][seen[at] :] for at in group]),
        keys=_padded([paths[at] for at in group]),
        seen=np.array([seen[at] for at in group]),
    )


def _padded(lines: Sequence[IntArray]) -> IntArray:
    width = max(map(len, lines))
    return np.stack([np.pad(line, (0, width - len(line)), mode="edge") for line in lines])
