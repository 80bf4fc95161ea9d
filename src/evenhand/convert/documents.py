"""Taking the documents back out of the text that showed them to the policy."""

from __future__ import annotations

import hashlib
import json
import re

from evenhand.task.scoring import folded
from evenhand.trajectory.protocol import INFORMATION_CLOSE, INFORMATION_OPEN, Document

RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"

# `Doc 1(Title: T) text` is Search-R1's line; with a blank before the bracket it is verl's.
_TITLED = re.compile(r"^Doc ([0-9]{1,4}) ?\(Title: ?", re.MULTILINE)
_PLAIN = re.compile(r"^Doc ([0-9]{1,4}): ?", re.MULTILINE)


def identity(title: str, text: str) -> str:
    """Return a stable id for a document whose dump has none: a hash of its title and text.

    Case, the form of Unicode, runs of blanks and quotes around the title make no difference.
    """
    parts = (folded(unquoted(title)), folded(text))
    encoded = "\x00".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()


def unquoted(title: str) -> str:
    """Return a title without the pair of double quotes that the wiki-18 corpus puts around it."""
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        return title[1:-1].strip()
    return title


def is_result(text: str) -> bool:
    """Whether a text of the environment shows the results of a search."""
    return INFORMATION_OPEN in text or RESPONSE_OPEN in text


def shown_documents(text: str) -> tuple[Document, ...]:
    """Return the documents that a text of the environment shows, in order.

    The text may be an `<information>` block, one or several `<tool_response>` blocks, or the bare
    content of a tool's message. A block that ends early (it was cut) is read to the end.
    """
    if INFORMATION_OPEN in text:
        body = text.partition(INFORMATION_OPEN)[2]
        end = body.rfind(INFORMATION_CLOSE)
        return documents_of(body if end < 0 else body[:end])
    if RESPONSE_OPEN in text:
        found: list[Document] = []
        for block in text.split(RESPONSE_OPEN)[1:]:
            found += _response(block.partition(RESPONSE_CLOSE)[0])
        return tuple(found)
    return tuple(_response(text))


def _response(block: str) -> list[Document]:
    block = block.strip()
    parts = [block]
    result = _json_result(block)
    if result is not None:
        # verl's search tool joins the results of several queries, each counted from Doc 1.
        parts = result.split("\n---\n")
    found: list[Document] = []
    for part in parts:
        if _numbered(part):
            found += documents_of(part)
        elif part.strip():
            found.append(_titled_by_line(part))
    return found


def _json_result(block: str) -> str | None:
    if not block.startswith("{"):
        return None
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    result = value.get("result") if isinstance(value, dict) else None
    return result if isinstance(result, str) else None


def documents_of(body: str) -> tuple[Document, ...]:
    """Return the documents of the inside of an information block.

    Documents start at `Doc n(Title: ` or `Doc n: ` at the start of a line, with n counting 1, 2,
    3, …: a passage that only mentions `Doc 7(Title: ` stays whole. What stands before the first
    one is dropped. A body without such a line is one document without a title; a blank one shows
    nothing.
    """
    headers = _numbered(body)
    if not headers:
        text = body.strip()
        return (document("", text),) if text else ()
    titled = headers[0].re is _TITLED
    ends = [header.start() for header in headers[1:]] + [len(body)]
    return tuple(
        (_titled_by_bracket if titled else _titled_by_line)(body[header.end() : end])
        for header, end in zip(headers, ends, strict=True)
    )


def _numbered(body: str) -> list[re.Match[str]]:
    first = [
        header
        for pattern in (_TITLED, _PLAIN)
        for header in pattern.finditer(body)
        if header.group(1) == "1"
    ]
    if not first:
        return []
    start = min(first, key=lambda header: header.start())
    headers: list[re.Match[str]] = []
    for header in start.re.finditer(body, start.start()):
        if int(header.group(1)) == len(headers) + 1:
            headers.append(header)
    return headers


def _titled_by_bracket(chunk: str) -> Document:
    line, _, _ = chunk.partition("\n")
    depth = 1
    for at, char in enumerate(line):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return document(line[:at], chunk[at + 1 :])
    # The brackets of the title do not balance: the first closing one ends it, or else the line.
    at = line.find(")")
    return document(line, chunk[len(line) :]) if at < 0 else document(line[:at], chunk[at + 1 :])


def _titled_by_line(chunk: str) -> Document:
    title, _, text = chunk.strip().partition("\n")
    return document(unquoted(title), text) if text.strip() else document("", title)


def document(title: str, text: str) -> Document:
    """Return a document with the identity that its title and text give it."""
    title, text = title.strip(), text.strip()
    return Document(identity(title, text), title, text)
