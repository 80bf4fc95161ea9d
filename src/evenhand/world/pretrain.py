"""Supervised pre-training of the warm-start policy: a curriculum, seeded and resumable.

The data of a stage comes in pools, each from its own seed: a fresh world, or fresh drills. A
checkpoint lies between two pools, so a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evenhand import __version__
from evenhand.core.errors import ConfigError, require
from evenhand.core.files import atomic_write
from evenhand.task import Tokenizer, as_tokenizer
from evenhand.world.demonstrations import build_retriever
from evenhand.world.generator import DEFAULT_SHARES, QuestionKind, generate_world
from evenhand.world.names import NameSplit
from evenhand.world.policy import new_policy, save_policy
from evenhand.world.sequences import (
    LearningSequence,
    batches,
    copy_drill,
    demonstration,
    reading_drill,
)
from evenhand.world.skills import Skill
from evenhand.world.tokenizer import build_tokenizer

MANIFEST = "manifest.json"
_LOG, _POLICY = "log.jsonl", "policy"
_STATE, _LATEST, _PREVIOUS = "optimizer.safetensors", "checkpoint", "checkpoint.previous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the curriculum.

    Attributes:
        name: for the log.
        tokens: how many tokens it lasts, padding left out.
        copy: share of pools that are copy drills.
        most_facts: facts of a copy drill at most.
        reading: share of sequences of the other pools that are reading drills.
        skills: weights of the demonstrators.
        shares: kinds of the questions that they play.
        learning_rate: at its start and end; it moves between them on a half cosine.
        schedule_tokens: after how many tokens that end would be reached, if not at the end.
        batch_tokens: tokens of an optimiser step, padding included. Looking up emerges after a
            number of steps, so early steps are small.
    """

    name: str
    tokens: int
    copy: float = 0.0
    most_facts: int = 4
    reading: float = 0.0
    skills: Mapping[Skill, float] = field(default_factory=lambda: {Skill.SOLVER: 1.0})
    shares: Mapping[QuestionKind, float] = field(default_factory=lambda: dict(DEFAULT_SHARES))
    learning_rate: tuple[float, float] = (3e-3, 3e-3)
    schedule_tokens: int | None = None
    batch_tokens: int = 2500


CURRICULUM = (
    Stage(name="copy", tokens=240_000, copy=1.0, most_facts=8, batch_tokens=1200),
    Stage(
        name="read",
        tokens=700_000,
        copy=0.2,
        most_facts=8,
        reading=0.4,
        batch_tokens=1600,
        learning_rate=(2e-3, 2e-3),
    ),
    Stage(
        name="skills",
        tokens=1_545_549,
        schedule_tokens=2_000_000,
        copy=0.03,
        most_facts=8,
        reading=0.1,
        skills={Skill.SOLVER: 0.6, Skill.HASTY: 0.2, Skill.CLUMSY: 0.2},
        learning_rate=(2e-3, 8e-4),
    ),
    Stage(
        name="habits",
        tokens=800_000,
        skills={
            Skill.SOLVER: 0.12,
            Skill.HASTY: 0.70,
            Skill.CLUMSY: 0.15,
            Skill.GUESSER: 0.03,
        },
        shares={**DEFAULT_SHARES, QuestionKind.FAMOUS: 0.25},
        learning_rate=(8e-4, 5e-5),
    ),
)
"""From looking up a value to the habits of the warm start: skills first, their rarity last."""

_WORLD_SIZE = 300
_POOL = 250
_WARM_UP = 50


@dataclass(slots=True)
class Progress:
    """Where a run is: what a checkpoint holds besides weights and optimiser."""

    stage: int = 0
    pool: int = 0
    stage_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    cpu_seconds: float = 0.0


Log = Callable[[Mapping[str, Any]], None]
"""Gets one record a pool: stage, steps, tokens, loss, token accuracy, value accuracy, seconds."""


