"""Every format that holds packs, beside each other: opening, memory, reading, size; by ``open_dataset`` and as usual.

    python tools/bench/formats.py [--packs 20000] [--rounds 3]

Writes tools/bench/results/formats.md. All files hold the same packs, but for the pickled .npy, which has fewer. Every
measurement runs in a fresh process that has read a tiny file of the same kind before, so that imports do not count;
the ways take turns, and figures are medians. Needs about 4 GB in the folder for temporary files.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import formats_peers as peers
import numpy as np
from formats_peers import Items
from report import machine, memory, table

from megatron_sft_idx import open_dataset
from megatron_sft_idx.convert import ConvertOptions, convert
from megatron_sft_idx.shard import ShardWriter

RESULTS = Path(__file__).parent / "results" / "formats.md"
CAPACITY, SEQUENCES, VOCABULARY = 4096, 8, 150_000
MIB = 1 << 20
PACKS_AT_ONCE = 250
MOST_READS, SECONDS = 20_000, 0.4
WARM_PACKS = 20


def write_packs(prefix: str, packs: int) -> None:
    """Packs of 8 sequences that fill 93 to 100% of the capacity.

    Ids are as frequent as words are (Zipf), and the second half of every sequence is trained on: so that a format
    that compresses has something to compress.
    """
    rng = np.random.default_rng(0)
    with ShardWriter(prefix, capacity=CAPACITY, pad_id=0, durable=False) as writer:
        for first in range(0, packs, PACKS_AT_ONCE):
            count = min(PACKS_AT_ONCE, packs - first)
            lengths = rng.integers(3800, CAPACITY + 1, count)
            shares = rng.dirichlet(np.full(SEQUENCES, 4.0), count)
            starts = np.cumsum(shares * (lengths[:, None] - 4 * SEQUENCES), axis=1).astype(np.int64)
            starts = np.roll(starts, 1, axis=1) + 4 * np.arange(SEQUENCES)  # 3 tokens or more in each
            starts[:, 0] = 0
            begins = (starts + (np.cumsum(lengths) - lengths)[:, None]).ravel()
            ends = np.append(begins[1:], lengths.sum())
            steps = np.zeros(lengths.sum(), np.int8)
            steps[(begins + ends) // 2] += 1
            steps[ends - 1] -= 1
            ids = np.exp(rng.random(len(steps), np.float32) * np.float32(np.log(VOCABULARY))).astype(np.int32)
            mask = np.cumsum(steps, dtype=np.int8).view(np.uint8)
            writer.add_packs(ids, mask, starts.ravel(), lengths, np.full(count, SEQUENCES))


# ---- ways ----


def ours(path: str) -> Items:
    return cast(Items, open_dataset(path))


def trained(path: str) -> Items:
    """Formats without masks need a rule."""
    return cast(Items, open_dataset(path, mask_rule="all"))


@dataclass(frozen=True)
class Way:
    """A row of the table.

    Attributes:
        stored: name of what is read, a file or folder of the bench's folder.
        label: of the format, in the table.
        reader: in the table.
        open: makes the dataset from a path.
    """

    stored: str
    label: str
    reader: str
    open: Callable[[str], Items]


SHARD, NPY, MEMMAP = "shard (five files)", "pickled `.npy`", "padded memmap folder"
LARGE, SMALL = "Parquet, 1000 packs a row group", "Parquet, 16 packs a row group"
PBIN, JSONL, STOCK = "Modalities `.pbin`, 490 tokens an item", "pre-packed JSONL chunks", "stock `.bin` and `.idx`"
WAYS = [
    Way("shard", SHARD, "`open_dataset`", ours),
    Way("shard", SHARD, "`np.memmap` slices", partial(peers.RawMemmap, plain=False)),
    Way("shard", SHARD, "slices of plain arrays on maps", partial(peers.RawMemmap, plain=True)),
    Way("packs.npy", NPY, "`open_dataset`", ours),
    Way("packs.npy", NPY, "`np.load`, allow_pickle", peers.LoadedNpy),
    Way("memmap", MEMMAP, "`open_dataset`", ours),
    Way("memmap", MEMMAP, "`np.load`, mmap_mode", peers.MappedRows),
    Way("1000.parquet", LARGE, "`open_dataset`", ours),
    Way("1000.parquet", LARGE, "pyarrow as Megatron-Bridge", peers.RowGroups),
    Way("16.parquet", SMALL, "`open_dataset`", ours),
    Way("16.parquet", SMALL, "pyarrow as Megatron-Bridge", peers.RowGroups),
    Way("jsonl", JSONL, "`open_dataset`", ours),
    Way("jsonl", JSONL, "`json.loads` of a line", peers.JsonLines),
    Way("packs.pbin", PBIN, "`open_dataset`", trained),
    Way("packs.pbin", PBIN, "`np.frombuffer` as Modalities", peers.Documents),
    Way("stock", STOCK, "`open_dataset`", trained),
    Way("stock", STOCK, "`IndexedDataset`", peers.Stock),
]


def write_all(folder: Path, packs: int, npy_packs: int) -> None:
    """The same packs in every format; the pickled file, which is read whole into memory, holds only some."""
    write_packs(str(folder / "shard"), packs)
    for suffix in (".bin", ".idx"):
        os.link(folder / f"shard{suffix}", folder / f"stock{suffix}")
    few = folder / "few"
    write_packs(str(few), npy_packs)
    made: list[tuple[Path, str, str, ConvertOptions]] = [
        (few, "packs.npy", "npy", ConvertOptions()),
        (folder / "shard", "memmap", "memmap", ConvertOptions()),
        (folder / "shard", "1000.parquet", "parquet", ConvertOptions(writer={"row_group_size": 1000})),
        (folder / "shard", "16.parquet", "parquet", ConvertOptions(writer={"row_group_size": 16})),
        (folder / "shard", "jsonl", "jsonl-chunks", ConvertOptions()),
        (folder / "shard", "packs.pbin", "pbin", ConvertOptions(allow_loss=True, verify=False)),
    ]
    for source, name, kind, options in made:
        convert(str(source), str(folder / name), kind, options)
    for path in folder.glob("few.*"):
        path.unlink()


def check_equal(folder: Path) -> None:
    """Every way gives the first pack of the shard, as far as its format holds it."""
    wanted = open_dataset(str(folder / "shard"))[0]
    for way in WAYS:
        items = way.open(f"{folder}/{way.stored}")
        parts = [items[i] for i in range(SEQUENCES if way.label == PBIN else 1)]
        same = np.array_equal(np.concatenate([part["input_ids"] for part in parts]), wanted["input_ids"])
        if way.label not in (PBIN, STOCK) and "labels" not in parts[0]:
            same &= np.array_equal(parts[0]["loss_mask"], wanted["loss_mask"])
            same &= np.array_equal(parts[0]["seq_boundaries"], wanted["seq_boundaries"])
        if not same:
            raise SystemExit(f"{way.label}, {way.reader}: another pack")


# ---- measuring ----


@dataclass(frozen=True)
class Figures:
    """What one process found.

    Attributes:
        open_ms: to open.
        open_mib: growth of resident memory by it.
        random_us: a read in random order, values left alone.
        touched_us: a read in random order, every value copied out.
        sequential_us: a read in order, every value copied out.
        own_mib: growth of memory beside mapped files, after all of it.
    """

    open_ms: float
    open_mib: float
    random_us: float
    touched_us: float
    sequential_us: float
    own_mib: float


def copied(items: Items, place: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Callable[[int], None]:
    """A read of which every value is copied out, as a collate does."""

    def read(i: int) -> None:
        for values in items[i].values():
            place[: len(values)] = values

    return read


def microseconds(read: Callable[[int], object], order: Iterable[int]) -> float:
    """A read, over as many as fit the time; three at least."""
    count, start = 0, time.perf_counter()
    for i in order:
        read(i)
        count += 1
        if count % 3 == 0 and time.perf_counter() - start > SECONDS:
            break
    return (time.perf_counter() - start) / count * 1e6


def measure(number: int, folder: str, warm: str, seed: int) -> Figures:
    """In a process of its own."""
    way = WAYS[number]
    path, place = f"{folder}/{way.stored}", np.empty(2 * CAPACITY, np.int32)
    small = way.open(f"{warm}/{way.stored}")
    copied(small, place)(len(small) - 1)
    gc.collect()
    resident, own = memory("VmRSS"), memory("RssAnon")
    start = time.perf_counter()
    items = way.open(path)
    open_ms, open_mib = (time.perf_counter() - start) * 1e3, (memory("VmRSS") - resident) / MIB
    order: list[int] = np.random.default_rng(seed).permutation(len(items))[:MOST_READS].tolist()
    read = copied(items, place)
    microseconds(read, order)  # pages that are in the cache come into the process
    random_us, touched_us = microseconds(items.__getitem__, order), microseconds(read, order)
    sequential_us = microseconds(read, range(min(len(items), MOST_READS)))
    return Figures(open_ms, open_mib, random_us, touched_us, sequential_us, (memory("RssAnon") - own) / MIB)


def in_own_process(number: int, folder: Path, warm: Path, seed: int) -> Figures:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, number, str(folder), str(warm), seed).result()


def medians(folder: Path, warm: Path, rounds: int) -> list[Figures]:
    """Of every way; they take turns."""
    found = [[in_own_process(i, folder, warm, seed) for i in range(len(WAYS))] for seed in range(rounds)]
    columns = zip(*found, strict=True)
    return [Figures(*map(statistics.median, zip(*map(astuple, column), strict=True))) for column in columns]


# ---- the report ----


def report(folder: Path, figures: list[Figures]) -> Iterator[str]:
    base = figures[0]
    rows = []
    for way, found in zip(WAYS, figures, strict=True):
        rows.append(
            (
                way.label,
                way.reader,
                f"{found.open_ms:.2f}",
                f"{found.open_mib:.1f}",
                f"{found.own_mib:.1f}",
                f"{found.random_us:,.2f}",
                f"{found.random_us / base.random_us:,.1f}",
                f"{found.touched_us:,.2f}",
                f"{found.touched_us / base.touched_us:,.1f}",
                f"{found.sequential_us:,.2f}",
                f"{peers.nbytes_of(str(folder / way.stored)) / 1e6:,.0f}",
            )
        )
    header = "format, reader, open ms, RSS of opening MiB, own memory MiB, random us, / ours, random and copied us"
    yield from table(f"{header}, / ours, in order and copied us, MB on disk".split(", "), rows)


def goals(figures: list[Figures]) -> Iterator[str]:
    def of(label: str, reader: str) -> Figures:
        return next(f for w, f in zip(WAYS, figures, strict=True) if w.label == label and w.reader.startswith(reader))

    shard = of(SHARD, "`open_dataset`")
    parquet, memmap, plain = of(LARGE, "pyarrow"), of(SHARD, "`np.memmap`"), of(SHARD, "slices")
    yield (
        f"A random read of the shard by `open_dataset` is {parquet.random_us / shard.random_us:,.0f} times as quick as"
        f" of Parquet the usual way ({parquet.touched_us / shard.touched_us:,.0f} times with all values copied), and"
        f" takes {shard.random_us / memmap.random_us:.2f} times as long as `np.memmap` slices for the same dictionary,"
        f" {shard.random_us / plain.random_us:.2f} times as long as unchecked slices of plain arrays."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--packs", type=int, default=20_000, help="packs in every format but .npy")
    parser.add_argument("--npy-packs", type=int, default=2_000, help="packs in the pickled .npy")
    parser.add_argument("--rounds", type=int, default=3, help="runs of which the median is taken")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, warm = Path(name) / "data", Path(name) / "warm"
        for made, packs, npy_packs in ((warm, WARM_PACKS, WARM_PACKS), (folder, options.packs, options.npy_packs)):
            made.mkdir()
            write_all(made, packs, npy_packs)
        check_equal(warm)
        figures = medians(folder, warm, options.rounds)
        lines = [
            "# Formats beside each other",
            "",
            f"{machine()}; from the page cache, medians of {options.rounds} runs, a fresh process each."
            f" {options.packs:,} packs of {CAPACITY} tokens and {SEQUENCES} sequences ({options.npy_packs:,} in the"
            " `.npy`, which is read whole). `.pbin` and stock datasets have no masks; an item of a `.pbin` is one"
            " sequence. Opening: after imports. Own memory: what the process holds beside mapped files once it has"
            " read. Copied: every value is copied into an array, as a collate does.",
            "",
            *report(folder, figures),
            *goals(figures),
        ]
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
