"""A dataset of thousands of shards compared with one shard of the same size, under tight limits of files and maps.

    python tools/bench/many_shards.py [--full]

Makes the data once in a temporary folder (200 KB a shard) and measures in a separate process that may open 256
descriptors and counts its maps of shard files after every step. All sides are warm, each has been read once, and run in
turn; figures are medians by the clock.
"""

from __future__ import annotations

import os
import pickle
import resource
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from measure import alternated, in_own_process, memory, write_equal_packs
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from plot import Dot, dots
from report import MIB, Bench, run_bench

from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import Batch, BatchAssembler
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.sft_dataset import PackedSFTDataset, PackedSFTDatasetConfig
from megatron_sft_idx.training.sources import StoredPacks

MOST_FILES, MOST_MAPS = 256, 200
PACKS, LENGTH, SEQUENCES = 8, 4096, 8
READS, BATCHES, ROWS = 8_000, 400, 8
OPENINGS = (
    "`ShardSet.open(folder)`",
    "the same, and its first pack",
    "`PackedSFTDataset` of it, by Megatron's builder, split in two",
)
SIDES = ("one shard, mapped", "many, held in memory", "many, opened for each read")
ACCESSES = ("`ds[i]`", "`assemble`", "`BatchLoader`")


# ---- data ----


def write(prefix: Path, groups: int, number: int = 0) -> None:
    """Write a shard of ``groups`` times eight packs."""
    metadata = {"tokenizer": {"fingerprint": "f" * 32, "vocab_size": 60_000}, "shard": number}
    options = {"token_dtype": np.uint16, "capacity": LENGTH, "metadata": metadata}
    write_equal_packs(prefix, groups * PACKS, LENGTH, SEQUENCES, seed=number, **options)


def make(folder: Path, shards: int) -> None:
    (folder / "many").mkdir()
    write(folder / "one", shards)
    for number in range(shards):
        write(folder / "many" / f"part-{number:05d}", 1, number)


# ---- limits ----


