"""Packing beside its peers: packs, time, mixing, on five shapes and on random ones.

    python tools/bench/packing.py [--sizes 1e4,1e5,1e6,1e7] [--random 200] [--out FILE]

Needs the ``bench`` extra: lightbinpack, trl (with datasets) and binpacking. One thread; process CPU time,
medians; every plan is checked (each sequence once, no pack over capacity). Making what a peer wants of an
array and checking are not timed. Peers that need minutes run up to the size in ``PEERS``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import machine

from megatron_sft_idx.packing import (
    METHODS,
    WindowPacker,
    attention_cost,
    group_by_cost,
    pack_sequences,
    reorder,
)

Lengths = NDArray[np.int64]
Csr = tuple[NDArray[np.int64], NDArray[np.int64]]


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
    """A capacity, 1 to 60 sequences a pack, and one of six families of lengths."""
    count = int(np.exp(random.uniform(np.log(300), np.log(1e5))))
    capacity = int(random.choice([512, 2048, 4096, 8192, 32768]))
    mean = max(1.0, capacity / float(np.exp(random.uniform(0, np.log(60)))))
    family = random.integers(6)
    if family == 0:
        values = random.lognormal(np.log(mean), random.uniform(0.1, 1.5), count)
    elif family == 1:
        values = random.uniform(mean * random.uniform(0, 1), mean * random.uniform(1, 2), count)
    elif family == 2:
        values = random.exponential(mean, count) + 1
    elif family == 3:
        values = random.choice(random.uniform(1, 2 * mean, random.integers(1, 30)), count)
    elif family == 4:
        short, long = (
            random.lognormal(np.log(mean), 0.3, count),
            random.lognormal(np.log(2 * mean), 0.5, count),
        )
        values = np.where(random.random(count) < 0.5, short, long)
    else:
        values = random.normal(mean, mean * random.uniform(0.02, 0.4), count)
    return np.clip(np.round(values), 1, capacity).astype(np.int64), capacity


# ---- packers: each returns its CPU seconds and its packs ----


def from_lists(packs: Iterable[Iterable[int]]) -> Csr:
    arrays = [np.fromiter(pack, np.int64) for pack in packs]
    offsets = np.concatenate([[0], np.cumsum([len(pack) for pack in arrays])]).astype(np.int64)
    return offsets, np.concatenate(arrays)


def lightbinpack(lengths: Lengths, capacity: int) -> tuple[float, Csr]:
    from lightbinpack import obfd

    values = lengths.tolist()
    seconds, packs = timed(lambda: obfd(values, capacity))
    return seconds, from_lists(packs)


def binpacking(lengths: Lengths, capacity: int) -> tuple[float, Csr]:
    from binpacking import to_constant_volume

    values = dict(enumerate(lengths.tolist()))
    seconds, packs = timed(lambda: to_constant_volume(values, capacity))
    return seconds, from_lists(packs)


def binpacking_windows(lengths: Lengths, capacity: int) -> tuple[float, Csr]:
    """Windows of a thousand, as trainers call it that would otherwise wait for minutes."""
    from binpacking import to_constant_volume

    pairs = list(enumerate(lengths.tolist()))

    def windows() -> list[list[tuple[int, int]]]:
        starts = range(0, len(pairs), 1000)
        return [pack for s in starts for pack in to_constant_volume(pairs[s : s + 1000], capacity, weight_pos=1)]

    seconds, packs = timed(windows)
    return seconds, from_lists([[index for index, _ in pack] for pack in packs])


def trl(lengths: Lengths, capacity: int) -> tuple[float, Csr]:
    """TRL's best fit on an Arrow table, less its copies of tokens, which are not packing.

    Its module sees compute functions of which ``filter`` (all pass) and ``take`` (the order is noted)
    do not move any tokens, and a column whose tokens are nulls.
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
        seconds, packed = timed(lambda: module._pack_bfd(table, capacity, "split"))
    finally:
        module.pc = original
    starts = packed["seq_lengths"].chunk(0).offsets.to_numpy().astype(np.int64)
    return seconds, (starts, np.array(order, np.int64))


def ours(method: str) -> Callable[[Lengths, int], tuple[float, Csr]]:
    def run(lengths: Lengths, capacity: int) -> tuple[float, Csr]:
        seconds, plan = timed(lambda: pack_sequences(lengths, capacity, method=method))
        return seconds, (plan.offsets, plan.sequences)

    return run


# Up to how many lengths each runs, and how often.
PEERS: dict[str, tuple[Callable[[Lengths, int], tuple[float, Csr]], int, int]] = {
    "lightbinpack obfd": (lightbinpack, 10**7, 3),
    "TRL bfd": (trl, 10**6, 1),
    "binpacking": (binpacking, 10**4, 1),
    "binpacking, windows": (binpacking_windows, 10**6, 1),
}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


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


