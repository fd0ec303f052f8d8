"""Blends and padding multiples of ``as_torch``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import loss_alone, tiny_llama

from megatron_sft_idx import FormatError, Shard, ShardWriter, as_torch, open_dataset
from megatron_sft_idx.shard import Pack
from megatron_sft_idx.training.torch_packs import Layout, WeightedPacks


class Numbers:
    """Packs that are numbers."""

    def __init__(self, name: int, count: int) -> None:
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> Pack:
        return (self.name, range(self.count)[index])  # type: ignore[return-value]


MEMBERS = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 20)), min_size=1, max_size=5)


@given(MEMBERS, st.none() | st.integers(1, 300))
def test_a_blend_is_spread_by_its_weights(members: list[tuple[int, float]], num_packs: int | None) -> None:
    sizes, weights = zip(*members, strict=True)
    blend = WeightedPacks([Numbers(name, size) for name, size in enumerate(sizes)], weights, num_packs)
    packs: list[Any] = [blend[i] for i in range(len(blend))]
    shares = np.array(weights) / sum(weights)
    if num_packs is None:
        assert set(packs) == {(name, number) for name, size in enumerate(sizes) for number in range(size)}
        smaller = WeightedPacks(blend.members, weights, len(blend) - 1) if len(blend) > 1 else None
        # One pack fewer would leave out a pack of some member, or cut its share below its packs.
        assert smaller is None or (np.array(shares) * len(smaller) < np.array(sizes) - 1e-6).any()
    else:
        assert len(packs) == num_packs
    assert blend.counts == [sum(each[0] == name for each in packs) for name in range(len(sizes))]
    assert (np.abs(np.array(blend.counts) - shares * len(packs)) < 1 + 1e-6).all()
    for name, size in enumerate(sizes):
        # Every member is gone through from its first pack to its last, again and again.
        assert [pack for member, pack in packs if member == name] == [i % size for i in range(blend.counts[name])]
    served = np.array([[each[0] == name for name in range(len(sizes))] for each in packs]).cumsum(0)
    even = np.arange(1, len(packs) + 1)[:, None] * np.array(blend.counts) / len(packs)
    assert (np.abs(served - even) <= len(sizes)).all()


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    for name, first, count in (("a", 0, 3), ("b", 100, 2)):
        with ShardWriter(tmp_path / name) as writer:
            for number in range(count):
                ids = np.arange(first + 10 * number, first + 10 * number + 7)
                writer.add_pack(ids, [1, 1, 0, 0, 1, 1, 0], [0, 3])
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_blends_of_paths_and_of_datasets(shards: list[str]) -> None:
    a, b = shards
    for source in ([3, a, 1.0, b], [0.75, open_dataset(a), 0.25, Shard(b)], [np.float32(0.6), Path(a), 0.2, b]):
        ds = as_torch(source, num_packs=8)
        found = [int(ds[i]["input_ids"][0]) for i in range(len(ds))]
        assert sorted(found) == [0, 0, 10, 10, 20, 20, 100, 110]
        assert [pack["input_ids"].tolist() for pack in map(pickle.loads(pickle.dumps(ds)).__getitem__, range(8))] == [
            ds[i]["input_ids"].tolist() for i in range(8)
        ]
    assert len(as_torch([3, a, 1, b])) == 8
    assert len(as_torch(shards)) == 5


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (lambda a, b: [0.5, a, b], r'expected a weight in front of each path: \[0.8, "a", 0.2, "b"\]'),
        (lambda a, b: [a, 0.5, b, 0.5], "expected a weight in front of each path"),
        (lambda a, b: [0.5, a, 0.5], "expected a weight in front of each path"),
        (lambda a, b: [0.5, a, 0, b], "b: blend weight 0.0, weights are above zero"),
        (lambda a, b: [0.5, a, float("inf"), b], "b: blend weight inf, weights are above zero"),
        (lambda a, b: [0.5, a, float("nan"), b], "b: blend weight nan, weights are above zero"),
    ],
)
def test_what_is_no_blend_is_refused(source: Any, reason: str, shards: list[str]) -> None:
    with pytest.raises(FormatError, match=reason):
        as_torch(source(*shards))


def test_other_refusals(shards: list[str], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="num_packs: belongs to a blend"):
        as_torch(shards, num_packs=3)
    with pytest.raises(FormatError, match="num_packs 0: expected at least one pack"):
        as_torch([1, shards[0]], num_packs=0)
    with pytest.raises(FormatError, match="pad_to_multiple_of 0: expected a whole number from 1"):
        as_torch(shards, pad_to_multiple_of=0)
    ShardWriter(tmp_path / "empty").finalize()
    with pytest.raises(FormatError, match="empty: has no packs; leave it out of the blend"):
        as_torch([0.5, shards[0], 0.5, str(tmp_path / "empty")])
    for name in ("x", "y"):
        metadata = {"tokenizer": {"fingerprint": name}}
        with ShardWriter(tmp_path / name, metadata=metadata) as writer:
            writer.add_pack([1, 2], [1, 0], [0])
    with pytest.raises(FormatError, match="different tokenizers"):
        as_torch([0.5, str(tmp_path / "x"), 0.5, str(tmp_path / "y")])


@pytest.mark.parametrize("multiple", [1, 2, 5, 64])
@pytest.mark.parametrize("layout", get_args(Layout))
def test_padding_to_a_multiple_changes_no_loss(shards: list[str], layout: Layout, multiple: int) -> None:
    pytest.importorskip("transformers")
    ds = as_torch(shards, layout, pad_to_multiple_of=multiple)
    batch = ds.collate([ds[0], ds[3]])
    longest, total = 4, 14
    assert batch["input_ids"].shape[1] == -(-(longest if layout == "padded" else total) // multiple) * multiple
    assert all(
        tensor.shape == batch["labels"].shape for name, tensor in batch.items() if name.endswith(("ids", "mask"))
    )
    model = tiny_llama(128).eval()
    with torch.no_grad():
        wanted = loss_alone(model, [Shard(shards[0])[0], Shard(shards[1])[0]])
        assert model(**batch).loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    if layout == "flash":
        assert batch["cu_seq_lens_q"][-1] == batch["input_ids"].shape[1]
        assert batch["max_length_q"] == batch["cu_seq_lens_q"].diff().max()
