"""Silver documents and the step correctness of searches (arXiv 2604.18235).

Silver documents of a group are those that its best successful rollouts retrieved. A search of any
rollout of the group is correct to the degree to which it found silver documents that the rollout
had not seen before. No gold passage is needed, and none is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from evenhand.core.arrays import MAX_REWARD
from evenhand.core.settings import check_choice, check_number
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import thought

STEP_SCORES = ("fraction", "count_max", "count_mean")


@dataclass(frozen=True, slots=True)
class EvidenceSettings:
    """How step scores are computed.

    Attributes:
        step_score: with `R` the list of documents that the search returned and `new` the silver
            ones among them that no earlier position of the rollout returned,
            `"fraction"`: `|new| / |R|`, as in the paper;
            `"count_max"`: max over `new` of `m / M`;
            `"count_mean"`: sum over `new` of `m / M`, divided by `|R|`,
            where `m` is the number of best rollouts that returned the document and `M` the
            largest `m` of the group. (The last two follow the behaviour of the released code.)
        threshold: a group has silver documents if its best reward reaches this.
        max_think_similarity: a search whose thought is more similar than this to an earlier one
            of its rollout scores 0; `None` switches the rule off.
    """

    step_score: str = "fraction"
    threshold: float = 0.7
    max_think_similarity: float | None = 0.5

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_choice(self.step_score, "step_score", STEP_SCORES)
        check_number(self.threshold, "threshold", -MAX_REWARD, MAX_REWARD)
        if self.max_think_similarity is not None:
            check_number(self.max_think_similarity, "max_think_similarity", 0.0, 1.0)


def silver_documents(group: Sequence[Trajectory], *, threshold: float = 0.7) -> Counter[str]:
    """Return the silver documents of a group: identity to number of best rollouts with it.

    Best rollouts are those that obey the format and reach the highest reward among the scored,
    format-valid ones of the group, if that reward is at least `threshold`; else there are none and
    the result is empty. Each counts a document once, however often it returned it.
    """
    eligible = [(t.reward, t) for t in group if t.reward is not None and t.format_ok]
    best = max((reward for reward, _ in eligible), default=None)
    counts: Counter[str] = Counter()
    if best is None or best < threshold:
        return counts
    for reward, trajectory in eligible:
        if reward == best:
            counts.update({d.id for s in trajectory.segments for d in s.documents or ()})
    return counts


def step_scores(
    trajectory: Trajectory,
    silver: Mapping[str, int],
    settings: EvidenceSettings = EvidenceSettings(),
) -> list[float]:
    """Return the step score of each executed search of a rollout, in order, each in [0, 1].

    Walking the rollout in order, a document is new if no earlier position returned it, credited or
    not, the same result list included. A search scores 0 if nothing new and silver came back, if
    its thought is too similar to that of an earlier executed search (word-level Levenshtein
    similarity, `1 - distance / longer length`; an empty thought is similar to nothing), if it
    shares two or more distinct documents with one earlier search, if the rollout breaks the
    format, or if the group has no silver documents.

    Args:
        trajectory: a rollout of the group.
        silver: what `silver_documents` returned for its group.
        settings: variant, threshold and similarity rule.
    """
    searches = trajectory.executed_searches()
    if not trajectory.format_ok or not silver:
        return [0.0] * len(searches)
    most = max(silver.values())
    seen: set[str] = set()
    earlier_results: list[set[str]] = []
    earlier_thoughts: list[list[str]] = []
    scores = []
    for at in searches:
        documents = trajectory.segments[at + 1].documents or ()
        counts = []
        for document in documents:
            if document.id not in seen and document.id in silver:
                counts.append(silver[document.id])
            seen.add(document.id)
        result = {document.id for document in documents}
        words = thought(trajectory.segments[at].text).split()
        repeats = any(len(result & other) >= 2 for other in earlier_results)
        if counts and not repeats and not _is_similar(words, earlier_thoughts, settings):
            scores.append(_score(counts, len(documents), most, settings.step_score))
        else:
            scores.append(0.0)
        earlier_results.append(result)
        earlier_thoughts.append(words)
    return scores


def _is_similar(words: list[str], earlier: Sequence[list[str]], settings: EvidenceSettings) -> bool:
    limit = settings.max_think_similarity
    if limit is None or not words:
        return False
    return any(
        1 - Levenshtein.distance(words, other) / max(len(words), len(other)) > limit
        for other in earlier
        if other
    )


def _score(counts: Sequence[int], returned: int, most: int, variant: str) -> float:
    if variant == "fraction":
        return len(counts) / returned
    if variant == "count_max":
        return max(counts) / most
    return sum(counts) / most / returned
