"""A training step of evenhand against one of TRL's `GRPOTrainer`, on one CPU thread.

    make bench-trl                                  # makes TRL's environment first
    python benchmarks/against_trl.py --rounds 5     # with .venv-trl in place
    python benchmarks/against_trl.py --workload long --rounds 1

Each round runs two processes after each other, TRL's in its own environment and evenhand's, and
each makes one whole training step of 128 rollouts (`against_trl_workload.py`) with the same random
Llama of 2.16 million parameters in float32. Where turns end is forced through the logits; all other
tokens are sampled. Both sides have prompts, turns and observations of the same number of tokens,
and every sampled token has credit (GRPO, mean over tokens, AdamW, clipping at 1); the script checks
that.
The first step of a process takes no longer than later ones, so it is the one that counts.

What differs. TRL renders and parses chat messages through its tokenizer's template, evenhand bare
text with tags. TRL's rollouts are `_generate`; its training is the step without generation and
scoring. evenhand's rollouts are `collect` and the reward; its training is all the rest: credit,
batches, loss, optimiser, and the files of the run, which TRL does not write here. TRL has bf16
and gradient checkpointing off, because its defaults are several times slower on a CPU,
micro-batches of 16 rollouts, and `generate` with its dynamic cache. evenhand has its defaults.

Seconds are CPU seconds of the process, so other work on the machine disturbs little. Exit code 1 if
the median over rounds of a ratio is below its threshold: rollouts 1.6, training 2.2, step 1.9. The
thresholds hold for the workload `short`; for `long` the ratio of the step is reported (goal 2.5).
Takes about 2 CPU minutes a round for `short` and 10 for `long`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from against_trl_workload import workload

HERE = Path(__file__).resolve().parent
PHASES = ("rollouts", "training", "step")
THRESHOLDS = {"rollouts": 1.6, "training": 2.2, "step": 1.9}
GOAL_LONG = 2.5


def one_step(python: str, script: str, name: str) -> dict[str, Any]:
    """Run a side in a process of its own; return what it measured, once the counts are checked."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [python, "-W", "ignore", str(HERE / script), name, "1"],
        env={**os.environ, **threads, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stderr[-2000:]}")
    (step,) = json.loads(done.stdout.splitlines()[-1])
    plan = workload(name)
    expected = {"tokens": plan.tokens, "trained": plan.sampled, "credited": plan.sampled}
    if {key: step[key] for key in expected} != expected:
        sys.exit(f"{script} did {step}, and the workload is {expected}")
    return step


def measure(name: str, rounds: int, trl: str) -> dict[str, Any]:
    found = []
    for number in range(1, rounds + 1):
        theirs = one_step(trl, "against_trl_theirs.py", name)
        ours = one_step(sys.executable, "against_trl_ours.py", name)
        ratios = {phase: theirs[phase] / ours[phase] for phase in PHASES}
        found.append({"theirs": theirs, "ours": ours, "ratios": ratios})
        line = ", ".join(
            f"{phase} {theirs[phase]:.1f} / {ours[phase]:.1f} s = {ratios[phase]:.2f}"
            for phase in PHASES
        )
        print(f"{name} round {number}: {line}", file=sys.stderr, flush=True)
    return {"workload": name, "rounds": found}


def summary(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    table = {}
    for phase in PHASES:
        ratios = [entry["ratios"][phase] for entry in result["rounds"]]
        table[phase] = {
            "theirs_s": statistics.median(entry["theirs"][phase] for entry in result["rounds"]),
            "ours_s": statistics.median(entry["ours"][phase] for entry in result["rounds"]),
            "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
        }  # fmt: skip
    return table


def report(name: str, table: dict[str, dict[str, float]]) -> bool:
    """Print the table; return whether the thresholds are kept."""
    plan, kept = workload(name), True
    print(f"{name}: {plan.sampled} tokens sampled, {plan.tokens} in all, {plan.searches} searches")
    for phase, line in table.items():
        print(
            f"  {phase:8s} TRL {line['theirs_s']:7.2f} s, evenhand {line['ours_s']:7.2f} s, "
            f"ratio {line['ratio']:.2f} [{line['lowest']:.2f}, {line['highest']:.2f}]",
            end="",
        )
        if name == "short":
            kept &= line["ratio"] >= THRESHOLDS[phase]
            print(f", at least {THRESHOLDS[phase]}")
        else:
            print(f", goal {GOAL_LONG}" if phase == "step" else "")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long-rounds", type=int, default=1)
    parser.add_argument("--workload", choices=("short", "long"), help="default: both")
    parser.add_argument("--trl", default=str(HERE.parent / ".venv-trl/bin/python"))
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    if not Path(arguments.trl).exists():
        sys.exit(f"{arguments.trl} is missing; `make bench-trl` makes TRL's environment")
    results, kept = [], True
    for name in (arguments.workload,) if arguments.workload else ("short", "long"):
        is_extra = name == "long" and arguments.workload is None
        result = measure(name, arguments.long_rounds if is_extra else arguments.rounds,
                         arguments.trl)  # fmt: skip
        result["summary"] = summary(result)
        kept &= report(name, result["summary"])
        results.append(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
