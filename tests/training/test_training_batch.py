"""Batches as tensors: from shards, in buffers of the caller, for context parallelism, narrow and widened."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_twin import slow_batch
from sample_packs import Sample, sample_of, write_samples
from training_source import StoredRows, random_samples, sequences_of, two_shards

from megatron_sft_idx.shard import Shard
from megatron_sft_idx.training.batch import Batch, BatchAssembler, widen

WIDE = {"tokens", "labels", "position_ids", "loss_mask", "cu_seqlens", "max_seqlen"}


def assert_equal(batch: dict[str, torch.Tensor], slow: dict[str, list[Any]]) -> None:
    assert batch.keys() == slow.keys()
    for name, tensor in batch.items():
        expected = torch.tensor(slow[name], dtype=tensor.dtype)
        assert torch.equal(tensor, expected), name


def slow_of(assembler: BatchAssembler, packs: list[Sample]) -> dict[str, list[Any]]:
    rows = [sequences_of(pack) for pack in packs]
    return slow_batch(rows, assembler.seq_length, assembler.width, assembler.sequence_multiple, assembler.pad_id)


def test_batches_of_two_shards_are_the_slow_ones(tmp_path: Path) -> None:
    source, packs = two_shards(tmp_path)
    order = np.random.default_rng(1).permutation(len(packs))
    assembler = BatchAssembler(source, 48)
    assert assembler.width == source.most_sequences + 2
    assert assembler.pad_id == 9
    for rows in (1, 3, 8):
        for first in range(0, len(order), rows):
            picked = order[first : first + rows]
            batch = assembler.assemble(picked)
            assert_equal(batch, slow_of(assembler, [packs[i] for i in picked]))
            wide = (torch.int64, torch.int64, torch.int64, torch.float32, torch.int32, torch.int32)
            assert tuple(t.dtype for t in batch.values()) == wide


@pytest.mark.parametrize("multiple", [2, 4, 8])
def test_sequences_are_padded_for_context_parallelism(tmp_path: Path, multiple: int) -> None:
    rng = np.random.default_rng(multiple)
    packs = random_samples(20, 40, rng)[1:]  # without the pack that is full before padding
    length = max(pack.padded(8) for pack in packs)
    length += -length % 8
    write_samples(tmp_path / "x", packs, capacity=length, sequence_multiple=8)
    assembler = BatchAssembler(
        StoredRows(Shard(tmp_path / "x"), sequence_multiple=8), length, sequence_multiple=multiple
    )
    batch = assembler.assemble(np.arange(len(packs)))
    assert_equal(batch, slow_of(assembler, packs))
    sizes, own = batch["cu_seqlens_padded"].diff(dim=1), batch["cu_seqlens"].diff(dim=1)
    assert not (sizes % multiple).any()
    assert (own <= sizes).all()
    assert (sizes.sum(1) == length).all()
    assert batch["cu_seqlens"][:, -1].tolist() == [len(pack.tokens) for pack in packs]
    for row, pack in enumerate(packs):
        pieces = [
            batch["tokens"][row, at : at + size].tolist()
            for at, size in zip(batch["cu_seqlens_padded"][row, :-1].tolist(), own[row].tolist(), strict=True)
            if size
        ]
        assert pieces == [ids for ids, _ in sequences_of(pack)]


def test_a_sample_is_a_row_and_a_masked_one_trains_nothing(tmp_path: Path) -> None:
    source, packs = two_shards(tmp_path)
    assembler = BatchAssembler(source, 40, width=12)
    row = assembler.sample(3)
    expected = {name: rows[0] for name, rows in slow_of(assembler, [packs[3]]).items()}
    assert_equal(row, expected)
    assert row["max_seqlen"].shape == ()
    assert row["loss_mask"].any()
    masked = assembler.sample(3, masked=True)
    assert not masked.pop("loss_mask").any()
    assert all(torch.equal(masked[name], row[name]) for name in masked)


def test_buffers_of_the_callers_are_filled_again_and_again(tmp_path: Path) -> None:
    source, packs = two_shards(tmp_path)
    assembler = BatchAssembler(source, 40)
    out = Batch(assembler.layout(4))
    address = out.storage.data_ptr()
    for picked in ([0, 1, 2, 3], [9, 13, 20, 5], [0, 12, 25], [7], []):
        batch = assembler.assemble(picked, out)
        assert_equal(
            {name: t for name, t in batch.items() if picked},
            {name: t for name, t in slow_of(assembler, [packs[i] for i in picked]).items() if picked},
        )
        assert batch["tokens"].shape == (len(picked), 40)
        assert not picked or batch["tokens"].data_ptr() == address
    with pytest.raises(ValueError, match="a batch of 5 rows does not fit the buffers of 4"):
        assembler.assemble([0, 1, 2, 3, 4], out)
    with pytest.raises(ValueError, match="this assembler fills"):
        assembler.assemble([0], Batch(BatchAssembler(source, 48).layout(1)))


def test_fresh_batches_share_nothing(tmp_path: Path) -> None:
    source, _ = two_shards(tmp_path)
    assembler = BatchAssembler(source, 40)
    first = assembler.assemble([0, 1])
    kept = {name: t.clone() for name, t in first.items()}
    assembler.assemble([5, 6])
    assert all(torch.equal(first[name], kept[name]) for name in first)


def test_pinning_is_left_out_where_there_is_no_gpu(tmp_path: Path) -> None:
    source, _ = two_shards(tmp_path)
    batch = Batch(BatchAssembler(source, 40).layout(2), pin_memory=True)
    assert batch.storage.is_pinned() == torch.cuda.is_available()


@pytest.mark.parametrize("multiple", [1, 4])
def test_narrow_batches_widen_to_the_wide_ones(tmp_path: Path, multiple: int) -> None:
    packs = random_samples(12, 40, np.random.default_rng(3))[1:]
    packs.append(sample_of([8] * 6, lambda p: p % 2, lambda p: p + 1))  # exactly full, no tail
    write_samples(tmp_path / "x", packs, capacity=48)
    source = StoredRows(Shard(tmp_path / "x"), sequence_multiple=4, pad_id=3)
    wide = BatchAssembler(source, 48, sequence_multiple=multiple).assemble(np.arange(len(packs)))
    for form, dtype in (("narrow", torch.uint8), ("narrow-weighted", torch.float32)):
        narrow = BatchAssembler(source, 48, sequence_multiple=multiple, form=form).assemble(np.arange(len(packs)))
        assert narrow["tokens"].dtype == torch.int32
        assert narrow["loss_mask"].dtype == dtype
        assert "labels" not in narrow
        assert "position_ids" not in narrow
        widened = widen(narrow, 3, "cpu")
        assert widened.keys() == wide.keys()
        for name, tensor in wide.items():
            assert widened[name].dtype == tensor.dtype, name
            assert torch.equal(widened[name], tensor), name
        assert narrow["tokens"].dtype == torch.int32  # widen does not change its argument


def test_weights_are_refused_by_a_flag_mask(tmp_path: Path) -> None:
    source, _ = two_shards(tmp_path)
    narrow = BatchAssembler(source, 40, form="narrow")
    narrow.assemble([0, 1])  # the first shard has flags
    with pytest.raises(ValueError, match="request a float32 mask"):
        narrow.assemble([0, 20])


def test_an_assembler_pickles_as_its_source(tmp_path: Path) -> None:
    source, packs = two_shards(tmp_path)
    assembler = BatchAssembler(source, 40)
    assembler.assemble([0])
    again = pickle.loads(pickle.dumps(assembler))
    assert len(pickle.dumps(assembler)) < 2000
    assert_equal(again.assemble([1, 20]), slow_of(assembler, [packs[1], packs[20]]))


def test_what_is_announced_changes_nothing_but_the_time(tmp_path: Path) -> None:
    source, packs = two_shards(tmp_path)
    assembler = BatchAssembler(source, 40)
    segments = assembler.plan([2, 25])
    assembler.will_need(segments)
    assert_equal(assembler.fill(segments, Batch(assembler.layout(2))), slow_of(assembler, [packs[2], packs[25]]))


class Damaged(StoredRows):
    """A source with the index of another shard."""

    def segments(self, packs: Any) -> Any:
        segments = super().segments(packs)
        segments.starts[-1] += 10_000
        return segments


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    source, _ = two_shards(tmp_path)
    with pytest.raises(ValueError, match="sequence length 41 is not a multiple of the sequence multiple 2"):
        BatchAssembler(source, 41, sequence_multiple=2)
    with pytest.raises(ValueError, match="packs of up to 40 tokens do not fit a sequence length of 32"):
        BatchAssembler(source, 32)
    with pytest.raises(ValueError, match="pack again with a sequence multiple of 2"):
        BatchAssembler(source, 40, sequence_multiple=2)
    BatchAssembler(source, 64, sequence_multiple=2)  # the longest pack fits with any padding of its sequences
    with pytest.raises(ValueError, match="row 0: cu_seqlens of width 2 have no room for its"):
        BatchAssembler(source, 40, width=2).assemble([1])
    with pytest.raises(ValueError, match="the index is damaged"):
        BatchAssembler(Damaged(*source.shards), 40).assemble([1])
    below = source.segments(np.array([1]))
    below.shards[0] = -1
    with pytest.raises(ValueError, match="shard -1"):
        BatchAssembler(source, 40).fill(below, Batch(BatchAssembler(source, 40).layout(1)))
