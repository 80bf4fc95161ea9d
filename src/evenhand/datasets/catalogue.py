"""The standard question sets by name, and where they are found.

A name is looked up in a data folder: the one that is given, else the one that `EVENHAND_DATA`
names, else `../shared/data` if it exists. Inside it, questions lie in `questions/SET_SPLIT.jsonl`
or, in FlashRAG's layout, `SET/SPLIT.jsonl` (each also `.jsonl.gz` or `.parquet`), and corpora in
`corpora/SET_corpus.jsonl` (also `.gz`). Without a data folder the hub is asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evenhand.core.errors import ConfigError, DataError, require
from evenhand.core.plugins import did_you_mean
from evenhand.datasets.corpora import read_corpus, union
from evenhand.datasets.questions import (
    Question,
    question_from_dict,
    read_questions,
    unique_questions,
    without_gaps,
)
from evenhand.trajectory.protocol import Document

DATA_VARIABLE = "EVENHAND_DATA"
"""Environment variable that names the data folder."""

DEFAULT_FOLDER = Path("../shared/data")
HUB_SOURCE = "RUC-NLPIR/FlashRAG_datasets"
"""FlashRAG's data sets on the hub: one configuration a set, one JSON-lines file a split."""

UNION = "union"
"""Name of the corpus that joins all corpora of the data folder."""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """One of the standard question sets.

    Attributes:
        name: the name users write.
        title: the name papers write.
        multi_hop: whether an answer needs several facts.
        splits: names of its splits; the first is the one that evaluations use.
    """

    name: str
    title: str
    multi_hop: bool
    splits: tuple[str, ...]


SETS: dict[str, QuestionSet] = {
    each.name: each
    for each in (
        QuestionSet("nq", "Natural Questions", False, ("test", "dev", "train")),
        QuestionSet("triviaqa", "TriviaQA", False, ("test", "dev", "train")),
        QuestionSet("popqa", "PopQA", False, ("test",)),
        QuestionSet("hotpotqa", "HotpotQA", True, ("dev", "train")),
        QuestionSet("2wikimultihopqa", "2WikiMultihopQA", True, ("dev", "dev_inferred", "train")),
        QuestionSet("musique", "MuSiQue", True, ("dev", "train")),
        QuestionSet("bamboogle", "Bamboogle", True, ("test",)),
    )
}


def find_set(spec: str) -> tuple[QuestionSet, str]:
    """Return the set and the split that `SET` or `SET:SPLIT` names.

    Raises:
        ConfigError: there is no such set or split.
    """
    name, colon, part = spec.partition(":")
    if name not in SETS:
        raise ConfigError(
            f"unknown question set {name!r}; valid: {', '.join(SETS)}, or the path of a file"
            + did_you_mean(name, SETS)
        )
    found = SETS[name]
    if colon and part not in found.splits:
        raise ConfigError(
            f"{name} has no split {part!r}; valid: {', '.join(found.splits)}"
            + did_you_mean(part, found.splits)
        )
    return found, part or found.splits[0]


def data_folder(folder: Path | str | None = None) -> Path | None:
    """Return the data folder that is in force, or `None` if there is none.

    Raises:
        DataError: the folder that was given, or that `EVENHAND_DATA` names, does not exist.
    """
    given = folder or os.environ.get(DATA_VARIABLE)
    if given:
        path = Path(given)
        if not path.is_dir():
            source = "" if folder else f" (from {DATA_VARIABLE})"
            raise DataError(f"the data folder {path}{source} is not a directory")
        return path
    return DEFAULT_FOLDER if DEFAULT_FOLDER.is_dir() else None


def is_given(folder: Path | str | None = None) -> bool:
    """Whether the user named the data folder, so that nothing is looked for elsewhere."""
    return bool(folder or os.environ.get(DATA_VARIABLE))


def find_questions(name: str, part: str, folder: Path) -> Path | None:
    """Return the file of one split in a data folder, or `None`."""
    stems = (folder / "questions" / f"{name}_{part}", folder / name / part)
    return _first_file(stems, (".jsonl", ".jsonl.gz", ".parquet"))


