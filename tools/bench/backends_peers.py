"""Other readers of the same files, and the gain of each option of ``Shard``, for ``backends.py``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from bench_read import EpochName, SettingTimes
from measure import indexed_dataset
from read_worker import Opener, ReadRequest
from report import Bench

from megatron_sft_idx.shard import Shard


class MemmapReader:
    """Slices of tokens and masks from ``np.memmap``, with the ends of packs in memory."""

    def __init__(self, job: ReadRequest) -> None:
        shard = Shard(job.prefix, backend="pread")
        self._ends = shard.token_offsets.tolist()
        header = shard.header
        self._tokens = np.memmap(f"{job.prefix}.bin", header.token_dtype, mode="r")
        self._loss = np.memmap(f"{job.prefix}.loss.bin", header.mask_dtype, mode="r")
        self._ids, self._mask = (np.zeros(header.longest_pack, array.dtype) for array in (self._tokens, self._loss))

    def read(self, pack: int) -> int:
        """Copy a pack out; its bytes."""
        start, stop = self._ends[pack : pack + 2]
        ids, mask = self._tokens[start:stop], self._loss[start:stop]
        self._ids[: len(ids)], self._mask[: len(mask)] = ids, mask
        return ids.nbytes + mask.nbytes


class StockReader:
    """Tokens from Megatron's own reader, which has no masks."""

    def __init__(self, job: ReadRequest, mmap: bool) -> None:
        self._dataset: Any = indexed_dataset().IndexedDataset(job.prefix, mmap=mmap)
        self._ids = np.zeros(int(self._dataset.sequence_lengths.max()), self._dataset.index.dtype)

    def read(self, pack: int) -> int:
        """Copy a pack out; its bytes."""
        ids = self._dataset[pack]
        self._ids[: len(ids)] = ids
        return int(ids.nbytes)


# Their names in the tables, and the functions that open them.
PEERS: dict[str, tuple[str, Opener]] = {
    "np.memmap": ("`np.memmap` of both files", MemmapReader),
    "stock-mmap": ("stock `IndexedDataset`, tokens only", partial(StockReader, mmap=True)),
    "stock-file": ("the same, `mmap=False`", partial(StockReader, mmap=False)),
}


# ---- defaults ----

Found = Mapping[str, SettingTimes]
# Option, default, and the two ways that it selects from.
_DECIDES = (
    ("`backend`", '`"mmap"`', "mmap", "pread"),
    ("`backend`, announced", '`"mmap"`', "mmap, random, schedule", "pread, random, schedule"),
    ("`advice`", '`"normal"`', "mmap", "mmap, random"),
    ("`schedule()`", "called by batch loaders", "mmap, random, schedule", "mmap, random"),
    ("`huge_pages`", "`False`", "mmap", "mmap, huge pages"),
)


def defaults(bench: Bench, cold: Found, limited: Found | None) -> None:
    """Write a section of the report: the gain of each read option in this run.

    Args:
        bench: the report.
        cold: shuffled, on a disk, in memory's reach.
        limited: shuffled, over a memory limit; None where none could be set.
    """

    def gain(found: Found | None, one: str, other: str, which: EpochName) -> str:
        pairs = zip(found[one].epochs(which), found[other].epochs(which), strict=False) if found else ()
        ratios = [mine.rate / others.rate for mine, others in pairs]
        return f"{statistics.median(ratios):.2f}" if ratios else "not measured"

    bench.section("Defaults, and what they gain")
    cases: list[tuple[Found | None, EpochName]] = [(cold, "first"), (cold, "second"), (limited, "first")]
    rows = [
        (option, default, f"`{one}` / `{other}`", *(gain(found, one, other, which) for found, which in cases))
        for option, default, one, other in _DECIDES
    ]
    bench.table(("option", "default", "rates compared, median of rounds", "cold", "warm", "over the limit"), rows)
