"""Conversations with images to packs, and a read of a single pack: ``python tools/bench/media.py``.

Half as many JPEG files as conversations are generated; two conversations refer to each file by path. The processor is
LLaVA's, built from its configuration, with 576 positions per image. No other tool packs images on disk, so the job is
compared with the cost of packing at run time in every epoch: transformers' processor on the same rows. One pack with
its images is read with a cold page cache and compared with MDS and with an index of tar files.
"""

from __future__ import annotations

import gc
import io
import json
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import media_training_peers as peers
import numpy as np
from measure import in_own_process, require_cold
from PIL import Image
from report import MIB, Bench, cells, run_bench

from megatron_sft_idx.shard import Shard

sys.path.append(str(Path(__file__).parents[1]))  # of medium.py
from medium import drop_cache

DEMO_TOKENIZER = Path(__file__).parents[1] / "demo/tokenizer"
CAPACITY, SIDE, PROCESSES = 4096, 256, 2
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
NAMES = {"ours": "`Shard`", "mds": "mosaicml-streaming (MDS), `LocalDataset`", "tar": "wids, an index of tar files"}


# ---- the rows ----


def write_processor(folder: Path) -> None:
    """Write LLaVA's processor, without a download."""
    from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor

    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    kind: Any = LlavaProcessor
    images: Any = CLIPImageProcessor
    kind(
        images(**size),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def write_images(folder: Path, count: int) -> int:
    """Write JPEG files with structure like photographs, and return their bytes."""
    folder.mkdir()
    rng, nbytes = np.random.default_rng(1), 0
    for number in range(count):
        coarse = rng.integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
        (folder / f"{number}.jpg").write_bytes(stream.getvalue())
        nbytes += len(stream.getvalue())
    return nbytes


def write_rows(path: Path, count: int) -> None:
    with open(path, "w") as file:
        for number in range(count):
            question = f"What can be seen in picture {number}, and what may have happened just before it was taken?"
            answer = f"A pattern of colours, the {number}th of its kind. " * (1 + number % 7)
            messages = [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages, "images": [f"images/{number // 2}.jpg"]}) + "\n")


# ---- the job ----


def peak_of_job(folder: Path, rows: int, workers: int) -> tuple[float, int, int]:
    """Return the seconds of a run of ``preprocess``, and the peak memory of its process and of a worker, in bytes."""
    prefix = folder / f"out-{rows}-{workers}"
    given = {
        "input": folder / f"rows-{rows}.jsonl",
        "tokenizer": folder / "processor",
        "processor": folder / "processor",
        "output-prefix": prefix,
        "seq-length": CAPACITY,
        "workers": workers,
        "log-interval": 0,
    }
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    program = (
        "import resource, sys; from megatron_sft_idx.cli.main import main; code = main(sys.argv[1:]);"
        " peak = lambda who: resource.getrusage(who).ru_maxrss;"
        " print(code, peak(resource.RUSAGE_SELF), peak(resource.RUSAGE_CHILDREN))"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "preprocess", *arguments], capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - begin
    code, own, children = done.stdout.split()[-3:]
    if done.returncode or code != "0":
        raise SystemExit(done.stderr[-2000:])
    return seconds, int(own) * 1024, int(children) * 1024


def seconds_of_processor(folder: Path, rows: int) -> float:
    """Return the seconds of transformers' processor for rows, image decoding included and import excluded."""
    from transformers import AutoProcessor

    kind: Any = AutoProcessor
    processor = kind.from_pretrained(folder / "processor")
    begin = time.monotonic()
    with open(folder / f"rows-{rows}.jsonl") as file:
        for line in file:
            row = json.loads(line)
            text = processor.apply_chat_template(row["messages"], tokenize=False)
            with Image.open(folder / row["images"][0]) as image:
                processor(text=[text], images=[image.convert("RGB")])
    return time.monotonic() - begin


