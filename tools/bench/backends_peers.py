"""What ``backends.py`` measures beside ``Shard``: the same files through other readers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.inspect.read_worker import Job, Reader
from megatron_sft_idx.shard import Shard

__all__ = ["PEERS"]


class _Untold:
    """A reader that cannot be told anything."""

    def schedule(self, packs: NDArray[np.int64]) -> None:
        raise NotImplementedError("no peer knows what comes next")

    def huge_nbytes(self) -> int:
        return 0


class MemmapReader(_Untold):
    """Tokens and masks sliced from ``np.memmap``, where packs end held in memory."""

    def __init__(self, job: Job) -> None:
        shard = Shard(job.prefix, backend="pread")
        self._ends = shard.token_offsets.tolist()
        header = shard.header
        self._tokens = np.memmap(f"{job.prefix}.bin", header.token_dtype, mode="r")
        self._loss = np.memmap(f"{job.prefix}.loss.bin", header.mask_dtype, mode="r")
        self._ids, self._mask = (np.zeros(header.longest_pack, array.dtype) for array in (self._tokens, self._loss))

    def read(self, pack: int) -> int:
        start, stop = self._ends[pack : pack + 2]
        ids, mask = self._tokens[start:stop], self._loss[start:stop]
        self._ids[: len(ids)], self._mask[: len(mask)] = ids, mask
        return ids.nbytes + mask.nbytes


class StockReader(_Untold):
    """Tokens by Megatron's own reader, which knows no masks."""

    def __init__(self, job: Job, mmap: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's, of what is not installed
            from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._dataset: Any = IndexedDataset(job.prefix, mmap=mmap)
        self._ids = np.zeros(int(self._dataset.sequence_lengths.max()), self._dataset.index.dtype)

    def read(self, pack: int) -> int:
        ids = self._dataset[pack]
        self._ids[: len(ids)] = ids
        return int(ids.nbytes)


# What the tables call them, and what opens them.
PEERS: dict[str, tuple[str, Callable[[Job], Reader]]] = {
    "np.memmap": ("`np.memmap` of both files", MemmapReader),
    "stock-mmap": ("stock `IndexedDataset`, tokens only", partial(StockReader, mmap=True)),
    "stock-file": ("the same, `mmap=False`", partial(StockReader, mmap=False)),
}
