"""Where copies of several shards go, and how much there is to copy."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import check_free
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.remote import RemotePath, open_store
from megatron_sft_idx.storage.remote.store import threads
from megatron_sft_idx.transfer.download import find_same
from megatron_sft_idx.transfer.source import open_source

__all__ = ["check_destinations", "destinations", "remote_target", "shard_nbytes"]


def remote_target(prefix: str) -> ShardPaths:
    """Paths of a shard that is to lie in an object store. FormatError where the prefix has no name."""
    paths = ShardPaths.of(prefix)
    if not RemotePath.of(paths.prefix).key.rpartition("/")[2]:
        raise FormatError(
            f"{prefix}: a bucket or a folder, where a shard needs a name: {paths.prefix.rstrip('/')}/NAME"
        )
    return paths


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
    for prefix, target in zip(prefixes, targets, strict=True):
        if is_remote(target):
            continue
        paths = ShardPaths.of(target)
        check_free(paths, overwrite=True, any_file=not overwrite)
        if paths.present() and not overwrite:
            find_same(open_source(prefix), paths, overwrite=False)


def shard_nbytes(prefix: str) -> int:
    """What a shard's files take together, for progress; those that are missing are for others to notice."""
    if not is_remote(prefix):
        return sum(os.path.getsize(path) for path in ShardPaths.of(prefix).all if os.path.isfile(path))
    store, key = open_store(prefix)
    return sum(info.nbytes for info in threads().map(store.head, [key + suffix for suffix in SUFFIXES]) if info)
