"""Real questions: whoever searches the supporting titles and gives the gold answer scores 1.0.

The promises of the environment are checked with a look-up by title; the rewards with real BM25.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from evenhand.datasets import read_corpus
from evenhand.retrieval import Bm25Retriever
from evenhand.task import Episode, GoldCase, Limits, check_environment, run_episode
from evenhand.task.rewards import REWARDS, found_useful_document, get_reward
from evenhand.testing.policies import gold_policy
from evenhand.testing.tokenizers import CharacterTokenizer
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import Document, first_action
from searching import Found

DATA = Path(__file__).parents[1] / "../shared/data"
SETS = {"hotpotqa": ("dev",), "musique": ("dev", "train")}
CHARACTERS = CharacterTokenizer()
WIDE = Limits(max_turn_tokens=2000, max_observation_tokens=20_000, max_context=200_000)
"""The rules of the defaults, in characters."""

pytestmark = pytest.mark.skipif(not DATA.exists(), reason="needs the shared data")


@cache
def cases(name: str) -> tuple[GoldCase, ...]:
    """The first 200 questions whose supporting titles are known and whose answer can be found."""

    def rows() -> list[GoldCase]:
        found = []
        for split in SETS[name]:
            with (DATA / f"questions/{name}_{split}.jsonl").open(encoding="utf-8") as lines:
                for row in map(json.loads, lines):
                    titles = row["metadata"].get("supporting_titles")
                    if titles and row["metadata"].get("answer_in_corpus") is not False:
                        golds = tuple(row["golden_answers"])
                        found.append(GoldCase(row["question"], golds, tuple(titles)))
        return found

    return tuple(islice(rows(), 200))


@cache
def pages(name: str) -> dict[str, tuple[Document, ...]]:
    by_title: dict[str, list[Document]] = {}
    with gzip.open(DATA / f"corpora/{name}_corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            document = Document(row["id"], row["title"], row["text"])
            by_title.setdefault(row["title"], []).append(document)
    return {title: tuple(documents[:3]) for title, documents in by_title.items()}


def title_lookup(name: str) -> Callable[[str], Found]:
    return lambda title: Found(pages(name).get(title, ()))


def answers_exactly(trajectory: Trajectory) -> float:
    action = first_action(trajectory.segments[-1].text)
    golds = [gold.strip() for gold in trajectory.golden_answers or ()]
    return float(action is not None and action.kind.value == "answer" and action.content in golds)


@pytest.mark.parametrize("name", SETS)
def test_two_hundred_questions_are_there_with_their_pages(name: str) -> None:
    assert len(cases(name)) == 200
    assert all(title_lookup(name)(title).documents for c in cases(name) for title in c.queries)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("think_in_prompt", [False, True])
def test_the_gold_episodes_keep_every_promise(name: str, think_in_prompt: bool) -> None:
    summary = check_environment(
        cases(name),
        search=title_lookup(name),
        reward=answers_exactly,
        tokenizer=CHARACTERS,
        limits=WIDE,
        think_in_prompt=think_in_prompt,
    )
    assert summary.episodes == 200
    assert summary.searches == sum(len(case.queries) for case in cases(name))


@cache
def gold_trajectories(name: str) -> tuple[Trajectory, ...]:
    """The gold episodes over BM25 on the set's own corpus, three passages a search."""
    retriever = Bm25Retriever.build(read_corpus(DATA / f"corpora/{name}_corpus.jsonl.gz"))

    def run(case: GoldCase) -> Trajectory:
        episode = Episode(
            case.question,
            tokenizer=CHARACTERS,
            limits=WIDE,
            labels={
                "golden_answers": case.golden_answers,
                "supporting_titles": case.queries,
                "dataset": name,
            },
        )
        policy = gold_policy(case, CHARACTERS, limits=WIDE)
        return run_episode(episode, policy, lambda query: retriever.search([query], k=3)[0])

    return tuple(map(run, cases(name)))


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("name", SETS)
def test_the_gold_answer_scores_one_under_every_named_reward(name: str, reward: str) -> None:
    scores = [get_reward(reward)(trajectory) for trajectory in gold_trajectories(name)]
    expected = [1.0] * 200
    if reward == "starter":  # BM25 does not find the page of every title: that term is then 0
        useful = [found_useful_document(trajectory) for trajectory in gold_trajectories(name)]
        assert sum(useful) >= 190
        expected = [0.9 + 0.1 * found for found in useful]
    assert scores == pytest.approx(expected)


@pytest.mark.parametrize("reward", ["exact_match", "contains", "f1_format", "f1_plus"])
def test_no_named_reward_is_fooled_by_planted_passages(reward: str) -> None:
    summary = check_environment(
        cases("hotpotqa")[:40],
        search=title_lookup("hotpotqa"),
        reward=get_reward(reward),
        tokenizer=CHARACTERS,
        limits=WIDE,
    )
    assert summary.episodes == 40
