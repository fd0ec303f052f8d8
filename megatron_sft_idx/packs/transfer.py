"""Copy whole shards into local folders, from a disk or an object store. All bytes are checked against checksums.

The files of a shard, including columns, are published together, ``.seq.idx`` last. The next copy of the same shard
continues with the files that an interrupted copy left in its building folder. Nothing here looks inside packs or
repairs a shard. Copies into object stores are in ``buckets``.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError, StorageError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.files import CHECKSUM_NBYTES, DATA_SUFFIXES, MEDIA_SUFFIXES, SUFFIXES, listed_columns
from megatron_sft_idx.shard import check_free, read_header
from megatron_sft_idx.shard.at_prefix import with_present_files
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.media_reader import open_media
from megatron_sft_idx.shard.opening import column_names, columns_beside, is_of_another_shard, object_at
from megatron_sft_idx.shard.publication import Publication, finish_interrupted, places_of
from megatron_sft_idx.storage import check_size, is_remote, open_regular
from megatron_sft_idx.storage.building import Building, take_free
from megatron_sft_idx.storage.local import StreamHash, digest_file, read_beginning, stamp_of
from megatron_sft_idx.storage.progress import Advance
from megatron_sft_idx.storage.publish import require_apart, require_space
from megatron_sft_idx.storage.remote import ObjectInfo, open_store
from megatron_sft_idx.storage.remote.store import read_ahead
from megatron_sft_idx.storage.remote.transport import request_pool

_READ_NBYTES = 1 << 20
_CHUNK_NBYTES = 8 << 20


class Copied(NamedTuple):
    """The result of copying a shard.

    The number of bytes written, and of bytes that were already right at ``prefix``; the number of unfinished uploads of
    earlier attempts that were removed; and notes on what could not be determined, one sentence each.
    """

    prefix: str
    nbytes_sent: int
    nbytes_found: int
    uploads_aborted: int = 0
    notes: tuple[str, ...] = ()


class FileContent(NamedTuple):
    """The required content of a shard's file.

    Attributes:
        head: the file's first bytes: the header of a column or of ``.media.items``; empty for every other file.
        rest: size and checksum of the bytes after ``head``.
    """

    head: bytes
    rest: FileDigest

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + self.rest.nbytes

    @property
    def checksum(self) -> str:
        """Checksum (hex) of the file; for a column, of its header, which contains the checksum of the rows."""
        return (self.head[-CHECKSUM_NBYTES:] or self.rest.checksum).hex()

    def is_at(self, path: str) -> bool:
        """Return whether a local file has this content. It is read only if its size is right."""
        if not os.path.isfile(path) or os.path.islink(path) or os.path.getsize(path) != self.nbytes:
            return False
        is_same_head = read_beginning(path, len(self.head)) == self.head
        return is_same_head and digest_file(path, len(self.head)) == self.rest


class ContentCheck:
    """Compares bytes, which arrive in chunks and in order, with the required content of a file."""

    def __init__(self, content: FileContent) -> None:
        self._content, self._head, self._rest = content, b"", StreamHash()

    def update(self, chunk: bytes | memoryview) -> None:
        """Process the next bytes."""
        missing = len(self._content.head) - len(self._head)
        self._head += chunk[:missing]
        self._rest.update(chunk[missing:])

    def passed(self) -> bool:
        """Return whether all bytes of the file have arrived and were right."""
        return self._head == self._content.head and self._rest.digest() == self._content.rest


class CopySource:
    """A shard to copy. All its files exist and have the sizes given in its headers.

    Args:
        prefix: prefix of the shard, local or remote.
        beside: names of the columns whose files are at the prefix (``columns_beside``); None to look for them.

    Attributes:
        paths: paths of its files, including columns.
        header: its header, checked.
        seq_idx: all bytes of its ``.seq.idx``, checked: the header, and 16 bytes per pack.
        files: the required content of each file, by suffix, in the order of publication.
        attached: suffixes of the attached columns, which its header does not list.
        notes: what could not be determined, one sentence each.

    Raises:
        ShardNotFoundError: some of its files are missing.
        CorruptShardError: its ``.seq.idx`` or a column breaks a rule, or a file has another size (rule F2).
        StorageError: the store cannot be read.
    """

    def __init__(self, prefix: str, beside: Collection[str] | None = None) -> None:
        self.paths = ShardPaths.of(prefix)
        self._objects = _objects(self.paths) if is_remote(self.paths.prefix) else {}
        sizes = {suffix: info.nbytes for suffix, info in self._objects.items()} or _local_sizes(self.paths)
        if missing := [self.paths.prefix + suffix for suffix in SUFFIXES if suffix not in sizes]:
            raise ShardNotFoundError(self.paths.prefix, missing, "check the path, or restore the missing files")
        self.seq_idx = b"".join(self.chunks(".seq.idx"))
        self.header = header = Header.decode(self.seq_idx, self.paths.seq_idx)
        check_size(self.paths.seq_idx, len(self.seq_idx), header.seq_idx_nbytes)
        if xxhash.xxh3_128_digest(memoryview(self.seq_idx)[header.nbytes :]) != header.arrays_checksum:
            detail = "the checksum of the arrays does not match; restore the file from a copy"
            raise CorruptShardError(self.paths.seq_idx, None, "F3", detail)
        digests = dict(zip(DATA_SUFFIXES, header.digests, strict=True))
        digests[".seq.idx"] = FileDigest(len(self.seq_idx), xxhash.xxh3_128_digest(self.seq_idx))
        for suffix, digest in digests.items():
            check_size(self.paths.prefix + suffix, sizes[suffix], digest.nbytes)
        contents = {suffix: FileContent(b"", digest) for suffix, digest in digests.items()}
        self.notes: tuple[str, ...] = ()
        columns = self._columns(beside)
        media = open_media(self.paths, header, "pread")
        self.paths = self.paths.with_columns(columns).with_media(media is not None)
        if media is not None:
            head = media.header.encode()
            items = FileDigest(media.header.nbytes - len(head), media.header.arrays_checksum)
            contents[".media.items"] = FileContent(head, items)
            contents[".media.data"] = FileContent(b"", FileDigest(media.header.data_nbytes, media.header.data_checksum))
        if self._objects:
            self._objects = _objects(self.paths)
        for name in columns:
            column = open_column(self.paths, name, header, "pread").header
            head = column.encode()
            contents[f".{name}.col"] = FileContent(head, FileDigest(column.nbytes - len(head), column.checksum))
        self.files = {
            path.removeprefix(self.paths.prefix): contents[path.removeprefix(self.paths.prefix)]
            for path in self.paths.all
        }
        self.attached = {f".{name}.col" for name in columns if name not in listed_columns(header.metadata)}

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(content.nbytes for content in self.files.values())

    def _columns(self, beside: Collection[str] | None) -> list[str]:
        """Return the names of the columns; only the listed ones if the credentials cannot list objects."""
        try:
            return column_names(self.paths, self.header, beside)
        except StorageError as error:
            self.notes = (f"{self.paths.prefix}: could not look for attached columns: {error}",)
            return sorted(listed_columns(self.header.metadata))

    def chunks(self, suffix: str, offset: int = 0) -> Iterator[bytes | memoryview]:
        """Yield the bytes of one file from ``offset`` on, unchecked."""
        if self._objects:
            store = open_store(self.paths.prefix)[0]
            yield from read_ahead(store, self._objects[suffix], offset=offset, range_nbytes=_CHUNK_NBYTES)
            return
        with open_regular(self.paths.prefix + suffix) as file:
            file.seek(offset)
            while chunk := file.read(_CHUNK_NBYTES):
                yield chunk

    def corrupt(self, suffix: str) -> CorruptShardError:
        """Return the error about a file with wrong content (rule F3, C7 for a column, M13 for media)."""
        content = self.files[suffix]
        expected = f"{content.rest.nbytes:,} bytes with checksum {content.rest.checksum.hex()}"
        detail = (
            f"its content does not match the header, which records {expected}; the file was changed or damaged:"
            " restore it from a copy, or make the shard again with --overwrite"
        )
        rule = "M13" if suffix in MEDIA_SUFFIXES else "C7" if content.head else "F3"
        return CorruptShardError(self.paths.prefix + suffix, None, rule, detail)


def shard_nbytes(prefix: str, beside: Collection[str] | None = None) -> int:
    """Return the size of a shard's existing files in bytes, for progress. See ``CopySource`` for ``beside``."""
    if beside is None:
        beside = ()
        with contextlib.suppress(StorageError):  # the credentials may not be able to list objects
            beside = columns_beside([prefix])[prefix]
    paths = ShardPaths.of(prefix).with_columns(beside).with_media()
    sizes = [info.nbytes for info in _objects(paths).values()] if is_remote(prefix) else _local_sizes(paths).values()
    return sum(sizes)


