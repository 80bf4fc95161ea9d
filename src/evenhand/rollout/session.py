"""Batched decoding of rows that go through several turns.

Rows sit in slots of one cache; those that decode are slots `0 .. n - 1`. A call of `generate`

1. takes up the turns it was given and moves the rows that decode to the front,
2. encodes what is new of each context (documents after a search; equal contexts, such as prompts or
   the same query after the same prompt, once for all the rows that have them, and a common
   beginning of different prompts once for all of them),
3. decodes until enough rows have finished (`rejoin`), and returns those.

Until then a finished row stays where it is and computes a token that nobody reads: at a share of
`rejoin` that is cheaper than moving rows. All of this depends on tokens only, never on time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.core.errors import ConfigError, DataError, require
from evenhand.rollout.choose import choose
from evenhand.rollout.draws import Draws
from evenhand.rollout.model import CachedModel
from evenhand.rollout.policy import (
    RowKey,
    SampledTurn,
    Sampling,
    Stop,
    TurnRequest,
    check_request,
)
from evenhand.rollout.stops import WINDOW, StopTags

torch: Any = require("torch", "train", "the transformers back end")

Tensor = Any
IntArray = NDArray[np.int64]

AdjustLogits = Callable[[Tensor, Sequence[RowKey | None], IntArray], Tensor]
"""`adjust(logits, keys, places)` returns new logits `[n, V]` for the rows `keys` and the places
`[n]` of the tokens to be drawn. A key is `None` where nobody will read the result."""

COMPACT = 0.25
"""Finished rows leave the batch when they make up this share of it."""
SHARED = 16
"""A common beginning of different prompts is encoded once if it has this many tokens."""
AHEAD = 64
"""Places that the cache keeps beyond the longest row."""


@dataclass(slots=True, eq=False)
class _Row:
    """A row between and during turns.

    Attributes:
        context: ids of the context of the current turn.
        held: how many places of the cache are right for `context` and what was sampled after it.
        tokens, logprobs: what was sampled in the current turn; the last one is not in the cache.
        decodes: whether the turn goes on.
    """

    key: RowKey
    slot: int
    order: int = 0
    context: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    held: int = 0
    max_tokens: int = 0
    tags: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None
    decodes: bool = False

    def take_up(self, turn: TurnRequest, order: int) -> None:
        context = np.asarray(turn.context_ids, dtype=np.int64)
        known = np.concatenate([self.context, np.array(self.tokens, dtype=np.int64)])[: self.held]
        # At least one token is encoded, because the next one is drawn from its logits.
        most = min(len(known), len(context) - 1)
        differs = np.flatnonzero(known[:most] != context[:most])
        self.held = int(differs[0]) if len(differs) else most
        self.context, self.order, self.decodes = context, order, True
        self.max_tokens, self.tags = turn.max_tokens, turn.stop_tags
        self.tokens, self.logprobs, self.stop = [], [], None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens `start .. end - 1` of the context of a row, to be encoded."""

    row: _Row
    start: int
    end: int


