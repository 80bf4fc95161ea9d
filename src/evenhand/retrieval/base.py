"""What a search engine is, and the guarantees that every back end shares.

A back end finds documents; `answer` makes its results keep the contract of `Retriever.search`, so
that no back end writes those rules again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from evenhand.core.errors import ConfigError, DataError, EvenhandError, RetrievalError
from evenhand.trajectory.protocol import Document, usable_document, valid_unicode

Progress = Callable[[str, int, int], None]
"""`(stage, done, total)`: told now and then during long work."""

PADDING_ID = "-1"
"""What search libraries put where they found nothing; never the id of a passage."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer to one query.

    Attributes:
        documents: best first. Empty where nothing matches, and where the query failed.
        error: why the query could not be answered after its retries (an environment fault), or
            `None`. A result with an error has no documents.
    """

    documents: tuple[Document, ...] = ()
    error: str | None = None

    def __post_init__(self) -> None:
        if self.error is not None and self.documents:
            raise DataError("a failed search result must have no documents")


NOTHING = SearchResult()
"""The result of a query that was answered and matched nothing."""


@runtime_checkable
class Retriever(Protocol):
    """A search engine that answers queries in batches."""

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        """Return one result a query, in the order of the queries.

        Each result holds at most `k` different documents, best first, equal scores in the order
        of their ids (as strings). A `k` beyond the corpus gives what there is. A blank query
        gives nothing. A query that cannot be answered gives a result with an `error`; it leaves
        the others alone.

        Raises:
            ConfigError: `k` is not a positive whole number.
            DataError: `queries` is a single string or holds something other than strings.
        """
        ...


@dataclass(frozen=True, slots=True)
class RetrieverInfo:
    """What a retriever says about itself.

    Attributes:
        kind: `bm25`, `dense`, `hybrid`, ...; the class name for a user's own.
        fingerprint: text that is the same for two retrievers if and only if they give the same
            results; `None` if the retriever cannot tell.
        passages: how many passages it searches, if it knows.
        corpus_hash: hash of these passages, if it knows (see `corpus_hash`).
    """

    kind: str
    fingerprint: str | None = None
    passages: int | None = None
    corpus_hash: str | None = None


def info_of(retriever: Retriever) -> RetrieverInfo:
    """Return `retriever.info` if it has one, else its class name and nothing more."""
    info = getattr(retriever, "info", None)
    return info if isinstance(info, RetrieverInfo) else RetrieverInfo(type(retriever).__name__)


def check_k(k: int) -> int:
    """Return `k` if it is a positive whole number, else raise a `ConfigError`."""
    return check_count(k, "k")


def check_count(value: object, name: str, *, least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `least`, else raise a `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def check_above_zero(value: object, name: str, *, or_zero: bool = False) -> float:
    """Return `value` as a float if it is a finite number above 0, else raise a `ConfigError`.

    With `or_zero` it may be 0 too.
    """
    usable = (
        not isinstance(value, bool)
        and isinstance(value, int | float)
        and 0 <= value <= sys.float_info.max
        and (or_zero or value > 0)
    )
    if not usable:
        bound = "of at least 0" if or_zero else "above 0"
        raise ConfigError(f"{name} must be a finite number {bound}, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def check_list(value: object, name: str, what: str) -> Sequence[Any]:
    """Return `value` if it is a sequence and no string, else raise a `ConfigError`."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list of {what}, got {value!r}")
    return value


