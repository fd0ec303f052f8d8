"""Writing, reading and opening shards beside Megatron's own IndexedDataset, on this machine.

    python tools/bench/shard.py [--rounds 5] [--largest 10000000]

Writes tools/bench/results/shard.md. Both sides run in turn, in the same process or in processes of their own that are
started the same way; figures are medians. Processor time is given beside wall time: a busy machine changes the second.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from report import machine, memory, table

from megatron_sft_idx.builder import SFTIndexedDatasetBuilder
from megatron_sft_idx.dataset import SFTIndexedDataset
from megatron_sft_idx.shard import ShardWriter

RESULTS = Path(__file__).parent / "results" / "shard.md"
MIB = 1 << 20
HEAP_PACKS = 1_000_000


@dataclass(frozen=True)
class Time:
    """Seconds, by the processor and by the clock."""

    cpu: float
    wall: float


def timed(work: Callable[[], Any]) -> Time:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Time(time.process_time() - cpu, time.perf_counter() - wall)


def medians(works: Sequence[Callable[[], Any]], rounds: int) -> list[Time]:
    """Each work in turn, ``rounds`` times, after one round that does not count."""
    times = [[timed(work) for work in works] for _ in range(rounds + 1)][1:]
    return [
        Time(statistics.median(t.cpu for t in column), statistics.median(t.wall for t in column))
        for column in zip(*times, strict=True)
    ]


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# ---- writing ----


class Input:
    """One pack, as every builder wants it: equal sequences, the last position of each masked."""

    def __init__(self, length: int, sequences: int) -> None:
        self.ids = np.arange(length, dtype=np.int32)
        self.tensor = torch.from_numpy(self.ids)
        self.starts = np.arange(0, length, length // sequences, dtype=np.int64)
        self.mask = np.ones(length, np.uint8)
        self.mask[np.append(self.starts[1:], length) - 1] = 0


def write_items(prefix: str, pack: Input, count: int) -> None:
    builder = IndexedDatasetBuilder(prefix + ".bin", np.int32)
    for _ in range(count):
        builder.add_item(pack.tensor)
        builder.end_document()
    builder.finalize(prefix + ".idx")


def write_documents(prefix: str, pack: Input, count: int) -> None:
    builder = IndexedDatasetBuilder(prefix + ".bin", np.int32)
    length = [len(pack.ids)]
    for _ in range(count):
        builder.add_document(pack.ids, length)
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
    ("stock `add_item`", write_items),
    ("stock `add_document`", write_documents),
    ("`add_pack`", write_packs),
    ("`add_pack`, no fsync", write_packs_unsynced),
]


def nbytes(writer: str, length: int, sequences: int) -> int:
    """Bytes that a pack takes in all files: tokens and index, and ours masks, starts and offsets too."""
    stock = 4 * length + 20
    return stock if writer.startswith("stock") else stock + length + 4 * sequences + 16


def writing(folder: Path, rounds: int) -> Iterator[str]:
    yield "## Writing"
    yield ""
    yield (
        "int32 tokens. The stock builder writes tokens and index; ours also checks every rule, writes masks and starts,"
    )
    yield "checksums all files and waits for the disk (fsync), which the stock builder does not."
    yield ""
    rows = []
    for length, sequences, count in ((4096, 8, 3_000), (64, 2, 50_000)):
        pack = Input(length, sequences)
        works = [partial(write, str(folder / "x"), pack, count) for _, write in WRITERS]
        found = medians(works, rounds)
        base = found[1]
        for (name, _), t in zip(WRITERS, found, strict=True):
            rows.append(
                (
                    length,
                    name,
                    f"{length * count / t.cpu / 1e6:.0f}",
                    f"{length * count / t.wall / 1e6:.0f}",
                    f"{nbytes(name, length, sequences) * count / t.cpu / 1e6:.0f}",
                    f"{t.cpu / count * 1e6:.2f}",
                    f"{base.cpu / t.cpu:.2f}",
                    f"{base.wall / t.wall:.2f}",
                )
            )
    yield from table(
        (
            "tokens a pack",
            "writer",
            "M tokens/cpu s",
            "M tokens/s",
            "MB/cpu s",
            "cpu us a pack",
            "rate by cpu, `add_document` = 1",
            "by clock",
        ),
        rows,
    )


def heap_of_writing(which: int, prefix: str, count: int) -> int:
    """Growth of the process's peak, from after a small build to after a large one."""
    pack, write = Input(16, 2), WRITERS[which][1]
    write(prefix, pack, 100)
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again at what is resident now
    before = memory("VmRSS")
    write(prefix, pack, count)
    return memory("VmHWM") - before


