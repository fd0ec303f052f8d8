"""What columns cost: a batch with none, one and four of them beside its mask, and their bytes on disk.

python tools/bench/columns.py [--full]
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
from batches import per_batch, random_batches
from batches_peers import CAPACITY, ROWS, SEQUENCES, fill
from report import Bench, Size, run_bench

from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard, ShardWriter, write_column
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import Batch, BatchAssembler
from megatron_sft_idx.training.sources import StoredPacks

BATCHES = 1000
SOURCE, WIDE = "source", "topk_logp"
TOKENS = [f"logp_{number}" for number in range(4)]
NONE, ONE, FOUR = "none", "one float32 a token", "four float32 a token"
# A row of the table each: the columns of a batch.
WAYS: dict[str, list[str]] = {
    NONE: [],
    "two uint32 a sequence": [SOURCE],
    ONE: TOKENS[:1],
    FOUR: TOKENS,
    "eight float32 a token": [WIDE],
}


def attach(prefix: Path) -> None:
    """Columns of each kind, written after the shard as a user would."""
    header, rng = Shard(prefix).header, np.random.default_rng(1)
    for name in TOKENS:
        write_column(prefix, name, rng.random(header.num_tokens, np.float32), per="token")
    write_column(prefix, WIDE, rng.random((header.num_tokens, 8), np.float32), per="token")
    rows = np.arange(2 * header.num_sequences, dtype=np.uint32).reshape(-1, 2)
    write_column(prefix, SOURCE, rows, per="sequence", metadata={"files": [{"name": "chats.jsonl"}]})


def assembling(prefix: Path, columns: list[str], packs: int) -> Callable[[int], float]:
    """Milliseconds a batch, into reused buffers, in an order that a seed gives."""
    source = StoredPacks(ShardSet([str(prefix)], columns=columns))
    assembler = BatchAssembler(source, CAPACITY, width=SEQUENCES + 2, columns=columns)
    out = Batch(assembler.layout(ROWS))

    def run(seed: int) -> float:
        return per_batch((assembler.assemble(picked, out) for picked in random_batches(packs, BATCHES, seed)), BATCHES)

    return run


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    prefix, packs = folder / "shard", options.packs
    # Float masks: then a column of tokens is read and written in as many bytes as the mask is.
    with ShardWriter(prefix, capacity=CAPACITY, pad_id=0, durable=False, mask_dtype=np.float32) as writer:
        fill(writer, np.random.default_rng(0), packs)
    attach(prefix)
    runs = {way: assembling(prefix, columns, packs) for way, columns in WAYS.items()}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(options.rounds):
        for way, run in runs.items():
            found[way].append(run(seed))
    paths = ShardPaths(str(prefix))
    tokens = Shard(prefix).header.num_tokens
    five = sum(Path(path).stat().st_size for path in paths.all)
    base = statistics.median(found[NONE])
    bench.say(
        f"{packs:,} packs, capacity {CAPACITY:,}, float32 masks, {five / tokens:.2f} bytes a token in the five files;"
        f" `assemble` into reused buffers, batches of {ROWS} random packs from the page cache, medians of"
        f" {options.rounds} rounds."
    )
    rows = []
    for way, columns in WAYS.items():
        took = statistics.median(found[way])
        nbytes = sum(Path(paths.column(name)).stat().st_size for name in columns)
        rows.append((way, f"{took:.3f}", f"{1e3 * (took - base):.0f}", f"{nbytes / tokens:.2f}"))
    bench.table(("columns of a batch", "ms", "µs beyond none", "bytes a token on disk"), rows)
    what = f"a batch of {ROWS} x {CAPACITY:,} with {{}} a token"
    for key, way in (("one", ONE), ("four", FOUR)):
        words = what.format("one float32 column" if way == ONE else "four float32 columns")
        bench.headline(key, words, found[way], "ms", peer="the same without columns", theirs=found[NONE])


if __name__ == "__main__":
    sizes = {
        "packs": Size(4_000, 10_000, "packs of the shard"),
        "rounds": Size(5, 9, "runs of which the median is taken"),
    }
    run_bench("columns", "Columns in batches", ("torch", "numpy"), report, __doc__, sizes)
