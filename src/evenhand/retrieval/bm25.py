"""BM25 over title and text, with the bm25s library: the embedded default.

The index is bm25s's (its scores, its file names: `bm25s.BM25.load(folder)` reads it too), as are
the token pattern, the English stop words and the defaults `k1 = 1.5`, `b = 0.75`,
`method = "lucene"`. Words are stemmed by PyStemmer. What is ours is the search over it
(`evenhand.retrieval.kernels`), which breaks ties by id and may be called from several threads.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.core.errors import ConfigError, DataError, require
from evenhand.core.settings import check_number
from evenhand.retrieval.base import (
    Progress,
    RetrieverInfo,
    SearchResult,
    answer,
    check_above_zero,
    check_count,
    check_text,
)
from evenhand.retrieval.corpus import PackedCorpus, damaged, load_array
from evenhand.retrieval.kernels import Best, Postings, search_function
from evenhand.retrieval.manifest import Manifest, library_versions, new_index
from evenhand.trajectory.protocol import Document

KIND = "bm25"
METHODS = ("lucene", "robertson", "atire")
"""The variants in which a term that is absent adds 0, so that only matching passages score."""

TOKEN_PATTERN = r"(?u)\b\w\w+\b"
"""bm25s's default: words of at least two letters, digits or underscores."""

DATA, INDICES, INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
VOCABULARY = "vocab.index.json"

_PART = 32
"""Queries that one call of the compiled loop gets: longer calls were slower, by a third at 2000."""

_UNKNOWN = -1
_REPORT_EVERY = 2000


class Analyzer:
    """Turns text into the numbers of its terms: lower case, words, stop words out, stems.

    Args:
        stemmer: a PyStemmer algorithm (`english`), or `none`.
        stopwords: `en` or `en_plus` (bm25s's lists), or `none`.
        vocabulary: stem to number; grows while `learn` is true.
    """

    def __init__(
        self, stemmer: str, stopwords: str, vocabulary: dict[str, int], *, learn: bool = False
    ) -> None:
        self.vocabulary = vocabulary
        self._learn = learn
        self._words = re.compile(TOKEN_PATTERN).findall
        self._stem = _stemmer(stemmer)
        self._stopwords = _stopwords(stopwords)
        self._known: dict[str, int] = {}
        # PyStemmer's objects must not be entered by two threads at once.
        self._lock = threading.Lock()

    def terms(self, text: str) -> list[int]:
        """Return the numbers of the terms of a text, in order, unknown ones left out."""
        known = self._known
        numbers = []
        for word in self._words(text.lower()):
            number = known.get(word)
            if number is None:
                number = self._look_up(word)
            if number >= 0:
                numbers.append(number)
        return numbers

    def _look_up(self, word: str) -> int:
        with self._lock:
            if word in self._stopwords:
                number = _UNKNOWN
            else:
                stem = self._stem(word)
                if self._learn:
                    number = self.vocabulary.setdefault(stem, len(self.vocabulary))
                else:
                    number = self.vocabulary.get(stem, _UNKNOWN)
            if len(self._known) > 1_000_000 and not self._learn:
                self._known.clear()
            self._known[word] = number
            return number


def _stemmer(name: str) -> Callable[[str], str]:
    if check_text(name, "stemmer") == "none":
        return str
    library = require("Stemmer", "search", "BM25 search")
    if name not in library.algorithms():
        raise ConfigError(f"stemmer must be none or one of {library.algorithms()}, got {name!r}")
    stem: Callable[[str], str] = library.Stemmer(name).stemWord
    return stem


def _stopwords(name: str) -> frozenset[str]:
    if check_text(name, "stopwords") == "none":
        return frozenset()
    lists = require("bm25s.stopwords", "search", "BM25 search")
    names = {"en": lists.STOPWORDS_EN, "en_plus": lists.STOPWORDS_EN_PLUS}
    if name not in names:
        raise ConfigError(f"stopwords must be none, en or en_plus, got {name!r}")
    return frozenset(names[name])


