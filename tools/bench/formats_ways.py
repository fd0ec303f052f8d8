"""The ways that ``formats.py`` sets beside each other, and the data that they read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import formats_peers as peers
import numpy as np
from formats_peers import Items

from megatron_sft_idx import open_dataset
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.shard import ShardWriter

CAPACITY, SEQUENCES, VOCABULARY = 4096, 8, 150_000
PACKS_AT_ONCE = 250


def write_packs(prefix: str, packs: int) -> None:
    """Packs of 8 sequences that fill 93 to 100% of the capacity.

    Ids are as frequent as words are (Zipf), and the second half of every sequence is trained on: so that a format
    that compresses has something to compress.
    """
    rng = np.random.default_rng(0)
    with ShardWriter(prefix, capacity=CAPACITY, pad_id=0, durable=False) as writer:
        for first in range(0, packs, PACKS_AT_ONCE):
            count = min(PACKS_AT_ONCE, packs - first)
            lengths = rng.integers(3800, CAPACITY + 1, count)
            shares = rng.dirichlet(np.full(SEQUENCES, 4.0), count)
            starts = np.cumsum(shares * (lengths[:, None] - 4 * SEQUENCES), axis=1).astype(np.int64)
            starts = np.roll(starts, 1, axis=1) + 4 * np.arange(SEQUENCES)  # 3 tokens or more in each
            starts[:, 0] = 0
            begins = (starts + (np.cumsum(lengths) - lengths)[:, None]).ravel()
            ends = np.append(begins[1:], lengths.sum())
            steps = np.zeros(lengths.sum(), np.int8)
            steps[(begins + ends) // 2] += 1
            steps[ends - 1] -= 1
            ids = np.exp(rng.random(len(steps), np.float32) * np.float32(np.log(VOCABULARY))).astype(np.int32)
            mask = np.cumsum(steps, dtype=np.int8).view(np.uint8)
            writer.add_packs(ids, mask, starts.ravel(), lengths, np.full(count, SEQUENCES))


# ---- ways ----


def ours(path: str, **options: Any) -> Items:
    return cast(Items, open_dataset(path, **options))


@dataclass(frozen=True)
class Way:
    """A row of the table."""

    stored: str  # name of what is read, a file or folder of the bench's folder
    label: str  # of the format, in the table
    reader: str  # in the table
    open: Callable[[str], Items]  # makes the dataset from a path
    key: str = ""  # of ours, by which its headlines are named
    beside: str = ""  # of others, the same where the shard is set beside them

    @property
    def ours(self) -> bool:
        """Whether it reads by ``open_dataset``."""
        return bool(self.key)

    @property
    def peer(self) -> str:
        """What stands beside the shard, in a headline."""
        return self.reader if self.label == SHARD else f"{self.label}, {self.reader}"


TRAINED = partial(ours, mask_rule="all")  # formats without masks need a rule
SHARD, NPY, MEMMAP = "shard (five files)", "pickled `.npy`", "padded memmap folder"
LARGE, SMALL = "Parquet, 1000 packs a row group", "Parquet, 16 packs a row group"
PBIN, JSONL, STOCK = "Modalities `.pbin`, 490 tokens an item", "pre-packed JSONL chunks", "stock `.bin` and `.idx`"
WAYS = [
    Way("shard", SHARD, "`open_dataset`", ours, key="shard"),
    Way("shard", SHARD, "`np.memmap` slices", partial(peers.RawMemmap, plain=False), beside="memmap"),
    Way("shard", SHARD, "slices of plain arrays on maps", partial(peers.RawMemmap, plain=True)),
    Way("packs.npy", NPY, "`open_dataset`", ours, key="npy"),
    Way("packs.npy", NPY, "`np.load`, allow_pickle", peers.LoadedNpy),
    Way("memmap", MEMMAP, "`open_dataset`", ours, key="memmap"),
    Way("memmap", MEMMAP, "`np.load`, mmap_mode", peers.MappedRows),
    Way("1000.parquet", LARGE, "`open_dataset`", ours, key="parquet"),
    Way("1000.parquet", LARGE, "pyarrow as Megatron-Bridge", peers.RowGroups, beside="parquet"),
    Way("16.parquet", SMALL, "`open_dataset`", ours, key="parquet16"),
    Way("16.parquet", SMALL, "pyarrow as Megatron-Bridge", peers.RowGroups, beside="parquet16"),
    Way("jsonl", JSONL, "`open_dataset`", ours, key="jsonl"),
    Way("jsonl", JSONL, "`json.loads` of a line", peers.JsonLines),
    Way("packs.pbin", PBIN, "`open_dataset`", TRAINED, key="pbin"),
    Way("packs.pbin", PBIN, "`np.frombuffer` as Modalities", peers.Documents),
    Way("stock", STOCK, "`open_dataset`", TRAINED, key="stock"),
    Way("stock", STOCK, "`IndexedDataset`", peers.Stock, beside="stock"),
]
# Those that are installed.
if find_spec("datasets"):
    WAYS.append(Way("arrow", "datasets (Arrow)", "numpy format", peers.arrow_items, beside="arrow"))
if find_spec("streaming"):
    WAYS.append(Way("mds", "mosaicml-streaming (MDS)", "`LocalDataset`", peers.mds_items, beside="mds"))


def write_all(folder: Path, packs: int, npy_packs: int) -> None:
    """The same packs in every format; the pickled file, which is read whole into memory, holds only some."""
    write_packs(str(folder / "shard"), packs)
    for suffix in (".bin", ".idx"):
        os.link(folder / f"shard{suffix}", folder / f"stock{suffix}")
    few = folder / "few"
    write_packs(str(few), npy_packs)
    made: list[tuple[Path, str, str, dict[str, Any]]] = [
        (few, "packs.npy", "npy", {}),
        (folder / "shard", "memmap", "memmap", {}),
        (folder / "shard", "1000.parquet", "parquet", {"writer": {"row_group_size": 1000}}),
        (folder / "shard", "16.parquet", "parquet", {"writer": {"row_group_size": 16}}),
        (folder / "shard", "jsonl", "jsonl-chunks", {}),
        (folder / "shard", "packs.pbin", "pbin", {"allow_loss": True}),
    ]
    for source, name, kind, options in made:
        convert(str(source), str(folder / name), kind, ConvertOptions(verify=False, **options))
    for path in folder.glob("few.*"):
        path.unlink()
    # It imports torch, which the many processes that read do not need.
    from batches_peers import Files, arrow, mds

    rows = Files(folder / "shard")
    stored = {way.stored for way in WAYS}
    for name, make in (("arrow", arrow), ("mds", mds)):
        if name in stored:
            make(folder, rows)
    shutil.rmtree(folder / "arrow-cache", ignore_errors=True)


def check_equal(folder: Path) -> None:
    """Every way gives the first pack of the shard, as far as its format holds it."""
    wanted = open_dataset(str(folder / "shard"))[0]
    for way in WAYS:
        items = way.open(f"{folder}/{way.stored}")
        parts = [items[i] for i in range(SEQUENCES if way.label == PBIN else 1)]
        same = np.array_equal(np.concatenate([part["input_ids"] for part in parts]), wanted["input_ids"])
        if way.label not in (PBIN, STOCK) and "labels" not in parts[0]:
            same &= np.array_equal(parts[0]["loss_mask"], wanted["loss_mask"])
            same &= np.array_equal(parts[0]["seq_boundaries"], wanted["seq_boundaries"])
        if not same:
            raise SystemExit(f"{way.label}, {way.reader}: another pack")
