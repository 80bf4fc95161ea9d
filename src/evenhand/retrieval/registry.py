"""Retrievers by name, and saved indexes by folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenhand.errors import ConfigError, DataError
from evenhand.plugins import did_you_mean, is_object_spec, load_object
from evenhand.protocol import Document
from evenhand.retrieval.base import Retriever
from evenhand.retrieval.bm25 import Bm25Retriever
from evenhand.retrieval.cache import CachedRetriever
from evenhand.retrieval.corpus import corpus_hash
from evenhand.retrieval.dense import DenseRetriever
from evenhand.retrieval.http import HttpSettings
from evenhand.retrieval.hybrid import K0, HybridRetriever
from evenhand.retrieval.manifest import check_corpus, read_manifest
from evenhand.retrieval.remote import RemoteRetriever
from evenhand.retrieval.rerank import CrossEncoderScorer, PairScorer, RerankRetriever
from evenhand.retrieval.web import SearxngProvider, WebProvider, WebRetriever

Spec = str | Mapping[str, Any]
"""A name of `RETRIEVERS`, an index folder, an `http(s)://` address, `module:function`; or a mapping
with such a `name` and the settings beside it."""


def load_index(
    path: Path | str,
    corpus: Iterable[Document] | str | None = None,
    *,
    verify: bool = False,
    **settings: Any,
) -> Retriever:
    """Load a saved index; its folder says which back end it is for.

    Args:
        path: the folder.
        corpus: passages (or their `corpus_hash`) that the index must have been built on, in the
            same order; by default they are not compared.
        verify: read every file and compare its sha256 with the manifest, instead of its size.
        settings: of the back end: `threads`, `backend`, `memory_map` (bm25); `encoder`, `device`,
            `batch_size` (dense).

    Raises:
        DataError: not an index, a damaged one, or one of another corpus (with both hashes).
        ConfigError: a setting that the back end does not have.
    """
    folder = Path(path)
    manifest = read_manifest(folder, verify=verify)
    if corpus is not None:
        check_corpus(folder, manifest, corpus if isinstance(corpus, str) else corpus_hash(corpus))
    back_ends: dict[str, Callable[..., Retriever]] = {
        "bm25": Bm25Retriever.open,
        "dense": DenseRetriever.open,
    }
    if manifest.kind not in back_ends:
        raise DataError(
            f"{folder} is an index of kind {manifest.kind!r}, this version reads "
            f"{' and '.join(back_ends)}"
        )
    retriever: Retriever = _call(
        back_ends[manifest.kind], f"a {manifest.kind} index", settings, folder, manifest
    )
    return retriever


def _http(settings: dict[str, Any]) -> HttpSettings:
    names = HttpSettings.__dataclass_fields__
    return HttpSettings(**{name: settings.pop(name) for name in list(settings) if name in names})


def _remote(url: str, **settings: Any) -> Retriever:
    http = _http(settings)
    return RemoteRetriever(url, http, **settings)


def _web(
    url: str = "", *, provider: str | WebProvider = "searxng", concurrency: int = 4, **settings: Any
) -> Retriever:
    if provider == "searxng":
        http = _http(settings)
        return WebRetriever(
            _call(SearxngProvider, "searxng", settings, url, http), concurrency=concurrency
        )
    made: WebProvider = (
        load_object(provider, "web provider")(**settings) if isinstance(provider, str) else provider
    )
    return WebRetriever(made, concurrency=concurrency)


def _hybrid(
    retrievers: Sequence[Spec | Retriever],
    *,
    k0: float = K0,
    depth: int = 100,
    weights: Sequence[float] | None = None,
) -> Retriever:
    parts = [open_retriever(part) for part in retrievers]
    return HybridRetriever(parts, k0=k0, depth=depth, weights=weights)


def _rerank(
    retriever: Spec | Retriever,
    *,
    model: str | None = None,
    scorer: str | PairScorer | None = None,
    depth: int = 50,
    device: str | None = None,
    batch_size: int = 32,
) -> Retriever:
    name = scorer if isinstance(scorer, str) else None
    if (model is None) == (scorer is None):
        raise ConfigError("rerank needs either model (a cross-encoder) or scorer (module:function)")
    if model is not None:
        scorer = CrossEncoderScorer(model, device=device, batch_size=batch_size)
    elif isinstance(scorer, str):
        scorer = load_object(scorer, "pair scorer")
    return RerankRetriever(open_retriever(retriever), scorer, depth=depth, name=name)  # type: ignore[arg-type]


RETRIEVERS: dict[str, Callable[..., Retriever]] = {
    "index": load_index,
    "hybrid": _hybrid,
    "rerank": _rerank,
    "remote": _remote,
    "web": _web,
}
"""Name to factory. `index` takes `path` and tells bm25 from dense by the folder's manifest."""