def check_text(value: object, name: str) -> str:
    """Return `value` if it is a string, else raise a `ConfigError`."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a text, got {value!r}")
    return value


def clean_query(query: str) -> str:
    """Return a query well formed and without surrounding blanks.

    Raises:
        DataError: not a string.
    """
    if not isinstance(query, str):
        raise DataError(f"a query must be a string, got {type(query).__name__}")
    return valid_unicode(query).strip()


def failure(error: Exception) -> SearchResult:
    """Return the result of a query whose search raised `error`."""
    own = isinstance(error, EvenhandError)
    return SearchResult(error=str(error) if own else f"{type(error).__name__}: {error}")


def clean_result(result: object) -> SearchResult:
    """Return what a retriever gave for a query with fields of plain types, or an `error` instead.

    A user's own retriever may give a numpy number as a score or a whole number as an id: they
    become `float` and `str`. A score that is not finite, a title or text that is no string, or
    something other than a `SearchResult` is a failure of the query.
    """
    if not isinstance(result, SearchResult):
        return SearchResult(error=f"the retriever gave {type(result).__name__}, no SearchResult")
    if result.error is not None:
        return SearchResult(error=str(result.error))
    try:
        documents = tuple([usable_document(document) for document in result.documents])
    except ValueError as error:
        return SearchResult(error=f"the retriever gave an unusable document, whose {error}")
    except (TypeError, AttributeError) as error:
        return SearchResult(error=f"the retriever gave an unusable document: {error}")
    return SearchResult(documents)


def ranked(documents: Iterable[Document], k: int) -> tuple[Document, ...]:
    """Return the best `k` of `documents`, each id once, never the padding id.

    If all of them have a score they are sorted by it, falling, and by id (as strings) where it is
    equal. Otherwise their order is the ranking. Of several with one id the first is kept.
    """
    unique: dict[str, Document] = {}
    for document in documents:
        if document.id != PADDING_ID:
            unique.setdefault(document.id, document)
    # Ids differ, so the comparison of two entries never reaches the documents.
    scored = [(-d.score, name, d) for name, d in unique.items() if d.score is not None]
    if len(scored) < len(unique):
        return tuple(unique.values())[:k]
    scored.sort()
    return tuple([document for _, _, document in scored[:k]])


def answer(
    queries: Sequence[str],
    k: int,
    search_batch: Callable[[list[str], int], Sequence[SearchResult]],
) -> list[SearchResult]:
    """Answer `queries` through `search_batch` and keep the contract of `Retriever.search`.

    Args:
        queries: as the caller gave them.
        k: how many documents a query.
        search_batch: gets the queries that are not blank, cleaned, and `k`; returns one result
            each, in order. It may return too many documents, duplicates, padding ids and equal
            scores in any order, as long as every document of the best `k` under the order of
            `ranked` is among them. It is not called without a query.

    Raises:
        RetrievalError: `search_batch` returned another number of results than queries.
    """
    check_k(k)
    if isinstance(queries, str):
        raise DataError("queries must be a list of strings, got one string; put it in a list")
    texts = [clean_query(query) for query in queries]
    asked = [at for at, text in enumerate(texts) if text]
    results = [NOTHING] * len(texts)
    if not asked:
        return results
    found = search_batch([texts[at] for at in asked], k)
    if len(found) != len(asked):
        raise RetrievalError(
            f"{len(asked)} queries got {len(found)} results; they must be parallel"
        )
    for at, given in zip(asked, found, strict=True):
        result = clean_result(given)
        results[at] = (
            result if result.error is not None else SearchResult(ranked(result.documents, k))
        )
    return results


def search_one_by_one(retriever: Retriever, queries: Sequence[str], k: int) -> list[SearchResult]:
    """Search a batch; if that raises, search each query alone, so that only its own fault hits it.

    For places that must go on whatever a retriever does (a server, the parts of a hybrid): a
    retriever of a user's own may raise for a whole batch because of one query, or give documents
    that break the contract. Either becomes the query's `error` (see `clean_result`).
    """
    try:
        results = list(retriever.search(queries, k))
        if len(results) == len(queries):
            return [clean_result(result) for result in results]
    except Exception as error:
        if len(queries) == 1:
            return [failure(error)]
    if len(queries) == 1:
        return [SearchResult(error="the retriever did not return one result for one query")]
    return [search_one_by_one(retriever, [query], k)[0] for query in queries]