def heap(folder: Path) -> Iterator[str]:
    yield "## Memory of writing"
    yield ""
    yield f"{HEAP_PACKS:,} packs of 16 tokens, a process each: growth of its peak resident memory, finalize included."
    yield ""
    rows = []
    for which, (name, _) in enumerate(WRITERS[:3]):
        grown = in_own_process(heap_of_writing, which, str(folder / f"heap{which}"), HEAP_PACKS)
        rows.append((name, f"{grown / MIB:.1f}", f"{grown / HEAP_PACKS:.1f}"))
    yield from table(("writer", "MiB", "bytes a pack"), rows)


# ---- reading ----


def reading(folder: Path, rounds: int) -> Iterator[str]:
    count, length = 20_000, 2048
    prefix = str(folder / "read")
    write_packs(prefix, Input(length, 8), count)
    order = np.random.default_rng(0).permutation(count).tolist()
    ours, pread, stock = (
        SFTIndexedDataset(prefix),
        SFTIndexedDataset(prefix, mmap=False),
        IndexedDataset(prefix),
    )

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
    found = medians([all_of(read) for _, read in reads], rounds)
    yield "## Reading a pack"
    yield ""
    yield f"{count:,} packs of {length} tokens, 8 sequences each, in random order from the page cache."
    yield ""
    rows = [
        (name, f"{t.cpu / count * 1e6:.2f}", f"{t.wall / count * 1e6:.2f}", f"{t.cpu / found[0].cpu:.2f}")
        for (name, _), t in zip(reads, found, strict=True)
    ]
    yield from table(("read", "cpu us", "us", "time by cpu, stock `ds[i]` = 1"), rows)


# ---- opening ----


def write_small_packs(prefix: str, count: int) -> None:
    """Packs of 2 tokens, as fast as they go."""
    with ShardWriter(prefix, token_dtype=np.uint16) as writer:
        for first in range(0, count, 1_000_000):
            n = min(1_000_000, count - first)
            ones = np.ones(n, np.int64)
            zeros = np.zeros(2 * n, np.uint8)
            writer.add_packs(np.arange(2 * n) % 60_000, zeros, ones * 0, ones * 2, ones)


def private_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private"))


def opening_of(stock: bool, warm: str, prefix: str, rounds: int) -> tuple[float, float, int]:
    """Seconds to open, seconds to open and read one pack, private bytes of the first opening."""
    kind = IndexedDataset if stock else SFTIndexedDataset
    for _ in range(5):
        kind(warm)[0]
    gc.collect()
    before = private_bytes()
    dataset = kind(prefix)
    grown = private_bytes() - before
    middle = len(dataset) // 2
    del dataset
    opened, read = medians([lambda: kind(prefix), lambda: kind(prefix)[middle]], 4 * rounds)
    return opened.wall, read.wall, grown


def opening(folder: Path, rounds: int, largest: int) -> Iterator[str]:
    yield "## Opening"
    yield ""
    yield "Warm; one process for each row. Private memory is what the first opening adds."
    yield ""
    warm, rows = str(folder / "warm"), []
    write_small_packs(warm, 100)
    for count in (10**exponent for exponent in range(4, 8) if 10**exponent <= largest):
        prefix = str(folder / f"open{count}")
        write_small_packs(prefix, count)
        for stock in (True, False):
            opened, read, grown = in_own_process(opening_of, stock, warm, prefix, rounds)
            name = "stock" if stock else "ours"
            rows.append((f"{count:,}", name, f"{opened * 1e3:.3f}", f"{read * 1e3:.3f}", f"{grown / MIB:.2f}"))
    yield from table(("packs", "reader", "open ms", "open and read one ms", "private MiB"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--largest", type=int, default=10**7, help="packs in the largest shard that is opened")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            "# Shards beside Megatron's IndexedDataset",
            "",
            f"{machine()}; medians of {options.rounds} runs.",
            "",
        ]
        for part in (
            writing(folder, options.rounds),
            heap(folder),
            reading(folder, options.rounds),
            opening(folder, options.rounds, options.largest),
        ):
            for line in part:
                print(line, flush=True)
                lines.append(line)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
