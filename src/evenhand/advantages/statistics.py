"""Centring and standardising rewards inside cells: the arithmetic that all estimators share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from evenhand.arrays import BoolArray, Dense, FloatArray, divide, extent, size, total


class Centred(NamedTuple):
    """Rewards minus the mean of their cell.

    Attributes:
        deviation: `[N]` `r_i - mean(cell of i)`; exactly 0 for an unscored trajectory and in a cell
            whose scored rewards are all equal (so also in a cell with one scored member).
        spread: `[cells]` largest minus smallest scored reward, 0 where a cell has none.
        members: `[cells]` how many are scored.
    """

    deviation: FloatArray
    spread: FloatArray
    members: FloatArray


def centre(rewards: FloatArray, cells: Dense) -> Centred:
    """Subtract the mean of the scored rewards of each cell.

    Whether a cell has any spread is decided on the rewards themselves. A computed mean carries
    rounding residue, which a division by a tiny deviation would blow up to advantages of thousands.
    """
    scored: BoolArray = ~np.isnan(rewards)
    low, high = extent(rewards, cells, scored)
    varied = high > low
    spread = np.subtract(high, low, out=np.zeros(cells.n), where=varied)
    count = size(cells, scored)
    live = scored & varied[cells.ids]
    # Measured from the smallest member, differences of nearly equal rewards are exact.
    above = np.zeros(len(rewards))
    np.subtract(rewards, low[cells.ids], out=above, where=live)
    mean = divide(total(above, cells), count)
    return Centred(np.where(live, above - mean[cells.ids], 0.0), spread, count)


def standardise(rewards: FloatArray, cells: Dense, *, ddof: int, eps: float) -> FloatArray:
    """Return `[N]` `(r_i - mean) / (std + eps)` over the scored members of the cell of `i`.

    0 for unscored trajectories and in cells without spread. Finite for every valid input, also for
    `eps = 0`: deviations are divided by the cell's spread before they are squared, so that neither
    tiny nor large rewards leave the range of floats.
    """
    centred = centre(rewards, cells)
    unit = divide(centred.deviation, centred.spread[cells.ids])
    # Cells without spread divide 0 by 0 here, which `divide` turns into 0.
    freedom = np.maximum(centred.members - ddof, 0.0)
    deviation = np.sqrt(divide(total(unit * unit, cells), freedom))
    with np.errstate(over="ignore"):  # eps far above the spread: the advantage goes to 0
        floor = divide(np.full(cells.n, eps), centred.spread)
    return divide(unit, (deviation + floor)[cells.ids])
