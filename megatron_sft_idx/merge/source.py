"""A shard whose bytes are copied elsewhere: read in pieces, held to its checksums on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import DATA_SUFFIXES
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.reader import require_same
from megatron_sft_idx.storage import Array, PreadArray, require_local
from megatron_sft_idx.storage.hashing import StreamHash

__all__ = ["Content", "SourceShard", "Tick", "copied_nbytes", "nbytes_of"]

# Told of the bytes that were read, piece by piece.
Tick = Callable[[int], None]

# Read, hashed twice (for the source and for the copy) and written while it is in the processor's cache. Measured on
# ext4 and tmpfs from the page cache, this is as fast as copy_file_range without any hashing, and a quarter faster than
# copy_file_range beside reading for the checksums. Cloned extents, which would be faster still, need offsets that are
# multiples of the file system's block, and packs end anywhere. And so what was hashed is what was written.
_PIECE_NBYTES = 1 << 18
# Of the offset arrays: their chunks are some MiB.
_CHUNK_PACKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Content:
    """One file of a source behind its header, if it has one.

    Attributes:
        path: of the file.
        array: its items.
        itemsize: of an item, in bytes.
        checksum: xxh3_128 of all items, as the shard's header has it.
        tick: called with the bytes of every piece.
    """

    path: str
    array: Array
    itemsize: int
    checksum: bytes
    tick: Tick

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[NDArray[Any]]:
        """Items ``[start, stop)`` in pieces of some hundred KiB; all items are held to their checksum at the end.

        Raises:
            CorruptShardError: the checksum of all items is another (rule F3), or the file was cut short (F2).
        """
        stop = len(self.array) if stop is None else stop
        whole = (start, stop) == (0, len(self.array))
        stream = StreamHash()
        step = _PIECE_NBYTES // self.itemsize
        for first in range(start, stop, step):
            piece = self.array[first : min(first + step, stop)]
            if whole:
                stream.update(piece)
            yield piece
            self.tick(piece.nbytes)
        if whole and stream.checksum() != self.checksum:
            raise CorruptShardError(
                self.path,
                0,
                "F3",
                f"checksum of all bytes is {stream.hex()}, the header says {self.checksum.hex()};"
                " the file was changed or is of another shard: restore it. Nothing was written",
            )

    def verify(self) -> None:
        """Read all of it. CorruptShardError as in ``pieces``."""
        for _ in self.pieces():
            pass


def nbytes_of(header: Header) -> int:
    """Bytes of a shard's five files without the header."""
    return sum(digest.nbytes for digest in header.digests) + header.seq_idx_nbytes - header.nbytes


def copied_nbytes(header: Header, num_tokens: int, num_sequences: int) -> int:
    """Bytes of so many tokens, their masks, and the starts of so many sequences."""
    return num_tokens * (header.token_dtype.itemsize + header.mask_dtype.itemsize) + num_sequences * 4


class SourceShard:
    """An open source. What it holds open stays the same shard, also when another one is published over it.

    Args:
        prefix: of the shard.
        shard_id: it must have.
        tick: called with the bytes of every piece that is read.

    Raises:
        ShardNotFoundError, FormatError: as ``Shard``, or it is not the shard it was.
    """

    def __init__(self, prefix: str, shard_id: bytes, tick: Tick) -> None:
        # Maps would be as fast, but pages of a shard larger than memory would count as this process's.
        require_local(prefix, "merging or splitting")
        self.prefix = prefix
        self._shard = shard = Shard(prefix, backend="pread")
        require_same(prefix, shard.shard_id, shard_id)
        shard.check_ends()
        paths, self.header = ShardPaths.of(prefix), shard.header
        checksums = {path: digest.checksum for path, digest in zip(paths.data, self.header.digests, strict=True)}
        files, self._path = shard.files, paths.seq_idx

        def content(path: str, array: Array, itemsize: int) -> Content:
            return Content(path, array, itemsize, checksums[path], tick)

        self.tokens = content(paths.tokens, files.tokens, self.header.token_dtype.itemsize)
        self.loss = content(paths.loss, files.loss, self.header.mask_dtype.itemsize)
        self.starts = content(paths.starts, files.starts, 4)
        idx_nbytes = self.header.digests[DATA_SUFFIXES.index(".idx")].nbytes
        self.idx = content(paths.idx, PreadArray(paths.idx, np.dtype("u1"), idx_nbytes, 0), 1)
        behind = self.header.seq_idx_nbytes - self.header.nbytes
        arrays = PreadArray(paths.seq_idx, np.dtype("u1"), behind, self.header.nbytes)
        self.arrays = Content(paths.seq_idx, arrays, 1, self.header.arrays_checksum, tick)

    def verify_indexes(self) -> None:
        """Hold both indexes to their checksums. CorruptShardError as in ``Content.pieces``."""
        self.idx.verify()
        self.arrays.verify()

    def verify(self) -> None:
        """Read every byte behind the header. CorruptShardError where one breaks F2, F3, O1 or O2."""
        self.verify_indexes()
        for content in (self.tokens, self.loss, self.starts):
            content.verify()
        for _ in self.records(0, self.header.num_packs):
            pass

    def spans(self, first: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Which tokens and which sequences the packs ``[first, stop)`` are."""
        tokens, sequences = self._shard.files.token_offsets, self._shard.files.sequence_offsets
        return (_at(tokens, first), _at(tokens, stop)), (_at(sequences, first), _at(sequences, stop))

    def records(self, first: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """Tokens and sequences of each pack ``[first, stop)``: int64 [n, 2], some 64 thousand packs at a time.

        Raises:
            CorruptShardError: the offsets break O1 or O2.
        """
        for begin in range(first, stop, _CHUNK_PACKS):
            end = min(begin + _CHUNK_PACKS, stop)
            files = self._shard.files
            tokens = np.diff(files.token_offsets[begin : end + 1])
            sequences = np.diff(files.sequence_offsets[begin : end + 1])
            self._check(begin, tokens, "O2", "tokens", self.header.longest_pack)
            self._check(begin, sequences, "O1", "sequences", self.header.most_sequences)
            yield np.stack([tokens, sequences], axis=1)

    def _check(self, begin: int, counts: NDArray[np.int64], rule: str, what: str, most: int) -> None:
        """Every pack from ``begin`` on has 1 to ``most`` tokens or sequences."""
        bad = np.flatnonzero((counts < 1) | (counts > most))
        if len(bad):
            i = begin + int(bad[0])
            base = self.header.nbytes if rule == "O1" else self.header.token_offsets_offset
            raise CorruptShardError(
                self._path,
                base + 8 * i,
                rule,
                f"pack {i} has {counts[bad[0]]} {what} by the offsets, expected 1 to {most} by the header;"
                f" {ShardPaths.of(self._path).index_remedy}",
            )


def _at(offsets: Array, i: int) -> int:
    return int(offsets[i : i + 1][0])
