"""`evenhand export`: a run's model as an ordinary folder that transformers and vLLM load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from evenhand.cli.common import console
from evenhand.core.errors import DataError

Run = Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)]


def export(
    run: Run,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder to make.", show_default=False)
    ],
) -> None:
    """Write the newest checkpoint of a run as a whole model, adapters folded in.

    The folder holds weights (safetensors), configuration, tokenizer and the recipe; it appears
    whole or not at all.
    """
    from evenhand.cli.train import quiet_libraries
    from evenhand.training.checkpoint import disk_errors_named
    from evenhand.training.models import merged
    from evenhand.training.recipes import write_recipe
    from evenhand.training.setup import load_trained

    if out.exists():
        raise DataError(f"{out} exists already; give the name of a folder to make")
    quiet_libraries()
    loaded, recipe = load_trained(run, device="cpu")
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with disk_errors_named(f"{out} cannot be written"):
            draft.mkdir(parents=True)
            model = merged(loaded)
            model.save_pretrained(draft)
            loaded.tokenizer.save_pretrained(draft)
            write_recipe(draft / "recipe.toml", recipe)
            draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    console().print(f"wrote {out}")
