"""Packing compared with its peers: packs, time and mixing, on five distributions and on random ones.

    python tools/bench/packing.py [--full]

Needs the ``bench`` extra: lightbinpack, trl (with datasets) and binpacking. One thread; process CPU time,
medians; every plan is checked (each sequence once, no pack over capacity). Making what a peer wants of an
array and checking are not timed. Peers that need minutes run up to the size in ``PEERS``; above ``MANY`` lengths only
what the headlines compare runs, but with ``--full``.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from measure import processed
from numpy.typing import NDArray
from plot import Dot, dots
from report import Bench, cells, run_bench

from megatron_sft_idx.packing import METHODS, WindowPacker, pack_sequences

Lengths = NDArray[np.int64]
Csr = tuple[NDArray[np.int64], NDArray[np.int64]]
Packed = tuple[float, Callable[[], Csr]]  # CPU seconds, and what makes the plan of what a packer returned


def shapes(count: int, random: np.random.Generator) -> Iterator[tuple[str, Lengths, int]]:
    """Name, lengths and capacity of the five shapes."""

    def lognormal(median: float, sigma: float, capacity: int) -> Lengths:
        values = np.round(random.lognormal(np.log(median), sigma, count))
        return np.clip(values, 1, capacity).astype(np.int64)

    yield "sft4k", lognormal(600, 1.0, 4096), 4096
    is_long = random.random(count) < 0.1
    yield "long32k", np.where(is_long, lognormal(12000, 0.6, 32768), lognormal(400, 1.0, 32768)), 32768
    yield "reason32k", lognormal(9000, 0.6, 32768), 32768
    first = random.integers(1, 2730, count // 3 + 1)
    second = 1 + (random.random(count // 3 + 1) * (4095 - first)).astype(np.int64)
    triples = np.maximum(1, np.stack([first, second, 4096 - first - second], axis=1).ravel()[:count])
    yield "trip", random.permutation(triples).astype(np.int64), 4096
    yield "adv", random.integers(4096 // 3 + 1, 2048, count), 4096


def random_shape(random: np.random.Generator) -> tuple[Lengths, int]:
    """Return lengths of one of six families and a capacity, with 1 to 60 sequences per pack."""
    count = int(np.exp(random.uniform(np.log(300), np.log(1e5))))
    capacity = int(random.choice([512, 2048, 4096, 8192, 32768]))
    mean = max(1.0, capacity / float(np.exp(random.uniform(0, np.log(60)))))

    def two_lengths() -> NDArray[Any]:
        short = random.lognormal(np.log(mean), 0.3, count)
        long = random.lognormal(np.log(2 * mean), 0.5, count)
        return np.where(random.random(count) < 0.5, short, long)

    families: list[Callable[[], NDArray[Any]]] = [
        lambda: random.lognormal(np.log(mean), random.uniform(0.1, 1.5), count),
        lambda: random.uniform(mean * random.uniform(0, 1), mean * random.uniform(1, 2), count),
        lambda: random.exponential(mean, count) + 1,
        lambda: random.choice(random.uniform(1, 2 * mean, random.integers(1, 30)), count),
        two_lengths,
        lambda: random.normal(mean, mean * random.uniform(0.02, 0.4), count),
    ]
    values = families[random.integers(6)]()
    return np.clip(np.round(values), 1, capacity).astype(np.int64), capacity


# ---- packers ----


def from_lists(packs: Iterable[Iterable[int]]) -> Csr:
    arrays = [np.fromiter(pack, np.int64) for pack in packs]
    offsets = np.concatenate([[0], np.cumsum([len(pack) for pack in arrays])]).astype(np.int64)
    return offsets, np.concatenate(arrays)


def lightbinpack(lengths: Lengths, capacity: int) -> Packed:
    from lightbinpack import obfd

    values = lengths.tolist()
    packs, seconds = processed(obfd, values, capacity)
    return seconds, lambda: from_lists(packs)


def binpacking(lengths: Lengths, capacity: int) -> Packed:
    from binpacking import to_constant_volume

    values = dict(enumerate(lengths.tolist()))
    packs, seconds = processed(to_constant_volume, values, capacity)
    return seconds, lambda: from_lists(packs)


def binpacking_windows(lengths: Lengths, capacity: int) -> Packed:
    """Pack windows of a thousand, like trainers that would otherwise wait for minutes."""
    from binpacking import to_constant_volume

    pairs = list(enumerate(lengths.tolist()))

    def windows() -> list[list[tuple[int, int]]]:
        starts = range(0, len(pairs), 1000)
        return [pack for s in starts for pack in to_constant_volume(pairs[s : s + 1000], capacity, weight_pos=1)]

    packs, seconds = processed(windows)
    return seconds, lambda: from_lists([[index for index, _ in pack] for pack in packs])


def trl(lengths: Lengths, capacity: int) -> Packed:
    """TRL's best fit on an Arrow table, less its copies of tokens, which are not packing.

    Its module gets replaced compute functions, and a column whose tokens are nulls: ``filter`` (all pass) and ``take``
    (which records the order) move no tokens.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import trl.data_utils as module

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.nulls(int(offsets[-1])))
    table = pa.table({"input_ids": column})
    order: list[int] = []

    def take(examples: Any, ids: list[int]) -> Any:
        order.extend(ids)
        return examples.combine_chunks()

    stand_in = SimpleNamespace(**vars(pc))
    stand_in.filter, stand_in.take = lambda column, mask: column, take
    original, module.pc = module.pc, stand_in
    try:
        packed, seconds = processed(module._pack_bfd, table, capacity, "split")
    finally:
        module.pc = original
    starts = packed["seq_lengths"].chunk(0).offsets.to_numpy().astype(np.int64)
    return seconds, lambda: (starts, np.array(order, np.int64))


