"""The inner loop of BM25 search: add up postings, keep the best k. Compiled if numba is there.

Two back ends with the same result: `numba` (a compiled loop that lets go of Python's global lock,
so threads run side by side) and `numpy`. Neither calls numba's own parallel loops, whose default
thread pool ends the process when two threads enter it at once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.core.arrays import IntArray
from evenhand.core.errors import ConfigError, MissingExtraError

Scores = NDArray[np.float32]


class Postings(NamedTuple):
    """An index by columns: which passages hold a term, and what the term adds to their score.

    Attributes:
        data: `[postings]` float32, the term's share of the score.
        indices: `[postings]` int32, the passage; each at most once a term.
        indptr: `[terms + 1]` int64, where the postings of each term start.
        rank: `[passages]` int64, the order of passages among equal scores.
    """

    data: Scores
    indices: NDArray[np.int32]
    indptr: IntArray
    rank: IntArray


class Best(NamedTuple):
    """The best passages of each query.

    Attributes:
        passage: `[queries, k]` int64, `-1` where fewer than `k` passages score above 0.
        score: `[queries, k]` float32, falling; equal scores by falling preference of `rank`.
    """

    passage: IntArray
    score: Scores


Search = Callable[[Postings, IntArray, IntArray, int], Best]
"""`(postings, terms, starts, k)`: query `q` holds the terms `terms[starts[q] : starts[q + 1]]`."""


def search_numpy(postings: Postings, terms: IntArray, starts: IntArray, k: int) -> Best:
    """Search with numpy alone. A repeated term counts as often as it stands in the query."""
    data, indices, indptr, rank = postings
    queries, passages = len(starts) - 1, len(rank)
    best = _nothing(queries, k)
    for query in range(queries):
        scores = np.zeros(passages, dtype=np.float32)
        for term in terms[starts[query] : starts[query + 1]]:
            # A passage stands once in a term's postings, so plain indexing loses no addition.
            scores[indices[indptr[term] : indptr[term + 1]]] += data[
                indptr[term] : indptr[term + 1]
            ]
        found = np.flatnonzero(scores > 0)
        if len(found) > k:
            least = np.partition(scores[found], len(found) - k)[len(found) - k]
            found = found[scores[found] >= least]
        found = found[np.lexsort((rank[found], -scores[found]))][:k]
        best.passage[query, : len(found)] = found
        best.score[query, : len(found)] = scores[found]
    return best


def _nothing(queries: int, k: int) -> Best:
    return Best(np.full((queries, k), -1, dtype=np.int64), np.zeros((queries, k), dtype=np.float32))


def _search_loop(  # plain Python for numba; see search_numpy for what it computes
    data: Scores,
    indices: NDArray[np.int32],
    indptr: IntArray,
    rank: IntArray,
    terms: IntArray,
    starts: IntArray,
    passage: IntArray,
    score: Scores,
) -> None:
    k = passage.shape[1]
    scores = np.zeros(rank.shape[0], dtype=np.float32)
    for query in range(starts.shape[0] - 1):
        scores[:] = 0.0
        for at in range(starts[query], starts[query + 1]):
            term = terms[at]
            for j in range(indptr[term], indptr[term + 1]):
                scores[indices[j]] += data[j]
        held = 0
        least = np.float32(0.0)
        for candidate in range(scores.shape[0]):
            value = scores[candidate]
            if value < least or value <= 0.0:
                continue
            if held == k:
                if value == least and rank[candidate] > rank[passage[query, k - 1]]:
                    continue
                place = k - 1
            else:
                place = held
                held += 1
            while place > 0 and (
                score[query, place - 1] < value
                or (
                    score[query, place - 1] == value
                    and rank[passage[query, place - 1]] > rank[candidate]
                )
            ):
                score[query, place] = score[query, place - 1]
                passage[query, place] = passage[query, place - 1]
                place -= 1
            score[query, place] = value
            passage[query, place] = candidate
            if held == k:
                least = score[query, k - 1]


@functools.cache
def _compiled(numba: Any) -> Any:
    return numba.njit(cache=True, nogil=True)(_search_loop)


def _numba_search(numba: Any) -> Search:
    loop = _compiled(numba)

    def search(postings: Postings, terms: IntArray, starts: IntArray, k: int) -> Best:
        best = _nothing(len(starts) - 1, k)
        loop(*postings, terms, starts, best.passage, best.score)
        return best

    return search


def search_function(backend: str) -> Search:
    """Return the search of a back end: `numba`, `numpy`, or `auto` (numba if it can be imported).

    Raises:
        ConfigError: another name.
        MissingExtraError: `numba` was asked for and cannot be imported.
    """
    if backend not in ("auto", "numba", "numpy"):
        raise ConfigError(f"backend must be auto, numba or numpy, got {backend!r}")
    if backend == "numpy":
        return search_numpy
    try:
        return _numba_search(importlib.import_module("numba"))
    except ImportError as error:  # also where numba refuses the numpy that is installed
        if backend == "auto":
            return search_numpy
        raise MissingExtraError(
            f"the BM25 back end 'numba' cannot be used ({error}); "
            "run: pip install numba, or set backend=numpy"
        ) from error
