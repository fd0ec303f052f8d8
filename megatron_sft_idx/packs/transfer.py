"""Whole shards into local folders, held to their checksums on the way: what arrives has the bytes that were sent.

The files of each, columns among them, are published together, ``.seq.idx`` last. What has arrived of an interrupted
copy is named by its journal; the next copy of the same shard goes on from there. Nothing here looks inside a shard or
mends it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError, StorageError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.column import listed_columns
from megatron_sft_idx.layout.files import CHECKSUM_NBYTES, DATA_SUFFIXES, SUFFIXES, column_of
from megatron_sft_idx.shard import check_free, read_header, recover
from megatron_sft_idx.shard.columns import column_names, columns_beside, is_of_another_shard, open_column
from megatron_sft_idx.shard.publication import Publication, places_of, read_journal, with_present_columns
from megatron_sft_idx.storage import check_size, is_remote, open_regular
from megatron_sft_idx.storage.local import StreamHash, digest_file
from megatron_sft_idx.storage.progress import Advance
from megatron_sft_idx.storage.publish import require_apart
from megatron_sft_idx.storage.remote import ObjectInfo, open_store
from megatron_sft_idx.storage.remote.store import read_ahead
from megatron_sft_idx.storage.remote.transport import request_pool

_READ_NBYTES = 1 << 20
_CHUNK_NBYTES = 8 << 20


class Copied(NamedTuple):
    """One shard, copied.

    Attributes:
        prefix: where it is now.
        nbytes_sent: bytes of the files that were written.
        nbytes_found: bytes of those that were there already.
        uploads_aborted: unfinished uploads of earlier attempts that were removed.
        notes: what could not be found out, a sentence each.
    """

    prefix: str
    nbytes_sent: int
    nbytes_found: int
    uploads_aborted: int = 0
    notes: tuple[str, ...] = ()


class FileContent(NamedTuple):
    """What a file of a shard holds.

    Attributes:
        head: bytes that are known already: the header of a column.
        rest: size and checksum of those behind them.
    """

    head: bytes
    rest: FileDigest

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + self.rest.nbytes

    @property
    def checksum(self) -> str:
        """In hex, what stands for all of it: of a column, the checksum of its header, which has that of the rest."""
        return (self.head[-CHECKSUM_NBYTES:] or self.rest.checksum).hex()

    def is_at(self, path: str) -> bool:
        """Whether a local file is this one; it is read only where the size fits."""
        if not os.path.isfile(path) or os.path.islink(path) or os.path.getsize(path) != self.nbytes:
            return False
        with open_regular(path) as file:
            same = file.read(len(self.head)) == self.head
        return same and digest_file(path, len(self.head)) == self.rest


class ContentCheck:
    """Bytes that come one after the other, held to what a file must hold.

    Args:
        content: that of the file.
    """

    def __init__(self, content: FileContent) -> None:
        self._content, self._rest, self._nbytes, self._same = content, StreamHash(), 0, True

    def update(self, piece: bytes | memoryview) -> None:
        """The next bytes."""
        head = self._content.head[self._nbytes :]
        self._same = self._same and piece[: len(head)] == head[: len(piece)]
        self._rest.update(piece[len(head) :])
        self._nbytes += len(piece)

    def passed(self) -> bool:
        """Whether they were what they must be, to the end."""
        return self._same and self._nbytes == self._content.nbytes and self._rest.digest() == self._content.rest


class CopySource:
    """A shard whose files are there and have the sizes that their headers say.

    Args:
        prefix: local or remote.
        beside: names of the columns whose files lie there, by ``columns_beside``; None to look.

    Attributes:
        paths: where it is, with its columns: those that it lists, and those that were attached to it.
        header: its header, checked.
        seq_idx: its whole ``.seq.idx``, checked: 16 bytes a pack and the header.
        files: what each file holds, by suffix, in the order of publication.
        attached: suffixes of the columns that it does not list.
        notes: what could not be found out.

    Raises:
        ShardNotFoundError: some of its files are missing.
        CorruptShardError: its ``.seq.idx`` or a column breaks a rule, or a file has another size (rule F2).
        StorageError: the store cannot be read.
    """

    def __init__(self, prefix: str, beside: Collection[str] | None = None) -> None:
        self.paths = ShardPaths.of(prefix)
        self._objects = _objects(self.paths.prefix, SUFFIXES) if is_remote(self.paths.prefix) else None
        sizes = _local_sizes(self.paths) if self._objects is None else {s: o.nbytes for s, o in self._objects.items()}
        if missing := [self.paths.prefix + suffix for suffix in SUFFIXES if suffix not in sizes]:
            raise ShardNotFoundError(self.paths.prefix, missing, "check the path, or restore what is missing")
        self.seq_idx = b"".join(self.chunks(".seq.idx"))
        self.header = header = Header.decode(self.seq_idx, self.paths.seq_idx)
        check_size(self.paths.seq_idx, len(self.seq_idx), header.seq_idx_nbytes)
        if xxhash.xxh3_128_digest(memoryview(self.seq_idx)[header.nbytes :]) != header.arrays_checksum:
            detail = "the arrays do not have their checksum; restore the file"
            raise CorruptShardError(self.paths.seq_idx, header.nbytes, "F3", detail)
        digests = dict(zip(DATA_SUFFIXES, self.header.digests, strict=True))
        digests[".seq.idx"] = FileDigest(len(self.seq_idx), xxhash.xxh3_128_digest(self.seq_idx))
        for suffix, digest in digests.items():
            check_size(self.paths.prefix + suffix, sizes[suffix], digest.nbytes)
        self.notes: tuple[str, ...] = ()
        columns = self._columns(beside)
        self.paths = self.paths.with_columns(columns)
        if self._objects is not None:
            self._objects |= _objects(self.paths.prefix, [f".{name}.col" for name in columns])
        contents = {suffix: FileContent(b"", digest) for suffix, digest in digests.items()}
        for name in columns:
            column = open_column(self.paths, name, self.header, "pread").header
            head = column.encode()
            rest = FileDigest(column.nbytes - len(head), column.checksum)
            contents[f".{name}.col"] = FileContent(head, rest)
        suffixes = [path.removeprefix(self.paths.prefix) for path in self.paths.all]
        self.files = {suffix: contents[suffix] for suffix in suffixes}
        listed = listed_columns(self.header.metadata)
        self.attached = {f".{name}.col" for name in columns if name not in listed}

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(content.nbytes for content in self.files.values())

    def _columns(self, beside: Collection[str] | None) -> list[str]:
        """Names of the columns; not everybody who may read objects may also list them."""
        try:
            return column_names(self.paths, self.header, beside)
        except StorageError as error:
            self.notes = (f"{self.paths.prefix}: columns that were attached could not be looked for: {error}",)
            return sorted(listed_columns(self.header.metadata))

    def chunks(self, suffix: str, offset: int = 0) -> Iterator[bytes | memoryview]:
        """The bytes of one of the files from ``offset`` on, not checked."""
        if self._objects is not None:
            store = open_store(self.paths.prefix)[0]
            yield from read_ahead(store, self._objects[suffix], offset=offset, range_nbytes=_CHUNK_NBYTES)
            return
        with open_regular(self.paths.prefix + suffix) as file:
            file.seek(offset)
            while chunk := file.read(_CHUNK_NBYTES):
                yield chunk

    def corrupt(self, suffix: str) -> CorruptShardError:
        """What is wrong with a file whose bytes are not what it must hold (rule F3, of a column C7)."""
        content = self.files[suffix]
        expected = f"{content.rest.nbytes:,} bytes with checksum {content.rest.checksum.hex()}"
        detail = f"its bytes are not the {expected} that the header says; it was changed or damaged: restore it"
        return CorruptShardError(self.paths.prefix + suffix, 0, "C7" if content.head else "F3", detail)


def shard_nbytes(prefix: str, beside: Collection[str] | None = None) -> int:
    """Bytes of a shard's files that are there, for progress; ``beside`` names columns that lie there, None to look."""
    if is_remote(prefix):
        store, key = open_store(prefix)
        try:
            found = {info.key.removeprefix(key): info.nbytes for info in store.list(key + ".")}
        except StorageError:
            found = {suffix: info.nbytes for suffix, info in _objects(prefix, SUFFIXES).items()}
        return sum(nbytes for suffix, nbytes in found.items() if suffix in SUFFIXES or column_of(suffix))
    names = columns_beside([prefix])[prefix] if beside is None else beside
    return sum(_local_sizes(ShardPaths.of(prefix).with_columns(names)).values())


