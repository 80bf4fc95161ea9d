"""Share of the diagnostics in the CPU time of a training step, on the quickstart recipe.

    python benchmarks/diagnostics.py            # six steps of 16 x 8 rollouts; about a minute

A step is everything from collecting its rollouts to writing them, timed between two steps of a
real run (CPU seconds of this process, one thread, so that neighbours on the machine do not count).
The diagnostics are the figures of a step (`step_metrics`) and the alarms, computed again on the
rollouts that the step has left. The reference perplexity and the divergence from the reference are
not among them: they exist only where the loss computes them. Both sides are medians; the first
step, which warms caches up, is left out. Exit code 1 if the share is 3 % or more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from evenhand.credit import gather
from evenhand.diagnostics.alarms import Alarms
from evenhand.training.listener import Listener
from evenhand.training.metrics import step_metrics
from evenhand.training.recipes import load_recipe
from evenhand.training.setup import new_trainer
from evenhand.trajectory import read_trajectories

BUDGET = 0.03
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.toml"


class Clock(Listener):
    """CPU seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.process_time()

    def started(self, *_: object) -> None:
        self._last = time.process_time()

    def stepped(self, progress: object, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        now = time.process_time()
        self.seconds.append(now - self._last)
        self._last = now


def training_steps(folder: Path, steps: int) -> list[float]:
    """Train; return the CPU seconds of each step."""
    settings = [f"steps={steps}", "data.evaluate=none", "tracking.tensorboard=off"]
    clock = Clock()
    trainer = new_trainer(load_recipe(RECIPE, settings), folder, clock)
    trainer.run()
    trainer.close()
    return clock.seconds


def diagnostics(folder: Path, runs: int = 5) -> list[float]:
    """Return the CPU seconds of figures and alarms of each step that the run has left."""
    recipe = load_recipe(folder / "recipe.toml")
    rule = recipe.credit.rule()
    alarms = Alarms(recipe.alarms)
    found = []
    for step, file in enumerate(sorted((folder / "trajectories").iterdir()), start=1):
        rollouts = list(read_trajectories(file))
        batch = gather(rollouts, rule.bridge)
        advantage = batch.advantage(rule)
        times = []
        for _ in range(runs):
            start = time.process_time()
            figures = step_metrics(rollouts, batch, advantage, rule.bridge.evidence.threshold)
            times.append(time.process_time() - start)
        start = time.process_time()
        alarms.update(step, figures)
        found.append(statistics.median(times) + time.process_time() - start)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        steps = statistics.median(training_steps(folder, options.steps)[1:])
        own = statistics.median(diagnostics(folder)[1:])
    found = {"step_ms": 1e3 * steps, "diagnostics_ms": 1e3 * own, "share": own / steps}
    if options.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"{key:16s} {value:10.4g}")
    passed = found["share"] < BUDGET
    print("within the budget" if passed else "OUTSIDE THE BUDGET", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
