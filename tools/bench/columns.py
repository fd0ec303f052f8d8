"""The cost of columns: batches with no, one and four columns, preprocess with ``source``, and bytes on disk.

python tools/bench/columns.py [--full]
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
from batches import per_batch, random_batches
from batches_peers import CAPACITY, ROWS, SEQUENCES, fill
from measure import in_turns, timed
from report import Bench, run_bench

from megatron_sft_idx import preprocess
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard, ShardWriter, write_column
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import Batch, BatchAssembler
from megatron_sft_idx.training.sources import StoredPacks

DEMO = Path(__file__).parents[1] / "demo"
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
    """Attach columns of each kind to the shard, as a user would."""
    header, rng = Shard(prefix).header, np.random.default_rng(1)
    for name in TOKENS:
        write_column(prefix, name, rng.random(header.num_tokens, np.float32), per="token")
    write_column(prefix, WIDE, rng.random((header.num_tokens, 8), np.float32), per="token")
    rows = np.arange(2 * header.num_sequences, dtype=np.uint32).reshape(-1, 2)
    write_column(prefix, SOURCE, rows, per="sequence", metadata={"files": [{"name": "chats.jsonl"}]})


def assembling(prefix: Path, columns: list[str], packs: int) -> Callable[[int], float]:
    """Return a function that measures milliseconds per batch, in reused buffers and an order given by a seed."""
    source = StoredPacks(ShardSet([str(prefix)], columns=columns))
    assembler = BatchAssembler(source, CAPACITY, width=SEQUENCES + 2, columns=columns)
    out = Batch(assembler.layout(ROWS))

    def run(seed: int) -> float:
        return per_batch((assembler.assemble(picked, out) for picked in random_batches(packs, BATCHES, seed)), BATCHES)

    return run


def preprocessing(folder: Path, copies: int, source: bool) -> tuple[float, int]:
    """Return CPU seconds of a run in this process over many copies of the demo's chats, and bytes on disk."""
    rows = [json.loads(line) for line in (DEMO / "chats.jsonl").read_text(encoding="utf-8").splitlines()]
    took = timed(
        lambda: preprocess(
            rows * copies, tokenizer=DEMO / "tokenizer", seq_length=4096, earlier_reasoning="drop", workers=0,
            output_prefix=folder / f"source-{source}", source=source, overwrite=True,
        )
    )  # fmt: skip
    return took.cpu, sum(path.stat().st_size for path in folder.glob(f"source-{source}.*"))


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    prefix, packs = folder / "shard", options.packs
    # Float masks: then a column of tokens is read and written in as many bytes as the mask is.
    with ShardWriter(prefix, capacity=CAPACITY, pad_id=0, durable=False, mask_dtype=np.float32) as writer:
        fill(writer, np.random.default_rng(0), packs)
    attach(prefix)
    runs = {way: assembling(prefix, columns, packs) for way, columns in WAYS.items()}
    found = in_turns(runs, options.rounds)
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
    made: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for number in range(options.rounds):
        for source in (True, False) if number % 2 else (False, True):
            made[source].append(preprocessing(folder, options.copies, source))
    with_, without = ([cpu for cpu, _ in made[source]] for source in (True, False))
    more = 100 * (made[True][0][1] / made[False][0][1] - 1)
    bench.headline("source", "`preprocess` with the column `source`", with_, "CPU s", peer="without", theirs=without)
    bench.headline("source_bytes", "a shard with the column `source`", [more], "% more bytes on disk")
    what = f"a batch of {ROWS} x {CAPACITY:,} with {{}} a token"
    for key, way in (("one", ONE), ("four", FOUR)):
        words = what.format("one float32 column" if way == ONE else "four float32 columns")
        bench.headline(key, words, found[way], "ms", peer="the same without columns", theirs=found[NONE])


if __name__ == "__main__":
    sizes = {
        "packs": (4_000, 10_000, "packs of the shard"),
        "copies": (20, 100, "times the demo's chats are taken for preprocess"),
    }
    run_bench("Columns in batches", ("torch", "numpy"), report, sizes, rounds=(5, 9))