def _local_sizes(paths: ShardPaths) -> dict[str, int]:
    return {path.removeprefix(paths.prefix): os.path.getsize(path) for path in paths.all if os.path.isfile(path)}


def _objects(paths: ShardPaths) -> dict[str, ObjectInfo]:
    """Return the existing objects of a shard, by suffix."""
    infos = request_pool().map(object_at, paths.all)
    return {path.removeprefix(paths.prefix): info for path, info in zip(paths.all, infos, strict=True) if info}


def destinations(prefixes: Sequence[str], target: str) -> list[str]:
    """Return the target prefix of each shard: in the folder ``target``, or ``target`` itself if it is not a folder.

    FormatError: several shards would have the same target.
    """
    if not target.endswith("/") and (is_remote(target) or not os.path.isdir(target)):
        if len(prefixes) == 1:
            return [ShardPaths.of(target).prefix]
        raise FormatError(
            f"{target}: a single prefix, but there are {len(prefixes)} shards; end it with / to make it a folder"
        )
    names = Counter(os.path.basename(prefix) for prefix in prefixes)
    if twice := [name for name, count in names.items() if count > 1]:
        raise FormatError(f"{target}: two of the shards have the name {twice[0]}; copy them to different folders")
    folder = target if target.endswith("/") else target + "/"
    return [folder + name for name in names]


