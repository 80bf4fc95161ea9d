from __future__ import annotations

import gzip
import io
import json
import shutil
import sys

import pytest
from convert_samples import DATA, SAMPLES, converted, documents, kinds, write_parquet, write_rows

from evenhand.convert import FORMATS, open_trajectories
from evenhand.core.errors import ConfigError, DataError
from evenhand.trajectory import (
    StopReason,
    read_trajectories,
    trajectory_from_dict,
    trajectory_to_dict,
    write_trajectories,
)

MARBURY = ("Marbury",)
SEAT = "What is the seat of the county in which Lake Vell lies?"


# --- every format --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "file"), SAMPLES.items())
def test_the_format_is_recognised_from_the_content(name, file):
    assert {t.metadata["source_format"] for t in converted(file)} == {name}


@pytest.mark.parametrize("file", SAMPLES.values())
def test_trajectories_survive_their_file(file, tmp_path):
    expected = converted(file)
    write_trajectories(tmp_path / "out.jsonl", expected)
    assert list(read_trajectories(tmp_path / "out.jsonl")) == expected


@pytest.mark.parametrize("file", SAMPLES.values())
def test_a_trajectory_is_equal_to_its_fields(file):
    for trajectory in converted(file):
        assert trajectory_from_dict(trajectory_to_dict(trajectory)) == trajectory


@pytest.mark.parametrize(("name", "file"), SAMPLES.items())
def test_naming_the_format_gives_the_same(name, file):
    assert list(open_trajectories([DATA / file], source=name)) == converted(file)


def test_our_own_file_comes_back_as_it_is(tmp_path):
    write_trajectories(tmp_path / "own.jsonl.gz", converted("searchr1.jsonl"))
    assert list(open_trajectories(tmp_path / "own.jsonl.gz")) == converted("searchr1.jsonl")


def test_rollouts_of_one_question_and_step_share_their_group():
    for file, groups in zip(SAMPLES.values(), (1, 1, 2, 1, 2), strict=True):
        assert len({t.group for t in converted(file)}) == groups


def test_several_files_of_several_formats_are_read_as_one():
    paths = [DATA / "searchr1.jsonl", DATA / "7.jsonl"]
    expected = converted("searchr1.jsonl") + converted("7.jsonl")
    assert list(open_trajectories(paths)) == expected


def test_files_of_the_same_name_give_different_ids(tmp_path):
    (tmp_path / "run").mkdir()
    copy = shutil.copy(DATA / "7.jsonl", tmp_path / "run" / "7.jsonl")
    ids = [t.id for t in open_trajectories([DATA / "7.jsonl", copy])]
    assert len(set(ids)) == 8


def test_an_id_that_occurs_in_two_of_our_files_is_an_error(tmp_path):
    for name in ("a", "b"):
        write_trajectories(tmp_path / f"{name}.jsonl", converted("7.jsonl"))
    with pytest.raises(DataError, match=r"b\.jsonl, line 1, field id: '7-1' occurs a second time"):
        list(open_trajectories([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]))


def test_standard_input_is_read(monkeypatch):
    raw = io.BytesIO((DATA / "7.jsonl").read_bytes())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="utf-8"))
    assert [t.id for t in open_trajectories("-")] == [f"stdin-{n}" for n in (1, 2, 3, 4)]