def open_retriever(spec: Spec | Retriever, **settings: Any) -> Retriever:
    """Make a retriever from a spec; a retriever is returned as it is.

    Args:
        spec: see `Spec`. In a mapping `name` may be left out beside a `path` or a `url`.
        settings: of the retriever, beside those in the mapping. `cache=FILE` puts an on-disk cache
            over any of them (`fingerprint=TEXT` where it has none of its own).

    Raises:
        ConfigError: an unknown name or setting, with the nearest valid one.
        DataError: an index that cannot be loaded.
    """
    if not isinstance(spec, str | Mapping):
        if settings:
            raise ConfigError("settings can only be given with the name of a retriever")
        return spec
    wanted = {**({"name": spec} if isinstance(spec, str) else spec), **settings}
    cache, fingerprint = wanted.pop("cache", None), wanted.pop("fingerprint", None)
    retriever = _open(wanted)
    if cache is None:
        return retriever
    return CachedRetriever(retriever, Path(cache), fingerprint=fingerprint)


def _open(wanted: dict[str, Any]) -> Retriever:
    implied = "index" if "path" in wanted else "remote" if "url" in wanted else None
    name = wanted.pop("name", implied)
    if not isinstance(name, str):
        raise ConfigError(f"a retriever needs a name, got {name!r}")
    factory: Any = RETRIEVERS.get(name)
    if factory is not None:
        made: object = _call(factory, f"retriever {name!r}", wanted)
    elif name.startswith(("http://", "https://")):
        made = _call(_remote, "a remote retriever", wanted, name)
    elif Path(name).is_dir():
        made = load_index(name, **wanted)
    elif is_object_spec(name):
        made = _call(load_object(name, "retriever"), f"retriever {name!r}", wanted)
    else:
        raise ConfigError(
            f"no retriever {name!r}{did_you_mean(name, RETRIEVERS)}; give one of "
            f"{', '.join(RETRIEVERS)}, an index folder, an http address or module:function"
        )
    if not isinstance(made, Retriever):
        raise ConfigError(f"{name} gave {type(made).__name__}, which has no method 'search'")
    return made


def _call(
    factory: Callable[..., Any], what: str, settings: Mapping[str, Any], *positional: Any
) -> Any:
    """Call a factory; a setting that it does not have, or lacks, is a `ConfigError`."""
    names = _settings_of(factory)
    unknown = [] if names is None else [name for name in settings if name not in names]
    if unknown:
        raise ConfigError(
            f"{what} has no setting {unknown[0]!r}{did_you_mean(unknown[0], names or ())}; "
            f"it has {', '.join(sorted(names or ()))}"
        )
    try:
        inspect.signature(factory).bind(*positional, **settings)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from None
    return factory(*positional, **settings)


def _settings_of(factory: Callable[..., Any]) -> set[str] | None:
    """Return the names of the settings of a factory; `None` for one that takes any."""
    passed_on: dict[Any, tuple[Callable[..., Any], ...]] = {
        load_index: (Bm25Retriever.open, DenseRetriever.open),
        _remote: (RemoteRetriever, HttpSettings),
    }
    parts = (factory, *passed_on.get(factory, ()))
    parameters = [p for part in parts for p in inspect.signature(part).parameters.values()]
    if len(parts) == 1 and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    names = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return names - {"manifest", "http"}
