"""A shard into an object store: data first, ``.seq.idx`` last, which makes it a shard there too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from megatron_sft_idx.errors import FormatError, StorageError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import DATA_SUFFIXES, SUFFIXES
from megatron_sft_idx.layout.header import MAGIC
from megatron_sft_idx.storage.remote import ObjectStore, open_store
from megatron_sft_idx.storage.remote.files import ObjectWriter, Stored, open_writer
from megatron_sft_idx.transfer.checking import checked
from megatron_sft_idx.transfer.claim import Claim
from megatron_sft_idx.transfer.places import remote_target
from megatron_sft_idx.transfer.report import Copied
from megatron_sft_idx.transfer.source import Source, digests_of

__all__ = ["require_ours", "upload"]


def upload(
    source: Source, prefix: str, *, overwrite: bool = False, on_progress: Callable[[int], None] = lambda nbytes: None
) -> Copied:
    """Copy a shard to a remote prefix. What is there already with the right checksum is not sent again.

    A failed or killed upload leaves nothing that looks like a shard, and goes on with the next attempt. A failed one
    gives up the parts it has sent of an unfinished file; those of a killed one are removed by the next.

    Args:
        source: the shard.
        prefix: ``s3://bucket/path`` or ``msc://profile/path``.
        overwrite: replace what is there. Not while another upload to the prefix is at work.
        on_progress: told how many more bytes of the shard are there.

    Raises:
        CorruptShardError: a file of the source does not have its checksum.
        FormatError: something else is at the prefix, or another shard is being uploaded to it.
        StorageError: the store cannot be reached, or does not let these credentials.
    """
    paths = remote_target(prefix)
    job = _Upload(source, paths, on_progress)
    if job.is_published(overwrite=overwrite):
        on_progress(job.nbytes)
        return Copied(paths.prefix, 0, job.nbytes, 0)
    with job.claimed(overwrite=overwrite):
        # Another upload may have ended between the first look and the claim.
        if job.is_published(overwrite=overwrite):
            on_progress(job.nbytes)
        else:
            job.send(overwrite=overwrite)
    return Copied(paths.prefix, job.sent, job.nbytes - job.sent, job.clear())


def require_ours(store: ObjectStore, writer: ObjectWriter, key: str, paths: ShardPaths) -> None:
    """FormatError where an object that is of no shard has a name of the shard's: such are never replaced.

    An object is known by the checksum that our writer records with it, or by a ``.seq.idx`` beside it that has our
    magic: a shard may have been uploaded by other means.

    Args:
        store: to read with.
        writer: to ask with.
        key: of the prefix.
        paths: of the prefix.
    """
    index = writer.stored(key + ".seq.idx")
    if index and index.nbytes >= len(MAGIC) and bytes(store.read(key + ".seq.idx", 0, len(MAGIC))) == MAGIC:
        return
    for suffix in SUFFIXES:
        found = index if suffix == ".seq.idx" else writer.stored(key + suffix)
        if found and found.checksum is None:
            raise FormatError(
                f"{paths.prefix}{suffix}: an object of {found.nbytes} bytes that is of no SFT shard is here, and is"
                " never replaced; choose another prefix, or remove it yourself"
            )


class _Upload:
    def __init__(self, source: Source, paths: ShardPaths, on_progress: Callable[[int], None]) -> None:
        self._source, self._paths, self._on_progress = source, paths, on_progress
        self._store, self.key = open_store(paths.prefix)
        self.writer: ObjectWriter = open_writer(paths.prefix)[0]
        self._digests = digests_of(source)
        self._claim = Claim(self._store, self.writer, self.key, paths.prefix, source.header.shard_id)
        self.nbytes = sum(digest.nbytes for digest in self._digests.values())
        self.sent = 0

    @contextlib.contextmanager
    def claimed(self, *, overwrite: bool) -> Iterator[None]:
        """Hold the claim; where that fails on the way out, the failure that led there counts."""
        self._claim.take(overwrite=overwrite)
        try:
            yield
        except BaseException:
            with contextlib.suppress(StorageError):
                self._claim.release()
            raise
        self._claim.release()

    def is_published(self, *, overwrite: bool) -> bool:
        """Whether this very shard is there, whole.

        Raises:
            FormatError: another one is, and ``overwrite`` is False.
        """
        found = self.writer.stored(self.key + ".seq.idx")
        if found is None:
            return False
        if found == self._expected(".seq.idx"):
            return all(self._is_there(suffix) for suffix in DATA_SUFFIXES)
        if not overwrite:
            raise FormatError(
                f"{self._paths.seq_idx}: another shard is here; choose another prefix, or pass overwrite (--overwrite)"
            )
        return False

    def send(self, *, overwrite: bool) -> None:
        """Send what is not there, and publish."""
        require_ours(self._store, self.writer, self.key, self._paths)
        present = {suffix: self.writer.stored(self.key + suffix) for suffix in SUFFIXES}
        kept = {suffix for suffix, found in present.items() if found == self._expected(suffix)}
        foreign = [suffix for suffix, found in present.items() if found and suffix not in kept]
        # Beside a .seq.idx of this shard they are this shard's, damaged.
        if foreign and not overwrite and ".seq.idx" not in kept:
            names = ", ".join(self._paths.prefix + suffix for suffix in foreign)
            raise FormatError(
                f"{self._paths.prefix}: {names} exist already and are not of this shard; choose another prefix,"
                " or pass overwrite (--overwrite)"
            )
        if present[".seq.idx"]:
            self.writer.delete(self.key + ".seq.idx")
        for suffix in SUFFIXES[:-1]:
            if suffix in kept:
                self._on_progress(self._digests[suffix].nbytes)
            else:
                self._put(suffix)
        self._publish()

    def clear(self) -> int:
        """Remove the parts that killed uploads of this shard's files have left; returns of how many.

        The shard is there without it, and not everybody who may write may also list what is unfinished.
        """
        try:
            return sum(self.writer.abort_uploads(self.key + suffix) for suffix in SUFFIXES)
        except StorageError:
            return 0

    def _put(self, suffix: str) -> None:
        self._claim.take()
        digest, path = self._digests[suffix], self._source.paths.prefix + suffix
        chunks = checked(self._source.chunks(suffix), digest, path, self._on_progress)
        try:
            self.writer.put(self.key + suffix, chunks, digest.nbytes, digest.checksum.hex())
        except StorageError:
            # The answer may have been lost, or another upload of this shard have been faster.
            if not self._is_there(suffix):
                raise
        self.sent += digest.nbytes

    def _publish(self) -> None:
        self._claim.take()
        if changed := [suffix for suffix in DATA_SUFFIXES if not self._is_there(suffix)]:
            raise FormatError(
                f"{self._paths.prefix}{changed[0]}: is not what was uploaded a moment ago; another upload writes here:"
                " run the command again when it is done"
            )
        digest = self._digests[".seq.idx"]
        if not self.writer.create(self.key + ".seq.idx", self._source.seq_idx, digest.checksum.hex()):
            # This one's first attempt, whose answer was lost, or another upload of the same shard.
            self.is_published(overwrite=False)
        else:
            self.sent += digest.nbytes
        self._on_progress(digest.nbytes)

    def _is_there(self, suffix: str) -> bool:
        return self.writer.stored(self.key + suffix) == self._expected(suffix)

    def _expected(self, suffix: str) -> Stored:
        digest = self._digests[suffix]
        return Stored(digest.nbytes, digest.checksum.hex())
