"""`collect` with scripted policies: scheduling, retrieval, faults, records, bounds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from evenhand.core.errors import ConfigError, DataError, RetrievalError
from evenhand.datasets import Question
from evenhand.rollout import (
    Progress,
    RowKey,
    SampledTurn,
    Sampling,
    ScriptedRollouts,
    SearchEnvironment,
    Stop,
    TurnRequest,
    collect,
    generate,
)
from evenhand.task import Limits
from evenhand.trajectory import StopReason, Trajectory, to_line
from searching import CHARACTERS, Found, answer, bare, document, search


class Recorder:
    """A search engine that keeps the batches that it was asked."""

    def __init__(self, failing: str = "", delay: float = 0.0, whole_batch: bool = False) -> None:
        self.batches: list[list[str]] = []
        self._failing, self._delay, self._whole_batch = failing, delay, whole_batch
        self._random = random.Random(0)

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        self.batches.append(list(queries))
        time.sleep(self._delay * self._random.random())
        if self._failing and self._whole_batch and any(self._failing in q for q in queries):
            raise OSError("no route to the host")
        return [
            Found(error="timed out")
            if self._failing and self._failing in query
            else Found(tuple(document(at, f"{query} {at}") for at in range(k)))
            for query in queries
        ]


def questions(n: int) -> list[Question]:
    return [Question(f"q{at}", f"Question {at}?", ("a",), dataset="toy") for at in range(n)]


def script(key: RowKey) -> Iterable[str]:
    """Rollout `r` of question `q` searches `(q + r) mod 3` times, then answers."""
    times = (int(key.question[-1]) + key.rollout) % 3
    return [*(search(f"{key.question} {key.rollout} {at}") for at in range(times)), answer()]


class OneByOne(ScriptedRollouts):
    """Returns one turn a call, the newest request first, as a back end with full batches may."""

    def session(self, sampling: Sampling) -> Any:
        outer = super().session(sampling)

        class Session:
            def __enter__(self) -> Any:
                self.inner, self.pending = outer.__enter__(), []
                return self

            def __exit__(self, *error: Any) -> None:
                outer.__exit__(*error)

            def generate(self, turns: Sequence[TurnRequest]) -> list[SampledTurn]:
                self.pending += turns
                return self.inner.generate([self.pending.pop()])

            def release(self, keys: Iterable[RowKey]) -> None:
                self.inner.release(keys)

        return Session()


def run(
    policy: Any = None, retriever: Any = None, n: int = 4, group_size: int = 3, **options: Any
) -> list[Trajectory]:
    environment = SearchEnvironment(
        retriever=retriever or Recorder(), k=2, template=bare,
        limits=options.pop("limits", Limits()),
    )  # fmt: skip
    return collect(options.pop("asked", None) or questions(n),
                   policy or ScriptedRollouts(CHARACTERS, script), environment,
                   group_size=group_size, **options)  # fmt: skip


def lines(records: list[Trajectory]) -> list[str]:
    return [to_line(record) for record in records]


def test_records_come_by_question_then_rollout_with_their_labels() -> None:
    asked = [Question("b", "B?", ("x", "y"), "set", 2, ("T", "U")), Question("a", "A?", ("z",))]
    records = run(ScriptedRollouts(CHARACTERS, lambda _: [answer()]), asked=asked,
                  group_size=2, step=7)  # fmt: skip
    assert [record.id for record in records] == ["7:set/b:0", "7:set/b:1", "7:a:0", "7:a:1"]
    assert [record.group for record in records] == ["7:set/b"] * 2 + ["7:a"] * 2
    first = records[0]
    assert (first.question, first.golden_answers, first.step) == ("B?", ("x", "y"), 7)
    assert (first.question_id, first.dataset, first.hops) == ("b", "set", 2)
    assert first.supporting_titles == ("T", "U")
    assert first.reward is None


def test_groups_of_different_steps_differ() -> None:
    groups = {record.group for step in (None, 0, 1) for record in run(n=1, step=step)}
    assert len(groups) == 3


def test_every_rollout_plays_its_own_script() -> None:
    for record in run():
        times = (int(record.question_id[-1]) + int(record.id[-1])) % 3  # type: ignore[index]
        assert len(record.executed_searches()) == times
        assert record.stop_reason is StopReason.ANSWERED


def test_queries_of_a_fixed_point_are_one_call_and_equal_ones_are_asked_once() -> None:
    retriever = Recorder()
    policy = ScriptedRollouts(CHARACTERS, lambda _: [search("same"), search("other"), answer()])
    records = run(policy, retriever)
    assert retriever.batches == [["same"], ["other"]]
    assert all(len(record.executed_searches()) == 2 for record in records)


@pytest.mark.parametrize("kind", [ScriptedRollouts, OneByOne])
@pytest.mark.parametrize("max_rows", [None, 1, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_scheduling_changes_no_record(kind: Any, max_rows: int | None, overlap: bool) -> None:
    policy = kind(CHARACTERS, script, max_rows=max_rows)
    assert lines(run(policy, overlap=overlap)) == lines(run())


@pytest.mark.parametrize("kind", [ScriptedRollouts, OneByOne])
def test_random_delays_of_the_search_engine_change_neither_records_nor_batches(kind: Any) -> None:
    prompt, late = Recorder(), Recorder(delay=0.02)
    policy = kind(CHARACTERS, script)
    seen: list[list[Progress]] = [[], []]
    first = run(policy, prompt, overlap=True, progress=seen[0].append)
    second = run(policy, late, overlap=True, progress=seen[1].append)
    assert lines(first) == lines(second)
    assert prompt.batches == late.batches
    assert seen[0] == seen[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("whole_batch", [False, True], ids=["result", "exception"])
def test_a_failed_search_ends_its_own_episodes_only(whole_batch: bool, overlap: bool) -> None:
    retriever = Recorder(failing="q2", whole_batch=whole_batch)
    usual = run()
    for record, other in zip(run(retriever=retriever, overlap=overlap), usual, strict=True):
        if record.question_id == "q2" and other.executed_searches():
            assert record.stop_reason is StopReason.FAILED
            assert record.reward is None
            expected = "OSError: no route to the host" if whole_batch else "timed out"
            assert record.segments[-1].error == expected
        else:
            assert to_line(record) == to_line(other)


def test_a_search_engine_that_returns_too_few_results_fails_those_episodes() -> None:
    class Short(Recorder):
        def search(self, queries: Sequence[str], k: int) -> list[Found]:
            return super().search(queries, k)[:-1]

    records = run(retriever=Short())
    failed = [record for record in records if record.stop_reason is StopReason.FAILED]
    assert len(failed) == 8
    assert failed[0].segments[-1].error == "the retriever returned 0 results for one query"


def test_a_misused_search_engine_is_an_error_not_a_failed_episode() -> None:
    class Misused(Recorder):
        def search(self, *_: Any) -> list[Found]:
            raise ConfigError("k must be a positive whole number")

    with pytest.raises(ConfigError, match="k must be"):
        run(retriever=Misused())


def test_a_retrieval_error_is_a_failed_episode() -> None:
    class Down(Recorder):
        def search(self, *_: Any) -> list[Found]:
            raise RetrievalError("the server is down")

    records = run(retriever=Down())
    assert {record.stop_reason for record in records} == {StopReason.FAILED, StopReason.ANSWERED}


def test_no_more_rows_are_open_than_the_policy_wants() -> None:
    class Counting(ScriptedRollouts):
        most = 0

        def session(self, sampling: Sampling) -> Any:
            outer, counting, held = super().session(sampling), self, set()

            class Session:
                def __enter__(self) -> Any:
                    self.inner = outer.__enter__()
                    return self

                def __exit__(self, *error: Any) -> None:
                    outer.__exit__(*error)

                def generate(self, turns: Sequence[TurnRequest]) -> list[SampledTurn]:
                    held.update(turn.key for turn in turns)
                    counting.most = max(counting.most, len(held))
                    return self.inner.generate(turns)

                def release(self, keys: Iterable[RowKey]) -> None:
                    held.difference_update(keys)

            return Session()

    policy = Counting(CHARACTERS, script, max_rows=5)
    run(policy, n=8)
    assert policy.most == 5


def test_progress_is_reported_and_ends_complete() -> None:
    seen: list[Progress] = []
    records = run(progress=seen.append)
    assert [one.finished for one in seen] == sorted(one.finished for one in seen)
    tokens = sum(
        segment.n_tokens for record in records for segment in record.segments if segment.is_policy
    )
    assert seen[-1] == Progress(12, 12, turns=24, tokens=tokens, searches=12)


def test_the_context_of_the_policy_lowers_the_limit() -> None:
    policy = ScriptedRollouts(CHARACTERS, lambda _: ["x" * 500], max_context=100)
    for record in run(policy):
        assert sum(segment.n_tokens for segment in record.segments) == 100
        assert record.stop_reason is StopReason.CONTEXT_LIMIT


def test_a_question_that_occurs_twice_is_refused() -> None:
    with pytest.raises(DataError, match="'toy/q0' occurs twice"):
        run(asked=questions(1) * 2)


def test_a_prompt_without_room_for_a_turn_is_refused() -> None:
    with pytest.raises(DataError, match="leaves none for a turn"):
        run(ScriptedRollouts(CHARACTERS, script, max_context=5))


def test_a_group_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_size"):
        run(group_size=0)


def test_no_question_gives_no_record() -> None:
    environment = SearchEnvironment(retriever=Recorder())
    assert collect([], ScriptedRollouts(CHARACTERS, script), environment) == []


@pytest.mark.parametrize("max_rows", [None, 2])
def test_generate_continues_prompts_in_order(max_rows: int | None) -> None:
    policy = ScriptedRollouts(CHARACTERS, lambda key: ["ab" * key.rollout], max_rows=max_rows)
    turns = generate(policy, [[1]] * 5, Sampling(), max_tokens=6)
    assert [len(turn.token_ids) for turn in turns] == [0, 2, 4, 6, 6]
    assert [turn.stop for turn in turns] == [Stop.EOS] * 4 + [Stop.LENGTH]
    assert all((turn.logprobs == np.zeros(len(turn.token_ids))).all() for turn in turns)


def test_a_scripted_turn_that_holds_a_tag_stops_there() -> None:
    policy = ScriptedRollouts(CHARACTERS, lambda _: [answer()])
    (turn,) = generate(policy, [[1]], Sampling(), max_tokens=100)
    assert (turn.stop, turn.finished) == (Stop.TAG, True)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (TurnRequest(RowKey(0, "q", 0), [], 5), "empty context"),
        (TurnRequest(RowKey(0, "q", 0), [1], 0), "at least 1"),
        (TurnRequest(RowKey(0, "q", 0), [1] * 9, 1), "takes 9"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(turn: TurnRequest, message: str) -> None:
    policy = ScriptedRollouts(CHARACTERS, script, max_context=9)
    with policy.session(Sampling()) as session, pytest.raises(DataError, match=message):
        session.generate([turn])
