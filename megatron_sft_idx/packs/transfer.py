"""Whole shards into local folders, held to their checksums on the way: what arrives has the bytes that were sent.

The files of each are published together, ``.seq.idx`` last. What has arrived of an interrupted copy is named by its
journal; the next copy of the same shard goes on from there. Nothing here looks inside a shard or mends it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.files import DATA_SUFFIXES, SUFFIXES
from megatron_sft_idx.shard import check_free, recover
from megatron_sft_idx.shard.prefix import places_of, read_journal
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.storage import check_size, is_remote, open_regular
from megatron_sft_idx.storage.hashing import StreamHash, has_digest
from megatron_sft_idx.storage.progress import Advance
from megatron_sft_idx.storage.publish import require_apart
from megatron_sft_idx.storage.remote import ObjectInfo, open_store
from megatron_sft_idx.storage.remote.files import read_ahead
from megatron_sft_idx.storage.remote.store import threads

__all__ = ["Copied", "Source", "check_destinations", "destinations", "download", "shard_nbytes"]

_READ_NBYTES = 1 << 20
_CHUNK_NBYTES = 8 << 20


class Copied(NamedTuple):
    """One shard, copied.

    Attributes:
        prefix: where it is now.
        nbytes_sent: bytes of the files that were written.
        nbytes_found: bytes of those that were there already.
        uploads_aborted: unfinished uploads of earlier attempts that were removed.
    """

    prefix: str
    nbytes_sent: int
    nbytes_found: int
    uploads_aborted: int = 0


class Source:
    """A shard whose five files are there and have the sizes that its header says.

    Args:
        prefix: local or remote.

    Attributes:
        paths: where it is.
        header: its header, checked.
        seq_idx: its whole ``.seq.idx``, checked: 16 bytes a pack and the header.
        digests: size and checksum of each of the five files, by suffix.

    Raises:
        ShardNotFoundError: some of its files are missing.
        CorruptShardError: its ``.seq.idx`` breaks a rule, or a file has another size (rule F2).
        StorageError: the store cannot be read.
    """

    def __init__(self, prefix: str) -> None:
        self.paths = ShardPaths.of(prefix)
        self._objects = _objects(self.paths.prefix) if is_remote(self.paths.prefix) else None
        sizes = _local_sizes(self.paths) if self._objects is None else {s: o.nbytes for s, o in self._objects.items()}
        if missing := [self.paths.prefix + suffix for suffix in SUFFIXES if suffix not in sizes]:
            raise ShardNotFoundError(self.paths.prefix, missing, "check the path, or restore what is missing")
        self.seq_idx = b"".join(self.chunks(".seq.idx"))
        self.header = _checked_header(self.seq_idx, self.paths.seq_idx)
        self.digests = dict(zip(DATA_SUFFIXES, self.header.digests, strict=True))
        for suffix, digest in self.digests.items():
            check_size(self.paths.prefix + suffix, sizes[suffix], digest.nbytes)
        self.digests[".seq.idx"] = FileDigest(len(self.seq_idx), xxhash.xxh3_128_digest(self.seq_idx))

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
        """What is wrong with a file whose bytes were not what its digest says (rule F3)."""
        digest = self.digests[suffix]
        expected = f"{digest.nbytes:,} bytes with checksum {digest.checksum.hex()}"
        detail = f"its bytes are not the {expected} that the header says; it was changed or damaged: restore it"
        return CorruptShardError(self.paths.prefix + suffix, 0, "F3", detail)


def shard_nbytes(prefix: str) -> int:
    """What a shard's files take together, for progress; those that are missing are for others to notice."""
    if is_remote(prefix):
        return sum(info.nbytes for info in _objects(prefix).values())
    return sum(_local_sizes(ShardPaths.of(prefix)).values())


def _local_sizes(paths: ShardPaths) -> dict[str, int]:
    found = dict(zip(SUFFIXES, paths.all, strict=True))
    return {suffix: os.path.getsize(path) for suffix, path in found.items() if os.path.isfile(path)}


def _objects(prefix: str) -> dict[str, ObjectInfo]:
    store, key = open_store(prefix)
    found = threads().map(store.head, [key + suffix for suffix in SUFFIXES])
    return {suffix: info for suffix, info in zip(SUFFIXES, found, strict=True) if info}


