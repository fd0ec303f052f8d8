"""Find the remains of an interrupted build at a prefix (``find_remains``), and make a shard from them (``recover``).

``X.building/packs`` logs which packs were written; the file sizes show how many of them are complete.
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
from megatron_sft_idx.layout.doubts import RECOVERED
from megatron_sft_idx.layout.files import MAX_COUNT, SEQ_IDX, HeaderForm, column_of
from megatron_sft_idx.layout.media_layout import MEDIA, MediaHeader
from megatron_sft_idx.shard.at_prefix import refuse_journal
from megatron_sft_idx.shard.build_options import BuildOptions
from megatron_sft_idx.shard.opening import read_start
from megatron_sft_idx.shard.pack_log import read_blocks
from megatron_sft_idx.shard.publication import Publication, check_free
from megatron_sft_idx.shard.writer import ShardWriter
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.building import Building
from megatron_sft_idx.storage.building_files import PACKS, inode_at, read_done, require_no_lost_files
from megatron_sft_idx.storage.progress import Advance

# Called with the current paths of the files by their final paths. It raises an error to keep them unpublished.
Check = Callable[[Mapping[str, str]], None]

_CHANGED = "; the build was complete, so the file has changed since: build the shard again with overwrite (--overwrite)"
_Decoded = TypeVar("_Decoded")


@dataclass(frozen=True)
class Remains:
    """The remains of a killed writer at a prefix.

    Attributes:
        paths: paths at the prefix, with the columns of the shard that was being written.
        work: the interrupted operation: ``build``, or the name of a command.
        unpublished: the current paths of the files of a complete shard, by their final paths; None if the shard is not
            complete.
        options: the options of the build; None if no packs were being written.
        num_packs: number of packs that are complete in all files. ``num_sequences`` and ``num_tokens`` are their
            counts.
        num_recorded: number of packs in the log, including packs whose data did not reach the disk.
        num_parts: number of parts of tokenization.
        outputs: for a job with several complete outputs, the suffix that each adds to the prefix.
    """

    paths: ShardPaths
    work: str
    unpublished: dict[str, str] | None
    options: BuildOptions | None = None
    num_packs: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_recorded: int = 0
    num_parts: int = 0
    outputs: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all files are complete and synced, and only renames are left."""
        return self.unpublished is not None

    @property
    def replaces(self) -> bool:
        """Whether the ``.seq.idx`` at the prefix belongs to a shard that is about to be replaced."""
        # .seq.idx is renamed last: while the new one is in the folder, it is not at the prefix.
        new, path = (self.unpublished or {}).get(self.paths.seq_idx), self.paths.seq_idx
        return new is not None and inode_at(path) not in (None, inode_at(new))  # equal: renamed, as a second link


def find_remains(prefix: str | os.PathLike[str]) -> Remains | None:
    """Return the remains of an interrupted writer at a prefix, or None. Changes nothing.

    Raises:
        CorruptShardError: the files are marked as complete, but are not.
        FormatError: a writer is active there, the folder has unrelated files, or a complete file is missing.
    """
    paths = ShardPaths.of(prefix)
    refuse_journal(paths)
    with contextlib.suppress(FileNotFoundError), Building.take(paths.prefix, create=False, shared=True) as building:
        return read_remains(paths, building)
    return None


def read_remains(paths: ShardPaths, building: Building) -> Remains | None:
    """Do the work of ``find_remains`` in a folder that the caller has taken."""
    if building.content is None:
        return None
    work = str(building.content.get("work"))
    if building.is_whole:
        require_no_lost_files(paths.prefix)  # otherwise a file of a replaced shard would be mistaken for it
        done = building.done
        names = {building.target(name): building.path(name) for name in done.files}
        paths, unpublished = (
            paths.with_files_of(names),
            {p: name for p, name in names.items() if os.path.lexists(name)},
        )
        if paths.seq_idx not in names or work == "rebuild":
            return Remains(paths, work, unpublished, outputs=tuple(done.outputs))
        header = complete_header(paths)
        counts = header.num_packs, header.num_sequences, header.num_tokens
        return Remains(paths, work, unpublished, None, *counts, counts[0])
    if (described := building.content.get("shard")) is None:
        return Remains(paths, work, None, num_parts=building.num_parts())
    options = BuildOptions.decode(described, building.folder)
    paths = options.paths_of(paths)
    # Number of tokens, sequences and packs that are complete in the files.
    num_present = {"token": MAX_COUNT, "sequence": MAX_COUNT, "pack": MAX_COUNT}
    for file in options.growing_files(paths):
        rows = (_nbytes(building.path(paths.suffix(file.path))) - file.begin) // file.row_nbytes
        num_present[file.per] = min(num_present[file.per], max(0, rows))
    recorded = packs = sequences = tokens = 0
    kept = 0, 0, 0  # packs, sequences and tokens to keep
    per_pair = 2 if "pair" in options.columns else 1  # keep both sequences of a pair or neither
    if os.path.lexists(log := building.path(PACKS)):
        with open_regular(log) as stream:
            for records in read_blocks(stream):
                if packs == recorded:  # all packs before this block are complete in all files
                    token_ends = tokens + np.cumsum(records[:, 0], dtype=np.int64)
                    sequence_ends = sequences + np.cumsum(records[:, 1], dtype=np.int64)
                    # Ends ascend, so the packs that fit are the first ones.
                    fits = (token_ends <= num_present["token"]) & (sequence_ends <= num_present["sequence"])
                    if fit := min(int(fits.sum()), num_present["pack"] - packs):
                        whole = np.flatnonzero(sequence_ends[:fit] % per_pair == 0)
                        if len(whole):
                            last = int(whole[-1])
                            kept = packs + last + 1, int(sequence_ends[last]), int(token_ends[last])
                        packs, tokens, sequences = packs + fit, int(token_ends[fit - 1]), int(sequence_ends[fit - 1])
                recorded += len(records)
    return Remains(paths, work, None, options, *kept, recorded, building.num_parts())


