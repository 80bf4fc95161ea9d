"""One battery over every back end: what `Retriever.search` promises."""

from __future__ import annotations

import contextlib

import pytest
from retrieval_helpers import THREE, TWINS, BagEncoder, served

from evenhand.core.errors import ConfigError
from evenhand.retrieval import (
    Bm25Retriever,
    CachedRetriever,
    DenseRetriever,
    HybridRetriever,
    RemoteRetriever,
    RerankRetriever,
    Retriever,
    WebRetriever,
    load_index,
)
from evenhand.trajectory.protocol import Document


def bm25(documents, **settings):
    return Bm25Retriever.build(documents, backend="numpy", **settings)


def overlap(pairs):
    return [len(set(query.split()) & set(passage.lower().split())) for query, passage in pairs]


class OnePageProvider:
    name = "one page"

    def __init__(self, documents):
        self.engine = bm25(documents)

    def search(self, query, k):
        return self.engine.search([query], k)[0].documents


@contextlib.contextmanager
def made(name, documents, folder):
    if name in ("flat", "hnsw"):
        pytest.importorskip("faiss")
        yield DenseRetriever.build(documents, BagEncoder(), structure=name)
    elif name == "numba":
        pytest.importorskip("numba")
        yield Bm25Retriever.build(documents, backend="numba")
    elif name == "loaded":
        bm25(documents).save(folder / "index")
        yield load_index(folder / "index", documents, backend="numpy")
    elif name == "threads":
        yield bm25(documents, threads=3)
    elif name == "hybrid":
        yield HybridRetriever([bm25(documents), bm25(documents, stemmer="none")])
    elif name == "rerank":
        yield RerankRetriever(bm25(documents), overlap)
    elif name == "cache":
        with CachedRetriever(bm25(documents), folder / "cache.sqlite") as cache:
            yield cache
    elif name == "remote":
        with served(bm25(documents)) as url:
            yield RemoteRetriever(f"{url}/retrieve")
    elif name == "web":
        yield WebRetriever(OnePageProvider(documents))
    else:
        yield bm25(documents)


NAMES = [
    "bm25", "numba", "loaded", "threads", "flat", "hnsw", "hybrid", "rerank", "cache", "remote",
    "web",
]  # fmt: skip


@pytest.fixture(params=NAMES)
def back_end(request, tmp_path):
    return lambda documents: made(request.param, documents, tmp_path)


def ids(result):
    assert result.error is None
    return [document.id for document in result.documents]


def test_three_passages_and_k_of_five_give_three_results_each_once(back_end):
    # RUC-NLPIR/FlashRAG #247, openbmb/UltraRAG #517
    with back_end(THREE) as retriever:
        for k in (3, 4, 5, 50):
            (result,) = retriever.search(["fruit tree"], k)
            assert sorted(ids(result)) == ["p1", "p10", "p9"]


@pytest.mark.parametrize("k", [1, 2, 4, 5, 7])
def test_equal_scores_come_in_the_order_of_their_ids_as_strings(back_end, k):
    with back_end(TWINS) as retriever:
        (result,) = retriever.search(["same words"], k)
        assert ids(result) == ["t1", "t10", "t2", "t20", "t3"][:k]


def test_results_keep_the_order_of_the_queries(back_end):
    with back_end(THREE) as retriever:
        queries = ["red apple", "green pear", "", "red apple"]
        results = retriever.search(queries, 1)
        assert [ids(result) for result in results] == [["p10"], ["p9"], [], ["p10"]]


def test_a_blank_query_returns_nothing(back_end):
    with back_end(THREE) as retriever:
        assert [ids(result) for result in retriever.search(["", " \n\t ", "\u2003"], 5)] == [[]] * 3
        assert retriever.search([], 5) == []


@pytest.mark.parametrize("k", [0, -3])
def test_k_below_one_is_an_error(back_end, k):
    with back_end(THREE) as retriever, pytest.raises(ConfigError, match="at least 1"):
        retriever.search(["fruit"], k)


def test_a_batch_gives_what_single_queries_give(back_end):
    words = ["fruit", "tree", "red", "green", "apple", "grows", "tree with", "pear a"]
    with back_end(THREE + TWINS) as retriever:
        batch = retriever.search(words, 3)
        assert batch == [retriever.search([word], 3)[0] for word in words]


@pytest.mark.parametrize(
    "query", ["\ud800 fruit", "fruit\x00", "🍐 fruit", "(fruit", "fruit " * 500]
)
def test_odd_characters_neither_raise_nor_hide_the_words(back_end, query):
    with back_end(THREE) as retriever:
        (result,) = retriever.search([query], 3)
        assert len(ids(result)) == 3


def test_titles_and_texts_come_back_unchanged(back_end):
    odd = Document("x/1 é", 'A "quoted" title', "line\nbreak \u2028 and\ttab, fruit, ünïcödé 🍐")
    with back_end([odd]) as retriever:
        (result,) = retriever.search(["fruit"], 1)
        (found,) = result.documents
        assert (found.id, found.title, found.text) == (odd.id, odd.title, odd.text)


def test_every_back_end_is_a_retriever(back_end):
    with back_end(THREE) as retriever:
        assert isinstance(retriever, Retriever)
