"""`evenhand eval`: a model on question sets, with intervals; baselines from the same command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from evenhand.cli.common import Settings, console
from evenhand.cli.compare import rich_table
from evenhand.cli.eval_parts import (
    ALL,
    OPENAI,
    Baseline,
    Opened,
    Wanted,
    answerers,
    open_sets,
    set_names,
)
from evenhand.core.errors import ConfigError
from evenhand.evaluation.folder import EvaluationFolder
from evenhand.evaluation.run import EvaluationProgress, evaluate
from evenhand.evaluation.tables import missing_lines, results_table
from evenhand.rollout import Policy, Sampling
from evenhand.task.scoring import get_convention
from evenhand.training.config import Recipe
from evenhand.training.recipes import load_recipe
from evenhand.training.sources import WORLD

Report = Callable[[EvaluationProgress], None]

_INSIDE = ("config.json", "adapter_config.json", "recipe.toml")

Model = Annotated[
    str | None,
    typer.Option(
        help="A model folder or hub name, a run folder, toy, or openai:URL#NAME.",
        show_default=False,
    ),
]
Sets = Annotated[
    str | None,
    typer.Option(
        help="Sets with commas (nq,hotpotqa:dev), all (the seven), world, or files of questions. "
        "Default: world for toy, the solver and runs on the world, else all.",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="So many questions a set, always the same ones.", show_default=False),
]
MaxSearches = Annotated[
    int | None, typer.Option(min=0, help="Search budget of a question.", show_default=False)
]
Engine = Annotated[
    str | None,
    typer.Option(
        help="bm25 over --corpus, an index folder, an http address or module:function.",
        show_default=False,
    ),
]
Corpus = Annotated[
    str | None,
    typer.Option(
        help="Passages for bm25: a set, union or a file. Default: union; the world's own.",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="Data folder for names of sets. Default: EVENHAND_DATA.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        help="Folder; the same command goes on in it. Default: evaluations/MODEL.",
        show_default=False,
    ),
]


def eval_command(
    model: Model = None,
    sets: Sets = None,
    baseline: Annotated[Baseline, typer.Option(help="What answers.")] = Baseline.NONE,
    limit: Limit = None,
    max_searches: MaxSearches = None,
    retriever: Engine = None,
    corpus: Corpus = None,
    data: Data = None,
    out: Out = None,
    batch: Annotated[int, typer.Option(min=1, help="Questions answered together.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling, above temperature 0.")] = 0,
    settings: Settings = None,
) -> None:
    """Measure a model on question sets: exact match, F1, searches and more, with intervals.

    Greedy, one rollout a question, and after the last search the model is told to answer. --set
    changes what a recipe holds, such as --set environment.limits.max_turn_tokens=128, --set
    environment.template=searchr1-chat, --set retrieval.documents=5, --set model.threads=1. An
    evaluation that was stopped goes on when the same command is given again.
    """
    shorthands = {
        "environment.limits.max_searches": max_searches,
        "retrieval.retriever": retriever,
        "retrieval.corpus": corpus,
    }
    given = [f"{key}={value}" for key, value in shorthands.items() if value is not None]
    model = _model(model, baseline)
    wanted = Wanted(
        model=model,
        baseline=baseline,
        sets=set_names(sets or _default_sets(model)),
        limit=limit,
        data=data,
        changes=tuple(given + list(settings or ())),
    )
    sampling = Sampling(temperature=temperature, seed=seed)
    opened = open_sets(wanted)
    label, convention = _label(wanted), _convention(opened)
    folder = EvaluationFolder.open(
        out or Path("evaluations") / _folder_name(label, baseline),
        _manifest(wanted, opened, label, sampling, convention),
    )
    try:
        policy, context = _policy(wanted, opened, batch)
        parts = answerers(wanted, opened, policy, sampling, context)
        with _progress() as report:
            results = evaluate(parts, folder, batch=batch, convention=convention, progress=report)
    except KeyboardInterrupt:
        console(err=True).print("the same command goes on where it was stopped")
        raise
    finally:
        folder.close()
    _show(results, folder.path)


def _model(model: str | None, baseline: Baseline) -> str | None:
    if baseline is Baseline.SOLVER:
        if model is not None:
            raise ConfigError("the baseline solver is a script; leave --model out")
        return None
    if model is None:
        raise ConfigError("give --model: a folder, a hub name, a run, toy, or openai:URL#NAME")
    folder = Path(model)
    if model != "toy" and folder.is_dir() and not any((folder / n).is_file() for n in _INSIDE):
        # Said now: questions and search engine may take minutes to load.
        raise ConfigError(f"{model} is neither a model nor a run: it has no config.json and no "
                          "recipe.toml; give the folder that has one")  # fmt: skip
    return model


def _default_sets(model: str | None) -> str:
    """Return the toy world for what was made for it, else the seven sets."""
    if model in (None, "toy"):
        return WORLD
    recipe = Path(model or "") / "recipe.toml"
    if recipe.is_file() and load_recipe(recipe).data.evaluate == WORLD:
        return WORLD
    return ALL


def _label(wanted: Wanted) -> str:
    """Return the name of the model in results; of a run with the step of its checkpoint."""
    if wanted.model is None:
        return "solver"
    if wanted.run is None:
        return wanted.model
    from evenhand.training.checkpoint import Checkpoints
    from evenhand.training.run_folder import RunFolder

    newest = Checkpoints(RunFolder.open(wanted.run).checkpoints).newest()
    step = "" if newest is None else f"@{int(newest.name.removeprefix('step-'))}"
    return f"{wanted.model}{step}"


def _folder_name(label: str, baseline: Baseline) -> str:
    name = label.removeprefix(OPENAI).rstrip("/").replace("://", "-")
    short = "-".join(
        part for part in name.replace("#", "/").split("/")[-2:] if part not in ("", ".")
    )
    plain = "".join(c if c.isalnum() or c in "-_.@" else "-" for c in short)
    return plain + ("" if baseline in (Baseline.NONE, Baseline.SOLVER) else f"-{baseline}")


def _convention(opened: Opened) -> str:
    name = next(iter(opened.recipes.values())).reward.convention
    return get_convention(name).name


def _manifest(
    wanted: Wanted, opened: Opened, label: str, sampling: Sampling, convention: str
) -> dict[str, Any]:
    return {
        "model": label,
        "baseline": None if wanted.baseline is Baseline.NONE else wanted.baseline.value,
        "sets": opened.manifest_sets(),
        "retriever": opened.retriever,
        "settings": {
            "sets": {name: _settings_of(recipe) for name, recipe in opened.recipes.items()},
            "temperature": sampling.temperature,
            "convention": convention,
        },
        "seed": sampling.seed,
    }


def _settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe that change results."""
    return {
        "documents": recipe.retrieval.documents,
        "retrieval": {"retriever": recipe.retrieval.retriever, "corpus": recipe.retrieval.corpus,
                      "settings": recipe.retrieval.settings},
        "environment": recipe.environment.model_dump(),
        "precision": recipe.model.precision,
        "world": recipe.data.world,
    }  # fmt: skip


