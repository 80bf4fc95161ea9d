"""Search-R1's and CalibAdv's transcripts.

Search-R1 writes no rollout file: it prints the decoded text of a rollout. Users store that text
with the question, the accepted answers and the reward, under names that its code uses. CalibAdv
writes `rollout_{step}.json`: one object that maps the id of a question to its record, whose
`responses` hold the flat text and, in `seg_responses`, the parts that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evenhand.convert import fields
from evenhand.convert.context import Context, Rollout, assemble, build_flat, question_from
from evenhand.convert.dialects import Dialect, without_end_of_turn
from evenhand.convert.flat import opens_think, split_prompt, split_turns
from evenhand.convert.rows import Row
from evenhand.convert.segments import Turn, build
from evenhand.core.errors import DataError
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import THINK_CLOSE, THINK_OPEN

WHOLE_TEXT = ("sequences_str", "sequence", "text", "transcript", "trajectory")
PROMPT = ("prompt", "input")
RESPONSE = ("response", "output", "completion")
GOLDEN = ("golden_answers", "ground_truth", "gts", "target", "answers", "reward_model")
REWARD = ("reward", "score")
DATASET = ("dataset", "data_source")
GROUP = ("group", "uid")
STEP = ("step", "global_step", "global_steps")
QUESTION_ID = ("question_id", "index")

_STEP_IN_NAME = r"(?:rollout|step)_?([0-9]{1,12})"
_ENVIRONMENT_ENDS = ("</information>", THINK_OPEN, "Let me try again.")
_ENTRY = ("question", "ground_truth", "golden_answers", "data_source", "responses", "uid")


def is_transcript(data: Mapping[str, Any]) -> bool:
    """Whether a record holds a flat text under a name that Search-R1's users give it."""
    return any(isinstance(data.get(name), str) for name in (*WHOLE_TEXT, *RESPONSE))


def is_calibadv(data: Mapping[str, Any]) -> bool:
    """Whether a record is CalibAdv's: an entry with `responses`, or a table of such entries."""
    return isinstance(data.get("responses"), list) or (
        bool(data)
        and all(isinstance(v, dict) and isinstance(v.get("responses"), list) for v in data.values())
    )


def read_searchr1(rows: Iterator[Row], context: Context) -> Iterator[Trajectory]:
    """Yield a trajectory for each record with a flat text."""
    for row in rows:
        yield _flat(row, context)


def read_calibadv(rows: Iterator[Row], context: Context) -> Iterator[Trajectory]:
    """Yield the trajectories of CalibAdv's rollout file; records with a flat text work too."""
    for row in rows:
        data = row.data
        if isinstance(data.get("responses"), list):
            yield from _entry(row, str(data.get("uid", "")), data, context, "")
        elif is_calibadv(data):
            for at, (uid, entry) in enumerate(data.items(), start=1):
                yield from _entry(row, uid, entry, context, f"-{at}")
        else:
            yield _flat(row, context)


def _flat(row: Row, context: Context) -> Trajectory:
    data, where = row.data, row.where
    text_name, _ = fields.first_field(data, WHOLE_TEXT)
    prompt_name, prompt = "", None
    if text_name:
        prompt, response = split_prompt(fields.text_field(data, text_name, where))
    else:
        text_name, _ = fields.first_field(data, RESPONSE)
        if not text_name:
            raise DataError(
                f"{where}: no field holds the rollout's text; name it one of "
                f"{', '.join((*WHOLE_TEXT, *RESPONSE))} (got {_keys(data)})"
            )
        response = fields.text_field(data, text_name, where)
        prompt_name, prompt = fields.first_field(data, PROMPT)
        if prompt is not None:
            prompt = fields.text_field(data, prompt_name, where)
    gold_name, gold = fields.first_field(data, GOLDEN)
    golds = fields.accepted_answers(gold, where, gold_name)
    reward_name, reward = fields.first_field(data, REWARD)
    step_name, step = fields.first_field(data, STEP)
    step = fields.step(step, where, step_name) if step_name else row.step_from_file(_STEP_IN_NAME)
    question = question_from(data.get("question"), prompt or "")
    group_name, group = fields.first_field(data, GROUP)
    id_name, question_id = fields.first_field(data, QUESTION_ID)
    dataset_name, dataset = fields.first_field(data, DATASET)
    if not question and not group_name:
        raise DataError(
            f"{where}, field question: missing, and no prompt holds it; without it rollouts cannot "
            "be grouped (a field group does, too)"
        )
    shared = (group,) if group_name else (question, golds)
    used = {text_name, prompt_name, gold_name, reward_name, step_name, "question", group_name}
    used |= {id_name, dataset_name, "id"}
    rollout = Rollout(
        row=row,
        group=fields.group_name(step, *shared),
        question=question,
        golden_answers=golds,
        reward=fields.reward(reward, where, reward_name),
        step=step,
        question_id=_label(question_id),
        dataset=dataset if isinstance(dataset, str) else None,
        scores=fields.scores(data, used, where),
        metadata=_metadata(data, used),
    )
    return assemble(rollout, build_flat(prompt or None, response, context), context)


