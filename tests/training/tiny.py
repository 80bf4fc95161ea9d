"""A tiny model, a handful of questions and recipes over them, all in a temporary folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.trajectory import Kind, Segment, Source, StopReason, Trajectory

WORDS = (
    "<pad>", "<eos>", "<unk>", "<think>", "</think>", "<search>", "</search>", "<answer>",
    "</answer>", "<information>", "</information>", "Doc", "(Title:", ")", "Question:", "\n", "who",
    "made", "the", "lamp", "clock", "bridge", "mill", "Anna", "Berta", "Clara", "Dora", "?", ".",
    "1", "2", "3",
)  # fmt: skip


def save_tiny_model(folder: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2) -> Path:
    """Write a random Llama with a word-level tokenizer; return its folder."""
    import torch
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"</?[a-z]+>|\n|\(Title:|[A-Za-z]+:?|[0-9]|[^ A-Za-z0-9]"),
        "removed",
        invert=True,
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_data(folder: Path) -> None:
    """Write questions and passages about who made what."""
    things, makers = ("lamp", "clock", "bridge", "mill"), ("Anna", "Berta", "Clara", "Dora")
    with (folder / "questions.jsonl").open("w") as file:
        for at, (thing, maker) in enumerate(zip(things, makers, strict=True)):
            for number in range(2):
                row = {
                    "id": f"q{at}-{number}",
                    "question": f"who made the {thing} ?",
                    "golden_answers": [maker],
                    "metadata": {"hops": 1 + number},
                }
                file.write(json.dumps(row) + "\n")
    with (folder / "passages.jsonl").open("w") as file:
        for at, (thing, maker) in enumerate(zip(things, makers, strict=True)):
            passage = {"id": f"d{at}", "title": thing, "text": f"{maker} made the {thing} ."}
            file.write(json.dumps(passage) + "\n")


def teach(folder: Path, *, steps: int = 60) -> None:
    """Fit the model in `folder / "model"` to rollouts with zero to two searches, so that a sampled
    rollout searches, answers, and is right at times."""
    import torch
    import transformers

    from evenhand.task import Episode, Limits, ScriptedPolicy, as_tokenizer, run_episode
    from evenhand.training.batching import micro_batches, rows_of
    from evenhand.training.forward import Forward
    from evenhand.training.recipes import recipe_from
    from evenhand.training.sources import open_sources

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = as_tokenizer(transformers.AutoTokenizer.from_pretrained(folder / "model"))
    sources = open_sources(recipe_from(settings(folder)))
    rollouts = []
    for question in sources.train:
        thing = question.question.split()[3]
        for searches in range(3):
            look = f"<think> {thing} </think> <search> {thing} </search>"
            reply = f"<think> the </think> <answer> {question.golden_answers[0]} </answer>"
            limits = Limits(**settings(folder)["environment"]["limits"])
            episode = Episode(
                question.question, tokenizer=tokenizer, template=template, limits=limits
            )
            policy = ScriptedPolicy(tokenizer, [look] * searches + [reply])
            retriever = sources.environment.retriever
            rollout = run_episode(episode, policy, lambda q: retriever.search([q], 1)[0])  # noqa: B023
            segments = tuple(replace(s, advantage=0.0) for s in rollout.segments)
            rollouts.append(replace(rollout, reward=0.0, segments=segments))
    (batch,) = micro_batches(rows_of(rollouts), 100_000)
    forward = Forward(model, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        (-forward(batch).logprobs.mean()).backward()
        optimizer.step()
    model.save_pretrained(folder / "model")


def save_world(folder: Path) -> Path:
    """Write model and data; return the folder."""
    save_tiny_model(folder / "model")
    write_data(folder)
    teach(folder)
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe as a nested table; `changes` are `section__key=value`."""
    table: dict[str, Any] = {
        "name": "tiny",
        "steps": 3,
        "model": {"path": str(folder / "model"), "device": "cpu", "threads": 1},
        "data": {
            "train": str(folder / "questions.jsonl"),
            "evaluate": str(folder / "questions.jsonl"),
        },
        "retrieval": {"corpus": str(folder / "passages.jsonl"), "documents": 1,
                      "settings": {"backend": "numpy"}},
        "environment": {
            "template": "tiny:template",
            "limits": {"max_turn_tokens": 10, "max_observation_tokens": 24, "max_context": 120,
                       "max_invalid": 1, "max_searches": 2},
        },
        "rollout": {"questions": 2, "group_size": 4},
        "reward": {"name": "tiny:varied"},
        "credit": {"estimator": "grpo"},
        "optimizer": {"lr": 0.01},
        "evaluation": {"questions": 4},
        "checkpoint": {"every": 1},
        "tracking": {"tensorboard": "off"},
    }  # fmt: skip
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            table.setdefault(section, {})[name] = value
        else:
            table[section] = value
    return table


