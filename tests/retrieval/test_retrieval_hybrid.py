"""Reciprocal rank fusion and reranking."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_helpers import THREE

from evenhand.core.errors import ConfigError
from evenhand.retrieval import Bm25Retriever, CrossEncoderScorer, HybridRetriever, RerankRetriever
from evenhand.testing.retrievers import ScriptedRetriever
from evenhand.trajectory.protocol import Document


def ranking(names, **settings):
    documents = [Document(name, name, "", float(-at)) for at, name in enumerate(names)]
    return ScriptedRetriever({"q": documents}, **settings)


def test_the_fused_score_is_the_sum_of_reciprocal_ranks():
    fused = HybridRetriever([ranking("abc"), ranking("bd")], k0=60)
    (result,) = fused.search(["q"], 9)
    scores = {document.id: document.score for document in result.documents}
    assert scores == pytest.approx({"a": 1 / 61, "b": 1 / 62 + 1 / 61, "c": 1 / 63, "d": 1 / 62})
    assert [document.id for document in result.documents] == ["b", "a", "d", "c"]


def test_weights_multiply_the_part_of_each_retriever():
    fused = HybridRetriever([ranking("a"), ranking("b")], weights=[1, 3])
    (result,) = fused.search(["q"], 9)
    assert [(d.id, d.score) for d in result.documents] == [("b", 3 / 61), ("a", 1 / 61)]


RANKINGS = st.lists(st.permutations("abcdef"), min_size=1, max_size=4)


@settings(deadline=None)
@given(RANKINGS, st.integers(1, 8), st.integers(1, 8))
def test_fusion_equals_the_plain_formula_at_any_depth(rankings, k, depth):
    (result,) = HybridRetriever([ranking(r) for r in rankings], depth=depth).search(["q"], k)
    read = max(k, depth)
    expected = {
        name: sum(1 / (61 + r.index(name)) for r in rankings if r.index(name) < read)
        for name in "abcdef"
    }
    assert len(result.documents) == min(k, sum(score > 0 for score in expected.values()))
    for document in result.documents:
        assert document.score == pytest.approx(expected[document.id])


def test_a_part_that_fails_fails_the_query_and_no_other():
    table = {"q": THREE, "r": THREE}
    fused = HybridRetriever([ScriptedRetriever(table), ScriptedRetriever(table, failing=["q"])])
    q, r = fused.search(["q", "r"], 3)
    assert q.error == "scripted: scripted failure"
    assert len(r.documents) == 3


@pytest.mark.parametrize(
    "setting",
    [{"k0": 0}, {"depth": 0}, {"weights": [1, 2]}, {"weights": [0]},
        {"k0": "abc"}, {"k0": float("inf")}, {"weights": "1"}, {"weights": ["x"]}, {"weights": 1}],
)  # fmt: skip
def test_a_setting_out_of_its_range_is_an_error(setting):
    with pytest.raises(ConfigError):
        HybridRetriever([ranking("a")], **setting)
    with pytest.raises(ConfigError, match="needs retrievers"):
        HybridRetriever([])
    with pytest.raises(ConfigError, match="retrievers must be a list"):
        HybridRetriever(5)


def test_the_corpus_is_known_where_all_parts_share_it():
    one, same = (Bm25Retriever.build(THREE, backend="numpy") for _ in range(2))
    other = Bm25Retriever.build(THREE[:2], backend="numpy")
    assert HybridRetriever([one, same]).info.corpus_hash == one.corpus.hash
    assert HybridRetriever([one, other]).info.corpus_hash is None
    prints = {HybridRetriever([one, part]).info.fingerprint for part in (same, other)}
    assert len(prints) == 2


def by_length(pairs):
    return [-len(passage) for _, passage in pairs]


def test_a_scorer_sorts_the_candidates_of_the_base_anew():
    base = Bm25Retriever.build(THREE, backend="numpy")
    retriever = RerankRetriever(base, by_length)
    tree, none = retriever.search(["fruit tree", "zebra"], 2)
    assert [(d.id, d.score) for d in tree.documents] == [
        ("p1", -len("Fruit tree\na tree with fruit")),
        ("p10", -len("Apple\na red fruit that grows on a tree")),
    ]
    assert none.documents == ()


def test_only_the_best_of_the_base_are_scored_all_queries_in_one_call():
    calls = []

    def scorer(pairs):
        calls.append([query for query, _ in pairs])
        return [0.0] * len(pairs)

    table = {"q": ranking("abcdef").search(["q"], 9)[0].documents, "r": THREE}
    RerankRetriever(ScriptedRetriever(table), scorer, depth=2).search(["q", "r"], 1)
    assert calls == [["q", "q", "r", "r"]]


def test_a_base_that_fails_keeps_its_error_and_the_scores_stay_aligned():
    table = {"q": THREE, "r": THREE}
    base = ScriptedRetriever(table, failing=["q"])
    q, r = RerankRetriever(base, by_length).search(["q", "r"], 3)
    assert q.error == "scripted failure"
    assert [document.id for document in r.documents] == ["p1", "p10", "p9"]


@pytest.mark.parametrize(
    "scores", [[], [1.0], [1.0, float("nan"), 2.0], [[1.0, 2.0, 3.0]], ["x"] * 3, None]
)
def test_a_scorer_that_does_not_give_a_number_a_pair_fails_the_query(scores):
    retriever = RerankRetriever(ScriptedRetriever({"q": THREE}), lambda _: scores)
    (result,) = retriever.search(["q"], 3)
    assert result.error.startswith("the scorer failed")


@pytest.mark.parametrize("raises", [True, False])
def test_a_scorer_that_fails_on_one_query_fails_no_other(raises):
    def scorer(pairs):
        if raises and any(query == "bad" for query, _ in pairs):
            raise ValueError("odd pair")
        return [float("nan") if query == "bad" else 1.0 for query, _ in pairs]

    table = dict.fromkeys(["q", "bad", "r"], THREE)
    q, bad, r = RerankRetriever(ScriptedRetriever(table), scorer).search(["q", "bad", "r"], 3)
    assert bad.error.startswith("the scorer failed")
    assert [len(result.documents) for result in (q, r)] == [3, 3]


class Short:
    def search(self, *_):
        return []


@pytest.mark.parametrize("part", [Short(), ScriptedRetriever({"q": THREE}, raising=["q"])])
def test_a_part_or_base_that_raises_or_is_short_fails_the_query(part):
    for retriever in (HybridRetriever([ranking("a"), part]), RerankRetriever(part, by_length)):
        q, none = retriever.search(["q", " "], 3)
        assert "scripted defect" in q.error or "did not return one result" in q.error
        assert none.error is None


def test_a_scorer_without_a_name_leaves_no_fingerprint():
    base = ScriptedRetriever({})
    assert RerankRetriever(base, by_length).info.fingerprint is None
    assert "mine" in RerankRetriever(base, by_length, name="mine").info.fingerprint


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_real_cross_encoder_scores_pairs(tmp_path):
    pytest.importorskip("sentence_transformers")
    import torch
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fruit", "tree", "red", "a", "green"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, num_labels=1, max_position_embeddings=64,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    scorer = CrossEncoderScorer(str(tmp_path / "model"), device="cpu")
    pairs = [("red fruit", "a tree"), ("red fruit", "a red fruit"), ("tree", "a tree")]
    assert len(scorer(pairs)) == 3
    assert scorer(pairs)[0] == pytest.approx(scorer(pairs[:1])[0], abs=1e-5)
    base = Bm25Retriever.build(THREE, backend="numpy")
    (result,) = RerankRetriever(base, scorer).search(["fruit tree"], 3)
    scores = [document.score for document in result.documents]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
