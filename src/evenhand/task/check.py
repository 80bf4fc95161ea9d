"""An executable contract: does this template, with these limits and this search, work at all?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from evenhand.core.errors import ConfigError, RetrievalError
from evenhand.task.drive import ScriptedPolicy, SearchFunction, run_episode
from evenhand.task.episode import Episode
from evenhand.task.limits import Limits
from evenhand.task.prompts import Notices, Template, render_prompt
from evenhand.task.requests import SearchOutcome
from evenhand.task.tokens import Tokenizer
from evenhand.trajectory import Kind, StopReason, Trajectory, parse_line, to_line
from evenhand.trajectory.protocol import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    INFORMATION_CLOSE,
    INFORMATION_OPEN,
    SEARCH_CLOSE,
    SEARCH_OPEN,
    STOP_TAGS,
    THINK_CLOSE,
    THINK_OPEN,
    Document,
    render_information,
    valid_unicode,
)

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
        episodes: gold episodes that ended with their answer; each scored 1.0.
        searches: searches that were executed in them.
        documents: documents that were shown.
        longest: tokens of the longest episode, prompt included.
        too_long: episodes that ended with `context_limit` because the first passage of a search
            alone was longer than `max_observation_tokens`; they are in none of the other counts.
    """

    episodes: int
    searches: int
    documents: int
    longest: int
    too_long: int


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
    * keep every token that was sampled, in order, and no other as the policy's,
    * pass `check_record`: masks, limits, closed blocks, an unchanged trip through the file.

    An episode that a first passage longer than `max_observation_tokens` ends is counted and not
    judged: it tells about one passage. If every episode ends so, the limit is too tight.

    And a policy that never answers must not be rewarded, though every passage it is shown says
    "the answer is …" in answer tags.

    Args:
        cases: questions with known answers, at least one.
        search: a query to its outcome.
        reward: judges a trajectory; 1.0 is right.
        tokenizer: the policy's.
        template: see `evenhand.task.prompts.resolve_template`.
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
    episodes = searches = documents = longest = too_long = 0
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

        where, gold = f"question {case.question!r:.60}", case.golden_answers[0]
        _check_prompt(where, case, template)
        policy = ScriptedPolicy(
            tokenizer, gold_turns(case, limits=limits, think_in_prompt=think_in_prompt)
        )
        outcomes: list[SearchOutcome] = []
        trajectory = run_episode(start(), policy, _recorded(search, outcomes))
        if _is_too_long(trajectory, outcomes, limits, tokenizer):
            too_long += 1
            continue
        _check_end(where, trajectory, gold, reward(trajectory))
        check_record(trajectory, limits=limits, tokenizer=tokenizer)
        _check_tokens(where, trajectory, policy)
        _check_silence(where, start(), gold, tokenizer, reward)
        shown = [s.documents for s in trajectory.segments if s.documents is not None]
        episodes += 1
        searches += len(shown)
        documents += sum(map(len, shown))
        longest = max(longest, sum(s.n_tokens for s in trajectory.segments))
    if not episodes:
        _nothing_judged(too_long, limits)
    return CheckSummary(episodes, searches, documents, longest, too_long)


def check_record(trajectory: Trajectory, *, limits: Limits, tokenizer: Tokenizer) -> None:
    """Check the record of one episode, whichever loop drove it.

    Every segment has its token ids; log-probabilities stand on the policy's segments only; a turn's
    text is that of its tokens and ends with the token that completes an action; every limit holds;
    information blocks are closed, in text and in tokens; the record comes back unchanged from the
    trajectory file.

    Raises:
        ConfigError: at the first of these that does not hold; the message names the question.
        DataError: the file format refuses a field.
    """
    where = f"question {trajectory.question!r:.60}"
    _check_segments(where, trajectory, tokenizer)
    _check_limits(where, trajectory, limits)
    _check_blocks(where, trajectory, tokenizer)
    _check_file(where, trajectory)


def _broken(where: str, what: str) -> NoReturn:
    raise ConfigError(f"{where}: {what}")


def _nothing_judged(too_long: int, limits: Limits) -> NoReturn:
    if not too_long:
        raise ConfigError("check_environment needs at least one case, got none")
    raise ConfigError(
        f"all gold episodes ({too_long}) ended with context_limit, because a first passage is "
        f"longer than max_observation_tokens {limits.max_observation_tokens}; raise it or cut the "
        "passages"
    )


def _check_prompt(where: str, case: GoldCase, template: str | Template) -> None:
    prompt = render_prompt(template, case.question)
    contents = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
    # Blanks around a question are no part of it: some templates drop them.
    if not any(valid_unicode(case.question).strip() in content for content in contents):
        _broken(where, f"the prompt does not hold the question, got {contents[-1]!r:.80}; a "
                "template inserts it unchanged")  # fmt: skip


