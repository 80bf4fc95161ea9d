#!/usr/bin/env python3
"""Check evenhand on a GPU: parity with the CPU, training in bf16, tokens a second.

Called by scripts/gpu_check.sh; needs the project's sources, torch and transformers, no network.

    python scripts/gpu_check.py --out DIR [--device cuda] [--model FOLDER] [--small]

The toy policy comes with the sources. SmolLM2 is checked from FOLDER if it was brought along, else
a random model of its shape stands in: parity and speed do not depend on what the weights say. A
table goes to the screen, everything to DIR/gpu_check.json. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "typer",
          "rich", "rapidfuzz", "jinja2", "bm25s", "Stemmer")  # fmt: skip
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 2048}  # fmt: skip

FLOAT32_MAX, BF16_MEAN, BF16_MAX = 2e-3, 0.1, 2.5
"""Largest and mean distance of log-probabilities (nats). Float32 differs by the order of sums. Of
bf16 only faults are to be found, such as a shifted position, which costs whole nats on average."""


@dataclass
class Report:
    """What was found so far."""

    machine: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def check(self, name: str, value: float, limit: str, is_good: bool) -> None:
        self.checks.append({"name": name, "value": value, "limit": limit, "ok": bool(is_good)})
        print(f"{'ok  ' if is_good else 'FAIL'}  {name:<46} {value:>12.5g}   {limit}", flush=True)

    def figure(self, name: str, value: float) -> None:
        self.figures[name] = value
        print(f"      {name:<46} {value:>12.5g}", flush=True)


def length_reward(trajectory: Any) -> float:
    """Return a reward that differs between rollouts of any policy: a number made of its tokens."""
    ids = [int(i) for s in trajectory.segments if s.is_policy for i in s.token_ids]
    return sum(ids) % 7 / 7


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check evenhand on a GPU.")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_check")))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="SmolLM2, if it is there")
    parser.add_argument("--minutes", type=float, default=7.5, help="no new part begins after this")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does the script work?")
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: not installed: {', '.join(missing)}; see WHEELS in scripts/gpu_check.sh",
              file=sys.stderr)  # fmt: skip
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu_check."))
    try:
        return run(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run(options: argparse.Namespace, work: Path) -> int:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    began = time.perf_counter()
    report = Report(machine=describe(options.device))
    print(json.dumps(report.machine), flush=True)
    if report.machine["device"] is None:
        print(f"error: torch sees no device {options.device!r}", file=sys.stderr)
        return 1
    model, label = big_model(options, work)
    small = options.small
    parts: list[tuple[str, Callable[[], None]]] = [
        ("toy parity", lambda: parity(report, "toy", "toy", options.device, 2 if small else 16)),
        ("toy training", lambda: training(report, "toy", toy_recipe(options), work)),
        (
            f"{label} parity",
            lambda: parity(report, label, model, options.device, 1 if small else 4),
        ),
        (f"{label} training", lambda: training(report, label, big_recipe(options, model), work)),
    ]
    for name, part in parts:
        if time.perf_counter() - began > 60 * options.minutes:
            report.check(f"{name}: begun in time", 0, f"within {options.minutes} minutes", False)
            continue
        with seconds(report, name):
            try:
                part()
            except Exception as error:  # whatever breaks is a finding, and the rest still counts
                print(f"      {type(error).__name__}: {error}", flush=True)
                report.check(f"{name}: runs", 0, "no error", False)
    is_good = all(check["ok"] for check in report.checks)
    result = {**asdict(report), "ok": is_good, "seconds": time.perf_counter() - began}
    (options.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'all checks hold' if is_good else 'SOME CHECKS FAIL'} after {result['seconds']:.0f} s;"
          f" figures: {options.out / 'gpu_check.json'}")  # fmt: skip
    return 0 if is_good else 1


class seconds:  # noqa: N801 reads as a function
    """Note how long a part took."""

    def __init__(self, report: Report, name: str) -> None:
        self.report, self.name = report, name

    def __enter__(self) -> None:
        print(f"-- {self.name}", flush=True)
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.report.figure(f"{self.name}: seconds", time.perf_counter() - self.began)


def describe(device: str) -> dict[str, Any]:
    import platform

    import torch
    import transformers

    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__,
                             "python": platform.python_version(), "cpus": os.cpu_count(),
                             "device": None}  # fmt: skip
    if torch.device(device).type != "cuda":
        return found | {"device": device}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30),
                  "cuda": torch.version.cuda, "bf16": torch.cuda.is_bf16_supported()}  # fmt: skip
    return found


# --- models and recipes --------------------------------------------------------------------------


def big_model(options: argparse.Namespace, work: Path) -> tuple[str, str]:
    """Return SmolLM2's folder, or that of a random model of its shape with the toy tokenizer."""
    if not options.small and (options.model / "config.json").is_file():
        return str(options.model), "smollm2"
    import torch
    import transformers

    from evenhand.world import build_fast_tokenizer

    tokenizer = build_fast_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **(TINY if options.small else SHAPE), tie_word_embeddings=True, rope_theta=1e5,
        max_position_embeddings=2048, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    folder = work / "random"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), "random of SmolLM2's shape"


