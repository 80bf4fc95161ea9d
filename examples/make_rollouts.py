"""Make `examples/rollouts.jsonl.gz`: 320 rollouts of a scripted agent in a small invented world.

    python examples/make_rollouts.py        # needs evenhand[search]

No language model is involved: the agent is a script of mixed skill whose turns go through the real
environment (`evenhand.task.Episode`), the real BM25 retriever and the real reward,
`f1_format`. Rollouts of one question differ in how often they search, and multi-hop questions need
several searches, so the file shows what a training run shows: searching once pays less than
searching on, and correct first searches of failed rollouts are punished by grpo.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenhand.retrieval import Bm25Retriever
from evenhand.task import Episode, Generate, Turn, run_episode
from evenhand.task.rewards import score_trajectory
from evenhand.trajectory import Trajectory, write_trajectories
from evenhand.trajectory.protocol import Document

OUT = Path(__file__).parent / "rollouts.jsonl.gz"
SEED = 7
STEPS = 2
QUESTIONS_A_STEP = 20
ROLLOUTS = 8

FIRST = ["Ada", "Bram", "Cleo", "Dorin", "Elva", "Fenn", "Gala", "Hugo", "Ines", "Joris"]
LAST = ["Alder", "Birch", "Calder", "Dane", "Estes", "Falk", "Gorse", "Hale", "Ivers", "Jett"]
TOWN = ["Arden", "Brill", "Corvo", "Delph", "Emmer", "Farrow", "Gellick", "Harrow", "Istra", "Jarn"]
RIVER = ["Amble", "Brand", "Cress", "Dove", "Eder"]
ADJECTIVE = ["Silent", "Glass", "Last", "Amber", "Hollow", "Paper", "Winter", "Iron", "Seventh"]
NOUN = ["Harbour", "Orchard", "Signal", "Lantern", "Meadow", "Engine", "Garden", "Voyage"]


@dataclass(frozen=True)
class Chain:
    """A question with the titles that lead to its answer."""

    question: str
    titles: tuple[str, ...]
    answer: str


def make_world(generator: random.Random) -> tuple[list[Document], list[Chain]]:
    """Films with directors who were born in towns on rivers."""
    towns = {town: generator.choice(RIVER) for town in TOWN}
    people = {
        f"{first} {last}": generator.choice(TOWN)
        for first, last in zip(FIRST, generator.sample(LAST, len(LAST)), strict=True)
    }
    titles = [f"The {adjective} {noun}" for adjective in ADJECTIVE for noun in NOUN]
    films = {title: generator.choice(list(people)) for title in generator.sample(titles, 40)}
    passages = [(film, f"{film} is a film directed by {who}.") for film, who in films.items()]
    passages += [
        (who, f"{who} is a film director. {who} was born in {town}.")
        for who, town in people.items()
    ]
    passages += [
        (town, f"{town} is a town. The river {river} flows through {town}.")
        for town, river in towns.items()
    ]
    chains = []
    for film, who in films.items():
        town = people[who]
        chains += [
            Chain(f"Who directed the film {film}?", (film,), who),
            Chain(f"In which town was the director of {film} born?", (film, who), town),
            Chain(
                f"Which river flows through the town where the director of {film} was born?",
                (film, who, town),
                towns[town],
            ),
        ]
    documents = [Document(f"p{n}", title, text) for n, (title, text) in enumerate(passages)]
    return documents, generator.sample(chains, STEPS * QUESTIONS_A_STEP)


class PieceTokenizer:
    """Words, blanks and signs as tokens; ids are given out as pieces are met."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in re.findall(r"</?\w+>| ?\w+|\s|[^\w\s]", text):
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            ids.append(self._ids[piece])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._pieces[i] for i in ids)


class Agent:
    """Follows the chain of a question, but stops early, repeats itself or misreads at times."""

    def __init__(self, chain: Chain, tokenizer: PieceTokenizer, generator: random.Random) -> None:
        self.chain = chain
        self.tokenizer = tokenizer
        self.random = generator
        self.at = 0
        self.patience = generator.choices([0, 1, 2, 3, 4], [1, 5, 4, 4, 2])[0]

    def __call__(self, context_ids: Sequence[int], request: Generate) -> Turn:  # noqa: ARG002
        ids = self.tokenizer.encode(self.turn())
        return Turn(ids[: request.max_tokens], finished=len(ids) <= request.max_tokens)

    def turn(self) -> str:
        chain, pick = self.chain, self.random.choice
        if self.random.random() < 0.03:
            return f"I would say {chain.answer}."  # no tags: an invalid turn
        if self.at < min(len(chain.titles), self.patience):
            query = chain.titles[self.at]
            if self.at and self.random.random() < 0.25:
                query = chain.titles[self.at - 1]  # searches for the same page again
            thoughts = [
                f"The page of {query} should tell.",
                f"Next comes {query}, which I do not know.",
                f"Before anything else I look up {query}.",
            ]
            self.at += 1
            return f"<think>{pick(thoughts)}</think>\n<search>{query}</search>"
        knows = self.at >= len(chain.titles) and self.random.random() < 0.85
        answer = chain.answer if knows else pick([*TOWN, *RIVER, *FIRST])
        doubt = "" if knows else " " + "I am not sure, but I have to say something. " * 2
        return f"<think>That is all I need.{doubt}</think>\n<answer>{answer}</answer>"


def main() -> None:
    generator = random.Random(SEED)
    documents, chains = make_world(generator)
    retriever = Bm25Retriever.build(documents)
    tokenizer = PieceTokenizer()
    rollouts: list[Trajectory] = []
    for number, chain in enumerate(chains):
        step = number // QUESTIONS_A_STEP
        for rollout in range(ROLLOUTS):
            episode = Episode(
                chain.question,
                tokenizer=tokenizer,
                template="plain",
                labels={
                    "id": f"s{step}-q{number}-r{rollout}",
                    "group": f"s{step}-q{number}",
                    "golden_answers": [chain.answer],
                    "step": step,
                    "hops": len(chain.titles),
                    "supporting_titles": list(chain.titles),
                },
            )
            agent = Agent(chain, tokenizer, generator)
            done = run_episode(episode, agent, lambda query: retriever.search([query], k=3)[0])
            rollouts.append(score_trajectory(done, "f1_format"))
    write_trajectories(OUT, rollouts)


if __name__ == "__main__":
    main()
