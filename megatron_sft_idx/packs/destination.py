"""The local or remote prefix that a command writes shards to: checks before the work, and the upload after it.

Shards for a remote prefix are built in a local folder and uploaded. Repeating an interrupted command with the same
folder resumes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.lines import log_line
from megatron_sft_idx.packs.buckets import RemoteTarget, remote_prefix, upload
from megatron_sft_idx.packs.transfer import CopySource, shard_nbytes
from megatron_sft_idx.shard import remove_shard
from megatron_sft_idx.shard.publication import places_of
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.building_files import require_ours
from megatron_sft_idx.storage.outputs import places_of_output
from megatron_sft_idx.storage.progress import show_progress
from megatron_sft_idx.storage.publish import Place, require_apart, require_space

# In the working directory: scratch folders are deleted with the job, together with the state needed to resume.
STAGING = "megatron-sft-idx-staging"


class Destination:
    """The prefix that a command writes to.

    Args:
        prefix: as the user gave it.
        suffixes: the suffixes of the shards that are written.
        beside: suffixes of further shards to upload to a remote prefix.
        staging: the local folder for building shards for a remote prefix.
        overwrite: replace existing shards.
        summary: path of a JSON file to write as well.

    Attributes:
        local: the local prefix to build shards at.

    Raises:
        FormatError: a remote prefix is only a bucket or a folder.
    """

    def __init__(
        self,
        prefix: str,
        *,
        suffixes: Sequence[str] = ("",),
        beside: Sequence[str] = (),
        staging: str = STAGING,
        overwrite: bool = False,
        summary: str | None = None,
    ) -> None:
        self.prefix, self._suffixes, self._beside = prefix, suffixes, beside
        self._overwrite, self._summary = overwrite, summary
        self.local, self._staging, self._remote = prefix, Path(staging), ""
        if is_remote(prefix):
            self._remote = remote_prefix(prefix)
            # With a hash of the whole prefix: two buckets can have shards of the same name.
            hashed = xxhash.xxh3_64_hexdigest(self._remote.encode())
            self.local = str(self._staging / f"{os.path.basename(self._remote)}-{hashed}")

    def prepare(
        self,
        reads: Iterable[Place] = (),
        *,
        beside: Sequence[str] = (),
        columns: Iterable[str] = (),
        nbytes: int = 0,
        may_be_found: bool = False,
    ) -> None:
        """Check, before hours of work, that shards can be written and published.

        Args:
            reads: the files that the command reads.
            beside: further shards that are written, by the suffix of their prefix.
            columns: names of the shards' columns.
            nbytes: minimum number of bytes that will be written.
            may_be_found: the command itself checks whether a remote shard is the one that it would make.

        Raises:
            FormatError: a shard or something else already exists there, locally or remotely.
            StorageError: the store is not writable.
            OSError: too little space on the disk.
        """
        if len(self._suffixes) > 1:
            require_ours(ShardPaths.of(self.local).prefix)
        shards = [ShardPaths.of(self.local + end).with_columns(columns) for end in (*self._suffixes, *beside)]
        for each in shards:
            each.require_own_names()
        writes = [place for each in shards for place in places_of(each, "the output", written=True)]
        if self._summary is not None:
            writes += places_of_output(self._summary, "--summary")
        require_apart(writes, reads)
        require_space(self.local, nbytes, (len(SUFFIXES) + 4) * len(shards))
        if self._remote:
            self._prepare_remote(keep=not self._overwrite and not may_be_found)
            log_line(f"building at {self.local}, for upload to {self.prefix}")

    def _prepare_remote(self, *, keep: bool) -> None:
        """Check that the prefix is free by writing and removing an object; with ``keep``, reject any shard."""
        self._require_free(self._suffixes, keep=keep)
        target = RemoteTarget(self._remote + self._suffixes[0])
        probe = f"{target.key}.{secrets.token_hex(8)}.probe"  # an unused name
        target.store.put(probe, [b""], 0, xxhash.xxh3_128_hexdigest(b""))
        target.store.delete(probe)
        self._staging.mkdir(parents=True, exist_ok=True)
        # An existing corpus in the build folder is used again; only its remote prefix must be free.
        self._require_free(self._beside, keep=keep)

    def _require_free(self, suffixes: Sequence[str], *, keep: bool) -> None:
        for target in [RemoteTarget(self._remote + suffix) for suffix in suffixes]:
            if keep and target.stored(".seq.idx"):
                raise FormatError(
                    f"{target.prefix}: a shard already exists; choose another prefix, or pass overwrite (--overwrite)"
                )
            target.require_ours()

    def publish(self, *, found: bool = False) -> None:
        """Upload shards built for a remote prefix and the further shards. If that fails, say where they are.

        If the shards were ``found``, they may be at the remote prefix already, and then there is no local one.
        """
        pending = [*self._suffixes, *self._beside] if self._remote else []
        pending = [end for end in pending if not found or os.path.isfile(ShardPaths.of(self.local + end).seq_idx)]
        try:
            while pending:
                self._upload(pending[0])
                del pending[0]
            if self._remote:
                with contextlib.suppress(OSError):  # if other shards are being built in the folder, it stays
                    self._staging.rmdir()
        except (SFTIndexError, KeyboardInterrupt, SystemExit):
            for suffix in pending:
                log_line(
                    f"the shard is complete and kept at {self.local + suffix}; upload it when the store is available"
                    f" again: megatron-sft-idx copy {self.local + suffix} {self.prefix + suffix}"
                )
            raise

    def _upload(self, suffix: str) -> None:
        """Upload a shard and remove the local one. After an error, it stays."""
        local = self.local + suffix
        with show_progress(1024)("uploading", shard_nbytes(local)) as advance:
            upload(CopySource(local), self._remote + suffix, overwrite=self._overwrite, on_progress=advance)
        remove_shard(ShardPaths.of(local))
