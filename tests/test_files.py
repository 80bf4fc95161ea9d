"""Output appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenhand.errors import DataError
from evenhand.files import atomic_write


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