def make_pool(
    stage: Stage, seed: tuple[int, ...], *, tokenizer: Tokenizer
) -> list[LearningSequence]:
    """Return the sequences of one pool; they depend on stage and seed alone."""
    random = np.random.default_rng(seed)
    if random.random() < stage.copy:
        return [copy_drill(random, stage.most_facts) for _ in range(4 * _POOL)]
    world = generate_world(int(random.integers(2**31)), size=_WORLD_SIZE, split=NameSplit.PRETRAIN)
    retriever = build_retriever(world)
    skills = list(stage.skills)
    weights = np.array([stage.skills[skill] for skill in skills])
    drawn = random.choice(len(skills), size=_POOL, p=weights / weights.sum())
    questions = world.questions(_POOL, shares=stage.shares)
    out = []
    for question, at in zip(questions, drawn, strict=True):
        if random.random() < stage.reading:
            made = reading_drill(world, retriever=retriever, tokenizer=tokenizer, random=random)
        else:
            made = demonstration(
                question, skills[at], retriever=retriever, tokenizer=tokenizer, random=random
            )
        out.append(made)
    return out


def pretrain(
    out: Path,
    *,
    seed: int = 0,
    curriculum: tuple[Stage, ...] = CURRICULUM,
    checkpoint_seconds: float = 120.0,
    budget_seconds: float | None = None,
    log: Log = lambda _: None,
) -> Path:
    """Train a policy through a curriculum and return the folder that holds it.

    `out/checkpoint` always holds a whole policy, with the optimiser's state; a run that finds one
    there goes on from it. At the end `out/policy` gets the same without that state.

    Args:
        out: folder of the run; `log.jsonl` in it gets one line a pool.
        seed: of initial weights and data.
        curriculum: the stages.
        checkpoint_seconds: time between checkpoints.
        budget_seconds: stop after so much time, with a checkpoint; `None`: run to the end.
        log: is told how far it is.

    Raises:
        ConfigError: the checkpoint found belongs to another seed or curriculum.
    """
    torch = require("torch", "train", "pre-training the toy world's policy")
    out.mkdir(parents=True, exist_ok=True)
    policy = new_policy(seed=seed)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01
    )
    recipe = _recipe(seed, curriculum)
    progress = _resume(out, policy, optimizer, recipe)
    tokenizer = as_tokenizer(build_tokenizer())
    started = saved = time.monotonic()
    while progress.stage < len(curriculum):
        stage = curriculum[progress.stage]
        before = time.process_time()
        pool = make_pool(stage, (seed, progress.stage, progress.pool), tokenizer=tokenizer)
        making = time.process_time() - before
        random = np.random.default_rng([seed, progress.stage, progress.pool, 1])
        record = train_on(
            policy,
            optimizer,
            batches(pool, tokens=stage.batch_tokens, random=random),
            stage,
            progress,
        )
        progress.pool += 1
        progress.cpu_seconds += time.process_time() - before
        record.update(making=round(making, 2), cpu_seconds=round(progress.cpu_seconds, 1))
        _append(out / _LOG, record)
        log(record)
        if progress.stage_tokens >= stage.tokens:
            progress.stage, progress.pool, progress.stage_tokens = progress.stage + 1, 0, 0
        now = time.monotonic()
        spent = budget_seconds is not None and now - started > budget_seconds
        if now - saved > checkpoint_seconds or spent or progress.stage == len(curriculum):
            _save(out, policy, optimizer, progress, recipe)
            saved = now
        if spent:
            break
    if progress.stage < len(curriculum):
        return out / _LATEST
    shutil.copytree(
        out / _LATEST, out / _POLICY, ignore=shutil.ignore_patterns(_STATE), dirs_exist_ok=True
    )
    return out / _POLICY


