"""TRL's completions table: `log_completions` writes `completions/completions_{step}.parquet`.

Columns: `step`, `prompt`, `completion` (decoded without special tokens), one column a reward
function, what `log_extra` added, and `advantage`. Prompts and completions that are lists of chat
messages are read as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from evenhand.convert import fields
from evenhand.convert.context import Context, Rollout, assemble, build_flat, question_from
from evenhand.convert.dialects import CALL_CLOSE, CALL_OPEN, Dialect, recognise_dialect
from evenhand.convert.flat import question_of
from evenhand.convert.rows import Row
from evenhand.convert.segments import Built, Turn, build
from evenhand.core.errors import DataError
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import THINK_CLOSE, THINK_OPEN

_GOLDEN = ("golden_answers", "ground_truth", "answer", "solution")
_USED = ("step", "prompt", "completion", "reward", "advantage", "question", *_GOLDEN)


def is_trl(data: Mapping[str, Any]) -> bool:
    """Whether a record has the columns of TRL's completions table."""
    return {"prompt", "completion"} <= data.keys()


def read_trl(rows: Iterator[Row], context: Context) -> Iterator[Trajectory]:
    """Yield a trajectory for each record; a group shares step and prompt."""
    for row in rows:
        data, where = row.data, row.where
        for name in ("prompt", "completion"):
            if not isinstance(data.get(name), str | list):
                raise DataError(
                    f"{where}, field {name}: expected text or a list of messages, got "
                    f"{fields.describe(data.get(name))}"
                )
        prompt = _prompt_text(data["prompt"], where)
        step = fields.step(data.get("step"), where)
        if step is None:
            step = row.step_from_file(r"completions_([0-9]{1,12})")
        gold_name, gold = fields.first_field(data, _GOLDEN)
        scores = fields.scores(data, _USED, where)
        reward, columns = _reward(data, scores or {}, where)
        advantage = fields.number(data.get("advantage"), where, "advantage")
        metadata = fields.leftovers(data, (*_USED, *(scores or ())))
        if columns:
            metadata["reward_columns"] = columns
        if advantage is not None:
            metadata["advantage"] = advantage
        rollout = Rollout(
            row=row,
            group=fields.group_name(step, data["prompt"]),
            question=question_from(data.get("question"), _question_text(data["prompt"], prompt)),
            golden_answers=fields.accepted_answers(gold, where, gold_name),
            reward=reward,
            step=step,
            scores=scores,
            metadata=metadata,
        )
        yield assemble(rollout, _built(prompt, data["completion"], where, context), context)


def _reward(
    data: Mapping[str, Any], scores: Mapping[str, float | None], where: str
) -> tuple[float | None, list[str]]:
    """Return the reward and the columns that it sums.

    A column `reward` is the reward. Else it is the plain sum of the columns of reward functions,
    which hold floats; the table does not have the weights. A function that did not apply gave
    `NaN` and adds nothing; if none applied, the rollout is not scored.
    """
    if "reward" in data:
        return fields.reward(data["reward"], where, "reward"), []
    columns = [name for name in scores if isinstance(data[name], float)]
    values = [value for name in columns if (value := scores[name]) is not None]
    total = fields.reward(sum(values), where, " + ".join(columns)) if values else None
    return total, columns


def _built(prompt: str, completion: Any, where: str, context: Context) -> Built:
    if isinstance(completion, str):
        return build_flat(prompt, completion, context)
    turns = [_turn(message, where) for message in completion]
    if not any(turn.policy for turn in turns):
        turns.append(Turn(policy=True, text=""))
    calls = any(turn.result or CALL_OPEN in turn.text for turn in turns)
    dialect = Dialect.TOOLS if calls else recognise_dialect(prompt, "")
    opening = Turn(policy=False, text=prompt) if prompt else None
    return build(turns, prompt=opening, dialect=dialect, count=context.count)


def _turn(message: Any, where: str) -> Turn:
    role, text = _message(message, where, "completion")
    if role != "assistant":
        return Turn(policy=False, text=text, result=role in ("tool", "function"))
    thought = message.get("reasoning_content") or message.get("thinking")
    if isinstance(thought, str):
        text = f"{THINK_OPEN}\n{thought}\n{THINK_CLOSE}\n\n{text}"
    calls = message.get("tool_calls")
    # A structured call has left the text; it is written back in the form of Hermes.
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else call
        try:
            written = json.dumps(function, ensure_ascii=False, default=str)
        except (ValueError, RecursionError):
            written = ""
        text += f"\n{CALL_OPEN}\n{written}\n{CALL_CLOSE}"
    return Turn(policy=True, text=text)


def _message(message: Any, where: str, name: str) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(
            f"{where}, field {name}: expected messages with role and content, got "
            f"{fields.describe(message)}"
        )
    content = message.get("content")
    if isinstance(content, list):  # parts of a multimodal message
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    if content is not None and not isinstance(content, str):
        raise DataError(
            f"{where}, field {name}: expected the content of a message as text, got "
            f"{fields.describe(content)}"
        )
    return message["role"], content or ""


def _prompt_text(prompt: Any, where: str) -> str:
    if isinstance(prompt, str):
        return prompt
    messages = [_message(message, where, "prompt") for message in prompt]
    return "".join(f"{role}\n{text}\n" for role, text in messages)


def _question_text(prompt: Any, text: str) -> str:
    if isinstance(prompt, str):
        return text
    users = [m.get("content") for m in prompt if m["role"] == "user"]
    users = [content for content in users if isinstance(content, str)]
    return question_of(users[-1]) if users else text
