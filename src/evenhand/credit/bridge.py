"""The one bridge from trajectories to credit: gather arrays, run an estimator, write it back.

Everything that knows both a `Trajectory` and an estimator is here. Arrays follow the conventions of
`evenhand.core.arrays`: `N` trajectories, `G` groups, `S` policy segments in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.core.arrays import BoolArray, FloatArray, IntArray
from evenhand.core.errors import ConfigError, DataError
from evenhand.core.settings import parse_setting
from evenhand.credit.evidence import EvidenceSettings, silver_documents, step_scores
from evenhand.credit.registry import (
    CreditInputs,
    Estimator,
    get_estimator,
    unknown_setting,
)
from evenhand.credit.strata import Label, get_stratum
from evenhand.trajectory import Kind, Segment, Trajectory

POLICY_KIND_ORDER = (Kind.SEARCH, Kind.ANSWER, Kind.INVALID, Kind.TRUNCATED)
"""`CreditBatch.kind` indexes this."""

BATCH_SIZE = 4096
"""Trajectories that a stream of contiguous groups gathers before it runs the estimator."""

NO_STEP = -1


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """What the bridge itself needs to know; on the command line these are `--set` keys too.

    Attributes:
        stratum: name of the stratum function, see `evenhand.credit.strata.get_stratum`.
        evidence: how step scores are computed.
    """

    stratum: str = "searches"
    evidence: EvidenceSettings = field(default_factory=EvidenceSettings)


_EVIDENCE_KEYS = tuple(item.name for item in fields(EvidenceSettings))


@dataclass(frozen=True, slots=True)
class CreditRule:
    """An estimator by name with all its settings, checked when it is made.

    Attributes:
        estimator: its name.
        settings: keywords of the estimator that differ from its defaults.
        bridge: stratum and evidence.
    """

    estimator: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    bridge: BridgeSettings = field(default_factory=BridgeSettings)

    def __post_init__(self) -> None:
        """Run the estimator on two rollouts, so that a bad setting fails before data is read."""
        get_stratum(self.bridge.stratum)
        two = np.arange(2)
        zeros = np.zeros(2, dtype=np.int64)
        inputs = CreditInputs(two, zeros, two, two >= 0, zeros + 1, zeros, np.zeros(2))
        self.function(inputs, **self.settings)

    @property
    def function(self) -> Estimator:
        """The estimator."""
        return get_estimator(self.estimator)

    @property
    def whole_batch(self) -> bool:
        """Whether groups of a step depend on one another."""
        return self.function.whole_batch(self.settings)

    @classmethod
    def from_settings(cls, estimator: str, settings: Mapping[str, Any]) -> CreditRule:
        """Make a rule from one flat table of settings, texts or values.

        Args:
            estimator: its name.
            settings: keywords of the estimator, and `stratum`, `step_score`, `threshold`,
                `max_think_similarity`.

        Raises:
            ConfigError: an unknown key (with the nearest valid one) or a bad value.
        """
        own = get_estimator(estimator).defaults
        bridge = BridgeSettings()
        defaults = {"stratum": bridge.stratum}
        defaults |= {key: getattr(bridge.evidence, key) for key in _EVIDENCE_KEYS}
        defaults |= own
        read: dict[str, Any] = {}
        for key, value in settings.items():
            if key not in defaults:
                raise ConfigError(unknown_setting(key, defaults))
            is_text = isinstance(value, str)
            nullable = key == "max_think_similarity"
            parsed = (
                parse_setting(key, value, defaults[key], nullable=nullable) if is_text else value
            )
            read[key] = parsed
        evidence = EvidenceSettings(**{k: v for k, v in read.items() if k in _EVIDENCE_KEYS})
        stratum = read.get("stratum", bridge.stratum)
        return cls(
            estimator,
            {key: value for key, value in read.items() if key in own},
            BridgeSettings(stratum, evidence),
        )


@dataclass(frozen=True, slots=True)
class CreditBatch:
    """Trajectories as arrays: what estimators and diagnostics read.

    Attributes:
        group_names: `G` group labels, in order of appearance.
        group: `[N]` index into `group_names`.
        rewards: `[N]`, `nan` = unscored.
        stratum: `N` labels.
        step: `[N]` training step, -1 where the file has none.
        searches: `[N]` executed searches.
        format_ok: `[N]`.
        environment_tokens: `[N]` tokens that the environment wrote, prompt included.
        owner: `[S]` trajectory of each policy segment.
        position: `[S]` its index among all segments of its trajectory.
        kind: `[S]` index into `POLICY_KIND_ORDER`.
        is_answer: `[S]` it is the last policy segment of its trajectory.
        is_executed: `[S]` it is a search that was executed.
        n_tokens: `[S]` its length.
        step_score: `[S]` step correctness; 0 where it is no executed search.
        silver_size: `[G]` number of silver documents.
    """

    group_names: tuple[str, ...]
    group: IntArray
    rewards: FloatArray
    stratum: tuple[Label, ...]
    step: IntArray
    searches: IntArray
    format_ok: BoolArray
    environment_tokens: IntArray
    owner: IntArray
    position: IntArray
    kind: IntArray
    is_answer: BoolArray
    is_executed: BoolArray
    n_tokens: IntArray
    step_score: FloatArray
    silver_size: IntArray

    def strata(self) -> tuple[list[Label], IntArray]:
        """Return the labels in sorted order (numbers before texts) and `[N]` indices into them."""
        labels = sorted(set(self.stratum), key=lambda label: (isinstance(label, str), label))
        index = {label: number for number, label in enumerate(labels)}
        return labels, np.array([index[label] for label in self.stratum], dtype=np.int64)

    @property
    def inputs(self) -> CreditInputs:
        """The arrays that estimators take."""
        return CreditInputs(
            rewards=self.rewards,
            group=self.group,
            owner=self.owner,
            is_answer=self.is_answer,
            n_tokens=self.n_tokens,
            stratum=self.strata()[1],
            step_score=self.step_score,
        )

    def advantage(self, rule: CreditRule) -> FloatArray:
        """Return `[S]` advantages; a rule that needs the whole batch runs step by step."""
        if not rule.whole_batch or (self.step == self.step[:1]).all():
            return rule.function(self.inputs, **rule.settings)
        result = np.zeros(len(self.owner))
        stratum = self.strata()[1]
        for step in np.unique(self.step):
            rows = self.step == step
            mine = rows[self.owner]
            renumber = np.cumsum(rows) - 1
            part = CreditInputs(
                rewards=self.rewards[rows],
                group=self.group[rows],
                owner=renumber[self.owner[mine]],
                is_answer=self.is_answer[mine],
                n_tokens=self.n_tokens[mine],
                stratum=stratum[rows],
                step_score=self.step_score[mine],
            )
            result[mine] = rule.function(part, **rule.settings)
        return result


def gather(trajectories: Sequence[Trajectory], bridge: BridgeSettings) -> CreditBatch:
    """Turn trajectories, in any order, into the arrays of a batch.

    Whole groups must be given: silver documents come from all rollouts of a group.
    """
    stratum_of = get_stratum(bridge.stratum)
    codes = {kind: code for code, kind in enumerate(POLICY_KIND_ORDER)}
    members: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        members.setdefault(trajectory.group, []).append(index)
    group = np.zeros(len(trajectories), dtype=np.int64)
    silver_size = np.zeros(len(members), dtype=np.int64)
    scores: list[list[float]] = [[]] * len(trajectories)
    for number, rows in enumerate(members.values()):
        group[rows] = number
        rollouts = [trajectories[row] for row in rows]
        silver = silver_documents(rollouts, threshold=bridge.evidence.threshold)
        silver_size[number] = len(silver)
        for row, rollout in zip(rows, rollouts, strict=True):
            scores[row] = step_scores(rollout, silver, bridge.evidence)
    # One list a column: a tuple a segment would be millions of objects for the garbage collector.
    columns: tuple[list[Any], ...] = ([], [], [], [], [], [], [])
    owners, positions, kinds, answers, executions, lengths, step_score = columns
    environment_tokens = np.zeros(len(trajectories), dtype=np.int64)
    for owner, trajectory in enumerate(trajectories):
        last = max(trajectory.policy_segments(), default=-1)
        own_scores = iter(scores[owner])
        for at, segment in enumerate(trajectory.segments):
            if not segment.is_policy:
                environment_tokens[owner] += segment.n_tokens
                continue
            executed = trajectory.is_executed(at)
            owners.append(owner)
            positions.append(at)
            kinds.append(codes[segment.kind])
            answers.append(at == last)
            executions.append(executed)
            lengths.append(segment.n_tokens)
            step_score.append(next(own_scores) if executed else 0.0)
    rewards = [np.nan if t.reward is None else t.reward for t in trajectories]
    steps = [NO_STEP if t.step is None else t.step for t in trajectories]
    return CreditBatch(
        group_names=tuple(members),
        group=group,
        rewards=np.array(rewards, dtype=np.float64),
        stratum=tuple(stratum_of(trajectory) for trajectory in trajectories),
        step=np.array(steps, dtype=np.int64),
        searches=np.array([len(score) for score in scores], dtype=np.int64),
        format_ok=np.array([t.format_ok for t in trajectories], dtype=bool),
        environment_tokens=environment_tokens,
        owner=np.array(owners, dtype=np.int64),
        position=np.array(positions, dtype=np.int64),
        kind=np.array(kinds, dtype=np.int64),
        is_answer=np.array(answers, dtype=bool),
        is_executed=np.array(executions, dtype=bool),
        n_tokens=np.array(lengths, dtype=np.int64),
        step_score=np.array(step_score, dtype=np.float64),
        silver_size=silver_size,
    )


def concatenate(batches: Sequence[CreditBatch]) -> CreditBatch:
    """Join batches that share no group into one."""
    trajectory_offset = np.cumsum([0, *(len(b.rewards) for b in batches)])
    group_offset = np.cumsum([0, *(len(b.group_names) for b in batches)])

    def join(name: str, offsets: NDArray[Any] | None = None) -> NDArray[Any]:
        parts = [getattr(batch, name) for batch in batches]
        if offsets is not None:
            parts = [part + shift for part, shift in zip(parts, offsets[:-1], strict=True)]
        return np.concatenate(parts)

    plain = {item.name: join(item.name) for item in fields(CreditBatch)
             if item.name not in ("group_names", "stratum", "group", "owner")}  # fmt: skip
    return CreditBatch(
        group_names=tuple(name for batch in batches for name in batch.group_names),
        stratum=tuple(label for batch in batches for label in batch.stratum),
        group=join("group", group_offset),
        owner=join("owner", trajectory_offset),
        **plain,
    )


class Credited(NamedTuple):
    """One batch of a stream with its credit.

    Attributes:
        trajectories: in the order of the file.
        batch: their arrays.
        advantage: `[S]` credit of the policy segments.
    """

    trajectories: list[Trajectory]
    batch: CreditBatch
    advantage: FloatArray

    def written(self) -> Iterator[Trajectory]:
        """Yield the trajectories with `advantage` and `step_score` on their segments."""
        advantage = self.advantage.tolist()
        executed = self.batch.is_executed.tolist()
        score = self.batch.step_score.tolist()
        at = 0
        for trajectory in self.trajectories:
            segments: list[Segment] = []
            for segment in trajectory.segments:
                if segment.is_policy:
                    own = score[at] if executed[at] else None
                    segments.append(replace(segment, advantage=advantage[at], step_score=own))
                    at += 1
                else:
                    segments.append(replace(segment, advantage=0.0, step_score=None))
            yield replace(trajectory, segments=tuple(segments))


def credit(trajectories: Sequence[Trajectory], estimator: str, **settings: Any) -> list[Trajectory]:
    """Return the same trajectories with `advantage` on every segment and `step_score` on searches.

    The environment's segments get advantage 0; executed searches get their step score.

    Args:
        trajectories: whole groups, in any order; one batch, unless they carry different steps and
            the estimator needs the whole batch: then one batch a step.
        estimator: a name of the registry.
        settings: keywords of the estimator, and `stratum`, `step_score`, `threshold`,
            `max_think_similarity`.

    Raises:
        ConfigError: unknown estimator or setting, bad value.
        DataError: a group has rollouts of two steps.
    """
    rule = CreditRule.from_settings(estimator, settings)
    for _ in whole_groups(trajectories, in_memory=True):
        pass
    batch = gather(trajectories, rule.bridge)
    return list(Credited(list(trajectories), batch, batch.advantage(rule)).written())


def credit_stream(
    trajectories: Iterable[Trajectory], rule: CreditRule, *, in_memory: bool = False
) -> Iterator[Credited]:
    """Credit a stream batch by batch, holding only whole groups (or steps) at a time.

    Args:
        trajectories: groups must be contiguous; if the rule needs the whole batch, steps must be.
        rule: estimator and settings.
        in_memory: read everything first; groups may then be scattered.

    Yields:
        Batches that together hold the trajectories in the order given.

    Raises:
        DataError: a group (or step) comes back after others.
    """
    for part in whole_groups(trajectories, by_step=rule.whole_batch, in_memory=in_memory):
        batch = gather(part, rule.bridge)
        yield Credited(part, batch, batch.advantage(rule))


def whole_groups(
    trajectories: Iterable[Trajectory], *, by_step: bool = False, in_memory: bool = False
) -> Iterator[list[Trajectory]]:
    """Cut a stream into lists that hold whole groups, or whole steps.

    Args:
        trajectories: the stream.
        by_step: cut only between steps; trajectories without a step make one step of their own.
        in_memory: one list of everything.

    Raises:
        DataError: a group, or with `by_step` a step, comes back after others; or a group has
            rollouts of two steps.
    """
    pending: list[Trajectory] = []
    step_of: dict[str, int | None] = {}
    steps: set[int | None] = set()
    for trajectory in trajectories:
        group, step = trajectory.group, trajectory.step
        is_known = group in step_of
        if step_of.setdefault(group, step) != step:
            raise DataError(
                f"trajectory {trajectory.id!r}: group {group!r} has rollouts of step "
                f"{step_of[group]} and of step {step}; a group id must be unique per step and "
                "question"
            )
        if pending and not in_memory:
            new_group, new_step = group != pending[-1].group, step != pending[-1].step
            if by_step and new_step and step in steps:
                raise _came_back("step", step, trajectory)
            if not by_step and new_group and is_known:
                raise _came_back("group", group, trajectory)
            if new_step if by_step else new_group and len(pending) >= BATCH_SIZE:
                yield pending
                pending = []
        steps.add(step)
        pending.append(trajectory)
    if pending:
        yield pending


def _came_back(what: str, name: object, trajectory: Trajectory) -> DataError:
    return DataError(
        f"trajectory {trajectory.id!r}: {what} {name!r} comes back after others; sort the file by "
        f"{what}, or read it whole with --in-memory"
    )
