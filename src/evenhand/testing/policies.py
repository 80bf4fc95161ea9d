"""Scripted policies: one that is always right, one that does anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenhand.task import (
    Generate,
    GoldCase,
    Limits,
    ScriptedPolicy,
    Tokenizer,
    Turn,
    gold_turns,
)

FRAGMENTS = (
    "<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>",
    "</information>", "</sea", "rch>", "<answ", "er>", "Doc 1(Title: T) x\n", "gold", " ", "\n",
    "who wrote it", "é", "日本", "\U0001f600", "{question}", "<|im_end|>", "<", ">", "/",
)  # fmt: skip
"""Pieces of turns: tags, half tags, words, blanks, characters of one to four bytes."""


def gold_policy(
    case: GoldCase,
    tokenizer: Tokenizer,
    *,
    limits: Limits | None = None,
    think_in_prompt: bool = False,
) -> ScriptedPolicy:
    """Return a policy that searches the queries of a case and gives its golden answer."""
    turns = gold_turns(case, limits=limits, think_in_prompt=think_in_prompt)
    return ScriptedPolicy(tokenizer, turns)


class MixturePolicy:
    """A policy that draws each turn at random, for fuzzing.

    With probability `well_formed` a turn is a think and a search or an answer; else it is a random
    string of `FRAGMENTS`. It does not stop at tags, and one turn in eight it ignores `max_tokens`,
    as samplers may.

    Attributes:
        sampled: the ids of each turn.
    """

    def __init__(self, tokenizer: Tokenizer, *, seed: int, well_formed: float = 0.5) -> None:
        self._tokenizer = tokenizer
        self._random = np.random.default_rng(seed)
        self._well_formed = well_formed
        self.sampled: list[list[int]] = []

    def __call__(self, context_ids: Sequence[int], request: Generate) -> Turn:  # noqa: ARG002 the protocol
        """Return a random turn."""
        random = self._random
        if random.random() < self._well_formed:
            action = "answer" if random.random() < 0.3 else "search"
            text = f"<think>{self._noise(4)}</think><{action}>{self._noise(3)}</{action}>"
        else:
            text = self._noise(12)
        ids = list(self._tokenizer.encode(text))
        cut = len(ids) > request.max_tokens and random.random() < 7 / 8
        ids = ids[: request.max_tokens] if cut else ids
        self.sampled.append(ids)
        logprobs = -random.random(len(ids)) if random.random() < 0.5 else None
        return Turn(ids, logprobs, finished=not cut)

    def _noise(self, most: int) -> str:
        picks = self._random.integers(len(FRAGMENTS), size=self._random.integers(most + 1))
        return "".join(FRAGMENTS[int(pick)] for pick in picks)
