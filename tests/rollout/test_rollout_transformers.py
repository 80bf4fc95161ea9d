"""The transformers back end against plain forward passes, `generate`, and itself."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rollout_models import (
    BYTES,
    KINDS,
    PIECES,
    PieceTokenizer,
    byte_tokenizer,
    greedy_turn,
    lean_to_tags,
    recomputed,
    tiny_model,
)

from evenhand.core.errors import ConfigError, DataError
from evenhand.datasets import Question
from evenhand.rollout import (
    RowKey,
    Sampling,
    SearchEnvironment,
    Stop,
    TurnRequest,
    collect,
    generate,
)
from evenhand.task import Limits, response_tokens
from evenhand.trajectory import Trajectory
from evenhand.trajectory.protocol import STOP_TAGS, Document
from searching import Found

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.train

from evenhand.rollout.transformers import TransformersPolicy  # noqa: E402 needs torch

torch.set_num_threads(1)
TOKENIZER = PieceTokenizer()
LIMITS = Limits(max_turn_tokens=40, max_observation_tokens=150, max_context=480)


class Pages:
    """One to three short documents, a function of the query."""

    def search(self, queries: Any, k: int) -> list[Found]:
        return [
            Found(tuple(Document(f"d{at}", "T", query[:30] or "?") for at in range(len(query) % k)))
            for query in queries
        ]


def questions(n: int = 4) -> list[Question]:
    return [Question(f"q{at}", "who " * (3 * at + 1) + "is it?", ("x",)) for at in range(n)]


def environment(**changes: Any) -> SearchEnvironment:
    base = SearchEnvironment(
        retriever=Pages(),
        limits=LIMITS,
        template=lambda question: f"Find the right answer to this: {question}\n",
    )
    return replace(base, **changes)


def policy(model: Any, **options: Any) -> TransformersPolicy:
    return TransformersPolicy(model, TOKENIZER, **options)


def rollouts(model: Any, asked: Any = None, **options: Any) -> list[Trajectory]:
    sampling = options.pop("sampling", Sampling(seed=5, temperature=1.2))
    size = options.pop("group_size", 4)
    return collect(asked or questions(), policy(model, **options), environment(),
                   group_size=size, sampling=sampling, step=3)  # fmt: skip


def turns_of(trajectories: list[Trajectory]) -> dict[str, list[list[int]]]:
    return {
        record.id: [segment.token_ids.tolist() for segment in record.segments]  # type: ignore[union-attr]
        for record in trajectories
    }


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_rows_of_several_turns_agree_with_one_plain_forward_pass_a_row(
    kind: str,
) -> None:
    model = tiny_model(kind)
    records = rollouts(model)
    turns = {len(record.policy_segments()) for record in records}
    assert len(turns) >= 2
    assert any(record.executed_searches() for record in records)
    for record in records:
        row = response_tokens(record)
        start = len(row.prompt_ids)
        expected = recomputed(model, [*row.prompt_ids, *row.response_ids], 1.2)[start - 1 :]
        np.testing.assert_allclose(
            row.logprobs[row.policy_mask], expected[row.policy_mask], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_of_one_turn_equals_generate_token_for_token(kind: str) -> None:
    model = tiny_model(kind, bias=False)
    lean_to_tags(model, 0.0)
    prompts = [TOKENIZER.encode(text) for text in ("a", "some words here", "x" * 30, "a b")]
    ours = generate(policy(model, stop_token_ids=[TOKENIZER.eos_token_id]), prompts,
                    Sampling(temperature=0), max_tokens=30, stop_tags=())  # fmt: skip
    for prompt, turn in zip(prompts, ours, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=30,
        )[0, len(prompt) :]  # fmt: skip
        assert turn.token_ids.tolist() == theirs.tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen2"])
def test_greedy_decoding_of_several_turns_equals_encoding_everything_again(kind: str) -> None:
    model = tiny_model(kind)
    limits = replace(LIMITS, retry_truncated=True, max_turn_tokens=15)
    records = collect(questions(), policy(model), environment(limits=limits),
                      sampling=Sampling(temperature=0))  # fmt: skip
    assert sum(len(record.policy_segments()) for record in records) > len(records)

    def stops(new: list[int]) -> bool:
        text = TOKENIZER.decode(new)
        return new[-1] == TOKENIZER.eos_token_id or any(tag in text for tag in STOP_TAGS)

    for record in records:
        context: list[int] = []
        for segment in record.segments:
            ids = segment.token_ids.tolist()  # type: ignore[union-attr]
            if segment.is_policy:
                most = min(limits.max_turn_tokens, limits.max_context - len(context))
                assert ids == greedy_turn(model, context, most, stops)
            context += ids


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama_gqa")


@pytest.fixture(scope="module")
def usual(llama: Any) -> dict[str, list[list[int]]]:
    return turns_of(rollouts(llama))


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 1},
        {"max_rows": 3},
        {"rejoin": 0.01},
        {"rejoin": 1.0},
        {"chunk_tokens": 7},
        {"chunk_tokens": 5000},
    ],
    ids=str,
)
def test_a_rollout_does_not_depend_on_how_rows_are_batched(
    llama: Any, usual: dict[str, list[list[int]]], options: dict[str, Any]
) -> None:
    assert turns_of(rollouts(llama, **options)) == usual


def test_random_delays_of_the_search_engine_change_no_token(
    llama: Any, usual: dict[str, list[list[int]]]
) -> None:
    class Late(Pages):
        def __init__(self, seed: int) -> None:
            self.random = random.Random(seed)

        def search(self, queries: Any, k: int) -> list[Found]:
            time.sleep(0.03 * self.random.random())
            return super().search(queries, k)

    for seed in range(3):
        records = collect(questions(), policy(llama), environment(retriever=Late(seed)),
                          group_size=4, sampling=Sampling(seed=5, temperature=1.2), step=3,
                          overlap=True)  # fmt: skip
        assert turns_of(records) == usual


def test_a_rollout_does_not_depend_on_the_other_questions_or_their_order(
    llama: Any, usual: dict[str, list[list[int]]]
) -> None:
    backwards = turns_of(rollouts(llama, questions()[::-1]))
    alone = turns_of(rollouts(llama, questions()[2:3]))
    assert backwards == usual
    assert alone == {key: usual[key] for key in alone}


def test_a_rollout_does_not_depend_on_how_many_share_its_prompt(
    llama: Any, usual: dict[str, list[list[int]]]
) -> None:
    pairs = turns_of(rollouts(llama, group_size=2))
    assert pairs == {key: usual[key] for key in pairs}


def test_the_rollouts_of_a_group_differ_and_so_do_seeds_and_steps(llama: Any) -> None:
    prompts, asked = policy(llama), questions(1)
    seen = [
        str(list(turns_of(collect(asked, prompts, environment(), group_size=2, step=step,
                                  sampling=Sampling(seed=seed))).values()))
        for seed, step in ((0, 0), (1, 0), (0, 1))
    ]  # fmt: skip
    assert len(set(seen)) == 3
    first, second = turns_of(collect(asked, prompts, environment(), group_size=2)).values()
    assert first != second


def test_what_rows_do_after_one_has_ended_changes_nothing_for_it(llama: Any) -> None:
    """The same rows beside neighbours that stop at once, or go on long after."""
    prompts = [TOKENIZER.encode(f"question {at}") for at in range(6)]
    found = []
    for most in (1, 60):
        # Nothing but its limit ends a turn: row 0 stays in the batch while row 1 goes on.
        with policy(llama, stop_token_ids=()).session(Sampling(seed=2)) as session:
            pending = [
                TurnRequest(RowKey(0, str(at), 0), prompt, (3, 7, 12)[at] if at < 3 else most, ())
                for at, prompt in enumerate(prompts)
            ]
            done = {}
            while len(done) < len(prompts):
                done.update({turn.key: turn for turn in session.generate(pending)})
                pending = []
        found.append([done[RowKey(0, str(at), 0)] for at in range(3)])
    assert [len(turn.token_ids) for turn in found[0]] == [3, 7, 12]
    for one, other in zip(*found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_context_that_does_not_continue_what_was_sampled_is_read_as_given(llama: Any) -> None:
    key, first = RowKey(0, "q", 0), TOKENIZER.encode("a first context of some length")
    changed = [*first[:9], *TOKENIZER.encode("another way to go on")]
    with policy(llama).session(Sampling(temperature=0)) as session:
        session.generate([TurnRequest(key, first, 10)])
        (again,) = session.generate([TurnRequest(key, changed, 10)])
    (fresh,) = generate(policy(llama), [changed], Sampling(temperature=0), max_tokens=10)
    assert again.token_ids.tolist() == fresh.token_ids.tolist()


def forced(ids: list[int], place: int = 1) -> Any:
    """Force the tokens of every row from a place on."""

    def adjust(logits: Any, _keys: Any, places: Any) -> Any:
        for at, where in enumerate(places):
            if 0 <= where - place < len(ids):
                logits[at] = float("-inf")
                logits[at, ids[where - place]] = 0.0
        return logits

    return adjust


def piece(text: str) -> int:
    return 128 + PIECES.index(text)


@pytest.mark.parametrize(
    ("ids", "kept", "stop"),
    [
        ([65, piece("</search>"), 66], 2, Stop.TAG),
        ([65, piece("</answer> ok"), 66], 2, Stop.TAG),
        ([*map(ord, "x</search>"), 66], 10, Stop.TAG),
        ([piece("</"), piece("sea"), piece("rch>\n"), 66], 3, Stop.TAG),
        ([*map(ord, "> a>"), piece("<eos>"), 66], 5, Stop.EOS),
        ([*map(ord, "</search"), *map(ord, " >>>")], 12, Stop.LENGTH),
        ([*[65] * 11, piece("</search>")], 12, Stop.TAG),
        ([*[65] * 60, piece("</search>"), 66], 12, Stop.LENGTH),
    ],
    ids=["whole", "with more behind", "characters", "three pieces", "eos", "no tag", "at the limit",
         "beyond the limit"],
)  # fmt: skip
def test_a_turn_ends_with_the_token_that_completes_a_tag(
    llama: Any, ids: list[int], kept: int, stop: Stop
) -> None:
    (turn,) = generate(policy(llama, adjust_logits=forced(ids)), [[70]], Sampling(), max_tokens=12)
    assert turn.token_ids.tolist() == ids[:kept]
    assert turn.stop is stop
    assert len(turn.logprobs) == kept


def test_a_tag_is_found_late_in_a_turn_of_several_calls(llama: Any) -> None:
    ids = [65] * 70 + list(map(ord, "</search>")) + [66]
    hooked = policy(llama, adjust_logits=forced(ids))
    turns = generate(hooked, [[70], [71], [72] * 200], Sampling(), max_tokens=100)
    assert [turn.token_ids.tolist() for turn in turns[:2]] == [ids[:79]] * 2


def test_the_context_limit_of_the_model_bounds_the_episode(llama: Any) -> None:
    records = collect(questions(), policy(llama), environment(limits=Limits(max_turn_tokens=300)),
                      group_size=4, sampling=Sampling(seed=1))  # fmt: skip
    longest = max(sum(segment.n_tokens for segment in record.segments) for record in records)
    assert longest <= 512
    for record in records:
        assert record.question in record.segments[0].text


def test_a_question_longer_than_the_context_is_refused_before_anything_is_generated(
    llama: Any,
) -> None:
    asked = [*questions(), Question("long", "x" * 600, ("x",))]
    hooked = policy(llama, adjust_logits=lambda *_: pytest.fail("something was generated"))
    with pytest.raises(DataError, match="600|leaves none for a turn"):
        collect(asked, hooked, environment())


def test_a_prompt_longer_than_the_model_is_refused(llama: Any) -> None:
    with pytest.raises(DataError, match="the model takes 512"):
        generate(policy(llama), [[65] * 512], Sampling(), max_tokens=1)


def test_the_mode_of_the_model_is_restored(llama: Any) -> None:
    llama.train()
    with policy(llama).session(Sampling()):
        assert not llama.training
    assert llama.training
    llama.eval()


@pytest.mark.parametrize("options", [{"rejoin": 0.0}, {"rejoin": 1.5}, {"max_rows": 0},
                                     {"chunk_tokens": 0}])  # fmt: skip
def test_an_option_out_of_range_is_refused(llama: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        policy(llama, **options)


def test_a_second_turn_for_a_row_that_still_decodes_is_refused(llama: Any) -> None:
    turn = TurnRequest(RowKey(0, "q", 0), [65], 50)
    other = TurnRequest(RowKey(0, "r", 0), [65], 1)
    hooked = policy(llama, rejoin=0.1, adjust_logits=forced([65] * 60))
    with hooked.session(Sampling()) as session:
        session.generate([turn, other])
        with pytest.raises(ConfigError, match="second turn"):
            session.generate([turn])


def test_a_model_with_layers_of_another_kind_is_refused(llama: Any) -> None:
    llama.config.layer_types = ["linear_attention"] * 3
    try:
        with pytest.raises(ConfigError, match="linear_attention"):
            policy(llama)
    finally:
        del llama.config.layer_types


def test_an_attention_without_masks_is_refused(llama: Any) -> None:
    usual = llama.config._attn_implementation
    llama.config._attn_implementation_internal = "flash_attention_2"
    try:
        with pytest.raises(ConfigError, match="sdpa"):
            policy(llama)
    finally:
        llama.config._attn_implementation_internal = usual


@pytest.fixture(scope="module")
def bytes_model() -> Any:
    return tiny_model("qwen2", bias=False, vocabulary=BYTES)


def as_message(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("template", ["plain", as_message])
def test_a_fast_tokenizer_and_its_chat_template_are_used(bytes_model: Any, template: Any) -> None:
    tokenizer = byte_tokenizer()
    records = collect(
        questions(2),
        TransformersPolicy(bytes_model, tokenizer),
        environment(template=template, limits=Limits(max_turn_tokens=20)),
        group_size=2,
        sampling=Sampling(seed=4),
    )
    end = tokenizer.convert_tokens_to_ids("<|assistant|>")
    for record in records:
        row = response_tokens(record)
        assert (row.prompt_ids[-1] == end) == (template is as_message)
        assert record.question in tokenizer.decode(row.prompt_ids)
        ids = [*row.prompt_ids, *row.response_ids]
        expected = recomputed(bytes_model, ids)[len(row.prompt_ids) - 1 :]
        np.testing.assert_allclose(
            row.logprobs[row.policy_mask], expected[row.policy_mask], atol=1e-4, rtol=0
        )


def test_the_end_tokens_of_model_and_tokenizer_both_end_a_turn(bytes_model: Any) -> None:
    tokenizer = byte_tokenizer()
    bytes_model.generation_config.eos_token_id = [5, 7]
    try:
        ends = TransformersPolicy(bytes_model, tokenizer).stop_token_ids
    finally:
        bytes_model.generation_config.eos_token_id = None
    assert {5, 7, tokenizer.eos_token_id} <= set(ends)


def test_a_token_that_the_model_does_not_know_is_refused(llama: Any) -> None:
    with pytest.raises(DataError, match="holds token 144 and the model knows 144"):
        generate(policy(llama), [[65, 144]], Sampling(), max_tokens=1)


def test_a_model_whose_logits_are_no_numbers_is_reported(llama: Any) -> None:
    broken = policy(llama, adjust_logits=lambda logits, *_: logits * float("nan"))
    with pytest.raises(DataError, match="not finite"):
        generate(broken, [[65]], Sampling(), max_tokens=3)


@pytest.fixture
def encoded(llama: Any) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of what goes through the model in passes over more than one token a row."""
    shapes: list[tuple[int, ...]] = []

    def note(_module: Any, _arguments: Any, keywords: Any) -> None:
        if keywords["input_ids"].shape[1] > 1:
            shapes.append(tuple(keywords["input_ids"].shape))

    handle = llama.register_forward_pre_hook(note, with_kwargs=True)
    yield shapes
    handle.remove()


