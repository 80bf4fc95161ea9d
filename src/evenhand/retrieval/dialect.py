"""The `/retrieve` dialects that training code speaks, for both ends: server and client.

A request is `{"queries": [...], "topk": 3, "return_scores": true}`; the answer is
`{"result": [[{"document": {...}, "score": 1.5}, ...], ...]}`, one list a query (the layout of
Search-R1's retrieval server). `docs/retrieval.md` lists every field.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenhand.retrieval.base import SearchResult
from evenhand.trajectory.protocol import Document, valid_unicode

K_FIELDS = ("topk_rerank", "topk", "top_n", "top_k", "k", "topk_retrieval")
"""Names for the number of documents; the first that is present counts. `topk_retrieval` comes last:
beside `topk_rerank` it means the depth before reranking, which is the retriever's own setting."""

FORMATS = ("object", "string")


class RequestError(Exception):
    """A request that cannot be answered.

    Attributes:
        status: the HTTP status that says so.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server accepts.

    Attributes:
        body_bytes: largest request body.
        queries: most queries of one request.
        k: most documents a query.
        default_k: where a request does not say.
        body_seconds: how long a client may take to send its body.
    """

    body_bytes: int = 4 * 2**20
    queries: int = 1024
    k: int = 100
    default_k: int = 3
    body_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A request, read and checked.

    Attributes:
        queries: at most `Limits.queries`; may be empty.
        k: documents a query.
        return_scores: each document comes in a pair with its score.
        as_text: a document is one string instead of an object.
    """

    queries: list[str]
    k: int
    return_scores: bool
    as_text: bool


def read_request(body: object, limits: Limits) -> SearchRequest:
    """Read the parsed JSON of a request. Unknown fields are ignored, `null` is no value.

    Raises:
        RequestError: 422 for a wrong type or value, 413 for too many queries.
    """
    if not isinstance(body, Mapping):
        raise RequestError(422, f"the body must be a JSON object, got {_short(body)}")
    queries = _queries(body)
    if len(queries) > limits.queries:
        raise RequestError(
            413, f"{len(queries)} queries in one request, at most {limits.queries}; send fewer"
        )
    k = limits.default_k
    name = next((name for name in K_FIELDS if body.get(name) is not None), None)
    if name is not None:
        k = body[name]
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= limits.k:
            raise RequestError(
                422, f"{name} must be a whole number from 1 to {limits.k}, got {_short(k)}"
            )
    scores = body.get("return_scores")
    if scores is not None and not isinstance(scores, bool):
        raise RequestError(422, f"return_scores must be true or false, got {_short(scores)}")
    layout = "object" if body.get("format") is None else body["format"]
    if layout not in FORMATS:
        raise RequestError(422, f"format must be object or string, got {_short(layout)}")
    return SearchRequest(queries, k, bool(scores), layout == "string")


def _queries(body: Mapping[str, Any]) -> list[str]:
    many, one = body.get("queries") is not None, body.get("query") is not None
    if many == one:
        found = "both" if many else "neither"
        raise RequestError(422, f"give 'queries' (a list) or 'query' (a string), got {found}")
    name = "queries" if many else "query"
    given = body[name]
    queries = [given] if isinstance(given, str) and name == "query" else given
    if not isinstance(queries, list):
        kinds = "a list of strings" if name == "queries" else "a string or a list of strings"
        raise RequestError(422, f"{name} must be {kinds}, got {_short(given)}")
    for at, query in enumerate(queries):
        if not isinstance(query, str):
            raise RequestError(422, f"{name}[{at}] must be a string, got {_short(query)}")
    return queries


def _short(value: object) -> str:
    # A body may hold megabytes; an error message must not.
    if isinstance(value, (Mapping, list)):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def render_results(results: Sequence[SearchResult], request: SearchRequest) -> dict[str, Any]:
    """Return the answer to a request.

    A failed query has an empty list; `errors` (one entry a query, `null` for those that were
    answered) is there only if some query failed.
    """
    rows = [
        [_item(document, request) for document in result.documents[: request.k]]
        for result in results
    ]
    answer: dict[str, Any] = {"result": rows}
    if any(result.error is not None for result in results):
        answer["errors"] = [result.error for result in results]
    return answer


def _item(document: Document, request: SearchRequest) -> Any:
    shown: Any = contents(document.title, document.text)
    if not request.as_text:
        shown = {
            "id": document.id,
            "title": document.title,
            "text": document.text,
            "contents": shown,
        }
    return {"document": shown, "score": document.score} if request.return_scores else shown


def contents(title: str, text: str) -> str:
    """Return title and text in one string, as in Search-R1's wiki-18: `"title"`, newline, text."""
    return f'"{title}"\n{text}'


