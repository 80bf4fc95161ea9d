"""The toy world's policy: an ordinary small `LlamaForCausalLM`, new, saved or shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenhand.errors import ConfigError, require
from evenhand.world.tokenizer import EOS, PAD, build_fast_tokenizer, vocabulary

WARMSTART = Path(__file__).parent / "warmstart"
"""The folder of the policy that ships with the package."""


def new_policy(
    *, seed: int = 0, layers: int = 4, hidden: int = 128, intermediate: int = 256
) -> Any:
    """Return a freshly initialised policy: 0.71 million parameters by default.

    Heads have size 32, which vLLM on CPU accepts (it refuses 16).

    Raises:
        ConfigError: `hidden` is not a multiple of 32.
    """
    if hidden % 32:
        raise ConfigError(f"hidden must be a multiple of the head size 32, got {hidden}")
    torch = require("torch", "train", "the toy world's policy")
    transformers = require("transformers", "train", "the toy world's policy")
    words = vocabulary()
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=1024,
        rope_theta=1000.0,
        tie_word_embeddings=True,
        pad_token_id=words[PAD],
        bos_token_id=None,
        eos_token_id=words[EOS],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)


def save_policy(policy: Any, folder: Path) -> None:
    """Write weights (safetensors), configuration and tokenizer into a folder."""
    policy.save_pretrained(folder)
    build_fast_tokenizer().save_pretrained(folder)


def load_policy(folder: Path = WARMSTART) -> tuple[Any, Any]:
    """Return policy and tokenizer of a folder; the default is the shipped warm start.

    Raises:
        ConfigError: the folder holds no policy.
    """
    transformers = require("transformers", "train", "the toy world's policy")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no policy (no config.json); make one with: "
                          "evenhand world pretrain")  # fmt: skip
    policy = transformers.LlamaForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return policy.eval(), tokenizer
