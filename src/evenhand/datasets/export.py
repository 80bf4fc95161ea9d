"""Question sets in the layout that verl's and Search-R1's training scripts read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from evenhand.core.errors import DataError, require
from evenhand.core.files import atomic_path
from evenhand.datasets.catalogue import SETS
from evenhand.datasets.questions import VERL_PREFIX, Question

ABILITY = "fact-reasoning"
"""The column `ability`; the scripts carry it along and do not read it."""

Render = Callable[[str], "str | Sequence[dict[str, str]]"]
"""Maps a question to a prompt: one text of the user, or a list of chat messages."""


def verl_rows(
    questions: Iterable[Question],
    render: Render,
    *,
    part: str = "train",
    prefix: str = VERL_PREFIX,
    data_source: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row a question, with the columns that verl and Search-R1 read.

    `data_source` chooses the scorer: verl's own knows `searchR1_nq` and its like, Search-R1's and
    CalibAdv's know `nq`; both refuse other names unless a reward function of your own is set.
    Whatever it says, `extra_info.dataset` names the set, so that ids stay apart.

    Args:
        questions: in the order of the rows; `extra_info.index` counts them from 0.
        render: question text to prompt, a text becomes one message of the user.
        part: value of `extra_info.split`.
        prefix: put before the name of a standard set.
        data_source: value of that column for every row, instead.
    """
    for index, question in enumerate(questions):
        prompt = render(question.question)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        name = question.dataset or "unnamed"
        titles = question.supporting_titles
        yield {
            "data_source": data_source or (prefix + name if name in SETS else name),
            "prompt": [{"role": each["role"], "content": each["content"]} for each in prompt],
            "ability": ABILITY,
            "reward_model": {
                "style": "rule",
                "ground_truth": {"target": list(question.golden_answers)},
            },
            "extra_info": {
                "split": part,
                "index": index,
                "id": question.id,
                "dataset": question.dataset,
                "question": question.question,
                "hops": question.hops,
                "supporting_titles": None if titles is None else list(titles),
            },
        }


def write_parquet(path: Path | str, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows of `verl_rows`; the file appears whole or not at all.

    Returns:
        How many rows it holds.

    Raises:
        DataError: the folder does not exist or cannot be written, or the path is a pipe.
        MissingExtraError: pyarrow is not installed.
    """
    arrow = require("pyarrow", "parquet", "writing a parquet file")
    parquet = require("pyarrow.parquet", "parquet", "writing a parquet file")
    schema = _schema(arrow)
    path, count = Path(path), 0
    try:
        with atomic_path(path) as target, parquet.ParquetWriter(target, schema) as writer:
            for batch in _batched(rows, 1000):
                writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
                count += len(batch)
    except OSError as error:  # a pipe has no positions, which parquet needs
        raise DataError(f"cannot write {path}: {error}; give the name of a regular file") from error
    return count


def _batched(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch


def _schema(arrow: Any) -> Any:
    # Written out, so that a column keeps its type where its first rows hold nothing.
    text, texts = arrow.string(), arrow.list_(arrow.string())
    message = arrow.struct([("role", text), ("content", text)])
    truth = arrow.struct([("target", texts)])
    extra = [("split", text), ("index", arrow.int64()), ("id", text), ("dataset", text),
             ("question", text), ("hops", arrow.int64()), ("supporting_titles", texts)]  # fmt: skip
    return arrow.schema(
        [
            ("data_source", text),
            ("prompt", arrow.list_(message)),
            ("ability", text),
            ("reward_model", arrow.struct([("style", text), ("ground_truth", truth)])),
            ("extra_info", arrow.struct(extra)),
        ]
    )
