"""Prompt templates, and the notices that the environment writes between turns.

A template turns a question into what the policy reads first: one bare string, or chat messages for
the chat template of a model. It is given by name, as `module:function`, or as a text file that
holds `{question}`. A question is inserted literally: braces and tags in it change nothing. (The
templates of Search-R1 drop the blanks around it and add a missing question mark, as its data
scripts do.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.core.errors import ConfigError
from evenhand.core.plugins import did_you_mean, is_object_spec, load_object
from evenhand.trajectory.protocol import THINK_OPEN, valid_unicode

Messages = list[dict[str, str]]
"""Chat messages: `{"role": ..., "content": ...}`, oldest first."""

Prompt = str | Messages
"""A bare text, or messages for a model's chat template."""

Template = Callable[[str], Prompt]
"""A question to its prompt."""

PLACEHOLDER = "{question}"
"""What a template file holds where the question goes."""

SEARCHR1_TEXT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every "
    "time you get new information. After reasoning, if you find you lack some knowledge, you can "
    "call a search engine by <search> query </search> and it will return the top searched results "
    "between <information> and </information>. You can search as many times as your want. If you "
    "find no further external knowledge needed, you can directly provide the answer inside "
    "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing "
    "</answer>. Question: {question}\n"
)
"""The prompt of Search-R1 (arXiv 2503.09516, table 1), word for word with its slips: published
models were trained on exactly this text, with a line break at the end."""

PLAIN_TEXT = (
    "Answer the question. First think between <think> and </think>, then take one action. "
    "<search>query</search> looks something up; what is found comes back between <information> and "
    "</information>, and you think again. <answer>short answer</answer> ends.\n"
    "Question: {question}\n"
)
"""A short prompt of ours."""

FEW_SHOT_TEXT = (
    "Question: Who wrote the book behind Blade Runner?\n"
    "<think>I need to look this up.</think><search>Blade Runner book author</search>\n\n"
    "<information>Doc 1(Title: Blade Runner) A film after a book by Philip K. Dick.\n"
    "</information>\n\n"
    "<think>I found it.</think><answer>Philip K. Dick</answer>\n\n"
    "Question: In which country does the Danube rise?\n"
    "<think>I need to look this up.</think><search>source of the Danube</search>\n\n"
    "<information>Doc 1(Title: Danube) The river rises in Germany.\n"
    "</information>\n\n"
    "<think>I found it.</think><answer>Germany</answer>\n\n"
    "Question: {question}\n"
)
"""Two worked examples instead of instructions, ours: for base models and for small ones, which
follow what they see rather than what they are told. With one example, or with thoughts that differ,
SmolLM2-135M answered at once and never searched."""


def _filled(text: str) -> Template:
    # `str.replace` reads the template once: a placeholder inside a question stays as it is.
    return lambda question: text.replace(PLACEHOLDER, question)


def _searchr1(question: str) -> str:
    # Its data scripts end every question with a question mark; its models have seen no other.
    asked = question.strip()
    return SEARCHR1_TEXT.replace(PLACEHOLDER, asked if asked.endswith("?") else f"{asked}?")


def _searchr1_chat(question: str) -> Messages:
    return [{"role": "user", "content": _searchr1(question)}]


TEMPLATES: dict[str, Template] = {
    "searchr1": _searchr1,
    "searchr1-chat": _searchr1_chat,
    "plain": _filled(PLAIN_TEXT),
    "few-shot": _filled(FEW_SHOT_TEXT),
}
"""Templates by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """What the environment says between turns. It is never parsed and never trained.

    Attributes:
        invalid: after a turn without a usable action.
        answer_now: before the turns in which no search is left.
    """

    invalid: str = (
        "\n\nThat was not a usable action. Write a query between <search> and </search>, or the "
        "final answer between <answer> and </answer>.\n\n"
    )
    answer_now: str = (
        "\n\nNo search is left. Write the final answer between <answer> and </answer>.\n\n"
    )


def resolve_template(template: str | Template) -> Template:
    """Return the template that a name, a `module:function` or a file stands for.

    Args:
        template: one of `searchr1` (bare text), `searchr1-chat` (the same text as one user
            message), `plain`, `few-shot`; `module:function` of a function from a question to a text
            or to messages; the path of a UTF-8 file that holds `{question}`; or such a function
            itself.

    Raises:
        ConfigError: none of these; the message lists the names.
    """
    if callable(template):
        return _checked(template, getattr(template, "__name__", "function"))
    if template in TEMPLATES:
        return TEMPLATES[template]
    if is_object_spec(template):
        function = load_object(template, "prompt template")
        if not callable(function):
            raise ConfigError(
                f"prompt template {template!r} is not a function but {function!r:.60}"
            )
        return _checked(function, template)
    return _filled(_read_template(template))


def _read_template(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"prompt template {name!r} is neither a known name nor a file; known names: "
            f"{', '.join(TEMPLATES)}; or give module:function, or a file that holds {PLACEHOLDER}"
            + did_you_mean(name, TEMPLATES)
        )
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"prompt template {name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt template {name} is not UTF-8 text ({error.reason})") from None
    if PLACEHOLDER not in text:
        raise ConfigError(f"prompt template {name} holds no {PLACEHOLDER}; write it where the "
                          "question goes")  # fmt: skip
    return text


def _checked(function: Callable[[str], Any], name: str) -> Template:
    def template(question: str) -> Prompt:
        try:
            prompt = function(question)
        except Exception as error:
            raise ConfigError(
                f"prompt template {name!r} failed on the question {question!r:.80}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(prompt, str) or _is_messages(prompt):
            return prompt  # type: ignore[no-any-return]
        raise ConfigError(
            f"prompt template {name!r} must return a text or a list of messages "
            f"{{'role': text, 'content': text}}, got {prompt!r:.80}"
        )

    return template


def _is_messages(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, dict)
            and {"role", "content"} <= message.keys()
            and all(isinstance(value, str) for value in message.values())
            for message in prompt
        )
    )


def render_prompt(
    template: str | Template, question: str, *, think_in_prompt: bool = False
) -> Prompt:
    """Return the prompt of a question.

    Args:
        template: see `resolve_template`.
        question: inserted as it is, but for two things: half surrogate pairs, which no tokenizer
            can read, become U+FFFD, and the two templates of Search-R1 drop the blanks around
            it and add a missing question mark.
        think_in_prompt: append the opening `<think>`, so that the policy neither writes nor learns
            it (CalibAdv's third component, arXiv 2604.18235). Messages get it as the beginning of
            the assistant's message, which the chat template must continue, not close.

    Raises:
        ConfigError: an unknown template, or one that fails or returns something else.
    """
    prompt = resolve_template(template)(valid_unicode(question))
    if not think_in_prompt:
        return prompt
    if isinstance(prompt, str):
        return prompt + THINK_OPEN
    return [*prompt, {"role": "assistant", "content": THINK_OPEN}]