def check_destinations(
    prefixes: Sequence[str], targets: Sequence[str], beside: Mapping[str, Collection[str]], *, overwrite: bool
) -> None:
    """Check all local targets before the first shard is copied. FormatError: one cannot be written.

    ``beside`` has the value for ``CopySource`` for each prefix.
    """
    local = {target: prefix for prefix, target in zip(prefixes, targets, strict=True) if not is_remote(target)}
    require_apart(
        [place for target in local for place in places_of(target, "DST", written=True)],
        [place for prefix in prefixes if not is_remote(prefix) for place in places_of(prefix, "SRC")],
    )
    for target, prefix in local.items():
        paths = ShardPaths.of(target)
        if not is_remote(prefix):
            header = read_header(prefix)
            names = column_names(ShardPaths.of(prefix), header, beside.get(prefix))
            paths = paths.with_listed(header.metadata).with_columns(names)
        check_free(paths, overwrite=True, any_file=not overwrite)
        if not overwrite and with_present_files(paths).present():
            _compare(CopySource(prefix, beside.get(prefix)), paths, overwrite=False)


def download(
    source: CopySource, prefix: str, *, overwrite: bool = False, on_progress: Advance = lambda nbytes: None
) -> Copied:
    """Copy a shard to a local prefix. Existing files with the right checksum are not fetched again.

    ``overwrite`` replaces an existing shard. ``on_progress`` is called with the bytes that have arrived since the last
    call.

    Raises:
        CorruptShardError: a file of the source does not have its checksum.
        FormatError: something else is at the prefix, or another process writes it.
        OSError: an error of the disk.
    """
    paths = ShardPaths.of(prefix).with_columns(source.paths.columns).with_media(source.paths.media)
    finish_interrupted(paths, overwrite=overwrite)
    right, obsolete = _compare(source, paths, overwrite=overwrite)
    missing = [suffix for suffix in source.files if suffix not in right]
    # A right .seq.idx is written again after the other files: without them there is no shard. The exception is one
    # attached column. With several of these, a kill could mix columns of the source with columns that were here.
    is_alone = len(missing) == 1 and missing[0] in source.attached
    if missing and ".seq.idx" in right and not is_alone:
        missing.append(".seq.idx")
    if missing:
        kept = {paths.prefix + suffix: stamp for suffix, stamp in right.items() if suffix not in missing}
        _fetch_all(source, paths, missing, kept, obsolete, overwrite, on_progress)
    elif os.path.isdir(paths.building):
        with contextlib.suppress(FormatError), Building.take(paths.prefix) as building:
            if overwrite or building.holds({"work": "copy"}):
                building.discard()
            building.release()
    nbytes = sum(content.nbytes for suffix, content in source.files.items() if suffix not in missing)
    on_progress(nbytes)
    return Copied(paths.prefix, source.nbytes - nbytes, nbytes, notes=source.notes)


def _stamp(path: str) -> tuple[int, ...] | None:
    return stamp_of(os.stat(path)) if os.path.exists(path) else None


_Stamps = Mapping[str, tuple[int, ...] | None]  # of files, by suffix or path


