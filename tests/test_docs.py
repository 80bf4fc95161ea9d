"""What the documents show is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ROOT
from evenhand.cli import app

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
RESULT = re.compile(r"^(?:\w+ *= *)?(.+?) +# (\[[^\]]*\])$")


def blocks(name: str) -> list[str]:
    return BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["README.md", "docs/estimators.md"])
def test_the_examples_run_and_give_the_values_beside_them(name: str) -> None:
    found = blocks(name)
    assert found
    for block in found:
        scope: dict[str, Any] = {}
        exec(block, scope)  # our own documents
        for line in block.splitlines():
            match = RESULT.match(line)
            if match and "np.array" not in line:
                shown = np.array(match.group(2).strip("[]").split(), dtype=float)
                value = eval(match.group(1), scope)
                np.testing.assert_allclose(np.round(value, 2), shown, atol=1e-9)


def test_the_readme_shows_four_values_of_its_example() -> None:
    lines = [line for block in blocks("README.md") for line in block.splitlines()]
    assert sum(bool(RESULT.match(line)) for line in lines if "np.array" not in line) == 4


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_that_the_documents_name_exists() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    text = "".join(path.read_text(encoding="utf-8") for path in _pages())
    named = set(re.findall(r"(?:`|^\$ )evenhand ([a-z]+)\b", text, re.MULTILINE))
    assert {"credit", "audit", "data", "search"} <= named
    assert named <= names


def _pages() -> list[Path]:
    return [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
