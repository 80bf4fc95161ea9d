"""The formats that are read, how each is recognised, and the one entrance to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from evenhand.convert.context import Context
from evenhand.convert.counting import Counter
from evenhand.convert.nemo_rl import is_nemo_rl, read_nemo_rl
from evenhand.convert.rows import Row, open_rows, short_names
from evenhand.convert.transcripts import (
    is_calibadv,
    is_transcript,
    read_calibadv,
    read_searchr1,
)
from evenhand.convert.trl import is_trl, read_trl
from evenhand.convert.verl import is_verl, read_verl
from evenhand.core.errors import ConfigError, DataError
from evenhand.core.files import STANDARD_STREAM
from evenhand.core.plugins import did_you_mean
from evenhand.trajectory import Trajectory, trajectory_from_dict


class Format(NamedTuple):
    """A format of rollouts.

    Attributes:
        description: what it is and who writes it.
        read: turns rows into trajectories, one by one.
        matches: whether a row has the format's keys.
    """

    description: str
    read: Callable[[Iterator[Row], Context], Iterator[Trajectory]]
    matches: Callable[[Mapping[str, Any]], bool]


def _is_own(data: Mapping[str, Any]) -> bool:
    return str(data.get("schema", "")).startswith("evenhand.trajectory")


def _read_own(rows: Iterator[Row], _: Context) -> Iterator[Trajectory]:
    for row in rows:
        yield trajectory_from_dict(row.data, row.where)


FORMATS: dict[str, Format] = {
    "evenhand": Format("our own trajectory file (schema)", _read_own, _is_own),
    "nemo-rl": Format(
        "NeMo-RL's train_data_step*.jsonl (content, token_loss_mask)", read_nemo_rl, is_nemo_rl
    ),
    "verl": Format("verl's rollout_data_dir (input, output, gts, score, step)", read_verl, is_verl),
    "trl": Format("TRL's completions table (step, prompt, completion)", read_trl, is_trl),
    "calibadv": Format(
        "CalibAdv's rollout_*.json (question, responses)", read_calibadv, is_calibadv
    ),
    "searchr1": Format(
        "Search-R1 transcripts (text or response, with question, golden_answers, reward)",
        read_searchr1,
        is_transcript,
    ),
}
"""Every format by name, in the order in which they are tried on a file."""


def open_trajectories(
    paths: Iterable[Path | str] | Path | str,
    *,
    source: str | None = None,
    tokenizer: Path | None = None,
) -> Iterator[Trajectory]:
    """Yield the trajectories of one or several rollout files, whatever wrote them.

    Files are streamed one after the other, row by row (a file that is one JSON value is held
    whole). The path `-` is standard input. Ids are unique over all files.

    Args:
        paths: the files.
        source: a name of `FORMATS`; `None` recognises the format of each file from its first row.
        tokenizer: a `tokenizer.json`, or a folder that holds one, that counts `n_tokens` where a
            dump does not tell it; without one, characters are counted. The trajectory's
            `metadata["n_tokens_unit"]` says which.

    Raises:
        ConfigError: no such format.
        DataError: a file cannot be read, its format is not recognised, or a row breaks it; the
            message names file, line and field. Raised while iterating.
    """
    if source is not None and source not in FORMATS:
        raise ConfigError(
            f"format {source!r} is not known{did_you_mean(source, FORMATS)}; the formats are "
            + ", ".join(FORMATS)
        )
    files = [paths] if isinstance(paths, Path | str) else list(paths)
    return _stream([Path(file) for file in files], source, Counter(tokenizer))


def _stream(paths: list[Path], source: str | None, count: Counter) -> Iterator[Trajectory]:
    if paths.count(STANDARD_STREAM) > 1:
        raise DataError("standard input can be read only once; give - once")
    seen: set[int] = set()
    for path, name in zip(paths, short_names(paths), strict=True):
        rows = open_rows(path, name)
        first = last = next(rows)
        found = source or recognise(first)
        before = len(seen)

        def noted(rows: Iterator[Row] = rows) -> Iterator[Row]:
            nonlocal last
            for row in rows:
                last = row
                yield row

        for trajectory in FORMATS[found].read(chain([first], noted()), Context(found, count)):
            # Hashes instead of the ids: 8 bytes each on files of many millions of lines.
            key = hash(trajectory.id)
            if key in seen:
                raise DataError(
                    f"{last.where}, field id: {trajectory.id!r} occurs a second time; ids are "
                    "unique in a file and over files that are read together"
                )
            seen.add(key)
            yield trajectory
        if len(seen) == before:
            raise DataError(f"{path} holds no trajectory")


def recognise(row: Row) -> str:
    """Return the name of the format that a row is written in.

    Raises:
        DataError: none of them; the message lists the formats and the row's keys.
    """
    for name, known in FORMATS.items():
        if known.matches(row.data):
            return name
    listed = "; ".join(f"{name}: {known.description}" for name, known in FORMATS.items())
    keys = ", ".join(str(key)[:40] for key in list(row.data)[:12]) or "none"
    raise DataError(
        f"{row.where}: the format is not recognised from the keys ({keys}); known formats are "
        f"{listed}; name one with --from"
    )
