"""A shard into a local folder: its files are published together, ``.seq.idx`` last.

What has arrived of an interrupted copy is named by its journal; the next copy of the same shard goes on from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import FileDigest, ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import recover
from megatron_sft_idx.shard.prefix import read_journal
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.storage.hashing import StreamHash, has_digest
from megatron_sft_idx.transfer.checking import corrupt
from megatron_sft_idx.transfer.report import Copied
from megatron_sft_idx.transfer.source import Source, digests_of

__all__ = ["download"]

_READ_NBYTES = 1 << 20


def download(
    source: Source, prefix: str, *, overwrite: bool = False, on_progress: Callable[[int], None] = lambda nbytes: None
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
    paths, digests = ShardPaths.of(prefix), digests_of(source)
    interrupted = read_journal(paths)
    if interrupted is not None and interrupted.work == "copy" and interrupted.done is not None:
        recover(paths.prefix, overwrite=overwrite)
    same = find_same(source, paths, overwrite=overwrite)
    if wanted := [suffix for suffix in SUFFIXES if suffix not in same]:
        # A .seq.idx that is right as it is goes while a file beside it does not have its content.
        again = [".seq.idx"] if ".seq.idx" in same else []
        _fetch_all(source, paths, digests, wanted + again, overwrite or bool(again), on_progress)
        same -= {*again}
    for suffix in same:
        on_progress(digests[suffix].nbytes)
    sent = sum(digests[suffix].nbytes for suffix in SUFFIXES if suffix not in same)
    return Copied(paths.prefix, sent, sum(digests[suffix].nbytes for suffix in same), 0)


def find_same(source: Source, paths: ShardPaths, *, overwrite: bool) -> set[str]:
    """Which files are there already, by suffix. FormatError where others are, and may not be replaced."""
    digests = digests_of(source)
    same = {suffix for suffix in SUFFIXES if _is_there(paths.prefix + suffix, digests[suffix])}
    others = [path for suffix in SUFFIXES if suffix not in same and os.path.lexists(path := paths.prefix + suffix)]
    if others and not overwrite:
        raise FormatError(
            f"{paths.prefix}: {', '.join(others)} exist already and are not of this shard; choose another prefix,"
            " or pass overwrite (--overwrite)"
        )
    return same


def _is_there(path: str, digest: FileDigest) -> bool:
    return os.path.isfile(path) and not os.path.islink(path) and has_digest(path, digest)


def _fetch_all(
    source: Source,
    paths: ShardPaths,
    digests: dict[str, FileDigest],
    wanted: list[str],
    overwrite: bool,
    on_progress: Callable[[int], None],
) -> None:
    """Bring files to their temporary names, and publish them."""
    only = [paths.prefix + suffix for suffix in wanted]
    content = {"shard_id": source.header.shard_id.hex()}
    head = read_journal(paths)
    same = head is not None and head.work == "copy" and head.content.get("shard_id") == content["shard_id"]
    if same and head is not None and head.files.keys() == set(wanted):
        new = Publication.take_up(paths, overwrite=overwrite)
    else:
        nbytes = sum(digests[suffix].nbytes for suffix in wanted)
        drops = ("copy",) if same else ()
        new = Publication(paths, content, work="copy", overwrite=overwrite, only=only, nbytes=nbytes, drops=drops)
    try:
        for suffix in wanted:
            # What an earlier attempt left may be damaged.
            if not any(_fetch(source, suffix, digests[suffix], new, keep, on_progress) for keep in (True, False)):
                raise corrupt(source.paths.prefix + suffix, digests[suffix])
        new.publish()
    except CorruptShardError:
        new.abandon()
        raise
    finally:
        new.close()  # what has arrived stays for the next attempt


def _fetch(
    source: Source,
    suffix: str,
    digest: FileDigest,
    new: Publication,
    keep: bool,
    on_progress: Callable[[int], None],
) -> bool:
    """Bring one file, from where an earlier attempt stopped; whether it is what it must be."""
    file = new.open(new.paths.prefix + suffix, keep=keep)
    if file.nbytes > digest.nbytes:
        file.cut(0)
    stream = StreamHash()
    for offset in range(0, file.nbytes, _READ_NBYTES):
        stream.update(file.read_at(offset, _READ_NBYTES))
    on_progress(file.nbytes)
    for chunk in _chunks(source, suffix, file.nbytes):
        file.write(chunk)
        stream.update(chunk)
        on_progress(len(chunk))
    if stream.digest() == digest:
        return True
    on_progress(-file.nbytes)
    return False


def _chunks(source: Source, suffix: str, offset: int) -> Iterator[bytes | memoryview]:
    if suffix == ".seq.idx":
        return iter([memoryview(source.seq_idx)[offset:]])
    return source.chunks(suffix, offset)
