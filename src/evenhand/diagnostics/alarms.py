"""Early warnings from the figures of a run, step after step: stagnation, collapse, dead groups.

`Alarms.update(step, figures)` takes the figures of one step (`evenhand.diagnostics.steps`, or a
line of `metrics.jsonl`) and returns what fires. The state is a function of the steps seen, so that
feeding the lines of a run again restores it. An alarm that has fired stays silent until its rule
has not held for a whole window.

A figure that a step lacks is unknown: it neither raises nor lowers an alarm. `docs/diagnostics.md`
has the rules with their reasons and what they were measured on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from evenhand.diagnostics.intervals import t95

Figures = Mapping[str, float]
Window = Annotated[int, Field(ge=2)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Action(StrEnum):
    """What an alarm does to the run."""

    OFF = "off"
    """It is not watched for."""
    WARN = "warn"
    """It is recorded and shown; the run goes on."""
    STOP = "stop"
    """It is recorded and shown; the run saves a checkpoint and ends."""


class _Rule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Action = Action.WARN


class StagnationRule(_Rule):
    """The policy stays at one search a question although several searches earn more.

    Attributes:
        action: `off`, `warn` or `stop`.
        window: steps that are pooled.
        searches: mean executed searches a rollout up to which it counts as one a question.
        rise: searches more in the second half of the window than in the first, from which the
            policy counts as moving.
    """

    window: Window = 20
    searches: NotNegative = 1.2
    rise: NotNegative = 0.05


class CollapseRule(_Rule):
    """The language breaks down: `signs` of five hold together, one of them of the language.

    Attributes:
        action: `off`, `warn` or `stop`.
        window: steps that are averaged; the first full window is the run's own normal.
        signs: how many signs must hold together.
        entropy: factor over normal from which entropy counts as risen.
        plunge: share of its peak below which an entropy that had risen counts as plunged.
        garbled: share of garbled policy segments.
        repetition: rise of the share of repeated 4-grams over normal.
        format: fall of the share of well-formed rollouts below its best window.
        negative: negative over positive token mass of the credit of searches, answers or all.
    """

    window: Window = 5
    signs: Annotated[int, Field(ge=1, le=5)] = 2
    entropy: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.75
    plunge: Share = 0.5
    garbled: Share = 0.02
    repetition: Share = 0.1
    format: Share = 0.1
    negative: NotNegative = 1.5


class DeadGroupsRule(_Rule):
    """Hardly any group has rewards that differ, so that hardly anything is learnt.

    Attributes:
        action: `off`, `warn` or `stop`.
        window: steps that are pooled.
        share: of the groups whose rewards differ, below which the alarm fires.
    """

    window: Window = 10
    share: Share = 0.1


class AlarmRules(BaseModel):
    """All alarms.

    Attributes:
        stagnation: one search a question although several earn more.
        collapse: the language breaks down.
        dead_groups: groups without differing rewards.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stagnation: StagnationRule = StagnationRule()
    collapse: CollapseRule = CollapseRule()
    dead_groups: DeadGroupsRule = DeadGroupsRule()


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that fired.

    Attributes:
        step: after which training step.
        name: `stagnation`, `collapse` or `dead_groups`.
        action: `warn` or `stop`.
        message: what it saw, with figures.
        cause: what usually causes it.
        remedy: what to try.
        figures: what the rule looked at, averaged over its window.
    """

    step: int
    name: str
    action: Action
    message: str
    cause: str
    remedy: str
    figures: dict[str, float]

    def as_plain(self) -> dict[str, Any]:
        """Return the line of `alarms.jsonl`."""
        return {
            "step": self.step,
            "alarm": self.name,
            "action": self.action.value,
            "message": self.message,
            "cause": self.cause,
            "remedy": self.remedy,
            "figures": self.figures,
        }


class Alarms:
    """The alarms of a run."""

    def __init__(self, rules: AlarmRules | None = None) -> None:
        """Start before the first step."""
        rules = rules or AlarmRules()
        watches: tuple[_Watch, ...] = (
            _Stagnation(rules.stagnation),
            _Collapse(rules.collapse),
            _DeadGroups(rules.dead_groups),
        )
        self._watches = [watch for watch in watches if watch.action is not Action.OFF]

    def update(self, step: int, figures: Figures) -> list[Alarm]:
        """Take in the figures of the next step; return the alarms that fire now."""
        fired = []
        for watch in self._watches:
            seen = watch.update(figures)
            if seen is not None:
                fired.append(Alarm(step, watch.name, watch.action, *seen))
        return fired


def replay(rows: Iterable[Figures], rules: AlarmRules | None = None) -> list[Alarm]:
    """Return the alarms of a series of steps, such as the lines of `metrics.jsonl`.

    Args:
        rows: figures with `step`, in order; rows without a training step are passed over.
        rules: the defaults if left out.
    """
    alarms = Alarms(rules)
    return [alarm for row in rows if is_training_step(row)
            for alarm in alarms.update(int(row["step"]), row)]  # fmt: skip


_LANGUAGE = ("actor/entropy", "language/garbled", "language/repetition", "rollouts/format_ok")
_MASSES = {
    f"credit/negative_to_positive/{kind}": label
    for kind, label in (("all", "all segments"), ("answer", "answers"), ("search", "searches"))
}


def is_training_step(row: Figures) -> bool:
    """Whether a line of `metrics.jsonl` holds a training step; step 0 is an evaluation."""
    return row.get("step", 0) > 0


class _Seen(NamedTuple):
    message: str
    cause: str
    remedy: str
    figures: dict[str, float]


class _Watch(ABC):
    """One alarm: a window of steps, and whether its rule has held in it."""

    name: str

    def __init__(self, rule: StagnationRule | CollapseRule | DeadGroupsRule) -> None:
        self.action = rule.action
        self._rows: deque[Figures] = deque(maxlen=rule.window)
        self._quiet = rule.window

    def update(self, figures: Figures) -> _Seen | None:
        """Return what is seen if the alarm fires now."""
        self._rows.append(figures)
        window = self._rows.maxlen or 0
        seen = self.look() if len(self._rows) == window else None
        if seen is None:
            self._quiet += 1
            return None
        fires = self._quiet >= window
        self._quiet = 0
        return seen if fires else None

    @abstractmethod
    def look(self) -> _Seen | None:
        """Judge a full window."""

    def mean(self, name: str, rows: Sequence[Figures] | None = None) -> float:
        """Return the mean of a figure over the steps that have it; `nan` if none has."""
        values = self.values(name, rows)
        return sum(values) / len(values) if values else math.nan

    def values(self, name: str, rows: Sequence[Figures] | None = None) -> list[float]:
        """Return the values of a figure, steps that lack it left out."""
        chosen = self._rows if rows is None else rows
        return [float(row[name]) for row in chosen if name in row]


class _Stagnation(_Watch):
    name = "stagnation"

    def __init__(self, rule: StagnationRule) -> None:
        super().__init__(rule)
        self._rule = rule

    def look(self) -> _Seen | None:
        rule, rows = self._rule, list(self._rows)
        half = len(rows) // 2
        searches = self.mean("rollouts/searches")
        rise = self.mean("rollouts/searches", rows[half:]) - self.mean(
            "rollouts/searches", rows[:half]
        )
        gain, low, groups = self._gain()
        if not (searches <= rule.searches and rise < rule.rise and low > 0):
            return None
        several = self.mean("searches/several/share")
        return _Seen(
            f"over the last {len(rows)} steps rollouts made {searches:.2f} searches on average "
            f"(moving by {rise:+.2f}) and {several:.1%} made several, although several earned "
            f"{gain:.3f} more reward than fewer on the same question (at least {low:.3f}, "
            f"{groups:.0f} groups)",
            "rollouts with several searches are compared with short ones that were lucky, and "
            "their correct first searches are punished whenever the answer is wrong; a policy "
            "that starts at one search then stays there",
            "estimator stratified or stratified_calibadv; more rollouts a question "
            "(rollout.group_size) or a higher rollout.temperature, so that several searches are "
            "tried; check that environment.limits.max_searches allows them and that the training "
            "questions need them",
            {
                "rollouts/searches": searches,
                "searches/rise": rise,
                "searches/several/share": several,
                "searches/gain": gain,
                "searches/gain_low": low,
                "searches/gain_groups": groups,
            },
        )

    def _gain(self) -> tuple[float, float, float]:
        """Return the pooled gain of several searches, its lower 95 % end, and the groups."""
        groups = total = squares = 0.0
        for row in self._rows:
            n = row.get("searches/gain_groups", 0)
            if n and "searches/gain" in row:
                groups += n
                total += n * row["searches/gain"]
                squares += n * row["searches/gain_square"]
        if groups < 2:
            return math.nan, math.nan, groups
        mean = total / groups
        variance = max(squares / groups - mean * mean, 0.0) * groups / (groups - 1)
        return mean, mean - t95(int(groups) - 1) * math.sqrt(variance / groups), groups


class _Collapse(_Watch):
    name = "collapse"

    def __init__(self, rule: CollapseRule) -> None:
        super().__init__(rule)
        self._rule = rule
        self._normal: dict[str, float] = {}
        self._peak = -math.inf
        self._best_format = -math.inf

    def look(self) -> _Seen | None:
        now = {name: self.mean(name) for name in _LANGUAGE if self.values(name)}
        # A step with hardly any positive credit has a huge ratio, which would carry a mean.
        now |= {name: median(values) for name in _MASSES if (values := self.values(name))}
        for name, value in now.items():
            self._normal.setdefault(name, value)
        self._peak = max(self._peak, now.get("actor/entropy", -math.inf))
        self._best_format = max(self._best_format, now.get("rollouts/format_ok", -math.inf))
        of_language = [
            sign
            for sign in (
                self._entropy(now), self._garbled(now), self._repetition(now), self._format(now)
            )
            if sign
        ]  # fmt: skip
        signs = of_language + [sign for sign in (self._negative(now),) if sign]
        if not of_language or len(signs) < self._rule.signs:
            return None
        return _Seen(
            f"over the last {len(self._rows)} steps {'; '.join(signs)}",
            "negative credit outweighs positive credit and pushes probability away from the "
            "language itself, or the learning rate is too high for it; correct searches of wrong "
            "rollouts that are punished add to both",
            "estimator calibadv or stratified_calibadv with balance = 1; a lower optimizer.lr; "
            "loss.kl of about 0.001; environment.think_in_prompt = true; go back to a checkpoint "
            "from before the signs began (docs/diagnostics.md)",
            now | {f"{name}/normal": value for name, value in self._normal.items()},
        )

    def _entropy(self, now: Figures) -> str | None:
        value, normal = now.get("actor/entropy"), self._normal.get("actor/entropy", math.nan)
        risen = self._rule.entropy * normal
        if value is None or not self._peak >= risen:
            return None
        if value >= risen:
            return f"entropy rose to {value:.3f} from {normal:.3f}"
        if value <= self._rule.plunge * self._peak:
            return f"entropy fell to {value:.3f} after it had risen to {self._peak:.3f}"
        return None

    def _garbled(self, now: Figures) -> str | None:
        value = now.get("language/garbled")
        if value is None or value < self._rule.garbled:
            return None
        return f"{value:.1%} of the turns are garbled"

    def _repetition(self, now: Figures) -> str | None:
        value = now.get("language/repetition")
        normal = self._normal.get("language/repetition", math.nan)
        if value is None or not value >= normal + self._rule.repetition:
            return None
        return f"{value:.1%} of the 4-grams repeat, after {normal:.1%} at first"

    def _format(self, now: Figures) -> str | None:
        value = now.get("rollouts/format_ok")
        if value is None or value > self._best_format - self._rule.format:
            return None
        return f"{value:.1%} of the rollouts keep the format, after {self._best_format:.1%}"

    def _negative(self, now: Figures) -> str | None:
        worst = max(_MASSES, key=lambda name: now.get(name, -math.inf))
        value = now.get(worst, -math.inf)
        if value < self._rule.negative:
            return None
        return f"negative credit is {value:.2f} times positive on {_MASSES[worst]}"


class _DeadGroups(_Watch):
    name = "dead_groups"

    def __init__(self, rule: DeadGroupsRule) -> None:
        super().__init__(rule)
        self._rule = rule

    def look(self) -> _Seen | None:
        kinds = ("effective", "too_easy", "too_hard", "lone", "unscored", "missing")
        counts = {kind: sum(self.values(f"groups/{kind}")) for kind in kinds}
        everything = sum(counts.values())
        if not everything or counts["effective"] >= self._rule.share * everything:
            return None
        shares = {kind: count / everything for kind, count in counts.items()}
        if shares["too_easy"] > shares["too_hard"]:
            cause = "the policy answers nearly all training questions: there is nothing to learn"
            remedy = "harder questions; rollout.filter_groups = true; or end the run here"
        else:
            cause = (
                "the questions are too hard for the policy, the reward asks for more than it can "
                "do yet, or the search engine or the format fails it"
            )
            remedy = (
                "easier questions or a warm start; a reward that tells wrong rollouts apart "
                "(f1_plus, starter); more rollouts a question; rollout.filter_groups = true; read "
                "a few rollouts with evenhand audit"
            )
        return _Seen(
            f"over the last {len(self._rows)} steps only {shares['effective']:.1%} of "
            f"{everything:.0f} groups had rewards that differ ({shares['too_easy']:.1%} too easy, "
            f"{shares['too_hard']:.1%} too hard, {shares['unscored']:.1%} unscored)",
            cause,
            remedy,
            {f"groups/{kind}": share for kind, share in shares.items()},
        )
