"""Hybrid search: the rankings of several retrievers fused by reciprocal rank."""

from __future__ import annotations

from collections.abc import Sequence

from evenhand.core.errors import ConfigError
from evenhand.retrieval.base import (
    Retriever,
    RetrieverInfo,
    SearchResult,
    answer,
    check_above_zero,
    check_count,
    check_list,
    info_of,
    search_one_by_one,
)
from evenhand.trajectory.protocol import Document

K0 = 60.0
"""The constant of the paper below."""


class HybridRetriever:
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009).

    Equation: `score(d) = sum_r weight_r / (k0 + rank_r(d))` over the retrievers `r` that return
    `d` among their best `max(k, depth)`, with ranks from 1. The scores of the retrievers
    themselves do not matter. Equal fused scores are ordered by id.

    A document that several retrievers return keeps title and text of the first; they are the same
    document if and only if their ids are equal. If a retriever fails on a query, also by an
    exception, the query fails: answering with the others would silently be another search engine.

    Args:
        retrievers: at least one.
        k0: above 0; a larger one flattens the difference between ranks.
        depth: how far down each ranking is read, whatever `k`.
        weights: one above 0 a retriever; by default all 1.

    Raises:
        ConfigError: a setting out of its range.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever],
        *,
        k0: float = K0,
        depth: int = 100,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._retrievers = tuple(check_list(retrievers, "retrievers", "retrievers"))
        given = (1.0,) * len(retrievers)
        if weights is not None:
            given = tuple(check_list(weights, "weights", "numbers"))
        self._weights = tuple(check_above_zero(weight, "a weight") for weight in given)
        self._k0 = check_above_zero(k0, "k0")
        self._depth = check_count(depth, "depth")
        if not self._retrievers or len(self._weights) != len(self._retrievers):
            raise ConfigError(
                f"hybrid search needs retrievers and one weight each, got "
                f"{len(self._retrievers)} and {len(self._weights)}"
            )

    @property
    def info(self) -> RetrieverInfo:
        """What this retriever is; its corpus is known where all of its parts share one."""
        parts = [info_of(retriever) for retriever in self._retrievers]
        prints = [part.fingerprint for part in parts]
        fingerprint = None
        if None not in prints:
            fingerprint = f"hybrid:{self._k0}:{self._depth}:{self._weights}:{prints}"
        same = len({part.corpus_hash for part in parts}) == 1
        return RetrieverInfo(
            "hybrid",
            fingerprint,
            parts[0].passages if same else None,
            parts[0].corpus_hash if same else None,
        )

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        """See `Retriever.search`. The score is the fused one."""
        return answer(queries, k, self._search_batch)

    def _search_batch(self, queries: list[str], k: int) -> list[SearchResult]:
        depth = max(k, self._depth)
        rankings = [search_one_by_one(part, queries, depth) for part in self._retrievers]
        return [self._fuse(of_query) for of_query in zip(*rankings, strict=True)]

    def _fuse(self, results: Sequence[SearchResult]) -> SearchResult:
        errors = [
            f"{info_of(retriever).kind}: {result.error}"
            for retriever, result in zip(self._retrievers, results, strict=True)
            if result.error is not None
        ]
        if errors:
            return SearchResult(error="; ".join(errors))
        scores: dict[str, float] = {}
        first: dict[str, Document] = {}
        for result, weight in zip(results, self._weights, strict=True):
            for rank, document in enumerate(result.documents, start=1):
                first.setdefault(document.id, document)
                scores[document.id] = scores.get(document.id, 0.0) + weight / (self._k0 + rank)
        return SearchResult(
            tuple(Document(d.id, d.title, d.text, scores[d.id]) for d in first.values())
        )
