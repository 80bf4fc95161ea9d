"""The guarantees that every back end gets from `answer`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenhand.core.errors import ConfigError, DataError, RetrievalError
from evenhand.retrieval.base import (
    NOTHING,
    RetrieverInfo,
    SearchResult,
    answer,
    failure,
    info_of,
    ranked,
    search_one_by_one,
)
from evenhand.testing.retrievers import ScriptedRetriever
from evenhand.trajectory.protocol import Document

DOCUMENTS = st.lists(
    st.builds(
        Document,
        st.sampled_from(["-1", "1", "10", "2", "a", "B", "é"]),
        st.just("t"),
        st.just("x"),
        st.sampled_from([0.0, 0.5, 1.0]),
    )
)


def echo(queries: list[str], _: int) -> list[SearchResult]:
    return [SearchResult((Document(query, "", ""),)) for query in queries]


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 9))
def test_a_ranking_is_sorted_by_score_then_id_without_repeats_or_padding(documents, k):
    found = ranked(documents, k)
    keys = [(-document.score, document.id) for document in found]
    assert keys == sorted(keys)
    assert len({document.id for document in found}) == len(found)
    assert "-1" not in {document.id for document in found}
    assert len(found) == min(k, len({d.id for d in documents} - {"-1"}))


def test_documents_without_scores_keep_their_order():
    documents = [Document("b", "", ""), Document("a", "", ""), Document("c", "", "", 9.0)]
    assert [document.id for document in ranked(documents, 2)] == ["b", "a"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["", " \t\n", "a", "b", " c ", "\ud800"])))
def test_results_are_parallel_to_the_queries_and_blank_ones_get_nothing(queries):
    results = answer(queries, 1, echo)
    assert len(results) == len(queries)
    for query, result in zip(queries, results, strict=True):
        expected = query.strip().replace("\ud800", "\ufffd")
        assert [d.id for d in result.documents] == ([expected] if expected else [])


def test_no_query_reaches_the_back_end_when_all_are_blank():
    def never(queries, _):
        raise AssertionError(queries)

    assert answer(["", "  "], 3, never) == [NOTHING, NOTHING]


@pytest.mark.parametrize("k", [0, -1, 1.0, "3", True, None])
def test_a_k_that_is_no_positive_whole_number_is_an_error(k):
    with pytest.raises(ConfigError, match="k must be a whole number of at least 1"):
        answer(["a"], k, echo)


def test_a_single_string_in_place_of_a_list_is_an_error():
    with pytest.raises(DataError, match="put it in a list"):
        answer("abc", 3, echo)


@pytest.mark.parametrize("query", [None, 3, b"bytes", ["nested"]])
def test_a_query_that_is_no_string_is_an_error(query):
    with pytest.raises(DataError, match="a query must be a string"):
        answer(["fine", query], 3, echo)


def test_a_back_end_that_loses_a_query_is_an_error():
    with pytest.raises(RetrievalError, match="2 queries got 1 results"):
        answer(["a", "b"], 3, lambda *_: [NOTHING])


def test_an_error_passes_and_excludes_documents():
    failed = SearchResult(error="down")
    assert answer(["a"], 3, lambda *_: [failed]) == [failed]
    with pytest.raises(DataError):
        SearchResult((Document("a", "", ""),), "down")


def test_a_retriever_that_raises_fails_only_the_query_that_makes_it_raise():
    table = {"good": [Document("1", "", "")]}
    retriever = ScriptedRetriever(table, raising=["bad"])
    results = search_one_by_one(retriever, ["good", "bad", "good"], 3)
    assert [result.error for result in results] == [None, "ValueError: scripted defect", None]
    assert results[0].documents == results[2].documents == tuple(table["good"])


@pytest.mark.parametrize("returned", [None, [], [1, 2], [NOTHING] * 3, "ab"])
def test_a_retriever_that_breaks_the_contract_gives_errors_not_exceptions(returned):
    class Broken:
        def search(self, *_):
            return returned

    results = search_one_by_one(Broken(), ["a", "b"], 3)
    assert len(results) == 2
    assert all(result.error for result in results)


@pytest.mark.parametrize("error", [ConfigError("own"), ValueError("other")])
def test_a_failure_names_the_type_of_a_foreign_exception_only(error):
    expected = "own" if isinstance(error, ConfigError) else "ValueError: other"
    assert failure(error) == SearchResult(error=expected)


@pytest.mark.parametrize(
    ("document", "score"),
    [
        (Document("1", "t", "x", np.float32(1.5)), 1.5),
        (Document(1, "t", "x", np.int64(2)), 2.0),
        (Document(np.int64(1), "t", "x"), None),
        (Document("1", "t", "x", 1), 1.0),
    ],
)
def test_ids_and_scores_get_plain_types(document, score):
    (result,) = answer(["q"], 1, lambda *_: [SearchResult((document,))])
    (found,) = result.documents
    assert found == Document("1", "t", "x", score)
    assert (type(found.id), type(found.score)) == (str, type(score))


@pytest.mark.parametrize(
    "document",
    [
        Document("1", "t", "x", float("nan")),
        Document("1", "t", "x", float("inf")),
        Document("1", "t", "x", 10**400),
        Document("1", "t", "x", "high"),
        Document("1", None, "x"),
        Document("1", "t", b"x"),
        Document(None, "t", "x"),
        Document(True, "t", "x"),
        Document(1.5, "t", "x"),
        "a text",
    ],
)
def test_an_unusable_document_fails_its_query_and_no_other(document):
    class Mine:
        def search(self, queries, _):
            good, bad = SearchResult((Document("1", "", ""),)), SearchResult((document,))
            return [bad if query == "bad" else good for query in queries]

    mine = Mine()
    for results in (
        search_one_by_one(mine, ["a", "bad"], 3),
        answer(["a", "bad"], 3, mine.search),
    ):
        assert results[0].error is None
        assert results[1].error.startswith("the retriever gave an unusable document")


def test_a_retriever_without_info_is_known_by_its_class():
    class Mine:
        def search(self, *_):
            return []

    assert info_of(Mine()) == RetrieverInfo("Mine")
