"""Images and audio of a run of packs: where they stand in its sequences, and the encoded files that they show.

Inside a run, an item is found by its sequence, not by its pack: so sequences can be put into other packs as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.layout.media import KINDS, Items, Kind, blob_hash


@dataclass(frozen=True)
class MediaItem:
    """One image or recording at one place of a pack.

    Attributes:
        kind: ``image`` or ``audio``.
        start: its first position in the pack.
        length: how many positions its placeholder tokens take.
        data: the encoded file (JPEG, PNG, WAV, ...), byte for byte as it was given.
    """

    kind: Kind
    start: int
    length: int
    data: bytes | memoryview

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data": bytes(self.data)}  # a view cannot be pickled


class Blobs(Protocol):
    """Encoded files by number."""

    def __len__(self) -> int: ...

    def nbytes(self, number: int) -> int:
        """The size of one, which is not read for it."""
        ...

    def data(self, number: int) -> bytes | memoryview:
        """The bytes of one, checked against ``hash``."""
        ...

    def hash(self, number: int) -> bytes:
        """The hash of one (``blob_hash``), by which equal ones are found."""
        ...


class BlobsInMemory(list[bytes | memoryview]):
    """Encoded files that are in memory."""

    def nbytes(self, number: int) -> int:
        """The size of one."""
        return len(self[number])

    def data(self, number: int) -> bytes | memoryview:
        """The bytes of one."""
        return self[number]

    def hash(self, number: int) -> bytes:
        """The hash of one."""
        return blob_hash(self[number])


class JoinedBlobs:
    """Encoded files of several sources, numbered through."""

    def __init__(self, parts: Sequence[Blobs]) -> None:
        self._parts, self.begins = parts, [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.begins[-1]

    def _at(self, number: int) -> tuple[Blobs, int]:
        part = int(np.searchsorted(self.begins, number, "right")) - 1
        return self._parts[part], number - self.begins[part]

    def nbytes(self, number: int) -> int:
        """The size of one."""
        blobs, own = self._at(number)
        return blobs.nbytes(own)

    def data(self, number: int) -> bytes | memoryview:
        """The bytes of one, checked against ``hash``."""
        blobs, own = self._at(number)
        return blobs.data(own)

    def hash(self, number: int) -> bytes:
        """The hash of one."""
        blobs, own = self._at(number)
        return blobs.hash(own)


class BlobsByHash:
    """Encoded files that are in memory, each once."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.datas: list[bytes] = []

    def __len__(self) -> int:
        return len(self.datas)

    @property
    def hashes(self) -> list[bytes]:
        """Their hashes, in order."""
        return [*self._numbers]

    def number(self, data: bytes) -> int:
        """The number of a file, which is added if it is new."""
        number = self._numbers.setdefault(blob_hash(data), len(self.datas))
        if number == len(self.datas):
            self.datas.append(data)
        return number


@dataclass(frozen=True, eq=False)
class RunMedia:
    """Items of the sequences of a run.

    Attributes:
        counts: how many items each sequence has, int64 [sequences].
        items: the items, in order; ``starts`` are counted from the first token of the sequence.
        blobs: the files that they show.
    """

    counts: NDArray[np.int64]
    items: Items
    blobs: Blobs

    def __len__(self) -> int:
        return len(self.items.starts)

    @classmethod
    def none(cls, num_sequences: int) -> RunMedia:
        """No items, of so many sequences."""
        empty = np.empty(0, np.uint32)
        items = Items(empty, empty, np.empty(0, np.uint8), empty)
        return cls(np.zeros(num_sequences, np.int64), items, BlobsInMemory())

    def file_sizes(self) -> NDArray[np.int64]:
        """Bytes of the file of each item, int64 [items]."""
        sizes = {number: self.blobs.nbytes(number) for number in np.unique(self.items.blobs).tolist()}
        return np.array([sizes[number] for number in self.items.blobs.tolist()], np.int64)

    def placed(self, sequences: slice, seq_starts: NDArray[Any]) -> list[MediaItem]:
        """The items of consecutive sequences, the sequences of one pack.

        Args:
            sequences: which of them.
            seq_starts: where each of these begins in the pack.
        """
        names = {code: kind for kind, code in KINDS.items()}
        first, last = self.offsets[[sequences.start, sequences.stop]].tolist()
        begins = np.repeat(seq_starts, self.counts[sequences]).astype(np.int64)
        starts, lengths, kinds, blobs = (values[first:last].astype(np.int64) for values in self.items)
        rows = np.stack([begins + starts, lengths, kinds, blobs], 1).tolist()
        return [MediaItem(names[kind], start, length, self.blobs.data(blob)) for start, length, kind, blob in rows]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """CSR offsets of the items by sequence: int64 [sequences + 1]."""
        return np.append(0, np.cumsum(self.counts))

    def subrun(self, sequences: slice) -> RunMedia:
        """The items of consecutive sequences, as views."""
        first, last = self.offsets[[sequences.start, sequences.stop]].tolist()
        return RunMedia(self.counts[sequences], Items(*(each[first:last] for each in self.items)), self.blobs)

    def taken(self, sequences: NDArray[np.int64]) -> RunMedia:
        """Copies of the items of some sequences, in the order that is given."""
        counts = self.counts[sequences]
        ends = np.cumsum(counts)
        chosen = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.offsets[sequences] - ends + counts, counts)
        return RunMedia(counts, Items(*(each[chosen] for each in self.items)), self.blobs)

    def cut(self, begins: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> RunMedia:
        """The items inside a cut of each sequence, counted from its first token.

        Args:
            begins: where in each sequence its cut begins, int64 [sequences].
            lengths: tokens of each cut, [sequences].
        """
        sequences, starts, ends = self._in_cuts(begins)
        kept = (starts >= 0) & (ends <= lengths[sequences])
        if kept.all() and not begins.any():
            return self
        items = Items(*(each[kept] for each in self.items))._replace(starts=starts[kept].astype(np.uint32))
        return RunMedia(np.bincount(sequences[kept], minlength=len(self.counts)), items, self.blobs)

    def are_parted(self, begins: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Whether an item of each sequence lies only in part in its cut, bool [sequences]; arguments as of ``cut``."""
        sequences, starts, ends = self._in_cuts(begins)
        limits = lengths[sequences]
        parted = ((starts < 0) & (ends > 0)) | ((starts < limits) & (ends > limits))
        return np.bincount(sequences[parted], minlength=len(self.counts)) > 0

    def _in_cuts(self, begins: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of each item its sequence, and its first position and the one behind its last, counted from the cut."""
        sequences = np.repeat(np.arange(len(self.counts)), self.counts)
        starts = self.items.starts.astype(np.int64) - begins[sequences]
        return sequences, starts, starts + self.items.lengths

    @classmethod
    def joined(cls, runs: Sequence[RunMedia]) -> RunMedia:
        """Copy the items of one or more runs into one."""
        distinct = {id(run.blobs): run.blobs for run in runs}
        blobs = runs[0].blobs if len(distinct) == 1 else JoinedBlobs([*distinct.values()])
        begins = dict(zip(distinct, blobs.begins, strict=False)) if isinstance(blobs, JoinedBlobs) else {}
        columns = [np.concatenate(each) for each in zip(*(run.items for run in runs), strict=True)]
        if len(distinct) > 1:
            shifts = [np.full(len(run.items.blobs), begins[id(run.blobs)], np.uint32) for run in runs]
            columns[3] += np.concatenate(shifts)
        return cls(np.concatenate([run.counts for run in runs]), Items(*columns), blobs)
