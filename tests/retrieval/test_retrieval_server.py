"""The server, over real sockets: dialects, JSON errors, limits, micro-batches, graceful stop."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retrieval_helpers import THREE, served

from evenhand.core.errors import ConfigError
from evenhand.retrieval import (
    Bm25Retriever,
    CachedRetriever,
    RetrieverInfo,
    SearchResult,
    corpus_hash,
)
from evenhand.retrieval.batching import MicroBatcher
from evenhand.retrieval.dialect import Limits
from evenhand.retrieval.server import serve
from evenhand.testing.retrievers import ScriptedRetriever
from evenhand.trajectory.protocol import Document

APPLE = {
    "id": "p10",
    "title": "Apple",
    "text": "a red fruit that grows on a tree",
    "contents": '"Apple"\na red fruit that grows on a tree',
}
SMALL = Limits(body_bytes=2000, queries=8, k=5)


def send(url, body, *, method="POST", path="/retrieve", headers=None):
    """Return status and parsed JSON; every answer must be JSON and say so."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, content, headers or {})
        response = connection.getresponse()
        assert response.getheader("content-type") == "application/json"
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def url():
    with served(Bm25Retriever.build(THREE, backend="numpy"), SMALL) as address:
        yield address


def test_without_scores_documents_come_plain(url):
    # Search-R1's server answered 500 to return_scores = false
    for scores in (False, None):
        asked = {"queries": ["apple", "zebra"], "topk": 2, "return_scores": scores}
        assert send(url, asked) == (200, {"result": [[APPLE], []]})
    assert send(url, {"queries": ["apple"]}) == (200, {"result": [[APPLE]]})


def test_with_scores_documents_come_in_pairs(url):
    status, answer = send(url, {"queries": ["apple"], "topk": 2, "return_scores": True})
    assert status == 200
    ((item,),) = answer["result"]
    assert set(item) == {"document", "score"}
    assert item["document"] == APPLE
    assert item["score"] > 0


@pytest.mark.parametrize("query", ["apple", ["apple"]])
def test_a_single_query_may_be_a_string_or_a_list(url, query):
    assert send(url, {"query": query}) == (200, {"result": [[APPLE]]})


@pytest.mark.parametrize(
    "fields",
    [
        {"topk": 2},
        {"top_n": 2},
        {"top_k": 2},
        {"k": 2},
        {"topk_retrieval": 2},
        {"topk_rerank": 2},
        {"topk_retrieval": 5, "topk_rerank": 2},
        {"topk": None, "top_n": 2},
    ],
)
def test_the_number_of_documents_has_several_names(url, fields):
    status, answer = send(url, {"queries": ["fruit tree"], **fields})
    assert status == 200
    assert [len(row) for row in answer["result"]] == [2]


def test_three_documents_come_where_no_number_is_given(url):
    assert len(send(url, {"queries": ["fruit tree"]})[1]["result"][0]) == 3


def test_a_document_is_a_string_on_request(url):
    asked = {"queries": ["apple"], "format": "string"}
    assert send(url, asked) == (200, {"result": [[APPLE["contents"]]]})
    (item,) = send(url, {**asked, "return_scores": True})[1]["result"][0]
    assert item["document"] == APPLE["contents"]


def test_null_stands_for_a_field_that_is_absent(url):
    asked = {"queries": None, "query": "apple", "format": None, "topk": None}
    assert send(url, asked) == (200, {"result": [[APPLE]]})