def split_contents(joined: str) -> tuple[str, str]:
    """Return title and text of a `contents` string; without a line break all of it is text."""
    first, newline, rest = joined.partition("\n")
    if not newline:
        return "", joined
    if len(first) >= 2 and first[0] == first[-1] == '"':
        first = first[1:-1]
    return first, rest


def read_results(payload: object, queries: int) -> list[SearchResult]:
    """Read the parsed JSON of an answer, in any of the layouts in use.

    A document is `{"document": ..., "score": ...}` or the document itself, which is an object
    (`id` with `title` and `text`, or with `contents`) or a `contents` string. Without an id, or
    with a blank one, its identity is a hash of title and text.

    Raises:
        ValueError: another layout, with the place.
    """
    if not isinstance(payload, Mapping) or not isinstance(payload.get("result"), list):
        raise ValueError("the answer has no list 'result'")
    rows = payload["result"]
    if len(rows) != queries:
        raise ValueError(f"the answer has {len(rows)} results for {queries} queries")
    errors = payload.get("errors")
    if errors is None:
        errors = [None] * queries
    if not isinstance(errors, list) or len(errors) != queries:
        raise ValueError("the answer's 'errors' is not parallel to its results")
    return [
        SearchResult(error=str(error)) if error is not None else _read_row(row, f"result[{at}]")
        for at, (row, error) in enumerate(zip(rows, errors, strict=True))
    ]


def _read_row(row: object, where: str) -> SearchResult:
    if not isinstance(row, list):
        raise ValueError(f"{where} is not a list")
    return SearchResult(
        tuple(_read_item(item, f"{where}[{place}]") for place, item in enumerate(row))
    )


def _read_item(item: object, where: str) -> Document:
    score = None
    if isinstance(item, Mapping):
        score = item.get("score")
        item = item.get("document", item)
    score = None if score is None else _score(score, where)
    if isinstance(item, str):
        name, (title, text) = None, split_contents(item)
    elif isinstance(item, Mapping):
        name, title, text = _fields(item, where)
    else:
        raise ValueError(f"{where} is neither a document nor a string")
    title, text = valid_unicode(title), valid_unicode(text)
    if name is None:
        name = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]
    return Document(valid_unicode(name), title, text, score)


def _score(score: object, where: str) -> float:
    try:
        # JSON may hold a whole number that no float can.
        number = float(score) if isinstance(score, int | float) else math.nan
    except OverflowError:
        number = math.nan
    if isinstance(score, bool) or not math.isfinite(number):
        raise ValueError(f"{where} has a score that is not a finite number")
    return number


def _fields(document: Mapping[str, Any], where: str) -> tuple[str | None, str, str]:
    name = document.get("id")
    if isinstance(name, bool) or not isinstance(name, (str, int, type(None))):
        raise ValueError(f"{where} has an id that is neither text nor a whole number")
    title, text, joined = (document.get(field) for field in ("title", "text", "contents"))
    if isinstance(text, str) and isinstance(title, (str, type(None))):
        pair = (title or "", text)
    elif isinstance(joined, str):
        pair = split_contents(joined)
    else:
        raise ValueError(f"{where} has neither 'text' nor 'contents'")
    known = None if name is None or not str(name).strip() else str(name)
    return (known, *pair)
