"""`evenhand train`: run a recipe, watch it, continue it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenhand.cli.common import Settings, console
from evenhand.cli.train_summary import Clock, show_family, show_summary
from evenhand.core.errors import ConfigError, require
from evenhand.training.config import Recipe
from evenhand.training.recipes import load_recipe, recipe_to_toml
from evenhand.training.run_folder import RunFolder

if TYPE_CHECKING:
    from evenhand.cli.train_display import PlainDisplay
    from evenhand.training.loop import Trainer

STOPPED_BY_ALARM = 3
"""Exit code of a run that an alarm with the action `stop` ended."""


def train(
    recipe_file: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe (TOML).", show_default=False),
    ] = None,
    settings: Settings = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the run in this folder.", metavar="RUN", show_default=False),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Run the recipe once for each seed, in folders seed-N under --out.",
            metavar="0,1,2",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder. Default: runs/NAME.", metavar="DIR", show_default=False),
    ] = None,
) -> None:
    """Train a policy with a recipe.

    Settings are dotted keys of the recipe, such as --set rollout.group_size=16. A run that was
    stopped continues with --resume; a kill at any moment changes nothing of the result. Exit code
    3: an alarm whose action is stop ended the run.
    """
    if resume is not None:
        if recipe_file is not None or out is not None or seeds is not None:
            raise ConfigError("--resume takes the recipe and the folder from the run; leave out "
                              "RECIPE, --out and --seeds")  # fmt: skip
        quiet_libraries()
        _exit_if(_resume(resume, settings))
        return
    if recipe_file is None and not settings:
        raise ConfigError("give a recipe, such as recipes/quickstart.toml, or --resume RUN")
    recipe = load_recipe(recipe_file, settings or ())
    folder = out or Path("runs") / recipe.name
    numbers = _seeds(seeds)
    _announce(recipe)
    quiet_libraries()
    if numbers is None:
        from evenhand.training.setup import new_trainer

        _exit_if(_run(new_trainer(recipe, folder, _display()), folder))
        return
    any_stopped = False
    for seed in numbers:
        console().print(f"seed {seed}", style="bold")
        any_stopped |= _run_seed(recipe.model_copy(update={"seed": seed}), folder / f"seed-{seed}")
    show_family(folder, [(seed, RunFolder.open(folder / f"seed-{seed}")) for seed in numbers])
    _exit_if(any_stopped)


def _exit_if(is_stopped: bool) -> None:
    if is_stopped:
        raise typer.Exit(STOPPED_BY_ALARM)


def _resume(path: Path, settings: list[str] | None) -> bool:
    from evenhand.training.setup import resumed_trainer

    recipe = None
    if settings:
        recipe = load_recipe(RunFolder.open(path).recipe_path, settings)
    return _run(resumed_trainer(path, recipe, _display()), path)


def _run_seed(recipe: Recipe, folder: Path) -> bool:
    from evenhand.training.setup import new_trainer, resumed_trainer

    # A family that was stopped goes on where it was: finished seeds have nothing left to do.
    if (folder / "recipe.toml").is_file():
        return _run(resumed_trainer(folder, recipe, _display()), folder)
    return _run(new_trainer(recipe, folder, _display()), folder)


def _run(trainer: Trainer, folder: Path) -> bool:
    """Run it and return whether an alarm ended it."""
    clock = Clock.start()
    try:
        trainer.run()
    except KeyboardInterrupt:
        console(err=True).print(f"continue with: evenhand train --resume {folder}")
        raise
    finally:
        trainer.close()
    show_summary(RunFolder.open(folder), clock)
    if trainer.stopped is None:
        return False
    console(err=True).print(
        f"stopped by the alarm {trainer.stopped.name} after step {trainer.stopped.step}; its "
        f"rollouts are in {folder / 'alarms'}; go on all the same with: evenhand train --resume "
        f"{folder}",
        markup=False,
    )
    return True


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"--seeds takes different whole numbers, such as 0,1,2, got {text!r}")
    return [int(part) for part in parts]


def _announce(recipe: Recipe) -> None:
    out = console()
    out.print("recipe", style="bold")
    out.print(recipe_to_toml(recipe), style="dim", markup=False)
    for warning in recipe.warnings():
        console(err=True).print(f"warning: {warning}", style="yellow")


def quiet_libraries() -> None:
    """Silence the progress bars and notes of transformers."""
    transformers = require("transformers", "train", "training")
    # The command line shows its own progress.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _display() -> PlainDisplay:
    from evenhand.cli.train_display import LiveDisplay, PlainDisplay

    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()