def test_empty_lists_blank_queries_and_unknown_fields_are_fine(url):
    assert send(url, {"queries": []}) == (200, {"result": []})
    assert send(url, {"queries": ["", " "], "dataset": "nq"}) == (200, {"result": [[], []]})


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe\x00", 400, "not JSON"),
        (b"[" * 1900, 400, "nested too deeply"),
        ([], 422, "must be a JSON object, got a list"),
        ({}, 422, "got neither"),
        ({"queries": ["a"], "query": "a"}, 422, "got both"),
        ({"queries": "a"}, 422, "queries must be a list of strings, got 'a'"),
        ({"query": None}, 422, "got neither"),
        ({"query": 3}, 422, "query must be a string or a list"),
        ({"queries": ["a", 3]}, 422, r"queries\[1\] must be a string, got 3"),
        ({"queries": ["a"], "topk": 0}, 422, "topk must be a whole number from 1 to 5, got 0"),
        ({"queries": ["a"], "top_n": 6}, 422, "top_n must be .* got 6"),
        ({"queries": ["a"], "topk": True}, 422, "topk must be"),
        ({"queries": ["a"], "topk": "3"}, 422, "topk must be"),
        ({"queries": ["a"], "topk": 2.5}, 422, "topk must be"),
        ({"queries": ["a"], "topk": 10**300}, 422, "topk must be"),
        ({"queries": ["a"], "return_scores": "yes"}, 422, "return_scores must be"),
        ({"queries": ["a"], "format": "xml"}, 422, "format must be object or string"),
        ({"queries": ["a"] * 9}, 413, "9 queries in one request, at most 8"),
        ({"queries": ["a" * 3000]}, 413, "more than 2000 bytes"),
    ],
)
def test_a_request_that_cannot_be_answered_gets_a_sentence(url, body, status, message):
    import re

    found, answer = send(url, body)
    assert found == status
    assert list(answer) == ["error"]
    assert re.search(message, answer["error"])
    assert len(answer["error"]) < 300


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/retrieve", 405),
        ("PUT", "/retrieve", 405),
        ("DELETE", "/retrieve", 405),
        ("POST", "/health", 405),
        ("GET", "/", 404),
        ("POST", "/search", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/retrieve/", 404),
        ("GET", "/health/", 404),
        ("POST", "/retrieve/../../etc/passwd", 404),
    ],
)
def test_other_methods_and_paths_get_json_too(url, method, path, status):
    found, answer = send(url, None, method=method, path=path)
    assert found == status
    assert "/retrieve" in answer["error"]


def raw(url, request):
    """Send bytes as they are and return everything that comes back."""
    host, port = urlsplit(url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_the_limit_of_a_body_holds_where_no_length_is_declared(url):
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    # Three of endless chunks are enough: the answer comes though the body never ends.
    answer = raw(url, head + 3 * chunk)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'{"error":' in answer


def test_a_client_that_sends_far_too_much_still_reads_the_answer(url):
    for _ in range(5):
        status, answer = send(url, b"x" * 3_000_000)
        assert status == 413
        assert "more than 2000 bytes" in answer["error"]


def test_a_body_that_does_not_arrive_is_not_waited_for_long():
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with served(ScriptedRetriever({}), Limits(body_seconds=0.5)) as address:
        start = time.monotonic()
        assert raw(address, head).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - start < 10


def test_a_connection_serves_many_requests(url):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.connect()
    ports = set()
    for _ in range(5):
        connection.request("POST", "/retrieve", json.dumps({"query": "apple"}))
        response = connection.getresponse()
        assert json.loads(response.read()) == {"result": [[APPLE]]}
        ports.add(connection.sock.getsockname()[1])
    connection.close()
    assert len(ports) == 1


def test_one_small_request_does_not_wait_for_company(tmp_path):
    # Header and body of an answer in two packets, 40 ms apart, is what Nagle's algorithm would do.
    Bm25Retriever.build(THREE, backend="numpy").save(tmp_path / "index")
    with server_process(f"load_index({str(tmp_path / 'index')!r}, backend='numpy')") as (
        _,
        address,
    ):
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
        seconds = []
        for _ in range(30):
            start = time.perf_counter()
            connection.request("POST", "/retrieve", json.dumps({"query": "apple"}))
            connection.getresponse().read()
            seconds.append(time.perf_counter() - start)
        connection.close()
    assert sorted(seconds)[5] < 0.03


def test_health_tells_kind_corpus_and_counts(tmp_path):
    base = Bm25Retriever.build(THREE, backend="numpy")
    with CachedRetriever(base, tmp_path / "cache.sqlite") as cache, served(cache, SMALL) as address:
        send(address, {"queries": ["apple", "pear"]})
        send(address, {"queries": ["apple"]})
        send(address, {"queries": 3})
        status, health = send(address, None, method="GET", path="/health")
    assert status == 200
    assert health["status"] == "ok"
    assert health["kind"] == "bm25"
    assert health["passages"] == 3
    assert health["corpus_hash"] == corpus_hash(THREE)
    assert health["uptime_seconds"] > 0
    assert health["cache"] == {"hits": 1, "misses": 2, "faults": 0}
    assert health["counters"] == {
        "requests": 3, "rejected_requests": 1, "failed_requests": 0, "queries": 3,
        "failed_queries": 0, "batches": 2, "largest_batch": 2,
    }  # fmt: skip


def test_a_query_that_fails_leaves_the_others_of_its_batch_alone():
    table = {"good": [Document("1", "T", "x")]}
    document = {"id": "1", "title": "T", "text": "x", "contents": '"T"\nx'}
    retriever = ScriptedRetriever(table, failing=["bad"], raising=["worse"])
    with served(retriever) as address:
        status, answer = send(address, {"queries": ["good", "bad", "worse"]})
        assert status == 200
        assert answer == {
            "result": [[document], [], []],
            "errors": [None, "scripted failure", "ValueError: scripted defect"],
        }
        status, answer = send(address, {"queries": ["bad", "worse"]})
        assert status == 502
        assert answer == {"error": "every query failed; the first: scripted failure"}


class Gated(ScriptedRetriever):
    """Does not finish its first call before the gate opens."""

    gate = threading.Event()

    def search(self, queries, k):
        self.gate.wait(timeout=30)
        return super().search(queries, k)


def test_requests_that_arrive_together_are_one_batch_and_get_their_own_results():
    table = {f"q{n}": [Document(f"d{n}", "", ""), Document("e", "", "")] for n in range(41)}
    retriever = Gated(table, failing=["q7"], raising=["q9"])
    with served(retriever) as address, ThreadPoolExecutor(41) as pool:
        answers = [
            pool.submit(send, address, {"query": f"q{n}", "topk": 1 + n % 2 if n else 3})
            for n in range(41)
        ]
        for _ in range(600):
            health = send(address, None, method="GET", path="/health")[1]
            if health["counters"]["requests"] == 41:
                break
            time.sleep(0.05)
        retriever.gate.set()
        for n, answer in enumerate(answers):
            status, content = answer.result()
            if n in (7, 9):
                assert status == 502
            else:
                expected = [f"d{n}", "e"][: 1 + n % 2 if n else 3]
                assert (status, [d["id"] for d in content["result"][0]]) == (200, expected)
    # One for q0 (or what came before it), one for each k; the singles belong to the call that
    # raised.
    assert 2 <= sum(len(call) > 1 for call in retriever.calls) <= 4


def test_a_client_that_leaves_does_not_disturb_the_others():
    retriever = ScriptedRetriever({"q": [Document("1", "", "")]}, seconds=0.2)
    with served(retriever) as address, ThreadPoolExecutor(8) as pool:
        host, port = urlsplit(address).netloc.split(":")
        body = b'{"query": "q"}'
        head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"

        def leave(_):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head.encode() + body)

        def stay(_):
            return send(address, {"query": "q"})[0]

        list(pool.map(leave, range(4)))
        assert list(pool.map(stay, range(8))) == [200] * 8


