"""Packs copied from shard to shard as ranges of bytes, in chunks of some hundred KiB, held to checksums on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec, Per
from megatron_sft_idx.layout.files import DATA_SUFFIXES, SEQ_IDX, check_column_name
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.columns import UnmappedRows, open_column
from megatron_sft_idx.shard.journal import PACK, BuildOptions, encode_block
from megatron_sft_idx.shard.opening import require_same
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.shard.writer import FORMAT_WRITER, GrowingFiles
from megatron_sft_idx.storage import Array, PreadArray, require_local
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.progress import Advance

# A chunk is read, hashed twice (for the source and for the copy) and written while it is in the processor's cache.
# Measured on ext4 and tmpfs from the page cache, this is as fast as copy_file_range without any hashing, and a quarter
# faster than copy_file_range beside reading for the checksums. Cloned extents, which would be faster still, need
# offsets that are multiples of the file system's block, and packs end anywhere.
_CHUNK_NBYTES = 1 << 18
# Packs whose offsets are read at once: some MiB of them.
_CHUNK_PACKS = 1 << 15


@dataclass(frozen=True, slots=True)
class CheckedArray:
    """What lies in one file of a source behind its header: an array that is held to its checksum as it is read.

    Attributes:
        path: of the file.
        array: its items, or the rows of a column.
        itemsize: bytes of an item or row.
        checksum: of all items or rows.
        advance: called with the bytes of each chunk that is read.
        rule: the rule of FORMAT.md that is broken where the checksum is another.
    """

    path: str
    array: Array | UnmappedRows
    itemsize: int
    checksum: bytes
    advance: Advance
    rule: str = "F3"

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[NDArray[Any]]:
        """Items ``[start, stop)`` in chunks. Of all items the checksum is compared, behind the last chunk.

        Raises:
            CorruptShardError: the checksum is another (rule F3, of a column C7), or the file was cut short (F2).
        """
        stop = len(self.array) if stop is None else stop
        whole = (start, stop) == (0, len(self.array))
        stream = StreamHash()
        step = max(1, _CHUNK_NBYTES // self.itemsize)
        for first in range(start, stop, step):
            chunk = self.array[first : min(first + step, stop)]
            if whole:
                stream.update(chunk.reshape(-1))
            yield chunk
            self.advance(chunk.nbytes)
        if whole and stream.checksum() != self.checksum:
            raise CorruptShardError(
                self.path,
                0,
                self.rule,
                f"checksum of all bytes is {stream.hex()}, the header says {self.checksum.hex()};"
                " the file was changed or is of another shard: restore it. Nothing was published",
            )

    def verify(self) -> None:
        """Read all of it. CorruptShardError as in ``chunks``."""
        for _ in self.chunks():
            pass


def nbytes_of(header: Header) -> int:
    """Bytes of a shard's five files, without the header of ``.seq.idx``."""
    return sum(digest.nbytes for digest in header.digests) + header.seq_idx_nbytes - header.nbytes


def copied_nbytes(header: Header, columns: Iterable[ColumnSpec], *, token: int, sequence: int, pack: int) -> int:
    """Bytes that so many tokens, sequences and packs take: ids, masks, starts, and the rows of columns."""
    rows: dict[Per, int] = {"token": token, "sequence": sequence, "pack": pack}
    beside = sum(rows[spec.per] * spec.row_nbytes for spec in columns)
    return token * (header.token_dtype.itemsize + header.mask_dtype.itemsize) + sequence * 4 + beside


class SourceColumn(NamedTuple):
    """A column of an open source: what it is, and its rows."""

    spec: ColumnSpec
    rows: CheckedArray


# Functions that change the rows of a column as they are copied, by the column's name.
Renumber = Mapping[str, Callable[[NDArray[Any]], NDArray[Any]]]


