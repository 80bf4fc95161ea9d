"""What an episode asks of the loop around it, and what it is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenhand.core.errors import DataError, RetrievalError
from evenhand.trajectory import Trajectory, golden_answers
from evenhand.trajectory.protocol import STOP_TAGS, Document, usable_document

IntArray = NDArray[np.int64]


class SearchOutcome(Protocol):
    """What a search gave, in whatever type a retriever returns (`retrieval.base.SearchResult`)."""

    @property
    def documents(self) -> Sequence[Document]:
        """The documents, best first; possibly none."""
        ...

    @property
    def error(self) -> str | None:
        """Why the search failed after its retries; `None` if it did not."""
        ...


@dataclass(frozen=True, slots=True)
class FailedSearch:
    """The outcome of a search that raised; a loop feeds it so that the rollout is kept.

    Attributes:
        error: why the search failed.
        documents: none.
    """

    error: str
    documents: tuple[Document, ...] = ()


@dataclass(frozen=True, slots=True)
class Generate:
    """The episode waits for a turn of the policy, after `Episode.context_ids`.

    Attributes:
        max_tokens: how many tokens the turn may have.
        stop_tags: texts at which generation stops, kept in the output.
    """

    max_tokens: int
    stop_tags: tuple[str, ...] = STOP_TAGS


@dataclass(frozen=True, slots=True)
class Search:
    """The episode waits for the documents of a query (never empty)."""

    query: str


@dataclass(frozen=True, slots=True)
class Done:
    """The episode has ended.

    Attributes:
        trajectory: the record, not yet scored: its reward is `None`, and stays so if the stop
            reason is `failed`.
    """

    trajectory: Trajectory


Request = Generate | Search | Done
"""What an episode waits for."""


class Labels(TypedDict, total=False):
    """Fields of the trajectory that only the caller knows."""

    id: str
    group: str
    golden_answers: Sequence[str] | str | None
    step: int | None
    question_id: str | None
    dataset: str | None
    hops: int | None
    supporting_titles: Sequence[str] | None
    metadata: Mapping[str, Any]


def checked_token_ids(values: ArrayLike, name: str) -> IntArray:
    """Return `[n]` int64 ids or raise a `DataError`."""
    array = np.asarray(values)
    if array.size == 0:
        array = np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any():
        raise DataError(
            f"{name} must be a list of token ids (whole numbers, not negative), got "
            f"{str(values)!r:.60}"
        )
    return array.astype(np.int64)


def checked_documents(documents: Iterable[Document]) -> tuple[Document, ...]:
    """Return documents as `protocol.usable_document` makes them.

    Raises:
        DataError: something other than documents; programs, not passages, cause this.
        RetrievalError: a field cannot be used: an id, title or text that is no text, an empty
            id, or a score that is no finite number.
    """
    return tuple([_checked_document(document, at) for at, document in enumerate(documents)])


def _checked_document(document: Document, at: int) -> Document:
    if not isinstance(document, Document):
        raise DataError("a search must return evenhand.trajectory.protocol.Document objects, got "
                        f"{document!r:.60}")  # fmt: skip
    try:
        return usable_document(document)
    except ValueError as error:
        raise RetrievalError(
            f"the search returned a document (number {at + 1}) whose {error}"
        ) from error


def checked_labels(labels: Labels) -> dict[str, Any]:
    """Return labels as fields of a trajectory; an unknown or ill-formed one is a `DataError`."""
    fields: dict[str, Any] = dict(labels)
    unknown = sorted(fields.keys() - Labels.__annotations__.keys())
    if unknown:
        raise DataError(f"unknown label {unknown[0]!r}; labels are: "
                        f"{', '.join(Labels.__annotations__)}")  # fmt: skip
    if fields.get("golden_answers") is not None:
        fields["golden_answers"] = golden_answers(fields["golden_answers"])
    if fields.get("supporting_titles") is not None:
        fields["supporting_titles"] = tuple(fields["supporting_titles"])
    return fields
