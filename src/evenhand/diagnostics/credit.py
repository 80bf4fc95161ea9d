"""What an assignment of credit does: which groups teach, who is punished, which side outweighs.

Masses are in tokens: `sum of n_tokens * |advantage|` over policy segments, the weight that a
segment has in a token-mean loss. Unscored trajectories carry none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evenhand.core.arrays import BoolArray, Dense, FloatArray, divide, extent, size, total
from evenhand.credit import CreditBatch
from evenhand.credit.bridge import POLICY_KIND_ORDER
from evenhand.credit.statistics import centre
from evenhand.diagnostics.intervals import Estimate, ratio, share
from evenhand.trajectory import Kind


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Groups by what outcome credit can learn from them.

    Attributes:
        effective: scored rewards differ.
        too_easy: two or more scored members, all with the same reward, at least the threshold.
        too_hard: the same below the threshold.
        lone: a single scored member.
        unscored: no scored member.
        single: groups of one rollout, scored or not (counted above too): wrong group ids make them.
    """

    effective: int
    too_easy: int
    too_hard: int
    lone: int
    unscored: int
    single: int = 0

    @property
    def has_wrong_ids(self) -> bool:
        """Whether every one of several groups holds a single rollout."""
        return self.single == self.total > 1

    @property
    def total(self) -> int:
        """All groups."""
        return self.effective + self.too_easy + self.too_hard + self.lone + self.unscored

    def __add__(self, other: GroupCounts) -> GroupCounts:
        return GroupCounts(
            self.effective + other.effective,
            self.too_easy + other.too_easy,
            self.too_hard + other.too_hard,
            self.lone + other.lone,
            self.unscored + other.unscored,
            self.single + other.single,
        )


def group_counts(batch: CreditBatch, *, threshold: float = 0.7) -> GroupCounts:
    """Count the groups of a batch; `threshold` is the reward that counts as a success."""
    groups = Dense(batch.group, len(batch.group_names))
    centred = centre(batch.rewards, groups)
    _, high = extent(batch.rewards, groups, ~np.isnan(batch.rewards))
    effective = centred.spread > 0
    flat = (centred.members > 1) & ~effective
    return GroupCounts(
        effective=int(effective.sum()),
        too_easy=int((flat & (high >= threshold)).sum()),
        too_hard=int((flat & (high < threshold)).sum()),
        lone=int((centred.members == 1).sum()),
        unscored=int((centred.members == 0).sum()),
        single=int((size(groups) == 1).sum()),
    )


@dataclass(frozen=True, slots=True)
class Mass:
    """Token-weighted credit of one kind of segment.

    Attributes:
        segments: how many segments.
        tokens: their tokens.
        positive: sum of `n_tokens * advantage` where it is positive.
        negative: sum of `n_tokens * |advantage|` where it is negative.
    """

    segments: int = 0
    tokens: int = 0
    positive: float = 0.0
    negative: float = 0.0

    def __add__(self, other: Mass) -> Mass:
        return Mass(
            self.segments + other.segments,
            self.tokens + other.tokens,
            self.positive + other.positive,
            self.negative + other.negative,
        )


def mass_by_kind(batch: CreditBatch, advantage: FloatArray) -> dict[Kind, Mass]:
    """Return the mass of each kind of policy segment, in the order of `POLICY_KIND_ORDER`."""
    weighted = batch.n_tokens * advantage
    result = {}
    for code, kind in enumerate(POLICY_KIND_ORDER):
        mine = batch.kind == code
        result[kind] = Mass(
            segments=int(mine.sum()),
            tokens=int(batch.n_tokens[mine].sum()),
            positive=float(np.maximum(weighted[mine], 0).sum()),
            negative=float(np.maximum(-weighted[mine], 0).sum()),
        )
    return result


def add_masses(first: Mapping[Kind, Mass], second: Mapping[Kind, Mass]) -> dict[Kind, Mass]:
    """Add two results of `mass_by_kind`."""
    return {kind: first[kind] + second[kind] for kind in POLICY_KIND_ORDER}


def negative_to_positive(
    batch: CreditBatch, advantage: FloatArray, where: BoolArray | None = None
) -> Estimate:
    """Return negative over positive mass, with an interval over groups as independent units."""
    weighted = batch.n_tokens * advantage
    if where is not None:
        weighted = np.where(where, weighted, 0.0)
    group = batch.group[batch.owner]
    n = len(batch.group_names)
    positive = total(np.maximum(weighted, 0), Dense(group, n))
    negative = total(np.maximum(-weighted, 0), Dense(group, n))
    live = (positive > 0) | (negative > 0)
    return ratio(negative[live], positive[live])


def is_correct_search(batch: CreditBatch) -> BoolArray:
    """Return `[S]`: an executed search of a scored rollout that found new silver documents."""
    scored = ~np.isnan(batch.rewards)[batch.owner]
    return np.asarray(batch.is_executed & (batch.step_score > 0) & scored)


def mis_penalised(batch: CreditBatch, advantage: FloatArray) -> Estimate:
    """Return the share of correct searches (step score > 0) with a negative advantage."""
    correct = is_correct_search(batch)
    return share(advantage[correct] < 0, batch.group[batch.owner[correct]])


def penalty_on_correct(batch: CreditBatch, advantage: FloatArray) -> float:
    """Return the negative token mass that falls on correct searches."""
    correct = is_correct_search(batch)
    return float((batch.n_tokens * np.maximum(-advantage, 0))[correct].sum())


def advantage_by_stratum(batch: CreditBatch, advantage: FloatArray) -> list[float]:
    """Return the token-mean advantage of each stratum: where the credit pushes the policy.

    In the order of `CreditBatch.strata`; 0 for a stratum without tokens.
    """
    labels, code = batch.strata()
    cells = Dense(code[batch.owner], len(labels))
    tokens = batch.n_tokens.astype(np.float64)
    return divide(total(tokens * advantage, cells), total(tokens, cells)).tolist()  # type: ignore[no-any-return]


def live_token_share(batch: CreditBatch, advantage: FloatArray) -> Estimate:
    """Return the share of the policy tokens of scored rollouts that have an advantage other than 0.

    `n` counts tokens; the interval treats groups as independent.
    """
    mine = ~np.isnan(batch.rewards)[batch.owner]
    group = batch.group[batch.owner[mine]]
    return share(advantage[mine] != 0, group, batch.n_tokens[mine])
