"""Shards for object stores are built in a local folder first: what is written there can be synced, resumed and read."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import remove_shard
from megatron_sft_idx.storage.remote import open_store
from megatron_sft_idx.storage.remote.files import open_writer
from megatron_sft_idx.transfer.places import remote_target
from megatron_sft_idx.transfer.report import Copied
from megatron_sft_idx.transfer.source import open_source
from megatron_sft_idx.transfer.upload import require_ours, upload

__all__ = ["STAGING", "StagedOutput"]

# In the folder where the command runs: scratch folders end with the job, and with them what --resume goes on from.
STAGING = "megatron-sft-idx-staging"


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
        self.prefix = remote_target(prefix).prefix
        self._overwrite = overwrite
        self._folder = Path(staging)
        # Prefixes of one name in two buckets do not meet.
        place = xxhash.xxh3_64_hexdigest(self.prefix.encode())
        self.local = str(self._folder / f"{os.path.basename(self.prefix)}-{place}")

    def prepare(self, suffixes: Sequence[str] = ("",), *, resume: bool = False) -> None:
        """Find out before the work whether it can end well: write an object beside the shard, and remove it.

        Args:
            suffixes: of the shards that will be built.
            resume: an earlier run may have been interrupted at any point, during its upload too.

        Raises:
            FormatError: a shard is in the way, remote or local.
            StorageError: the store cannot be reached, or does not let these credentials write.
        """
        writer, key = open_writer(self.prefix)
        keep = not self._overwrite and not resume
        for suffix in suffixes:
            if keep and writer.stored(key + suffix + ".seq.idx"):
                where = self.prefix + suffix
                raise FormatError(f"{where}: a shard is here; choose another prefix, or pass overwrite (--overwrite)")
            require_ours(open_store(self.prefix)[0], writer, key + suffix, ShardPaths.of(self.prefix + suffix))
        probe = f"{key}.{secrets.token_hex(8)}.probe"  # a name that nobody has
        writer.put(probe, [b""], 0, xxhash.xxh3_128_hexdigest(b""))
        writer.delete(probe)
        for local, remote in ((self.local + suffix, self.prefix + suffix) for suffix in suffixes):
            if keep and os.path.exists(ShardPaths.of(local).seq_idx):
                raise FormatError(
                    f"{local}: built by an earlier run, and not uploaded; send it: megatron-sft-idx copy {local}"
                    f" {remote}, or pass overwrite (--overwrite) to build it anew"
                )
        self._folder.mkdir(parents=True, exist_ok=True)

    def publish(self, suffix: str = "", on_progress: Callable[[int], None] = lambda nbytes: None) -> Copied:
        """Upload what was built, and remove it here.

        Args:
            suffix: of both prefixes, for a shard that was built beside this one.
            on_progress: told how many more bytes have arrived.

        Raises:
            SFTIndexError: as ``upload``; what was built stays here.
        """
        local = self.local + suffix
        copied = upload(open_source(local), self.prefix + suffix, overwrite=self._overwrite, on_progress=on_progress)
        remove_shard(ShardPaths.of(local))
        with contextlib.suppress(OSError):  # others are being built here
            self._folder.rmdir()
        return copied
