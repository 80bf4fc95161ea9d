"""The trajectory file: round trips, and an error for each kind of damage."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import rollout
from evenhand.core.errors import DataError
from evenhand.trajectory import (
    Kind,
    Segment,
    Source,
    StopReason,
    Trajectory,
    golden_answers,
    parse_line,
    read_trajectories,
    to_line,
    trajectory_from_dict,
    trajectory_to_dict,
    write_trajectories,
)
from evenhand.trajectory.protocol import Document

TEXT = st.text(max_size=12)
LABEL = st.text(min_size=1, max_size=8)
DOCUMENTS = st.builds(Document, LABEL, TEXT, TEXT, st.none() | st.floats(-9, 9))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    segments: list[Segment] = []
    for _ in range(draw(st.integers(0, 3))):
        n = draw(st.integers(0, 4))
        ids = draw(st.none() | st.just(np.arange(n)))
        logprobs = None if ids is None else -np.ones(n)
        segments.append(
            Segment(Source.POLICY, Kind.SEARCH, draw(TEXT), n, query=draw(TEXT), token_ids=ids,
                    logprobs=logprobs, advantage=draw(st.none() | st.floats(-2, 2)),
                    step_score=draw(st.none() | st.floats(0, 1)))
        )  # fmt: skip
        if draw(st.booleans()):
            shown = tuple(draw(st.lists(DOCUMENTS, max_size=2)))
            segments.append(
                Segment(Source.ENVIRONMENT, Kind.INFORMATION, draw(TEXT), 3, documents=shown)
            )
        else:
            segments.append(
                Segment(Source.ENVIRONMENT, Kind.NOTICE, draw(TEXT), 3, error=draw(TEXT))
            )
    reward = draw(st.none() | st.floats(-1e6, 1e6))
    return Trajectory(
        id=draw(LABEL),
        group=draw(LABEL),
        question=draw(TEXT),
        golden_answers=draw(st.none() | st.lists(TEXT, min_size=1, max_size=3).map(tuple)),
        reward=reward,
        format_ok=draw(st.booleans()),
        stop_reason=StopReason.FAILED if reward is None else draw(st.sampled_from(
            [reason for reason in StopReason if reason is not StopReason.FAILED])),
        segments=tuple(segments),
        step=draw(st.none() | st.integers(0, 9)),
        hops=draw(st.none() | st.integers(0, 4)),
        supporting_titles=draw(st.none() | st.lists(TEXT, max_size=2).map(tuple)),
        scores=draw(st.none() | st.dictionaries(LABEL, st.none() | st.floats(0, 1), max_size=2)),
        think_in_prompt=draw(st.booleans()),
        metadata=draw(st.dictionaries(LABEL, TEXT, max_size=2)),
    )  # fmt: skip


@given(trajectories())
def test_a_line_reads_back_as_the_same_trajectory(trajectory: Trajectory) -> None:
    again = parse_line(to_line(trajectory), "here")
    assert again == trajectory
    for old, new in zip(trajectory.segments, again.segments, strict=True):
        for name in ("token_ids", "logprobs"):
            np.testing.assert_array_equal(getattr(old, name), getattr(new, name))


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_file_reads_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rollouts = [rollout(f"r{n}", results=[["a"]]) for n in range(5)]
    assert write_trajectories(path, rollouts) == 5
    assert list(read_trajectories(path)) == rollouts
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_half_a_surrogate_pair_survives() -> None:
    garbled = rollout("r\ud83d")
    assert parse_line(to_line(garbled).encode(), "here") == garbled


def test_unknown_fields_are_kept() -> None:
    data = trajectory_to_dict(rollout("r"))
    data["temperature"] = 0.7
    data["segments"][0]["finish"] = "stop"
    read = trajectory_from_dict(data)
    assert read.metadata["temperature"] == 0.7
    assert read.segments[0].metadata["finish"] == "stop"
    assert trajectory_from_dict(trajectory_to_dict(read)) == read


def test_gzip_is_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "plain-name.jsonl"
    path.write_bytes(gzip.compress(to_line(rollout("r")).encode()))
    assert len(list(read_trajectories(path))) == 1


def test_a_search_is_executed_only_if_information_follows() -> None:
    one = rollout("r", results=[["a"], []])
    assert one.executed_searches() == [0, 2]
    bare = Trajectory(**{**{f: getattr(one, f) for f in Trajectory.__slots__},
                         "segments": (one.segments[0], one.segments[-1])})  # fmt: skip
    assert bare.executed_searches() == []


Damage = Callable[[dict[str, Any]], Any]


def _put(*path: Any, value: Any) -> Damage:
    def damage(data: dict[str, Any]) -> None:
        target: Any = data
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return damage


DAMAGES: list[tuple[str, Damage, str]] = [
    ("schema", lambda d: d.pop("schema"), "field schema"),
    ("id", lambda d: d.pop("id"), "field id is missing"),
    ("reward missing", lambda d: d.pop("reward"), "field reward is missing"),
    ("reward text", _put("reward", value="high"), 'field reward: .*got "high"'),
    ("reward nan", _put("reward", value=float("nan")), "field reward: .*write null"),
    ("reward true", _put("reward", value=True), "field reward: .*got true"),
    ("reward large", _put("reward", value=2e6), r"\[-1e\+06, 1e\+06\], got 2e\+06"),
    ("reward huge", _put("reward", value=10**400), "field reward: expected a finite"),
    ("failed with reward", _put("stop_reason", value="failed"), "a failed rollout has reward null"),
    ("stop reason", _put("stop_reason", value="bored"), 'one of answered, .*got "bored"'),
    ("golds empty", _put("golden_answers", value=[]), "field golden_answers: .*empty"),
    ("golds numbers", _put("golden_answers", value=[1]), "field golden_answers: .*list of texts"),
    ("group empty", _put("group", value=""), "field group: expected a text that is not empty"),
    ("format", _put("format_ok", value=1), "field format_ok: expected true or false"),
    ("step", _put("step", value=-1), "field step: expected a whole number"),
    ("segments", _put("segments", value={}), "field segments: expected a list"),
    ("segment", _put("segments", 0, value=3), r"segments\[0\]: expected an object, got 3"),
    ("kind", _put("segments", 1, "kind", value="search"), r"segments\[1\], field kind: 'search'"),
    ("n_tokens", _put("segments", 0, "n_tokens", value=None), r"segments\[0\], field n_tokens"),
    ("documents", _put("segments", 1, "documents", value=None), "lists the documents"),
    ("document id", _put("segments", 1, "documents", 0, value={"title": "", "text": ""}),
     r"segments\[1\].documents\[0\]: field id is missing"),
    ("orphan", lambda d: d["segments"].insert(0, d["segments"][1]), "must follow a search"),
    ("token ids", _put("segments", 0, "token_ids", value=[1]), "n_tokens is 10"),
    ("token text", _put("segments", 0, "token_ids", value=["x"]), "a list of whole numbers"),
    ("token fractions", _put("segments", 0, "token_ids", value=[1.5] * 10), "whole numbers"),
    ("token text ids", _put("segments", 0, "token_ids", value=["1"] * 10), "whole numbers"),
    ("logprob", _put("segments", 0, "logprobs", value=[float("-inf")] * 10), "not finite"),
    ("scores", _put("scores", value={"em": "x"}), "field scores, field em"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGES],
                         ids=[d[0] for d in DAMAGES])  # fmt: skip
def test_damage_is_reported_with_file_line_and_field(
    tmp_path: Path, damage: Damage, message: str
) -> None:
    path = tmp_path / "rollouts.jsonl"
    data = trajectory_to_dict(rollout("r1", results=[["a"]]))
    damage(data)
    path.write_text(to_line(rollout("r0")) + "\n\n" + json.dumps(data) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        list(read_trajectories(path))
    assert str(caught.value).startswith(f"{path}, line 3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema": "evenhand', "line 1: not JSON"),
        (b"[1, 2]", "line 1: expected a JSON object, got list"),
        (b"\xff\xfe{}", "line 1: not UTF-8"),
        (b"", "holds no trajectory"),
        (b"\n \n", "holds no trajectory"),
        (b"[" * 100_000, "line 1: not JSON: nested too deeply"),
        (b'{"x": ' + b"1" * 5000 + b"}", "line 1: not JSON: a number is too long"),
        (gzip.compress(b"{}" * 5000)[:-20], "cut or damaged"),
    ],
)
def test_a_broken_file_gives_a_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_trajectories(path))


def test_a_folder_and_a_missing_file_give_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a directory"):
        list(read_trajectories(tmp_path))
    with pytest.raises(DataError, match="does not exist"):
        list(read_trajectories(tmp_path / "none.jsonl"))


def test_an_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text(2 * (to_line(rollout("r")) + "\n"))
    with pytest.raises(DataError, match="line 2, field id: 'r' occurs a second time"):
        list(read_trajectories(path))


@given(st.recursive(st.none() | st.booleans() | st.floats() | TEXT,
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["schema", "id", "segments", "reward"]),
                                      inner, max_size=3), max_leaves=8))  # fmt: skip
def test_any_json_gives_a_trajectory_or_a_data_error(value: Any) -> None:
    with pytest.raises(DataError):
        parse_line(json.dumps(value), "here")


@given(st.data())
def test_any_value_in_any_field_gives_a_trajectory_or_a_data_error(data: st.DataObject) -> None:
    value = data.draw(
        st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), TEXT, st.just([]),
                  st.just({}), st.just([{}]), st.just([None]))
    )  # fmt: skip
    fields = trajectory_to_dict(rollout("r", results=[["a"]], step=1))
    place = data.draw(st.sampled_from([fields, *fields["segments"],
                                       fields["segments"][1]["documents"][0]]))  # fmt: skip
    place[data.draw(st.sampled_from(sorted(place)))] = value
    try:
        trajectory_from_dict(fields)
    except DataError:
        pass


def test_a_bare_gold_is_one_answer_and_an_array_is_a_list() -> None:
    assert golden_answers("Paris") == ("Paris",)
    assert golden_answers(np.array(["Paris", "Lutetia"])) == ("Paris", "Lutetia")
    with pytest.raises(DataError, match="empty"):
        golden_answers([])


def test_nan_in_free_fields_is_written_as_null() -> None:
    data = trajectory_to_dict(rollout("r"))
    data |= {"temperature": float("inf"), "metadata": {"kl": [float("nan"), 1.0]}}
    again = parse_line(to_line(trajectory_from_dict(data)), "here")
    assert again.metadata == {"temperature": None, "kl": [None, 1.0]}
