"""Catalogs for tests of consumers: in memory, to test only the order, and on disk, with identifiable packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sample_packs import Sample, sample_of, write_samples

from megatron_sft_idx.live import Catalog, Limits, ProducerState, Waiter
from megatron_sft_idx.live.live_loader import LiveConfig, LiveLoader
from megatron_sft_idx.live.live_order import RankState
from megatron_sft_idx.live.live_shards import LiveShards, OpenPacks
from megatron_sft_idx.live.live_walk import Walk

CAPACITY = 12
# Names of packs begin here. All other tokens are smaller.
FIRST_NAME = 1000
PER_SHARD = 100


class MemoryShards(LiveShards):
    """A finished catalog that has only pack counts, no files."""

    folder = "memory"

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def limits(self, waiter: Waiter) -> tuple[Limits, int | None]:
        return Limits(CAPACITY, 3), None

    def end(self) -> int | None:
        return len(self.counts)

    def wait(self, number: int, waiter: Waiter, unacknowledged: Callable[[], int] = lambda: 0) -> bool:
        return number < len(self.counts)

    def numbers(self) -> list[int]:
        return list(range(len(self.counts)))

    def count(self, number: int) -> int | None:
        return self.counts[number] if number < len(self.counts) else None

    def open(self, number: int, columns: Sequence[str] = (), *, allow_media: bool = False) -> OpenPacks:
        raise NotImplementedError("there is nothing in it")


class LateEnd(MemoryShards):
    """The same, but the end is known only after waiting for a shard that does not come."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__(counts)
        self._ended = False

    def end(self) -> int | None:
        return len(self.counts) if self._ended else None

    def wait(self, number: int, waiter: Waiter, unacknowledged: Callable[[], int] = lambda: 0) -> bool:
        self._ended = self._ended or number >= len(self.counts)
        return number < len(self.counts)


class MicroBatch(NamedTuple):
    """Shard and pack of each row, the number of masked rows at the end, and the state after the micro-batch."""

    shards: NDArray[np.int64]
    packs: NDArray[np.int64]
    num_masked: int
    state: RankState


def walk(shards: Any, state: RankState, *, epochs: int = 1, at_end: Any = "pad") -> Iterator[MicroBatch]:
    waiter = Waiter("a test")
    for wanted in Walk(shards, state, epochs=epochs, at_end=at_end, acknowledged=lambda state: {}, waiter=waiter):
        rows = np.asarray(wanted.packs)
        masked = [] if wanted.masked is None else wanted.masked.tolist()
        assert masked == sorted(masked)
        yield MicroBatch(rows[:, 0], rows[:, 1], sum(masked), wanted.state)


def names(shard: int, packs: int) -> list[int]:
    """Return the names of a shard's packs. The name of a pack is its first token."""
    return [FIRST_NAME + shard * PER_SHARD + pack for pack in range(packs)]


def packs_of(shard: int, packs: int) -> list[Sample]:
    """Return packs of one to three sequences. All tokens except the first are below ``FIRST_NAME``, and trained."""

    def pack(name: int) -> Sample:
        lengths = [2 + (name + i) % 3 for i in range(1 + name % 3)]
        return sample_of(lengths, lambda p: 1, lambda p: p + 1 if p else name)

    return [pack(name) for name in names(shard, packs)]


def publish(folder: Path, shard: int, packs: int) -> None:
    """Publish one complete shard."""
    prefix = Catalog(folder).shard_prefix(shard)
    write_samples(prefix, packs_of(shard, packs), capacity=CAPACITY, pad_id=0)


def make_catalog(folder: Path, counts: Sequence[int], *, ended: bool = True, **limits: Any) -> Catalog:
    """Make a catalog of shards with these numbers of packs, as a producer leaves it."""
    folder.mkdir(exist_ok=True)
    for shard, packs in enumerate(counts):
        publish(folder, shard, packs)
    catalog = Catalog(folder)
    catalog.write_producer(ProducerState(Limits(CAPACITY, 3, **limits), published=len(counts)))
    if ended:
        catalog.write_end(len(counts))
    return catalog


def config(rank: int = 0, size: int = 1, **options: Any) -> LiveConfig:
    return LiveConfig(rank=rank, size=size, **{"seq_length": 16, **options})


def loader(folder: Path | Any, rank: int = 0, size: int = 1, **options: Any) -> LiveLoader:
    return LiveLoader(folder, config(rank, size, **options))


def names_in(batch: dict[str, torch.Tensor]) -> list[int]:
    """Return the names of the packs of a batch that are trained on."""
    trained = batch["loss_mask"].sum(1) > 0
    return [int(row[0]) for row, real in zip(batch["tokens"], trained, strict=True) if real]


def names_of(batches: Any) -> list[int]:
    return [name for batch in batches for name in names_in(batch)]


def all_names(counts: Sequence[int]) -> list[int]:
    return [name for shard, packs in enumerate(counts) for name in names(shard, packs)]


def copies(batches: Any, count: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Return copies of batches, which do not change when further batches are read."""
    taken = zip(range(count), batches, strict=False) if count is not None else enumerate(batches)
    return [{name: tensor.clone() for name, tensor in batch.items()} for _, batch in taken]


def remove(catalog: Path, *shards: int) -> None:
    for shard in shards:
        for path in catalog.glob(f"shard-{shard:06d}.*"):
            path.unlink()
