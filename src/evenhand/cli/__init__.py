"""The command line: one module a command, wired together here.

Exit codes: 0 fine, 2 wrong use or bad input (one line: what, got, remedy), 3 an alarm ended the
training run, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from evenhand import __version__
from evenhand.cli import data, search, world
from evenhand.cli.ask import ask
from evenhand.cli.audit import audit
from evenhand.cli.common import printable
from evenhand.cli.compare import compare_command
from evenhand.cli.convert import convert
from evenhand.cli.credit import credit
from evenhand.cli.estimators import estimators
from evenhand.cli.eval import eval_command
from evenhand.cli.export import export
from evenhand.cli.report import report
from evenhand.cli.train import train
from evenhand.cli.view import view
from evenhand.core.errors import EvenhandError

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""`ClickException`: typer keeps its own copy of click, whose modules are private."""

WRONG_USE = 2
INTERRUPTED = 130

app = typer.Typer(
    name="evenhand",
    help="Train LLM search agents with reinforcement learning, with fair credit for every step.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(ask)
app.command()(audit)
app.command("compare")(compare_command)
app.command()(convert)
app.command()(credit)
app.command()(estimators)
app.command("eval")(eval_command)
app.command()(export)
app.command()(report)
app.command()(train)
app.command()(view)
app.add_typer(data.app, name="data")
app.add_typer(search.app, name="search")
app.add_typer(world.app, name="world")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evenhand {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; errors become one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe may have an encoding without our signs
            stream.reconfigure(errors="replace")
    try:
        result = app(args=arguments, standalone_mode=False)
    except EvenhandError as error:
        return _fail(str(error))
    except USAGE_ERROR as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if not message.strip():  # nothing was asked for: the help is the answer
            error.show()  # type: ignore[attr-defined]
            return WRONG_USE
        return _fail(f"{_sentence(message)} See: {_command_of(error)} --help")
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("evenhand: interrupted", err=True)
        return INTERRUPTED
    except SystemExit as stop:
        # Typer turns a pipe whose reader went away (`| head`) into exit code 1; nothing is wrong.
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _sentence(message: str) -> str:
    """Return what typer says of wrong use without pydantic's prefix and with a full stop."""
    text = message.strip().replace(": Value error, ", ": ")
    return text if text.endswith((".", "?")) else f"{text}."


def _command_of(error: Exception) -> str:
    """Return the command that was used wrongly, such as `evenhand data show`."""
    context = getattr(error, "ctx", None)
    names: list[str] = []
    while context is not None and context.parent is not None:  # the root is called as one likes
        names.insert(0, context.info_name)
        context = context.parent
    return " ".join(["evenhand", *names])


def _fail(message: str) -> int:
    # One line, also when a part of the message came from elsewhere.
    typer.echo("evenhand: error: " + printable(" ".join(message.split())), err=True)
    return WRONG_USE


def run() -> None:
    """Entry point of the `evenhand` script."""
    sys.exit(main())
