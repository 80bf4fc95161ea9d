"""What came out of runs: figures before and after with intervals, and two or three sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evenhand.core.errors import DataError
from evenhand.diagnostics.findings import number
from evenhand.diagnostics.intervals import NOTHING, Estimate, mean, proportion
from evenhand.pages.runs import Family, Run, State
from evenhand.training.run_folder import RunFolder
from evenhand.trajectory import StopReason, read_trajectories

BY_HOPS = "eval/hops_"


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """A figure of the first and of the last evaluation.

    Attributes:
        name: of the figure, in words.
        n: questions, of the last evaluation.
        before: first evaluation.
        after: last evaluation.
        change: after minus before, paired by seed, or by question where there is one run.
    """

    name: str
    n: int
    before: Estimate
    after: Estimate
    change: Estimate


def over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean over seeds with its interval (Student's t); none for one seed."""
    if not values:
        return NOTHING
    return mean(np.array(values, dtype=np.float64), np.arange(len(values)))


def before_after(family: Family) -> list[BeforeAfter]:
    """Return the figures of a family's first and last evaluations; empty without an evaluation.

    Several seeds: means over seeds with their intervals. One run: Wilson intervals for exact
    match, and a change paired by question where the run folder holds both evaluations' rollouts.
    """
    evaluated = [(run, rows) for run in family.runs if (rows := run.evaluations())]
    # A seed that has only been evaluated once has no "after": it would count as no change.
    twice = [(run, rows) for run, rows in evaluated if len(rows) > 1]
    pairs = [(run, rows[0], rows[-1]) for run, rows in twice or evaluated]
    if not pairs:
        return []
    hops = sorted({_hops(key) for _, _, row in pairs for key in row if key.startswith(BY_HOPS)})
    wanted = [("exact match", "eval/exact_match", "eval/n")]
    wanted += [("F1", "eval/f1", "eval/n"), ("searches a question", "eval/searches", "eval/n")]
    wanted += [("format obeyed", "eval/format_ok", "eval/n")]
    wanted += [
        (f"exact match, {h} hop{'' if h == 1 else 's'}", f"{BY_HOPS}{h}/exact_match",
         f"{BY_HOPS}{h}/n") for h in hops
    ]  # fmt: skip
    found = []
    for name, key, n_key in wanted:
        mine = [pair for pair in pairs if key in pair[1] and key in pair[2]]
        if mine:
            found.append(_one(name, key, n_key, mine))
    return found


def _hops(key: str) -> int:
    number_of = key.removeprefix(BY_HOPS).partition("/")[0]
    return int(number_of) if number_of.isdigit() else -1


def _one(
    name: str, key: str, n_key: str, pairs: Sequence[tuple[Run, Mapping[str, float],
    Mapping[str, float]]],
) -> BeforeAfter:  # fmt: skip
    n = int(pairs[0][2].get(n_key, 0))
    if len(pairs) > 1:
        firsts, lasts = [p[1][key] for p in pairs], [p[2][key] for p in pairs]
        moved = [b - a for a, b in zip(firsts, lasts, strict=True)]
        bounds = (0.0, 1.0) if _is_share(key) else (-math.inf, math.inf)
        before, after = _inside(over_seeds(firsts), *bounds), _inside(over_seeds(lasts), *bounds)
        change = _inside(over_seeds(moved), -bounds[1], bounds[1])
        return BeforeAfter(name, n, before, after, change)
    run, first, last = pairs[0]
    change = Estimate(last[key] - first[key], math.nan, math.nan, n)
    if key == "eval/exact_match" and first is not last:
        change = _paired(run, int(first["step"]), int(last["step"])) or change
    return BeforeAfter(name, n, _of_one(first, key, n_key), _of_one(last, key, n_key), change)


def _is_share(key: str) -> bool:
    return key.endswith(("exact_match", "/f1", "/format_ok"))