def train_on(
    policy: Any, optimizer: Any, pool: list[LearningSequence], stage: Stage, progress: Progress
) -> dict[str, Any]:
    """Take one optimiser step a batch, and return what to log; `progress` moves on."""
    torch = require("torch", "train", "pre-training")
    sums = np.zeros(5)
    for batch in pool:
        rate = _rate(stage, progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = torch.from_numpy(batch.ids)
        weight = torch.from_numpy(batch.weight[:, 1:])
        learnt = weight > 0
        hidden = policy.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        # The head runs on tokens with a loss only.
        logits = policy.lm_head(hidden[learnt])
        target = ids[:, 1:][learnt]
        loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        loss = (loss * weight[learnt]).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        hit = (logits.argmax(-1) == target).numpy()
        value = batch.value[:, 1:][learnt.numpy()]
        sums += [loss.item(), hit.sum(), len(hit), hit[value].sum(), value.sum()]
        count = int((batch.ids > 0).sum())
        progress.steps += 1
        progress.tokens += count
        progress.stage_tokens += count
    return {
        "stage": stage.name,
        "pool": progress.pool,
        "steps": progress.steps,
        "tokens": progress.tokens,
        "learning_rate": rate,
        "loss": round(sums[0] / len(pool), 4),
        "token_accuracy": round(sums[1] / sums[2], 4),
        "value_accuracy": round(sums[3] / max(sums[4], 1), 4),
    }


def _rate(stage: Stage, progress: Progress) -> float:
    start, end = stage.learning_rate
    done = min(1.0, progress.stage_tokens / (stage.schedule_tokens or stage.tokens))
    rate = end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))
    return rate * min(1.0, (progress.steps + 1) / _WARM_UP)


# --- checkpoints ---------------------------------------------------------------------------------


def _recipe(seed: int, curriculum: tuple[Stage, ...]) -> dict[str, Any]:
    recipe = {
        "seed": seed,
        "curriculum": [asdict(stage) for stage in curriculum],
    }
    plain: dict[str, Any] = json.loads(json.dumps(recipe))
    return plain


def _save(
    out: Path, policy: Any, optimizer: Any, progress: Progress, recipe: dict[str, Any]
) -> None:
    torch = require("torch", "train", "pre-training")
    folder = out / f".{_LATEST}.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    save_policy(policy, folder)
    safetensors = require("safetensors.torch", "train", "pre-training")
    state = optimizer.state_dict()["state"]
    named = {f"{at}.{name}": value for at, of in state.items() for name, value in of.items()}
    safetensors.save_file(named, folder / _STATE)
    manifest = {
        "evenhand": __version__,
        "torch": torch.__version__,
        "progress": asdict(progress),
        "recipe": recipe,
    }
    with atomic_write(folder / MANIFEST) as file:
        json.dump(manifest, file, indent=1)
    latest, previous = out / _LATEST, out / _PREVIOUS
    shutil.rmtree(previous, ignore_errors=True)
    if latest.exists():
        latest.rename(previous)
    folder.rename(latest)


def _resume(out: Path, policy: Any, optimizer: Any, recipe: dict[str, Any]) -> Progress:
    safetensors = require("safetensors.torch", "train", "pre-training")
    # A run that was killed between the two renames left only the previous one.
    folder = next((out / n for n in (_LATEST, _PREVIOUS) if (out / n / MANIFEST).is_file()), None)
    if folder is None:
        return Progress()
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["recipe"] != recipe:
        raise ConfigError(f"{folder} was made with another seed or curriculum; choose another "
                          "output folder, or delete it")  # fmt: skip
    weights = safetensors.load_file(folder / "model.safetensors")
    policy.load_state_dict(weights, strict=False)
    policy.tie_weights()
    state: dict[int, dict[str, Any]] = {}
    for key, value in safetensors.load_file(folder / _STATE).items():
        at, _, name = key.partition(".")
        state.setdefault(int(at), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    progress = Progress(**manifest["progress"])
    _forget_after(out / _LOG, progress)
    return progress


def _forget_after(path: Path, progress: Progress) -> None:
    """Drop what the log holds of pools after the checkpoint: they will be trained on again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    with atomic_write(path) as file:
        file.writelines(
            # The line that a killed process was writing may lack its end.
            line
            for line in lines
            if line.endswith("\n") and json.loads(line)["tokens"] <= progress.tokens
        )


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
