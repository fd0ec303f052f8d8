"""Shuffled batches with images, compared with other stores of the same packs: ``python tools/bench/media_training.py``.

Every way hands over the batch that Megatron takes and its images, in one of three forms: encoded files, decoded
pixels, or the tensors of an image processor. Decoding and the processor are the same code in all ways, except that
datasets decodes with its own ``Image`` feature. All ways but webdataset, which chooses its own order, must give the
same batch before they are timed. Ways take turns, and every second round goes through them from the last to the first.

The trainer of the waits sleeps during its steps, so that the processor is free for what prepares batches. A trainer
that keeps the processor or Python busy waits longer.
"""

from __future__ import annotations

import gc
import io
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import media_training_peers as peers
import numpy as np
import torch
from batches import in_fork
from batches_peers import WIDTH
from measure import read_from_disk, require_cold
from media_training_peers import Stage, Store
from PIL import Image
from report import Bench, not_run, run_bench
from torch.utils.data import DataLoader, Dataset, IterableDataset

from megatron_sft_idx.layout.media_layout import MediaItem
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import ReadOptions
from megatron_sft_idx.training.batch import BatchAssembler, whole_batch
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.media import MediaBatch, MediaInputs, MediaStep, keep_items
from megatron_sft_idx.training.sources import StoredPacks

sys.path.append(str(Path(__file__).parents[1]))  # of medium.py
from media import write_processor
from medium import drop_cache

CAPACITY, ROWS, IMAGES, POSITIONS = 4096, 8, 3, 576
PICTURES = 300  # different ones; every file has a comment too, so that no two files are equal
WARM_UP, IN_FLIGHT = 2, 4  # batches before the clock starts, and batches that are never taken
STEP = 1.5  # a step of the trainer, in units of what one thread takes for a batch
THREAD, INLINE, OWN_LOADER = "ours, `BatchLoader`, the thread", "ours, no thread", "ours in a DataLoader"
Order = list[list[int]]


# ---- the packs ----


