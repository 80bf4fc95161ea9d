"""From the figures of an audit to sentences: what stands out, and what the files cannot tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from evenhand.diagnostics.intervals import Estimate

if TYPE_CHECKING:
    from evenhand.diagnostics.audit import Audit, EstimatorRow


class Level(StrEnum):
    """How much a finding matters."""

    NOTE = "note"
    """Worth knowing."""
    WARNING = "warning"
    """Likely to hurt training."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about the rollouts.

    Attributes:
        level: how much it matters.
        text: the sentence, with its numbers.
    """

    level: Level
    text: str


def percent(estimate: Estimate) -> str:
    """Return `12.3 % [10.1, 14.8] of 900`; `unknown (0)` where there is nothing to count."""
    if estimate.n == 0:
        return "unknown (0)"
    text = f"{100 * estimate.value:.1f} %"
    if not math.isnan(estimate.low):
        text += f" [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
    return f"{text} of {estimate.n:,}"


def number(estimate: Estimate, digits: int = 2) -> str:
    """Return `1.23 [1.10, 1.36]`, without brackets where there is no interval."""
    if math.isnan(estimate.value):
        return "unknown"
    text = plain(estimate.value, digits)
    if math.isnan(estimate.low):
        return text
    return f"{text} [{plain(estimate.low, digits)}, {plain(estimate.high, digits)}]"


def plain(value: float, digits: int) -> str:
    """Return a number with that many digits, or with three significant ones if it is large."""
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.3g}"


def language_rows(audit: Audit) -> list[tuple[str, str]]:
    """Return what the policy wrote as names and texts."""
    language = audit.language
    unknown = "unknown: the files hold no log-probabilities"
    has_logprobs = language.entropy.n > 0
    return [
        (
            "entropy",
            f"{number(language.entropy, 3)} nats a token, n {language.entropy.n:,} turns"
            if has_logprobs
            else unknown,
        ),
        ("garbled turns", f"{percent(language.garbled)} turns" if has_logprobs else unknown),
        (
            "repetition",
            f"{number(language.repetition, 3)} of the 4-grams of a turn stand earlier in it, "
            f"n {language.repetition.n:,} turns",
        ),
        ("duplicate queries", f"{percent(language.duplicate_queries)} searches"),
        (
            "several searches",
            f"{number(audit.gain, 3)} more reward than fewer on the same question, "
            f"n {audit.gain.n:,} groups with both",
        ),
    ]


def find(audit: Audit) -> list[Finding]:
    """Return what stands out, the most important first."""
    rows = {row.name: row for row in audit.estimators}
    found = [_groups(audit), *_scores(audit), _structure(audit), *_steps(rows)]
    found += [finding for finding in (_answers(rows),) if finding is not None]
    return sorted(found, key=lambda finding: finding.level is not Level.WARNING)


def _groups(audit: Audit) -> Finding:
    groups = audit.groups
    if groups.has_wrong_ids:
        return Finding(
            Level.WARNING,
            "Every group has a single member, so every group-relative advantage is 0: rollouts of "
            "one question and step must share their group id.",
        )
    text = (
        f"{groups.effective} of {groups.total} groups have rewards that differ and can teach "
        f"(no spread and below {audit.threshold:g}: {groups.too_hard}; no spread and at least "
        f"{audit.threshold:g}: {groups.too_easy}; fewer than two scored rollouts: "
        f"{groups.lone + groups.unscored})."
    )
    share = groups.effective / groups.total
    return Finding(Level.WARNING if share < 0.3 else Level.NOTE, text)


def _scores(audit: Audit) -> list[Finding]:
    found = []
    if audit.format_ok.value < 0.9:
        found.append(
            Finding(
                Level.WARNING,
                f"Only {percent(audit.format_ok)} rollouts obey the protocol. Rollouts that break "
                "it give no silver documents and their searches no step score.",
            )
        )
    if audit.searches.value == 0:
        found.append(
            Finding(Level.WARNING, "No search was executed: there is no structure to stratify.")
        )
    return found


def _structure(audit: Audit) -> Finding:
    between = audit.between
    if math.isnan(between.share):
        return Finding(
            Level.NOTE, "No group has differing rewards: nothing can be said about strata."
        )
    if between.groups == 0:
        return Finding(
            Level.NOTE,
            "No question has rollouts to compare both inside and between strata: nothing can be "
            "said about structure.",
        )
    facts = (
        f"{100 * between.share:.0f} % of the reward variance inside questions lies between strata; "
        f"chance alone gives {100 * between.expected:.0f} % "
        f"[{100 * between.low:.0f}, {100 * between.high:.0f}] "
        f"(groups that can show it: {between.groups}, rollouts: {between.trajectories})"
    )
    if between.has_evidence:
        return Finding(
            Level.WARNING,
            f"{facts}: rollouts of different structure are being compared with one another. "
            "stratified halves that offset at its default alpha; san removes it, and with it the "
            "signal on how often to search.",
        )
    return Finding(Level.NOTE, f"{facts}: no evidence of structure.")


def _steps(rows: dict[str, EstimatorRow]) -> list[Finding]:
    grpo = rows["grpo"].mis_penalised
    if grpo.n == 0:
        return []
    text = f"grpo punishes {percent(grpo)} correct searches (by silver documents)"
    calibadv = rows.get("calibadv")
    if calibadv is not None and not math.isnan(calibadv.penalty_kept):
        text += f"; calibadv keeps {100 * calibadv.penalty_kept:.0f} % of that penalty"
    level = Level.WARNING if grpo.low > 0.2 else Level.NOTE
    return [Finding(level, text + ".")]


def _answers(rows: dict[str, EstimatorRow]) -> Finding | None:
    answer = rows["grpo"].answer_ratio
    if math.isnan(answer.value):
        return None
    text = f"Under grpo negative credit on answers weighs {number(answer)} times the positive"
    if answer.low > 1:
        return Finding(
            Level.WARNING,
            f"{text}: wrong answers have more tokens than right ones, which pushes probability "
            "away from the language itself. The calibrated estimators balance the two.",
        )
    return Finding(Level.NOTE, f"{text}.")


def unknowns(audit: Audit, *, without_golds: int) -> list[str]:
    """Return what the files cannot tell, one sentence each."""
    notes = []
    if without_golds:
        notes.append(
            f"{without_golds:,} of {audit.trajectories:,} rollouts carry no accepted answers: "
            "rewards are taken as recorded and cannot be checked."
        )
    if audit.unscored:
        notes.append(
            f"Rollouts without a reward: {audit.unscored:,}. They get no credit and are left out "
            "of rewards, format, searches and strata; tokens, group sizes and stop reasons count "
            "them."
        )
    silver = audit.silver_groups
    if silver.value < 1:
        notes.append(
            f"Groups without silver documents: {silver.n - round(silver.value * silver.n):,} of "
            f"{silver.n:,} (their best rollouts in valid format stay below {audit.threshold:g} or "
            "returned no document). Which of their searches were correct is unknown; they get the "
            "full penalty."
        )
    if audit.units != ("tokens",):
        notes.append(
            f"Lengths are counted in {' and '.join(audit.units)}, not in tokens alone: masses and "
            "ratios are approximate; convert with --tokenizer for exact ones."
        )
    if not audit.steps:
        notes.append("The files name no training step: all rollouts are taken as one batch.")
    return notes
