"""What a recipe names: questions, search engine, environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenhand.core.errors import ConfigError
from evenhand.core.plugins import did_you_mean, load_object
from evenhand.datasets import Question, load_corpus, load_questions
from evenhand.retrieval import Bm25Retriever, Retriever, open_retriever
from evenhand.rollout import SearchEnvironment, Searcher
from evenhand.task.prompts import Notices
from evenhand.training.config import Recipe
from evenhand.trajectory.protocol import Document
from evenhand.world.generator import generate_world

WORLD = "world"
"""Name of the toy world as a source of questions."""

_WORLD_DRAW = 250
"""Questions of one draw from a world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """Settings of the toy world (`data.world`): one to train on, one of other names to evaluate on.

    Attributes:
        seed: of both worlds.
        size: entities of the training world.
        questions: how many to train on.
        evaluate_size: entities of the other one.
        evaluate_questions: how many to evaluate on.
    """

    seed: int = 1
    size: int = 300
    questions: int = 4000
    evaluate_size: int = 300
    evaluate_questions: int = 600


@dataclass(frozen=True, slots=True)
class Sources:
    """Questions and what surrounds the policy while it works on them.

    Attributes:
        train: questions to train on.
        environment: search engine, rules and prompt.
        evaluate: held-out questions; empty if nothing is evaluated.
        evaluate_environment: the same with the search engine of these.
    """

    train: Sequence[Question]
    environment: SearchEnvironment
    evaluate: Sequence[Question]
    evaluate_environment: SearchEnvironment


def open_sources(recipe: Recipe) -> Sources:
    """Load what a recipe names.

    Raises:
        ConfigError: unknown names, or fewer training questions than a step needs.
        DataError: files that cannot be read.
    """
    data, retriever = recipe.data, _common_retriever(recipe)
    train, searched = _part(recipe, data.train, "train", retriever)
    if len(train) < recipe.rollout.questions:
        raise ConfigError(
            f"{len(train)} training questions are fewer than a step takes (rollout.questions is "
            f"{recipe.rollout.questions}); lower it or give more questions"
        )
    environment = environment_of(recipe, searched)
    if data.evaluate is None:
        return Sources(train, environment, (), environment)
    held_out, searched = _part(recipe, data.evaluate, "evaluate", retriever)
    return Sources(
        train,
        environment,
        held_out[: recipe.evaluation.questions],
        replace(environment, retriever=searched),
    )


def open_held_out(recipe: Recipe) -> tuple[Sequence[Question], SearchEnvironment]:
    """Return the questions of `data.evaluate` and their environment, without the training ones.

    Raises:
        ConfigError: unknown names, or nothing to evaluate on.
        DataError: files that cannot be read.
    """
    if recipe.data.evaluate is None:
        raise ConfigError("data.evaluate is not set, so there is nothing to evaluate on")
    retriever = _common_retriever(recipe)
    questions, searched = _part(recipe, recipe.data.evaluate, "evaluate", retriever)
    return questions, environment_of(recipe, searched)


def open_environment(recipe: Recipe) -> SearchEnvironment:
    """Return the environment of a recipe's evaluation, without loading its questions.

    Raises:
        ConfigError: unknown names, or no passages to search.
    """
    retriever = _common_retriever(recipe)
    if retriever is None:
        retriever = _part(recipe, WORLD, "evaluate", None)[1]
    return environment_of(recipe, retriever)


def held_out_world(recipe: Recipe) -> Any:
    """Return the toy world that a recipe evaluates on (`evenhand.world.World`)."""
    return _world(recipe, "evaluate")[0]


def environment_of(recipe: Recipe, retriever: Searcher) -> SearchEnvironment:
    """Return rules and prompt of a recipe around a search engine."""
    return SearchEnvironment(
        retriever=retriever,
        k=recipe.retrieval.documents,
        limits=recipe.environment.rules(),
        template=recipe.environment.template,
        think_in_prompt=recipe.environment.think_in_prompt,
        notices=_notices(recipe.environment.notices),
    )


def _common_retriever(recipe: Recipe) -> Retriever | None:
    """Return the search engine of training and evaluation, or `None`: each world has its own."""
    if recipe.retrieval.corpus is None and recipe.retrieval.retriever == "bm25":
        return None
    return _retriever(recipe)


