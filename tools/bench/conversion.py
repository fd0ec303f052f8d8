"""Converting packed data between a shard and every other format: peak memory and speed.

    python tools/bench/conversion.py [--full]

Every conversion runs in a fresh process, which is watched from outside: its heap is what Linux counts as RssAnon,
interpreter and libraries included, mapped files not. Needs some 4 times the size in the folder for temporary files.
"""

from __future__ import annotations

import os
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from formats_peers import nbytes_of, write_packs
from measure import in_own_process, memory
from plot import Dot, dots
from report import MIB, Bench, cells, run_bench

from megatron_sft_idx.formats.convert import ConvertOptions, convert

GB = 10**9
PACK_NBYTES = 5 * 3948 + 60  # of a shard, on average
WATCH_SECONDS = 0.005
# A pickled .npy is read whole, at some 40 bytes per token, so reading it is measured with less data.
NPY_SHARE = 0.1


@dataclass(frozen=True)
class Format:
    """The options of the conversions to and from a format."""

    name: str  # as --to takes it
    stored: str  # file or folder name
    to: ConvertOptions | None = field(default_factory=ConvertOptions)  # how it is written; None where it is only read
    back: ConvertOptions = field(default_factory=ConvertOptions)  # how it is read


TRAINED = ConvertOptions(reader={"mask_rule": "all"})
FORMATS = [
    Format("npy", "packs.npy", ConvertOptions(verify=False)),  # to verify is to read
    Format("memmap", "memmap"),
    Format("parquet", "packs.parquet"),
    Format("pbin", "packs.pbin", ConvertOptions(lossy=True), TRAINED),
    Format("megatron", "stock", None, TRAINED),
    Format("jsonl-chunks", "jsonl"),  # last: it takes most space
]


@dataclass(frozen=True)
class Run:
    """One conversion."""

    direction: str  # from what to what
    nbytes: int  # of the source
    written: int  # bytes of the result
    seconds: float  # to open the source and to convert it
    verifying: float | None  # seconds to read the result again; None where it was not
    heap: int  # peak


# ---- one conversion, in a separate process ----


def work(pipe: Connection, source: list[str], destination: str, to: str, options: ConvertOptions) -> None:
    begins: list[float] = []  # of converting, and of verifying

    def on_pass(what: str, tokens: int) -> Any:
        begins.append(time.perf_counter())
        return lambda tokens, packs: None

    start = time.perf_counter()
    convert(source, destination, to, options, on_pass=on_pass)
    # Opening the source is part of converting it: some formats read all of it for that.
    pipe.send((start, *begins[1:], time.perf_counter()))


def watched(direction: str, source: list[str], destination: str, to: str, options: ConvertOptions) -> Run:
    context = get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=work, args=(send, source, destination, to, options))
    child.start()
    send.close()  # so that a child that dies is an end of file
    heap = 0
    while not receive.poll(WATCH_SECONDS):
        heap = max(heap, memory("RssAnon", child.pid or "self"))
    times = receive.recv()
    child.join()
    seconds = [after - before for before, after in pairwise(times)]
    read = sum(nbytes_of(path) for path in source)
    verifying = seconds[1] if len(seconds) > 1 else None
    return Run(direction, read, nbytes_of(destination), seconds[0], verifying, heap)


# ---- there and back ----


def up_to(path: Path, nbytes: int) -> list[str]:
    """Return the path, or enough chunks of a folder for ``nbytes`` bytes."""
    if not path.is_dir() or (path / "manifest.json").exists():
        return [str(path)]
    taken: list[str] = []
    for chunk in sorted(path.iterdir()):
        taken.append(str(chunk))
        nbytes -= chunk.stat().st_size
        if nbytes <= 0:
            break
    return taken


