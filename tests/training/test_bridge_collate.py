"""``ds[i]`` can be passed to Megatron-Bridge's packed collate function; a reimplementation of it is used here.

Bridge's function takes ``input_ids``, ``loss_mask`` and ``seq_boundaries`` of each pack. It removes the last token of
every sequence for the inputs and the first for the labels, and reads the mask at the positions of the inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sample_packs import Sample, demo_samples, sample_of, write_samples

from megatron_sft_idx import MediaItem, SFTIndexedDataset, ShardWriter
from megatron_sft_idx.errors import FormatError, SequenceError

PAD = 0


def packed_collate(items: Sequence[dict[str, Any]], length: int, width: int) -> dict[str, torch.Tensor]:
    """Return rows of ``length`` positions with boundaries padded to one width, made of slices of the items."""
    columns: dict[str, list[list[int]]] = {
        key: [] for key in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
    }
    for item in items:
        bounds = item["seq_boundaries"]
        spans = [(bounds[i], bounds[i + 1]) for i in range(len(bounds) - 1)]
        lengths = np.array(bounds[1:]) - np.array(bounds[:-1]) - 1
        row = {
            "tokens": np.concatenate([item["input_ids"][a : b - 1] for a, b in spans]),
            "labels": np.concatenate([item["input_ids"][a + 1 : b] for a, b in spans]),
            "loss_mask": np.concatenate([item["loss_mask"][a : b - 1] for a, b in spans]),
            "position_ids": np.concatenate([np.arange(n) for n in lengths]),
        }
        for key, values in row.items():
            listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
            columns[key].append(listed + [PAD] * (length - len(listed)))
        ends = [0, *np.cumsum(lengths).tolist()]
        columns["cu_seqlens"].append(ends + [length] * (width - len(ends)))
    return {key: torch.LongTensor(rows) for key, rows in columns.items()}


def trained(batch: dict[str, torch.Tensor], row: int) -> list[tuple[list[int], int]]:
    """Return the trained labels of a row, each with the tokens of its segment before it."""
    found = []
    for a, b in pairwise(batch["cu_seqlens"][row].tolist()):
        for j in range(a, b):
            if batch["loss_mask"][row, j]:
                found.append((batch["tokens"][row, a : j + 1].tolist(), int(batch["labels"][row, j])))
    return found


def expected(sample: Sample) -> list[tuple[list[int], int]]:
    """Return the same, computed from the token-aligned mask of the sample."""
    return [
        (sample.tokens[a:j], sample.tokens[j])
        for a, b in pairwise(sample.bounds)
        for j in range(a + 1, b)
        if sample.mask[j]
    ]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_pack_is_collated_as_it_is(tmp_path: Path, dtype: Any) -> None:
    packs = [*demo_samples(), sample_of([1, 1, 4, 1], lambda _: 1, lambda i: 100 + i)]
    write_samples(tmp_path / "x", packs, token_dtype=dtype)
    dataset = SFTIndexedDataset(str(tmp_path / "x"))
    assert set(dataset[0]) == {"input_ids", "loss_mask", "seq_boundaries"}
    batch = packed_collate([dataset[i] for i in range(len(dataset))], 64, 8)
    # Lists, as in packs that Bridge unpickles.
    lists = [
        {"input_ids": pack.tokens, "loss_mask": [int(m) for m in pack.label_mask], "seq_boundaries": pack.bounds}
        for pack in packs
    ]
    for key, value in packed_collate(lists, 64, 8).items():
        assert torch.equal(batch[key], value), key
    for row, pack in enumerate(packs):
        assert trained(batch, row) == expected(pack)
    assert sum(len(expected(pack)) for pack in packs) > 10


class FollowsTheirs:
    """Megatron-Bridge's packed data set without the two methods that our class replaces."""

    def __init__(self, file_path: str, mapping: list[int] | None = None, max_seq_length: int = 64) -> None:
        self.file_path, self.samples_mapping, self.max_seq_length = file_path, mapping, max_seq_length
        self._load_dataset()

    def _load_dataset(self) -> None:
        raise AssertionError("our class replaces this")


@pytest.fixture
def packed_shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Provide our class, derived from that one."""
    theirs = ModuleType("megatron.bridge.data.datasets.sft")
    theirs.GPTSFTPackedDataset = FollowsTheirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    for parent in ("megatron.bridge", "megatron.bridge.data", "megatron.bridge.data.datasets"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    name = "megatron_sft_idx.training.packed_shard"
    yield import_module(name).PackedShard
    del sys.modules[name]


def test_our_class_on_theirs_gives_the_packs_of_shards(tmp_path: Path, packed_shard: Any) -> None:
    packs = demo_samples()
    for name, some in (("x", packs), ("parts/a", packs[:4]), ("parts/b", packs[4:])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_samples(tmp_path / name, some, capacity=64)
    for name in ("x", "parts"):
        for mapping in (None, list(range(len(packs)))[::-1]):
            dataset = packed_shard(str(tmp_path / name), mapping)
            order = mapping or list(range(len(packs)))
            batch = packed_collate([dataset[i] for i in range(len(packs))], 64, 8)
            for row, pack in enumerate(order):
                assert trained(batch, row) == expected(packs[pack])
            padding = dataset[-1]
            assert not padding["loss_mask"].any()
            assert padding["input_ids"].tolist() == packs[order[-1]].tokens


def test_our_class_on_theirs_refuses_what_it_would_train_wrongly(tmp_path: Path, packed_shard: Any) -> None:
    write_samples(tmp_path / "x", demo_samples(), capacity=64)
    with pytest.raises(FormatError, match=r"up to 64 tokens, .* is 63; raise it, or pack again with --seq-length 63"):
        packed_shard(str(tmp_path / "x"), max_seq_length=63)
    weighed = sample_of([4, 3], lambda position: 0.5 * (position == 5), lambda position: position)
    write_samples(tmp_path / "w", [*demo_samples(2), weighed], capacity=64, mask_dtype=np.float32)
    dataset = packed_shard(str(tmp_path / "w"))
    assert dataset[1]["loss_mask"].dtype == np.float32
    with pytest.raises(SequenceError, match=r"w:2: its loss mask has weights"):
        dataset[2]


def test_our_class_on_theirs_refuses_images(tmp_path: Path, packed_shard: Any) -> None:
    with ShardWriter(tmp_path / "x", media=True) as writer:
        writer.add_pack([5, 90, 90, 7], [0, 0, 1, 0], [0], media=[MediaItem("image", 1, 2, b"a PNG")])
    with pytest.raises(FormatError, match=r"contains images or audio, .* use BridgeVLMConfig"):
        packed_shard(str(tmp_path / "x"))