def shape_rows(count: int) -> Iterator[str]:
    """One table row for each packer on each shape of this size."""
    for name, lengths, capacity in shapes(count, np.random.default_rng(count)):
        bound = pack_sequences(lengths, capacity, method="sequential").lower_bound
        runs: list[tuple[str, float, Csr]] = []
        packers = [(f"**{method}**", ours(method), 1 if method == "first-fit-shuffle" else 5) for method in METHODS]
        packers += [(peer, run, times) for peer, (run, limit, times) in PEERS.items() if count <= limit]
        for packer, run, repeats in packers:
            seconds, csr = run(lengths, capacity)
            check(csr, lengths, capacity)
            # Only the first plan is kept: new memory at every repeat is the machine's time, not the packer's.
            repeated = [seconds, *(run(lengths, capacity)[0] for _ in range(repeats - 1))]
            runs.append((packer, statistics.median(repeated), csr))
        auto, best = runs[0], runs[1]
        fewest = min(len(csr[0]) for _, _, csr in runs)
        if len(auto[2][0]) > fewest:
            print(f"auto is behind on {name} at {count}: {len(auto[2][0]) - fewest} packs", flush=True)
        for packer, seconds, csr in runs:
            packs = len(csr[0]) - 1
            fill = 100 * lengths.sum() / packs / capacity
            yield (
                f"| {name} | {count:.0e} | {packer} | {packs:,} | +{packs - bound:,} | {fill:.4f} "
                f"| {1e3 * seconds:,.1f} | {seconds / auto[1]:.2f} | {seconds / best[1]:.2f} "
                f"| {mixing(csr, lengths):.2f} | {np.diff(csr[0]).max():,} |"
            )


def random_rows(number: int) -> Iterator[str]:
    """How auto stands against everything else on random shapes."""
    if not number:
        yield "left out"
        return
    random = np.random.default_rng(20261121)
    others = [method for method in METHODS if method != "auto"]
    wins: dict[str, list[int]] = {name: [0, 0, 0] for name in [*others, "lightbinpack obfd"]}
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
            packs = len(run(lengths, capacity)[1][0]) - 1
            total[name] += packs
            tally[0 if auto.num_packs < packs else 1 if auto.num_packs == packs else 2] += 1
    yield (
        f"{number} shapes, {min(per_pack):.1f} to {max(per_pack):.1f} sequences a pack; auto met the "
        f"lower bound (so is optimal) on {optimal}. Packs in all: auto {total['auto']:,}."
    )
    yield ""
    yield "| against | auto has fewer packs | equal | more | packs in all |"
    yield "|---|---|---|---|---|"
    for name, (fewer, equal, more) in wins.items():
        yield f"| {name} | {fewer} | {equal} | {more} | {total[name]:,} |"


def training_rows(count: int) -> Iterator[str]:
    """What data parallelism and streams see."""
    columns = ["shape", "attention max/mean at dp 8, shuffled", "grouped by cost", "windows of 10,000, packs"]
    yield f"| {' | '.join(columns)} |"
    yield "|---|---|---|---|"
    for name, lengths, capacity in shapes(count, np.random.default_rng(count)):
        plan = pack_sequences(lengths, capacity)
        grouped = reorder(plan, group_by_cost(attention_cost(lengths, plan), 8))
        ratios = []
        for each in (plan, grouped):
            steps = attention_cost(lengths, each)[: each.num_packs // 8 * 8].reshape(-1, 8)
            ratios.append(float((steps.max(axis=1) / steps.mean(axis=1)).mean()))
        packer = WindowPacker(capacity)
        streamed = len(packer.add(lengths)) + len(packer.finish())
        extra = 100 * (streamed / plan.num_packs - 1)
        yield f"| {name} | {ratios[0]:.3f} | {ratios[1]:.4f} | +{extra:.4f}% |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="1e4,1e5,1e6,1e7")
    parser.add_argument("--random", type=int, default=200, help="random shapes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "packing.md")
    args = parser.parse_args()
    sizes = [int(float(size)) for size in args.sizes.split(",")]
    lines = [
        "# Packing",
        "",
        f"`python tools/bench/packing.py --sizes {args.sizes} --random {args.random}`; {machine()};",
        "one thread, CPU time, medians. Time ratios are against auto and best-fit of the same shape; `+` is",
        "packs over the lower bound; mixing is the share of log-length variance explained by the pack, less",
        "what random packs would show (0 = random, 1 = one length a pack, below 0 = packs mix more than",
        "chance). Own methods are in bold. TRL's time is without its copies of tokens.",
        "",
        "| shape | lengths | packer | packs | + | fill % | ms | / auto | / best-fit | mixing | most a pack |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for section in (
        (row for size in sizes for row in shape_rows(size)),
        ["", "## Random shapes", ""],
        random_rows(args.random),
        ["", "## Order and streams", ""],
        training_rows(min(10**6, max(sizes))),
    ):
        for line in section:
            print(line, flush=True)
            lines.append(line)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
