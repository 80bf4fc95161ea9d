"""Every estimator once more, slowly and plainly: loops over lists, no numpy, exact fractions.

Means and sums of squares are computed in rational arithmetic, so the only rounding is in the square
root and the last division. Written from the equations of the papers, without the vectorised code.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from fractions import Fraction

Reward = float | None


def _rows(labels: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    rows: dict[Hashable, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        rows[label].append(index)
    return rows


def _scored(rewards: Sequence[Reward], rows: Sequence[int]) -> list[int]:
    return [row for row in rows if not _missing(rewards[row])]


def _missing(reward: Reward) -> bool:
    return reward is None or math.isnan(reward)


def _exact(rewards: Sequence[Reward], row: int) -> Fraction:
    reward = rewards[row]
    assert reward is not None
    return Fraction(reward)


def _mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def _root(square: Fraction) -> float:
    # Fractions of tiny rewards underflow as floats; scale by an even power of two first.
    if square == 0:
        return 0.0
    shift = (square.denominator.bit_length() - square.numerator.bit_length()) // 2
    return math.ldexp(math.sqrt(square * Fraction(4) ** shift), -shift)


def _standardised(
    rewards: Sequence[Reward], labels: Sequence[Hashable], ddof: int, eps: float
) -> list[float]:
    result = [0.0] * len(rewards)
    for rows in _rows(labels).values():
        scored = _scored(rewards, rows)
        values = [_exact(rewards, row) for row in scored]
        if len(set(values)) < 2:
            continue
        mean = _mean(values)
        variance = _mean([(value - mean) ** 2 for value in values])
        variance *= Fraction(len(values), len(values) - ddof)
        # The spread is the unit, so that the quotient of two tiny numbers keeps its digits.
        unit = max(values) - min(values)
        deviation = _root(variance / unit**2)
        floor = Fraction(eps) / unit
        floor_as_float = float(floor) if floor < 10**300 else math.inf
        for row, value in zip(scored, values, strict=True):
            result[row] = float((value - mean) / unit) / (deviation + floor_as_float)
    return result


def grpo(
    rewards: Sequence[Reward], group: Sequence[Hashable], *, ddof: int = 1, eps: float = 1e-6
) -> list[float]:
    """Return `(r - mean) / (std + eps)` over each group."""
    return _standardised(rewards, group, ddof, eps)


def dr_grpo(rewards: Sequence[Reward], group: Sequence[Hashable]) -> list[float]:
    """Return `r - mean` over each group."""
    result = [0.0] * len(rewards)
    for rows in _rows(group).values():
        scored = _scored(rewards, rows)
        for row in scored:
            mean = _mean([_exact(rewards, other) for other in scored])
            result[row] = float(_exact(rewards, row) - mean)
    return result


def rloo(rewards: Sequence[Reward], group: Sequence[Hashable]) -> list[float]:
    """Return `r` minus the mean of the other members of its group."""
    result = [0.0] * len(rewards)
    for rows in _rows(group).values():
        scored = _scored(rewards, rows)
        for row in scored:
            others = [_exact(rewards, other) for other in scored if other != row]
            if others:
                result[row] = float(_exact(rewards, row) - _mean(others))
    return result


def reinforce_baseline(
    rewards: Sequence[Reward], group: Sequence[Hashable], *, eps: float = 1e-6
) -> list[float]:
    """Return centred rewards over the deviation of all centred rewards."""
    centred: dict[int, Fraction] = {}
    for rows in _rows(group).values():
        scored = _scored(rewards, rows)
        for row in scored:
            mean = _mean([_exact(rewards, other) for other in scored])
            centred[row] = _exact(rewards, row) - mean
    result = [0.0] * len(rewards)
    unit = max((abs(value) for value in centred.values()), default=Fraction(0))
    if unit == 0:
        return result
    mean = _mean(list(centred.values()))
    variance = _mean([(value - mean) ** 2 for value in centred.values()])
    variance *= Fraction(len(centred), len(centred) - 1)
    floor = Fraction(eps) / unit
    scale = _root(variance / unit**2) + (float(floor) if floor < 10**300 else math.inf)
    for row, value in centred.items():
        result[row] = float(value / unit) / scale
    return result


def stratified(
    rewards: Sequence[Reward],
    group: Sequence[Hashable],
    stratum: Sequence[Hashable],
    *,
    alpha: float = 0.5,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
    scope: str = "group",
) -> list[float]:
    """Return the blend of stratum-normalised and global advantages."""
    cells = list(zip(group, stratum, strict=True)) if scope == "group" else list(stratum)
    of_group = grpo(rewards, group, ddof=ddof, eps=eps)
    of_stratum = _with_lone(rewards, cells, of_group, ddof, eps, lone)
    return [alpha * s + (1 - alpha) * g for s, g in zip(of_stratum, of_group, strict=True)]


def _with_lone(
    rewards: Sequence[Reward],
    cells: Sequence[Hashable],
    fallback: Sequence[float],
    ddof: int,
    eps: float,
    lone: str,
) -> list[float]:
    result = _standardised(rewards, cells, ddof, eps)
    for rows in _rows(cells).values():
        scored = _scored(rewards, rows)
        if len(scored) == 1 and lone == "global":
            result[scored[0]] = fallback[scored[0]]
    return result


def san(
    rewards: Sequence[Reward],
    group: Sequence[Hashable],
    stratum: Sequence[Hashable],
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
    scope: str = "group",
) -> list[float]:
    """Return stratum-normalised advantages alone."""
    return stratified(
        rewards, group, stratum, alpha=1.0, ddof=ddof, eps=eps, lone=lone, scope=scope
    )


def stratified_shrunk(
    rewards: Sequence[Reward],
    group: Sequence[Hashable],
    stratum: Sequence[Hashable],
    *,
    kappa: float = 2.0,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
) -> list[float]:
    """Return the blend whose weight is `n / (n + kappa)`."""
    cells = list(zip(group, stratum, strict=True))
    of_group = grpo(rewards, group, ddof=ddof, eps=eps)
    of_stratum = _with_lone(rewards, cells, of_group, ddof, eps, lone)
    result = [0.0] * len(rewards)
    for rows in _rows(cells).values():
        scored = _scored(rewards, rows)
        for row in scored:
            alpha = len(scored) / (len(scored) + kappa)
            result[row] = alpha * of_stratum[row] + (1 - alpha) * of_group[row]
    return result


def soften_negative(advantage: Sequence[float], step_score: Sequence[float]) -> list[float]:
    """Return `A (1 - c)` where `A < 0`, else `A`."""
    return [a * (1 - c) if a < 0 else a for a, c in zip(advantage, step_score, strict=True)]


def rebalance(
    advantage: Sequence[float],
    n_tokens: Sequence[int],
    block: Sequence[Hashable],
    *,
    balance: float = 1.0,
    rescale: str = "positive",
    only_when_negative_dominates: bool = False,
) -> list[float]:
    """Return advantages whose positive mass is `balance` times the negative mass of each block."""
    result = list(advantage)
    for rows in _rows(block).values():
        mass = {row: Fraction(advantage[row]) * n_tokens[row] for row in rows}
        positive = sum((m for m in mass.values() if m > 0), Fraction(0))
        negative = -sum((m for m in mass.values() if m < 0), Fraction(0))
        left_alone = (
            only_when_negative_dominates
            and positive > 0
            and Fraction(balance) * negative <= positive
        )
        for row in rows:
            value = Fraction(advantage[row])
            if n_tokens[row] == 0:
                result[row] = 0.0
            elif left_alone:
                continue
            elif positive == 0 or negative == 0:
                result[row] = 0.0
            elif value > 0 and rescale == "positive":
                result[row] = float(value * Fraction(balance) * negative / positive)
            elif value < 0 and rescale == "negative":
                result[row] = float(value * positive / (Fraction(balance) * negative))
    return result


def calibrated(
    outcome: Sequence[float],
    group: Sequence[Hashable],
    owner: Sequence[int],
    is_answer: Sequence[bool],
    n_tokens: Sequence[int],
    step_score: Sequence[float],
    *,
    balance: float = 1.0,
    rescale: str = "positive",
    only_when_negative_dominates: bool = False,
) -> list[float]:
    """Return segment advantages: searches softened, answers rebalanced inside their group."""
    spread = [outcome[index] for index in owner]
    result = list(spread)
    answers = [at for at, answer in enumerate(is_answer) if answer]
    for at, answer in enumerate(is_answer):
        if not answer:
            result[at] = soften_negative([spread[at]], [step_score[at]])[0]
    balanced = rebalance(
        [spread[at] for at in answers],
        [n_tokens[at] for at in answers],
        [group[owner[at]] for at in answers],
        balance=balance,
        rescale=rescale,
        only_when_negative_dominates=only_when_negative_dominates,
    )
    for at, value in zip(answers, balanced, strict=True):
        result[at] = value
    return result
