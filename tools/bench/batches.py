"""Batches of packed rows beside other ways to store and collate them, on this machine.

    python tools/bench/batches.py [--packs 20000] [--rounds 3]

Writes tools/bench/results/batches.md. All sides serve the same packs in the same random order and, but for the
collate of Python lists, must give the same tensors before they are timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import batches_peers as peers
import numpy as np
import torch
from batches_peers import CAPACITY, ROWS, Row
from report import machine, table
from torch.utils.data import DataLoader, Dataset

from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shards import ShardSet
from megatron_sft_idx.training.batch import Batch, BatchAssembler
from megatron_sft_idx.training.loader import BatchLoader, PackRows, whole_batch
from megatron_sft_idx.training.sources import StoredPacks

RESULTS = Path(__file__).parent / "results" / "batches.md"
SEQUENCES = 8
WARM_UP, COLD_BATCHES, STEP_SECONDS = 10, 80, 0.004
Batches = list[list[int]]


class Store(NamedTuple):
    """One way to keep packs.

    Attributes:
        name: in the table.
        files: what lies on disk.
        open: makes the dataset, of which ``ds[i]`` is a row, or ``ds.__getitems__(list)`` several.
    """

    name: str
    files: list[Path]
    open: Callable[[], Dataset[Any]]


def write_shard(prefix: Path, packs: int) -> None:
    """Packs of 8 sequences that fill 95% of the capacity."""
    rng = np.random.default_rng(0)
    with ShardWriter(prefix, capacity=CAPACITY, pad_id=0, durable=False) as writer:
        for _ in range(packs):
            cuts = np.sort(rng.choice(np.arange(1, 3900), SEQUENCES - 1, replace=False))
            starts = np.concatenate([[0], cuts])
            mask = np.ones(3900, np.uint8)
            mask[np.append(cuts, 3900) - 1] = 0
            writer.add_pack(rng.integers(1, 150_000, 3900, np.int32), mask, starts)


class Files(Dataset[Row]):
    """The shard, read pack by pack."""

    def __init__(self, prefix: Path) -> None:
        self.shard = Shard(prefix)

    def __len__(self) -> int:
        return len(self.shard)

    def __getitem__(self, i: int) -> Row:
        pack = self.shard[i]
        return pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"]


def assembler_of(prefix: Path, **options: Any) -> BatchAssembler:
    return BatchAssembler(StoredPacks(ShardSet([str(prefix)])), CAPACITY, width=SEQUENCES + 2, **options)


def random_batches(packs: int, count: int, seed: int) -> Batches:
    rng = np.random.default_rng(seed)
    picked: list[list[int]] = rng.choice(packs, (count + WARM_UP, ROWS)).tolist()
    return picked


# ---- timing ----


def per_batch(batches: Iterable[Any], count: int) -> float:
    """Milliseconds a batch for a trainer that does nothing else."""
    taken = iter(batches)
    for _ in range(WARM_UP):
        next(taken)
    start = time.perf_counter()
    for _ in range(count):
        next(taken)
    return (time.perf_counter() - start) / count * 1e3


def blocked(batches: Iterable[Any], count: int) -> float:
    """Mean milliseconds that a trainer whose steps take a while waits for the next batch."""
    taken = iter(batches)
    waits = []
    for i in range(count + WARM_UP):
        start = time.perf_counter()
        next(taken)
        if i >= WARM_UP:
            waits.append(time.perf_counter() - start)
        time.sleep(STEP_SECONDS)
    return statistics.mean(waits) * 1e3


def loader(dataset: Dataset[Any], collate: Callable[[Any], Any], batches: Batches, workers: int) -> Iterable[Any]:
    context = "fork" if workers else None
    made: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers, multiprocessing_context=context
    )
    return made


Way = tuple[str, Callable[[], float]]


def warm_ways(stores: list[Store], prefix: Path, packs: int) -> list[tuple[str, list[Callable[[], float] | None]]]:
    """A row of the table each: workers 0, workers 2, and blocked in next() beside a trainer."""
    seeds = iter(range(1, 1_000_000))

    def order(count: int) -> Batches:
        return random_batches(packs, count, next(seeds))

    def through(dataset: Dataset[Any], collate: Callable[[Any], Any], slow: int) -> list[Callable[[], float] | None]:
        few, some = 400 // slow, 150
        return [
            lambda: per_batch(loader(dataset, collate, order(few), 0), few),
            lambda: per_batch(loader(dataset, collate, order(some), 2), some),
            lambda: blocked(loader(dataset, collate, order(100), 2), 100),
        ]

    def inline(form: Any) -> Callable[[], float]:
        assembler = assembler_of(prefix, form=form)
        out = Batch(assembler.layout(ROWS))
        return lambda: per_batch((assembler.assemble(picked, out) for picked in order(1000)), 1000)

    def thread(form: Any) -> list[Callable[[], float] | None]:
        assembler = assembler_of(prefix, form=form)
        return [
            lambda: per_batch(BatchLoader(assembler, order(1000)), 1000),
            None,
            lambda: blocked(BatchLoader(assembler, order(200)), 200),
        ]

    ways: list[tuple[str, list[Callable[[], float] | None]]] = [
        ("read the packs' bytes, write the batch's bytes (memcpy)", [copying(prefix, order), None, None]),
        ("`assemble` into reused buffers", [inline("wide"), None, None]),
        ("`BatchLoader`, the thread", thread("wide")),
        ("`PackRows` in a DataLoader", through(PackRows(assembler_of(prefix)), whole_batch, 1)),
        ("narrow form into reused buffers", [inline("narrow"), None, None]),
        ("narrow form, the thread", thread("narrow")),
        ("five files, collate in numpy", through(Files(prefix), peers.collate, 1)),
    ]
    ways += [(f"{store.name}, collate in numpy", through(store.open(), peers.collate, 4)) for store in stores]
    lists = peers.Lists([Files(prefix)[i] for i in range(64)])
    ways.append(("Python lists, Megatron-Bridge's collate", lists_ways(lists)))
    return ways


def lists_ways(lists: peers.Lists) -> list[Callable[[], float] | None]:
    def order(count: int) -> Batches:
        return random_batches(len(lists), count, 0)

    return [
        lambda: per_batch(loader(lists, peers.collate_lists, order(12), 0), 12),
        lambda: per_batch(loader(lists, peers.collate_lists, order(30), 2), 30),
        lambda: blocked(loader(lists, peers.collate_lists, order(30), 2), 30),
    ]


def copying(prefix: Path, order: Callable[[int], Batches]) -> Callable[[], float]:
    """The least that anyone must do: every byte of the packs read once, every byte of the batch written once."""
    files = Files(prefix)
    shard, assembler = files.shard, assembler_of(prefix)
    out = Batch(assembler.layout(ROWS)).storage.numpy()
    made = Batch(assembler.layout(ROWS)).storage.numpy()
    made[:] = 1
    ids, mask = np.empty(CAPACITY, np.int32), np.empty(CAPACITY, np.uint8)
    tokens, loss = shard.files.tokens[:], shard.files.loss[:]

    def batch(picked: list[int]) -> None:
        for i in picked:
            start, stop = shard.token_range(i)
            np.copyto(ids[: stop - start], tokens[start:stop])
            np.copyto(mask[: stop - start], loss[start:stop])
        np.copyto(out, made)

    return lambda: per_batch(map(batch, order(1000)), 1000)


def check_equal(stores: list[Store], prefix: Path, packs: int) -> None:
    """Every side gives the same tensors."""
    picked = random_batches(packs, 1, 7)[0]
    wanted = assembler_of(prefix).assemble(picked)
    for store in [Store("five files", [], lambda: Files(prefix)), *stores]:
        (made,) = loader(store.open(), peers.collate, [picked], 0)
        for name, tensor in wanted.items():
            if not torch.equal(made[name], tensor):
                raise SystemExit(f"{store.name}: another {name}")


def warm(stores: list[Store], prefix: Path, packs: int, rounds: int) -> Iterator[str]:
    ways = warm_ways(stores, prefix, packs)
    found: list[list[list[float]]] = [[[] for _ in works] for _, works in ways]
    for _ in range(rounds):
        for row, (_, works) in zip(found, ways, strict=True):
            for cell, work in zip(row, works, strict=True):
                if work is not None:
                    cell.append(work())
    figures = [[statistics.median(cell) if cell else None for cell in row] for row in found]
    names = [name for name, _ in ways]
    base = figures[names.index("`assemble` into reused buffers")][0] or 0.0
    waits = figures[names.index("`BatchLoader`, the thread")][2] or 0.0
    yield "## From the page cache"
    yield ""
    yield (
        f"Milliseconds a batch, medians of {rounds} rounds. First two columns: a trainer that does nothing but ask for"
        f" the next batch. Third: how long `next` keeps a trainer waiting whose steps take {STEP_SECONDS * 1e3:.0f} ms,"
        " with the thread or two worker processes ahead of it. Last two: workers 0 in units of `assemble` into reused"
        " buffers, and the best of all three in units of how long `next` of our thread blocks."
    )
    yield ""
    rows = []
    for name, (zero, two, wait) in zip(names, figures, strict=True):
        best = min(x for x in (zero, two, wait) if x is not None)
        shown = [f"{x:.3f}" if x is not None else "" for x in (zero, two, wait)]
        rows.append((name, *shown, f"{(zero or 0.0) / base:.2f}", f"{best / waits:.1f}"))
    header = ("way", "workers 0", "workers 2", "blocked in `next`", "workers 0 / `assemble`", "best / thread blocked")
    yield from table(header, rows)


# ---- from disk ----


def evict(files: Iterable[Path]) -> None:
    """Drop files from the page cache; nobody may have them mapped."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def disk_bytes() -> int:
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def in_fork(work: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """In a process that has mapped nothing yet, and takes its maps with it."""
    context = get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=lambda: send.send(work()))
    child.start()
    send.close()  # so that a child that dies is an end of file
    found: tuple[float, float] = receive.recv()
    child.join()
    return found


