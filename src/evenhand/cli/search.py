"""`evenhand search`: build an index, query any retriever, serve it over HTTP."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from evenhand.errors import ConfigError, DataError, RetrievalError
from evenhand.files import atomic_write, numbered_lines
from evenhand.plugins import did_you_mean
from evenhand.protocol import Document
from evenhand.retrieval import (
    Bm25Retriever,
    CachedRetriever,
    DenseRetriever,
    Retriever,
    SearchResult,
    SentenceEncoder,
    info_of,
    open_retriever,
)
from evenhand.retrieval.manifest import check_target
from evenhand.settings import split_setting

app = typer.Typer(help="Build, query and serve search engines.", no_args_is_help=True)

_BATCH = 64
_SNIPPET = 160


class Kind(StrEnum):
    """What `index` builds."""

    BM25 = "bm25"
    """Words, with bm25s."""
    DENSE = "dense"
    """Vectors, with sentence-transformers and faiss."""


Source = Annotated[
    str,
    typer.Argument(
        help="An index folder, an http(s) address of a /retrieve server, or module:function.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the retriever; may be repeated.", metavar="KEY=VALUE"),
]
Fuse = Annotated[
    list[str] | None,
    typer.Option(help="Another source, fused by reciprocal rank; may be repeated."),
]
Rerank = Annotated[
    str | None,
    typer.Option(help="A cross-encoder (name or folder) or module:function that sorts anew."),
]
Cache = Annotated[Path | None, typer.Option(help="An on-disk cache of results (one sqlite file).")]


@app.command()
def index(
    corpora: Annotated[
        list[Path],
        typer.Argument(
            help="Passages as JSON lines, {id, title, text} or {id, contents}; - reads standard "
            "input.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.", show_default=False)],
    kind: Annotated[Kind, typer.Option(help="Which back end to build for.")] = Kind.BM25,
    encoder: Annotated[
        str | None, typer.Option(help="dense: a sentence-transformers model (name or folder).")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an index of that name.")] = False,
    settings: Settings = None,
) -> None:
    """Index a corpus, or the union of several without its duplicates, into one folder.

    Settings of bm25: k1, b, method, stemmer, stopwords. Of dense: structure (flat, hnsw),
    query_prefix, passage_prefix, neighbours, ef_construction, ef_search.
    """
    given = _read_settings(settings)
    builder: Any = Bm25Retriever.build
    arguments: list[Any] = []
    if kind is Kind.DENSE:
        if encoder is None:
            raise ConfigError("a dense index needs --encoder, the name or folder of a model")
        builder, arguments = DenseRetriever.build, [SentenceEncoder(encoder)]
    elif encoder is not None:
        raise ConfigError("--encoder goes with --kind dense")
    _check_names(builder, given)
    check_target(out, overwrite=overwrite)  # before an hour of work, not after it
    with _progress() as report:
        built = builder(_passages(corpora), *arguments, progress=report, **given)
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
        Path | None, typer.Option("-o", "--out", help="Write JSON lines to a file (gz by name).")
    ] = None,
    settings: Settings = None,
    fuse: Fuse = None,
    rerank: Rerank = None,
    cache: Cache = None,
) -> None:
    """Search, and print what was found."""
    given = _read_settings(settings)
    if queries and "backend" not in given and Path(source).is_dir() and _is_bm25(Path(source)):
        # Loading the compiled loop takes longer than a few searches without it.
        given["backend"] = "numpy"
    asked: Iterable[str] = queries if queries else _lines(input_file)
    failed = total = 0
    reason: str | None = None
    with ExitStack() as stack:
        retriever = _open(source, given, fuse, rerank, cache, stack)
        file: IO[str] | None = stack.enter_context(atomic_write(out)) if out else None
        for batch in _batches(asked):
            results = retriever.search(batch, k)
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
    log_level: Annotated[str, typer.Option(help="debug also logs every request.")] = "info",
) -> None:
    """Serve POST /retrieve and GET /health until SIGINT or SIGTERM."""
    from evenhand.retrieval.dialect import Limits
    from evenhand.retrieval.server import serve as run_server

    limits = Limits(body_bytes=max_body, queries=max_batch, k=max_k, default_k=min(3, max_k))
    with ExitStack() as stack:
        retriever = _open(source, _read_settings(settings), fuse, rerank, cache, stack)
        info = info_of(retriever)
        passages = f", {info.passages:,} passages" if info.passages is not None else ""
        typer.echo(f"{source}: {info.kind}{passages}", err=True)
        run_server(retriever, host=host, port=port, limits=limits, log_level=log_level)


def _open(
    source: str,
    settings: dict[str, Any],
    fuse: list[str] | None,
    rerank: str | None,
    cache: Path | None,
    stack: ExitStack,
) -> Retriever:
    retriever = open_retriever(source, **settings)
    if fuse:
        retriever = open_retriever("hybrid", retrievers=[retriever, *fuse])
    if rerank is not None:
        key = "model" if Path(rerank).exists() or ":" not in rerank else "scorer"
        retriever = open_retriever("rerank", retriever=retriever, **{key: rerank})
    if cache is not None:
        retriever = stack.enter_context(CachedRetriever(retriever, cache))
    return retriever


def _is_bm25(folder: Path) -> bool:
    return (folder / "vocab.index.json").exists()


def _read_settings(settings: list[str] | None) -> dict[str, Any]:
    """Read repeated `key=value`; a value that is JSON (`2`, `true`) is read as such."""
    given: dict[str, Any] = {}
    for text in settings or []:
        key, value = split_setting(text)
        try:
            given[key] = json.loads(value)
        except ValueError:
            given[key] = value
    return given


def _check_names(builder: Any, given: dict[str, Any]) -> None:
    names = set(inspect.signature(builder).parameters) - {"documents", "encoder", "progress"}
    for name in given:
        if name not in names:
            raise ConfigError(
                f"the index has no setting {name!r}{did_you_mean(name, names)}; "
                f"it has {', '.join(sorted(names))}"
            )


def _passages(corpora: list[Path]) -> Iterator[Document]:
    from evenhand.datasets import read_corpus, union

    yield from read_corpus(corpora[0]) if len(corpora) == 1 else union(map(read_corpus, corpora))


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
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(text)}[/bold]")
    if result.error is not None:
        console.print(f"  [red]failed:[/red] {escape(result.error)}")
    elif not result.documents:
        console.print("  nothing found")
    for rank, document in enumerate(result.documents, start=1):
        score = "" if document.score is None else f"{document.score:.3f}  "
        snippet = " ".join(document.text.split())[:_SNIPPET]
        console.print(
            f"  {rank}  {score}{escape(document.title)}  [dim]{escape(document.id)}[/dim]"
        )
        console.print(f"     {escape(snippet)}")


@contextmanager
def _progress() -> Iterator[Any]:
    """Give a callable `(stage, done, total)` that draws on standard error, if it is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=None)

        def report(stage: str, done: int, total: int) -> None:
            progress.update(task, description=stage, completed=done, total=total or None)

        yield report