def ours(method: str) -> Callable[[Lengths, int], Packed]:
    def run(lengths: Lengths, capacity: int) -> Packed:
        plan, seconds = processed(pack_sequences, lengths, capacity, method=method)
        return seconds, lambda: (plan.offsets, plan.sequences)

    return run


LIGHT = "lightbinpack obfd"
ROUNDS = 3
MANY = 10**6
# Up to how many lengths each runs, and with --full.
PEERS: dict[str, tuple[Callable[[Lengths, int], Packed], int, int]] = {
    LIGHT: (lightbinpack, 10**7, 10**7),
    "TRL bfd": (trl, 10**5, 10**6),
    "binpacking": (binpacking, 10**4, 10**4),
    "binpacking, windows": (binpacking_windows, 10**5, 10**6),
}


def check(csr: Csr, lengths: Lengths, capacity: int) -> None:
    offsets, sequences = csr
    if not (np.bincount(sequences, minlength=len(lengths)) == 1).all():
        raise RuntimeError("a plan does not use each sequence once")
    if np.add.reduceat(lengths[sequences], offsets[:-1]).max() > capacity:
        raise RuntimeError("a plan has a pack over the capacity")


def mixing(csr: Csr, lengths: Lengths) -> float:
    """Share of the variance of log length that the pack explains, adjusted so that random packs score 0.

    1 where each pack holds one length, below 0 where packs mix short and long more than chance does.
    """
    offsets, sequences = csr
    logs = np.log(lengths[sequences])
    total = float(np.square(logs - logs.mean()).sum())
    counts = np.diff(offsets)
    if total == 0 or len(counts) == len(logs):
        return float("nan")
    means = np.add.reduceat(logs, offsets[:-1]) / counts
    within = float(np.square(logs - np.repeat(means, counts)).sum())
    return 1 - within / (len(logs) - len(counts)) * (len(logs) - 1) / total


class Run(NamedTuple):
    """One packer on one shape: seconds of every round, and packs."""

    shape: str
    packer: str
    seconds: list[float]
    packs: int


def packers(count: int, full: bool) -> dict[str, Callable[[Lengths, int], Packed]]:
    """Return the packers that are run on this many lengths."""
    methods = METHODS if full or count <= MANY else ("auto", "best-fit")
    peers = {name: run for name, (run, board, most) in PEERS.items() if count <= (most if full else board)}
    return {**{f"**{method}**": ours(method) for method in methods}, **peers}


def run_shapes(bench: Bench, count: int, full: bool) -> list[Run]:
    """Run every packer on each shape of this size, with one table row each."""
    every: list[Run] = []
    rows: list[tuple[str, ...]] = []
    for name, lengths, capacity in shapes(count, np.random.default_rng(count)):
        runs: dict[str, Run] = {}
        plans: dict[str, Csr] = {}
        for turn in range(ROUNDS):
            for packer, run in packers(count, full).items():
                if turn and packer in PEERS and packer != LIGHT:
                    continue  # hundreds of times slower: one round is enough
                seconds, plan = run(lengths, capacity)
                # Only the first plan is kept: new memory at every repeat is the machine's time, not the packer's.
                if not turn:
                    plans[packer] = csr = plan()
                    check(csr, lengths, capacity)
                    runs[packer] = Run(name, packer, [], len(csr[0]) - 1)
                runs[packer].seconds.append(seconds)
        rows += shape_rows(runs, plans, lengths, capacity)
        every += runs.values()
    bench.section(f"{count:,} lengths")
    header = "shape, packer, packs, +, fill %, ms, / auto, / best-fit, mixing, most a pack"
    bench.table(header.split(", "), rows)
    return every


def shape_rows(
    runs: dict[str, Run], plans: dict[str, Csr], lengths: Lengths, capacity: int
) -> Iterator[tuple[str, ...]]:
    """One row of the table for each packer."""
    bound = pack_sequences(lengths, capacity, method="sequential").lower_bound
    auto, best = (statistics.median(runs[f"**{method}**"].seconds) for method in ("auto", "best-fit"))
    for packer, run in runs.items():
        seconds, csr = statistics.median(run.seconds), plans[packer]
        fill, most = 100 * lengths.sum() / run.packs / capacity, np.diff(csr[0]).max()
        times = 1e3 * seconds, seconds / auto, seconds / best
        figures = cells(".4f ,.1f .2f .2f .2f ,", fill, *times, mixing(csr, lengths), most)
        yield run.shape, packer, f"{run.packs:,}", f"+{run.packs - bound:,}", *figures