def complete_header(prefix: str | ShardPaths) -> Header:
    """Return the header of a complete shard in its building folder, after a check of the sizes of all files.

    Some files may be renamed already. CorruptShardError: a file is missing, or has another size than in its header (the
    shard's, or a column's own). FormatError: there is no such shard.
    """
    paths = ShardPaths.of(prefix)
    suffixes = read_done(paths.prefix).files

    def present_name(path: str) -> str:
        name = paths.unpublished.prefix + paths.suffix(path)
        return name if os.path.lexists(name) else path

    def header_of(path: str, form: HeaderForm, decode: Callable[[bytes, str], _Decoded]) -> _Decoded:
        start = read_start(path, form)
        try:
            return decode(start.raw if start else b"", path)
        except CorruptShardError as error:  # its remedy is for a published shard
            raise CorruptShardError(path, error.offset, error.rule, error.detail.split(";")[0] + _CHANGED) from None

    seq_idx = present_name(paths.seq_idx)
    header = header_of(seq_idx, SEQ_IDX, Header.decode)
    sizes = {path: (nbytes, seq_idx) for path, nbytes in header.sizes(paths).items() if paths.suffix(path) in suffixes}
    for path in (paths.prefix + suffix for suffix in suffixes if column_of(paths.prefix + suffix)):
        column = present_name(path)
        sizes[path] = header_of(column, COLUMN, ColumnHeader.decode).nbytes, column
    if ".media.items" in suffixes:
        items = present_name(paths.media_items)
        media = header_of(items, MEDIA, MediaHeader.decode)
        sizes[paths.media_items], sizes[paths.media_data] = (media.nbytes, items), (media.data_nbytes, items)
    for path, (nbytes, header_path) in sizes.items():
        if (actual := _nbytes(present_name(path))) != nbytes:
            detail = (
                f"the file has {actual} bytes, expected {nbytes} according to the header of {header_path}{_CHANGED}"
            )
            raise CorruptShardError(present_name(path), min(actual, nbytes), "F2", detail)
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
    """Publish the packs of an interrupted build at a prefix.

    A build that is complete except for renames is published as it is. For any other build, every pack whose data is
    complete in all files is kept. The rules are checked, and counts and checksums are computed again. The header of
    such a shard marks it as rebuilt, and its JSON block has ``recovered``: the number of packs that it has, and the
    number in the log. Memory stays at a few MiB. The remains are removed only when the new shard is complete and
    synced, so a recovery that is killed can be repeated.

    ``overwrite`` replaces a shard at the prefix. ``check`` is called when all files are complete, before the first
    rename. ``progress`` is called with the tokens read since the last call. Returns the header of the published shard.

    Raises:
        CorruptShardError: the files are marked as complete, but are not.
        FormatError: there is nothing to recover, another writer is active, or a shard may not be replaced.
    """
    paths = ShardPaths.of(prefix)
    refuse_journal(paths)
    try:
        building = Building.take(paths.prefix, create=False)
    except FileNotFoundError:
        raise FormatError(f"{paths.building}: there is no such folder, so there is nothing to recover") from None
    with building:
        remains = read_remains(paths, building)
        if remains is not None and remains.unpublished is not None:
            if not overwrite and remains.replaces:
                check_free(paths, overwrite=False)
            header = complete_header(paths)
            check(remains.unpublished)
            building.finish()
            return header
        check_free(paths, overwrite=overwrite)
        if remains is None or remains.options is None:
            raise FormatError(f"{building.folder}: no packs were being written, so there is nothing to recover")
        publication = Publication.resume(building, remains.options.paths_of(paths), overwrite=overwrite)
        writer = ShardWriter.of(publication, remains.options)
        if not (num_packs := writer.replay(remains.num_packs, progress)):
            raise FormatError(
                f"{building.folder}: no complete pack had been written yet, so there is nothing to recover; build it"
                " again"
            )
        writer.metadata[RECOVERED] = {"packs": num_packs, "packs_noted": remains.num_recorded}
        writer.complete()
        check({path: building.path(paths.suffix(path)) for path in writer.paths.all})
        return writer.finalize()