class Watch:
    """The maximum numbers of maps of shard files and of descriptors of this process, counted after each step."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/many/"
        self.maps = self.files = 0

    def look(self) -> None:
        """Count them. SystemExit if there are too many maps."""
        self.maps = max(self.maps, Path("/proc/self/maps").read_text().count(self._folder))
        self.files = max(self.files, len(os.listdir("/proc/self/fd")))
        if self.maps > MOST_MAPS:
            raise SystemExit(f"{self.maps} maps of shard files, at most {MOST_MAPS} are allowed")


# ---- what is measured ----


class Found(NamedTuple):
    """The measurements of the process under the limits."""

    opening: list[list[float]]  # seconds of every round, for each of ``OPENINGS``
    pickled: int  # bytes without the paths
    # Microseconds of every round, for each of ``ACCESSES`` a list with each of ``SIDES``.
    access: list[list[list[float]]]
    rss: list[int]  # bytes that each side holds
    maps: int  # of shard files, at most
    files: int  # descriptors, at most


def opening(folder: Path, rounds: int, watch: Watch) -> list[list[float]]:
    def build() -> PackedSFTDataset:
        config = PackedSFTDatasetConfig(
            random_seed=1, sequence_length=LENGTH, blend=([str(folder / "many")], None), split="99,1,0", tokenizer=None
        )
        builder = BlendedMegatronDatasetBuilder(PackedSFTDataset, [None, None, None], lambda: True, config)
        built: PackedSFTDataset = builder.build()[0]
        return built

    works = (lambda: ShardSet.open(folder / "many"), lambda: ShardSet.open(folder / "many")[0], build)
    return [[t.wall for t in column] for column in alternated(works, rounds, watch.look)]


def touch(data: ShardSet, order: Sequence[int]) -> None:
    for i in order:
        pack = data[i]
        pack["input_ids"].max()
        pack["loss_mask"].max()


def batches(assembler: BatchAssembler, order: Sequence[Any], out: Batch) -> None:
    for packs in order:
        assembler.assemble(packs, out)


def loaded(assembler: BatchAssembler, order: Sequence[Any]) -> None:
    for _ in BatchLoader(assembler, order):
        pass


def access(folder: Path, rounds: int, watch: Watch) -> tuple[list[list[list[float]]], list[int]]:
    many = folder / "many"
    sides = [ShardSet.open(folder / "one"), ShardSet.open(many), ShardSet.open(many, backend="reopen")]
    order = np.random.default_rng(0).permutation(len(sides[0]))
    rss = []
    for data in sides:
        before = memory("RssAnon")
        for i in order.tolist():
            data[i]
        rss.append(memory("RssAnon") - before)
        watch.look()
    groups = [order[i : i + ROWS] for i in range(0, BATCHES * ROWS, ROWS)]
    assemblers = [BatchAssembler(StoredPacks(data), LENGTH) for data in sides]
    outs = [Batch(assembler.layout(ROWS)) for assembler in assemblers]
    reads = order[:READS].tolist()
    works: list[tuple[int, list[Callable[[], None]]]] = [
        (len(reads), [partial(touch, data, reads) for data in sides]),
        (len(groups), [partial(batches, a, groups, out) for a, out in zip(assemblers, outs, strict=True)]),
        (len(groups), [partial(loaded, a, groups) for a in assemblers]),
    ]
    found = [(count, alternated(each, rounds, watch.look)) for count, each in works]
    return [[[t.wall / count * 1e6 for t in times] for times in columns] for count, columns in found], rss


def measured(folder: Path, rounds: int) -> Found:
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))
    watch = Watch(folder)
    opened = opening(folder, rounds, watch)
    data = ShardSet.open(folder / "many")
    pickled = len(pickle.dumps(data)) - sum(map(len, data.prefixes)) - len(data.prefixes)
    times, rss = access(folder, rounds, watch)
    return Found(opened, pickled, times, rss, watch.maps, watch.files)


# ---- the report ----


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    shards: int = options.shards
    bench.title = f"{shards:,} shards beside one of the same size"
    make(folder, shards)
    found: Found = in_own_process(measured, folder, options.rounds)
    bench.say(f"{shards * PACKS:,} packs of {LENGTH} tokens on either side.")
    bench.section("Opening")
    rows = [(name, f"{median(seconds):.3f}") for name, seconds in zip(OPENINGS, found.opening, strict=True)]
    bench.table(("", "s"), rows)
    bench.say(f"Pickled: {found.pickled:,} bytes, and a path and a byte for each shard.")
    bench.section("Random access")
    bench.say(
        f"us, and beside it the time of one shard as 1. A pack has {LENGTH} tokens, a batch {ROWS} packs. `ds[i]` is"
        " with every token and mask value looked at, `BatchLoader` with nothing done between batches."
    )
    middles = [[median(times) for times in columns] for columns in found.access]
    table = [
        (side, *(f"{column[i]:.1f} ({column[i] / column[0]:.2f})" for column in middles), f"{found.rss[i] / MIB:.0f}")
        for i, side in enumerate(SIDES)
    ]
    bench.table(("", *ACCESSES, "MiB of memory"), table)
    bench.say(
        f"At most {found.maps} maps of shard files at a time (limit {MOST_MAPS}) and {found.files} descriptors of all"
        f" kinds (limit {MOST_FILES}, set with RLIMIT_NOFILE)."
    )
    bench.headline("shards", "shards", [shards], "shards")
    bench.headline("open", f"opening {shards:,} shards and reading a pack", found.opening[1], "s")
    loader = found.access[-1]
    for key, which, how in (("memory", 1, "held in memory"), ("reopen", 2, "opened for each read")):
        ours, one = ([us / 1e3 for us in times] for times in (loader[which], loader[0]))
        what = f"a batch over {shards:,} shards, {how}"
        bench.headline(key, what, ours, "ms", peer="one shard of the same size", theirs=one, short=which == 1)
    rows_of = [
        Dot(f"{side}: {name}", times, True)
        for name, columns in zip(ACCESSES, found.access, strict=True)
        for side, times in zip(SIDES, columns, strict=True)
    ]
    bench.plot("many_shards", dots(f"{shards:,} shards beside one", "microseconds", rows_of))


if __name__ == "__main__":
    sizes = {"shards": (1000, 5000, "how many")}
    run_bench("Many shards beside one of the same size", ("megatron-core",), report, sizes, rounds=(3, 5))
