"""Writing, reading and opening shards compared with Megatron's own IndexedDataset, on this machine.

    python tools/bench/shard.py [--full]

Both sides run in turn, in the same process or in separate processes that are started the same way; figures are
medians. Processor time is given next to wall time, because a busy machine changes the latter.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import alternated, in_own_process, medians, memory, reset_peak, write_equal_packs
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from report import MIB, Bench, cells, run_bench

from megatron_sft_idx.builder import SFTIndexedDatasetBuilder
from megatron_sft_idx.dataset import SFTIndexedDataset
from megatron_sft_idx.shard import ShardWriter

HEAP_PACKS = 250_000
STOCK = "Megatron's `IndexedDataset`"


# ---- writing ----


class Input:
    """One pack, as every builder wants it: equal sequences, the last position of each masked."""

    def __init__(self, length: int, sequences: int) -> None:
        self.ids = np.arange(length, dtype=np.int32)
        self.tensor = torch.from_numpy(self.ids)
        self.starts = np.arange(0, length, length // sequences, dtype=np.int64)
        self.mask = np.ones(length, np.uint8)
        self.mask[np.append(self.starts[1:], length) - 1] = 0


def write_stock(prefix: str, pack: Input, count: int, *, documents: bool) -> None:
    builder = IndexedDatasetBuilder(prefix + ".bin", np.int32)
    length = [len(pack.ids)]
    for _ in range(count):
        if documents:
            builder.add_document(pack.ids, length)
        else:
            builder.add_item(pack.tensor)
            builder.end_document()
    builder.finalize(prefix + ".idx")


def write_packs(prefix: str, pack: Input, count: int) -> None:
    with SFTIndexedDatasetBuilder(prefix + ".bin", np.int32, overwrite=True) as builder:
        for _ in range(count):
            builder.add_pack(pack.ids, pack.mask, pack.starts)


def write_packs_unsynced(prefix: str, pack: Input, count: int) -> None:
    with ShardWriter(prefix, overwrite=True, durable=False) as writer:
        for _ in range(count):
            writer.add_pack(pack.ids, pack.mask, pack.starts)


WRITERS: list[tuple[str, Callable[[str, Input, int], None]]] = [
    ("stock `add_item`", partial(write_stock, documents=False)),
    ("stock `add_document`", partial(write_stock, documents=True)),
    ("`add_pack`", write_packs),
    ("`add_pack`, no fsync", write_packs_unsynced),
]


def nbytes(writer: str, length: int, sequences: int) -> int:
    """Bytes that a pack takes in all files: tokens and index, and ours masks, starts and offsets too."""
    stock = 4 * length + 20
    return stock if writer.startswith("stock") else stock + length + 4 * sequences + 16


def writing(bench: Bench, folder: Path, rounds: int) -> None:
    bench.section("Writing")
    bench.say(
        "int32 tokens. The stock builder writes tokens and index; ours also checks every rule, writes masks and starts,"
        " checksums all files and waits for the disk (fsync), which the stock builder does not."
    )
    rows = []
    for length, sequences, count in ((4096, 8, 3_000), (64, 2, 50_000)):
        pack = Input(length, sequences)
        works = [partial(write, str(folder / f"x{i}"), pack, count) for i, (_, write) in enumerate(WRITERS)]
        times = alternated(works, rounds)
        found = medians(times)
        base = found[1]
        for (name, _), t in zip(WRITERS, found, strict=True):
            million, size = length * count / 1e6, nbytes(name, length, sequences) * count / 1e6
            rates = million / t.cpu, million / t.wall, size / t.cpu, t.cpu / count * 1e6
            beside = base.cpu / t.cpu, base.wall / t.wall
            rows.append((length, name, *cells(".0f .0f .0f .2f .2f .2f", *rates, *beside)))
        every = [[length * count / t.cpu / 1e6 for t in column] for column in times]
        what = f"writing packs of {length:,} tokens with masks, rules checked, checksummed"
        peer = "Megatron's `add_document`, tokens only"
        key, unit, short = f"write{length}", "M tokens a CPU s", length == 4096
        bench.headline(key, what, every[2], unit, peer=peer, theirs=every[1], more=True, short=short)
    header = "tokens a pack, writer, M tokens/cpu s, M tokens/s, MB/cpu s, cpu us a pack"
    bench.table([*header.split(", "), "rate by cpu, `add_document` = 1", "by clock"], rows)


def heap_of_writing(which: int, prefix: str, count: int) -> int:
    """Growth of the process's peak, from after a small build to after a large one."""
    pack, write = Input(16, 2), WRITERS[which][1]
    write(prefix, pack, 100)
    gc.collect()
    reset_peak()
    before = memory("VmRSS")
    write(prefix, pack, count)
    return memory("VmHWM") - before


