"""Read one pack from disk without announcing it: its data is not in the page cache, the index arrays are warm.

    python tools/bench/cold_pack.py [--packs 50000] [--rounds 15]

Writes tools/bench/results/cold_pack.md. All ways are open all the time, in one process; they take turns, each reads
another pack in every round and copies it out, and before that its data files are dropped from the page cache.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import cast

import numpy as np
from batches_peers import Files, mds
from formats import copied
from formats_peers import Items, RawMemmap, mds_items
from measure import write_equal_packs
from report import Bench, cells, run_bench

from megatron_sft_idx.shard import Shard

sys.path.append(str(Path(__file__).parents[1]))  # of medium.py
from medium import drop_cache, medium_of

LENGTH, SEQUENCES = 4096, 8


def opened(folder: Path) -> dict[str, tuple[Items, list[Path]]]:
    """Return every way, opened with its index arrays in memory, and its data files."""
    shard = Shard(folder / "x")
    shard.sequence_bounds()
    data = [folder / "x.bin", folder / "x.loss.bin"]
    return {
        "`Shard`": (cast(Items, shard), data),
        "mosaicml-streaming (MDS), `LocalDataset`": (mds_items(str(folder / "mds")), sorted(folder.glob("mds/*.mds"))),
        "`np.memmap` slices": (RawMemmap(str(folder / "x"), plain=False), data),
    }


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    write_equal_packs(folder / "x", options.packs, LENGTH, SEQUENCES, capacity=LENGTH)
    mds(folder, Files(folder / "x"))
    ways, place = opened(folder), np.empty(LENGTH, np.int32)
    found: dict[str, list[float]] = {way: [] for way in ways}
    rng = np.random.default_rng(1)
    for turn in range(-1, options.rounds):  # the first does not count
        for way, (items, files) in ways.items():
            read, pack = copied(items, place), int(rng.integers(options.packs))
            drop_cache(files)
            begin = time.perf_counter()
            read(pack)
            found[way] += [(time.perf_counter() - begin) * 1e6] * (turn >= 0)
    ahead = medium_of(str(folder / "x.bin")).read_ahead_nbytes
    bench.say(
        f"{options.packs:,} packs of {LENGTH} tokens; each way reads {options.rounds} of them at random, alone."
        + ("" if ahead is None else f" The kernel reads up to {ahead >> 10:,} KiB around a fault there.")
    )
    rows = [(way, *cells(",.0f ,.0f ,.0f", statistics.median(us), min(us), max(us))) for way, us in found.items()]
    bench.table(("", "µs, median", "least", "most"), rows)
    (_, ours), *others = found.items()
    for key, (peer, theirs) in zip(("mds", "memmap"), others, strict=True):
        what, short = "a pack read alone, nothing cached", key == "mds"
        bench.headline(f"alone-{key}", what, ours, "µs", peer=peer, theirs=theirs, short=short)


if __name__ == "__main__":
    sizes = {
        "packs": (50_000, 50_000, f"packs of {LENGTH} tokens, 20 KiB each"),
        "rounds": (15, 60, "packs that each way reads"),
    }
    run_bench("One cold pack", ("mosaicml-streaming", "numpy"), report, sizes)
