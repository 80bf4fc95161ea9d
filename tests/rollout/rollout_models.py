"""Tiny random models, a tokenizer of pieces, and slow references for the tests of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

PIECES = (
    "<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "</answer> ok",
    "rch>\n", "</", "sea", "<eos>",
)  # fmt: skip
"""Tokens of more than one character: a tag in one piece, one with more behind it, parts of tags."""


class PieceTokenizer:
    """ASCII characters and `PIECES`; encodes greedily, the longest piece first."""

    eos_token_id = 128 + PIECES.index("<eos>")

    def __init__(self, whole_tags: bool = True) -> None:
        usable = [piece for piece in PIECES if whole_tags and piece != "<eos>"]
        self._usable = sorted(usable, key=len, reverse=True)

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            piece = next((p for p in self._usable if text.startswith(p, at)), None)
            ids.append(128 + PIECES.index(piece) if piece else ord(text[at]) % 128)
            at += len(piece) if piece else 1
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(
            chr(item) if item < 128 else (PIECES[item - 128] if item < 128 + len(PIECES) else "?")
            for item in ids
        )


VOCABULARY = 144
KINDS = ("llama", "llama_gqa", "qwen2", "smollm3", "gemma2", "gemma3", "mistral", "gpt_neox")


def tiny_model(
    kind: str = "llama", *, seed: int = 0, bias: bool = True, vocabulary: int = VOCABULARY
) -> Any:
    """A random model in float32 whose logits lean towards tags, so that turns end."""
    import torch
    import transformers as hf

    base = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": PieceTokenizer.eos_token_id,
    }  # fmt: skip
    grouped = {**base, "num_key_value_heads": 2}
    window = {**grouped, "head_dim": 8, "sliding_window": 12}
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    build = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**base, tie_word_embeddings=True)),
        "llama_gqa": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped)),
        "smollm3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**grouped)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**window, layer_types=mixed, attn_implementation="eager")
        ),
        "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**window, layer_types=mixed)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**window)),
        "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**base)),
    }
    torch.manual_seed(seed)
    model = build[kind]().float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the usual start is so flat that greedy decoding repeats itself
                parameter.mul_(3)
    if bias:
        lean_to_tags(model)
    return model


def lean_to_tags(model: Any, weight: float = 2.0) -> None:
    import torch

    lean = torch.zeros(VOCABULARY)
    lean[128 : 128 + len(PIECES)] = weight
    for piece in ("<search>", "</search>"):
        lean[128 + PIECES.index(piece)] = 2.5 * weight

    def add(_module: Any, _arguments: Any, output: Any) -> Any:
        output.logits = output.logits + lean
        return output

    model.register_forward_hook(add)


def recomputed(model: Any, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of tokens 1.. of one row, by one plain forward pass without a cache."""
    import torch

    row = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(-1, row[0, 1:, None]).squeeze(-1).numpy()


def greedy_turn(model: Any, ids: Sequence[int], most: int, stops: Any) -> list[int]:
    """Continue one row greedily, everything encoded again for each token."""
    import torch

    new: list[int] = []
    while len(new) < most:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*ids, *new]]), use_cache=False).logits[0, -1]
        new.append(int(logits.argmax()))
        if stops(new):
            break
    return new


CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BYTES = 262
"""Tokens of `byte_tokenizer`."""


def byte_tokenizer() -> Any:
    """A fast tokenizer of transformers over bytes, with a chat template."""
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    inner.add_special_tokens(special)
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<|end|>"
    )
    tokenizer.chat_template = CHAT
    return tokenizer
