"""Centring and standardising rewards inside cells: the arithmetic that all estimators share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from evenhand.core.arrays import BoolArray, Dense, FloatArray, divide, extent, size, total


class Centred(NamedTuple):
    """Rewards minus the mean of their cell, in units of the spread of the cell.

    Attributes:
        unit: `[N]` `(r_i - mean) / spread`, in [-1, 1]; exactly 0 for an unscored trajectory and in
            a cell whose scored rewards are all equal (so also in one with one scored member).
        spread: `[cells]` largest minus smallest scored reward, 0 where a cell has none.
        members: `[cells]` how many are scored.
        cells: the cells.
    """

    unit: FloatArray
    spread: FloatArray
    members: FloatArray
    cells: Dense

    @property
    def deviation(self) -> FloatArray:
        """`[N]` `r_i - mean` of the cell of `i`."""
        return self.unit * self.spread[self.cells.ids]


def centre(rewards: FloatArray, cells: Dense) -> Centred:
    """Subtract the mean of the scored rewards of each cell.

    Whether a cell has any spread is decided on the rewards themselves. A computed mean carries
    rounding residue, which a division by a tiny deviation would blow up to advantages of thousands.
    """
    scored: BoolArray = ~np.isnan(rewards)
    low, high = extent(rewards, cells, scored)
    varied = high > low
    spread = np.subtract(high, low, out=np.zeros(cells.n), where=varied)
    members = size(cells, scored)
    live = scored & varied[cells.ids]
    # Measured from the smallest member, differences of nearly equal rewards are exact; in units of
    # the spread, neither they nor their squares underflow.
    above = np.zeros(len(rewards))
    np.subtract(rewards, low[cells.ids], out=above, where=live)
    above = divide(above, spread[cells.ids])
    mean = divide(total(above, cells), members)
    return Centred(np.where(live, above - mean[cells.ids], 0.0), spread, members, cells)


def standardise(rewards: FloatArray, cells: Dense, *, ddof: int, eps: float) -> FloatArray:
    """Return `[N]` `(r_i - mean) / (std + eps)` over the scored members of the cell of `i`.

    0 for unscored trajectories and in cells without spread. Finite for every valid input, also for
    `eps = 0`.
    """
    centred = centre(rewards, cells)
    # Cells without spread divide 0 by 0 here, which `divide` turns into 0.
    freedom = np.maximum(centred.members - ddof, 0.0)
    deviation = np.sqrt(divide(total(centred.unit**2, cells), freedom))
    with np.errstate(over="ignore"):  # eps far above the spread: the advantage goes to 0
        floor = divide(np.full(cells.n, eps), centred.spread)
    return divide(centred.unit, (deviation + floor)[cells.ids])
