"""The work that both sides of `against_trl.py` do; nothing but the standard library.

16 prompts x 8 rollouts. A rollout searches 0 to 4 times (mean 2.1), in turns of 8 to 16 tokens, and
answers in 6 to 14. Lengths are scripted; what the tokens between are is sampled. An observation has
about 60 tokens (`short`), or 300 with four searches in every rollout (`long`); its length depends
on the length of the query alone, so that both sides see the same number of tokens.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

PROMPTS, GROUP = 16, 8
ROWS = PROMPTS * GROUP

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<asst>", "<tool>", "<search>", "</search>",
           "<answer>", "</answer>", "<information>", "</information>")  # fmt: skip
PAD, EOS, UNKNOWN, USER, ASSISTANT, TOOL, SEARCH, SEARCH_END, ANSWER, ANSWER_END = range(10)
VOCABULARY = 2000
WORDS = tuple(f"w{at}" for at in range(VOCABULARY - len(SPECIAL)))

MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None,
}  # fmt: skip
"""A Llama of 2.16 million parameters."""

OPTIMIZER = {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "max_grad_norm": 1.0}


@dataclass(frozen=True)
class Workload:
    """Prompts, and the lengths of the turns of every rollout, the last one an answer.

    Attributes:
        prompts: the questions.
        turns: for each rollout the tokens of its turns, tags and end included.
        observation: the shortest observation in tokens, all that surrounds the page included.
    """

    name: str
    prompts: tuple[str, ...]
    turns: tuple[tuple[int, ...], ...]
    observation: int

    @property
    def group(self) -> int:
        """Rollouts of a prompt."""
        return len(self.turns) // len(self.prompts)

    @property
    def sampled(self) -> int:
        """Tokens that the policy samples in a step."""
        return sum(map(sum, self.turns))

    @property
    def searches(self) -> int:
        """Searches of a step."""
        return sum(len(lengths) - 1 for lengths in self.turns)

    def observed(self, query_words: int) -> int:
        """Tokens of the observation after a query of this many words."""
        return self.observation + query_words * 37 % 21

    @property
    def tokens(self) -> int:
        """Tokens of a step, each once: prompts, turns, observations."""
        prompts = sum(len(prompt.split()) + 2 for prompt in self.prompts) * self.group
        # The tags are no words of the query.
        seen = sum(self.observed(n - 2) for lengths in self.turns for n in lengths[:-1])
        return prompts + self.sampled + seen

    def page(self, query: str, wrapping: int) -> str:
        """Words for a query; with `wrapping` tokens around them they are the observation."""
        words = query.split()
        draw = random.Random(zlib.crc32(" ".join(words).encode()))
        count = self.observed(len(words)) - wrapping
        return " ".join(WORDS[draw.randrange(len(WORDS))] for _ in range(count))


def workload(name: str) -> Workload:
    """Return `short`, `long`, or `even:P:N:T`: P prompts, N searches each, observations from T."""
    draw = random.Random(1234)
    kind, *numbers = name.split(":")
    count, searches, observation = map(int, numbers) if numbers else (PROMPTS, 4, 50)
    prompts = tuple(
        " ".join(draw.choice(WORDS) for _ in range(draw.randint(16, 32))) for _ in range(count)
    )
    many = [draw.choices(range(5), (0.1, 0.25, 0.3, 0.25, 0.1))[0] for _ in range(count * GROUP)]
    if kind != "short":
        many = [searches] * (count * GROUP)
    turns = tuple((*(draw.randint(8, 16) for _ in range(n)), draw.randint(6, 14)) for n in many)
    return Workload(name, prompts, turns, 290 if kind == "long" else observation)


def reward(row: int, step: int) -> float:
    """A reward for a rollout: no two of a group are equal, so that every token has credit."""
    return random.Random(f"{row}/{step}").random()
