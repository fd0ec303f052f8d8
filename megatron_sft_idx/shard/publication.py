"""Publication: the files of a shard appear together or not at all, and unrelated files are never replaced or removed.

Files are written in the shard's building folder (``storage.building``). When they are complete and synced, they are
renamed: first the data files, then ``.idx``, the columns, and finally ``.seq.idx``, whose presence makes a shard. When
a shard is replaced, its ``.seq.idx`` is removed first, then its columns, so that no mix of old and new files ever looks
like a shard.

Only files of this package are replaced or removed. A shard is recognised by the magic of its ``.seq.idx`` or by its
building folder, and a column by its own magic.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import MEDIA_SUFFIXES, column_of
from megatron_sft_idx.shard.at_prefix import (
    has_media,
    inodes_of,
    is_column,
    is_shard,
    refuse_journal,
    with_present_files,
)
from megatron_sft_idx.storage import OutputFile, require_local
from megatron_sft_idx.storage.building import Building, may_drop, require_replaceable, take_free
from megatron_sft_idx.storage.building_files import (
    LOGS,
    building_of,
    is_whole_at,
    lost_files,
    read_done,
    require_ours,
    require_short,
)
from megatron_sft_idx.storage.publish import Kind, Place, check_place, require_space, resolve

# ---- the state of a prefix ----


def places_of(prefix: str | ShardPaths, role: str, *, written: bool = False) -> list[Place]:
    """Return the places of a shard's files, existing or not, for ``require_apart``.

    ``role`` is the shard's role in error messages. If the shard is ``written``, its building folder is included.
    """
    paths = ShardPaths.of(prefix)
    building = [Place(paths.building, role, folder=True)] if written else []
    return [*(Place(file, role) for file in paths.all), *building]


def check_free(
    paths: ShardPaths,
    *,
    overwrite: bool,
    only: Collection[str] | None = None,
    any_file: bool = False,
    nbytes: int = 0,
) -> dict[str, int]:
    """Check, before writing anything, that a shard may be written at a prefix.

    Args:
        paths: paths of the shard, with the columns that it will have.
        overwrite: whether a shard at the prefix may be replaced.
        only: paths of the files to write and of the columns to remove; None for all files of ``paths`` and all columns
            at the prefix.
        any_file: whether files that belong to no recognisable shard may be replaced. Only for a rebuild, which keeps
            the files that it replaces under other names.
        nbytes: minimum number of bytes that will be written.

    Returns:
        Inodes of the files to replace, by suffix; ``.seq.idx`` comes first if it is one of them.

    Raises:
        FormatError: something at one of the paths is not a file, belongs to no shard, or may not be replaced; or a name
            would be too long.
        OSError: the disk has too little space or too few inodes.
    """
    _check_room(paths, num_files=len(paths.all if only is None else only), nbytes=nbytes)
    paths = with_present_files(paths, refuse_strange=True) if only is None else paths.with_files_of(only)
    require_ours(paths.prefix)
    refuse_journal(paths)
    present = [path for path in reversed(paths.all) if only is None or path in only]
    replaced = inodes_of(paths, present)
    if not overwrite and replaced:
        shown = (
            [paths.prefix + suffix for suffix in reversed(replaced)] if only else with_present_files(paths).present()
        )
        exist, them = ("already exists", "it") if len(shown) == 1 else ("already exist", "them")
        names, remedy = ", ".join(shown), "pass overwrite (--overwrite)"
        try:
            _require_shard(paths, replaced)
        except FormatError:
            remedy = f"move {them} away"
        raise FormatError(f"{paths.prefix}: {names} {exist}; choose another prefix, or {remedy}")
    if not any_file:
        _require_shard(paths, replaced)
    for suffix in replaced:
        require_replaceable(paths.prefix + suffix)
    return replaced


def _require_shard(paths: ShardPaths, suffixes: Iterable[str]) -> None:
    """Raise FormatError if one of these files at a prefix belongs to no shard."""
    is_of_shard, is_of_media = is_shard(paths), has_media(paths)
    file = Kind("a file of a shard, which has a .seq.idx", lambda _: is_of_shard)
    column = Kind("a column of a shard", is_column)
    media = Kind("a file of a shard's images and audio, which has a .media.items", lambda _: is_of_media)
    for suffix in suffixes:
        kind = file if column_of(path := paths.prefix + suffix) is None else column
        with contextlib.suppress(FileNotFoundError):
            check_place(path, media if suffix in MEDIA_SUFFIXES else kind, overwrite=True)


def _check_room(paths: ShardPaths, *, num_files: int, nbytes: int) -> None:
    """Raise FormatError or OSError if files of a shard cannot be created at a prefix, independent of existing files."""
    require_local(paths.prefix, "writing a shard")
    for path in paths.all:
        resolve(path)
    require_short(paths.prefix)
    require_space(paths.prefix, nbytes, num_files + 4)


# ---- remains of a killed writer ----


def finish_interrupted(prefix: str | ShardPaths, *, overwrite: bool = False) -> None:
    """Publish the files of an interrupted writer if all of them are complete.

    With ``overwrite``, files that may be dropped are left to the next writer. FormatError: a writer is active there, or
    an error of ``Building.finish``.
    """
    paths = ShardPaths.of(prefix)
    if not os.path.isdir(paths.building):
        return
    try:
        building = Building.take(paths.prefix, create=False)
    except FileNotFoundError:
        return
    with building:
        if building.is_done and not (overwrite and may_drop(paths.prefix)):
            building.finish()
        building.release()  # a kill may have left an empty folder


@contextlib.contextmanager
def taken(prefix: str, *, overwrite: bool = False) -> Iterator[Building]:
    """Provide the empty building folder of a prefix, and remove it at the end unless ``finish`` was called.

    Complete work of an interrupted writer is published first, and its other remains are removed. See ``take_free`` for
    the argument and errors.
    """
    building = take_free(prefix, overwrite=overwrite)
    try:
        building.clear()
        yield building
    finally:
        building.discard()


# ---- one shard ----


class Publication:
    """The unpublished files of a shard that is being written.

    As a context manager it removes them unless it is finished.

    Args:
        paths: final paths of the shard, with the columns that it will have.
        content: content of ``build.json``.
        overwrite: whether a shard at the prefix may be replaced.
        durable: False skips fsync.
        only: see ``check_free``, also for ``nbytes`` and ``any_file``.
        building: the folder of the prefix, if the caller has taken it and removes it at the end. Otherwise it is taken
            here.
        wait: maximum number of seconds to wait for another active writer.
        may_be_found: the shard at the prefix may be identical to the one being written, which is then dropped.

    Attributes:
        building: the folder.
        is_resumed: whether an interrupted writer began the work (``resume``).

    Raises:
        FormatError: something is at the prefix, or another process is writing there.
        OSError: an error of the disk, or too little space on it.
    """

    def __init__(
        self,
        paths: ShardPaths,
        content: Mapping[str, Any],
        *,
        overwrite: bool,
        durable: bool = True,
        only: Collection[str] | None = None,
        nbytes: int = 0,
        any_file: bool = False,
        building: Building | None = None,
        wait: float = 0.0,
        may_be_found: bool = False,
    ) -> None:
        paths.require_own_names()
        self.paths, self.is_resumed = paths, False
        self._borrowed = building is not None
        self._closed = False
        if building is None:
            _check_room(paths, num_files=len(paths.all if only is None else only), nbytes=nbytes)
            building = take_free(paths.prefix, overwrite=overwrite, durable=durable, wait=wait)
        self.building = building
        try:
            may_replace = overwrite or may_be_found
            # The remains of a shard that a killed writer was replacing are recognised by its folder, which is removed
            # now.
            self._any_file = any_file or is_whole_at(paths.prefix)
            self._replaced = check_free(paths, overwrite=may_replace, only=only, any_file=any_file, nbytes=nbytes)
            if self._borrowed:
                building.clear_files()
            else:
                building.clear()
            building.begin({**(building.content or {}), **content})
        except BaseException:
            if not self._borrowed:
                building.release()
            raise

    @classmethod
    def resume(
        cls, building: Building, paths: ShardPaths, *, overwrite: bool, only: Collection[str] | None = None
    ) -> Publication:
        """Continue with the files that an interrupted writer left in a folder, which the caller has taken."""
        self = cls.__new__(cls)
        self.paths, self.is_resumed = paths, True
        self._borrowed, self._closed, self._any_file, self.building = True, False, False, building
        self._replaced = check_free(paths, overwrite=overwrite, only=only)
        return self

    def __enter__(self) -> Publication:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    @property
    def closed(self) -> bool:
        """Whether writing is no longer possible."""
        return self._closed or self.building.closed

    def open(self, path: str, *, keep: bool = False) -> OutputFile:
        """Return the unpublished file for the final path ``path``. Its content is removed unless ``keep``."""
        return self.building.open(self.paths.suffix(path), keep=keep)

    def open_log(self, name: str) -> OutputFile:
        """Return the file in which a writer logs what it has written, one of ``LOGS`` (``pack_log``)."""
        return self.building.open(name, keep=True)

    def drop(self, path: str) -> None:
        """Remove the unpublished file of ``path`` if no new file will be published there."""
        self.building.remove(self.paths.suffix(path))

    def stage(self) -> None:
        """Sync all files. FormatError: a file has appeared at the prefix since the work began."""
        paths = self.paths.with_files_of(self.paths.prefix + suffix for suffix in self._replaced)
        written = [path for path in self.paths.all if os.path.lexists(self.building.path(paths.suffix(path)))]
        replaced = inodes_of(
            paths, (path for path in reversed(paths.all) if path in written or path not in self.paths.all)
        )
        if appeared := [suffix for suffix in replaced if replaced[suffix] != self._replaced.get(suffix)]:
            names = ", ".join(paths.prefix + suffix for suffix in appeared)
            raise FormatError(f"{paths.prefix}: someone else created {names} in the meantime; choose another prefix")
        if not self._any_file:
            _require_shard(paths, replaced)  # a new file may have got the inode of a file that was removed since
        self.building.stage(list(map(paths.suffix, written)), replaced)

    def set_aside(self) -> None:
        """``stage``, then leave the publication to the job (``publish_outputs``)."""
        self.stage()
        if not self._borrowed:
            self.building.complete(awaits=True)
        self.close()

    def complete(self) -> None:
        """``stage``, and record that all files are complete. Only renames are left."""
        self.stage()
        self.building.complete()

    def finish(self) -> None:
        """Publish the shard after ``complete``. If this fails, the remaining work can be finished later."""
        self.building.finish()

    def abandon(self) -> None:
        """Remove what was written. Does nothing after ``close``, ``finish`` or ``abandon``.

        A forked process only closes it: its garbage collection must not remove files that its parent still writes.
        """
        if self.closed:
            return
        if not self._borrowed:
            self.building.discard()
        else:
            for path in (*map(self.paths.suffix, self.paths.all), *LOGS):
                self.building.remove(path)
        self.close()

    def close(self) -> None:
        """Close all files, and release the lock unless it belongs to a job. Files on disk stay. Can be called twice."""
        self._closed = True
        if not self._borrowed:
            self.building.close()


def remove_shard(paths: ShardPaths) -> None:
    """Remove the files of a shard, ``.seq.idx`` first. After a kill, the next writer finishes the removal.

    FormatError: there are files without a ``.seq.idx``, which may be stock data, or a writer is active.
    """
    finish_interrupted(paths)
    if not with_present_files(paths).present():
        return
    with taken(paths.prefix) as building:
        paths = with_present_files(paths)
        replaced = inodes_of(paths, reversed(paths.all))
        _require_shard(paths, replaced)
        building.begin({"work": "removal"})
        building.stage([], replaced)
        building.complete()
        building.finish()


# ---- the outputs of one job ----


@contextlib.contextmanager
def job_folder(prefix: str, content: Mapping[str, Any], *, overwrite: bool, durable: bool = True) -> Iterator[Building]:
    """Provide the building folder of a job with several outputs, whose prefixes begin with ``prefix``.

    Complete outputs of a killed job are published first. After an error the folder is removed. See ``take_free`` for
    errors.
    """
    job = take_free(prefix, overwrite=overwrite, durable=durable)
    try:
        job.clear()
        job.begin(content)
        yield job
    except Exception:  # a KeyboardInterrupt leaves the folder, like a kill
        job.discard()
        raise
    finally:
        job.close()


def publish_outputs(
    job: Building,
    shards: Sequence[ShardPaths],
    write: Callable[[Sequence[int]], Iterable[Header]],
    *,
    overwrite: bool,
    existing_header: Callable[[int], Header | None],
) -> list[Header]:
    """Write all outputs of a job and publish them together. Shards that they replace stay until all are complete.

    Args:
        job: the folder of the job, already begun. One of the shards may be written in it.
        shards: all output shards, with their columns. The prefix of each is the job's output or begins with it.
        write: writes the outputs of these numbers in this order, and sets each aside.
        overwrite: whether they may replace shards.
        existing_header: returns the header of an output by number if this same output is already published or set aside
            by an earlier attempt at the job. It is then not written again.

    Raises:
        FormatError: another shard is at a prefix, and may not be replaced.
        Exception: an error of ``write``. Its files are then removed, except for what a kill would leave.
    """
    for paths in shards:
        if paths.prefix != job.output:
            finish_interrupted(paths, overwrite=overwrite)  # remains of another command: a removal or a shard
    headers = [existing_header(number) for number in range(len(shards))]
    missing = [number for number, header in enumerate(headers) if header is None]
    for number in missing:
        check_free(shards[number], overwrite=overwrite, only=shards[number].all)
    try:
        written = iter([*write(missing)])
    except Exception:  # after a KeyboardInterrupt, outputs that are set aside stay for the next attempt
        for number in missing:
            _drop_output(job, shards[number].prefix)
        raise
    for number in missing:
        if (prefix := shards[number].prefix) != job.output and not is_set_aside(prefix):
            raise FormatError(f"{prefix}: another command wrote here in the meantime; run this one again")
    ends = (paths.prefix.removeprefix(job.output) for paths in shards)
    job.complete([end for end in ends if end and is_set_aside(job.output + end)])
    job.finish()
    return [next(written) if header is None else header for header in headers]


def is_set_aside(prefix: str) -> bool:
    """Return whether the building folder of a prefix has a complete shard. FormatError: ``done.json`` is damaged."""
    is_of_shard = is_whole_at(prefix) and ".seq.idx" in read_done(prefix).files
    return is_of_shard and not lost_files(prefix)


def _drop_output(job: Building, prefix: str) -> None:
    """Remove what this job, or an earlier attempt at it, has written for one of its outputs."""
    if prefix == job.output or building_of(prefix) is None:
        return
    work = (job.content or {}).get("work")
    # A task on another machine may still be writing it.
    with contextlib.suppress(FormatError, FileNotFoundError), Building.take(prefix, create=False) as output:
        if output.holds({"work": work}) and not output.is_done:
            output.discard()
