"""`evenhand ask`: put a question to a trained agent and watch it think, search and answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from evenhand.cli.common import Settings, console, printable
from evenhand.core.errors import ConfigError
from evenhand.task import Done, Generate, Turn
from evenhand.task.rewards import answer_of
from evenhand.training.config import Recipe
from evenhand.training.recipes import load_recipe
from evenhand.trajectory import Trajectory

if TYPE_CHECKING:
    from evenhand.rollout import Policy, SearchEnvironment, Session
    from evenhand.training.models import LoadedModel

Write = Callable[[str], None]

_SNIPPET = 200


def ask(
    question: Annotated[str, typer.Argument(help="The question.", show_default=False)],
    run: Annotated[
        Path | None, typer.Option(help="The folder of a run.", metavar="RUN", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A model folder, such as `export` wrote.", metavar="DIR",
                     show_default=False),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    settings: Settings = None,
) -> None:  # fmt: skip
    """Ask a trained agent; its thinking, searches, documents and answer appear as they happen.

    Search engine, prompt and rules are those of the run's recipe; --set changes them, for example
    --set retrieval.retriever=http://127.0.0.1:8000/retrieve.
    """
    from evenhand.cli.train import quiet_libraries
    from evenhand.rollout import RowKey, Sampling
    from evenhand.training.setup import make_policy
    from evenhand.training.sources import open_environment

    if (run is None) == (model is None):
        raise ConfigError("give either --run RUN or --model DIR")
    quiet_libraries()
    recipe = _recipe(run, model, settings)
    environment = open_environment(recipe)
    loaded = _load(run, recipe)
    policy = make_policy(loaded)
    out = console()
    key = RowKey(-1, question, 0)
    with loaded.autocast(), policy.session(Sampling(temperature=temperature, seed=seed)) as session:
        trajectory = converse(question, policy, session, environment, key, out)
    answer = answer_of(trajectory)
    if answer is None:
        out.print(f"no answer ({trajectory.stop_reason.value})", style="yellow")
    else:
        out.print(printable(answer), style="bold green")


def _recipe(run: Path | None, model: Path | None, settings: list[str] | None) -> Recipe:
    folder = run or model
    assert folder is not None
    path = folder / "recipe.toml"
    changes = list(settings or ())
    if model is not None:
        changes.insert(0, f"model.path={model}")
        changes.insert(0, "model.lora.rank=0")
    return load_recipe(path if run is not None or path.is_file() else None, changes)


def _load(run: Path | None, recipe: Recipe) -> LoadedModel:
    from evenhand.training.models import load_model
    from evenhand.training.setup import load_trained

    if run is not None:
        return load_trained(run, device=recipe.model.device)[0]
    return load_model(recipe.model)


def converse(
    question: str,
    policy: Policy,
    session: Session,
    environment: SearchEnvironment,
    key: tuple[int, str, int],
    out: Console,
) -> Trajectory:
    """Play one episode, writing every token as it is sampled; return its record."""
    from evenhand.rollout import RowKey, new_episode

    episode = new_episode(question, policy, environment)

    def write(text: str) -> None:
        out.print(printable(text), end="", soft_wrap=True)
        out.file.flush()

    while True:
        request = episode.next()
        if isinstance(request, Done):
            return request.trajectory
        if isinstance(request, Generate):
            turn = stream_turn(policy, session, RowKey(*key), episode.context_ids, request, write)
            out.print()
            episode.feed_turn(turn.token_ids, turn.logprobs, finished=turn.finished)
            continue
        (outcome,) = environment.retriever.search([request.query], environment.k)
        if outcome.error is not None:
            out.print(f"search failed: {printable(outcome.error)}", style="red")
        for document in outcome.documents:
            text = " ".join(document.text.split())
            short = text if len(text) <= _SNIPPET else text[:_SNIPPET].rstrip() + " …"
            title = (printable(document.title), "cyan")
            out.print(Text.assemble("  ", title, "  ", (printable(short), "dim")))
        episode.feed_result(outcome)


def stream_turn(
    policy: Policy,
    session: Session,
    key: tuple[int, str, int],
    context_ids: Sequence[int],
    request: Generate,
    write: Write,
) -> Turn:
    """Sample a turn token by token, writing its text as it grows.

    A character whose bytes are not complete yet is held back.
    """
    from evenhand.rollout import RowKey, Stop, TurnRequest

    ids: list[int] = []
    logprobs: list[float] = []
    shown = ""
    is_finished = False
    while len(ids) < request.max_tokens and not is_finished:
        context = [*context_ids, *ids]
        (turn,) = session.generate([TurnRequest(RowKey(*key), context, 1, request.stop_tags)])
        ids += [int(item) for item in turn.token_ids]
        logprobs += [float(item) for item in turn.logprobs]
        text = policy.tokenizer.decode(ids)
        whole = text.rstrip("\ufffd")
        if whole.startswith(shown):
            write(whole[len(shown) :])
            shown = whole
        # A tag may be completed by a token of a later call, so the whole turn is looked at.
        is_finished = turn.stop is not Stop.LENGTH or any(tag in text for tag in request.stop_tags)
    return Turn(ids, logprobs, finished=is_finished)
