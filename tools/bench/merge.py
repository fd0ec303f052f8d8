"""Merging and splitting shards beside Megatron's add_index and plain cat.

    python tools/bench/merge.py [--rounds 3]

Writes tools/bench/results/merge.md. Sources lie in the page cache. Each way of merging runs in a process of its own, so
that its memory can be told: growth of the peak resident set over imports. Figures are medians.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from report import machine

from megatron_sft_idx.layout.files import DATA_SUFFIXES, SUFFIXES
from megatron_sft_idx.merge import Parts, merge, split
from megatron_sft_idx.shard import Shard, ShardWriter

RESULTS = Path(__file__).parent / "results" / "merge.md"
MIB = 1 << 20
SHARDS = 8
SHAPES = ((2500, 4096), (100_000, 64))  # packs a shard, tokens a pack


@dataclass(frozen=True)
class Run:
    """One way of merging: seconds and CPU seconds of every round, bytes written, growth of peak memory."""

    seconds: list[float]
    cpu: list[float]
    nbytes: int
    memory: int


def write_sources(folder: Path, packs: int, length: int) -> list[str]:
    random = np.random.default_rng(0)
    prefixes = [str(folder / f"part-{i}") for i in range(SHARDS)]
    total = packs * length
    mask = np.ones(total, np.uint8)
    mask[length - 1 :: length] = 0
    for prefix in prefixes:
        with ShardWriter(prefix, capacity=length, durable=False) as writer:
            tokens = random.integers(0, 150_000, total, dtype=np.int32)
            ones = np.ones(packs, np.int64)
            writer.add_packs(tokens, mask, 0 * ones, length * ones, ones)
    return prefixes


def with_merge(sources: list[str], output: str, *, durable: bool) -> None:
    merge(sources, output, durable=durable)


def with_add_shard(sources: list[str], output: str) -> None:
    header = Shard(sources[0]).header
    with ShardWriter(output, capacity=header.capacity, durable=False) as writer:
        for source in sources:
            writer.add_shard(Shard(source))


def with_add_index(sources: list[str], output: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron says that it falls back to its own code
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(output + ".bin", np.int32)
    for source in sources:
        builder.add_index(source)
    builder.finalize(output + ".idx")


def with_cat(sources: list[str], output: str) -> None:
    for suffix in DATA_SUFFIXES:
        with open(output + suffix, "wb") as file:
            subprocess.run(["cat", *(source + suffix for source in sources)], stdout=file, check=True)


def with_split(sources: list[str], output: str) -> None:
    """Of one merged shard, which ``sources`` holds."""
    split(sources[0], output, Parts(shards=SHARDS), durable=False)


Way = Callable[[list[str], str], None]
WAYS: list[tuple[str, Way]] = [
    ("`merge`", partial(with_merge, durable=False)),
    ("`merge`, waiting for the disk", partial(with_merge, durable=True)),
    ("`ShardWriter.add_shard`, without checksums of the sources", with_add_shard),
    ("Megatron's `add_index`: tokens and index only", with_add_index),
    ("`cat` of the four data files: no valid index", with_cat),
]


def memory(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(way: Way, sources: list[str], warm: list[str], folder: str, rounds: int) -> Run:
    way(warm, f"{folder}/warm")  # imports, allocator
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
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


def in_own_process(way: Way, sources: list[str], warm: list[str], folder: Path, rounds: int) -> Run:
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        return pool.submit(measure, way, sources, warm, name, rounds).result()


def row(name: str, run: Run) -> str:
    seconds, cpu = statistics.median(run.seconds), statistics.median(run.cpu)
    rates = f"{run.nbytes / MIB:.0f} | {seconds:.2f} | {cpu:.2f} | {run.nbytes / 1e9 / cpu:.2f}"
    return f"| {name} | {rates} | {run.memory / MIB:.1f} |"


def report(folder: Path, rounds: int) -> Iterator[str]:
    for packs, length in SHAPES:
        place = folder / str(length)
        sources = write_sources(place, packs, length)
        (warm,) = write_sources(place / "warm", 4, length)[:1]
        yield f"## {SHARDS} shards of {packs:,} packs of {length:,} tokens, int32"
        yield ""
        yield "| | MiB written | seconds | cpu seconds | GB/cpu s | peak MiB beyond imports |"
        yield "|---|---|---|---|---|---|"
        for name, way in WAYS:
            yield row(name, in_own_process(way, sources, [warm], place, rounds))
        merge(sources, place / "whole", durable=False)
        remove(sources)
        yield row(f"`split` into {SHARDS}", in_own_process(with_split, [str(place / "whole")], [warm], place, rounds))
        yield ""
        shutil.rmtree(place)


def remove(prefixes: Sequence[str]) -> None:
    for prefix in prefixes:
        for suffix in SUFFIXES:
            os.unlink(prefix + suffix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="runs of which the median is taken")
    options = parser.parse_args()
    lines = [
        "# Merging and splitting",
        "",
        f"{machine()}; medians of {options.rounds} runs.",
        "",
        "`merge` verifies every byte of the sources and computes the checksums of the output on the way; `split` reads",
        "its source twice. Neither `add_index` nor `cat` verifies, writes checksums or waits for the disk.",
        "`add_index` collects garbage once a shard, which takes most of its time here.",
        "",
    ]
    with tempfile.TemporaryDirectory() as name:
        for line in report(Path(name), options.rounds):
            print(line, flush=True)
            lines.append(line)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
