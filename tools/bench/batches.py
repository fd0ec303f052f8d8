"""Batches of packed rows compared with other ways to store and collate them, on this machine.

    python tools/bench/batches.py [--full]

All sides serve the same packs in the same random order. Except for the collate
of Python lists, they must give the same tensors before they are timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import batches_peers as peers
import numpy as np
import torch
from batches_peers import CAPACITY, ROWS, SEQUENCES, TOKENS, Files, fill
from measure import read_from_disk
from plot import Dot, dots
from report import Bench, cells, run_bench
from torch.utils.data import DataLoader, Dataset

from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import Advice, ReadOptions
from megatron_sft_idx.training.batch import Batch, BatchAssembler, whole_batch
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.sources import StoredPacks

sys.path.append(str(Path(__file__).parents[1]))  # of medium.py
from medium import drop_cache

WARM_UP, COLD_BATCHES, STEP_SECONDS = 10, 80, 0.004
Batches = list[list[int]]
ASSEMBLE, THREAD = "`assemble` into reused buffers", "`BatchLoader`, the thread"
COPYING = "read the packs' bytes, write the batch's bytes (memcpy)"
NUMPY, LISTS = "five files, collate in numpy", "Python lists, Megatron-Bridge's collate"
COLD = "`BatchLoader`, 16 ahead, random advice"
Cells = list[list[float]]  # of a way: the rounds of workers 0, workers 2, blocked in next()


class Store(NamedTuple):
    """One way to keep packs."""

    name: str  # in the table
    files: list[Path]  # on disk
    # Makes the dataset: ``ds[i]`` is a row, ``ds.__getitems__(list)`` several rows.
    open: Callable[[], Dataset[Any]]


def assembler_of(prefix: Path, **options: Any) -> BatchAssembler:
    return BatchAssembler(StoredPacks(ShardSet([str(prefix)])), CAPACITY, width=SEQUENCES + 2, **options)


def random_batches(packs: int, count: int, seed: int) -> Batches:
    rng = np.random.default_rng(seed)
    picked: list[list[int]] = rng.choice(packs, (count + WARM_UP, ROWS)).tolist()
    return picked


# ---- timing ----


def per_batch(batches: Iterable[Any], count: int) -> float:
    """Return milliseconds per batch for a trainer that does nothing else."""
    taken = iter(batches)
    for _ in range(WARM_UP):
        next(taken)
    start = time.perf_counter()
    for _ in range(count):
        next(taken)
    return (time.perf_counter() - start) / count * 1e3


def blocked(batches: Iterable[Any], count: int) -> float:
    """Return the mean milliseconds that a trainer with longer steps waits for the next batch."""
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


def warm_ways(stores: list[Store], prefix: Path, packs: int) -> list[tuple[str, list[Callable[[], float] | None]]]:
    """Return the ways of each table row: 0 workers, 2 workers, and time blocked in next() next to a trainer."""
    seeds = iter(range(1, 1_000_000))

    def order(count: int) -> Batches:
        return random_batches(packs, count, next(seeds))

    def through(
        dataset: Dataset[Any], collate: Callable[[Any], Any], sizes: tuple[int, int, int], of: int = packs
    ) -> list[Callable[[], float] | None]:
        alone, ahead, waiting = sizes
        return [
            lambda: per_batch(loader(dataset, collate, random_batches(of, alone, next(seeds)), 0), alone),
            lambda: per_batch(loader(dataset, collate, random_batches(of, ahead, next(seeds)), 2), ahead),
            lambda: blocked(loader(dataset, collate, random_batches(of, waiting, next(seeds)), 2), waiting),
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
        (COPYING, [copying(prefix, order), None, None]),
        (ASSEMBLE, [inline("wide"), None, None]),
        (THREAD, thread("wide")),
        ("`BatchAssembler` in a DataLoader", through(assembler_of(prefix), whole_batch, (400, 150, 100))),
        ("narrow form into reused buffers", [inline("narrow"), None, None]),
        ("narrow form, the thread", thread("narrow")),
        (NUMPY, through(Files(prefix), peers.collate, (400, 150, 100))),
    ]
    for store in stores:
        ways.append((f"{store.name}, collate in numpy", through(store.open(), peers.collate, (100, 150, 100))))
    lists = peers.Lists([Files(prefix)[i] for i in range(64)])
    ways.append((LISTS, through(lists, peers.collate_lists, (12, 30, 30), len(lists))))
    return ways


def copying(prefix: Path, order: Callable[[int], Batches]) -> Callable[[], float]:
    """The minimum work: read every byte of the packs once, and write every byte of the batch once."""
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
    picked = random_batches(packs, 1, 7)[0]
    wanted = assembler_of(prefix).assemble(picked)
    for store in [Store(NUMPY, [], lambda: Files(prefix)), *stores]:
        (made,) = loader(store.open(), peers.collate, [picked], 0)
        for name, tensor in wanted.items():
            if not torch.equal(made[name], tensor):
                raise SystemExit(f"{store.name}: another {name}")


def warm(bench: Bench, stores: list[Store], prefix: Path, packs: int, rounds: int) -> None:
    ways = warm_ways(stores, prefix, packs)
    found: dict[str, Cells] = {name: [[] for _ in works] for name, works in ways}
    for _ in range(rounds):
        for name, works in ways:
            for cell, work in zip(found[name], works, strict=True):
                if work is not None:
                    cell.append(work())
    figures = {name: [statistics.median(cell) if cell else None for cell in row] for name, row in found.items()}
    base, waits = figures[ASSEMBLE][0] or 0.0, figures[THREAD][2] or 0.0
    bench.section("From the page cache")
    bench.say(
        f"Milliseconds a batch, medians of {rounds} rounds. First two columns: a trainer that does nothing but ask for"
        f" the next batch. Third: how long `next` keeps a trainer waiting whose steps take {STEP_SECONDS * 1e3:.0f} ms,"
        " with the thread or two worker processes ahead of it. Last two: workers 0 in units of `assemble` into reused"
        " buffers, and the best of all three in units of how long `next` of our thread blocks."
    )
    rows = []
    for name, (zero, two, wait) in figures.items():
        best = min(x for x in (zero, two, wait) if x is not None)
        shown = [f"{x:.3f}" if x is not None else "" for x in (zero, two, wait)]
        rows.append((name, *shown, f"{(zero or 0.0) / base:.2f}", f"{best / waits:.1f}"))
    header = ("way", "workers 0", "workers 2", "blocked in `next`", "workers 0 / `assemble`", "best / thread blocked")
    bench.table(header, rows)
    headlines(bench, found)


def headlines(bench: Bench, found: dict[str, Cells]) -> None:
    """Report a batch without workers, and the wait in ``next`` compared with the best way of each peer."""
    size = f"{ROWS} x {CAPACITY:,}, shuffled"
    peers = {name: key for key in ("numpy", "arrow", "mds", "lists") for name in found if key_of(name) == key}
    for name, key in peers.items():
        what, ours = f"a batch of {size}, no workers", found[ASSEMBLE][0]
        bench.headline(f"batch-{key}", what, ours, "ms", peer=name, theirs=found[name][0], short=key != "numpy")
    for name, key in peers.items():
        best = min((cell for cell in found[name] if cell), key=statistics.median)
        what, ours = "the same: time a trainer waits in `next`", found[THREAD][2]
        bench.headline(f"next-{key}", what, ours, "ms", peer=f"{name}; best of three", theirs=best)
    others = {COPYING, *peers}
    marks = [Dot(name, cells[0], name not in others) for name, cells in found.items()]
    bench.plot("batches", dots(f"A batch of {size}, no workers", "milliseconds", marks))


def key_of(name: str) -> str:
    """Return the short name of a peer; empty for ours."""
    words = {NUMPY: "numpy", LISTS: "lists"}
    return words.get(name) or next((key for key, word in (("arrow", "(Arrow)"), ("mds", "(MDS)")) if word in name), "")


# ---- from disk ----


def in_fork(work: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Run in a fork that has mapped nothing yet, so that its maps end with it."""
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
    """Return the rows of the table: files to evict, and how to read them again."""
    files = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".loss.bin", ".idx", ".seq.bin", ".seq.idx")]

    def thread(ahead: int, advice: Advice) -> Callable[[Batches], Iterable[Any]]:
        def opened(order: Batches) -> Iterable[Any]:
            shards = ShardSet([str(prefix)], backend=ReadOptions(advice=advice))
            assembler = BatchAssembler(StoredPacks(shards), CAPACITY, width=SEQUENCES + 2)
            return BatchLoader(assembler, order, ahead=ahead)

        return opened

    def plain(order: Batches) -> Iterable[Any]:
        assembler = assembler_of(prefix)
        out = Batch(assembler.layout(ROWS))
        return (assembler.assemble(picked, out) for picked in order)

    def collated(opened: Callable[[], Dataset[Any]]) -> Callable[[Batches], Iterable[Any]]:
        return lambda order: loader(opened(), peers.collate, order, 0)

    return [
        ("`assemble`, a plain map", files, plain),
        ("`BatchLoader`, 4 batches ahead", files, thread(4, "normal")),
        ("`BatchLoader`, 4 ahead, random advice", files, thread(4, "random")),
        (COLD, files, thread(16, "random")),
        (NUMPY, files, collated(lambda: Files(prefix))),
        *((f"{store.name}, collate in numpy", store.files, collated(store.open)) for store in stores),
    ]


