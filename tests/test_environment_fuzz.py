"""Any policy, any passages, any question, any token boundaries: the promises hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from evenhand.core.errors import DataError
from evenhand.task import (
    Done,
    Episode,
    Generate,
    Limits,
    Search,
    Tokenizer,
    Turn,
    as_tokenizer,
    response_tokens,
    run_episode,
)
from evenhand.testing.policies import FRAGMENTS, MixturePolicy
from evenhand.testing.tokenizers import CharacterTokenizer, ChunkTokenizer
from evenhand.trajectory import Kind, StopReason, Trajectory, parse_line, to_line
from evenhand.trajectory.protocol import PROTOCOL_TAG, STOP_TAGS, Document, first_action
from searching import Found


def greedy_tokenizer() -> Tokenizer:
    """Byte pairs merged across blanks and tags: tokens such as `</search>` + what follows."""
    text = ["<think>t</think>\n<search>who wrote it</search>\n\n<information>Doc 1(Title: A) x\n"
            "</information>\n\n<think>u</think><answer>gold</answer>"] * 20  # fmt: skip
    tokenizer = HubTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([line[at:] for line in text for at in range(0, 40, 3)], trainer)
    return as_tokenizer(tokenizer)


GREEDY = greedy_tokenizer()

text = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)
half = st.just("\ud83d")
actions = st.builds(
    "<think>{}</think><{kind}>{}</{kind}>{}".format,
    text,
    st.sampled_from(["q", "who wrote it"]) | text,
    text,
    kind=st.sampled_from(["search", "search", "answer"]),
)
passages = st.lists(
    st.builds(Document, st.sampled_from(["a", "b", "c"]), text | half, text | half), max_size=4
)
results = st.lists(
    st.builds(Found, passages.map(tuple), st.sampled_from([None, None, None, "down"])),
    min_size=1,
    max_size=3,
)
limits = st.builds(
    Limits,
    max_searches=st.integers(0, 3),
    max_turns=st.none() | st.integers(1, 4),
    max_turn_tokens=st.integers(1, 120) | st.integers(100, 300),
    max_observation_tokens=st.integers(1, 300) | st.integers(100, 300),
    max_context=st.integers(2, 500) | st.integers(400, 2000),
    max_response_tokens=st.none() | st.integers(1, 1000),
    max_invalid=st.integers(0, 3),
    retry_truncated=st.booleans(),
    announce_last=st.booleans(),
)


class Recorder:
    """Wraps a tokenizer and remembers what the environment encoded."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.encoded: list[list[int]] = []

    def encode(self, text: str) -> Sequence[int]:
        ids = list(self.inner.encode(text))
        self.encoded.append(ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(ids)


def check(
    trajectory: Trajectory,
    episode: Episode,
    sampled: list[tuple[int, list[int]]],
    tokenizer: Recorder,
    rules: Limits,
) -> None:
    segments = trajectory.segments
    ids = [[] if s.token_ids is None else s.token_ids.tolist() for s in segments]

    # Tokens: the concatenation is the context; each turn is a beginning of what was sampled, the
    # whole of it unless it ran past an action or its limit; the rest is what was encoded.
    assert [item for part in ids for item in part] == episode.context_ids
    assert all(len(part) == s.n_tokens for part, s in zip(ids, segments, strict=True))
    turns = [(s, part) for s, part in zip(segments, ids, strict=True) if s.is_policy]
    for (segment, part), (most, fed) in zip(turns, sampled, strict=True):
        assert fed[: len(part)] == part
        assert segment.text == tokenizer.decode(part)
        stopped = any(tag in segment.text for tag in STOP_TAGS)
        assert len(part) == min(most, len(fed)) or (stopped and len(part) < most)
        before = tokenizer.decode(part[:-1])
        assert not any(tag in before for tag in STOP_TAGS)
    for segment, part in zip(segments, ids, strict=True):
        if not segment.is_policy and segment.n_tokens:
            assert part in tokenizer.encoded
            assert segment.logprobs is None

    # Budgets.
    used = len(episode.context_ids)
    assert used <= rules.max_context
    if rules.max_response_tokens is not None:
        assert used - len(episode.prompt_ids) <= rules.max_response_tokens
    assert len(turns) <= rules.most_turns
    assert len(trajectory.executed_searches()) <= rules.max_searches
    assert all(s.n_tokens <= rules.max_turn_tokens for s, _ in turns)
    blocks = [s for s in segments if s.kind is Kind.INFORMATION]
    assert all(s.n_tokens <= rules.max_observation_tokens for s in blocks)

    # Nothing retrieved acts: every action is the first of its own turn, every block is whole.
    for segment, _ in turns:
        action = first_action(segment.text)
        if segment.kind in (Kind.SEARCH, Kind.ANSWER):
            assert action is not None
            assert action.kind.value == segment.kind.value
            assert segment.query == (action.content if segment.kind is Kind.SEARCH else None)
        else:
            assert action is None or not action.content
    for segment in blocks:
        body = segment.text.removesuffix("<think>")
        assert PROTOCOL_TAG.findall(body) == ["<information>", "</information>"]
        assert segment.documents is not None
        heads = re.findall(r"Doc (\d+)\(Title:", body)
        assert heads == [str(n + 1) for n in range(len(segment.documents))]
    for first, second in pairwise(segments):
        if second.kind is Kind.INFORMATION:
            assert first.kind is Kind.SEARCH

    # The end.
    if trajectory.format_ok:
        assert trajectory.stop_reason is StopReason.ANSWERED
    assert (segments[-1].kind is Kind.ANSWER) == (trajectory.stop_reason is StopReason.ANSWERED)
    assert parse_line(to_line(trajectory), "line") == trajectory
    response_tokens(trajectory)


def start(question: str, tokenizer: Recorder, rules: Limits, think: bool) -> Episode | None:
    try:
        return Episode(question, tokenizer=tokenizer, limits=rules, template=str,
                       think_in_prompt=think)  # fmt: skip
    except DataError:  # the question alone fills the context
        longest = len(tokenizer.encode(question + "<think>")) + 200
        assert rules.max_context <= longest or (rules.max_response_tokens or 0) <= 200
        return None


@given(st.integers(0, 2**32), text, results, limits, st.booleans(), st.booleans())
def test_any_policy_and_any_passages_keep_every_promise(
    seed: int, question: str, found: list[Found], rules: Limits, think: bool, characters: bool
) -> None:
    tokenizer = Recorder(CharacterTokenizer() if characters else GREEDY)
    episode = start(question, tokenizer, rules, think)
    if episode is None:
        return
    mixture = MixturePolicy(tokenizer.inner, seed=seed, well_formed=0.7)
    sampled: list[tuple[int, list[int]]] = []
    asked: list[str] = []

    def policy(context: Sequence[int], request: Generate) -> Turn:
        turn = mixture(context, request)
        sampled.append((request.max_tokens, mixture.sampled[-1]))
        return turn

    def search(query: str) -> Found:
        asked.append(query)
        return found[len(asked) % len(found)]

    trajectory = run_episode(episode, policy, search)
    assert all(query.strip() for query in asked)
    assert len(asked) <= rules.max_searches
    check(trajectory, episode, sampled, tokenizer, rules)


@given(
    st.lists(actions | actions | text, max_size=6),
    st.randoms(use_true_random=False),
    results,
    limits,
)
def test_any_token_boundaries_give_the_same_course(
    turns: list[str], random: object, found: list[Found], rules: Limits
) -> None:
    chunks = ChunkTokenizer()
    tokenizer = Recorder(chunks)
    episode = start("Q?", tokenizer, rules, think=False)
    if episode is None:
        return
    sampled: list[tuple[int, list[int]]] = []
    queue = iter(turns)
    searches = 0
    for _ in range(2 * rules.most_turns + 1):
        request = episode.next()
        if isinstance(request, Done):
            break
        if isinstance(request, Generate):
            whole = next(queue, "")
            cuts = sorted(random.sample(range(len(whole) + 1), min(3, len(whole))))  # type: ignore[attr-defined]
            pieces = [whole[a:b] for a, b in pairwise([0, *cuts, len(whole)])]
            ids = chunks.ids(pieces)
            sampled.append((request.max_tokens, ids))
            episode.feed_turn(ids)
        else:
            searches += 1
            episode.feed_result(found[searches % len(found)])
    done = episode.next()
    assert isinstance(done, Done), "the number of requests is bounded"
    check(done.trajectory, episode, sampled, tokenizer, rules)


@given(actions | text, st.data())
def test_the_action_does_not_depend_on_where_tokens_end(turn: str, data: st.DataObject) -> None:
    chunks = ChunkTokenizer()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(turn)), max_size=6)))
    pieces = [turn[a:b] for a, b in pairwise([0, *cuts, len(turn)])]

    def first(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, str | None]:
        episode = Episode("Q?", tokenizer=tokenizer, template=str)
        episode.feed_turn(ids)
        request = episode.next()
        kind = type(request).__name__
        return kind, getattr(request, "query", None)

    plain = CharacterTokenizer()
    assert first(chunks, chunks.ids(pieces)) == first(plain, plain.encode(turn))


