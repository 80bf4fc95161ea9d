"""Saved indexes: a folder that appears whole or not at all, described by `manifest.json`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evenhand import __version__
from evenhand.core.errors import DataError
from evenhand.retrieval.corpus import damaged

SCHEMA = "evenhand.index/1"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an index folder holds.

    Attributes:
        kind: the back end (`bm25`, `dense`).
        corpus_hash: `corpus_hash` of its passages, in order.
        passages: how many there are.
        parameters: what the index was built with; enough to search it again.
        versions: of evenhand and of the libraries that built it.
        files: size in bytes and sha256 of every other file of the folder.
        schema: the version of this layout.
    """

    kind: str
    corpus_hash: str
    passages: int
    parameters: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    schema: str = SCHEMA

    @property
    def fingerprint(self) -> str:
        """Text that tells apart any two indexes that may give different results."""
        return f"{self.kind}:{self.corpus_hash}:{json.dumps(self.parameters, sort_keys=True)}"


def library_versions(*packages: str) -> dict[str, str]:
    """Return the versions of evenhand and of `packages`."""
    return {"evenhand": __version__} | {
        package: importlib.metadata.version(package) for package in packages
    }


def check_target(path: Path, *, overwrite: bool = False) -> None:
    """Raise a `DataError` unless an index may be written to `path`.

    It may be absent, an empty folder, or, with `overwrite`, an index.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / MANIFEST).is_file():
        raise DataError(f"{path} exists and is not an index; give another name")
    if not overwrite:
        raise DataError(
            f"{path} holds an index already; give another name, or overwrite it (--overwrite)"
        )


@contextmanager
def new_index(path: Path, manifest: Manifest, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder to write an index into; it appears at `path` when the block ends.

    The manifest is written last, with size and sha256 of every file, and the folder is renamed to
    `path`. If the block raises, nothing is left and an earlier index stays untouched.

    Raises:
        DataError: `path` exists and `overwrite` is false, or it is not an index, or it cannot be
            written.
    """
    check_target(path, overwrite=overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}: {path.parent}") from error
    try:
        yield temporary
        _write_manifest(temporary, manifest)
        _put_in_place(temporary, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    record = asdict(manifest)
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            os.fsync(stream.fileno())
        record["files"][file.name] = {"bytes": file.stat().st_size, "sha256": digest}
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump({"schema": record.pop("schema"), **record}, stream, indent=1, ensure_ascii=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    mask = os.umask(0)  # mkdtemp gives 0700; the folder should look like any other of this user
    os.umask(mask)
    folder.chmod(0o777 & ~mask)


def _put_in_place(temporary: Path, path: Path) -> None:
    if not (path / MANIFEST).exists():
        temporary.replace(path)  # also over an empty folder
        return
    # A folder cannot be renamed over a full one: the old one steps aside first.
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".old"))
    path.replace(old)
    try:
        temporary.replace(path)
    except OSError:
        old.replace(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def read_manifest(path: Path, *, verify: bool = False) -> Manifest:
    """Read the manifest of an index folder and check that its files are there.

    Args:
        path: the folder.
        verify: also compare the sha256 of every file (reads all of them); otherwise sizes only.

    Raises:
        DataError: not an index folder, an unknown schema, a missing, cut or changed file.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; give the folder of an index")
    try:
        record = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path} has no {MANIFEST}; give the folder that `evenhand search index` wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise damaged(path, f"{MANIFEST} cannot be read ({error})") from error
    manifest = _checked(path, record)
    for name, expected in manifest.files.items():
        _check_file(path, name, expected, verify=verify)
    return manifest


def _checked(path: Path, record: object) -> Manifest:
    if not isinstance(record, Mapping):
        raise damaged(path, f"{MANIFEST} is not an object")
    if record.get("schema") != SCHEMA:
        raise DataError(
            f"{path} has the schema {record.get('schema')!r}, this version reads {SCHEMA!r}; "
            "build the index again"
        )
    wanted = {
        "kind": str,
        "corpus_hash": str,
        "passages": int,
        "parameters": dict,
        "versions": dict,
        "files": dict,
    }
    for name, kind in wanted.items():
        if not isinstance(record.get(name), kind):
            raise damaged(path, f"{MANIFEST} has no usable field {name!r}")
    return Manifest(**{name: record[name] for name in wanted})


def _check_file(path: Path, name: str, expected: object, *, verify: bool) -> None:
    if Path(name).name != name or not isinstance(expected, Mapping):
        raise damaged(path, f"{MANIFEST} names the file {name!r} in a way that cannot be used")
    file = path / name
    if not file.is_file():
        raise damaged(path, f"{name} is missing")
    size = file.stat().st_size
    if size != expected.get("bytes"):
        raise damaged(path, f"{name} has {size} bytes, its manifest says {expected.get('bytes')}")
    if verify:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != expected.get("sha256"):
            raise damaged(path, f"{name} has another content than its manifest says")


def check_corpus(path: Path, manifest: Manifest, found: str) -> None:
    """Raise a `DataError` with both hashes unless the index was built on the corpus `found`."""
    if manifest.corpus_hash != found:
        raise DataError(
            f"{path} was built on another corpus: its hash is {manifest.corpus_hash}, "
            f"the given corpus has {found}; build an index of this corpus"
        )
