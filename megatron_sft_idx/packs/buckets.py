"""Copy shards into object stores: data first, ``.seq.idx`` last. As on a disk, its presence makes a shard.

When a shard is replaced, its ``.seq.idx`` is removed first, then its columns. Objects are replaced one by one, so
uploads of two different shards to one prefix would mix their files. To prevent this, an upload first creates its claim,
the object ``X.building``, which holds the shard's id. An upload that finds the claim of another shard is rejected.
Uploads of the same shard share a claim and do not disturb each other. A killed upload leaves its claim, and the next
upload of the same shard removes it at its end.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Sequence

import xxhash

from megatron_sft_idx.errors import FormatError, StorageError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import BUILDING, MAGIC, MEDIA_SUFFIXES, SEQ_IDX, SUFFIXES
from megatron_sft_idx.layout.media_layout import MEDIA_MAGIC
from megatron_sft_idx.packs.transfer import ContentCheck, Copied, CopySource, download, other_shard_error
from megatron_sft_idx.shard.at_prefix import lists_media
from megatron_sft_idx.shard.opening import columns_beside, is_of_another_shard, read_start
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.progress import Advance
from megatron_sft_idx.storage.remote import RemotePath, open_store

_CLAIM = re.compile(rb'\{"version": 1, "shard_id": "[0-9a-f]{32}"\}')
_ATTEMPTS = 5


def upload(
    source: CopySource, prefix: str, *, overwrite: bool = False, on_progress: Advance = lambda nbytes: None
) -> Copied:
    """Copy a shard to a remote prefix. Objects that already exist with the right checksum are not sent again.

    A failed or killed upload leaves nothing that looks like a shard. The next attempt keeps the objects that were sent.
    An incomplete upload of a file is removed by the failed upload itself, or after a kill by the next upload.
    ``overwrite`` replaces existing objects, but not during another upload to the prefix. ``on_progress`` is called with
    the bytes that were uploaded since the last call.

    Raises:
        CorruptShardError: a file of the source does not have its checksum.
        FormatError: something else is at the prefix, or another shard is being uploaded to it.
        StorageError: the store is unreachable, or rejects the credentials.
    """
    new = _Upload(source, prefix, on_progress)
    if new.prefix == source.paths.prefix:  # its .seq.idx would be removed before its other files are read
        raise FormatError(f"{prefix}: used as both SRC and DST; choose another prefix")
    if new.is_published(overwrite=overwrite):
        on_progress(source.nbytes)
        return Copied(new.prefix, 0, source.nbytes, 0, source.notes)
    new.claim(overwrite=overwrite)
    try:
        if new.is_published(overwrite=overwrite):  # another upload finished between the first check and the claim
            on_progress(source.nbytes)
        else:
            new.send(overwrite=overwrite)
    except BaseException:
        with contextlib.suppress(StorageError):  # the original failure matters more
            new.remove_claim()
        raise
    new.remove_claim()
    return Copied(new.prefix, new.nbytes_sent, source.nbytes - new.nbytes_sent, new.abort_uploads(), source.notes)


def copy_shard(
    source: str,
    target: str,
    *,
    overwrite: bool = False,
    beside: Collection[str] | None = None,
    on_progress: Advance = lambda nbytes: None,
) -> Copied:
    """Copy a shard between local or remote prefixes. See ``CopySource``, ``upload`` and ``download``."""
    copy = upload if is_remote(target) else download
    return copy(CopySource(source, beside), target, overwrite=overwrite, on_progress=on_progress)


def remote_prefix(prefix: str) -> str:
    """Return the prefix of a shard in an object store. FormatError: it is only a bucket or a folder."""
    remote = ShardPaths.of(prefix).prefix
    if not RemotePath.of(remote).key.rpartition("/")[2]:
        raise FormatError(f"{prefix}: this is a bucket or folder; add a name for the shard: {remote.rstrip('/')}/NAME")
    return remote


class RemoteTarget:
    """A remote prefix to which a shard is written.

    Attributes:
        prefix: the prefix with its scheme and bucket.
        key: the prefix inside the bucket.
        suffixes: suffixes of the shard's files, in the order of publication.
    """

    def __init__(self, prefix: str, suffixes: Sequence[str] = SUFFIXES) -> None:
        self.prefix, self.suffixes = remote_prefix(prefix), tuple(suffixes)
        self.store, self.key = open_store(self.prefix)

    def stored(self, suffix: str) -> tuple[int, str | None] | None:
        """Return size and recorded checksum (hex) of the object at ``suffix``, or None if there is no object."""
        info = self.store.head(self.key + suffix, writing=True)
        return info and (info.nbytes, info.checksum)

    def require_ours(self) -> None:
        """Raise FormatError if an unrelated object has one of the names, because such objects are never replaced.

        An object belongs to a shard if our writer recorded a checksum with it. A shard may also have been uploaded by
        other means. Then its ``.seq.idx`` begins with our magic, and a column with the magic of columns.
        """
        index = self.stored(".seq.idx")
        is_shard = index and index[0] >= len(MAGIC) and self._read(".seq.idx", len(MAGIC)) == MAGIC
        for suffix in self.suffixes:
            if suffix in SUFFIXES:
                is_ours = bool(is_shard)
            else:
                is_media = suffix in MEDIA_SUFFIXES
                is_ours = self._is_media() if is_media else is_of_another_shard(self.prefix + suffix, b"")
            stored = index if suffix == ".seq.idx" else self.stored(suffix)
            if stored and stored[1] is None and not is_ours:
                raise FormatError(
                    f"{self.prefix}{suffix}: an object of {stored[0]} bytes exists here that does not belong to an SFT"
                    " shard, and is never replaced; choose another prefix, or remove the object yourself"
                )

    def _is_media(self) -> bool:
        """Return whether the prefix has images and audio of a shard: their items, or a ``.seq.idx`` that lists them."""
        items = self.stored(".media.items")
        if items and items[0] >= len(MEDIA_MAGIC) and self._read(".media.items", len(MEDIA_MAGIC)) == MEDIA_MAGIC:
            return True
        path = self.prefix + ".seq.idx"
        return (start := read_start(path, SEQ_IDX)) is not None and lists_media(start.raw, path)

    def _read(self, suffix: str, nbytes: int) -> bytes:
        return bytes(self.store.read(self.key + suffix, 0, nbytes))


class _Upload(RemoteTarget):
    """One upload of a shard: the steps of ``upload``. ``nbytes_sent`` counts the bytes of the files that it sent."""

    def __init__(self, source: CopySource, prefix: str, on_progress: Advance) -> None:
        super().__init__(prefix, [*source.files])
        self._source, self._on_progress = source, on_progress
        self._claim = json.dumps({"version": 1, "shard_id": source.header.shard_id.hex()}).encode()
        self._expected = {suffix: (content.nbytes, content.checksum) for suffix, content in source.files.items()}
        self.nbytes_sent = 0

    def claim(self, *, overwrite: bool = False) -> None:
        """Create the claim ``X.building``, unless it already exists for the same shard.

        FormatError: it belongs to another shard and ``overwrite`` is False, or the object is not a claim.
        """
        key = self.key + BUILDING
        for _ in range(_ATTEMPTS):
            self.store.create(key, self._claim, xxhash.xxh3_128_hexdigest(self._claim))
            # Read it even if it was just created: some stores let two uploads create one object, and the later one
            # stays.
            stored = self._stored_claim()
            if stored == self._claim:
                return
            if stored is not None and not _CLAIM.fullmatch(stored):
                raise FormatError(
                    f"{self.prefix}{BUILDING}: an object exists here that no upload of this package wrote, and is"
                    " never replaced; choose another prefix, or remove the object yourself"
                )
            if stored is not None and not overwrite:
                break
            if stored is not None:
                self.store.delete(key)
        raise FormatError(
            f"{self.prefix}{BUILDING}: another shard is being uploaded to this prefix, or its upload was killed; wait"
            " for it to finish, or, if no upload is running, pass overwrite (--overwrite)"
        )

    def _stored_claim(self) -> bytes | None:
        """Return the existing claim, or one byte more than a claim has; None if there is none."""
        info = self.store.head(self.key + BUILDING)
        return info and self._read(BUILDING, min(info.nbytes, len(self._claim) + 1))

    def remove_claim(self) -> None:
        """Remove the claim if it belongs to this shard."""
        if self._stored_claim() == self._claim:
            self.store.delete(self.key + BUILDING)

    def abort_uploads(self) -> int:
        """Remove incomplete files of killed uploads; return their number, 0 if the store does not allow it."""
        # The shard is published, and credentials that can write cannot always list uploads.
        try:
            return sum(self.store.abort_uploads(self.key + suffix) for suffix in self.suffixes)
        except StorageError:
            return 0

    def is_published(self, *, overwrite: bool) -> bool:
        """Return whether this same shard is complete at the prefix.

        FormatError: another shard is there and ``overwrite`` is False.
        """
        stored = self.stored(".seq.idx")
        if stored is not None and stored == self._expected[".seq.idx"]:
            return all(map(self._is_sent, self.suffixes[:-1]))
        if stored is not None and not overwrite:
            raise FormatError(
                f"{self.prefix}.seq.idx: another shard already exists; choose another prefix, or pass overwrite"
                " (--overwrite)"
            )
        return False

    def send(self, *, overwrite: bool) -> None:
        """Send the files that are not at the prefix yet, and publish. The caller must hold the claim."""
        self.require_ours()
        loses_media = not self._source.paths.media and self._is_media()
        present = {suffix: self.stored(suffix) for suffix in self.suffixes}
        right = {suffix for suffix, stored in present.items() if stored == self._expected[suffix]}
        wrong = [suffix for suffix, stored in present.items() if stored and suffix not in right]
        # Next to this shard's .seq.idx they are its own files, but damaged. Columns, however, may have been attached
        # there.
        if (".seq.idx" not in right or {*wrong} & self._source.attached) and wrong and not overwrite:
            raise other_shard_error(self.prefix, [self.prefix + suffix for suffix in wrong])
        only_columns = present.keys() - right <= self._source.attached  # only attached columns are missing
        if present[".seq.idx"] and not only_columns:
            self.store.delete(self.key + ".seq.idx")
        if ".seq.idx" not in right:
            # Remove images, audio and columns of the replaced shard. If the credentials cannot list objects, such a
            # column stays, and readers ignore it: its header has the id of another shard.
            if loses_media:
                for suffix in MEDIA_SUFFIXES:
                    self.store.delete(self.key + suffix)
            with contextlib.suppress(StorageError):
                for name in sorted(columns_beside([self.prefix])[self.prefix]):
                    suffix = f".{name}.col"
                    if suffix not in self.suffixes and is_of_another_shard(
                        self.prefix + suffix, self._source.header.shard_id
                    ):
                        self.store.delete(self.key + suffix)
        for suffix in self.suffixes[:-1]:
            if suffix in right:
                self._on_progress(self._expected[suffix][0])
            else:
                self._put(suffix)
        if only_columns:
            self._on_progress(self._expected[".seq.idx"][0])
        else:
            self._publish()

    def _put(self, suffix: str) -> None:
        self.claim()
        nbytes, checksum = self._expected[suffix]
        try:
            self.store.put(self.key + suffix, self._checked(suffix), nbytes, checksum)
        except StorageError:
            # The object may exist: the response was lost, or another upload of this shard was faster.
            if not self._is_sent(suffix):
                raise
        self.nbytes_sent += nbytes

    def _checked(self, suffix: str) -> Iterator[bytes | memoryview]:
        """Yield the chunks of a source file. After the last one, CorruptShardError unless all bytes were right."""
        check = ContentCheck(self._source.files[suffix])
        for chunk in self._source.chunks(suffix):
            check.update(chunk)
            yield chunk
            self._on_progress(len(chunk))
        if not check.passed():
            raise self._source.corrupt(suffix)

    def _publish(self) -> None:
        self.claim()
        changed = [suffix for suffix in self.suffixes[:-1] if not self._is_sent(suffix)]
        nbytes, checksum = self._expected[".seq.idx"]
        if not changed and self.store.create(self.key + ".seq.idx", self._source.seq_idx, checksum):
            self.nbytes_sent += nbytes
        # Otherwise it may exist after a request whose response was lost, or from another upload of the same shard.
        elif changed or not self.is_published(overwrite=False):
            raise FormatError(
                f"{self.prefix}{[*changed, '.seq.idx'][0]}: changed since this command uploaded it, so another upload"
                " writes to the same prefix; run the command again when that has finished"
            )
        self._on_progress(nbytes)

    def _is_sent(self, suffix: str) -> bool:
        return self.stored(suffix) == self._expected[suffix]
