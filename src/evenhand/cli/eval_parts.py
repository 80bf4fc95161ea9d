"""What `evenhand eval` opens: recipe, question sets, search engines, models, baselines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand.core.errors import ConfigError, DataError
from evenhand.datasets import SETS, Question, load_corpus, load_questions
from evenhand.datasets.catalogue import UNION, find_set, is_file_name
from evenhand.evaluation.baselines import direct, gold_passages, retrieve_once
from evenhand.evaluation.folder import question_hash
from evenhand.evaluation.run import Answerer, EvaluationSet, PolicyAnswerer
from evenhand.retrieval import Retriever, SearchResult, info_of
from evenhand.rollout import Policy, Sampling, SearchEnvironment, Searcher
from evenhand.training.config import Recipe
from evenhand.training.recipes import load_recipe
from evenhand.training.sources import (
    WORLD,
    environment_of,
    held_out_world,
    open_environment,
    open_held_out,
)

if TYPE_CHECKING:
    from evenhand.trajectory.protocol import Document

ALL = "all"
"""Name of the seven standard sets together."""

OPENAI = "openai:"
"""Beginning of a model behind an address."""

WORLD_SETTINGS = (
    "environment.template=evenhand.world:template",
    "environment.limits={ max_searches = 5, max_turn_tokens = 32, max_observation_tokens = 120, "
    "max_context = 512, max_invalid = 1 }",
    "retrieval.documents=2",
    "data.world.evaluate_size=600",
)
"""The toy world as its recipes have it, for models that come without a recipe."""

WORLD_QUESTIONS = 1000
"""Questions of the toy world without --limit."""


class Baseline(StrEnum):
    """What answers instead of the agent."""

    NONE = "none"
    """Nothing: the model as a search agent."""
    DIRECT = "direct"
    """The model without a search."""
    RETRIEVE_ONCE = "retrieve_once"
    """The model with the passages that the question itself finds in its prompt."""
    GOLD_PASSAGES = "gold_passages"
    """The model with the supporting passages in its prompt."""
    SOLVER = "solver"
    """The scripted solver of the toy world; no model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options that decide what is evaluated.

    Attributes:
        model: folder, hub name, run or `openai:URL`; `None` for the solver.
        baseline: what answers.
        sets: names as given.
        limit: questions a set.
        data: data folder.
        changes: `a.b=c` settings of the recipe, the shorthands of options included.
    """

    model: str | None
    baseline: Baseline
    sets: tuple[str, ...]
    limit: int | None
    data: Path | None
    changes: tuple[str, ...]

    @property
    def run(self) -> Path | None:
        """The run folder that the model is, or `None`."""
        path = Path(self.model or "")
        if self.model is None or not (path / "recipe.toml").is_file():
            return None
        return None if (path / "config.json").is_file() else path

    def recipe(self, name: str) -> Recipe:
        """Return the settings for one set: those of the run or model, or defaults, and changes."""
        path = None if self.model is None else Path(self.model) / "recipe.toml"
        has_recipe = path is not None and path.is_file()
        changes: list[str] = []
        if name == WORLD and not has_recipe:
            changes += WORLD_SETTINGS
        if self.model is not None and not self.model.startswith(OPENAI) and self.run is None:
            changes += ["model.lora.rank=0", f"model.path={self.model}"]
        if self.data is not None:
            changes.append(f"data.folder={self.data}")
        own = ["data.evaluate=world", "retrieval.corpus=none", "retrieval.retriever=bm25"]
        if name == WORLD:
            questions = self.limit or WORLD_QUESTIONS
            changes += [*own, f"data.world.evaluate_questions={questions}", *self.changes]
            # A search engine for other sets knows nothing of the world.
            changes += own if len(self.sets) > 1 else []
        else:
            changes += self.changes
        base = path if has_recipe else None
        recipe = load_recipe(base, changes)
        if name != WORLD and recipe.retrieval.retriever == "bm25" and not recipe.retrieval.corpus:
            recipe = load_recipe(base, [*changes, f"retrieval.corpus={UNION}"])
        return recipe


def set_names(text: str) -> tuple[str, ...]:
    """Return the names in `--sets`; `all` stands for the seven standard sets.

    Raises:
        ConfigError: an unknown set, or one that stands twice.
    """
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        names += SETS if part == ALL else [part]
    for name in names:
        if name != WORLD and not is_file_name(name):
            find_set(name)
    keys = [key_of(name) for name in names]
    if not names or len(set(keys)) < len(keys):
        raise ConfigError(f"--sets takes different sets, such as nq,musique, got {text!r}")
    return tuple(names)


def key_of(name: str) -> str:
    """Return the name of a set in results: without split, and of a file its name."""
    if name == WORLD:
        return WORLD
    if is_file_name(name):
        return Path(name).name.split(".")[0]
    return find_set(name)[0].name


def sampled(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """Return `limit` questions, always the same ones, in their order.

    Those with the smallest hash of their id: a larger limit keeps the questions of a smaller one,
    and other questions in the file change nothing.
    """
    if limit is None or limit >= len(questions):
        return list(questions)

    def place(question: Question) -> bytes:
        return hashlib.sha256(question.id.encode()).digest()

    border = sorted(map(place, questions))[limit - 1]
    return [question for question in questions if place(question) <= border]


@dataclass(slots=True)
class Opened:
    """Question sets and environments.

    Attributes:
        questions: of each set, by its name in results.
        environments: of each set.
        recipes: settings of each set.
        retriever: what the manifest says of the search engines.
    """

    questions: dict[str, list[Question]]
    environments: dict[str, SearchEnvironment]
    recipes: dict[str, Recipe]
    retriever: dict[str, Any]

    def manifest_sets(self) -> dict[str, Any]:
        """Return what the manifest says of the sets."""
        return {
            name: {"n": len(questions), "questions": question_hash(questions)}
            for name, questions in self.questions.items()
        }


class _NoSearch:
    """Finds nothing: for baselines that never search."""

    def search(self, queries: Sequence[str], k: int) -> list[SearchResult]:  # noqa: ARG002 the protocol
        return [SearchResult() for _ in queries]


def open_sets(wanted: Wanted) -> Opened:
    """Load questions and search engines; one engine for all sets but the toy world.

    Raises:
        ConfigError: unknown names, or a baseline that does not fit the set.
        DataError: questions or passages that cannot be found.
    """
    opened = Opened({}, {}, {}, {})
    common: Searcher | None = None
    needs_search = wanted.baseline in (Baseline.NONE, Baseline.RETRIEVE_ONCE)
    for spec in wanted.sets:
        name, recipe = key_of(spec), wanted.recipe(spec)
        if spec == WORLD:
            found, environment = open_held_out(recipe)
            questions = list(found)
        elif wanted.baseline is Baseline.SOLVER:
            raise ConfigError("the baseline solver plays the toy world only; use --sets world")
        else:
            questions = _questions(spec, wanted, recipe)
            if common is None:
                common = open_environment(recipe).retriever if needs_search else _NoSearch()
            environment = environment_of(recipe, common)
        opened.questions[name], opened.recipes[name] = questions, recipe
        opened.environments[name] = environment
        opened.retriever[name] = _engine(environment.retriever)
    return opened


def _questions(spec: str, wanted: Wanted, recipe: Recipe) -> list[Question]:
    questions = sampled(load_questions(spec, data=recipe.data.folder), wanted.limit)
    if len({question.id for question in questions}) < len(questions):
        raise DataError(f"{spec} holds questions of several sets that share ids; give a file a set")
    return questions


def _engine(retriever: Any) -> dict[str, Any] | None:
    if isinstance(retriever, _NoSearch):
        return None
    info = info_of(retriever)
    return {"kind": info.kind, "fingerprint": info.fingerprint, "passages": info.passages}


def answerers(
    wanted: Wanted, opened: Opened, policy: Policy | None, sampling: Sampling, context: Any
) -> list[EvaluationSet]:
    """Return the sets with what answers them; without a policy the scripted solver does."""
    passages: dict[bool, Sequence[Document]] = {}
    found = []
    for spec in wanted.sets:
        name, is_world = key_of(spec), spec == WORLD
        environment, questions = opened.environments[name], opened.questions[name]
        if policy is None:
            found.append(EvaluationSet(name, questions, _solver(environment)))
            continue
        agent = PolicyAnswerer(
            policy=policy, environment=environment, sampling=sampling, context=context
        )
        answerer: Answerer = agent
        if wanted.baseline is Baseline.DIRECT:
            answerer = direct(agent)
        elif wanted.baseline is Baseline.RETRIEVE_ONCE:
            answerer = retrieve_once(agent)
        elif wanted.baseline is Baseline.GOLD_PASSAGES:
            if is_world not in passages:
                passages[is_world] = _passages(opened.recipes[name], is_world)
            answerer = gold_passages(agent, passages[is_world])
        found.append(EvaluationSet(name, questions, answerer))
    return found


def _solver(environment: SearchEnvironment) -> Answerer:
    from evenhand.world.solver import SolverAnswerer

    retriever = environment.retriever
    assert isinstance(retriever, Retriever)
    return SolverAnswerer(retriever, environment.limits)


def _passages(recipe: Recipe, is_world: bool) -> Sequence[Document]:
    if not is_world:
        return list(load_corpus(recipe.retrieval.corpus or UNION, data=recipe.data.folder))
    documents: Sequence[Document] = held_out_world(recipe).documents
    return documents