def template(question: str) -> str:
    """Return the prompt."""
    return f"Question: {question}\n"


def varied(trajectory: Trajectory) -> float:
    """Return a reward that a random policy varies in: the share of names among its tokens."""
    ids = [i for s in trajectory.segments if s.is_policy for i in s.token_ids.tolist()]
    names = {WORDS.index(name) for name in ("Anna", "Berta", "Clara", "Dora")}
    return sum(i in names for i in ids) / max(len(ids), 1)


def credited_rollout(
    name: str,
    group: str,
    lengths: list[tuple[str, int]],
    generator: np.random.Generator,
    *,
    reward: float | None = 1.0,
    credit: float | None = None,
    stop_reason: StopReason = StopReason.ANSWERED,
) -> Trajectory:
    """Return a rollout of random tokens: `lengths` are `(kind, tokens)` after a prompt."""
    segments = []
    for kind_name, n in [("prompt", 4), *lengths]:
        kind = Kind(kind_name)
        is_policy = kind in (Kind.SEARCH, Kind.ANSWER, Kind.INVALID, Kind.TRUNCATED)
        own = generator.normal() if credit is None else credit
        segments.append(
            Segment(
                source=Source.POLICY if is_policy else Source.ENVIRONMENT,
                kind=kind,
                text="x",
                n_tokens=n,
                query="q" if kind is Kind.SEARCH else None,
                documents=() if kind is Kind.INFORMATION else None,
                token_ids=generator.integers(3, len(WORDS), size=n),
                logprobs=-generator.random(n) * 4 if is_policy else None,
                advantage=float(own) if is_policy else 0.0,
            )
        )
    return Trajectory(
        id=name,
        group=group,
        question="q",
        golden_answers=("a",),
        reward=reward,
        format_ok=True,
        stop_reason=stop_reason,
        segments=tuple(segments),
    )


def mixed_rollouts(seed: int = 0) -> list[Trajectory]:
    """Return eight rollouts of two groups with different lengths, one of them without credit."""
    generator = np.random.default_rng(seed)
    found = []
    for at in range(8):
        searches = int(generator.integers(0, 3))
        lengths: list[tuple[str, int]] = []
        for _ in range(searches):
            lengths += [("search", int(generator.integers(2, 9)))]
            lengths += [("information", int(generator.integers(5, 30)))]
        lengths += [("answer", int(generator.integers(2, 7)))]
        credit = 0.0 if at == 3 else None
        found.append(credited_rollout(f"t{at}", f"g{at % 2}", lengths, generator, credit=credit))
    return found


def constant_reward(trajectory: Trajectory) -> float:  # noqa: ARG001 the protocol
    """Return the same for every rollout."""
    return 1.0


def only_lamps(trajectory: Trajectory) -> float:
    """Return a reward that varies for questions about lamps only."""
    return varied(trajectory) if "lamp" in trajectory.question else 0.0


def fails_at_times(trajectory: Trajectory) -> float:
    """Fail on rollouts that searched."""
    if trajectory.executed_searches():
        raise ValueError("cannot judge this")
    return varied(trajectory)


class _BrokenForLamps:
    def search(self, queries: list[str], k: int) -> list[Any]:
        from evenhand.retrieval import SearchResult
        from evenhand.trajectory.protocol import Document

        found = SearchResult((Document("d0", "clock", "Berta made the clock ."),)[:k])
        failed = SearchResult(error="the server is down")
        return [failed if "lamp" in query else found for query in queries]


def broken_for_lamps() -> _BrokenForLamps:
    """Return a search engine that fails for some queries."""
    return _BrokenForLamps()


def as_message(question: str) -> list[dict[str, str]]:
    """Return the prompt as a chat message."""
    return [{"role": "user", "content": question}]


CHAT = "{% for message in messages %}Question: {{ message.content }}\n{% endfor %}"
"""A chat template that gives the same tokens as `template`."""


class _OneBook:
    """A search engine that knows one passage."""

    def search(self, queries: list[str], k: int) -> list[Any]:  # noqa: ARG002 the protocol
        from evenhand.retrieval import SearchResult
        from evenhand.trajectory.protocol import Document

        return [SearchResult((Document("own", "mill", "Dora made the mill ."),)) for _ in queries]


def one_book() -> _OneBook:
    """Return a search engine of one's own."""
    return _OneBook()


def by_length(trajectory: Trajectory) -> str:
    """Return a stratum: whether the policy wrote much."""
    tokens = sum(s.n_tokens for s in trajectory.segments if s.is_policy)
    return "long" if tokens > 14 else "short"
