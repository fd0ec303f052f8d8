"""Inspect a prefix: which files of a shard exist there, and which of them a writer may replace."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import COLUMN_MAGIC
from megatron_sft_idx.layout.files import MAGIC, SEQ_IDX, column_of, listed_media
from megatron_sft_idx.layout.media_layout import MEDIA_MAGIC
from megatron_sft_idx.storage.building_files import building_of, is_half_finished, is_whole_at
from megatron_sft_idx.storage.publish import describe, head_of

# The first bytes of a journal that earlier versions of this package kept next to a shard during a build.
_JOURNAL_MAGIC = b"SFTJRNL"


def inode_of(path: str) -> int | None:
    """Return the inode of the regular file at a path, or None if nothing exists.

    FormatError: it is not a regular file.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        what = f"there is {describe(path)}, expected a file of a shard or nothing"
        raise FormatError(f"{path}: {what}; choose another prefix, or move it away")
    return status.st_ino


def inodes_of(paths: ShardPaths, files: Iterable[str]) -> dict[str, int]:
    """Return the inodes of the existing files of a shard, by suffix."""
    inodes = {paths.suffix(path): inode_of(path) for path in files}
    return {suffix: inode for suffix, inode in inodes.items() if inode is not None}


def is_column(path: str) -> bool:
    """Return whether a file is a column of a shard."""
    return head_of(path, len(COLUMN_MAGIC)) == COLUMN_MAGIC


def is_shard(paths: ShardPaths) -> bool:
    """Return whether a prefix has a shard's files: one has the magic of ``.seq.idx``, or some are already renamed."""
    if head_of(paths.seq_idx, len(MAGIC)) == MAGIC:
        return True
    return is_whole_at(paths.prefix) and is_half_finished(paths.prefix)


def has_media(paths: ShardPaths) -> bool:
    """Return whether a prefix has the two media files of a shard, or is about to get them.

    This is the case if the items file has its magic, if ``.seq.idx`` lists both files (which may be lost or damaged),
    or if some files are already renamed. Otherwise nothing distinguishes encoded media from an unrelated file.
    """
    if head_of(paths.media_items, len(MEDIA_MAGIC)) == MEDIA_MAGIC:
        return True
    head = head_of(paths.seq_idx, SEQ_IDX.fixed_nbytes)
    if lists_media(head_of(paths.seq_idx, SEQ_IDX.stated_nbytes(head)), paths.seq_idx):
        return True
    return is_whole_at(paths.prefix) and is_half_finished(paths.prefix)


def lists_media(raw: bytes, path: str) -> bool:
    """Return whether the header of a ``.seq.idx`` is complete and lists images and audio."""
    with contextlib.suppress(FormatError):
        return listed_media(Header.decode(raw, path).metadata) is not None
    return False


def is_building(paths: ShardPaths) -> bool:
    """Return whether there is unfinished work at a prefix."""
    return building_of(paths.prefix) is not None


def holds_shard_files(paths: ShardPaths) -> bool:
    """Return whether the building folder of a prefix has files of a shard."""
    return is_building(paths) and any(map(os.path.lexists, paths.unpublished.all))


def with_present_files(paths: ShardPaths, *, refuse_strange: bool = False) -> ShardPaths:
    """Return ``paths``, extended by the columns, images and audio that exist at the prefix. Scans the folder once.

    FormatError: with ``refuse_strange``, a file or link has the name of a column that is not in ``paths``, but is not a
    column. Next to a shard it would count as a damaged column.
    """
    folder, name = os.path.split(paths.prefix)
    found: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder or ".") as entries:
        for entry in entries:
            may_be = entry.name.startswith(name + ".") and entry.name.endswith(".col")
            if not may_be or not entry.is_file():
                continue
            path = paths.prefix + entry.name.removeprefix(name)
            if column_of(path) is None:
                continue
            if not entry.is_symlink() and is_column(path):
                found.append(path)
            elif refuse_strange and path not in paths.all:
                raise FormatError(
                    f"{path}: the file has the name of a column of {paths.prefix}, but is not a column; rename it, or"
                    " choose another prefix"
                )
    return paths.with_files_of(found).with_media(has_media(paths))


def refuse_journal(paths: ShardPaths) -> None:
    """Raise FormatError if an earlier version of this package left unfinished work at a prefix."""
    journal = paths.prefix + ".journal"
    if head_of(journal, len(_JOURNAL_MAGIC)) == _JOURNAL_MAGIC:
        raise FormatError(
            f"{journal}: unfinished work of an earlier version of this package; finish it with that version, or remove"
            f" this file and the {os.path.basename(paths.prefix)}.*.tmp files next to it, and build again"
        )
