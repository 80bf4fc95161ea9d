"""Reading files of trajectories into an index, and single lines back out of them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import sqlite3
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from evenhand.core.errors import DataError
from evenhand.core.files import GZIP_MAGIC
from evenhand.pages.viewer.records import COLUMNS, NotARolloutError, record
from evenhand.pages.viewer.sources import SourceFile

LARGE = 4 * 2**20
"""Compressed files from this size on are kept in blocks; smaller ones are unpacked when needed."""

BLOCK = 2**20
"""Bytes of lines in a block."""

SHIFT = 32
"""The key of a rollout is the number of its file, shifted by this, and the number of its line."""

_BATCH = 500
_PROOF = 1024

Progress = Callable[[int, int, int], None]
"""Called with bytes done, bytes in all, rollouts found."""


class Report:
    """How far the reading of several files is."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, max(total, 1)
        self._before, self.rollouts = 0, 0

    def show(self, inside: int) -> None:
        """Say how many bytes of the present file were read."""
        if self._progress is not None:
            self._progress(min(self._before + inside, self._total), self._total, self.rollouts)

    def file_done(self, size: int) -> None:
        """Say that a file was read to its end."""
        self._before += size
        self.show(0)


def read_file(base: sqlite3.Connection, file: SourceFile, report: Report) -> None:
    """Take a new or changed file in; of a file that only grew, what was added."""
    found = base.execute(
        "SELECT id, head, done, lines, damaged FROM files WHERE name = ?", (file.name,)
    ).fetchone()
    try:
        raw = file.path.open("rb")
    except OSError as error:
        if found:
            forget(base, found[0])
        _remember(base, file, "", 0, 0, 0, f"cannot be read ({error.strerror})")
        return
    with raw:
        is_packed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        done = lines = damaged = 0
        if found and not is_packed and file.size > found[2] and _proof(raw, found[2]) == found[1]:
            done, lines, damaged = found[2:]
        elif found:
            forget(base, found[0])
        number = found[0] if found else _remember(base, file, "", 0, 0, 0, "")
        raw.seek(0 if is_packed else done)
        reader = _Reader(base, number, file, report)
        state = reader.read(raw, is_packed, done, lines)
        proof = "" if is_packed else _proof(raw, reader.done)
    _remember(base, file, proof, reader.done, reader.lines, damaged + reader.damaged, state)


def _proof(raw: BinaryIO, done: int) -> str:
    """Return what tells that a file still is what it was up to a position: its ends there."""
    raw.seek(0)
    first = raw.read(min(_PROOF, done))
    raw.seek(max(0, done - _PROOF))
    last = raw.read(min(_PROOF, done))
    return hashlib.sha256(first + b"/" + last).hexdigest()[:24]


class _Reader:
    """Reads one file from where it was left and inserts what it finds."""

    def __init__(self, base: sqlite3.Connection, number: int, file: SourceFile,
                 report: Report) -> None:  # fmt: skip
        self._base, self._number, self._file, self._report = base, number, file, report
        self._rows: list[tuple[Any, ...]] = []
        self._texts: list[tuple[int, str]] = []
        self._block: list[bytes] = []
        self._block_start = self._block_size = 0
        self.done = self.lines = self.damaged = 0

    def read(self, raw: BinaryIO, is_packed: bool, done: int, lines: int) -> str:
        """Read to the end; return what is to be said about the file, empty if all is well."""
        self.done, self.lines = done, lines
        in_blocks = is_packed and self._file.size >= LARGE
        self._block_start = done
        stream: Any = gzip.GzipFile(fileobj=raw) if is_packed else raw
        state = ""
        try:
            for line in stream:
                if not self._take(line, in_blocks):
                    state = "the last line is half written; it will be read when it is whole"
                    break
                if len(self._rows) >= _BATCH:
                    self._flush()
                    self._report.show(raw.tell() - (0 if is_packed else done))
        except (EOFError, OSError, zlib.error):
            state = "the file is cut, damaged or still being written; what is whole is shown"
        self._flush()
        self._end_block()
        return state

    def _take(self, line: bytes, in_blocks: bool) -> bool:
        """Take in a line; return whether it is whole."""
        found = None
        if line.strip():
            try:
                found = record(line, self._file.name)
            except NotARolloutError:
                if not line.endswith(b"\n"):
                    return False
                self.damaged += 1
        self.lines += 1
        if found is not None:
            key = self._number << SHIFT | self.lines
            values = [getattr(found, name) for name in COLUMNS]
            self._rows.append((key, self._number, self.done, len(line), *values[:-1]))
            self._texts.append((key, values[-1]))
            self._report.rollouts += 1
        if in_blocks:
            self._block.append(line)
            self._block_size += len(line)
        self.done += len(line)
        if self._block_size >= BLOCK:
            self._end_block()
        return True

    def _flush(self) -> None:
        marks = ", ".join("?" * (4 + len(COLUMNS) - 1))
        self._base.executemany(f"INSERT INTO rollouts VALUES ({marks})", self._rows)
        self._base.executemany("INSERT INTO texts VALUES (?, ?)", self._texts)
        self._rows.clear()
        self._texts.clear()

    def _end_block(self) -> None:
        if self._block:
            data = zlib.compress(b"".join(self._block), 1)
            self._base.execute(
                "INSERT INTO blocks VALUES (?, ?, ?)", (self._number, self._block_start, data)
            )
        self._block.clear()
        self._block_start, self._block_size = self.done, 0


def _remember(
    base: sqlite3.Connection, file: SourceFile, head: str, done: int, lines: int, damaged: int,
    state: str,
) -> int:  # fmt: skip
    row = base.execute(
        "INSERT INTO files (name, size, changed, head, done, lines, damaged, state) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET size = excluded.size, "
        "changed = excluded.changed, head = excluded.head, done = excluded.done, "
        "lines = excluded.lines, damaged = excluded.damaged, state = excluded.state RETURNING id",
        (file.name, file.size, file.changed, head, done, lines, damaged, state),
    ).fetchone()
    return int(row[0])


def forget(base: sqlite3.Connection, number: int) -> None:
    """Drop everything that was read of a file."""
    low, high = number << SHIFT, (number + 1) << SHIFT
    for table in ("rollouts", "texts"):
        base.execute(f"DELETE FROM {table} WHERE key >= ? AND key < ?", (low, high))
    base.execute("DELETE FROM blocks WHERE file = ?", (number,))


def from_blocks(base: sqlite3.Connection, file: int, start: int, length: int) -> bytes | None:
    """Return a line of a large compressed file, `None` if the file is not kept in blocks."""
    found = base.execute(
        "SELECT start, data FROM blocks WHERE file = ? AND start <= ? ORDER BY start DESC LIMIT 1",
        (file, start),
    ).fetchone()
    if found is None:
        return None
    return zlib.decompress(found[1])[start - found[0] :][:length]


def from_file(path: Path, changed: int, start: int, length: int) -> bytes:
    """Return a line of a file.

    Raises:
        DataError: it cannot be read any more.
    """
    try:
        with path.open("rb") as raw:
            if raw.read(2) == GZIP_MAGIC:
                return _unpacked(path, changed)[start : start + length]
            raw.seek(start)
            return raw.read(length)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path.name} cannot be read any more: {error}") from None


@lru_cache(maxsize=8)
def _unpacked(path: Path, changed: int) -> bytes:  # noqa: ARG001 - a changed file is another entry
    """Return a small compressed file unpacked, as far as it is whole."""
    parts = []
    with gzip.open(path) as file, contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile):
        while part := file.read(2**16):
            parts.append(part)
    return b"".join(parts)