def _metadata(data: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    numeric = {name for name, value in data.items() if isinstance(value, int | float)}
    return fields.leftovers(data, (used | numeric) - {"id"})


def _label(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value) or None


def _keys(data: Mapping[str, Any]) -> str:
    return ", ".join(list(data)[:12]) or "no fields"


# --- CalibAdv's file -----------------------------------------------------------------------------


def _entry(
    row: Row, uid: str, entry: Mapping[str, Any], context: Context, key: str
) -> Iterator[Trajectory]:
    where = f"{row.where}, question {uid}" if uid else row.where
    question = fields.text_field(entry, "question", where)
    gold_name, gold = fields.first_field(entry, ("ground_truth", "golden_answers"))
    golds = fields.accepted_answers(gold, where, gold_name)
    step = row.step_from_file(_STEP_IN_NAME)
    dataset = entry.get("data_source")
    responses = entry["responses"]
    for at, response in enumerate(responses, start=1):
        if not isinstance(response, dict):
            raise DataError(
                f"{where}, response {at}: expected an object, got {fields.describe(response)}"
            )
    parts = [
        _turns(response, f"{where}, response {at}") for at, response in enumerate(responses, 1)
    ]
    think_open = _think_in_prompt(parts)
    for at, (response, (turns, known)) in enumerate(zip(responses, parts, strict=True), start=1):
        here = f"{where}, response {at}"
        if not known:
            text = fields.text_field(response, "response", here)
            turns = split_turns(text, Dialect.TAGS, think_open=think_open)
        rollout = Rollout(
            row=row,
            group=fields.group_name(step, uid or question, golds),
            question=question,
            golden_answers=golds,
            reward=fields.reward(response.get("reward"), here, "reward"),
            step=step,
            question_id=uid or None,
            dataset=dataset if isinstance(dataset, str) else None,
            scores=fields.scores(response, ("reward",), here),
            metadata={
                **fields.leftovers(entry, _ENTRY),
                "author": "known" if known else "from the text",
            },
        )
        built = build(
            turns,
            prompt=None,
            dialect=Dialect.TAGS,
            count=context.count,
            think_open=think_open,
        )
        yield assemble(rollout, built, context, key=f"{key}-{at}")


def _turns(response: Mapping[str, Any], where: str) -> tuple[list[Turn], bool]:
    """Return the turns of a response and whether their authors are known from its segments."""
    text = fields.text_field(response, "response", where)
    policy = response.get("seg_responses")
    if not isinstance(policy, list) or not all(isinstance(part, str) for part in policy):
        return split_turns(text, Dialect.TAGS, think_open=False), False
    turns: list[Turn] = []
    at = 0
    for number, raw in enumerate(policy):
        # `response` leaves out the end-of-turn tokens that the segments spell out.
        part = raw if raw in text[at:] else without_end_of_turn(raw)
        start = _find_policy(text, part, at) if part else -1
        if start < 0 or (number == 0 and start > 0):
            return split_turns(text, Dialect.TAGS, think_open=False), False
        if start > at:
            turns.append(Turn(policy=False, text=text[at:start]))
        turns.append(Turn(policy=True, text=part, metadata=_per_segment(response, number)))
        at = start + len(part)
    rest = text[at:]
    if rest.strip():
        turns.append(Turn(policy=False, text=rest))
    elif rest and turns:
        last = turns[-1]
        turns[-1] = Turn(policy=last.policy, text=last.text + rest, metadata=last.metadata)
    return (turns, True) if turns else (split_turns(text, Dialect.TAGS, think_open=False), False)


def _find_policy(text: str, part: str, at: int) -> int:
    """Return where `part` starts after a whole text of the environment (or at once), or -1."""
    start = text.find(part, at)
    while start > at and not text[at:start].rstrip().endswith(_ENVIRONMENT_ENDS):
        start = text.find(part, start + 1)
    return start


def _per_segment(response: Mapping[str, Any], number: int) -> dict[str, float]:
    found = {}
    for name, values in response.items():
        if name.startswith("seg_") and isinstance(values, list) and number < len(values):
            value = values[number]
            if isinstance(value, int | float) and abs(value) < float("inf"):
                found[name.removeprefix("seg_")] = float(value)
    return found


def _think_in_prompt(parts: Sequence[tuple[Sequence[Turn], bool]]) -> bool:
    """Whether the environment wrote the opening `<think>`; the dump does not hold the prompt.

    The environment's texts show it: with that option each ends with the tag. Where none of the
    question's rollouts has such a text, the tag is taken to be the prompt's if every rollout that
    closes its first thought did not open it.
    """
    shown = [turn.text for turns, _ in parts for turn in turns if not turn.policy]
    shown = [text for text in shown if "</information>" in text]
    if shown:
        return all(opens_think(text) for text in shown)
    first = [turns[0].text for turns, _ in parts if turns]
    closing = [text for text in first if THINK_CLOSE in text]
    return bool(closing) and all(
        THINK_OPEN not in text.partition(THINK_CLOSE)[0] for text in closing
    )
