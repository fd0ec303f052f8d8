"""Images and audio of a run of packs: their positions in its sequences, and their encoded files.

In a run, an item belongs to its sequence, not to its pack, so sequences can be moved to other packs unchanged.
"""

from __future__ import annotations

import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.layout.media_layout import HASH_NBYTES, KIND_NAMES, Items, MediaItem, blob_hash

_MOST_IN_TABLE: Final = (1 << 32) - 2


class Blobs(Protocol):
    """Encoded files by number."""

    def __len__(self) -> int: ...

    def nbytes(self, number: int) -> int:
        """Return the size of a file without reading it."""
        ...

    def data(self, number: int) -> bytes | memoryview:
        """Return the bytes of a file, checked against ``hash``."""
        ...

    def hash(self, number: int) -> bytes:
        """Return the hash of a file (``blob_hash``), which identifies equal files."""
        ...


class BlobsInMemory(list[bytes | memoryview]):
    """Encoded files in memory, as they were given. Equal ones may occur more than once."""

    def nbytes(self, number: int) -> int:
        """Return the size of a file."""
        return len(self[number])

    def data(self, number: int) -> bytes | memoryview:
        """Return the bytes of a file."""
        return self[number]

    def hash(self, number: int) -> bytes:
        """Return the hash of a file."""
        return blob_hash(self[number])


