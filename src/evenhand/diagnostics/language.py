"""What the policy wrote, judged without a model: garbled, repeated, asked twice, broken.

All figures come from a trajectory file. Those that need the sampler's log-probabilities are unknown
where the file has none. `LanguageBatch` holds one column a figure, parallel to the policy segments
of a `CreditBatch`, so that a step, a file or any group of steps is a matter of which rows are
added up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from evenhand.core.arrays import BoolArray, FloatArray, IntArray, dense, total
from evenhand.credit import CreditBatch
from evenhand.diagnostics.intervals import NOTHING, Estimate, ratio, share
from evenhand.trajectory import Kind, Trajectory

GARBLED = 50.0
"""Perplexity of a policy segment from which it counts as garbled (CalibAdv's monitor)."""

NGRAM = 4
"""Words of one n-gram of `repetition`; 4 is the usual choice (seq-rep-4)."""

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class LanguageBatch:
    """Columns parallel to the `[S]` policy segments of a `CreditBatch`, in its order.

    Attributes:
        surprise: `[S]` minus the summed log-probability, in nats, of the sampled tokens; `nan`
            where the file has none (or the segment no token).
        ngrams: `[S]` word n-grams of the text, repeated ones counted each time.
        repeated: `[S]` those of them that stand earlier in the same segment.
        is_query: `[S]` a search with a query that is not blank, executed or not.
        is_duplicate: `[S]` its query stood earlier in the rollout, but for case and blanks.
    """

    surprise: FloatArray
    ngrams: IntArray
    repeated: IntArray
    is_query: BoolArray
    is_duplicate: BoolArray


def gather_language(trajectories: Sequence[Trajectory]) -> LanguageBatch:
    """Read the columns of all policy segments, in the order in which `credit.gather` has them."""
    surprise: list[float] = []
    ngrams: list[int] = []
    repeated: list[int] = []
    is_query: list[bool] = []
    is_duplicate: list[bool] = []
    for trajectory in trajectories:
        seen: set[str] = set()
        for segment in trajectory.segments:
            if not segment.is_policy:
                continue
            logprobs = segment.logprobs
            known = logprobs is not None and len(logprobs) > 0
            surprise.append(-float(logprobs.sum()) if known else math.nan)  # type: ignore[union-attr]
            count, again = repeated_ngrams(segment.text)
            ngrams.append(count)
            repeated.append(again)
            query = " ".join((segment.query or "").lower().split())
            is_query.append(segment.kind is Kind.SEARCH and bool(query))
            is_duplicate.append(is_query[-1] and query in seen)
            if is_query[-1]:
                seen.add(query)
    return LanguageBatch(
        surprise=np.array(surprise, dtype=np.float64),
        ngrams=np.array(ngrams, dtype=np.int64),
        repeated=np.array(repeated, dtype=np.int64),
        is_query=np.array(is_query, dtype=bool),
        is_duplicate=np.array(is_duplicate, dtype=bool),
    )


def concatenate_language(batches: Sequence[LanguageBatch]) -> LanguageBatch:
    """Join batches in order."""
    return LanguageBatch(
        **{
            item.name: np.concatenate([getattr(batch, item.name) for batch in batches])
            for item in fields(LanguageBatch)
        }
    )


def select_language(batch: LanguageBatch, where: BoolArray) -> LanguageBatch:
    """Return the segments for which `where` (`[S]`) holds."""
    return LanguageBatch(
        **{item.name: getattr(batch, item.name)[where] for item in fields(LanguageBatch)}
    )


def repeated_ngrams(text: str, n: int = NGRAM) -> tuple[int, int]:
    r"""Return how many word n-grams a text has, and how many of them stand earlier in it.

    .. math:: \text{seq-rep-}n = 1 - \frac{|\text{distinct n-grams}|}{|\text{n-grams}|}

    is the second over the first. A word is a run of letters and digits, or one other sign that is
    not blank, so that tags written without blanks count too. A text of fewer than `n` words gives
    `(0, 0)`. In scripts without blanks a run of letters is one word: there the figure is low.

    Source: Welleck et al. (2020), "Neural Text Generation with Unlikelihood Training".
    """
    words = _WORD.findall(text)
    count = len(words) - n + 1
    if count <= 0:
        return 0, 0
    return count, count - len(set(zip(*(words[at:] for at in range(n)), strict=False)))


@dataclass(frozen=True, slots=True)
class Language:
    """The language of some rollouts, with 95 % intervals over groups.

    Attributes:
        entropy: minus the mean log-probability, under the sampler's full softmax, of the tokens it
            sampled, in nats; `n` counts segments. An unbiased estimate of the policy's entropy
            that costs nothing. Unknown (`n = 0`) without log-probabilities.
        garbled: share of the policy segments whose perplexity under the sampler is 50 or more.
        repetition: share of repeated word 4-grams inside policy segments; `n` counts segments that
            are long enough to have one.
        duplicate_queries: share of the searches that repeat an earlier query of the same rollout.
        format_ok: share of the rollouts that obey the protocol.
    """

    entropy: Estimate
    garbled: Estimate
    repetition: Estimate
    duplicate_queries: Estimate
    format_ok: Estimate


def language(batch: CreditBatch, columns: LanguageBatch) -> Language:
    """Return the figures of the scored and unscored rollouts of a batch.

    Unscored rollouts count for what their policy wrote, and not for `format_ok`: an environment
    fault is no fault of the policy.
    """
    group = batch.group[batch.owner]
    known = ~np.isnan(columns.surprise) & (batch.n_tokens > 0)
    tokens = batch.n_tokens[known].astype(np.float64)
    surprise = columns.surprise[known]
    long = columns.ngrams > 0
    scored = ~np.isnan(batch.rewards)
    return Language(
        entropy=_per(surprise, tokens, group[known]),
        garbled=share(is_garbled(surprise, tokens), group[known]),
        repetition=_per(
            columns.repeated[long].astype(np.float64),
            columns.ngrams[long].astype(np.float64),
            group[long],
        ),
        duplicate_queries=share(columns.is_duplicate[columns.is_query], group[columns.is_query]),
        format_ok=share(batch.format_ok[scored], batch.group[scored]),
    )


def is_garbled(surprise: FloatArray, tokens: FloatArray) -> BoolArray:
    """Return `[segments]` whether `exp(surprise / tokens)`, the perplexity, is 50 or more."""
    return np.asarray(surprise >= math.log(GARBLED) * tokens)


def _per(above: FloatArray, below: FloatArray, group: IntArray) -> Estimate:
    """Return the sum of one over that of the other; groups are the independent units."""
    if len(above) == 0:
        return NOTHING
    cells = dense(group)
    return replace(ratio(total(above, cells), total(below, cells)), n=len(above))
