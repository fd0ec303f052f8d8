"""A shard into a local folder: files arrive under names of their own and are renamed together, ``.seq.idx`` last.

What has arrived of an interrupted copy lies at ``X.bin.copy`` and so on; the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import xxhash

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard.digests import has_digest
from megatron_sft_idx.shard.lock import lock_journal
from megatron_sft_idx.shard.publish import remove_temporaries
from megatron_sft_idx.storage import OutputFile, sync_folder
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
        overwrite: replace what is there.
        on_progress: told how many more bytes of the shard are there.

    Raises:
        CorruptShardError: a file of the source does not have its checksum.
        FormatError: something else is at the prefix, or another process writes it.
        OSError: the disk says no.
    """
    paths = ShardPaths.of(prefix)
    paths.folder.mkdir(parents=True, exist_ok=True)
    with _locked(paths, overwrite=overwrite):
        job = _Download(source, paths, on_progress)
        present = job.present(overwrite=overwrite)
        for suffix in SUFFIXES:
            if suffix in present:
                on_progress(job.digests[suffix].nbytes)
            else:
                job.fetch(suffix)
        job.publish([suffix for suffix in SUFFIXES if suffix not in present])
    sent = sum(job.digests[suffix].nbytes for suffix in SUFFIXES if suffix not in present)
    found = sum(job.digests[suffix].nbytes for suffix in present)
    return Copied(paths.prefix, sent, found, 0)


@contextlib.contextmanager
def _locked(paths: ShardPaths, *, overwrite: bool) -> Iterator[None]:
    """Keep builders and other copies out, by the lock that builders take."""
    lock = lock_journal(paths, create=True)
    try:
        if os.fstat(lock).st_size:
            if not overwrite:
                raise FormatError(
                    f"{paths.journal}: left by a build that was interrupted; recover its packs (megatron-sft-idx"
                    f" rebuild {paths.prefix}), or pass overwrite (--overwrite) to drop them"
                )
            os.ftruncate(lock, 0)
            remove_temporaries(paths)
        try:
            yield
        finally:
            os.unlink(paths.journal)
    finally:
        os.close(lock)


class _Download:
    def __init__(self, source: Source, paths: ShardPaths, on_progress: Callable[[int], None]) -> None:
        self._source, self._paths, self._on_progress = source, paths, on_progress
        self.digests = digests_of(source)

    def present(self, *, overwrite: bool) -> set[str]:
        """Suffixes of the files that are there as they will be.

        Raises:
            FormatError: others are there, and ``overwrite`` is False.
        """
        there = [suffix for suffix in SUFFIXES if os.path.lexists(self._paths.prefix + suffix)]
        same = {suffix for suffix in there if has_digest(self._paths.prefix + suffix, self.digests[suffix])}
        if not overwrite and (others := [self._paths.prefix + suffix for suffix in there if suffix not in same]):
            raise FormatError(
                f"{self._paths.prefix}: {', '.join(others)} exist already and are not of this shard; choose another"
                " prefix, or pass overwrite (--overwrite)"
            )
        return same

    def fetch(self, suffix: str) -> None:
        """Bring a file to its temporary name, from where an earlier attempt stopped."""
        if not self._fetch(suffix, keep=True) and not self._fetch(suffix, keep=False):
            os.unlink(_arriving(self._paths.prefix + suffix))
            raise corrupt(self._source.paths.prefix + suffix, self.digests[suffix])

    def _fetch(self, suffix: str, *, keep: bool) -> bool:
        """Whether the file is what it must be; what an earlier attempt left may be of another shard."""
        digest = self.digests[suffix]
        path = _arriving(self._paths.prefix + suffix)
        file = OutputFile(path, keep=os.path.lexists(path))
        try:
            if not keep or file.nbytes > digest.nbytes:
                file.cut(0)
            hashed = xxhash.xxh3_128()
            for offset in range(0, file.nbytes, _READ_NBYTES):
                hashed.update(file.read_at(offset, _READ_NBYTES))
            self._on_progress(file.nbytes)
            for chunk in self._chunks(suffix, file.nbytes):
                file.write(chunk)
                hashed.update(chunk)
                self._on_progress(len(chunk))
            if file.nbytes == digest.nbytes and hashed.digest() == digest.checksum:
                file.sync()
                return True
            self._on_progress(-file.nbytes)
            return False
        finally:
            file.close()

    def _chunks(self, suffix: str, offset: int) -> Iterator[bytes | memoryview]:
        if suffix == ".seq.idx":
            return iter([memoryview(self._source.seq_idx)[offset:]])
        return self._source.chunks(suffix, offset)

    def publish(self, suffixes: list[str]) -> None:
        """Give the files that were fetched their names, in the order of publication (rules W2 and W3)."""
        if not suffixes:
            return
        folder = self._paths.folder
        if os.path.lexists(self._paths.seq_idx):
            if ".seq.idx" not in suffixes:
                # Right as it is, but beside a file that is about to be replaced.
                os.rename(self._paths.seq_idx, _arriving(self._paths.seq_idx))
                suffixes = [*suffixes, ".seq.idx"]
            else:
                os.unlink(self._paths.seq_idx)
            sync_folder(folder)
        for suffix in suffixes:
            if suffix == ".seq.idx":
                sync_folder(folder)
            path = self._paths.prefix + suffix
            os.rename(_arriving(path), path)
        sync_folder(folder)


def _arriving(path: str) -> str:
    return path + ".copy"
