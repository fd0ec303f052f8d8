"""Pretraining data in a blend: what batches of chats cost next to it, and batches of both, against Megatron's own.

python tools/bench/pretraining.py [--full]
"""

from __future__ import annotations

import logging
import statistics
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import per_batch
from batches_peers import CAPACITY, ROWS, fill
from measure import in_turns
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from numpy.typing import NDArray
from report import Bench, run_bench
from torch.utils.data import default_collate

from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.training.batch import Batch
from megatron_sft_idx.training.rows import rows_of
from megatron_sft_idx.training.sft_dataset import PackedSFTDataset, PackedSFTDatasetConfig

BATCHES = 300
CHATS, TEXT = 1, 0  # members of the blend
ALONE, BESIDE, OF_TEXT, BOTH = "chats, blend of chats", "chats, blend of both", "pretraining rows", "half of each"


def write_text(prefix: Path, tokens: int) -> None:
    """Write documents of about a thousand tokens."""
    rng, builder, written = np.random.default_rng(2), IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32), 0
    while written < tokens:
        document = rng.integers(1, 150_000, int(rng.exponential(1000)) + 1, np.int32)
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
        written += len(document)
    builder.finalize(f"{prefix}.idx")


def blend_of(folder: Path, *paths: str) -> Any:
    """Return the training data of one epoch of each path."""
    config = PackedSFTDatasetConfig(
        random_seed=1, sequence_length=CAPACITY, blend=(list(paths), None), split="1,0,0",
        path_to_cache=str(folder / "cache"),
    )  # fmt: skip
    builder = BlendedMegatronDatasetBuilder(PackedSFTDataset, [None] * 3, lambda: True, config)
    return builder.build()[0]


def samples_of(blend: Any, members: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """Return batches of random samples, with equally many of each member."""
    rng = np.random.default_rng(seed)
    count = (BATCHES + 50) * ROWS // len(members)
    each = [rng.choice(np.flatnonzero(blend.dataset_index == member), count) for member in members]
    return np.stack(each, 1).reshape(-1, ROWS)


def ours(blend: Any, members: tuple[int, ...]) -> Callable[[int], float]:
    """Return a function that measures milliseconds per batch, in reused buffers."""
    rows = rows_of(blend)
    out = Batch(rows.assembler.layout(ROWS))

    def run(seed: int) -> float:
        batches = samples_of(blend, members, seed)
        return per_batch((rows.assembler.assemble(rows.packs(batch), out) for batch in batches), BATCHES)

    return run


def theirs(blend: Any, members: tuple[int, ...]) -> Callable[[int], float]:
    """Return the same for Megatron's blend, read row by row like its loaders, with torch's collate function."""

    def run(seed: int) -> float:
        batches = samples_of(blend, members, seed)
        return per_batch((default_collate([blend[int(i)] for i in batch]) for batch in batches), BATCHES)

    return run


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    logging.disable(logging.WARNING)
    for name in ("chats", "others"):
        with ShardWriter(folder / name, capacity=CAPACITY, pad_id=0, durable=False) as writer:
            fill(writer, np.random.default_rng(0), options.packs // 2)
    write_text(folder / "text", options.packs * CAPACITY)
    both = blend_of(folder, f"pretrain:{folder}/text", str(folder / "chats"))
    chats = blend_of(folder, str(folder / "others"), str(folder / "chats"))
    members: dict[str, tuple[int, ...]] = {BESIDE: (CHATS,), OF_TEXT: (TEXT,), BOTH: (TEXT, CHATS)}
    runs = {ALONE: ours(chats, (0, 1)), **{way: ours(both, chosen) for way, chosen in members.items()}}
    peers = {f"{way}, row by row": theirs(both, chosen) for way, chosen in members.items()}
    found = in_turns({**runs, **peers}, options.rounds)
    bench.say(
        f"{options.packs:,} packs and as many rows of pretraining data, {CAPACITY:,} tokens each, from the page cache;"
        f' batches of {ROWS} random samples, medians of {options.rounds} rounds. "Row by row" is Megatron\'s'
        " `BlendedDataset` and torch's collate function, which its own loaders go through."
    )
    rows = []
    for way in runs:
        took = statistics.median(found[way])
        beside = found.get(f"{way}, row by row")
        rate = ROWS * CAPACITY / took / 1e3
        rows.append((way, f"{took:.3f}", f"{rate:.0f}", f"{statistics.median(beside):.3f}" if beside else ""))
    bench.table(("batch", "ms", "million tokens/s", "row by row, ms"), rows)
    bench.headline("chats", "a batch of chats from a blend with pretraining data", found[BESIDE], "ms",
                   peer="a blend of chats alone", theirs=found[ALONE])  # fmt: skip
    for key, way, words in (("text", OF_TEXT, "pretraining rows"), ("both", BOTH, "half chats, half pretraining rows")):
        bench.headline(key, f"a batch of {words}", found[way], "ms", peer="Megatron's blend, row by row",
                       theirs=found[f"{way}, row by row"])  # fmt: skip


if __name__ == "__main__":
    sizes = {"packs": (4_000, 20_000, "packs of chats, and as many rows of pretraining data")}
    run_bench("Pretraining data in a blend", ("megatron-core", "torch", "numpy"), report, sizes, rounds=(5, 9))