def toy_recipe(options: argparse.Namespace) -> Any:
    sizes = (2, 2, 4, 4) if options.small else (5, 32, 8, 100)
    return world_recipe(options, "toy", sizes, [
        "environment.template=evenhand.world:template", "credit.estimator=stratified_calibadv",
        "environment.limits.max_turn_tokens=32", "optimizer.lr=3e-4",
    ])  # fmt: skip


def big_recipe(options: argparse.Namespace, model: str) -> Any:
    sizes = (2, 2, 2, 2) if options.small else (4, 8, 8, 16)
    turn = 8 if options.small else 64
    is_real = Path(model) == options.model
    template = "few-shot" if is_real else "evenhand.world:template"
    return world_recipe(options, model, sizes, [
        f"environment.template={template}", f"environment.limits.max_turn_tokens={turn}",
        "environment.limits.retry_truncated=true", "environment.limits.max_invalid=3",
        "optimizer.lr=1e-5",
    ])  # fmt: skip


def world_recipe(
    options: argparse.Namespace, model: str, sizes: tuple[int, int, int, int], settings: list[str]
) -> Any:
    """Return a recipe over the toy world; `sizes` are steps, questions, group size, evaluation."""
    from evenhand.training.recipes import load_recipe

    steps, questions, group_size, evaluated = sizes
    size = 60 if options.small else 300
    own = [] if model == "toy" and not options.small else ["reward.name=gpu_check:length_reward"]
    return load_recipe(None, [
        f"model.path={model}", f"model.device={options.device}", "model.precision=bf16",
        f"steps={steps}", f"rollout.questions={questions}", f"rollout.group_size={group_size}",
        f"evaluation.questions={evaluated}", "evaluation.at_start=false", "retrieval.documents=2",
        f"data.world.size={size}", f"data.world.evaluate_size={size}", "data.world.questions=200",
        f"data.world.evaluate_questions={max(evaluated, 10)}", "tracking.tensorboard=off",
        "environment.limits.max_observation_tokens=120", "environment.limits.max_context=768",
        "environment.limits.max_searches=3", "loss.micro_tokens=32768", *own, *settings,
    ])  # fmt: skip


# --- parts ---------------------------------------------------------------------------------------


def parity(report: Report, label: str, model: str, device: str, questions: int) -> None:
    """Compare log-probabilities of one batch of rollouts: CPU float32 against the device."""
    import numpy as np
    import torch

    from evenhand.training.config import ModelSection
    from evenhand.training.forward import Forward
    from evenhand.training.models import load_model

    torch.backends.cuda.matmul.allow_tf32 = False
    reference = load_model(ModelSection(path=model, device="cpu", precision="float32"))
    rows = sampled(reference, questions)
    report.figure(f"{label} parity: tokens compared", sum(len(row.targets) for row in rows))
    forward = Forward(reference.model, reference.device)
    expected = np.concatenate(forward.logprobs(rows, 4096))
    for precision in ("float32", "bf16"):
        loaded = load_model(ModelSection(path=model, device=device, precision=precision))  # type: ignore[arg-type]
        forward = Forward(loaded.model, loaded.device, 1.0, loaded.autocast)
        gap = np.abs(np.concatenate(forward.logprobs(rows, 4096)) - expected)
        compare(report, f"{label}: {precision} trainer, CPU float32", gap, precision)
        own_rows = sampled(loaded, questions)
        recorded = np.concatenate([row.targets.sampled for row in own_rows])
        gap = np.abs(np.concatenate(forward.logprobs(own_rows, 4096)) - recorded)
        compare(report, f"{label}: {precision} trainer, its sampler", gap, precision)


