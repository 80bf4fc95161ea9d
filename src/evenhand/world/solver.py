"""The scripted solver as an answerer of evaluations: the ceiling of the toy world."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from evenhand.datasets import Question
from evenhand.retrieval import Retriever
from evenhand.rollout import Progress, ProgressCallback, group_name
from evenhand.task import Limits, as_tokenizer
from evenhand.trajectory import Trajectory
from evenhand.world.demonstrations import LIMITS, demonstrate
from evenhand.world.skills import Skill
from evenhand.world.tokenizer import build_tokenizer


@dataclass(frozen=True, slots=True)
class SolverAnswerer:
    """Plays the questions of a toy world with a scripted agent (`evaluation.run.Answerer`).

    Attributes:
        retriever: over the passages of the questions' world.
        limits: rules of the episodes.
        skill: of the agent.
    """

    retriever: Retriever
    limits: Limits = LIMITS
    skill: Skill = Skill.SOLVER

    def refuses(self, question: Question) -> str | None:  # noqa: ARG002 the protocol
        """Return `None`: every question can be asked."""
        return None

    def answer(
        self, questions: Sequence[Question], progress: ProgressCallback | None = None
    ) -> list[Trajectory]:
        """Return one rollout a question; its wording depends on the question alone."""
        tokenizer = as_tokenizer(build_tokenizer())
        rollouts = []
        for at, question in enumerate(questions, start=1):
            seed = hashlib.sha256(question.id.encode()).digest()
            rollout = demonstrate(
                question,
                self.skill,
                retriever=self.retriever,
                tokenizer=tokenizer,
                random=np.random.default_rng(list(seed)),
                limits=self.limits,
            )
            name = group_name(question)
            rollouts.append(replace(rollout, id=f"{name}:0", group=name))
            if progress is not None:
                progress(Progress(len(questions), finished=at))
        return rollouts