Cold = tuple[str, list[Path], Callable[[Batches], Iterable[Any]]]


def cold_ways(stores: list[Store], prefix: Path) -> list[Cold]:
    """A row of the table each: what is evicted, and how it is read again."""
    files = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".loss.bin", ".idx", ".seq.bin", ".seq.idx")]

    def thread(ahead: int, random_access: bool) -> Callable[[Batches], Iterable[Any]]:
        return lambda order: BatchLoader(assembler_of(prefix, random_access=random_access), order, ahead=ahead)

    def plain(order: Batches) -> Iterable[Any]:
        assembler = assembler_of(prefix)
        out = Batch(assembler.layout(ROWS))
        return (assembler.assemble(picked, out) for picked in order)

    def collated(opened: Callable[[], Dataset[Any]]) -> Callable[[Batches], Iterable[Any]]:
        return lambda order: loader(opened(), peers.collate, order, 0)

    return [
        ("`assemble`, a plain map", files, plain),
        ("`BatchLoader`, 4 batches ahead", files, thread(4, False)),
        ("`BatchLoader`, 4 ahead, `random_access`", files, thread(4, True)),
        ("`BatchLoader`, 16 ahead, `random_access`", files, thread(16, True)),
        ("five files, collate in numpy", files, collated(lambda: Files(prefix))),
        *((f"{store.name}, collate in numpy", store.files, collated(store.open)) for store in stores),
    ]