def _local_sizes(paths: ShardPaths) -> dict[str, int]:
    found = {path.removeprefix(paths.prefix): path for path in paths.all}
    return {suffix: os.path.getsize(path) for suffix, path in found.items() if os.path.isfile(path)}


def _objects(prefix: str, suffixes: Sequence[str]) -> dict[str, ObjectInfo]:
    store, key = open_store(prefix)
    found = request_pool().map(store.head, [key + suffix for suffix in suffixes])
    return {suffix: info for suffix, info in zip(suffixes, found, strict=True) if info}


def destinations(prefixes: Sequence[str], target: str) -> list[str]:
    """Where each of several shards goes: under ``target`` where that names a folder, else to ``target`` itself.

    Raises:
        FormatError: several shards to one prefix, or two of one name to one folder.
    """
    if not target.endswith("/") and (is_remote(target) or not os.path.isdir(target)):
        if len(prefixes) == 1:
            return [ShardPaths.of(target).prefix]
        raise FormatError(f"{target}: one prefix for {len(prefixes)} shards; end it with / to name a folder")
    names = Counter(os.path.basename(prefix) for prefix in prefixes)
    if twice := [name for name, count in names.items() if count > 1]:
        raise FormatError(f"{target}: two of the shards are called {twice[0]}; copy them to folders of their own")
    folder = target if target.endswith("/") else target + "/"
    return [folder + name for name in names]


