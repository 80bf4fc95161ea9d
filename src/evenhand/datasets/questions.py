"""The question record, its readers, and splits that never move a question.

Three layouts are read, told apart by their fields and not by the file's name:

* FlashRAG: `{"id", "question", "golden_answers", "metadata"}`, as JSON lines or parquet;
* verl and Search-R1: parquet (or JSON lines) with `data_source`, `prompt`,
  `reward_model.ground_truth.target` and `extra_info`;
* plain: `{"question", "golden_answers"}`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenhand.core.errors import ConfigError, DataError
from evenhand.core.files import (
    STANDARD_STREAM,
    atomic_write,
    is_parquet,
    numbered_lines,
    parquet_rows,
)
from evenhand.trajectory import golden_answers, parse_json

VERL_PREFIX = "searchR1_"
"""What verl's data preparation puts before the name of a set in `data_source`."""

_SUFFIXES = re.compile(r"(\.jsonl?|\.parquet|\.gz)+$")
_KNOWN = frozenset(
    {"id", "question", "golden_answers", "dataset", "hops", "supporting_titles", "answer_in_corpus",
     "metadata", "data_source", "prompt", "ability", "reward_model", "extra_info"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its accepted answers.

    Attributes:
        id: unique in its set. A file without ids gets one from the question and its answers, so
            that it does not depend on the other rows.
        question: the text.
        golden_answers: accepted answers, at least one.
        dataset: name of the set.
        hops: how many facts the answer needs.
        supporting_titles: titles of the pages that hold them; `None` where they are not known.
        answer_in_corpus: whether the set's own corpus holds an answer; `None` if not known or not
            meaningful (yes/no).
        metadata: whatever else the source had.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    dataset: str | None = None
    hops: int | None = None
    supporting_titles: tuple[str, ...] | None = None
    answer_in_corpus: bool | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


# --- reading -------------------------------------------------------------------------------------


def read_questions(path: Path | str, *, dataset: str | None = None) -> Iterator[Question]:
    """Yield the questions of a file: JSON lines (gzip or not) or parquet, by content.

    Args:
        path: the file; `-` is standard input (JSON lines).
        dataset: name of the set. Default: what the row says, else the file's name without suffix.

    Raises:
        DataError: at the first row that breaks its layout, naming file, line (parquet: row) and
            field; for an id that occurs twice; for a file without a question.
        MissingExtraError: a parquet file, and pyarrow is not installed.
    """
    path = Path(path)
    rows = _table_rows(path) if is_parquet(path) else _json_rows(path)
    name = None if path == STANDARD_STREAM else _SUFFIXES.sub("", path.name)
    return unique_questions(
        (question_from_dict(row, where, dataset=dataset, default_dataset=name), where)
        for where, row in rows
    )


def unique_questions(questions: Iterable[tuple[Question, str]]) -> Iterator[Question]:
    """Yield the questions of `(question, where)` pairs; refuse an id that occurs twice."""
    seen: set[tuple[str | None, str]] = set()
    where = "the source"
    for question, where in questions:
        key = (question.dataset, question.id)
        if key in seen:
            raise DataError(
                f"{where}, field id: {question.id!r} occurs a second time in the set "
                f"{question.dataset or 'without a name'}; an id names one question of a set"
            )
        seen.add(key)
        yield question
    if not seen:
        raise DataError(f"{where.split(', line')[0]} holds no question")


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        yield where, parse_json(line, where)


def _table_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in parquet_rows(path):
        yield f"{path}, row {number}", without_gaps(row)


def without_gaps(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a table without the nulls of its metadata.

    A table gives every row the fields of all rows; those that a row never had are null.
    """
    return {
        name: {key: part for key, part in value.items() if part is not None}
        if name in ("metadata", "extra_info") and isinstance(value, dict)
        else value
        for name, value in row.items()
    }


def question_from_dict(
    data: Mapping[str, Any],
    where: str = "question",
    *,
    dataset: str | None = None,
    default_dataset: str | None = None,
) -> Question:
    """Build and check a question from one row of any of the layouts.

    Args:
        data: the row. Lists may be arrays; a bare string of golden answers is one answer.
        where: what an error message starts with.
        dataset: name of the set, whatever the row says.
        default_dataset: name of the set if the row says none.

    Raises:
        DataError: a field is missing or has a wrong value.
    """
    metadata, extra = _mapping(data, "metadata", where), _mapping(data, "extra_info", where)
    source = data.get("data_source")
    named = data.get("dataset") or extra.get("dataset")
    named = named or (source and str(source).removeprefix(VERL_PREFIX))
    name = dataset or (str(named) if named else default_dataset)
    question = _question(data, extra, where)
    golds = _golds(data, where)
    # The first place that knows a field wins; it is not repeated in the metadata.
    lifted: dict[str, Any] = {}
    for key in ("hops", "supporting_titles", "answer_in_corpus"):
        lifted[key] = _first(key, data, metadata, extra)
        metadata.pop(key, None)
        extra.pop(key, None)
    identity = _id(data, extra, name, question, golds, where)
    rest = {key: value for key, value in extra.items() if key not in ("id", "dataset", "question")}
    titles = _titles(lifted["supporting_titles"], metadata, where)
    stored = {
        "id": (identity,),
        "dataset": (name or "",),
        "question": (question,),
        "golden_answers": golds,
        "supporting_titles": titles or (),
    }
    for what, texts in stored.items():
        for text in texts:
            require_unicode(text, what, where)
    return Question(
        id=identity,
        question=question,
        golden_answers=golds,
        dataset=name,
        hops=_hops(lifted["hops"], where),
        supporting_titles=titles,
        answer_in_corpus=_flag(lifted["answer_in_corpus"], where),
        metadata={
            **{key: value for key, value in data.items() if key not in _KNOWN},
            **({"extra_info": rest} if rest else {}),
            **metadata,
        },
    )


def require_unicode(text: str, name: str, where: str) -> None:
    """Raise a `DataError` if the text holds half a surrogate pair, which no file can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}, field {name}: half a surrogate pair at character {error.start}; the text "
            "was cut inside a character"
        ) from None


def _first(name: str, *places: Mapping[str, Any]) -> Any:
    return next((place[name] for place in places if place.get(name) is not None), None)


def _mapping(data: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}, field {name}: expected an object, got {value!r:.40}")
    return dict(value)


def _question(data: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> str:
    value = _first("question", data, extra)
    if value is None and data.get("prompt") is not None:
        value = _question_in_prompt(data["prompt"])
        if value is None:
            raise DataError(
                f"{where}, field prompt: no message of the user to take a question from"
            )
    if value is None:
        raise DataError(f"{where}: field question is missing")
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}, field question: expected a text that is not empty, got {value!r:.40}"
        )
    return value


