"""Corpora of passages: two layouts of JSON lines, and the union of several."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evenhand.core.errors import DataError
from evenhand.core.files import numbered_lines
from evenhand.datasets.questions import require_unicode
from evenhand.task.scoring import folded
from evenhand.trajectory import parse_json
from evenhand.trajectory.protocol import Document


def read_corpus(path: Path | str) -> Iterator[Document]:
    """Yield the passages of a JSON-lines file (gzip or not) one by one.

    A line is `{"id", "title", "text"}`, or `{"id", "contents"}` as Search-R1 and FlashRAG have it:
    the title, possibly in double quotes, a line break, the text. Contents of a single line are a
    text without a title. Other fields are ignored; where both layouts are present, `text` counts.

    Raises:
        DataError: at the first line that breaks the layout, naming file, line and field; for an id
            that occurs twice; for a file without a passage.
    """
    path = Path(path)
    seen: set[int] = set()
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        document = document_from_dict(parse_json(line, where), where)
        # Hashes instead of the ids: corpora have tens of millions of lines.
        key = hash(document.id)
        if key in seen:
            raise DataError(
                f"{where}, field id: {document.id!r} occurs a second time; an id names one passage"
            )
        seen.add(key)
        yield document
    if not seen:
        raise DataError(f"{path} holds no passage; the file is empty")


def document_from_dict(data: Mapping[str, Any], where: str = "passage") -> Document:
    """Build and check a passage from the fields of either layout."""
    identity = data.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    if not isinstance(identity, str) or not identity:
        raise DataError(
            f"{where}, field id: expected a text or a whole number, got {identity!r:.40}"
        )
    require_unicode(identity, "id", where)
    if "text" in data:
        title = data.get("title")
        return Document(
            identity,
            "" if title is None else _text(title, "title", where),
            _text(data["text"], "text", where),
        )
    if "contents" not in data:
        raise DataError(f"{where}: neither field text nor field contents is there")
    title, broken, text = _text(data["contents"], "contents", where).partition("\n")
    if not broken:
        return Document(identity, "", title)
    title = title.strip()
    if len(title) >= 2 and title.startswith('"') and title.endswith('"'):
        title = title[1:-1]
    return Document(identity, title, text)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}, field {name}: expected text, got {value!r:.40}")
    require_unicode(value, name, where)
    return value


def union(corpora: Iterable[Iterable[Document]]) -> Iterator[Document]:
    """Yield the passages of several corpora, each content once.

    Two passages are the same if title and text agree in Unicode form C, case folded, with blanks
    squeezed. The first one in order stays, with its id.

    Raises:
        DataError: an id names two different passages.
    """
    contents: set[bytes] = set()
    ids: set[str] = set()
    for corpus in corpora:
        for document in corpus:
            key = _content_key(document)
            if key in contents:
                continue
            if document.id in ids:
                raise DataError(
                    f"id {document.id!r} names two different passages of the corpora to be joined; "
                    "give the ids of each corpus a prefix of their own"
                )
            contents.add(key)
            ids.add(document.id)
            yield document


def _content_key(document: Document) -> bytes:
    text = f"{folded(document.title)}\n{folded(document.text)}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
