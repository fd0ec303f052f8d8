"""Publication: the files of a shard appear together, or none does; and no file of anybody else is replaced or removed.

Files are written under temporary names in the shard's own folder. ``Publication.publish`` syncs them and renames the
data files, then ``.idx``, then columns, then ``.seq.idx``, whose presence makes a shard. When a shard is replaced, its
``.seq.idx`` is removed first, then its columns, so that no mix of old and new files ever looks like a shard.

Only files of this package are replaced or removed. A shard is recognised by the magic of its ``.seq.idx``, columns and
journals by their magics, and every other file by its inode, which a journal names.

A killed writer leaves temporary files and a journal. The next writer at the prefix finishes renames and removals that
had begun, and removes the temporary files of all other work (``finish_interrupted``). Where a new file is gone that the
journal names, nothing is renamed: a file of the replaced shard would be taken for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import MAGIC, column_of
from megatron_sft_idx.shard.journal import (
    DONE,
    FILE,
    MAGICS,
    JournalHead,
    by_suffix,
    closing_lock,
    cut_torn_block,
    encode_head,
    encode_inodes,
    inode_of,
    inodes_of,
    is_column,
    is_named_or_empty,
    lock_journal,
    locked_journal,
    locked_outputs,
    read_journal,
    unlink_locked,
    with_named_columns,
    with_present_columns,
)
from megatron_sft_idx.storage import OutputFile, name_in_errors, require_local, sync_folder
from megatron_sft_idx.storage.publish import (
    MAX_NAME_NBYTES,
    Kind,
    Place,
    check_lock,
    check_place,
    head_of,
    identity,
    make_folders,
    move_into_place,
    require_space,
    resolve,
)

_START_ANEW = "pass overwrite (--overwrite) to start anew (its data is dropped)"
# What the error about interrupted work says, by its kind, before the prefix.
_INTERRUPTED = {
    "build": f"left by a build that was interrupted; {_START_ANEW}, or recover its packs: megatron-sft-idx rebuild",
    "copy": f"left by a copy that was interrupted; run the same copy again, or {_START_ANEW}:",
    "rebuild": "left by a rebuild that was interrupted; run it again: megatron-sft-idx rebuild",
    "removal": "left by a removal of the shard that was interrupted; run the command that removed it again, which"
    " finishes it, or, to keep what is left, move this journal away and run megatron-sft-idx rebuild",
}


# ---- what is at a prefix ----


def places_of(prefix: str | ShardPaths, role: str, *, written: bool = False) -> list[Place]:
    """The places of a shard's files, present or not, for ``require_apart``.

    ``role`` is the shard's in error messages. If the shard is ``written``, temporary files and journal are included.
    """
    paths = ShardPaths.of(prefix)
    temporary = [paths.journal, *paths.unpublished.all] if written else []
    return [Place(file, role) for file in (*paths.all, *temporary)]


def check_free(
    paths: ShardPaths,
    *,
    overwrite: bool,
    only: Collection[str] | None = None,
    any_file: bool = False,
    nbytes: int = 0,
) -> dict[str, int]:
    """Check, before anything is written, that a shard may be written at a prefix.

    Unless the caller holds the lock, files of a living writer that come and go may be refused as a stranger's.

    Args:
        paths: of the shard, with the columns that it will have.
        overwrite: whether a shard at the prefix may be replaced.
        only: paths of the files that will be written, and of the columns that will be removed; None for all files of
            ``paths``, and all columns at the prefix.
        any_file: whether files may be replaced that belong to no recognisable shard. Only for a rebuild, which keeps
            what it replaces under other names.
        nbytes: how many bytes will be written at least.

    Returns:
        Inodes of the files that will be replaced, by path.

    Raises:
        FormatError: what is at one of the paths is not a file, belongs to no shard, or may not be replaced; or a name
            would be too long.
        OSError: too little space on the disk, or too few inodes.
    """
    paths = with_present_columns(paths, refuse_strange=True) if only is None else paths.with_columns_of(only)
    replaced = _check_room(paths, overwrite=overwrite, only=only, nbytes=nbytes)
    _require_ours(paths, [*(() if any_file else replaced), *paths.unpublished.all])
    return replaced


def _require_ours(paths: ShardPaths, files: Iterable[str]) -> None:
    """FormatError if one of these files of a shard, published or temporary, is there and belongs to no shard."""
    head = read_journal(paths)
    # What a copy or a rebuild that was killed among its renames had kept is named by no journal.
    is_shard = head_of(paths.seq_idx, len(MAGIC)) == MAGIC or _is_half_renamed(paths, head)

    def is_temporary(path: str) -> bool:
        return is_named_or_empty(path, head)

    def is_ours(path: str) -> bool:
        return (is_column(path) if column_of(path) else is_shard) or is_temporary(path)

    published = Kind("a file of a shard, which has a .seq.idx", is_ours)
    temporary = Kind("a temporary file that a journal names", is_temporary)
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # a living writer has just renamed the file
            check_place(path, temporary if path in paths.unpublished.all else published, overwrite=True)


def _check_room(paths: ShardPaths, *, overwrite: bool, only: Collection[str] | None, nbytes: int) -> dict[str, int]:
    """``check_free`` but for what other files hold, and for columns that are not among ``paths``."""
    require_local(paths.prefix, "writing a shard")
    resolve(paths.seq_idx)
    if max(len(os.fsencode(os.path.basename(path))) for path in paths.unpublished.all) > MAX_NAME_NBYTES:
        raise FormatError(
            f"{paths.prefix}: with what is added, a name of more than {MAX_NAME_NBYTES} bytes; choose a shorter one"
        )
    replaced = {path: inode for path, inode in inodes_of(paths.all).items() if only is None or path in only}
    if replaced and not overwrite:
        present, remedy = ", ".join(with_present_columns(paths).present()), "pass overwrite (--overwrite)"
        try:
            _require_ours(paths, [*replaced, *paths.unpublished.all])
        except FormatError:
            remedy = "move away what is here"
        raise FormatError(f"{paths.prefix}: {present} exist already; choose another prefix, or {remedy}")
    check_lock(paths.journal, MAGICS)
    require_space(paths.prefix, nbytes, len(paths.all if only is None else only) + 1)
    return replaced


# ---- what is removed ----


@contextlib.contextmanager
def locked_prefix(paths: ShardPaths, *, overwrite: bool = False) -> Iterator[int]:
    """Hold the lock of a prefix, after ``finish_interrupted``; the empty journal is removed at the end.

    Errors as of ``finish_interrupted``. FormatError: another writer is at work at the prefix.
    """
    with closing_lock(paths.journal, lock_journal(paths, create=True)) as lock:
        finish_interrupted(paths, lock, overwrite=overwrite, drops=("rebuild",))
        yield lock


def _remove_temporaries(paths: ShardPaths, head: JournalHead | None) -> None:
    """Remove the temporary files that the journal names, and empty ones."""
    for path in paths.unpublished.all:
        if inode_of(path) is not None and is_named_or_empty(path, head):
            os.unlink(path)


def remove_shard(paths: ShardPaths) -> None:
    """Remove the files of a shard, ``.seq.idx`` first. If this is killed, the next writer finishes the removal.

    FormatError: files without a ``.seq.idx`` are there, which may be stock data; or a writer is at work.
    """
    paths = with_present_columns(paths)
    if not paths.present():
        return
    with locked_prefix(paths) as lock:
        _require_ours(paths, paths.all)
        with contextlib.closing(OutputFile(paths.journal, append=True)) as journal:
            journal.write(encode_head({"work": "removal", "files": by_suffix(paths, inodes_of(paths.all))}))
        finish_interrupted(paths, lock, overwrite=False)


def remove_remains(prefix: str | os.PathLike[str] | ShardPaths) -> None:
    """Remove what an interrupted writer left at a prefix; a shard that is published there stays.

    FormatError: a writer is at work there, or the journal is torn and does not name the temporary files beside it.
    """
    paths = ShardPaths.of(prefix)
    if os.path.lexists(paths.journal):
        with locked_prefix(paths, overwrite=True):
            pass


def drop_build(paths: ShardPaths) -> None:
    """Remove what an interrupted writer of a new shard left at a prefix; remains of other work stay."""
    if (head := read_journal(paths)) is not None and head.work == "build":
        remove_remains(paths)


def finish_interrupted(paths: ShardPaths, lock: int, *, overwrite: bool, drops: Collection[str] = ()) -> None:
    """Finish what a killed writer had begun to remove or to rename, or else remove its files; then empty the journal.

    The caller must hold ``lock``, the journal's. Files that hold packs are removed with ``overwrite`` alone; and
    without it if they are not complete, and of a kind of work that ``drops`` has.

    FormatError: there are files that may not be removed; or the journal is torn, and does not name the files.
    """
    if not os.fstat(lock).st_size:
        return
    try:
        head = JournalHead.read(paths)
    except FormatError:
        # A torn head names no file of this package, so only empty files may be removed.
        if not overwrite or not all(is_named_or_empty(path, None) for path in paths.unpublished.all):
            raise
        head = None
    if head is None:
        paths = with_present_columns(paths)
    else:
        paths = with_named_columns(paths, head)
        if head.work == "removal":
            _remove_named(paths, head)
        elif head.replaced_inodes is not None:
            if not overwrite:
                raise renames_left_error(paths, head.work)
            if _is_half_renamed(paths, head):
                if not _lost(paths, head):
                    rename_all(paths, head, durable=True)
                # What a rebuild has replaced keeps a second name, and the next rebuild goes on from what is here.
                elif inode_of(paths.seq_idx) is None and head.work != "rebuild":
                    _remove_named(paths, head)
        elif not overwrite and head.work not in drops:
            raise interrupted_error(paths, head)
    _remove_temporaries(paths, head)
    # Last, because the journal must name the files as long as there are any to remove.
    with name_in_errors(paths.journal):
        os.ftruncate(lock, 0)


def _remove_named(paths: ShardPaths, head: JournalHead) -> None:
    """Remove the files at the prefix that the journal names: those that were written, and those that are replaced."""
    for path in reversed(paths.all):
        if inode_of(path) in head.inodes:
            os.unlink(path)


def _is_half_renamed(paths: ShardPaths, head: JournalHead | None) -> bool:
    """Whether a killed writer had begun to rename: what it replaces is not whole any more, so the rest must follow."""
    if head is None or head.replaced_inodes is None:
        return False
    all_paths = with_named_columns(paths, head).all
    has_renamed = any(inode_of(path) == head.files.get(paths.temporary(path), -1) for path in all_paths)
    return has_renamed or (paths.seq_idx in head.replaced_inodes and inode_of(paths.seq_idx) is None)


def interrupted_error(paths: ShardPaths, head: JournalHead) -> FormatError:
    """The error about what an interrupted writer left at a prefix, with a remedy."""
    return FormatError(f"{paths.journal}: {_INTERRUPTED[head.work]} {paths.prefix}")


def renames_left_error(paths: ShardPaths, work: str) -> FormatError:
    """The error about a shard that lies whole under temporary names, with a remedy."""
    return FormatError(
        f"{paths.journal}: left by a {work} that was interrupted, complete but for renames; finish it: megatron-sft-idx"
        f" rebuild {paths.prefix}"
    )


# ---- the steps of a publication ----


def rename_all(paths: ShardPaths, head: JournalHead, *, durable: bool) -> None:
    """Remove what is replaced and rename the new files, except what a killed writer had removed and renamed already.

    The caller must hold the lock, and the journal must have a DONE block. The folder is synced wherever a later step
    must not reach the disk before an earlier one. FormatError: a new file is gone, or another file has appeared at one
    of the paths; journal and files that are not renamed yet stay.
    """
    for path in _remove_replaced(paths, head, durable=durable):
        if path == paths.seq_idx:
            sync_folder(paths.folder, durable)
        move_into_place(paths.temporary(path), path, identity(path))
    sync_folder(paths.folder, durable)
    _remove_temporaries(with_named_columns(paths, head), head)


def _remove_replaced(paths: ShardPaths, head: JournalHead, *, durable: bool) -> list[str]:
    """Remove the ``.seq.idx`` of the shard that is replaced, then those of its columns that the new shard lacks.

    Returns the paths of the files that are still to be renamed. Errors as of ``rename_all``.
    """
    assert head.replaced_inodes is not None
    require_all(paths, head)
    to_rename = pending(paths, head)
    for path, inode in inodes_of(to_rename).items():
        if inode != head.replaced_inodes.get(path):
            raise FormatError(
                f"{path}: something else has appeared here since the build began, and was left alone; move it away,"
                f" then finish the build: megatron-sft-idx rebuild {paths.prefix}"
            )
    if paths.seq_idx in to_rename:
        if inode_of(paths.seq_idx) is not None:
            os.unlink(paths.seq_idx)
            sync_folder(paths.folder, durable)
        for path, inode in head.replaced_inodes.items():
            if paths.temporary(path) not in head.files and inode_of(path) == inode:
                os.unlink(path)
    return to_rename


def pending(paths: ShardPaths, head: JournalHead) -> list[str]:
    """Paths of the files that are still to be renamed: those whose temporary files the journal names.

    A file that has both names is not among them: where renaming takes a second link, a kill may leave it so.
    """
    return [
        path
        for path in with_named_columns(paths, head).all
        if inode_of(paths.temporary(path)) in head.files.values() and not _has_both_names(paths, path)
    ]


def naming_present(paths: ShardPaths, head: JournalHead) -> JournalHead:
    """The head, as if it named the temporary files that are present, and those that have been renamed since."""
    files = inodes_of(paths.unpublished.all)
    if head.replaced_inodes is not None:
        renamed = {paths.temporary(path): inode for path, inode in inodes_of(paths.all).items()}
        files = {name: inode for name, inode in renamed.items() if name in head.files} | files
    return head._replace(files=files)


def _has_both_names(paths: ShardPaths, path: str) -> bool:
    return inode_of(path) == inode_of(paths.temporary(path)) is not None


def require_named(paths: ShardPaths, head: JournalHead) -> None:
    """FormatError if a temporary file is not the one that the journal names, or has a name of somebody else's too."""
    for path in with_named_columns(paths, head).all:
        if (inode := inode_of(temporary := paths.temporary(path))) is None:
            continue
        # A file with a name of somebody else's (a hard link) would change under that name too.
        num_own_names = 1 + _has_both_names(paths, path)
        if inode not in head.files.values() or os.lstat(temporary).st_nlink > num_own_names:
            raise FormatError(
                f"{temporary}: not the file that {paths.journal} names, or one that has another name too (a hard link);"
                " recover the build where it was made, or, where all of it was copied, with megatron-sft-idx rebuild"
                f" --copied {paths.prefix}"
            )


