"""The index of a viewer: one SQLite file outside the run, a row a rollout, made as files grow.

A row says where the line of a rollout begins and how long it is. Lines of plain files are read from
the file itself; a large compressed file, in which nothing can be found without unpacking what is
before it, is kept in the index a second time, in blocks that are compressed one by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.core.errors import DataError
from evenhand.pages.viewer.query import PAGE, SORTS, Filter, where
from evenhand.pages.viewer.reading import (
    SHIFT,
    Progress,
    Report,
    forget,
    from_blocks,
    from_file,
    read_file,
)
from evenhand.pages.viewer.records import COLUMNS
from evenhand.pages.viewer.sources import Sources
from evenhand.trajectory import Trajectory, parse_line

VERSION = "1"
_KEEP_DAYS = 30

_TABLES = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE files (id INTEGER PRIMARY KEY, name TEXT UNIQUE, size INTEGER, changed INTEGER,
    head TEXT, done INTEGER, lines INTEGER, damaged INTEGER, state TEXT);
CREATE TABLE rollouts (key INTEGER PRIMARY KEY, file INTEGER, start INTEGER, length INTEGER,
    id TEXT, grp TEXT, step INTEGER, question TEXT, dataset TEXT, hops INTEGER, reward REAL,
    searches INTEGER, format_ok INTEGER, stop TEXT, tokens INTEGER, advantage REAL,
    punished INTEGER, answer TEXT, strip TEXT);
CREATE TABLE texts (key INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE blocks (file INTEGER, start INTEGER, data BLOB, PRIMARY KEY (file, start));
CREATE INDEX by_group ON rollouts (grp);
CREATE INDEX by_step ON rollouts (step DESC, file DESC, grp, key);
CREATE INDEX by_reward ON rollouts (reward DESC, key);
INSERT INTO meta VALUES ('version', '{VERSION}'), ('changes', '0');
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A rollout in the list.

    Attributes:
        key: names it on the page: number of its file and of its line.
        columns: what the index keeps of it.
    """

    key: str
    columns: dict[str, Any]


