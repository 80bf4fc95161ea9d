"""Paired differences over questions: a bootstrap interval and a sign-flip test.

Two evaluations of the same questions are compared question by question, which removes what the
questions differ in. The questions are the independent units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenhand.core.arrays import FloatArray, float_vector
from evenhand.core.errors import DataError
from evenhand.diagnostics.intervals import NOTHING, Estimate, t95

DRAWS = 10_000
"""Resamples of a bootstrap, and of a sign-flip test."""

LEVEL = 0.05
"""A difference is reported at this level."""

_BLOCK = 4_000_000
"""Numbers held at a time: 32 MB, whatever the number of questions."""

_TIE = 1e-12


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """How a second evaluation differs from a first one in one metric, question by question.

    Attributes:
        first: mean of the first over the paired questions (of the strata's means, if there are
            strata); `nan` if there is none.
        second: the same of the second.
        difference: `second - first` with its 95 % interval; `n` is the number of questions.
        p_value: of the sign-flip test, two-sided; 1 where all questions tie.
        better: questions where the second is higher.
        worse: questions where it is lower.
        ties: questions where both are equal.
    """

    first: float
    second: float
    difference: Estimate
    p_value: float
    better: int
    worse: int
    ties: int

    @property
    def n(self) -> int:
        """Number of paired questions."""
        return self.difference.n

    @property
    def differs(self) -> bool:
        """Whether a difference is reported: `p_value <= 0.05`, and 0 is outside the interval.

        An interval that cannot be given (see `paired_difference`) does not decide.
        """
        low, high = self.difference.low, self.difference.high
        outside = math.isnan(low) or low > 0 or high < 0
        return self.p_value <= LEVEL and outside


def paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    *,
    stratum: ArrayLike | None = None,
    draws: int = DRAWS,
    seed: int | np.random.Generator = 0,
) -> PairedDifference:
    r"""Compare two evaluations of the same questions in one metric.

    With `d_i = second_i - first_i` the difference is the mean of `d`; with strata the mean of the
    strata's means, each stratum with the same weight.

    *Interval.* Questions are drawn with replacement, inside each stratum, `draws` times; the
    interval is between quantiles of the redrawn differences (percentile bootstrap). That interval
    is too narrow for few questions. So deviations from a stratum's mean are widened by
    :math:`\sqrt{n / (n - 1)}`, and the quantiles are taken at :math:`\Phi(\mp t_{0.975, f})` with
    `f` the number of questions minus the number of strata (the expanded percentile interval of
    Hesterberg 2015; at 600 questions it is 0.3 % wider than the plain one).

    *Test.* If both sides are exchangeable (the same policy with two seeds), the sign of every `d_i`
    is a fair coin. `p_value` is the share of `draws` flips that give a difference at least as large
    as the one seen, `(1 + hits) / (1 + draws)`. It holds its level for any number of questions,
    which no bootstrap does where a handful of questions differ.

    Args:
        first: `[n]` values of the first evaluation, one a question; several rollouts of a question
            are averaged before.
        second: `[n]` values of the second, the same questions in the same order.
        stratum: `[n]` whole numbers; `None` puts all questions into one.
        draws: resamples.
        seed: of the random numbers, or a generator.

    Degenerate cases: no question gives `nan` and a `p_value` of 1. Where `d` does not vary inside
    any stratum (all questions tie, or there is one question), no interval is given (`nan`), and the
    test alone decides.

    Raises:
        DataError: the arrays are not parallel, or hold a value that is not finite.

    Source: Efron and Tibshirani 1993, chapter 13; Hesterberg 2015 (arXiv 1411.5279) for the
    expansion; Fisher 1935 for the sign flips.
    """
    one, two = float_vector(first, "first"), float_vector(second, "second")
    strata = np.zeros(len(one), dtype=np.int64) if stratum is None else np.asarray(stratum)
    if len(one) != len(two) or strata.shape != one.shape:
        raise DataError(f"first has {len(one)} values, second {len(two)} and stratum "
                        f"{len(strata)}; give one each a question")  # fmt: skip
    delta = two - one
    delta[np.abs(delta) <= _TIE] = 0.0
    n = len(delta)
    if n == 0:
        return PairedDifference(math.nan, math.nan, NOTHING, 1.0, 0, 0, 0)
    generator = np.random.default_rng(seed)
    parts = [np.flatnonzero(strata == value) for value in np.unique(strata)]
    better, worse = int((delta > 0).sum()), int((delta < 0).sum())
    value = _mean_of_means(delta, parts)
    interval = _interval([delta[part] for part in parts], value, draws, generator)
    return PairedDifference(
        first=_mean_of_means(one, parts),
        second=_mean_of_means(two, parts),
        difference=Estimate(value, *interval, n),
        p_value=_sign_flip([delta[part] for part in parts], value, draws, generator),
        better=better,
        worse=worse,
        ties=n - better - worse,
    )


def _mean_of_means(values: FloatArray, parts: list[NDArray[np.intp]]) -> float:
    return float(np.mean([values[part].mean() for part in parts]))


def _interval(
    parts: list[FloatArray], value: float, draws: int, generator: np.random.Generator
) -> tuple[float, float]:
    moved = np.zeros(draws)
    varies = False
    for part in parts:
        if np.ptp(part) == 0:
            continue
        varies = True
        widened = math.sqrt(len(part) / (len(part) - 1))
        moved += widened * (_redrawn_means(part, draws, generator) - part.mean()) / len(parts)
    if not varies:
        return math.nan, math.nan
    freedom = sum(len(part) for part in parts) - len(parts)
    tail = 0.5 * math.erfc(t95(freedom) / math.sqrt(2))
    low, high = value + np.quantile(moved, [tail, 1 - tail])
    return float(low), float(high)


def _redrawn_means(values: FloatArray, draws: int, generator: np.random.Generator) -> FloatArray:
    """Return `[draws]` means of `values` drawn with replacement."""
    n = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    # How often each distinct value is drawn is multinomial: for scores of a few levels that costs
    # a few numbers a draw instead of one a question.
    few = len(distinct) * 8 <= n
    width = len(distinct) if few else n
    rows = max(1, _BLOCK // width)
    means = np.empty(draws)
    for start in range(0, draws, rows):
        block = slice(start, min(start + rows, draws))
        size = block.stop - block.start
        if few:
            means[block] = generator.multinomial(n, counts / n, size=size) @ distinct / n
        else:
            chosen = generator.integers(0, n, size=(size, n), dtype=np.int32)
            means[block] = values[chosen].mean(axis=1)
    return means


def _sign_flip(
    parts: list[FloatArray], value: float, draws: int, generator: np.random.Generator
) -> float:
    if not any(part.any() for part in parts):
        return 1.0
    flipped = np.zeros(draws)
    for part in parts:
        sizes, counts = np.unique(np.abs(part[part != 0]), return_counts=True)
        rows = max(1, _BLOCK // max(1, len(sizes)))
        for start in range(0, draws, rows):
            block = slice(start, min(start + rows, draws))
            heads = generator.binomial(counts, 0.5, size=(block.stop - block.start, len(sizes)))
            flipped[block] += (2 * heads - counts) @ sizes / (len(part) * len(parts))
    # Sums of the same numbers in another order differ in their last bits; they count as equal.
    hits = int((np.abs(flipped) >= abs(value) * (1 - 1e-9) - 1e-15).sum())
    return (1 + hits) / (1 + draws)
