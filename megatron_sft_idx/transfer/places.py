"""Which shards a remote path names, and where copies of several go."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.remote import open_store

__all__ = ["destinations", "remote_prefixes", "shard_nbytes"]

_MARK = ".seq.idx"


def remote_prefixes(source: str) -> list[str]:
    """Prefixes of the shards that a remote path names, by name, numbers as numbers.

    A path that ends in ``/`` stands for the shards right under it, one with ``*``, ``?`` or ``[`` for those whose
    prefix it matches, any other for itself.

    Raises:
        ShardNotFoundError: no shard there.
        StorageError: the store cannot be read.
    """
    store, key = open_store(source)
    if not source.endswith("/") and not re.search(r"[*?\[]", key):
        return [ShardPaths.of(source).prefix]
    pattern = key + "*" if key.endswith("/") or not key else key
    fixed = re.split(r"[*?\[]", pattern)[0]
    folders = pattern.count("/")
    found = [
        info.key.removesuffix(_MARK)
        for info in store.list(fixed)
        if info.key.endswith(_MARK)
        and info.key.count("/") == folders  # as in a file system, a star does not reach into folders
        and fnmatch.fnmatchcase(info.key.removesuffix(_MARK), pattern)
    ]
    if not found:
        raise ShardNotFoundError(source, [store.path(pattern + _MARK)], "no shard of that name is there")
    return [store.path(each) for each in sorted(found, key=lambda key: [*map(_number, re.split(r"(\d+)", key))])]


def _number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (0, text)


def destinations(prefixes: Sequence[str], target: str) -> list[str]:
    """Where each of several shards goes: under ``target`` where that names a folder, else to ``target`` itself.

    Raises:
        FormatError: several shards to one prefix, or two of one name to one folder.
    """
    if not target.endswith("/") and (is_remote(target) or not os.path.isdir(target)):
        if len(prefixes) == 1:
            return [ShardPaths.of(target).prefix]
        raise FormatError(f"{target}: one prefix for {len(prefixes)} shards; end it with / to name a folder")
    names = [os.path.basename(prefix) for prefix in prefixes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FormatError(f"{target}: two of the shards are called {twice[0]}; copy them to folders of their own")
    return [target.rstrip("/") + "/" + name for name in names]


def shard_nbytes(prefix: str) -> int:
    """What a shard's files take together, for progress; those that are missing are for others to notice."""
    paths = ShardPaths.of(prefix).all
    if not is_remote(prefix):
        return sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
    store, key = open_store(prefix)
    wanted = {os.path.basename(path) for path in paths}
    return sum(info.nbytes for info in store.list(key + ".") if os.path.basename(info.key) in wanted)
