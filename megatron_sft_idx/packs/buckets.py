"""Shards into object stores: data first, ``.seq.idx`` last, which makes a shard there too.

Columns of an older shard go once its ``.seq.idx`` has. Objects are replaced one by one, so two uploads of different
shards to one prefix would mix their files. Each first makes an object, ``X.upload``, which one of them can; whoever
finds another shard's leaves. Uploads of the same shard do not disturb each other. One that was killed leaves its claim
behind: the next one of the same shard takes it over.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import xxhash

from megatron_sft_idx.errors import FormatError, StorageError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import MAGIC, SUFFIXES
from megatron_sft_idx.packs.transfer import ContentCheck, Copied, CopySource, download
from megatron_sft_idx.shard import remove_shard
from megatron_sft_idx.shard.columns import columns_beside, is_of_another_shard
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.progress import Advance
from megatron_sft_idx.storage.remote import RemotePath, open_store

# In the folder where the command runs: scratch folders end with the job, and with them what --resume goes on from.
STAGING = "megatron-sft-idx-staging"
_CLAIM_VERSION = 1
_MAX_CLAIM_NBYTES = 4096
_ATTEMPTS = 5


def upload(
    source: CopySource, prefix: str, *, overwrite: bool = False, on_progress: Advance = lambda nbytes: None
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
    job, nbytes, aborted = _Upload(source, prefix, on_progress), source.nbytes, 0
    if job.is_published(overwrite=overwrite):
        on_progress(nbytes)
    else:
        job.claim(overwrite=overwrite)
        try:
            # Another upload may have ended between the first look and the claim.
            if job.is_published(overwrite=overwrite):
                on_progress(nbytes)
            else:
                job.send(overwrite=overwrite)
        except BaseException:
            with contextlib.suppress(StorageError):  # the failure that led here counts
                job.give_up()
            raise
        job.give_up()
        aborted = job.abort_uploads()
    return Copied(job.prefix, job.sent, nbytes - job.sent, aborted, source.notes)


def copy_shard(
    source: str,
    target: str,
    *,
    overwrite: bool = False,
    beside: Collection[str] | None = None,
    on_progress: Advance = lambda nbytes: None,
) -> Copied:
    """Copy the shard at a prefix to another, either of them local or remote; see ``upload`` and ``download``.

    ``beside`` are names of the columns whose files lie at the source, by ``columns_beside``; None to look.
    """
    copy = upload if is_remote(target) else download
    return copy(CopySource(source, beside), target, overwrite=overwrite, on_progress=on_progress)


def _remote_prefix(prefix: str) -> str:
    """The prefix of a shard that is to lie in an object store. FormatError where it has no name."""
    found = ShardPaths.of(prefix).prefix
    if not RemotePath.of(found).key.rpartition("/")[2]:
        raise FormatError(f"{prefix}: a bucket or a folder, where a shard needs a name: {found.rstrip('/')}/NAME")
    return found


class _Target:
    """A remote prefix that is to be written.

    Attributes:
        prefix: as people write it.
        key: in its bucket.
        suffixes: of the files that will be there, in the order of publication.
    """

    def __init__(self, prefix: str, suffixes: Sequence[str] = SUFFIXES) -> None:
        self.prefix, self.suffixes = _remote_prefix(prefix), tuple(suffixes)
        self.store, self.key = open_store(self.prefix)

    def stored(self, suffix: str) -> tuple[int, str | None] | None:
        """Size of a file that is there, and the checksum that its writer recorded, in hex; None for nothing."""
        found = self.store.head(self.key + suffix, writing=True)
        return found and (found.nbytes, found.checksum)

    def require_ours(self) -> None:
        """FormatError where an object that is of no shard has a name of the shard's: such are never replaced.

        An object is known by the checksum that our writer records with it, or by a ``.seq.idx`` beside it that has our
        magic, a column by its own: a shard may have been uploaded by other means.
        """
        index = self.stored(".seq.idx")
        is_shard = index and index[0] >= len(MAGIC) and self._read(".seq.idx", len(MAGIC)) == MAGIC
        for suffix in self.suffixes:
            if is_shard and suffix in SUFFIXES:
                continue
            if suffix not in SUFFIXES and is_of_another_shard(self.prefix + suffix, b""):
                continue
            found = index if suffix == ".seq.idx" else self.stored(suffix)
            if found and found[1] is None:
                raise FormatError(
                    f"{self.prefix}{suffix}: an object of {found[0]} bytes that is of no SFT shard is here, and is"
                    " never replaced; choose another prefix, or remove it yourself"
                )

    def _read(self, suffix: str, nbytes: int) -> bytes:
        return bytes(self.store.read(self.key + suffix, 0, nbytes))


class _Upload(_Target):
    def __init__(self, source: CopySource, prefix: str, on_progress: Advance) -> None:
        super().__init__(prefix, [*source.files])
        self._source, self._on_progress = source, on_progress
        self._shard_id = source.header.shard_id.hex()
        self._expected = {suffix: (content.nbytes, content.checksum) for suffix, content in source.files.items()}
        self.sent = 0

    def claim(self, *, overwrite: bool = False) -> None:
        """Make ``X.upload``, or find that it is held by an upload of the same shard.

        Raises:
            FormatError: another shard holds it, and ``overwrite`` is False; or something that is no claim is there.
        """
        claim = {"version": _CLAIM_VERSION, "shard_id": self._shard_id}
        data, key = json.dumps(claim).encode(), self.key + ".upload"
        for _ in range(_ATTEMPTS):
            self.store.create(key, data, xxhash.xxh3_128_hexdigest(data))
            # Read even where it was made just now: some stores let two make one object, and the later one stays.
            held = self._claimant()
            if held == self._shard_id:
                return
            if held == "":
                raise FormatError(
                    f"{self.prefix}.upload: an object that is no claim of an upload is here, and is never replaced;"
                    " choose another prefix, or remove it yourself"
                )
            if held is not None and not overwrite:
                break
            if held is not None:
                self.store.delete(key)
        raise FormatError(
            f"{self.prefix}.upload: another shard is being uploaded to this prefix, or such an upload was killed; wait"
            " for it, or pass overwrite (--overwrite) if none is at work any more"
        )

    def _claimant(self) -> str | None:
        """The shard that holds the claim, None for nobody; what cannot be read is somebody else's: ``""``."""
        found = self.store.head(self.key + ".upload")
        if found is None:
            return None
        with contextlib.suppress(ValueError):
            held = json.loads(self._read(".upload", found.nbytes)) if found.nbytes <= _MAX_CLAIM_NBYTES else None
            if isinstance(held, dict) and held.get("version") == _CLAIM_VERSION:
                shard_id = held.get("shard_id")
                return shard_id if isinstance(shard_id, str) else ""
        return ""

    def give_up(self) -> None:
        """Remove the claim, if it is still this shard's."""
        if self._claimant() == self._shard_id:
            self.store.delete(self.key + ".upload")

    def abort_uploads(self) -> int:
        """Remove the parts that killed uploads of the files have left; returns of how many.

        The shard is there without it, and not everybody who may write may also list what is unfinished.
        """
        try:
            return sum(self.store.abort_uploads(self.key + suffix) for suffix in self.suffixes)
        except StorageError:
            return 0

    def is_published(self, *, overwrite: bool) -> bool:
        """Whether this very shard is there, whole.

        Raises:
            FormatError: another one is, and ``overwrite`` is False.
        """
        found = self.stored(".seq.idx")
        if found is not None and found == self._expected[".seq.idx"]:
            return all(map(self._is_there, self.suffixes[:-1]))
        if found is not None and not overwrite:
            raise FormatError(
                f"{self.prefix}.seq.idx: another shard is here; choose another prefix, or pass overwrite (--overwrite)"
            )
        return False

    def send(self, *, overwrite: bool) -> None:
        """Send what is not there, and publish."""
        self.require_ours()
        present = {suffix: self.stored(suffix) for suffix in self.suffixes}
        kept = {suffix for suffix, found in present.items() if found == self._expected[suffix]}
        foreign = [suffix for suffix, found in present.items() if found and suffix not in kept]
        # Beside a .seq.idx of this shard they are this shard's, damaged, but for columns that were attached there.
        if (".seq.idx" not in kept or {*foreign} & self._source.attached) and foreign and not overwrite:
            names = ", ".join(self.prefix + suffix for suffix in foreign)
            raise FormatError(
                f"{self.prefix}: {names} exist already and are not of this shard; choose another prefix,"
                " or pass overwrite (--overwrite)"
            )
        same = present.keys() - kept <= self._source.attached  # what makes the shard is all there
        if present[".seq.idx"] and not same:
            self.store.delete(self.key + ".seq.idx")
        if ".seq.idx" not in kept:
            # Columns of another shard, which is no more. Nobody who may not list objects is kept from writing: one
            # that stays is of no shard, for its header names that of another.
            with contextlib.suppress(StorageError):
                for name in sorted(columns_beside([self.prefix])[self.prefix]):
                    suffix = f".{name}.col"
                    strange = suffix not in self.suffixes
                    if strange and is_of_another_shard(self.prefix + suffix, self._source.header.shard_id):
                        self.store.delete(self.key + suffix)
        for suffix in self.suffixes[:-1]:
            if suffix in kept:
                self._on_progress(self._expected[suffix][0])
            else:
                self._put(suffix)
        if same:
            self._on_progress(self._expected[".seq.idx"][0])
        else:
            self._publish()

    def _put(self, suffix: str) -> None:
        self.claim()
        nbytes, checksum = self._expected[suffix]
        try:
            self.store.put(self.key + suffix, self._checked(suffix), nbytes, checksum)
        except StorageError:
            # The answer may have been lost, or another upload of this shard have been faster.
            if not self._is_there(suffix):
                raise
        self.sent += nbytes

    def _checked(self, suffix: str) -> Iterator[bytes | memoryview]:
        """The chunks of a file; CorruptShardError after the last one unless they are what they must be."""
        held = ContentCheck(self._source.files[suffix])
        for chunk in self._source.chunks(suffix):
            held.update(chunk)
            yield chunk
            self._on_progress(len(chunk))
        if not held.passed():
            raise self._source.corrupt(suffix)

    def _publish(self) -> None:
        self.claim()
        if changed := [suffix for suffix in self.suffixes[:-1] if not self._is_there(suffix)]:
            raise FormatError(
                f"{self.prefix}{changed[0]}: is not what was uploaded a moment ago; another upload writes here:"
                " run the command again when it is done"
            )
        nbytes, checksum = self._expected[".seq.idx"]
        created = self.store.create(self.key + ".seq.idx", self._source.seq_idx, checksum)
        if created:
            self.sent += nbytes
        else:  # this one's first attempt, whose answer was lost, or another upload of the same shard
            self.is_published(overwrite=False)
        self._on_progress(nbytes)

    def _is_there(self, suffix: str) -> bool:
        return self.stored(suffix) == self._expected[suffix]


