"""What is at a prefix, and what may go from there.

What is replaced or removed is known to be of this package: a shard by the magic of its ``.seq.idx``, a column and a
journal by their own, everything else by the inode that a journal names. What a killed writer left is brought to an
end by the next one that has the lock: half done it is dropped, complete but for renames it is finished forward, and so
is a removal.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import COLUMN_MAGIC
from megatron_sft_idx.layout.files import column_of
from megatron_sft_idx.layout.header import MAGIC
from megatron_sft_idx.layout.journal import MAGICS, Head, encode_head
from megatron_sft_idx.storage import OutputFile, naming, require_local, sync_folder
from megatron_sft_idx.storage.publish import (
    MAX_NAME_NBYTES,
    Kind,
    Place,
    check_lock,
    check_place,
    describe,
    head_of,
    identity,
    lock_file,
    make_folders,
    put,
    require_space,
    resolve,
)

__all__ = [
    "SHORTER",
    "check_free",
    "empty_journal",
    "held",
    "inode_of",
    "is_column",
    "is_journal",
    "is_only_name",
    "is_set_aside",
    "left",
    "lock_journal",
    "locked_journal",
    "name_held",
    "named_by",
    "parts_held",
    "places_of",
    "publish_all",
    "read_journal",
    "remove_remains",
    "remove_shard",
    "remove_shorter",
    "remove_temporaries",
    "rename_all",
    "settle",
    "suffix_of",
    "unlink_locked",
    "with_present",
]

# Added to the name of a journal that is being written anew.
SHORTER = ".tmp"
_ANEW = "pass overwrite (--overwrite) to start anew (its data is dropped)"
_LEFT = {
    "build": f"left by a build that was interrupted; {_ANEW}, or recover its packs: megatron-sft-idx rebuild",
    "copy": f"left by a copy that was interrupted; run the same copy again, or {_ANEW}:",
    "rebuild": "left by a rebuild that was interrupted; run it again: megatron-sft-idx rebuild",
}


def lock_journal(paths: ShardPaths, *, create: bool, shared: bool = False) -> int:
    """The lock of whoever writes at a prefix, as a descriptor of the journal. Errors as ``lock_file``."""
    busy = f"{paths.prefix}: another writer is at work here now; wait for it, or choose another prefix"
    return lock_file(paths.journal, MAGICS, create=create, shared=shared, busy=busy)


def places_of(prefix: str | ShardPaths, role: str, *, written: bool = False) -> list[Place]:
    """The files of a shard, there or not, for ``require_apart``; one that is written has other names first."""
    paths = ShardPaths.of(prefix)
    before = [paths.journal, *paths.unpublished.all] if written else []
    return [Place(file, role) for file in (*paths.all, *before)]


@contextlib.contextmanager
def locked_journal(paths: ShardPaths, *, create: bool = False, shared: bool = False) -> Iterator[int]:
    """``lock_journal``, given up in the end."""
    lock = lock_journal(paths, create=create, shared=shared)
    try:
        yield lock
    finally:
        os.close(lock)


@contextlib.contextmanager
def _kept_while_needed(path: str, lock: int) -> Iterator[int]:
    """Give a lock up in the end, and remove its file, unless that says what was cut short."""
    try:
        try:
            yield lock
        finally:
            if not os.fstat(lock).st_size:
                unlink_locked(path, lock)
    finally:
        os.close(lock)


def check_free(
    paths: ShardPaths,
    *,
    overwrite: bool,
    only: Collection[str] | None = None,
    any_file: bool = False,
    nbytes: int = 0,
) -> dict[str, int]:
    """Find out whether a shard may be written at a prefix, before anything is.

    Args:
        paths: of the shard, with the columns that it will have.
        overwrite: whether a shard may be replaced.
        only: the files that will be written, and columns that go; None for all files, and all columns there go.
        any_file: also files that are of no shard that can be recognised: a rebuild keeps them under another name.
        nbytes: what will be written at least.

    Returns:
        Inodes of the files that will be replaced, by path.

    Raises:
        FormatError: something is at one of the names, and is no file, is of no shard, or may not be replaced.
        OSError: too little space, or too few inodes.
    """
    require_local(paths.prefix, "writing a shard")
    resolve(paths.seq_idx)
    if only is None:
        paths = with_present(paths)
    else:
        paths = paths.with_columns(column[1] for path in only if (column := column_of(path)))
    longest = max(len(os.fsencode(os.path.basename(path))) for path in paths.unpublished.all)
    if longest > MAX_NAME_NBYTES:
        raise FormatError(f"{paths.prefix}: with what is added, a name of more than {MAX_NAME_NBYTES} bytes; choose a"
                          " shorter one")  # fmt: skip
    written = paths.all if only is None else [path for path in paths.all if path in only]
    found = {path: inode for path in paths.all if (inode := inode_of(path)) is not None}
    present = [path for path in written if path in found]
    if present and not overwrite:
        raise FormatError(
            f"{paths.prefix}: {', '.join(present)} exist already;"
            " choose another prefix, or pass overwrite (--overwrite)"
        )
    replaced = present if not any_file else []
    try:
        _refuse_strangers(paths, replaced)
    except FormatError:  # unless a living writer was taking its last steps between the looks
        _refuse_strangers(paths, replaced)
    check_lock(paths.journal, MAGICS)
    remove_shorter(paths, dry_run=True)
    require_space(paths.prefix, nbytes, len(written) + 1)
    return {path: found[path] for path in present}


def _refuse_strangers(paths: ShardPaths, present: Iterable[str]) -> None:
    """FormatError where a file that is present, or one under a temporary name, is not of this package."""
    head, is_shard = read_journal(paths), head_of(paths.seq_idx, len(MAGIC)) == MAGIC
    ours = Kind("a file of a shard, which has a .seq.idx", lambda path: _is_ours(path, is_shard) or _may_go(path, head))
    temporary = Kind("a temporary file that a journal names", lambda path: _may_go(path, head))
    for kind, places in ((ours, present), (temporary, paths.unpublished.all)):
        for path in places:
            with contextlib.suppress(FileNotFoundError):  # a living writer has just renamed it: nothing is here
                check_place(path, kind, overwrite=True)


def _is_ours(path: str, is_shard: bool) -> bool:
    """Whether a published file is known to be of this package; ``is_shard`` where a ``.seq.idx`` is beside it."""
    return is_column(path) if column_of(path) else is_shard


def is_column(path: str) -> bool:
    """Whether a file is a column of a shard."""
    return head_of(path, len(COLUMN_MAGIC)) == COLUMN_MAGIC


def with_present(paths: ShardPaths, head: Head | None = None) -> ShardPaths:
    """The files that are meant, and the columns that lie at the prefix: one look at the folder.

    Columns are known by their magic; temporary ones by the journal whose head is given, or as empty.
    """
    folder, name = os.path.split(paths.prefix)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder or ".") as entries:
        for entry in [entry.name for entry in entries if entry.name.startswith(name + ".")]:
            final = entry.removesuffix(paths.temporary(""))
            if (found := column_of(final)) is None or found[0] != name:
                continue
            path = os.path.join(folder, entry)
            if is_column(path) if entry == final else _is_regular(path) and _may_go(path, head):
                paths = paths.with_columns([found[1]])
    return paths


def _is_regular(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def named_by(paths: ShardPaths, head: Head) -> ShardPaths:
    """The files that are meant, and the columns that a journal names."""
    ending = paths.temporary("")
    found = (column_of(paths.prefix + suffix.removesuffix(ending)) for suffix in (*head.files, *(head.done or {})))
    return paths.with_columns(column[1] for column in found if column and column[0] == paths.prefix)


def inode_of(path: str) -> int | None:
    """Of a file; None for nothing. FormatError for anything else."""
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            return status.st_ino
        raise FormatError(
            f"{path}: {describe(path)} is here, expected a file of a shard or nothing; choose another prefix, or"
            " move it away"
        )
    return None


def is_journal(path: str) -> bool:
    """Whether a file says what is done at a prefix; one that is there for its lock alone is empty (``name_held``)."""
    return head_of(path, len(MAGICS[0])) in MAGICS


def read_journal(paths: ShardPaths) -> Head | None:
    """What a journal says; None where it says nothing, or is none of this package."""
    with contextlib.suppress(FormatError, FileNotFoundError):
        if is_journal(paths.journal):
            return Head.read(paths.journal)
    return None


def _may_go(path: str, head: Head | None) -> bool:
    """Whether what is at a path is nothing, is empty as a kill leaves it, or is a file that a journal names."""
    named = () if head is None else (*head.files.values(), *(head.done or {}).values())
    return (inode := inode_of(path)) is None or inode in named or _is_empty(path)


def _is_empty(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_size == 0
    return True


def is_only_name(path: str, inodes: Collection[int]) -> bool:
    """Whether nothing is at a path, or one of these files that has no other name (hard link), so that it may be cut."""
    return inode_of(path) is None or (inode_of(path) in inodes and os.lstat(path).st_nlink == 1)


def remove_temporaries(paths: ShardPaths, head: Head | None) -> None:
    """Remove the temporary files that a journal names, and empty ones."""
    for path in with_present(paths, head).unpublished.all:
        if inode_of(path) is not None and _may_go(path, head):
            os.unlink(path)
    remove_shorter(paths)


def remove_shorter(paths: ShardPaths, *, dry_run: bool = False) -> None:
    """Remove what a kill left of a journal that was being written anew. FormatError where it is something else."""
    path = paths.journal + SHORTER
    if inode_of(path) is None:
        return
    if not _is_empty(path) and head_of(path, len(MAGICS[0])) not in MAGICS:
        raise FormatError(f"{path}: a file that megatron-sft-idx did not write is here; move it away")
    if not dry_run:
        os.unlink(path)


def unlink_locked(path: str, lock: int) -> None:
    """Remove the file that a lock is on, and no other."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.lstat(path)):
            os.unlink(path)


