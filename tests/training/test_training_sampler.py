"""Distribution of samples to ranks: every pack once, equal global batches for any number of ranks, even attention."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from blends import build, config_of, key_of, pack_keys, write_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megatron_sft_idx.packing import pack_sequences
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.rows import PADDING, PackedBatchSampler, deal, rows_of


class Costs:
    """The part of a dataset that a sampler uses."""

    def __init__(self, costs: Any) -> None:
        self.costs = np.asarray(costs, np.int64)

    def __len__(self) -> int:
        return len(self.costs)

    def sample_costs(self, samples: Any) -> Any:
        return self.costs[samples]


def sampler(dataset: Any, rank: int, ranks: int, micro: int, consumed: int = 0, **options: Any) -> PackedBatchSampler:
    return PackedBatchSampler(
        dataset,
        consumed_samples=consumed,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        **options,
    )


def steps(dataset: Any, ranks: int, micro: int, batch: int, consumed: int = 0, **options: Any) -> list[Any]:
    """Return the samples of each step: [ranks, micro-batches, packs]."""
    every = [
        list(sampler(dataset, rank, ranks, micro, consumed, global_batch_size=batch, **options))
        for rank in range(ranks)
    ]
    count = batch // (ranks * micro)
    together = np.array(every).reshape(ranks, -1, micro)
    return [together[:, i : i + count] for i in range(0, together.shape[1], count)]


# ---- coverage ----


@settings(deadline=None)
@given(packs=st.integers(1, 70), micro=st.integers(1, 5), ranks=st.integers(1, 5), balance=st.booleans())
def test_every_sample_comes_once(packs: int, micro: int, ranks: int, balance: bool) -> None:
    options = {"balance_attention": balance, "global_batch_size": 2 * micro * ranks}
    every = [sampler(Costs(range(packs)), rank, ranks, micro, drop_last=False, **options) for rank in range(ranks)]
    batches = [list(one) for one in every]
    assert {len(one) for one in every} == {len(found) for found in batches} == {len(batches[0])}
    assert {len(batch) for found in batches for batch in found} == {micro}
    seen = [sample for found in batches for batch in found for sample in batch]
    assert sorted(sample for sample in seen if sample != PADDING) == list(range(packs))
    kept = [list(sampler(Costs(range(packs)), rank, ranks, micro, **options)) for rank in range(ranks)]
    window = 2 * micro * ranks if balance else micro * ranks
    full = packs // window * window
    assert sorted(sample for found in kept for batch in found for sample in batch) == list(range(full))


@pytest.mark.parametrize("micro", [1, 2, 3, 5])
@pytest.mark.parametrize("balance", [False, True])
def test_four_ranks_cover_each_epoch_exactly(tmp_path: Path, micro: int, balance: bool) -> None:
    count, ranks = 60, 4
    prefix = write_packs(tmp_path / "a", count)
    dataset = build(config_of(prefix), (3 * count + ranks * micro, 0, 0))[0]
    options = {"balance_attention": balance, "global_batch_size": ranks * micro}
    keys = {}
    for rank in range(ranks):
        mine = sampler(dataset, rank, ranks, micro, **options)
        samples = [sample for batch in mine for sample in batch]
        rows = [row for batch in DataLoader(dataset, batch_sampler=mine, collate_fn=list) for row in batch]
        assert not keys.keys() & set(samples)
        keys |= dict(zip(samples, map(key_of, rows), strict=True))
    for epoch in range(3):
        found = [keys[sample] for sample in range(epoch * count, (epoch + 1) * count)]
        assert sorted(found) == sorted(pack_keys(count))


def test_evaluation_fills_up_with_masked_rows(tmp_path: Path) -> None:
    dataset = build(config_of(write_packs(tmp_path / "a", 10)))[0]
    loaders = [DataLoader(dataset, batch_sampler=sampler(dataset, rank, 4, 2, drop_last=False)) for rank in range(4)]
    rows = [
        (tuple(tokens[tokens > 0].tolist()), bool(loss.any()))
        for batches in zip(*loaders, strict=True)
        for batch in batches
        for tokens, loss in zip(batch["tokens"], batch["loss_mask"], strict=True)
    ]
    assert len(rows) == 16
    assert sorted(key for key, _ in rows[:10]) == sorted(pack_keys(10))
    assert not any(trained for _, trained in rows[10:])


# ---- resuming ----


@settings(deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    more=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2]),
    stop=st.integers(0, 9),
    balance=st.booleans(),
)
def test_any_number_of_ranks_goes_on_with_the_same_global_batches(
    ranks: int, more: int, micro: int, stop: int, balance: bool
) -> None:
    dataset = Costs(np.random.default_rng(0).integers(1, 1000, 160))
    whole = steps(dataset, ranks, micro, 16, balance_attention=balance)
    rest = steps(dataset, more, micro, 16, consumed=16 * stop, balance_attention=balance)
    assert len(whole) == stop + len(rest) == 10
    for i, step in enumerate(whole):
        assert sorted(step.ravel()) == list(range(16 * i, 16 * i + 16))
    for before, after in zip(whole[stop:], rest, strict=True):
        assert sorted(before.ravel()) == sorted(after.ravel())
        assert more != ranks or before.tolist() == after.tolist()


def batches_of(config: Any, ranks: int, consumed: int = 0, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Return every global batch in the order of samples, read by all ranks, each with its own dataset."""
    out = []
    parts = []
    for rank in range(ranks):
        dataset = build(config, (96, 0, 0))[0]
        loader_sampler = sampler(dataset, rank, ranks, 2, consumed, global_batch_size=8, **options)
        loader = DataLoader(dataset, batch_sampler=loader_sampler)
        parts.append((list(loader_sampler), list(loader)))
    per_step = 8 // (2 * ranks)
    for i in range(0, len(parts[0][0]), per_step):
        samples = [s for found, _ in parts for batch in found[i : i + per_step] for s in batch]
        rows = [batch for _, found in parts for batch in found[i : i + per_step]]
        order = np.argsort(samples)
        out.append({key: torch.cat([row[key] for row in rows])[order] for key in rows[0]})
    return out


