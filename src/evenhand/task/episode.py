"""One episode of a search agent as a state machine.

It does no I/O: `Episode.next` says what it waits for, and the loop around it generates, searches
and feeds the outcome back. Token ids go in and out; what the policy sampled is never encoded again.
`evenhand.task.limits` states the order in which limits are checked.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenhand.core.arrays import float_vector
from evenhand.core.errors import ConfigError, DataError, RetrievalError
from evenhand.task.limits import Limits
from evenhand.task.prompts import Notices, Template, render_prompt
from evenhand.task.requests import (
    Done,
    Generate,
    IntArray,
    Labels,
    Request,
    Search,
    SearchOutcome,
    checked_documents,
    checked_labels,
    checked_token_ids,
)
from evenhand.task.tokens import Tokenizer, encode_prompt
from evenhand.trajectory import Kind, Segment, Source, StopReason, Trajectory
from evenhand.trajectory.protocol import (
    STOP_TAGS,
    THINK_OPEN,
    Action,
    ActionKind,
    Document,
    first_action,
    is_valid_format,
    render_information,
)


class Episode:
    """One question, from its prompt to a trajectory.

    Attributes:
        question: the question.
        limits: the rules.
        think_in_prompt: the environment writes the opening `<think>` before every turn, as part of
            its own text (so it carries no credit).
        prompt_ids: token ids of the prompt.
    """

    def __init__(
        self,
        question: str,
        *,
        tokenizer: Tokenizer,
        limits: Limits | None = None,
        template: str | Template = "searchr1",
        think_in_prompt: bool = False,
        notices: Notices | None = None,
        prompt_ids: ArrayLike | None = None,
        labels: Labels | None = None,
    ) -> None:
        """Render and encode the prompt.

        Args:
            question: the question.
            tokenizer: the policy's (`as_tokenizer` wraps those of transformers and tokenizers).
            limits: the rules; `None` for the defaults.
            template: see `evenhand.task.prompts.resolve_template`.
            think_in_prompt: see the class.
            notices: the environment's messages; `None` for the defaults.
            prompt_ids: a prompt that a trainer has encoded already, instead of a template's. The
                opening `<think>` is added to it.
            labels: further fields of the trajectory. Without them it has id and group `"0"` and no
                golden answers.

        Raises:
            DataError: the prompt leaves no room for a turn (a question is never cut), or a label is
                unknown or ill-formed.
            ConfigError: the template cannot be used.
        """
        self.question = question
        self.limits = limits or Limits()
        self.think_in_prompt = think_in_prompt
        self._tokenizer = tokenizer
        self._notices = notices or Notices()
        self._labels = checked_labels(labels or {})
        self._segments: list[Segment] = []
        self._context: list[int] = []
        self._turns = self._searches = self._invalid = 0
        self._request: Request | None = None

        announces_now = self._announces()
        opens_think = think_in_prompt and not announces_now
        if prompt_ids is None:
            prompt = render_prompt(template, question, think_in_prompt=opens_think)
            ids = encode_prompt(tokenizer, prompt)
            text = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
        else:
            ids = [int(item) for item in checked_token_ids(prompt_ids, "prompt_ids")]
            ids += tokenizer.encode(THINK_OPEN) if opens_think else []
            text = tokenizer.decode(ids)
        self.prompt_ids: tuple[int, ...] = tuple(ids)
        self._append(Kind.PROMPT, text, ids)
        if announces_now:
            self._announce()
        if self._room() < 1:
            raise DataError(
                f"the prompt of the question {question!r:.60} has {len(self._context)} tokens, "
                f"which leaves none for a turn (max_context {self.limits.max_context}, "
                f"max_response_tokens {self.limits.max_response_tokens}); raise the limit or use a "
                "shorter template"
            )
        self._ask_for_turn()

    def again(self, labels: Labels) -> Episode:
        """Return one more episode of the same question, at its beginning, with other labels.

        Raises:
            ConfigError: this one has been fed already.
            DataError: a label is unknown or ill-formed.
        """
        if self._turns or not isinstance(self._request, Generate):
            raise ConfigError("only an episode at its beginning can be had again, and this one has "
                              "been fed; make a new one")  # fmt: skip
        twin = copy.copy(self)
        twin._labels = checked_labels(labels)
        twin._segments, twin._context = list(self._segments), list(self._context)
        return twin

    # --- the requests -----------------------------------------------------------------------------

    def next(self) -> Request:
        """Return what the episode waits for; the same until it is fed."""
        assert self._request is not None
        return self._request

    @property
    def context_ids(self) -> list[int]:
        """Token ids of everything so far: what the policy continues."""
        return list(self._context)

    def feed_turn(
        self, token_ids: ArrayLike, logprobs: ArrayLike | None = None, *, finished: bool = True
    ) -> None:
        """Answer `Generate` with what the policy sampled.

        The tokens alone decide: their text is decoded here. All tokens after the one that completes
        the first `</search>` or `</answer>`, or beyond `Generate.max_tokens`, are dropped with
        their logprobs, so a sampler that does not stop at tags gives the same episode.

        Args:
            token_ids: `[n]` sampled ids, the end-of-sequence token included if it was sampled.
            logprobs: `[n]` log-probabilities of the sampler, if known.
            finished: the policy ended the turn itself (end of sequence or a stop tag); false if a
                limit cut it.

        Raises:
            DataError: `token_ids` are no ids, or `logprobs` are not parallel to them or not finite.
            ConfigError: the episode does not wait for a turn.
        """
        request = self._request
        if not isinstance(request, Generate):
            self._refuse("feed_turn")
        ids = checked_token_ids(token_ids, "token_ids")
        scores = None if logprobs is None else float_vector(logprobs, "logprobs")
        if scores is not None and len(scores) != len(ids):
            raise DataError(f"logprobs has {len(scores)} entries and token_ids has {len(ids)}; "
                            "give one for each token")  # fmt: skip
        if len(ids) > request.max_tokens:
            ids, finished = ids[: request.max_tokens], False
        ids, text = self._cut_at_action(ids)
        scores = None if scores is None else scores[: len(ids)]
        self._turns += 1

        action = first_action(text)
        if action is not None and action.kind is ActionKind.ANSWER:
            self._append(Kind.ANSWER, text, ids, scores)
            self._end(StopReason.ANSWERED)
        elif action is not None and action.content:
            self._append(Kind.SEARCH, text, ids, scores, query=action.content)
            self._after_search(action)
        elif finished or _has_stop_tag(text):
            self._append(Kind.INVALID, text, ids, scores)
            self._after_invalid()
        else:
            self._append(Kind.TRUNCATED, text, ids, scores)
            self._after_truncated()

    def feed_result(self, result: SearchOutcome) -> None:
        """Answer `Search` with its documents or its failure.

        Documents are shown from the best on, as many as fit whole; the information segment lists
        those. A failure ends the episode as `failed`: it says nothing about the policy. So do
        documents with a field that cannot be used: an id, title or text that is no text, an empty
        id, a score that is no finite number.

        Raises:
            ConfigError: the episode does not wait for a search.
            DataError: something other than documents was returned.
        """
        if not isinstance(self._request, Search):
            self._refuse("feed_result")
        if result.error is not None:
            self.fail(result.error)
            return
        try:
            documents = checked_documents(result.documents)
        except RetrievalError as error:
            self.fail(str(error))
            return
        announces = self._announces()
        shown = self._fit(documents, announces)
        if shown is None:
            self._end(StopReason.CONTEXT_LIMIT)
            return
        self._append(Kind.INFORMATION, shown.text, shown.ids, documents=shown.documents)
        if announces:
            self._announce()
        self._ask_for_turn()

    def fail(self, error: str) -> None:
        """End the episode as `failed`: a search, or the server that samples, did not answer.

        Raises:
            ConfigError: the episode has ended.
        """
        if isinstance(self._request, Done):
            self._refuse("fail")
        # Nothing is added to the context: the policy never reads this notice.
        self._append(Kind.NOTICE, "", [], error=error)
        self._end(StopReason.FAILED)

    # --- after a turn -----------------------------------------------------------------------------

    def _after_search(self, action: Action) -> None:
        if self._searches >= self.limits.max_searches or self._turns == self.limits.max_turns:
            self._end(StopReason.SEARCH_LIMIT)
            return
        self._searches += 1
        if self._fit((), self._announces()) is None:
            self._end(StopReason.CONTEXT_LIMIT)
        else:
            self._request = Search(action.content)

    def _after_invalid(self) -> None:
        self._invalid += 1
        if self._invalid > self.limits.max_invalid or self._turns == self.limits.max_turns:
            self._end(StopReason.INVALID_ACTION)
            return
        if self._announces():
            self._announce()
        else:
            self._append_notice(self._notices.invalid)
        self._ask_for_turn()

    def _after_truncated(self) -> None:
        if self.limits.retry_truncated and self._room() > 0:
            self._after_invalid()
        else:
            self._end(self._exhausted())

    # --- before a turn ----------------------------------------------------------------------------

    def _may_search(self) -> bool:
        """Whether a search in the next turn would be executed."""
        limits = self.limits
        return self._searches < limits.max_searches and (
            limits.max_turns is None or self._turns + 1 < limits.max_turns
        )

    def _announces(self) -> bool:
        """Whether the environment's next words tell the policy that no search is left."""
        return self.limits.announce_last and not self._may_search()

    def _announce(self) -> None:
        self._append_notice(self._notices.answer_now)

    def _append_notice(self, text: str) -> None:
        text += self._opening()
        self._append(Kind.NOTICE, text, self._tokenizer.encode(text))

    def _opening(self) -> str:
        return THINK_OPEN if self.think_in_prompt else ""

    def _ask_for_turn(self) -> None:
        overflow = self._room() < 0
        if overflow:  # the notice did not fit; the policy never read it
            last = self._segments.pop()
            del self._context[len(self._context) - last.n_tokens :]
        if overflow or self._room() == 0:
            self._end(self._exhausted(overflow=overflow))
            return
        self._request = Generate(min(self.limits.max_turn_tokens, self._room()))

    # --- room -------------------------------------------------------------------------------------

    def _context_room(self) -> int:
        return self.limits.max_context - len(self._context)

    def _response_room(self) -> int:
        most = self.limits.max_response_tokens
        if most is None:
            return self._context_room()
        return most - (len(self._context) - len(self.prompt_ids))

    def _room(self) -> int:
        return min(self._context_room(), self._response_room())

    def _exhausted(self, *, overflow: bool = False) -> StopReason:
        if overflow:
            tighter = self._context_room() <= self._response_room()
        else:
            tighter = self._context_room() <= 0
        return StopReason.CONTEXT_LIMIT if tighter else StopReason.TOKEN_LIMIT

    def _fit(self, documents: tuple[Document, ...], announces: bool) -> _Shown | None:
        """Return the longest list of first documents whose block fits, or `None`.

        The notice that follows must fit too: losing a document is better than ending the episode.
        """
        suffix = "" if announces else self._opening()
        room = self._room()
        if announces:
            notice = self._notices.answer_now + self._opening()
            room -= len(self._tokenizer.encode(notice))
        room = min(room, self.limits.max_observation_tokens)

        def shown(count: int) -> _Shown | None:
            text = render_information(documents[:count]) + suffix
            ids = self._tokenizer.encode(text)
            return _Shown(text, ids, documents[:count]) if len(ids) <= room else None

        whole = shown(len(documents))
        if whole is not None:
            return whole
        best = None
        for count in range(1, len(documents)):
            longer = shown(count)
            if longer is None:
                break
            best = longer
        return best

    # --- record -----------------------------------------------------------------------------------

    def _cut_at_action(self, ids: IntArray) -> tuple[IntArray, str]:
        """Drop the tokens after the one that completes the first closing tag of an action."""
        text = self._tokenizer.decode(ids.tolist())
        if not _has_stop_tag(text):
            return ids, text

        def complete(count: int) -> bool:
            return _has_stop_tag(self._tokenizer.decode(ids[:count].tolist()))

        last = len(ids) - 1
        if not complete(last):  # the sampler stopped at the tag, as most do
            return ids, text
        kept = bisect_left(range(last), True, key=complete)
        ids = ids[:kept]
        return ids, self._tokenizer.decode(ids.tolist())

    def _append(
        self,
        kind: Kind,
        text: str,
        ids: Sequence[int] | IntArray,
        logprobs: NDArray[np.float64] | None = None,
        **fields: Any,
    ) -> None:
        environment = kind in (Kind.PROMPT, Kind.INFORMATION, Kind.NOTICE)
        array = np.array(ids, dtype=np.int64)
        self._context.extend(array.tolist())
        self._segments.append(
            Segment(
                source=Source.ENVIRONMENT if environment else Source.POLICY,
                kind=kind,
                text=text,
                n_tokens=len(array),
                token_ids=array,
                logprobs=logprobs,
                **fields,
            )
        )

    def _end(self, reason: StopReason) -> None:
        unlabelled = {"id": "0", "group": "0", "golden_answers": None}
        trajectory = Trajectory(
            question=self.question,
            reward=None,
            format_ok=is_valid_format(
                [_grammar_text(segment) for segment in self._segments if segment.is_policy],
                think_in_prompt=self.think_in_prompt,
            ),
            stop_reason=reason,
            segments=tuple(self._segments),
            think_in_prompt=self.think_in_prompt,
            **(unlabelled | self._labels),
        )
        self._request = Done(trajectory)

    def _refuse(self, call: str) -> NoReturn:
        waits = {Generate: "a turn (feed_turn)", Search: "a search (feed_result)"}.get(
            type(self._request), "nothing: it is done"
        )
        raise ConfigError(f"{call} was called while the episode waits for {waits}; answer what "
                          "next() returns")  # fmt: skip


class _Shown(NamedTuple):
    text: str
    ids: Sequence[int]
    documents: tuple[Document, ...]


def _has_stop_tag(text: str) -> bool:
    return any(tag in text for tag in STOP_TAGS)


def _grammar_text(segment: Segment) -> str:
    """The part of a turn that the grammar judges: without what the last token carried."""
    action = first_action(segment.text)
    return segment.text if action is None else segment.text[: action.end]
