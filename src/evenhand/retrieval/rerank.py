"""A cross-encoder over another retriever: it reads query and passage together and sorts anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from evenhand.errors import ConfigError, RetrievalError, require
from evenhand.protocol import Document
from evenhand.retrieval.base import (
    Retriever,
    RetrieverInfo,
    SearchResult,
    answer,
    check_count,
    info_of,
)

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
        self._batch_size = batch_size
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
    score are returned. A query on which the base fails keeps the base's error.

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
        """See `Retriever.search`. The score is the scorer's.

        Raises:
            RetrievalError: the scorer did not return one finite number a pair.
        """
        return answer(queries, k, self._search_batch)

    def _search_batch(self, queries: list[str], k: int) -> list[SearchResult]:
        candidates = self._base.search(queries, max(k, self._depth))
        pairs = [
            (query, f"{d.title}\n{d.text}" if d.title else d.text)
            for query, result in zip(queries, candidates, strict=True)
            for d in result.documents
        ]
        scores = iter(self._scores(pairs))
        return [
            result
            if result.error is not None
            else SearchResult(
                tuple(Document(d.id, d.title, d.text, next(scores)) for d in result.documents)
            )
            for result in candidates
        ]

    def _scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        if not pairs:
            return []
        scores = np.asarray(self._scorer(pairs), dtype=np.float64)
        if scores.shape != (len(pairs),) or not np.isfinite(scores).all():
            raise RetrievalError(
                f"the scorer gave {scores.shape} numbers for {len(pairs)} pairs, or one that is "
                "not finite; it must give one finite number a pair"
            )
        values: list[float] = scores.tolist()
        return values