@contextlib.contextmanager
def held(paths: ShardPaths, *, create: bool = True) -> Iterator[int]:
    """Keep writers away from a prefix where no build is half done; in the end its journal is gone.

    Yields:
        The descriptor of the lock.

    Raises:
        FormatError: another writer is at work, or was interrupted here.
    """
    with _kept_while_needed(paths.journal, lock_journal(paths, create=create)) as lock:
        settle(paths, lock, overwrite=False, drops=("rebuild",))
        yield lock


def remove_shard(paths: ShardPaths) -> None:
    """Remove the files of a shard, ``.seq.idx`` first; a removal that is killed is finished by the next writer."""
    paths = with_present(paths)
    if not any(map(os.path.lexists, paths.all)):
        return
    with held(paths) as lock:
        found = {suffix_of(paths, path): inode for path in paths.all if (inode := inode_of(path)) is not None}
        with contextlib.closing(OutputFile(paths.journal, keep=True)) as journal:
            journal.write(encode_head({"work": "removal", "files": found}))
        _finish_removal(paths, found.values())
        empty_journal(paths, lock)


def empty_journal(paths: ShardPaths, lock: int) -> None:
    """Empty a journal whose lock is held; what it named is gone, or has its name."""
    with naming(paths.journal):
        os.ftruncate(lock, 0)


