"""Which shards a path stands for: one shard, a folder, a glob, or a list of these."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from typing import TypeAlias

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.remote.store import exists, folders_matching, in_folder, matching

__all__ = ["Source", "find_prefixes", "natural_key"]

Source: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


def natural_key(path: str) -> tuple[list[str | int], str]:
    """Sort key that compares runs of digits as numbers: ``part-9`` comes before ``part-10``."""
    parts: list[str | int] = list(re.split(r"(\d+)", path))
    parts[1::2] = map(int, parts[1::2])
    return parts, path


def find_prefixes(source: Source) -> list[str]:
    """Prefixes of the shards that ``source`` names.

    A folder stands for the shards right in it, a glob for those whose prefix or one of whose files it matches; both
    are in numeric-aware order of their names. A list keeps its own order.

    Raises:
        ShardNotFoundError: a folder or a glob without any shard. A prefix that does not exist is given back: who
            opens it says what is missing.
        FormatError: an empty list.
    """
    if not isinstance(source, str | os.PathLike):
        if not len(source):
            raise FormatError("an empty list of shards; name at least one")
        return [prefix for entry in source for prefix in find_prefixes(entry)]
    path = os.fspath(source)
    if is_remote(path):
        return _find_remote(path)
    if os.path.isdir(path):
        found = _in_folder(path)
        if not found:
            raise ShardNotFoundError(path, [os.path.join(path, "*.seq.idx")], "the folder holds no shard of its own")
        return found
    prefix = ShardPaths.of(path).prefix
    if not glob.has_magic(path) or os.path.exists(prefix + ".seq.idx"):
        return [prefix]
    found = _matching(path)
    if not found:
        raise ShardNotFoundError(path, [path + ".seq.idx"], "no shard and no folder of shards matches the pattern")
    return found


def _in_folder(folder: str) -> list[str]:
    names = (entry.name for entry in os.scandir(folder) if entry.name.endswith(".seq.idx"))
    return sorted((os.path.join(folder, ShardPaths.of(name).prefix) for name in names), key=natural_key)


def _matching(pattern: str) -> list[str]:
    """Files are taken for their prefixes, so ``data/*`` and ``data/train-*`` both work; folders for what they hold."""
    found = {ShardPaths.of(path).prefix for path in glob.glob(pattern + ".seq.idx")}
    for path in glob.glob(pattern):
        if os.path.isdir(path):
            found.update(_in_folder(path))
        elif path.endswith(SUFFIXES) and os.path.exists(ShardPaths.of(path).seq_idx):
            found.add(ShardPaths.of(path).prefix)
    return sorted(found, key=natural_key)


def _find_remote(path: str) -> list[str]:
    """As ``find_prefixes``, in an object store, where a folder is nothing but the start of some keys."""
    is_folder = path.endswith("/")
    if not is_folder:
        prefix = ShardPaths.of(path).prefix
        if exists(prefix + ".seq.idx"):
            return [prefix]
    if glob.has_magic(path):
        paths = matching(path + ".seq.idx") + matching(path)
        paths += [entry for folder in folders_matching(path) for entry in in_folder(folder)]
        wanted, why = path + ".seq.idx", "no shard and no folder of shards matches the pattern"
    else:
        paths = in_folder(path)
        wanted, why = path.rstrip("/") + "/*.seq.idx", "the folder holds no shard of its own"
    found = {ShardPaths.of(entry).prefix for entry in paths if entry.endswith(".seq.idx")}
    if found:
        return sorted(found, key=natural_key)
    if is_folder or glob.has_magic(path):
        raise ShardNotFoundError(path, [wanted], why)
    return [prefix]