def check_destinations(
    prefixes: Sequence[str], targets: Sequence[str], beside: Mapping[str, Collection[str]], *, overwrite: bool
) -> None:
    """Look at all local places before the first shard is copied. FormatError where one may not be written.

    ``beside`` are names of the columns whose files lie at prefixes, as far as they are known.
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
            paths = paths.with_columns(column_names(ShardPaths.of(prefix), header, beside.get(prefix)))
        check_free(paths, overwrite=True, any_file=not overwrite)
        if not overwrite and with_present_columns(paths).present():
            _compare(CopySource(prefix, beside.get(prefix)), paths, overwrite=False)


def download(
    source: CopySource, prefix: str, *, overwrite: bool = False, on_progress: Advance = lambda nbytes: None
) -> Copied:
    """Copy a shard to a local prefix. What is there already with the right checksum is not fetched again.

    Args:
        source: the shard, local or remote.
        prefix: the path that the five files will share.
        overwrite: replace a shard that is there.
        on_progress: told how many more bytes of the shard are there.

    Raises:
        CorruptShardError: a file of the source does not have its checksum.
        FormatError: something else is at the prefix, or another process writes it.
        OSError: the disk says no.
    """
    paths = ShardPaths.of(prefix).with_columns(source.paths.columns)
    interrupted = read_journal(paths)
    if interrupted is not None and interrupted.work == "copy" and interrupted.replaced_inodes is not None:
        recover(paths.prefix, overwrite=overwrite)
    same, goes = _compare(source, paths, overwrite=overwrite)
    if wanted := [suffix for suffix in source.files if suffix not in same]:
        # A .seq.idx that is right as it is goes while a file that it tells of does not have its content.
        again = [".seq.idx"] if ".seq.idx" in same and {*wanted} - source.attached else []
        _fetch_all(source, paths, wanted + again, goes, overwrite or bool(again), on_progress)
        same -= {*again}
    found = sum(source.files[suffix].nbytes for suffix in same)
    on_progress(found)
    return Copied(paths.prefix, source.nbytes - found, found, notes=source.notes)


def _compare(source: CopySource, paths: ShardPaths, *, overwrite: bool) -> tuple[set[str], list[str]]:
    """Which files are there already, by suffix, and paths of the columns that go with the shard that is replaced.

    Raises:
        FormatError: others are there, and may not be replaced.
    """
    places = {suffix: paths.prefix + suffix for suffix in source.files}
    same = {suffix for suffix, path in places.items() if source.files[suffix].is_at(path)}
    goes = []
    if ".seq.idx" not in same:
        strange = [path for path in with_present_columns(ShardPaths(paths.prefix)).all if path not in places.values()]
        goes = [path for path in strange if is_of_another_shard(path, source.header.shard_id)]
    others = [path for suffix, path in places.items() if suffix not in same and os.path.lexists(path)] + goes
    if others and not overwrite:
        raise FormatError(
            f"{paths.prefix}: {', '.join(others)} exist already and are not of this shard; choose another prefix,"
            " or pass overwrite (--overwrite)"
        )
    return same, goes


def _fetch_all(
    source: CopySource, paths: ShardPaths, wanted: list[str], goes: list[str], overwrite: bool, on_progress: Advance
) -> None:
    """Bring files to their temporary names, and publish them; columns of the shard that is replaced go."""
    content = {"shard_id": source.header.shard_id.hex()}
    head, only = read_journal(paths), [*(paths.prefix + suffix for suffix in wanted), *goes]
    same = head is not None and head.work == "copy" and head.content.get("shard_id") == content["shard_id"]
    if same and head is not None and head.files.keys() == {paths.temporary(paths.prefix + suffix) for suffix in wanted}:
        new = Publication.take_up(paths, overwrite=overwrite, only=only)
    else:
        new = Publication(
            paths,
            content,
            work="copy",
            overwrite=overwrite,
            only=only,
            nbytes=sum(source.files[suffix].nbytes for suffix in wanted),
            drops=("copy",) if same else (),
        )
    try:
        for suffix in wanted:
            # What an earlier attempt left may be damaged.
            if not any(_fetch(source, suffix, new, keep, on_progress) for keep in (True, False)):
                raise source.corrupt(suffix)
        new.publish()
    except CorruptShardError:
        new.abandon()
        raise
    finally:
        new.close()  # what has arrived stays for the next attempt


def _fetch(source: CopySource, suffix: str, new: Publication, keep: bool, on_progress: Advance) -> bool:
    """Bring one file, from where an earlier attempt stopped; whether it is what it must be."""
    file, content = new.open(new.paths.prefix + suffix, keep=keep), source.files[suffix]
    if file.nbytes > content.nbytes:
        file.truncate(0)
    held = ContentCheck(content)
    for offset in range(0, file.nbytes, _READ_NBYTES):
        held.update(file.read_at(offset, _READ_NBYTES))
    on_progress(file.nbytes)
    # What was checked is what is written.
    index = [memoryview(source.seq_idx)[file.nbytes :]]
    for chunk in index if suffix == ".seq.idx" else source.chunks(suffix, file.nbytes):
        file.write(chunk)
        held.update(chunk)
        on_progress(len(chunk))
    if held.passed():
        return True
    on_progress(-file.nbytes)
    return False
