"""Index-only packing: from a tokenised corpus to the first batch, the first time and with the plan cached.

    python tools/bench/index_only.py [--rounds 3] [--sequences 10000000]

Writes tools/bench/results/index_only.md. Each start is a process of its own, timed from after its imports, and so is
its memory. Planning: growth of the peak resident set, pages of mapped files included. After the first batch: private
memory, and apart from it the page cache that is mapped, which the kernel hands out in 2 MiB pages where it has them,
however little of one is read. Figures are medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from report import machine

from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shards import ShardSet
from megatron_sft_idx.training.order import EpochOrder
from megatron_sft_idx.training.plan_cache import plan_path
from megatron_sft_idx.training.rows import PackedRows
from megatron_sft_idx.training.sources import PlannedPacks, PlanOptions

RESULTS = Path(__file__).parent / "results" / "index_only.md"
MIB = 1 << 20
CAPACITY, BATCH = 4096, 8
STEPS = ("shards opened", "planned and placed, or mapped", "first batch of 8")
MEMORY = ("peak until planned", "private after the first batch", "mapped page cache after the first batch")
CHUNK = 500_000


@dataclass(frozen=True)
class Start:
    """One start: seconds after each of ``STEPS``, bytes for each of ``MEMORY``, packs, size of the cached plan."""

    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]
    packs: int
    plan_nbytes: int


def write_corpus(prefix: str, count: int) -> int:
    """An unpacked shard: lognormal lengths, median 60 (10 times shorter than chats, to save disk); returns tokens."""
    random = np.random.default_rng(0)
    with ShardWriter(prefix, token_dtype=np.uint16, durable=False) as writer:
        for first in range(0, count, CHUNK):
            n = min(CHUNK, count - first)
            lengths = np.clip(random.lognormal(np.log(60), 1.0, n), 1, CAPACITY).astype(np.int64)
            total = int(lengths.sum())
            mask = np.ones(total, np.uint8)
            mask[np.cumsum(lengths) - 1] = 0
            tokens = np.arange(total, dtype=np.int64) % 60_000
            writer.add_packs(tokens.astype(np.uint16), mask, np.zeros(n, np.int64), lengths, np.ones(n, np.int64))
        return writer.finalize().num_tokens


def memory(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def start(prefix: str, cache: str) -> Start:
    """Start as training does, without Megatron, and take a batch."""
    torch.set_num_threads(2)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = {field: memory(field) for field in ("VmRSS", "RssAnon", "RssFile")}
    begin = time.perf_counter()
    shards = ShardSet.open(prefix, same_capacity=False)
    seconds = [time.perf_counter() - begin]
    source = PlannedPacks(shards, PlanOptions(CAPACITY), cache=cache)
    seconds.append(time.perf_counter() - begin)
    peak = memory("VmHWM") - before["VmRSS"]
    order = EpochOrder(source.num_packs, 0, "train", source.fingerprint)
    rows = PackedRows(source, order, source.num_packs, CAPACITY)
    tokens = rows.batch(np.arange(BATCH))["tokens"]
    assert tokens.shape == (BATCH, CAPACITY)
    seconds.append(time.perf_counter() - begin)
    nbytes = (peak, memory("RssAnon") - before["RssAnon"], memory("RssFile") - before["RssFile"])
    return Start(tuple(seconds), nbytes, source.num_packs, os.path.getsize(plan_path(cache, source.fingerprint)))


def in_own_process(prefix: str, cache: str) -> Start:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(start, prefix, cache).result()


def report(folder: Path, count: int, rounds: int) -> Iterator[str]:
    prefix, cache = str(folder / "corpus"), str(folder / "cache")
    tokens = write_corpus(prefix, count)
    first, second = [], []
    for _ in range(rounds):
        shutil.rmtree(cache, ignore_errors=True)
        first.append(in_own_process(prefix, cache))
        second.append(in_own_process(prefix, cache))
    yield f"{count:,} sequences, {tokens:,} tokens, packed to {CAPACITY}: {first[0].packs:,} packs"
    fill = tokens / (first[0].packs * CAPACITY)
    yield f"({fill:.4%} full). The cached plan has {first[0].plan_nbytes / MIB:.0f} MiB."
    yield ""
    yield "| seconds until | first start | second start |"
    yield "|---|---|---|"
    for i, step in enumerate(STEPS):
        times = [statistics.median(run.seconds[i] for run in runs) for runs in (first, second)]
        yield f"| {step} | " + " | ".join(f"{value:.3f}" for value in times) + " |"
    yield ""
    yield "| MiB beyond imports | first start | second start |"
    yield "|---|---|---|"
    for i, what in enumerate(MEMORY):
        sizes = [statistics.median(run.nbytes[i] for run in runs) / MIB for runs in (first, second)]
        yield f"| {what} | " + " | ".join(f"{value:.0f}" for value in sizes) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="starts of which the median is taken")
    parser.add_argument("--sequences", type=int, default=10**7, help="sequences of the corpus")
    options = parser.parse_args()
    lines = ["# Index-only packing", "", f"{machine()}; medians of {options.rounds} starts.", ""]
    with tempfile.TemporaryDirectory() as name:
        for line in report(Path(name), options.sequences, options.rounds):
            print(line, flush=True)
            lines.append(line)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
