"""The trajectory component: what its template needs, from a credited trajectory.

One component serves the audit page, the report and the viewer. Colours are classes of the style
sheet (`pos`, `neg` with a strength `a0` to `a10`), so that pages work without inline styles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from evenhand.trajectory import Kind, Segment, Trajectory
from evenhand.trajectory.protocol import PROTOCOL_TAG, THINK_CLOSE, Document, first_action

Decode = Callable[[Sequence[int]], str]
"""From token ids to text, special tokens kept."""

UNSURE = 0.9
"""Tokens that the sampler gave a lower probability are underlined."""

STRIP_WIDTH = 120
"""Units that the credit strip of a rollout is wide."""


@dataclass(frozen=True, slots=True)
class DocumentView:
    """A document as shown.

    Attributes:
        document: the document.
        is_silver: a best rollout of the group returned it.
        is_gold: it is one of the supporting pages.
        text: its text in pieces; true marks an accepted answer.
    """

    document: Document
    is_silver: bool
    is_gold: bool
    text: list[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a part: a token if tokens are known.

    Attributes:
        text: its text.
        chance: the sampler's probability as text, empty if unknown.
        unsure: 0 for a likely token, 1 to 3 the less likely it was.
    """

    text: str
    chance: str = ""
    unsure: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a policy segment with one role: `think`, `tag`, `query`, `answer` or `plain`."""

    role: str
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment as shown.

    Attributes:
        segment: the segment.
        title: what it is.
        documents: its documents with their marks.
        parts: text of a policy segment by role.
        shade: strength of the advantage's colour, 0 to 10.
        sign: `pos`, `neg` or `none`.
        credit: text of its advantage and step score, empty for the environment's.
    """

    segment: Segment
    title: str
    documents: list[DocumentView]
    parts: list[Part]
    shade: int
    sign: str
    credit: str


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """A trajectory as shown.

    Attributes:
        trajectory: the trajectory.
        segments: its segments without the prompt.
        answer: what it answered, empty if it did not.
        queries: what it searched for, in order.
        searches: how many searches were executed.
        strip: left end, width and class of each segment in the credit strip.
    """

    trajectory: Trajectory
    segments: list[SegmentView]
    answer: str
    queries: list[str]
    searches: int
    strip: list[tuple[float, float, str]]


def trajectory_view(
    trajectory: Trajectory,
    *,
    silver: Collection[str] = (),
    largest: float | None = None,
    decode: Decode | None = None,
) -> TrajectoryView:
    """Prepare a credited trajectory for the template.

    Args:
        trajectory: the trajectory.
        silver: identities of the silver documents of its group.
        largest: magnitude of the advantage with the full colour; default: its own largest.
        decode: text of token ids. Without it, or where token ids are not recorded, a segment is
            coloured as a whole.
    """
    if largest is None:
        largest = largest_advantage([trajectory])
    gold = {title.casefold() for title in trajectory.supporting_titles or ()}
    answers = _answer_pattern(trajectory.golden_answers or ())
    views = []
    number = 0
    for at, segment in enumerate(trajectory.segments):
        if segment.kind is Kind.PROMPT:
            continue
        number += trajectory.is_executed(at)
        views.append(
            SegmentView(
                segment=segment,
                title=_title(segment, trajectory.is_executed(at), number),
                documents=[
                    DocumentView(
                        d, d.id in silver, d.title.casefold() in gold, _marked(d.text, answers)
                    )
                    for d in segment.documents or ()
                ],
                parts=_parts(segment, decode) if segment.is_policy else [],
                shade=_shade(segment.advantage or 0.0, largest),
                sign=_sign(segment.advantage or 0.0),
                credit=_credit(segment),
            )
        )
    return TrajectoryView(
        trajectory=trajectory,
        segments=views,
        answer=_answer(trajectory),
        queries=[s.query for s in trajectory.segments if s.query is not None],
        searches=number,
        strip=credit_strip(
            [(s.n_tokens, s.advantage or 0.0) for s in trajectory.segments if s.is_policy], largest
        ),
    )


def largest_advantage(trajectories: Iterable[Trajectory]) -> float:
    """Return the largest magnitude of an advantage, 1 if all are 0."""
    return max(
        (abs(s.advantage or 0.0) for t in trajectories for s in t.segments), default=0.0
    ) or 1.0  # fmt: skip


def _title(segment: Segment, is_executed: bool, number: int) -> str:
    match segment.kind:
        case Kind.SEARCH:
            return f"search {number}" if is_executed else "search, not executed"
        case Kind.INFORMATION:
            count = len(segment.documents or ())
            return f"{count} document{'' if count == 1 else 's'}"
        case Kind.INVALID:
            return "turn without an action"
        case Kind.TRUNCATED:
            return "turn cut by a limit"
        case _:
            return segment.kind.value


def _credit(segment: Segment) -> str:
    if not segment.is_policy or segment.advantage is None:
        return ""
    text = f"A {segment.advantage:+.3f}"
    return text if segment.step_score is None else f"{text}, c {segment.step_score:.2f}"


def _shade(advantage: float, largest: float) -> int:
    return min(10, math.ceil(10 * abs(advantage) / largest))


