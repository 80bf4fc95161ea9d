"""Two evaluations of the same questions, side by side: paired by question, by set and by hops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evenhand.core.errors import ConfigError
from evenhand.core.plugins import did_you_mean
from evenhand.diagnostics.paired import DRAWS, PairedDifference, paired_difference
from evenhand.evaluation.measures import METRICS, SECONDS, measures
from evenhand.evaluation.sets import UNNAMED, averages, in_order
from evenhand.trajectory import Trajectory

QuestionKey = tuple[str, str]
"""Set, and id of the question in it."""


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One metric on one part of the questions.

    Attributes:
        part: title of the part: a set, a set and its hops, or an average over sets.
        dataset: the set; `None` for an average.
        hops: how many facts the questions need; `None` where they are not split by it.
        average: name of the average (`all`, `single_hop`, `multi_hop`); `None` for a set.
        metric: name of the metric.
        result: the paired difference, second minus first.
    """

    part: str
    dataset: str | None
    hops: int | None
    average: str | None
    metric: str
    result: PairedDifference


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        rows: by metric, in the order of `METRICS`; inside it sets, their hops, averages.
        paired: questions that both sides have.
        only_first: questions that only the first has.
        only_second: questions that only the second has.
        failed: questions that both have and that an environment fault kept out on either side.
    """

    rows: tuple[ComparedRow, ...]
    paired: int
    only_first: int
    only_second: int
    failed: int

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that were compared."""
        return tuple(dict.fromkeys(row.metric for row in self.rows))

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that were compared."""
        return tuple(dict.fromkeys(r.dataset for r in self.rows if r.dataset is not None))

    def of(
        self, metric: str = "exact_match", *, dataset: str | None = None, hops: int | None = None
    ) -> PairedDifference:
        """Return the difference of one metric.

        Args:
            metric: its name.
            dataset: a set; `None`: the only one there is, or else the average over all sets.
            hops: questions with that many hops, inside the set.

        Raises:
            ConfigError: there is no such row.
        """
        if dataset is None and len(self.sets) == 1:
            (dataset,) = self.sets
        average = "all" if dataset is None else None
        for row in self.rows:
            if (row.metric, row.dataset, row.hops, row.average) == (metric, dataset, hops, average):
                return row.result
        raise ConfigError(
            f"the comparison has no metric {metric!r} for set {dataset or 'average'!r}, hops "
            f"{hops}; it has the metrics {', '.join(self.metrics)} and the sets "
            f"{', '.join(self.sets)}"
        )


def question_key(trajectory: Trajectory) -> QuestionKey:
    """Return what makes two rollouts answers to the same question: set and id.

    Without an id, the text of the question.
    """
    identity = trajectory.question_id
    return (trajectory.dataset or UNNAMED, trajectory.question if identity is None else identity)


@dataclass(frozen=True, slots=True)
class _Answered:
    """What one side knows of a question: the mean of each metric over its rollouts."""

    values: Mapping[str, float]
    hops: int | None


def compare(
    first: Iterable[Trajectory],
    second: Iterable[Trajectory],
    *,
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    draws: int = DRAWS,
) -> Comparison:
    """Compare two evaluations of the same questions; differences are second minus first.

    Questions are paired by set and id (`question_key`). Several rollouts of a question are averaged
    first: the questions are the independent units. Questions that one side lacks, or that ended
    with an environment fault on one side, are left out and counted. A metric is compared where both
    sides have it (see `evenhand.evaluation.measures.measures`); seconds are not, because they
    depend on the machine.

    Rows are one a set; one for each number of hops where a set has several; and the unweighted
    averages over the standard sets if there are at least two. Each row stands for itself: of
    twenty rows without any difference, one is expected to report one.

    Args:
        first: rollouts of the first evaluation.
        second: rollouts of the second.
        metrics: which to compare; `None` for all.
        seed: of the resamples. Every row has random numbers of its own.
        draws: resamples a row.

    Raises:
        ConfigError: the two have no question in common, or a metric is asked for that they lack.
    """
    one, two = _by_question(first), _by_question(second)
    common = [key for key in one if key in two]
    if not common:
        raise ConfigError(
            f"the two evaluations have no question in common ({len(one)} and {len(two)} questions, "
            f"such as {_example(one)} and {_example(two)}); compare evaluations of the same sets"
        )
    usable = [key for key in common if one[key].values and two[key].values]
    chosen = _metrics(metrics, [one[key] for key in usable], [two[key] for key in usable])
    parts = _parts(usable, one, two)
    rows = []
    for metric in chosen:
        for at, (label, keys) in enumerate(parts):
            both = [k for k in keys if metric in one[k].values and metric in two[k].values]
            if not both:
                continue
            names = [key[0] for key in both]
            result = paired_difference(
                [one[key].values[metric] for key in both],
                [two[key].values[metric] for key in both],
                stratum=np.unique(names, return_inverse=True)[1],
                draws=draws,
                seed=np.random.default_rng([seed, at, _number(metric)]),
            )
            rows.append(ComparedRow(*label, metric, result))
    return Comparison(
        rows=tuple(rows),
        paired=len(common),
        only_first=len(one) - len(common),
        only_second=len(two) - len(common),
        failed=len(common) - len(usable),
    )


def _by_question(trajectories: Iterable[Trajectory]) -> dict[QuestionKey, _Answered]:
    found: dict[QuestionKey, list[dict[str, float]]] = {}
    hops: dict[QuestionKey, int | None] = {}
    for trajectory in trajectories:
        key = question_key(trajectory)
        values = measures(trajectory)
        values.pop(SECONDS, None)
        hops[key] = trajectory.hops
        rollouts = found.setdefault(key, [])
        if values:
            rollouts.append(values)
    return {key: _Answered(_means(rollouts), hops[key]) for key, rollouts in found.items()}


def _means(rollouts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = rollouts[0].keys() if rollouts else ()
    return {
        name: sum(values[name] for values in rollouts) / len(rollouts)
        for name in names
        if all(name in values for values in rollouts)
    }


def _metrics(
    asked: Sequence[str] | None, one: Sequence[_Answered], two: Sequence[_Answered]
) -> list[str]:
    shared = {name for each in one for name in each.values} & {
        name for each in two for name in each.values
    }
    known = [name for name in METRICS if name in shared]
    for name in asked or ():
        if name not in known:
            raise ConfigError(
                f"the two evaluations do not both have the metric {name!r}"
                f"{did_you_mean(name, known)}; they have {', '.join(known) or 'none'}"
            )
    return known if asked is None else [name for name in known if name in asked]


def _number(metric: str) -> int:
    return list(METRICS).index(metric)


_Label = tuple[str, str | None, int | None, str | None]


def _parts(
    keys: Sequence[QuestionKey],
    one: Mapping[QuestionKey, _Answered],
    two: Mapping[QuestionKey, _Answered],
) -> list[tuple[_Label, list[QuestionKey]]]:
    """Return the parts of the questions: `(part, dataset, hops, average)` and the questions."""
    by_set: dict[str, list[QuestionKey]] = {}
    for key in keys:
        by_set.setdefault(key[0], []).append(key)
    parts: list[tuple[_Label, list[QuestionKey]]] = []
    for name in in_order(by_set):
        parts.append(((name, name, None, None), by_set[name]))
        by_hops: dict[int, list[QuestionKey]] = {}
        for key in by_set[name]:
            hops = one[key].hops if one[key].hops is not None else two[key].hops
            if hops is not None:
                by_hops.setdefault(hops, []).append(key)
        if len(by_hops) > 1:
            parts += [
                ((f"{name}, hops {hops}", name, hops, None), by_hops[hops])
                for hops in sorted(by_hops)
            ]
    for average in averages(by_set):
        chosen = [key for name in average.sets for key in by_set[name]]
        parts.append(((average.title, None, None, average.name), chosen))
    return parts


def _example(answered: Mapping[QuestionKey, _Answered]) -> str:
    if not answered:
        return "none"
    return "/".join(next(iter(answered)))
