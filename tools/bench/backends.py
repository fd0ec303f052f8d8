"""Ways of reading a shard: cold, warm, over a memory limit, in order and shuffled, on a disk and in memory.

    python tools/bench/backends.py [--mib 256] [--rounds 3]

Writes tools/bench/results/backends.md. Repeats the measurements of ``tools/bench_read.py`` on two file systems and
under a control group with a quarter of the data's size, next to ``np.memmap`` and Megatron's own reader.
Every measurement has its own process; ways take turns, and figures are medians of rounds with their range. Before
each first epoch the page cache is dropped, which the bytes read from the disk show. Epochs end after a time, so that
slow ways do not hold up the bench: rates are of the packs that were read. The limit needs a control group: root, or a
container that may make one; where none may be made, the report says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of bench_read.py, medium.py, read_worker.py

from backends_peers import PEERS, defaults
from bench_read import EpochName, SettingTimes, measure_once
from measure import write_equal_packs
from medium import medium_of, memory_limit
from plot import Dot, dots
from read_worker import SETTINGS, Epoch, Order, ReadRequest, Setting, ShardReader
from report import MIB, Bench, run_bench

LENGTH, SEQUENCES = 4096, 8
MEMORY = Path("/dev/shm")
PEER_NAMES = {"memmap": "np.memmap", "stock": "stock-mmap"}
# The ways that differ when packs are read in order.
IN_ORDER = ("mmap", "mmap, sequential", "pread", *PEERS)


# The lines of the tables: settings of ours, and peers, whose setting is the plain one.
WAYS = {setting.name: setting for setting in SETTINGS} | dict.fromkeys(PEERS, Setting())
SHOWN = {name: PEERS[name][0] if name in PEERS else f"`{name}`" for name in WAYS}


@dataclass
class Case:
    """A file system, an order and a limit."""

    title: str  # of its section
    prefix: str  # of the shard there
    packs: range  # what an epoch reads
    order: Order
    seconds: float  # of an epoch, at most
    group: str | None = None  # folder of the control group
    found: dict[str, SettingTimes] = field(default_factory=dict)  # by name of the way


# ---- measuring ----


def measure(cases: Sequence[Case], rounds: int) -> None:
    """Measure all ways in turn, case by case."""
    for case in cases:
        ways = [name for name in WAYS if case.order == "shuffled" or name in IN_ORDER]
        case.found = {name: SettingTimes(WAYS[name]) for name in ways}
        for number in range(rounds):
            for name in ways if number % 2 else reversed(ways):
                job = ReadRequest(case.prefix, case.packs, WAYS[name], case.order, case.seconds, case.group)
                opener = PEERS[name][1] if name in PEERS else ShardReader
                measure_once(case.found[name], job, opener)
        print(f"{case.title}: measured", file=sys.stderr, flush=True)


# ---- showing ----

EPOCH = ("packs/s", "disk bytes a byte")
COLUMNS = ("", f"first epoch: {EPOCH[0]}", *EPOCH[1:], f"second epoch: {EPOCH[0]}", *EPOCH[1:])


def cells(epochs: Sequence[Epoch]) -> Iterator[str]:
    """Yield the table cells of one epoch over all rounds."""
    rates = [epoch.rate for epoch in epochs]
    yield f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
    yield f"{statistics.median(epoch.amplification for epoch in epochs):.2f}"


def rows(case: Case, limit: int | None) -> Iterator[tuple[str, ...]]:
    for name, one in case.found.items():
        if not one.rounds:
            yield SHOWN[name], f"refused: {one.refused}", *[""] * (len(COLUMNS) - 2)
            continue
        first, second = [run.first for run in one.rounds], [run.second for run in one.rounds]
        # If less was read than the limit, nothing was evicted, and the second epoch is warm as without a limit.
        felt = limit is None or min(run.first.nbytes for run in one.rounds) > limit
        again = list(cells(second)) if felt else [""] * len(EPOCH)
        yield SHOWN[name], *cells(first), *again


def show(bench: Bench, case: Case, limit: int | None) -> None:
    bench.section(case.title)
    ahead = medium_of(case.prefix + ".bin").read_ahead_nbytes
    told = "" if ahead is None else f"; the kernel reads up to {ahead >> 10:,} KiB ahead there"
    bench.say(f"{len(case.packs):,} packs an epoch, {case.order}, at most {case.seconds:g} s{told}.")
    bench.table(COLUMNS, rows(case, limit))


def rates(case: Case, name: str, epoch: EpochName) -> list[float]:
    return [one.rate for one in case.found[name].epochs(epoch)]


def headlines(bench: Bench, cold: Case, limited: Case | None) -> None:
    def beside(key: str, what: str, case: Case, ours: str, which: EpochName, short: bool) -> None:
        for peer, name in (("memmap", "`np.memmap`"), ("stock", "stock `IndexedDataset`, tokens only")):
            mine, theirs = rates(case, ours, which), rates(case, PEER_NAMES[peer], which)
            if mine and len(mine) == len(theirs):
                quoted = short and peer == "memmap"
                bench.headline(
                    f"{key}-{peer}", what, mine, "packs/s", peer=name, theirs=theirs, more=True, short=quoted
                )

    beside("cold", "shuffled packs, cold", cold, "mmap", "first", False)
    beside("warm", "shuffled packs, warm", cold, "mmap", "second", False)
    if limited is not None:
        announced = "mmap, random, schedule"
        beside("limited", "shuffled packs over a memory limit, announced", limited, announced, "first", True)


def plot(bench: Bench, case: Case) -> None:
    shown = [
        Dot(SHOWN[name], rates(case, name, "first"), name not in PEERS)
        for name, one in case.found.items()
        if one.rounds
    ]
    bench.plot("backends", dots(f"{case.title}: first epoch", "packs/s", shown, more=True))


def cases_in(folder: Path, memory: Path, options: argparse.Namespace) -> list[Case]:
    packs = options.mib * MIB // (5 * LENGTH)
    for place in (folder, memory):
        write_equal_packs(place / "x", packs, LENGTH, SEQUENCES, capacity=LENGTH)
    disk, some = medium_of(str(folder)).filesystem, packs // 4
    start = (packs - some) // 2
    middle = range(start, start + some)
    return [
        Case(f"On {disk}, cold and warm", str(folder / "x"), middle, "shuffled", 0.3),
        Case(f"On {disk}, in order", str(folder / "x"), middle, "sequential", 0.2),
        Case(f"On {medium_of(str(memory)).filesystem}", str(memory / "x"), middle, "shuffled", 0.1),
    ]


def report(bench: Bench, folder: Path, options: argparse.Namespace) -> None:
    limit_nbytes = options.mib * MIB // 4
    with ExitStack() as stack:
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)))
        cases, limited, why = cases_in(folder, memory, options), list[Case](), ""
        try:
            group = str(stack.enter_context(memory_limit(limit_nbytes)).folder)
        except OSError as refused:
            why = str(refused)
        else:
            for case, name in zip(cases, ("shuffled", "in order"), strict=False):
                whole = range(options.mib * MIB // (5 * LENGTH))
                title = f"Over a limit of {limit_nbytes // MIB} MiB for {options.mib} MiB, {name}"
                limited.append(Case(title, case.prefix, whole, case.order, 0.3, group))
        measure([*cases, *limited], options.rounds)
        for case in (*cases, *limited):
            show(bench, case, limit_nbytes if case in limited else None)
        if why:
            bench.section("Over a memory limit")
            bench.say(f"Not measured: {why}.")
    defaults(bench, cases[0].found, limited[0].found if limited else None)
    headlines(bench, cases[0], limited[0] if limited else None)
    plot(bench, limited[0] if limited else cases[0])


if __name__ == "__main__":
    sizes = {"mib": (256, 1024, "MiB of tokens and masks; the memory limit is a quarter")}
    run_bench("Ways of reading a shard", ("megatron-core", "numpy"), report, sizes, rounds=(3, 7))
