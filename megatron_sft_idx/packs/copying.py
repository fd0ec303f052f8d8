"""Packs copied from shard to shard; every byte of a source is held to its checksums on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from megatron_sft_idx.errors import CorruptShardError, SequenceError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.packs.run import PackRun, windows
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.journal import BuildOptions
from megatron_sft_idx.shard.opening import require_same
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.shard.writer import CHUNK_PACKS
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.local import StreamHash, digest_file
from megatron_sft_idx.storage.progress import Advance

# So many tokens are read at a time. Half as many take a twelfth more time; with more, the memory grows.
COPIED_TOKENS = 1 << 19


def open_source(prefix: str, shard_id: bytes) -> Shard:
    """Open a local shard that packs are copied from.

    Its files stay open, so it is the same shard still when another one is published over it.

    Raises:
        FormatError: its id is not ``shard_id``, or it lies in an object store.
        ShardNotFoundError, CorruptShardError: as of ``Shard``.
    """
    require_local(prefix, "merging or splitting")
    # Maps would be as fast, but the pages that are read would count as this process's memory.
    shard = Shard(prefix, backend="pread")
    require_same(prefix, shard.shard_id, shard_id)
    return shard


def nbytes_of(header: Header) -> int:
    """Bytes of a shard's five files, without the header of ``.seq.idx``."""
    return sum(digest.nbytes for digest in header.digests) + header.seq_idx_nbytes - header.nbytes


def nbytes_of_run(run: PackRun) -> int:
    """Bytes that the tokens, masks, starts and columns of a run take in the files of a shard."""
    columns = sum(column.values.nbytes for column in run.columns.values())
    return run.tokens.nbytes + run.loss_mask.nbytes + 4 * len(run.seq_starts) + columns


def checked_runs(shard: Shard, columns: Collection[str], advance: Advance) -> Iterator[PackRun]:
    """All packs of a shard from ``open_source``, with columns; each file is held to its checksum.

    The checksums of the indexes and starts are compared before the first run, all others behind the last. ``advance``
    is called with the bytes that were read since the last call. CorruptShardError: a file does not have its checksum
    (F3, of a column C7), or the offsets break O1 or O2.
    """
    paths, header = ShardPaths.of(shard.prefix), shard.header
    tokens, loss, idx, starts = header.digests
    arrays = FileDigest(header.seq_idx_nbytes - header.nbytes, header.arrays_checksum)
    for path, begin, digest in ((paths.idx, 0, idx), (paths.seq_idx, header.nbytes, arrays), (paths.starts, 0, starts)):
        _require_checksum(path, "F3", digest_file(path, begin).checksum, digest.checksum)
    advance(idx.nbytes + arrays.nbytes)
    shard.check_ends()
    expected = {paths.tokens: ("F3", tokens.checksum), paths.loss: ("F3", loss.checksum)}
    expected |= {paths.column(name): ("C7", shard.columns.open(name).header.checksum) for name in columns}
    hashes = {path: StreamHash() for path in expected}
    for window in windows(shard, COPIED_TOKENS, columns):
        run = window.run()
        rows = run.tokens, run.loss_mask, *(column.values.reshape(-1) for column in run.columns.values())
        for stream, values in zip(hashes.values(), rows, strict=True):
            stream.update(values)
        advance(nbytes_of_run(run))
        yield run
        del run, rows, values  # before the next are read, into the same memory
    for path, (rule, checksum) in expected.items():
        _require_checksum(path, rule, hashes[path].checksum(), checksum)


def _require_checksum(path: str, rule: str, found: bytes, expected: bytes) -> None:
    if found != expected:
        raise CorruptShardError(
            path,
            0,
            rule,
            f"checksum of all bytes is {found.hex()}, the header says {expected.hex()}; the file was changed or is of"
            " another shard: restore it. Nothing was published",
        )


def begin_copy(prefix: str, like: Header, columns: Mapping[str, ColumnSpec], **writing: Any) -> ShardWriter:
    """A writer of a shard that is made of packs of other shards.

    Args:
        prefix: the path that the five files will share.
        like: a header with the dtypes, capacity, multiple, pad id, metadata and flags of the new shard.
        columns: the columns of the new shard, by name.
        writing: other arguments of ``Publication``.
    """
    numbers = like.capacity or None, like.sequence_multiple, like.pad_id  # an empty shard may have no capacity
    options = BuildOptions(like.token_dtype, like.mask_dtype, *numbers, dict(like.metadata), dict(columns))
    writer = ShardWriter.of(
        Publication(ShardPaths.of(prefix).with_columns(columns), options.encode(), **writing), options
    )
    writer.rebuilt = like.rebuilt
    return writer


def append_shard(
    writer: ShardWriter,
    shard: Shard,
    columns: Collection[str],
    advance: Advance,
    renumber: Callable[[PackRun], PackRun],
) -> None:
    """Append all packs of a shard, as ``renumber`` makes them of each run, and hold the shard to its checksums.

    The packs are entered in the journal behind the last of them, so that nothing of a corrupt source is recovered from
    a killed merge. Errors as of ``checked_runs``, and SequenceError for a source that breaks rules of packs.
    """
    runs = checked_runs(shard, columns, advance)
    writer.journals_packs = False
    for run in runs:
        try:
            writer.add_run(renumber(run))
            del run
        except SequenceError:
            for _ in runs:
                pass  # if the file is damaged, that is the error
            raise
    writer.flush()
    writer.journals_packs = True
    for first in range(0, len(shard), CHUNK_PACKS):
        last = min(first + CHUNK_PACKS, len(shard))
        offsets = shard.files.token_offsets[first : last + 1], shard.files.sequence_offsets[first : last + 1]
        writer.enter_in_journal(np.diff(offsets).T)