def test_a_real_tokenizer_carries_more_than_a_tag_and_the_token_is_kept_whole() -> None:
    turn = "<think>t</think>\n<search>who wrote it</search>\n\n<information>gold"
    ids = list(GREEDY.encode(turn))
    pieces = [GREEDY.decode([item]) for item in ids]
    over = next(at for at, piece in enumerate(pieces) if "</search>" in "".join(pieces[: at + 1]))
    assert not pieces[over].endswith("</search>"), "else this test tries nothing"
    episode = Episode("Q?", tokenizer=GREEDY, template=str)
    episode.feed_turn(ids)
    assert episode.next() == Search("who wrote it")
    assert episode.context_ids == [*episode.prompt_ids, *ids[: over + 1]]


def test_an_endless_babbler_is_stopped() -> None:
    calls = 0

    def babble(_context: Sequence[int], request: Generate) -> Turn:
        nonlocal calls
        calls += 1
        return Turn([ord("x")] * request.max_tokens, finished=False)

    rules = Limits(retry_truncated=True, max_turn_tokens=3)
    episode = Episode("Q?", tokenizer=CharacterTokenizer(), template=str, limits=rules)
    trajectory = run_episode(episode, babble, lambda _: Found())
    assert trajectory.stop_reason is StopReason.INVALID_ACTION
    assert calls == 3