@pytest.mark.parametrize("balance", [False, True])
def test_a_blend_resumes_bitwise_on_one_rank_and_on_two(tmp_path: Path, balance: bool) -> None:
    paths = [write_packs(tmp_path / "a", 20, 0), write_packs(tmp_path / "b", 13, 1)]
    config = config_of((paths, [0.7, 0.3]), path_to_cache=str(tmp_path / "cache"))
    whole = batches_of(config, 1, balance_attention=balance)
    assert len(whole) == 12
    for ranks in (1, 2):
        rest = batches_of(config, ranks, consumed=5 * 8, balance_attention=balance)
        assert len(rest) == 7
        for expected, found in zip(whole[5:], rest, strict=True):
            assert expected.keys() == found.keys() >= {"tokens", "labels", "loss_mask", "cu_seqlens", "dataset_id"}
            assert all(torch.equal(expected[key], found[key]) for key in expected)
    rows = [tuple(row.tolist()) for batch in whole for row in batch["tokens"]]
    assert len(set(rows)) == 33


# ---- blends, read natively ----


def blend_of(tmp_path: Path, planned: bool, samples: int = 120, weights: Any = (0.5, 0.3, 0.2)) -> Any:
    """Return a blend of three members: two shards, the second half of a shard by a split, and a small shard."""
    write_packs(tmp_path / "a" / "one", 11, 0)
    write_packs(tmp_path / "a" / "two", 9, 1)
    paths = [str(tmp_path / "a"), write_packs(tmp_path / "b", 30, 2), write_packs(tmp_path / "c", 5, 3)]
    options: dict[str, Any] = {
        "index_only_packing": planned,
        "path_to_cache": str(tmp_path / "cache") if planned else None,
    }
    return build(config_of((paths, list(weights) if weights else None), "40,60,0", **options), (samples, samples, 0))


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("split", [0, 1])
def test_a_blend_read_natively_is_what_megatron_reads_sample_by_sample(
    tmp_path: Path, planned: bool, split: int
) -> None:
    blend = blend_of(tmp_path, planned)[split]
    rows = rows_of(blend)
    mine = sampler(rows, 0, 1, 8)
    loaded = DataLoader(blend, batch_sampler=sampler(blend, 0, 1, 8))
    count = 0
    for expected, found in zip(loaded, BatchLoader(rows.assembler, rows.micro_batches(mine), copy=True), strict=True):
        assert expected.keys() - found.keys() == {"dataset_id"}
        assert all(torch.equal(found[name], expected[name]) for name in found)
        count += 1
    assert count == len(mine) == 15
    assert {int(i) for i in blend.dataset_index} == {0, 1, 2}
    assert torch.equal(rows[17]["tokens"], blend[17]["tokens"])


