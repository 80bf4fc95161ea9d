"""Estimates with 95 % intervals, the only form in which a number reaches a user."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from evenhand.arrays import Dense, FloatArray, dense, total

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval and what it was computed from.

    Attributes:
        value: the point estimate; `nan` when `n` is 0.
        low: lower end; `nan` where no interval can be given (fewer than two independent units).
        high: upper end.
        n: how many items it was computed from.
    """

    value: float
    low: float
    high: float
    n: int


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


def proportion(successes: int, n: int) -> Estimate:
    r"""Return a proportion with its Wilson interval.

    .. math:: \frac{\hat p + z^2/2n \pm z\sqrt{\hat p(1-\hat p)/n + z^2/4n^2}}{1 + z^2/n}

    `n = 0` gives `nan`. Source: Wilson (1927).
    """
    if n == 0:
        return NOTHING
    p = successes / n
    centre = p + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    scale = 1 + Z95**2 / n
    # At p = 0 and p = 1 an end coincides with p; rounding must not push it past.
    low, high = max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
    return Estimate(p, min(low, p), max(high, p), n)


def mean(values: FloatArray, cluster: Dense | None = None) -> Estimate:
    """Return a mean with a normal interval, robust to dependence inside clusters.

    The standard error comes from the residual sums of the clusters (rollouts of one question are
    not independent of one another). One cluster gives no interval; `cluster=None` makes every value
    its own.
    """
    n = len(values)
    if n == 0:
        return NOTHING
    cells = dense(np.arange(n)) if cluster is None else cluster
    value = float(values.mean())
    error = _clustered_error(total(values - value, cells), float(n))
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
    cells = dense(np.arange(n))
    relative = _clustered_error(total(numerator - value * denominator, cells), under) / value
    return Estimate(value, value * math.exp(-relative), value * math.exp(relative), n)


def _clustered_error(residuals: FloatArray, weight: float) -> float:
    clusters = len(residuals)
    if clusters < 2:
        return math.nan
    variance = clusters / (clusters - 1) * float(np.square(residuals).sum()) / weight**2
    return Z95 * math.sqrt(variance)
