"""Files are read whatever packs them, and output appears whole or not at all."""

from __future__ import annotations

import gzip
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from evenhand.core.errors import DataError
from evenhand.core.files import (
    STANDARD_STREAM,
    atomic_path,
    atomic_write,
    check_output,
    is_parquet,
    numbered_lines,
    parquet_rows,
)


def test_a_failure_leaves_the_earlier_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as file:
        file.write("half")
        raise ZeroDivisionError
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.jsonl"]  # noqa: PTH208


def test_nothing_is_seen_before_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with atomic_write(path) as file:
        file.write("all")
        file.flush()
        assert not path.exists()
    assert path.read_text() == "all"
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_compressed_bytes_do_not_depend_on_the_time(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        with atomic_write(tmp_path / name) as file:
            file.write("same")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="does not exist"),
        atomic_write(tmp_path / "no" / "x"),
    ):
        pass


def test_a_device_is_written_to_and_not_replaced() -> None:
    with atomic_write(Path(os.devnull)) as file:
        file.write("gone")
    assert not Path(os.devnull).is_file()


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a directory"), atomic_write(tmp_path):
        pass


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_path(pipe) as target:
        assert target == pipe
        target.write_bytes(b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_device_is_a_good_output_though_its_folder_is_not() -> None:
    assert check_output(Path(os.devnull)) == Path(os.devnull)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc")
def test_an_open_stream_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    # As `-o /dev/stdout > file`: a link to a file that the process holds open.
    link, path = tmp_path / "stdout", tmp_path / "file"
    with path.open("wb") as stream:
        link.symlink_to(f"/proc/self/fd/{stream.fileno()}")
        inode = path.stat().st_ino
        with atomic_write(link) as file:
            file.write("through")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_ino) == ("through", inode)


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    link, path = tmp_path / "link", tmp_path / "deep" / "file"
    link.symlink_to(path)
    for text in ("first", "second"):
        with atomic_write(link) as file:
            file.write(text)
        assert link.is_symlink()
        assert path.read_text() == text


def test_a_failed_block_leaves_no_temporary_path(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "out") as target:
        target.write_bytes(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_compressed_file_that_is_cut_names_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(b"one\n" * 100_000)[:-20])
    with pytest.raises(DataError, match=r"reading failed after line \d+: .*cut or damaged"):
        list(numbered_lines(path))


def test_damage_inside_a_compressed_file_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.gz"
    # Bytes that no deflate stream starts with: zlib raises an error of its own.
    path.write_bytes(gzip.compress(b"")[:10] + b"\xff" * 40)
    with pytest.raises(DataError, match=r"bad\.gz: reading failed after line 0"):
        list(numbered_lines(path))


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_may_be_compressed(
    pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    standard_input(monkeypatch, pack(b"one\n\ntwo\n"))
    assert list(numbered_lines(STANDARD_STREAM)) == [(1, b"one\n"), (3, b"two\n")]


def test_a_pipe_may_be_compressed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=pipe.write_bytes, args=(gzip.compress(b"one\n"),))
    thread.start()
    assert list(numbered_lines(pipe)) == [(1, b"one\n")]
    thread.join()


def test_standard_input_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, b"one\n")
    assert list(numbered_lines(STANDARD_STREAM)) == [(1, b"one\n")]
    with pytest.raises(DataError, match="standard input is closed or was read already"):
        list(numbered_lines(STANDARD_STREAM))


def test_a_closed_standard_input_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="standard input is closed"):
        list(numbered_lines(STANDARD_STREAM))


def test_text_in_a_table_that_is_not_utf_8_is_a_data_error(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "bad.parquet"
    parquet.write_table(arrow.table({"a": arrow.array([b"\xff"]).view(arrow.string())}), path)
    assert is_parquet(path)
    with pytest.raises(DataError, match="reading failed after row 0"):
        list(parquet_rows(path))