def _inside(estimate: Estimate, low: float, high: float) -> Estimate:
    """Cut an interval at the ends of what is possible; `nan` stays."""
    ends = np.clip([estimate.low, estimate.high], low, high)
    return Estimate(estimate.value, float(ends[0]), float(ends[1]), estimate.n)


def _of_one(row: Mapping[str, float], key: str, n_key: str) -> Estimate:
    n = int(row.get(n_key, 0))
    if n and (key.endswith("exact_match") or key == "eval/format_ok"):
        return proportion(round(row[key] * n), n)
    return Estimate(row[key], math.nan, math.nan, n)


def _paired(run: Run, first: int, last: int) -> Estimate | None:
    """Return the change in exact match over the questions of both evaluations, if recorded."""
    before, after = _exact(run, first), _exact(run, last)
    both = sorted(before.keys() & after.keys())
    if len(both) < 2:
        return None
    change = np.array([after[q] - before[q] for q in both], dtype=np.float64)
    return mean(change, np.arange(len(both)))


def _exact(run: Run, step: int) -> dict[str, float]:
    path = RunFolder(run.path).evaluations / f"step-{step:06d}.jsonl.gz"
    if not path.is_file():
        return {}
    try:
        return {
            t.question_id or t.question: float((t.scores or {}).get("exact_match") or 0.0)
            for t in read_trajectories(path)
            if t.stop_reason is not StopReason.FAILED
        }
    except DataError:
        return {}


# --- sentences -----------------------------------------------------------------------------------


def summary(families: Sequence[Family]) -> list[str]:
    """Return two or three sentences: what happened, who is ahead, which alarms fired."""
    found = [_stories(families) if len(families) > 2 else " ".join(map(_story, families))]
    if len(families) > 1:
        found.append(_comparison(families))
    found.append(_alarms(families))
    return [sentence for sentence in found if sentence]


def _head(family: Family) -> str:
    runs = family.runs
    head = family.label
    if len(runs) > 1:
        head += f" ({len(runs)} seeds)"
    last = sorted({run.last_step for run in runs})
    head += f", {last[0]}" if len(last) == 1 else f", {last[0]} to {last[-1]}"
    head += " step" if last == [1] else " steps"
    unfinished = sum(run.state is not State.FINISHED for run in runs)
    if unfinished and len(runs) > 1:
        return f"{head} so far ({unfinished} of {len(runs)} not finished)"
    return f"{head} so far" if unfinished else head


def _story(family: Family) -> str:
    """Say what happened to one family."""
    figures = {row.name: row for row in before_after(family)}
    exact = figures.get("exact match")
    if exact is None:
        return f"{_head(family)}: {_reward_story(family)}"
    searches = figures.get("searches a question")
    if all(len(run.evaluations()) < 2 for run in family.runs):
        text = f"exact match on {exact.n:,} questions is {number(exact.after, 3)}"
        if searches:
            text += f" with {number(searches.after)} searches a question"
        return f"{_head(family)}: {text}; there is no second evaluation to compare with."
    text = (
        f"exact match on {exact.n:,} held-out questions {_verb(exact)} from "
        f"{number(exact.before, 3)} to {number(exact.after, 3)}"
    )
    if math.isfinite(exact.change.low):
        text += f" (change {_signed(exact.change)})"
    if searches:
        text += f"; searches a question from {number(searches.before)} to {number(searches.after)}"
    return f"{_head(family)}: {text}."


def _verb(row: BeforeAfter) -> str:
    """`rose` or `fell` if the interval of the change says so, or both intervals lie apart."""
    if row.change.low > 0 or row.after.low > row.before.high:
        return "rose"
    if row.change.high < 0 or row.after.high < row.before.low:
        return "fell"
    return "went"


def _stories(families: Sequence[Family]) -> str:
    """Say the same of many families in one sentence."""
    parts = []
    for family in families:
        exact = next((row for row in before_after(family) if row.name == "exact match"), None)
        if exact is not None:
            parts.append(f"{_head(family)}: {_short(exact.before)} to {number(exact.after, 3)}")
    if not parts:
        return " ".join(map(_story, families))
    return f"Exact match on held-out questions, first to last evaluation. {'; '.join(parts)}."


