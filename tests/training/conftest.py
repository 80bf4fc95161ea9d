"""A tiny taught policy, made once a session and copied for each test that writes."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, questions and passages: read only."""
    torch = pytest.importorskip("torch")
    from tiny import save_world

    torch.set_num_threads(1)

    return save_world(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def world_copy(tiny_world: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_world, tmp_path / "world"))


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_TORCH:
        import torch

        torch.set_num_threads(1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
