"""A dataset of thousands of shards beside one shard of the same size, under tight limits of files and maps.

    python tools/bench/many_shards.py [--shards 5000] [--rounds 5]

Writes tools/bench/results/many_shards.md. Makes the data once in a temporary folder (1 GB by default) and measures in a
process of its own that may open 256 descriptors and counts its maps of shard files after every step. Both sides are
warm, each has been read once, and run in turn; figures are medians by the clock.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from report import machine, memory, table

from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shards import ShardSet
from megatron_sft_idx.training.batch import Batch, BatchAssembler
from megatron_sft_idx.training.dataset import PackedSFTDataset, PackedSFTDatasetConfig
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.sources import StoredPacks

RESULTS = Path(__file__).parent / "results" / "many_shards.md"
MIB = 1 << 20
MOST_FILES, MOST_MAPS = 256, 200
PACKS, LENGTH, SEQUENCES = 8, 4096, 8
READS, BATCHES, ROWS = 8_000, 400, 8


# ---- data ----


def write(prefix: Path, groups: int, number: int = 0) -> None:
    """A shard of ``groups`` times eight packs."""
    rng = np.random.default_rng(number)
    starts = np.tile(np.arange(SEQUENCES) * (LENGTH // SEQUENCES), PACKS).astype(np.int64)
    mask = np.ones(PACKS * LENGTH, np.uint8)
    mask[LENGTH // SEQUENCES - 1 :: LENGTH // SEQUENCES] = 0
    lengths, sequences = np.full(PACKS, LENGTH), np.full(PACKS, SEQUENCES)
    metadata = {"tokenizer": {"fingerprint": "f" * 32, "vocab_size": 60_000}, "shard": number}
    with ShardWriter(prefix, token_dtype=np.uint16, capacity=LENGTH, durable=False, metadata=metadata) as writer:
        for _ in range(groups):
            ids = rng.integers(0, 60_000, PACKS * LENGTH, np.uint16)
            writer.add_packs(ids, mask, starts, lengths, sequences)


def make(folder: Path, shards: int) -> None:
    (folder / "many").mkdir()
    write(folder / "one", shards)
    for number in range(shards):
        write(folder / "many" / f"part-{number:05d}", 1, number)


# ---- limits ----


class Watch:
    """How many maps of shard files and descriptors this process has had at most, by what was seen after each step."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/many/"
        self.maps = self.files = 0

    def look(self) -> None:
        """Count them; SystemExit where there are too many maps."""
        self.maps = max(self.maps, Path("/proc/self/maps").read_text().count(self._folder))
        self.files = max(self.files, len(os.listdir("/proc/self/fd")))
        if self.maps > MOST_MAPS:
            raise SystemExit(f"{self.maps} maps of shard files, at most {MOST_MAPS} are allowed")


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def medians(works: Sequence[Callable[[], Any]], rounds: int, watch: Watch) -> list[float]:
    """Seconds of each work, which run in turn, after one round that does not count."""
    times = []
    for _ in range(rounds + 1):
        times.append([timed(work) for work in works])
        watch.look()
    return [statistics.median(column) for column in zip(*times[1:], strict=True)]


# ---- what is measured ----


def opening(folder: Path, rounds: int, watch: Watch) -> Iterator[str]:
    def build() -> PackedSFTDataset:
        config = PackedSFTDatasetConfig(
            random_seed=1,
            sequence_length=LENGTH,
            blend=([str(folder / "many")], None),
            split="99,1,0",
            tokenizer=None,
        )
        builder = BlendedMegatronDatasetBuilder(PackedSFTDataset, [None, None, None], lambda: True, config)
        built: PackedSFTDataset = builder.build()[0]
        return built

    works = {
        "`ShardSet.open(folder)`": lambda: ShardSet.open(folder / "many"),
        "the same, and its first pack": lambda: ShardSet.open(folder / "many")[0],
        "`PackedSFTDataset` of it, by Megatron's builder, split in two": build,
    }
    yield "## Opening"
    yield ""
    found = medians(list(works.values()), rounds, watch)
    yield from table(("", "s"), [(name, f"{seconds:.3f}") for name, seconds in zip(works, found, strict=True)])
    data = ShardSet.open(folder / "many")
    paths = sum(map(len, data.prefixes))
    own = len(pickle.dumps(data)) - paths - len(data.prefixes)
    yield f"Pickled: {own:,} bytes, and a path and a byte for each shard."
    yield ""


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


def access(folder: Path, rounds: int, watch: Watch) -> Iterator[str]:
    many = folder / "many"
    sides = {
        "one shard, mapped": ShardSet.open(folder / "one"),
        "many, held in memory": ShardSet.open(many),
        "many, opened for each read": ShardSet.open(many, backend="reopen"),
    }
    order = np.random.default_rng(0).permutation(len(sides["one shard, mapped"]))
    rss = []
    for data in sides.values():
        before = memory("RssAnon")
        for i in order.tolist():
            data[i]
        rss.append(memory("RssAnon") - before)
        watch.look()
    groups = [order[i : i + ROWS] for i in range(0, BATCHES * ROWS, ROWS)]
    assemblers = [BatchAssembler(StoredPacks(data), LENGTH) for data in sides.values()]
    outs = [Batch(assembler.layout(ROWS)) for assembler in assemblers]
    reads = medians([partial(touch, data, order[:READS].tolist()) for data in sides.values()], rounds, watch)
    made = medians([partial(batches, a, groups, out) for a, out in zip(assemblers, outs, strict=True)], rounds, watch)
    given = medians([partial(loaded, a, groups) for a in assemblers], rounds, watch)
    yield "## Random access"
    yield ""
    yield f"us, and beside it the time of one shard as 1. A pack has {LENGTH} tokens, a batch {ROWS} packs."
    yield "`ds[i]` is with every token and mask value looked at, `BatchLoader` with nothing done between batches."
    yield ""
    rows = []
    for i, name in enumerate(sides):
        cells = [
            f"{column[i] / count * 1e6:.1f} ({column[i] / column[0]:.2f})"
            for column, count in ((reads, READS), (made, BATCHES), (given, BATCHES))
        ]
        rows.append((name, *cells, f"{rss[i] / MIB:.0f}"))
    yield from table(("", "`ds[i]`", "`assemble`", "`BatchLoader`", "MiB of memory"), rows)


def measured(folder: Path, rounds: int) -> list[str]:
    """All of it, under the limits."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))
    watch = Watch(folder)
    lines = [*opening(folder, rounds, watch), *access(folder, rounds, watch)]
    lines.append(
        f"At most {watch.maps} maps of shard files at a time (limit {MOST_MAPS}) and {watch.files} descriptors of all"
        f" kinds (limit {MOST_FILES}, set with RLIMIT_NOFILE)."
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shards", type=int, default=5000, help="how many")
    parser.add_argument("--rounds", type=int, default=5, help="runs of which the median is taken")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, options.shards)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(measured, folder, options.rounds).result()
    packs = options.shards * PACKS
    lines = [
        f"# {options.shards:,} shards beside one of the same size",
        "",
        f"{machine()}; {packs:,} packs of {LENGTH} tokens on either side; medians of {options.rounds} runs.",
        "",
        *found,
    ]
    print("\n".join(lines))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
