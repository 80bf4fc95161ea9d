"""Reading and writing text files: gzip by suffix, output that appears whole or not at all."""

from __future__ import annotations

import gzip
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

from evenhand.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"


STANDARD_STREAM = Path("-")
"""The name that stands for standard input (or output) on the command line."""


def check_input(path: Path) -> Path:
    """Return `path` if it is a readable file (or a pipe), else raise a `DataError`."""
    if path == STANDARD_STREAM:
        return path
    if path.is_dir():
        raise DataError(f"{path} is a directory; give a file inside it")
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} cannot be read (permission denied)")
    return path


def open_lines(path: Path) -> BinaryIO:
    """Open a file of lines for reading bytes; gzip is recognised by content, not by name."""
    check_input(path)
    if path == STANDARD_STREAM:
        return sys.stdin.buffer
    if not path.is_file():  # a pipe cannot be looked at twice
        return cast(BinaryIO, path.open("rb"))
    with path.open("rb") as file:
        compressed = file.read(2) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb") if compressed else path.open("rb"))


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield `(line number from 1, line)` for each line that is not blank.

    Raises:
        DataError: a compressed file ends early or is damaged, with the last line that was read.
    """
    number = 0
    with open_lines(path) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise DataError(
                f"{path}: reading failed after line {number}: {error}; the file is cut or damaged"
            ) from error


def check_output(path: Path) -> Path:
    """Return `path` if a file can be written there, so that long work does not end in an error.

    Raises:
        DataError: it is a directory, or its folder does not exist or cannot be written.
    """
    if path.is_dir():
        raise DataError(f"{path} is a directory; give the name of a file to write")
    if not path.parent.is_dir():
        raise DataError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise DataError(f"cannot write {path}: the folder {path.parent} cannot be written")
    return path


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[str]]:
    """Open `path` for writing text; it appears whole when the block ends without an error.

    The text goes to a temporary file in the same folder, which is flushed to disk and then renamed
    over `path`. If the block raises, an earlier file at `path` stays untouched. A name that ends in
    `.gz` is compressed. The bytes do not depend on the time of writing.

    Raises:
        DataError: the folder does not exist or cannot be written.
    """
    if path.is_dir():
        raise DataError(f"{path} is a directory; give the name of a file to write")
    if (
        path.exists() and not path.is_file()
    ):  # a device or a pipe: renaming over it would destroy it
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            yield stream
        return
    check_output(path)
    try:
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
        )
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}: {path.parent}") from error
    try:
        with os.fdopen(handle, "wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
                    yield from _text_over(cast(BinaryIO, packed))
            else:
                yield from _text_over(raw)
            raw.flush()
            os.fsync(raw.fileno())
        # mkstemp gives 0600; the result should look like any other file of this user.
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _text_over(binary: BinaryIO) -> Iterator[IO[str]]:
    text = io.TextIOWrapper(binary, encoding="utf-8", newline="\n")
    try:
        yield text
        text.flush()
    finally:
        text.detach()
