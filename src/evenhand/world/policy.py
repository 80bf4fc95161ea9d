"""The toy world's policy: an ordinary small `LlamaForCausalLM`, new, saved or shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evenhand.core.errors import ConfigError, require
from evenhand.world.tokenizer import EOS, PAD, build_fast_tokenizer, vocabulary

WARMSTART = Path(__file__).parent / "warmstart"
"""The folder of the policy that ships with the package."""


_HEAD = 32
_WIRED = 3
_ROPE_THETA = 1e6
"""So large that ten of a head's sixteen rotations hardly turn within a context of the toy world."""


def new_policy(
    *, seed: int = 0, layers: int = 4, hidden: int = 128, intermediate: int = 256
) -> Any:
    """Return a freshly initialised policy: 0.71 million parameters by default.

    Heads have size 32, which vLLM on CPU accepts (it refuses 16). Six heads start out wired for
    looking up (see `_wire_lookup`); everything else is random.

    Raises:
        ConfigError: `hidden` is not a multiple of 32 of at least 96, or there is one layer only.
    """
    if hidden % _HEAD or hidden < _WIRED * _HEAD or layers < 2:
        raise ConfigError(f"hidden must be a multiple of the head size {_HEAD}, at least "
                          f"{_WIRED * _HEAD}, and layers at least 2; got hidden={hidden}, "
                          f"layers={layers}")  # fmt: skip
    torch = require("torch", "train", "the toy world's policy")
    transformers = require("transformers", "train", "the toy world's policy")
    words = vocabulary()
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // _HEAD,
        num_key_value_heads=hidden // _HEAD,
        max_position_embeddings=1024,
        rope_theta=_ROPE_THETA,
        tie_word_embeddings=True,
        pad_token_id=words[PAD],
        bos_token_id=None,
        eos_token_id=words[EOS],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            _wire_lookup(policy)
    return policy


def _wire_lookup(policy: Any) -> None:
    """Set three heads of the first and of the second layer up for induction.

    A random transformer needs millions of tokens until it finds induction: attend to where the
    last three tokens stood before, and copy what followed (Olsson et al., arXiv 2209.11895). Wired
    at the start, it looks up most values after some twenty steps. One direction of the embedding
    is the same for all tokens. The heads of layer 0 use it to attend one, two and three positions
    back, and write what stands there into subspaces of their own. The heads of layer 1 compare
    this token and the two before it with the three before a place, in those rotary dimensions
    that hardly turn, and write the token at that place. A fact is looked up by three tokens: first
    name, last name, relation. All of it is trained on.
    """
    torch = require("torch", "train", "the toy world's policy")
    hidden, half, constant = policy.config.hidden_size, _HEAD // 2, policy.config.hidden_size - 1
    turn = _ROPE_THETA ** (-torch.arange(half) / half)

    def subspace() -> Any:
        """Return 32 orthonormal directions `[32, hidden]`, none along the constant one."""
        basis = torch.linalg.qr(torch.randn(hidden - 1, _HEAD))[0].T
        return torch.cat([basis, torch.zeros(_HEAD, 1)], dim=1)

    embedding = policy.model.embed_tokens.weight
    deviation = float(embedding.std())
    embedding[:, constant] = 3 * deviation
    length = deviation * hidden**0.5
    token = subspace()
    written = [subspace() for _ in range(_WIRED)]

    first = policy.model.layers[0].self_attn
    for head in range(_WIRED):
        rows = slice(head * _HEAD, (head + 1) * _HEAD)
        first.q_proj.weight[rows] = 0
        first.k_proj.weight[rows] = 0
        for pair in torch.nonzero(turn >= 0.01)[:, 0].tolist():
            angle = turn[pair] * (head + 1)
            at = rows.start + pair
            first.q_proj.weight[at, constant] = 2.2 * torch.cos(-angle)
            first.q_proj.weight[at + half, constant] = 2.2 * torch.sin(-angle)
            first.k_proj.weight[at, constant] = 2.2
        gain = (length / 5.6) ** 0.5
        first.v_proj.weight[rows] = gain * token
        first.o_proj.weight[:, rows] = gain * written[head].T

    second = policy.model.layers[1].self_attn
    slow = torch.nonzero(turn < 0.006)[:, 0]
    for head in range(_WIRED):
        rows = slice(head * _HEAD, (head + 1) * _HEAD)
        still = torch.cat([slow, slow + half]) + rows.start
        second.q_proj.weight[rows] = 0
        second.k_proj.weight[rows] = 0
        # The query reads (this, one back, two back), the key (one back, two back, three back).
        for asked, held in zip([token, *written], written, strict=False):
            mixed = 2.2 * torch.linalg.qr(torch.randn(_HEAD, len(still)))[0].T
            second.q_proj.weight[still] += mixed @ asked
            second.k_proj.weight[still] += mixed @ held
        copied, gain = subspace(), (4 * length / 3.3) ** 0.5
        second.v_proj.weight[rows] = gain * copied
        second.o_proj.weight[:, rows] = gain * copied.T


def save_policy(policy: Any, folder: Path) -> None:
    """Write weights (safetensors), configuration and tokenizer into a folder."""
    policy.save_pretrained(folder)
    build_fast_tokenizer().save_pretrained(folder)
    # transformers 5 writes names that version 4, and what is built on it, would read past.
    _add(folder / "config.json", rope_theta=_ROPE_THETA, torch_dtype="float32")
    _add(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "model.safetensors").chmod(0o644)


def _add(path: Path, **fields: Any) -> None:
    known = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**known, **fields}, indent=2) + "\n", encoding="utf-8")


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