def random_shapes(bench: Bench, number: int) -> None:
    """Compare auto with all others on random shapes."""
    random = np.random.default_rng(20261121)
    others = [method for method in METHODS if method != "auto"]
    wins: dict[str, list[int]] = {name: [0, 0, 0] for name in [*others, LIGHT]}
    optimal, total, per_pack = 0, dict.fromkeys(["auto", *wins], 0), []
    for _ in range(number):
        lengths, capacity = random_shape(random)
        auto = pack_sequences(lengths, capacity)
        check((auto.offsets, auto.sequences), lengths, capacity)
        optimal += auto.num_packs == auto.lower_bound
        total["auto"] += auto.num_packs
        per_pack.append(len(lengths) / auto.num_packs)
        for name, tally in wins.items():
            run = lightbinpack if name not in METHODS else ours(name)
            packs = len(run(lengths, capacity)[1]()[0]) - 1
            total[name] += packs
            tally[0 if auto.num_packs < packs else 1 if auto.num_packs == packs else 2] += 1
    bench.section("Random shapes")
    bench.say(
        f"{number} shapes, {min(per_pack):.1f} to {max(per_pack):.1f} sequences a pack; auto met the lower bound (so is"
        f" optimal) on {optimal}. Packs in all: auto {total['auto']:,}."
    )
    rows = [(name, *tally, f"{total[name]:,}") for name, tally in wins.items()]
    bench.table(("against", "auto has fewer packs", "equal", "more", "packs in all"), rows)
    fewer, _, more = wins[LIGHT]
    bench.headline("fewer", f"random shapes of {number} on which `auto` has fewer packs than lightbinpack", [fewer], "")
    bench.headline("more", f"random shapes of {number} on which `auto` has more packs than lightbinpack", [more], "")


def streams(bench: Bench, count: int) -> None:
    rows = []
    for name, lengths, capacity in shapes(count, np.random.default_rng(count)):
        plan = pack_sequences(lengths, capacity)
        packer = WindowPacker(capacity)
        streamed = len(packer.add(lengths)) + len(packer.finish())
        extra = 100 * (streamed / plan.num_packs - 1)
        rows.append((name, f"+{extra:.4f}%"))
    bench.section("Streams")
    bench.table(("shape", "windows of 10,000, packs"), rows)


def headlines(bench: Bench, count: int, runs: Sequence[Run]) -> None:
    """Report the largest size compared with lightbinpack, a line and two dots for each shape."""
    of = {(run.shape, run.packer): run for run in runs}
    marks = []
    for shape in dict.fromkeys(run.shape for run in runs):
        auto, best, peer = (of[shape, packer] for packer in ("**auto**", "**best-fit**", LIGHT))
        theirs = peer.seconds
        what = f"packing {count:,} lengths, shape {shape}"
        bench.headline(f"auto-{shape}", what, auto.seconds, "CPU s", peer=LIGHT, theirs=theirs, short=shape == "sft4k")
        bench.headline(f"best-fit-{shape}", f"{what}, `best-fit`", best.seconds, "CPU s", peer=LIGHT, theirs=theirs)
        marks += [Dot(f"{shape}: auto", auto.seconds, True), Dot(f"{shape}: {LIGHT}", theirs, False)]
    faster = [h.ratio for h in bench.headlines if h.key.startswith("auto-") and h.ratio]
    least = f"packing {count:,} lengths with `auto`: least of the shapes"
    bench.headline("least", least, [min(faster)], "times as fast")
    bench.headline("most", "the same: most of the shapes", [max(faster)], "times")
    bench.headline("lengths", "the same: lengths", [count / 10**6], "million lengths")
    packs = [of[run.shape, "**auto**"].packs - run.packs for run in runs]
    bench.headline("behind", "the same: packs that `auto` has more than the best of all", [max(0, *packs)], "packs")
    bench.plot("packing", dots(f"Packing {count:,} lengths", "processor seconds", marks))


def report(bench: Bench, _: Path, options: Namespace) -> None:
    bench.say(
        "One thread, CPU time, medians. Time ratios are against auto and best-fit of the same shape; `+` is packs over"
        " the lower bound; mixing is the share of log-length variance explained by the pack, less what random packs"
        " would show (0 = random, 1 = one length a pack, below 0 = packs mix more than chance). Own methods are in"
        " bold. TRL's time is without its copies of tokens."
    )
    sizes = sorted(map(int, options.sizes))
    runs = {count: run_shapes(bench, count, options.full) for count in sizes}
    headlines(bench, sizes[-1], runs[sizes[-1]])
    random_shapes(bench, options.random)
    streams(bench, min(MANY, sizes[-1]))


if __name__ == "__main__":
    sizes = {
        "sizes": ([1e4, 1e5, 1e6, 1e7], [1e4, 1e5, 1e6, 1e7], "numbers of lengths"),
        "random": (25, 200, "random shapes"),
    }
    run_bench("Packing", ("lightbinpack", "trl", "binpacking"), report, sizes)
