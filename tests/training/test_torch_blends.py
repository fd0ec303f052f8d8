"""Blends and padding multiples of ``as_torch``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import loss_alone, tiny_llama
from torch.utils.data import ConcatDataset, Subset

from megatron_sft_idx import FormatError, SFTIndexedDataset, Shard, ShardWriter, as_torch, open_dataset
from megatron_sft_idx.formats.convert import convert
from megatron_sft_idx.shard import Pack
from megatron_sft_idx.training.torch_packs import Layout, WeightedPacks


class Numbers:
    """A data set with numbers as packs."""

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
        # With one pack fewer, a pack of some member would be missing, or its share would be below its number of packs.
        assert smaller is None or (np.array(shares) * len(smaller) < np.array(sizes) - 1e-6).any()
    else:
        assert len(packs) == num_packs
    assert blend.counts == [sum(each[0] == name for each in packs) for name in range(len(sizes))]
    assert (np.abs(np.array(blend.counts) - shares * len(packs)) < 1 + 1e-6).all()
    for name, size in enumerate(sizes):
        # Every member is read from its first pack to its last, repeatedly.
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
        (lambda a, b: [0.5, a, b], r'expected a weight before each path: \[0.8, "a", 0.2, "b"\]'),
        (lambda a, b: [a, 0.5, b, 0.5], "expected a weight before each path"),
        (lambda a, b: [0.5, a, 0.5], "expected a weight before each path"),
        (lambda a, b: [0.5, a, 0, b], "b: blend weight 0.0, expected a number above zero"),
        (lambda a, b: [0.5, a, float("inf"), b], "b: blend weight inf, expected a number above zero"),
        (lambda a, b: [0.5, a, float("nan"), b], "b: blend weight nan, expected a number above zero"),
        (lambda a, b: [0.5, a, -2, b], "b: blend weight -2.0, expected a number above zero"),
        (lambda a, b: [0.5, a, 10**400, b], "b: blend weight a huge number, expected a number above zero"),
        (lambda a, b: [1e308, a, 1e308, b], "the sum of the weights is too large for a float"),
        (
            lambda a, b: [1, a, 1e-12, b],
            "b: with this blend weight, 2e[+]12 packs are needed",
        ),
        (lambda a, b: [1e300, a, 5e-324, b], "b: with this blend weight, inf packs are needed"),
        (lambda a, b: [0.5, a, "0.5", b], "expected a weight before each path"),
        (lambda a, b: [0.5, a, 1j, b], "expected a weight before each path"),
        (lambda a, b: [True, a, True, b], "source: True, expected"),
    ],
)
def test_what_is_no_blend_is_refused(source: Any, reason: str, shards: list[str]) -> None:
    with pytest.raises(FormatError, match=reason):
        as_torch(source(*shards))


def test_other_refusals(shards: list[str], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="num_packs: only for a blend"):
        as_torch(shards, num_packs=3)
    for number in (0, 10**15):
        with pytest.raises(FormatError, match=f"num_packs {number}: expected at least one pack, at most 100,000,000"):
            as_torch([1, shards[0]], num_packs=number)
    with pytest.raises(FormatError, match="pad_to_multiple_of 0: expected a whole number of at least 1"):
        as_torch(shards, pad_to_multiple_of=0)
    ShardWriter(tmp_path / "empty").finalize()
    with pytest.raises(FormatError, match="empty: has no packs; leave it out of the blend"):
        as_torch([0.5, shards[0], 0.5, str(tmp_path / "empty")])
    for value in ("1", None, 10**400, True):
        with pytest.raises(FormatError, match="expected a number above zero"):
            WeightedPacks([Numbers(0, 1)], [value])


SOURCES: dict[str, Callable[[str, str], Any]] = {
    "paths": lambda x, y: [x, y],
    "opened together": lambda x, y: open_dataset([x, y]),
    "subset": lambda x, y: Subset(open_dataset([x, y]), [0]),  # type: ignore[arg-type]
    "blend of paths": lambda x, y: [0.5, x, 0.5, y],
    "blend of data sets": lambda x, y: [0.5, open_dataset(x), 0.5, open_dataset(y)],
    "blend of shards": lambda x, y: [0.5, Shard(x), 0.5, Shard(y)],
    "blend of a shard and a path": lambda x, y: [0.5, Shard(x), 0.5, y],
    "blend of lists": lambda x, y: [0.5, [x, x], 0.5, [x, y]],
    "shards end to end": lambda x, y: ConcatDataset([Shard(x), SFTIndexedDataset(y)]),  # type: ignore[list-item]
    "blend with a subset": lambda x, y: [0.5, x, 0.5, Subset(Shard(y), [0])],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", SOURCES)
def test_different_tokenizers_are_refused_however_packs_are_handed_over(name: str, tmp_path: Path) -> None:
    for shard, metadata in (
        ("x", {"tokenizer": {"fingerprint": "x"}}),
        ("same", {"tokenizer": {"fingerprint": "x"}}),
        ("unknown", {}),
        ("y", {"tokenizer": {"fingerprint": "y"}}),
    ):
        with ShardWriter(tmp_path / shard, metadata=metadata) as writer:
            writer.add_pack([1, 2], [1, 0], [0])
    x = str(tmp_path / "x")
    for other in ("same", "unknown"):
        assert len(as_torch(SOURCES[name](x, str(tmp_path / other))))
    with pytest.raises(FormatError, match=rf"^{x} and others: different tokenizers \(x, y\); read them separately$"):
        as_torch(SOURCES[name](x, str(tmp_path / "y")))


@pytest.mark.parametrize("name", ["parquet", "memmap"])
def test_different_tokenizers_of_files_are_refused(name: str, tmp_path: Path) -> None:
    paths = []
    for made in ("x", "y"):
        with ShardWriter(tmp_path / made, metadata={"tokenizer": {"fingerprint": made}}) as writer:
            writer.add_pack([1, 2], [1, 0], [0])
        paths.append(str(tmp_path / f"{made}.{name}"))
        convert(str(tmp_path / made), paths[-1], name)
    for source in (paths, [0.5, paths[0], 0.5, paths[1]], [0.5, paths[0], 0.5, str(tmp_path / "y")]):
        with pytest.raises(FormatError, match=r"different tokenizers \(x, y\); read them separately$"):
            as_torch(source)
    assert len(as_torch([0.5, paths[0], 0.5, str(tmp_path / "x")])) == 2


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
