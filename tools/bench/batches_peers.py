"""Other stores of the same packs, and other collates, for ``batches.py``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from formats_peers import import_streaming
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_sft_idx.shard import Shard, ShardWriter

CAPACITY, TOKENS, SEQUENCES, ROWS = 4096, 3900, 8, 8
WIDTH = SEQUENCES + 2
Row = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # ids, label-aligned mask, boundaries
Made = tuple[str, list[Path], Callable[[], Dataset[Any]]]


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    """The batch that Megatron takes, with whole-array numpy operations: no loop over tokens or sequences."""
    shape = (len(rows), CAPACITY)
    tokens, labels, positions = (np.zeros(shape, np.int64) for _ in range(3))
    loss = np.zeros(shape, np.float32)
    cu_seqlens = np.full((len(rows), WIDTH), CAPACITY, np.int32)
    longest = np.empty(len(rows), np.int32)
    for r, (ids, mask, bounds) in enumerate(rows):
        n = len(ids)
        tokens[r, :n] = ids
        labels[r, : n - 1] = ids[1:]
        labels[r, bounds[1:] - 1] = 0
        loss[r, :n] = mask
        cu_seqlens[r, : len(bounds)] = bounds
        lengths = np.diff(cu_seqlens[r])
        positions[r] = np.arange(CAPACITY) - np.repeat(cu_seqlens[r, :-1], lengths)
        longest[r] = lengths.max()
    made = {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": loss}
    made |= {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
    return {name: torch.from_numpy(array) for name, array in made.items()}


def fill(writer: ShardWriter, rng: np.random.Generator, packs: int) -> None:
    """Packs of 8 sequences that fill 95% of the capacity."""
    for _ in range(packs):
        cuts = np.sort(rng.choice(np.arange(1, TOKENS), SEQUENCES - 1, replace=False))
        mask = np.ones(TOKENS, np.uint8)
        mask[np.append(cuts, TOKENS) - 1] = 0
        writer.add_pack(rng.integers(1, 150_000, TOKENS, np.int32), mask, np.concatenate([[0], cuts]))


class Files(Dataset[Row]):
    """The shard, read pack by pack."""

    def __init__(self, prefix: Path) -> None:
        self.shard = Shard(prefix)

    def __len__(self) -> int:
        return len(self.shard)

    def __getitem__(self, i: int) -> Row:
        pack = self.shard[i]
        return pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"]


# ---- Python lists ----


class Lists(Dataset[dict[str, list[int]]]):
    """Packs as Python lists, as they come out of a pickled ``.npy``; a few, as they take 300 KB each."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = [
            {"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_boundaries": bounds.tolist()}
            for ids, mask, bounds in rows
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return self.rows[i]


def collate_lists(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """The algorithm of Megatron-Bridge's packed collate, reimplemented.

    Each sequence gives up its last token so that tokens and labels are two slices of it; slices of lists are
    concatenated by numpy, padded as lists again, and made tensors from lists of lists.
    """

    def cut(item: dict[str, list[int]], key: str, skip: int) -> NDArray[Any]:
        edges = item["seq_boundaries"]
        return np.concatenate([item[key][a + skip : b - 1 + skip] for a, b in pairwise(edges)])

    def pad(rows: list[Any]) -> torch.Tensor:
        lists = [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]
        return torch.LongTensor([row + [0] * (CAPACITY - len(row)) for row in lists])

    positions: list[list[int]] = []
    bounds: list[list[int]] = []
    for item in batch:
        positions.append([])
        bounds.append([0])
        for length in np.diff(np.array(item["seq_boundaries"])):
            positions[-1].extend(range(length - 1))
            bounds[-1].append(bounds[-1][-1] + int(length) - 1)
        bounds[-1] += [CAPACITY] * (WIDTH - len(bounds[-1]))
    cu_seqlens = torch.IntTensor(bounds)
    return {
        "tokens": pad([cut(item, "input_ids", 0) for item in batch]),
        "labels": pad([cut(item, "input_ids", 1) for item in batch]),
        "loss_mask": pad([cut(item, "loss_mask", 0) for item in batch]),
        "position_ids": pad(positions),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": cu_seqlens.diff(dim=1).max(dim=1).values,
    }


# ---- Hugging Face datasets ----


class _ArrowRows(Dataset[Row]):
    """A saved dataset in its fastest form: a whole batch at once, as Arrow, and views of its values."""

    def __init__(self, folder: Path) -> None:
        import datasets

        self.rows = datasets.load_from_disk(str(folder)).with_format("arrow")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, picked: list[int]) -> list[Row]:
        found = self.rows[picked]

        def column(name: str) -> list[NDArray[Any]]:
            whole = found[name].combine_chunks()
            edges, values = whole.offsets.to_numpy(), whole.values.to_numpy()
            return [values[a:b] for a, b in pairwise(edges)]

        return list(zip(column("input_ids"), column("loss_mask"), column("seq_boundaries"), strict=True))


def arrow(folder: Path, rows: Dataset[Row]) -> Made:
    import datasets

    def items() -> Any:
        for i in range(len(rows)):  # type: ignore[arg-type]
            ids, mask, bounds = rows[i]
            yield {"input_ids": ids, "loss_mask": mask, "seq_boundaries": bounds}

    types = {"input_ids": "int32", "loss_mask": "uint8", "seq_boundaries": "int32"}
    features = datasets.Features({name: datasets.Sequence(datasets.Value(kind)) for name, kind in types.items()})
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_generator(items, features=features, cache_dir=str(folder / "arrow-cache"))
    made.save_to_disk(str(folder / "arrow"))
    version = datasets.__version__
    return (
        f"datasets {version} (Arrow)",
        sorted((folder / "arrow").rglob("*.arrow")),
        lambda: _ArrowRows(folder / "arrow"),
    )


# ---- mosaicml-streaming ----


class _MdsRows(Dataset[Row]):
    def __init__(self, folder: Path) -> None:
        self.rows = import_streaming().LocalDataset(str(folder))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        row = self.rows[i]
        return row["input_ids"], row["loss_mask"], row["seq_boundaries"]


def mds(folder: Path, rows: Dataset[Row]) -> Made:
    streaming = import_streaming()
    columns = {"input_ids": "ndarray:int32", "loss_mask": "ndarray:uint8", "seq_boundaries": "ndarray:int32"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for i in range(len(rows)):  # type: ignore[arg-type]
            writer.write(dict(zip(columns, rows[i], strict=True)))
    name = f"mosaicml-streaming {streaming.__version__} (MDS)"
    return name, sorted((folder / "mds").glob("*.mds")), lambda: _MdsRows(folder / "mds")
