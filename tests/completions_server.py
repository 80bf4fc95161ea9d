"""A completions server on loopback that plays scripts and misbehaves on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any]], dict[str, Any] | tuple[int, bytes, str]]
"""A request to the first choice of the answer, or to `(status, body, content type)`."""


class CompletionsServer:
    """Attributes: `url`, and `requests`: headers and bodies in order of arrival."""

    def __init__(self, script: Script, models: tuple[str, ...] = ("tiny",)) -> None:
        self.requests: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                rows = [{"id": name} for name in models]
                self.reply(200, json.dumps({"data": rows}).encode(), "application/json")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._lock:
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                    outer.requests.append(
                        {"headers": dict(self.headers), "path": self.path, **body}
                    )
                try:
                    made = script(body)
                finally:
                    with outer._lock:
                        outer._now -= 1
                if isinstance(made, tuple):
                    self.reply(*made)
                else:
                    answer = {"choices": [{"finish_reason": "stop", **made}]}
                    self.reply(200, json.dumps(answer).encode(), "application/json")

            def reply(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def serving(script: Script, **options: Any) -> Iterator[CompletionsServer]:
    server = CompletionsServer(script, **options)
    try:
        yield server
    finally:
        server.close()


def after(seconds: float, script: Script) -> Script:
    def late(body: dict[str, Any]) -> Any:
        time.sleep(seconds)
        return script(body)

    return late
