"""Cost of multi-turn rollouts: evenhand's, against a fresh `model.generate` for every turn.

    python benchmarks/rollout.py                # three workloads, five rounds each
    python benchmarks/rollout.py --rounds 3 --workload short

The model is a random Llama of 2.16 million parameters (float32, one thread). 16 prompts x 8
rollouts; each rollout searches 0 to 4 times (mean 2.1) in turns of 8 to 16 tokens and answers in 6
to 14. Where turns end is forced through the logits, so that both sides do the same work; all other
tokens are sampled. Observations have about 60 tokens (`short`), 300 with four searches for every
rollout (`long`), or none at all (`single`: one turn of 36 tokens).

`generate` is what trainers without a kept cache do: after every search the whole context is encoded
again, padded on the left. It gets its observations as token ids, free of charge; evenhand's figure
is all of `collect`, parsing, prompts and records included. Seconds are CPU seconds of this process;
rounds alternate, and the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)

from evenhand.datasets import Question
from evenhand.rollout import RowKey, Sampling, SearchEnvironment, collect
from evenhand.rollout.transformers import TransformersPolicy
from evenhand.task import Limits
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import Document

VOCABULARY = 2000
SPECIAL = ("<pad>", "<eos>", "<unk>", "<search>", "</search>", "<answer>", "</answer>",
           "<information>", "</information>")  # fmt: skip
PAD, EOS, UNKNOWN, SEARCH, SEARCH_END, ANSWER, ANSWER_END = range(7)
PROMPTS, GROUP = 16, 8


class Words:
    """One token a word; what is no word of the list is unknown."""

    def __init__(self) -> None:
        self.words = [*SPECIAL, *(f"w{at}" for at in range(VOCABULARY - len(SPECIAL)))]
        self._ids = {word: at for at, word in enumerate(self.words)}
        self.eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word, UNKNOWN) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in ids)


@dataclass(frozen=True)
class Workload:
    """Prompts, and the lengths of the turns of every rollout, the last one an answer."""

    name: str
    prompts: list[str]
    turns: list[list[int]]
    words: tuple[int, int]


def workload(name: str) -> Workload:
    draw = random.Random(1234)
    prompts = [
        " ".join(f"w{draw.randrange(1900)}" for _ in range(draw.randint(16, 32)))
        for _ in range(PROMPTS)
    ]
    if name == "single":
        return Workload(name, prompts, [[36]] * (PROMPTS * GROUP), (0, 0))
    many = [draw.choices(range(5), (0.1, 0.25, 0.3, 0.25, 0.1))[0] for _ in range(PROMPTS * GROUP)]
    if name == "long":
        many = [4] * (PROMPTS * GROUP)
    turns = [[draw.randint(8, 16) for _ in range(n)] + [draw.randint(6, 14)] for n in many]
    return Workload(name, prompts, turns, (285, 305) if name == "long" else (44, 64))


@dataclass(frozen=True)
class Found:
    documents: tuple[Document, ...]
    error: str | None = None


class RandomPages:
    """A page of random words for every query, always the same one."""

    def __init__(self, words: tuple[int, int]) -> None:
        self._words = words

    def search(self, queries: Sequence[str], k: int) -> list[Found]:  # noqa: ARG002 one page
        return [Found((Document("d", "T", self.page(query)),)) for query in queries]

    def page(self, query: str) -> str:
        draw = random.Random(zlib.crc32(query.encode()))
        return " ".join(f"w{draw.randrange(1900)}" for _ in range(draw.randint(*self._words)))


class Script:
    """Forces the first and the last token of each turn, and forbids special tokens between."""

    def __init__(self, work: Workload, names: dict[tuple[str, int], int]) -> None:
        self._names = names
        ends = np.zeros((len(work.turns), 1 + max(map(sum, work.turns))), dtype=np.int64)
        for row, lengths in enumerate(work.turns):
            at = 0
            for turn, length in enumerate(lengths):
                last = turn == len(lengths) - 1
                ends[row, at] = ANSWER if last else SEARCH
                ends[row, at + length - 1] = ANSWER_END if last else SEARCH_END
                at += length
        self._forced = ends
        self.drawn = np.zeros(len(work.turns), dtype=np.int64)

    def rows(self, rows: Any, logits: Any) -> Any:
        """Change the logits of rollouts `rows`, each of which draws its next token."""
        rows = np.asarray(rows)
        live = np.flatnonzero(rows >= 0)
        forced = np.zeros(len(rows), dtype=np.int64)
        forced[live] = self._forced[rows[live], self.drawn[rows[live]]]
        self.drawn[rows[live]] += 1
        logits[:, : len(SPECIAL)] = float("-inf")
        must = np.flatnonzero(forced)
        logits[must] = float("-inf")
        logits[must, forced[must]] = 0.0
        return logits

    def __call__(self, logits: Any, keys: Sequence[RowKey | None], _places: Any) -> Any:
        names = self._names
        return self.rows([-1 if key is None else names[key[1], key[2]] for key in keys], logits)


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=2048,
        tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).float().eval()


class Ours:
    def __init__(self, llama: Any, work: Workload, **options: Any) -> None:
        self._work = work
        self._names = {(str(at // GROUP), at % GROUP): at for at in range(len(work.turns))}
        self._tokenizer = Words()
        self._policy = TransformersPolicy(
            llama, self._tokenizer, adjust_logits=self._adjust, **options
        )
        self._questions = [Question(str(at), text, ("x",)) for at, text in enumerate(work.prompts)]
        self._environment = SearchEnvironment(
            retriever=RandomPages(work.words), k=1, template=lambda question: question,
            limits=Limits(max_context=2048, announce_last=False),
        )  # fmt: skip
        self._script = Script(work, self._names)

    def _adjust(self, *arguments: Any) -> Any:
        return self._script(*arguments)

    def __call__(self, seed: int) -> list[Trajectory]:
        self._script = Script(self._work, self._names)
        return collect(self._questions, self._policy, self._environment, group_size=GROUP,
                       sampling=Sampling(seed=seed))  # fmt: skip


class ForcedTurn(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, script: Script, rows: list[int]) -> None:
        self._script, self._rows = script, np.array(rows)
        self._done = np.zeros(len(rows), dtype=np.bool_)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        ended = input_ids[:, -1].numpy()
        self._done |= (ended == SEARCH_END) & (self._script.drawn[self._rows] > 0) & self._started
        self._done |= ended == ANSWER_END
        self._started = np.ones(len(self._rows), dtype=np.bool_)
        return self._script.rows(np.where(self._done, -1, self._rows), scores)

    _started = np.zeros(1, dtype=np.bool_)


class Generate:
    """A fresh call of `generate` for every turn, on contexts padded on the left."""

    def __init__(self, llama: Any, work: Workload) -> None:
        self._llama, self._work = llama, work
        self._tokenizer, self._pages = Words(), RandomPages(work.words)
        self._config = GenerationConfig(
            do_sample=True, top_k=0, top_p=1.0, max_new_tokens=64, pad_token_id=PAD,
            eos_token_id=[EOS, SEARCH_END, ANSWER_END],
        )  # fmt: skip

    def __call__(self, seed: int) -> float:
        """Return the seconds spent outside of `generate`, which are not counted."""
        torch.manual_seed(seed)
        spare = 0.0
        script = Script(self._work, {})
        contexts = [
            self._tokenizer.encode(self._work.prompts[at // GROUP])
            for at in range(len(self._work.turns))
        ]
        rows = list(range(len(contexts)))
        while rows:
            width = max(len(contexts[row]) for row in rows)
            ids = torch.full((len(rows), width), PAD)
            mask = torch.zeros((len(rows), width), dtype=torch.long)
            for at, row in enumerate(rows):
                ids[at, width - len(contexts[row]) :] = torch.tensor(contexts[row])
                mask[at, width - len(contexts[row]) :] = 1
            out = self._llama.generate(
                input_ids=ids, attention_mask=mask, generation_config=self._config,
                logits_processor=LogitsProcessorList([ForcedTurn(script, rows)]),
            )  # fmt: skip
            start = time.process_time()
            searching = []
            for row, tokens in zip(rows, out[:, width:].tolist(), strict=True):
                if SEARCH_END in tokens:
                    turn = tokens[: tokens.index(SEARCH_END) + 1]
                    page = self._pages.page(self._tokenizer.decode(turn))
                    contexts[row] += turn + [UNKNOWN] * 5 + self._tokenizer.encode(page)
                    searching.append(row)
            rows = searching
            spare += time.process_time() - start
        assert script.drawn.sum() == sum(map(sum, self._work.turns))
        return spare


def seconds(call: Any, seed: int) -> float:
    start = time.process_time()
    spare = call(seed)
    return time.process_time() - start - (spare if isinstance(spare, float) else 0.0)


def compare(name: str, rounds: int, **options: Any) -> None:
    work, llama = workload(name), model()
    ours, theirs = Ours(llama, work, **options), Generate(llama, work)
    tokens = sum(map(sum, work.turns))
    records = ours(0)
    assert sum(
        segment.n_tokens for record in records for segment in record.segments if segment.is_policy
    ) == tokens, "the script was not followed"  # fmt: skip
    total = sum(segment.n_tokens for record in records for segment in record.segments)
    found = [(seconds(ours, at), seconds(theirs, at)) for at in range(1, rounds + 1)]
    mine, other = (statistics.median(column) for column in zip(*found, strict=True))
    ratios = sorted(their / own for own, their in found)
    print(
        f"{name:7s} {tokens:6d} sampled, {total:7d} in all; evenhand {mine:6.2f} s "
        f"({tokens / mine:5.0f} tokens/s), generate {other:6.2f} s ({tokens / other:5.0f}); "
        f"ratio {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", choices=("short", "long", "single"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in (arguments.workload,) if arguments.workload else ("short", "long", "single"):
        compare(name, arguments.rounds)


if __name__ == "__main__":
    main()
