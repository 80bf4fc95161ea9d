"""evenhand's side of `against_trl.py`.

    python benchmarks/against_trl_ours.py short 2

The trainer as a recipe makes it, `collect` and credit and records included; only the lengths are
forced, through `adjust_logits`. Prints one line of JSON: CPU seconds of each step and phase, and
the number of tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import against_trl_workload as work
from evenhand.rollout import RowKey
from evenhand.rollout.transformers import TransformersPolicy
from evenhand.training.listener import Listener
from evenhand.training.loop import Trainer
from evenhand.training.recipes import recipe_from
from evenhand.training.run_folder import RunFolder
from evenhand.training.setup import open_parts
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import Document, render_information

HERE = Path(__file__).stem


def template(question: str) -> str:
    return f"<user> {question} <asst>"


def row_of(question: str, rollout: int) -> int:
    """Number of a rollout; a question is named `questions/NUMBER`."""
    return int(question.rsplit("/")[-1]) * work.GROUP + rollout


def reward(trajectory: Trajectory) -> float:
    _, question, rollout = trajectory.id.split(":")
    assert trajectory.step is not None
    return work.reward(row_of(question, int(rollout)), trajectory.step)


@dataclass(frozen=True)
class Found:
    documents: tuple[Document, ...]
    error: str | None = None


class Pages:
    """A page of random words for every query, always the same one."""

    def __init__(self, plan: str) -> None:
        self._plan = work.workload(plan)
        self._wrapping = len(render_information([Document("d", "T", "")]).split())

    def search(self, queries: Sequence[str], k: int) -> list[Found]:  # noqa: ARG002 one page
        pages = [self._plan.page(query, self._wrapping) for query in queries]
        return [Found((Document("d", "T", page),)) for page in pages]


class Script:
    """Ends turns where the script says; no special token before."""

    def __init__(self, plan: work.Workload) -> None:
        self._forced = np.zeros((len(plan.turns), 1 + max(map(sum, plan.turns))), dtype=np.int64)
        for row, lengths in enumerate(plan.turns):
            begin = 0
            for length in lengths[:-1]:
                self._forced[row, [begin, begin + length - 1]] = work.SEARCH, work.SEARCH_END
                begin += length
            last = begin + lengths[-1] - 1
            self._forced[row, [begin, last]] = work.ANSWER, work.ANSWER_END
        self._drawn = np.zeros(len(plan.turns), dtype=np.int64)

    def begin(self) -> None:
        self._drawn[:] = 0

    def __call__(self, logits: Any, keys: Sequence[RowKey | None], _places: Any) -> Any:
        rows = np.array([-1 if key is None else row_of(key.question, key.rollout) for key in keys])
        live = np.flatnonzero(rows >= 0)
        forced = np.zeros(len(rows), dtype=np.int64)
        forced[live] = self._forced[rows[live], self._drawn[rows[live]]]
        self._drawn[rows[live]] += 1
        logits[:, : len(work.SPECIAL)] = float("-inf")
        must = np.flatnonzero(forced)
        logits[must] = float("-inf")
        logits[must, forced[must]] = 0.0
        return logits


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**work.MODEL)).float().save_pretrained(folder)
    vocabulary = {word: at for at, word in enumerate((*work.SPECIAL, *work.WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def settings(folder: Path, plan: work.Workload, steps: int) -> dict[str, Any]:
    questions = folder / "questions.jsonl"
    questions.write_text("".join(
        json.dumps({"id": str(at), "question": text, "golden_answers": ["x"]}) + "\n"
        for at, text in enumerate(plan.prompts)
    ))  # fmt: skip
    return {
        "name": "against-trl", "steps": steps,
        "model": {"path": str(folder), "precision": "float32", "threads": 1, "device": "cpu"},
        "data": {"train": str(questions), "evaluate": None, "shuffle": False},
        "retrieval": {
            "retriever": f"{HERE}:Pages", "documents": 1, "settings": {"plan": plan.name},
        },
        "environment": {
            "template": f"{HERE}:template",
            "limits": {"max_context": 2048, "announce_last": False},
        },
        "rollout": {"questions": len(plan.prompts), "group_size": plan.group},
        "reward": {"name": f"{HERE}:reward"},
        "credit": {"estimator": "grpo"},
        "loss": {"aggregation": "token_mean"},
        "optimizer": {**work.OPTIMIZER, "schedule": "constant"},
        "checkpoint": {"every": 1000},
        "tracking": {"tensorboard": "off"},
    }  # fmt: skip


class Clock(Listener):
    """Steps from end to end: rollouts, credit, forward, backward, clipping, optimiser, records."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.collecting = 0.0
        self.counts: dict[str, int] = {}
        self._ended = 0.0

    def started(self, *_: Any) -> None:
        self._ended = time.process_time()

    def stepped(self, *_: Any) -> None:
        now = time.process_time()
        step = now - self._ended
        self.steps.append({"rollouts": self.collecting, "training": step - self.collecting,
                           "step": step, **self.counts})  # fmt: skip
        self._ended = time.process_time()


class Timed(Trainer):
    """The trainer, with a clock around the rollouts."""

    clock: Clock
    script: Script

    def _collect(self, step: int) -> Any:
        self.script.begin()
        began = time.process_time()
        found = super()._collect(step)
        self.clock.collecting = time.process_time() - began
        return found

    def _update(self, trajectories: Sequence[Trajectory], step: int) -> Any:
        segments = [segment for rollout in trajectories for segment in rollout.segments]
        trained = [segment for segment in segments if segment.is_policy]
        self.clock.counts = {
            "tokens": sum(segment.n_tokens for segment in segments),
            "trained": sum(segment.n_tokens for segment in trained),
            "credited": sum(segment.n_tokens for segment in trained if segment.advantage),
        }
        return super()._update(trajectories, step)


def steps_of(name: str, steps: int) -> list[dict[str, Any]]:
    """Train for a few steps on a workload; return what each took."""
    plan = work.workload(name)
    script, clock = Script(plan), Clock()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        save_model(model)
        recipe = recipe_from(settings(model, plan, steps))
        parts = open_parts(recipe)
        policy = TransformersPolicy(
            parts.loaded.model, parts.loaded.tokenizer, adjust_logits=script
        )
        run = RunFolder.create(Path(folder, "run"))
        run.begin(recipe)
        trainer = Timed(recipe, replace(parts, policy=policy), run, clock)
        trainer.clock, trainer.script = clock, script
        try:
            trainer.run()
        finally:
            trainer.close()
    return clock.steps


if __name__ == "__main__":
    print(json.dumps(steps_of(sys.argv[1], int(sys.argv[2]))))
