"""`evenhand world`: generate, show and check toy worlds; pre-train their policy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.text import Text

from evenhand.cli.common import console, plain_table
from evenhand.core.errors import ConfigError, DataError, require
from evenhand.core.files import atomic_write
from evenhand.datasets import write_questions
from evenhand.diagnostics.intervals import Estimate
from evenhand.task import as_tokenizer
from evenhand.trajectory import Trajectory
from evenhand.world import (
    NameSplit,
    Skill,
    World,
    build_retriever,
    build_tokenizer,
    demonstrate,
    generate_world,
    load_policy,
)
from evenhand.world.measure import Row, as_plain, roll_out, summarise
from evenhand.world.pretrain import CURRICULUM, pretrain

app = typer.Typer(
    name="world",
    help="Generate, show and check toy worlds; pre-train the toy world's policy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

SHIPPED = "warmstart"
"""The name of the policy that comes with the package."""

Seed = Annotated[int, typer.Option(help="Another seed, another world.", min=0)]
Size = Annotated[int, typer.Option(help="Entities besides the famous ones.")]
Split = Annotated[NameSplit, typer.Option(help="Whose names the world has.")]
Count = Annotated[int, typer.Option("--questions", help="How many questions.", min=1)]
QuestionSeed = Annotated[int, typer.Option(help="Another seed, other questions.", min=0)]


@app.command()
def generate(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.", show_default=False)],
    seed: Seed = 0,
    size: Size = 300,
    split: Split = NameSplit.TRAIN,
    questions: Count = 1000,
    question_seed: QuestionSeed = 0,
) -> None:
    """Write a world as a corpus and a question set: `corpus.jsonl` and `questions.jsonl`."""
    make_folder(out)
    world = generate_world(seed, size=size, split=split)
    asked = world.questions(questions, seed=question_seed)
    with atomic_write(out / "corpus.jsonl") as file:
        for document in world.documents:
            row = {"id": document.id, "title": document.title, "text": document.text}
            file.write(json.dumps(row) + "\n")
    write_questions(out / "questions.jsonl", asked)
    console().print(f"{len(world.documents)} passages and {len(asked)} questions in {out}")


@app.command()
def show(
    seed: Seed = 0,
    size: Size = 300,
    split: Split = NameSplit.TRAIN,
    questions: Count = 3,
    question_seed: QuestionSeed = 0,
    skill: Annotated[Skill, typer.Option(help="Who plays the questions.")] = Skill.SOLVER,
) -> None:
    """Show how a scripted agent answers some questions of a world."""
    world = generate_world(seed, size=size, split=split)
    for rollout in _play(world, questions, question_seed, skill)[1]:
        text = "".join(segment.text for segment in rollout.segments)
        console().print(Text(f"{text}\n\nright: {', '.join(rollout.golden_answers or ())}\n"))


@app.command()
def check(
    seed: Seed = 0,
    size: Size = 300,
    split: Split = NameSplit.EVAL,
    questions: Count = 500,
    question_seed: QuestionSeed = 0,
    policy: Annotated[
        str | None,
        typer.Option(help=f"Measure this policy too: a folder, or {SHIPPED}.", show_default=False),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the policy; 0 is greedy.", min=0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Prove that a world's questions can be answered, and measure a policy on them.

    The scripted solver must answer every question right through the real environment and search
    engine; else the exit code is 2.
    """
    world = generate_world(seed, size=size, split=split)
    asked, rollouts = _play(world, questions, question_seed, Skill.SOLVER)
    _print("scripted solver", summarise(asked, rollouts), as_json=as_json)
    if policy is not None:
        _quiet()
        model, tokenizer = load_policy() if policy == SHIPPED else load_policy(Path(policy))
        rollouts_of_policy = roll_out(
            model, tokenizer, asked, build_retriever(world), temperature=temperature, seed=seed
        )
        name = f"{policy}, temperature {temperature:g}"
        _print(name, summarise(asked, rollouts_of_policy), as_json=as_json)
    right = summarise(asked, rollouts)[0].exact_match.value
    if right < 1:
        raise DataError(f"the solver answers {right:.2%} of the questions right; it must answer "
                        "all: this is a fault of the generator, please report it")  # fmt: skip


@app.command("pretrain")
def pretrain_command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the run.")],
    seed: Seed = 0,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so long; the same command goes on later.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1,
) -> None:
    """Make a warm-start policy: about a quarter of an hour on one idle core; killed, it resumes."""
    torch = require("torch", "train", "pre-training the toy world's policy")
    torch.set_num_threads(threads)
    _quiet()
    make_folder(out)
    total = sum(stage.tokens for stage in CURRICULUM)

    def log(record: Mapping[str, Any]) -> None:
        console().print(
            f"{record['tokens'] / total:5.1%}  {record['stage']:7s} loss {record['loss']:.3f}  "
            f"tokens right {record['token_accuracy']:.3f}  "
            f"values right {record['value_accuracy']:.3f}  {record['cpu_seconds']:.0f} CPU s"
        )

    budget = None if minutes is None else minutes * 60
    folder = pretrain(out, seed=seed, budget_seconds=budget, log=log)
    console().print(f"policy in {folder}")


def _quiet() -> None:
    # A bar for each checkpoint would tear our own lines apart.
    transformers = require("transformers", "train", "the toy world's policy")
    transformers.utils.logging.disable_progress_bar()


# --- parts ---------------------------------------------------------------------------------------


def make_folder(path: Path) -> None:
    """Create a folder, or say in one line why that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}") from error


def _play(
    world: World, count: int, question_seed: int, skill: Skill
) -> tuple[list[Any], list[Trajectory]]:
    questions = world.questions(count, seed=question_seed)
    retriever = build_retriever(world)
    tokenizer = as_tokenizer(build_tokenizer())
    random = np.random.default_rng(question_seed)
    rollouts = [
        demonstrate(question, skill, retriever=retriever, tokenizer=tokenizer, random=random)
        for question in questions
    ]
    return questions, rollouts


def _print(title: str, rows: Sequence[Row], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            typer.echo(json.dumps({"policy": title, **as_plain(row)}))
        return
    table = plain_table(
        "questions", "n", "exact match", "95 %", "format", "searches", "two or more", title=title
    )
    for row in rows:
        right = row.exact_match
        table.add_row(
            row.kind,
            str(right.n),
            _percent(right),
            _interval(right),
            _percent(row.format_ok),
            f"{row.searches:.2f}",
            _percent(row.several),
        )
    console().print(table)


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.1%}"


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.1%} to {estimate.high:.1%}"