def _short(estimate: Estimate) -> str:
    return f"{estimate.value:.3f}"


def _signed(estimate: Estimate) -> str:
    text = number(estimate, 3)
    return text if text.startswith("-") else f"+{text}"


def _reward_story(family: Family) -> str:
    """What can be said without an evaluation: rewards of the first and last batches."""
    firsts, lasts = [], []
    for run in family.runs:
        rewards = [row["critic/score/mean"] for row in run.rows if "critic/score/mean" in row]
        tenth = max(1, len(rewards) // 10)
        if rewards:
            firsts.append(float(np.mean(rewards[:tenth])))
            lasts.append(float(np.mean(rewards[-tenth:])))
    if not firsts:
        return "no figure was recorded."
    return (
        f"mean training reward went from {number(over_seeds(firsts), 3)} (first tenth of the "
        f"steps) to {number(over_seeds(lasts), 3)} (last tenth); no evaluation was recorded."
    )


def _exact_at(family: Family) -> dict[int, dict[object, float]]:
    """Return step -> seed -> exact match of the evaluations of a family, step 0 left out."""
    found: dict[int, dict[object, float]] = {}
    for at, run in enumerate(family.runs):
        for row in run.evaluations():
            if row["step"] > 0:
                seed = run.settings.get("seed", at)
                found.setdefault(int(row["step"]), {})[seed] = row["eval/exact_match"]
    return found


def _comparison(families: Sequence[Family]) -> str:
    """Say whether the best family is ahead of the others beyond what seeds explain.

    Families are compared after the same number of steps: the last that all have evaluated.
    """
    evaluated = {f.label: found for f in families if (found := _exact_at(f))}
    common = set.intersection(*(set(found) for found in evaluated.values())) if evaluated else set()
    if len(evaluated) < 2 or not common:
        return ""
    step = max(common)
    values = {name: found[step] for name, found in evaluated.items()}
    means = {name: float(np.mean(list(by_seed.values()))) for name, by_seed in values.items()}
    best, *others = sorted(means, key=lambda name: -means[name])
    clear: list[str] = []
    unclear: list[str] = []
    alone: list[str] = []
    for name in others:
        seeds = sorted(values[best].keys() & values[name].keys(), key=str)
        if len(seeds) < 2:
            alone.append(f"{name} ({means[name]:.3f})")
            continue
        change = over_seeds([values[best][s] - values[name][s] for s in seeds])
        # Equal in every seed: no spread, and nothing to be ahead of.
        ahead = change.low > 0
        (clear if ahead else unclear).append(f"{name} by {number(change, 3)}")
    text = f"At step {step}, the last that all have evaluated, {best} is highest"
    text += f" ({means[best]:.3f})"
    if clear:
        text += f", ahead of {_list(clear)}"
    if unclear:
        text += f"{'; ' if clear else ', '}no clear difference to {_list(unclear)}"
    if clear or unclear:
        text += " (paired by seed)"
    if alone:
        text += f"; nothing can be said against {_list(alone)} with fewer than two seeds in common"
    return text + "."


def _list(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _alarms(families: Sequence[Family]) -> str:
    parts = []
    for family in families:
        fired = [(run, alarm) for run in family.runs for alarm in run.alarms]
        for name in dict.fromkeys(alarm.alarm for _, alarm in fired):
            first = min(alarm.step for _, alarm in fired if alarm.alarm == name)
            runs = len({run.path for run, alarm in fired if alarm.alarm == name})
            where = f"{runs} of {len(family.runs)} runs of " if len(family.runs) > 1 else ""
            parts.append(f"{name} in {where}{family.label}, first at step {first}")
    return f"Alarms: {'; '.join(parts)}." if parts else "No alarm fired."