def _compare(source: CopySource, paths: ShardPaths, *, overwrite: bool) -> tuple[_Stamps, list[str]]:
    """Return the right files at the target, by suffix; and paths of columns and media of a shard to replace.

    FormatError: other files are at the target, and ``overwrite`` is False.
    """
    targets = {suffix: paths.prefix + suffix for suffix in source.files}
    stamps = {suffix: _stamp(path) for suffix, path in targets.items()}  # before the files are read
    right = {suffix: stamp for suffix, stamp in stamps.items() if source.files[suffix].is_at(targets[suffix])}
    obsolete = []
    if ".seq.idx" not in right:
        beside = [path for path in with_present_files(ShardPaths(paths.prefix)).all if path not in targets.values()]
        media = paths.media_data, paths.media_items
        obsolete = [path for path in beside if path in media or is_of_another_shard(path, source.header.shard_id)]
    replaced = [path for suffix, path in targets.items() if suffix not in right and os.path.lexists(path)] + obsolete
    if replaced and not overwrite:
        raise other_shard_error(paths.prefix, replaced)
    return right, obsolete


def other_shard_error(prefix: str, present: Sequence[str]) -> FormatError:
    """Return the error about files at the target prefix that do not belong to this shard."""
    return FormatError(
        f"{prefix}: {', '.join(present)} already exist and do not belong to this shard; choose another prefix, or pass"
        " overwrite (--overwrite)"
    )


def _fetch_all(
    source: CopySource,
    paths: ShardPaths,
    suffixes: list[str],
    kept: _Stamps,
    obsolete: list[str],
    overwrite: bool,
    on_progress: Advance,
) -> None:
    """Copy files to the building folder, publish them, and remove the columns at the paths ``obsolete``.

    The files to replace were compared with the source. Without ``overwrite``, its ``.seq.idx`` is the same.

    FormatError: a file that was to be ``kept`` (its stamp by its path) has changed since it was compared.
    """
    only = [*(paths.prefix + suffix for suffix in suffixes), *obsolete]
    may_replace = overwrite or (".seq.idx" in suffixes and source.files[".seq.idx"].is_at(paths.seq_idx))
    content = {"work": "copy", "shard_id": source.header.shard_id.hex()}
    nbytes = sum(source.files[suffix].nbytes for suffix in suffixes)
    arrived = sum(map(os.path.getsize, paths.unpublished.present()))
    require_space(paths.prefix, nbytes - arrived, len(suffixes) + 4)
    building = take_free(paths.prefix, overwrite=overwrite)
    try:
        if building.holds(content):
            new = Publication.resume(building, paths, overwrite=may_replace, only=only)
        else:
            building.clear()
            new = Publication(paths, content, overwrite=may_replace, only=only, building=building)
        for path in paths.all:
            if paths.suffix(path) not in suffixes:
                new.drop(path)
        if any(_stamp(path) != stamp for path, stamp in kept.items()):
            raise FormatError(
                f"{paths.prefix}: another command wrote to this prefix at the same time; run this command again"
            )
        # The remains of an earlier attempt may be damaged; then the file is copied from its beginning.
        attempts = (True, False) if new.is_resumed else (False,)
        for suffix in suffixes:
            if not any(_fetch(source, suffix, new, keep, on_progress) for keep in attempts):
                raise source.corrupt(suffix)
        new.complete()
        new.finish()
    except CorruptShardError:
        building.discard()
        raise
    finally:
        building.release()  # the data that has arrived stays for the next attempt


def _fetch(source: CopySource, suffix: str, new: Publication, keep: bool, on_progress: Advance) -> bool:
    """Copy one file; with ``keep``, from where an earlier attempt stopped. Return whether all of it is right."""
    file, content = new.open(new.paths.prefix + suffix, keep=keep), source.files[suffix]
    if file.nbytes > content.nbytes:
        file.truncate(0)
    check = ContentCheck(content)
    for offset in range(0, file.nbytes, _READ_NBYTES):
        check.update(file.read_at(offset, _READ_NBYTES))
    on_progress(file.nbytes)
    # For .seq.idx, write the bytes that were checked when the source was opened.
    index = [memoryview(source.seq_idx)[file.nbytes :]]
    for chunk in index if suffix == ".seq.idx" else source.chunks(suffix, file.nbytes):
        file.write(chunk)
        check.update(chunk)
        on_progress(len(chunk))
    if check.passed():
        return True
    on_progress(-file.nbytes)
    return False
