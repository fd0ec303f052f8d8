"""The data of ``formats.py``, and the usual reader of each format.

Each reader returns a dictionary of arrays or lists, and has a length.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import shutil
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np
from measure import indexed_dataset

from megatron_sft_idx import open_dataset
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.shard import ShardWriter

Sample = dict[str, Any]


class Items(Protocol):
    """Anything that returns samples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Sample: ...


class Rows:
    """A reader whose ``items`` are one for each sample, or for its place."""

    items: Any

    def __len__(self) -> int:
        return len(self.items)


class RawMemmap:
    """A shard's files through ``np.memmap``, offsets in memory, nothing checked."""

    def __init__(self, prefix: str, *, plain: bool) -> None:
        with open(prefix + ".seq.idx", "rb") as file:
            head = file.read(256)
            _, header_nbytes = struct.unpack_from("<II", head, 8)
            (packs,) = struct.unpack_from("<Q", head, 32)
            file.seek(header_nbytes)
            self.sequences = np.frombuffer(file.read(8 * (packs + 1)), "<i8")
            file.seek(-(-file.tell() // 64) * 64)
            self.offsets = np.frombuffer(file.read(8 * (packs + 1)), "<i8")
        token, mask = {4: "<i4", 8: "<u2"}[head[72]], {1: "u1", 7: "<f4"}[head[73]]
        kinds = ((".bin", token), (".loss.bin", mask), (".seq.bin", "<u4"))
        maps = (np.memmap(prefix + suffix, kind, "r") for suffix, kind in kinds)
        arrays: Any = map(np.asarray, maps) if plain else maps
        self.ids, self.mask, self.starts = arrays

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Sample:
        start, stop = self.offsets[i], self.offsets[i + 1]
        first, last = self.sequences[i], self.sequences[i + 1]
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = self.starts[first:last]
        boundaries[-1] = stop - start
        return {"input_ids": self.ids[start:stop], "loss_mask": self.mask[start:stop], "seq_boundaries": boundaries}


class LoadedNpy(Rows):
    """``np.load`` of the pickled array: everything in memory as Python lists."""

    def __init__(self, path: str) -> None:
        self.items = np.load(path, allow_pickle=True)

    def __getitem__(self, i: int) -> Sample:
        row = self.items[i]
        boundaries = [*row["seq_start_id"], len(row["input_ids"])]
        return {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "seq_boundaries": boundaries}


class MappedRows(Rows):
    """The five arrays of a padded folder through ``np.load``, mapped."""

    def __init__(self, folder: str) -> None:
        names = ("input_ids", "loss_mask", "packed_len", "seq_offsets", "seq_starts")
        arrays = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in names)
        self.ids, self.mask, self.items, self.offsets, self.starts = arrays

    def __getitem__(self, i: int) -> Sample:
        length = self.items[i]
        starts = self.starts[self.offsets[i] : self.offsets[i + 1]]
        boundaries = np.append(starts, length).astype(np.int32)
        return {"input_ids": self.ids[i, :length], "loss_mask": self.mask[i, :length], "seq_boundaries": boundaries}


class RowGroups:
    """The algorithm of Megatron-Bridge's packed Parquet dataset, reimplemented.

    The row group of the pack is found by bisection and read into a table, the last table is kept, and the three values
    of the row become Python lists.
    """

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as pq

        self.file = pq.ParquetFile(path)
        rows = [self.file.metadata.row_group(i).num_rows for i in range(self.file.metadata.num_row_groups)]
        self.offsets = np.cumsum([0, *rows]).tolist()
        self.group = -1
        self.table: Any = None

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, i: int) -> Sample:
        group = bisect_right(self.offsets, i) - 1
        if self.group != group:
            self.table = self.file.read_row_group(group, columns=["input_ids", "seq_start_id", "loss_mask"])
            self.group = group
        row, table = i - self.offsets[group], self.table
        ids, starts, mask = (table.column(name)[row].as_py() for name in ("input_ids", "seq_start_id", "loss_mask"))
        return {"input_ids": ids, "loss_mask": mask, "seq_boundaries": [*starts, len(ids)]}


class JsonLines(Rows):
    """Places of all lines, found at the start; then ``json.loads`` of one line."""

    def __init__(self, folder: str) -> None:
        self.files = [open(path, "rb") for path in sorted(Path(folder).glob("*.jsonl"))]  # noqa: SIM115
        self.items: list[tuple[int, int]] = []
        for number, file in enumerate(self.files):
            place = 0
            for line in file:
                self.items.append((number, place))
                place += len(line)

    def __getitem__(self, i: int) -> Sample:
        number, place = self.items[i]
        file = self.files[number]
        file.seek(place)
        row = json.loads(file.readline())
        return {name: row[name] for name in ("input_ids", "labels", "lengths")}


