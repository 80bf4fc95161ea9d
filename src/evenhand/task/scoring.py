"""Answer scoring: normalisation, exact match, token F1 and containment, by named convention.

`squad` (the default) is the scoring of SQuAD v1.1, which Search-R1, CalibAdv, verl and FlashRAG
share; `hotpotqa` adds HotpotQA's rule for closed answers; `lenient` forgives more of the spelling.
Examples of where they differ stand in `docs/search-and-scoring.md`.

Two deviations from the official scripts hold in every convention:

* An empty answer never matches a gold that normalises to nothing. Officially `""` against the gold
  `"A"` is an exact match, because dropping the article leaves nothing of it. Empty means: without a
  letter or digit. An article alone is a word, so `"a"` still matches `"A"`, and a sign still
  matches itself (`"*"` against `"*"`).
* Text is brought to Unicode normal form C first, so that `é` as one and as two characters is equal.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from evenhand.core.errors import ConfigError, DataError
from evenhand.core.plugins import did_you_mean

CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
"""Answers that HotpotQA's F1 compares whole: a part of the words earns nothing."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


@dataclass(frozen=True, slots=True)
class Convention:
    """A named way to compare an answer with a gold.

    Attributes:
        name: the name users write.
        summary: one line on what it does.
        normalise: maps a text to the form that is compared, words separated by single blanks.
        closed: normalised answers that must match whole to earn any F1.
    """

    name: str
    summary: str
    normalise: Callable[[str], str]
    closed: frozenset[str] = frozenset()


@lru_cache(maxsize=1024)  # an answer meets several scores, a gold all rollouts of its question
def _squad(text: str) -> str:
    return _without_articles(unicodedata.normalize("NFC", text).lower().translate(_NO_PUNCTUATION))


def _without_articles(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text).split())


# --- the lenient form ----------------------------------------------------------------------------

# Letters with a stroke and ligatures have no decomposition, so dropping marks does not reach them.
_PLAIN_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "ħ": "h", "ı": "i", "ß": "ss", "æ": "ae", "œ": "oe",
     "þ": "th"}
)  # fmt: skip
_QUOTES = str.maketrans("", "", "‘’‚‛“”„‟′″‹›«»´")
_DASH = re.compile("[-\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")

_BELOW_TWENTY = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_UNITS = {word: value for value, word in enumerate(_BELOW_TWENTY)}
_TENS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80,
    "ninety": 90,
}  # fmt: skip
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_DIGITS = re.compile(r"\d{1,15}")


def _lenient(text: str) -> str:
    flat = unicodedata.normalize("NFC", text).lower().translate(_PLAIN_LETTERS)
    marked = unicodedata.normalize("NFD", flat)
    bare = "".join(char for char in marked if unicodedata.category(char) != "Mn")
    spaced = _DASH.sub(" ", bare.translate(_QUOTES)).translate(_NO_PUNCTUATION)
    return " ".join(_numbers_as_digits(_without_articles(spaced).split()))


def _numbers_as_digits(words: list[str]) -> list[str]:
    out: list[str] = []
    at = 0
    while at < len(words):
        value, after = _number(words, at)
        # Digits that stand alone keep their spelling: 007 is not 7.
        alone = after == at + 1 and words[at].isdecimal()
        out.append(words[at] if value is None or alone else str(value))
        at = after
    return out


def _number(words: list[str], at: int) -> tuple[int | None, int]:
    """Return the longest number that starts at `at` and the index after it (None: no number).

    A number is a sum of groups below 1000, each with a smaller scale than the one before; digits
    are a group too (`3 million`). `hundred` and the scales may open a number: the article before
    them has been dropped.
    """
    total, limit, start = 0, 10**15, at
    while at < len(words):
        skip = 1 if at > start and words[at] == "and" else 0
        group, after = _group(words, at + skip)
        scale = _SCALES.get(words[after]) if after < len(words) else None
        if group is None and (scale is None or skip or at > start):
            break
        if scale is None:
            if group is None or group >= limit:
                break
            return total + group, after
        if scale >= limit:
            break
        total += (1 if group is None else group) * scale
        limit, at = scale, after + 1
    return (total, at) if at > start else (None, start + 1)


