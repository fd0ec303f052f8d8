"""A finished catalog read as a stream, compared with a static dataset of its shards and with scattering from rank 0.

python tools/bench/live_catalog.py [--full]
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from batches_peers import CAPACITY, ROWS, SEQUENCES, TOKENS, fill
from plot import Dot, dots
from report import Bench, cells, run_bench

from megatron_sft_idx.live import Catalog, Limits, ProducerState
from megatron_sft_idx.live.live_loader import LiveConfig, LiveLoader
from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import Batch, BatchAssembler
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.rows import PackedRows
from megatron_sft_idx.training.sources import StoredPacks

RANKS = 4


def write_catalog(folder: Path, shards: int, packs: int) -> None:
    rng = np.random.default_rng(0)
    catalog = Catalog(folder)
    for shard in range(shards):
        with ShardWriter(catalog.shard_prefix(shard), capacity=CAPACITY, pad_id=0, durable=False) as writer:
            fill(writer, rng, packs // shards)
    catalog.write_producer(ProducerState(Limits(CAPACITY, SEQUENCES), published=shards))
    catalog.write_end(shards)


def static_batches(folder: Path) -> Iterator[Any]:
    """Yield batches of the shards as a complete dataset, in random order."""
    source = StoredPacks(ShardSet.open(folder))
    rows = PackedRows(source, 0, "train", source.num_packs, CAPACITY)
    order = [list(range(first, first + ROWS)) for first in range(0, source.num_packs - ROWS + 1, ROWS)]
    return iter(BatchLoader(rows.assembler, rows.micro_batches(order)))


def live(folder: Path, rank: int = 0, size: int = 1, **options: Any) -> LiveLoader:
    return LiveLoader(folder, LiveConfig(rank=rank, size=size, seq_length=CAPACITY, micro_batch_size=ROWS, **options))


def per_batch(batches: Iterable[Any]) -> tuple[float, float]:
    """Return milliseconds and CPU milliseconds per batch, over an epoch, for a trainer that does nothing else."""
    start, busy, count = time.perf_counter(), time.process_time(), 0
    for _ in batches:
        count += 1
    return (time.perf_counter() - start) / count * 1e3, (time.process_time() - busy) / count * 1e3


def beside(bench: Bench, folder: Path, rounds: int) -> None:
    torch.set_num_threads(1)  # a pool of polling threads would count as busy
    ways: list[tuple[str, Callable[[], Iterable[Any]]]] = [
        ("static dataset", lambda: static_batches(folder)),
        ("live catalog", lambda: live(folder)),
        ("live catalog, as stored", lambda: live(folder, shuffle=False)),
        ("live catalog, window of 4 shards", lambda: live(folder, window=4)),
    ]
    found: list[list[tuple[float, float]]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for cell, (_, batches) in zip(found, ways, strict=True):
            took = per_batch(batches())
            if turn:  # the first turn fills the page cache
                cell.append(took)
    figures = [[statistics.median(column) for column in zip(*cell, strict=True)] for cell in found]
    (base, busy) = figures[0]
    bench.section("One rank")
    bench.say(
        f"Milliseconds a micro-batch of {ROWS} packs over whole epochs from the page cache, through the thread, opening"
        f" included; medians of {rounds} interleaved epochs. Processor time tells more where other work runs on the"
        " machine."
    )
    header = ("way", "ms", "fastest", "static dataset = 1", "processor ms", "static dataset = 1")
    rows = [
        (name, *cells(".3f .3f .2f .3f .2f", wall, min(cell)[0], wall / base, cpu, cpu / busy))
        for (name, _), cell, (wall, cpu) in zip(ways, found, figures, strict=True)
    ]
    bench.table(header, rows)
    static, ours = ([wall for wall, _ in cell] for cell in found[:2])
    what = f"a batch of {ROWS} x {CAPACITY} of a live catalog"
    bench.headline("batch", what, ours, "ms", peer="the same shards as a static dataset", theirs=static)


# ---- four ranks ----


def scattered(folder: Path, rank: int) -> Iterator[Any]:
    """Yield batches that rank 0 reads for all ranks and scatters, like streaming datasets in other trainers."""
    source = StoredPacks(ShardSet.open(folder))
    assembler = BatchAssembler(source, CAPACITY, width=SEQUENCES + 2)
    layout = assembler.layout(ROWS)
    mine = Batch(layout)
    order = np.random.default_rng(0).permutation(source.num_packs)
    for step in order[: len(order) // (ROWS * RANKS) * ROWS * RANKS].reshape(-1, RANKS, ROWS):
        parts = None
        if rank == 0:
            batches = [Batch(layout) for _ in range(RANKS)]
            for batch, packs in zip(batches, step, strict=True):
                assembler.assemble(packs, batch)
            parts = [batch.storage for batch in batches]
        dist.scatter(mine.storage, parts)
        yield mine.tensors


def rank_main(rank: int, folder: Path, meeting: str, rounds: int, pipe: Any) -> None:
    """One of four processes; rank 0 sends the milliseconds a step of each way, alternately."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    found = []
    for _ in range(rounds + 1):
        for way in (partial(live, size=RANKS), scattered):
            dist.barrier()
            start, count = time.perf_counter(), 0
            for _batch in way(folder, rank=rank):
                count += 1
            dist.barrier()
            found.append((time.perf_counter() - start) / count * 1e3)
    if rank == 0:
        pipe.send(found)
    dist.destroy_process_group()


def four_ranks(bench: Bench, folder: Path, rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    meeting = os.fspath(folder / "meeting")
    ranks = [context.Process(target=rank_main, args=(rank, folder, meeting, rounds, send)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    send.close()
    found = receive.recv()[2:]
    for process in ranks:
        process.join()
    own, scatter = found[::2], found[1::2]
    base = statistics.median(own)
    layout = BatchAssembler(StoredPacks(ShardSet.open(folder)), CAPACITY, width=SEQUENCES + 2).layout(ROWS)
    nbytes = RANKS * Batch(layout).layout.nbytes
    bench.section(f"{RANKS} ranks")
    bench.say(
        f"Milliseconds a step of {RANKS} processes on this machine (gloo, over loopback), each with a micro-batch of"
        f" {ROWS} packs; medians of {rounds} interleaved epochs. Scattering moves {nbytes / 1e6:.1f} MB a step"
        " through rank 0."
    )
    ways = (("each rank reads its own shards", own), ("rank 0 reads all and scatters", scatter))
    rows = [
        (name, f"{middle:.2f}", f"{min(cell):.2f} to {max(cell):.2f}", f"{middle / base:.1f}")
        for name, cell in ways
        for middle in [statistics.median(cell)]
    ]
    bench.table(("way", "ms", "range", "own shards = 1"), rows)
    what = f"a step of {RANKS} ranks, each with shards of its own"
    bench.headline("step", what, own, "ms", peer=ways[1][0], theirs=scatter, short=True)
    marks = [Dot(name, cell, cell is own) for name, cell in ways]
    bench.plot("live_catalog", dots(f"A step of {RANKS} ranks over a live catalog", "milliseconds", marks))


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    bench.say(f"{options.packs:,} packs of {TOKENS} tokens in {options.shards} shards.")
    write_catalog(folder, options.shards, options.packs)
    beside(bench, folder, options.rounds)
    four_ranks(bench, folder, options.rounds)


if __name__ == "__main__":
    sizes = {"packs": (8000, 8000, "packs in the catalog"), "shards": (20, 20, "shards they are in")}
    run_bench("A live catalog beside a static dataset", ("torch",), report, sizes, rounds=(5, 9))
