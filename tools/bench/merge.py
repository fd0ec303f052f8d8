"""Merging and splitting shards compared with Megatron's add_index and plain cat.

    python tools/bench/merge.py [--full]

Sources are in the page cache. Each way of merging runs in a separate process, so
that its memory can be measured: growth of the peak resident set over imports. Figures are medians.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from measure import in_own_process, indexed_dataset, memory, reset_peak, write_equal_packs
from plot import Dot, dots
from report import MIB, Bench, cells, run_bench

from megatron_sft_idx.layout.files import DATA_SUFFIXES
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.shard import Shard, ShardWriter

SHARDS = 8
SHAPES = ((2500, 4096), (100_000, 64))  # packs per shard, tokens per pack
STOCK = "Megatron's `add_index`: tokens and index only"
CAT = "`cat` of the four data files: no valid index"


@dataclass(frozen=True)
class Run:
    """One way of merging: seconds and CPU seconds of every round, bytes written, growth of peak memory."""

    seconds: list[float]
    cpu: list[float]
    nbytes: int
    memory: int


def write_sources(folder: Path, packs: int, length: int) -> list[str]:
    prefixes = [str(folder / f"part-{i}") for i in range(SHARDS)]
    for number, prefix in enumerate(prefixes):
        write_equal_packs(prefix, packs, length, seed=number, capacity=length)
    return prefixes


def with_merge(sources: list[str], output: str, *, durable: bool) -> None:
    merge(sources, output, durable=durable)


def with_add_shard(sources: list[str], output: str) -> None:
    header = Shard(sources[0]).header
    with ShardWriter(output, capacity=header.capacity, durable=False) as writer:
        for source in sources:
            writer.add_shard(Shard(source))


def with_add_index(sources: list[str], output: str) -> None:
    builder = indexed_dataset().IndexedDatasetBuilder(output + ".bin", np.int32)
    for source in sources:
        builder.add_index(source)
    builder.finalize(output + ".idx")


def with_cat(sources: list[str], output: str) -> None:
    for suffix in DATA_SUFFIXES:
        with open(output + suffix, "wb") as file:
            subprocess.run(["cat", *(source + suffix for source in sources)], stdout=file, check=True)


def with_split(sources: list[str], output: str) -> None:
    """Split the one merged shard in ``sources``."""
    split(sources[0], output, SplitSize(shards=SHARDS), durable=False)


Way = Callable[[list[str], str], None]
WAYS: list[tuple[str, Way]] = [
    ("`merge`", partial(with_merge, durable=False)),
    ("`merge`, waiting for the disk", partial(with_merge, durable=True)),
    ("`ShardWriter.add_shard`", with_add_shard),
    (STOCK, with_add_index),
    (CAT, with_cat),
]


def cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(way: Way, sources: list[str], warm: list[str], folder: str, rounds: int) -> Run:
    way(warm, f"{folder}/warm")  # imports, allocator
    reset_peak()
    before = memory("VmRSS")
    seconds, cpu, nbytes = [], [], 0
    for number in range(rounds):
        target = Path(folder) / f"round-{number}"
        target.mkdir()
        begin, begin_cpu = time.perf_counter(), cpu_seconds()
        way(sources, str(target / "x"))
        seconds.append(time.perf_counter() - begin)
        cpu.append(cpu_seconds() - begin_cpu)
        nbytes = sum(path.stat().st_size for path in target.iterdir())
        shutil.rmtree(target)
    return Run(seconds, cpu, nbytes, memory("VmHWM") - before)


def run_of(way: Way, sources: list[str], warm: list[str], folder: Path, rounds: int) -> Run:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        run: Run = in_own_process(measure, way, sources, warm, name, rounds)
        return run


def row(name: str, run: Run) -> tuple[str, ...]:
    seconds, cpu = statistics.median(run.seconds), statistics.median(run.cpu)
    sizes = run.nbytes / MIB, seconds, cpu, run.nbytes / 1e9 / cpu, run.memory / MIB
    return name, *cells(".0f .2f .2f .2f .1f", *sizes)


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    bench.say(
        "`merge` verifies every byte of the sources and computes the checksums of the output on the way; `split` reads"
        " its source twice. Neither `add_index` nor `cat` verifies, writes checksums or waits for the disk. `add_index`"
        " collects garbage once a shard, which takes most of its time here."
    )
    rounds = options.rounds
    for packs, length in SHAPES:
        place = folder / str(length)
        sources = write_sources(place, packs, length)
        (warm,) = write_sources(place / "warm", 4, length)[:1]
        found = {name: run_of(way, sources, [warm], place, rounds) for name, way in WAYS}
        merge(sources, place / "whole", durable=False)
        for path in place.glob("part-*"):
            path.unlink()
        found[f"`split` into {SHARDS}"] = run_of(with_split, [str(place / "whole")], [warm], place, rounds)
        shutil.rmtree(place)
        bench.section(f"{SHARDS} shards of {packs:,} packs of {length:,} tokens, int32")
        header = ("", "MiB written", "seconds", "cpu seconds", "GB/cpu s", "peak MiB beyond imports")
        bench.table(header, [row(name, run) for name, run in found.items()])
        if length == SHAPES[0][1]:
            headlines(bench, found)


def headlines(bench: Bench, found: dict[str, Run]) -> None:
    rates = {name: [run.nbytes / 1e9 / cpu for cpu in run.cpu] for name, run in found.items()}
    what = f"`merge` of {SHARDS} shards, sources held to their checksums"
    peers = (("add-index", "Megatron's `add_index`, tokens only", STOCK), ("cat", "`cat`, which checks nothing", CAT))
    for key, peer, name in peers:
        ours, theirs = rates["`merge`"], rates[name]
        bench.headline(key, what, ours, "GB a CPU s", peer=peer, theirs=theirs, more=True, short=name == STOCK)
    marks = [Dot(name, values, name not in (STOCK, CAT)) for name, values in rates.items()]
    bench.plot(
        "merge",
        dots(f"Merging {SHARDS} shards of {SHAPES[0][0]:,} packs", "GB written a processor second", marks, more=True),
    )


if __name__ == "__main__":
    run_bench("Merging and splitting", ("megatron-core", "numpy"), report, {}, rounds=(3, 7))