def require_all(paths: ShardPaths, head: JournalHead) -> None:
    """FormatError if a file of a complete shard is gone: one of the shard that it replaces would be taken for it."""
    for temporary in _lost(paths, head):
        raise FormatError(f"{temporary}: was removed before it got its name; build the shard again (--overwrite)")


def _lost(paths: ShardPaths, head: JournalHead) -> list[str]:
    """Temporary names of the files that the journal names and that have neither this name nor that of the shard."""
    return [
        temporary
        for path in with_named_columns(paths, head).all
        if (written := head.files.get(temporary := paths.temporary(path))) is not None
        and written not in (inode_of(temporary), inode_of(path))
    ]


def is_set_aside(paths: ShardPaths) -> bool:
    """Whether a complete shard lies at a prefix under temporary names."""
    head = read_journal(paths)
    return (
        head is not None
        and head.replaced_inodes is not None
        and inode_of(paths.unpublished.seq_idx) in head.files.values()
    )


def publish_all(shards: Sequence[ShardPaths], *, durable: bool = True) -> None:
    """Publish shards that were set aside.

    All shards that they replace are removed before the first new one appears: new shards beside old ones would open as
    a dataset that lacks some packs and repeats others. FormatError: another file has appeared at one of the prefixes;
    ``rebuild``, or the next writer at a prefix, publishes the shards that are left.
    """
    for is_renaming in (False, True):
        for paths in shards:
            with locked_journal(paths) as lock:
                head = JournalHead.read(paths)
                if head is None or head.replaced_inodes is None:
                    raise FormatError(f"{paths.journal}: another command wrote here meanwhile; run this one again")
                if is_renaming:
                    rename_all(paths, head, durable=durable)
                    unlink_locked(paths.journal, lock)
                else:
                    _remove_replaced(paths, head, durable=durable)


