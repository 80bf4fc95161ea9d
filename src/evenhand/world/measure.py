"""What a policy does in the toy world: rollouts in batches, and a table by kind of question.

The sampler here is small and plain. It serves the check of the warm start; training and evaluation
have their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from evenhand.core.errors import require
from evenhand.datasets import Question
from evenhand.diagnostics.intervals import Estimate, proportion
from evenhand.retrieval import Retriever
from evenhand.task import Generate, Limits, Search, as_tokenizer
from evenhand.task.episode import Episode
from evenhand.task.requests import Done
from evenhand.task.rewards import exact_match
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import ANSWER_CLOSE, SEARCH_CLOSE
from evenhand.world import language
from evenhand.world.demonstrations import DOCUMENTS_SHOWN, LIMITS, labels_of
from evenhand.world.tokenizer import EOS, PAD, vocabulary

ALL = "all"


def roll_out(
    policy: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    retriever: Retriever,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    limits: Limits = LIMITS,
    rows: int = 64,
) -> list[Trajectory]:
    """Return one rollout a question, in their order.

    Args:
        policy: a causal language model of transformers.
        tokenizer: the toy world's.
        questions: what to ask.
        retriever: over the passages of the questions' world.
        temperature: 0 is greedy.
        seed: of the sampling.
        limits: rules of the episodes.
        rows: episodes that are decoded together.
    """
    torch = require("torch", "train", "rollouts of the toy world")
    generator = torch.Generator().manual_seed(seed)
    words = as_tokenizer(tokenizer)
    episodes = [
        Episode(
            question.question,
            tokenizer=words,
            limits=limits,
            template=language.template,
            notices=language.notices(),
            labels=labels_of(question, question.id),
        )
        for question in questions
    ]
    while True:
        waiting = [episode for episode in episodes if isinstance(episode.next(), Generate)]
        if not waiting:
            break
        waiting.sort(key=lambda episode: len(episode.context_ids))
        for start in range(0, len(waiting), rows):
            part = waiting[start : start + rows]
            turns = _decode(policy, [e.context_ids for e in part], _room(part), temperature,
                            generator)  # fmt: skip
            for episode, turn in zip(part, turns, strict=True):
                episode.feed_turn(turn)
        _search(episodes, retriever)
    done = [episode.next() for episode in episodes]
    return [request.trajectory for request in done if isinstance(request, Done)]


def _room(episodes: Iterable[Episode]) -> int:
    requests = (episode.next() for episode in episodes)
    return max(request.max_tokens for request in requests if isinstance(request, Generate))


def _search(episodes: Iterable[Episode], retriever: Retriever) -> None:
    asked = [(e, r.query) for e in episodes if isinstance(r := e.next(), Search)]
    found = retriever.search([query for _, query in asked], DOCUMENTS_SHOWN) if asked else []
    for (episode, _), result in zip(asked, found, strict=True):
        episode.feed_result(result)


def _decode(
    policy: Any, contexts: Sequence[Sequence[int]], most: int, temperature: float, generator: Any
) -> list[list[int]]:
    """Return the sampled ids of each row, the token that stopped it included."""
    torch = require("torch", "train", "rollouts of the toy world")
    words = vocabulary()
    stops = torch.tensor([words[token] for token in (SEARCH_CLOSE, ANSWER_CLOSE, EOS)])
    longest = max(map(len, contexts))
    ids = torch.full((len(contexts), longest), words[PAD])
    mask = torch.zeros((len(contexts), longest), dtype=torch.long)
    for row, context in enumerate(contexts):
        ids[row, longest - len(context) :] = torch.tensor(context)
        mask[row, longest - len(context) :] = 1
    position = (mask.cumsum(1) - 1).clamp(min=0)
    out: list[list[int]] = [[] for _ in contexts]
    open_ = torch.ones(len(contexts), dtype=torch.bool)
    cache = require("transformers", "train", "rollouts of the toy world").DynamicCache()
    # The keyword was renamed in transformers 5.
    keyword = "cache" if "cache" in signature(policy.forward).parameters else "past_key_values"
    with torch.inference_mode():
        for _ in range(most):
            step = policy(
                input_ids=ids,
                attention_mask=mask,
                position_ids=position,
                use_cache=True,
                logits_to_keep=1,
                **{keyword: cache},
            )
            logits = step.logits[:, -1]
            if temperature > 0:
                chances = torch.softmax(logits / temperature, dim=-1)
                drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
            else:
                drawn = logits.argmax(-1)
            for row in torch.nonzero(open_)[:, 0].tolist():
                out[row].append(int(drawn[row]))
            open_ &= ~torch.isin(drawn, stops)
            if not open_.any():
                break
            ids, position = drawn[:, None], position[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return out


# --- table ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """What a group of rollouts did.

    Attributes:
        kind: the kind of question, or `all`.
        exact_match: share of right answers (`squad` convention).
        format_ok: share that obeys the format.
        searches: mean executed searches.
        several: share with two or more executed searches.
    """

    kind: str
    exact_match: Estimate
    format_ok: Estimate
    searches: float
    several: Estimate


def summarise(questions: Sequence[Question], rollouts: Sequence[Trajectory]) -> list[Row]:
    """Return one row for all and one for each kind of question, with 95 % Wilson intervals."""
    groups: dict[str, list[Trajectory]] = {ALL: list(rollouts)}
    for question, rollout in zip(questions, rollouts, strict=True):
        groups.setdefault(question.metadata["kind"], []).append(rollout)
    return [_row(kind, groups[kind]) for kind in [ALL, *sorted(groups.keys() - {ALL})]]


def _row(kind: str, rollouts: Sequence[Trajectory]) -> Row:
    n = len(rollouts)
    searches = [len(rollout.executed_searches()) for rollout in rollouts]
    return Row(
        kind,
        proportion(sum(int(exact_match(rollout)) for rollout in rollouts), n),
        proportion(sum(rollout.format_ok for rollout in rollouts), n),
        sum(searches) / n,
        proportion(sum(count >= 2 for count in searches), n),
    )


def as_plain(row: Row) -> Mapping[str, Any]:
    """Return a row as plain numbers, for JSON."""
    return {
        "kind": row.kind,
        "n": row.exact_match.n,
        "exact_match": row.exact_match.value,
        "exact_match_interval": [row.exact_match.low, row.exact_match.high],
        "format_ok": row.format_ok.value,
        "searches": row.searches,
        "two_or_more_searches": row.several.value,
    }
