"""How much of the in-process search rate the server keeps, with many clients at once.

    python benchmarks/server.py [--index FOLDER] [--seconds 6] [--rounds 3]

In-process and served runs alternate, so that a change of the machine's speed hits both. The
clients are raw sockets with prepared bodies in a process of their own: on a machine of two cores
they take their share of the CPU from the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from evenhand.retrieval import Retriever, load_index
from retrieval_data import all_questions, need_data, union_index

K, BATCH, CLIENTS = 3, 16, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", type=Path, help="index of the union; built there if absent")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="search threads, both sides")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=BATCH, help=argparse.SUPPRESS)
    options = parser.parse_args()
    need_data()
    if options.serve:
        serve(options)
    elif options.client:
        print(json.dumps(asyncio.run(clients(options))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            options.index = union_index(options.index or Path(folder) / "union")
            compare(options)


def serve(options: argparse.Namespace) -> None:
    from evenhand.retrieval.server import serve as run_server

    retriever = load_index(options.index, threads=options.threads)
    run_server(retriever, port=options.port, log_level="warning")


def compare(options: argparse.Namespace) -> None:
    retriever = load_index(options.index, threads=options.threads)
    queries = shuffled()
    in_process(retriever, queries, 1.0)
    port = free_port()
    command = [sys.executable, __file__, "--index", str(options.index), "--port", str(port)]
    threads = ["--threads", str(options.threads)]
    server = subprocess.Popen([*command, *threads, "--serve"])
    try:
        wait_for(port)
        inside, outside, failed = [], [], 0
        for _ in range(options.rounds):
            inside.append(in_process(retriever, queries, options.seconds))
            found = run_clients(command, CLIENTS, BATCH, options.seconds)
            outside.append(found["queries_per_second"])
            failed += found["failed"]
            share = outside[-1] / inside[-1]
            print(
                f"in process {inside[-1]:7.0f}/s   server {outside[-1]:7.0f}/s   {share:6.1%}   "
                f"request p50 {found['p50_ms']:.1f} ms p95 {found['p95_ms']:.1f} ms   "
                f"failed {found['failed']}"
            )
        ratio = statistics.median(o / i for o, i in zip(outside, inside, strict=True))
        print(
            f"{CLIENTS} clients, {BATCH} queries a request, k = {K}: "
            f"{ratio:.1%} of the in-process rate (median of {options.rounds}), {failed} failed"
        )
        one = run_clients(command, 1, 1, options.seconds)
        alone = in_process(retriever, queries, options.seconds, size=1)
        print(
            f"one client, one query a request: {one['queries_per_second']:.0f}/s, "
            f"p50 {one['p50_ms']:.2f} ms, p95 {one['p95_ms']:.2f} ms, {one['failed']} failed; "
            f"in process {alone:.0f}/s"
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            print(json.dumps(json.load(answer)["counters"]))
    finally:
        server.terminate()
        print(f"server stopped with code {server.wait(timeout=40)}")


def shuffled() -> list[str]:
    queries = all_questions()
    random.Random(0).shuffle(queries)
    return queries


def in_process(
    retriever: Retriever, queries: list[str], seconds: float, size: int = BATCH
) -> float:
    """Return queries a second of plain calls, one after the other."""
    done, at, start = 0, 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = queries[at : at + size]
        assert all(result.error is None for result in retriever.search(batch, K))
        done += len(batch)
        at = (at + size) % (len(queries) - size)
    return done / (time.perf_counter() - start)


def run_clients(command: list[str], number: int, size: int, seconds: float) -> dict:
    load = ["--client", str(number), "--size", str(size), "--seconds", str(seconds)]
    return json.loads(subprocess.run([*command, *load], check=True, capture_output=True).stdout)


async def clients(options: argparse.Namespace) -> dict:
    """Send prepared requests over kept connections; return rate, latencies and failures."""
    queries = shuffled()
    size = options.size
    bodies = [
        request({"queries": queries[at : at + size], "topk": K, "return_scores": True})
        for at in range(0, len(queries) - size, size)
    ]
    latencies: list[float] = []
    failed = 0
    end = time.perf_counter() + options.seconds

    async def client(number: int) -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", options.port, limit=2**20)
        at = number * len(bodies) // options.client
        while (start := time.perf_counter()) < end:
            writer.write(bodies[at % len(bodies)])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            latencies.append(time.perf_counter() - start)
            # A whole answer ends with the lists; its items are counted without parsing them.
            whole = body.endswith(b"]]}") and body.count(b'"document":') >= size
            failed += not (head.startswith(b"HTTP/1.1 200") and whole)
            at += 1
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(options.client)))
    seconds = time.perf_counter() - start
    cuts = statistics.quantiles(latencies, n=20)
    return {
        "queries_per_second": len(latencies) * size / seconds,
        "p50_ms": 1000 * cuts[9],
        "p95_ms": 1000 * cuts[18],
        "failed": failed,
    }


def request(content: dict) -> bytes:
    body = json.dumps(content).encode()
    head = (
        "POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except OSError:
            time.sleep(0.1)
    sys.exit("the server did not start")


if __name__ == "__main__":
    main()