class CachedSession:
    """A `Session` over a `CachedModel`; made by `TransformersPolicy.session`."""

    def __init__(
        self,
        model: CachedModel,
        sampling: Sampling,
        *,
        stop_tags: Callable[[tuple[str, ...]], StopTags],
        stop_tokens: NDArray[np.bool_],
        max_context: int | None,
        rejoin: float,
        chunk_tokens: int,
        adjust_logits: AdjustLogits | None = None,
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._draws = Draws(sampling.seed)
        self._stop_tags = stop_tags
        self._stop_tokens = stop_tokens
        self._max_context = max_context
        self._rejoin = rejoin
        self._chunk_tokens = chunk_tokens
        self._adjust_logits = adjust_logits
        self._rows: dict[RowKey, _Row] = {}
        self._slots: list[_Row | None] = []
        self._taken = 0

    # --- the session ------------------------------------------------------------------------------

    def generate(self, turns: Sequence[TurnRequest]) -> list[SampledTurn]:
        """Take up turns and decode to the next fixed point; see `Session.generate`."""
        joining = [self._take_up(turn) for turn in turns]
        decoding = sum(row.decodes for row in self._rows.values())
        if not decoding:
            return []
        quota = max(1, math.ceil(self._rejoin * decoding))
        longest = max((len(row.context) for row in joining), default=0)
        self._reserve(longest + AHEAD)
        self._arrange()
        finished = self._encode(joining)
        while len(finished) < quota and any(row.decodes for row in self._rows.values()):
            self._arrange()
            finished += self._decode(quota - len(finished))
        _check_scores(finished)
        return [
            SampledTurn(row.key, np.array(row.tokens, dtype=np.int64), np.array(row.logprobs), stop)
            for row in sorted(finished, key=lambda row: row.order)
            if (stop := row.stop) is not None
        ]

    def release(self, keys: Iterable[RowKey]) -> None:
        """Free the places of rows that have ended."""
        for key in keys:
            row = self._rows.pop(key, None)
            if row is not None:
                self._slots[row.slot] = None

    # --- rows and slots ---------------------------------------------------------------------------

    def _take_up(self, turn: TurnRequest) -> _Row:
        check_request(turn, self._max_context)
        largest = max(turn.context_ids)
        if largest >= self._model.vocabulary:
            raise DataError(
                f"the context of row {tuple(turn.key)} holds token {largest} and the model knows "
                f"{self._model.vocabulary}; use the tokenizer that belongs to the model"
            )
        row = self._rows.get(turn.key)
        if row is None:
            slot = self._slots.index(None) if None in self._slots else len(self._slots)
            row = self._rows[turn.key] = _Row(turn.key, slot)
            self._slots[slot : slot + 1] = [row]
            self._draws.place(slot, turn.key)
        elif row.decodes:
            raise ConfigError(f"row {tuple(turn.key)} got a second turn before its first was done")
        self._taken += 1
        row.take_up(turn, self._taken)
        return row

    def _reserve(self, length: int) -> None:
        cache = self._model.cache
        if len(self._slots) > cache.rows or length > cache.length:
            kept = np.array([row.slot for row in self._rows.values()], dtype=np.int64)
            cache.reserve(len(self._slots), length, kept)

    def _arrange(self) -> None:
        """Move the rows that decode to the front, with as few moves as possible."""
        n = sum(row.decodes for row in self._rows.values())
        holes = [at for at in range(n) if (row := self._slots[at]) is None or not row.decodes]
        movers = [row for row in self._slots[n:] if row is not None and row.decodes]
        source, target, length = [], [], 0
        for hole, row in zip(holes, movers, strict=True):
            other, behind = self._slots[hole], row.slot
            source.append(behind)
            target.append(hole)
            length = max(length, row.held)
            self._place(row, hole)
            self._slots[behind] = None
            if other is not None:
                source.append(hole)
                target.append(behind)
                length = max(length, other.held)
                self._place(other, behind)
        self._model.cache.copy(np.array(source, dtype=np.int64), np.array(target), length)

    def _place(self, row: _Row, slot: int) -> None:
        row.slot = slot
        self._slots[slot] = row
        self._draws.place(slot, row.key)

    # --- contexts ---------------------------------------------------------------------------------

    def _encode(self, joining: list[_Row]) -> list[_Row]:
        """Encode what is new of the contexts and draw the first token of each turn."""
        if not joining:
            return []
        leader = self._leaders(joining)
        leaders = [row for row in joining if leader[row.key] is row]
        self._share_beginning([row for row in leaders if row.held == 0])
        index = {row.key: at for at, row in enumerate(leaders)}
        logits = self._chunks([_Chunk(row, row.held, len(row.context)) for row in leaders])
        followers = [row for row in joining if leader[row.key] is not row]
        self._model.cache.extend(
            np.array([leader[row.key].slot for row in followers]),
            np.array([row.slot for row in followers]),
            np.array([row.held for row in followers]),
            np.array([len(row.context) for row in followers]),
        )
        for row in joining:
            row.held = len(row.context)
        rows = torch.tensor([index[leader[row.key].key] for row in joining])
        logits = logits[rows.to(logits.device)]
        tokens, logprobs = self._choose(
            logits,
            np.array([row.slot for row in joining]),
            np.array([len(row.context) for row in joining]),
        )
        for row, token, logprob in zip(joining, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.stop = self._stop_of(row, row.tokens)
            row.decodes = row.stop is None
        return [row for row in joining if not row.decodes]

    def _leaders(self, joining: list[_Row]) -> dict[RowKey, _Row]:
        """Map each row to the one that encodes its context: the first that has the same."""
        first: dict[bytes, _Row] = {}
        return {row.key: first.setdefault(row.context.tobytes(), row) for row in joining}

    def _share_beginning(self, rows: list[_Row]) -> None:
        """Encode the common beginning of different prompts once."""
        if len(rows) < 2:
            return
        shortest = min(len(row.context) for row in rows) - 1
        stacked = np.stack([row.context[:shortest] for row in rows])
        differs = np.flatnonzero((stacked != stacked[0]).any(axis=0))
        common = int(differs[0]) if len(differs) else shortest
        if common < SHARED:
            return
        self._chunks([_Chunk(rows[0], 0, common)])
        others = np.array([row.slot for row in rows[1:]])
        self._model.cache.copy(np.full(len(others), rows[0].slot), others, common)
        for row in rows:
            row.held = common

    def _chunks(self, chunks: list[_Chunk]) -> Tensor:
        """Run chunks through the model; return the logits `[len(chunks), V]` after each."""
        most = self._chunk_tokens
        found: list[Tensor] = [None] * len(chunks)
        order = sorted(range(len(chunks)), key=lambda at: chunks[at].end - chunks[at].start)
        batch: list[int] = []
        for at in order:
            chunk = chunks[at]
            while chunk.end - chunk.start > most:
                self._forward([_Chunk(chunk.row, chunk.start, chunk.start + most)])
                chunk = _Chunk(chunk.row, chunk.start + most, chunk.end)
            chunks[at] = chunk
        for at in order:
            width = max(chunks[other].end - chunks[other].start for other in (*batch, at))
            if batch and width * (len(batch) + 1) > most:
                self._run(chunks, batch, found)
                batch = []
            batch.append(at)
        self._run(chunks, batch, found)
        return torch.stack(found)

    def _run(self, chunks: list[_Chunk], batch: list[int], found: list[Tensor]) -> None:
        for at, logits in zip(batch, self._forward([chunks[at] for at in batch]), strict=True):
            found[at] = logits

    def _forward(self, chunks: list[_Chunk]) -> Tensor:
        width = max(chunk.end - chunk.start for chunk in chunks)
        ids = np.zeros((len(chunks), width), dtype=np.int64)
        positions = np.full((len(chunks), width), -1, dtype=np.int64)
        for at, chunk in enumerate(chunks):
            start = width - (chunk.end - chunk.start)
            ids[at, start:] = chunk.row.context[chunk.start : chunk.end]
            positions[at, start:] = np.arange(chunk.start, chunk.end)
        return self._model.forward(ids, positions, np.array([chunk.row.slot for chunk in chunks]))

    # --- tokens -----------------------------------------------------------------------------------

    def _decode(self, quota: int) -> list[_Row]:
        """Decode the front rows until `quota` or a share of `COMPACT` of them have finished."""
        rows = [row for row in self._slots if row is not None and row.decodes]
        n, slots = len(rows), np.arange(len(rows))
        enough = min(quota, max(1, math.ceil(COMPACT * n)))
        position = np.array([row.held for row in rows])
        left = np.array([row.max_tokens - len(row.tokens) for row in rows])
        pending = torch.tensor([row.tokens[-1] for row in rows], device=self._model.device)
        may_complete = self._may_complete(rows)
        length = np.zeros(n, dtype=np.int64)
        done = np.zeros(n, dtype=np.bool_)
        drawn: list[IntArray] = []
        scores: list[Tensor] = []
        while int(done.sum()) < enough:
            self._reserve(int(position.max()) + 1)
            logits = self._model.forward(pending[:, None], position[:, None], slots)
            pending, logprobs = self._choose(logits, slots, position + 1)
            tokens: IntArray = pending.cpu().numpy()
            drawn.append(tokens)
            scores.append(logprobs)
            live = ~done
            position[live] += 1
            length[live] += 1
            may_end = live & (may_complete[tokens] | self._stop_tokens[tokens] | (length == left))
            for at in np.flatnonzero(may_end).tolist():
                row, column = rows[at], [int(step[at]) for step in drawn[-WINDOW:]]
                row.stop = self._stop_of(row, row.tokens + column, int(length[at]))
                done[at] = row.stop is not None
        table, score = np.stack(drawn), torch.stack(scores).cpu().numpy()
        for at, row in enumerate(rows):
            row.tokens += table[: length[at], at].tolist()
            row.logprobs += score[: length[at], at].tolist()
            row.held, row.decodes = int(position[at]), not done[at]
        return [row for row in rows if not row.decodes]

    def _choose(
        self, logits: Tensor, slots: IntArray, positions: IntArray
    ) -> tuple[Tensor, Tensor]:
        if self._adjust_logits is not None:
            rows = [self._slots[slot] for slot in slots]
            keys = [row.key if row is not None and row.stop is None else None for row in rows]
            logits = self._adjust_logits(logits, keys, positions)
        if self._sampling.temperature == 0:
            return choose(logits, None, self._sampling)
        uniforms = torch.from_numpy(self._draws.at(slots, positions)).float()
        return choose(logits, uniforms.to(logits.device), self._sampling)

    def _may_complete(self, rows: list[_Row]) -> NDArray[np.bool_]:
        tables = [self._stop_tags(tags).may_complete for tags in {row.tags for row in rows}]
        return tables[0] if len(tables) == 1 else np.logical_or.reduce(tables)

    def _stop_of(self, row: _Row, tail: list[int], more: int = 0) -> Stop | None:
        """Why the turn of a row ends with the last token of `tail`, `more` tokens on; or `None`."""
        if self._stop_tokens[tail[-1]]:
            return Stop.EOS
        tags = self._stop_tags(row.tags)
        if tags.may_complete[tail[-1]] and tags.completed(tail[-WINDOW:]):
            return Stop.TAG
        return Stop.LENGTH if len(row.tokens) + more >= row.max_tokens else None


def _check_scores(rows: list[_Row]) -> None:
    for row in rows:
        if not np.isfinite(row.logprobs).all():
            raise DataError(
                f"the model gave log-probabilities that are not finite for row {tuple(row.key)}; "
                "its weights have diverged or are damaged: go back to an earlier checkpoint"
            )
