"""The trajectory component: every character once, tokens where they are known, marks, colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import answer, rollout, search
from evenhand.pages.tokens import decoder, load_decoder
from evenhand.pages.trajectory import STRIP_WIDTH, largest_advantage, trajectory_view
from evenhand.trajectory import Kind, Segment, Source, Trajectory
from run_builder import credited

TEXT = "<think>so é</think>\n<search>two words</search>"


def only(segment: Segment, **changes: object) -> Trajectory:
    return replace(rollout("r"), segments=(segment,), **changes)  # type: ignore[arg-type]


def by_bytes(text: str) -> tuple[Segment, object]:
    """A segment whose tokens are the bytes of its text, and their decoder."""
    data = text.encode()
    segment = Segment(
        Source.POLICY, Kind.SEARCH, text, len(data), query="q",
        token_ids=np.frombuffer(data, dtype=np.uint8).astype(np.int64),
        logprobs=np.log(np.linspace(0.01, 1.0, len(data))),
    )  # fmt: skip

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    return segment, decode


def shown(segment: Segment, decode: object = None) -> list[tuple[str, list[str]]]:
    view = trajectory_view(only(segment), decode=decode)  # type: ignore[arg-type]
    return [(part.role, [piece.text for piece in part.pieces]) for part in view.segments[0].parts]


@given(st.lists(st.sampled_from(["<think>", "</think>", "<search>", "</search>", "<answer>",
                                 "</answer>", "a", " ", "é", "<", "x y"])))  # fmt: skip
def test_every_character_is_shown_once_in_order(pieces: list[str]) -> None:
    text = "".join(pieces)
    segment, decode = by_bytes(text)
    for way in (None, decode):
        assert "".join("".join(part) for _, part in shown(segment, way)) == text


def test_roles_of_a_policy_text() -> None:
    roles = [(role, "".join(pieces)) for role, pieces in shown(by_bytes(TEXT)[0])]
    assert roles == [
        ("tag", "<think>"), ("think", "so é"), ("tag", "</think>"), ("plain", "\n"),
        ("tag", "<search>"), ("query", "two words"), ("tag", "</search>"),
    ]  # fmt: skip


def test_characters_of_several_tokens_stay_whole() -> None:
    pieces = dict(shown(*by_bytes(TEXT)))["think"]
    assert pieces == ["s", "o", " ", "é"]


def test_tokens_that_do_not_make_up_the_text_are_not_shown() -> None:
    segment, _ = by_bytes("abc")
    assert shown(segment, lambda ids: "z" * len(ids)) == [("plain", ["abc"])]


def test_unlikely_tokens_are_underlined_and_tell_their_probability() -> None:
    segment, decode = by_bytes("ab")
    view = trajectory_view(only(segment), decode=decode)  # type: ignore[arg-type]
    first, last = view.segments[0].parts[0].pieces
    assert (first.chance, first.unsure) == ("0.010", 3)
    assert (last.chance, last.unsure) == ("1.000", 0)


def test_colours_are_relative_to_the_largest_of_the_group() -> None:
    small, large = credited(rollout("a"), 0.5), credited(rollout("b"), -2.0)
    largest = largest_advantage([small, large])
    view = trajectory_view(small, largest=largest).segments[0]
    assert (view.sign, view.shade, view.credit) == ("pos", 3, "A +0.500")
    view = trajectory_view(large, largest=largest).segments[0]
    assert (view.sign, view.shade) == ("neg", 10)


def test_without_credit_nothing_is_coloured() -> None:
    view = trajectory_view(rollout("a")).segments[0]
    assert (view.sign, view.shade, view.credit) == ("none", 0, "")


def test_documents_are_marked_silver_gold_and_by_answer() -> None:
    trajectory = replace(
        rollout("a", results=[["d1", "d2"]]),
        supporting_titles=("TITLE d2",),
        golden_answers=("of d1", "d1"),
    )
    one, two = trajectory_view(trajectory, silver={"d1"}).segments[1].documents
    assert (one.is_silver, one.is_gold, two.is_silver, two.is_gold) == (True, False, False, True)
    assert one.text == [("text ", False), ("of d1", True), ("", False)]


def test_an_answer_inside_a_word_is_not_marked() -> None:
    trajectory = replace(rollout("a", results=[["d1"]]), golden_answers=("ext",))
    assert trajectory_view(trajectory).segments[1].documents[0].text == [("text of d1", False)]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=200))
def test_the_credit_strip_fits(lengths: list[int]) -> None:
    segments = tuple(answer(n_tokens=length) for length in lengths)
    strip = trajectory_view(replace(rollout("r"), segments=segments)).strip
    assert len(strip) == len(lengths)
    left, width, _ = strip[-1]
    assert left + width == pytest.approx(STRIP_WIDTH, abs=0.2)
    assert all(width >= 0 for _, width, _ in strip)


def test_titles_count_executed_searches() -> None:
    trajectory = rollout("a", results=[["d"], []])
    segments = (*trajectory.segments[:-1], search("late"))
    titles = [s.title for s in trajectory_view(replace(trajectory, segments=segments)).segments]
    assert titles == ["search 1", "1 document", "search 2", "0 documents", "search, not executed"]


def test_a_toy_run_has_a_decoder_and_unknown_models_have_none() -> None:
    pytest.importorskip("tokenizers")
    decode = decoder({"model.path": "toy"})
    assert decode is not None
    assert decoder({}) is None
    assert decoder({"model.path": "some/hub-name"}) is None


def test_a_damaged_tokenizer_file_is_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.json").write_text("{}")
    assert load_decoder(str(path)) is None
