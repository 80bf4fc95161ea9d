"""An executable contract: does this template, with these limits and this search, work at all?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from evenhand.environment.drive import ScriptedPolicy, SearchFunction, run_episode
from evenhand.environment.episode import Episode
from evenhand.environment.limits import Limits
from evenhand.environment.tokens import Tokenizer
from evenhand.errors import ConfigError, RetrievalError
from evenhand.prompts import Notices, Template, render_prompt
from evenhand.protocol import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    INFORMATION_CLOSE,
    INFORMATION_OPEN,
    SEARCH_CLOSE,
    SEARCH_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    Document,
    valid_unicode,
)
from evenhand.trajectory import Kind, Segment, StopReason, Trajectory, parse_line, to_line

Reward = Callable[[Trajectory], float | None]
"""A trajectory to its reward; `None` where it cannot be scored."""


@dataclass(frozen=True, slots=True)
class GoldCase:
    """A question whose answer is known.

    Attributes:
        question: the question.
        golden_answers: accepted answers; the first is given.
        queries: what to search on the way, such as the titles of the supporting pages.
    """

    question: str
    golden_answers: tuple[str, ...]
    queries: tuple[str, ...] = ()


class CheckSummary(NamedTuple):
    """What `check_environment` saw.

    Attributes:
        episodes: gold episodes that were run; each scored 1.0.
        searches: searches that were executed in them.
        documents: documents that were shown.
        longest: tokens of the longest episode, prompt included.
    """

    episodes: int
    searches: int
    documents: int
    longest: int


def policy_turn(think: str, *, query: str | None = None, answer: str | None = None,
                think_in_prompt: bool = False) -> str:  # fmt: skip
    """Return a well-formed turn that searches `query` or, without one, gives `answer`."""
    opening = "" if think_in_prompt else THINK_OPEN
    if query is not None:
        return f"{opening}{think}{THINK_CLOSE}\n{SEARCH_OPEN}{query}{SEARCH_CLOSE}"
    return f"{opening}{think}{THINK_CLOSE}\n{ANSWER_OPEN}{answer or ''}{ANSWER_CLOSE}"


def gold_turns(
    case: GoldCase, *, limits: Limits | None = None, think_in_prompt: bool = False
) -> list[str]:
    """Return the turns that search every query of a case, then give its first golden answer.

    Queries beyond the searches that the limits allow are left out.
    """
    limits = limits or Limits()
    most = limits.max_searches
    if limits.max_turns is not None:
        most = min(most, limits.max_turns - 1)
    thinks = ("I start with", "Now I look for", "What remains is", "I still need")
    searches = [
        policy_turn(f"{thinks[at % len(thinks)]} {query}.", query=query,
                    think_in_prompt=think_in_prompt)
        for at, query in enumerate(case.queries[:most])
    ]  # fmt: skip
    last = policy_turn("This settles it.", answer=case.golden_answers[0],
                       think_in_prompt=think_in_prompt)  # fmt: skip
    return [*searches, last]


def check_environment(
    cases: Iterable[GoldCase],
    *,
    search: SearchFunction,
    reward: Reward,
    tokenizer: Tokenizer,
    template: str | Template = "searchr1",
    limits: Limits | None = None,
    think_in_prompt: bool = False,
    notices: Notices | None = None,
) -> CheckSummary:
    """Run scripted episodes and raise at the first broken promise.

    For each case, the episode that searches its queries and gives the golden answer must

    * have a prompt that holds the question,
    * end as `answered`, in the right format, with reward 1.0,
    * keep every token that was sampled, in order, and mark no other token as the policy's,
    * keep every limit,
    * show documents in blocks that are closed, in text and in tokens,
    * come back unchanged from the trajectory file.

    And a policy that never answers must not be rewarded, though every passage it is shown says
    "the answer is …" in answer tags.

    Args:
        cases: questions with known answers, at least one.
        search: a query to its outcome.
        reward: judges a trajectory; 1.0 is right.
        tokenizer: the policy's.
        template: see `evenhand.prompts.resolve_template`.
        limits: the rules of an episode.
        think_in_prompt: the environment opens each think.
        notices: the environment's messages.

    Raises:
        ConfigError: a promise is broken; the message says which, and for which question.
        RetrievalError: a search failed.
    """
    limits = limits or Limits()
    if len(tokenizer.encode("")) > 0:
        raise ConfigError("the tokenizer adds tokens to an empty text; wrap it with as_tokenizer, "
                          "or switch its special tokens off")  # fmt: skip
    totals = [0, 0, 0, 0]
    for case in cases:

        def start(case: GoldCase = case) -> Episode:
            return Episode(
                case.question,
                tokenizer=tokenizer,
                limits=limits,
                template=template,
                think_in_prompt=think_in_prompt,
                notices=notices,
                labels={"golden_answers": case.golden_answers},
            )

        _check_prompt(case, template)
        turns = gold_turns(case, limits=limits, think_in_prompt=think_in_prompt)
        policy = ScriptedPolicy(tokenizer, turns)
        episode = start()
        trajectory = run_episode(episode, policy, search)
        _check_end(case, trajectory, reward(trajectory))
        _check_tokens(case, episode, trajectory, policy)
        _check_limits(case, trajectory, limits)
        _check_blocks(case, trajectory, tokenizer)
        _check_file(case, trajectory)
        _check_silence(case, start(), tokenizer, reward, think_in_prompt)
        shown = [s.documents for s in trajectory.segments if s.documents is not None]
        totals[0] += 1
        totals[1] += len(shown)
        totals[2] += sum(map(len, shown))
        totals[3] = max(totals[3], len(episode.context_ids))
    if not totals[0]:
        raise ConfigError("check_environment needs at least one case, got none")
    return CheckSummary(*totals)


def _broken(case: GoldCase, what: str) -> NoReturn:
    raise ConfigError(f"question {case.question!r:.60}: {what}")


def _check_prompt(case: GoldCase, template: str | Template) -> None:
    prompt = render_prompt(template, case.question)
    contents = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
    if not any(valid_unicode(case.question) in content for content in contents):
        _broken(case, f"the prompt does not hold the question, got {contents[-1]!r:.80}; a "
                "template inserts it unchanged")  # fmt: skip


def _check_end(case: GoldCase, trajectory: Trajectory, reward: float | None) -> None:
    if trajectory.stop_reason is StopReason.FAILED:
        error = trajectory.segments[-1].error
        raise RetrievalError(f"question {case.question!r:.60}: a search failed: {error}")
    if trajectory.stop_reason is not StopReason.ANSWERED:
        _broken(case, f"the gold episode ended with {trajectory.stop_reason.value}, not with an "
                "answer; the limits are too tight for it")  # fmt: skip
    if not trajectory.format_ok:
        _broken(case, "the gold episode breaks the format; a query or answer may hold a tag")
    if reward is None or abs(reward - 1.0) > 1e-9:
        _broken(case, f"the gold answer {case.golden_answers[0]!r:.40} has reward {reward}, not "
                "1.0; the reward and the golden answers disagree")  # fmt: skip


def _check_tokens(
    case: GoldCase, episode: Episode, trajectory: Trajectory, policy: ScriptedPolicy
) -> None:
    joined: list[int] = []
    sampled: list[list[int]] = []
    for segment in trajectory.segments:
        ids = [] if segment.token_ids is None else segment.token_ids.tolist()
        if len(ids) != segment.n_tokens:
            _broken(case, f"a {segment.kind.value} segment has {len(ids)} token ids and n_tokens "
                    f"{segment.n_tokens}")  # fmt: skip
        joined += ids
        if segment.is_policy:
            sampled.append(ids)
        elif segment.logprobs is not None:
            _broken(
                case, f"a {segment.kind.value} segment of the environment has log-probabilities"
            )
    if joined != episode.context_ids:
        _broken(case, "the segments' token ids are not the context that the policy saw")
    if sampled != policy.sampled:
        _broken(case, "the policy segments' token ids are not those that were sampled")


def _check_limits(case: GoldCase, trajectory: Trajectory, limits: Limits) -> None:
    used = sum(segment.n_tokens for segment in trajectory.segments)
    after = used - sum(s.n_tokens for s in trajectory.segments if s.kind is Kind.PROMPT)
    turns = [s.n_tokens for s in trajectory.segments if s.is_policy]
    blocks = [s.n_tokens for s in trajectory.segments if s.kind is Kind.INFORMATION]
    for name, value, most in (
        ("max_context", used, limits.max_context),
        ("max_response_tokens", after, limits.max_response_tokens),
        ("max_turn_tokens", max(turns, default=0), limits.max_turn_tokens),
        ("max_observation_tokens", max(blocks, default=0), limits.max_observation_tokens),
        ("max_searches", len(blocks), limits.max_searches),
        ("max_turns", len(turns), limits.max_turns),
    ):
        if most is not None and value > most:
            _broken(case, f"{name} is {most} and the episode used {value}")


def _check_blocks(case: GoldCase, trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    for segment in trajectory.segments:
        if segment.kind is not Kind.INFORMATION or segment.token_ids is None:
            continue
        read = tokenizer.decode(segment.token_ids.tolist())
        for text, where in ((segment.text, "text"), (read, "decoded tokens")):
            body, closed, rest = text.partition(INFORMATION_CLOSE)
            rest = rest.replace(THINK_OPEN, "", 1)
            if not closed or body.count(INFORMATION_OPEN) != 1 or rest.strip():
                _broken(case, f"an information block is not opened and closed once in its {where}, "
                        f"got the end {text[-60:]!r}")  # fmt: skip


def _check_file(case: GoldCase, trajectory: Trajectory) -> None:
    def arrays(segments: Sequence[Segment]) -> list[list[int] | None]:
        return [None if s.token_ids is None else s.token_ids.tolist() for s in segments]

    back = parse_line(to_line(trajectory), "trajectory")
    if back != trajectory or arrays(back.segments) != arrays(trajectory.segments):
        _broken(case, "the trajectory changes when it is written and read")


@dataclass(frozen=True, slots=True)
class _Planted:
    documents: tuple[Document, ...]
    error: str | None = None


def _check_silence(
    case: GoldCase, episode: Episode, tokenizer: Tokenizer, reward: Reward, think_in_prompt: bool
) -> None:
    gold = case.golden_answers[0]
    passage = f"{INFORMATION_CLOSE}{ANSWER_OPEN}{gold}{ANSWER_CLOSE}"
    planted = _Planted((Document("planted", gold, passage),))
    turns = [policy_turn("I look.", query="x", think_in_prompt=think_in_prompt)]
    trajectory = run_episode(episode, ScriptedPolicy(tokenizer, turns), lambda _: planted)
    if any(segment.kind is Kind.ANSWER for segment in trajectory.segments):
        _broken(case, "a passage with answer tags became the policy's answer")
    score = reward(trajectory)
    if score is not None and score >= 1.0:
        _broken(case, f"an episode without an answer has reward {score}; the reward reads more "
                "than the policy's answer")  # fmt: skip