def test_a_repeated_id_names_its_line(tmp_path):
    path = tmp_path / "own.jsonl"
    write_trajectories(path, converted("7.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], lines[1]]))
    with pytest.raises(DataError, match=r"own\.jsonl, line 4, field id: '7-2' occurs"):
        list(open_trajectories(path))


def test_standard_input_cannot_be_given_twice():
    with pytest.raises(DataError, match="standard input can be read only once; give - once"):
        list(open_trajectories(["-", "-"]))


def test_compressed_standard_input_is_read(monkeypatch):
    raw = io.BytesIO(gzip.compress((DATA / "7.jsonl").read_bytes()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="utf-8"))
    assert len(list(open_trajectories("-"))) == 4


def test_compressed_files_are_read(tmp_path):
    path = tmp_path / "7.jsonl.gz"
    path.write_bytes(gzip.compress((DATA / "7.jsonl").read_bytes()))
    assert list(open_trajectories(path)) == converted("7.jsonl")


def test_rows_are_converted_as_they_are_asked_for(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_bytes((DATA / "7.jsonl").read_bytes() + b'{"input": "broken')
    stream = open_trajectories(path)
    assert [next(stream).id for _ in range(4)][-1] == "cut-4"
    with pytest.raises(DataError, match=r"cut\.jsonl, line 5: not JSON"):
        next(stream)


def test_a_list_of_records_is_read_too(tmp_path):
    rows = [json.loads(line) for line in (DATA / "7.jsonl").read_text("utf-8").splitlines()]
    path = tmp_path / "7.json"
    path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    assert list(open_trajectories(path)) == converted("7.jsonl")


# --- lengths -------------------------------------------------------------------------------------


def test_without_a_tokenizer_characters_are_counted():
    first = converted("searchr1.jsonl")[0]
    assert first.metadata["n_tokens_unit"] == "characters"
    assert [s.n_tokens for s in first.segments] == [len(s.text) for s in first.segments]


@pytest.fixture
def tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_counts_tokens(tokenizer):
    for path in (tokenizer, tokenizer / "tokenizer.json"):
        first = next(open_trajectories(DATA / "searchr1.jsonl", tokenizer=path))
        assert first.metadata["n_tokens_unit"] == "tokens"
        assert [s.n_tokens for s in first.segments] == [len(s.text.split()) for s in first.segments]


def test_a_tokenizer_leaves_the_counts_of_a_mask_alone(tokenizer):
    stream = open_trajectories(DATA / "train_data_step3.jsonl", tokenizer=tokenizer)
    assert list(stream) == converted("train_data_step3.jsonl")


def test_a_tokenizer_counts_half_surrogate_pairs(tokenizer, tmp_path):
    row = {"question": "q", "response": "a \ud800 b"}
    path = write_rows(tmp_path / "rows.jsonl", row)
    (only,) = open_trajectories(path, tokenizer=tokenizer)
    assert only.segments[0].n_tokens == 3


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"tokenizer\.json (does not exist|is not a tokenizer)"):
        open_trajectories(DATA / "7.jsonl", tokenizer=path)


# --- Search-R1 -----------------------------------------------------------------------------------


def test_a_searchr1_transcript_is_taken_apart():
    first, second, third, fourth = converted("searchr1.jsonl")
    assert kinds(first) == ["prompt", "search", "information", "answer"]
    assert (first.question, first.golden_answers, first.reward) == (SEAT, MARBURY, 1.0)
    assert (first.dataset, first.step, first.format_ok) == ("lakes", 30, True)
    assert len(second.executed_searches()) == 2
    assert kinds(third) == ["prompt", "invalid", "notice", "answer"]
    assert fourth.executed_searches() == []


def test_one_document_has_one_id_in_the_whole_group():
    first, second, *_ = converted("searchr1.jsonl")
    ids = {
        document.title: document.id
        for segment in first.segments
        for document in segment.documents or ()
    }
    for segment in second.segments:
        for document in segment.documents or ():
            assert ids.get(document.title, document.id) == document.id


def test_a_missing_reward_is_not_scored():
    assert converted("searchr1.jsonl")[3].reward is None


@pytest.mark.parametrize(
    ("golds", "expected"),
    [
        ({"golden_answers": "Paris"}, ("Paris",)),
        ({"ground_truth": ["a", "b"]}, ("a", "b")),
        ({"ground_truth": {"target": ["a"]}}, ("a",)),
        ({"reward_model": {"style": "rule", "ground_truth": {"target": "a"}}}, ("a",)),
        ({"golden_answers": [1997]}, ("1997",)),
        ({"golden_answers": ""}, None),
        ({}, None),
    ],
)
def test_accepted_answers_are_found_in_their_forms(tmp_path, golds, expected):
    path = write_rows(tmp_path / "rows.jsonl", {"question": "q", "response": "x", **golds})
    assert next(open_trajectories(path)).golden_answers == expected


def test_an_empty_list_of_answers_is_an_error_that_names_the_row(tmp_path):
    row = {"question": "q", "response": "x"}
    path = write_rows(tmp_path / "rows.jsonl", row, {**row, "golden_answers": []})
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2, field golden_answers: .* empty"):
        list(open_trajectories(path))


def test_a_row_without_question_and_prompt_needs_a_group(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"response": "x"})
    with pytest.raises(DataError, match="line 1, field question: missing"):
        list(open_trajectories(path))
    path = write_rows(tmp_path / "rows.jsonl", {"response": "x", "group": 7})
    assert next(open_trajectories(path)).question == ""


def test_small_fields_are_kept_and_large_ones_are_not(tmp_path):
    row = {"question": "q", "response": "x", "note": "n", "ids": list(range(400)), "em": True}
    (only,) = open_trajectories(write_rows(tmp_path / "rows.jsonl", row))
    assert only.metadata["note"] == "n"
    assert "ids" not in only.metadata
    assert only.scores == {"em": 1.0}


# --- CalibAdv ------------------------------------------------------------------------------------


def test_calibadvs_segments_tell_the_author():
    first, second, third = converted("rollout_12.json")
    assert kinds(first) == ["search", "information", "search", "information", "answer"]
    assert kinds(third) == ["invalid", "notice"]
    assert second.metadata["author"] == "known"
    assert (first.step, first.question_id, first.reward) == (12, "5f1c", 1.0)
    assert first.segments[0].metadata == {"old_ppl": 1.5}


def test_an_answer_planted_in_a_passage_does_not_act_where_the_author_is_known():
    second = converted("rollout_12.json")[1]
    assert kinds(second) == ["search", "information", "answer"]
    assert second.segments[-1].text.endswith("<answer>Sandholm</answer>")
    assert "<answer>Marbury</answer>" in documents(second)[0][0][1]


def test_the_opening_think_of_the_environment_is_recognised():
    trajectories = converted("rollout_12.json")
    assert all(t.think_in_prompt for t in trajectories)
    assert [t.format_ok for t in trajectories] == [True, True, False]


def test_segments_that_do_not_fit_the_text_are_set_aside(tmp_path):
    table = json.loads((DATA / "rollout_12.json").read_text("utf-8"))
    for response in table["5f1c"]["responses"]:
        response["seg_responses"] = ["something else"]
    path = tmp_path / "rollout_12.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    first = next(open_trajectories(path))
    assert first.metadata["author"] == "from the text"
    assert kinds(first) == ["search", "information", "search", "information", "answer"]


def test_a_short_segment_is_not_found_inside_a_passage(tmp_path):
    passage = "\n\n<information>Doc 1(Title: A) a b</information>\n\n"
    response = {
        "response": f"<search>q</search>{passage}b",
        "seg_responses": ["<search>q</search>", "b"],
        "reward": 0.0,
    }
    entry = {"question": "q", "ground_truth": ["g"], "responses": [response]}
    (only,) = open_trajectories(write_rows(tmp_path / "rollout_1.json", {"u": entry}))
    assert [s.text for s in only.segments] == ["<search>q</search>", passage, "b"]


def test_calibadvs_records_may_stand_on_lines(tmp_path):
    table = json.loads((DATA / "rollout_12.json").read_text("utf-8"))
    rows = [{"uid": uid, **entry} for uid, entry in table.items()]
    path = write_rows(tmp_path / "rollout_12.jsonl", *rows)
    assert [t.group for t in open_trajectories(path)] == [
        t.group for t in converted("rollout_12.json")
    ]


def test_without_a_word_of_the_environment_all_rollouts_tell_where_the_think_was_opened(tmp_path):
    def entry(*texts):
        responses = [{"response": text, "seg_responses": [text], "reward": 0.0} for text in texts]
        return {"question": "q", "ground_truth": ["g"], "responses": responses}

    table = {
        "a": entry("t</think><answer>x</answer>", "no thought"),
        "b": entry("t</think><answer>x</answer>", "<think>t</think><answer>x</answer>"),
    }
    path = write_rows(tmp_path / "rollout_1.json", table)
    assert [t.format_ok for t in open_trajectories(path)] == [True, False, False, True]


def test_a_policy_that_leaves_the_opening_think_out_breaks_the_format(tmp_path):
    block = "\n\n<information>Doc 1(Title: A) a</information>\n\n"
    policy = ["t</think><search>q</search>", "<think>u</think><answer>x</answer>"]
    response = {"response": block.join(policy), "seg_responses": policy, "reward": 0.0}
    entry = {"question": "q", "ground_truth": ["g"], "responses": [response]}
    (only,) = open_trajectories(write_rows(tmp_path / "rollout_1.json", {"u": entry}))
    assert (only.think_in_prompt, only.format_ok) == (False, False)


def test_a_file_of_questions_without_rollouts_is_an_error(tmp_path):
    entry = {"question": "q", "ground_truth": ["g"], "responses": []}
    path = write_rows(tmp_path / "rollout_1.json", {"u": entry})
    with pytest.raises(DataError, match="holds no trajectory"):
        list(open_trajectories(path))


# --- verl ----------------------------------------------------------------------------------------


def test_verls_record_is_read():
    first, _, third, fourth = converted("7.jsonl")
    assert (first.question, first.golden_answers, first.step) == (SEAT, MARBURY, 7)
    assert first.scores == {"acc": 1.0}
    assert first.metadata["request_id"] == "a1"
    assert kinds(third) == ["prompt", "search", "information", "answer"]
    assert third.segments[1].query == "county of Lake Vell"
    assert documents(third)[0][1] == (
        '"Orrin (county)"', "Orrin is a county. Its seat is Marbury (population 9,000)."
    )  # fmt: skip
    assert fourth.reward is None


def test_verls_groups_share_step_input_and_answers(tmp_path):
    row = {"input": "Question: q", "output": "x", "gts": ["a"], "score": 0, "step": 1}
    changed = [row, {**row, "output": "y"}, {**row, "step": 2}, {**row, "gts": ["b"]}]
    path = write_rows(tmp_path / "1.jsonl", *changed, {**row, "input": "Question: r"})
    groups = [t.group for t in open_trajectories(path)]
    assert groups[0] == groups[1]
    assert len(set(groups)) == 4


# --- TRL -----------------------------------------------------------------------------------------


def test_trls_table_is_read_from_parquet(tmp_path):
    path = write_parquet(tmp_path / "completions_00010.parquet", "trl_text.json")
    first, second = open_trajectories(path)
    assert kinds(first) == ["prompt", "search", "information", "answer"]
    assert first.group == second.group
    assert first.step == 10
    assert first.id == "completions_00010-1"


def test_trls_reward_is_the_sum_of_the_columns_of_floats(tmp_path):
    path = write_parquet(tmp_path / "c.parquet", "trl_text.json")
    first, second = open_trajectories(path)
    assert (first.reward, second.reward) == (1.5, 0.5)
    assert first.metadata["reward_columns"] == ["accuracy", "format_ok"]
    assert first.scores == {"accuracy": 1.0, "format_ok": 0.5, "pages": 2.0}
    assert first.metadata["advantage"] == 0.7


def test_trls_groups_share_step_and_prompt(tmp_path):
    row = {"step": 1, "prompt": "p", "completion": "c", "em": 0.0}
    changed = [{**row, "completion": "d"}, {**row, "step": 2}, {**row, "prompt": "q"}]
    groups = [t.group for t in open_trajectories(write_rows(tmp_path / "c.jsonl", row, *changed))]
    assert groups[0] == groups[1]
    assert len(set(groups)) == 3


def test_trls_column_named_reward_is_the_reward(tmp_path):
    row = {"step": "3", "prompt": "p", "completion": "c", "reward": 0.25, "em": 1.0}
    (only,) = open_trajectories(write_rows(tmp_path / "c.jsonl", row))
    assert (only.reward, only.step) == (0.25, 3)


def test_trls_functions_that_did_not_apply_leave_the_rollout_unscored(tmp_path):
    row = {"step": 3, "prompt": "p", "completion": "c", "a": float("nan"), "b": None}
    (only,) = open_trajectories(write_rows(tmp_path / "c.jsonl", row))
    assert only.reward is None


def test_trls_messages_are_read(tmp_path):
    path = write_parquet(tmp_path / "c.parquet", "trl_messages.json")
    first, second = open_trajectories(path)
    assert kinds(first) == ["prompt", "search", "information", "answer"]
    assert first.segments[1].query == "county of Lake Vell"
    assert documents(first)[0][0][0] == "Lake Vell"
    assert first.question == SEAT
    assert first.format_ok
    assert (second.reward, second.stop_reason) == (None, StopReason.INVALID_ACTION)


def test_a_cut_parquet_file_is_an_error(tmp_path):
    path = write_parquet(tmp_path / "c.parquet", "trl_text.json")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"c\.parquet: reading failed after row 0"):
        list(open_trajectories(path))


