"""Search engines for agents: BM25, dense, hybrid, reranked, remote and web, and their server.

* `open_retriever` makes any of them by name, address, index folder or `module:function`.
* `load_index` loads a saved index; `Bm25Retriever.build` and `DenseRetriever.build` make one.
* `Retriever` is what they all are; `SearchResult` is what they return.
"""

from evenhand.retrieval.base import (
    Retriever,
    RetrieverInfo,
    SearchResult,
    answer,
    info_of,
)
from evenhand.retrieval.bm25 import Bm25Retriever
from evenhand.retrieval.cache import CachedRetriever, CacheStats
from evenhand.retrieval.corpus import PackedCorpus, corpus_hash
from evenhand.retrieval.dense import DenseRetriever, Encoder, SentenceEncoder
from evenhand.retrieval.http import HttpSettings
from evenhand.retrieval.hybrid import HybridRetriever
from evenhand.retrieval.manifest import Manifest, read_manifest
from evenhand.retrieval.registry import RETRIEVERS, load_index, open_retriever
from evenhand.retrieval.remote import RemoteRetriever
from evenhand.retrieval.rerank import CrossEncoderScorer, RerankRetriever
from evenhand.retrieval.web import SearxngProvider, WebProvider, WebRetriever

__all__ = [
    "RETRIEVERS",
    "Bm25Retriever",
    "CacheStats",
    "CachedRetriever",
    "CrossEncoderScorer",
    "DenseRetriever",
    "Encoder",
    "HttpSettings",
    "HybridRetriever",
    "Manifest",
    "PackedCorpus",
    "RemoteRetriever",
    "RerankRetriever",
    "Retriever",
    "RetrieverInfo",
    "SearchResult",
    "SearxngProvider",
    "SentenceEncoder",
    "WebProvider",
    "WebRetriever",
    "answer",
    "corpus_hash",
    "info_of",
    "load_index",
    "open_retriever",
    "read_manifest",
]
