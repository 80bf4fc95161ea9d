"""Estimates with 95 % intervals, the only form in which a number reaches a user.

Rollouts of one question are not independent of one another, and neither are the searches of one
rollout: intervals treat the groups as the independent units and use Student's t with one degree of
freedom less than there are groups. Where the groups show no variation at all, or there is only one,
no interval is given rather than one of width 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from evenhand.core.arrays import Dense, FloatArray, total

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""

_T95 = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 6: 2.446912,
        7: 2.364624}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval and what it was computed from.

    Attributes:
        value: the point estimate; `nan` when `n` is 0.
        low: lower end; `nan` where no interval can be given.
        high: upper end.
        n: how many items it was computed from.
    """

    value: float
    low: float
    high: float
    n: int


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


def t95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, to 1e-3; infinite without a degree of freedom.

    From eight degrees of freedom on by the expansion of Fisher and Cornish around the normal.
    """
    if freedom < 1:
        return math.inf
    if freedom in _T95:
        return _T95[freedom]
    z = Z95
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def proportion(successes: int, n: int) -> Estimate:
    r"""Return a proportion of independent items with its Wilson interval.

    .. math:: \frac{\hat p + z^2/2n \pm z\sqrt{\hat p(1-\hat p)/n + z^2/4n^2}}{1 + z^2/n}

    `n = 0` gives `nan`. Source: Wilson (1927).
    """
    if n == 0:
        return NOTHING
    return _wilson(successes / n, float(n), Z95, n)


def share(flags: ArrayLike, cluster: ArrayLike, weights: ArrayLike | None = None) -> Estimate:
    """Return the share of true flags, with a Wilson interval that respects clusters.

    The number of items in Wilson's formula is the effective one: `p (1 - p)` over the variance of
    `p` between clusters (Rao and Scott, 1992), at most the number of items. Where all clusters
    agree, it is the number of clusters.

    Args:
        flags: `[n]` booleans.
        cluster: `[n]` whole numbers from 0, the group of each item.
        weights: `[n]` weights of the items (tokens), 1 if left out.
    """
    true = np.asarray(flags, dtype=bool)
    if len(true) == 0:
        return NOTHING
    weight = np.ones(len(true)) if weights is None else np.asarray(weights, dtype=np.float64)
    cells = _cells(cluster)
    inside, hits = total(weight, cells), total(weight * true, cells)
    everything = float(inside.sum())
    if everything == 0:
        return NOTHING
    p = float(hits.sum()) / everything
    clusters = int((inside > 0).sum())
    n = round(everything)
    if clusters < 2:
        return Estimate(p, math.nan, math.nan, n)
    variance = _variance(hits - p * inside, everything, clusters)
    effective = p * (1 - p) / variance if variance > 0 else float(clusters)
    return _wilson(p, min(effective, everything), t95(clusters - 1), n)


def _wilson(p: float, effective: float, z: float, n: int) -> Estimate:
    centre = p + z**2 / (2 * effective)
    half = z * math.sqrt(p * (1 - p) / effective + z**2 / (4 * effective**2))
    scale = 1 + z**2 / effective
    # At p = 0 and p = 1 an end coincides with p; rounding must not push it past.
    low, high = max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
    return Estimate(p, min(low, p), max(high, p), n)


def mean(values: FloatArray, cluster: ArrayLike) -> Estimate:
    """Return a mean with an interval from the residual sums of the clusters.

    Args:
        values: `[n]`.
        cluster: `[n]` whole numbers from 0, the group of each value.
    """
    n = len(values)
    if n == 0:
        return NOTHING
    cells = _cells(cluster)
    value = float(values.mean())
    clusters = int((total(np.ones(n), cells) > 0).sum())
    error = _half_width(total(values - value, cells), float(n), clusters)
    if not error > 1e-12 * abs(value):
        return Estimate(value, math.nan, math.nan, n)
    return Estimate(value, value - error, value + error, n)


def ratio(numerator: FloatArray, denominator: FloatArray) -> Estimate:
    """Return `sum(numerator) / sum(denominator)` over independent units, both not negative.

    The interval is symmetric on the log scale (delta method), so that it stays positive. A zero
    denominator gives `inf` (or `nan` if the numerator is 0 too) without an interval.
    """
    over, under = float(numerator.sum()), float(denominator.sum())
    n = len(numerator)
    if under == 0:
        return Estimate(math.inf if over > 0 else math.nan, math.nan, math.nan, n)
    value = over / under
    if over == 0:
        return Estimate(0.0, math.nan, math.nan, n)
    relative = _half_width(numerator - value * denominator, under, n) / value
    if not 1e-12 < relative < 50:
        return Estimate(value, math.nan, math.nan, n)
    return Estimate(value, value * math.exp(-relative), value * math.exp(relative), n)


def _cells(cluster: ArrayLike) -> Dense:
    ids = np.asarray(cluster, dtype=np.int64)
    return Dense(ids, int(ids.max(initial=-1)) + 1)


def _variance(residuals: FloatArray, weight: float, clusters: int) -> float:
    return clusters / (clusters - 1) * float(np.square(residuals).sum()) / weight**2


def _half_width(residuals: FloatArray, weight: float, clusters: int) -> float:
    if clusters < 2:
        return math.nan
    return t95(clusters - 1) * math.sqrt(_variance(residuals, weight, clusters))