def _part(
    recipe: Recipe, specs: str | list[str], part: str, retriever: Retriever | None
) -> tuple[Sequence[Question], Retriever]:
    """Return questions and the search engine that goes with them."""
    if specs == WORLD:
        world, questions = _world(recipe, part)
        return questions, retriever or _bm25(recipe, world.documents)
    if retriever is None:
        raise ConfigError("retrieval.corpus is missing: bm25 needs passages; name a set, union or "
                          "a file")  # fmt: skip
    names = [specs] if isinstance(specs, str) else specs
    folder = recipe.data.folder
    return [q for name in names for q in load_questions(name, data=folder)], retriever


def _world(recipe: Recipe, part: str) -> tuple[Any, list[Question]]:
    known = WorldSettings.__dataclass_fields__
    for name in recipe.data.world:
        if name not in known:
            raise ConfigError(f"data.world has no setting {name!r}{did_you_mean(name, known)}; "
                              f"it has {', '.join(known)}")  # fmt: skip
    settings = WorldSettings(**recipe.data.world)
    for name in known:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"data.world.{name} must be a whole number, got {value!r}")
    if part == "train":
        world = generate_world(settings.seed, size=settings.size, split="train")
        return world, _draw(world, settings.questions)
    world = generate_world(settings.seed, size=settings.evaluate_size, split="eval")
    return world, _draw(world, settings.evaluate_questions)


def _draw(world: Any, count: int) -> list[Question]:
    # A draw holds different questions, and a world has few about famous facts: several draws let
    # these come back, under ids of their own.
    draws = [min(_WORLD_DRAW, count - begin) for begin in range(0, count, _WORLD_DRAW)]
    return [question for seed, n in enumerate(draws) for question in world.questions(n, seed=seed)]


def _notices(name: str | None) -> Notices:
    if name is None:
        return Notices()
    found = load_object(name, "notices")
    made = found() if callable(found) else found
    if not isinstance(made, Notices):
        raise ConfigError(f"environment.notices {name!r} gave {type(made).__name__}, expected an "
                          "evenhand.task.prompts.Notices")  # fmt: skip
    return made


def _retriever(recipe: Recipe) -> Retriever:
    section = recipe.retrieval
    if section.retriever != "bm25":
        return open_retriever(section.retriever, **section.settings)
    assert section.corpus is not None
    return _bm25(recipe, load_corpus(section.corpus, data=recipe.data.folder))


def _bm25(recipe: Recipe, passages: Iterable[Document]) -> Retriever:
    settings = recipe.retrieval.settings
    known = set(inspect.signature(Bm25Retriever.build).parameters) - {"documents", "progress"}
    for name in settings:
        if name not in known:
            raise ConfigError(f"retrieval.settings: bm25 has no setting {name!r}"
                              f"{did_you_mean(name, known)}")  # fmt: skip
    return Bm25Retriever.build(passages, **settings)


class QuestionStream:
    """An endless stream of questions whose position is one number.

    Pass `p` is a permutation that depends on the seed and `p` alone, so a position is enough to
    resume.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        *,
        seed: int,
        shuffle: bool = True,
        usable: Callable[[Question], bool] | None = None,
        position: int = 0,
    ) -> None:
        """Make a stream.

        Args:
            questions: the set.
            seed: of the permutations.
            shuffle: else every pass is in the order of the set.
            usable: questions for which it is false are passed over.
            position: how many were drawn before.
        """
        self._questions = questions
        self._seed = seed
        self._shuffle = shuffle
        self._usable = usable or (lambda _: True)
        self._order: tuple[int, Any] = (-1, None)
        self.position = position
        self.unusable: set[str] = set()

    def take(self, n: int, *, besides: Iterable[Question] = ()) -> list[Question]:
        """Return up to `n` different questions, none of them among `besides`.

        Fewer come only if the set has no more that are usable.
        """
        taken: list[Question] = []
        seen = {_key(question) for question in besides}
        looked_at = 0
        while len(taken) < n and looked_at < 2 * len(self._questions):
            question = self._next()
            looked_at += 1
            if _key(question) in seen:
                continue
            if question.id in self.unusable or not self._usable(question):
                self.unusable.add(question.id)
                continue
            seen.add(_key(question))
            taken.append(question)
        return taken

    def _next(self) -> Question:
        epoch, at = divmod(self.position, len(self._questions))
        if self._order[0] != epoch:
            n = len(self._questions)
            generator = np.random.default_rng([self._seed, epoch])
            self._order = (epoch, generator.permutation(n) if self._shuffle else np.arange(n))
        self.position += 1
        return self._questions[int(self._order[1][at])]


def _key(question: Question) -> tuple[str | None, str]:
    return (question.dataset, question.id)