class Bm25Retriever:
    """BM25 search over a packed corpus. Make one with `build` or `load_index`.

    Passages without any term of the query are never returned, so a result may be shorter than `k`
    or empty. Safe to use from several threads.

    Attributes:
        corpus: the passages.
        manifest: what the index is.
    """

    def __init__(
        self,
        corpus: PackedCorpus,
        postings: Postings,
        vocabulary: dict[str, int],
        manifest: Manifest,
        *,
        threads: int = 1,
        backend: str = "auto",
    ) -> None:
        check_count(threads, "threads")
        self.corpus = corpus
        self.manifest = manifest
        self._postings = postings
        self._threads = threads
        self._search = search_function(backend)
        self._analyzer = Analyzer(
            manifest.parameters["stemmer"], manifest.parameters["stopwords"], vocabulary
        )
        self._pool = ThreadPoolExecutor(threads, "bm25") if threads > 1 else None

    @property
    def info(self) -> RetrieverInfo:
        """What this retriever is."""
        return RetrieverInfo(KIND, self.manifest.fingerprint, len(self.corpus), self.corpus.hash)

    @classmethod
    def build(
        cls,
        documents: Iterable[Document],
        *,
        k1: float = 1.5,
        b: float = 0.75,
        method: str = "lucene",
        stemmer: str = "english",
        stopwords: str = "en",
        threads: int = 1,
        backend: str = "auto",
        progress: Progress | None = None,
    ) -> Bm25Retriever:
        """Index passages; title and text are searched as one text.

        Args:
            documents: the corpus, read once.
            k1: how soon repeated terms saturate, above 0.
            b: how much long passages are held back, in [0, 1].
            method: `lucene`, `robertson` or `atire` (see Kamphuis et al., ECIR 2020).
            stemmer: a PyStemmer algorithm, or `none`.
            stopwords: `en`, `en_plus` or `none`.
            threads: threads that share the queries of a batch.
            backend: `numba`, `numpy` or `auto`.
            progress: is told how far the work is.

        Raises:
            ConfigError: a setting out of its range.
            DataError: an unusable corpus (see `PackedCorpus.pack`), or one without any term.
        """
        if method not in METHODS:
            raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        k1, b = check_above_zero(k1, "k1"), check_number(b, "b", 0.0, 1.0)
        check_count(threads, "threads")  # all of them before an hour of work, not after it
        search_function(backend)
        library = require("bm25s", "search", "BM25 search")
        parameters = {
            "k1": k1,
            "b": b,
            "method": method,
            "stemmer": stemmer,
            "stopwords": stopwords,
            "token_pattern": TOKEN_PATTERN,
        }
        report = progress or (lambda *_: None)
        analyzer = Analyzer(stemmer, stopwords, {}, learn=True)
        report("reading", 0, 0)
        corpus = PackedCorpus.pack(documents)
        terms = _analyze(corpus, analyzer, report)
        if not analyzer.vocabulary:
            raise DataError("no passage of the corpus holds a term to index; check title and text")
        report("indexing", 0, 0)
        model = library.BM25(k1=k1, b=b, method=method)
        model.index((terms, analyzer.vocabulary), create_empty_token=False, show_progress=False)
        del terms
        postings = Postings(
            model.scores["data"].astype(np.float32, copy=False),
            model.scores["indices"].astype(np.int32, copy=False),
            model.scores["indptr"].astype(np.int64, copy=False),
            corpus.rank,
        )
        for values in postings:  # as from a file: one compiled variant of the loop serves both
            values.flags.writeable = False
        manifest = Manifest(
            KIND, corpus.hash, len(corpus), parameters, library_versions("bm25s", "PyStemmer")
        )
        return cls(
            corpus, postings, analyzer.vocabulary, manifest, threads=threads, backend=backend
        )

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the index folder; it appears whole or not at all (see `new_index`)."""
        with new_index(path, self.manifest, overwrite=overwrite) as folder:
            self.corpus.save(folder)
            np.save(folder / DATA, self._postings.data, allow_pickle=False)
            np.save(folder / INDICES, self._postings.indices, allow_pickle=False)
            np.save(folder / INDPTR, self._postings.indptr, allow_pickle=False)
            vocabulary = json.dumps(self._analyzer.vocabulary, ensure_ascii=False)
            (folder / VOCABULARY).write_text(vocabulary, encoding="utf-8")
            parameters = self.manifest.parameters
            for_bm25s = {name: parameters[name] for name in ("k1", "b", "method")}
            for_bm25s["num_docs"] = len(self.corpus)
            (folder / "params.index.json").write_text(json.dumps(for_bm25s), encoding="utf-8")

    @classmethod
    def open(
        cls,
        path: Path,
        manifest: Manifest,
        *,
        threads: int = 1,
        backend: str = "auto",
        memory_map: bool = False,
    ) -> Bm25Retriever:
        """Open an index folder whose manifest was read (`load_index` does both).

        Passages are memory-mapped; with `memory_map` the postings are too, so that several
        processes share them and an index larger than memory works (about a sixth slower).

        Raises:
            DataError: files are damaged or do not fit together.
        """
        corpus = PackedCorpus.open(path, manifest.corpus_hash)
        try:
            postings = Postings(
                load_array(path / DATA, "f4", memory_map=memory_map),
                load_array(path / INDICES, "i4", memory_map=memory_map),
                load_array(path / INDPTR, "i8", memory_map=memory_map),
                corpus.rank,
            )
            vocabulary = json.loads((path / VOCABULARY).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise damaged(path, f"the BM25 index cannot be read ({error})") from error
        if len(corpus) != manifest.passages or not _fit(postings, vocabulary):
            raise damaged(path, "postings, vocabulary and passages do not fit together")
        told = [manifest.parameters.get(name) for name in ("stemmer", "stopwords", "token_pattern")]
        if not all(isinstance(text, str) for text in told) or told[2] != TOKEN_PATTERN:
            raise damaged(path, "its manifest does not say how text was split into terms")
        return cls(corpus, postings, vocabulary, manifest, threads=threads, backend=backend)

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        """See `Retriever.search`. Scores are the sums of bm25s, the same for any batch."""
        return answer(queries, k, self._search_batch)

    def _search_batch(self, queries: list[str], k: int) -> list[SearchResult]:
        k = min(k, len(self.corpus))
        terms = [self._analyzer.terms(query) for query in queries]
        size = min(_PART, -(-len(terms) // self._threads))
        parts = [terms[at : at + size] for at in range(0, len(terms), size)]
        run = map if self._pool is None or len(parts) == 1 else self._pool.map
        found = run(lambda part: self._best(part, k), parts)
        return [result for best in found for result in self._results(best)]

    def _best(self, terms: list[list[int]], k: int) -> Best:
        starts = np.zeros(len(terms) + 1, dtype=np.int64)
        np.cumsum([len(of_query) for of_query in terms], out=starts[1:])
        flat = np.fromiter((term for of_query in terms for term in of_query), np.int64, starts[-1])
        return self._search(self._postings, flat, starts, k)

    def _results(self, best: Best) -> list[SearchResult]:
        document = self.corpus.document
        return [
            SearchResult(
                tuple(document(at, score) for at, score in zip(row, scores, strict=True) if at >= 0)
            )
            for row, scores in zip(best.passage.tolist(), best.score.tolist(), strict=True)
        ]


def _analyze(corpus: PackedCorpus, analyzer: Analyzer, report: Progress) -> list[array[int]]:
    terms = []
    for at, document in enumerate(corpus):
        if at % _REPORT_EVERY == 0:
            report("tokenising", at, len(corpus))
        # An array holds a number in 4 bytes, a list in 8 and the number itself besides.
        terms.append(array("i", analyzer.terms(f"{document.title} {document.text}")))
    report("tokenising", len(corpus), len(corpus))
    return terms


def _fit(postings: Postings, vocabulary: Any) -> bool:
    # The compiled loop does not check bounds: a damaged file must not reach it.
    data, indices, indptr, rank = postings
    return (
        isinstance(vocabulary, dict)
        and len(indptr) == len(vocabulary) + 1
        and len(data) == len(indices) == indptr[-1]
        and indptr[0] == 0
        and bool((np.diff(indptr) >= 0).all())
        and (len(indices) == 0 or bool(indices.min() >= 0 and indices.max() < len(rank)))
        and list(vocabulary.values()) == list(range(len(vocabulary)))
    )
