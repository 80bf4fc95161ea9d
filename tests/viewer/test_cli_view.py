"""`evenhand view` as a process: what it prints, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evenhand.cli import main
from run_builder import write_run
from viewer_server import get


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["view", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_it_serves_until_it_is_interrupted_and_ends_cleanly(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "evenhand", "view", str(run), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"8 rollouts at http://(127\.0\.0\.1:\d+)/ .*\n", line)
        assert found, line
        assert get(found.group(1))[0] == 200
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert (out, error) == ("", "")


def test_a_port_in_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another --port" in error_of(capsys, str(run), "--port", port)


def test_a_path_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not exist" in error_of(capsys, str(tmp_path / "none"))


def test_a_file_of_another_tool_is_one_line_that_names_the_converter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_text('{"input": "q", "output": "a"}\n')
    assert "evenhand convert" in error_of(capsys, str(path))