class SourceShard:
    """A local shard that packs are copied from, with some of its columns.

    Its files stay open: it is the same shard still when another one is published over it. ``advance`` is called with
    the bytes of each chunk that is read. Errors as of ``Shard``; FormatError where its id is not ``shard_id``.
    """

    def __init__(self, prefix: str, shard_id: bytes, advance: Advance, columns: Iterable[str] = ()) -> None:
        # Maps would be as fast, but the pages that are read would count as this process's memory.
        require_local(prefix, "merging or splitting")
        self.prefix = prefix
        self._shard = shard = Shard(prefix, backend="pread")
        require_same(prefix, shard.shard_id, shard_id)
        shard.check_ends()
        paths, self.header = ShardPaths.of(prefix), shard.header
        checksums = {path: digest.checksum for path, digest in zip(paths.data, self.header.digests, strict=True)}
        files, self._path = shard.files, paths.seq_idx

        def content(path: str, array: Array, itemsize: int) -> CheckedArray:
            return CheckedArray(path, array, itemsize, checksums[path], advance)

        self.tokens = content(paths.tokens, files.tokens, self.header.token_dtype.itemsize)
        self.loss = content(paths.loss, files.loss, self.header.mask_dtype.itemsize)
        self.starts = content(paths.starts, files.starts, 4)
        idx_nbytes = self.header.digests[DATA_SUFFIXES.index(".idx")].nbytes
        self.idx = content(paths.idx, PreadArray(paths.idx, np.dtype("u1"), idx_nbytes, 0), 1)
        behind = self.header.seq_idx_nbytes - self.header.nbytes
        arrays = PreadArray(paths.seq_idx, np.dtype("u1"), behind, self.header.nbytes)
        self.arrays = CheckedArray(paths.seq_idx, arrays, 1, self.header.arrays_checksum, advance)
        self.columns: dict[str, SourceColumn] = {}
        for name in columns:
            column, path = open_column(paths, name, self.header, "pread"), paths.column(name)
            nbytes, checksum = column.spec.row_nbytes, column.header.checksum
            rows = CheckedArray(path, column.values, nbytes, checksum, advance, "C7")
            self.columns[name] = SourceColumn(column.spec, rows)

    def verify_indexes(self) -> None:
        """Hold both indexes to their checksums. CorruptShardError as in ``CheckedArray.chunks``."""
        self.idx.verify()
        self.arrays.verify()

    def verify(self) -> None:
        """Read every byte behind the headers. CorruptShardError where one breaks F2, F3, C7, O1 or O2."""
        self.verify_indexes()
        for content in (self.tokens, self.loss, self.starts, *(column.rows for column in self.columns.values())):
            content.verify()
        for _ in self.records(0, self.header.num_packs):
            pass

    def spans(self, first: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The tokens, then the sequences, of packs ``[first, stop)``: the first, and the one behind the last."""
        tokens, sequences = self._shard.files.token_offsets, self._shard.files.sequence_offsets
        return (_at(tokens, first), _at(tokens, stop)), (_at(sequences, first), _at(sequences, stop))

    def copied_nbytes(self, first: int, stop: int) -> int:
        """Bytes of the tokens, masks, starts and columns of the packs ``[first, stop)``."""
        (token, last_token), (sequence, last_sequence) = self.spans(first, stop)
        specs = [column.spec for column in self.columns.values()]
        rows = {"token": last_token - token, "sequence": last_sequence - sequence, "pack": stop - first}
        return copied_nbytes(self.header, specs, **rows)

    def records(self, first: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """How many tokens and sequences each of the packs ``[first, stop)`` has: chunks, int64 [packs, 2].

        Raises:
            CorruptShardError: the offsets break O1 or O2.
        """
        for begin in range(first, stop, _CHUNK_PACKS):
            end = min(begin + _CHUNK_PACKS, stop)
            files = self._shard.files
            tokens = np.diff(files.token_offsets[begin : end + 1])
            sequences = np.diff(files.sequence_offsets[begin : end + 1])
            for rule, what, base, counts, max_count in (
                ("O2", "tokens", self.header.token_offsets_offset, tokens, self.header.longest_pack),
                ("O1", "sequences", self.header.nbytes, sequences, self.header.most_sequences),
            ):
                for bad in np.flatnonzero((counts < 1) | (counts > max_count))[:1].tolist():
                    raise CorruptShardError(
                        self._path,
                        base + 8 * (begin + bad),
                        rule,
                        f"pack {begin + bad} has {counts[bad]} {what} by the offsets, expected 1 to {max_count} by the"
                        f" header; {ShardPaths.of(self._path).index_remedy}",
                    )
            yield np.stack([tokens, sequences], axis=1)


def _at(offsets: Array, i: int) -> int:
    return int(offsets[i : i + 1][0])


class CopyWriter:
    """Writes a shard out of packs of other shards, by ranges of bytes; publishes and journals as ``ShardWriter`` does.

    Rules of packs are not checked: a source that has its checksums holds what its writer checked. Only the offsets of
    packs are, from which the new shard's indexes are computed. A context manager: leaving it without ``finalize``
    publishes nothing and removes what was written.

    Args:
        prefix: the path the five files will share.
        like: a header with the dtypes, capacity, multiple, pad id, metadata and flags of the new shard.
        columns: the columns of the new shard, by name. Each source must have them.
        overwrite: replace what is at the prefix.
        durable: False skips fsync.
        nbytes: how many bytes will be written; so much room must be free. 0 where the caller has checked that.
        drops: kinds of interrupted work (``build``, ``copy``, ``rebuild``) at the prefix that may be dropped without
            ``overwrite``.
    """

    def __init__(
        self,
        prefix: str,
        like: Header,
        columns: Mapping[str, ColumnSpec],
        *,
        overwrite: bool,
        durable: bool,
        nbytes: int = 0,
        drops: Collection[str] = (),
    ) -> None:
        self._paths = ShardPaths.of(prefix).with_columns(map(check_column_name, columns))
        self._like = dataclasses.replace(like, metadata={**like.metadata, "format_writer": FORMAT_WRITER})
        SEQ_IDX.nbytes(self._like.metadata)
        # What a ShardWriter of such a shard would have been begun with; an empty shard may have no capacity.
        options = BuildOptions(
            like.token_dtype,
            like.mask_dtype,
            like.capacity or None,
            like.sequence_multiple,
            like.pad_id,
            dict(like.metadata),
            dict(columns),
        )
        self._columns = columns
        self._totals = np.zeros(2, np.int64)  # tokens, sequences
        self._largest = np.zeros(2, np.int64)  # in one pack
        self._trained = np.zeros(2, np.int64)  # tokens that are trained on, packs without one
        self._num_packs = 0
        self._publication = Publication(
            self._paths, options.encode(), overwrite=overwrite, durable=durable, nbytes=nbytes, drops=drops
        )
        try:
            self._files = GrowingFiles(self._publication, options)
        except BaseException:
            self._publication.abandon()
            raise

    def __enter__(self) -> CopyWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publication.abandon()

    def append(self, source: SourceShard, first: int, stop: int, renumber: Renumber | None = None) -> None:
        """Append the packs ``[first, stop)`` of a source; ``renumber`` has functions that change rows of columns.

        The packs are entered into the journal behind their data, so that nothing of a corrupt source is recovered from
        a killed merge. A checksum is of a whole file: the caller must call ``source.verify`` before it appends some of
        a source's packs, and ``source.verify_indexes`` before it appends all of them.

        Raises:
            CorruptShardError: all packs are appended, and the source breaks F2, F3 or C7.
        """
        token_span, sequence_span = source.spans(first, stop)
        spans: dict[Per, tuple[int, int]] = {"token": token_span, "sequence": sequence_span, "pack": (first, stop)}
        for chunk in source.tokens.chunks(*token_span):
            self._files.write(self._paths.tokens, chunk)
        if (first, stop) == (0, source.header.num_packs):
            for chunk in source.loss.chunks():
                self._files.write(self._paths.loss, chunk)
            self._trained += source.header.num_trained_tokens, source.header.num_masked_packs
        else:
            self._append_masks(source, first, stop)
        for chunk in source.starts.chunks(*sequence_span):
            self._files.write(self._paths.starts, chunk)
        for name, spec in self._columns.items():
            column, change = source.columns[name], (renumber or {}).get(name)
            if column.spec.kind != spec.kind:
                raise FormatError(f"{column.rows.path}: another column was attached here meanwhile; start again")
            for chunk in column.rows.chunks(*spans[spec.per]):
                self._files.write(self._paths.column(name), chunk if change is None else change(chunk))
        for records in source.records(first, stop):
            self._num_packs += len(records)
            self._totals += records.sum(axis=0)
            self._largest = np.maximum(self._largest, records.max(axis=0))
            self._publication.journal.write(encode_block(PACK, records.astype(np.uint32)))

    def _append_masks(self, source: SourceShard, first: int, stop: int) -> None:
        """Append the masks of packs ``[first, stop)``; count trained tokens, and packs without any."""
        (position, _), _ = source.spans(first, stop)
        for records in source.records(first, stop):
            ends, trained = position + np.cumsum(records[:, 0]), np.zeros(len(records), np.bool_)
            for chunk in source.loss.chunks(position, int(ends[-1])):
                self._files.write(self._paths.loss, chunk)
                # The packs that the chunk has tokens of; the first may have begun before it, the last end behind it.
                low, high = np.searchsorted(ends, [position, position + len(chunk) - 1], side="right")
                begins = np.append(position, ends[low:high]) - position
                trained[low : high + 1] |= np.maximum.reduceat(chunk, begins) > 0
                self._trained[0] += np.count_nonzero(chunk)
                position += len(chunk)
            self._trained[1] += np.count_nonzero(~trained)
            del records, ends, trained  # before the next are read

    def finalize(self, *, publish: bool = True) -> Header:
        """Write the indexes and publish, or set the shard aside for ``publish_all``; returns the header."""
        (num_tokens, num_sequences), (longest, most_sequences) = self._totals.tolist(), self._largest.tolist()
        num_trained_tokens, num_masked_packs = self._trained.tolist()
        header = dataclasses.replace(
            self._like,
            num_packs=self._num_packs,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            num_trained_tokens=num_trained_tokens,
            num_masked_packs=num_masked_packs,
            longest_pack=longest,
            most_sequences=most_sequences,
        )
        header = self._files.finish(header)
        if publish:
            self._publication.publish()
        else:
            self._publication.set_aside()
        return header
