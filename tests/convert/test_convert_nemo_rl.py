from __future__ import annotations

import gzip
import json
from collections import Counter

import numpy as np
import pytest
from convert_samples import DATA, SHARED, converted, documents, kinds, write_rows

from evenhand.convert import open_trajectories
from evenhand.core.errors import DataError
from evenhand.trajectory import Kind, StopReason, trajectory_from_dict, trajectory_to_dict

SAMPLE = "train_data_step3.jsonl"


def sample_rows():
    return [json.loads(line) for line in (DATA / SAMPLE).read_text("utf-8").splitlines()]


def of(tmp_path, row):
    (only,) = open_trajectories(write_rows(tmp_path / SAMPLE, row))
    return only


def row(parts, **changes):
    """A record of parts `(text, policy, n_tokens)`; every token has the id 5."""
    mask = [int(policy) for _, policy, n in parts for _ in range(n)]
    return {
        "content": [[text for text, _, _ in parts]],
        "token_loss_mask": [mask],
        "token_ids": [[5] * len(mask)],
        "generation_logprobs": [[-0.5] * len(mask)],
        "input_lengths": [len(mask)],
        "rewards": [1.0],
        "sample_loss_mask": [1.0],
        **changes,
    }


TURNS = [
    ("Question: q", False, 7),
    ("<search>q</search>", True, 5),
    ("<information>Doc 1(Title: A) one</information>", False, 9),
    ("<think>t</think><answer>x</answer>", True, 6),
]


# --- authors and lengths -------------------------------------------------------------------------


def test_the_kth_text_holds_the_kth_run_of_the_mask(tmp_path):
    only = of(tmp_path, row(TURNS))
    assert kinds(only) == ["prompt", "search", "information", "answer"]
    assert [s.n_tokens for s in only.segments] == [7, 5, 9, 6]
    assert only.metadata["n_tokens_unit"] == "tokens"


def test_padding_beyond_the_length_is_cut_off():
    first, padded = converted(SAMPLE)[0], sample_rows()[0]
    assert sum(s.n_tokens for s in first.segments) == padded["input_lengths"][0]
    assert len(padded["token_ids"][0]) > padded["input_lengths"][0]


def test_token_ids_and_logprobs_are_carried_over():
    first, source = converted(SAMPLE)[0], sample_rows()[0]
    length = source["input_lengths"][0]
    ids = np.concatenate([s.token_ids for s in first.segments])
    np.testing.assert_array_equal(ids, source["token_ids"][0][:length])
    mask = np.array(source["token_loss_mask"][0][:length]) == 1
    own = np.concatenate([s.logprobs for s in first.segments if s.is_policy])
    np.testing.assert_array_equal(own, np.array(source["generation_logprobs"][0][:length])[mask])
    assert all(s.logprobs is None for s in first.segments if not s.is_policy)


def test_an_invented_block_is_no_search():
    second = converted(SAMPLE)[1]
    assert second.executed_searches() == []
    assert documents(second) == []
    assert second.segments[1].metadata == {"invented_information": 1}
    assert not second.format_ok
    assert second.stop_reason is StopReason.ANSWERED


def test_an_empty_last_text_is_dropped(tmp_path):
    source = row(TURNS)
    source["content"][0].append("")
    assert kinds(of(tmp_path, source)) == kinds(of(tmp_path, row(TURNS)))


def test_an_empty_text_in_between_joins_two_texts_of_one_author(tmp_path):
    source = row([TURNS[0], ("a", True, 8)])
    source["content"] = [["Question: q", "a", "", "b"]]
    assert [s.text for s in of(tmp_path, source).segments] == ["Question: q", "ab"]


def test_several_opening_messages_make_one_prompt(tmp_path):
    source = row(TURNS)
    source["content"][0].insert(0, "System. ")
    assert of(tmp_path, source).segments[0].text == "System. Question: q"


def test_results_that_found_no_room_are_not_shown(tmp_path):
    source = row(TURNS[:2])
    source["content"][0].append(TURNS[2][0])
    only = of(tmp_path, source)
    assert kinds(only) == ["prompt", "search"]
    assert only.executed_searches() == []
    assert only.stop_reason is StopReason.CONTEXT_LIMIT


@pytest.mark.parametrize("texts", [["Question: q"], TURNS[1][0], [3], [["a"], ["b"]], None])
def test_texts_that_do_not_fit_the_mask_are_an_error(tmp_path, texts):
    with pytest.raises(DataError, match=r"line 1, field content"):
        of(tmp_path, row(TURNS, content=texts))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_loss_mask", None),
        ("token_loss_mask", [[0, "x"]]),
        ("token_loss_mask", [[]]),
        ("token_loss_mask", [[0, 1, float("nan")]]),
        ("token_ids", [[1, 2]]),
        ("token_ids", [[0.5] * 27]),
        ("token_ids", [[2**70] * 27]),
        ("generation_logprobs", [[[1.0]] * 27]),
        ("input_lengths", [28]),
        ("input_lengths", [0]),
        ("input_lengths", [5.5]),
        ("rewards", [1.0, 2.0]),
        ("rewards", ["x"]),
    ],
)
def test_a_wrong_array_names_its_field(tmp_path, name, value):
    with pytest.raises(DataError, match=rf"{SAMPLE}, line 1, field"):
        of(tmp_path, row(TURNS, **{name: value}))


def test_logprobs_that_are_not_finite_are_left_out(tmp_path):
    only = of(tmp_path, row(TURNS, generation_logprobs=[[float("-inf")] * 27]))
    assert only.segments[1].logprobs is None
    assert only.segments[1].metadata == {"logprobs": "left out: not finite"}


def test_a_rollout_that_left_the_loss_is_kept_and_marked():
    assert converted(SAMPLE)[3].metadata["sample_loss_mask"] == 0


