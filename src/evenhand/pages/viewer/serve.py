"""The viewer as a server: a port, uvicorn, an end without noise."""

from __future__ import annotations

import socket
from collections.abc import Callable

from evenhand.core.errors import ConfigError, require
from evenhand.core.serving import listen, quiet_server
from evenhand.pages.viewer.app import PURPOSE, Viewer, create_app

PORT = 8321
"""Taken when no port is asked for; if it is in use, one of the next `TRIES`."""

TRIES = 20
_GRACE_SECONDS = 1


def listen_near(host: str, port: int | None) -> socket.socket:
    """Return a listening socket: on `port`, or on the first free one from `PORT` if it is `None`.

    Raises:
        ConfigError: the port is in use, or the address is not one of this machine.
    """
    if port is not None:
        return listen(host, port)
    for number in range(PORT, PORT + TRIES - 1):
        try:
            return listen(host, number)
        except ConfigError as error:
            if not isinstance(error.__cause__, OSError) or isinstance(
                error.__cause__, socket.gaierror
            ):
                raise
    return listen(host, PORT + TRIES - 1)


def serve(
    viewer: Viewer,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGINT or SIGTERM, then return.

    Args:
        viewer: what is shown.
        host: address to listen on; there is no password, so anything but loopback is open to all
            who can reach it.
        port: 0 takes any free one, `None` the first free one from `PORT`.
        ready: called with the address once it is listened on.

    Raises:
        ConfigError: the address cannot be listened on.
        MissingExtraError: Starlette or uvicorn is not installed.
    """
    uvicorn = require("uvicorn", "server", PURPOSE)
    config = uvicorn.Config(
        create_app(viewer, host=host),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        lifespan="off",
        ws="none",
        server_header=False,
    )
    with listen_near(host, port) as listening:
        name, number = listening.getsockname()[:2]
        shown = f"[{name}]" if ":" in name else name
        ready(f"http://{shown}:{number}/")
        quiet_server(uvicorn.Server)(config).run(sockets=[listening])
