"""What the servers of this package share: the listening socket, and an end without noise."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evenhand.core.errors import ConfigError

_BACKLOG = 512


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        # With the protocol named, asyncio turns Nagle's algorithm off for what it accepts here.
        # Without, header and body of an answer leave 40 ms apart.
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error}; give another --host") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); "
            "choose another --port or --host"
        ) from error
    return listening


def quiet_server(base: Any) -> Any:
    """Return uvicorn's server class, without its habit of raising the stop signal again.

    A stop that was asked for and went well ends with exit code 0.
    """

    class QuietServer(base):  # type: ignore[misc]
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            stops = (signal.SIGINT, signal.SIGTERM)
            before = {number: signal.signal(number, self.handle_exit) for number in stops}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    return QuietServer
