"""Tables of the folders that `evenhand eval` wrote: `results.json` with sets and averages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.diagnostics.findings import number
from evenhand.diagnostics.intervals import Estimate

RESULTS = "results.json"
HOPS = "hops"
"""Key of a set's figures by hops, beside those of all its questions."""

_AVERAGES = (("single_hop", "single-hop"), ("multi_hop", "multi-hop"), ("all", "all sets"))
_FIRST = ("exact_match", "f1")


@dataclass(frozen=True, slots=True)
class EvaluationTable:
    """One figure of several evaluations.

    Attributes:
        figure: its name.
        columns: sets, then averages.
        rows: name of the evaluation and a text a column.
    """

    figure: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


def evaluation_tables(folders: Sequence[Path]) -> tuple[list[EvaluationTable], list[str]]:
    """Return a table for each figure, and a note for each folder that cannot be read."""
    notes: list[str] = []
    results = []
    for folder in folders:
        data = _read(folder, notes)
        if data is not None:
            results.append((_name(folder, data, folders), data))
    sets = list(dict.fromkeys(name for _, data in results for name in data["sets"]))
    figures = list(
        dict.fromkeys(
            figure for _, data in results for part in (data["sets"], data["averages"])
            for cells in part.values() for figure in cells if figure != HOPS
        )
    )  # fmt: skip
    figures.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    averages = [pair for pair in _AVERAGES if any(pair[0] in d["averages"] for _, d in results)]
    tables = [
        EvaluationTable(
            figure,
            [*sets, *(title for _, title in averages)],
            [
                (name, [_cell(data["sets"].get(s, {}).get(figure)) for s in sets]
                 + [_cell(data["averages"].get(key, {}).get(figure)) for key, _ in averages])
                for name, data in results
            ],
        )
        for figure in figures
    ]  # fmt: skip
    return [*tables, *_by_hops(results, sets)], notes


def _by_hops(
    results: Sequence[tuple[str, Mapping[str, Any]]], sets: Sequence[str]
) -> list[EvaluationTable]:
    """Return exact match by hops, of the sets that tell hops."""
    found = {
        (name, at): cells[HOPS]
        for at, (_, data) in enumerate(results)
        for name in sets
        if isinstance((cells := data["sets"].get(name, {})).get(HOPS), dict)
    }
    columns = []
    for name in sets:
        mine = {str(hops) for (other, _), cells in found.items() if other == name for hops in cells}
        columns += [(name, hops) for hops in sorted(mine)]
    if not columns:
        return []

    def cell(at: int, name: str, hops: str) -> str:
        figures = found.get((name, at), {}).get(hops)
        return _cell(figures.get(_FIRST[0]) if isinstance(figures, dict) else None)

    return [
        EvaluationTable(
            "exact match by hops",
            [f"{name}, {hops} hop{'' if hops == '1' else 's'}" for name, hops in columns],
            [(name, [cell(at, *column) for column in columns]) for at, (name, _) in
             enumerate(results)],
        )
    ]  # fmt: skip


def _name(folder: Path, data: Mapping[str, Any], folders: Sequence[Path]) -> str:
    model = str(data.get("model") or folder.name)
    if data.get("baseline"):
        model += f", {data['baseline']}"
    return model if len(folders) == 1 else f"{model} ({folder.name})"


def _read(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    file = folder / RESULTS if folder.is_dir() else folder
    try:
        data = json.loads(file.read_bytes())
        parts = {
            part: {str(k): v for k, v in (data.get(part) or {}).items() if isinstance(v, dict)}
            for part in ("sets", "averages")
        }
    except FileNotFoundError:
        notes.append(f"{folder}: no {RESULTS}; give the folder that `evenhand eval` wrote")
    except OSError as error:
        notes.append(f"{file} cannot be read ({error.strerror})")
    except (ValueError, AttributeError, RecursionError):
        notes.append(f"{file} is no result of `evenhand eval`: it is cut or damaged")
    else:
        return {"model": data.get("model"), "baseline": data.get("baseline"), **parts}
    return None


def _cell(value: Any) -> str:
    """`0.412 [0.380, 0.445] of 900`; a bare number without interval; unknown for `null`."""
    if isinstance(value, int | float):
        value = {"value": value}
    if not isinstance(value, dict) or value.get("value") is None:
        return "–"
    try:
        ends = [math.nan if value.get(k) is None else float(value[k]) for k in ("low", "high")]
        text = number(Estimate(float(value["value"]), ends[0], ends[1], 0), 3)
    except (TypeError, ValueError):
        return "–"
    return f"{text} of {value['n']:,}" if isinstance(value.get("n"), int) else text