def remove(folder: Path, name: str) -> None:
    """A file, a folder, or the files of a prefix."""
    for path in [folder / name, *folder.glob(name + ".*")]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def there_and_back(folder: Path, kind: Format, nbytes: int) -> Iterator[Run]:
    """Convert a shard to the format and back.

    Afterwards the folder is unchanged, except that the first shard is removed.
    """
    shard, other = folder / "shard", folder / kind.stored
    write_packs(str(shard), max(1, nbytes // PACK_NBYTES))
    if kind.to is None:
        for suffix in (".bin", ".idx"):
            os.link(f"{shard}{suffix}", f"{other}{suffix}")
    else:
        yield watched(f"sft-idx to {kind.name}", [str(shard)], str(other), kind.name, kind.to)
    if kind.name == "npy":
        remove(folder, kind.stored)
        remove(folder, "shard")
        write_packs(str(shard), max(1, int(nbytes * NPY_SHARE) // PACK_NBYTES))
        convert(str(shard), str(other), kind.name, kind.to)
    remove(folder, "shard")
    source, back = up_to(other, nbytes), str(folder / "back")
    yield watched(f"{kind.name} to sft-idx", source, back, "sft-idx", kind.back)
    remove(folder, "back")
    remove(folder, kind.stored)


# ---- compared with a script ----


def by_convert(source: str, destination: str) -> float:
    """Return the seconds to make a shard from a Parquet file, without verification."""
    import pyarrow.parquet  # noqa: F401  # neither side's imports count

    start = time.perf_counter()
    convert(source, destination, "sft-idx", ConvertOptions(verify=False))
    return time.perf_counter() - start


def by_script(source: str, destination: str) -> float:
    """Return the seconds to make Megatron's own files from it, tokens only: Parquet row by row through Python lists."""
    import pyarrow.parquet as pq
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    start = time.perf_counter()
    builder = IndexedDatasetBuilder(destination + ".bin", np.int32)
    for rows in pq.ParquetFile(source).iter_batches(1000, columns=["input_ids"]):
        for row in rows.to_pylist():
            builder.add_document(np.array(row["input_ids"], np.int32), [len(row["input_ids"])])
    builder.finalize(destination + ".idx")
    return time.perf_counter() - start


def beside_scripts(bench: Bench, folder: Path, nbytes: int, rounds: int) -> None:
    """Convert Parquet to a shard with masks and boundaries, and compare with the usual loop for tokens only."""
    ours: list[float] = []
    theirs: list[float] = []
    write_packs(str(folder / "shard"), max(1, nbytes // PACK_NBYTES))
    convert(str(folder / "shard"), str(folder / "packs.parquet"), "parquet", ConvertOptions(verify=False))
    for number in range(rounds):
        for work, times in ((by_convert, ours), (by_script, theirs)):
            prefix = f"{folder}/{work.__name__}{number}"
            times.append(in_own_process(work, f"{folder}/packs.parquet", prefix))
            remove(folder, Path(prefix).name)
    remove(folder, "shard")
    remove(folder, "packs.parquet")
    what = f"Parquet to a shard of {nbytes / 1e6:,.0f} MB, masks and boundaries too"
    peer = "pyarrow, lists and Megatron's `add_document`, tokens only"
    bench.headline("parquet", what, ours, "s", peer=peer, theirs=theirs, short=True)


# ---- the report ----


def tables(bench: Bench, full: list[Run]) -> None:
    rows = []
    for run in full:
        read = run.nbytes / 1e6, run.written / 1e6, run.seconds, run.nbytes / run.seconds / 1e6
        verifying = "not verified" if run.verifying is None else f"{run.verifying:.1f}"
        rows.append((run.direction, *cells(",.0f ,.0f .1f ,.0f", *read), verifying, f"{run.heap / MIB:,.0f}"))
    header = "direction, MB read, MB written, seconds, MB/s, verifying seconds, peak heap MiB"
    bench.table(header.split(", "), rows)
    for run in full:
        key = run.direction.replace(" ", "-")
        bench.headline(key, f"converting {run.direction}", [run.nbytes / run.seconds / 1e6], "MB/s")
    most = max((run for run in full if run.direction != "npy to sft-idx"), key=lambda run: run.heap)
    what = f"most heap of a conversion but from `npy` ({most.direction})"
    bench.headline("heap", what, [most.heap / MIB], "MiB")
    marks = [Dot(run.direction, [run.nbytes / run.seconds / 1e6], True) for run in full]
    bench.plot("conversion", dots("Converting between formats", "MB read a second", marks, more=True))


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    bench.say(
        "Packs of 4096 tokens; a fresh process each; MB/s of what is read, opening it and fsync included. Heap: peak of"
        " all memory but mapped files, interpreter and libraries included. A pickled `.npy` can only be read whole: it"
        f" is read at {NPY_SHARE:.0%} of the size, and not verified at full size."
    )
    nbytes = int(options.gigabytes * GB)
    found = []
    beside_scripts(bench, folder, nbytes // 2, options.rounds)
    for kind in FORMATS:
        for run in there_and_back(folder, kind, nbytes):
            size, heap = run.nbytes / 1e6, run.heap / MIB
            print(f"{run.direction}: {size:.0f} MB, {run.seconds:.1f} s, heap {heap:.0f} MiB", flush=True)
            found.append(run)
    tables(bench, found)


if __name__ == "__main__":
    title = "Converting between a shard and every other format"
    sizes = {"gigabytes": (0.1, 2.0, "size of what is converted")}
    run_bench(title, ("pyarrow", "megatron-core", "numpy"), report, sizes, rounds=(3, 3))