def cold(stores: list[Store], prefix: Path, packs: int, rounds: int) -> Iterator[str]:
    ways, seeds = cold_ways(stores, prefix), iter(range(1_000_000, 2_000_000))
    found: list[list[tuple[float, float, float]]] = [[] for _ in ways]
    for _ in range(rounds):
        for cell, (_, files, batches) in zip(found, ways, strict=True):
            # New batches each time: what is below the page cache must not remember them either.
            cell.append(
                (
                    *_from_disk(per_batch, files, batches, packs, next(seeds)),
                    _from_disk(blocked, files, batches, packs, next(seeds))[0],
                )
            )
    figures = [[statistics.median(column) for column in zip(*cell, strict=True)] for cell in found]
    yield "## From disk"
    yield ""
    yield (
        f"Milliseconds a batch with the files dropped from the page cache before each run of {COLD_BATCHES} random"
        f" batches, medians of {rounds}; workers 0. A batch holds {ROWS * 3900 * 5 / 1e6:.2f} MB of packs. The last two"
        f" columns are for a trainer whose steps take {STEP_SECONDS * 1e3:.0f} ms."
    )
    yield ""
    base, waits = figures[0][0], figures[0][2]
    rows = [
        (name, f"{t:.2f}", f"{base / t:.1f}", f"{nbytes / 1e6:.2f}", f"{wait:.2f}", f"{waits / wait:.1f}")
        for (name, _, _), (t, nbytes, wait) in zip(ways, figures, strict=True)
    ]
    header = ("way", "ms", "rate, plain map = 1", "MB read from disk", "blocked in `next`", "plain map / this")
    yield from table(header, rows)


def _from_disk(
    measure: Callable[[Iterable[Any], int], float],
    files: list[Path],
    batches: Callable[[Batches], Iterable[Any]],
    packs: int,
    seed: int,
) -> tuple[float, float]:
    """Milliseconds and bytes read a batch."""

    def work() -> tuple[float, float]:
        before = disk_bytes()
        took = measure(batches(random_batches(packs, COLD_BATCHES, seed)), COLD_BATCHES)
        return took, (disk_bytes() - before) / (COLD_BATCHES + WARM_UP)

    evict(files)
    return in_fork(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--packs", type=int, default=20_000, help="packs in every store")
    parser.add_argument("--rounds", type=int, default=3, help="runs of which the median is taken")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix = folder / "ours"
        write_shard(prefix, options.packs)
        stores, missing = [], []
        for make in (peers.arrow, peers.mds):
            try:
                stores.append(Store(*make(folder, Files(prefix))))
            except ImportError as error:
                missing.append(f"{make.__name__} is left out: {error}.")
        lines = [
            "# Batches beside other stores and collates",
            "",
            f"{machine()}; torch {torch.__version__}. {options.packs:,} packs, capacity {CAPACITY}, batches of {ROWS}"
            f" random packs: {ROWS * 3900:,} tokens of {SEQUENCES * ROWS} sequences.",
            *missing,
            "",
        ]
        # Cold first: this process must not have mapped what is to be evicted.
        chilled = list(cold(stores, prefix, options.packs, options.rounds))
        check_equal(stores, prefix, options.packs)
        lines += [*warm(stores, prefix, options.packs, options.rounds), *chilled]
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
