"""The viewer on a real socket, for tests."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from evenhand.core.serving import listen, quiet_server
from evenhand.pages.viewer.app import Viewer, create_app
from evenhand.pages.viewer.index import Index
from evenhand.pages.viewer.sources import open_sources


def make_index(cache: Path, *paths: Path) -> Index:
    index = Index(open_sources(paths), cache)
    index.refresh()
    return index


@contextmanager
def served(index: Index, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve an index; yield `127.0.0.1:PORT`."""
    config = uvicorn.Config(
        create_app(Viewer(index), host=host), log_level="error", lifespan="off", ws="none",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    with listen("127.0.0.1", 0) as listening:
        server = quiet_server(uvicorn.Server)(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def get(
    address: str, path: str = "/", *, host: str | None = None, method: str = "GET"
) -> tuple[int, Mapping[str, str], str]:
    """Return status, headers (lower case) and body."""
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", address if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, answer.read().decode()
    finally:
        connection.close()