def compare(report: Report, name: str, gap: Any, precision: str) -> None:
    most, mean = (
        (FLOAT32_MAX, FLOAT32_MAX / 20) if precision == "float32" else (BF16_MAX, BF16_MEAN)
    )
    report.check(f"{name}: largest gap", float(gap.max()), f"<= {most:g}", gap.max() <= most)
    report.check(f"{name}: mean gap", float(gap.mean()), f"<= {mean:g}", gap.mean() <= mean)


def sampled(loaded: Any, questions: int) -> list[Any]:
    """Return the rows of rollouts in the toy world."""
    from evenhand.rollout import Sampling, SearchEnvironment, collect
    from evenhand.rollout.transformers import TransformersPolicy
    from evenhand.training.batching import rows_of
    from evenhand.world import LIMITS, build_retriever, generate_world, template

    world = generate_world(7, size=60, split="eval")
    environment = SearchEnvironment(
        retriever=build_retriever(world), k=2, template=template,
        limits=replace(LIMITS, retry_truncated=True, max_invalid=2, max_turn_tokens=24),
    )  # fmt: skip
    policy = TransformersPolicy(loaded.model, loaded.tokenizer)
    with loaded.autocast():
        rollouts = collect(world.questions(questions, seed=3), policy, environment, group_size=4,
                           sampling=Sampling(seed=1))  # fmt: skip
    scored = [
        replace(r, reward=0.0, segments=tuple(replace(s, advantage=0.0) for s in r.segments))
        for r in rollouts
    ]
    return rows_of(scored)


def training(report: Report, label: str, recipe: Any, work: Path) -> None:
    """Train some steps and look at the figures that the run wrote."""
    import numpy as np
    import torch

    from evenhand.training.setup import new_trainer

    run = work / f"run-{len(list(work.iterdir()))}"
    if recipe.model.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    trainer = new_trainer(recipe, run)
    try:
        trainer.run()
    finally:
        trainer.close()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    norms = np.array([row["actor/grad_norm"] for row in steps])
    name = f"{label} training, bf16"
    report.check(f"{name}: steps", len(steps), f"= {recipe.steps}", len(steps) == recipe.steps)
    report.check(f"{name}: gradient norm, mean", float(norms.mean()), "finite, > 0",
                 bool(np.isfinite(norms).all() and norms.max() > 0))  # fmt: skip
    skipped = sum(row["actor/skipped_updates"] for row in steps)
    report.check(f"{name}: dropped updates", skipped, "= 0", skipped == 0)
    gap = max(row["actor/sampler_gap"] for row in steps)
    report.check(f"{name}: gap to the sampler", gap, f"<= {BF16_MEAN}", gap <= BF16_MEAN)
    tokens = [trained_tokens(path) for path in sorted((run / "trajectories").iterdir())]
    # The first step pays for what the device does once.
    later = range(1, len(steps)) if len(steps) > 1 else range(len(steps))
    update = [row["timing_s/update_actor"] for row in steps]
    speed = {
        "sampled tokens a second": [steps[at]["perf/sampled_tokens_per_s"] for at in later],
        "trained tokens a second": [tokens[at] / update[at] for at in later],
        "seconds a step": [steps[at]["timing_s/gen"] + update[at] for at in later],
    }
    for what, values in speed.items():
        report.figure(f"{name}: {what}", float(np.median(values)))
    with suppress(KeyError):
        report.figure(f"{name}: exact match after", rows[-1]["eval/exact_match"])
    if recipe.model.device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated() / 2**30
        report.figure(f"{name}: peak memory, GiB", peak)


def trained_tokens(path: Path) -> int:
    """Return the tokens of all rows that went through forward and backward pass."""
    from evenhand.trajectory import read_trajectories

    return sum(
        sum(segment.n_tokens for segment in trajectory.segments)
        for trajectory in read_trajectories(path)
        if any(segment.advantage for segment in trajectory.segments)
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
