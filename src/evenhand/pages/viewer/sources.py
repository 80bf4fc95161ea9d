"""Which files of trajectories a path stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenhand.core.errors import DataError
from evenhand.pages.runs import ALARMS
from evenhand.training.run_folder import RunFolder

_SUFFIXES = (".jsonl", ".jsonl.gz")
_OTHER = ("metrics.jsonl", ALARMS)
_DEPTH = 3
_ASIDE = "alarms"
_PASSED_OVER = ("checkpoints", "tensorboard")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that may hold trajectories.

    Attributes:
        path: where it is.
        name: how it is called on the page.
        size: bytes on disk.
        changed: time of its last change in nanoseconds.
    """

    path: Path
    name: str
    size: int
    changed: int


@dataclass(frozen=True, slots=True)
class Sources:
    """What a viewer shows.

    Attributes:
        root: the folder, or the one that holds the files that were named.
        files: the files that were named; empty: whatever lies in the folder.
    """

    root: Path
    files: tuple[Path, ...] = ()

    @property
    def is_run(self) -> bool:
        """Whether it is the folder of a training run."""
        return not self.files and RunFolder(self.root).recipe_path.is_file()

    def scan(self) -> list[SourceFile]:
        """Return the files that are there now, in order of their names."""
        paths = self.files or _without_copies(sorted(_inside(self.root, _DEPTH)), self.root)
        found = []
        for path in paths:
            try:
                status = path.stat()
                str(path).encode()
            except (OSError, UnicodeEncodeError):  # gone since it was listed, or no name in UTF-8
                continue
            found.append(SourceFile(path, self._name(path), status.st_size, status.st_mtime_ns))
        return found

    def _name(self, path: Path) -> str:
        try:
            return str(path.relative_to(self.root))
        except ValueError:
            return str(path)


def open_sources(paths: Sequence[Path]) -> Sources:
    """Return what paths stand for: one folder, or one or more files.

    Raises:
        DataError: a path that does not exist; several folders; a folder without files of
            trajectories that is no run either.
    """
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist; give a run folder or a file of trajectories")
    if len(paths) == 1 and paths[0].is_dir():
        sources = Sources(paths[0].resolve())
        if not sources.is_run and not sources.scan():
            raise DataError(
                f"{paths[0]} holds no file of trajectories (.jsonl, .jsonl.gz) and is no run "
                "folder; give the folder that `evenhand train` wrote, or a file"
            )
        return sources
    folders = [path for path in paths if path.is_dir()]
    if folders:
        raise DataError(f"{folders[0]} is a folder; give one folder, or files")
    files = tuple(dict.fromkeys(path.resolve() for path in paths))
    parents = {file.parent for file in files}
    root = parents.pop() if len(parents) == 1 else Path("/")
    return Sources(root, files)


def _without_copies(paths: Sequence[Path], root: Path) -> list[Path]:
    """Leave out what alarms put aside of steps whose rollouts are there anyway."""
    aside = root / _ASIDE
    trained = RunFolder(root).trajectories
    seen = {path.name for path in paths if path.is_relative_to(trained)}
    kept = []
    for path in paths:
        if path.is_relative_to(aside):
            if path.name in seen:
                continue
            seen.add(path.name)
        kept.append(path)
    return kept


def _inside(folder: Path, depth: int) -> Iterator[Path]:
    """Yield files of lines below a folder; links that lead out of it are not followed."""
    root = folder.resolve()
    waiting = [(root, depth)]
    while waiting:
        here, left = waiting.pop()
        try:
            entries = list(here.iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _PASSED_OVER:
                continue
            if entry.is_symlink() and not entry.resolve().is_relative_to(root):
                continue
            if entry.is_dir():
                if left > 1:
                    waiting.append((entry, left - 1))
            elif entry.name.endswith(_SUFFIXES) and entry.name not in _OTHER:
                yield entry