def _finish_removal(paths: ShardPaths, inodes: Collection[int]) -> None:
    for path in reversed(paths.all):
        if inode_of(path) in inodes:
            os.unlink(path)


def settle(paths: ShardPaths, lock: int, *, overwrite: bool, drops: Collection[str] = ()) -> None:
    """Bring what a killed writer left to an end, and empty the journal, whose lock is held.

    Args:
        paths: of the shard.
        lock: of the journal.
        overwrite: drop what was half done; what was complete but for renames is finished forward.
        drops: what may be dropped in any case.

    Raises:
        FormatError: what is left is not for this writer to drop.
    """
    if not os.fstat(lock).st_size:
        return
    try:
        head = Head.read(paths.journal)
        assert head is not None
    except FormatError:
        # It says nothing that would make these files anybody's.
        if not overwrite or not all(map(_is_empty, paths.unpublished.all)):
            raise
        head = None
    if head is not None:
        paths = named_by(paths, head)
    if head is not None and head.work == "removal":
        _finish_removal(paths, head.files.values())
    elif head is not None and head.done is not None:
        if not overwrite:
            raise FormatError(
                f"{paths.journal}: left by a {head.work} that was interrupted, complete but for renames; finish it:"
                f" megatron-sft-idx rebuild {paths.prefix}"
            )
        if _is_begun(paths, head):
            rename_all(paths, head, durable=True)
    elif head is not None and not overwrite and head.work not in drops:
        raise left(paths, head)
    remove_temporaries(paths, head)
    # Not before: files that no journal names are nobody's to remove.
    empty_journal(paths, lock)


def _is_begun(paths: ShardPaths, head: Head) -> bool:
    """Whether a step of ``rename_all`` was taken, so that the shard that is replaced is none any more."""
    files = [path for path in paths.all if suffix_of(paths, paths.temporary(path)) in head.files]
    replaces = suffix_of(paths, paths.seq_idx) in (head.done or {})
    return _pending(paths, head) != files or (replaces and inode_of(paths.seq_idx) is None)


