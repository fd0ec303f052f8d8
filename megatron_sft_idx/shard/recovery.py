"""What an interrupted build left, and what can be made of it.

Its journal says which packs were written; how far its data really reaches is looked up. ``recover`` publishes those
packs, whoever built them.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import numpy as np

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import COLUMN, ColumnHeader
from megatron_sft_idx.layout.files import MAX_COUNT, SEQ_IDX, HeaderForm
from megatron_sft_idx.layout.journal import PACK, BuildOptions, Head, read_blocks, read_head, torn
from megatron_sft_idx.shard.opening import read_start
from megatron_sft_idx.shard.publication import Publication, check_free, interrupted_error, locked_journal, read_journal
from megatron_sft_idx.shard.writer import ShardWriter
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.progress import Advance


@dataclass(frozen=True)
class Remains:
    """What a killed build left at a prefix: packs of complete journal blocks that lie wholly in all files.

    ``num_recorded`` counts those too whose data did not reach the disk.
    """

    paths: ShardPaths
    head: Head
    num_packs: int
    num_sequences: int
    num_tokens: int
    num_recorded: int

    @property
    def is_complete(self) -> bool:
        """Whether all files are complete and synced, and only renames are left; the counts are then the shard's."""
        return self.head.replaced_inodes is not None

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
    with contextlib.suppress(FileNotFoundError), locked_journal(paths, shared=True):
        head = read_journal(paths)
        return None if head is not None and head.work == "removal" else read_remains(paths)
    return None


def read_remains(paths: ShardPaths) -> Remains:
    """As ``find_remains``, for whoever holds the lock."""
    if (head := Head.read(paths)) is None:
        raise torn(paths.journal, "the journal's head is torn or changed")
    if head.replaced_inodes is not None:
        header = complete_header(paths)
        counts = header.num_packs, header.num_sequences, header.num_tokens
        return Remains(paths, head, *counts, counts[0])
    if head.work != "build":
        raise interrupted_error(paths, head)
    most = {"token": MAX_COUNT, "sequence": MAX_COUNT, "pack": MAX_COUNT}
    for file in BuildOptions.decode(head.content, paths.journal).files(paths):
        rows = (_nbytes(paths.temporary(file.path)) - file.begin) // file.row_nbytes
        most[file.per] = min(most[file.per], max(0, rows))
    recorded = packs = sequences = tokens = 0
    with open_regular(paths.journal) as stream:
        read_head(stream, paths.journal)
        for block in read_blocks(stream):
            if block.kind != PACK:
                continue
            if packs == recorded:  # all so far lie wholly in all files
                token_ends = tokens + np.cumsum(block.records[:, 0], dtype=np.int64)
                sequence_ends = sequences + np.cumsum(block.records[:, 1], dtype=np.int64)
                # Sums ascend, so where both fit all before it does.
                fit = int(((token_ends <= most["token"]) & (sequence_ends <= most["sequence"])).sum())
                if fit := min(fit, most["pack"] - packs):
                    packs, tokens, sequences = packs + fit, int(token_ends[fit - 1]), int(sequence_ends[fit - 1])
            recorded += len(block.records)
    return Remains(paths, head, packs, sequences, tokens, recorded)


def complete_header(paths: ShardPaths) -> Header:
    """The header of a shard whose journal says DONE, once every file has the size it says, under either name.

    Raises:
        CorruptShardError: a file is missing, or has another size than the header says, or than a column's own does.
    """

    def now(path: str) -> str:
        return next((name for name in (paths.temporary(path), path) if os.path.lexists(name)), path)

    def header_of(path: str, form: HeaderForm) -> bytes:
        start = read_start(path, form)
        return start.raw if start else b""

    seq_idx, head = now(paths.seq_idx), read_journal(paths)
    header = Header.decode(header_of(seq_idx, SEQ_IDX), seq_idx)
    sizes = {path: (nbytes, seq_idx) for path, nbytes in header.sizes(paths).items()}
    for path in map(paths.column, paths.with_columns_of(head.files if head else ()).columns):
        where = now(path)
        sizes[path] = ColumnHeader.decode(header_of(where, COLUMN), where).nbytes, where
    for path, (nbytes, said) in sizes.items():
        if (found := _nbytes(now(path))) != nbytes:
            detail = (
                f"file has {found} bytes, expected {nbytes} by the header of {said}; the journal says that it is"
                " complete, so it was changed since: build it again with overwrite (--overwrite)"
            )
            raise CorruptShardError(now(path), min(found, nbytes), "F2", detail)
    return header


def _nbytes(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0


def recover(
    prefix: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Advance = lambda num_tokens: None,
) -> Header:
    """Publish the packs that an interrupted build left at a prefix.

    A build that was complete but for renames is finished, its content as it was meant. Of any other every pack is
    kept whose journal record is complete and whose data is there; rules are checked, counts and checksums taken anew.
    Its header says that it was rebuilt, and its JSON block holds ``recovered``: how many packs there are and how many
    the journal knew of. Memory stays at a few MiB. Until the new shard is complete and synced nothing of the remains
    is removed, so a recovery that is itself killed can be run again.

    Args:
        prefix: the path the five files will share.
        overwrite: replace a shard that is at the prefix.
        progress: called with the tokens read since the last call.

    Returns:
        The header of the published shard.

    Raises:
        CorruptShardError: the journal's head is torn, or it says that files are complete which are not.
        FormatError: nothing to recover, a living writer, or a shard that may not be replaced.
    """
    paths = ShardPaths.of(prefix)
    try:
        publication = Publication.take_up(paths, overwrite=overwrite)
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal, so there is nothing to recover from it") from None
    try:
        remains = read_remains(paths)
        if remains.is_complete:
            # .seq.idx is renamed last: under its temporary name, the one beside it is of the shard to be replaced.
            if not overwrite and os.path.lexists(paths.unpublished.seq_idx) and os.path.lexists(paths.seq_idx):
                check_free(paths, overwrite=False)
            header = complete_header(paths)
            publication.finish()
            return header
        check_free(paths, overwrite=overwrite)
        options = remains.build_options
        writer = ShardWriter.taking_up(publication, options)
        if not (kept := writer.replay(remains.num_packs, progress)):
            raise FormatError(
                f"{paths.journal}: no complete pack had been written yet, so there is nothing to recover;"
                " build it again with overwrite (--overwrite)"
            )
        writer.metadata["recovered"] = {"packs": kept, "packs_in_journal": remains.num_recorded}
        return writer.finalize()
    finally:
        publication.close()


def adopt_remains(paths: ShardPaths) -> None:
    """Let a journal name the temporary files that lie beside it, all of which were copied here.

    Raises:
        FormatError: there is no journal, or a living writer is at work here.
    """
    try:
        Publication.take_up(paths, overwrite=False, copied=True).close()
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal; copy it here with the .tmp files beside it") from None