class Documents(Rows):
    """A ``.pbin`` as Modalities reads it: pickled places, ``np.frombuffer`` on the map, ids widened to int64."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        nbytes, self.itemsize = struct.unpack_from("<QI", self.map)
        self.items: Sequence[tuple[int, int]] = pickle.loads(self.map[12 + nbytes :])

    def __getitem__(self, i: int) -> Sample:
        offset, nbytes = self.items[i]
        ids = np.frombuffer(self.map, f"<u{self.itemsize}", nbytes // self.itemsize, 12 + offset)
        return {"input_ids": ids.astype(np.int64)}


class Stock(Rows):
    """Megatron's ``IndexedDataset``: only tokens."""

    def __init__(self, prefix: str) -> None:
        self.items = indexed_dataset().IndexedDataset(prefix)

    def __getitem__(self, i: int) -> Sample:
        return {"input_ids": self.items[i]}


def arrow_items(folder: str) -> Items:
    """Hugging Face ``datasets`` from a saved folder, as numpy arrays."""
    import datasets

    rows: Items = datasets.load_from_disk(folder).with_format("numpy")
    return rows


def import_streaming() -> ModuleType:
    """Import the package without its image datasets, which it imports at once and which need torchvision."""
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    import streaming

    return streaming  # type: ignore[no-any-return]


def mds_items(folder: str) -> Items:
    """mosaicml-streaming's local dataset, which gives numpy arrays."""
    rows: Items = import_streaming().LocalDataset(folder)
    return rows


def files_of(path: str) -> list[Path]:
    """Return the file, the files of a folder, or the files of a prefix."""
    place = Path(path)
    if place.is_dir():
        return [file for file in place.iterdir() if file.is_file()]
    return [place] if place.is_file() else list(place.parent.glob(place.name + ".*"))


def nbytes_of(path: str) -> int:
    """Bytes of a file, of a folder, or of all files of a prefix."""
    return sum(file.stat().st_size for file in files_of(path))


# ---- the data ----

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
    beside: str = ""  # the same for the comparison with other formats

    @property
    def ours(self) -> bool:
        """Whether it reads by ``open_dataset``."""
        return bool(self.key)

    @property
    def peer(self) -> str:
        """The name of the peer in a headline."""
        return self.reader if self.label == SHARD else f"{self.label}, {self.reader}"


TRAINED = partial(ours, mask_rule="all")  # formats without masks need a rule
SHARD, NPY, MEMMAP = "shard (five files)", "pickled `.npy`", "padded memmap folder"
LARGE, SMALL = "Parquet, 1000 packs a row group", "Parquet, 16 packs a row group"
PBIN, JSONL, STOCK = "Modalities `.pbin`, 490 tokens an item", "pre-packed JSONL chunks", "stock `.bin` and `.idx`"
WAYS = [
    Way("shard", SHARD, "`open_dataset`", ours, key="shard"),
    Way("shard", SHARD, "`np.memmap` slices", partial(RawMemmap, plain=False), beside="memmap"),
    Way("shard", SHARD, "slices of plain arrays on maps", partial(RawMemmap, plain=True)),
    Way("packs.npy", NPY, "`open_dataset`", ours, key="npy"),
    Way("packs.npy", NPY, "`np.load`, allow_pickle", LoadedNpy),
    Way("memmap", MEMMAP, "`open_dataset`", ours, key="memmap"),
    Way("memmap", MEMMAP, "`np.load`, mmap_mode", MappedRows),
    Way("1000.parquet", LARGE, "`open_dataset`", ours, key="parquet"),
    Way("1000.parquet", LARGE, "pyarrow as Megatron-Bridge", RowGroups, beside="parquet"),
    Way("16.parquet", SMALL, "`open_dataset`", ours, key="parquet16"),
    Way("16.parquet", SMALL, "pyarrow as Megatron-Bridge", RowGroups, beside="parquet16"),
    Way("jsonl", JSONL, "`open_dataset`", ours, key="jsonl"),
    Way("jsonl", JSONL, "`json.loads` of a line", JsonLines),
    Way("packs.pbin", PBIN, "`open_dataset`", TRAINED, key="pbin"),
    Way("packs.pbin", PBIN, "`np.frombuffer` as Modalities", Documents),
    Way("stock", STOCK, "`open_dataset`", TRAINED, key="stock"),
    Way("stock", STOCK, "`IndexedDataset`", Stock, beside="stock"),
]
# Only installed libraries.
if find_spec("datasets"):
    WAYS.append(Way("arrow", "datasets (Arrow)", "numpy format", arrow_items, beside="arrow"))
if find_spec("streaming"):
    WAYS.append(Way("mds", "mosaicml-streaming (MDS)", "`LocalDataset`", mds_items, beside="mds"))


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
        (folder / "shard", "packs.pbin", "pbin", {"lossy": True}),
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
