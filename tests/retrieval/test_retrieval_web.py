"""Web search against a local fake of SearXNG's JSON interface."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenhand.core.errors import ConfigError, RetrievalError
from evenhand.retrieval import HttpSettings, SearxngProvider, WebRetriever
from evenhand.retrieval.web import read_page
from evenhand.testing.retrievers import Fault, FaultyServer
from evenhand.trajectory.protocol import Document

QUICK = HttpSettings(timeout=0.4, retries=1, backoff=0.001, max_backoff=0.01)


def pages(request):
    """Two pages of three results; the third page repeats the second."""
    given = {name: values[0] for name, values in parse_qs(urlsplit(request.target).query).items()}
    page = min(int(given["pageno"]), 2)
    results = [
        {"url": f"https://site/{given['q']}/{page}/{n}", "title": f"Page {n}", "content": "words"}
        for n in range(3)
    ]
    return 200, {"query": given["q"], "results": results}


def test_a_result_of_the_instance_becomes_a_document():
    with FaultyServer(pages) as server:
        retriever = WebRetriever(SearxngProvider(server.url, QUICK))
        (result,) = retriever.search(["cats & dogs"], 2)
    assert result.documents == (
        Document("https://site/cats & dogs/1/0", "Page 0", "words"),
        Document("https://site/cats & dogs/1/1", "Page 1", "words"),
    )
    target = urlsplit(server.requests[0].target)
    assert target.path == "/search"
    assert parse_qs(target.query) == {
        "q": ["cats & dogs"], "pageno": ["1"], "format": ["json"], "language": ["en"],
    }  # fmt: skip


@pytest.mark.parametrize(("k", "found", "asked"), [(3, 3, 1), (4, 4, 2), (6, 6, 2), (9, 6, 3)])
def test_further_pages_are_read_until_there_is_enough_or_nothing_new(k, found, asked):
    with FaultyServer(pages) as server:
        (result,) = WebRetriever(SearxngProvider(server.url, QUICK)).search(["q"], k)
    assert len(result.documents) == found
    assert len(server.requests) == asked


@pytest.mark.parametrize("fault", list(Fault))
def test_a_fault_of_one_query_fails_that_query_and_no_other(fault):
    def answer(request):
        return fault if "bad" in request.target else pages(request)

    with FaultyServer(answer) as server:
        retriever = WebRetriever(SearxngProvider(server.url, QUICK))
        results = retriever.search(["one", "bad", "two", "", "one"], 3)
    assert [result.error is None for result in results] == [True, False, True, True, True]
    assert [len(result.documents) for result in results] == [3, 0, 3, 0, 3]
    assert sum("bad" in request.target for request in server.requests) <= 2


@pytest.mark.parametrize(
    "payload",
    [[], {}, {"results": None}, {"results": [3]}, {"results": [{"title": "no address"}]},
     {"results": [{"url": "u", "title": 3}]}, {"results": [{"url": "u", "content": []}]}],
)  # fmt: skip
def test_another_schema_is_a_recorded_failure(payload):
    with FaultyServer(lambda _: (200, payload)) as server:
        (result,) = WebRetriever(SearxngProvider(server.url, QUICK)).search(["q"], 3)
    assert "wrong schema" in result.error


def test_missing_titles_and_snippets_are_empty():
    results = [{"url": "u", "title": None}]
    with FaultyServer(lambda _: (200, {"results": results})) as server:
        (result,) = WebRetriever(SearxngProvider(server.url, QUICK)).search(["q"], 3)
    assert result.documents == (Document("u", "", ""),)


def test_any_object_with_name_and_search_is_a_provider():
    class Mine:
        name = "mine"

        def search(self, query, k):
            if query == "bad":
                raise RetrievalError("no luck")
            return [Document(f"{query}{n}", "", "") for n in range(k)]

    retriever = WebRetriever(Mine(), concurrency=2)
    a, bad, b = retriever.search(["a", "bad", "b"], 2)
    assert [d.id for d in a.documents + b.documents] == ["a0", "a1", "b0", "b1"]
    assert bad.error == "no luck"
    assert retriever.info.fingerprint == "web:mine"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["results", "url", "title", "content"]), inner)
    ),
    max_leaves=9,
)


@settings(deadline=None)
@given(JSON | st.fixed_dictionaries({"results": st.lists(JSON)}))
def test_any_page_is_documents_or_a_value_error(payload):
    try:
        documents = read_page(payload)
    except ValueError:
        return
    assert all(isinstance(document, Document) for document in documents)


def test_an_exception_of_a_users_own_provider_fails_its_query():
    class Mine:
        name = "mine"

        def search(self, query, _):
            if query == "bad":
                raise KeyError("defect")
            return [Document(query, "", "")]

    good, bad = WebRetriever(Mine()).search(["a", "bad"], 2)
    assert [d.id for d in good.documents] == ["a"]
    assert "defect" in bad.error


def test_instances_that_may_answer_differently_have_different_fingerprints():
    url = "http://127.0.0.1:1"
    providers = [
        SearxngProvider(url),
        SearxngProvider(f"{url}0"),
        SearxngProvider(url, language="de"),
        SearxngProvider(url, engines="wikipedia"),
        SearxngProvider(url, max_pages=1),
    ]
    assert len({WebRetriever(provider).info.fingerprint for provider in providers}) == 5


@pytest.mark.parametrize("setting", [{"max_pages": 0}, {"max_seconds": "abc"}])
def test_a_setting_of_the_provider_out_of_its_range_is_an_error(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        SearxngProvider("http://127.0.0.1:1", **setting)


def test_a_concurrency_below_one_is_an_error():
    with pytest.raises(ConfigError, match="concurrency"):
        WebRetriever(SearxngProvider("http://127.0.0.1:1"), concurrency=0)
