"""Dense retrieval: passages and queries as vectors, cosine similarity, faiss on the CPU.

`flat` compares a query with every passage (exact); `hnsw` walks a graph (Malkov and Yashunin,
arXiv 1603.09320) and may miss some. Vectors are scaled to length 1, so the inner product is the
cosine. Models that were trained with prefixes (`query: `, `passage: ` for the E5 family) need the
same ones here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evenhand.core.errors import ConfigError, DataError, require
from evenhand.retrieval.base import (
    Progress,
    RetrieverInfo,
    SearchResult,
    answer,
    check_count,
    check_text,
)
from evenhand.retrieval.corpus import PackedCorpus, damaged
from evenhand.retrieval.manifest import Manifest, library_versions, new_index
from evenhand.trajectory.protocol import Document

Vectors = NDArray[np.float32]

KIND = "dense"
STRUCTURES = ("flat", "hnsw")
INDEX_FILE = "vectors.faiss"
PROBE_FILE = "probe_vectors.npy"

PROBES = ("Who wrote the play about a prince of Denmark?", "Apple\na red fruit of a tree")
"""Texts whose vectors are saved with an index, so that another encoder is noticed."""

SAME_ENCODER = 0.999
"""Least cosine between two vectors of one text by the same encoder: a device or half precision
moves it by less, another model by far more."""


DECIMALS = 6
"""Scores are rounded to this many decimals. Padding inside a batch moves a float32 cosine by about
1e-7; without rounding it would decide between equal passages."""

_BLOCK = 1024
_MARGIN = 8


class Encoder(Protocol):
    """Turns texts into vectors."""

    name: str
    """Which model it is; goes into the manifest and the fingerprint."""

    def encode(self, texts: Sequence[str]) -> Any:
        """Return `[texts, dimensions]` numbers, of any length but not 0."""
        ...


class SentenceEncoder:
    """A sentence-transformers model.

    Args:
        model: its name or folder.
        device: `cpu`, `cuda`, ...; by default what the library chooses.
        batch_size: texts that are encoded together.
    """

    def __init__(self, model: str, *, device: str | None = None, batch_size: int = 64) -> None:
        library = require("sentence_transformers", "dense", "dense retrieval")
        # The path of a folder must mean the same from any other folder.
        self.name = str(Path(model).resolve() if Path(model).is_dir() else model)
        self._batch_size = check_count(batch_size, "batch_size")
        try:
            self._model = library.SentenceTransformer(self.name, device=device)
        except (OSError, ValueError) as error:
            first_line = (str(error).splitlines() or ["no reason given"])[0]
            raise ConfigError(
                f"the encoder {self.name!r} cannot be loaded ({first_line}); "
                "give a folder, or a name that the hub (or its local cache) has"
            ) from error

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return `[texts, dimensions]` float32 vectors."""
        vectors: Vectors = self._model.encode(
            list(texts),
            batch_size=self._batch_size,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return vectors


class DenseRetriever:
    """Search by the cosine of vectors. Make one with `build` or `load_index`.

    A flat index always returns `min(k, passages)` documents. An HNSW index may return fewer, never
    a padding entry. Vectors of one text depend on its batch in the last bits, so scores are
    rounded to six decimals before they are compared.

    Attributes:
        corpus: the passages, in the order of the vectors.
        manifest: what the index is.
    """

    def __init__(
        self, corpus: PackedCorpus, index: Any, encoder: Encoder, manifest: Manifest
    ) -> None:
        self.corpus = corpus
        self.manifest = manifest
        self._index = index
        self._encoder = encoder

    @property
    def info(self) -> RetrieverInfo:
        """What this retriever is."""
        fingerprint = f"{self.manifest.fingerprint}:{self._encoder.name}"
        return RetrieverInfo(KIND, fingerprint, len(self.corpus), self.corpus.hash)

    @classmethod
    def build(
        cls,
        documents: Iterable[Document],
        encoder: Encoder,
        *,
        structure: str = "flat",
        query_prefix: str = "",
        passage_prefix: str = "",
        neighbours: int = 32,
        ef_construction: int = 200,
        ef_search: int = 64,
        progress: Progress | None = None,
    ) -> DenseRetriever:
        """Encode and index passages as `passage_prefix + title + "\\n" + text`.

        Args:
            documents: the corpus, read once.
            encoder: turns texts into vectors.
            structure: `flat` or `hnsw`.
            query_prefix: stands before every query, `query: ` for the E5 family.
            passage_prefix: stands before every passage, `passage: ` for the E5 family.
            neighbours: HNSW's links of a node (M).
            ef_construction: HNSW's width while building.
            ef_search: HNSW's width while searching; at least `k` is used.
            progress: is told how far the work is.

        Raises:
            ConfigError: a setting out of its range.
            DataError: an unusable corpus, or vectors that are not finite or have length 0.
        """
        if structure not in STRUCTURES:
            raise ConfigError(f"structure must be flat or hnsw, got {structure!r}")
        check_text(query_prefix, "query_prefix")
        check_text(passage_prefix, "passage_prefix")
        faiss = require("faiss", "dense", "dense retrieval")
        parameters: dict[str, Any] = {
            "encoder": encoder.name,
            "structure": structure,
            "query_prefix": query_prefix,
            "passage_prefix": passage_prefix,
        }
        if structure == "hnsw":
            parameters |= {
                "neighbours": check_count(neighbours, "neighbours"),
                "ef_construction": check_count(ef_construction, "ef_construction"),
                "ef_search": check_count(ef_search, "ef_search"),
            }
        corpus = PackedCorpus.pack(documents)
        index = None
        for start in range(0, len(corpus), _BLOCK):
            if progress is not None:
                progress("encoding", start, len(corpus))
            block = [f"{passage_prefix}{d.title}\n{d.text}" for d in corpus[start : start + _BLOCK]]
            vectors = _unit(encoder, block)
            if index is None:
                index = _new_index(faiss, vectors.shape[1], parameters)
            index.add(vectors)
        encoding = ["sentence-transformers"] if isinstance(encoder, SentenceEncoder) else []
        versions = library_versions("faiss-cpu", *encoding)
        manifest = Manifest(KIND, corpus.hash, len(corpus), parameters, versions)
        return cls(corpus, index, encoder, manifest)

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the index folder; it appears whole or not at all (see `new_index`)."""
        faiss = require("faiss", "dense", "dense retrieval")
        with new_index(path, self.manifest, overwrite=overwrite) as folder:
            self.corpus.save(folder)
            faiss.write_index(self._index, str(folder / INDEX_FILE))
            probes = _unit(self._encoder, list(PROBES))
            np.save(folder / PROBE_FILE, probes, allow_pickle=False)

    @classmethod
    def open(
        cls,
        path: Path,
        manifest: Manifest,
        *,
        encoder: Encoder | str | None = None,
        device: str | None = None,
        batch_size: int = 64,
    ) -> DenseRetriever:
        """Open an index folder whose manifest was read (`load_index` does both).

        Args:
            path: the folder.
            manifest: its manifest.
            encoder: the encoder, or the name or folder of a model if it has moved since; by
                default the model that the manifest names.
            device: of a model that is loaded here.
            batch_size: of a model that is loaded here.

        Raises:
            DataError: files are damaged or do not fit together, or the encoder gives other vectors
                than the one that the index was built with.
        """
        faiss = require("faiss", "dense", "dense retrieval")
        corpus = PackedCorpus.open(path, manifest.corpus_hash)
        try:
            index = faiss.read_index(str(path / INDEX_FILE))
        except RuntimeError as error:
            raise damaged(path, f"{INDEX_FILE} cannot be read") from error
        if not index.ntotal == len(corpus) == manifest.passages:
            raise damaged(path, f"{index.ntotal} vectors for {len(corpus)} passages")
        _check_parameters(path, manifest.parameters)
        if encoder is None or isinstance(encoder, str):
            model = encoder or manifest.parameters["encoder"]
            encoder = SentenceEncoder(model, device=device, batch_size=batch_size)
        _check_encoder(path, index.d, encoder, manifest)
        return cls(corpus, index, encoder, manifest)

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:
        """See `Retriever.search`. The score is the cosine, rounded to six decimals."""
        return answer(queries, k, self._search_batch)

    def _search_batch(self, queries: list[str], k: int) -> list[SearchResult]:
        prefix = self.manifest.parameters["query_prefix"]
        vectors = _unit(self._encoder, [prefix + query for query in queries])
        k = min(k, len(self.corpus))
        results: list[SearchResult | None] = [None] * len(queries)
        waiting, width = np.arange(len(queries)), min(k + _MARGIN, len(self.corpus))
        while len(waiting):
            raw, passages = self._nearest(vectors[waiting], width)
            scores = np.round(raw.astype(np.float64), DECIMALS)
            # Equal scores that reach the end of the list may go on beyond it: look further.
            cut = np.zeros(len(waiting), dtype=bool)
            if width < len(self.corpus):
                cut = (passages[:, -1] >= 0) & (scores[:, -1] >= scores[:, k - 1])
            for row in np.flatnonzero(~cut):
                pairs = zip(passages[row].tolist(), scores[row].tolist(), strict=True)
                found = tuple(self.corpus.document(at, score) for at, score in pairs if at >= 0)
                results[waiting[row]] = SearchResult(found)
            waiting, width = waiting[cut], min(4 * width, len(self.corpus))
        return [result for result in results if result is not None]

    def _nearest(self, vectors: Vectors, width: int) -> tuple[Vectors, NDArray[np.int64]]:
        if self.manifest.parameters["structure"] == "hnsw":
            faiss = require("faiss", "dense", "dense retrieval")
            ef_search = max(int(self.manifest.parameters["ef_search"]), width)
            settings = faiss.SearchParametersHNSW(efSearch=ef_search)
            scores, passages = self._index.search(vectors, width, params=settings)
        else:
            scores, passages = self._index.search(vectors, width)
        return scores, passages


def _new_index(faiss: Any, size: int, parameters: dict[str, Any]) -> Any:
    if parameters["structure"] == "flat":
        return faiss.IndexFlatIP(size)
    index = faiss.IndexHNSWFlat(size, parameters["neighbours"], faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = parameters["ef_construction"]
    return index


def _check_parameters(path: Path, parameters: dict[str, Any]) -> None:
    texts = ("encoder", "structure", "query_prefix", "passage_prefix")
    missing = [name for name in texts if not isinstance(parameters.get(name), str)]
    if missing:
        raise damaged(path, f"its manifest has no usable {', '.join(missing)}")
    width = parameters.get("ef_search")
    if parameters["structure"] not in STRUCTURES or (
        parameters["structure"] == "hnsw" and not (isinstance(width, int) and width > 0)
    ):
        raise damaged(path, "its manifest does not say how to search the vectors")


def _check_encoder(path: Path, size: int, encoder: Encoder, manifest: Manifest) -> None:
    remedy = f"use the encoder of the index ({manifest.parameters['encoder']!r})"
    vectors = _unit(encoder, list(PROBES))
    if vectors.shape[1] != size:
        raise DataError(
            f"{path} holds vectors of {size} numbers, the encoder {encoder.name!r} gives "
            f"{vectors.shape[1]}; {remedy}"
        )
    try:
        saved = np.load(path / PROBE_FILE, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise damaged(path, f"{PROBE_FILE} cannot be read") from error
    if saved.shape != vectors.shape or saved.dtype != vectors.dtype:
        raise damaged(path, f"{PROBE_FILE} holds {saved.dtype} of shape {saved.shape}")
    nearness = float((saved * vectors).sum(axis=1).min())
    if not nearness >= SAME_ENCODER:
        raise DataError(
            f"{path} was built with another encoder than {encoder.name!r}: the vectors of a test "
            f"sentence have the cosine {nearness:.3f}, not 1; {remedy}"
        )


def _unit(encoder: Encoder, texts: list[str]) -> Vectors:
    vectors = np.array(encoder.encode(texts), dtype=np.float32, order="C")
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise DataError(
            f"the encoder {encoder.name!r} gave the shape {vectors.shape} for {len(texts)} texts; "
            "it must give one vector a text"
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0)).all():
        raise DataError(
            f"the encoder {encoder.name!r} gave a vector that is not finite or has length 0"
        )
    unit: Vectors = vectors / lengths
    return unit
