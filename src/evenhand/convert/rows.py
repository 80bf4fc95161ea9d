"""From a dump's file to its rows, whatever holds them: JSON lines, one JSON value, or parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.core.errors import DataError
from evenhand.core.files import (
    PARQUET_MAGIC,
    STANDARD_STREAM,
    is_parquet,
    numbered_lines,
    parquet_rows,
)
from evenhand.trajectory import parse_json

_SUFFIXES = (".gz", ".jsonl", ".json", ".ndjson", ".parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a dump.

    Attributes:
        where: file and line, for messages.
        key: unique among all files that are read together: short file name and line number.
        file: name of the file, without its folder.
        data: the record's fields.
    """

    where: str
    key: str
    file: str
    data: dict[str, Any]

    def step_from_file(self, pattern: str) -> int | None:
        """Return the number that `pattern`'s group finds in the file's name, if any."""
        found = re.search(pattern, self.file)
        return int(found.group(1)) if found else None


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file, without suffixes; a repeated one gets `~2`, `~3`, …"""
    taken: set[str] = set()
    names = []
    for path in paths:
        name = "stdin" if path == STANDARD_STREAM else path.name
        while (stem := name[: name.rfind(".")]) and name[len(stem) :] in _SUFFIXES:
            name = stem
        unique, copy = name, 1
        while unique in taken:
            copy += 1
            unique = f"{name}~{copy}"
        taken.add(unique)
        names.append(unique)
    return names


def open_rows(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a file; `name` starts their keys.

    Raises:
        DataError: the file is missing, empty, damaged, or a row is not an object.
    """
    if is_parquet(path):
        yield from _table_rows(path, name)
        return
    yield from _text_rows(path, name)


def _text_rows(path: Path, name: str) -> Iterator[Row]:
    lines = numbered_lines(path)
    number, line = next(lines, (0, b""))
    if not line:
        raise DataError(f"{path} holds no trajectory; the file is empty")
    if line.startswith(PARQUET_MAGIC):
        raise DataError(
            f"{path} holds parquet, which cannot be read from a pipe; give the name of its file"
        )
    opening = line.strip()
    # A JSON value that is spread over lines, or a list, is no file of JSON lines.
    if opening == b"{" or opening.startswith(b"["):
        yield from _whole_json(path, name, b"".join([line, *(more for _, more in lines)]))
        return
    while line:
        where = f"{path}, line {number}"
        yield Row(where, f"{name}-{number}", path.name, parse_json(line, where))
        number, line = next(lines, (0, b""))


def _whole_json(path: Path, name: str, text: bytes) -> Iterator[Row]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error)
        at = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{path}: not JSON: {reason}{at}; the file is cut or damaged") from None
    items = value if isinstance(value, list) else [value]
    if not items:
        raise DataError(f"{path} holds no trajectory; its list is empty")
    for number, item in enumerate(items, start=1):
        where = f"{path}, item {number}"
        if not isinstance(item, dict):
            raise DataError(f"{where}: expected a JSON object, got {type(item).__name__}")
        yield Row(where, f"{name}-{number}", path.name, item)


def _table_rows(path: Path, name: str) -> Iterator[Row]:
    number = 0
    for number, data in parquet_rows(path):
        yield Row(f"{path}, row {number}", f"{name}-{number}", path.name, data)
    if number == 0:
        raise DataError(f"{path} holds no trajectory; the table is empty")
