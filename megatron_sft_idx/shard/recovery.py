"""What an interrupted build left at a prefix (``find_remains``), and how a shard is made of it (``recover``).

The journal says which packs were written; the sizes of the temporary files say how many of them are there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import COLUMN, ColumnHeader
from megatron_sft_idx.layout.files import MAX_COUNT, SEQ_IDX, HeaderForm
from megatron_sft_idx.shard.journal import (
    PACK,
    BuildOptions,
    JournalHead,
    locked_journal,
    read_blocks,
    read_head,
    with_named_columns,
)
from megatron_sft_idx.shard.opening import read_start
from megatron_sft_idx.shard.publication import (
    Publication,
    check_free,
    interrupted_error,
    naming_present,
    pending,
    require_all,
    require_named,
)
from megatron_sft_idx.shard.writer import ShardWriter
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.progress import Advance

# Is given where files are until they get their names, by the paths that they are for; raises to keep them unpublished.
Check = Callable[[Mapping[str, str]], None]

_CHANGED = (
    "; the journal says that it is complete, so it was changed since: build it again with overwrite (--overwrite)"
)
_Decoded = TypeVar("_Decoded")


@dataclass(frozen=True)
class Remains:
    """What a killed build left at a prefix.

    Attributes:
        paths: of the prefix.
        head: of the journal.
        num_packs: packs that lie wholly in all files; ``num_sequences`` and ``num_tokens`` are theirs.
        num_recorded: packs in the journal, including those whose data did not reach the disk.
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
    def unpublished(self) -> dict[str, str]:
        """Where files of a complete shard are until they get their names, by the paths that they are for."""
        return {path: self.paths.temporary(path) for path in pending(self.paths, self.head)}

    @property
    def replaces(self) -> bool:
        """Whether the ``.seq.idx`` at the prefix belongs to a shard that is to be replaced."""
        # .seq.idx is renamed last: as long as the new one has only its temporary name, none of it is at the prefix.
        return self.paths.seq_idx in self.unpublished and os.path.lexists(self.paths.seq_idx)

    @property
    def build_options(self) -> BuildOptions:
        """The options of the build. CorruptShardError: the head does not hold them."""
        return BuildOptions.decode(self.head.content, self.paths.journal)


def find_remains(prefix: str | os.PathLike[str], *, named: bool = False, copied: bool = False) -> Remains | None:
    """What an interrupted build left at a prefix; None if no journal has content but a removal's. Changes nothing.

    ``named`` asks, as ``recover`` does, that the temporary files are those that the journal names; ``copied`` sees them
    as after ``adopt_remains``.

    Raises:
        CorruptShardError: the journal's head is torn, or it says that the files are complete and they are not.
        FormatError: a writer is at work there, or what was interrupted is a copy or a rebuild.
    """
    paths = ShardPaths.of(prefix)
    with contextlib.suppress(FileNotFoundError), locked_journal(paths, shared=True):
        head = JournalHead.read(paths)
        if head is None or head.work == "removal":
            return None
        if copied:
            head = naming_present(with_named_columns(paths, head), head)
        elif named:
            require_named(paths, head)
        return read_remains(paths, head)
    return None


def read_remains(paths: ShardPaths, head: JournalHead) -> Remains:
    """As ``find_remains``. The caller must hold the lock; the journal may not be that of a removal."""
    if head.replaced_inodes is not None:
        header = complete_header(paths, head)
        counts = header.num_packs, header.num_sequences, header.num_tokens
        return Remains(paths, head, *counts, counts[0])
    if head.work != "build":
        raise interrupted_error(paths, head)
    # How many tokens, sequences and packs lie wholly in the files.
    num_present = {"token": MAX_COUNT, "sequence": MAX_COUNT, "pack": MAX_COUNT}
    for file in BuildOptions.decode(head.content, paths.journal).growing_files(paths):
        rows = (_nbytes(paths.temporary(file.path)) - file.begin) // file.row_nbytes
        num_present[file.per] = min(num_present[file.per], max(0, rows))
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
                fits = (token_ends <= num_present["token"]) & (sequence_ends <= num_present["sequence"])
                if fit := min(int(fits.sum()), num_present["pack"] - packs):
                    packs, tokens, sequences = packs + fit, int(token_ends[fit - 1]), int(sequence_ends[fit - 1])
            recorded += len(block.records)
    return Remains(paths, head, packs, sequences, tokens, recorded)