class StagedOutput:
    """Where a shard that is to lie at a remote prefix is built, and its way there.

    Args:
        prefix: the remote prefix.
        staging: the local folder; the same command finds in it what it was interrupted with.
        overwrite: replace what is at the remote prefix.

    Attributes:
        local: the prefix to build at.

    Raises:
        FormatError: the prefix is no path of a shard in an object store.
    """

    def __init__(self, prefix: str, staging: str = STAGING, *, overwrite: bool = False) -> None:
        self.prefix = _remote_prefix(prefix)
        self._overwrite, self._folder = overwrite, Path(staging)
        # Prefixes of one name in two buckets do not meet.
        place = xxhash.xxh3_64_hexdigest(self.prefix.encode())
        self.local = str(self._folder / f"{os.path.basename(self.prefix)}-{place}")

    def prepare(self, suffixes: Sequence[str] = ("",), *, resume: bool = False) -> None:
        """Find out before the work whether it can end well: write an object beside the shard, and remove it.

        ``suffixes`` are those of the shards that will be built; with ``resume`` an earlier run may have been
        interrupted at any point. FormatError where a shard is in the way, remote or local; StorageError where the store
        may not be written.
        """
        keep = not self._overwrite and not resume
        targets = [_Target(self.prefix + suffix) for suffix in suffixes]
        for target in targets:
            if keep and target.stored(".seq.idx"):
                raise FormatError(
                    f"{target.prefix}: a shard is here; choose another prefix, or pass overwrite (--overwrite)"
                )
            target.require_ours()
        probe = f"{targets[0].key}.{secrets.token_hex(8)}.probe"  # a name that nobody has
        targets[0].store.put(probe, [b""], 0, xxhash.xxh3_128_hexdigest(b""))
        targets[0].store.delete(probe)
        for suffix in suffixes:
            local = self.local + suffix
            if keep and os.path.exists(ShardPaths.of(local).seq_idx):
                raise FormatError(
                    f"{local}: built by an earlier run, and not uploaded; send it: megatron-sft-idx copy {local}"
                    f" {self.prefix + suffix}, or pass overwrite (--overwrite) to build it anew"
                )
        self._folder.mkdir(parents=True, exist_ok=True)

    def publish(self, suffix: str = "", on_progress: Advance = lambda nbytes: None) -> Copied:
        """Upload what was built, and remove it here.

        Args:
            suffix: of both prefixes, for a shard that was built beside this one.
            on_progress: told how many more bytes have arrived.

        Raises:
            SFTIndexError: as ``upload``; what was built stays here.
        """
        local = self.local + suffix
        copied = upload(CopySource(local), self.prefix + suffix, overwrite=self._overwrite, on_progress=on_progress)
        remove_shard(ShardPaths.of(local))
        with contextlib.suppress(OSError):  # others are being built here
            self._folder.rmdir()
        return copied
