"""What every converter shares: the unit of lengths, and putting a trajectory together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenhand.convert.counting import TOKENS, Counter
from evenhand.convert.dialects import recognise_dialect
from evenhand.convert.flat import opens_think, question_of, split_turns
from evenhand.convert.rows import Row
from evenhand.convert.segments import Built, Turn, build
from evenhand.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Context:
    """The settings of one conversion.

    Attributes:
        source: name of the format.
        count: length of a text.
    """

    source: str
    count: Counter


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a converter found out about one rollout, beside its segments."""

    row: Row
    group: str
    question: str
    golden_answers: tuple[str, ...] | None
    reward: float | None
    step: int | None = None
    question_id: str | None = None
    dataset: str | None = None
    scores: Mapping[str, float | None] | None = None
    metadata: Mapping[str, Any] | None = None


def assemble(
    rollout: Rollout, built: Built, context: Context, *, counted: bool = True, key: str = ""
) -> Trajectory:
    """Return the trajectory of a rollout.

    Args:
        rollout: its record.
        built: its segments.
        context: settings of the conversion.
        counted: `n_tokens` was counted here; false where the dump told it, in tokens.
        key: ending of the id where one row holds several rollouts.
    """
    return Trajectory(
        id=rollout.row.key + key,
        group=rollout.group,
        question=rollout.question,
        golden_answers=rollout.golden_answers,
        reward=rollout.reward,
        format_ok=built.format_ok,
        stop_reason=built.stop_reason,
        segments=built.segments,
        step=rollout.step,
        question_id=rollout.question_id,
        dataset=rollout.dataset,
        scores=rollout.scores,
        think_in_prompt=built.think_in_prompt,
        metadata={
            "source_format": context.source,
            "n_tokens_unit": context.count.unit if counted else TOKENS,
            **(rollout.metadata or {}),
        },
    )


def build_flat(prompt: str | None, response: str, context: Context) -> Built:
    """Return the segments of a flat response, with its prompt if that is known."""
    dialect = recognise_dialect(prompt or "", response)
    think_open = prompt is not None and opens_think(prompt)
    turns = split_turns(response, dialect, think_open=think_open)
    opening = Turn(policy=False, text=prompt) if prompt else None
    return build(turns, prompt=opening, dialect=dialect, count=context.count, think_open=think_open)


def question_from(value: Any, prompt: str) -> str:
    """Return the question of a record, or the one that its prompt asks."""
    return value if isinstance(value, str) and value else question_of(prompt)
