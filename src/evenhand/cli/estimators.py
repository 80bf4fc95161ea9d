"""`evenhand estimators`: the table of what `--estimator` can say."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from evenhand.advantages.registry import estimator_names, get_estimator
from evenhand.cli.common import console, plain_table
from evenhand.errors import EvenhandError


def estimators(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the estimators: formula, what each needs, settings with defaults, source."""
    rows = [_row(name) for name in estimator_names()]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    table = plain_table("name", "formula", "needs", "settings", "source")
    for column in table.columns:
        column.justify = "left"
    for row in rows:
        table.add_row(
            row["name"],
            row["formula"],
            ", ".join(row["needs"]) or "-",
            " ".join(f"{key}={value}" for key, value in row["settings"].items()) or "-",
            row["source"],
        )
    console().print(table)


def _row(name: str) -> dict[str, Any]:
    try:
        found = get_estimator(name)
    except EvenhandError as error:  # of an installed package; the others are still of use
        return {"name": name, "formula": str(error), "needs": [], "settings": {}, "source": "-"}
    return {
        "name": name,
        "formula": found.formula,
        "needs": sorted(found.needs),
        "settings": found.defaults,
        "source": found.source,
    }
