"""Reading and writing files: gzip by content, parquet, output that appears whole or not at all."""

from __future__ import annotations

import gzip
import io
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from evenhand.core.errors import DataError, require

GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"

STANDARD_STREAM = Path("-")
"""The name that stands for standard input (or output) on the command line."""

# --- reading -------------------------------------------------------------------------------------


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


@contextmanager
def open_lines(path: Path) -> Iterator[BinaryIO]:
    """Open a file of lines for reading bytes; gzip is recognised by content, not by name.

    Standard input (`-`) and pipes may be compressed too.

    Raises:
        DataError: the file cannot be read, or standard input was read before.
    """
    check_input(path)
    with _standard_input() if path == STANDARD_STREAM else path.open("rb") as file:
        # A pipe cannot be read twice, so the first bytes are looked at and left where they are.
        if file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield file


def _standard_input() -> io.BufferedReader:
    # Whoever reads standard input closes it, so that a second reader finds out.
    if sys.stdin is None or sys.stdin.closed or sys.stdin.buffer.closed:
        raise DataError(
            "standard input is closed or was read already; give - once, and something to read"
        )
    stream: Any = sys.stdin.buffer  # a host program may have put another kind there
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)


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
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(
                f"{path}: reading failed after line {number}: {error}; the file is cut or damaged"
            ) from error


def is_parquet(path: Path) -> bool:
    """Whether a file holds parquet, by its first bytes; never true of standard input or a pipe."""
    check_input(path)
    if path == STANDARD_STREAM or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield `(row number from 1, row)` for each row of a parquet file; only a part is held.

    Raises:
        DataError: the file is damaged, with the last row that was read.
        MissingExtraError: pyarrow is not installed.
    """
    parquet = require("pyarrow.parquet", "parquet", "reading a parquet file")
    arrow_error = require("pyarrow", "parquet", "reading a parquet file").ArrowException
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (arrow_error, OSError, UnicodeDecodeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path}: reading failed after row {number}: {reason}; the file is cut or damaged"
        ) from error


# --- writing -------------------------------------------------------------------------------------


def check_output(path: Path) -> Path:
    """Return `path` if a file can be written there, so that long work does not end in an error.

    Raises:
        DataError: it is a directory, a device or pipe that cannot be written, or its folder does
            not exist or cannot be written.
    """
    if path.is_dir():
        raise DataError(f"{path} is a directory; give the name of a file to write")
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise DataError(f"cannot write {path} (permission denied)")
        return path
    folder = _without_links(path).parent
    if not folder.is_dir():
        raise DataError(f"cannot write {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise DataError(f"cannot write {path}: the folder {folder} cannot be written")
    return path


def _without_links(path: Path) -> Path:
    """Return the path of the file itself, so that it is written and not the link replaced."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _is_special(path: Path) -> bool:
    """Whether renaming a file over a path would destroy it: a device, a pipe, an open stream."""
    if not path.exists() or path.is_dir():
        return False
    return not path.is_file() or _is_open_stream(path)


def _is_open_stream(path: Path) -> bool:
    # `/dev/stdout` is a link to `/proc/self/fd/1`, which stands for a file that is open already.
    while True:
        folder = os.path.realpath(path.parent)
        if folder == "/dev/fd" or folder.startswith("/proc/"):
            return True
        if not path.is_symlink():
            return False
        path = Path(folder, path.readlink())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` when the block ends without an error.

    The file lies in the same folder, is flushed to disk and then renamed over `path`. If the block
    raises, it is removed and an earlier file at `path` stays untouched. Of a link the file that it
    points to is replaced. A device, a pipe or an open stream (`/dev/stdout`) is not replaced: its
    own path is given, and what the block writes goes there at once.

    Raises:
        DataError: see `check_output`; or writing fails.
    """
    check_output(path)
    if _is_special(path):
        yield path
        return
    final = _without_links(path)
    try:
        handle, name = tempfile.mkstemp(dir=final.parent, prefix=f".{final.name}.", suffix=".tmp")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}: {final.parent}") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp gives 0600; the result should look like any other file of this user.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(final)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[str]]:
    """Open `path` for writing text; it appears whole when the block ends without an error.

    See `atomic_path`. A name that ends in `.gz` is compressed. The bytes do not depend on the time
    of writing.

    Raises:
        DataError: see `check_output`; or writing fails.
    """
    with atomic_path(path) as target, target.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(
                filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0
            ) as packed:
                yield from _text_over(cast(BinaryIO, packed))
        else:
            yield from _text_over(raw)


def _text_over(binary: BinaryIO) -> Iterator[IO[str]]:
    text = io.TextIOWrapper(binary, encoding="utf-8", newline="\n")
    try:
        yield text
        text.flush()
    finally:
        text.detach()