def complete_header(paths: ShardPaths, head: JournalHead | None = None) -> Header:
    """The header of a shard whose journal has a DONE block, after a check of the sizes of all files.

    ``head`` is that of the journal, None to read it. Each file may still have its temporary name, or be renamed
    already. CorruptShardError: a file is missing, or has another size than the header, or a column's own header, says.
    FormatError: a file of the shard that it replaces is in the place of one that is missing.
    """

    def present_name(path: str) -> str:
        return next((name for name in (paths.temporary(path), path) if os.path.lexists(name)), path)

    def header_of(path: str, form: HeaderForm, decode: Callable[[bytes, str], _Decoded]) -> _Decoded:
        start = read_start(path, form)
        try:
            return decode(start.raw if start else b"", path)
        except CorruptShardError as error:  # whose remedy is that of a shard
            raise CorruptShardError(path, error.offset, error.rule, error.detail.split(";")[0] + _CHANGED) from None

    head = head or JournalHead.read(paths)
    assert head is not None, paths.journal
    if not os.path.lexists(seq_idx := present_name(paths.seq_idx)):
        require_all(paths, head)
    header = header_of(seq_idx, SEQ_IDX, Header.decode)
    sizes = {path: (nbytes, seq_idx) for path, nbytes in header.sizes(paths).items()}
    for path in map(paths.column, paths.with_columns_of(head.files).columns):
        column = present_name(path)
        sizes[path] = header_of(column, COLUMN, ColumnHeader.decode).nbytes, column
    for path, (nbytes, header_path) in sizes.items():
        if (actual := _nbytes(present_name(path))) != nbytes:
            detail = f"file has {actual} bytes, expected {nbytes} by the header of {header_path}{_CHANGED}"
            raise CorruptShardError(present_name(path), min(actual, nbytes), "F2", detail)
    require_all(paths, head)
    return header


def _nbytes(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0


def recover(
    prefix: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    check: Check = lambda unpublished: None,
    progress: Advance = lambda num_tokens: None,
) -> Header:
    """Publish the packs that an interrupted build left at a prefix.

    A build that was complete but for renames is published as it is. Of any other build, every pack is kept whose data
    lies wholly in all files. Its rules are checked, and counts and checksums are taken anew. The header of such a shard
    says that it was rebuilt, and its JSON block holds ``recovered``: how many packs it has, and how many the journal
    records. Memory stays at a few MiB. Nothing of the remains is removed until the new shard is complete and synced, so
    a recovery that is itself killed can be run again. ``overwrite`` replaces a shard that is at the prefix; ``check``
    is called when all files are complete, before one of them gets its name; ``progress`` is called with the tokens read
    since the last call. Returns the header of the published shard.

    Raises:
        CorruptShardError: the journal's head is torn, or it says that the files are complete and they are not.
        FormatError: there is nothing to recover, another writer is at work, or a shard may not be replaced.
    """
    paths = ShardPaths.of(prefix)
    try:
        publication = Publication.resume(paths, overwrite=overwrite)
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal, so there is nothing to recover from it") from None
    try:
        remains = read_remains(paths, publication.head)
        if remains.is_complete:
            if not overwrite and remains.replaces:
                check_free(paths, overwrite=False)
            header = complete_header(paths)
            check(remains.unpublished)
            publication.finish()
            return header
        check_free(paths, overwrite=overwrite)
        options = remains.build_options
        writer = ShardWriter.of(publication, options)
        if not (num_packs := writer.replay(remains.num_packs, progress)):
            raise FormatError(
                f"{paths.journal}: no complete pack had been written yet, so there is nothing to recover;"
                " build it again with overwrite (--overwrite)"
            )
        writer.metadata["recovered"] = {"packs": num_packs, "packs_in_journal": remains.num_recorded}
        writer.complete()
        check({path: paths.temporary(path) for path in writer.paths.all})
        return writer.finalize()
    finally:
        publication.close()


def adopt_remains(paths: ShardPaths) -> None:
    """Let the journal at a prefix name the temporary files that lie beside it.

    The caller must know that all of them are the journal's own, and were copied here with it. FormatError: there is no
    journal, or a writer is at work there.
    """
    try:
        Publication.resume(paths, overwrite=False, copied=True).close()
    except FileNotFoundError:
        raise FormatError(f"{paths.journal}: there is no journal; copy it here with the .tmp files beside it") from None
