"""Does the alarm for collapse fire in time, and stay silent on healthy runs?

    python benchmarks/alarms.py                       # five collapsing and five healthy runs
    python benchmarks/alarms.py --only collapse --seeds 3,4
    python benchmarks/alarms.py --runs runs/mine ...  # runs that are there already

Collapsing runs are the recipe toy-calibadv whose negative credit on answers outweighs the positive
four times (`balance = 0.25` with `rescale = "negative"`), at the recipe's learning rate, with four
questions a step. Healthy runs are the quickstart. A run is read again from the rollouts it has
left, under the default rules, so that runs of any version can be judged.

Peak is the highest exact match of the greedy evaluations, half the first evaluation after it with
at most half of that. Exit code 1 if fewer than four fifths of the runs that fall to half of their
peak are warned of before, or if a healthy run is warned of.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.credit import gather
from evenhand.diagnostics.alarms import Alarm, replay
from evenhand.diagnostics.language import gather_language
from evenhand.diagnostics.steps import REPLACED, Figures, series
from evenhand.training.recipes import load_recipe
from evenhand.trajectory import read_trajectories

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
COMMON = ("tracking.tensorboard=off", "checkpoint.every=1000")
KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "collapse": (
        "toy-calibadv.toml",
        ("credit.settings.balance=0.25", "credit.settings.rescale=negative",
         "rollout.questions=4", "evaluation.every=5", "evaluation.questions=50", "steps=60"),
    ),
    "healthy": (
        "quickstart.toml", ("evaluation.every=20", "evaluation.questions=200", "steps=40")
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happened in a run; steps are `None` where it did not happen."""

    run: Path
    steps: int
    peak: float
    peak_step: int
    half_step: int | None
    last: float
    alarms: list[Alarm]

    @property
    def collapse(self) -> Alarm | None:
        return next((alarm for alarm in self.alarms if alarm.name == "collapse"), None)

    @property
    def lead(self) -> int | None:
        """Steps from the alarm to half of the peak; negative if it came late."""
        if self.half_step is None or self.collapse is None:
            return None
        return self.half_step - self.collapse.step


def train(kind: str, seed: int, folder: Path) -> Path:
    """Train a run of that kind, unless it is there already; return its folder."""
    from evenhand.training.setup import new_trainer, resumed_trainer

    run = folder / kind / f"seed-{seed}"
    file, settings = KINDS[kind]
    recipe = load_recipe(RECIPES / file, [*COMMON, *settings, f"seed={seed}"])
    is_there = (run / "recipe.toml").is_file()
    trainer = resumed_trainer(run) if is_there else new_trainer(recipe, run)
    try:
        trainer.run()
    finally:
        trainer.close()
    return run


def judge(run: Path) -> Verdict:
    """Replay the alarms on what a run has left."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines)}
    exact = {step: row["eval/exact_match"] for step, row in rows.items()
             if "eval/exact_match" in row}  # fmt: skip
    peak_step = max(exact, key=lambda step: exact[step])
    halves = [step for step, value in exact.items()
              if step > peak_step and value <= exact[peak_step] / 2]  # fmt: skip
    return Verdict(
        run=run,
        steps=max(rows),
        peak=exact[peak_step],
        peak_step=peak_step,
        half_step=min(halves, default=None),
        last=exact[max(exact)],
        alarms=replay(figures_of(run)),
    )


def figures_of(run: Path) -> Iterator[Figures]:
    """Yield the figures that alarms look at, from the rollouts of each step."""
    rule = load_recipe(run / "recipe.toml").credit.rule()
    for file in sorted((run / "trajectories").iterdir()):
        rollouts = list(read_trajectories(file))
        advantage = [s.advantage for t in rollouts for s in t.segments if s.is_policy]
        replaced = [bool(t.metadata.get(REPLACED)) for t in rollouts]
        yield from series(
            gather(rollouts, rule.bridge),
            gather_language(rollouts),
            np.array(advantage, dtype=np.float64),
            np.array(replaced),
        )


def table(verdicts: Sequence[Verdict]) -> list[str]:
    lines = [
        "| run | steps | peak EM (step) | half of it at | last EM | collapse alarm at | lead | "
        "other alarms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        others = [f"{a.name} {a.step}" for a in verdict.alarms if a is not verdict.collapse]
        cells: list[Any] = [
            "/".join(verdict.run.parts[-2:]),
            verdict.steps,
            f"{verdict.peak:.2f} ({verdict.peak_step})",
            verdict.half_step,
            f"{verdict.last:.2f}",
            verdict.collapse.step if verdict.collapse else None,
            verdict.lead,
            ", ".join(others),
        ]
        shown = ("-" if cell is None or cell == "" else str(cell) for cell in cells)
        lines.append(f"| {' | '.join(shown)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=tuple(KINDS), help="one kind of run")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--out", type=Path, default=Path("runs/alarms"))
    parser.add_argument("--runs", type=Path, nargs="+", help="judge these and train nothing")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.runs:
        verdicts = [judge(run) for run in options.runs]
        print("\n".join(table(verdicts)))
        return 0
    passed = True
    for kind in [options.only] if options.only else KINDS:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        verdicts = [judge(train(kind, seed, options.out)) for seed in seeds]
        print("\n".join(["", kind, "", *table(verdicts)]))
        for verdict in verdicts:
            if verdict.collapse:
                print(f"{verdict.run}: {verdict.collapse.message}")
        if kind == "healthy":
            passed &= not any(verdict.collapse for verdict in verdicts)
        else:
            fallen = [verdict for verdict in verdicts if verdict.half_step is not None]
            warned = [v for v in fallen if v.lead is not None and v.lead > 0]
            passed &= len(warned) >= 0.8 * len(fallen) > 0
    print("as required" if passed else "NOT AS REQUIRED", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
