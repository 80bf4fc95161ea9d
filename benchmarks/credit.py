"""Cost of credit: arrays, trajectory objects, growth, and a file of 100,000 rollouts.

    python benchmarks/credit.py            # everything; about two minutes
    python benchmarks/credit.py --quick    # arrays and objects only

Times are medians of CPU seconds in this process (one thread), so that neighbours on the machine do
not count; ratios come from the same run. (The growth from 25,600 to 256,000 rollouts is for
information: those arrays leave the caches, which neighbours on the machine share.) The loop
implementation is the same formulas on the same segments in plain Python and numpy scalars.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from evenhand.credit import BridgeSettings, CreditInputs, CreditRule, gather, get_estimator
from evenhand.trajectory import Kind, Segment, Source, StopReason, Trajectory, write_trajectories
from evenhand.trajectory.protocol import Document

RUNS = 15
GROUP = 5
ROLLOUTS = 2560
SEGMENTS = 3
BUDGET_ARRAYS = 0.047
BUDGET_OBJECTS = 0.5
WORDS = ("north", "river", "castle", "who", "wrote", "born", "film", "director", "city", "year")


def median_seconds(work: Callable[[], object], runs: int = RUNS) -> float:
    work()
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def random_inputs(rollouts: int, seed: int = 0) -> CreditInputs:
    """A batch like the paper's: groups of 5, three segments a rollout."""
    generator = np.random.default_rng(seed)
    owner = np.repeat(np.arange(rollouts), SEGMENTS)
    answer = np.tile(np.arange(SEGMENTS) == SEGMENTS - 1, rollouts)
    score = generator.choice([0.0, 1 / 3, 2 / 3, 1.0], size=len(owner))
    return CreditInputs(
        rewards=generator.choice([0.0, 0.4, 1.0], size=rollouts),
        group=np.arange(rollouts) // GROUP,
        owner=owner,
        is_answer=answer,
        n_tokens=generator.integers(20, 300, size=len(owner)),
        stratum=generator.integers(0, 4, size=rollouts),
        step_score=np.where(answer, 0.0, score),
    )


def loop_calibadv(inputs: CreditInputs) -> list[float]:
    """The formulas of calibadv, trajectory by trajectory and segment by segment."""
    rewards, group = np.asarray(inputs.rewards).tolist(), np.asarray(inputs.group).tolist()
    owner, answer = np.asarray(inputs.owner).tolist(), np.asarray(inputs.is_answer).tolist()
    tokens, score = np.asarray(inputs.n_tokens).tolist(), np.asarray(inputs.step_score).tolist()
    members: dict[int, list[float]] = defaultdict(list)
    for reward, label in zip(rewards, group, strict=True):
        members[label].append(reward)
    outcome = []
    for reward, label in zip(rewards, group, strict=True):
        rows = members[label]
        mean = sum(rows) / len(rows)
        if max(rows) == min(rows):
            outcome.append(0.0)
            continue
        deviation = math.sqrt(sum((row - mean) ** 2 for row in rows) / (len(rows) - 1))
        outcome.append((reward - mean) / (deviation + 1e-6))
    result = []
    positive: dict[int, float] = defaultdict(float)
    negative: dict[int, float] = defaultdict(float)
    for at, index in enumerate(owner):
        value = outcome[index]
        if answer[at]:
            if value > 0:
                positive[group[index]] += tokens[at] * value
            else:
                negative[group[index]] -= tokens[at] * value
        elif value < 0:
            value *= 1 - score[at]
        result.append(value)
    for at, index in enumerate(owner):
        if answer[at]:
            p, n = positive[group[index]], negative[group[index]]
            if p == 0 or n == 0:
                result[at] = 0.0
            elif result[at] > 0:
                result[at] *= n / p
    return result