def cold(bench: Bench, stores: list[Store], prefix: Path, packs: int, rounds: int) -> None:
    ways, seeds = cold_ways(stores, prefix), iter(range(1_000_000, 2_000_000))

    def from_disk(measure: Callable[[Iterable[Any], int], float], way: Cold) -> tuple[float, float]:
        """Return milliseconds and bytes read per batch."""
        _, files, batches = way
        # New batches each time, because caches below the page cache must not have them either.
        order = random_batches(packs, COLD_BATCHES, next(seeds))

        def work() -> tuple[float, float]:
            before = read_from_disk()
            took = measure(batches(order), COLD_BATCHES)
            return took, (read_from_disk() - before) / (COLD_BATCHES + WARM_UP)

        drop_cache(files)
        return in_fork(work)

    found: list[list[tuple[float, float, float]]] = [[] for _ in ways]
    for _ in range(rounds):
        for cell, way in zip(found, ways, strict=True):
            cell.append((*from_disk(per_batch, way), from_disk(blocked, way)[0]))
    figures = [[statistics.median(column) for column in zip(*cell, strict=True)] for cell in found]
    bench.section("From disk")
    bench.say(
        f"Milliseconds a batch with the files dropped from the page cache before each run of {COLD_BATCHES} random"
        f" batches, medians of {rounds}; workers 0. A batch holds {ROWS * TOKENS * 5 / 1e6:.2f} MB of packs. The last"
        f" two columns are for a trainer whose steps take {STEP_SECONDS * 1e3:.0f} ms."
    )
    base, waits = figures[0][0], figures[0][2]
    rows = [
        (name, *cells(".2f .1f .2f .2f .1f", t, base / t, nbytes / 1e6, wait, waits / wait))
        for (name, _, _), (t, nbytes, wait) in zip(ways, figures, strict=True)
    ]
    header = ("way", "ms", "rate, plain map = 1", "MB read from disk", "blocked in `next`", "plain map / this")
    bench.table(header, rows)
    times = {name: [ms for ms, _, _ in cell] for (name, _, _), cell in zip(ways, found, strict=True)}
    thread = times[COLD]
    for name in [name for name in times if key_of(name) in ("arrow", "mds")]:
        what = f"a batch of {ROWS} x {CAPACITY:,} from disk, nothing cached"
        bench.headline(f"cold-{key_of(name)}", what, thread, "ms", peer=name, theirs=times[name])
    marks = [Dot(name, cell, not key_of(name)) for name, cell in times.items()]
    bench.plot("batches_cold", dots("A shuffled batch from disk, nothing cached", "milliseconds", marks))


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    bench.say(
        f"{options.packs:,} packs, capacity {CAPACITY}, batches of {ROWS} random packs: {ROWS * TOKENS:,} tokens of"
        f" {SEQUENCES * ROWS} sequences."
    )
    prefix, stores = folder / "ours", []
    with ShardWriter(prefix, capacity=CAPACITY, pad_id=0, durable=False) as writer:
        fill(writer, np.random.default_rng(0), options.packs)
    for make in (peers.arrow, peers.mds):
        try:
            stores.append(Store(*make(folder, Files(prefix))))
        except ImportError as error:
            bench.say(f"{make.__name__} is left out: {error}.")
    # Cold reads come first, because this process must not have mapped files to evict.
    cold(bench, stores, prefix, options.packs, options.rounds)
    check_equal(stores, prefix, options.packs)
    warm(bench, stores, prefix, options.packs, options.rounds)


if __name__ == "__main__":
    versions = ("torch", "datasets", "mosaicml-streaming", "numpy")
    sizes = {"packs": (10_000, 20_000, "packs in every store")}
    run_bench("Batches beside other stores and collates", versions, report, sizes, rounds=(3, 5))
