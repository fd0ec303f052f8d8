"""Ways of reading a shard: cold, warm, over a memory limit, in order and shuffled, on a disk and in memory.

    python tools/bench/backends.py [--mib 256] [--rounds 3]

Writes tools/bench/results/backends.md. What ``megatron-sft-idx bench-read`` measures on one disk, here on two file
systems and under a control group that has a quarter of the data's size, beside ``np.memmap`` and Megatron's own reader.
Every way has a process of its own; they run in turn, and figures are medians of rounds with their range. Before each
first epoch the page cache is dropped, which is looked at with mincore. Epochs end after a time, so that slow ways do
not hold up the bench: rates, and faults of 1,000 packs, are of the packs that were read. The limit needs a control
group: root, or a container that may make one; where none may be made, the report says so.
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

from backends_peers import PEERS, defaults
from measure import write_equal_packs
from plot import Dot, dots
from report import MIB, Bench, run_bench

from megatron_sft_idx.inspect.bench_read import EpochName, SettingTimes, measure_once
from megatron_sft_idx.inspect.medium import medium_of, memory_limit
from megatron_sft_idx.inspect.read_worker import SETTINGS, Epoch, ReadRequest, Sample, Setting, ShardReader, Workers
from megatron_sft_idx.layout import ShardPaths

LENGTH, SEQUENCES = 4096, 8
MEMORY = Path("/dev/shm")
PEER_NAMES = {"memmap": "np.memmap", "stock": "stock-mmap"}
# Of the ways that differ where packs are read in order.
IN_ORDER = ("mmap", "mmap, sequential", "pread", *PEERS)


# The lines of the tables: settings of ours, and peers, whose setting is the plain one.
WAYS = {setting.name: setting for setting in SETTINGS} | dict.fromkeys(PEERS, Setting())
SHOWN = {name: PEERS[name][0] if name in PEERS else f"`{name}`" for name in WAYS}


@dataclass
class Case:
    """A file system, an order and a limit."""

    title: str  # of its section
    prefix: str  # of the shard there
    sample: Sample  # what an epoch reads
    seconds: float  # of an epoch, at most
    group: str | None = None  # folder of the control group
    found: dict[str, SettingTimes] = field(default_factory=dict)  # by name of the way
    kept: int = 0  # most of the shard that was in memory when a first epoch began


# ---- measuring ----


def measure(cases: Sequence[Case], rounds: int) -> None:
    """Every way in every case, in turn; a case after the other, those with a limit last, as no process leaves it."""
    with ExitStack() as stack:
        openers = {"": ShardReader} | {name: opener for name, (_, opener) in PEERS.items()}
        workers = {name: stack.enter_context(Workers(opener)) for name, opener in openers.items()}
        for case in cases:
            ways = [name for name in WAYS if case.sample.order == "shuffled" or name in IN_ORDER]
            case.found = {name: SettingTimes(WAYS[name]) for name in ways}
            for number in range(rounds):
                for name in ways if number % 2 else reversed(ways):
                    job = ReadRequest(case.prefix, case.sample, WAYS[name], case.seconds, case.group)
                    kept = measure_once(workers[name if name in PEERS else ""], case.found[name], job)
                    case.kept = max(case.kept, kept or 0)
            print(f"{case.title}: measured", file=sys.stderr, flush=True)


# ---- showing ----

FAULTS = ("hard_faults", "soft_faults")
EPOCH = ("packs/s", "p99 µs", "disk bytes a byte", "hard, soft faults of 1,000 packs")
COLUMNS = ("", f"first epoch: {EPOCH[0]}", *EPOCH[1:], f"second epoch: {EPOCH[0]}", *EPOCH[1:], "own MiB")


def cells(epochs: Sequence[Epoch]) -> Iterator[str]:
    """Of one epoch, over the rounds."""
    rates = [epoch.rate for epoch in epochs]
    yield f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
    yield f"{statistics.median(epoch.p99_us for epoch in epochs):,.0f}"
    amplified = [epoch.amplification for epoch in epochs if epoch.amplification is not None]
    yield f"{statistics.median(amplified):.2f}" if amplified else "not told"
    counts = ([1000 * getattr(epoch, which) / epoch.packs for epoch in epochs] for which in FAULTS)
    yield ", ".join(f"{statistics.median(of):,.0f}" for of in counts)


def rows(case: Case, limit: int | None) -> Iterator[tuple[str, ...]]:
    for name, one in case.found.items():
        if not one.rounds:
            yield SHOWN[name], f"refused: {one.refused}", *[""] * (len(COLUMNS) - 2)
            continue
        first, second = [run.first for run in one.rounds], [run.second for run in one.rounds]
        # Where less was read than the limit, nothing had to go, and the second epoch is warm as without one.
        felt = limit is None or min(run.seen_nbytes for run in one.rounds) > limit
        again = list(cells(second)) if felt else [""] * len(EPOCH)
        own = f"{one.median(lambda run: run.private_nbytes) / MIB:.0f}"
        yield SHOWN[name], *cells(first), *again, own


def show(bench: Bench, case: Case, limit: int | None) -> None:
    bench.section(case.title)
    files = ShardPaths(case.prefix).all
    size = sum(Path(path).stat().st_size for path in files)
    kept = f"{case.kept / size:.0%} of the shard was in the page cache when a first epoch began"
    if (ahead := medium_of(files[0]).read_ahead_nbytes) is not None:
        kept += f"; the kernel reads up to {ahead >> 10:,} KiB ahead there"
    bench.say(f"{len(case.sample):,} packs an epoch, {case.sample.order}, at most {case.seconds:g} s; {kept}.")
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
    shuffled, ordered = (Sample(start, start + some, 1, order) for order in ("shuffled", "sequential"))
    return [
        Case(f"On {disk}, cold and warm", str(folder / "x"), shuffled, 0.3),
        Case(f"On {disk}, in order", str(folder / "x"), ordered, 0.2),
        Case(f"On {medium_of(str(memory)).filesystem}", str(memory / "x"), shuffled, 0.1),
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
                whole = Sample(0, options.mib * MIB // (5 * LENGTH), 1, case.sample.order)
                title = f"Over a limit of {limit_nbytes // MIB} MiB for {options.mib} MiB, {name}"
                limited.append(Case(title, case.prefix, whole, 0.3, group))
        measure([*cases, *limited], options.rounds)
        for case in (*cases, *limited):
            show(bench, case, limit_nbytes if case in limited else None)
        if why:
            bench.section("Over a memory limit")
            bench.say(f"Not measured: {why}.")
    defaults(bench, cases[0].found, cases[2].found, limited[0].found if limited else None)
    headlines(bench, cases[0], limited[0] if limited else None)
    plot(bench, limited[0] if limited else cases[0])


if __name__ == "__main__":
    sizes = {"mib": (256, 1024, "MiB of tokens and masks; the memory limit is a quarter")}
    run_bench("Ways of reading a shard", ("megatron-core", "numpy"), report, sizes, rounds=(3, 7))
