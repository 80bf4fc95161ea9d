"""A search engine behind HTTP: a client for the `/retrieve` dialects."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from evenhand.retrieval.base import RetrieverInfo, SearchResult, answer, check_count
from evenhand.retrieval.dialect import read_results
from evenhand.retrieval.http import (
    Budget,
    FaultKind,
    HttpFault,
    HttpSettings,
    JsonClient,
    run,
)

_LEAF_ATTEMPTS = 2


class RemoteRetriever:
    """Search by POST of `{query_field: [...], k_field: k, "return_scores": true}`.

    What happens when a request fails, in this order:

    1. A fault that may pass (no connection, 408, 425, 429, 5xx, a time-out, a broken connection,
       no JSON, a wrong schema) is retried with growing pauses (see `HttpSettings`); `Retry-After`
       is obeyed up to `max_backoff`.
    2. If the batch still fails, and one of its queries or its size may be the cause, it is halved,
       and the halves again, down to single queries. Halves get one attempt, single queries two.
    3. If no query can be the cause (no connection, 401, 404, 429, ...), the rest of the call
       fails without further requests.

    A query that ends here has a `SearchResult` with an `error`; the others are answered. Equal
    queries are sent once. `search` blocks; it may be called from several threads, and from a
    thread in which an event loop runs.

    Args:
        url: the whole address, `http://host:port/retrieve`.
        http: how patient a request is.
        query_field: the name of the list of queries in the request.
        k_field: the name of the number of documents.
        batch_size: most queries of one request.
        concurrency: most requests at the same time.
        max_requests: most requests of one call; by default 16 + 4 a query.
        max_seconds: no request of a call starts later than this after its beginning.

    Raises:
        ConfigError: not an address, or a setting out of its range.
    """

    def __init__(
        self,
        url: str,
        http: HttpSettings | None = None,
        *,
        query_field: str = "queries",
        k_field: str = "topk",
        batch_size: int = 64,
        concurrency: int = 4,
        max_requests: int | None = None,
        max_seconds: float = 300.0,
    ) -> None:
        self._client = JsonClient(url, http or HttpSettings())
        self._fields = (query_field, k_field)
        self._batch_size = check_count(batch_size, "batch_size")
        self._concurrency = check_count(concurrency, "concurrency")
        self._max_requests = max_requests and check_count(max_requests, "max_requests")
        self._max_seconds = max_seconds
        self._calls = itertools.count()

    @property
    def info(self) -> RetrieverInfo:
        """What this retriever is. It takes the address for the identity of what stands behind."""
        return RetrieverInfo("remote", f"remote:{self._client.shown_url}:{self._fields}")

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        """See `Retriever.search`. Scores are the server's; without scores its order counts."""
        return answer(queries, k, self._search_batch)

    def _search_batch(self, queries: list[str], k: int) -> list[SearchResult]:
        distinct = list(dict.fromkeys(queries))
        found = run(self._search_all(distinct, k))
        return [found[query] for query in queries]

    async def _search_all(self, queries: list[str], k: int) -> dict[str, SearchResult]:
        limit = self._max_requests or 16 + 4 * len(queries)
        seed = f"{self._client.settings.seed}:{next(self._calls)}"
        async with self._client.open() as client:
            call = _Call(self, client, k, Budget(limit, self._max_seconds), random.Random(seed))
            turns = asyncio.Semaphore(self._concurrency)

            async def in_turn(batch: list[str]) -> None:
                async with turns:
                    await call.solve(batch)

            size = self._batch_size
            batches = [queries[at : at + size] for at in range(0, len(queries), size)]
            async with asyncio.TaskGroup() as group:
                for batch in batches:
                    group.create_task(in_turn(batch))
        return call.results

    async def _ask(self, client: Any, queries: list[str], k: int) -> list[SearchResult]:
        query_field, k_field = self._fields
        body = {query_field: queries, k_field: k, "return_scores": True}
        payload = await self._client.request(client, "POST", json=body)
        try:
            return read_results(payload, len(queries))
        except ValueError as error:
            raise HttpFault(
                FaultKind.BAD_ANSWER, f"{self._client.shown_url}: wrong schema: {error}"
            ) from None


class _Call:
    """One call of `search`: what it knows so far, and what it may still spend."""

    def __init__(
        self,
        retriever: RemoteRetriever,
        client: Any,
        k: int,
        budget: Budget,
        chance: random.Random,
    ) -> None:
        self.results: dict[str, SearchResult] = {}
        self._retriever = retriever
        self._client = client
        self._k = k
        self._budget = budget
        self._chance = chance
        self._down: str | None = None

    async def solve(self, batch: list[str]) -> None:
        """Find a result for every query of a batch."""
        http = self._retriever._client
        waiting = deque([(batch, 1 + http.settings.retries)])
        while waiting:
            part, attempts = waiting.popleft()
            if self._down is not None:
                self._fail(part, self._down)
                continue
            try:
                found = await http.with_retries(
                    lambda part=part: self._retriever._ask(self._client, part, self._k),  # type: ignore[misc]
                    self._budget,
                    self._chance,
                    attempts=attempts,
                )
                self.results.update(zip(part, found, strict=True))
            except HttpFault as fault:
                if not fault.may_be_one_query:
                    self._down = str(fault)
                if fault.may_be_one_query and len(part) > 1:
                    middle = len(part) // 2
                    for half in (part[:middle], part[middle:]):
                        waiting.append((half, 1 if len(half) > 1 else _LEAF_ATTEMPTS))
                else:
                    self._fail(part, str(fault))

    def _fail(self, part: list[str], reason: str) -> None:
        self.results.update((query, SearchResult(error=reason)) for query in part)
