"""`evenhand estimators`: the table of what `--estimator` can say."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from evenhand.cli.common import console, plain_table
from evenhand.core.errors import EvenhandError
from evenhand.credit.registry import estimator_names, get_estimator


def estimators(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the estimators: formula, what each needs, settings with defaults, source."""
    rows = [_row(name) for name in estimator_names()]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    table = plain_table("name", "formula", "needs", "source")
    defaults = plain_table("name", "settings and defaults")
    for column in (*table.columns, *defaults.columns):
        column.justify = "left"
    for row in rows:
        table.add_row(row["name"], row["formula"], ", ".join(row["needs"]) or "-", row["source"])
        settings = " ".join(f"{key}={value}" for key, value in row["settings"].items())
        defaults.add_row(row["name"], settings or "-")
    console().print(table)
    console().print()
    console().print(defaults)


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