class Index:
    """The rollouts of some sources, found quickly; safe to use from several threads.

    Attributes:
        sources: what is shown.
        path: the SQLite file.
    """

    def __init__(self, sources: Sources, folder: Path | None = None) -> None:
        """Open the index of some sources, or make an empty one.

        Args:
            sources: what is shown.
            folder: where index files lie; default: `cache_folder()`.
        """
        self.sources = sources
        self._refreshing = threading.Lock()
        self.path = _index_path(sources, folder)
        self._prepare()

    def _prepare(self) -> None:
        try:
            with self._open() as base:
                found = base.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()
                if found and found[0] == VERSION:
                    return
        except sqlite3.DatabaseError:  # none yet, damaged, or of another kind
            pass
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        with self._open() as base:
            base.executescript(_TABLES)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        base = sqlite3.connect(self.path, timeout=60, isolation_level=None)
        try:
            base.execute("PRAGMA journal_mode = WAL")
            # A cache: after a crash of the machine it is made anew.
            base.execute("PRAGMA synchronous = OFF")
            yield base
        finally:
            base.close()

    # --- reading the files ---

    def refresh(self, progress: Progress | None = None) -> bool:
        """Take in what was added, changed or removed; return whether anything was.

        Of two calls at the same time one does it and the other returns `False` at once.
        """
        if not self._refreshing.acquire(blocking=False):
            return False
        try:
            with self._open() as base:
                return self._refresh(base, progress)
        finally:
            self._refreshing.release()

    def _refresh(self, base: sqlite3.Connection, progress: Progress | None) -> bool:
        known = {row[1]: row for row in base.execute("SELECT id, name, size, changed FROM files")}
        there = self.sources.scan()
        new = [f for f in there if f.name not in known
               or (f.size, f.changed) != known[f.name][2:4]]  # fmt: skip
        gone = [row[0] for name, row in known.items() if name not in {f.name for f in there}]
        if not new and not gone:
            return False
        report = Report(progress, sum(file.size for file in new))
        for number in gone:
            with _transaction(base):
                forget(base, number)
                base.execute("DELETE FROM files WHERE id = ?", (number,))
        for file in new:
            # One transaction a file: a viewer that is stopped loses at most one of them.
            with _transaction(base):
                read_file(base, file, report)
            report.file_done(file.size)
        with _transaction(base):
            base.execute("UPDATE meta SET value = value + 1 WHERE name = 'changes'")
        return True

    # --- asking ---

    def state(self) -> dict[str, Any]:
        """Return `changes` (a counter), `total`, `last_step`, and `problems` as sentences."""
        with self._open() as base:
            changes = base.execute("SELECT value FROM meta WHERE name = 'changes'").fetchone()[0]
            total, last = base.execute("SELECT COUNT(*), MAX(step) FROM rollouts").fetchone()
            rows = base.execute(
                "SELECT name, damaged, state FROM files WHERE damaged OR state <> '' ORDER BY name"
            ).fetchall()
            # A folder may hold lines of other things, which are nobody's fault.
            ours = {row[0] for row in base.execute(
                "SELECT name FROM files WHERE EXISTS (SELECT 1 FROM rollouts WHERE key >= id << ? "
                "AND key < (id + 1) << ?)", (SHIFT, SHIFT))}  # fmt: skip
        problems = []
        for name, damaged, state in rows:
            if damaged and (name in ours or self.sources.files):
                problems.append(f"{name}: {damaged} damaged line(s) were left out")
            if state:
                problems.append(f"{name}: {state}")
        return {
            "changes": int(changes),
            "total": total,
            "last_step": last,
            "problems": problems,
        }

    def choices(self) -> dict[str, list[str]]:
        """Return what can be chosen in the filters `stop` and `source`."""
        with self._open() as base:
            stops = [r[0] for r in base.execute("SELECT DISTINCT stop FROM rollouts ORDER BY 1")]
            names = [r[0] for r in base.execute("SELECT name FROM files ORDER BY name")]
        folders = sorted({name.partition("/")[0] for name in names if "/" in name})
        return {"stop": stops, "source": folders + (names if len(names) <= 30 else [])}

    def rows(
        self, wanted: Filter, alarm_steps: Sequence[int] = (), offset: int = 0
    ) -> tuple[int, list[Row]]:
        """Return how many rollouts match and one page of them.

        Raises:
            ConfigError: the filter cannot be read.
        """
        condition, values = where(wanted, alarm_steps)
        columns = [name for name in COLUMNS if name != "text"]
        with self._open() as base:
            count = base.execute(f"SELECT COUNT(*) FROM rollouts WHERE {condition}", values)
            total = int(count.fetchone()[0])
            found = base.execute(
                f"SELECT key, {', '.join(columns)} FROM rollouts WHERE {condition} "
                f"ORDER BY {SORTS[wanted.sort]} LIMIT {PAGE} OFFSET ?",
                [*values, max(0, offset)],
            ).fetchall()
        return total, [
            Row(_name_of(row[0]), dict(zip(columns, row[1:], strict=True))) for row in found
        ]

    def group(self, key: str) -> tuple[list[str], int]:
        """Return the keys of a rollout's group (those of its file), and its place among them.

        Raises:
            DataError: there is no such rollout.
        """
        number = _number_of(key)
        with self._open() as base:
            mine = base.execute("SELECT file, grp FROM rollouts WHERE key = ?", (number,))
            found = mine.fetchone()
            if found is None:
                raise DataError(f"there is no rollout {key}; the file may have changed")
            rows = base.execute(
                "SELECT key FROM rollouts WHERE grp = ? AND file = ? ORDER BY key LIMIT 200",
                (found[1], found[0]),
            ).fetchall()
        keys = [row[0] for row in rows]
        # A group beyond the limit still shows the rollout that was asked for.
        if number not in keys:
            keys.append(number)
        return [_name_of(k) for k in keys], keys.index(number)

    def trajectory(self, key: str) -> Trajectory:
        """Return a rollout, read from its file and checked in full.

        Raises:
            DataError: there is no such rollout, or its file has changed or is damaged.
        """
        number = _number_of(key)
        with self._open() as base:
            found = base.execute(
                "SELECT start, length, name, changed, file FROM rollouts JOIN files "
                "ON files.id = rollouts.file WHERE key = ?",
                (number,),
            ).fetchone()
            if found is None:
                raise DataError(f"there is no rollout {key}; the file may have changed")
            start, length, name, changed, file = found
            line = from_blocks(base, file, start, length)
        if line is None:
            path = self.sources.root / name
            line = from_file(path, changed, start, length)
        return parse_line(line, f"{name}, line {number & (2**SHIFT - 1)}")


# --- where index files lie -----------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of index files: `evenhand/viewer` in the user's cache folder.

    That is `$XDG_CACHE_HOME`, else `~/.cache`.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "evenhand/viewer"


def _index_path(sources: Sources, folder: Path | None) -> Path:
    chosen = folder or cache_folder()
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen):
            pass
    except OSError:
        # No room in the cache folder: an index for this time only.
        chosen = Path(tempfile.mkdtemp(prefix="evenhand-viewer-"))
    _forget_old(chosen)
    names = json.dumps([str(sources.root), *map(str, sources.files)])
    return chosen / f"{hashlib.sha256(names.encode()).hexdigest()[:24]}.sqlite"


def _forget_old(folder: Path) -> None:
    for path in folder.glob("*.sqlite*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEEP_DAYS * 86400:
                path.unlink()


@contextmanager
def _transaction(base: sqlite3.Connection) -> Iterator[None]:
    base.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        base.execute("ROLLBACK")
        raise
    base.execute("COMMIT")


def _name_of(key: int) -> str:
    return f"{key >> SHIFT}-{key & (2**SHIFT - 1)}"


def _number_of(name: str) -> int:
    file, _, line = name.partition("-")
    if not (file.isascii() and file.isdigit() and line.isascii() and line.isdigit()):
        raise DataError(f"there is no rollout {name!r}")
    return int(file[:9]) << SHIFT | int(line[:9])
