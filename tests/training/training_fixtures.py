"""Fixtures of the tests that train (a plugin of theirs): a tiny taught policy, made once a session.

No conftest.py: its name would hide that of the folder above.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


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


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torch to one thread and the hub out."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