def _checked_header(raw: bytes, path: str) -> Header:
    """The header of a whole ``.seq.idx``, and the arrays behind it held to their checksum."""
    header = Header.decode(raw, path)
    check_size(path, len(raw), header.seq_idx_nbytes)
    if xxhash.xxh3_128_digest(memoryview(raw)[header.nbytes :]) != header.arrays_checksum:
        raise CorruptShardError(path, header.nbytes, "F3", "the arrays do not have their checksum; restore the file")
    return header


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


def check_destinations(prefixes: Sequence[str], targets: Sequence[str], *, overwrite: bool) -> None:
    """Look at all local places before the first shard is copied. FormatError where one may not be written."""
    local = {target: prefix for prefix, target in zip(prefixes, targets, strict=True) if not is_remote(target)}
    require_apart(
        [place for target in local for place in places_of(target, "DST", written=True)],
        [place for prefix in prefixes if not is_remote(prefix) for place in places_of(prefix, "SRC")],
    )
    for target, prefix in local.items():
        paths = ShardPaths.of(target)
        check_free(paths, overwrite=True, any_file=not overwrite)
        if paths.present() and not overwrite:
            _find_same(Source(prefix), paths, overwrite=False)


def download(
    source: Source, prefix: str, *, overwrite: bool = False, on_progress: Advance = lambda nbytes: None
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
    paths = ShardPaths.of(prefix)
    interrupted = read_journal(paths)
    if interrupted is not None and interrupted.work == "copy" and interrupted.done is not None:
        recover(paths.prefix, overwrite=overwrite)
    same = _find_same(source, paths, overwrite=overwrite)
    if wanted := [suffix for suffix in SUFFIXES if suffix not in same]:
        # A .seq.idx that is right as it is goes while a file beside it does not have its content.
        again = [".seq.idx"] if ".seq.idx" in same else []
        _fetch_all(source, paths, wanted + again, overwrite or bool(again), on_progress)
        same -= {*again}
    found = sum(source.digests[suffix].nbytes for suffix in same)
    on_progress(found)
    return Copied(paths.prefix, sum(digest.nbytes for digest in source.digests.values()) - found, found)


def _find_same(source: Source, paths: ShardPaths, *, overwrite: bool) -> set[str]:
    """Which files are there already, by suffix. FormatError where others are, and may not be replaced."""
    places = {suffix: paths.prefix + suffix for suffix in SUFFIXES}
    same = {suffix for suffix, path in places.items() if _is_there(path, source, suffix)}
    others = [path for suffix, path in places.items() if suffix not in same and os.path.lexists(path)]
    if others and not overwrite:
        raise FormatError(
            f"{paths.prefix}: {', '.join(others)} exist already and are not of this shard; choose another prefix,"
            " or pass overwrite (--overwrite)"
        )
    return same


def _is_there(path: str, source: Source, suffix: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path) and has_digest(path, source.digests[suffix])


def _fetch_all(source: Source, paths: ShardPaths, wanted: list[str], overwrite: bool, on_progress: Advance) -> None:
    """Bring files to their temporary names, and publish them."""
    content = {"shard_id": source.header.shard_id.hex()}
    head = read_journal(paths)
    same = head is not None and head.work == "copy" and head.content.get("shard_id") == content["shard_id"]
    if same and head is not None and head.files.keys() == set(wanted):
        new = Publication.take_up(paths, overwrite=overwrite)
    else:
        new = Publication(
            paths,
            content,
            work="copy",
            overwrite=overwrite,
            only=[paths.prefix + suffix for suffix in wanted],
            nbytes=sum(source.digests[suffix].nbytes for suffix in wanted),
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


def _fetch(source: Source, suffix: str, new: Publication, keep: bool, on_progress: Advance) -> bool:
    """Bring one file, from where an earlier attempt stopped; whether it is what it must be."""
    file, digest = new.open(new.paths.prefix + suffix, keep=keep), source.digests[suffix]
    if file.nbytes > digest.nbytes:
        file.cut(0)
    stream = StreamHash()
    for offset in range(0, file.nbytes, _READ_NBYTES):
        stream.update(file.read_at(offset, _READ_NBYTES))
    on_progress(file.nbytes)
    # What was checked is what is written.
    index = [memoryview(source.seq_idx)[file.nbytes :]]
    for chunk in index if suffix == ".seq.idx" else source.chunks(suffix, file.nbytes):
        file.write(chunk)
        stream.update(chunk)
        on_progress(len(chunk))
    if stream.digest() == digest:
        return True
    on_progress(-file.nbytes)
    return False