def test_a_client_that_leaves_in_its_body_counts_as_rejected():
    with served(ScriptedRetriever({})) as address:
        host, port = urlsplit(address).netloc.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
            )
        for _ in range(200):
            health = send(address, None, method="GET", path="/health")[1]
            if health["counters"]["rejected_requests"] == 1:
                break
            time.sleep(0.05)
        assert health["counters"]["rejected_requests"] == 1


def test_a_request_that_is_given_up_while_it_waits_does_not_stop_the_worker():
    async def scenario():
        batcher = MicroBatcher(ScriptedRetriever({"q": THREE}, seconds=0.2))
        batcher.start()
        first = asyncio.create_task(batcher.search(["q"], 3))
        await asyncio.sleep(0.05)
        waiting = [asyncio.create_task(batcher.search(["q"], k)) for k in (2, 2, 1)]
        await asyncio.sleep(0.05)
        for task in waiting[:2]:  # the first in the queue and all of its k
            task.cancel()
        answers = [await first, await waiting[2], await batcher.search(["q"], 2)]
        only = asyncio.create_task(batcher.search(["q"], 3))
        await asyncio.sleep(0.05)
        alone = asyncio.create_task(batcher.search(["q"], 3))
        await asyncio.sleep(0)
        alone.cancel()  # nothing else waits
        await only
        answers.append(await batcher.search(["q"], 3))
        await batcher.close()
        return [len(results[0].documents) for results in answers]

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == [3, 1, 2, 3]


def test_a_stop_that_cannot_wait_longer_answers_503_in_json():
    retriever = ScriptedRetriever({"q": THREE}, seconds=3.0)
    with ThreadPoolExecutor(2) as pool:
        with served(retriever, grace=1) as address:
            answers = [pool.submit(send, address, {"query": "q", "topk": k}) for k in (1, 2)]
            time.sleep(0.5)
        assert [answer.result()[0] for answer in answers] == [503, 503]
        assert "stopping" in answers[0].result()[1]["error"]


