"""JSON over HTTP for search clients: one deadline a request, faults sorted, bounded retries."""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import ipaddress
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

from evenhand.core.errors import ConfigError, require
from evenhand.retrieval.base import check_above_zero, check_count

_T = TypeVar("_T")


class FaultKind(StrEnum):
    """What went wrong with a request, by what helps against it."""

    UNREACHABLE = "unreachable"
    """No connection. Worth a retry; no query is to blame."""
    BUSY = "busy"
    """Status 408, 425 or 429. Worth a retry after a while; no query is to blame."""
    BAD_ANSWER = "bad answer"
    """A 5xx status, a time-out, a broken connection, no JSON, a wrong schema. Worth a retry; one
    of the queries may be to blame."""
    BAD_INPUT = "bad input"
    """Status 400, 413 or 422. A retry cannot help; one of the queries, or their number, may be to
    blame."""
    REFUSED = "refused"
    """Any other status. Neither a retry nor other queries can help."""


_RETRY = frozenset({FaultKind.UNREACHABLE, FaultKind.BUSY, FaultKind.BAD_ANSWER})
_MAY_BE_ONE_QUERY = frozenset({FaultKind.BAD_ANSWER, FaultKind.BAD_INPUT})


class HttpFault(Exception):  # noqa: N818 - "error" would hide that it is data until retries end
    """A request that was not answered as it should be.

    Attributes:
        kind: what helps against it.
        retry_after: seconds that the server asked to wait, if it did.
    """

    def __init__(self, kind: FaultKind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after

    @property
    def may_be_one_query(self) -> bool:
        """Whether a smaller batch may do better."""
        return self.kind in _MAY_BE_ONE_QUERY


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """How patient a client is.

    Attributes:
        timeout: seconds for one request, from connecting to the last byte of the answer.
        retries: how often a request is sent again after a fault that may pass.
        backoff: seconds before the first retry; doubles each time, times a random factor in
            [0.5, 1].
        max_backoff: most seconds before a retry, also where the server asks for more.
        max_bytes: largest answer that is read.
        seed: of the random factors.
        headers: sent with every request (a key of an API); never part of a message.
    """

    timeout: float = 30.0
    retries: int = 3
    backoff: float = 0.5
    max_backoff: float = 10.0
    max_bytes: int = 64 * 2**20
    seed: int = 0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_above_zero(self.timeout, "timeout")
        check_count(self.max_bytes, "max_bytes")
        check_count(self.retries, "retries", least=0)
        for name in ("backoff", "max_backoff"):
            check_above_zero(getattr(self, name), name, or_zero=True)
        headers: object = self.headers
        texts = [*headers, *headers.values()] if isinstance(headers, Mapping) else [None]
        if not all(isinstance(text, str) and text.isascii() for text in texts):
            # The value may be a key: it must not stand in the message.
            raise ConfigError(
                "headers must be an object of names and texts in ASCII, got "
                f"{type(headers).__name__} with something else"
            )


class Budget:
    """How many requests one call may still send, and until when it may start them."""

    def __init__(self, requests: int, seconds: float) -> None:
        self.requests = requests
        self._left = requests
        self._end = time.monotonic() + seconds
        self._seconds = seconds

    def spend(self, last: HttpFault | None) -> None:
        """Take one request, or raise the fault that says which bound is reached."""
        if self._left > 0 and time.monotonic() < self._end:
            self._left -= 1
            return
        bound = f"{self._seconds:g} seconds" if self._left > 0 else f"{self.requests} requests"
        reason = f" (last fault: {last})" if last is not None else ""
        raise HttpFault(
            FaultKind.REFUSED, f"the limit of {bound} for one search is used up{reason}"
        )


class JsonClient:
    """Sends requests to one address and checks that JSON comes back.

    Args:
        url: `http://` or `https://`.
        settings: how patient it is.

    Attributes:
        url: as given.
        shown_url: without user info and query, for messages.
        identity: the same with a hash of the query: addresses that may answer differently differ.

    Raises:
        ConfigError: not such an address.
        MissingExtraError: httpx is not installed.
    """

    def __init__(self, url: str, settings: HttpSettings) -> None:
        self._httpx = require("httpx", "search", "search over HTTP")
        parts = self._parts(url)
        self.url = url
        # User name and password of an address must not reach logs and error messages.
        place = parts.netloc.rpartition("@")[2]
        self.shown_url = urlunsplit((parts.scheme, place, parts.path, "", ""))
        # The query may choose the index behind the address, and it may hold a key: hashed.
        query = hashlib.sha256(parts.query.encode()).hexdigest()[:16] if parts.query else ""
        self.identity = f"{self.shown_url}?{query}" if query else self.shown_url
        self.settings = settings
        self._verify: Any = self._httpx.create_ssl_context() if parts.scheme == "https" else False
        # A proxy of the environment must not see what is meant for this machine.
        self._trust_env = not _is_loopback(parts.hostname or "")

    def _parts(self, url: object) -> SplitResult:
        try:
            if not isinstance(url, str):
                raise ValueError("no text")
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError("no scheme, host or port")
            self._httpx.URL(url)
        except (ValueError, self._httpx.InvalidURL):
            raise ConfigError(
                f"a search address must be http://host or https://host, got {url!r}"
            ) from None
        return parts

    def open(self) -> Any:
        """Return an `httpx.AsyncClient` to use as an asynchronous context manager."""
        settings = self.settings
        connect = min(10.0, 0.8 * settings.timeout)
        return self._httpx.AsyncClient(
            headers={"accept": "application/json", **settings.headers},
            timeout=self._httpx.Timeout(None, connect=connect),
            verify=self._verify,
            trust_env=self._trust_env,
            follow_redirects=False,
        )

    async def request(self, client: Any, method: str, **content: Any) -> Any:
        """Send one request and return the parsed JSON of a 2xx answer.

        Raises:
            HttpFault: anything else came back, or nothing in time.
        """
        httpx, seconds = self._httpx, self.settings.timeout
        try:
            # One deadline over everything: a server that drips bytes resets any read time-out.
            async with (
                asyncio.timeout(seconds),
                client.stream(method, self.url, **content) as response,
            ):
                _check_status(response)
                body = await self._body(response)
        except TimeoutError:
            raise self._fault(FaultKind.BAD_ANSWER, f"no whole answer in {seconds:g} s") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._fault(FaultKind.UNREACHABLE, f"no connection ({_reason(error)})") from error
        except httpx.HTTPError as error:
            raise self._fault(FaultKind.BAD_ANSWER, f"broken answer ({_reason(error)})") from error
        except HttpFault as fault:
            raise self._fault(fault.kind, str(fault), fault.retry_after) from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            what = "an empty body" if not body.strip() else "a body that is not JSON"
            raise self._fault(FaultKind.BAD_ANSWER, what) from None

    async def _body(self, response: Any) -> bytes:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise HttpFault(FaultKind.BAD_ANSWER, f"content type {kind or 'missing'}, not JSON")
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > self.settings.max_bytes:
                raise HttpFault(
                    FaultKind.BAD_INPUT, f"an answer of more than {self.settings.max_bytes} bytes"
                )
        return bytes(body)

    def _fault(self, kind: FaultKind, message: str, retry_after: float | None = None) -> HttpFault:
        return HttpFault(kind, f"{self.shown_url}: {message}", retry_after)

    async def with_retries(
        self,
        send: Callable[[], Awaitable[_T]],
        budget: Budget,
        chance: random.Random,
        *,
        attempts: int,
    ) -> _T:
        """Call `send` until it succeeds, at most `attempts` times, waiting in between.

        Raises:
            HttpFault: the last fault, with the number of attempts.
        """
        last: HttpFault | None = None
        for attempt in range(attempts):
            if last is not None:
                await asyncio.sleep(self._pause(attempt - 1, last.retry_after, chance))
            budget.spend(last)
            try:
                return await send()
            except HttpFault as fault:
                last = fault
                if fault.kind not in _RETRY:
                    break
        if last is None:
            raise ValueError("attempts must be at least 1")
        tried = f" (attempt {attempt + 1} of {attempts})" if attempt else ""
        raise HttpFault(last.kind, f"{last}{tried}", last.retry_after)

    def _pause(self, retry: int, asked: float | None, chance: random.Random) -> float:
        settings = self.settings
        # Beyond 2**60 the bound below decides anyway, and a float could overflow.
        own = settings.backoff * 2.0 ** min(retry, 60) * chance.uniform(0.5, 1.0)
        return min(settings.max_backoff, max(own, asked or 0.0))


def _check_status(response: Any) -> None:
    status = response.status_code
    if 200 <= status < 300:
        return
    if status >= 500:
        kind = FaultKind.BAD_ANSWER
    elif status in (408, 425, 429):
        kind = FaultKind.BUSY
    elif status in (400, 413, 422):
        kind = FaultKind.BAD_INPUT
    else:
        kind = FaultKind.REFUSED
    raise HttpFault(kind, f"status {status}", _retry_after(response.headers.get("retry-after")))


def _retry_after(header: str | None) -> float | None:
    """Return the seconds that a `Retry-After` header asks for (a number or a date), if any."""
    if header is None:
        return None
    try:
        if header.strip().isdecimal():
            return float(header)
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end from ordinary code, also where a loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
