"""BM25: equality with bm25s used by hand, and what is ours on top."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor

import bm25s
import numpy as np
import pytest
import Stemmer
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_helpers import THREE, TWINS

from evenhand.core.errors import ConfigError, DataError, MissingExtraError
from evenhand.retrieval import Bm25Retriever, PackedCorpus, corpus_hash, load_index
from evenhand.retrieval.bm25 import Analyzer
from evenhand.trajectory.protocol import Document

VOCABULARY = [
    "the", "running", "runner", "ran", "fruits", "fruit", "tree", "trees", "of", "Ümlaut", "x",
    "42", "flies", "", "!?",
]  # fmt: skip
WORDS = st.lists(st.sampled_from(VOCABULARY), max_size=12).map(" ".join)
CORPORA = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=12).filter(
    lambda rows: any(word in " ".join(map(" ".join, rows)) for word in ("fruit", "tree", "42"))
)


BACKENDS = ["numpy", *(["numba"] if importlib.util.find_spec("numba") else [])]


def documents_of(rows):
    return [Document(f"{at:02}", title, text) for at, (title, text) in enumerate(rows)]


def by_hand(documents, queries, **settings):
    """Return `[queries, passages]` scores from bm25s alone."""
    stemmer = Stemmer.Stemmer("english")
    tokens = bm25s.tokenize(
        [f"{d.title} {d.text}" for d in documents], stemmer=stemmer, show_progress=False
    )
    model = bm25s.BM25(**settings)
    model.index(tokens, show_progress=False)
    split = bm25s.tokenize(queries, stemmer=stemmer, show_progress=False, return_ids=False)
    return [
        model.get_scores(words) if words else np.zeros(len(documents), np.float32)
        for words in split
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["lucene", "robertson", "atire"])
@settings(deadline=None, max_examples=30)
@given(rows=CORPORA, queries=st.lists(WORDS, min_size=1, max_size=4))
def test_scores_are_exactly_those_of_bm25s(backend, method, rows, queries):
    documents = documents_of(rows)
    retriever = Bm25Retriever.build(documents, method=method, backend=backend)
    scores = by_hand(documents, queries, method=method)
    for result, expected in zip(retriever.search(queries, 50), scores, strict=True):
        right = sorted((-score, d.id) for score, d in zip(expected, documents, strict=True))
        assert [(-d.score, d.id) for d in result.documents] == [
            (score, name) for score, name in right if score < 0
        ]


@settings(deadline=None, max_examples=30)
@given(rows=CORPORA, queries=st.lists(WORDS, min_size=1, max_size=4), k=st.integers(1, 6))
def test_the_best_k_are_the_start_of_the_whole_ranking(rows, queries, k):
    for backend in BACKENDS:
        retriever = Bm25Retriever.build(documents_of(rows), backend=backend)
        short, whole = retriever.search(queries, k), retriever.search(queries, 100)
        for few, all_of_them in zip(short, whole, strict=True):
            assert few.documents == all_of_them.documents[:k]


def test_words_are_split_and_stemmed_as_bm25s_does():
    text = "The runner's RUNNING shoes, e.g. no_1 & 2x: naïve Ärger a I"
    analyzer = Analyzer("english", "en", {}, learn=True)
    names = {number: stem for stem, number in analyzer.vocabulary.items()}
    numbers = analyzer.terms(text)
    names = {number: stem for stem, number in analyzer.vocabulary.items()}
    expected = bm25s.tokenize(
        [text], stemmer=Stemmer.Stemmer("english"), show_progress=False, return_ids=False
    )[0]
    assert [names[number] for number in numbers] == expected


def test_a_query_without_a_known_word_matches_nothing():
    retriever = Bm25Retriever.build(THREE, backend="numpy")
    results = retriever.search(["zebra", "the of", "?!", "a"], 3)
    assert [result.documents for result in results] == [()] * 4


def test_a_repeated_word_of_a_query_counts_each_time():
    retriever = Bm25Retriever.build(THREE, backend="numpy")
    once, twice = retriever.search(["apple", "apple apple"], 1)
    assert twice.documents[0].score == pytest.approx(2 * once.documents[0].score)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_threads_may_search_at_once(threads):
    documents = [Document(str(n), "", f"word{n % 7} word{n % 3} common") for n in range(500)]
    retriever = Bm25Retriever.build(documents, threads=threads)
    queries = [f"word{n} common" for n in range(7)] * 20
    expected = retriever.search(queries, 5)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: retriever.search(queries, 5), range(24)))
    assert found == [expected] * 24


def test_without_numba_the_search_is_the_same(monkeypatch):
    queries = ["fruit tree", "red", "zebra"]
    with_whatever_is_there = Bm25Retriever.build(THREE).search(queries, 3)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert Bm25Retriever.build(THREE).search(queries, 3) == with_whatever_is_there
    with pytest.raises(MissingExtraError, match="set backend=numpy"):
        Bm25Retriever.build(THREE, backend="numba")


def test_a_folder_is_also_an_index_of_bm25s(tmp_path):
    Bm25Retriever.build(THREE, backend="numpy").save(tmp_path / "index")
    model = bm25s.BM25.load(tmp_path / "index")
    assert model.get_scores(["red"]).argmax() == 0


def test_the_index_does_not_depend_on_the_process(tmp_path):
    # Python's string hashes differ between processes; files must not.
    import subprocess

    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from retrieval_helpers import THREE, TWINS\n"
        "from evenhand.retrieval import Bm25Retriever\n"
        "Bm25Retriever.build(THREE + TWINS, backend='numpy').save(Path(sys.argv[1]))\n"
    )
    here = str(__file__).rpartition("/")[0]
    for name in ("a", "b"):
        subprocess.run([sys.executable, "-c", code, tmp_path / name, here], check=True)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"method": "bm25+"}, "method must be one of"),
        ({"k1": 0}, "k1 must be a finite number above 0"),
        ({"k1": "abc"}, "k1 must be"),
        ({"k1": float("inf")}, "k1 must be"),
        ({"b": 1.5}, "b must be"),
        ({"stopwords": ["en"]}, "stopwords must be a text"),
        ({"stemmer": 3}, "stemmer must be a text"),
        ({"stemmer": "klingon"}, "stemmer must be"),
        ({"stopwords": "some"}, "stopwords must be"),
        ({"threads": 0}, "threads must be"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_a_setting_out_of_its_range_is_an_error(setting, message):
    with pytest.raises(ConfigError, match=message):
        Bm25Retriever.build(THREE, **setting)


@pytest.mark.parametrize("setting", [{"threads": "abc"}, {"backend": "cuda"}])
def test_a_setting_of_the_search_is_checked_before_the_corpus_is_read(setting):
    def never():
        raise AssertionError
        yield

    with pytest.raises(ConfigError):
        Bm25Retriever.build(never(), **setting)


@pytest.mark.parametrize("parameter", [{"stopwords": ["en"]}, {"stemmer": None}])
def test_a_manifest_without_usable_parameters_is_a_data_error(tmp_path, parameter):
    retriever = Bm25Retriever.build(THREE, backend="numpy")
    retriever.manifest.parameters.update(parameter)
    retriever.save(tmp_path / "index")
    with pytest.raises(DataError, match="how text was split into terms"):
        load_index(tmp_path / "index")


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no passages"),
        ([Document("", "t", "x")], "must not be blank"),
        ([Document("  ", "t", "x")], "must not be blank"),
        ([Document("-1", "t", "x")], "must not be blank or -1"),
        ([Document("1", "t", "x"), Document("1", "u", "y")], "repeats the id '1'"),
        ([Document("1", "t", "\ud800")], "lone surrogate"),
        ([Document("1", "", "of the")], "no passage of the corpus holds a term"),
    ],
)
def test_an_unusable_corpus_is_an_error(documents, message):
    with pytest.raises(DataError, match=message):
        Bm25Retriever.build(documents)


def test_a_passage_without_words_is_kept_and_never_found():
    retriever = Bm25Retriever.build([*THREE, Document("blank", "", "")], backend="numpy")
    assert len(retriever.corpus) == 4
    assert "blank" not in {d.id for d in retriever.search(["fruit tree red"], 9)[0].documents}


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=8))
def test_a_packed_corpus_gives_back_its_passages(rows):
    documents = [
        Document(f"{at}", title, text)
        for at, (title, text) in enumerate(rows)
        if (title + text).isprintable()
    ] or THREE
    packed = PackedCorpus.pack(documents)
    assert list(packed) == documents
    assert packed[-1] == documents[-1]
    assert packed[1:] == documents[1:]
    assert packed.hash == corpus_hash(documents)


def test_moving_text_across_a_border_or_changing_the_order_changes_the_hash():
    pairs = [Document("1", "ab", "c"), Document("2", "", "d")]
    others = [
        [Document("1", "a", "bc"), Document("2", "", "d")],
        [Document("1a", "b", "c"), Document("2", "", "d")],
        [Document("1", "ab", "c"), Document("2", "d", "")],
        pairs[::-1],
        pairs[:1],
    ]
    assert len({corpus_hash(corpus) for corpus in [pairs, *others]}) == 6


def test_progress_is_told_from_start_to_end():
    told = []
    Bm25Retriever.build(TWINS, backend="numpy", progress=lambda *step: told.append(step))
    assert ("tokenising", 0, 5) in told
    assert ("tokenising", 5, 5) in told