def random_trajectories(rollouts: int, seed: int = 0) -> list[Trajectory]:
    """Rollouts as objects: two searches of three documents and an answer."""
    generator = np.random.default_rng(seed)
    made = []
    for index in range(rollouts):
        segments: list[Segment] = []
        for _ in range(SEGMENTS - 1):
            think = " ".join(generator.choice(WORDS, size=12))
            text = f"<think>{think}</think>\n<search>{think[:20]}</search>"
            ids = generator.integers(0, 12, size=3).tolist()
            documents = tuple(
                Document(f"{index // GROUP}-{i}", f"Title {i}", "some text of a passage " * 8)
                for i in ids
            )
            segments.append(Segment(Source.POLICY, Kind.SEARCH, text, 40, query=think[:20]))
            segments.append(
                Segment(Source.ENVIRONMENT, Kind.INFORMATION, "…", 200, documents=documents)
            )
        text = "<think>so</think>\n<answer>x</answer>"
        segments.append(Segment(Source.POLICY, Kind.ANSWER, text, int(generator.integers(8, 90))))
        made.append(
            Trajectory(
                id=f"r{index}",
                group=f"g{index // GROUP}",
                question="who wrote it?",
                golden_answers=("x",),
                reward=float(generator.choice([0.0, 0.4, 1.0])),
                format_ok=True,
                stop_reason=StopReason.ANSWERED,
                segments=tuple(segments),
            )
        )
    return made


def arrays() -> dict[str, float]:
    calibadv = get_estimator("calibadv")
    inputs = random_inputs(ROLLOUTS)
    loop = np.array(loop_calibadv(inputs))
    np.testing.assert_allclose(calibadv(inputs), loop, rtol=1e-9, atol=1e-12)
    ours = median_seconds(lambda: calibadv(inputs))
    plain = median_seconds(lambda: loop_calibadv(inputs))
    growth = {}
    for rollouts in (2_560, 25_600):
        small, large = random_inputs(rollouts), random_inputs(10 * rollouts)
        ratios = [
            median_seconds(lambda: calibadv(large), 5) / median_seconds(lambda: calibadv(small), 5)  # noqa: B023
            for _ in range(5)
        ]
        growth[f"growth_10x_{rollouts}"] = statistics.median(ratios)
    return {
        "arrays_ms": 1e3 * ours,
        "loop_ms": 1e3 * plain,
        "loop_over_ours": plain / ours,
        **growth,
    }


def objects() -> dict[str, float]:
    trajectories = random_trajectories(ROLLOUTS)
    rule = CreditRule("calibadv")
    seconds = median_seconds(lambda: gather(trajectories, BridgeSettings()).advantage(rule))
    many = random_trajectories(10 * ROLLOUTS)
    ratio = median_seconds(lambda: gather(many, BridgeSettings()).advantage(rule), 3) / seconds
    return {"objects_ms": 1e3 * seconds, "objects_growth_10x": ratio}


def stream(rollouts: int) -> dict[str, float]:
    """Time and peak memory of `evenhand credit` on a file, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        write_trajectories(source, random_trajectories(rollouts))
        size = source.stat().st_size / 2**20
        command = [sys.executable, "-m", "evenhand", "credit", str(source), "-e", "calibadv",
                   "-o", str(target)]  # fmt: skip
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    return {"stream_rollouts": rollouts, "stream_file_mib": size, "stream_s": seconds,
            "stream_peak_mib": peak}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="leave out the file of 100,000")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    found = {**arrays(), **objects()}
    if not options.quick:
        found |= stream(100_000)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:22s} {value:12.2f}")
    passed = (
        found["arrays_ms"] <= 1e3 * BUDGET_ARRAYS
        and found["objects_ms"] <= 1e3 * BUDGET_OBJECTS
        and found[f"growth_10x_{ROLLOUTS}"] <= 12
        and found["objects_growth_10x"] <= 12
        and found.get("stream_peak_mib", 0) <= 1536
    )
    print("within the budgets" if passed else "OUTSIDE THE BUDGETS", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
