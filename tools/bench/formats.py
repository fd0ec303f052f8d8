"""Every format of packed SFT data beside a shard: through open_dataset, and through what people usually read it with.

    python tools/bench/formats.py [--packs 20000] [--rounds 5]

Writes tools/bench/results/formats.md. All readers run in one process, in turn, over the same packs in the same random
order, from the page cache; figures are medians. Opening and memory are measured in a process for each reader.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sft_idx import open_dataset
from megatron_sft_idx.convert import ConvertOptions, convert
from megatron_sft_idx.shard import Shard, ShardWriter

RESULTS = Path(__file__).parent / "results" / "formats.md"
MIB = 1 << 20
LENGTH, SEQUENCE = 4096, 512
# Megatron-Bridge's and Nemotron's files have so many packs in a row group or chunk.
ROW_GROUP, CHUNK = 1000, 100

Read = Callable[[int], Any]


def write(folder: Path, packs: int) -> None:
    """The same packs in every format; masks of chats, where turns alternate."""
    rng = np.random.default_rng(0)
    starts = np.arange(0, LENGTH, SEQUENCE)
    with ShardWriter(folder / "shard", durable=False) as writer:
        for _ in range(packs):
            mask = np.repeat(rng.integers(0, 2, LENGTH // 64, np.uint8), 64)
            mask[SEQUENCE - 1 :: SEQUENCE] = 0
            # Squared, so that small ids are frequent, as in text.
            ids = (rng.random(LENGTH) ** 3 * 150_000).astype(np.int32)
            writer.add_pack(ids, mask, starts)
    for name, target, options in FILES:
        made = ConvertOptions(allow_loss=True, verify=False, writer=options)
        convert(str(folder / "shard"), str(folder / target), name, made)


FILES: list[tuple[str, str, dict[str, Any]]] = [
    ("memmap", "memmap", {}),
    ("parquet", "x.parquet", {"row_group_size": ROW_GROUP}),
    ("npy", "x.npy", {}),
    ("jsonl-chunks", "chunks", {"samples_per_chunk": CHUNK}),
    ("pbin", "x.pbin", {}),
]


# ---- what people usually read with ----


def shard_alone(folder: Path) -> Read:
    return Shard(folder / "shard").__getitem__


def raw_memmap(folder: Path) -> Read:
    """The same dictionary from plain maps of a shard's files, as short as it can be written."""
    tokens = np.memmap(folder / "shard.bin", np.int32, "r")
    loss = np.memmap(folder / "shard.loss.bin", np.uint8, "r")
    starts = np.memmap(folder / "shard.seq.bin", np.uint32, "r")
    sequences = LENGTH // SEQUENCE

    def read(i: int) -> Any:
        boundaries = np.empty(sequences + 1, np.int32)
        boundaries[:-1], boundaries[-1] = starts[i * sequences : (i + 1) * sequences], LENGTH
        here = slice(i * LENGTH, (i + 1) * LENGTH)
        return {"input_ids": tokens[here], "loss_mask": loss[here], "seq_boundaries": boundaries}

    return read


def numpy_rows(folder: Path) -> Read:
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in (folder / "memmap").glob("*.npy")}

    def read(i: int) -> Any:
        length = int(arrays["packed_len"][i])
        first, last = int(arrays["seq_offsets"][i]), int(arrays["seq_offsets"][i + 1])
        return {
            "input_ids": arrays["input_ids"][i, :length],
            "loss_mask": arrays["loss_mask"][i, :length],
            "seq_boundaries": [*arrays["seq_starts"][first:last].tolist(), length],
        }

    return read