def left(paths: ShardPaths, head: Head) -> FormatError:
    """The error about what an interrupted writer left, and what may be done with it."""
    return FormatError(f"{paths.journal}: {_LEFT[head.work]} {paths.prefix}")


def rename_all(paths: ShardPaths, head: Head, *, durable: bool) -> None:
    """Take the steps that are left once the journal says DONE; those taken before a kill are passed over.

    The folder is synced wherever a later step must not reach the disk before an earlier one.

    Raises:
        FormatError: something else has appeared at one of the names; the rest and the journal stay as they are.
    """
    paths = named_by(paths, head)
    for path in _remove_seq_idx(paths, head, durable=durable):
        if path == paths.seq_idx and durable:
            sync_folder(paths.folder)
        put(paths.temporary(path), path, identity(path))
    if durable:
        sync_folder(paths.folder)


def _remove_seq_idx(paths: ShardPaths, head: Head, *, durable: bool) -> list[str]:
    """The first of the steps: from here on the old shard is none, and its columns are gone that no new ones replace.

    Returns the files that have yet to be renamed.
    """
    assert head.done is not None
    paths = named_by(paths, head)
    pending = _pending(paths, head)
    for path in pending:
        if (inode := inode_of(path)) is not None and inode != head.done.get(suffix_of(paths, path)):
            raise FormatError(
                f"{path}: something else has appeared here since the build began, and was left alone; move it away,"
                f" then finish the build: megatron-sft-idx rebuild {paths.prefix}"
            )
    if paths.seq_idx in pending:
        if inode_of(paths.seq_idx) is not None:
            os.unlink(paths.seq_idx)
            if durable:
                sync_folder(paths.folder)
        for suffix, inode in head.done.items():
            path = paths.prefix + suffix
            if paths.temporary(suffix) not in head.files and inode_of(path) == inode:
                os.unlink(path)
    return pending


def _pending(paths: ShardPaths, head: Head) -> list[str]:
    """The files that have yet to be renamed."""
    return [path for path in paths.all if inode_of(paths.temporary(path)) in head.files.values()]


def suffix_of(paths: ShardPaths, path: str) -> str:
    """What is added to the prefix, by which a journal names a file."""
    return path.removeprefix(paths.prefix)


@contextlib.contextmanager
def name_held(path: str, busy: str) -> Iterator[None]:
    """Hold the lock of a file that is there for it alone, and goes in the end; it may not hold anything."""
    with _kept_while_needed(path, lock_file(path, (), create=True, busy=busy)):
        yield


@contextlib.contextmanager
def parts_held(prefix: str) -> Iterator[None]:
    """Keep others away from all shards whose prefixes begin with one and a number."""
    make_folders(prefix)
    busy = f"{prefix}: another command writes shards of this name now; wait for it, or choose another prefix"
    with name_held(f"{prefix}-parts.journal", busy):
        yield


def is_set_aside(paths: ShardPaths) -> bool:
    """Whether a shard is whole here but for its names."""
    head = read_journal(paths)
    return head is not None and head.done is not None and inode_of(paths.unpublished.seq_idx) in head.files.values()


def publish_all(shards: Sequence[ShardPaths], *, durable: bool = True) -> None:
    """Publish shards that were set aside: all that they replace goes before the first appears.

    New shards beside old ones would open as a dataset that lacks some packs and repeats others.

    Raises:
        FormatError: something else has appeared at one of the prefixes. What is left of them can be finished forward:
            ``rebuild`` does, and so does whoever writes them again.
    """
    for last in (False, True):
        for paths in shards:
            with locked_journal(paths) as lock:
                head = Head.read(paths.journal)
                if head is None or head.done is None:
                    raise FormatError(f"{paths.journal}: another command wrote here meanwhile; run this one again")
                if last:
                    rename_all(paths, head, durable=durable)
                    remove_temporaries(paths, head)
                    unlink_locked(paths.journal, lock)
                else:
                    _remove_seq_idx(paths, head, durable=durable)


def remove_remains(prefix: str | os.PathLike[str] | ShardPaths) -> None:
    """Remove what an interrupted writer left half done at a prefix; a shard there stays.

    Raises:
        FormatError: a living writer is at work here, or the journal is torn and names none of the files beside it.
    """
    paths = ShardPaths.of(prefix)
    if not os.path.lexists(paths.journal):
        return
    with locked_journal(paths) as lock:
        settle(paths, lock, overwrite=True)
        unlink_locked(paths.journal, lock)