def report_job(bench: Bench, folder: Path, options: Namespace) -> None:
    nbytes = write_images(folder / "images", options.rows // 2)
    found = []
    sizes = [options.rows // 10, options.rows]
    for rows in sizes:
        write_rows(folder / f"rows-{rows}.jsonl", rows)
    peer = in_own_process(seconds_of_processor, folder, sizes[0]) / sizes[0]
    for rows, workers in ((sizes[0], PROCESSES), (sizes[1], PROCESSES), (sizes[0], 0)):
        seconds, own, children = peak_of_job(folder, rows, workers)
        found.append(
            (rows, workers or "none", *cells(",.1f ,.0f ,.0f ,.0f", seconds, rows / seconds, own / MIB, children / MIB))
        )
    bench.section("The job")
    bench.say(
        f"{options.rows:,} conversations, {options.rows // 2:,} JPEG files of {SIDE} x {SIDE} pixels,"
        f" {nbytes / (options.rows // 2) / 1024:.1f} KiB each; from the start of the command to its end."
    )
    bench.table(("rows", "workers", "s", "rows a second", "MiB, the job's process", "MiB, its largest worker"), found)
    bench.say(
        f"transformers' processor alone, one process, decoding and resizing the images of these rows: {1 / peer:,.0f}"
        " rows a second. It is called once for each size here, and for every row in every epoch where packs are made"
        " at run time."
    )
    prefix = folder / f"out-{sizes[1]}-{PROCESSES}"
    data = Path(f"{prefix}.media.data").stat().st_size
    rest = sum(path.stat().st_size for path in prefix.parent.glob(f"{prefix.name}.*")) - data
    items = Path(f"{prefix}.media.items").stat().st_size
    tokens = Shard(prefix).header.num_tokens
    bench.table(
        ("on disk, bytes a row", ""),
        [
            ("images, each once", f"{data / sizes[1]:,.0f}"),
            ("where they stand, and their hashes (`.media.items`)", f"{items / sizes[1]:,.1f}"),
            (
                f"tokens, masks, starts and indexes ({tokens / sizes[1]:,.0f} tokens)",
                f"{(rest - items) / sizes[1]:,.0f}",
            ),
        ],
    )
    assert data == nbytes


# ---- one pack ----


def readers(folder: Path, prefix: Path) -> dict[str, tuple[Callable[[int], int], list[Path]]]:
    """Return for every way a function that copies a pack and returns its bytes, and the data files."""
    # Another object reads the shard for the peers, because mapped pages cannot be dropped from the page cache.
    written = Shard(prefix)
    mds_store, (tar_store, _) = peers.mds(folder, written), peers.tars(folder, written)
    del written
    gc.collect()
    shard = Shard(prefix)

    def ours(number: int) -> int:
        pack = shard[number]
        arrays = [np.array(pack["input_ids"]), np.array(pack["loss_mask"]), pack["seq_boundaries"]]
        return sum(map(len, arrays)) + sum(len(bytes(item.data)) for item in pack["media"])

    def theirs(rows: Any) -> Callable[[int], int]:
        def read(number: int) -> int:
            row = rows[number]
            arrays = [np.array(values) for values in (row.ids, row.mask, row.bounds)]
            return sum(map(len, arrays)) + sum(map(len, row.images))

        return read

    data = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".loss.bin", ".media.data")]
    return {
        "ours": (ours, data),
        "mds": (theirs(mds_store.open("files")), mds_store.files),
        "tar": (theirs(tar_store.open("files")), tar_store.files),
    }


def report_pack(bench: Bench, folder: Path, options: Namespace) -> None:
    prefix = folder / f"out-{options.rows}-{PROCESSES}"
    ways, shard = readers(folder, prefix), Shard(prefix)
    numbers = np.random.default_rng(2).permutation(len(shard))[: options.rounds + 1].tolist()
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn, number in enumerate([len(shard) - 1, *numbers]):  # the first does not count
        sizes = set()
        for way, (read, files) in ways.items():
            drop_cache(files)
            require_cold(files)
            begin = time.perf_counter()
            sizes.add(read(number))
            found[way] += [(time.perf_counter() - begin) * 1e6] * (turn > 0)
        assert len(sizes) == 1, sizes
    warm: dict[str, list[float]] = {way: [] for way in ways}
    for number in numbers:
        for way, (read, _) in ways.items():
            read(number)
            begin = time.perf_counter()
            read(number)
            warm[way].append((time.perf_counter() - begin) * 1e6)
    images = statistics.mean(len(shard[number]["media"]) for number in numbers)
    bench.section("One pack with its images")
    bench.say(
        f"{len(shard):,} packs of up to {CAPACITY} tokens, {images:.1f} images each; {len(numbers)} at random, each"
        " read by every way in turn and copied out. All are open, with their indexes in memory; cold means that no data"
        " file is in the page cache."
    )
    rows = [
        (
            NAMES[way],
            *cells(",.0f ,.0f ,.0f ,.0f", statistics.median(us), min(us), max(us), statistics.median(warm[way])),
        )
        for way, us in found.items()
    ]
    bench.table(("", "µs, cold, median", "least", "most", "µs, cached"), rows)
    for way in ("mds", "tar"):
        what = "a pack with its images, nothing cached"
        bench.headline(f"pack-{way}", what, found["ours"], "µs", peer=NAMES[way], theirs=found[way], short=way == "mds")


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    write_processor(folder / "processor")
    report_job(bench, folder, options)
    report_pack(bench, folder, options)


if __name__ == "__main__":
    sizes = {
        "rows": (20_000, 20_000, "conversations, two of which show each image"),
        "rounds": (30, 100, "packs that each way reads"),
    }
    run_bench("Images in packs", ("transformers", "mosaicml-streaming", "wids", "pillow"), report, sizes)
