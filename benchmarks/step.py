"""Where the seconds of a training step go, and how they grow.

    python benchmarks/step.py                 # overhead of a quickstart step, then growth
    python benchmarks/step.py --no-growth

Overhead: steps of `recipes/quickstart.toml` as they are, one thread. Model compute is the time
inside the model's forward passes (sampling and training; LM head included), the softmax over the
vocabulary that turns its logits into probabilities (in sampling and in training), the backward
pass, gradient clipping and the optimiser. All the rest is overhead: prompts, scheduling, masks,
drawing tokens, moving rows of the cache, parsing, search, reward, credit, batches, records. The
share with the softmax counted as overhead is printed beside it. Exit code 1 if the median share is
15 % or more.

Growth: the scripted workload of `against_trl.py` with 32 rollouts, 2 searches and observations of
60 tokens, one of the three changed at a time.

CPU seconds. About 2 CPU minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from against_trl_ours import steps_of
from evenhand.rollout import choose
from evenhand.training.forward import Forward
from evenhand.training.listener import Listener
from evenhand.training.loop import Trainer
from evenhand.training.recipes import load_recipe
from evenhand.training.setup import new_trainer

LIMIT = 0.15
QUICKSTART = Path(__file__).resolve().parent.parent / "recipes/quickstart.toml"
GROWTH = {
    "rollouts": ["even:2:2:50", "even:4:2:50", "even:8:2:50", "even:16:2:50"],
    "searches": ["even:4:0:50", "even:4:1:50", "even:4:2:50", "even:4:4:50"],
    "observation": ["even:4:2:50", "even:4:2:110", "even:4:2:230", "even:4:2:470"],
}


class Clock(Listener):
    """Seconds of each step, and of the named parts of it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._parts: dict[str, float] = {}
        self._began = 0.0

    def started(self, *_: Any) -> None:
        self._parts, self._began = {}, time.process_time()

    def stepped(self, *_: Any) -> None:
        self.steps.append({**self._parts, "step": time.process_time() - self._began})
        self._parts, self._began = {}, time.process_time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + time.process_time() - began


def watched(clock: Clock, owner: Any, method: str, name: str) -> None:
    """Put a clock around a method."""
    plain = getattr(owner, method)

    def timed(*arguments: Any, **keywords: Any) -> Any:
        with clock.part(name):
            return plain(*arguments, **keywords)

    setattr(owner, method, timed)


def watch(trainer: Trainer, clock: Clock) -> None:
    model, optimizer = trainer._parts.loaded.model, trainer._parts.trained.optimizer
    running = ExitStack()

    def begin(*_: Any) -> None:
        name = "forward" if torch.is_grad_enabled() else "sampling"
        running.enter_context(clock.part(name))

    # Hooks rather than another `forward`, whose signature the sampler looks at.
    model.register_forward_pre_hook(begin)
    model.register_forward_hook(lambda *_: running.close())
    watched(clock, choose, "softmax_parts", "softmax")
    watched(clock, Forward, "_outputs", "softmax")
    watched(clock, torch.Tensor, "backward", "backward")
    watched(clock, optimizer, "step", "optimiser")
    watched(clock, torch.nn.utils, "clip_grad_norm_", "optimiser")


def overhead(steps: int) -> float:
    settings = [f"steps={steps + 2}", "evaluation.at_start=false", "evaluation.every=none",
                "evaluation.questions=1", "data.world.evaluate_questions=1"]  # fmt: skip
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(load_recipe(QUICKSTART, settings), Path(folder, "run"), clock)
        watch(trainer, clock)
        try:
            trainer.run()
        finally:
            trainer.close()
    # The first step pays for what is made once; the last one ends with an evaluation.
    found = clock.steps[1:-1]
    parts = ("sampling", "forward", "softmax", "backward", "optimiser")
    shares = [1 - sum(step.get(part, 0.0) for part in parts) / step["step"] for step in found]
    strict = [share + step["softmax"] / step["step"]
              for share, step in zip(shares, found, strict=True)]  # fmt: skip
    print(f"quickstart: {statistics.median(step['step'] for step in found):.2f} s a step, median "
          f"of {len(found)}; " + ", ".join(
              f"{part} {statistics.median(step.get(part, 0.0) for step in found):.2f}"
              for part in parts))  # fmt: skip
    share = statistics.median(shares)
    print(f"overhead {share:.1%} [{min(shares):.1%}, {max(shares):.1%}], to be below {LIMIT:.0%}; "
          f"{statistics.median(strict):.1%} with the softmax")  # fmt: skip
    return share


def growth() -> list[dict[str, Any]]:
    """Print a table: what changes, seconds of rollouts and training, and a token's share."""
    known: dict[str, dict[str, Any]] = {}
    print("32 rollouts, 2 searches, observations of 60 tokens, but for")
    print("                    tokens  sampled  rollouts s  training s  ms/sampled  ms/token")
    rows = []
    for name, workloads in GROWTH.items():
        for at in workloads:
            prompts, searches, words = map(int, at.split(":")[1:])
            value = {"rollouts": prompts * 8, "searches": searches, "observation": words + 10}[name]
            step = known[at] = known.get(at) or steps_of(at, 1)[0]
            rows.append({"what": name, "value": value, **step})
            print(f"{name:12s} {value:5d} {step['tokens']:7d}  {step['trained']:7d} "
                  f"{step['rollouts']:11.2f} {step['training']:11.2f} "
                  f"{1e3 * step['rollouts'] / step['trained']:11.2f} "
                  f"{1e3 * step['training'] / step['tokens']:9.2f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    share = overhead(arguments.steps)
    rows = [] if arguments.no_growth else growth()
    if arguments.json:
        arguments.json.write_text(json.dumps({"overhead": share, "growth": rows}, indent=1) + "\n")
    sys.exit(0 if share < LIMIT else 1)


if __name__ == "__main__":
    main()
