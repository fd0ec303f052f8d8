"""What an interrupted build left at a prefix, and how a shard is made of it.

The journal says which packs were written; the sizes of the files say how many of them are there. ``recover`` publishes
those packs.
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
from megatron_sft_idx.shard.journal import (
    PACK,
    BuildOptions,
    JournalHead,
    journal_error,
    locked_journal,
    read_blocks,
    read_head,
    read_journal,
)
from megatron_sft_idx.shard.opening import read_start
from megatron_sft_idx.shard.publication import Publication, check_free, interrupted_error
from megatron_sft_idx.shard.writer import ShardWriter
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.progress import Advance


@dataclass(frozen=True)
class Remains:
    """What a killed build left at a prefix, with the number of packs that lie wholly in all files.

    ``num_recorded`` counts all packs in the journal, those included whose data did not reach the disk.
    """

    paths: ShardPaths
    head: JournalHead
    num_packs: int
    num_sequences: int
    num_tokens: int
    num_recorded: int

    @property
    def is_complete(self) -> bool:
        """Whether all files are complete and synced, and only renames are left."""
        return self.head.replaced_inodes is not None

    @property
    def build_options(self) -> BuildOptions:
        """What the build was begun with. CorruptShardError where the head does not say it."""
        return BuildOptions.decode(self.head.content, self.paths.journal)


def find_remains(prefix: str | os.PathLike[str]) -> Remains | None:
    """Look what an interrupted build left at a prefix; changes nothing. None without a journal, or for a removal's.

    Raises:
        CorruptShardError: the journal's head is torn, or it says that the files are complete and they are not.
        FormatError: a living writer is at work there, or what was interrupted is a copy or a rebuild.
    """
    paths = ShardPaths.of(prefix)
    with contextlib.suppress(FileNotFoundError), locked_journal(paths, shared=True):
        head = read_journal(paths)
        return None if head is not None and head.work == "removal" else read_remains(paths)
    return None


def read_remains(paths: ShardPaths) -> Remains:
    """As ``find_remains``. The caller must hold the lock, and there must be a journal."""
    if (head := JournalHead.read(paths)) is None:
        raise journal_error(paths.journal, "the journal's head is journal_error or changed")
    if head.replaced_inodes is not None:
        header = complete_header(paths)
        counts = header.num_packs, header.num_sequences, header.num_tokens
        return Remains(paths, head, *counts, counts[0])
    if head.work != "build":
        raise interrupted_error(paths, head)
    rows_there = {"token": MAX_COUNT, "sequence": MAX_COUNT, "pack": MAX_COUNT}
    for file in BuildOptions.decode(head.content, paths.journal).growing_files(paths):
        rows = (_nbytes(paths.temporary(file.path)) - file.begin) // file.row_nbytes
        rows_there[file.per] = min(rows_there[file.per], max(0, rows))
    recorded = packs = sequences = tokens = 0
    with open_regular(paths.journal) as stream:
        read_head(stream, paths.journal)
        for block in read_blocks(stream):
            if block.kind != PACK:
                continue
            if packs == recorded:  # all packs before this block lie wholly in all files
                token_ends = tokens + np.cumsum(block.records[:, 0], dtype=np.int64)
                sequence_ends = sequences + np.cumsum(block.records[:, 1], dtype=np.int64)
                # Ends ascend, so the packs that fit are the first ones.
                fits = (token_ends <= rows_there["token"]) & (sequence_ends <= rows_there["sequence"])
                if fit := min(int(fits.sum()), rows_there["pack"] - packs):
                    packs, tokens, sequences = packs + fit, int(token_ends[fit - 1]), int(sequence_ends[fit - 1])
            recorded += len(block.records)
    return Remains(paths, head, packs, sequences, tokens, recorded)


def complete_header(paths: ShardPaths) -> Header:
    """The header of a shard whose journal says DONE; checks that every file is there, under either name, in its size.

    Raises:
        CorruptShardError: a file is missing, or has another size than the header says, or than a column's own does.
    """

    def present_name(path: str) -> str:
        return next((name for name in (paths.temporary(path), path) if os.path.lexists(name)), path)

    def header_of(path: str, form: HeaderForm) -> bytes:
        start = read_start(path, form)
        return start.raw if start else b""

    seq_idx, head = present_name(paths.seq_idx), read_journal(paths)
    header = Header.decode(header_of(seq_idx, SEQ_IDX), seq_idx)
    sizes = {path: (nbytes, seq_idx) for path, nbytes in header.sizes(paths).items()}
    for path in map(paths.column, paths.with_columns_of(head.files if head else ()).columns):
        column = present_name(path)
        sizes[path] = ColumnHeader.decode(header_of(column, COLUMN), column).nbytes, column
    for path, (nbytes, header_path) in sizes.items():
        if (actual := _nbytes(present_name(path))) != nbytes:
            detail = (
                f"file has {actual} bytes, expected {nbytes} by the header of {header_path}; the journal says that it"
                " is complete, so it was changed since: build it again with overwrite (--overwrite)"
            )
            raise CorruptShardError(present_name(path), min(actual, nbytes), "F2", detail)
    return header


def _nbytes(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0


def recover(
    prefix: str | os.PathLike[str], *, overwrite: bool = False, progress: Advance = lambda num_tokens: None
) -> Header:
    """Publish the packs that an interrupted build left at a prefix.

    A build that was complete but for renames is published as it is. Of any other build every pack is kept whose
    journal record is complete and whose data is there; rules are checked, counts and checksums taken anew. The header
    of such a shard says that it was rebuilt, and its JSON block holds ``recovered``: how many packs it has and how many
    the journal records. Memory stays at a few MiB. Until the new shard is complete and synced nothing of the remains
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
        publication = Publication.resume(paths, overwrite=overwrite)
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal, so there is nothing to recover from it") from None
    try:
        remains = read_remains(paths)
        if remains.is_complete:
            # .seq.idx is renamed last: while it has its temporary name, another one is of the shard to be replaced.
            if not overwrite and os.path.lexists(paths.unpublished.seq_idx) and os.path.lexists(paths.seq_idx):
                check_free(paths, overwrite=False)
            header = complete_header(paths)
            publication.finish()
            return header
        check_free(paths, overwrite=overwrite)
        options = remains.build_options
        writer = ShardWriter.resumed(publication, options)
        if not (num_packs := writer.replay(remains.num_packs, progress)):
            raise FormatError(
                f"{paths.journal}: no complete pack had been written yet, so there is nothing to recover;"
                " build it again with overwrite (--overwrite)"
            )
        writer.metadata["recovered"] = {"packs": num_packs, "packs_in_journal": remains.num_recorded}
        return writer.finalize()
    finally:
        publication.close()


def adopt_remains(paths: ShardPaths) -> None:
    """Have a journal name the temporary files that lie beside it. The caller must know that all were copied here.

    Raises:
        FormatError: there is no journal, or a living writer is at work there.
    """
    try:
        Publication.resume(paths, overwrite=False, copied=True).close()
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal; copy it here with the .tmp files beside it") from None
