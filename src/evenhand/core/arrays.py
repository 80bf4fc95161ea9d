"""Entry checks, and reductions over groups and segments.

Dimension names used everywhere: `N` trajectories, `G` groups, `S` policy segments, `T` tokens. An
array's description starts with its shape. Everything is vectorised: no Python loop over rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenhand.core.errors import DataError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

MAX_REWARD = 1e6
"""Largest magnitude of a reward. Sums over any batch then stay far from overflow."""


def float_vector(
    values: ArrayLike, name: str, *, low: float = -np.inf, high: float = np.inf
) -> FloatArray:
    """Return `values` as an `[n]` float64 array with every entry finite and in `[low, high]`.

    It may be the array that came in: callers do not write to it.
    """
    array = _numbers(values, name)
    if not np.isfinite(array).all():
        at = int(np.flatnonzero(~np.isfinite(array))[0])
        raise DataError(f"{name} must be finite, got {array[at]} at index {at}")
    _check_range(array, name, low, high)
    return array


def reward_vector(values: ArrayLike) -> FloatArray:
    """Return `[N]` float64 rewards; `nan` or `None` marks an unscored trajectory.

    Raises:
        DataError: not one-dimensional, not numbers, infinite, or larger than 1e6 in magnitude.
    """
    array = _numbers(values, "rewards")
    if np.isinf(array).any():
        at = int(np.flatnonzero(np.isinf(array))[0])
        raise DataError(f"rewards must be finite or nan (unscored), got {array[at]} at index {at}")
    _check_range(array[~np.isnan(array)], "rewards", -MAX_REWARD, MAX_REWARD)
    return array


def count_vector(values: ArrayLike, name: str) -> FloatArray:
    """Return `[n]` non-negative whole numbers as float64 (exact up to 2**53)."""
    array = float_vector(values, name, low=0, high=float(2**53))
    if (array != np.floor(array)).any():
        at = int(np.flatnonzero(array != np.floor(array))[0])
        raise DataError(f"{name} must be whole numbers, got {array[at]} at index {at}")
    return array


def _numbers(values: ArrayLike, name: str) -> FloatArray:
    if isinstance(values, np.ma.MaskedArray):  # a masked entry is a missing one
        values = np.ma.filled(values.astype(np.float64), np.nan)
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} must be numbers: {error}") from error
    if array.ndim != 1:
        raise DataError(f"{name} must have one dimension, got shape {array.shape}")
    return array


def _check_range(array: FloatArray, name: str, low: float, high: float) -> None:
    bad = (array < low) | (array > high)
    if bad.any():
        raise DataError(
            f"{name} must lie in [{low:g}, {high:g}], got {array[bad][0]:g} "
            f"({int(bad.sum())} of {array.size} outside)"
        )


def same_length(**arrays: NDArray[Any]) -> None:
    """Raise a `DataError` that names both lengths unless all arrays have the same length."""
    (first, reference), *others = arrays.items()
    for name, array in others:
        if len(array) != len(reference):
            raise DataError(
                f"{name} has {len(array)} entries and {first} has {len(reference)}; "
                "they must be parallel"
            )


class Dense(NamedTuple):
    """Labels as whole numbers without gaps.

    Attributes:
        ids: `[rows]` int64, the label of each row as `0 .. n - 1`, numbered in sorted order.
        n: how many distinct labels there are.
    """

    ids: IntArray
    n: int


def dense(labels: ArrayLike, name: str = "group") -> Dense:
    """Number arbitrary labels (integers, strings, booleans) `0 .. n - 1` in sorted order.

    Raises:
        DataError: not one-dimensional, or a label is a float `nan`.
    """
    array = np.asarray(labels)
    if array.size == 0:
        return Dense(np.zeros(0, dtype=np.int64), 0)
    if array.ndim != 1:
        raise DataError(f"{name} must have one dimension, got shape {array.shape}")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise DataError(f"{name} has nan at index {int(np.flatnonzero(np.isnan(array))[0])}")
    if array.dtype.kind == "O":
        array = np.array([_text_label(label, name) for label in array.tolist()])
    if array.dtype.kind in "iu":
        low, high = int(array.min()), int(array.max())
        if high - low < 4 * array.size:  # nearly dense already: a table is linear, sorting is not
            # Signed labels widen first: a difference of int8 need not fit into int8.
            wide = array.astype(np.int64, copy=False) if array.dtype.kind == "i" else array
            shifted = (wide - wide.dtype.type(low)).astype(np.int64, copy=False)
            present = np.bincount(shifted, minlength=high - low + 1) > 0
            ranks = np.cumsum(present) - 1
            return Dense(ranks[shifted], int(ranks[-1]) + 1)
    _, index = np.unique(array, return_inverse=True)
    return Dense(index.astype(np.int64, copy=False), int(index.max()) + 1)


def _text_label(label: object, name: str) -> str:
    # Rows of mixed types have no order; their text has, and 1 and "1" would be one label anyway
    # once written to a file.
    if label is None or (isinstance(label, float) and np.isnan(label)):
        raise DataError(f"{name} has a missing label ({label!r}); give every trajectory one")
    return str(label)


def cross(first: Dense, second: Dense) -> Dense:
    """Number the pairs `(first, second)` that occur, in the order of `first`, then `second`."""
    same_length(first=first.ids, second=second.ids)
    return dense(first.ids * max(second.n, 1) + second.ids)


def total(values: FloatArray, cells: Dense) -> FloatArray:
    """Return `[n]` sums of `values` over each cell."""
    return np.bincount(cells.ids, weights=values, minlength=cells.n).astype(np.float64)


def size(cells: Dense, where: BoolArray | None = None) -> FloatArray:
    """Return `[n]` how many rows (for which `where` holds) each cell has."""
    weights = None if where is None else where.astype(np.float64)
    return np.bincount(cells.ids, weights=weights, minlength=cells.n).astype(np.float64)


class Extent(NamedTuple):
    """Smallest and largest scored value of each cell; `+inf, -inf` where a cell has none."""

    low: FloatArray
    high: FloatArray


def extent(values: FloatArray, cells: Dense, where: BoolArray) -> Extent:
    """Return the `[n]` extent of `values` over each cell, over rows for which `where` holds."""
    low = np.full(cells.n, np.inf)
    high = np.full(cells.n, -np.inf)
    np.minimum.at(low, cells.ids[where], values[where])
    np.maximum.at(high, cells.ids[where], values[where])
    return Extent(low, high)


def divide(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Return `numerator / denominator`, and 0 where the denominator is 0."""
    out = np.zeros(np.broadcast_shapes(numerator.shape, denominator.shape))
    return np.divide(numerator, denominator, out=out, where=denominator != 0)


class Runs(NamedTuple):
    """Maximal runs of a mask as half-open intervals.

    Attributes:
        start: `[runs]` first index of each run of `True`.
        stop: `[runs]` index just past its end.
    """

    start: IntArray
    stop: IntArray


def mask_runs(mask: ArrayLike) -> Runs:
    """Return the maximal runs of true entries in a `[T]` mask, in order."""
    flags = np.asarray(mask)
    if flags.ndim != 1:
        raise DataError(f"mask must have one dimension, got shape {flags.shape}")
    edges = np.diff(np.concatenate([[0], (flags != 0).astype(np.int8), [0]]))
    return Runs(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1))
