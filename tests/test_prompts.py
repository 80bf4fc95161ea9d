"""Prompt templates by name, by function and by file."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.core.errors import ConfigError
from evenhand.task.prompts import TEMPLATES, render_prompt
from evenhand.testing.policies import FRAGMENTS
from evenhand.trajectory.protocol import is_valid_format

SHARED = Path(__file__).parents[1] / "../shared"
ROLLOUTS = SHARED / "data/rollouts/searchtags_step1.jsonl.gz"

NASTY = [
    "{question}", "{0} {x} %s {{}}", "<search>a</search>", "</think><answer>b</answer>",
    "\\1 \\g<0>", "$question", "line\nbreak", "", "日本 é \U0001f600",
]  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("question", NASTY)
def test_a_question_is_inserted_literally_and_once(name: str, question: str) -> None:
    def text(inserted: str) -> str:
        prompt = render_prompt(name, inserted)
        return prompt if isinstance(prompt, str) else prompt[0]["content"]

    before, _, after = text("\x00").partition("\x00")
    assert text(question) == before + question + after


@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=10).map("".join))
def test_any_question_leaves_the_rest_of_the_prompt_alone(question: str) -> None:
    before, _, after = str(render_prompt("plain", "\x00")).partition("\x00")
    assert render_prompt("plain", question) == before + question + after


def test_half_a_surrogate_pair_in_a_question_is_replaced() -> None:
    assert "a\ufffdb" in render_prompt("plain", "a\udc00b")


@pytest.mark.skipif(not ROLLOUTS.exists(), reason="needs the shared data")
def test_searchr1_is_the_prompt_of_real_rollouts_word_for_word() -> None:
    with gzip.open(ROLLOUTS, "rt") as lines:
        for line in lines:
            shown = json.loads(line)["content"][0][0].split("<|im_start|>user\n")[1]
            shown = shown.split("<|im_end|>")[0]
            question = shown.split("Question: ")[1]
            assert render_prompt("searchr1", question) == shown + "\n"


@pytest.mark.parametrize("name", ["searchr1", "searchr1-chat"])
def test_the_prompts_of_searchr1_end_every_question_with_a_question_mark(name: str) -> None:
    assert render_prompt(name, " who wrote it ") == render_prompt(name, "who wrote it?")
    assert "who wrote it" in str(render_prompt("plain", "who wrote it"))
    assert "who wrote it?" not in str(render_prompt("plain", "who wrote it"))


def test_the_chat_template_holds_the_same_text_as_one_user_message() -> None:
    assert render_prompt("searchr1-chat", "Why?") == [
        {"role": "user", "content": render_prompt("searchr1", "Why?")}
    ]


def test_the_worked_examples_of_few_shot_obey_the_format() -> None:
    text = str(render_prompt("few-shot", "Why?"))
    turns = re.findall("<think>.*?</(?:search|answer)>", text)
    assert len(turns) == 4
    assert is_valid_format(turns[:2])
    assert is_valid_format(turns[2:])


@pytest.mark.parametrize("name", ["searchr1", "plain", "few-shot"])
def test_think_in_prompt_ends_a_bare_prompt_with_the_opening_tag(name: str) -> None:
    assert render_prompt(name, "Why?", think_in_prompt=True) == (
        str(render_prompt(name, "Why?")) + "<think>"
    )


def test_think_in_prompt_begins_the_message_of_the_assistant() -> None:
    prompt = render_prompt("searchr1-chat", "Why?", think_in_prompt=True)
    assert prompt[1:] == [{"role": "assistant", "content": "<think>"}]  # type: ignore[comparison-overlap]


def test_an_unknown_name_lists_the_valid_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"searchr1, searchr1-chat, plain.*did you mean 'plain'"):
        render_prompt("plian", "Why?")


def test_a_file_that_holds_the_placeholder_is_a_template(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Q {question} {other} {question}", encoding="utf-8")
    assert render_prompt(str(path), "{question}!") == "Q {question}! {other} {question}!"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no place for it", "holds no {question}"), (b"\xff{question}", "not UTF-8")],
)
def test_a_file_that_is_no_template_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        render_prompt(str(path), "Why?")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_templates.py").write_text(
        "def text(question): return f'<{question}>'\n"
        "def chat(question): return [{'role': 'user', 'content': question}]\n"
        "def nothing(question): return None\n"
        "def empty(question): return []\n"
        "def fails(question): return question[100]\n"
        "number = 3\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "my_templates"


def test_a_function_of_a_module_is_a_template(module: str) -> None:
    assert render_prompt(f"{module}:text", "{x}") == "<{x}>"
    assert render_prompt(f"{module}:chat", "x") == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "must return a text or a list of messages"),
        ("empty", "must return a text or a list of messages"),
        ("fails", "IndexError"),
        ("number", "is not a function"),
        ("txet", "did you mean 'text'"),
    ],
)
def test_a_bad_function_is_named_with_what_is_wrong(module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render_prompt(f"{module}:{name}", "Why?")
