"""Retrievers by name, folder, address and `module:function`."""

from __future__ import annotations

import pytest
from retrieval_helpers import THREE

from evenhand.core.errors import ConfigError, DataError
from evenhand.retrieval import (
    Bm25Retriever,
    CachedRetriever,
    HybridRetriever,
    RemoteRetriever,
    RerankRetriever,
    WebRetriever,
    corpus_hash,
    open_retriever,
    settings_from_text,
)
from evenhand.testing.retrievers import ScriptedRetriever


@pytest.fixture
def folder(tmp_path):
    Bm25Retriever.build(THREE, backend="numpy").save(tmp_path / "index")
    return str(tmp_path / "index")


def found(retriever):
    return [document.id for document in retriever.search(["red apple"], 1)[0].documents]


def test_an_index_opens_by_folder_by_path_and_by_name(folder):
    for retriever in (
        open_retriever(folder),
        open_retriever({"path": folder, "backend": "numpy"}),
        open_retriever("index", path=folder),
        open_retriever({"name": "index", "path": folder}, backend="numpy"),
    ):
        assert isinstance(retriever, Bm25Retriever)
        assert found(retriever) == ["p10"]


def test_remote_and_web_open_with_the_settings_of_their_requests():
    for spec in (
        "http://127.0.0.1:1/retrieve",
        {"url": "http://127.0.0.1:1/retrieve"},
        {"name": "remote", "url": "http://127.0.0.1:1/retrieve"},
    ):
        retriever = open_retriever(spec, retries=0, timeout=1.0, batch_size=8)
        assert isinstance(retriever, RemoteRetriever)
        assert retriever.search(["a"], 1)[0].error
    web = open_retriever("web", url="http://127.0.0.1:1", retries=0, language="de")
    assert isinstance(web, WebRetriever)
    assert web.search(["a"], 1)[0].error


def test_parts_of_a_composite_are_specs_too(folder):
    hybrid = open_retriever("hybrid", retrievers=[folder, {"path": folder}], k0=10)
    assert isinstance(hybrid, HybridRetriever)
    assert found(hybrid) == ["p10"]
    rerank = open_retriever(
        {"name": "rerank", "retriever": folder}, scorer="retrieval_plugins:constant", depth=2
    )
    assert isinstance(rerank, RerankRetriever)
    assert rerank.info.fingerprint is not None


def test_a_cache_goes_over_any_of_them(folder, tmp_path):
    with open_retriever(folder, cache=tmp_path / "cache.sqlite") as retriever:
        assert isinstance(retriever, CachedRetriever)
        assert found(retriever) == found(retriever) == ["p10"]
        assert retriever.stats.hits == 1
    with pytest.raises(ConfigError, match="needs a fingerprint"):
        open_retriever("retrieval_plugins:make", cache=tmp_path / "cache.sqlite")


def test_a_cache_goes_over_a_retriever_that_is_made(tmp_path):
    made = ScriptedRetriever({}, fingerprint=None)
    with open_retriever(made, cache=tmp_path / "cache.sqlite", fingerprint="v1") as retriever:
        assert isinstance(retriever, CachedRetriever)
    with pytest.raises(ConfigError, match="give cache=FILE too"):
        open_retriever(made, fingerprint="v1")


@pytest.mark.parametrize(
    ("spec", "texts", "values"),
    [
        ("FOLDER", {"threads": "2", "memory_map": "no"}, {"threads": 2, "memory_map": False}),
        ("FOLDER", {"encoder": "123", "device": "none"}, {"encoder": "123", "device": None}),
        (
            "http://h",
            {"timeout": "3", "query_field": " q "},
            {"timeout": 3.0, "query_field": " q "},
        ),
        ("http://h", {"headers": '{"key": "x"}'}, {"headers": {"key": "x"}}),
        ("http://h", {"max_requests": "none"}, {"max_requests": None}),
        ("web", {"language": "2", "max_pages": "2"}, {"language": "2", "max_pages": 2}),
        ("hybrid", {"weights": "[1, 2.5]", "k0": "1"}, {"weights": [1, 2.5], "k0": 1.0}),
        ("rerank", {"retriever": "x", "depth": "9"}, {"retriever": "x", "depth": 9}),
        ("retrieval_plugins:make", {"answer": "7 "}, {"answer": "7 "}),
        (
            "retrieval_plugins:plain",
            {"a": "7", "b": "7", "c": "7 x"},
            {"a": 7, "b": "7", "c": "7 x"},
        ),
        ("FOLDER", {"cache": "7", "fingerprint": "1"}, {"cache": "7", "fingerprint": "1"}),
    ],
)
def test_a_setting_as_text_is_read_as_the_type_of_its_parameter(folder, spec, texts, values):
    assert settings_from_text(folder if spec == "FOLDER" else spec, texts) == values