# ---- the outputs of one job ----


def publish_outputs(
    prefix: str,
    shards: Sequence[ShardPaths],
    write: Callable[[Sequence[int]], Iterable[Header]],
    *,
    overwrite: bool,
    existing_header: Callable[[int], Header | None] | None = None,
    durable: bool = True,
) -> list[Header]:
    """Write all outputs of a job and publish them together; shards that they replace stay until all are whole.

    Args:
        prefix: what the prefixes of several outputs begin with.
        shards: all of them, with their columns.
        write: writes the outputs of these numbers, in their order, and sets each aside.
        overwrite: whether they may replace shards.
        existing_header: to go on with an interrupted job: the header of the output of a number, where that very output
            is published or set aside. It is not written again; one that was left unfinished is removed.
        durable: False skips fsync.

    Raises:
        FormatError: another shard is at a prefix, and may not be replaced.
        Exception: of ``write``; of what it has written nothing is left then.
    """
    is_alone = [paths.prefix for paths in shards] == [ShardPaths.of(prefix).prefix]
    with contextlib.nullcontext() if is_alone else locked_outputs(prefix):
        headers = [existing_header(number) if existing_header else None for number in range(len(shards))]
        missing = [number for number, header in enumerate(headers) if header is None]
        for paths in [shards[number] for number in missing]:
            check_free(paths, overwrite=overwrite, only=paths.all)
        for number in missing if existing_header else ():
            drop_build(shards[number])
        # What an earlier job set aside is replaced with overwrite alone; else it stays whatever becomes of this one.
        ours = [shards[number] for number in missing if overwrite or not is_set_aside(shards[number])]
        try:
            written = iter([*write(missing)])
        except Exception:  # a KeyboardInterrupt leaves what is set aside, for --resume
            for paths in ours:
                with contextlib.suppress(FormatError):  # a task on another machine still writes it
                    if is_set_aside(paths):
                        remove_remains(paths)
            raise
        publish_all([*filter(is_set_aside, shards)], durable=durable)
    return [next(written) if header is None else header for header in headers]


