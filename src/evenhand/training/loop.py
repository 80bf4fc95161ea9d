"""The training loop: collect, score, credit, micro-batches, loss, optimiser step, checkpoint.

One step of `Trainer.run`, from top to bottom:

1. `_collect`: questions from the stream, all their rollouts together; groups without spread are
   replaced if the recipe says so.
2. `_credit`: rewards were set by `_score`; the estimator gives every segment its advantage.
3. `_update`: rows of tokens, mini-batches of whole groups, micro-batches by a token budget, the
   loss, the optimiser step.
4. `_record`: rollouts, then figures, then alarms, then (if due) the checkpoint. A kill between any
   two of these leaves a run that resumes to the same weights: what is beyond the newest checkpoint
   is dropped and done again. An alarm whose action is `stop` makes the checkpoint due and ends the
   run.

Left out on purpose: several devices (verl and TRL do that), a learned critic, replay of old
batches.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from evenhand.core.errors import ConfigError, require
from evenhand.credit import Credited, gather
from evenhand.datasets import Question
from evenhand.diagnostics.alarms import Alarm
from evenhand.rollout import Policy, Sampling, collect, leaves_room
from evenhand.task.rewards import get_reward, score_trajectory
from evenhand.training import metrics as figures
from evenhand.training.batching import Row, mini_batches, rows_of, weighted
from evenhand.training.checkpoint import Checkpoints, Trained
from evenhand.training.config import Recipe
from evenhand.training.forward import Forward
from evenhand.training.listener import Listener
from evenhand.training.losses import SUMS, TokenBatch, token_loss
from evenhand.training.metrics import Metrics
from evenhand.training.models import LoadedModel, Reference
from evenhand.training.run_folder import RunFolder
from evenhand.training.sources import QuestionStream, Sources
from evenhand.training.tracking import Trackers
from evenhand.training.watch import AlarmWatch, stopping
from evenhand.trajectory import Trajectory

torch = require("torch", "train", "training")

_EVALUATION_STEP = -2
"""Step in the keys of evaluation rollouts, so that they never share one with training."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trainer is made of; `evenhand.training.setup.open_parts` makes it from a recipe.

    Attributes:
        policy: samples turns with the weights that are trained.
        loaded: these weights.
        trained: weights, optimiser, schedule.
        reference: the starting policy; `None` without a KL term.
        sources: questions and environments.
    """

    policy: Policy
    loaded: LoadedModel
    trained: Trained
    reference: Reference | None
    sources: Sources


class Trainer:
    """A run: `Trainer(recipe, parts, run).run()`.

    Attributes:
        progress: where the run is.
        stopped: the alarm that ended the run, if one did.
    """

    def __init__(
        self, recipe: Recipe, parts: Parts, run: RunFolder, listener: Listener | None = None
    ) -> None:
        """Continue the run in its folder, or begin it there.

        Raises:
            DataError: a damaged checkpoint, or a folder that cannot be written.
        """
        self.recipe = recipe
        self._parts = parts
        self._run = run
        self._listener = listener or Listener()
        self._reward = get_reward(recipe.reward.name, convention=recipe.reward.convention)
        self._rule = recipe.credit.rule()
        self._forward = Forward(
            parts.loaded.model,
            parts.loaded.device,
            recipe.rollout.temperature,
            parts.loaded.autocast,
        )
        self._sampling = Sampling(
            temperature=recipe.rollout.temperature,
            top_p=recipe.rollout.top_p,
            top_k=recipe.rollout.top_k,
            seed=recipe.seed,
        )
        self._checkpoints = Checkpoints(run.checkpoints, keep=recipe.checkpoint.keep)
        self._checkpoints.remove_debris()
        self.progress = self._checkpoints.load(parts.trained)
        kept = self.progress.step if self._checkpoints.newest() else -1
        run.rewind(kept)
        self._trackers = Trackers(recipe, run.tensorboard, step=kept)
        self._stream = QuestionStream(
            parts.sources.train,
            seed=recipe.seed,
            shuffle=recipe.data.shuffle,
            usable=self._fits,
            position=self.progress.drawn,
        )
        self._seconds: dict[str, float] = {}
        self._watch = AlarmWatch(recipe, run)
        self.stopped: Alarm | None = None

    def run(self) -> Metrics:
        """Train to the last step, or to an alarm that stops the run (`stopped`).

        Returns:
            The figures of the last evaluation, if there was one.

        Raises:
            DataError: disk full or not writable; the last checkpoint is whole.
        """
        with _lasting_objects_left_alone():
            return self._run_steps()

    def _run_steps(self) -> Metrics:
        recipe = self.recipe
        evaluated: Metrics = {}
        self._listener.started(recipe, self.progress, self._stream)
        if self._checkpoints.newest() is None:
            if recipe.evaluation.at_start:
                evaluated = self._evaluate()
            if evaluated:
                self._record(0, evaluated, None)
            self._save()
        while self.progress.step < recipe.steps:
            step = self.progress.step + 1
            self._seconds = {}
            began = time.perf_counter()
            trajectories, found = self._train_step(step)
            if self._is_due(step, recipe.evaluation.every):
                evaluated = self._evaluate()
                found |= evaluated
            found["timing_s/step"] = time.perf_counter() - began
            found |= {f"timing_s/{name}": value for name, value in self._seconds.items()}
            self._record(step, found, trajectories)
            fired = self._watch.look(step, found, trajectories)
            for alarm in fired:
                self._listener.alarmed(alarm)
            self.stopped = stopping(fired)
            if self.stopped or self._is_due(step, recipe.checkpoint.every):
                self._save()
            if self.stopped:
                break
        self._listener.finished(self.progress, evaluated)
        return evaluated

    def close(self) -> None:
        """Close trackers and let others write into the folder."""
        self._trackers.close()
        self._run.unlock()
        self._listener.closed()

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self.recipe.steps or (every is not None and step % every == 0)

    # --- one step ---------------------------------------------------------------------------------

    def _train_step(self, step: int) -> tuple[list[Trajectory], Metrics]:
        with self._timed("gen"):
            kept, dropped, found = self._collect(step)
        with self._timed("credit"):
            credited = self._credit(kept)
            found |= figures.step_metrics(
                kept, credited.batch, credited.advantage, self._rule.bridge.evidence.threshold
            )
            trajectories = list(credited.written())
        with self._timed("update_actor"):
            found |= self._update(trajectories, step)
        self.progress = replace(self.progress, step=step, drawn=self._stream.position)
        found |= {
            "training/global_step": step,
            "training/questions_drawn": self.progress.drawn,
            "training/questions_too_long": len(self._stream.unusable),
            "actor/lr": self._parts.trained.schedule.get_last_lr()[0],
        }
        sampled = found["response_length/mean"] * len(kept)
        found["perf/sampled_tokens_per_s"] = sampled / max(self._seconds["gen"], 1e-9)
        return trajectories + dropped, found

    def _collect(self, step: int) -> tuple[list[Trajectory], list[Trajectory], Metrics]:
        """Return the rollouts to train on, those of groups without spread, and counts."""
        section = self.recipe.rollout
        questions = self._stream.take(section.questions)
        if len(questions) < section.questions:
            raise ConfigError(
                f"only {len(questions)} training questions leave room for a turn, and a step takes "
                f"{section.questions}; raise environment.limits.max_context or lower "
                "rollout.questions"
            )
        kept = self._rollouts(questions, step)
        if not section.filter_groups:
            return kept, [], {}
        dropped: list[Trajectory] = []
        drawn = list(questions)
        kept, flat = _split_by_spread(kept)
        dropped += flat
        refills = 0
        while (missing := section.questions - _n_groups(kept)) and refills < section.max_refills:
            more = self._stream.take(missing, besides=drawn)
            if not more:
                break
            refills += 1
            drawn += more
            effective, flat = _split_by_spread(self._rollouts(more, step))
            kept += effective
            dropped += flat
        found: Metrics = {
            "groups/refills": refills,
            "groups/without_spread": _n_groups(dropped),
            "groups/missing": section.questions - _n_groups(kept),
        }
        marked = [_without_credit(trajectory) for trajectory in dropped]
        return kept, marked, found

    def _rollouts(self, questions: Sequence[Question], step: int) -> list[Trajectory]:
        with self._parts.loaded.autocast():
            rollouts = collect(
                questions,
                self._parts.policy,
                self._parts.sources.environment,
                group_size=self.recipe.rollout.group_size,
                sampling=self._sampling,
                step=step,
                progress=self._listener.rollouts,
            )
        return self._score(rollouts)

    def _score(self, rollouts: Sequence[Trajectory]) -> list[Trajectory]:
        convention = self.recipe.reward.convention
        return [score_trajectory(t, self._reward, convention=convention) for t in rollouts]

    def _credit(self, trajectories: list[Trajectory]) -> Credited:
        batch = gather(trajectories, self._rule.bridge)
        return Credited(trajectories, batch, batch.advantage(self._rule))

    def _fits(self, question: Question) -> bool:
        return leaves_room(question, self._parts.policy, self._parts.sources.environment)

    # --- the update -------------------------------------------------------------------------------

    def _update(self, trajectories: Sequence[Trajectory], step: int) -> Metrics:
        """Make the optimiser steps of a batch of credited rollouts."""
        loss = self.recipe.loss
        rows = rows_of(trajectories, mask_truncated=loss.mask_truncated)
        if self._parts.reference is not None:
            with self._parts.reference.model() as model:
                reference = replace(self._forward, model=model)
                values = reference.logprobs(rows, loss.micro_tokens)
            rows = [
                replace(row, targets=replace(row.targets, reference=value))
                for row, value in zip(rows, values, strict=True)
            ]
        updates = loss.minibatches * loss.epochs
        if loss.old == "trainer" and updates > 1:
            values = self._forward.logprobs(rows, loss.micro_tokens)
            rows = [
                replace(row, targets=replace(row.targets, old=value))
                for row, value in zip(rows, values, strict=True)
            ]
        sums = np.zeros(len(SUMS))
        norms: list[float] = []
        skipped = 0
        for epoch in range(loss.epochs):
            generator = np.random.default_rng([self.recipe.seed, step, epoch])
            for part in mini_batches(rows, loss.minibatches, generator):
                self._listener.updating(len(norms) + 1, updates)
                norm = self.accumulate(part, sums)
                skipped += not self._optimizer_step(norm)
                norms.append(norm)
        found = figures.update_metrics(dict(zip(SUMS, sums, strict=True)), norms, len(norms))
        if self._parts.reference is not None:
            found |= figures.reference_metrics([row.targets.reference for row in rows])
        return found | {"actor/updates": len(norms), "actor/skipped_updates": skipped}

    def accumulate(self, rows: Sequence[Row], sums: np.ndarray) -> float:
        """Put the gradient of one optimiser step into the parameters; return its norm.

        The norm is that before clipping. Rows without credit skip the forward pass if nothing but
        the policy gradient looks at them; the denominators count them all the same.
        """
        loss = self.recipe.loss
        parameters = list(self._parts.loaded.trainable().values())
        for parameter in parameters:
            # Zeros rather than nothing: a step without a credited row moves what any other would.
            parameter.grad = torch.zeros_like(parameter)
        live = weighted(
            rows,
            loss.aggregation,
            constant_length=loss.constant_length,
            skip_uncredited=loss.is_policy_gradient_only,
        )
        tensor = self._forward.tensor
        # With a single optimiser step a batch, the trainer's old policy is the current one.
        old_is_new = loss.old == "trainer" and loss.minibatches * loss.epochs == 1
        for micro in self._forward.batches(live, loss.micro_tokens):
            outputs = self._forward(micro, entropy=loss.entropy > 0)
            targets = micro.targets
            batch = TokenBatch(
                advantage=tensor(targets.advantage),
                sampled=tensor(targets.sampled),
                old=outputs.logprobs.detach() if old_is_new else tensor(targets.old),
                reference=tensor(targets.reference),
                weight=tensor(targets.weight),
            )
            parts = token_loss(outputs.logprobs, outputs.entropy, batch, loss)
            self._forward.backward(parts.loss, micro)
            sums += parts.sums.cpu().numpy()
        limit = self.recipe.optimizer.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)
        return float(norm)

    def _optimizer_step(self, norm: float) -> bool:
        """Apply the gradient; one that is not finite is dropped, and the schedule goes on."""
        trained = self._parts.trained
        if math.isfinite(norm):
            trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
        with _schedule_after_skip():
            trained.schedule.step()
        self.progress = replace(self.progress, updates=self.progress.updates + 1)
        return math.isfinite(norm)

    # --- evaluation and records -------------------------------------------------------------------

    def _evaluate(self) -> Metrics:
        """Answer the held-out questions greedily, one rollout each."""
        sources = self._parts.sources
        questions = [
            question
            for question in sources.evaluate
            if leaves_room(question, self._parts.policy, sources.evaluate_environment)
        ]
        if not questions:
            return {}
        with self._timed("testing"), self._parts.loaded.autocast():
            rollouts = collect(
                questions,
                self._parts.policy,
                sources.evaluate_environment,
                sampling=Sampling(temperature=0.0, seed=self.recipe.seed),
                step=_EVALUATION_STEP,
                progress=self._listener.evaluating,
            )
        rollouts = self._score(rollouts)
        if self.recipe.tracking.trajectories:
            step = self.progress.step
            self._run.write_evaluation(step, [replace(t, step=step) for t in rollouts])
        found = figures.evaluation_metrics(rollouts)
        found["eval/too_long"] = len(sources.evaluate) - len(questions)
        self._listener.evaluated(self.progress, found)
        return found

    def _record(self, step: int, found: Metrics, trajectories: Sequence[Trajectory] | None) -> None:
        if trajectories is not None and self.recipe.tracking.trajectories:
            self._run.write_trajectories(step, trajectories)
        self._run.write_metrics(step, found)
        self._trackers.write(step, found)
        if trajectories is not None:
            self._listener.stepped(self.progress, found)

    def _save(self) -> None:
        path = self._checkpoints.save(self._parts.trained, self.progress)
        keep = self.recipe.tracking.keep_trajectories
        if keep is not None:
            # Steps after the newest checkpoint may be done again: rollouts count back from it.
            self._run.drop_trajectories(self.progress.step - max(keep, self.recipe.alarms.keep))
        self._listener.saved(self.progress, path)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began


@contextmanager
def _lasting_objects_left_alone() -> Iterator[None]:
    """Keep what exists now (modules, model, index, questions) out of Python's garbage collection.

    A step makes many small objects, and each full collection would walk through all of that again.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _schedule_after_skip() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch warns if a schedule moves before the first optimiser step, which a dropped gradient
        # may be.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield


def _split_by_spread(rollouts: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return the rollouts of groups whose scored rewards differ, and the others."""
    rewards: dict[str, set[float]] = {}
    for rollout in rollouts:
        values = rewards.setdefault(rollout.group, set())
        if rollout.reward is not None:
            values.add(rollout.reward)
    kept = [rollout for rollout in rollouts if len(rewards[rollout.group]) > 1]
    return kept, [rollout for rollout in rollouts if len(rewards[rollout.group]) <= 1]


def _n_groups(rollouts: Sequence[Trajectory]) -> int:
    return len({rollout.group for rollout in rollouts})


def _without_credit(rollout: Trajectory) -> Trajectory:
    """Return a rollout of a group that was replaced: credit 0 everywhere, and marked."""
    segments = tuple(replace(segment, advantage=0.0) for segment in rollout.segments)
    return replace(rollout, segments=segments, metadata={**rollout.metadata, "replaced": True})
