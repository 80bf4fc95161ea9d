"""Scripted retrievers, and a real HTTP server on loopback that misbehaves on request."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any

from evenhand.retrieval.base import RetrieverInfo, SearchResult, answer
from evenhand.trajectory.protocol import Document


class ScriptedRetriever:
    """Answers from a table; what it was asked is kept in `calls`.

    Args:
        table: query to documents; any other query gives nothing.
        failing: queries that end with an error.
        raising: queries that make the whole call raise, as a defect of a user's retriever would.
        seconds: how long each call takes.
        fingerprint: what `info` says; `None` stands for a retriever that cannot tell.
    """

    def __init__(
        self,
        table: Mapping[str, Sequence[Document]],
        *,
        failing: Sequence[str] = (),
        raising: Sequence[str] = (),
        seconds: float = 0.0,
        fingerprint: str | None = "scripted",
    ) -> None:
        self.calls: list[list[str]] = []
        self.info = RetrieverInfo("scripted", fingerprint, len(table))
        self._table = table
        self._failing = frozenset(failing)
        self._raising = frozenset(raising)
        self._seconds = seconds

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        """See `Retriever.search`."""
        return answer(queries, k, self._search_batch)

    def _search_batch(self, queries: list[str], _: int) -> list[SearchResult]:
        self.calls.append(queries)
        time.sleep(self._seconds)
        if self._raising.intersection(queries):
            raise ValueError("scripted defect")
        return [
            SearchResult(error="scripted failure")
            if query in self._failing
            else SearchResult(tuple(self._table.get(query, ())))
            for query in queries
        ]


class Fault(StrEnum):
    """What a `FaultyServer` can do to a request instead of answering it."""

    STATUS_500 = "status 500"
    """Status 500 with a JSON body."""
    STATUS_429 = "status 429"
    """Status 429 with `Retry-After: 3600`."""
    STATUS_401 = "status 401"
    """Status 401."""
    HTML = "html"
    """Status 200 with an HTML page."""
    HTML_AS_JSON = "html as json"
    """Status 200 with an HTML page that calls itself JSON."""
    EMPTY = "empty"
    """Status 200 with no body."""
    WRONG_SCHEMA = "wrong schema"
    """Status 200 with JSON of another layout."""
    WRONG_COUNT = "wrong count"
    """Status 200 with one result too many."""
    HALF_BODY = "half a body"
    """Half of the promised bytes, then the connection closes."""
    DRIP = "drip"
    """A good answer, one byte a tenth of a second."""
    DRIP_HEADERS = "drip headers"
    """Not even the headers: one byte a tenth of a second."""
    SILENT = "silent"
    """Nothing; the connection stays open."""
    CLOSE = "close"
    """The connection closes without an answer."""
    DEEP = "deep"
    """JSON that is nested 100,000 deep."""
    REDIRECT = "redirect"
    """Status 302."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request as a `FaultyServer` saw it.

    Attributes:
        method: `GET`, `POST`.
        target: path and query string.
        body: parsed JSON, or `None` without a body.
    """

    method: str
    target: str
    body: Any = None


Answer = Callable[[HttpRequest], "tuple[int, Any] | Fault"]
"""Gives status and JSON content for a request, or a fault."""


@dataclass
class FaultyServer:
    """A small HTTP server on a free loopback port, for the time of a `with` block.

    Attributes:
        answer: decides about each request; called from several threads.
        requests: those that were received, in order.
    """

    answer: Answer
    requests: list[HttpRequest] = field(default_factory=list)

    def __enter__(self) -> FaultyServer:
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        # A blocked accept is not woken by closing its socket on every system; a connection is.
        socket.create_connection(("127.0.0.1", self._port)).close()
        for thread in self._threads:
            thread.join(timeout=5)
        self._listener.close()

    @property
    def url(self) -> str:
        """Its address, without a path."""
        return f"http://127.0.0.1:{self._port}"

    def _accept(self) -> None:
        while not self._stop.is_set():
            connection, _ = self._listener.accept()
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(0.05)
            try:
                request = self._read(connection)
                if request is not None:
                    self.requests.append(request)
                    self._reply(connection, self.answer(request))
            except OSError:  # the client has gone, which is what many faults make it do
                return

    def _read(self, connection: socket.socket) -> HttpRequest | None:
        data = b""
        length = None
        while length is None or len(data) < length:
            try:
                piece = connection.recv(65536)
            except TimeoutError:
                if self._stop.is_set():
                    return None
                continue
            if not piece:
                return None
            data += piece
            head, end, _ = data.partition(b"\r\n\r\n")
            if length is None and end:
                length = len(head) + 4 + _content_length(head)
        head, _, body = data.partition(b"\r\n\r\n")
        method, target, _ = head.decode("latin-1").split(" ", 2)
        return HttpRequest(method, target, json.loads(body) if body else None)

    def _reply(self, connection: socket.socket, reply: tuple[int, Any] | Fault) -> None:
        connection.settimeout(None)
        if isinstance(reply, tuple):
            connection.sendall(_response(reply[0], json.dumps(reply[1]).encode()))
            return
        page = b"<html><body>502 Bad Gateway</body></html>"
        whole = {
            Fault.STATUS_500: _response(500, b'{"error": "internal"}'),
            Fault.STATUS_429: _response(429, b"{}", extra="Retry-After: 3600\r\n"),
            Fault.STATUS_401: _response(401, b"{}"),
            Fault.HTML: _response(200, page, kind="text/html"),
            Fault.HTML_AS_JSON: _response(200, page),
            Fault.EMPTY: _response(200, b""),
            Fault.WRONG_SCHEMA: _response(200, b'{"documents": [1, 2]}'),
            Fault.WRONG_COUNT: _response(200, json.dumps({"result": [[]] * 1000}).encode()),
            Fault.DEEP: _response(200, b"[" * 100_000),
            Fault.REDIRECT: _response(302, b"", extra="Location: http://127.0.0.1:1/\r\n"),
        }
        good = _response(200, json.dumps({"result": [[]]}).encode())
        if reply in whole:
            connection.sendall(whole[reply])
        elif reply is Fault.HALF_BODY:
            connection.sendall(good[:-8])
        elif reply in (Fault.DRIP, Fault.DRIP_HEADERS):
            start = good.index(b"\r\n\r\n") + 4 if reply is Fault.DRIP else 0
            connection.sendall(good[:start])
            for at in range(start, len(good)):
                if self._stop.wait(0.1):
                    return
                connection.sendall(good[at : at + 1])
        elif reply is Fault.SILENT:
            self._stop.wait()


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


def _response(
    status: int, body: bytes, *, kind: str = "application/json", extra: str = ""
) -> bytes:
    head = (
        f"HTTP/1.1 {status} Scripted\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n{extra}\r\n"
    )
    return head.encode() + body
