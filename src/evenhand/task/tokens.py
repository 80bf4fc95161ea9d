"""The little that the environment needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from evenhand.core.errors import ConfigError
from evenhand.task.prompts import Prompt


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of plain text.

        No token is added, and text that looks like a special token stays text: a passage may hold
        `<|im_end|>` and must not end a message with it.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...


@runtime_checkable
class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows how a model wants its prompt."""

    def encode_prompt(self, prompt: Prompt) -> Sequence[int]:
        """Return the ids of a prompt, with the special tokens that the model expects.

        Messages go through the chat template; a last message of the assistant is continued.
        """
        ...


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the ids of a prompt, by the tokenizer's own way if it has one.

    Raises:
        ConfigError: the prompt is a list of messages and the tokenizer has no chat template.
    """
    if isinstance(tokenizer, PromptTokenizer):
        return list(tokenizer.encode_prompt(prompt))
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    raise ConfigError(
        f"the prompt is a list of chat messages and {type(tokenizer).__name__} has no "
        "encode_prompt; use a template of bare text, or pass prompt_ids"
    )


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return a `Tokenizer` over an object of `tokenizers` or `transformers`.

    * `tokenizers.Tokenizer`, and a fast tokenizer of transformers: a private copy encodes plain
      text, without added tokens, without truncation, with special tokens as text. Prompts are
      encoded by the original, special tokens and all.
    * a slow tokenizer of transformers: the same through its keywords.
    * anything else that has `encode` and `decode` is returned as it is.

    Raises:
        ConfigError: the object has no `encode` and `decode`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "to_str") and hasattr(backend, "encode_special_tokens"):
        return _FastTokenizer(tokenizer, backend)
    if hasattr(tokenizer, "apply_chat_template"):
        return _SlowTokenizer(tokenizer)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    raise ConfigError(
        f"{type(tokenizer).__name__} is no tokenizer: it needs encode(text) and decode(ids)"
    )


class _FastTokenizer:
    """Over the `tokenizers` library, alone or inside transformers."""

    def __init__(self, tokenizer: Any, backend: Any) -> None:
        self._original = tokenizer
        # Copies: the switches below would change what the owner of the original gets.
        self._whole = _without_cuts(backend)
        self._plain = _without_cuts(backend)
        self._plain.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._plain.decode(list(map(int, ids)), skip_special_tokens=False))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        if hasattr(self._original, "apply_chat_template"):
            return _transformers_prompt(self._original, prompt, self.encode)
        if isinstance(prompt, str):
            return list(self._whole.encode(prompt).ids)
        raise ConfigError("the prompt is a list of chat messages and this tokenizer has no chat "
                          "template; use a template of bare text, or pass prompt_ids")  # fmt: skip


def _without_cuts(backend: Any) -> Any:
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


class _SlowTokenizer:
    """Over a Python tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._original = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(
            self._original.encode(text, add_special_tokens=False, split_special_tokens=True)
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self._original.decode(
                list(map(int, ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return _transformers_prompt(self._original, prompt, self.encode)


def _transformers_prompt(tokenizer: Any, prompt: Prompt, encode: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError("the prompt is a list of chat messages and this tokenizer has no chat "
                          "template; use a template of bare text, or pass prompt_ids")  # fmt: skip
    messages, begun = list(prompt), ""
    if messages[-1]["role"] == "assistant":
        # Some chat templates rewrite a think inside an assistant message; appended, it stays whole.
        begun = messages.pop()["content"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [*tokenizer.encode(text, add_special_tokens=False), *encode(begun)]