@pytest.mark.parametrize(
    ("spec", "texts", "message"),
    [
        ("http://h", {"retries": "1.5"}, "retries must be a whole number"),
        ("http://h", {"timeout": "abc"}, "timeout must be a number"),
        ("http://h", {"timeout": "inf"}, "timeout must be a finite number"),
        ("index", {"verify": "maybe"}, "verify must be true or false"),
        ("hybrid", {"k0": "nan"}, "k0 must be a finite number"),
        ("absent", {}, "no retriever 'absent'"),
    ],
)
def test_a_text_of_another_type_is_a_config_error(spec, texts, message):
    with pytest.raises(ConfigError, match=message):
        settings_from_text(spec, texts)


def test_a_corpus_is_given_as_passages_or_as_their_hash(folder):
    assert found(open_retriever(folder, corpus=THREE)) == ["p10"]
    assert found(open_retriever(folder, corpus=corpus_hash(THREE))) == ["p10"]
    with pytest.raises(ConfigError, match="64 hexadecimal digits, got 'corpus.jsonl'"):
        open_retriever(folder, corpus="corpus.jsonl")
    with pytest.raises(DataError, match="another corpus"):
        open_retriever(folder, corpus="0" * 64)


def test_a_folder_refuses_a_second_path(folder):
    with pytest.raises(ConfigError, match="path"):
        open_retriever(folder, path="x")


def test_a_function_of_the_user_makes_a_retriever_with_its_settings():
    retriever = open_retriever("retrieval_plugins:make", answer="red apple")
    assert found(retriever) == ["mine"]


def test_a_retriever_is_returned_as_it_is():
    retriever = ScriptedRetriever({})
    assert open_retriever(retriever) is retriever
    with pytest.raises(ConfigError, match="settings can only be given"):
        open_retriever(retriever, threads=2)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("hybird", {}, "did you mean 'hybrid'"),
        ("remote", {}, "missing a required argument: 'url'"),
        ("remote", {"url": "http://h", "timeuot": 3}, "did you mean 'timeout'"),
        ("web", {"url": "http://h", "langauge": "en"}, "did you mean 'language'"),
        ("hybrid", {"retrievers": [], "deep": 3}, "did you mean 'depth'"),
        ("hybrid", {"retrievers": []}, "needs retrievers"),
        ("rerank", {"retriever": "http://h"}, "needs either model"),
        ("retrieval_plugins:make", {"answr": "x"}, "did you mean 'answer'"),
        ("retrieval_plugins:absent", {}, "has no 'absent'"),
        ("retrieval_plugins:broken", {}, "raised RuntimeError: no engine"),
        ("retrieval_plugins:NUMBER", {}, "give a function or class"),
        ("hybrid", {"retrievers": 5}, "retrievers must be a list"),
        ("hybrid", {"retrievers": "idx"}, "retrievers must be a list"),
        ("retrieval_plugins:constant", {"pairs": []}, "has no method 'search'"),
        ({"name": 3}, {}, "needs a name"),
        ({}, {}, "needs a name"),
    ],
)
def test_a_wrong_name_or_setting_is_a_config_error_that_helps(spec, settings, message):
    with pytest.raises(ConfigError, match=message):
        open_retriever(spec, **settings)


def test_an_index_that_is_not_there_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        open_retriever("index", path=str(tmp_path / "absent"))
