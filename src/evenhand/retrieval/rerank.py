"""A cross-encoder over another retriever: it reads query and passage together and sorts anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from evenhand.core.errors import ConfigError, require
from evenhand.retrieval.base import (
    Retriever,
    RetrieverInfo,
    SearchResult,
    answer,
    check_count,
    failure,
    info_of,
    search_one_by_one,
)
from evenhand.trajectory.protocol import Document

PairScorer = Callable[[Sequence[tuple[str, str]]], Sequence[float]]
"""Gets `(query, passage)` pairs and returns one number each, higher is better."""


class CrossEncoderScorer:
    """A sentence-transformers cross-encoder as a scorer of pairs.

    Args:
        model: its name or folder.
        device: `cpu`, `cuda`, ...; by default what the library chooses.
        batch_size: pairs that are scored together.
    """

    def __init__(self, model: str, *, device: str | None = None, batch_size: int = 32) -> None:
        library = require("sentence_transformers", "dense", "reranking")
        self.name = str(model)
        self._batch_size = check_count(batch_size, "batch_size")
        try:
            self._model = library.CrossEncoder(self.name, device=device)
        except (OSError, ValueError) as error:
            first_line = (str(error).splitlines() or ["no reason given"])[0]
            raise ConfigError(
                f"the cross-encoder {self.name!r} cannot be loaded ({first_line}); "
                "give a folder, or a name that the hub (or its local cache) has"
            ) from error

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return one number a pair."""
        scores = self._model.predict(
            list(pairs), batch_size=self._batch_size, show_progress_bar=False
        )
        return [float(score) for score in np.asarray(scores).reshape(len(pairs))]


class RerankRetriever:
    """Sort the best passages of another retriever anew by a scorer of pairs.

    The best `max(k, depth)` passages of the base are scored as `title + "\\n" + text` (the text
    alone where the title is empty), all queries of a batch in one call, and the best `k` by that
    score are returned. A query on which the base fails keeps the base's error; one for which the
    scorer raises or does not give one finite number a pair fails alone.

    Args:
        base: finds the candidates.
        scorer: any callable that scores pairs, for example a `CrossEncoderScorer`.
        depth: how many candidates are scored, whatever `k`.
        name: of the scorer, for the fingerprint; by default its attribute `name`. Without either
            the retriever has no fingerprint and needs one to be cached.

    Raises:
        ConfigError: `depth` below 1.
    """

    def __init__(
        self, base: Retriever, scorer: PairScorer, *, depth: int = 50, name: str | None = None
    ) -> None:
        self._base = base
        self._scorer = scorer
        self._depth = check_count(depth, "depth")
        self._name = name or getattr(scorer, "name", None)

    @property
    def info(self) -> RetrieverInfo:
        """What this retriever is."""
        base = info_of(self._base)
        fingerprint = None
        if base.fingerprint is not None and self._name is not None:
            fingerprint = f"rerank:{self._depth}:{self._name}:{base.fingerprint}"
        return RetrieverInfo("rerank", fingerprint, base.passages, base.corpus_hash)

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        """See `Retriever.search`. The score is the scorer's."""
        return answer(queries, k, self._search_batch)

    def _search_batch(self, queries: list[str], k: int) -> list[SearchResult]:
        results = search_one_by_one(self._base, queries, max(k, self._depth))
        found = [at for at, result in enumerate(results) if result.documents]
        scored = self._scored([(queries[at], results[at].documents) for at in found])
        for at, result in zip(found, scored, strict=True):
            results[at] = result
        return results

    def _scored(self, rows: list[tuple[str, tuple[Document, ...]]]) -> list[SearchResult]:
        pairs = [
            (query, f"{d.title}\n{d.text}" if d.title else d.text)
            for query, documents in rows
            for d in documents
        ]
        if not pairs:
            return []
        try:
            scores = np.asarray(self._scorer(pairs), dtype=np.float64)
            if scores.shape != (len(pairs),):
                raise ValueError(f"it gave {scores.shape} numbers for {len(pairs)} pairs")
        except Exception as error:
            if len(rows) > 1:  # one query may be to blame
                return [self._scored([row])[0] for row in rows]
            return [SearchResult(error=f"the scorer failed: {failure(error).error}")]
        values = iter(scores.tolist())
        return [_with_scores(documents, [next(values) for _ in documents]) for _, documents in rows]


def _with_scores(documents: tuple[Document, ...], scores: list[float]) -> SearchResult:
    if not np.isfinite(scores).all():
        return SearchResult(error="the scorer failed: it gave a number that is not finite")
    pairs = zip(documents, scores, strict=True)
    return SearchResult(tuple(Document(d.id, d.title, d.text, score) for d, score in pairs))
