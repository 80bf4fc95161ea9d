"""Whatever a dump's fields hold, a converter gives a valid trajectory or a `DataError`."""

from __future__ import annotations

import contextlib
import json

import pytest
from convert_samples import DATA, SAMPLES
from hypothesis import given
from hypothesis import strategies as st

from evenhand.convert import FORMATS, recognise
from evenhand.convert.context import Context
from evenhand.convert.counting import Counter
from evenhand.convert.rows import Row
from evenhand.core.errors import DataError
from evenhand.trajectory import parse_line, to_line

TAGS = st.sampled_from(
    [
        *("<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "\n\n", "\n"),
        *("<information>", "</information>", "<tool_call>", "</tool_call>", "Doc 1(Title: "),
        *("<tool_response>", "</tool_response>", "<function=search>", "<parameter=query>", ")"),
        *("<|im_start|>", "<|im_end|>", "assistant\n", "user\n", "Question:", "Doc 1: ", "((("),
        *('{"name": "search", "arguments": {"query": "q"}}', '{"result": "Doc 1(Title: a) b"}'),
        "My previous action is invalid. If I want to search Let me try again.",
    ]
)
ANY_CHARACTER = st.text(st.characters(exclude_categories=[]), max_size=12)  # surrogates, too
TEXT = st.lists(TAGS | ANY_CHARACTER, max_size=10).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
MASK = st.lists(st.integers(0, 1), min_size=1, max_size=12)

FIELDS = {
    "searchr1": ("text", "prompt", "response", "question", "golden_answers", "reward", "step"),
    "calibadv": ("question", "ground_truth", "responses", "uid", "data_source"),
    "verl": ("input", "output", "gts", "score", "step", "acc"),
    "trl": ("step", "prompt", "completion", "reward", "em", "advantage", "answer"),
    "nemo-rl": (
        *("content", "rewards", "input_lengths", "token_ids", "token_loss_mask"),
        *("sample_loss_mask", "advantages", "generation_logprobs"),
    ),
}
NAMES = sorted(FIELDS)


def read(name: str, data: dict) -> list:
    row = Row("rows.jsonl, line 1", "rows-1", "rows.jsonl", data)
    context = Context(name, Counter())
    return list(FORMATS[name].read(iter([row]), context))


def check(name: str, data: dict) -> None:
    """Convert a record; what comes out must be valid and survive its file."""
    with contextlib.suppress(DataError):
        for trajectory in read(name, data):
            assert parse_line(to_line(trajectory), "line") == trajectory


CASES = st.sampled_from(NAMES).flatmap(
    lambda name: st.tuples(
        st.just(name), st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS[name], JSON))
    )
)


@given(CASES)
def test_any_json_in_any_field_is_converted_or_refused(case):
    check(*case)


@pytest.mark.parametrize("name", ["searchr1", "verl", "trl"])
@given(prompt=TEXT, response=TEXT)
def test_any_text_is_converted(name, prompt, response):
    row = {
        "searchr1": {"prompt": prompt, "response": response, "question": "q"},
        "verl": {"input": prompt, "output": response, "score": 1.0},
        "trl": {"prompt": prompt, "completion": response},
    }[name]
    (only,) = read(name, row)
    assert "".join(segment.text for segment in only.segments) == prompt + response
    assert parse_line(to_line(only), "line") == only


@given(TEXT)
def test_any_whole_transcript_keeps_its_text(text):
    (only,) = read("searchr1", {"text": text, "question": "q"})
    assert "".join(segment.text for segment in only.segments) == text


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": TEXT | JSON},
        optional={"tool_calls": JSON, "reasoning_content": JSON},
    ),
    max_size=4,
)


@given(MESSAGES, MESSAGES)
def test_any_messages_are_converted_or_refused(prompt, completion):
    check("trl", {"prompt": prompt, "completion": completion})


RESPONSES = st.lists(
    st.fixed_dictionaries(
        {"response": TEXT},
        optional={"seg_responses": st.lists(TEXT, max_size=3), "reward": JSON, "seg_ppl": JSON},
    ),
    max_size=3,
)


@given(RESPONSES)
def test_any_responses_of_calibadv_are_converted_or_refused(responses):
    check("calibadv", {"question": "q", "ground_truth": ["g"], "responses": responses})


@given(st.lists(TEXT, min_size=1, max_size=5), MASK, st.data())
def test_any_content_of_nemo_rl_is_converted_or_refused(content, mask, data):
    numbers = st.lists(st.integers(-3, 9), min_size=len(mask), max_size=len(mask))
    check(
        "nemo-rl",
        {
            "content": [content],
            "token_loss_mask": [mask],
            "token_ids": [data.draw(numbers)],
            "generation_logprobs": [data.draw(st.none() | numbers)],
            "rewards": [data.draw(st.none() | st.floats())],
            "input_lengths": [data.draw(st.integers(0, len(mask)))],
        },
    )


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4))
def test_any_row_is_recognised_or_refused(data):
    row = Row("rows.jsonl, line 1", "rows-1", "rows.jsonl", data)
    with contextlib.suppress(DataError):
        assert recognise(row) in FORMATS


@given(st.sampled_from(sorted(SAMPLES.items())), st.integers(0, 5000), TEXT | ANY_CHARACTER)
def test_a_sample_with_any_text_put_into_it_is_converted_or_refused(sample, at, put):
    name, file = sample
    text = (DATA / file).read_text("utf-8")
    line = text if file.endswith(".json") else text.splitlines()[0]
    value = json.loads(line)
    leaves = list(_texts(value))
    holder, key = leaves[at % len(leaves)]
    holder[key] = holder[key][: at % 50] + put + holder[key][at % 50 :]
    for row in value if isinstance(value, list) else [value]:
        check(name, row)


def _texts(value):
    """Yield `(holder, key)` of every text inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, str):
            yield value, key
        elif isinstance(inner, dict | list):
            yield from _texts(inner)
