"""`evenhand estimators`: the table of what `--estimator` can say."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from evenhand.advantages.registry import estimator_names, get_estimator
from evenhand.cli.common import console, plain_table


def estimators(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the estimators: formula, what each needs, settings with defaults, source."""
    if as_json:
        for name in estimator_names():
            found = get_estimator(name)
            row = {
                "name": name,
                "formula": found.formula,
                "needs": sorted(found.needs),
                "settings": found.defaults,
                "source": found.source,
            }
            typer.echo(json.dumps(row))
        return
    table = plain_table("name", "formula", "needs", "settings", "source")
    for column in table.columns:
        column.justify = "left"
    for name in estimator_names():
        found = get_estimator(name)
        table.add_row(
            name,
            found.formula,
            ", ".join(sorted(found.needs)) or "-",
            " ".join(f"{key}={value}" for key, value in found.defaults.items()) or "-",
            found.source,
        )
    console().print(table)