def _question_in_prompt(prompt: Any) -> str | None:
    """Return what follows the last `Question:` of the last message of the user."""
    if isinstance(prompt, str):
        text: Any = prompt
    else:
        messages = [m for m in _plain_list(prompt) or [] if isinstance(m, Mapping)]
        texts = [m.get("content") for m in messages if m.get("role") == "user"]
        text = texts[-1] if texts else None
    if not isinstance(text, str):
        return None
    return text.rpartition("Question:")[2].strip()


def _golds(data: Mapping[str, Any], where: str) -> tuple[str, ...]:
    name, value = "golden_answers", data.get("golden_answers")
    if value is None and isinstance(data.get("reward_model"), Mapping):
        name, value = "reward_model.ground_truth", data["reward_model"].get("ground_truth")
        if isinstance(value, Mapping):
            name, value = f"{name}.target", value.get("target")
    if value is None:
        raise DataError(
            f"{where}: field {name} is missing; accepted answers are read from golden_answers or "
            "from reward_model.ground_truth.target"
        )
    try:
        return golden_answers(value)
    except DataError as error:
        raise DataError(f"{where}, field {name}: {error}") from None


def _id(
    data: Mapping[str, Any],
    extra: Mapping[str, Any],
    dataset: str | None,
    question: str,
    golds: tuple[str, ...],
    where: str,
) -> str:
    value = _first("id", data, extra)
    if value is None and extra.get("index") is not None:
        parts = [dataset, extra.get("split"), extra["index"]]
        return "-".join(str(part) for part in parts if part is not None)
    if value is None:
        content = json.dumps([question, *golds]).encode()
        return "q-" + hashlib.sha256(content).hexdigest()[:16]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}, field id: expected a text or a whole number, got {value!r:.40}")
    return str(value)


