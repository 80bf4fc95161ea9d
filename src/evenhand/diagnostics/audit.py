"""What a user should know about a run's rollouts before changing anything.

`AuditCollector` reads trajectories batch by batch and keeps arrays only; `Audit` holds the figures
that the terminal and the page show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenhand.core.arrays import Dense, FloatArray, size
from evenhand.core.errors import EvenhandError
from evenhand.credit import BridgeSettings, CreditBatch, Credited, CreditRule, concatenate, gather
from evenhand.credit.bridge import NO_STEP, POLICY_KIND_ORDER
from evenhand.credit.evidence import silver_documents
from evenhand.credit.registry import estimator_names
from evenhand.diagnostics.alarms import Alarm, replay
from evenhand.diagnostics.credit import (
    GroupCounts,
    advantage_by_stratum,
    group_counts,
    is_correct_search,
    live_token_share,
    mis_penalised,
    negative_to_positive,
    penalty_on_correct,
)
from evenhand.diagnostics.findings import Finding, find, unknowns
from evenhand.diagnostics.intervals import Estimate, mean, proportion, share
from evenhand.diagnostics.language import (
    Language,
    LanguageBatch,
    concatenate_language,
    gather_language,
    language,
)
from evenhand.diagnostics.steps import REPLACED, gain_of_several, series
from evenhand.diagnostics.strata import (
    BetweenStrata,
    StrataShape,
    StratumRow,
    between_strata,
    strata_shape,
    stratum_rows,
)
from evenhand.trajectory import Kind, Trajectory

REFERENCE = "grpo"
"""Penalties are shown relative to this estimator's."""

EXAMPLES = 3
"""Rollouts that an audit keeps whole."""


@dataclass(frozen=True, slots=True)
class EstimatorRow:
    """What one estimator would do to these rollouts.

    Attributes:
        name: of the estimator, under its default settings.
        live: share of policy tokens with an advantage other than 0.
        mis_penalised: share of correct searches with a negative advantage.
        penalty_kept: negative mass on correct searches relative to `grpo`'s; `nan` where `grpo`
            puts none.
        search_ratio: negative over positive mass on search segments.
        answer_ratio: the same on answer segments.
        other_ratio: the same on turns without an action (invalid, truncated).
        total_ratio: the same on everything.
        by_stratum: token-mean advantage of each stratum, in the order of `Audit.strata`.
    """

    name: str
    live: Estimate
    mis_penalised: Estimate
    penalty_kept: float
    search_ratio: Estimate
    answer_ratio: Estimate
    other_ratio: Estimate
    total_ratio: Estimate
    by_stratum: list[float]


@dataclass(frozen=True, slots=True)
class Example:
    """A rollout worth reading.

    Attributes:
        trajectory: with `grpo` credit written on its segments.
        penalty: negative token mass on its correct searches.
        silver: identities of the silver documents of its group.
    """

    trajectory: Trajectory
    penalty: float
    silver: frozenset[str]


