"""Slow, independent re-implementations of the official answer scores, for tests.

Written from the published definitions, one character or word at a time, without regular
expressions, counters or anything of `evenhand.task.scoring`. They are official: without the two
deviations that evenhand makes.

Sources: SQuAD v1.1, section 6.1 of Rajpurkar et al. 2016 (arXiv 1606.05250) and the evaluation
script it points to; HotpotQA, section 5.1 of Yang et al. 2018 (arXiv 1809.09600) and
`hotpot_evaluate_v1.py` for the rule on yes, no and noanswer.
"""

from __future__ import annotations

from collections.abc import Sequence

_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_ARTICLES = ("a", "an", "the")
_CLOSED = ("yes", "no", "noanswer")


def official_words(text: str) -> list[str]:
    """Return the words that are compared: lower case, no ASCII punctuation, no articles.

    An article is a maximal run of letters, digits and underscores that reads a, an or the; what
    touches it on either side (an en dash, say) stays.
    """
    kept = ""
    for char in text.lower():
        if char not in _PUNCTUATION:
            kept = kept + char
    without = ""
    run = ""
    for char in kept + " ":
        if char.isalnum():
            run = run + char
        else:
            without = without + (" " if run in _ARTICLES else run) + char
            run = ""
    return without.split()


def official_exact_match(prediction: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the words equal those of a gold, in order (SQuAD v1.1 and HotpotQA alike)."""
    best = 0.0
    for gold in golds:
        if official_words(prediction) == official_words(gold):
            best = 1.0
    return best


def squad_f1(prediction: str, golds: Sequence[str]) -> float:
    """Return SQuAD v1.1's F1: the largest over the golds."""
    best = 0.0
    for gold in golds:
        best = max(best, _f1(official_words(prediction), official_words(gold)))
    return best


def hotpotqa_f1(prediction: str, golds: Sequence[str]) -> float:
    """Return HotpotQA's F1, the largest over the golds (the script itself takes one gold)."""
    best = 0.0
    for gold in golds:
        mine, theirs = official_words(prediction), official_words(gold)
        closed = " ".join(mine) in _CLOSED or " ".join(theirs) in _CLOSED
        if closed and mine != theirs:
            continue
        best = max(best, _f1(mine, theirs))
    return best


def _f1(mine: list[str], theirs: list[str]) -> float:
    left = list(theirs)
    same = 0
    for word in mine:
        if word in left:
            left.remove(word)
            same = same + 1
    if same == 0:
        return 0.0
    precision = same / len(mine)
    recall = same / len(theirs)
    return 2 * precision * recall / (precision + recall)
