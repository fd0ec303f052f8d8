"""Data sets for other trainers: trained tokens equal the shard's masks; tested here without the trainers."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import Pack, Shard, ShardWriter
from megatron_sft_idx.training.adapters import AutomodelPacks, ShardSequences, TorchtitanPacks, VerlDataset, pack_row

LENGTH, MULTIPLE = 32, 4
Sequences = list[tuple[list[int], set[int]]]


def write_shard(prefix: Path, seed: int = 0, packs: int = 12, **options: Any) -> str:
    """Write packs of sequences of at least one token, with ids up to the largest uint16."""
    rng = np.random.default_rng(seed)
    with ShardWriter(prefix, capacity=LENGTH, sequence_multiple=MULTIPLE, durable=False, **options) as writer:
        for number in range(packs):
            lengths = [1] if number == 3 else rng.integers(1, 9, 3).tolist()
            lengths = [LENGTH] if number == 4 else lengths
            ids = rng.integers(60_000, 65_536, sum(lengths))
            mask = rng.integers(0, 2, sum(lengths))
            mask[np.cumsum(lengths) - 1] = 0
            writer.add_pack(ids, mask, np.cumsum([0, *lengths[:-1]]))
    return str(prefix)


def said_by(shard: Shard) -> Sequences:
    """Return tokens and trained positions of each sequence, the slow way."""
    found = []
    for pack in shard:
        for start, stop in itertools.pairwise(pack["seq_boundaries"].tolist()):
            mask = pack["loss_mask"][start:stop].tolist()
            found.append((pack["input_ids"][start:stop].tolist(), {j + 1 for j, is_on in enumerate(mask) if is_on}))
    return found


def said_by_row(ids: list[int], labels: list[int], lengths: list[int], padded: list[int]) -> Sequences:
    """Return the same for a row whose labels are the next tokens. Check that nothing else is trained."""
    found, at, trained = [], 0, 0
    for length, whole in zip(lengths, padded, strict=True):
        mine, wanted = ids[at : at + length], labels[at : at + length]
        on = {j + 1 for j, label in enumerate(wanted) if label != -100}
        assert all(mine[j] == wanted[j - 1] for j in on)
        trained += len(on)
        found.append((mine, on))
        at += whole
    assert trained == sum(label != -100 for label in labels)
    return found


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_shard(tmp_path / "chats")


@pytest.mark.parametrize("multiple", [1, MULTIPLE])
def test_rows_are_what_the_shard_says(prefix: str, multiple: int) -> None:
    shard, found = Shard(prefix), []
    for pack in shard:
        row = pack_row(pack, LENGTH, multiple)
        assert {array.dtype for array in row} == {np.dtype(np.int64)}
        assert not (row.padded_lengths % multiple).any()
        ends = [0, *np.cumsum(row.padded_lengths).tolist(), LENGTH]
        positions = [j for a, b in itertools.pairwise(ends) for j in range(b - a)]
        assert row.position_ids.tolist() == positions
        found += said_by_row(
            *(row._asdict()[name].tolist() for name in ("input_ids", "labels", "lengths", "padded_lengths"))
        )
    assert found == said_by(shard)
    assert max(token for ids, _ in found for token in ids) > 65_000


def test_another_trained_token_would_show(prefix: str) -> None:
    pack = dict(Shard(prefix)[0])
    pack["loss_mask"] = pack["loss_mask"].copy()
    pack["loss_mask"][0] ^= 1
    row = pack_row(Pack(**pack), LENGTH)
    names = ("input_ids", "labels", "lengths", "padded_lengths")
    assert said_by_row(*(row._asdict()[name].tolist() for name in names)) != said_by(Shard(prefix))[:3]


def test_sequences_are_what_the_shards_say(tmp_path: Path, prefix: str) -> None:
    write_shard(tmp_path / "others", 1)
    both = [prefix, str(tmp_path / "others")]
    expected = [each for path in both for each in said_by(Shard(path))]
    for sequences in (ShardSequences(both), pickle.loads(pickle.dumps(ShardSequences(both)))):
        found = []
        for i in range(len(sequences)):
            ids, mask = sequences[i]
            assert (ids.dtype, mask.dtype) == (np.int64, np.int64)
            found.append((ids.tolist(), set(np.flatnonzero(mask).tolist())))
        assert found == expected
    assert ShardSequences(both)[-1][0].tolist() == expected[-1][0]
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            ShardSequences(both)[index]


def test_verl_has_the_sequences(prefix: str) -> None:
    expected, items = said_by(Shard(prefix)), VerlDataset([prefix], config={"pad_mode": "no_padding"})
    assert len(items) == len(expected)
    for item, (ids, trained) in zip((items[i] for i in range(len(items))), expected, strict=True):
        assert item["input_ids"].tolist() == ids
        assert set(item["loss_mask"].nonzero().flatten().tolist()) == trained
        assert item["position_ids"].tolist() == list(range(len(ids)))
    assert len(VerlDataset(prefix, max_samples=3)) == 3
    with pytest.raises(FormatError, match="pad_mode=right"):
        VerlDataset(prefix, config={"pad_mode": "right"})


@pytest.mark.parametrize("multiple", [1, MULTIPLE])
def test_automodel_has_the_packs(prefix: str, multiple: int) -> None:
    rows, found = AutomodelPacks(prefix, LENGTH, sequence_multiple=multiple), []
    for item in (rows[i] for i in range(len(rows))):
        assert sum(item["seq_lens_padded"]) == len(item["input_ids"]) == LENGTH
        found += said_by_row(item["input_ids"], item["labels"], item["seq_lens"], item["seq_lens_padded"])
    assert found == said_by(Shard(prefix))


def test_packs_that_may_not_fit_are_refused_before_training(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(FormatError, match="longest pack has 32 tokens, more than seq_length 16"):
        AutomodelPacks(prefix, 16)
    with pytest.raises(FormatError, match="may not fit seq_length 32 with sequences rounded up to multiples of 8"):
        AutomodelPacks(prefix, LENGTH, sequence_multiple=8)
    with pytest.raises(FormatError, match="seq_length must be a multiple"):
        AutomodelPacks(prefix, 30, sequence_multiple=4)
    with pytest.raises(ShardNotFoundError):
        ShardSequences(tmp_path / "nothing")


def taken(packs: TorchtitanPacks, count: int) -> list[list[int]]:
    return [inputs["input"].tolist() for inputs, _ in itertools.islice(packs, count)]


def test_torchtitan_takes_every_pack_once_an_epoch_on_any_number_of_ranks(prefix: str) -> None:
    alone = taken(TorchtitanPacks(prefix, LENGTH), 24)
    first, second = ({*map(tuple, epoch)} for epoch in (alone[:12], alone[12:]))
    assert first == second == {tuple(pack_row(pack, LENGTH).input_ids.tolist()) for pack in Shard(prefix)}
    assert alone[:12] != alone[12:]
    ranks = [taken(TorchtitanPacks(prefix, LENGTH, rank=rank, world_size=3), 8) for rank in range(3)]
    assert [row for step in zip(*ranks, strict=True) for row in step] == alone
    inputs, labels = next(iter(TorchtitanPacks(prefix, LENGTH)))
    assert {inputs["input"].dtype, inputs["positions"].dtype, labels.dtype} == {torch.int64}


def test_torchtitan_goes_on_where_it_stopped_and_nowhere_else(tmp_path: Path, prefix: str) -> None:
    packs = TorchtitanPacks(prefix, LENGTH, world_size=2)
    whole = taken(TorchtitanPacks(prefix, LENGTH, world_size=2), 10)
    assert taken(packs, 4) == whole[:4]
    resumed = TorchtitanPacks(prefix, LENGTH, world_size=2)
    resumed.load_state_dict(packs.state_dict())
    assert taken(resumed, 6) == whole[4:]
    write_shard(tmp_path / "others", 1)
    for other, said in (
        (
            TorchtitanPacks(prefix, LENGTH, world_size=2, seed=1),
            "seed 0, but this run has 1, so packs would be repeated or lost",
        ),
        (TorchtitanPacks(prefix, LENGTH), "world_size 2, but this run has 1"),
        (TorchtitanPacks(tmp_path / "others", LENGTH, world_size=2), "with fingerprint"),
    ):
        with pytest.raises(FormatError, match=said):
            other.load_state_dict(packs.state_dict())


def test_weights_are_refused_where_a_trainer_would_round_them(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "weighed", capacity=LENGTH, mask_dtype=np.float32, durable=False) as writer:
        writer.add_pack([1, 2, 3], [0.5, 1, 0], [0])
    for item in (
        lambda: AutomodelPacks(tmp_path / "weighed", LENGTH)[0],
        lambda: next(iter(TorchtitanPacks(tmp_path / "weighed", LENGTH))),
        lambda: ShardSequences(tmp_path / "weighed")[0],
        lambda: VerlDataset(str(tmp_path / "weighed"))[0],
    ):
        with pytest.raises(FormatError, match="weights other than 0 and 1"):
            item()
    weights = VerlDataset(str(tmp_path / "weighed"), config={"loss_weights": True})[0]["loss_mask"]
    assert weights.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("kind", [AutomodelPacks, TorchtitanPacks, ShardSequences])
def test_preference_pairs_are_refused(tmp_path: Path, kind: Any) -> None:
    spec = ColumnSpec("sequence", np.uint32, 2)
    with ShardWriter(tmp_path / "pairs", capacity=LENGTH, durable=False, columns={"pair": spec}) as writer:
        writer.add_pack([1, 2, 3, 4], [1, 0, 1, 0], [0, 2], columns={"pair": np.array([[0, 0], [0, 1]])})
    with pytest.raises(FormatError, match="preference pairs"):
        kind(tmp_path / "pairs", *([] if kind is ShardSequences else [LENGTH]))