def _group(words: list[str], at: int) -> tuple[int | None, int]:
    """Return the value of a group below 1000 (or of digits) and the index after it."""
    word = words[at] if at < len(words) else ""
    if _DIGITS.fullmatch(word):
        return int(word), at + 1
    value, after = _below_hundred(words, at)
    if after < len(words) and words[after] == "hundred" and (value is None or 0 < value < 20):
        hundreds = 100 * (1 if value is None else value)
        rest = after + 2 if after + 1 < len(words) and words[after + 1] == "and" else after + 1
        value, end = _below_hundred(words, rest)
        return (hundreds, after + 1) if value is None else (hundreds + value, end)
    return value, after


def _below_hundred(words: list[str], at: int) -> tuple[int | None, int]:
    word = words[at] if at < len(words) else ""
    if word in _UNITS:
        return _UNITS[word], at + 1
    if word not in _TENS:
        return None, at
    unit = _UNITS.get(words[at + 1], 0) if at + 1 < len(words) else 0
    return (_TENS[word] + unit, at + 2) if 0 < unit < 10 else (_TENS[word], at + 1)


# --- the table and the scores --------------------------------------------------------------------

CONVENTIONS: dict[str, Convention] = {
    "squad": Convention(
        "squad", "lower case, no ASCII punctuation, no a/an/the, single blanks", _squad
    ),
    "hotpotqa": Convention(
        "hotpotqa",
        "squad; in F1, yes/no/noanswer on either side must match whole",
        _squad,
        CLOSED_ANSWERS,
    ),
    "lenient": Convention(
        "lenient",
        "squad; also no accents or typographic quotes, dashes are blanks, number words are digits",
        _lenient,
    ),
}


class TokenScore(NamedTuple):
    """Token overlap of an answer with the gold that it fits best; each in [0, 1]."""

    f1: float
    precision: float
    recall: float


