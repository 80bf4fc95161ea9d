"""`evenhand search`: build an index, query any retriever, serve it over HTTP."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from evenhand.cli.common import PROGRESS_AFTER, console, printable, read_settings, with_progress
from evenhand.core.errors import ConfigError, DataError, RetrievalError
from evenhand.core.files import STANDARD_STREAM, atomic_write, numbered_lines
from evenhand.core.plugins import did_you_mean
from evenhand.retrieval import (
    Bm25Retriever,
    DenseRetriever,
    Retriever,
    SearchResult,
    SentenceEncoder,
    info_of,
    open_retriever,
    settings_from_text,
)
from evenhand.retrieval.base import check_k, search_one_by_one
from evenhand.retrieval.manifest import check_target
from evenhand.retrieval.texts import read_texts
from evenhand.trajectory.protocol import Document

app = typer.Typer(help="Build, query and serve search engines.", no_args_is_help=True)

_BATCH = 64
_COUNT_EVERY = 1000
_SNIPPET = 160


class Kind(StrEnum):
    """What `index` builds."""

    BM25 = "bm25"
    """Words, with bm25s."""
    DENSE = "dense"
    """Vectors, with sentence-transformers and faiss."""


class LogLevel(StrEnum):
    """How much `serve` logs, in uvicorn's words."""

    CRITICAL = "critical"
    """What ends the server."""
    ERROR = "error"
    """What fails inside it."""
    WARNING = "warning"
    """What looks wrong."""
    INFO = "info"
    """Start and stop."""
    DEBUG = "debug"
    """Every request."""
    TRACE = "trace"
    """Every message of the protocol."""


Source = Annotated[
    str,
    typer.Argument(
        help="An index folder, an http(s) address of a /retrieve server, or module:function.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the retriever; may be repeated. fuse.KEY and rerank.KEY are settings of "
        "--fuse (k0, depth, weights) and --rerank (depth, device, batch_size).",
        metavar="KEY=VALUE",
    ),
]
Fuse = Annotated[
    list[str] | None,
    typer.Option(help="Another source, fused by reciprocal rank; may be repeated."),
]
Rerank = Annotated[
    str | None,
    typer.Option(help="A cross-encoder (name or folder) or module:function that sorts anew."),
]
Corpus = Annotated[
    list[str] | None,
    typer.Option(help="Refuse an index of another corpus than this file or set; may be repeated."),
]
Cache = Annotated[Path | None, typer.Option(help="An on-disk cache of results (one sqlite file).")]


