"""Micro-batches: requests that arrive while a search runs are answered by one search after it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from evenhand.retrieval.base import Retriever, SearchResult, search_one_by_one


@dataclass(slots=True)
class BatchCounts:
    """What a batcher did so far.

    Attributes:
        queries: answered or failed.
        failed: ended with an error.
        batches: calls of the retriever.
        largest: most queries of one call.
    """

    queries: int = 0
    failed: int = 0
    batches: int = 0
    largest: int = 0


@dataclass(slots=True)
class _Waiting:
    queries: list[str]
    k: int
    done: asyncio.Future[list[SearchResult]] = field(repr=False)


class MicroBatcher:
    """Collects requests of an event loop and searches them in one worker thread.

    The thread takes whatever waits, up to `max_queries`, and searches it at once: an idle server
    answers without waiting for company, a busy one fills its batches. Requests for another `k`
    are searched in a call of their own, because for some retrievers the best three are not the
    start of the best ten. A retriever that raises is asked query by query, so only the queries
    that make it raise fail.

    Args:
        retriever: is called from one thread at a time.
        max_queries: most queries of one call, except that a request is never divided.
    """

    def __init__(self, retriever: Retriever, *, max_queries: int = 256) -> None:
        self.counts = BatchCounts()
        self._retriever = retriever
        self._max_queries = max_queries
        self._queue: list[_Waiting] = []
        self._arrived = asyncio.Event()
        self._closing = False
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "search")

    def start(self) -> None:
        """Start the worker; call it inside the event loop."""
        self._worker = asyncio.create_task(self._work())

    async def search(self, queries: list[str], k: int) -> list[SearchResult]:
        """Return one result a query."""
        if not queries:
            return []
        waiting = _Waiting(queries, k, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._arrived.set()
        return await waiting.done

    async def close(self) -> None:
        """Answer what waits, then stop."""
        self._closing = True
        self._arrived.set()
        if self._worker is not None:
            await self._worker
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._queue:
                batch = self._take()
                queries = [query for waiting in batch for query in waiting.queries]
                results = await loop.run_in_executor(
                    self._thread, search_one_by_one, self._retriever, queries, batch[0].k
                )
                self._count(results)
                self._hand_out(batch, results)
            if self._closing:
                return

    def _take(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        left: list[_Waiting] = []
        k, size = self._queue[0].k, 0
        for waiting in self._queue:
            fits = not taken or size + len(waiting.queries) <= self._max_queries
            if waiting.k == k and fits and not waiting.done.cancelled():
                taken.append(waiting)
                size += len(waiting.queries)
            elif not waiting.done.cancelled():
                left.append(waiting)
        self._queue = left
        return taken

    def _hand_out(self, batch: list[_Waiting], results: Sequence[SearchResult]) -> None:
        start = 0
        for waiting in batch:
            stop = start + len(waiting.queries)
            if not waiting.done.done():  # the client may have gone meanwhile
                waiting.done.set_result(list(results[start:stop]))
            start = stop

    def _count(self, results: Sequence[SearchResult]) -> None:
        self.counts.queries += len(results)
        self.counts.failed += sum(result.error is not None for result in results)
        self.counts.batches += 1
        self.counts.largest = max(self.counts.largest, len(results))