def _sign(advantage: float) -> str:
    return "pos" if advantage > 0 else "neg" if advantage < 0 else "none"


def _answer(trajectory: Trajectory) -> str:
    for segment in reversed(trajectory.segments):
        if segment.kind is Kind.ANSWER:
            action = first_action(segment.text)
            return action.content if action else ""
    return ""


def credit_strip(
    segments: Sequence[tuple[int, float]], largest: float
) -> list[tuple[float, float, str]]:
    """Return left end, width and class of policy segments drawn side by side.

    Args:
        segments: tokens and advantage of each.
        largest: magnitude of the advantage with the full colour.
    """
    gap = min(2.0, 0.3 * STRIP_WIDTH / max(len(segments), 1))
    room = STRIP_WIDTH - gap * (len(segments) - 1)
    tokens = sum(max(count, 1) for count, _ in segments)
    found = []
    left = 0.0
    for count, advantage in segments:
        width = room * max(count, 1) / tokens
        style = f"{_sign(advantage)} a{_shade(advantage, largest)}"
        found.append((round(left, 1), round(width, 1), style))
        left += width + gap
    return found


# --- text ----------------------------------------------------------------------------------------


def _answer_pattern(answers: Sequence[str]) -> re.Pattern[str] | None:
    words = [re.escape(a.strip()) for a in answers if len(a.strip()) > 1]
    if not words:
        return None
    # The longest first, so that "New York City" is not marked as "New York".
    words.sort(key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", re.IGNORECASE)


def _marked(text: str, pattern: re.Pattern[str] | None) -> list[tuple[str, bool]]:
    if pattern is None:
        return [(text, False)]
    found = []
    end = 0
    for match in pattern.finditer(text):
        found += [(text[end : match.start()], False), (match.group(), True)]
        end = match.end()
    return [*found, (text[end:], False)]


def _roles(text: str) -> list[tuple[int, str]]:
    """Return where each role of a policy text begins, in order."""
    action = first_action(text)
    closed = text.find(THINK_CLOSE)
    found: list[tuple[int, str]] = []
    at = 0
    for tag in PROTOCOL_TAG.finditer(text):
        found.append((at, _role(at, text, closed, action)))
        found.append((tag.start(), "tag"))
        at = tag.end()
    found.append((at, _role(at, text, closed, action)))
    return found


def _role(at: int, text: str, closed: int, action: object) -> str:
    if at <= closed:
        return "think"
    if action is not None:
        for role in ("search", "answer"):
            if text.endswith(f"<{role}>", 0, at) and getattr(action, "kind", "") == role:
                return "query" if role == "search" else "answer"
    return "plain"


def _parts(segment: Segment, decode: Decode | None) -> list[Part]:
    text = segment.text
    pieces = token_pieces(segment, decode) or [Piece(text)]
    starts = _roles(text)
    ends = [at for at, _ in starts[1:]] + [len(text)]
    spans = [(b, e, r) for (b, r), e in zip(starts, ends, strict=True) if e > b]
    parts: list[Part] = [Part(role, []) for _, _, role in spans]
    left = 0
    for piece in pieces:
        right = left + len(piece.text)
        for part, (begin, end, _) in zip(parts, spans, strict=True):
            # A token may reach over a tag's end: each part gets its share of it.
            inside = text[max(left, begin) : min(right, end)]
            if inside:
                part.pieces.append(Piece(inside, piece.chance, piece.unsure))
        left = right
    return parts


def token_pieces(segment: Segment, decode: Decode | None) -> list[Piece]:
    """Return a segment's text token by token, or nothing where that cannot be had.

    Tokens are decoded together, so that characters made of several tokens stay whole: they belong
    to the last of them. Nothing is returned unless the pieces are exactly the segment's text.
    """
    ids = segment.token_ids
    if decode is None or ids is None or not len(ids):
        return []
    numbers = ids.tolist()
    single = [decode([number]) for number in numbers]
    if "".join(single) != segment.text:
        single = _growing(numbers, decode)
        if "".join(single) != segment.text:
            return []
    if segment.logprobs is None:
        return [Piece(text) for text in single]
    return [
        Piece(text, _chance(logprob), _unsure(math.exp(min(logprob, 0.0))))
        for text, logprob in zip(single, segment.logprobs.tolist(), strict=True)
    ]


def _growing(ids: Sequence[int], decode: Decode) -> list[str]:
    pieces = []
    done = ""
    for count in range(1, len(ids) + 1):
        whole = decode(ids[:count])
        # An unfinished character decodes to U+FFFD: wait for its last token.
        ready = whole.rstrip("\ufffd") if count < len(ids) else whole
        if not ready.startswith(done):
            return []
        pieces.append(ready[len(done) :])
        done = ready
    return pieces


def _chance(logprob: float) -> str:
    chance = math.exp(min(logprob, 0.0))
    return f"{chance:.3f}" if chance >= 0.001 else f"{chance:.1e}"


def _unsure(chance: float) -> int:
    if chance >= UNSURE:
        return 0
    return 1 if chance >= 0.5 else 2 if chance >= 0.1 else 3