@app.command()
def index(
    corpora: Annotated[
        list[str],
        typer.Argument(
            help="Passages as JSON lines, {id, title, text} or {id, contents}; - reads standard "
            "input. Or names of sets, or union.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.", show_default=False)],
    kind: Annotated[Kind, typer.Option(help="Which back end to build for.")] = Kind.BM25,
    encoder: Annotated[
        str | None, typer.Option(help="dense: a sentence-transformers model (name or folder).")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an index of that name.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Data folder for names of sets. Default: EVENHAND_DATA.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Index a corpus, or the union of several without its duplicates, into one folder.

    Settings of bm25: k1, b, method, stemmer, stopwords. Of dense: structure (flat, hnsw),
    query_prefix, passage_prefix, neighbours, ef_construction, ef_search.
    """
    from evenhand.datasets import load_corpus

    builder: Any = Bm25Retriever.build if kind is Kind.BM25 else DenseRetriever.build
    given = _build_settings(builder, read_settings(settings))
    arguments: list[Any] = []
    check_target(out, overwrite=overwrite)  # before an hour of work, not after it
    documents = load_corpus(*corpora, data=data)
    if kind is Kind.DENSE:
        if encoder is None:
            raise ConfigError("a dense index needs --encoder, the name or folder of a model")
        arguments = [SentenceEncoder(encoder)]
    elif encoder is not None:
        raise ConfigError("--encoder goes with --kind dense")
    with _progress() as report:
        counted = _counted(documents, report) if report else documents
        built = builder(counted, *arguments, progress=report, **given)
        built.save(out, overwrite=overwrite)
    manifest = built.manifest
    typer.echo(f"{out}: {manifest.kind}, {manifest.passages:,} passages, {manifest.corpus_hash}")


@app.command()
def query(
    source: Source,
    queries: Annotated[
        list[str] | None,
        typer.Argument(help="Queries; without any, one a line from --input.", show_default=False),
    ] = None,
    k: Annotated[int, typer.Option("-k", "--top", help="Documents a query.")] = 3,
    input_file: Annotated[
        Path, typer.Option("-i", "--input", help="File of queries, one a line.")
    ] = Path("-"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a query.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="Write JSON lines to a file (gz by name, - is standard output)."
        ),
    ] = None,
    settings: Settings = None,
    fuse: Fuse = None,
    rerank: Rerank = None,
    cache: Cache = None,
    corpus: Corpus = None,
) -> None:
    """Search, and print what was found."""
    check_k(k)
    given = read_settings(settings)
    if queries and "backend" not in given and Path(source).is_dir() and _is_bm25(Path(source)):
        # Loading the compiled loop takes longer than a few searches without it.
        given["backend"] = "numpy"
    if out == STANDARD_STREAM:
        out, as_json = None, True
    asked: Iterable[str] = queries if queries else _lines(input_file)
    if out is not None or not sys.stdout.isatty():  # else the results show how far it is
        asked = with_progress(asked, "queries")
    failed = total = 0
    reason: str | None = None
    with ExitStack() as stack:
        retriever = _open(source, given, fuse, rerank, cache, corpus, stack)
        file: IO[str] | None = stack.enter_context(atomic_write(out)) if out else None
        for batch in _batches(asked):
            results = search_one_by_one(retriever, batch, k)
            for text, result in zip(batch, results, strict=True):
                total += 1
                if result.error is not None:
                    failed, reason = failed + 1, reason or result.error
                _show(text, result, as_json=as_json, file=file)
    if failed and failed == total:
        raise RetrievalError(f"every query failed; the first: {reason}")
    if failed:
        typer.echo(f"{failed} of {total} queries failed; the first: {reason}", err=True)


@app.command()
def serve(
    source: Source,
    host: Annotated[str, typer.Option(help="Address to listen on; there is no login.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(min=1, help="Most queries of one request.")] = 1024,
    max_k: Annotated[int, typer.Option(min=1, help="Most documents a query.")] = 100,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request body in bytes.")] = (
        4 * 2**20
    ),
    settings: Settings = None,
    fuse: Fuse = None,
    rerank: Rerank = None,
    cache: Cache = None,
    corpus: Corpus = None,
    log_level: Annotated[LogLevel, typer.Option(help="debug also logs every request.")] = (
        LogLevel.INFO
    ),
) -> None:
    """Serve POST /retrieve and GET /health until SIGINT or SIGTERM."""
    from evenhand.retrieval.dialect import Limits
    from evenhand.retrieval.server import serve as run_server

    limits = Limits(body_bytes=max_body, queries=max_batch, k=max_k, default_k=min(3, max_k))
    with ExitStack() as stack:
        retriever = _open(source, read_settings(settings), fuse, rerank, cache, corpus, stack)
        info = info_of(retriever)
        passages = f", {info.passages:,} passages" if info.passages is not None else ""
        typer.echo(f"{source}: {info.kind}{passages}", err=True)
        run_server(retriever, host=host, port=port, limits=limits, log_level=log_level.value)


def _open(
    source: str,
    texts: dict[str, str],
    fuse: list[str] | None,
    rerank: str | None,
    cache: Path | None,
    corpus: list[str] | None,
    stack: ExitStack,
) -> Retriever:
    fusing, sorting = _taken(texts, "fuse", fuse), _taken(texts, "rerank", rerank)
    fingerprint = texts.pop("fingerprint", None) if cache is not None else None
    given = settings_from_text(source, texts)
    if corpus:
        from evenhand.datasets import load_corpus

        given["corpus"] = load_corpus(*corpus)
    retriever = open_retriever(source, **given)
    if fuse:
        settings = settings_from_text("hybrid", fusing) | {"retrievers": [retriever, *fuse]}
        retriever = open_retriever("hybrid", **settings)
    if rerank is not None:
        key = "model" if Path(rerank).exists() or ":" not in rerank else "scorer"
        settings = settings_from_text("rerank", sorting) | {"retriever": retriever, key: rerank}
        retriever = open_retriever("rerank", **settings)
    if cache is not None:
        retriever = open_retriever(retriever, cache=cache, fingerprint=fingerprint)
    if isinstance(retriever, AbstractContextManager):
        stack.enter_context(retriever)
    return retriever


def _taken(texts: dict[str, str], prefix: str, option: object) -> dict[str, str]:
    """Take the settings `prefix.KEY` out of `texts`; an error if the option is not in use."""
    keys = [key for key in texts if key.startswith(f"{prefix}.")]
    if keys and not option:
        raise ConfigError(f"the setting {keys[0]!r} goes with --{prefix}")
    return {key[len(prefix) + 1 :]: texts.pop(key) for key in keys}


def _is_bm25(folder: Path) -> bool:
    return (folder / "vocab.index.json").exists()


def _build_settings(builder: Any, texts: dict[str, str]) -> dict[str, Any]:
    # What says how to search is no part of an index.
    others = {"documents", "encoder", "progress", "threads", "backend"}
    parameters = dict(inspect.signature(builder).parameters)
    names = set(parameters) - others
    for name in texts:
        if name not in names:
            raise ConfigError(
                f"the index has no setting {name!r}{did_you_mean(name, names)}; "
                f"it has {', '.join(sorted(names))}"
            )
    return read_texts(texts, parameters)


def _counted(documents: Iterable[Document], report: Any) -> Iterator[Document]:
    for number, document in enumerate(documents, start=1):
        yield document
        if number % _COUNT_EVERY == 0:
            report("reading", number, 0)


def _lines(path: Path) -> Iterator[str]:
    for number, line in numbered_lines(path):
        try:
            yield line.decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: a query is not UTF-8 ({error.reason})") from error


def _batches(queries: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(queries)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch


def _show(text: str, result: SearchResult, *, as_json: bool, file: IO[str] | None) -> None:
    if as_json or file is not None:
        documents = [
            {"id": d.id, "title": d.title, "text": d.text, "score": d.score}
            for d in result.documents
        ]
        line = json.dumps(
            {"query": text, "documents": documents, "error": result.error}, ensure_ascii=False
        )
        if file is not None:
            file.write(line + "\n")
        if as_json:
            typer.echo(line)
        if file is not None:
            return
    if as_json:
        return
    screen = console()
    screen.print(Text(_one_line(text), style="bold"), soft_wrap=True)
    if result.error is not None:
        reason = Text.assemble("  ", ("failed:", "red"), f" {_one_line(result.error)}")
        screen.print(reason, soft_wrap=True)
    elif not result.documents:
        screen.print(Text("  nothing found"))
    for rank, document in enumerate(result.documents, start=1):
        score = "" if document.score is None else f"{document.score:.3f}  "
        head = f"  {rank}  {score}{_one_line(document.title)}  "
        screen.print(Text.assemble(head, (_one_line(document.id), "dim")), soft_wrap=True)
        screen.print(Text(f"     {_one_line(document.text)[:_SNIPPET]}"), soft_wrap=True)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


@contextmanager
def _progress() -> Iterator[Any]:
    """Give a callable `(stage, done, total)` that draws on standard error, if it is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task("reading", total=None)
    started = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        progress.update(task, description=stage, completed=done, total=total or None)
        if time.monotonic() - started > PROGRESS_AFTER and not progress.live.is_started:
            progress.start()

    try:
        yield report
    finally:
        progress.stop()
