"""Scores against the official scripts' own results, and the conventions' differences.

`data/scoring_pairs.json` holds what SQuAD's `evaluate-v1.1.py` and HotpotQA's
`hotpot_evaluate_v1.py` return, the largest over the golds; `deviation` what evenhand returns where
it deviates on purpose.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenhand.core.errors import ConfigError, DataError
from evenhand.task import scoring
from evenhand.task.scoring import (
    contains,
    exact_match,
    f1,
    is_closed_answer,
    normalise,
    token_scores,
)
from evenhand.testing import scoring as oracle

PAIRS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data/scoring_pairs.json").read_text(encoding="utf-8")
)
OFFICIAL = [pair for pair in PAIRS if "deviation" not in pair]
DEVIATIONS = [pair for pair in PAIRS if "deviation" in pair]

WORDS = st.sampled_from(
    ["a", "The", "an", "yes", "No", "noanswer", "Paris", "new", "York", "U.S.", "-", "–", "", " ",
     "é", "e\u0301", "1,000", "twenty-one", "x_y", "*", "İ", "\u3000"]
)  # fmt: skip
TEXTS = st.lists(WORDS, max_size=5).map(" ".join) | st.text(max_size=12)
GOLDS = st.lists(TEXTS, min_size=1, max_size=3)
CONVENTIONS = st.sampled_from(list(scoring.CONVENTIONS))


def _id(pair: dict[str, Any]) -> str:
    return f"{pair['kind']}: {pair['prediction']!a} against {pair['golds']!a}"


def test_the_table_is_large_and_covers_every_kind() -> None:
    kinds = Counter(pair["kind"] for pair in PAIRS)
    assert sum(kinds.values()) >= 60
    assert set(kinds) == {
        "articles", "punctuation", "unicode", "unicode forms", "numbers", "yes/no", "overlap",
        "empties",
    }  # fmt: skip


@pytest.mark.parametrize("pair", OFFICIAL, ids=_id)
def test_scores_equal_the_official_ones(pair: dict[str, Any]) -> None:
    prediction, golds = pair["prediction"], pair["golds"]
    for convention in ("squad", "hotpotqa"):
        assert exact_match(prediction, golds, convention=convention) == pair["exact_match"]
        assert f1(prediction, golds, convention=convention) == pytest.approx(
            pair[f"{convention}_f1"], abs=1e-12
        )


@pytest.mark.parametrize("pair", DEVIATIONS, ids=_id)
def test_the_two_deviations_are_what_is_listed(pair: dict[str, Any]) -> None:
    prediction, golds, ours = pair["prediction"], pair["golds"], pair["deviation"]
    for convention in ("squad", "hotpotqa"):
        assert exact_match(prediction, golds, convention=convention) == ours["exact_match"]
        assert f1(prediction, golds, convention=convention) == pytest.approx(
            ours[f"{convention}_f1"], abs=1e-12
        )
    assert any(ours[name] != pair[name] for name in ("exact_match", "squad_f1", "hotpotqa_f1"))


def test_there_are_only_two_kinds_of_deviation() -> None:
    for pair in DEVIATIONS:
        texts = [pair["prediction"], *pair["golds"]]
        if pair["deviation"]["rule"] == "nfc":
            assert any(not unicodedata.is_normalized("NFC", text) for text in texts)
        else:
            assert not any(char.isalnum() for char in pair["prediction"])
            assert any(not normalise(gold) for gold in pair["golds"])


@pytest.mark.parametrize("pair", PAIRS, ids=_id)
def test_the_slow_reference_reproduces_the_official_scores(pair: dict[str, Any]) -> None:
    prediction, golds = pair["prediction"], pair["golds"]
    assert oracle.official_exact_match(prediction, golds) == pair["exact_match"]
    assert oracle.squad_f1(prediction, golds) == pytest.approx(pair["squad_f1"], abs=1e-12)
    assert oracle.hotpotqa_f1(prediction, golds) == pytest.approx(pair["hotpotqa_f1"], abs=1e-12)


@given(TEXTS, GOLDS)
def test_scores_equal_the_slow_reference_on_composed_text(
    prediction: str, golds: list[str]
) -> None:
    mine = unicodedata.normalize("NFC", prediction)
    theirs = [unicodedata.normalize("NFC", gold) for gold in golds]
    assert f1(prediction, golds) == pytest.approx(oracle.squad_f1(mine, theirs), abs=1e-12)
    assert f1(prediction, golds, convention="hotpotqa") == pytest.approx(
        oracle.hotpotqa_f1(mine, theirs), abs=1e-12
    )
    if any(char.isalnum() for char in prediction):
        assert exact_match(prediction, golds) == oracle.official_exact_match(mine, theirs)


@given(TEXTS)
def test_normalisation_equals_the_slow_reference(text: str) -> None:
    composed = unicodedata.normalize("NFC", text)
    assert normalise(text).split() == oracle.official_words(composed)


@given(st.text(alphabet=" .,-*!\t\n–", max_size=6), GOLDS, CONVENTIONS)
def test_an_answer_without_a_word_matches_only_the_same_text(
    prediction: str, golds: list[str], convention: str
) -> None:
    same = any(gold.split() == prediction.split() != [] for gold in golds)
    nothing_left = not normalise(prediction, convention)
    if nothing_left and not same:
        assert exact_match(prediction, golds, convention=convention) == 0.0
        assert contains(prediction, golds, convention=convention) == 0.0


@pytest.mark.parametrize("convention", scoring.CONVENTIONS)
@pytest.mark.parametrize(
    ("prediction", "gold", "right"),
    [("", "A", 0.0), ("", "The The", 0.0), ("The The", "The The", 1.0), ("a", "A", 1.0)],
)
def test_an_empty_answer_never_matches_a_gold_of_articles(
    convention: str, prediction: str, gold: str, right: float
) -> None:
    assert exact_match(prediction, gold, convention=convention) == right
    assert contains(prediction, gold, convention=convention) == right


@pytest.mark.parametrize("convention", scoring.CONVENTIONS)
def test_no_answer_scores_nothing(convention: str) -> None:
    for score in (exact_match, f1, contains):
        assert score(None, ["A", "Paris"], convention=convention) == 0.0


@given(TEXTS, GOLDS, CONVENTIONS)
def test_scores_lie_in_the_unit_interval_and_are_ordered(
    prediction: str, golds: list[str], convention: str
) -> None:
    match = exact_match(prediction, golds, convention=convention)
    score = token_scores(prediction, golds, convention=convention)
    assert match in (0.0, 1.0)
    assert match <= contains(prediction, golds, convention=convention) <= 1.0
    for part in score:
        assert 0.0 <= part <= 1.0
    assert min(score.precision, score.recall) - 1e-12 <= score.f1
    assert score.f1 <= max(score.precision, score.recall) + 1e-12
    if match and normalise(prediction, convention):
        assert score == (1.0, 1.0, 1.0)


@given(TEXTS, GOLDS, CONVENTIONS)
def test_a_further_gold_never_lowers_a_score(
    prediction: str, golds: list[str], convention: str
) -> None:
    for score in (exact_match, f1, contains):
        assert score(prediction, golds, convention=convention) >= score(
            prediction, golds[:1], convention=convention
        )


@given(TEXTS, TEXTS)
def test_the_conventions_agree_on_exact_match_but_for_lenient(prediction: str, gold: str) -> None:
    assert exact_match(prediction, gold, convention="hotpotqa") == exact_match(prediction, gold)


@given(st.text(max_size=20))
@example("an an")
def test_every_text_with_a_word_matches_itself(text: str) -> None:
    if any(char.isalnum() for char in text):
        for convention in scoring.CONVENTIONS:
            assert exact_match(text, [text], convention=convention) == 1.0


# --- golds as they come from files ---------------------------------------------------------------


@pytest.mark.parametrize("score", [exact_match, f1, contains])
def test_a_bare_gold_is_one_answer_and_not_its_letters(score: Any) -> None:
    assert score("P", "Paris") == 0.0
    assert score("Paris", "Paris") == 1.0


@pytest.mark.parametrize("score", [exact_match, f1, contains])
def test_golds_may_be_an_array(score: Any) -> None:
    assert score("Paris", np.array(["London", "Paris"])) == 1.0


@pytest.mark.parametrize("score", [exact_match, f1, contains, token_scores])
@pytest.mark.parametrize("golds", [[], ["Paris", None], [1972]])
def test_missing_or_foreign_golds_are_a_data_error(score: Any, golds: list[Any]) -> None:
    with pytest.raises(DataError, match="accepted answer"):
        score("Paris", golds)


@pytest.mark.parametrize("score", [exact_match, f1, contains, token_scores])
@pytest.mark.parametrize("golds", [None, 5, np.array("Paris")])
def test_golds_that_are_no_list_are_a_data_error(score: Any, golds: Any) -> None:
    with pytest.raises(DataError, match="accepted answers must be a list of texts"):
        score("Paris", golds)


@pytest.mark.parametrize("score", [exact_match, f1, contains, token_scores])
def test_an_answer_that_is_no_text_is_a_data_error(score: Any) -> None:
    with pytest.raises(DataError, match="an answer must be text or None, got 5"):
        score(5, ["5"])


@given(TEXTS)
@example("H\u0307\u0331")  # h with the lower mark is one character, H is not
@example("\N{GREEK SMALL LETTER ALPHA}\u0345\u0301")  # folding turns one mark into a letter
def test_folding_is_blind_to_unicode_form_case_and_blanks_and_changes_nothing_twice(
    text: str,
) -> None:
    once = scoring.folded(text)
    assert scoring.folded(once) == once
    assert scoring.folded(f" {unicodedata.normalize('NFD', text)}\t") == once
    assert scoring.folded(unicodedata.normalize("NFC", text).casefold()) == once


# --- where the conventions differ ----------------------------------------------------------------


def test_closed_answers_earn_part_of_the_words_under_squad_only() -> None:
    assert f1("yes it is", "yes") == pytest.approx(0.5)
    assert f1("yes it is", "yes", convention="hotpotqa") == 0.0
    assert f1("yes it is", "yes", convention="lenient") == pytest.approx(0.5)


def test_the_closed_rule_holds_gold_by_gold() -> None:
    assert token_scores("yes it is", ["yes", "yes it was"], convention="hotpotqa").f1 == (
        pytest.approx(2 / 3)
    )


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("Cafe", "Café"), ("Lodz", "Łódź"), ("Strasse", "Straße"), ("Aerosmith", "Ærosmith"),
        ("1939-1945", "1939–1945"), ("1939 - 1945", "1939—1945"), ("well known", "well-known"),
        ("O'Brien", "O’Brien"), ("Heroes", "“Heroes”"), ("twenty-one", "21"),
        ("twenty one", "twenty-one"), ("two hundred and five", "205"), ("a hundred", "100"),
        ("3 million", "3,000,000"), ("nineteen hundred", "1900"),
        ("two million three hundred thousand and six", "2300006"), ("ninety-nine", "99"),
    ],
)  # fmt: skip
def test_lenient_forgives_accents_dashes_quotes_and_number_words(
    prediction: str, gold: str
) -> None:
    assert exact_match(prediction, gold) == 0.0
    assert exact_match(prediction, gold, convention="lenient") == 1.0


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("one two three", "1 2 3"), ("nineteen eighty-four", "19 84"), ("007", "007"),
        ("thousand thousand", "1000 1000"), ("one thousand and", "1000 and"),
        ("two thousand and five people", "2005 people"), ("and five", "and 5"),
        ("five thousand six million", "5000 6000000"), ("zero", "0"), ("fortyish", "fortyish"),
        ("one hundred thousand", "100000"), ("the hundred", "100"), ("someone", "someone"),
        ("twenty zero", "20 0"), ("two hundred million people", "200000000 people"),
        ("two thousand 5000", "2000 5000"),
    ],
)  # fmt: skip
def test_lenient_reads_number_words_by_the_grammar_of_cardinals(text: str, form: str) -> None:
    assert normalise(text, "lenient") == form


@given(st.integers(min_value=0, max_value=10**12))
def test_lenient_reads_every_spelled_number(number: int) -> None:
    assert normalise(_spell(number), "lenient") == str(number)


def _documented() -> list[list[str]]:
    page = Path(__file__).parents[1] / "docs/search-and-scoring.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    start = lines.index("| answer | gold | `squad` | `hotpotqa` | `lenient` | contains |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("row", _documented(), ids=lambda row: f"{row[0]} against {row[1]}")
def test_the_documented_examples_are_right(row: list[str]) -> None:
    prediction, gold = "" if row[0] == "(empty)" else row[0], row[1]
    for convention, cell in zip(("squad", "hotpotqa", "lenient"), row[2:5], strict=True):
        match, overlap = map(float, cell.split(" / "))
        assert exact_match(prediction, gold, convention=convention) == match
        assert round(f1(prediction, gold, convention=convention), 2) == overlap
    assert contains(prediction, gold) == float(row[5])


def test_precision_and_recall_belong_to_the_gold_with_the_best_f1() -> None:
    assert token_scores("Barack Obama", ["Obama", "Barack Hussein Obama"]) == pytest.approx(
        (0.8, 1.0, 2 / 3)
    )


def test_containment_counts_whole_words_only() -> None:
    assert contains("the city of Paris, in France", "Paris") == 1.0
    assert contains("Parisian", "Paris") == 0.0
    assert contains("New Yorkshire", "New York") == 0.0
    assert contains("Paris", "the city of Paris") == 0.0


def test_a_repeated_word_counts_as_often_as_both_sides_hold_it() -> None:
    assert f1("new york new york", "new york") == pytest.approx(2 / 3)


def test_closed_answers_are_recognised_through_their_spelling() -> None:
    assert is_closed_answer(["Yes."])
    assert is_closed_answer("no")
    assert not is_closed_answer(["yes", "Paris"])


def test_an_unknown_convention_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'squad'"):
        normalise("Paris", "sqaud")


def test_every_convention_is_listed_under_its_own_name() -> None:
    assert {name: rule.name for name, rule in scoring.CONVENTIONS.items()} == {
        name: name for name in ("squad", "hotpotqa", "lenient")
    }


_SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def _spell(number: int) -> str:
    for scale, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"),
                        (1000, "thousand"), (100, "hundred")):  # fmt: skip
        if number >= scale:
            high, rest = divmod(number, scale)
            return f"{_spell(high)} {name}" + (f" {_spell(rest)}" if rest else "")
    if number < 20:
        return _SMALL[number]
    ten, unit = divmod(number, 10)
    return _TENS[ten - 2] + (f"-{_SMALL[unit]}" if unit else "")