def test_the_groups_of_two_steps_differ(tmp_path):
    first, second = (
        next(open_trajectories(write_rows(tmp_path / f"train_data_step{n}.jsonl", row(TURNS))))
        for n in (1, 2)
    )
    assert (first.step, second.step) == (1, 2)
    assert first.group != second.group


# --- why a rollout ended -------------------------------------------------------------------------


def test_a_turn_with_its_end_token_but_no_action_is_invalid():
    third = converted(SAMPLE)[2]
    assert (kinds(third)[-1], third.stop_reason) == ("invalid", StopReason.INVALID_ACTION)


def test_a_turn_without_its_end_token_was_cut_by_its_limit():
    fourth = converted(SAMPLE)[3]
    assert (kinds(fourth)[-1], fourth.stop_reason) == ("truncated", StopReason.TOKEN_LIMIT)


def test_a_turn_that_fills_a_round_length_was_cut_by_the_context(tmp_path):
    only = of(tmp_path, row([TURNS[0], ("I think", True, 249)]))
    assert (kinds(only)[-1], only.stop_reason) == ("truncated", StopReason.CONTEXT_LIMIT)


def test_results_that_fill_a_round_length_are_marked_as_cut(tmp_path):
    only = of(tmp_path, row([*TURNS[:2], (TURNS[2][0], False, 244)]))
    assert only.stop_reason is StopReason.CONTEXT_LIMIT
    assert only.segments[-1].metadata == {"cut": True}


def test_results_that_nothing_follows_were_the_last_turn(tmp_path):
    only = of(tmp_path, row(TURNS[:3]))
    assert only.stop_reason is StopReason.SEARCH_LIMIT
    assert only.segments[-1].metadata == {}


# --- the tool dialect ----------------------------------------------------------------------------


def test_tool_calls_are_searches_and_responses_documents():
    last = converted(SAMPLE)[4]
    assert kinds(last) == ["prompt", "search", "information", "answer"]
    assert last.segments[1].query == "Lake Vell"
    assert documents(last) == [
        [("Lake Vell", "Lake Vell lies in Orrin."), ("Sand", "The Sand is short.")]
    ]


def test_each_turn_opens_its_think_unless_the_text_before_did():
    last = converted(SAMPLE)[4]
    assert last.think_in_prompt
    assert last.segments[3].text.startswith("<think>")
    assert last.format_ok


# --- the real dumps ------------------------------------------------------------------------------

REAL = {
    "searchtags_step1": [0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    "toolcall_step2": [4, 1, 5, 4, 2, 4, 5, 5, 4, 5, 4, 4, 5, 4, 1, 5, 4, 4, 4, 4],
    "toolcall_step3": [4, 4, 3, 4, 4, 4, 4, 4, 4, 4, 5, 4, 5, 4, 5, 4, 4, 4, 4, 0],
}


@pytest.fixture(scope="module", params=REAL)
def real(request):
    path = SHARED / f"{request.param}.jsonl.gz"
    if not path.exists():
        pytest.skip("the shared rollouts are not there")
    with gzip.open(path) as lines:
        source = [json.loads(line) for line in lines]
    return request.param, source, list(open_trajectories(path))


def test_real_rollouts_have_their_searches(real):
    name, _, trajectories = real
    assert [len(t.executed_searches()) for t in trajectories] == REAL[name]


def test_real_searches_are_those_that_the_environment_answered(real):
    _, source, trajectories = real
    for record, trajectory in zip(source, trajectories, strict=True):
        mask = np.array(record["token_loss_mask"][0])
        runs = np.split(mask, np.flatnonzero(np.diff(mask)) + 1)
        environment = [len(run) for run in runs[1:] if not run[0]]
        shown = [s.n_tokens for s in trajectory.segments if s.kind is Kind.INFORMATION]
        assert shown == environment


def test_real_tokens_sum_to_the_mask(real):
    _, source, trajectories = real
    for record, trajectory in zip(source, trajectories, strict=True):
        mask = np.array(record["token_loss_mask"][0])
        own = [s.n_tokens for s in trajectory.segments if s.is_policy]
        other = [s.n_tokens for s in trajectory.segments if not s.is_policy]
        assert (sum(own), sum(other)) == (mask.sum(), (mask == 0).sum())
        ids = np.concatenate([s.token_ids for s in trajectory.segments])
        np.testing.assert_array_equal(ids, record["token_ids"][0])


def test_real_rollouts_form_four_groups_of_five(real):
    _, _, trajectories = real
    assert sorted(Counter(t.group for t in trajectories).values()) == [5, 5, 5, 5]
    assert all(t.question and "<|im" not in t.question for t in trajectories)


def test_real_rollouts_survive_their_fields(real):
    _, _, trajectories = real
    for trajectory in trajectories:
        assert trajectory_from_dict(trajectory_to_dict(trajectory)) == trajectory
        assert trajectory.golden_answers is None


def test_real_invented_blocks_are_no_information(real):
    name, source, trajectories = real
    invented = 0
    for record, trajectory in zip(source, trajectories, strict=True):
        own = [s for s in trajectory.segments if s.is_policy]
        assert [s.text for s in own] == [t for t in record["content"][0][1::2] if t]
        invented += sum(s.metadata.get("invented_information", 0) for s in own)
    assert invented == (6 if name == "searchtags_step1" else 0)


def test_real_tool_calls_come_back_with_five_titled_documents(real):
    name, _, trajectories = real
    if name == "searchtags_step1":
        return
    for trajectory in trajectories:
        for segment in trajectory.segments:
            if segment.kind is Kind.INFORMATION:
                assert len(segment.documents) == 5
                assert all(document.title for document in segment.documents)
