"""Web search: one small provider interface, and SearXNG's JSON interface as a provider."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from evenhand.core.errors import RetrievalError
from evenhand.retrieval.base import (
    RetrieverInfo,
    SearchResult,
    answer,
    check_above_zero,
    check_count,
    failure,
)
from evenhand.retrieval.http import (
    Budget,
    FaultKind,
    HttpFault,
    HttpSettings,
    JsonClient,
    run,
)
from evenhand.trajectory.protocol import Document, valid_unicode


class WebProvider(Protocol):
    """A web search service."""

    name: str
    """Which service it is; goes into the fingerprint."""

    def search(self, query: str, k: int) -> Sequence[Document]:
        """Return at most `k` documents, best first; the address of a page is its id.

        Called from several threads.

        Raises:
            RetrievalError: the service did not answer, after whatever retries it deserves.
        """
        ...


class WebRetriever:
    """Any web provider as a retriever; a query that fails fails alone.

    Args:
        provider: the service.
        concurrency: most queries that are asked at the same time.

    Raises:
        ConfigError: `concurrency` below 1.
    """

    def __init__(self, provider: WebProvider, *, concurrency: int = 4) -> None:
        self._provider = provider
        self._concurrency = check_count(concurrency, "concurrency")

    @property
    def info(self) -> RetrieverInfo:
        """What this retriever is."""
        return RetrieverInfo("web", f"web:{self._provider.name}")

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        """See `Retriever.search`. Equal queries of a batch are asked once."""
        return answer(queries, k, self._search_batch)

    def _search_batch(self, queries: list[str], k: int) -> list[SearchResult]:
        distinct = list(dict.fromkeys(queries))
        with ThreadPoolExecutor(min(self._concurrency, len(distinct)), "web") as pool:
            found = dict(
                zip(distinct, pool.map(lambda query: self._ask(query, k), distinct), strict=True)
            )
        return [found[query] for query in queries]

    def _ask(self, query: str, k: int) -> SearchResult:
        try:
            return SearchResult(tuple(self._provider.search(query, k)))
        except Exception as error:  # also one of a user's own provider
            return failure(error)


class SearxngProvider:
    """SearXNG's `GET /search?format=json` (the instance must allow the format `json`).

    A document's id is the page's address, its text the snippet. The order is SearXNG's own; its
    scores are not comparable between queries and are left out. Further pages are read until `k`
    documents are there, a page brings nothing new, or `max_pages` are read.

    Args:
        url: of the instance, `http://host:port`.
        http: how patient a request is.
        language: as SearXNG names it (`en`, `all`).
        engines: names of engines, comma separated; by default the instance's.
        max_pages: most pages a query.
        max_seconds: no request of a query starts later than this after its beginning.
    """

    def __init__(
        self,
        url: str,
        http: HttpSettings | None = None,
        *,
        language: str = "en",
        engines: str = "",
        max_pages: int = 3,
        max_seconds: float = 120.0,
    ) -> None:
        self._client = JsonClient(f"{url.rstrip('/')}/search", http or HttpSettings())
        self._parameters = {"format": "json", "language": language}
        if engines:
            self._parameters["engines"] = engines
        self._max_pages = check_count(max_pages, "max_pages")
        self._max_seconds = check_above_zero(max_seconds, "max_seconds")
        self._calls = itertools.count()
        self.name = f"searxng:{self._client.identity}:{(language, engines, max_pages)}"

    def search(self, query: str, k: int) -> list[Document]:
        """See `WebProvider.search`."""
        try:
            return run(self._pages(query, k))
        except HttpFault as fault:
            raise RetrievalError(str(fault)) from fault

    async def _pages(self, query: str, k: int) -> list[Document]:
        attempts = 1 + self._client.settings.retries
        budget = Budget(attempts * self._max_pages, self._max_seconds)
        chance = random.Random(f"{self._client.settings.seed}:{next(self._calls)}")
        found: dict[str, Document] = {}
        async with self._client.open() as client:
            for page in range(1, self._max_pages + 1):
                parameters = {"q": query, "pageno": page, **self._parameters}
                documents = await self._client.with_retries(
                    lambda p=parameters: self._page(client, p),  # type: ignore[misc]
                    budget,
                    chance,
                    attempts=attempts,
                )
                before = len(found)
                for document in documents:
                    found.setdefault(document.id, document)
                if len(found) >= k or len(found) == before:
                    break
        return list(found.values())[:k]

    async def _page(self, client: Any, parameters: dict[str, Any]) -> list[Document]:
        payload = await self._client.request(client, "GET", params=parameters)
        try:
            return read_page(payload)
        except ValueError as error:
            raise HttpFault(
                FaultKind.BAD_ANSWER, f"{self._client.shown_url}: wrong schema: {error}"
            ) from None


def read_page(payload: object) -> list[Document]:
    """Read the parsed JSON of one page of SearXNG.

    Raises:
        ValueError: another layout.
    """
    entries = payload.get("results") if isinstance(payload, Mapping) else None
    if not isinstance(entries, list):
        raise ValueError("no list 'results'")
    return [_document(entry) for entry in entries]


def _document(entry: object) -> Document:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("url"), str):
        raise ValueError("a result without 'url'")
    title, text = ("" if entry.get(name) is None else entry[name] for name in ("title", "content"))
    if not isinstance(title, str) or not isinstance(text, str):
        raise ValueError("a result whose title or content is not text")
    return Document(valid_unicode(entry["url"]), valid_unicode(title), valid_unicode(text))