class JoinedBlobs:
    """Encoded files of several sources, numbered consecutively."""

    def __init__(self, parts: Sequence[Blobs]) -> None:
        self._parts, self.begins = parts, [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.begins[-1]

    def _at(self, number: int) -> tuple[Blobs, int]:
        part = bisect_right(self.begins, number) - 1
        return self._parts[part], number - self.begins[part]

    def nbytes(self, number: int) -> int:
        """Return the size of a file."""
        blobs, own = self._at(number)
        return blobs.nbytes(own)

    def data(self, number: int) -> bytes | memoryview:
        """Return the bytes of a file, checked against ``hash``."""
        blobs, own = self._at(number)
        return blobs.data(own)

    def hash(self, number: int) -> bytes:
        """Return the hash of a file."""
        blobs, own = self._at(number)
        return blobs.hash(own)


class BlobTable:
    """Numbers of blobs by their hashes, from 0 in the order in which they are added.

    Memory is 24 to 32 bytes per blob.

    Example:
        >>> table = BlobTable()
        >>> table.number(bytes(16)), table.number(b"x" * 16), table.number(bytes(16)), len(table)
        (0, 1, 0, 2)
    """

    # Open addressing: a slot holds a number + 1, or 0. At most half of the slots are used.
    def __init__(self) -> None:
        self._slots, self._hashes = array("I", bytes(4 << 10)), bytearray()

    def __len__(self) -> int:
        return len(self._hashes) // HASH_NBYTES

    def hash(self, number: int) -> bytes:
        """Return the hash of the blob with this number."""
        return bytes(self._hashes[number * HASH_NBYTES : (number + 1) * HASH_NBYTES])

    def _slot(self, hashed: bytes) -> int:
        slots, hashes = self._slots, self._hashes
        slot = int.from_bytes(hashed[:8], "little") % len(slots)
        while (taken := slots[slot]) and hashes[(taken - 1) * HASH_NBYTES : taken * HASH_NBYTES] != hashed:
            slot = (slot + 1) % len(slots)
        return slot

    def number(self, hashed: bytes) -> int:
        """Return the number of the blob with this hash; add it if it is new. OverflowError: there are too many."""
        slot = self._slot(hashed)
        if not self._slots[slot]:
            if len(self) >= _MOST_IN_TABLE:
                raise OverflowError("more than 4 billion different images and recordings")
            self._hashes += hashed
            self._slots[slot] = len(self)
            if 2 * len(self) > len(self._slots):
                self._grow()
            return len(self) - 1
        return self._slots[slot] - 1

    def _grow(self) -> None:
        self._slots = array("I", bytes(8 * len(self._slots)))
        for number in range(len(self)):
            self._slots[self._slot(self.hash(number))] = number + 1


class CollectedBlobs:
    """Encoded files with one number per distinct file. Keeps only their hashes, for callers that need only items."""

    def __init__(self) -> None:
        self._table = BlobTable()

    def __len__(self) -> int:
        return len(self._table)

    def hash(self, number: int) -> bytes:
        """Return the hash of a file."""
        return self._table.hash(number)

    def add(self, hashed: bytes, data: bytes) -> int:
        """Return the number of the file with this hash; keep it if it is new."""
        known = len(self._table)
        if (number := self._table.number(hashed)) == known:
            self._keep(data)
        return number

    def _keep(self, data: bytes) -> None:
        """Keep the bytes of a new file; subclasses implement this."""


class KeptBlobs(CollectedBlobs):
    """Encoded files that are kept in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[bytes] = []

    def _keep(self, data: bytes) -> None:
        self._files.append(data)

    def nbytes(self, number: int) -> int:
        """Return the size of a file."""
        return len(self._files[number])

    def data(self, number: int) -> bytes:
        """Return the bytes of a file."""
        return self._files[number]


class SpilledBlobs(CollectedBlobs):
    """Encoded files in a temporary file, which has no name and is deleted when this object is closed.

    Args:
        folder: a folder on the file system for the file; None for the system's folder of temporary files.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self._file = tempfile.TemporaryFile(dir=folder, prefix="media-", suffix=".tmp")  # noqa: SIM115
        self._ends = array("Q", [0])

    def _keep(self, data: bytes) -> None:
        self._file.seek(self._ends[-1])
        self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """Return the size of each file in bytes, uint64 [files]."""
        return np.diff(np.array(self._ends, np.int64)).astype(np.uint64)

    def data(self, number: int) -> bytes:
        """Return the bytes of a file. OSError: the temporary file cannot be read."""
        begin, end = self._ends[number], self._ends[number + 1]
        self._file.seek(begin)
        data = self._file.read(end - begin)
        if len(data) < end - begin:
            raise OSError(f"a temporary file of images and audio ends {end - begin - len(data)} bytes too early")
        return data

    def close(self) -> None:
        """Free the disk space."""
        self._file.close()


@dataclass(frozen=True, eq=False)
class RunMedia:
    """Items of the sequences of a run.

    Attributes:
        counts: number of items of each sequence, int64 [sequences].
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
        """Return an object without items, for this many sequences."""
        empty = np.empty(0, np.uint32)
        items = Items(empty, empty, np.empty(0, np.uint8), empty)
        return cls(np.zeros(num_sequences, np.int64), items, BlobsInMemory())

    @classmethod
    def of_packs(
        cls,
        items: Items,
        packs: NDArray[np.int64],
        sequence_offsets: NDArray[np.int64],
        seq_starts: NDArray[np.int64],
        blobs: Blobs,
    ) -> RunMedia:
        """Return the items of several packs, by sequence.

        Args:
            items: the items in order; ``starts`` are counted from the first token of the pack.
            packs: number of each item's pack, ascending, int64 [items].
            sequence_offsets: CSR offsets of the sequences by pack, int64 [packs + 1]; the first is 0.
            seq_starts: start of each sequence in its pack, int64 [sequences].
            blobs: the files that the items show.
        """
        # Sequences and items as one ascending number each: the pack, then the position in it.
        counts = np.diff(sequence_offsets)
        keys = (np.repeat(np.arange(len(counts)), counts) << 32) + seq_starts
        sequences = np.searchsorted(keys, (packs << 32) + items.starts.astype(np.int64), "right") - 1
        # Below 0 only if the first pack does not begin with a sequence. Such packs are damaged, and rejected elsewhere.
        sequences = np.maximum(sequences, 0)
        by_sequence = np.bincount(sequences, minlength=len(seq_starts)).astype(np.int64)
        starts = (items.starts.astype(np.int64) - seq_starts[sequences]).astype(np.uint32)
        return cls(by_sequence, items._replace(starts=starts), blobs)

    def starts_in_packs(self, seq_starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first position of each item in its pack, int64 [items], given the starts of the sequences."""
        return np.repeat(seq_starts, self.counts) + self.items.starts.astype(np.int64)

    def file_sizes(self) -> NDArray[np.int64]:
        """Return the size of each item's file in bytes, int64 [items]."""
        sizes = {number: self.blobs.nbytes(number) for number in np.unique(self.items.blobs).tolist()}
        return np.array([sizes[number] for number in self.items.blobs.tolist()], np.int64)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """CSR offsets of the items by sequence: int64 [sequences + 1]."""
        return np.append(0, np.cumsum(self.counts))

    def subrun(self, sequences: slice) -> RunMedia:
        """Return the items of consecutive sequences, as views."""
        first, last = self.offsets[[sequences.start, sequences.stop]].tolist()
        return RunMedia(self.counts[sequences], Items(*(each[first:last] for each in self.items)), self.blobs)

    def in_pack(self, sequences: slice, seq_starts: NDArray[np.int64]) -> list[MediaItem]:
        """Return the items of one pack's sequences, in order, each with its encoded file.

        Args:
            sequences: the pack's sequences in the run.
            seq_starts: start of each of them in the pack, int64 [sequences].

        Raises:
            CorruptShardError: a file of a shard does not match its hash (M11).
        """
        own = self.subrun(sequences)
        starts = own.starts_in_packs(seq_starts)
        each = zip(starts.tolist(), *(values.tolist() for values in own.items[1:]), strict=True)
        return [MediaItem(KIND_NAMES[code], start, size, self.blobs.data(blob)) for start, size, code, blob in each]

    def taken(self, sequences: NDArray[np.int64]) -> RunMedia:
        """Return copies of the items of several sequences, in the given order."""
        counts = self.counts[sequences]
        ends = np.cumsum(counts)
        chosen = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.offsets[sequences] - ends + counts, counts)
        return RunMedia(counts, Items(*(each[chosen] for each in self.items)), self.blobs)

    def cut(self, begins: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> RunMedia:
        """Return the items inside a cut of each sequence, counted from the first token of the cut.

        Args:
            begins: start of the cut in each sequence, int64 [sequences].
            lengths: number of tokens of each cut, [sequences].
        """
        sequences, starts, ends = self._in_cuts(begins)
        kept = (starts >= 0) & (ends <= lengths[sequences])
        if kept.all() and not begins.any():
            return self
        items = Items(*(each[kept] for each in self.items))._replace(starts=starts[kept].astype(np.uint32))
        return RunMedia(np.bincount(sequences[kept], minlength=len(self.counts)), items, self.blobs)

    def are_parted(self, begins: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return whether each sequence has an item only partly inside its cut, bool [sequences].

        Arguments as in ``cut``.
        """
        sequences, starts, ends = self._in_cuts(begins)
        limits = lengths[sequences]
        parted = ((starts < 0) & (ends > 0)) | ((starts < limits) & (ends > limits))
        return np.bincount(sequences[parted], minlength=len(self.counts)) > 0

    def _in_cuts(self, begins: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return each item's sequence, its first position, and its end, both counted from the cut."""
        sequences = np.repeat(np.arange(len(self.counts)), self.counts)
        starts = self.items.starts.astype(np.int64) - begins[sequences]
        return sequences, starts, starts + self.items.lengths

    @classmethod
    def joined(cls, runs: Sequence[RunMedia]) -> RunMedia:
        """Copy the items of one or more runs into a new object."""
        distinct = {id(run.blobs): run.blobs for run in runs}
        blobs = runs[0].blobs if len(distinct) == 1 else JoinedBlobs([*distinct.values()])
        begins = dict(zip(distinct, blobs.begins, strict=False)) if isinstance(blobs, JoinedBlobs) else {}
        columns = [np.concatenate(each) for each in zip(*(run.items for run in runs), strict=True)]
        if len(distinct) > 1:
            shifts = [np.full(len(run.items.blobs), begins[id(run.blobs)], np.uint32) for run in runs]
            columns[3] += np.concatenate(shifts)
        return cls(np.concatenate([run.counts for run in runs]), Items(*columns), blobs)


class RunItems:
    """Finds the images and audio of a run's sequences by the positions of their tokens.

    Args:
        media: the images and audio of the run.
        begins: the position of the first token of each of its sequences, int64 [sequences], ascending.
    """

    def __init__(self, media: RunMedia, begins: NDArray[np.int64]) -> None:
        self._media, self._begins = media, begins

    def of_ranges(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], Items]:
        """Return the items of several sequences, which must be complete sequences of the run.

        Args:
            starts: position of the first token of each sequence, int64 [sequences].
            lengths: number of tokens of each sequence, int64 [sequences].

        Returns:
            The number of each item's sequence, int64 [items]; and the items, whose ``starts`` are counted from the
            first token of the sequence.
        """
        chosen = self._media.taken(np.searchsorted(self._begins, starts))
        return np.repeat(np.arange(len(starts)), chosen.counts), chosen.items

    def bytes_of_each(self, numbers: Sequence[int]) -> dict[int, bytes | memoryview]:
        """Return encoded files by number."""
        return {number: self._media.blobs.data(number) for number in numbers}

    def will_need(self, numbers: Sequence[int]) -> None:
        """Do nothing: the files are in memory."""