def get_convention(name: str) -> Convention:
    """Return the convention of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return CONVENTIONS[name]
    except KeyError:
        raise ConfigError(
            f"unknown scoring convention {name!r}; valid: {', '.join(CONVENTIONS)}"
            + did_you_mean(name, CONVENTIONS)
        ) from None


def folded(text: str) -> str:
    """Return the text brought to Unicode form C, case folded, with blanks squeezed.

    This is what decides whether two titles or passages are the same.
    """
    # Form C may join a letter and a mark in lower case only, so folding can leave it.
    text = unicodedata.normalize("NFC", text).casefold()
    return " ".join(unicodedata.normalize("NFC", text).split())


def normalise(text: str, convention: str = "squad") -> str:
    """Return the form of `text` that is compared: words separated by single blanks.

    `squad` and `hotpotqa`: Unicode form C, lower case, ASCII punctuation deleted (`"U.S."` becomes
    `us`, `"well-known"` becomes `wellknown`), the words a, an, the dropped, blanks squeezed.
    `lenient`: also combining marks dropped, letters such as ø and æ spelled plainly, typographic
    quotation marks deleted, every dash (the ASCII hyphen included) turned into a blank, cardinal
    number words written as digits (`"two hundred and five"` becomes `205`; a year in two halves
    such as `"nineteen eighty"` becomes `19 80`).

    The result may be empty: `"The The"`, `"A+"` and `"*"` normalise to nothing.

    Raises:
        ConfigError: unknown convention.
    """
    return get_convention(convention).normalise(text)


def exact_match(
    prediction: str | None, golds: str | Iterable[str], *, convention: str = "squad"
) -> float:
    """Return 1.0 if the normalised prediction equals a normalised gold, else 0.0.

    Args:
        prediction: the answer; `None` (there is none) scores 0.
        golds: accepted answers; a bare string is one gold.
        convention: `squad`, `hotpotqa` (the same here) or `lenient`.

    An empty answer scores 0. Where both sides normalise to nothing they match if the answer holds a
    word (`"a"` against `"A"`), or is the same text but for case and blanks (`"*"` against `"*"`).

    Raises:
        DataError: no gold, or a gold or prediction that is not text.
        ConfigError: unknown convention.

    Source: Rajpurkar et al. 2016 (SQuAD) and its script for v1.1.
    """
    rule, accepted = get_convention(convention), _accepted(golds)
    _check_prediction(prediction)
    if prediction is None:
        return 0.0
    mine = rule.normalise(prediction)
    return float(any(_matches(prediction, mine, gold, rule) for gold in accepted))


def f1(prediction: str | None, golds: str | Iterable[str], *, convention: str = "squad") -> float:
    """Return the token F1 with the gold that fits best, in [0, 1]; see `token_scores`."""
    return token_scores(prediction, golds, convention=convention).f1


def token_scores(
    prediction: str | None, golds: str | Iterable[str], *, convention: str = "squad"
) -> TokenScore:
    """Return F1, precision and recall over normalised words, for the gold with the largest F1.

    With `same` the size of the multiset intersection, precision is `same / words of the
    prediction`, recall `same / words of the gold`, and F1 their harmonic mean. A repeated word
    counts as often as both sides hold it. All three are 0 where nothing is shared, so also where
    either side normalises to nothing: there, as in the official scripts, F1 is 0 even if
    `exact_match` is 1. `hotpotqa`: 0 if either side is yes, no or noanswer and they differ.

    Args:
        prediction: the answer; `None` (there is none) scores 0.
        golds: accepted answers; a bare string is one gold. Of golds with equal F1 the first counts.
        convention: `squad`, `hotpotqa` or `lenient`.

    Raises:
        DataError: no gold, or a gold or prediction that is not text.
        ConfigError: unknown convention.

    Source: Rajpurkar et al. 2016 (SQuAD); Yang et al. 2018 (HotpotQA) for the closed answers.
    """
    rule, accepted = get_convention(convention), _accepted(golds)
    _check_prediction(prediction)
    if prediction is None:
        return TokenScore(0.0, 0.0, 0.0)
    mine = rule.normalise(prediction)
    return max(
        (_overlap(mine, rule.normalise(gold), rule.closed) for gold in accepted),
        key=lambda score: score.f1,
    )


def contains(
    prediction: str | None, golds: str | Iterable[str], *, convention: str = "squad"
) -> float:
    """Return 1.0 if a normalised gold occurs in the normalised prediction as whole words, else 0.0.

    Whole words: `"Parisian"` does not contain `"Paris"`, as it does where substrings are compared
    (Search-R1's `subem`, FlashRAG's `acc`). A gold that normalises to nothing is contained only
    where it matches exactly; so containment is never below exact match.

    Args:
        prediction: the answer; `None` (there is none) scores 0.
        golds: accepted answers; a bare string is one gold.
        convention: `squad`, `hotpotqa` (the same here) or `lenient`.

    Raises:
        DataError: no gold, or a gold or prediction that is not text.
        ConfigError: unknown convention.
    """
    rule, accepted = get_convention(convention), _accepted(golds)
    _check_prediction(prediction)
    if prediction is None:
        return 0.0
    mine = rule.normalise(prediction)
    for gold in accepted:
        wanted = rule.normalise(gold)
        if (wanted and f" {wanted} " in f" {mine} ") or _matches(prediction, mine, gold, rule):
            return 1.0
    return 0.0


def is_closed_answer(golds: str | Iterable[str]) -> bool:
    """Whether every gold is yes, no or noanswer: a word that any passage may hold by chance."""
    return all(_squad(gold) in CLOSED_ANSWERS for gold in _accepted(golds))


def _matches(prediction: str, mine: str, gold: str, rule: Convention) -> bool:
    if mine != rule.normalise(gold):
        return False
    if mine or any(char.isalnum() for char in prediction):
        return True
    return folded(prediction) == folded(gold) != ""


def _overlap(prediction: str, gold: str, closed: frozenset[str]) -> TokenScore:
    if prediction != gold and (prediction in closed or gold in closed):
        return TokenScore(0.0, 0.0, 0.0)
    mine, theirs = prediction.split(), gold.split()
    same = (Counter(mine) & Counter(theirs)).total()
    if same == 0:
        return TokenScore(0.0, 0.0, 0.0)
    precision, recall = same / len(mine), same / len(theirs)
    return TokenScore(2 * precision * recall / (precision + recall), precision, recall)


def _check_prediction(prediction: str | None) -> None:
    if prediction is not None and not isinstance(prediction, str):
        raise DataError(f"an answer must be text or None, got {prediction!r:.40}")


def _accepted(golds: str | Iterable[str]) -> tuple[str, ...]:
    try:
        # Iterating a bare string would compare with its letters.
        accepted = (golds,) if isinstance(golds, str) else tuple(golds)
    except TypeError:
        raise DataError(f"accepted answers must be a list of texts, got {golds!r:.40}") from None
    if not accepted:
        raise DataError("the list of accepted answers is empty; give at least one answer")
    for gold in accepted:
        if not isinstance(gold, str):
            raise DataError(f"an accepted answer must be text, got {gold!r:.40}")
    return accepted
