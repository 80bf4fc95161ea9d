"""A remote retriever against a real server that misbehaves: only the affected queries fail."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_helpers import THREE, served

from evenhand.core.errors import ConfigError
from evenhand.retrieval import Bm25Retriever, CachedRetriever, HttpSettings, RemoteRetriever
from evenhand.retrieval.dialect import Limits, read_results
from evenhand.retrieval.http import JsonClient
from evenhand.testing.retrievers import Fault, FaultyServer, ScriptedRetriever
from evenhand.trajectory.protocol import Document

QUICK = HttpSettings(timeout=0.4, retries=2, backoff=0.001, max_backoff=0.01)
BAD_ANSWERS = [
    Fault.STATUS_500, Fault.HTML, Fault.HTML_AS_JSON, Fault.EMPTY, Fault.WRONG_SCHEMA,
    Fault.WRONG_COUNT, Fault.HALF_BODY, Fault.DRIP, Fault.DRIP_HEADERS, Fault.SILENT, Fault.CLOSE,
    Fault.DEEP,
]  # fmt: skip
"""Faults for which one of the queries may be to blame."""
WHOLE_SERVER = [Fault.STATUS_429, Fault.STATUS_401, Fault.REDIRECT]


def row(query):
    return [{"document": {"id": query, "title": "T", "contents": f'"T"\n{query}'}, "score": 1.0}]


def good(request):
    return 200, {"result": [row(query) for query in request.body["queries"]]}


def failing_on(bad, fault):
    return lambda request: fault if bad & set(request.body["queries"]) else good(request)


def found(result):
    return [document.id for document in result.documents]


@pytest.mark.parametrize("fault", BAD_ANSWERS)
def test_a_fault_of_one_query_fails_that_query_and_no_other(fault):
    # PeterGriffinJin/Search-R1 #43
    queries = [f"q{n}" for n in range(8)]
    with FaultyServer(failing_on({"q5"}, fault)) as server:
        results = RemoteRetriever(server.url, QUICK).search(queries, 3)
    for query, result in zip(queries, results, strict=True):
        if query == "q5":
            assert result.error is not None
            assert result.error.startswith(server.url)
            assert result.documents == ()
        else:
            assert result.error is None
            assert found(result) == [query]
    # The whole batch three times, then a walk down to one query: bounded.
    assert len(server.requests) <= 3 + 2 * 3 + 2


@pytest.mark.parametrize("fault", [*BAD_ANSWERS, *WHOLE_SERVER])
def test_a_server_that_never_answers_right_fails_every_query_after_bounded_requests(fault):
    with FaultyServer(lambda _: fault) as server:
        start = time.monotonic()
        results = RemoteRetriever(server.url, QUICK).search(["a", "b", "c"], 3)
        assert time.monotonic() - start < 20
    assert len(results) == 3
    assert all(result.error and not result.documents for result in results)
    assert 1 <= len(server.requests) <= 16 + 4 * 3


@pytest.mark.parametrize(
    ("fault", "requests"),
    [(Fault.STATUS_429, 3), (Fault.STATUS_401, 1), (Fault.REDIRECT, 1)],
)
def test_a_fault_that_no_query_can_cause_is_not_searched_for_in_the_batch(fault, requests):
    with FaultyServer(lambda _: fault) as server:
        results = RemoteRetriever(server.url, QUICK).search([f"q{n}" for n in range(32)], 3)
    assert all(result.error for result in results)
    assert len(server.requests) == requests


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_batch_that_the_server_rejects_is_halved_without_retries(status):
    def at_most_two(request):
        return good(request) if len(request.body["queries"]) <= 2 else (status, {"error": "many"})

    with FaultyServer(at_most_two) as server:
        results = RemoteRetriever(server.url, QUICK).search([f"q{n}" for n in range(8)], 3)
    assert [found(result) for result in results] == [[f"q{n}"] for n in range(8)]
    assert [len(request.body["queries"]) for request in server.requests] == [8, 4, 4, 2, 2, 2, 2]


def test_a_refused_connection_fails_every_query():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    results = RemoteRetriever(f"http://127.0.0.1:{port}/retrieve", QUICK).search(["a", "b"], 3)
    assert all("no connection" in result.error for result in results)
    assert "attempt 3 of 3" in results[0].error


def test_a_fault_that_passes_is_not_seen():
    answers = iter([Fault.STATUS_500, Fault.CLOSE])
    with FaultyServer(lambda request: next(answers, None) or good(request)) as server:
        results = RemoteRetriever(server.url, QUICK).search(["a", "b"], 3)
    assert [found(result) for result in results] == [["a"], ["b"]]
    assert len(server.requests) == 3


def test_retry_after_is_obeyed_only_up_to_the_bound():
    with FaultyServer(lambda _: Fault.STATUS_429) as server:
        start = time.monotonic()
        RemoteRetriever(server.url, QUICK).search(["a"], 3)
    assert time.monotonic() - start < 5  # the server asked for an hour, twice


@pytest.mark.parametrize(("asked", "pause"), [(None, 0.5), (2.0, 2.0), (3600.0, 4.0), (0.0, 0.5)])
def test_a_pause_grows_and_has_a_bound(asked, pause):
    class Middle:
        def uniform(self, low, high):
            assert (low, high) == (0.5, 1.0)
            return 1.0

    client = JsonClient("http://127.0.0.1:1", HttpSettings(backoff=0.5, max_backoff=4.0))
    assert client._pause(0, asked, Middle()) == pause
    assert client._pause(2, None, Middle()) == 2.0
    assert client._pause(10_000, None, Middle()) == 4.0


def test_the_number_of_requests_of_a_call_has_a_bound():
    with FaultyServer(lambda _: Fault.STATUS_500) as server:
        retriever = RemoteRetriever(server.url, QUICK, max_requests=5)
        results = retriever.search([f"q{n}" for n in range(50)], 3)
    assert len(server.requests) == 5
    assert all(result.error for result in results)
    assert "limit of 5 requests" in results[-1].error


def test_no_request_starts_after_the_time_of_a_call():
    with FaultyServer(lambda _: Fault.STATUS_500) as server:
        patience = HttpSettings(retries=1000, backoff=0.05, max_backoff=0.05)
        start = time.monotonic()
        (result,) = RemoteRetriever(server.url, patience, max_seconds=0.3).search(["a"], 3)
    assert "limit of 0.3 seconds" in result.error
    assert time.monotonic() - start < 5


def test_batches_keep_the_order_and_equal_queries_are_sent_once():
    queries = [f"q{n % 5}" for n in range(40)]
    with FaultyServer(good) as server:
        results = RemoteRetriever(server.url, QUICK, batch_size=2).search(queries, 3)
    assert [found(result) for result in results] == [[query] for query in queries]
    sent = [query for request in server.requests for query in request.body["queries"]]
    assert sorted(sent) == ["q0", "q1", "q2", "q3", "q4"]


def test_the_names_of_the_fields_can_be_set():
    def other(request):
        assert set(request.body) == {"query", "top_n", "return_scores"}
        return 200, {"result": [row(query)[:1] for query in request.body["query"]]}

    with FaultyServer(other) as server:
        retriever = RemoteRetriever(server.url, QUICK, query_field="query", k_field="top_n")
        assert found(retriever.search(["a"], 7)[0]) == ["a"]
    assert server.requests[0].body["top_n"] == 7


@pytest.mark.parametrize(
    ("item", "document"),
    [
        (
            {"document": {"id": 7, "contents": '"T"\nx\ny'}, "score": 2},
            Document("7", "T", "x\ny", 2.0),
        ),
        ({"document": {"id": "a", "title": "T", "text": "x"}}, Document("a", "T", "x")),
        ({"id": "a", "title": "T", "text": "x", "score": 0.5}, Document("a", "T", "x", 0.5)),
        ({"id": "a", "contents": "no line break"}, Document("a", "", "no line break")),
        ({"id": "a", "text": "\ud800"}, Document("a", "", "\ufffd")),
    ],
)
def test_every_layout_of_a_document_is_read(item, document):
    with FaultyServer(lambda _: (200, {"result": [[item]]})) as server:
        (result,) = RemoteRetriever(server.url, QUICK).search(["a"], 3)
    assert result.documents == (document,)


def test_documents_without_an_id_are_the_same_if_and_only_if_their_text_is():
    items = ['"T"\nx', '"T"\ny', {"title": "T", "text": "x"}]
    with FaultyServer(lambda _: (200, {"result": [items]})) as server:
        (result,) = RemoteRetriever(server.url, QUICK).search(["a"], 3)
    assert [(d.title, d.text) for d in result.documents] == [("T", "x"), ("T", "y")]


@pytest.mark.parametrize(
    "payload",
    [
        None, [], "x", 3, {}, {"result": None}, {"result": {}}, {"result": [None]},
        {"result": [[None]]}, {"result": [[3]]}, {"result": [[{}]]},
        {"result": [[{"document": 3}]]}, {"result": [[{"id": "a", "title": 3, "text": "x"}]]},
        {"result": [[{"id": 1.5, "text": "x"}]]}, {"result": [[{"id": True, "text": "x"}]]},
        {"result": [[{"id": "a", "text": 3}]]},
        {"result": [[{"text": "x", "score": "1"}]]}, {"result": [[{"text": "x", "score": True}]]},
        {"result": [[{"text": "x", "score": 1e999}]]}, {"result": [[]], "errors": []},
        {"result": [[]], "errors": {}}, {"result": [[{"text": "x", "score": 10**400}]]},
    ],
)  # fmt: skip
def test_any_other_layout_is_a_recorded_failure(payload):
    with FaultyServer(lambda _: (200, payload)) as server:
        (result,) = RemoteRetriever(server.url, QUICK).search(["a"], 3)
    assert result.error is not None
    assert "wrong schema" in result.error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["document", "id", "title", "text", "contents", "score"]), inner
    ),
    max_leaves=9,
)  # fmt: skip
ITEMS = st.fixed_dictionaries({"text": st.text(max_size=3), "score": st.just(10**400) | JSON})


@settings(deadline=None)
@given(
    JSON
    | st.fixed_dictionaries(
        {"result": st.lists(st.lists(ITEMS | JSON, max_size=3), min_size=1, max_size=1)},
        optional={"errors": JSON},
    )
)
def test_any_answer_is_results_or_a_value_error(payload):
    try:
        (result,) = read_results(payload, 1)
    except ValueError:
        return
    scores = [document.score for document in result.documents]
    assert all(score is None or math.isfinite(score) for score in scores)


def test_documents_with_a_blank_id_are_told_apart_by_their_text():
    items = [{"id": "", "contents": "a"}, {"id": "", "contents": "b"}]
    with FaultyServer(lambda _: (200, {"result": [items]})) as server:
        (result,) = RemoteRetriever(server.url, QUICK).search(["a"], 3)
    assert [d.text for d in result.documents] == ["a", "b"]


def test_more_documents_than_asked_are_cut_and_repeats_dropped():
    items = [{"id": name, "text": "x", "score": s} for name, s in [("b", 1), ("b", 1), ("a", 1)]]
    with FaultyServer(lambda _: (200, {"result": [[*items, {"id": "-1", "text": ""}]]})) as server:
        (result,) = RemoteRetriever(server.url, QUICK).search(["a"], 2)
    assert found(result) == ["a", "b"]


def test_an_answer_that_is_too_large_is_a_failure():
    with FaultyServer(lambda _: (200, {"result": [["x" * 5000]]})) as server:
        settings = HttpSettings(retries=0, max_bytes=1000)
        (result,) = RemoteRetriever(server.url, settings).search(["a"], 3)
    assert "more than 1000 bytes" in result.error


def test_a_search_may_be_called_where_an_event_loop_runs():
    async def inside(url):
        return RemoteRetriever(url, QUICK).search(["a"], 3)

    with FaultyServer(good) as server:
        (result,) = asyncio.run(inside(server.url))
    assert found(result) == ["a"]


def test_passwords_of_an_address_stay_out_of_messages():
    url = "http://user:secret@127.0.0.1:1/retrieve?key=secret"
    settings = HttpSettings(retries=0, headers={"authorization": "secret"})
    retriever = RemoteRetriever(url, settings)
    (result,) = retriever.search(["a"], 3)
    assert "secret" not in f"{result.error} {retriever.info} {settings!r}"


def test_addresses_with_another_query_do_not_share_a_cache(tmp_path):
    def answer(request):
        return 200, {"result": [row(request.target) for _ in request.body["queries"]]}

    with FaultyServer(answer) as server:
        for index in ("a", "b"):
            retriever = RemoteRetriever(f"{server.url}/retrieve?index={index}", QUICK)
            with CachedRetriever(retriever, tmp_path / "cache.sqlite") as cache:
                assert found(cache.search(["q"], 1)[0]) == [f"/retrieve?index={index}"]


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://host/x", "http://", "/retrieve", "http://[::1/retrieve",
     "http://h:99999/retrieve", "http://h:abc/", "http://h\x00/", None, 5],
)  # fmt: skip
def test_an_address_that_is_none_is_a_config_error(url):
    with pytest.raises(ConfigError, match=re.escape(repr(url))):
        RemoteRetriever(url)


@pytest.mark.parametrize(
    "setting",
    [{"timeout": 0}, {"retries": -1}, {"backoff": -1}, {"max_bytes": 0}, {"timeout": "abc"},
     {"timeout": math.inf}, {"retries": 1.5}, {"max_backoff": math.nan}, {"headers": "x"},
     {"headers": {"a": 3}}, {"headers": {"a": "é"}}],
)  # fmt: skip
def test_a_setting_of_the_client_out_of_its_range_is_a_config_error(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        HttpSettings(**setting)


@pytest.mark.parametrize(
    "setting", [{"max_seconds": "abc"}, {"max_requests": 0}, {"query_field": 3}]
)
def test_a_setting_of_the_retriever_out_of_its_range_is_a_config_error(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        RemoteRetriever("http://127.0.0.1:1", **setting)


def test_our_own_server_answers_our_own_client():
    retriever = Bm25Retriever.build(THREE, backend="numpy")
    with served(retriever) as url:
        remote = RemoteRetriever(f"{url}/retrieve", QUICK)
        queries = ["red fruit", "", "zebra", "tree"]
        assert remote.search(queries, 2) == retriever.search(queries, 2)


def test_a_query_that_fails_behind_our_server_fails_alone_at_the_client():
    table = {"good": [THREE[0]]}
    with served(ScriptedRetriever(table, failing=["bad"], raising=["worse"])) as url:
        remote = RemoteRetriever(f"{url}/retrieve", QUICK)
        good_result, bad, worse = remote.search(["good", "bad", "worse"], 3)
    assert found(good_result) == ["p10"]
    assert bad.error == "scripted failure"
    assert worse.error == "ValueError: scripted defect"


def test_our_client_halves_a_batch_that_our_server_finds_too_large():
    retriever = Bm25Retriever.build(THREE, backend="numpy")
    with served(retriever, Limits(queries=3)) as url:
        results = RemoteRetriever(f"{url}/retrieve", QUICK).search(
            [f"fruit {n}" for n in range(10)], 1
        )
    assert [found(result) for result in results] == [["p1"]] * 10
