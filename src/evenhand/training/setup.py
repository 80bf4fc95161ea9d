"""From a recipe to a trainer, and from a run folder to its model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenhand.core.errors import ConfigError, DataError
from evenhand.rollout.transformers import TransformersPolicy
from evenhand.training.checkpoint import Checkpoints, Trained, load_weights
from evenhand.training.config import ModelSection, Recipe
from evenhand.training.listener import Listener
from evenhand.training.loop import Parts, Trainer
from evenhand.training.models import LoadedModel, Reference, load_model
from evenhand.training.optimizer import make_optimizer, make_schedule
from evenhand.training.recipes import differences, write_recipe
from evenhand.training.run_folder import RunFolder
from evenhand.training.sources import open_sources

RESUMABLE = ("steps", "evaluation.", "checkpoint.", "tracking.", "alarms.", "model.device",
             "model.threads")  # fmt: skip
"""Keys (or their beginnings) that may change when a run is resumed: none touches what was done."""


def open_parts(recipe: Recipe) -> Parts:
    """Load what a run is made of; questions first, so that a slip costs no loading of weights."""
    sources = open_sources(recipe)
    loaded = load_model(recipe.model, seed=recipe.seed)
    parameters = loaded.trainable()
    optimizer = make_optimizer(parameters, recipe.optimizer)
    schedule = make_schedule(optimizer, recipe.optimizer, recipe.optimizer_steps)
    return Parts(
        policy=make_policy(loaded, recipe.rollout.rows),
        loaded=loaded,
        trained=Trained(loaded, optimizer, schedule),
        reference=Reference(loaded) if recipe.loss.kl else None,
        sources=sources,
    )


def make_policy(loaded: LoadedModel, rows: int | None = None) -> TransformersPolicy:
    """Return the sampler over a model; it shares the weights that are trained."""
    if rows is None:
        return TransformersPolicy(loaded.model, loaded.tokenizer)
    return TransformersPolicy(loaded.model, loaded.tokenizer, max_rows=rows)


def new_trainer(recipe: Recipe, out: Path, listener: Listener | None = None) -> Trainer:
    """Begin a run in a new folder; the resolved recipe is written before the first step.

    A recipe that cannot be used leaves no run behind.

    Raises:
        ConfigError: a name or a setting of the recipe that cannot be used.
        DataError: the folder holds a run already, or cannot be written.
    """
    run = RunFolder.create(out)
    with _unlocked_on_error(run):
        parts = open_parts(recipe)
        run.begin(recipe)
        return Trainer(recipe, parts, run, listener)


def resumed_trainer(
    path: Path, recipe: Recipe | None = None, listener: Listener | None = None
) -> Trainer:
    """Continue a run from its newest checkpoint, or from the start if it has none.

    Args:
        path: the run folder.
        recipe: the run's recipe with changes that `RESUMABLE` allows; `None` changes nothing.
        listener: is told what happens.

    Raises:
        ConfigError: a change that is not allowed, or another process trains there.
        DataError: no run, or a damaged checkpoint.
    """
    run = RunFolder.open(path)
    before = run.recipe()
    recipe = recipe or before
    changed = differences(before, recipe)
    for key in changed:
        if not key.startswith(RESUMABLE):
            raise ConfigError(
                f"{key} cannot change when {path} is resumed, because the run would be neither the "
                "old nor a new one; start another run with --out"
            )
    run.lock()
    with _unlocked_on_error(run):
        parts = open_parts(recipe)
        if changed:
            write_recipe(run.recipe_path, recipe)
        return Trainer(recipe, parts, run, listener)


@contextmanager
def _unlocked_on_error(run: RunFolder) -> Iterator[None]:
    try:
        yield
    except BaseException:
        run.unlock()
        raise


def load_trained(path: Path, *, device: str = "auto") -> tuple[LoadedModel, Recipe]:
    """Return the model of a run with the weights of its newest checkpoint, and its recipe.

    Raises:
        DataError: no run, or no checkpoint in it.
    """
    run = RunFolder.open(path)
    recipe = run.recipe()
    newest = Checkpoints(run.checkpoints).newest()
    if newest is None:
        raise DataError(f"{path} has no checkpoint yet; wait for the first one")
    section: ModelSection = recipe.model.model_copy(update={"device": device})
    loaded = load_model(section, seed=recipe.seed)
    load_weights(loaded, newest)
    return loaded, recipe