@dataclass(frozen=True, slots=True)
class Audit:
    """All figures of an audit.

    Attributes:
        trajectories: how many were read.
        unscored: how many have no reward.
        steps: distinct training steps, in order; empty if the file has none.
        groups: groups by what credit can learn from them.
        group_size: smallest, median and largest number of rollouts a group.
        reward: mean reward.
        success: share of scored rollouts whose reward reaches `threshold`.
        threshold: the reward that counts as a success.
        format_ok: share of scored rollouts that obey the protocol.
        stop_reasons: rollouts by stop reason.
        searches: mean number of executed searches of scored rollouts.
        policy_tokens: tokens that the policy sampled.
        environment_tokens: tokens that the environment wrote.
        units: units of `n_tokens`, normally `("tokens",)`.
        stratum: name of the stratum function.
        strata: share and reward of each stratum.
        shape: lone members and flat strata.
        between: variance between strata beside its chance level.
        gain: mean, over the groups that hold both, of the reward of rollouts with two or more
            searches minus that of rollouts with fewer; `n` counts these groups.
        language: what the policy wrote.
        alarms: what would have fired, step after step, under the default rules; empty if the files
            name fewer steps than a window has.
        silver_groups: share of groups that have silver documents.
        silver_size: `[groups with silver]` sorted sizes of the sets.
        step_scores: `[judged searches]` step scores of searches in groups with silver documents.
        correct: share of the searches with step score above 0 among those that could be judged:
            executed, in a scored rollout, in a group with silver documents.
        estimators: one row an estimator.
        findings: what stands out, in sentences.
        unknown: what these files cannot tell.
        examples: rollouts with the most punished correct searches, one a group.
    """

    trajectories: int
    unscored: int
    steps: tuple[int, ...]
    groups: GroupCounts
    group_size: tuple[int, float, int]
    reward: Estimate
    success: Estimate
    threshold: float
    format_ok: Estimate
    stop_reasons: dict[str, int]
    searches: Estimate
    policy_tokens: int
    environment_tokens: int
    units: tuple[str, ...]
    stratum: str
    strata: list[StratumRow]
    shape: StrataShape
    between: BetweenStrata
    gain: Estimate
    language: Language
    alarms: list[Alarm]
    silver_groups: Estimate
    silver_size: FloatArray
    step_scores: FloatArray
    correct: Estimate
    estimators: list[EstimatorRow]
    findings: list[Finding]
    unknown: list[str]
    examples: list[Example]