def find_corpus(name: str, folder: Path) -> Path | None:
    """Return the file of a set's own corpus in a data folder, or `None`."""
    return _first_file([folder / "corpora" / f"{name}_corpus"], (".jsonl", ".jsonl.gz"))


def corpora_in(folder: Path) -> list[Path]:
    """Return the files of all corpora in a data folder, sorted by name."""
    return sorted((folder / "corpora").glob("*_corpus.jsonl*"))


def _first_file(stems: Iterable[Path], suffixes: Iterable[str]) -> Path | None:
    candidates = (stem.with_name(stem.name + suffix) for stem in stems for suffix in suffixes)
    return next((path for path in candidates if path.is_file()), None)


def is_file_name(spec: str) -> bool:
    """Whether `spec` means a file rather than the name of a set."""
    return spec.partition(":")[0] not in SETS and (
        "/" in spec or "." in spec or spec == "-" or Path(spec).exists()
    )


def load_questions(spec: str, *, data: Path | str | None = None) -> list[Question]:
    """Return the questions of `SET`, `SET:SPLIT` or a file.

    Args:
        spec: `hotpotqa` (the split that evaluations use), `hotpotqa:train`, or a path.
        data: data folder; default: see the module.

    Raises:
        ConfigError: no such set or split.
        DataError: not in the data folder that was given, or the file breaks its layout.
        MissingExtraError: it would come from the hub and `datasets` is not installed.
    """
    if is_file_name(spec):
        return list(read_questions(spec))
    found, part = find_set(spec)
    folder = data_folder(data)
    path = None if folder is None else find_questions(found.name, part, folder)
    if path is not None:
        return list(read_questions(path, dataset=found.name))
    if folder is not None and is_given(data):
        raise DataError(
            f"{found.name}:{part} is not in {folder}; expected questions/{found.name}_{part}.jsonl "
            f"or {found.name}/{part}.jsonl"
        )
    return list(read_hub(found.name, part))


def read_hub(name: str, part: str, *, source: str = HUB_SOURCE) -> Iterator[Question]:
    """Yield the questions of one split from the hub, or from a local copy of its layout.

    Args:
        name: the set, a configuration of the source.
        part: the split.
        source: repository on the hub, or a folder with the same files and the same card.

    Raises:
        DataError: it cannot be loaded, or a row breaks the layout.
        MissingExtraError: `datasets` is not installed.
    """
    library = require("datasets", "hub", f"loading {name}:{part} from the hub")
    try:
        rows = library.load_dataset(source, name, split=part)
    except Exception as error:  # network, cache, card and parser each raise kinds of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"cannot load {name}:{part} from {source}: {reason}; download the set and give its "
            f"folder with --data or {DATA_VARIABLE}"
        ) from error
    wheres = ((row, f"{source}, {name}:{part}, row {at}") for at, row in enumerate(rows, start=1))
    return unique_questions(
        (question_from_dict(without_gaps(row), where, dataset=name), where) for row, where in wheres
    )


def load_corpus(*specs: str, data: Path | str | None = None) -> Iterator[Document]:
    """Yield the passages of a corpus, or the union of several.

    Args:
        specs: each the name of a set (its own corpus), `union` (all corpora of the data folder) or
            a path.
        data: data folder; default: see the module.

    Raises:
        ConfigError: no such set.
        DataError: not in the data folder, or a file breaks its layout.
    """
    paths = [path for spec in specs for path in _corpus_paths(spec, data)]
    return read_corpus(paths[0]) if len(paths) == 1 else union(map(read_corpus, paths))


def _corpus_paths(spec: str, data: Path | str | None) -> list[Path]:
    if spec != UNION and is_file_name(spec):
        return [Path(spec)]
    name = spec if spec == UNION else find_set(spec)[0].name
    folder = data_folder(data)
    if folder is None:
        raise DataError(
            f"no data folder to find the corpus {name!r} in; give one with --data or "
            f"{DATA_VARIABLE}, or give the path of a corpus"
        )
    paths = corpora_in(folder) if name == UNION else [find_corpus(name, folder)]
    found = [path for path in paths if path is not None]
    if not found:
        expected = "*" if name == UNION else name
        raise DataError(
            f"no corpus {name!r} in {folder}; expected corpora/{expected}_corpus.jsonl(.gz)"
        )
    return found