def test_a_shared_prompt_and_a_common_beginning_are_encoded_once(
    llama: Any, encoded: list[tuple[int, ...]]
) -> None:
    prompts = [[65] * 20 + [66 + at] * 5 for at in (0, 1, 2, 0, 1, 2)]
    generate(policy(llama), prompts, Sampling(), max_tokens=1)
    assert encoded == [(1, 20), (3, 5)]


def test_after_a_search_only_what_is_new_is_encoded(
    llama: Any, encoded: list[tuple[int, ...]]
) -> None:
    key, prompt = RowKey(0, "q", 0), [65] * 50
    hooked = policy(llama, adjust_logits=forced([66] * 9, place=50))
    with hooked.session(Sampling()) as session:
        (turn,) = session.generate([TurnRequest(key, prompt, 9)])
        session.generate([TurnRequest(key, [*prompt, *turn.token_ids, *[67] * 30], 1)])
    # The last sampled token was never an input before: it goes with the documents.
    assert encoded == [(1, 50), (1, 31)]


def test_long_texts_are_encoded_in_passes_of_bounded_size(
    llama: Any, encoded: list[tuple[int, ...]]
) -> None:
    prompts = [[at] * 70 for at in range(65, 70)] + [[at] * 20 for at in range(75, 80)]
    generate(policy(llama, chunk_tokens=64), prompts, Sampling(), max_tokens=1)
    assert max(rows * width for rows, width in encoded) <= 64


def test_turns_of_a_call_come_in_the_order_of_their_requests(llama: Any) -> None:
    lengths = [9, 2, 30, 1, 5]
    hooked = policy(llama, rejoin=1.0, adjust_logits=forced([66] * 40))
    with hooked.session(Sampling()) as session:
        turns = session.generate(
            [TurnRequest(RowKey(0, str(most), 0), [65], most) for most in lengths]
        )
    assert [len(turn.token_ids) for turn in turns] == lengths