def _recorded(search: SearchFunction, outcomes: list[SearchOutcome]) -> SearchFunction:
    def recording(query: str) -> SearchOutcome:
        outcomes.append(search(query))
        return outcomes[-1]

    return recording


def _is_too_long(
    trajectory: Trajectory, outcomes: Sequence[SearchOutcome], limits: Limits, tokenizer: Tokenizer
) -> bool:
    if trajectory.stop_reason is not StopReason.CONTEXT_LIMIT or not outcomes:
        return False
    block = render_information(outcomes[-1].documents[:1])
    return len(tokenizer.encode(block)) > limits.max_observation_tokens


def _check_end(where: str, trajectory: Trajectory, gold: str, reward: float | None) -> None:
    if trajectory.stop_reason is StopReason.FAILED:
        raise RetrievalError(f"{where}: a search failed: {trajectory.segments[-1].error}")
    if trajectory.stop_reason is not StopReason.ANSWERED:
        _broken(where, f"the gold episode ended with {trajectory.stop_reason.value}, not with an "
                "answer; the limits are too tight for it")  # fmt: skip
    if not trajectory.format_ok:
        _broken(where, "the gold episode breaks the format; a query or answer may hold a tag")
    if reward is None or abs(reward - 1.0) > 1e-9:
        _broken(where, f"the gold answer {gold!r:.40} has reward {reward}, not 1.0; the reward and "
                "the golden answers disagree")  # fmt: skip


def _check_tokens(where: str, trajectory: Trajectory, policy: ScriptedPolicy) -> None:
    sampled = [s.token_ids.tolist() for s in trajectory.segments
               if s.is_policy and s.token_ids is not None]  # fmt: skip
    if sampled != policy.sampled:
        _broken(where, "the policy segments' token ids are not those that were sampled")


def _check_segments(where: str, trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    for segment in trajectory.segments:
        kind = segment.kind.value
        if segment.token_ids is None or len(segment.token_ids) != segment.n_tokens:
            have = "no" if segment.token_ids is None else len(segment.token_ids)
            _broken(where, f"a {kind} segment has {have} token ids and n_tokens "
                    f"{segment.n_tokens}")  # fmt: skip
        ids = segment.token_ids.tolist()
        if not segment.is_policy:
            if segment.logprobs is not None:
                _broken(where, f"a {kind} segment of the environment has log-probabilities")
            continue
        if segment.text != tokenizer.decode(ids):
            _broken(where, f"the text of a {kind} segment is not that of its tokens")
        if any(tag in tokenizer.decode(ids[:-1]) for tag in STOP_TAGS):
            _broken(where, f"a {kind} segment goes on after the token that completes its action")


def _check_limits(where: str, trajectory: Trajectory, limits: Limits) -> None:
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
            _broken(where, f"{name} is {most} and the episode used {value}")


def _check_blocks(where: str, trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    for segment in trajectory.segments:
        if segment.kind is not Kind.INFORMATION or segment.token_ids is None:
            continue
        read = tokenizer.decode(segment.token_ids.tolist())
        for text, form in ((segment.text, "text"), (read, "decoded tokens")):
            body, closed, rest = text.partition(INFORMATION_CLOSE)
            rest = rest.replace(THINK_OPEN, "", 1)
            if not closed or body.count(INFORMATION_OPEN) != 1 or rest.strip():
                _broken(where, f"an information block is not opened and closed once in its {form}, "
                        f"got the end {text[-60:]!r}")  # fmt: skip


def _check_file(where: str, trajectory: Trajectory) -> None:
    try:
        line = to_line(trajectory)
    except (TypeError, ValueError) as error:
        _broken(where, f"the trajectory cannot be written: {error}; look at the documents' fields")
    if parse_line(line, where) != trajectory:
        _broken(where, "the trajectory changes when it is written and read; look at the documents' "
                "fields")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Planted:
    documents: tuple[Document, ...]
    error: str | None = None


def _check_silence(
    where: str, episode: Episode, gold: str, tokenizer: Tokenizer, reward: Reward
) -> None:
    turn = policy_turn("I look.", query="x", think_in_prompt=episode.think_in_prompt)
    policy = ScriptedPolicy(tokenizer, [turn])
    passage = f"{INFORMATION_CLOSE}{ANSWER_OPEN}{gold}{ANSWER_CLOSE}"
    planted = _Planted((Document("planted", gold, passage),))
    score = reward(run_episode(episode, policy, lambda _: planted))
    if score is not None and score >= 1.0:
        _broken(where, f"an episode without an answer has reward {score}; the reward reads more "
                "than the policy's answer")  # fmt: skip
