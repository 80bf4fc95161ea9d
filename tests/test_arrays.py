"""Entry checks and reductions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.core.arrays import (
    count_vector,
    dense,
    float_vector,
    mask_runs,
    reward_vector,
    same_length,
)
from evenhand.core.errors import DataError


@given(st.lists(st.integers(-128, 127) | st.sampled_from([10**12, -(10**12)]), max_size=20))
def test_dense_numbers_labels_in_sorted_order(labels: list[int]) -> None:
    ids, n = dense(labels)
    order = sorted(set(labels))
    assert n == len(order)
    assert [order[i] for i in ids] == labels


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64, bool])
def test_dense_takes_any_integer_type(dtype: type) -> None:
    labels = np.array([1, 0, 1], dtype=dtype)
    if dtype is np.int8:
        labels = np.array([127, -128, 127] * 50, dtype=dtype)
    ids, n = dense(labels)
    assert n == 2
    assert ids[:3].tolist() == [1, 0, 1]


def test_dense_takes_mixed_labels_and_refuses_missing_ones() -> None:
    assert dense(["b", "a", "b"]).ids.tolist() == [1, 0, 1]
    assert dense(np.array(["x", 1], dtype=object)).n == 2
    for missing in ([1.0, np.nan], np.array(["a", None], dtype=object)):
        with pytest.raises(DataError, match=r"nan|missing"):
            dense(missing)


def test_entry_checks_name_the_quantity_and_the_value() -> None:
    with pytest.raises(DataError, match="rewards must be finite or nan .*got inf at index 1"):
        reward_vector([0, np.inf])
    with pytest.raises(DataError, match=r"rewards must lie in .*got 2e\+06 \(1 of 2"):
        reward_vector([0, 2e6])
    with pytest.raises(DataError, match="rewards must be numbers"):
        reward_vector(["a"])
    with pytest.raises(DataError, match=r"one dimension, got shape \(1, 1\)"):
        reward_vector([[1.0]])
    with pytest.raises(DataError, match="n_tokens must be whole numbers, got 0.5"):
        count_vector([0.5], "n_tokens")
    with pytest.raises(DataError, match="advantage must be finite, got nan"):
        float_vector([np.nan], "advantage")
    with pytest.raises(DataError, match="b has 2 entries and a has 1"):
        same_length(a=np.zeros(1), b=np.zeros(2))


@given(st.lists(st.booleans(), max_size=30))
def test_mask_runs_cover_exactly_the_mask(mask: list[bool]) -> None:
    start, stop = mask_runs(mask)
    rebuilt = np.zeros(len(mask), dtype=bool)
    for first, last in zip(start, stop, strict=True):
        assert first < last
        rebuilt[first:last] = True
    assert rebuilt.tolist() == mask
    assert (start[1:] > stop[:-1]).all()
