"""Shared paths and small builders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fast", max_examples=25, derandomize=True, **COMMON)
settings.register_profile("thorough", max_examples=400, **COMMON)
settings.load_profile(os.environ.get("EVENHAND_HYPOTHESIS", "fast"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of cases and data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("no shared folder beside this checkout")
    return SHARED


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With EVENHAND_NO_SKIPS a skipped test is a failure: what was to be installed is not."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("EVENHAND_NO_SKIPS") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
