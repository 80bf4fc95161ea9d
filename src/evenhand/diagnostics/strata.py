"""How much of the reward variance lies between strata, beside what chance alone puts there.

With few rollouts a question, strata differ by luck: rewards that ignore the strata put an expected
share of `(K - 1) / (n - 1)` between the `K` strata of `n` rollouts. A share is therefore shown
beside its expectation and its 95 % range under permutation of the strata inside each group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from evenhand.core.arrays import Dense, FloatArray, IntArray, cross, dense, divide, size, total
from evenhand.credit import CreditBatch
from evenhand.credit.outcome import rewards_and_group
from evenhand.credit.statistics import centre
from evenhand.credit.strata import Label
from evenhand.diagnostics.intervals import Estimate, mean, share

SHUFFLED = 1 << 16
"""Numbers that one call shuffles; many draws of a small batch share it."""


@dataclass(frozen=True, slots=True)
class BetweenStrata:
    r"""The share of the within-question reward variance that lies between strata.

    .. math:: \frac{\sum_g \sum_k n_k (\mathrm{mean}_k - \mathrm{mean}_g)^2}
                   {\sum_g \sum_i (r_i - \mathrm{mean}_g)^2}

    Attributes:
        share: the share; `nan` if no group has any spread.
        expected: its exact expectation under permutation of strata inside groups.
        low: 2.5 % quantile under permutation.
        high: 97.5 % quantile.
        groups: groups with spread, two or more strata, and a stratum of two or more members: only
            they can show anything.
        trajectories: their scored trajectories.
    """

    share: float
    expected: float
    low: float
    high: float
    groups: int
    trajectories: int

    @property
    def has_evidence(self) -> bool:
        """Whether the share lies above the range: strata differ by more than chance.

        Where every permutation gives the same share, rounding must not decide.
        """
        return self.groups > 0 and self.share > self.high + 1e-9


def between_strata(
    rewards: ArrayLike,
    group: ArrayLike,
    stratum: ArrayLike,
    *,
    draws: int | None = None,
    seed: int = 0,
) -> BetweenStrata:
    """Compare the share of variance between strata with its chance level.

    Args:
        rewards: `[N]`; `nan` = unscored, left out.
        group: `[N]` labels.
        stratum: `[N]` labels.
        draws: permutations for the range; `None` chooses 1000, fewer (at least 200) for more than
            200,000 trajectories.
        seed: of the permutations; the result is a function of the arguments alone.
    """
    values, groups = rewards_and_group(rewards, group)
    scored = ~np.isnan(values)
    values, groups = values[scored], dense(groups.ids[scored])
    strata = dense(np.asarray(stratum)[scored], "stratum")
    centred = centre(values, groups)
    deviation = centred.deviation
    within = total(deviation * deviation, groups)
    cells = cross(groups, strata)
    in_group = dense_owner(cells, groups)
    n_strata = np.bincount(in_group, minlength=groups.n).astype(np.float64)
    everything = float(within.sum())
    if everything == 0:
        return BetweenStrata(np.nan, np.nan, np.nan, np.nan, 0, 0)
    several = (within > 0) & (n_strata > 1)
    informative = several & (n_strata < centred.members)
    rows = informative[groups.ids]
    means = divide(total(deviation, cells), size(cells))
    # A group with one stratum has no between part; its computed mean is rounding residue. Where
    # every member is a stratum of its own, everything lies between, under any permutation.
    saturated = float(within[several & ~informative].sum())
    between = np.where(informative[in_group], size(cells) * means**2, 0.0)
    observed = (float(between.sum()) + saturated) / everything
    expected = float((within * divide(n_strata - 1, centred.members - 1)).sum()) / everything
    if draws is None:
        draws = int(np.clip(2e8 / max(len(values), 1), 200, 1000))
    sums = _permuted_sums(
        deviation[rows], dense(groups.ids[rows]), dense(cells.ids[rows]), draws, seed
    )
    low, high = np.quantile((sums + saturated) / everything, [0.025, 0.975])
    return BetweenStrata(
        observed, expected, float(low), float(high), int(informative.sum()), int(rows.sum())
    )


def dense_owner(cells: Dense, groups: Dense) -> IntArray:
    """Return `[cells]` the group that each cell belongs to."""
    owner = np.zeros(cells.n, dtype=np.int64)
    owner[cells.ids] = groups.ids
    return owner


def _permuted_sums(
    deviation: FloatArray, groups: Dense, cells: Dense, draws: int, seed: int
) -> FloatArray:
    """Return `[draws]` sums of squares between strata, deviations shuffled inside each group."""
    generator = np.random.default_rng(seed)
    sums = np.zeros(draws)
    order = np.argsort(groups.ids, kind="stable")
    members = size(groups).astype(np.int64)
    start = np.concatenate([[0], np.cumsum(members)])[:-1]
    # Groups of one size form a matrix, whose rows numpy shuffles in one call.
    for width in np.unique(members):
        rows = order[start[members == width][:, None] + np.arange(width)]
        values = deviation[rows]
        bucket = dense(cells.ids[rows].ravel())
        count = size(bucket)
        at_once = max(1, SHUFFLED // values.size)
        for start_draw in range(0, draws, at_once):
            n = min(at_once, draws - start_draw)
            shuffled = generator.permuted(np.tile(values, (n, 1)), axis=1).reshape(n, -1)
            ids = bucket.ids + bucket.n * np.arange(n)[:, None]
            totals = np.bincount(ids.ravel(), shuffled.ravel(), n * bucket.n).reshape(n, -1)
            sums[start_draw : start_draw + n] += (totals**2 / count).sum(axis=1)
    return sums


@dataclass(frozen=True, slots=True)
class StratumRow:
    """One stratum over all groups.

    Attributes:
        label: the stratum.
        share: of the scored trajectories.
        reward: mean over its scored trajectories; `n = 0` if none is scored.
    """

    label: Label
    share: Estimate
    reward: Estimate


def stratum_rows(batch: CreditBatch) -> list[StratumRow]:
    """Return the strata in sorted order, numbers before texts."""
    labels, code = batch.strata()
    scored = ~np.isnan(batch.rewards)
    result = []
    for number, label in enumerate(labels):
        mine = (code == number) & scored
        reward = mean(batch.rewards[mine], batch.group[mine])
        part = share(code[scored] == number, batch.group[scored])
        result.append(StratumRow(label, part, reward))
    return result


@dataclass(frozen=True, slots=True)
class StrataShape:
    """How strata fall into groups.

    Attributes:
        strata: strata of groups with a scored member, all groups together.
        lone: trajectories that are alone in their stratum of their group.
        flat: strata of two or more members whose rewards are all equal.
    """

    strata: int
    lone: Estimate
    flat: Estimate


def strata_shape(batch: CreditBatch) -> StrataShape:
    """Count lone trajectories and flat strata over the scored trajectories of a batch."""
    scored = ~np.isnan(batch.rewards)
    _, code = batch.strata()
    groups = dense(batch.group[scored])
    cells = cross(groups, dense(code[scored]))
    centred = centre(batch.rewards[scored], cells)
    several = centred.members > 1
    of_group = dense_owner(cells, groups)
    return StrataShape(
        strata=cells.n,
        lone=share(centred.members[cells.ids] == 1, groups.ids),
        flat=share(centred.spread[several] == 0, of_group[several]),
    )