def row_groups(folder: Path) -> Read:
    """A row group for every random read."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(folder / "x.parquet", memory_map=True)

    def read(i: int) -> Any:
        rows = file.read_row_group(i // ROW_GROUP)
        return {name: rows.column(name)[i % ROW_GROUP].values.to_numpy() for name in rows.column_names}

    return read


def pickled(folder: Path) -> Read:
    return np.load(folder / "x.npy", allow_pickle=True).__getitem__  # type: ignore[no-any-return]


def whole_chunks(folder: Path) -> Read:
    def read(i: int) -> Any:
        with open(folder / "chunks" / f"chunk_{i // CHUNK:05d}.jsonl", encoding="utf-8") as file:
            return [json.loads(line) for line in file][i % CHUNK]

    return read


def ours(target: str, **options: Any) -> Callable[[Path], Read]:
    return lambda folder: open_dataset(folder / target, **options).__getitem__


# Name, how it is opened, share of the reads that are timed, and the files whose size counts.
READERS: list[tuple[str, Callable[[Path], Read], int, str]] = [
    ("sft-idx, `Shard`", shard_alone, 1, "shard.*"),
    ("sft-idx", ours("shard"), 1, "shard.*"),
    ("sft-idx, plain `np.memmap`", raw_memmap, 1, "shard.*"),
    ("memmap", ours("memmap"), 1, "memmap/*"),
    ("memmap, `np.load(mmap_mode)`", numpy_rows, 1, "memmap/*"),
    ("parquet", ours("x.parquet"), 100, "x.parquet"),
    ("parquet, `read_row_group`", row_groups, 400, "x.parquet"),
    ("npy", ours("x.npy"), 1, "x.npy"),
    ("npy, `np.load`", pickled, 1, "x.npy"),
    ("jsonl-chunks", ours("chunks"), 100, "chunks/*"),
    ("jsonl-chunks, `json.loads` a chunk", whole_chunks, 400, "chunks/*"),
    ("pbin", ours("x.pbin", mask_rule="all"), 1, "x.pbin"),
]


def seconds(read: Read, indices: Sequence[int]) -> float:
    gc.collect()
    begin = time.perf_counter()
    for i in indices:
        read(i)
    return (time.perf_counter() - begin) / len(indices)


def anonymous() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def opening(which: int, folder: Path) -> tuple[float, int]:
    """Seconds to open and read one pack, and the heap that takes."""
    import pyarrow.parquet  # noqa: F401  # importing it is not what is measured

    gc.collect()
    before, begin = anonymous(), time.perf_counter()
    read = READERS[which][1](folder)
    read(0)
    took = time.perf_counter() - begin
    return took, anonymous() - before


def rows(folder: Path, packs: int, rounds: int) -> Iterator[list[str]]:
    reads = [make(folder) for _, make, _, _ in READERS]
    order = np.random.default_rng(1).permutation(packs).tolist()
    found = []
    for _ in range(rounds + 1):
        for number, read in enumerate(reads):
            indices = order[:: READERS[number][2]]
            found.append((number, seconds(read, indices), seconds(read, sorted(order[: len(indices)]))))
    found = found[len(reads) :]  # a round to warm up
    base = statistics.median(random for number, random, _ in found if number == 1)
    for number, (name, _, _, files) in enumerate(READERS):
        random = statistics.median(r for n, r, _ in found if n == number)
        forward = statistics.median(s for n, _, s in found if n == number)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            took, heap = pool.submit(opening, number, folder).result()
        size = sum(path.stat().st_size for path in folder.glob(files))
        yield [
            name,
            f"{took * 1e3:.2f}",
            f"{heap / MIB:.1f}",
            f"{random * 1e6:,.2f}",
            f"{random / base:,.2f}",
            f"{forward * 1e6:,.2f}",
            f"{size / MIB:,.0f}",
        ]


HEADER = [
    "reader",
    "open, read one: ms",
    "heap MiB",
    "random us",
    "`open_dataset` of sft-idx = 1",
    "ascending us",
    "MiB",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="for some GB of files (default: the system's temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        write(Path(name), arguments.packs)
        lines = [
            "# Formats of packed data, read",
            "",
            f"{os.cpu_count()} cores; {arguments.packs:,} packs of {LENGTH} tokens in {LENGTH // SEQUENCE} sequences;"
            f" medians of {arguments.rounds} runs. Names alone are `open_dataset`; others are what people usually read"
            " with. Ascending reads take the same share of the packs as random ones.",
            "",
            "| " + " | ".join(HEADER) + " |",
            "|---" * len(HEADER) + "|",
            *("| " + " | ".join(row) + " |" for row in rows(Path(name), arguments.packs, arguments.rounds)),
            "",
        ]
    RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
