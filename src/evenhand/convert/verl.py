"""verl's rollout file: `trainer.rollout_data_dir` writes `{step}.jsonl`.

Each record holds `input` and `output` (decoded without special tokens), `gts` (the accepted
answers of `reward_model.ground_truth`), `score`, `step`, and further keys of the reward function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evenhand.convert import fields
from evenhand.convert.context import Context, Rollout, assemble, build_flat, question_from
from evenhand.convert.rows import Row
from evenhand.trajectory import Trajectory

_USED = ("input", "output", "gts", "score", "step", "question", "data_source")


def is_verl(data: Mapping[str, Any]) -> bool:
    """Whether a record has the keys of verl's rollout file."""
    return {"input", "output"} <= data.keys() and bool({"score", "gts", "step"} & data.keys())


def read_verl(rows: Iterator[Row], context: Context) -> Iterator[Trajectory]:
    """Yield a trajectory for each record; a group shares step, input and accepted answers."""
    for row in rows:
        data, where = row.data, row.where
        prompt = fields.text_field(data, "input", where)
        response = fields.text_field(data, "output", where)
        golds = fields.accepted_answers(data.get("gts"), where, "gts")
        step = fields.step(data.get("step"), where)
        if step is None:
            step = row.step_from_file(r"^([0-9]{1,12})\.jsonl")
        dataset = data.get("data_source")
        scores = fields.scores(data, _USED, where)
        rollout = Rollout(
            row=row,
            group=fields.group_name(step, prompt, golds),
            question=question_from(data.get("question"), prompt),
            golden_answers=golds,
            reward=fields.reward(data.get("score"), where, "score"),
            step=step,
            dataset=dataset if isinstance(dataset, str) else None,
            scores=scores,
            metadata=fields.leftovers(data, (*_USED, *(scores or ()))),
        )
        yield assemble(rollout, build_flat(prompt, response, context), context)
