"""The back end for a model behind an OpenAI-compatible completions server: text in, text out.

Works with `/v1/completions` of vLLM, SGLang, llama.cpp and their like. Several turns are in flight
at a time; results keep their order. For evaluations: what comes back is text, so rollouts carry no
token ids and no log-probabilities (`evenhand.rollout.text`), and cannot be trained on.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from evenhand.core.errors import ConfigError, RetrievalError, require
from evenhand.retrieval.base import check_count
from evenhand.retrieval.http import Budget, FaultKind, HttpFault, HttpSettings, JsonClient, run
from evenhand.rollout.policy import RowKey, SampledTurn, Sampling, Stop, TurnRequest, check_request
from evenhand.rollout.text import TextTokenizer
from evenhand.task import Tokenizer
from evenhand.trajectory.protocol import ANSWER_CLOSE, ANSWER_OPEN, SEARCH_CLOSE, SEARCH_OPEN

SCHEME = "openai:"
KEY_VARIABLES = ("EVENHAND_API_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the key of the server; the first that is set counts."""

_OPENINGS = {SEARCH_CLOSE: SEARCH_OPEN, ANSWER_CLOSE: ANSWER_OPEN}


@dataclass(frozen=True, slots=True)
class Completion:
    """What a server made of a prompt.

    Attributes:
        text: the continuation; a stop tag that ended it stands at its end.
        stop: why it ended.
    """

    text: str
    stop: Stop


class CompletionsPolicy:
    """A model behind `POST URL/completions`.

    A fault that may pass (no connection, time-out, 408, 425, 429, 5xx, no JSON, a wrong schema) is
    retried with growing pauses. A turn that still has no completion ends its episode as `failed`:
    a fault of the environment, not of the policy.

    The server cuts stop tags off; they are put back. Which one it was comes from `stop_reason`
    (vLLM) or `matched_stop` (SGLang). A server that gives neither ends a text on a stop tag and on
    its end of sequence alike with `finish_reason` "stop"; a search or answer that is open then is
    taken to have been closed.

    Attributes:
        tokenizer: a `TextTokenizer`.
        max_context: the longest context in pieces, if a bound is wanted.
        max_rows: no bound.
        model: name of the model at the server.
    """

    max_rows: int | None = None

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        http: HttpSettings | None = None,
        concurrency: int = 8,
        max_context: int | None = None,
    ) -> None:
        """Connect to a server.

        Args:
            url: `http://host:port/v1`; without a path `/v1` is added.
            model: its name there; `None` asks the server, which must have exactly one.
            http: how patient a request is; by default 300 seconds, three retries. Headers hold the
                key, if the server wants one.
            concurrency: turns in flight.
            max_context: bound of the context in pieces; `None` leaves it to the limits of episodes.

        Raises:
            ConfigError: not an address, or no or several models to choose from.
            RetrievalError: the server does not answer.
            MissingExtraError: httpx is not installed.
        """
        require("httpx", "search", "a model behind an address")
        self._base = _base_url(url)
        self._http = http or HttpSettings(timeout=300.0)
        self._concurrency = check_count(concurrency, "concurrency")
        self._client = JsonClient(f"{self._base}/completions", self._http)
        self.tokenizer: Tokenizer = TextTokenizer()
        self.max_context = max_context
        self.model = model or self._only_model()

    @classmethod
    def from_spec(
        cls, spec: str, *, http: HttpSettings | None = None, concurrency: int = 8
    ) -> CompletionsPolicy:
        """Open `openai:URL` or `openai:URL#MODEL`; the key comes from the environment.

        Raises:
            ConfigError: not such a spec; see also the constructor.
        """
        url, _, model = spec.removeprefix(SCHEME).partition("#")
        settings = http or HttpSettings(timeout=300.0)
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        if key is not None:
            if not key.isascii() or key != key.strip():
                raise ConfigError("the key in the environment has blanks or letters beyond ASCII; "
                                  "set EVENHAND_API_KEY anew")  # fmt: skip
            headers = {**settings.headers, "authorization": f"Bearer {key}"}
            settings = replace(settings, headers=headers)
        return cls(url, model or None, http=settings, concurrency=concurrency)

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[CompletionsSession]:
        """Open a session."""
        if sampling.top_k is not None:
            raise ConfigError("top_k is not part of the completions protocol; leave it off")
        yield CompletionsSession(self, sampling)

    def complete(
        self, prompts: Sequence[str], max_tokens: Sequence[int], stop: Sequence[Sequence[str]],
        sampling: Sampling, seeds: Sequence[int],
    ) -> list[Completion | str]:  # fmt: skip
        """Return the continuation of each prompt in order, or why there is none (a text)."""
        bodies = [
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": most,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "seed": seed,
                "stop": list(tags),
            }
            for prompt, most, tags, seed in zip(prompts, max_tokens, stop, seeds, strict=True)
        ]
        return run(self._complete_all(bodies))

    async def _complete_all(self, bodies: list[dict[str, Any]]) -> list[Completion | str]:
        turns = asyncio.Semaphore(self._concurrency)
        attempts = 1 + self._http.retries

        async def one(client: Any, at: int, body: dict[str, Any]) -> Completion | str:
            async def send() -> Completion:
                payload = await self._client.request(client, "POST", json=body)
                return _completion(payload, body["stop"], self._client.shown_url)

            async with turns:
                budget = Budget(attempts, 1e9)
                chance = random.Random(f"{self._http.seed}:{at}")
                try:
                    return await self._client.with_retries(send, budget, chance, attempts=attempts)
                except HttpFault as fault:
                    return str(fault)

        async with self._client.open() as client:
            tasks = (one(client, at, body) for at, body in enumerate(bodies))
            return list(await asyncio.gather(*tasks))

    def _only_model(self) -> str:
        listing = JsonClient(f"{self._base}/models", self._http)

        async def ask() -> Any:
            async with listing.open() as client:
                return await listing.with_retries(
                    lambda: listing.request(client, "GET"),
                    Budget(1 + self._http.retries, 1e9),
                    random.Random(self._http.seed),
                    attempts=1 + self._http.retries,
                )

        try:
            payload = run(ask())
        except HttpFault as fault:
            raise RetrievalError(
                f"the model's server does not say what it serves: {fault}; start it, or name the "
                f"model: {SCHEME}URL#MODEL"
            ) from None
        data = payload.get("data") if isinstance(payload, Mapping) else None
        rows = data if isinstance(data, list) else []
        names = [str(row["id"]) for row in rows if isinstance(row, Mapping) and "id" in row]
        if len(names) != 1:
            raise ConfigError(
                f"{listing.shown_url} serves {len(names)} models ({', '.join(names) or 'none'}); "
                f"name one: {SCHEME}URL#MODEL"
            )
        return names[0]


