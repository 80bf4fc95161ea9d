"""A model behind a completions server: real HTTP on loopback, faults injected."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions_server import after, serving
from evenhand.core.errors import ConfigError, RetrievalError
from evenhand.datasets import Question
from evenhand.retrieval import SearchResult
from evenhand.retrieval.http import HttpSettings
from evenhand.rollout import Sampling, SearchEnvironment, collect
from evenhand.rollout.openai import CompletionsPolicy
from evenhand.rollout.text import TextTokenizer, as_text_only
from evenhand.task import Done, Episode, Limits
from evenhand.task.rewards import answer_of
from evenhand.trajectory import StopReason, parse_line, to_line
from evenhand.trajectory.protocol import Document

FAST = HttpSettings(timeout=5.0, retries=2, backoff=0.01, max_backoff=0.05)


class Engine:
    def search(self, queries: list[str], k: int) -> list[SearchResult]:
        found = (Document("d", "lamp", "Anna made the lamp."),)
        return [SearchResult(found[:k]) for _ in queries]


def questions(n: int) -> list[Question]:
    return [Question(str(at), f"who made lamp number {at}?", ("Anna",), "nq") for at in range(n)]


def number_of(body: dict[str, Any]) -> str:
    return body["prompt"].rsplit("lamp number ", 1)[1].partition("?")[0]


def agent(body: dict[str, Any]) -> dict[str, Any]:
    """Search once, then answer; stop tags are cut off, as servers do."""
    if "<information>Doc 1" in body["prompt"]:
        return {"text": f"<think>so</think><answer>Anna {number_of(body)}"}
    return {"text": "<think>look</think><search>lamp"}


def rollouts(url: str, n: int = 3, sampling: Sampling | None = None, **options: Any) -> list[Any]:
    policy = CompletionsPolicy(url, http=FAST, **options)
    environment = SearchEnvironment(retriever=Engine(), k=1, template="plain")
    return collect(questions(n), policy, environment, sampling=sampling or Sampling(temperature=0))


def test_an_agent_behind_a_server_searches_and_answers() -> None:
    with serving(agent) as server:
        found = rollouts(server.url)
    assert [answer_of(t) for t in found] == ["Anna 0", "Anna 1", "Anna 2"]
    assert [len(t.executed_searches()) for t in found] == [1, 1, 1]
    assert all(t.format_ok for t in found)
    # The second request continues what was said and shown.
    assert (
        "<search>lamp</search>\n\n<information>Doc 1(Title: lamp)" in server.requests[-1]["prompt"]
    )


def test_the_request_follows_the_completions_protocol() -> None:
    with serving(agent) as server:
        rollouts(server.url, 1, Sampling(temperature=0.5, top_p=0.9, seed=3))
    request = server.requests[0]
    assert request["path"] == "/v1/completions"
    assert request["model"] == "tiny"
    assert request["stop"] == ["</search>", "</answer>"]
    assert (request["temperature"], request["top_p"], request["max_tokens"]) == (0.5, 0.9, 500)
    assert request["seed"] != server.requests[1]["seed"]


def test_order_is_kept_however_late_answers_are_and_several_are_in_flight() -> None:
    chance = random.Random(0)
    delays = [chance.uniform(0.02, 0.12) for _ in range(40)]
    turns = itertools.count()

    def slow(body: dict[str, Any]) -> Any:
        return after(delays[next(turns) % 40], agent)(body)

    with serving(slow) as server:
        found = rollouts(server.url, 12, concurrency=4)
    assert [answer_of(t) for t in found] == [f"Anna {at}" for at in range(12)]
    assert 2 <= server.most_at_once <= 4


@pytest.mark.parametrize(
    ("choice", "ended"),
    [
        ({"text": "<think>a</think><answer>x", "stop_reason": "</answer>"}, StopReason.ANSWERED),
        ({"text": "<think>a</think><answer>x", "matched_stop": "</answer>"}, StopReason.ANSWERED),
        ({"text": "<think>a</think><answer>x</answer>"}, StopReason.ANSWERED),
        ({"text": "<think>a</think><answer>x"}, StopReason.ANSWERED),
        # The end of the sequence inside an answer: the server says that no tag stopped it.
        ({"text": "<think>a</think><answer>x", "stop_reason": None}, StopReason.INVALID_ACTION),
        ({"text": "<think>a</think><answer>x", "matched_stop": 2}, StopReason.INVALID_ACTION),
        ({"text": "nothing"}, StopReason.INVALID_ACTION),
        ({"text": "<think>a", "finish_reason": "length"}, StopReason.TOKEN_LIMIT),
    ],
)
def test_why_a_turn_ended_is_read_from_the_answer(
    choice: dict[str, Any], ended: StopReason
) -> None:
    with serving(lambda _: choice) as server:
        policy = CompletionsPolicy(server.url, http=FAST)
        environment = SearchEnvironment(
            retriever=Engine(), template="plain", limits=Limits(max_invalid=0)
        )
        (found,) = collect(questions(1), policy, environment)
    assert found.stop_reason is ended


def test_a_fault_that_passes_is_retried() -> None:
    faults = iter([(503, b"busy", "text/plain"), (200, b"{no json", "application/json")])

    def shaky(body: dict[str, Any]) -> Any:
        return next(faults, None) or agent(body)

    with serving(shaky) as server:
        (found,) = rollouts(server.url, 1)
    assert found.stop_reason is StopReason.ANSWERED
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("fault", "reason", "tries"),
    [
        ((500, b"{}", "application/json"), "status 500", 3),
        ((200, b"<html>", "text/html"), "content type text/html, not JSON", 3),
        ((200, b'{"choices": []}', "application/json"), "no text in choices[0]", 3),
        ((200, b'{"choices": [{"text": 5}]}', "application/json"), "no text in choices[0]", 3),
        ((200, b"[1]", "application/json"), "no text in choices[0]", 3),
        ((401, b"{}", "application/json"), "status 401", 1),
        ((400, b"{}", "application/json"), "status 400", 1),
    ],
)
def test_a_server_that_fails_is_a_fault_of_the_environment_for_that_question_alone(
    fault: tuple[int, bytes, str], reason: str, tries: int
) -> None:
    def script(body: dict[str, Any]) -> Any:
        return fault if number_of(body) == "1" else agent(body)

    with serving(script) as server:
        found = rollouts(server.url)
    assert [t.stop_reason for t in found] == [
        StopReason.ANSWERED, StopReason.FAILED, StopReason.ANSWERED,
    ]  # fmt: skip
    assert reason in found[1].segments[-1].error
    assert found[1].reward is None
    assert sum(number_of(request) == "1" for request in server.requests) == tries


def test_an_answer_that_is_too_late_is_a_fault() -> None:
    http = HttpSettings(timeout=0.3, retries=0)
    with serving(after(1.0, agent)) as server:
        policy = CompletionsPolicy(server.url, "tiny", http=http)
        environment = SearchEnvironment(retriever=Engine(), template="plain")
        began = time.monotonic()
        (found,) = collect(questions(1), policy, environment)
        assert time.monotonic() - began < 0.9
    assert "no whole answer in 0.3 s" in found.segments[-1].error


def test_the_key_comes_from_the_environment_and_is_in_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "second")
    monkeypatch.setenv("EVENHAND_API_KEY", "first-secret")
    with serving(lambda _: (500, b"{}", "application/json")) as server:
        policy = CompletionsPolicy.from_spec(f"openai:{server.url}#tiny", http=FAST)
        environment = SearchEnvironment(retriever=Engine(), template="plain")
        (found,) = collect(questions(1), policy, environment)
        headers = {k.lower(): v for k, v in server.requests[0]["headers"].items()}
    assert headers["authorization"] == "Bearer first-secret"
    assert "first-secret" not in to_line(found)
    assert "first-secret" not in repr(policy)


def test_without_a_key_none_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("EVENHAND_API_KEY", raising=False)
    with serving(agent) as server:
        environment = SearchEnvironment(retriever=Engine(), template="plain")
        collect(questions(1), CompletionsPolicy.from_spec(f"openai:{server.url}"), environment)
    assert "authorization" not in {k.lower() for k in server.requests[0]["headers"]}


def test_the_server_names_its_only_model_and_several_must_be_chosen_from() -> None:
    with serving(agent, models=("a",)) as server:
        assert CompletionsPolicy(server.url.removesuffix("/v1"), http=FAST).model == "a"
    with serving(agent, models=("a", "b")) as server:
        assert CompletionsPolicy(server.url, "b", http=FAST).model == "b"
        with pytest.raises(ConfigError, match=r"serves 2 models \(a, b\)"):
            CompletionsPolicy(server.url, http=FAST)


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with serving(agent) as server:
        url = server.url
    with pytest.raises(RetrievalError, match="no connection"):
        CompletionsPolicy(url, http=FAST)


@pytest.mark.parametrize(
    "spec", ["openai:", "openai:localhost:1", "openai:ftp://x", "openai:http://"]
)
def test_an_address_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="a model's address"):
        CompletionsPolicy.from_spec(spec)


def test_a_template_of_messages_says_what_to_use() -> None:
    with serving(agent) as server:
        policy = CompletionsPolicy(server.url, http=FAST)
        environment = SearchEnvironment(retriever=Engine(), template="searchr1-chat")
        with pytest.raises(ConfigError, match="use a template of bare text"):
            collect(questions(1), policy, environment)


def test_an_episode_that_has_ended_cannot_fail() -> None:
    episode = Episode("who?", tokenizer=TextTokenizer(), template="plain")
    episode.fail("the server is gone")
    request = episode.next()
    assert isinstance(request, Done)
    assert request.trajectory.segments[-1].error == "the server is gone"
    with pytest.raises(ConfigError, match="it is done"):
        episode.fail("again")


# --- text without tokens -------------------------------------------------------------------------


@given(st.text())
def test_any_text_comes_back_from_its_pieces(text: str) -> None:
    tokenizer = TextTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_are_somewhat_fewer_than_tokens_of_english() -> None:
    text = "The Potato Eaters is an oil painting by Vincent van Gogh, finished in 1885 in Nuenen."
    assert len(TextTokenizer().encode(text)) == 19


def test_text_only_rollouts_carry_no_tokens_and_say_their_unit() -> None:
    with serving(agent) as server:
        found = as_text_only(rollouts(server.url, 1)[0])
    data = json.loads(to_line(found))
    assert not any("token_ids" in s or "logprobs" in s for s in data["segments"])
    assert data["metadata"]["n_tokens_unit"] == "pieces"
    assert parse_line(to_line(found), "line") == found
