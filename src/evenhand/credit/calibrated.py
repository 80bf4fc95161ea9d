"""Calibrated credit: two separable steps on the advantages of segments.

CalibAdv (arXiv 2604.18235) in the order outcome -> `soften_negative` on searches -> `rebalance` on
answers. Arrays are `[S]`, one entry a policy segment.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from evenhand.core.arrays import (
    FloatArray,
    count_vector,
    dense,
    divide,
    float_vector,
    same_length,
    total,
)
from evenhand.core.settings import check_choice, check_number

RESCALE = ("positive", "negative")

MAX_ADVANTAGE = 1e9
"""Largest magnitude of an advantage: beyond anything that rewards of at most 1e6 give, and small
enough that sums over tokens stay finite."""


def soften_negative(advantage: ArrayLike, step_score: ArrayLike) -> FloatArray:
    r"""Spare correct searches of failed rollouts their penalty.

    .. math:: \tilde A_s = A_s\,(1 - c_s) \text{ if } A_s < 0, \text{ else } A_s

    A correct search (`c = 1`) gets 0, a useless one (`c = 0`) the full penalty; positive advantages
    are untouched.

    Args:
        advantage: `[S]` advantages of search segments.
        step_score: `[S]` step correctness `c` in [0, 1].

    Returns:
        `[S]` softened advantages.

    Raises:
        DataError: arrays that are not parallel or finite, an advantage above 1e9 in magnitude, or a
            score outside [0, 1].

    Source: arXiv 2604.18235, soft penalty.
    """
    values = float_vector(advantage, "advantage", low=-MAX_ADVANTAGE, high=MAX_ADVANTAGE)
    scores = float_vector(step_score, "step_score", low=0.0, high=1.0)
    same_length(advantage=values, step_score=scores)
    # Adding 0 turns the -0 of a fully spared search into 0.
    return np.where(values < 0, values * (1.0 - scores), values) + 0.0


def rebalance(
    advantage: ArrayLike,
    n_tokens: ArrayLike,
    block: ArrayLike,
    *,
    balance: float = 1.0,
    rescale: str = "positive",
    only_when_negative_dominates: bool = False,
) -> FloatArray:
    r"""Make positive and negative advantages of a block weigh what they should.

    .. math::
        P = \sum_{A_s > 0} n_s A_s, \quad N = \sum_{A_s < 0} n_s |A_s|, \qquad
        A_s \leftarrow A_s \cdot \lambda N / P \ \text{ where } A_s > 0

    so that the token-weighted positive mass becomes `balance` (the paper's lambda) times the
    negative one. A one-sided block (`P = 0` or `N = 0`) becomes 0. A segment without tokens has no
    mass to balance and always becomes 0.

    Args:
        advantage: `[S]` advantages of answer segments.
        n_tokens: `[S]` their lengths.
        block: `[S]` labels; each block (a group) is balanced by itself.
        balance: lambda, in [1e-6, 1e6]; 1 is the paper's best.
        rescale: `"positive"` as above; `"negative"` multiplies the negatives by `P / (lambda N)`.
        only_when_negative_dominates: leave a block alone when `P > 0` and `N / P <= 1 / lambda`
            (so also when `N = 0`); a block with `P = 0` still becomes 0.

    Returns:
        `[S]` rebalanced advantages.

    Raises:
        DataError: arrays that are not parallel or finite, an advantage above 1e9 in magnitude, or
            lengths that are not whole numbers.
        ConfigError: a setting out of range.

    Source: arXiv 2604.18235, advantage rebalancing; `rescale` and `only_when_negative_dominates`
    follow the behaviour of the paper's released code.
    """
    values = float_vector(advantage, "advantage", low=-MAX_ADVANTAGE, high=MAX_ADVANTAGE)
    lengths = count_vector(n_tokens, "n_tokens")
    blocks = dense(block, "block")
    same_length(advantage=values, n_tokens=lengths, block=blocks.ids)
    balance = check_number(balance, "balance", 1e-6, 1e6)
    scale_positive = check_choice(rescale, "rescale", RESCALE) == "positive"
    positive = total(lengths * np.maximum(values, 0.0), blocks)
    negative = total(lengths * np.maximum(-values, 0.0), blocks)
    scaled_side, fixed_side = (positive, negative) if scale_positive else (negative, positive)
    weight = balance if scale_positive else 1.0 / balance
    moves = (values > 0) if scale_positive else (values < 0)
    # Share of the side's mass first, then the new mass: the bare factor could overflow.
    share = divide(np.where(moves, values, 0.0), scaled_side[blocks.ids])
    result = np.where(moves, share * (weight * fixed_side)[blocks.ids], values)
    two_sided = (positive > 0) & (negative > 0)
    result = np.where(two_sided[blocks.ids], result, 0.0)
    if only_when_negative_dominates:
        alone = (positive > 0) & (balance * negative <= positive)
        result = np.where(alone[blocks.ids], values, result)
    return np.where(lengths > 0, result, 0.0)