class AuditCollector:
    """Reads batches of whole groups and keeps what an audit needs: arrays and a few counts."""

    def __init__(self, bridge: BridgeSettings) -> None:
        """Start empty; `bridge` names the stratum and how evidence is computed."""
        self.bridge = bridge
        self._batches: list[CreditBatch] = []
        self._columns: list[LanguageBatch] = []
        self._advantage: list[float] = []
        self._replaced: list[bool] = []
        self._stop_reasons: Counter[str] = Counter()
        self._units: Counter[str] = Counter()
        self._without_golds = 0
        self._reference = CreditRule(REFERENCE, bridge=bridge)
        self._examples: list[Example] = []

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Take in one batch of whole groups."""
        batch = gather(trajectories, self.bridge)
        self._batches.append(batch)
        self._columns.append(gather_language(trajectories))
        self._keep_examples(list(trajectories), batch)
        for trajectory in trajectories:
            self._stop_reasons[trajectory.stop_reason.value] += 1
            self._units[str(trajectory.metadata.get("n_tokens_unit", "tokens"))] += 1
            self._without_golds += trajectory.golden_answers is None
            self._replaced.append(bool(trajectory.metadata.get(REPLACED)))
            self._advantage += [
                math.nan if segment.advantage is None else segment.advantage
                for segment in trajectory.segments
                if segment.is_policy
            ]

    def _keep_examples(self, trajectories: list[Trajectory], batch: CreditBatch) -> None:
        advantage = batch.advantage(self._reference)
        penalty = np.zeros(len(trajectories))
        mass = batch.n_tokens * np.maximum(-advantage, 0.0) * is_correct_search(batch)
        np.add.at(penalty, batch.owner, mass)
        best = sorted(np.flatnonzero(penalty > 0).tolist(), key=lambda row: -penalty[row])
        written = list(Credited(trajectories, batch, advantage).written()) if best else []
        for row in best:
            if len(self._examples) == EXAMPLES and penalty[row] <= self._examples[-1].penalty:
                break
            if any(e.trajectory.group == trajectories[row].group for e in self._examples):
                continue
            rollouts = [t for t in trajectories if t.group == trajectories[row].group]
            silver = silver_documents(rollouts, threshold=self.bridge.evidence.threshold)
            self._examples.append(Example(written[row], float(penalty[row]), frozenset(silver)))
            self._examples.sort(key=lambda example: -example.penalty)
            del self._examples[EXAMPLES:]

    def finish(self) -> Audit:
        """Compute the figures of everything that was added (at least one trajectory)."""
        batch = concatenate(self._batches)
        columns = concatenate_language(self._columns)
        gains = gain_of_several(batch)
        threshold = self.bridge.evidence.threshold
        scored = ~np.isnan(batch.rewards)
        rewards, group = batch.rewards[scored], batch.group[scored]
        sizes = size(Dense(batch.group, len(batch.group_names)))
        executed = batch.is_executed & scored[batch.owner]
        judged = executed & (batch.silver_size[batch.group[batch.owner]] > 0)
        has_silver = batch.silver_size > 0
        rows, failures = estimator_rows(batch, self.bridge)
        audit = Audit(
            trajectories=len(batch.rewards),
            unscored=int((~scored).sum()),
            steps=tuple(int(step) for step in np.unique(batch.step) if step != NO_STEP),
            groups=group_counts(batch, threshold=threshold),
            group_size=(int(sizes.min()), float(np.median(sizes)), int(sizes.max())),
            reward=mean(rewards, group),
            success=share(rewards >= threshold, group),
            threshold=threshold,
            format_ok=share(batch.format_ok[scored], group),
            stop_reasons=dict(self._stop_reasons.most_common()),
            searches=mean(batch.searches[scored].astype(np.float64), group),
            policy_tokens=int(batch.n_tokens.sum()),
            environment_tokens=int(batch.environment_tokens.sum()),
            units=tuple(sorted(self._units)),
            stratum=self.bridge.stratum,
            strata=stratum_rows(batch),
            shape=strata_shape(batch),
            between=between_strata(batch.rewards, batch.group, batch.strata()[1]),
            gain=mean(gains, np.arange(len(gains))),
            language=language(batch, columns),
            alarms=replay(
                series(
                    batch,
                    columns,
                    np.array(self._advantage),
                    np.array(self._replaced, dtype=bool),
                    threshold=threshold,
                )
            ),
            silver_groups=proportion(int(has_silver.sum()), len(has_silver)),
            silver_size=np.sort(batch.silver_size[has_silver]).astype(np.float64),
            step_scores=batch.step_score[judged],
            correct=share(batch.step_score[judged] > 0, batch.group[batch.owner[judged]]),
            estimators=rows,
            findings=[],
            unknown=[],
            examples=self._examples,
        )
        audit.findings.extend(find(audit))
        audit.unknown.extend(unknowns(audit, without_golds=self._without_golds))
        audit.unknown.extend(failures)
        return audit


def estimator_rows(
    batch: CreditBatch, bridge: BridgeSettings
) -> tuple[list[EstimatorRow], list[str]]:
    """Return what each registered estimator would do, and a sentence for each that failed."""
    rows: list[EstimatorRow] = []
    failures: list[str] = []
    searches = batch.kind == POLICY_KIND_ORDER.index(Kind.SEARCH)
    answers = batch.kind == POLICY_KIND_ORDER.index(Kind.ANSWER)
    reference = penalty_on_correct(batch, batch.advantage(CreditRule(REFERENCE, bridge=bridge)))
    for name in estimator_names():
        try:
            advantage = batch.advantage(CreditRule(name, bridge=bridge))
        except EvenhandError as error:
            failures.append(f"Estimator {name} could not be run: {error}")
            continue
        kept = penalty_on_correct(batch, advantage) / reference if reference else math.nan
        rows.append(
            EstimatorRow(
                name=name,
                live=live_token_share(batch, advantage),
                mis_penalised=mis_penalised(batch, advantage),
                penalty_kept=kept,
                search_ratio=negative_to_positive(batch, advantage, searches),
                answer_ratio=negative_to_positive(batch, advantage, answers),
                other_ratio=negative_to_positive(batch, advantage, ~searches & ~answers),
                total_ratio=negative_to_positive(batch, advantage),
                by_stratum=advantage_by_stratum(batch, advantage),
            )
        )
    return rows, failures
