"""Folders and globs of objects: stores know neither, only keys that begin alike."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Iterator

from megatron_sft_idx.storage.remote.paths import RemotePath
from megatron_sft_idx.storage.remote.store import open_store

__all__ = ["exists", "in_folder", "matching"]


def exists(path: str) -> bool:
    """Whether there is an object at a path."""
    store, key = open_store(path)
    return bool(key) and store.head(key) is not None


def in_folder(path: str) -> list[str]:
    """Paths of the objects right in a folder; empty where there is none."""
    store, key = open_store(path)
    start = key.rstrip("/") + "/" if key.strip("/") else ""
    return [store.path(found.key) for found in store.list(start) if "/" not in found.key[len(start) :]]


def matching(pattern: str) -> list[str]:
    """Paths of the objects that a glob matches; ``*`` and ``?`` stop at a slash."""
    store, key = open_store(pattern)
    start = _before_magic(key)
    wanted = key.split("/")
    return [store.path(found.key) for found in store.list(start) if _matches(found.key.split("/"), wanted)]


def folders_matching(pattern: str) -> Iterator[str]:
    """Folders that a glob matches."""
    store, key = open_store(pattern)
    wanted = key.rstrip("/").split("/")
    seen = set()
    for found in store.list(_before_magic(key)):
        parts = found.key.split("/")[:-1][: len(wanted)]
        if _matches(parts, wanted) and (folder := "/".join(parts)) not in seen:
            seen.add(folder)
            yield str(RemotePath(store.scheme, store.bucket, folder))


def _before_magic(key: str) -> str:
    """The longest folder in which all matches lie."""
    plain = []
    for part in key.split("/")[:-1]:
        if glob.has_magic(part):
            break
        plain.append(part + "/")
    return "".join(plain)


def _matches(parts: list[str], patterns: list[str]) -> bool:
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
