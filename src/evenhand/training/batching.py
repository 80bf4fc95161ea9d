"""From credited trajectories to rows of tokens, and from rows to micro-batches.

A row is one trajectory cut after its last trained token. Only tokens that the policy sampled are
trained: prompts, retrieved text and notices have no entry in any array of targets, so no gradient
can reach the positions that predict them. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from evenhand.core.arrays import BoolArray, FloatArray, IntArray
from evenhand.core.errors import ConfigError, DataError
from evenhand.trajectory import StopReason, Trajectory

CUT = frozenset({StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT})
"""Stop reasons of a rollout that a limit cut (`mask_truncated`)."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens to train: parallel arrays of length `n`.

    Attributes:
        position: `[n]` place of the token in its sequence, from 1: position - 1 predicts it.
        ids: `[n]` token ids.
        advantage: `[n]` credit.
        sampled: `[n]` log-probabilities of the sampler.
        old: `[n]` log-probabilities that the ratio of the loss is taken to.
        reference: `[n]` log-probabilities of the reference policy; read only by the KL term.
        weight: `[n]` weight of the token in the loss, all denominators included.
    """

    position: IntArray
    ids: IntArray
    advantage: FloatArray
    sampled: FloatArray
    old: FloatArray
    reference: FloatArray
    weight: FloatArray

    def __len__(self) -> int:
        return len(self.position)

    def take(self, kept: BoolArray) -> Targets:
        """Return the tokens for which `kept` holds."""
        return Targets(*(getattr(self, item.name)[kept] for item in fields(self)))


def joined(parts: Sequence[Targets]) -> Targets:
    """Return the targets of several rows, one after the other."""
    return Targets(
        *(np.concatenate([getattr(p, item.name) for p in parts]) for item in fields(Targets))
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory as the trainer sees it.

    Attributes:
        index: its place in the batch of trajectories.
        group: label of its group.
        ids: `[T]` token ids before the last trained token (that one is a target only).
        targets: the tokens to train.
        policy_tokens: how many tokens the policy sampled, trained or not.
    """

    index: int
    group: str
    ids: IntArray
    targets: Targets
    policy_tokens: int

    def trained_on(self, targets: Targets) -> Row:
        """Return the row with these targets, cut after the last of them."""
        return replace(self, targets=targets, ids=self.ids[: int(targets.position[-1])])


def rows_of(trajectories: Sequence[Trajectory], *, mask_truncated: bool = False) -> list[Row]:
    """Return a row for each credited trajectory that takes part in the loss, in order.

    Left out: unscored trajectories, those without a policy token, and with `mask_truncated` those
    that a limit cut. Weights are 1 until `weighted`; `old` is the sampler's.

    Raises:
        DataError: token ids or log-probabilities were not recorded, credit is missing, or a row
            begins with a token of the policy (nothing predicts it).
    """
    rows = []
    for index, trajectory in enumerate(trajectories):
        if trajectory.reward is None or (mask_truncated and trajectory.stop_reason in CUT):
            continue
        row = _row(index, trajectory)
        if row is not None:
            rows.append(row)
    return rows


def _row(index: int, trajectory: Trajectory) -> Row | None:
    ids: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    advantages: list[FloatArray] = []
    logprobs: list[FloatArray] = []
    at = 0
    for number, segment in enumerate(trajectory.segments):
        where = f"trajectory {trajectory.id!r}, segment {number}"
        if segment.token_ids is None:
            raise DataError(f"{where} has no token_ids; what is trained are the sampled ids")
        ids.append(segment.token_ids)
        if segment.is_policy and segment.n_tokens:
            if segment.advantage is None:
                raise DataError(f"{where} has no advantage; run the estimator first")
            if segment.logprobs is None:
                raise DataError(f"{where} has no logprobs of the sampler; record them")
            places.append(np.arange(at, at + segment.n_tokens))
            advantages.append(np.full(segment.n_tokens, segment.advantage))
            logprobs.append(segment.logprobs)
        at += segment.n_tokens
    if not places:
        return None
    sequence, position = np.concatenate(ids), np.concatenate(places)
    if position[0] == 0:
        raise DataError(
            f"trajectory {trajectory.id!r} begins with a token of the policy; nothing predicts it"
        )
    sampled = np.concatenate(logprobs)
    targets = Targets(
        position=position,
        ids=sequence[position],
        advantage=np.concatenate(advantages),
        sampled=sampled,
        old=sampled,
        reference=np.zeros(len(position)),
        weight=np.ones(len(position)),
    )
    return Row(index, trajectory.group, sequence[: int(position[-1])], targets, len(position))


