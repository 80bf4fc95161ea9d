"""scripts/gpu_check.py works on a CPU, and says so when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.train


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    return gpu_check  # type: ignore[no-any-return]


def test_the_script_runs_without_a_gpu_and_writes_its_figures(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out"),
                 "OMP_NUM_THREADS": "1", "SECONDS_AT_MOST": "280"}  # fmt: skip
    result = subprocess.run(
        [str(SCRIPTS / "gpu_check.sh"), "--device", "cpu", "--small"],
        env=variables, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert found["ok"] is True
    names = " ".join(check["name"] for check in found["checks"])
    for part in (
        "toy: float32 trainer, CPU float32",
        "toy: bf16 trainer, its sampler",
        "toy training, bf16: gradient norm",
        "shape training, bf16: gradient norm",
    ):
        assert part in names
    assert found["figures"]["toy training, bf16: trained tokens a second"] > 0
    assert "all checks hold" in result.stdout


def test_a_device_that_is_not_there_is_code_1(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert script.main(["--out", str(tmp_path), "--device", "cuda"]) == 1
    assert "torch sees no device 'cuda'" in capsys.readouterr().err


def test_a_part_that_breaks_or_misses_its_limit_fails_the_whole(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parity(report: Any, label: str, *_: Any) -> None:
        report.check(f"{label} parity", 5.0, "<= 1", label != "toy")

    def training(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(script, "parity", parity)
    monkeypatch.setattr(script, "training", training)
    assert script.main(["--out", str(tmp_path), "--device", "cpu", "--small"]) == 1
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [check["ok"] for check in found["checks"]] == [False, False, True, False]


def test_missing_packages_are_all_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(script, "NEEDED", ("torch", "no_such_a", "no_such_b"))
    assert script.main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    assert "not installed: no_such_a, no_such_b; see WHEELS" in capsys.readouterr().err