def heap(bench: Bench, folder: Path) -> None:
    bench.section("Memory of writing")
    bench.say(f"{HEAP_PACKS:,} packs of 16 tokens, a process each: growth of its peak resident memory, with finalize.")
    grown = [
        in_own_process(heap_of_writing, which, str(folder / f"heap{which}"), HEAP_PACKS) / MIB for which in range(3)
    ]
    rows = [(WRITERS[i][0], f"{mib:.1f}", f"{mib * MIB / HEAP_PACKS:.1f}") for i, mib in enumerate(grown)]
    bench.table(("writer", "MiB", "bytes a pack"), rows)
    what = "memory that grows while a million packs are written"
    bench.headline("write-memory", what, grown[2:], "MiB", peer="Megatron's `add_document`", theirs=grown[1:2])


# ---- reading ----


def reading(bench: Bench, folder: Path, rounds: int) -> None:
    count, length = 20_000, 2048
    prefix = str(folder / "read")
    write_packs(prefix, Input(length, 8), count)
    order = np.random.default_rng(0).permutation(count).tolist()
    ours, pread, stock = SFTIndexedDataset(prefix), SFTIndexedDataset(prefix, mmap=False), IndexedDataset(prefix)

    def all_of(read: Callable[[int], Any]) -> Callable[[], None]:
        def work() -> None:
            for i in order:
                read(i)

        return work

    reads: list[tuple[str, Callable[[int], Any]]] = [
        ("stock `ds[i]`: tokens", stock.__getitem__),
        ("stock `ds.get(i)`: tokens", stock.get),
        ("`ds.get(i)`: tokens", ours.get),
        ("`ds[i]`: tokens, mask, boundaries", ours.__getitem__),
        ("stock `ds[i]`, and every token summed", lambda i: stock[i].sum()),
        ("`ds.get(i)`, and every token summed", lambda i: ours.get(i).sum()),
        ("`ds[i]` by pread", pread.__getitem__),
    ]
    times = alternated([all_of(read) for _, read in reads], rounds)
    found = medians(times)
    bench.section("Reading a pack")
    bench.say(f"{count:,} packs of {length} tokens, 8 sequences each, in random order from the page cache.")
    rows = [
        (name, *cells(".2f .2f .2f", t.cpu / count * 1e6, t.wall / count * 1e6, t.cpu / found[0].cpu))
        for (name, _), t in zip(reads, found, strict=True)
    ]
    bench.table(("read", "cpu us", "us", "time by cpu, stock `ds[i]` = 1"), rows)
    us = [[t.cpu / count * 1e6 for t in column] for column in times]
    what = "a random read of a pack's tokens, a view of the map"
    bench.headline("read-tokens", what, us[2], "µs", peer=f"{STOCK}, `ds[i]`", theirs=us[0], short=True)
    what = "a random read of tokens, mask and boundaries"
    bench.headline("read-pack", what, us[3], "µs", peer=f"{STOCK}, tokens only", theirs=us[0])


# ---- opening ----


def opening_of(stock: bool, warm: str, prefix: str, rounds: int) -> tuple[list[float], list[float], int]:
    """Milliseconds to open, to open and read one pack, of every round; private bytes of the first opening."""
    kind = IndexedDataset if stock else SFTIndexedDataset
    for _ in range(5):
        kind(warm)[0]
    gc.collect()
    before = memory("Private", file="smaps_rollup")
    dataset = kind(prefix)
    grown = memory("Private", file="smaps_rollup") - before
    middle = len(dataset) // 2
    del dataset
    opened, read = alternated([lambda: kind(prefix), lambda: kind(prefix)[middle]], 4 * rounds)
    return [t.wall * 1e3 for t in opened], [t.wall * 1e3 for t in read], grown


def opening(bench: Bench, folder: Path, rounds: int, largest: int) -> None:
    bench.section("Opening")
    bench.say("Warm; one process for each row. Private memory is what the first opening adds.")
    warm, rows = str(folder / "warm"), []
    write_equal_packs(warm, 100, 2, seed=None, token_dtype=np.uint16)
    found: dict[bool, list[float]] = {}
    counts = [10**exponent for exponent in range(4, 8) if 10**exponent <= largest]
    for count in counts:
        prefix = str(folder / f"open{count}")
        write_equal_packs(prefix, count, 2, seed=None, token_dtype=np.uint16)
        for stock in (True, False):
            found[stock], read, grown = in_own_process(opening_of, stock, warm, prefix, rounds)
            figures = cells(".3f .3f .2f", median(found[stock]), median(read), grown / MIB)
            rows.append((f"{count:,}", "stock" if stock else "ours", *figures))
    bench.table(("packs", "reader", "open ms", "open and read one ms", "private MiB"), rows)
    what = f"opening a shard of {counts[-1]:,} packs"
    bench.headline("open", what, found[False], "ms", peer=STOCK, theirs=found[True], short=True)


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    writing(bench, folder, options.rounds)
    heap(bench, folder)
    reading(bench, folder, options.rounds)
    opening(bench, folder, options.rounds, options.largest)


if __name__ == "__main__":
    title = "Shards beside Megatron's IndexedDataset"
    sizes = {"largest": (10**6, 10**7, "packs in the largest shard that is opened")}
    run_bench(title, ("megatron-core", "torch", "numpy"), report, sizes, rounds=(3, 9))