class CompletionsSession:
    """A `Session` over a server; turns of one call run together and are returned together."""

    def __init__(self, policy: CompletionsPolicy, sampling: Sampling) -> None:
        self._policy = policy
        self._sampling = sampling

    def generate(self, turns: Sequence[TurnRequest]) -> list[SampledTurn]:
        """Return the turns, in order; one that the server failed to sample has an `error`."""
        policy = self._policy
        for turn in turns:
            check_request(turn, policy.max_context)
        completions = policy.complete(
            [policy.tokenizer.decode(turn.context_ids) for turn in turns],
            [turn.max_tokens for turn in turns],
            [turn.stop_tags for turn in turns],
            self._sampling,
            [_seed(self._sampling.seed, turn) for turn in turns],
        )
        return [self._turn(*pair) for pair in zip(turns, completions, strict=True)]

    def release(self, keys: Iterable[RowKey]) -> None:
        """Do nothing: the server keeps no rows for us."""

    def _turn(self, turn: TurnRequest, completion: Completion | str) -> SampledTurn:
        if isinstance(completion, str):
            nothing = np.zeros(0, dtype=np.int64)
            return SampledTurn(turn.key, nothing, np.zeros(0), Stop.EOS, error=completion)
        ids = np.array(self._policy.tokenizer.encode(completion.text), dtype=np.int64)
        return SampledTurn(turn.key, ids, np.zeros(len(ids)), completion.stop)


def _seed(seed: int, turn: TurnRequest) -> int:
    text = f"{seed}:{tuple(turn.key)}:{len(turn.context_ids)}"
    return random.Random(text).getrandbits(31)


def _base_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"a model's address must be {SCHEME}http://host:port/v1, got {url!r}")
    path = parts.path.rstrip("/").removesuffix("/completions") or "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def _completion(payload: Any, tags: Sequence[str], shown_url: str) -> Completion:
    """Return the completion of an answer.

    Raises:
        HttpFault: the answer has another form.
    """
    choice = None
    if isinstance(payload, Mapping) and isinstance(payload.get("choices"), list):
        choice = next(iter(payload["choices"]), None)
    text = choice.get("text") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(text, str):
        raise HttpFault(
            FaultKind.BAD_ANSWER, f"{shown_url}: wrong schema: no text in choices[0] of the answer"
        )
    if any(tag in text for tag in tags):
        return Completion(text, Stop.TAG)
    if choice.get("finish_reason") == "length":
        return Completion(text, Stop.LENGTH)
    tag = _stopped_at(choice, text, tags)
    return Completion(text, Stop.EOS) if tag is None else Completion(text + tag, Stop.TAG)


def _stopped_at(choice: Mapping[str, Any], text: str, tags: Sequence[str]) -> str | None:
    """Return the stop tag that the server cut off, or `None` if the text ended by itself."""
    for name in ("stop_reason", "matched_stop"):
        if name in choice:
            reason = choice[name]
            return reason if reason in tags else None
    opened = {tag: text.rfind(_OPENINGS[tag]) for tag in tags if tag in _OPENINGS}
    last = max(opened, key=lambda tag: opened[tag], default=None)
    return None if last is None or opened[last] < 0 else last
