"""A policy that plays given texts: for tests, demonstrations and scripted solvers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from evenhand.core.errors import ConfigError
from evenhand.rollout.policy import (
    RowKey,
    SampledTurn,
    Sampling,
    Stop,
    TurnRequest,
    check_request,
)
from evenhand.task import Tokenizer

Script = Callable[[RowKey], Iterable[str]]
"""A row to the texts of its turns; a generator may be endless."""


class ScriptedRollouts:
    """Plays a script for each row and says nothing once it is used up.

    Every token has log-probability 0; sampling settings are ignored. A text that does not fit
    `max_tokens` is cut. It returns the turns of a call together, so searches come in large batches.

    Attributes:
        tokenizer: encodes the texts.
        max_context: bound of the context, if a test wants one.
        max_rows: rows at a time, if a test wants a bound.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        *,
        max_context: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.max_rows = max_rows
        self._script = script

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[ScriptedSession]:  # noqa: ARG002 the protocol
        """Open a session in which every script starts at its beginning."""
        yield ScriptedSession(self.tokenizer, self._script, self.max_context)


class ScriptedSession:
    """A `Session` over a script."""

    def __init__(self, tokenizer: Tokenizer, script: Script, max_context: int | None) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._max_context = max_context
        self._left: dict[RowKey, Iterator[str]] = {}

    def generate(self, turns: Sequence[TurnRequest]) -> list[SampledTurn]:
        """Return the next text of each row."""
        keys = {turn.key for turn in turns}
        if len(keys) < len(turns):
            raise ConfigError("two turns of one call have the same key; keys are unique")
        return [self._turn(turn) for turn in turns]

    def release(self, keys: Iterable[RowKey]) -> None:
        """Forget the scripts of rows that have ended."""
        for key in keys:
            self._left.pop(key, None)

    def _turn(self, turn: TurnRequest) -> SampledTurn:
        check_request(turn, self._max_context)
        if turn.key not in self._left:
            self._left[turn.key] = iter(self._script(turn.key))
        text = next(self._left[turn.key], "")
        ids = np.array(self._tokenizer.encode(text), dtype=np.int64)
        kept = ids[: turn.max_tokens]
        if len(kept) < len(ids):
            stop = Stop.LENGTH
        else:
            stop = Stop.TAG if any(tag in text for tag in turn.stop_tags) else Stop.EOS
        return SampledTurn(turn.key, kept, np.zeros(len(kept)), stop)