def _hops(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # a column with gaps comes as floats
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"{where}, field hops: expected a whole number, got {value!r:.40}")
    return value


def _titles(value: Any, metadata: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    if value is None:
        # HotpotQA and 2WikiMultihopQA, as FlashRAG has them, name sentences of pages instead.
        facts = metadata.get("supporting_facts")
        if isinstance(facts, Mapping):
            value = facts.get("title")
        elif facts is not None:
            value = [fact[0] for fact in _plain_list(facts) or [] if _plain_list(fact)]
        if value is None:
            return None
    titles = _plain_list(value)
    if titles is None or not all(isinstance(title, str) for title in titles):
        raise DataError(
            f"{where}, field supporting_titles: expected a list of texts, got {value!r:.40}"
        )
    return tuple(dict.fromkeys(titles))


def _flag(value: Any, where: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise DataError(
            f"{where}, field answer_in_corpus: expected true, false or null, got {value!r:.40}"
        )
    return value


def _plain_list(value: Any) -> list[Any] | None:
    if hasattr(value, "tolist"):  # columns of lists arrive as arrays
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


# --- writing -------------------------------------------------------------------------------------


def question_to_dict(question: Question) -> dict[str, Any]:
    """Return the row of FlashRAG's layout; reading it gives the question back."""
    metadata: dict[str, Any] = dict(question.metadata)
    for key in ("hops", "answer_in_corpus"):
        if getattr(question, key) is not None:
            metadata[key] = getattr(question, key)
    if question.supporting_titles is not None:
        metadata["supporting_titles"] = list(question.supporting_titles)
    row: dict[str, Any] = {
        "id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
    }
    if question.dataset is not None:
        row["dataset"] = question.dataset
    return {**row, "metadata": metadata} if metadata else row


def question_to_line(question: Question) -> str:
    """Return the JSON line of a question, without a line break."""
    row = question_to_dict(question)
    line = json.dumps(row, ensure_ascii=False, default=str)
    try:
        line.encode()
    except UnicodeEncodeError:  # metadata is free; escapes carry what text cannot
        line = json.dumps(row, default=str)
    return line


def write_questions(path: Path | str, questions: Iterable[Question]) -> int:
    """Write JSON lines of FlashRAG's layout; the file appears whole or not at all.

    Returns:
        How many questions it holds.
    """
    count = 0
    with atomic_write(Path(path)) as file:
        for question in questions:
            file.write(question_to_line(question) + "\n")
            count += 1
    return count


# --- splits --------------------------------------------------------------------------------------


def split(
    questions: Iterable[Question], parts: Mapping[str, float], *, seed: int = 0
) -> dict[str, list[Question]]:
    """Divide questions into named parts by a hash of their id.

    A question's part depends on its id, the parts and the seed alone: rows added, removed or moved
    never move another, and equal ids of two files land in the same part.

    Args:
        questions: the questions; their order is kept inside a part.
        parts: share of each part, all positive, adding up to 1. Their order matters.
        seed: another seed, another division.

    Returns:
        The parts in the order given. Sizes fluctuate as those of independent draws do.

    Raises:
        ConfigError: the shares are not positive or do not add up to 1.
    """
    shares = list(parts.values())
    if not shares or any(not share > 0 for share in shares) or not math.isclose(sum(shares), 1):
        raise ConfigError(
            f"the shares of a split must be positive and add up to 1, got {dict(parts)}"
        )
    limits = [sum(shares[: at + 1]) for at in range(len(shares))]
    limits[-1] = math.inf  # a sum of shares may end a rounding error below 1
    names = list(parts)
    out: dict[str, list[Question]] = {name: [] for name in names}
    for question in questions:
        digest = hashlib.sha256(f"{seed}:{question.id}".encode()).digest()
        position = int.from_bytes(digest[:8], "big") / 2**64
        out[names[next(at for at, limit in enumerate(limits) if position < limit)]].append(question)
    return out
