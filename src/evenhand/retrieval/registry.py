"""Retrievers by name, and saved indexes by folder."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenhand.core.errors import ConfigError, DataError, EvenhandError
from evenhand.core.plugins import did_you_mean, is_object_spec, load_object
from evenhand.retrieval.base import Retriever, check_list
from evenhand.retrieval.bm25 import Bm25Retriever
from evenhand.retrieval.cache import CachedRetriever
from evenhand.retrieval.corpus import corpus_hash
from evenhand.retrieval.dense import DenseRetriever
from evenhand.retrieval.http import HttpSettings
from evenhand.retrieval.hybrid import K0, HybridRetriever
from evenhand.retrieval.manifest import check_corpus, read_manifest
from evenhand.retrieval.remote import RemoteRetriever
from evenhand.retrieval.rerank import CrossEncoderScorer, PairScorer, RerankRetriever
from evenhand.retrieval.texts import read_texts
from evenhand.retrieval.web import SearxngProvider, WebProvider, WebRetriever
from evenhand.trajectory.protocol import Document

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
        corpus: passages (or their `corpus_hash`, 64 hexadecimal digits) that the index must have
            been built on, in the same order; by default they are not compared.
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
        check_corpus(folder, manifest, _hash_of(corpus))
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


def _hash_of(corpus: Iterable[Document] | str) -> str:
    if not isinstance(corpus, str):
        return corpus_hash(corpus)
    if not re.fullmatch("[0-9a-f]{64}", corpus):
        raise ConfigError(
            f"corpus must be passages or their hash of 64 hexadecimal digits, got {corpus!r}; "
            "read a file with evenhand.datasets.load_corpus (on the command line: --corpus)"
        )
    return corpus


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
    parts = [open_retriever(part) for part in check_list(retrievers, "retrievers", "retrievers")]
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


def open_retriever(spec: Spec | Retriever, /, **settings: Any) -> Retriever:
    """Make a retriever from a spec; a retriever is returned as it is.

    Args:
        spec: see `Spec`. In a mapping `name` may be left out beside a `path` or a `url`.
        settings: of the retriever, beside those in the mapping. `cache=FILE` puts an on-disk cache
            over any of them, also over one that is made (`fingerprint=TEXT` where it has none of
            its own).

    Raises:
        ConfigError: an unknown name or setting, with the nearest valid one.
        DataError: an index that cannot be loaded.
    """
    made = not isinstance(spec, str | Mapping)
    wanted = dict(settings)
    if isinstance(spec, str):
        wanted = {"name": spec, **settings}
    elif isinstance(spec, Mapping):
        wanted = {**spec, **settings}
    cache, fingerprint = wanted.pop("cache", None), wanted.pop("fingerprint", None)
    if made and wanted:
        raise ConfigError("settings can only be given with the name of a retriever")
    if cache is None and fingerprint is not None:
        raise ConfigError("fingerprint is a setting of a cache; give cache=FILE too")
    retriever: Retriever = spec if made else _open(wanted)  # type: ignore[assignment]
    if cache is None:
        return retriever
    return CachedRetriever(retriever, Path(cache), fingerprint=fingerprint)


def settings_from_text(spec: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Read settings that were given as texts (`key=value`) for `open_retriever(spec, ...)`.

    Each is read as the type of its parameter (see `read_texts`); unknown ones are left for
    `open_retriever` to refuse.

    Raises:
        ConfigError: no such retriever, or a text of another type.
    """
    factory, _, _ = _found(spec)
    return read_texts(texts, {**_CACHING, **_parameters(factory)})


def _open(wanted: dict[str, Any]) -> Retriever:
    implied = "index" if "path" in wanted else "remote" if "url" in wanted else None
    name = wanted.pop("name", implied)
    if not isinstance(name, str):
        raise ConfigError(f"a retriever needs a name, got {name!r}")
    factory, what, positional = _found(name)
    if is_object_spec(name):
        _check_settings(factory, what, wanted)
        try:
            made: object = factory(**wanted)
        except EvenhandError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{what} raised {type(error).__name__}: {error}; check it and its settings"
            ) from error
    else:
        made = _call(factory, what, wanted, *positional)
    if not isinstance(made, Retriever):
        raise ConfigError(f"{name} gave {type(made).__name__}, which has no method 'search'")
    return made


def _found(name: str) -> tuple[Callable[..., Any], str, tuple[str, ...]]:
    """Return the factory that a name stands for, words for messages, and its first arguments."""
    if name in RETRIEVERS:
        return RETRIEVERS[name], f"retriever {name!r}", ()
    if name.startswith(("http://", "https://")):
        return _remote, "a remote retriever", (name,)
    if Path(name).is_dir():
        return load_index, "an index", (name,)
    if is_object_spec(name):
        factory = load_object(name, "retriever")
        if not callable(factory):
            raise ConfigError(f"{name} is {type(factory).__name__}; give a function or class")
        return factory, f"retriever {name!r}", ()
    raise ConfigError(
        f"no retriever {name!r}{did_you_mean(name, RETRIEVERS)}; give one of "
        f"{', '.join(RETRIEVERS)}, an index folder, an http address or module:function"
    )


def _call(
    factory: Callable[..., Any], what: str, settings: Mapping[str, Any], *positional: Any
) -> Any:
    """Call a factory; a setting that it does not have, or lacks, is a `ConfigError`."""
    _check_settings(factory, what, settings, *positional)
    return factory(*positional, **settings)


def _check_settings(
    factory: Callable[..., Any], what: str, settings: Mapping[str, Any], *positional: Any
) -> None:
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


_PASSED_ON: dict[Any, tuple[Callable[..., Any], ...]] = {
    load_index: (Bm25Retriever.open, DenseRetriever.open),
    _remote: (RemoteRetriever, HttpSettings),
    _web: (SearxngProvider, HttpSettings),
}
"""Where a factory's further keywords go."""

_CACHING = {
    name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation="str")
    for name in ("cache", "fingerprint")
}


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parts = (factory, *_PASSED_ON.get(factory, ()))
    return {
        parameter.name: parameter
        for part in parts
        for parameter in inspect.signature(part).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def _settings_of(factory: Callable[..., Any]) -> set[str] | None:
    """Return the names of the settings of a factory; `None` for one that takes any."""
    kinds = [parameter.kind for parameter in inspect.signature(factory).parameters.values()]
    closed = factory in _PASSED_ON and factory is not _web  # a web provider may take any
    if inspect.Parameter.VAR_KEYWORD in kinds and not closed:
        return None
    return set(_parameters(factory)) - {"manifest", "http"}
