"""The examples of docs/environment.md run, and its tables say what the code does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from evenhand.core.errors import RetrievalError
from evenhand.task import PRESETS, Limits, Turn
from evenhand.testing.tokenizers import CharacterTokenizer
from evenhand.trajectory import StopReason
from searching import Found, answer, document, kinds, search

TEXT = (Path(__file__).parents[1] / "docs/environment.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Run all examples of the page in order, as a reader would."""
    found: dict[str, Any] = {"search": lambda _query: Found((document(),))}
    for example in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(example, found)
    return found


def test_the_asynchronous_loop_drives_an_episode(names: dict[str, Any]) -> None:
    characters = CharacterTokenizer()
    turns = iter([search("q"), "nothing", answer("a")])

    async def generate(_context: Sequence[int], most: int, stop_tags: Sequence[str]) -> Turn:
        await asyncio.sleep(0)
        assert most == 500
        assert "</search>" in stop_tags
        return Turn(characters.encode(next(turns)))

    async def find(query: str) -> Found:
        await asyncio.sleep(0)
        assert query == "q"
        return Found((document(),))

    trajectory = asyncio.run(names["rollout"]("Q?", characters, generate, find))
    assert kinds(trajectory) == ["search", "information", "invalid", "notice", "answer"]


def test_the_asynchronous_loop_keeps_the_rollout_of_a_search_that_raises(
    names: dict[str, Any],
) -> None:
    characters = CharacterTokenizer()

    async def generate(*_: Any) -> Turn:
        return Turn(characters.encode(search("q")))

    async def down(_: str) -> Found:
        raise RetrievalError("no route")

    trajectory = asyncio.run(names["rollout"]("Q?", characters, generate, down))
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.segments[-1].error == "no route"


def test_the_synchronous_example_answers(names: dict[str, Any]) -> None:
    assert names["trajectory"].stop_reason is StopReason.ANSWERED
    assert names["trajectory"].format_ok


def test_the_check_example_passes(names: dict[str, Any]) -> None:
    assert names["summary"].episodes == 1


def test_the_table_of_presets_is_what_the_presets_are() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", TEXT, re.MULTILINE)
    shown = {name: values for name, *values in rows if name in Limits.__dataclass_fields__}

    def written(value: object) -> str:
        if value is None:
            return "none"
        return ("yes" if value else "no") if isinstance(value, bool) else str(value)

    assert list(shown) == [field.name for field in fields(Limits)]
    for at, limits in enumerate(PRESETS.values()):
        for name, values in shown.items():
            assert values[at].strip() == written(getattr(limits, name)), (name, at)
