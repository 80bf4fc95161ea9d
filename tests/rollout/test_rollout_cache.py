"""Keys and values stay where they belong when rows move and the cache grows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.train

from evenhand.rollout.cache import RowCache  # noqa: E402 needs torch

ROWS, LENGTH = 4, 5


def filled(dtype: Any = None) -> RowCache:
    """A cache whose numbers tell row, head and place."""
    cache = RowCache(torch.device("cpu"), LENGTH)
    cache.reserve(ROWS, LENGTH)
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    cache.plan(np.arange(ROWS), places, LENGTH)
    states = torch.arange(ROWS * 2 * LENGTH * 3, dtype=dtype or torch.float32)
    cache.update(*[states.view(ROWS, 2, LENGTH, 3) + shift for shift in (0, 1)], 0)
    return cache


def held(cache: RowCache, row: int, length: int) -> Any:
    cache.plan(np.array([row]), torch.tensor([[cache.scratch]]), length)
    nothing = torch.zeros(1, 2, 1, 3, dtype=cache._keys[0].dtype)
    return [each.clone() for each in cache.update(nothing, nothing, 0)]


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_rows_change_places_in_one_copy(dtype: Any) -> None:
    cache = filled(dtype)
    before = [held(cache, row, LENGTH) for row in range(ROWS)]
    cache.copy(np.array([0, 2]), np.array([2, 0]), LENGTH)
    after = [held(cache, row, LENGTH) for row in range(ROWS)]
    assert all(same(after[row], before[other]) for row, other in enumerate([2, 1, 0, 3]))


def test_a_copy_leaves_the_places_beyond_its_length() -> None:
    cache = filled()
    before = held(cache, 1, LENGTH)
    cache.copy(np.array([0]), np.array([1]), 2)
    found = held(cache, 1, LENGTH)
    assert same([each[:, :, 2:] for each in found], [each[:, :, 2:] for each in before])
    assert same([each[:, :, :2] for each in found], held(cache, 0, 2))


def test_a_cache_that_grows_keeps_what_rows_hold() -> None:
    cache = filled()
    before = [held(cache, row, LENGTH) for row in range(ROWS)]
    cache.reserve(ROWS + 2, LENGTH + 1)
    assert all(same(held(cache, row, LENGTH), before[row]) for row in range(ROWS))


def test_a_cache_that_grows_keeps_the_rows_that_are_needed() -> None:
    cache = filled()
    before = held(cache, 3, LENGTH)
    cache.reserve(ROWS + 2, LENGTH + 1, np.array([3, ROWS + 1]))
    assert same(held(cache, 3, LENGTH), before)
    assert not any(each.any() for each in held(cache, 0, LENGTH))


def test_a_row_that_follows_another_gets_only_what_it_lacks() -> None:
    cache = filled()
    before = [held(cache, row, LENGTH) for row in range(ROWS)]
    cache.extend(np.array([0, 0]), np.array([1, 3]), np.array([2, 0]), np.array([4, 1]))
    for row, own in ((1, [0, 1, 4]), (3, [1, 2, 3, 4])):
        taken = [place for place in range(LENGTH) if place not in own]
        for found, mine, lead in zip(held(cache, row, LENGTH), before[row], before[0], strict=True):
            assert torch.equal(found[:, :, own], mine[:, :, own])
            assert torch.equal(found[:, :, taken], lead[:, :, taken])
    assert all(same(held(cache, row, LENGTH), before[row]) for row in (0, 2))