def test_parquet_from_a_pipe_is_an_error(monkeypatch, tmp_path):
    raw = write_parquet(tmp_path / "c.parquet", "trl_text.json").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    with pytest.raises(DataError, match="cannot be read from a pipe"):
        list(open_trajectories("-"))


# --- bad input -----------------------------------------------------------------------------------


def test_an_unrecognised_row_names_its_keys_and_every_format(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"colour": 1, "size": 2})
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: .*\(colour, size\)") as caught:
        list(open_trajectories(path))
    assert all(name in str(caught.value) for name in FORMATS)


def test_an_unknown_format_is_an_error_before_a_file_is_opened():
    with pytest.raises(ConfigError, match="'ver1' is not known; did you mean 'verl'"):
        open_trajectories("nowhere", source="ver1")


@pytest.mark.parametrize("text", ["", "\n \n", "[]"])
def test_an_empty_file_is_an_error(tmp_path, text):
    path = tmp_path / "empty.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="holds no trajectory"):
        list(open_trajectories(path))


@pytest.mark.parametrize("text", ["{\n", "[1]", "[{}", "3\n", "\x00", "{\n}"])
def test_a_damaged_file_is_an_error(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        list(open_trajectories(path))


def test_a_directory_and_a_missing_file_are_errors(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DataError, match=r"is a directory|does not exist"):
            list(open_trajectories(path))


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"input": 1, "output": "x", "score": 1}, "input"),
        ({"input": "i", "output": None, "score": 1}, "output"),
        ({"input": "i", "output": "x", "score": "high"}, "score"),
        ({"input": "i", "output": "x", "score": 2e6}, "score"),
        ({"input": "i", "output": "x", "score": 1, "step": -1}, "step"),
        ({"input": "i", "output": "x", "score": 1, "gts": [None]}, "gts"),
        ({"input": "i", "output": "x", "score": 1, "acc": float("inf")}, "acc"),
        ({"prompt": "p", "completion": [{"content": "x"}]}, "completion"),
        ({"prompt": "p", "completion": [{"role": "assistant", "content": 3}]}, "completion"),
        ({"prompt": 3, "completion": "x"}, "prompt"),
        ({"question": "q", "responses": [{"response": 3}]}, "response"),
        ({"question": "q", "responses": ["x"]}, "response 1"),
        ({"question": 3, "responses": []}, "question"),
        ({"question": "q", "text": "x", "reward": "1"}, "reward"),
    ],
)
def test_a_wrong_value_names_file_line_and_field(tmp_path, row, field):
    path = write_rows(tmp_path / "rows.jsonl", row)
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1.*{field}"):
        list(open_trajectories(path))
