"""Small corpora, a scripted encoder and a served application for the retrieval tests."""

from __future__ import annotations

import contextlib
import socket
import threading
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import uvicorn

from evenhand.retrieval import Retriever
from evenhand.retrieval.dialect import Limits
from evenhand.retrieval.server import create_app
from evenhand.trajectory.protocol import Document

THREE = [
    Document("p10", "Apple", "a red fruit that grows on a tree"),
    Document("p9", "Pear", "a green fruit that grows on a tree"),
    Document("p1", "Fruit tree", "a tree with fruit"),
]

TWINS = [Document(f"t{n}", "Twin", "same words in every passage") for n in (3, 1, 20, 2, 10)]
"""Equal passages: every score is a tie. As strings: t1, t10, t2, t20, t3."""


class BagEncoder:
    """Counts hashed words: texts that share words are near. The same vector in any batch."""

    name = "bag"

    def __init__(self, size: int = 64) -> None:
        self.size = size
        self.seen: list[str] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.seen.extend(texts)
        vectors = np.full((len(texts), self.size), 0.01, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                vectors[row, zlib.crc32(word.encode()) % self.size] += 1
        return vectors


@contextlib.contextmanager
def served(
    retriever: Retriever, limits: Limits | None = None, grace: int | None = None
) -> Iterator[str]:
    """Serve on a free loopback port in a thread; give the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            create_app(retriever, limits=limits),
            log_level="critical",
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=grace,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive()
