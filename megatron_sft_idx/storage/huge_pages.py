"""Huge pages: asked for, and counted where the kernel says what it really gave.

``MADV_HUGEPAGE`` succeeds almost anywhere and mostly does nothing: a file system must keep a file in pages that large,
and tmpfs must be told to. So what counts is what ``/proc/self/smaps`` says after the pages were touched.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_sft_idx.storage.advice import map_of
from megatron_sft_idx.storage.local import Array
from megatron_sft_idx.storage.mounts import mount_of

__all__ = ["Mapping", "ask_huge_pages", "huge_nbytes_of", "mappings"]

logger = logging.getLogger(__name__)

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


class Mapping(NamedTuple):
    """One range of addresses of this process, as ``/proc/self/smaps`` has it.

    Attributes:
        begin: first address.
        end: where it ends.
        nbytes: counts by their name there, such as ``Rss``, ``Pss`` and ``FilePmdMapped``.
    """

    begin: int
    end: int
    nbytes: dict[str, int]


def mappings(arrays: Sequence[Array]) -> list[Mapping]:
    """The ranges of addresses that arrays lie in; none for arrays that are not in memory."""
    spans = [(array.ctypes.data, array.nbytes) for array in arrays if isinstance(array, np.ndarray) and array.nbytes]
    return [each for each in _all() if any(each.begin < begin + size and begin < each.end for begin, size in spans)]


def _all() -> Iterator[Mapping]:
    found: Mapping | None = None
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if at := _RANGE.match(line):
                if found:
                    yield found
                found = Mapping(int(at[1], 16), int(at[2], 16), {})
            elif found and line.endswith(" kB\n"):
                name, amount, _ = line.split()
                found.nbytes[name.rstrip(":")] = int(amount) << 10
    if found:
        yield found


def huge_nbytes_of(arrays: Sequence[Array]) -> int:
    """Bytes of the ranges that arrays lie in that are mapped by huge pages now."""
    return sum(each.nbytes.get(name, 0) for each in mappings(arrays) for name in _HUGE)


def ask_huge_pages(path: str, array: Array) -> None:
    """Ask for huge pages for a map; what is known to stand in the way is logged as a warning."""
    mapped = map_of(array)
    why = "it is not mapped into memory" if mapped is None else _obstacle(path)
    if mapped is not None:
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel without them
            why = error.strerror
    if why:
        logger.warning("%s: no huge pages: %s; reading goes on with small ones", path, why)


def _obstacle(path: str) -> str | None:
    """Why a map of a file will have no huge pages; None where it may have some."""
    enabled = _setting("enabled")
    if enabled in ("never", None):
        return f"transparent huge pages are switched off on this machine ({_SETTINGS / 'enabled'})"
    on_tmpfs = _setting("shmem_enabled")
    if mount_of(path).filesystem == "tmpfs" and on_tmpfs in ("never", "deny", None):
        return f"tmpfs gives none unless {_SETTINGS / 'shmem_enabled'} says advise, or it is mounted with huge=advise"
    if os.path.getsize(path) < _pmd_nbytes():
        return f"the file is smaller than one of {_pmd_nbytes()} bytes"
    return None


def _setting(name: str) -> str | None:
    """The value in brackets among those that a file of the kernel lists."""
    try:
        found = re.search(r"\[(\w+)\]", (_SETTINGS / name).read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def _pmd_nbytes() -> int:
    try:
        return int((_SETTINGS / "hpage_pmd_size").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 2 << 20
