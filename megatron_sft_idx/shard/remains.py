"""What an interrupted build left at a prefix: its journal, and how far its data really reaches."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.header import MAX_HEADER_NBYTES
from megatron_sft_idx.layout.journal import PACK, BuildOptions, Head, read_blocks, read_head, torn
from megatron_sft_idx.shard.prefix import lock_journal, read_journal, require_build

__all__ = ["Remains", "complete_header", "find_remains", "pack_records", "read_remains", "where_to_look"]


@dataclass(frozen=True)
class Remains:
    """What a killed build left at a prefix.

    Attributes:
        paths: of the shard it would have become.
        head: of the journal.
        num_packs: packs of complete journal blocks that lie wholly in all three data files.
        num_sequences: their sequences.
        num_tokens: their tokens.
        num_recorded: packs of complete journal blocks, also those whose data did not reach the disk.
        journal_nbytes: where the journal's last complete block ends.
        done: all files are complete and synced, and only renames are left; the counts are then the shard's.
    """

    paths: ShardPaths
    head: Head
    num_packs: int
    num_sequences: int
    num_tokens: int
    num_recorded: int
    journal_nbytes: int
    done: bool

    @property
    def build_options(self) -> BuildOptions:
        """What the build was begun with. CorruptShardError where the head does not say it."""
        return BuildOptions.decode(self.head.content, self.paths.journal)


def find_remains(prefix: str | os.PathLike[str]) -> Remains | None:
    """What an interrupted build left at a prefix; None where there is no journal. Changes nothing.

    A journal that only says that a shard is being removed is none.

    Raises:
        CorruptShardError: the journal's head is torn, or it says that the files are complete and they are not.
        FormatError: a living writer is at work here, or what was interrupted is a copy or a rebuild.
    """
    paths = ShardPaths.of(prefix)
    try:
        lock = lock_journal(paths, create=False, shared=True)
    except FileNotFoundError:
        return None
    try:
        if (head := read_journal(paths)) is not None and head.work == "removal":
            return None
        return read_remains(paths)
    finally:
        os.close(lock)


def read_remains(paths: ShardPaths) -> Remains:
    """As ``find_remains``, for whoever holds the lock."""
    if (head := Head.read(paths.journal)) is None:
        raise torn(paths.journal, "the journal's head is torn or changed")
    if head.done is not None:
        header = complete_header(paths)
        counts = header.num_packs, header.num_sequences, header.num_tokens
        return Remains(paths, head, *counts, counts[0], os.path.getsize(paths.journal), True)
    require_build(paths, head)
    options = BuildOptions.decode(head.content, paths.journal)
    recorded = 0
    with open(paths.journal, "rb") as stream:
        read_head(stream, paths.journal)
        nbytes = begin = stream.tell()
        for block in read_blocks(stream):
            nbytes = stream.tell()
            recorded += len(block.records) if block.kind == PACK else 0
        stream.seek(begin)
        counts = _on_disk(stream, paths, options.token_dtype, options.mask_dtype)
    return Remains(paths, head, *counts, recorded, nbytes, False)


def _on_disk(
    stream: BinaryIO, paths: ShardPaths, token_dtype: np.dtype[Any], mask_dtype: np.dtype[Any]
) -> tuple[int, int, int]:
    """Packs, sequences and tokens that lie wholly in the three data files; the stream is at the first block."""
    most_tokens = min(
        _nbytes(paths.temporary(paths.tokens)) // token_dtype.itemsize,
        _nbytes(paths.temporary(paths.loss)) // mask_dtype.itemsize,
    )
    most_sequences = _nbytes(paths.temporary(paths.starts)) // 4
    packs = sequences = tokens = 0
    for records in pack_records(stream):
        token_ends = tokens + np.cumsum(records[:, 0], dtype=np.int64)
        sequence_ends = sequences + np.cumsum(records[:, 1], dtype=np.int64)
        # Sums ascend, so where both fit all before it does.
        fit = int(((token_ends <= most_tokens) & (sequence_ends <= most_sequences)).sum())
        if fit:
            packs, tokens, sequences = packs + fit, int(token_ends[fit - 1]), int(sequence_ends[fit - 1])
        if fit < len(records):
            break
    return packs, sequences, tokens


def pack_records(stream: BinaryIO) -> Iterator[NDArray[np.uint32]]:
    """The records of the PACK blocks, uint32 [n, 2]: length in tokens and sequences of each pack."""
    return (block.records for block in read_blocks(stream) if block.kind == PACK)


def complete_header(paths: ShardPaths) -> Header:
    """The header of a build whose journal says DONE, once every file has the size it says, under either name.

    Raises:
        CorruptShardError: a file is missing or has another size.
    """
    path = paths.temporary(paths.seq_idx)
    if not os.path.lexists(path):
        path = paths.seq_idx
    raw = b""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        raw = file.read(MAX_HEADER_NBYTES)
    header = Header.decode(raw, path)
    sizes = dict(zip(paths.data, (digest.nbytes for digest in header.digests), strict=True))
    for final, nbytes in (sizes | {paths.seq_idx: header.seq_idx_nbytes}).items():
        where = next((name for name in (paths.temporary(final), final) if os.path.lexists(name)), final)
        if (found := _nbytes(where)) != nbytes:
            raise CorruptShardError(
                where,
                min(found, nbytes),
                "F2",
                f"file has {found} bytes, expected {nbytes} by the header of {path}; the journal says that it is"
                " complete, so it was changed since: build it again with overwrite (--overwrite)",
            )
    return header


def where_to_look(paths: ShardPaths) -> str:
    """A remedy where nothing is at a prefix: what a killed run was making there may lie beside it, under a longer name.

    ``preprocess`` tokenises into ``PREFIX.parts``, and makes the corpus that it is to keep at ``PREFIX.unpacked``.
    """
    if os.path.lexists(f"{paths.prefix}.parts/run.json"):
        return f"preprocess was interrupted here, or is at work: preprocess --resume goes on with {paths.prefix}.parts"
    journals = sorted(glob.glob(f"{glob.escape(paths.prefix)}.*.journal"))
    if not journals:
        return "check the prefix: the path without .seq.idx"
    beside = journals[0].removesuffix(".journal")
    return (
        f"a build of {beside} was interrupted, or is at work: preprocess --resume goes on with it,"
        f" megatron-sft-idx rebuild {beside} recovers its packs"
    )


def _nbytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