def _policy(wanted: Wanted, opened: Opened, batch: int) -> tuple[Policy | None, Any]:
    """Open the model; return it with the context that its forward passes run in."""
    if wanted.model is None:
        return None, nullcontext
    recipe = next(iter(opened.recipes.values()))
    if wanted.model.startswith(OPENAI):
        from evenhand.rollout.openai import CompletionsPolicy

        return CompletionsPolicy.from_spec(wanted.model), nullcontext
    from evenhand.cli.train import quiet_libraries
    from evenhand.training.models import load_model
    from evenhand.training.setup import load_trained, make_policy

    quiet_libraries()
    if wanted.run is not None:
        loaded = load_trained(wanted.run, device=recipe.model.device)[0]
    else:
        loaded = load_model(recipe.model)
    return make_policy(loaded, batch), loaded.autocast


@contextmanager
def _progress() -> Iterator[Report]:
    """Give a report that draws a bar with the time left, or writes a line a set into a pipe."""
    if not sys.stderr.isatty():
        yield _line_a_set()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("evaluating", total=None)

        def report(progress: EvaluationProgress) -> None:
            # Questions of an earlier run took no time here; they would make the rest look short.
            bar.update(
                task,
                description=progress.dataset,
                total=progress.total - progress.earlier,
                completed=progress.finished - progress.earlier,
            )

        yield report


def _line_a_set() -> Report:
    last: dict[str, str] = {}

    def report(progress: EvaluationProgress) -> None:
        if last.get("set") != progress.dataset:
            last["set"] = progress.dataset
            typer.echo(f"{progress.dataset}: from question {progress.finished + 1:,} of "
                       f"{progress.total:,}", err=True)  # fmt: skip

    return report


def _show(results: Mapping[str, Any], path: Path) -> None:
    screen = console()
    screen.print(rich_table(results_table(results, narrow=True)))
    for line in missing_lines(results):
        screen.print(line)
    screen.print(f"all figures: {path}/table.md, {path}/results.json", soft_wrap=True)
