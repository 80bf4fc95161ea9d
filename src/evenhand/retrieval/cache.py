"""An on-disk cache over any retriever, in one sqlite file.

The key is the retriever's fingerprint, `k` and the query; failures are never kept. Threads and
processes may share the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from evenhand.core.errors import ConfigError, DataError
from evenhand.retrieval.base import (
    Retriever,
    RetrieverInfo,
    SearchResult,
    answer,
    info_of,
    search_one_by_one,
)
from evenhand.trajectory.protocol import Document

_BUSY_SECONDS = 30.0
_CREATE = "CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, documents TEXT NOT NULL)"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache did since it was opened, counted in queries that are not blank.

    Attributes:
        hits: answered without the retriever.
        misses: passed on to it.
        faults: times that the file could not be read or written (full disk, locked for longer
            than half a minute); the search went on without it.
    """

    hits: int = 0
    misses: int = 0
    faults: int = 0


class CachedRetriever:
    """Answers from a file what `base` was asked before.

    A query that stands twice in a batch is passed on once: one miss and one hit. Use the cache as a
    context manager, or call `close`.

    Args:
        base: answers what the file does not hold.
        path: the sqlite file; made if absent.
        fingerprint: tells results of different retrievers apart; by default the base's own.

    Raises:
        ConfigError: the base has no fingerprint and none is given.
        DataError: the file is no sqlite database or cannot be opened.
    """

    def __init__(self, base: Retriever, path: Path, *, fingerprint: str | None = None) -> None:
        known = fingerprint or info_of(base).fingerprint
        if not known:
            raise ConfigError(
                f"a cache over {type(base).__name__} needs a fingerprint, and it has none; "
                "give fingerprint='...', a text that changes whenever its results do"
            )
        self._base = base
        self._path = path
        self._fingerprint = known
        self._lock = threading.Lock()
        self._stats = CacheStats()
        self._process = os.getpid()
        self._connection = self._connect()

    @property
    def info(self) -> RetrieverInfo:
        """What the base is."""
        return info_of(self._base)

    @property
    def stats(self) -> CacheStats:
        """Hits, misses and faults so far."""
        return self._stats

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        """See `Retriever.search`."""
        return answer(queries, k, self._search_batch)

    def close(self) -> None:
        """Close the file. A later search goes to the base alone and counts a fault."""
        self._connection.close()

    def __enter__(self) -> CachedRetriever:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _search_batch(self, queries: list[str], k: int) -> list[SearchResult]:
        distinct = list(dict.fromkeys(queries))
        keys = {query: self._key(query, k) for query in distinct}
        known = self._read(keys)
        missing = [query for query in distinct if query not in known]
        asked = search_one_by_one(self._base, missing, k) if missing else []
        fresh = dict(zip(missing, asked, strict=True))
        self._write(
            {keys[query]: result for query, result in fresh.items() if result.error is None}
        )
        self._count(hits=len(queries) - len(missing), misses=len(missing))
        known.update(fresh)
        return [known[query] for query in queries]

    def _key(self, query: str, k: int) -> bytes:
        # JSON keeps the three parts apart whatever they hold.
        return hashlib.sha256(json.dumps([self._fingerprint, k, query]).encode()).digest()

    def _read(self, keys: dict[str, bytes]) -> dict[str, SearchResult]:
        found = {}
        try:
            with self._lock:
                connection = self._own_connection()
                for query, key in keys.items():
                    row = connection.execute(
                        "SELECT documents FROM results WHERE key = ?", (key,)
                    ).fetchone()
                    if row is not None:
                        found[query] = _from_text(row[0])
        except (sqlite3.DatabaseError, ValueError, TypeError):
            self._count(faults=1)
        return found

    def _write(self, results: dict[bytes, SearchResult]) -> None:
        if not results:
            return
        rows = [(key, _to_text(result)) for key, result in results.items()]
        try:
            with self._lock, self._own_connection() as connection:
                connection.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", rows)
        except sqlite3.DatabaseError:
            self._count(faults=1)

    def _count(self, *, hits: int = 0, misses: int = 0, faults: int = 0) -> None:
        with self._lock:
            was = self._stats
            self._stats = CacheStats(was.hits + hits, was.misses + misses, was.faults + faults)

    def _own_connection(self) -> sqlite3.Connection:
        if os.getpid() != self._process:  # sqlite connections must not cross a fork
            self._connection, self._process = self._connect(), os.getpid()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, check_same_thread=False)
        except sqlite3.Error as error:
            raise DataError(f"the cache {self._path} cannot be opened ({error})") from error
        try:
            # Readers do not wait for a writer, and a crash loses at most the last entries.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            with connection:
                connection.execute(_CREATE)
        except sqlite3.Error as error:
            connection.close()
            raise DataError(
                f"the cache {self._path} cannot be used ({error}); give another file or delete it"
            ) from error
        return connection


def _to_text(result: SearchResult) -> str:
    return json.dumps([[d.id, d.title, d.text, d.score] for d in result.documents])


def _from_text(text: str) -> SearchResult:
    return SearchResult(tuple(Document(*fields) for fields in json.loads(text)))
