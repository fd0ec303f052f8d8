"""One build: data files and columns that grow, the counts and hashes of what is in them, the indexes written last."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.layout import FileDigest, Header, token_dtype_of
from megatron_sft_idx.layout.files import pack_idx_header
from megatron_sft_idx.layout.header import MAX_CAPACITY
from megatron_sft_idx.layout.journal import (
    MAX_RECORDS,
    PACK,
    BuildOptions,
    encode_block,
    pack_records,
    read_head,
)
from megatron_sft_idx.shard.columns import ColumnFiles
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.storage import OutputFile, open_regular
from megatron_sft_idx.storage.hashing import HashedFile
from megatron_sft_idx.storage.progress import Advance

__all__ = [
    "CHUNK_PACKS",
    "FORMAT_WRITER",
    "STAGE_TOKENS",
    "Build",
    "JournalPacks",
    "PackChunk",
    "write_idx",
    "write_seq_idx",
]


# Stored in the JSON block: raised whenever the same input would give other bytes.
FORMAT_WRITER = 1
# Small enough to stay in the processor's cache between the check, the write and the checksum.
STAGE_TOKENS = 1 << 16


class Build:
    """The data files of one shard in the making.

    Args:
        publication: the lock on the prefix, and the files' names.
        options: what the build is begun with.
        mask_dtype: of the loss file that an interrupted build left: it is taken up, and ``replay`` comes first.
        journal_nbytes: where the journal of that build ends.

    Attributes:
        stage: checks and counts packs, and holds them until they are written.
        columns: what is beside them.
    """

    def __init__(
        self,
        publication: Publication,
        options: BuildOptions,
        journal_nbytes: int | None = None,
    ) -> None:
        self.options = options
        self.stage = _native.PackStage(
            options.token_dtype,
            options.mask_dtype,
            options.capacity or MAX_CAPACITY,
            options.sequence_multiple,
            STAGE_TOKENS,
        )
        self._publication = publication
        self._journal_nbytes = journal_nbytes
        paths, keep = publication.paths, journal_nbytes is not None
        self._tokens = HashedFile(publication.open(paths.tokens, keep=keep))
        self._loss = HashedFile(publication.open(paths.loss, keep=keep))
        self._starts = HashedFile(publication.open(paths.starts, keep=keep))
        self.columns = ColumnFiles(publication, options.columns, keep=keep)

    def write_staged(self) -> None:
        """Write what is staged, then record it in the journal."""
        stage = self.stage
        self._tokens.write(stage.tokens)
        self._loss.write(stage.mask)
        self._starts.write(stage.starts)
        self.columns.write_staged()
        records = np.frombuffer(stage.records, np.uint32).reshape(-1, 2)
        for start in range(0, len(records), MAX_RECORDS):
            self._publication.journal.write(encode_block(PACK, records[start : start + MAX_RECORDS]))
        stage.clear()

    def replay(self, num_packs: int, progress: Advance = lambda num_tokens: None) -> int:
        """Take in the first packs of the remains as if they had just been added: checked, counted and hashed.

        Args:
            num_packs: so many at most.
            progress: called with the tokens taken in since the last call.

        Returns:
            Packs taken in: fewer where one breaks a rule, since its bytes never reached the disk.
        """
        for chunk in JournalPacks(self._publication.paths.journal, num_packs):
            left = np.stack(chunk, axis=1)
            while len(left):
                size = int(np.searchsorted(np.cumsum(left[:, 0]), STAGE_TOKENS, side="right"))
                run, left = left[: max(size, 1)], left[max(size, 1) :]
                if not self._replay_run(run):
                    return self.stage.num_packs
                progress(int(run[:, 0].sum()))
        return self.stage.num_packs

    def _replay_run(self, records: NDArray[np.int64]) -> bool:
        """Some packs at once; one by one where a rule is broken, so that those before it are taken in."""
        num_tokens, num_sequences = records.sum(axis=0).tolist()
        raw = [
            file.file.read_at(file.nbytes, count * itemsize)
            for file, count, itemsize in (
                (self._tokens, num_tokens, self.options.token_dtype.itemsize),
                (self._loss, num_tokens, self.options.mask_dtype.itemsize),
                (self._starts, num_sequences, 4),
            )
        ]
        tokens = np.frombuffer(raw[0], self.options.token_dtype)
        mask = np.frombuffer(raw[1], self.options.mask_dtype)
        starts = np.frombuffer(raw[2], "<u4").astype(np.int64)
        lengths, sequences = np.ascontiguousarray(records.T)
        try:
            self.stage.add(tokens, mask, starts, lengths, sequences, False)
        except ValueError:
            return len(records) > 1 and all(self._replay_run(record) for record in records[:, np.newaxis])
        for file, data in zip((self._tokens, self._loss, self._starts), raw, strict=True):
            file.update(data)
        self.columns.take_in(token=num_tokens, sequence=num_sequences, pack=len(records))
        self.stage.clear()
        return True

    def publish(self, metadata: Mapping[str, Any], *, rebuilt: bool = False) -> Header:
        """Write the indexes and publish the shard; nothing is staged. Returns its header."""
        header = self.complete(metadata, rebuilt=rebuilt)
        self._publication.publish()
        return header

    def complete(self, metadata: Mapping[str, Any], *, rebuilt: bool = False) -> Header:
        """Write the indexes: the files hold all of the shard, under the names of before publication."""
        publication, options, stage = self._publication, self.options, self.stage
        paths, packs = publication.paths, JournalPacks(publication.journal.path, stage.num_packs)
        code, dtype = token_dtype_of(options.token_dtype)
        idx_digest = write_idx(publication.open(paths.idx), packs, code, dtype.itemsize, stage.num_packs)
        header = Header(
            num_packs=stage.num_packs,
            num_sequences=stage.num_sequences,
            num_tokens=stage.num_tokens,
            num_trained_tokens=stage.num_trained_tokens,
            num_masked_packs=stage.num_masked_packs,
            token_dtype=dtype,
            mask_dtype=options.mask_dtype,
            sequence_multiple=options.sequence_multiple,
            capacity=options.capacity or stage.longest_padded_pack,
            longest_pack=stage.longest_pack,
            most_sequences=stage.most_sequences,
            pad_id=options.pad_id,
            digests=(self._tokens.digest(), self._loss.digest(), idx_digest, self._starts.digest()),
            arrays_checksum=bytes(16),
            metadata={**metadata, "format_writer": FORMAT_WRITER},
            rebuilt=rebuilt,
        )
        header = self.columns.finish(header)
        header = write_seq_idx(publication.open(paths.seq_idx), packs, header)
        # What is not of these packs was never part of the shard: the torn end of what a kill interrupted.
        for data in (self._tokens, self._loss, self._starts):
            data.file.cut(data.nbytes)
        if self._journal_nbytes is not None:
            publication.journal.cut(self._journal_nbytes)
        return header


# Packs handled at once: a few MiB of arrays.
CHUNK_PACKS = 1 << 15


class PackChunk(NamedTuple):
    """Consecutive packs: ``lengths`` in tokens and ``sequences`` counted, both int64 [packs]."""

    lengths: NDArray[np.int64]
    sequences: NDArray[np.int64]


class JournalPacks:
    """The first packs that a journal records, in chunks of some 32 thousand; may be iterated again and again."""

    def __init__(self, journal: str, num_packs: int) -> None:
        self._journal, self._num_packs = journal, num_packs

    def __iter__(self) -> Iterator[PackChunk]:
        held: list[NDArray[np.uint32]] = []
        count, left = 0, self._num_packs
        with open_regular(self._journal) as stream:
            read_head(stream, self._journal)
            for records in pack_records(stream):
                held.append(records[:left])
                count, left = count + len(held[-1]), left - len(held[-1])
                if count >= CHUNK_PACKS:
                    yield _chunk(held)
                    held, count = [], 0
        if count:
            yield _chunk(held)


def _chunk(records: list[NDArray[np.uint32]]) -> PackChunk:
    lengths, sequences = (np.concatenate([block[:, column] for block in records], dtype=np.int64) for column in (0, 1))
    return PackChunk(lengths, sequences)


def _offsets(counts: Iterable[NDArray[np.int64]], scale: int = 1) -> Iterator[NDArray[np.int64]]:
    """Running sums: chunks of positions, then the total."""
    total = 0
    for chunk in counts:
        offsets = _native.offsets_from_lengths(chunk, scale, total)
        total = int(offsets[-1])
        yield offsets[:-1]
    yield np.array([total])


def write_idx(
    file: OutputFile, packs: Iterable[PackChunk], dtype_code: int, itemsize: int, num_packs: int
) -> FileDigest:
    """Write Megatron's ``.idx``; ``packs`` is iterated twice, ``itemsize`` is of a token in bytes."""
    out = HashedFile(file)
    out.write(pack_idx_header(dtype_code, num_packs))
    for chunk in packs:
        out.write(chunk.lengths.astype("<i4"))
    left = num_packs
    for pointers in _offsets((chunk.lengths for chunk in packs), itemsize):
        out.write(pointers[:left])  # the total at the end is no pack's pointer
        left -= len(pointers[:left])
    for start in range(0, num_packs + 1, CHUNK_PACKS):
        out.write(np.arange(start, min(start + CHUNK_PACKS, num_packs + 1), dtype="<i8"))
    return out.digest()


def write_seq_idx(file: OutputFile, packs: Iterable[PackChunk], header: Header) -> Header:
    """Write ``.seq.idx``: arrays first, then the header with their checksum; returns the header as written.

    ``packs`` is iterated twice.
    """
    file.write(bytes(header.nbytes))
    out = HashedFile(file)
    for offsets in _offsets(chunk.sequences for chunk in packs):
        out.write(offsets)
    out.write(bytes(header.token_offsets_offset - file.nbytes))
    for offsets in _offsets(chunk.lengths for chunk in packs):
        out.write(offsets)
    header = dataclasses.replace(header, arrays_checksum=out.checksum())
    file.write_at(header.encode(), 0)
    assert file.nbytes == header.seq_idx_nbytes
    return header