@pytest.mark.parametrize(
    ("document", "score"),
    [
        (Document("1", "T", "x", np.float32(1.5)), 1.5),
        (Document(1, "T", "x", np.int64(2)), 2.0),
        (Document("1", "T", "x", math.nan), None),
        (Document("1", None, "x", 1.0), None),
        (Document(b"1", "T", "x", 1.0), None),
    ],
)
def test_documents_of_a_users_own_retriever_are_made_plain_or_fail_the_query(document, score):
    class Mine:
        def search(self, queries, _):
            return [SearchResult((document,)) for _ in queries]

    with served(Mine()) as address:
        status, answer = send(address, {"query": "q", "return_scores": True})
    if score is None:
        assert status == 502
        assert "unusable document" in answer["error"]
    else:
        assert status == 200
        ((item,),) = answer["result"]
        assert (item["score"], item["document"]["id"]) == (score, "1")


def test_an_exception_in_our_own_code_is_a_json_500():
    class Unwritable:
        info = RetrieverInfo("broken", passages=object())

        def search(self, queries, _):
            return [SearchResult() for _ in queries]

    with served(Unwritable()) as address:
        status, answer = send(address, None, method="GET", path="/health")
        assert status == 500
        assert answer["error"].startswith("internal error")
        assert send(address, {"query": "q"})[0] == 200


class server_process:  # noqa: N801 - used like a function
    """Serve an expression in a process of its own; give it and its address."""

    def __init__(self, expression):
        self.expression = expression

    def __enter__(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        code = (
            "from evenhand.retrieval import load_index\n"
            "from evenhand.retrieval.server import serve\n"
            "from retrieval_plugins import *\n"
            f"serve({self.expression}, port={port}, log_level='warning')\n"
        )
        here = str(__file__).rpartition("/")[0]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
        self.process = subprocess.Popen([sys.executable, "-c", code], env=environment)
        for _ in range(300):
            assert self.process.poll() is None
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return self.process, f"http://127.0.0.1:{port}"
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server did not start")

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_answers_what_was_accepted_and_ends_with_code_0(stop):
    with server_process("slow()") as (process, address):
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(send(address, {"query": "q"})))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.4)
        process.send_signal(stop)
        for thread in threads:
            thread.join(timeout=20)
        assert [status for status, _ in answers] == [200] * 3
        assert process.wait(timeout=20) == 0


def test_an_address_that_is_taken_or_wrong_is_a_config_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
            serve(ScriptedRetriever({}), port=listener.getsockname()[1])
        with pytest.raises(ConfigError, match=r"cannot listen on 256\.0\.0\.1"):
            serve(ScriptedRetriever({}), host="256.0.0.1")
    with pytest.raises(ConfigError, match="log_level must be one of"):
        serve(ScriptedRetriever({}), log_level="loud")


def test_loopback_is_the_default():
    import inspect

    assert inspect.signature(serve).parameters["host"].default == "127.0.0.1"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["queries", "query", "topk", "top_n", "k", "return_scores", "format", "x"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "queries": JSON | st.lists(st.text(max_size=6) | st.just("fruit tree"), max_size=9),
        "query": JSON | st.text(max_size=6),
        "topk": JSON | st.integers(-1, 7),
        "top_n": JSON | st.integers(1, 5),
        "topk_retrieval": JSON,
        "topk_rerank": JSON,
        "return_scores": JSON | st.booleans(),
        "format": JSON | st.sampled_from(["object", "string"]),
    },
)
BODIES = (
    st.binary(max_size=60)
    | st.integers(1990, 9000).map(lambda size: b"x" * size)
    | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | (JSON | REQUESTS).map(lambda value: json.dumps(value).encode())
    | REQUESTS.map(lambda value: json.dumps(value, ensure_ascii=False))
    .map(lambda text: text.encode("utf-16", "surrogatepass"))
    | REQUESTS.map(lambda value: json.dumps(value).encode()[:-1])
)  # fmt: skip


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(BODIES)
def test_any_body_is_answered_in_json_with_a_result_or_a_sentence(url, body):
    status, answer = send(url, body)
    assert status in (200, 400, 413, 422)
    if status == 200:
        asked = json.loads(body)
        queries = asked["query"] if asked.get("queries") is None else asked["queries"]
        count = 1 if isinstance(queries, str) else len(queries)
        assert len(answer["result"]) == count
        assert "errors" not in answer
    else:
        assert isinstance(answer["error"], str)
        assert "\n" not in answer["error"]