def test_a_loader_may_be_gone_through_again(tmp_path: Path) -> None:
    rows = rows_of(blend_of(tmp_path, False)[0])
    loader = BatchLoader(rows.assembler, rows.micro_batches(sampler(rows, 0, 1, 8)), copy=True)
    first, second = ([batch["tokens"] for batch in loader] for _ in range(2))
    assert len(first) == len(second) == len(loader) == 15
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (3, 2), (4, 8)])
def test_a_blend_is_filled_up_with_masked_rows(tmp_path: Path, ranks: int, micro: int) -> None:
    write_packs(tmp_path / "a", 10, 0)
    write_packs(tmp_path / "b", 7, 1)
    blend = build(config_of(([str(tmp_path / "a"), str(tmp_path / "b")], None)))[0]
    rows = rows_of(blend)
    loaders = [
        BatchLoader(rows.assembler, rows.micro_batches(sampler(rows, rank, ranks, micro, drop_last=False)), copy=True)
        for rank in range(ranks)
    ]
    seen = [
        (key_of({"tokens": tokens}), bool(loss.any()))
        for batches in zip(*loaders, strict=True)
        for batch in batches
        for tokens, loss in zip(batch["tokens"], batch["loss_mask"], strict=True)
    ]
    assert len(seen) == -(-17 // (ranks * micro)) * ranks * micro
    assert sorted(key for key, _ in seen[:17]) == sorted(pack_keys(10) + pack_keys(7, 1))
    assert not any(trained for _, trained in seen[17:])
    with pytest.raises(ValueError, match="rows_of"):
        sampler(blend, 0, ranks, micro, drop_last=False)


def test_only_packed_data_sets_have_rows(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list: expected a PackedSFTDataset"):
        rows_of([1])
    paths = [write_packs(tmp_path / name, 3, salt) for salt, name in enumerate("ab")]
    blend = build(config_of((paths, None)))[0]
    again = SimpleNamespace(datasets=[blend, blend], dataset_index=blend.dataset_index)
    with pytest.raises(TypeError, match="a blend of blends"):
        rows_of(again)


# ---- attention ----


def test_costs_are_sums_of_squared_lengths(tmp_path: Path) -> None:
    paths = [write_packs(tmp_path / "a", 20, 0), write_packs(tmp_path / "b", 13, 1)]
    single = build(config_of(paths[0]), (50, 0, 0))[0]
    blend = build(config_of((paths, [1.0, 1.0])), (50, 0, 0))[0]
    for dataset in (single, single.rows, blend):
        for i, cost in enumerate(rows_of(dataset).sample_costs(np.arange(50))):
            row = dataset[i]
            bounds = row["cu_seqlens"][row["cu_seqlens"] <= len(key_of(row))]
            assert cost == (bounds.diff() ** 2).sum()


def test_long_packs_are_dealt_evenly() -> None:
    """Packs of chats, 10 % of them long; capacity 32768, 8 ranks, global batch 64."""
    random = np.random.default_rng(0)
    count = 60_000
    long, short = (np.exp(random.normal(np.log(median), sigma, count)) for median, sigma in ((12_000, 0.6), (400, 1.0)))
    lengths = np.clip(np.where(random.random(count) < 0.1, long, short).round(), 1, 32_768).astype(np.int64)
    plan = pack_sequences(lengths, 32_768)
    costs = np.add.reduceat(np.square(lengths[plan.sequences]), plan.offsets[:-1])
    dataset = Costs(costs[: len(costs) // 64 * 64])

    def uneven(balance: bool, across: tuple[int, ...]) -> Any:
        found = [costs[step].sum(axis=across) for step in steps(dataset, 8, 1, 64, balance_attention=balance)]
        return np.array([(each.max(axis=0) / each.mean(axis=0)).mean() for each in found])

    assert len(uneven(True, (1, 2))) > 50
    assert uneven(True, (1, 2)).max() < 1.03  # the ranks of a step, over all steps
    assert uneven(False, (1, 2)).mean() > 1.25
    assert uneven(True, (2,)).mean() < 1.2  # the micro-batches that ranks process at the same time
    assert uneven(False, (2,)).mean() > 1.9


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_dealing_keeps_the_batch_whole(ranks: int, micro_batches: int, packs: int, data: st.DataObject) -> None:
    size = ranks * micro_batches * packs
    costs = np.array(data.draw(st.lists(st.integers(0, 2**40), min_size=size, max_size=size)), np.int64)
    dealt = deal(costs, ranks, micro_batches)
    assert dealt.shape == (ranks, micro_batches, packs)
    assert sorted(dealt.ravel()) == list(range(size))
    assert dealt.tolist() == deal(costs.copy(), ranks, micro_batches).tolist()


def test_micro_batches_of_a_rank_are_evened_out_too() -> None:
    costs = np.random.default_rng(1).integers(1, 1000, 128)
    found = costs[deal(costs, 4, 4)].sum(axis=2)
    assert found.max() / found.mean() < 1.1


def test_packs_that_no_swap_can_even_out_are_dealt_in_few_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    swaps, unravel = [], np.unravel_index
    monkeypatch.setattr(np, "unravel_index", lambda *args: swaps.append(args) or unravel(*args))
    costs = 256 * 512**2 + np.random.default_rng(0).integers(0, 10**7, 1024)
    costs[:3] = 131_072**2  # three whole sequences for two ranks
    found = costs[deal(costs, 2, 512)].sum(axis=(1, 2))
    assert found.max() / found.mean() < 1.15
    assert len(swaps) < 150


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro": 0}, "micro-batch size 0"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"consumed": 40}, r"all samples are consumed \(40 of 40\)"),
        ({"global_batch_size": 6}, "6 is not a multiple of micro-batch size 2 x 2"),
        ({"balance_attention": True}, "balance_attention needs global_batch_size"),
        ({"balance_attention": True, "global_batch_size": 8, "consumed": 4}, "end inside a global batch of 8"),
    ],
)
def test_numbers_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(Costs(range(40)), **{"rank": 0, "ranks": 2, "micro": 2, **options})
