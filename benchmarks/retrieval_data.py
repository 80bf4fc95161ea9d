"""What the retrieval benchmarks share: the real corpora and questions beside the checkout."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from evenhand.retrieval import Bm25Retriever
from evenhand.trajectory.protocol import Document

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def need_data() -> None:
    """Leave with a sentence if the data are not there."""
    if not DATA.is_dir():
        sys.exit(f"the data of this benchmark are not there: {DATA}")


def corpus(name: str) -> Iterator[Document]:
    """Yield the passages of one corpus."""
    with gzip.open(DATA / "corpora" / f"{name}_corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Document(row["id"], row["title"], row["text"])


def union() -> Iterator[Document]:
    """Yield the passages of all corpora, each title and text once."""
    seen: set[int] = set()
    for path in sorted((DATA / "corpora").glob("*_corpus.jsonl.gz")):
        for document in corpus(path.name.removesuffix("_corpus.jsonl.gz")):
            key = hash((document.title, document.text))
            if key not in seen:
                seen.add(key)
                yield document


def questions(name: str) -> list[dict]:
    """Return the rows of one question file."""
    text = (DATA / "questions" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def all_questions() -> list[str]:
    """Return every different question of all files, in a fixed order."""
    names = sorted(path.stem for path in (DATA / "questions").glob("*.jsonl"))
    return list(dict.fromkeys(row["question"] for name in names for row in questions(name)))


def union_index(folder: Path) -> Path:
    """Return an index of the union, built at `folder` unless it is there."""
    if not (folder / "manifest.json").exists():
        Bm25Retriever.build(union()).save(folder)
    return folder
