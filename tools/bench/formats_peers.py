"""What ``formats.py`` measures beside ``open_dataset``: the usual reader of each format, written as its users do.

Each hands out a dictionary of arrays or lists, whatever the reader makes, and knows its number of items.
"""

from __future__ import annotations

import json
import mmap
import pickle
import struct
import sys
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

Sample = dict[str, Any]


class Items(Protocol):
    """Anything that hands out samples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Sample: ...


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
        self.ids: Any
        self.mask: Any
        self.starts: Any
        self.ids, self.mask, self.starts = map(np.asarray, maps) if plain else maps

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Sample:
        start, stop = self.offsets[i], self.offsets[i + 1]
        first, last = self.sequences[i], self.sequences[i + 1]
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = self.starts[first:last]
        boundaries[-1] = stop - start
        return {"input_ids": self.ids[start:stop], "loss_mask": self.mask[start:stop], "seq_boundaries": boundaries}


class LoadedNpy:
    """``np.load`` of the pickled array: everything in memory as Python lists."""

    def __init__(self, path: str) -> None:
        self.rows = np.load(path, allow_pickle=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Sample:
        row = self.rows[i]
        boundaries = [*row["seq_start_id"], len(row["input_ids"])]
        return {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "seq_boundaries": boundaries}


class MappedRows:
    """The five arrays of a padded folder through ``np.load``, mapped."""

    def __init__(self, folder: str) -> None:
        names = ("input_ids", "loss_mask", "packed_len", "seq_offsets", "seq_starts")
        arrays = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in names)
        self.ids, self.mask, self.lengths, self.offsets, self.starts = arrays

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Sample:
        length = self.lengths[i]
        starts = self.starts[self.offsets[i] : self.offsets[i + 1]]
        boundaries = np.append(starts, length).astype(np.int32)
        return {"input_ids": self.ids[i, :length], "loss_mask": self.mask[i, :length], "seq_boundaries": boundaries}


class RowGroups:
    """The algorithm of Megatron-Bridge's packed Parquet dataset, written anew.

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


class JsonLines:
    """Places of all lines, found at the start; then ``json.loads`` of one line."""

    def __init__(self, folder: str) -> None:
        self.files = [open(path, "rb") for path in sorted(Path(folder).glob("*.jsonl"))]  # noqa: SIM115
        self.lines: list[tuple[int, int]] = []
        for number, file in enumerate(self.files):
            place = 0
            for line in file:
                self.lines.append((number, place))
                place += len(line)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> Sample:
        number, place = self.lines[i]
        file = self.files[number]
        file.seek(place)
        row = json.loads(file.readline())
        return {name: row[name] for name in ("input_ids", "labels", "lengths")}


class Documents:
    """A ``.pbin`` as Modalities reads it: pickled places, ``np.frombuffer`` on the map, ids widened to int64."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        nbytes, self.itemsize = struct.unpack_from("<QI", self.map)
        self.places: Sequence[tuple[int, int]] = pickle.loads(self.map[12 + nbytes :])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> Sample:
        offset, nbytes = self.places[i]
        ids = np.frombuffer(self.map, f"<u{self.itemsize}", nbytes // self.itemsize, 12 + offset)
        return {"input_ids": ids.astype(np.int64)}


class Stock:
    """Megatron's ``IndexedDataset``: tokens alone."""

    def __init__(self, prefix: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron says that it falls back to its own code
            from megatron.core.datasets.indexed_dataset import IndexedDataset
        self.items = IndexedDataset(prefix)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Sample:
        return {"input_ids": self.items[i]}


def arrow_items(folder: str) -> Items:
    """Hugging Face ``datasets`` from a saved folder, as numpy arrays."""
    import datasets

    rows: Items = datasets.load_from_disk(folder).with_format("numpy")
    return rows


def import_streaming() -> ModuleType:
    """The package, without its image datasets, which alone need torchvision and are imported at once."""
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    import streaming

    return streaming  # type: ignore[no-any-return]


def mds_items(folder: str) -> Items:
    """mosaicml-streaming's local dataset, which gives numpy arrays."""
    rows: Items = import_streaming().LocalDataset(folder)
    return rows


def files_of(path: str) -> list[Path]:
    """A file, the files of a folder, or those of a prefix."""
    place = Path(path)
    if place.is_dir():
        return [file for file in place.iterdir() if file.is_file()]
    return [place] if place.is_file() else list(place.parent.glob(place.name + ".*"))


def nbytes_of(path: str) -> int:
    """Bytes of a file, of a folder, or of all files of a prefix."""
    return sum(file.stat().st_size for file in files_of(path))