def pictures(rng: np.random.Generator) -> Iterator[bytes]:
    """Yield JPEG files of 640 x 480 and 480 x 640 pixels, with the file size of photographs."""
    grain = rng.normal(0, 9, (1024, 1024, 1)).astype(np.float32)
    for number in range(PICTURES):
        height, width = (640, 480) if number % 3 == 2 else (480, 640)
        coarse = Image.fromarray(rng.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
        top, left = rng.integers(0, 384, 2)
        noise = rng.uniform(0.3, 1.5) * grain[top : top + height, left : left + width]
        stream = io.BytesIO()
        pixels = (smooth + noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(stream, "JPEG", quality=int(rng.integers(80, 93)))
        yield stream.getvalue()


def write_packs(prefix: Path, packs: int, image_id: int) -> None:
    """Write packs of conversations with one image each, expanded as by LLaVA's processor."""
    rng = np.random.default_rng(0)
    pool, number = list(pictures(rng)), 0
    with ShardWriter(prefix, capacity=CAPACITY, pad_id=0, durable=False, media=True) as writer:
        for _ in range(packs):
            lengths = rng.integers(1000, CAPACITY // IMAGES, IMAGES)
            starts = np.cumsum(lengths) - lengths
            ids, mask = rng.integers(1, image_id, lengths.sum(), np.int32), np.zeros(lengths.sum(), np.uint8)
            items = []
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                ids[start + 4 : start + 4 + POSITIONS] = image_id
                mask[start + POSITIONS + 100 : start + length - 1] = 1
                comment = number.to_bytes(8, "big")
                file = pool[number % PICTURES]
                # The first two bytes of a JPEG file are a marker; a comment may follow.
                file = file[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + file[2:]
                items.append(MediaItem("image", start + 4, POSITIONS, file))
                number += 1
            writer.add_pack(ids, mask, starts, media=items)


# ---- the ways ----


@dataclass(frozen=True)
class Finished:
    """A media step that does with a batch's files what every other way does with them."""

    finish: peers.Finish

    def __call__(self, batch: MediaBatch) -> dict[str, Any]:
        """Return the tensors to add to the batch."""
        return self.finish([item.data for item in batch.items])


def steps(stage: Stage, folder: Path) -> tuple[MediaStep, peers.Finish]:
    """Return our media step for a form of images, and the function that all other ways call."""
    if stage == "files":
        return keep_items, peers.Files()
    if stage == "pixels":
        return Finished(peers.Pixels()), peers.Pixels()
    from transformers import LlavaConfig

    place = folder / "processor"
    return MediaInputs(place, LlavaConfig()), peers.Tensors(place)


def assembler_of(prefix: Path, step: MediaStep, **options: Any) -> BatchAssembler:
    shards = ShardSet([str(prefix)], **options)
    return BatchAssembler(StoredPacks(shards), CAPACITY, width=WIDTH, media=step)


def loader(dataset: Dataset[Any], collate: Callable[[Any], Any], order: Order, workers: int) -> Iterable[Any]:
    """Return a DataLoader of torch. An iterable data set chooses its own order."""
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    chosen: dict[str, Any] = {"batch_size": ROWS} if isinstance(dataset, IterableDataset) else {"batch_sampler": order}
    made: DataLoader[Any] = DataLoader(dataset, collate_fn=collate, **chosen, **options)
    return made


class Way(NamedTuple):
    """Functions that make batches of an order, without and with two worker processes; None if impossible."""

    name: str
    alone: Callable[[Order], Iterable[Any]] | None
    workers: Callable[[Order], Iterable[Any]] | None


def ways_of(stage: Stage, folder: Path, stores: list[Store]) -> list[Way]:
    """Return the ways, one per row of the table."""
    step, finish = steps(stage, folder)
    prefix, collate = folder / "ours", peers.Collate(finish)
    # A pool of threads does not survive the fork of a DataLoader, so each way has its own step.
    alone, threaded, forked = (assembler_of(prefix, step) for _ in range(3))

    def through(store: Store) -> Way:
        dataset = store.open(stage)
        return Way(
            store.name,
            lambda order: loader(dataset, collate, order, 0),
            lambda order: loader(dataset, collate, order, 2),
        )

    return [
        Way(INLINE, lambda order: map(alone.assemble, order), None),
        Way(THREAD, lambda order: BatchLoader(threaded, order), None),
        Way(OWN_LOADER, None, lambda order: loader(forked, whole_batch, order, 2)),
        *map(through, stores),
    ]


def random_order(packs: int, count: int, rng: np.random.Generator) -> Order:
    picked: Order = rng.choice(packs, (count, ROWS)).tolist()
    return picked


def check_equal(stage: Stage, ways: list[Way], packs: int) -> None:
    """Check that every way returns the same tensors and images for the same packs."""
    order = random_order(packs, 1, np.random.default_rng(7))
    wanted: dict[str, Any] | None = None
    for way in ways:
        if way.name.startswith("webdataset"):  # in its own order
            continue
        for make in filter(None, (way.alone, way.workers)):
            batch = dict(next(iter(make(order))))
            if "media" in batch:
                batch["images"] = [item.data for item in batch.pop("media")]
            if "images" in batch:
                batch["images"] = [bytes(np.asarray(image).data) for image in batch["images"]]
            if wanted is None:
                wanted = batch
            for name, value in wanted.items():
                same = batch[name] == value if name == "images" else torch.equal(batch[name], value)
                if not same:
                    raise SystemExit(f"{stage}, {way.name}: another {name}")


# ---- timing ----


def per_batch(batches: Iterable[Any], count: int) -> float:
    """Milliseconds per batch for a trainer that does nothing else."""
    taken = iter(batches)
    for _ in range(WARM_UP):
        next(taken)
    start = time.perf_counter()
    for _ in range(count):
        next(taken)
    return (time.perf_counter() - start) / count * 1e3


def waits(batches: Iterable[Any], count: int, step_ms: float) -> list[float]:
    """Return the milliseconds that a trainer with longer steps waits for each batch."""
    taken, found = iter(batches), []
    for number in range(count + WARM_UP):
        start = time.perf_counter()
        next(taken)
        if number >= WARM_UP:
            found.append((time.perf_counter() - start) * 1e3)
        time.sleep(step_ms / 1e3)
    return found


class Found(NamedTuple):
    """One way with or without workers: milliseconds per batch of each round, and the waits of each round."""

    took: list[float]
    waited: list[list[float]]


def measured(
    ways: list[Way], packs: int, rounds: int, count: int, step_ms: float, seed: int
) -> dict[tuple[str, int], Found]:
    """Measure all ways. Return results by name of the way and number of workers."""
    rng = np.random.default_rng(seed)
    made = [
        (way.name, workers, make)
        for way in ways
        for workers, make in ((0, way.alone), (2, way.workers))
        if make is not None
    ]
    found = {(name, workers): Found([], []) for name, workers, _ in made}
    for number in range(rounds):
        for name, workers, make in made if number % 2 == 0 else reversed(made):
            timed, waited = (random_order(packs, count + WARM_UP + IN_FLIGHT, rng) for _ in range(2))
            found[name, workers].took.append(per_batch(make(timed), count))
            if name != INLINE:
                found[name, workers].waited.append(waits(make(waited), count, step_ms))
    return found


def percentile(values: Iterable[list[float]], percent: float) -> float:
    return float(np.percentile(np.concatenate(list(values)), percent))


def report_stage(
    bench: Bench, stage: Stage, folder: Path, stores: list[Store], options: Namespace, count: int, rounds: int
) -> None:
    ways = ways_of(stage, folder, stores)
    check_equal(stage, ways, options.packs)
    one_thread = assembler_of(folder / "ours", Finished(steps(stage, folder)[1]))
    order = random_order(options.packs, WARM_UP + 5, np.random.default_rng(5))
    step_ms = max(STEP * min(per_batch(map(one_thread.assemble, order), 5) for _ in range(2)), 4.0)
    found = measured(ways, options.packs, rounds, count, step_ms, seed=len(stage))
    titles = {"files": "Encoded files", "pixels": "Decoded images", "tensors": "Tensors of the processor"}
    what = {
        "files": "the bytes of each file",
        "pixels": "each image in RGB, uint8 [height, width, 3]",
        "tensors": "`pixel_values` float32 [images, 3, 336, 336] by LLaVA's image processor",
    }
    bench.section(titles[stage])
    bench.say(
        f"A batch has its tokens and {what[stage]}. Milliseconds per batch are medians of {rounds} rounds of {count}"
        f" batches, for a trainer that only takes batches. Waits in `next` are those of a trainer whose steps take"
        f" {step_ms:.0f} ms: {STEP} times what one thread takes for a batch here, at least 4."
        + (" `MediaInputs` decodes in two threads unless it runs in a worker process." if stage == "tensors" else "")
    )
    rows = []
    for way in ways:
        row = [way.name]
        for workers in (0, 2):
            one = found.get((way.name, workers), Found([], []))
            row.append(f"{statistics.median(one.took):,.1f}" if one.took else "")
            row += [f"{percentile(one.waited, q):,.2f}" if one.waited else "" for q in (50, 95)]
        rows.append(row)
    header = ["way"]
    for which in ("no workers", "two workers"):
        header += [f"ms, {which}", f"wait, {which}, median", "95% below"]
    bench.table(header, rows)
    headlines(bench, stage, stores, found)


def headlines(bench: Bench, stage: Stage, stores: list[Store], found: dict[tuple[str, int], Found]) -> None:
    """Report the time per batch and the wait for one, for each side the better of no workers and two."""
    images = {"files": "encoded images", "pixels": "decoded images", "tensors": "`pixel_values`"}[stage]

    def best(names: Iterable[str], values: Callable[[Found], list[float]]) -> list[float]:
        sides = [values(found[key]) for key in found if key[0] in names]
        return min(sides, key=statistics.median)

    def times(one: Found) -> list[float]:
        return one.took

    def waited(one: Found) -> list[float]:
        return [statistics.median(each) for each in one.waited]

    for store in stores:
        peer, key = f"{store.name}; best of no and two workers", f"{stage}-{store.name.split()[0].split('-')[-1]}"
        ours, theirs = best((THREAD, OWN_LOADER), times), best((store.name,), times)
        what, short = f"a shuffled batch of {ROWS} packs with {images}", key in ("pixels-datasets", "pixels-wids")
        bench.headline(key, what, ours, "ms", peer=peer, theirs=theirs, short=short)
        ours, theirs = waited(found[THREAD, 0]), best((store.name,), waited)
        bench.headline(f"{key}-next", "the same: wait in `next`", ours, "ms", peer=peer, theirs=theirs)


# ---- from disk ----


def report_cold(bench: Bench, folder: Path, stores: list[Store], options: Namespace, rounds: int) -> None:
    """Measure encoded files with an empty page cache: the cost of the disk and of the order of reading."""
    gc.collect()  # maps of files keep their pages in the page cache
    rng, count, step_ms = np.random.default_rng(11), options.cold_batches, 20.0
    step, finish = steps("files", folder)
    prefix, collate = folder / "ours", peers.Collate(finish)
    files = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".loss.bin", ".media.data")]

    def ours() -> Callable[[Order], Iterable[Any]]:
        assembler = assembler_of(prefix, step, backend=ReadOptions(advice="random"))
        return lambda order: BatchLoader(assembler, order)

    def through(store: Store, workers: int) -> Callable[[Order], Iterable[Any]]:
        dataset = store.open("files")
        return lambda order: loader(dataset, collate, order, workers)

    made: list[tuple[str, list[Path], Callable[[], Callable[[Order], Iterable[Any]]]]] = [(THREAD, files, ours)]
    made += [
        (f"{store.name}, {'two' if workers else 'no'} workers", store.files, partial(through, store, workers))
        for store in stores
        if not store.name.startswith("webdataset")
        for workers in (0, 2)
    ]

    def once(
        place: list[Path],
        opened: Callable[[], Callable[[Order], Iterable[Any]]],
        measure: Callable[[Iterable[Any]], float],
    ) -> tuple[float, float]:
        # New batches each time, because caches below the page cache must not have them either.
        order = random_order(options.packs, count + WARM_UP, rng)

        def work() -> tuple[float, float]:
            make = opened()
            drop_cache(place)  # after it is opened: making the index of a tar file reads all of it
            require_cold(place)
            before = read_from_disk()
            return measure(make(order)), (read_from_disk() - before) / (count + WARM_UP)

        return in_fork(work)

    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name, _, _ in made}
    for number in range(rounds):
        for name, place, opened in made if number % 2 == 0 else reversed(made):
            took, nbytes = once(place, opened, lambda batches: per_batch(batches, count))
            wait, _ = once(place, opened, lambda batches: statistics.median(waits(batches, count, step_ms)))
            found[name].append((took, nbytes, wait))
    bench.section("From disk")
    bench.say(
        f"Encoded files again, with all data files dropped from the page cache before each run of {count} batches;"
        f" medians of {rounds} rounds. Waits are those of a trainer whose steps take {step_ms:.0f} ms. What worker"
        " processes read is not counted."
    )
    figures = {name: [statistics.median(column) for column in zip(*each, strict=True)] for name, each in found.items()}
    rows = []
    for name, (took, nbytes, wait) in figures.items():
        read = "" if "two workers" in name else f"{nbytes / 1e6:.1f}"
        rows.append((name, f"{took:.1f}", read, f"{wait:.2f}"))
    bench.table(("way", "ms", "MB read from disk per batch", "wait, median"), rows)


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    from transformers import AutoTokenizer

    write_processor(folder / "processor")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "processor")
    prefix = folder / "ours"
    write_packs(prefix, options.packs, tokenizer.convert_tokens_to_ids("<image>"))
    shard, stores = Shard(prefix), []
    for write in (peers.arrow, peers.mds, peers.tars):
        try:
            made = write(folder, shard)
        except ImportError as error:
            not_run(f"{error.name} is not installed")
        stores += made if isinstance(made, list) else [made]
    assert shard.media is not None
    nbytes, items = shard.media.header.data_nbytes, shard.media.header.num_items
    del shard  # and its maps, because mapped pages stay in the page cache
    bench.say(
        f"{options.packs:,} packs of up to {CAPACITY} tokens, with {items:,} JPEG files of 640 x 480 pixels,"
        f" {nbytes / items / 1000:.0f} kB each on average; batches of {ROWS} random packs have {ROWS * IMAGES} images."
        " webdataset reads tar files one after the other and shuffles in a buffer of"
        f" {peers.SHUFFLE_BUFFER} packs; all others read packs at random. Other programs were running on this machine."
    )
    rounds, batches = options.rounds, options.batches
    # The processor takes most of the time of these batches, so fewer ways are enough.
    some = [store for store in stores if store.name.startswith(("datasets", "wids"))]
    report_stage(bench, "files", folder, stores, options, count=20, rounds=rounds)
    report_stage(bench, "pixels", folder, stores, options, count=batches, rounds=rounds)
    report_stage(bench, "tensors", folder, some, options, count=batches // 2, rounds=max(rounds - 1, 1))
    report_cold(bench, folder, stores, options, max(rounds - 1, 1))


if __name__ == "__main__":
    sizes = {
        "packs": (800, 3000, f"packs, each with {IMAGES} images"),
        "rounds": (3, 7, "rounds of every way"),
        "batches": (6, 20, "decoded batches of a round"),
        "cold_batches": (20, 40, "batches of a round from disk"),
    }
    run_bench("Images in batches", ("datasets", "mosaicml-streaming", "wids", "webdataset", "pillow"), report, sizes)
