"""What a result depends on besides its settings: packages, Python, machine, git revision."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from evenhand import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "bm25s")


def versions() -> dict[str, Any]:
    """Return what a run depends on besides its recipe."""
    found: dict[str, Any] = {
        "evenhand": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | _git()


def _git() -> dict[str, Any]:
    """Return the revision of the working folder, if it is under git."""
    answers = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            result = subprocess.run(
                ["git", *command], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return {}
        answers.append(result.stdout.strip())
    return {"git_revision": answers[0], "git_changes": bool(answers[1])}
