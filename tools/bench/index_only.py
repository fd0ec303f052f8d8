"""Index-only packing: from a tokenised corpus to the first batch, the first time and with the plan cached.

    python tools/bench/index_only.py [--full]

Each start is a separate process, timed from after its imports, and so is
its memory. Planning: growth of the peak resident set, pages of mapped files included. After the first batch: private
memory, and apart from it the page cache that is mapped, which the kernel hands out in 2 MiB pages where it has them,
however little of one is read. Figures are medians.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from measure import in_own_process, memory, reset_peak
from report import MIB, Bench, cells, run_bench

from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.plan_file import plan_path
from megatron_sft_idx.training.rows import PackedRows
from megatron_sft_idx.training.sources import PlannedPacks, PlanOptions

CAPACITY, BATCH = 4096, 8
STEPS = ("shards opened", "planned and placed, or mapped", "first batch of 8")
MEMORY = ("peak until planned", "private after the first batch", "mapped page cache after the first batch")
CHUNK = 500_000


@dataclass(frozen=True)
class Start:
    """One start: seconds after each of ``STEPS``, MiB for each of ``MEMORY``, packs, size of the cached plan."""

    seconds: tuple[float, ...]
    mib: tuple[float, ...]
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


def start(prefix: str, cache: str) -> Start:
    """Start as training does, without Megatron, and take a batch."""
    torch.set_num_threads(2)
    reset_peak()
    before = {field: memory(field) for field in ("VmRSS", "RssAnon", "RssFile")}
    begin = time.perf_counter()
    shards = ShardSet.open(prefix, same_capacity=False)
    seconds = [time.perf_counter() - begin]
    source = PlannedPacks(shards, PlanOptions(CAPACITY), cache=cache)
    seconds.append(time.perf_counter() - begin)
    peak = memory("VmHWM") - before["VmRSS"]
    rows = PackedRows(source, 0, "train", source.num_packs, CAPACITY)
    tokens = rows.__getitems__(np.arange(BATCH)).tensors["tokens"]
    assert tokens.shape == (BATCH, CAPACITY)
    seconds.append(time.perf_counter() - begin)
    grown = (peak, *(memory(field) - before[field] for field in ("RssAnon", "RssFile")))
    return Start(
        tuple(seconds),
        tuple(nbytes / MIB for nbytes in grown),
        source.num_packs,
        os.path.getsize(plan_path(cache, source.fingerprint)),
    )


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    count, rounds = options.sequences, options.rounds
    prefix, cache = str(folder / "corpus"), str(folder / "cache")
    tokens = write_corpus(prefix, count)
    first: list[Start] = []
    second: list[Start] = []
    for _ in range(rounds):
        shutil.rmtree(cache, ignore_errors=True)
        first.append(in_own_process(start, prefix, cache))
        second.append(in_own_process(start, prefix, cache))
    fill = tokens / (first[0].packs * CAPACITY)
    bench.say(
        f"{count:,} sequences, {tokens:,} tokens, packed to {CAPACITY}: {first[0].packs:,} packs ({fill:.4%} full)."
        f" The cached plan has {first[0].plan_nbytes / MIB:.0f} MiB."
    )
    for what, names, field, form in (
        ("seconds until", STEPS, "seconds", ".3f .3f"),
        ("MiB beyond imports", MEMORY, "mib", ".0f .0f"),
    ):
        columns = []
        for runs in (first, second):
            found = zip(*(getattr(run, field) for run in runs), strict=True)
            columns.append([statistics.median(values) for values in found])
        rows = [(name, *cells(form, *pair)) for name, *pair in zip(names, *columns, strict=True)]
        bench.table((what, "first start", "second start"), rows)
    once, again = ([run.seconds[-1] for run in runs] for runs in (first, second))
    what = f"first batch of {count // 10**6} million sequences packed at start-up, from the cached plan"
    bench.headline("first-batch", what, again, "s", peer="our own first start, which plans", theirs=once, short=True)
    bench.headline("sequences", "sequences of the corpus", [count / 10**6], "million sequences")
    bench.headline("peak", "the same: peak memory until planned", [run.mib[0] for run in first], "MiB")


if __name__ == "__main__":
    sizes = {"sequences": (10**7, 3 * 10**7, "sequences of the corpus")}
    run_bench("Index-only packing", ("torch", "numpy"), report, sizes, rounds=(3, 5))
