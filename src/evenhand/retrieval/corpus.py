"""A corpus of passages packed into one block of bytes: small in memory, lazily read from disk.

A folder holds `corpus.bin` (UTF-8 of id, title, text of every passage, one after the other),
`corpus_offsets.npy` (`[3n + 1]` int64, where each of them starts) and `corpus_rank.npy` (`[n]`
int64, the place of each passage in the order of ids as strings). The block is memory-mapped.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from evenhand.core.arrays import IntArray
from evenhand.core.errors import DataError
from evenhand.retrieval.base import PADDING_ID
from evenhand.trajectory.protocol import Document

BLOCK, OFFSETS, RANK = "corpus.bin", "corpus_offsets.npy", "corpus_rank.npy"

_LENGTHS = struct.Struct("<3Q")


def corpus_hash(documents: Iterable[Document]) -> str:
    """Return the sha256 (hexadecimal) over ids, titles and texts, in order.

    Each passage adds the byte lengths of its three fields (three unsigned 64-bit numbers, little
    endian) and the fields in UTF-8, so no two corpora share a hash by moving text across a border.
    Scores do not count.

    Raises:
        DataError: a field holds a lone surrogate.
    """
    digest = hashlib.sha256()
    for document in documents:
        fields = _encoded(document)
        digest.update(_LENGTHS.pack(*map(len, fields)))
        digest.update(b"".join(fields))
    return digest.hexdigest()


def _encoded(document: Document) -> tuple[bytes, bytes, bytes]:
    try:
        return document.id.encode(), document.title.encode(), document.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"passage {document.id!r} holds a lone surrogate, which is no text; clean the corpus"
        ) from error


class PackedCorpus(Sequence[Document]):
    """An ordered, immutable sequence of passages in one block of bytes.

    Attributes:
        rank: `[n]` int64, the place of each passage in the order of ids (as strings).
        hash: `corpus_hash` of the passages.
    """

    def __init__(
        self, block: bytearray | mmap.mmap, offsets: IntArray, rank: IntArray, corpus_hash: str
    ) -> None:
        self._block = block
        self._offsets = offsets
        self.rank = rank
        self.hash = corpus_hash

    @classmethod
    def pack(cls, documents: Iterable[Document]) -> PackedCorpus:
        """Pack passages, reading `documents` once.

        Raises:
            DataError: no passage, a blank or repeated id, the id `-1`, or a lone surrogate.
        """
        block, offsets, ids = bytearray(), array("q", [0]), []
        digest = hashlib.sha256()
        for document in documents:
            fields = _encoded(document)
            digest.update(_LENGTHS.pack(*map(len, fields)))
            joined = b"".join(fields)
            digest.update(joined)
            start = len(block)
            block += joined
            offsets.extend((start + len(fields[0]), start + len(joined) - len(fields[2])))
            offsets.append(len(block))
            ids.append(document.id)
        _check_ids(ids)
        rank = np.empty(len(ids), dtype=np.int64)
        rank[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
        return cls(block, np.frombuffer(offsets, dtype=np.int64).copy(), rank, digest.hexdigest())

    @classmethod
    def open(cls, folder: Path, corpus_hash: str) -> PackedCorpus:
        """Map the files that `save` wrote; texts are read when they are asked for.

        Raises:
            DataError: a file is missing, damaged, or does not fit the others.
        """
        try:
            offsets = load_array(folder / OFFSETS, "i8")
            rank = load_array(folder / RANK, "i8")
            with (folder / BLOCK).open("rb") as file:
                block = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise damaged(folder, f"the passages cannot be read ({error})") from error
        fits = (
            len(rank) > 0
            and len(offsets) == 3 * len(rank) + 1
            and offsets[0] == 0
            and offsets[-1] == len(block)
            and bool((np.diff(offsets) >= 0).all())
            and bool((np.bincount(np.clip(rank, 0, len(rank)), minlength=len(rank)) == 1).all())
        )
        if not fits:
            raise damaged(folder, "offsets, ranks and texts of the passages do not fit together")
        return cls(block, offsets, rank, corpus_hash)

    def save(self, folder: Path) -> None:
        """Write the three files into an existing folder."""
        (folder / BLOCK).write_bytes(self._block)
        np.save(folder / OFFSETS, self._offsets, allow_pickle=False)
        np.save(folder / RANK, self.rank, allow_pickle=False)

    def __len__(self) -> int:
        return len(self.rank)

    @overload
    def __getitem__(self, at: int) -> Document: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Document]: ...
    def __getitem__(self, at: int | slice) -> Document | Sequence[Document]:
        if isinstance(at, slice):
            return [self.document(i) for i in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(f"passage {at} of {len(self)}")
        return self.document(at % len(self))

    def __iter__(self) -> Iterator[Document]:
        return map(self.document, range(len(self)))

    def document(self, at: int, score: float | None = None) -> Document:
        """Return passage `at` (counted from 0) with a score.

        Raises:
            DataError: its bytes are not UTF-8 (a damaged file).
        """
        start, title, text, end = self._offsets[3 * at : 3 * at + 4].tolist()
        block = self._block
        try:
            return Document(
                block[start:title].decode(),
                block[title:text].decode(),
                block[text:end].decode(),
                score,
            )
        except UnicodeDecodeError as error:
            raise DataError(
                f"passage number {at} of the index is not UTF-8; it is damaged: build it again"
            ) from error


def _check_ids(ids: list[str]) -> None:
    if not ids:
        raise DataError("the corpus has no passages; give a file with at least one")
    seen: set[str] = set()
    for at, name in enumerate(ids, start=1):
        if not name.strip() or name == PADDING_ID:
            raise DataError(
                f"passage {at} of the corpus has the id {name!r}; an id must not be blank or "
                f"{PADDING_ID} (padding in search libraries)"
            )
        if name in seen:
            raise DataError(f"passage {at} of the corpus repeats the id {name!r}; ids must differ")
        seen.add(name)


def load_array(path: Path, dtype: str, *, memory_map: bool = True) -> Any:
    """Read (or memory-map) a one-dimensional `.npy` file and check its type; read-only.

    Raises:
        ValueError: another type or shape, or not such a file.
        OSError: the file cannot be read.
    """
    values = np.load(path, mmap_mode="r" if memory_map else None, allow_pickle=False)
    if values.dtype != np.dtype(dtype) or values.ndim != 1:
        raise ValueError(f"{path.name} holds {values.dtype} of shape {values.shape}")
    # A plain view: numpy's memmap class makes every small slice several times slower.
    plain = np.asarray(values)
    plain.flags.writeable = False
    return plain


def damaged(folder: Path, what: str) -> DataError:
    """Return the error for an index folder that cannot be used."""
    return DataError(f"{folder}: {what}; the index is damaged or incomplete: build it again")
