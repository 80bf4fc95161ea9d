"""The search server: POST `/retrieve` in the dialects in use, GET `/health`, JSON errors always.

It listens on the loopback address unless told otherwise; it has no authentication of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from evenhand import __version__
from evenhand.core.errors import require
from evenhand.core.serving import listen, quiet_server
from evenhand.core.settings import check_choice
from evenhand.retrieval.base import Retriever, RetrieverInfo, info_of, search_one_by_one
from evenhand.retrieval.batching import MicroBatcher
from evenhand.retrieval.cache import CachedRetriever
from evenhand.retrieval.dialect import Limits, RequestError, read_request, render_results

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
"""uvicorn's."""

_GRACE_SECONDS = 30
_DRAIN_SECONDS = 2.0


@dataclass(slots=True)
class RequestCounts:
    """What a server answered so far on `/retrieve`.

    Attributes:
        requests: all of them, those with a wrong method apart.
        rejected: those that could not be answered (a 4xx status).
        failed: those of which every query failed (status 502).
    """

    requests: int = 0
    rejected: int = 0
    failed: int = 0


def create_app(retriever: Retriever, *, limits: Limits | None = None) -> Any:
    """Return the FastAPI application that serves a retriever.

    Args:
        retriever: answers; it is called from one thread at a time.
        limits: what a request may ask for.

    Raises:
        MissingExtraError: FastAPI is not installed.
    """
    fastapi = require("fastapi", "server", "the search server")
    state = _State(retriever, limits or Limits())

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        state.batcher.start()
        yield
        await state.batcher.close()

    app = fastapi.FastAPI(
        title="evenhand search",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    # Starlette's own routes: the body is read by hand, so that its limit holds while it arrives.
    app.add_route("/retrieve", state.retrieve, methods=["POST"])
    app.add_route("/health", state.health, methods=["GET"])
    _answer_errors_in_json(app)
    return app


class _State:
    def __init__(self, retriever: Retriever, limits: Limits) -> None:
        self._responses = require("starlette.responses", "server", "the search server")
        requests = require("starlette.requests", "server", "the search server")
        self._left: type[Exception] = requests.ClientDisconnect
        self._limits = limits
        self._retriever = retriever
        self._started = time.monotonic()
        self._counts = RequestCounts()
        self.batcher = MicroBatcher(retriever)

    async def retrieve(self, request: Any) -> Any:
        """Answer POST `/retrieve`."""
        self._counts.requests += 1
        try:
            asked = read_request(_parse(await self._body(request)), self._limits)
        except RequestError as error:
            self._counts.rejected += 1
            response = self._json({"error": str(error)}, error.status)
            if error.status in (408, 413):  # the rest of the body may still be on its way
                response.headers["connection"] = "close"
            return response
        try:
            results = await self.batcher.search(asked.queries, asked.k)
        except asyncio.CancelledError:  # the stop of the server ran out of patience
            self._counts.failed += 1
            return self._json({"error": "the server is stopping; ask again later"}, 503)
        if results and all(result.error is not None for result in results):
            self._counts.failed += 1
            return self._json({"error": f"every query failed; the first: {results[0].error}"}, 502)
        return self._json(render_results(results, asked))

    async def health(self, _: Any) -> Any:
        """Answer GET `/health`."""
        return self._json(self._health())

    def _health(self) -> dict[str, Any]:
        info: RetrieverInfo = info_of(self._retriever)
        counters = {
            "requests": self._counts.requests,
            "rejected_requests": self._counts.rejected,
            "failed_requests": self._counts.failed,
            "queries": self.batcher.counts.queries,
            "failed_queries": self.batcher.counts.failed,
            "batches": self.batcher.counts.batches,
            "largest_batch": self.batcher.counts.largest,
        }
        health: dict[str, Any] = {
            "status": "ok",
            "kind": info.kind,
            "passages": info.passages,
            "corpus_hash": info.corpus_hash,
            "version": __version__,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "counters": counters,
        }
        if isinstance(self._retriever, CachedRetriever):
            health["cache"] = asdict(self._retriever.stats)
        return health

    async def _body(self, request: Any) -> bytes:
        limit, seconds = self._limits.body_bytes, self._limits.body_seconds
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(seconds) as deadline:
                async for piece in request.stream():
                    # Not by Content-Length: a chunked body has none, and the header may lie.
                    if size <= limit < size + len(piece):
                        # A client that still sends would see a reset in place of the answer: read
                        # on for a while, keeping nothing.
                        rest = asyncio.get_running_loop().time() + min(seconds, _DRAIN_SECONDS)
                        deadline.reschedule(rest)
                    size += len(piece)
                    if size <= limit:
                        body += piece
        except self._left:
            raise RequestError(400, "the client left before its body was whole") from None
        except TimeoutError:
            if size <= limit:
                message = f"the body did not arrive within {seconds:g} seconds"
                raise RequestError(408, message) from None
        if size > limit:
            raise RequestError(413, f"the body has more than {limit} bytes; send fewer queries")
        return bytes(body)

    def _json(self, content: object, status: int = 200) -> Any:
        return _json_response(self._responses, content, status)


def _json_response(responses: Any, content: object, status: int) -> Any:
    # ASCII output: any string, even one with a lone surrogate, can be written.
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")
    return responses.Response(body, status, media_type="application/json")


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON ({str(error)[:80]})") from None


def _answer_errors_in_json(app: Any) -> None:
    responses = require("starlette.responses", "server", "the search server")
    exceptions = require("starlette.exceptions", "server", "the search server")
    reasons = {404: "there are /retrieve and /health", 405: "use POST /retrieve or GET /health"}

    async def of_http(_: Any, error: Any) -> Any:
        message = reasons.get(error.status_code, error.detail)
        response = _json_response(responses, {"error": message}, error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def of_anything(_: Any, error: Exception) -> Any:
        message = f"internal error: {type(error).__name__}; the server's log has the details"
        return _json_response(responses, {"error": message}, 500)

    app.add_exception_handler(exceptions.HTTPException, of_http)
    app.add_exception_handler(Exception, of_anything)


def serve(
    retriever: Retriever,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    log_level: str = "info",
) -> None:
    """Serve until SIGINT or SIGTERM; then answer what was accepted (at most 30 s) and return.

    The first search runs before the port opens, so that compiling or loading a model does not
    fall on a client.

    Args:
        retriever: answers.
        host: address to listen on; loopback by default, as there is no authentication.
        port: 0 takes a free one (it is in the log).
        limits: what a request may ask for.
        log_level: of uvicorn; requests are logged with `debug` only.

    Raises:
        ConfigError: the address cannot be listened on, or an unknown `log_level`.
        MissingExtraError: FastAPI or uvicorn is not installed.
    """
    check_choice(log_level, "log_level", LOG_LEVELS)
    uvicorn = require("uvicorn", "server", "the search server")
    app = create_app(retriever, limits=limits)
    search_one_by_one(retriever, ["warm up"], 1)
    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=log_level in ("debug", "trace"),
        timeout_graceful_shutdown=_GRACE_SECONDS,
        lifespan="on",
        ws="none",
    )
    with listen(host, port) as listening:
        logging.getLogger("uvicorn.error").info("listening on %s:%d", *listening.getsockname()[:2])
        quiet_server(uvicorn.Server)(config).run(sockets=[listening])