# ---- one shard ----


class Publication:
    """The temporary files of one shard that is being written, its journal, and the lock on its prefix.

    Args:
        paths: where the shard will be, with the columns that it will have.
        content: what the head of the journal holds beside the entries of every head.
        work: ``build``, ``copy`` or ``rebuild``.
        overwrite: whether a shard at the prefix may be replaced.
        durable: False skips fsync.
        only: as of ``check_free``, and so is ``nbytes``.
        drops: as of ``finish_interrupted``.
        lock: the lock of the prefix, if the caller holds it (``locked_prefix``), as a rebuild does. Then files at the
            prefix that belong to no recognisable shard may be replaced.

    Attributes:
        head: the head of the journal, as it is now.
        is_resumed: whether an interrupted writer began the work (``resume``).
        closed: whether nothing more can be written, because ``close`` was called.

    Raises:
        FormatError: something is at the prefix, or another process is writing there.
        OSError: of the disk, or too little room on it.
    """

    def __init__(
        self,
        paths: ShardPaths,
        content: Mapping[str, Any],
        *,
        work: str = "build",
        overwrite: bool,
        durable: bool = True,
        only: Collection[str] | None = None,
        nbytes: int = 0,
        drops: Collection[str] = (),
        lock: int | None = None,
    ) -> None:
        paths.require_own_names()
        self._set_fields(paths, durable, JournalHead({}, work, {}, None), borrowed=lock is not None)
        _check_room(paths, overwrite=overwrite, only=only, nbytes=nbytes)
        make_folders(paths.prefix)
        self._lock = lock_journal(paths, create=True) if lock is None else os.dup(lock)
        options: dict[str, Any] = {"overwrite": overwrite, "any_file": lock is not None, "nbytes": nbytes}
        try:
            # Nothing that a killed writer left is removed before all is checked under the lock.
            if lock is None and os.fstat(self._lock).st_size:
                check_free(paths, only=only, **options)
                finish_interrupted(paths, self._lock, overwrite=overwrite, drops=drops)
            with_columns = with_present_columns(paths, refuse_strange=only is None)
            self._replaced = check_free(paths, only=with_columns.all if only is None else only, **options)
            _remove_temporaries(with_columns, None)
            self.journal = OutputFile(paths.journal, durable=durable, append=True)
            self.closed = False
            for path in paths.all:
                if only is None or path in only:
                    name = paths.temporary(path)
                    self._files[name] = OutputFile(name, durable=durable)
                    self.head.files[name] = os.fstat(self._files[name].fileno()).st_ino
            described = {"work": work, "overwrite": overwrite, "files": by_suffix(paths, self.head.files)}
            self.journal.write(encode_head({**content, **described}))
            self.journal.sync()
            sync_folder(self.paths.folder, self.durable)
        except BaseException:
            if self.closed:
                if not os.fstat(self._lock).st_size:
                    unlink_locked(paths.journal, self._lock)
                os.close(self._lock)
            self.abandon()
            raise

    def _set_fields(self, paths: ShardPaths, durable: bool, head: JournalHead, *, borrowed: bool = False) -> None:
        self.paths, self.durable, self.head, self._borrowed = paths, durable, head, borrowed
        self._files: dict[str, OutputFile] = {}
        self._replaced = {}
        self._process, self.closed, self.is_resumed = os.getpid(), True, False

    @classmethod
    def resume(
        cls, paths: ShardPaths, *, overwrite: bool, copied: bool = False, only: Collection[str] | None = None
    ) -> Publication:
        """Go on with what an interrupted writer left; takes the lock. ``open`` opens the files.

        ``overwrite`` and ``only`` are as when the work was begun. If journal and temporary files were ``copied`` to
        this folder, and so have other inodes, the journal is told to name the files that lie beside it.

        Raises:
            FileNotFoundError: there is no journal.
            CorruptShardError: the head of the journal is torn.
            FormatError: another writer is at work, or a temporary file is not the one that the journal names.
        """
        self = cls.__new__(cls)
        lock = lock_journal(paths, create=False)
        try:
            if (head := JournalHead.read(paths)) is None:
                raise FileNotFoundError(paths.journal)
            paths = with_named_columns(paths, head)
            self._set_fields(paths, True, head)
            self._lock, self.is_resumed = lock, True
            if not copied:
                require_named(paths, head)
            if overwrite and head.replaced_inodes is None:
                self._replaced = check_free(paths, overwrite=True, only=only)
            self.journal = OutputFile(paths.journal, append=True)
        except BaseException:
            os.close(lock)
            raise
        self.closed = False
        try:
            if copied:
                self._name_files()
        except BaseException:
            self.close()
            raise
        return self

    def require_owner(self) -> None:
        """FormatError in a forked process: it shares the positions of open files with the process that opened them."""
        if os.getpid() != self._process:
            raise FormatError(
                f"{self.paths.prefix}: this writer belongs to process {self._process} and this is a fork of it;"
                " let every process write a prefix of its own"
            )

    def open(self, path: str, *, keep: bool = False) -> OutputFile:
        """The temporary file of the file that will be at ``path``. Its content is removed unless ``keep``."""
        name = self.paths.temporary(path)
        if name not in self._files:
            try:
                self._files[name] = OutputFile(name, durable=self.durable, append=True)
            except FileNotFoundError:  # it was removed since, or not copied here with the others
                self._files[name] = OutputFile(name, durable=self.durable)
                self._name_files()
        if not keep:
            self._files[name].truncate(0)
        return self._files[name]

    def drop(self, path: str) -> None:
        """Remove the temporary file of ``path``, where no new file will be published then."""
        if (file := self._files.pop(self.paths.temporary(path), None)) is not None:
            file.close()
            os.unlink(file.path)
            self._name_files()

    def _name_files(self) -> None:
        """Let the journal name the temporary files that are present."""
        self.head = naming_present(self.paths, self.head)
        self._append_inodes(FILE, self.head.files)

    def _append_inodes(self, kind: bytes, inodes: Mapping[str, int]) -> None:
        """Append a block of inodes, by path, to the journal."""
        if self.is_resumed:
            cut_torn_block(self.journal)
        self.journal.write(encode_inodes(kind, by_suffix(self.paths, inodes)))
        self.journal.sync()

    def complete(self) -> None:
        """Sync all files, then append DONE to the journal: only renames are left.

        FormatError: a file has appeared at the prefix since the work began, or a temporary one is gone.
        """
        paths = self.paths
        written = [path for path in paths.all if paths.temporary(path) in self._files]
        for temporary in map(paths.temporary, written):
            (file := self._files[temporary]).sync()
            if inode_of(temporary) != os.fstat(file.fileno()).st_ino:
                raise FormatError(f"{temporary}: was removed or replaced while it was written; build the shard again")
        replaced = inodes_of((*written, *(path for path in self._replaced if path not in paths.all)))
        if appeared := [path for path in replaced if replaced[path] != self._replaced.get(path)]:
            raise FormatError(
                f"{paths.prefix}: {', '.join(appeared)} exist already, which were not there when this was begun;"
                " choose another prefix"
            )
        # Before the journal says DONE, the files and their names must be on disk.
        sync_folder(self.paths.folder, self.durable)
        self.head = self.head._replace(replaced_inodes=replaced)
        self._append_inodes(DONE, replaced)

    def set_aside(self) -> None:
        """``complete``, then release the lock. The shard stays under temporary names until ``publish_all``."""
        self.complete()
        self.close()

    def publish(self) -> None:
        """``complete``, then ``finish``."""
        self.complete()
        self.finish()

    def finish(self) -> None:
        """Rename the files of a shard that is complete, and remove the journal.

        If that fails, the journal and the files that are not renamed yet stay, because the replaced shard may be gone.
        """
        try:
            rename_all(self.paths, self.head, durable=self.durable)
            self._end_journal()
        finally:
            self.close()

    def abandon(self) -> None:
        """Remove the temporary files and the journal. Does nothing after ``close``, ``finish`` or ``abandon``.

        A forked process only closes them: its garbage collection must not remove what its parent still writes.
        """
        if self.closed:
            return
        if os.getpid() == self._process:
            for path in self.paths.unpublished.all:
                with contextlib.suppress(FileNotFoundError):
                    if os.lstat(path).st_ino in self.head.files.values():
                        os.unlink(path)
            self._end_journal()
        self.close()

    def _end_journal(self) -> None:
        """Remove the journal; or empty it, if the lock is the caller's."""
        if self._borrowed:
            self.journal.truncate(0)
        else:
            unlink_locked(self.paths.journal, self._lock)

    def close(self) -> None:
        """Close all files and release the lock; what is on disk stays. May be called twice."""
        if self.closed:
            return
        self.closed = True
        for file in (*self._files.values(), self.journal):
            file.close()
        os.close(self._lock)