def weighted(
    rows: Sequence[Row],
    aggregation: str,
    *,
    constant_length: int = 1,
    skip_uncredited: bool = False,
) -> list[Row]:
    """Give every token the weight that it has in the loss of one optimiser step.

    With `R` rows and `n_i` policy tokens in row `i`, a token of row `i` weighs

        token_mean      1 / sum_j n_j
        sequence_mean   1 / (R n_i)
        constant        1 / (R constant_length)

    The weights depend on the whole optimiser step and on nothing else, so the cut into
    micro-batches cannot change the loss.

    Args:
        rows: all rows of the optimiser step.
        aggregation: one of the three names.
        constant_length: of `constant`.
        skip_uncredited: drop tokens without credit afterwards, and rows that have none left; the
            denominators still count them. Right if no other term of the loss looks at them.

    Raises:
        ConfigError: unknown aggregation.
    """
    tokens = [row.policy_tokens for row in rows]
    if aggregation == "token_mean":
        weights = [1 / sum(tokens)] * len(rows) if rows else []
    elif aggregation == "sequence_mean":
        weights = [1 / (len(rows) * n) for n in tokens]
    elif aggregation == "constant":
        weights = [1 / (len(rows) * constant_length)] * len(rows)
    else:
        raise ConfigError(
            f"unknown aggregation {aggregation!r}; known: token_mean, sequence_mean, constant"
        )
    result = []
    for row, weight in zip(rows, weights, strict=True):
        targets = replace(row.targets, weight=np.full(len(row.targets), weight))
        if skip_uncredited:
            targets = targets.take(targets.advantage != 0)
        if len(targets):
            result.append(row.trained_on(targets))
    return result


def mini_batches(
    rows: Sequence[Row], parts: int, generator: np.random.Generator
) -> list[list[Row]]:
    """Divide rows into `parts` optimiser steps of whole groups, as even in groups as can be.

    One part keeps the order of the rows; more shuffle the groups. Parts without a row are left out.
    """
    if parts == 1:
        return [list(rows)] if rows else []
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    labels = list(groups)
    order = [labels[at] for at in generator.permutation(len(labels))]
    pieces = [order[at::parts] for at in range(parts)]
    return [[row for label in piece for row in groups[label]] for piece in pieces if piece]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`B` rows of similar length, padded on the right to `L` tokens.

    Padding needs no mask: attention is causal, so nothing that comes after a token changes it.

    Attributes:
        ids: `[B, L]` token ids; 0 where a row is shorter.
        row: `[n]` row of each target.
        targets: the `n` targets of all rows, row by row.
        members: the rows.
    """

    ids: IntArray
    row: IntArray
    targets: Targets
    members: tuple[Row, ...]

    @property
    def real_tokens(self) -> int:
        """Tokens that are no padding."""
        return sum(len(row.ids) for row in self.members)


def micro_batches(rows: Sequence[Row], max_tokens: int) -> list[MicroBatch]:
    """Cut rows into micro-batches of at most `max_tokens`, padding included, longest rows first.

    Sorting by length keeps padding near zero. A row longer than the budget goes alone. Equal
    lengths keep their order, so the cut is the same in every run.
    """
    result: list[MicroBatch] = []
    current: list[Row] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if current and (len(current) + 1) * len(current[0].ids) > max_tokens:
            result.append(_padded(current))
            current = []
        current.append(row)
    if current:
        result.append(_padded(current))
    return result


def _padded(rows: Sequence[Row]) -> MicroBatch:
    ids = np.zeros((len(rows), max(len(row.ids) for row in rows)), dtype=np.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids)] = row.ids
    return MicroBatch(
        ids=ids,
        row=np.repeat(np.arange(len(rows)), [len(row.targets) for row in rows]),
        targets=joined([row.targets for row in rows]),
        members=tuple(rows),
    )
