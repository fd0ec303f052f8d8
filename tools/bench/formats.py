"""All formats for packs compared: opening, memory, reading and size, by ``open_dataset`` and by the usual reader.

    python tools/bench/formats.py [--full]

All files hold the same packs, except that the pickled .npy has fewer. Every
measurement runs in a fresh process that has read a tiny file of the same kind before, so that imports do not count;
the ways take turns, and figures are medians. Cold reads are of another process, once the files have been dropped from
the page cache. Needs about 200 KB a pack in the folder for temporary files.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import formats_peers as peers
import numpy as np
from formats_peers import CAPACITY, SEQUENCES, WAYS, Items, Way, check_equal, write_all
from measure import in_own_process, memory, read_from_disk
from plot import Dot, dots
from report import MIB, Bench, cells, run_bench

from megatron_sft_idx import open_dataset

sys.path.append(str(Path(__file__).parents[1]))  # of medium.py
from medium import drop_cache

MOST_READS, COLD_READS, SECONDS = 20_000, 300, 0.25
WARM_PACKS = 20
# The peers that are lines of the short table.
SHORT = {"random": ("stock", "arrow", "parquet"), "sequential": ("arrow", "mds"), "cold": ("arrow", "mds")}
BESIDE = {
    "touched_us": ("random", "a random read of a pack, values copied"),
    "sequential_us": ("sequential", "a read in order, values copied"),
    "cold_us": ("cold", "a random read from disk, nothing cached"),
    "open_ms": ("open", "opening a dataset"),
}


# ---- measuring ----


class Figures(NamedTuple):
    """The measurements of two processes in one round."""

    open_ms: float  # to open
    open_mib: float  # growth of resident memory by it
    random_us: float  # a read in random order, values left alone
    touched_us: float  # a read in random order, every value copied out
    sequential_us: float  # a read in order, every value copied out
    own_mib: float  # growth of memory except mapped files, after all reads
    cold_us: float = 0.0  # a read in random order, every value copied out, nothing in the page cache
    cold_kib: float = 0.0  # that the disk gave for it


def copied(items: Items, place: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Callable[[int], None]:
    """Return a function that reads an item and copies every value, as a collate does."""

    def read(i: int) -> None:
        for values in items[i].values():
            place[: len(values)] = values

    return read


def microseconds(read: Callable[[int], object], order: Iterable[int]) -> float:
    """Return microseconds per read, over as many reads as fit the time, at least three."""
    count, start = 0, time.perf_counter()
    for i in order:
        read(i)
        count += 1
        if count % 3 == 0 and time.perf_counter() - start > SECONDS:
            break
    return (time.perf_counter() - start) / count * 1e6


def open_small(way: Way, warm: str) -> None:
    """Open and read a tiny file, so that all code is loaded."""
    small = way.open(f"{warm}/{way.stored}")
    copied(small, np.empty(2 * CAPACITY, np.int32))(len(small) - 1)


def measure(number: int, folder: str, warm: str, seed: int) -> Figures:
    way = WAYS[number]
    place = np.empty(2 * CAPACITY, np.int32)
    open_small(way, warm)
    gc.collect()
    resident, own = memory("VmRSS"), memory("RssAnon")
    start = time.perf_counter()
    items = way.open(f"{folder}/{way.stored}")
    open_ms, open_mib = (time.perf_counter() - start) * 1e3, (memory("VmRSS") - resident) / MIB
    order: list[int] = np.random.default_rng(seed).permutation(len(items))[:MOST_READS].tolist()
    read = copied(items, place)
    microseconds(read, order)  # pages that are in the cache come into the process
    random_us, touched_us = microseconds(items.__getitem__, order), microseconds(read, order)
    sequential_us = microseconds(read, range(min(len(items), MOST_READS)))
    return Figures(open_ms, open_mib, random_us, touched_us, sequential_us, (memory("RssAnon") - own) / MIB)


def cold(number: int, folder: str, warm: str, seed: int) -> tuple[float, float]:
    """Microseconds and KiB from disk of a read, in a separate process, after the files were evicted."""
    way = WAYS[number]
    open_small(way, warm)
    items = way.open(f"{folder}/{way.stored}")
    order: list[int] = np.random.default_rng(seed).permutation(len(items))[:COLD_READS].tolist()
    before, left = read_from_disk(), iter(order)
    us = microseconds(copied(items, np.empty(2 * CAPACITY, np.int32)), left)
    return us, (read_from_disk() - before) / 1024 / (len(order) - len(list(left)))


def measured(folder: Path, warm: Path, rounds: int) -> dict[Way, list[Figures]]:
    """Measure every way in every round, in turns."""
    found: dict[Way, list[Figures]] = {way: [] for way in WAYS}
    for seed in range(rounds):
        for number, way in enumerate(WAYS):
            drop_cache(peers.files_of(str(folder / way.stored)))
            us, kib = in_own_process(cold, number, str(folder), str(warm), seed + rounds)
            warmly: Figures = in_own_process(measure, number, str(folder), str(warm), seed)
            found[way].append(warmly._replace(cold_us=us, cold_kib=kib))
    return found


# ---- the report ----


def tables(bench: Bench, folder: Path, found: dict[Way, list[Figures]]) -> None:
    middles = {way: Figures(*map(statistics.median, zip(*rounds, strict=True))) for way, rounds in found.items()}
    base = next(iter(middles.values()))
    rows = []
    for way, one in middles.items():
        copied = one.touched_us, one.touched_us / base.touched_us, one.sequential_us
        stored = one.cold_us, one.cold_kib, peers.nbytes_of(str(folder / way.stored)) / 1e6
        read = one.open_ms, one.open_mib, one.own_mib, one.random_us, one.random_us / base.random_us
        figures = cells(".2f .1f .1f ,.2f ,.1f ,.2f ,.1f ,.2f ,.0f ,.0f ,.0f", *read, *copied, *stored)
        rows.append((way.label, way.reader, *figures))
    header = "format, reader, open ms, RSS of opening MiB, own memory MiB, random us, / ours, random and copied us"
    header += ", / ours, in order and copied us, cold random us, KiB from disk, MB on disk"
    bench.table(header.split(", "), rows)
    headlines(bench, folder, found)
    beside_ours(bench, found)


def headlines(bench: Bench, folder: Path, found: dict[Way, list[Figures]]) -> None:
    """Report the figures of the table of formats: read time and size of each format, and memory of its reader."""
    for key, stored in (("packs", "shard"), ("npy-packs", "packs.npy")):
        bench.headline(key, f"packs in {stored}", [len(open_dataset(str(folder / stored)))], "packs")
    for way in (way for way in WAYS if way.ours):
        usual = next((other for other in WAYS if other.stored == way.stored and not other.ours), None)
        us = [one.touched_us for one in found[way]]
        what, unit = f"{way.label}: a random read by `open_dataset`", "µs"
        peer = usual.reader if usual else ""
        theirs = [one.touched_us for one in found[usual]] if usual else []
        bench.headline(f"{way.key}-read", what, us, unit, peer=peer, theirs=theirs)
        size = peers.nbytes_of(str(folder / way.stored)) / 1e6
        bench.headline(f"{way.key}-size", f"{way.label}: on disk", [size], "MB")
        own = [max(one.own_mib, 1.0) for one in found[way]]
        bench.headline(f"{way.key}-memory", f"{way.label}: memory of the reader, a MiB at least", own, "MiB")
        opening = [one.open_ms for one in found[way]]
        bench.headline(f"{way.key}-open", f"{way.label}: opening by `open_dataset`", opening, "ms")


def beside_ours(bench: Bench, found: dict[Way, list[Figures]]) -> None:
    """Compare the shard with the formats that others store packs in, each read as its users do."""
    for field, (key, what) in BESIDE.items():
        unit = "ms" if field.endswith("ms") else "µs"
        ours = [getattr(one, field) for one in found[WAYS[0]]]
        for way in (way for way in WAYS if way.beside):
            theirs = [getattr(one, field) for one in found[way]]
            short = way.beside in SHORT.get(key, ())
            bench.headline(f"{key}-{way.beside}", what, ours, unit, peer=way.peer, theirs=theirs, short=short)
        marks = [
            Dot(f"{way.label}, {way.reader}", [getattr(one, field) for one in rounds], way is WAYS[0])
            for way, rounds in found.items()
            if way is WAYS[0] or way.beside
        ]
        label = "milliseconds" if unit == "ms" else "microseconds"
        bench.plot(f"formats_{key}", dots(what.capitalize(), label, marks))


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    bench.say(
        f"From the page cache, medians of {options.rounds} runs, a fresh process each. {options.packs:,} packs of"
        f" {CAPACITY} tokens and {SEQUENCES} sequences ({options.npy_packs:,} in the `.npy`, which is read whole)."
        " `.pbin` and stock datasets have no masks; an item of a `.pbin` is one sequence. Opening: after imports. Own"
        " memory: what the process holds beside mapped files once it has read. Copied: every value is copied into an"
        " array, as a collate does. Cold: the same, with nothing in the page cache."
    )
    data, warm = folder / "data", folder / "warm"
    for made, packs, npy_packs in ((warm, WARM_PACKS, WARM_PACKS), (data, options.packs, options.npy_packs)):
        made.mkdir()
        write_all(made, packs, npy_packs)
    check_equal(warm)
    tables(bench, data, measured(data, warm, options.rounds))


if __name__ == "__main__":
    versions = ("pyarrow", "datasets", "mosaicml-streaming", "megatron-core", "numpy")
    sizes = {
        "packs": (12_000, 20_000, "packs in every format but .npy"),
        "npy_packs": (1_000, 2_000, "packs in the pickled .npy"),
    }
    run_bench("Formats beside each other", versions, report, sizes, rounds=(3, 5))
