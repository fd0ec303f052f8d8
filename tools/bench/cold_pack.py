"""One pack that nobody announced, from a disk: nothing of it in the page cache, the index arrays warm.

    python tools/bench/cold_pack.py [--packs 50000] [--rounds 15]

Writes tools/bench/results/cold_pack.md. All ways are open all the time, in one process; they take turns, each reads
another pack in every round and copies it out, and before that its data files are dropped from the page cache.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from formats_peers import Items, MdsItems, RawMemmap, import_streaming
from report import Bench, Parser, Size

from megatron_sft_idx.inspect.place import drop_cache, find_place
from megatron_sft_idx.shard import Shard, ShardWriter

LENGTH, SEQUENCES = 4096, 8
COLUMNS = {"input_ids": "ndarray:int32", "loss_mask": "ndarray:uint8", "seq_boundaries": "ndarray:int32"}


def write(folder: Path, packs: int) -> None:
    rng, bounds = np.random.default_rng(0), np.arange(SEQUENCES + 1, dtype=np.int32) * (LENGTH // SEQUENCES)
    mask = np.ones(LENGTH, np.uint8)
    mask[bounds[1:] - 1] = 0
    mds = import_streaming().MDSWriter(out=str(folder / "mds"), columns=COLUMNS)
    with ShardWriter(folder / "x", capacity=LENGTH, durable=False) as writer, mds as other:
        for _ in range(packs):
            ids = rng.integers(0, 60_000, LENGTH, np.int32)
            writer.add_pack(ids, mask, bounds[:-1])
            other.write({"input_ids": ids, "loss_mask": mask, "seq_boundaries": bounds})


def opened(folder: Path) -> dict[str, tuple[Items, list[Path]]]:
    """Every way, its index arrays in memory, and its data files."""
    shard = Shard(folder / "x")
    shard.sequence_bounds()
    data = [folder / "x.bin", folder / "x.loss.bin"]
    return {
        "`Shard`": (shard, data),  # type: ignore[dict-item]
        "mosaicml-streaming (MDS), `LocalDataset`": (MdsItems(str(folder / "mds")), sorted(folder.glob("mds/*.mds"))),
        "`np.memmap` slices": (RawMemmap(str(folder / "x"), plain=False), data),
    }


def microseconds(read: Callable[[int], object], pack: int) -> float:
    begin = time.perf_counter()
    read(pack)
    return (time.perf_counter() - begin) * 1e6


def main() -> None:
    options = Parser(
        __doc__,
        packs=Size(50_000, 50_000, f"packs of {LENGTH} tokens, 20 KiB each"),
        rounds=Size(15, 60, "packs that each way reads"),
    ).parse()
    bench = Bench("cold_pack", "One cold pack", ("mosaicml-streaming", "numpy"), options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, options.packs)
        ways, place = opened(folder), np.empty(LENGTH, np.int32)
        found: dict[str, list[float]] = {way: [] for way in ways}
        rng = np.random.default_rng(1)
        for turn in range(-1, options.rounds):  # the first does not count
            for way, (items, files) in ways.items():

                def read(pack: int, items: Items = items) -> None:
                    for values in items[pack].values():
                        place[: len(values)] = values

                drop_cache(files)
                took = microseconds(read, int(rng.integers(options.packs)))
                found[way] += [took] * (turn >= 0)
        ahead = find_place(str(folder / "x.bin")).read_ahead_nbytes
    bench.say(
        f"{options.packs:,} packs of {LENGTH} tokens; each way reads {options.rounds} of them at random, alone."
        + ("" if ahead is None else f" The kernel reads up to {ahead >> 10:,} KiB around a fault there.")
    )
    rows = [(way, *(f"{of(us):,.0f}" for of in (statistics.median, min, max))) for way, us in found.items()]
    bench.table(("", "µs, median", "least", "most"), rows)
    ours, *others = found
    for key, peer in zip(("mds", "memmap"), others, strict=True):
        bench.headline(
            f"alone-{key}", "a pack read alone, nothing cached", found[ours], "µs", peer=peer, theirs=found[peer],
            short=key == "mds",
        )  # fmt: skip
    bench.write()


if __name__ == "__main__":
    main()
