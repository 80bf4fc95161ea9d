"""`evenhand view`: a local page over the rollouts of a run or of files."""

from __future__ import annotations

import sys
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from evenhand.cli.common import PROGRESS_AFTER, console
from evenhand.core.errors import DataError, require

if TYPE_CHECKING:
    from evenhand.pages.viewer.index import Index


def view(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|FILE...",
            help="A run folder, live or finished, an evaluation folder, or trajectory files.",
            show_default=False,
        ),
    ],
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Default: the first free one from 8321; 0: any free one.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; there is no password.")
    ] = "127.0.0.1",
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Model folder or tokenizer.json to show tokens. Default: that of the recipe.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show rollouts in the browser: filter, sort, read, compare with the others of the group.

    It follows a run that is being trained. The page is on this machine only; Ctrl-C ends it.
    """
    from evenhand.pages.viewer.app import PURPOSE, Viewer
    from evenhand.pages.viewer.index import Index
    from evenhand.pages.viewer.serve import serve
    from evenhand.pages.viewer.sources import open_sources

    require("starlette.applications", "server", PURPOSE)
    require("uvicorn", "server", PURPOSE)
    sources = open_sources(paths)
    index = Index(sources)
    _fill(index)
    total = index.state()["total"]
    if not total and sources.files:
        raise DataError(
            f"{paths[0]} holds no trajectory; dumps of other tools are converted with: "
            "evenhand convert IN -o OUT"
        )
    viewer = Viewer(index, None if tokenizer is None else str(tokenizer))
    note = console(err=True)
    for problem in viewer.state()["problems"]:
        note.print(f"note: {problem}", style="yellow")
    if host not in ("127.0.0.1", "localhost", "::1"):
        note.print(f"warning: {host} may be reached from other machines, and there is no password",
                   style="yellow")  # fmt: skip

    def ready(address: str) -> None:
        console().print(f"{total:,} rollouts at {address}  (Ctrl-C ends)")
        if open_browser:
            webbrowser.open(address)

    serve(viewer, host=host, port=port, ready=ready)


def _fill(index: Index) -> None:
    """Bring the index up to date; after a second show how far it is."""
    if not sys.stderr.isatty():
        index.refresh()
        return
    progress = Progress(
        TextColumn("indexing"), BarColumn(), TextColumn("{task.fields[rollouts]:,} rollouts"),
        TimeRemainingColumn(), console=console(err=True), transient=True,
    )  # fmt: skip
    task = progress.add_task("indexing", total=1, rollouts=0)
    began = time.monotonic()

    def show(done: int, total: int, rollouts: int) -> None:
        progress.update(task, completed=done, total=total, rollouts=rollouts)
        if time.monotonic() - began > PROGRESS_AFTER and not progress.live.is_started:
            progress.start()

    try:
        index.refresh(show)
    finally:
        progress.stop()
