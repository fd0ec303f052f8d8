"""``PackedSFTDataset`` under Megatron's own builder."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blends import CAPACITY, build, config_of, digest_of, key_of, keys_of, pack_keys, packs_of, write_packs
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.utils import Split
from sample_packs import sample_of, write_samples

from megatron_sft_idx.check import GivenFacts, rebuild
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.shard import Shard, write_column
from megatron_sft_idx.storage import ReadOptions
from megatron_sft_idx.training.batch import whole_batch
from megatron_sft_idx.training.rows import PackedRows, stored_packs
from megatron_sft_idx.training.sft_dataset import PackedSFTDataset


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_packs(tmp_path / "a", 40)


def train_of(config: Any, size: int | None = None) -> Any:
    return build(config, (size, size, size))[0]


# ---- rows ----


def test_a_row_is_megatrons(tmp_path: Path) -> None:
    prefix = write_packs(tmp_path / "a", 12, pad_id=0)
    dataset = train_of(config_of(prefix))
    by_key = {tuple(pack.tokens): pack for pack in packs_of(12)}
    most = max(len(pack.starts) for pack in by_key.values())
    for row in (dataset[i] for i in range(12)):
        pack = by_key[key_of(row)]
        length = len(pack.tokens)
        assert {key: (value.dtype, tuple(value.shape)) for key, value in row.items()} == {
            "tokens": (torch.int64, (CAPACITY,)),
            "labels": (torch.int64, (CAPACITY,)),
            "position_ids": (torch.int64, (CAPACITY,)),
            "loss_mask": (torch.float32, (CAPACITY,)),
            "cu_seqlens": (torch.int32, (most + 2,)),
            "max_seqlen": (torch.int32, ()),
        }
        assert row["tokens"][:length].tolist() == pack.tokens
        assert row["loss_mask"].tolist() == pack.label_mask + [0] * (CAPACITY - length)
        bounds = [*pack.bounds, *([CAPACITY] * (most + 2 - len(pack.bounds)))]
        assert row["cu_seqlens"].tolist() == bounds
        assert row["max_seqlen"] == max(np.diff(bounds))


def test_negative_and_missing_indices_are_masked_rows(prefix: str) -> None:
    dataset = train_of(config_of(prefix), 100)
    assert dataset[99]["loss_mask"].any()
    for index, same in ((-1, 99), (-100, 0), (None, 99)):
        row = dataset[index]
        assert not row["loss_mask"].any()
        assert row["tokens"].tolist() == dataset[same]["tokens"].tolist()
    for outside in (100, -101):
        with pytest.raises(IndexError):
            dataset[outside]
        with pytest.raises(IndexError):
            dataset.rows.__getitems__([0, outside])
    batch = dataset.rows.__getitems__([99, -1, 5]).whole()
    for at, index in enumerate((99, -1, 5)):
        assert all(torch.equal(batch[key][at], value) for key, value in dataset[index].items())


@pytest.mark.parametrize("options", [{"sequence_multiple": 4}, {"context_parallel_size": 2}])
def test_sequences_are_padded_inside_for_context_parallelism(tmp_path: Path, options: dict[str, int]) -> None:
    prefix = write_packs(tmp_path / "a", 20, sequence_multiple=8, capacity=48)
    dataset = train_of(config_of(prefix, sequence_length=48, **options))
    for i in range(20):
        row = dataset[i]
        assert not (row["cu_seqlens_padded"] % 4).any()
        assert row["cu_seqlens_padded"].max() == 48
    assert Counter(keys_of(dataset)) == Counter(pack_keys(20))


# ---- length, splits, order ----


def test_one_epoch_or_as_many_samples_as_asked_for(prefix: str) -> None:
    one = train_of(config_of(prefix))
    assert len(one) == 40
    assert sorted(keys_of(one)) == sorted(pack_keys(40))
    long = keys_of(train_of(config_of(prefix), 130))
    assert len(long) == 130
    for epoch in range(3):
        assert sorted(long[40 * epoch : 40 * epoch + 40]) == sorted(pack_keys(40))
    assert long[:40] == keys_of(one)
    assert long[:40] != long[40:80]
    assert keys_of(train_of(config_of(prefix), 57)) == long[:57]
    assert keys_of(train_of(config_of(prefix, random_seed=8)))[:40] != long[:40]


def test_splits_go_by_pack(tmp_path: Path) -> None:
    prefix = write_packs(tmp_path / "a", 200)
    train, valid, test = build(config_of(prefix, "98,1,1"))
    keys = pack_keys(200)
    assert sorted(keys_of(train)) == sorted(keys[:196])
    assert sorted(keys_of(valid)) == sorted(keys[196:198])
    assert sorted(keys_of(test)) == sorted(keys[198:])
    assert build(config_of(prefix, "100,0,0"))[1:] == [None, None]


def test_the_order_is_of_the_data_and_not_of_its_path(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write_packs(tmp_path / folder / "s-1", 9)
        write_packs(tmp_path / folder / "s-2", 12, salt=1)
    there = train_of(config_of(str(tmp_path / "x")), 50)
    assert sorted(keys_of(there)[:21]) == sorted(pack_keys(9) + pack_keys(12, 1))
    assert keys_of(train_of(config_of(f"{tmp_path}/y/s-*")), range(21)) == keys_of(there, range(21))
    key = there.unique_description_hash
    write_packs(tmp_path / "x" / "s-2", 12, salt=2, overwrite=True)
    assert train_of(config_of(str(tmp_path / "x")), 50).unique_description_hash != key


# ---- blends ----


def test_weighted_blend(tmp_path: Path) -> None:
    paths = [write_packs(tmp_path / name, count, salt) for salt, (name, count) in enumerate([("a", 30), ("b", 50)])]
    config = config_of((paths, [3.0, 1.0]), num_dataset_builder_threads=2)
    blend = train_of(config, 120)
    assert isinstance(blend, BlendedDataset)
    assert len(blend) == 120
    counts = Counter(int(row["dataset_id"]) for row in (blend[i] for i in range(120)))
    assert counts == {0: 90, 1: 30}
    first = [key_of(row) for row in (blend[i] for i in range(120)) if row["dataset_id"] == 0]
    assert Counter(first) == dict.fromkeys(pack_keys(30), 3)
    assert len({row["cu_seqlens"].shape for row in (blend[i] for i in range(120))}) == 1
    again = pickle.loads(pickle.dumps(blend))  # as in a worker process of a DataLoader
    assert keys_of(again) == keys_of(blend)
    assert all(isinstance(part, PackedRows) for part in again.datasets)


def test_unweighted_blend_is_one_epoch_of_all(tmp_path: Path) -> None:
    paths = [write_packs(tmp_path / name, count, salt) for salt, (name, count) in enumerate([("a", 30), ("b", 50)])]
    blend = train_of(config_of((paths, None)))
    assert sorted(keys_of(blend)) == sorted(pack_keys(30) + pack_keys(50, 1))


def test_a_blend_for_each_split_and_several_validation_sets(tmp_path: Path) -> None:
    a, b, c = (write_packs(tmp_path / name, 20 + salt, salt) for salt, name in enumerate("abc"))
    blends = [([a, b], [1.0, 2.0]), ([b, c], None), ([c], None)]
    config = config_of(blend_per_split=blends, multiple_validation_sets=True)
    train, valid, test = build(config, (30, None, None))
    assert len(train) == 30
    assert [sorted(keys_of(one)) for one in valid] == [sorted(pack_keys(21, 1)), sorted(pack_keys(22, 2))]
    assert sorted(keys_of(test)) == sorted(pack_keys(22, 2))
    none = config_of(blend_per_split=[([a], None), None, None])
    assert [None if one is None else len(one) for one in build(none)] == [20, None, None]


def test_blend_and_cache_folder_without_torch_distributed(tmp_path: Path) -> None:
    paths = [write_packs(tmp_path / name, 20, salt) for salt, name in enumerate("ab")]
    cached = config_of((paths, [1.0, 1.0]), path_to_cache=str(tmp_path / "cache"))
    assert keys_of(train_of(cached, 60)) == keys_of(train_of(config_of((paths, [1.0, 1.0])), 60))


# ---- index-only packing ----


def corpus(prefix: Path, count: int, salt: int = 0) -> list[tuple[int, ...]]:
    """An unpacked shard; returns its sequences."""
    packs = packs_of(count, salt)
    sequences = [tuple(pack.tokens[a:b]) for pack in packs for a, b in pairwise(pack.bounds)]
    write_samples(prefix, packs, capacity=CAPACITY)
    return sequences


def sequences_in(row: Any) -> list[tuple[int, ...]]:
    bounds = row["cu_seqlens"].tolist()
    cut = (tuple(row["tokens"][a:b].tolist()) for a, b in pairwise(bounds) if a < b)
    return [sequence for sequence in cut if any(sequence)]


def test_index_only_packing_splits_by_sequence(tmp_path: Path) -> None:
    sequences = corpus(tmp_path / "a", 60)
    config = config_of(str(tmp_path / "a"), "9,1,0", index_only_packing=True, path_to_cache=str(tmp_path / "cache"))
    train, valid, _ = build(config)
    cut = round(0.9 * len(sequences))
    for dataset, expected in ((train, sequences[:cut]), (valid, sequences[cut:])):
        found = [sequence for i in range(len(dataset)) for sequence in sequences_in(dataset[i])]
        assert sorted(found) == sorted(expected)
        assert dataset[0]["cu_seqlens"].shape == train[0]["cu_seqlens"].shape
    assert len(train) < 54
    assert len(list((tmp_path / "cache").glob("sft-plan-*.bin"))) == 2


def test_index_only_blend_of_uneven_corpora_has_one_width(tmp_path: Path) -> None:
    corpus(tmp_path / "a", 60)
    write_samples(tmp_path / "b", [pack for pack in packs_of(60, 1) if len(pack.tokens) > 20])
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    blend = train_of(config_of((paths, [1.0, 1.0]), index_only_packing=True), 40)
    assert len({blend[i]["cu_seqlens"].shape for i in range(40)}) == 1
    assert {int(blend[i]["dataset_id"]) for i in range(40)} == {0, 1}


# ---- where samples are stored ----


@pytest.mark.parametrize("split", ["1,0,0", "2,8,0"])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("paths", ["a", "*", "a b", "* a"])
def test_the_packs_of_samples_are_found(paths: str, planned: bool, split: str, tmp_path: Path) -> None:
    for salt, name in enumerate("ab"):
        write_packs(tmp_path / name, 20 + salt, salt)
    blend = [str(tmp_path / path) for path in paths.split()]
    config = config_of((blend, [1.0] * len(blend)), split, index_only_packing=planned)
    for dataset in filter(None, build(config, (50, 30, 30))):
        for sample in range(0, len(dataset), 7):
            found = stored_packs(dataset, [sample])
            stored = [Shard(prefix).sequences(number) for prefix, numbers in found.items() for number in numbers]
            texts = [{tuple(ids.tolist()) for ids, _ in sequences} for sequences in stored]
            wanted = {*sequences_in(dataset[sample])}
            assert wanted <= set().union(*texts)
            assert all(text & wanted if planned else text == wanted for text in texts)
        together = stored_packs(dataset, range(len(dataset)))
        assert all(numbers == sorted({*numbers}) for numbers in together.values())
        with pytest.raises(IndexError, match=f"there are {len(dataset)}"):
            stored_packs(dataset, [len(dataset)])


# ---- repr and pickling ----


def test_it_says_what_an_epoch_holds(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    packs = packs_of(40)
    tokens = sum(len(pack.tokens) for pack in packs)
    trained = sum(map(bool, (value for pack in packs for value in pack.label_mask)))
    with caplog.at_level(logging.INFO):
        train_of(config_of(prefix, global_batch_size=16))
        build(config_of(prefix, "3,1,0"))
    assert f"an epoch is 40 packs, {tokens} tokens, {trained} of them trained on, 2.5 steps of 16" in caplog.text
    part = sum(len(pack.tokens) for pack in packs[30:])
    assert f"(valid): an epoch is 10 packs, {part} tokens, about {round(trained * part / tokens)} of" in caplog.text


def test_packs_that_train_nothing_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packs = [sample_of([4, 5], lambda p, i=i: int(i != 2), lambda p: p) for i in range(5)]
    write_samples(tmp_path / "a", packs, capacity=CAPACITY)
    config_of(str(tmp_path / "a"))
    assert "1 of 5 packs have no trained token" in caplog.text
    assert "rows of 32 are 28% full" in caplog.text


@pytest.mark.parametrize("options", [{}, pytest.param({"index_only_packing": True}, marks=pytest.mark.slow)])
def test_it_pickles_light_and_is_read_without_megatron(tmp_path: Path, prefix: str, options: Any) -> None:
    config = config_of(prefix, "1,1,0", path_to_cache=str(tmp_path), **options)
    train, valid, _ = build(config, (90, 30, 0))
    train[0]
    raw = pickle.dumps(valid)
    assert len(raw) < 200 + len(prefix) + (100 + len(str(tmp_path)) if options else 0)
    program = """
import json, pickle, sys
rows = pickle.load(sys.stdin.buffer)
print(json.dumps([len(rows), [rows[i]["tokens"].tolist() for i in range(len(rows))]]))
print([name for name in sys.modules if name.startswith("megatron.")])
"""
    done = subprocess.run([sys.executable, "-c", program], input=raw, capture_output=True, check=True)
    found, modules = done.stdout.decode().splitlines()
    assert found == str([30, [valid[i]["tokens"].tolist() for i in range(30)]])
    assert modules == "[]"
    assert isinstance(pickle.loads(raw), PackedRows)


# ---- refusals, before any rank waits ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blend": None}, "neither blend nor blend_per_split"),
        ({"blend": ([], None)}, "without any path"),
        ({"blend": (["P", "P"], [1.0, 0.0])}, "a: blend weight 0.0"),
        ({"blend": (["P", "P"], [1.0, float("nan")])}, "a: blend weight nan"),
        ({"blend": (["P", "P"], [1.0, -1])}, "a: blend weight -1.0, expected a number above zero"),
        ({"blend": (["P", "P"], [1.0, 10**400])}, "a: blend weight a huge number, expected a number above zero"),
        ({"blend": (["P", "P"], [1.0, "1"])}, "a: blend weight '1', expected a number above zero"),
        ({"blend": (["P", "P"], [1e308, 1e308])}, "the sum of the weights is too large for a float"),
        ({"blend": (["P", "P"], "11")}, "the weights are '11', expected a list of numbers"),
        ({"blend": (["P", "P"], 0.5)}, "the weights are 0.5, expected a list of numbers"),
        ({"blend": (["P", "P"], [1.0])}, "1 weights for 2 paths"),
        ({"split": "98,1,1"}, "a: the test split is empty, 0.99 to 1 of 40 packs"),
        ({"split": "1,0,0,0"}, "split '1,0,0,0' or a related option: expected up to three numbers"),
        ({"split": "9.8.1"}, "split '9.8.1' or a related option: could not convert string to float"),
        ({"sequence_length": 31}, "packs of up to 32 tokens, but sequence_length is 31"),
        ({"sequence_length": 33, "sequence_multiple": 2}, "33 is not a multiple of the sequence multiple 2"),
        ({"sequence_multiple": 2}, "packed for sequence multiple 1, .* multiples of 2"),
        ({"tokenizer_fingerprint": "ours"}, "tokenized with theirs, but the tokenizer of this job is ours"),
        ({"read": ReadOptions(backend="s3")}, "read: backend 's3', choose one of mmap, os, pread, reopen"),
        ({"blend": (["P", "other"], None), "sequence_length": 64}, "other: capacity is 40, but 32 in .*a"),
        ({"blend": (["P", "foreign"], None)}, "foreign: tokenizer is strange, but theirs in .*a"),
        ({"blend": (["nowhere"], None)}, "nowhere: no shard here"),
        ({"index_only_packing": True, "packing_method": "magic"}, "index-only packing: unknown method 'magic'"),
        ({"index_only_packing": True, "random_seed": -1}, "index-only packing: seed is -1"),
        ({"index_only_packing": True, "sequence_length": 8}, r"a: \d+ of \d+ sequences are longer than 8 tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_at_once(tmp_path: Path, options: Any, message: str) -> None:
    made_by = {"tokenizer": {"fingerprint": "theirs"}}
    prefix = write_packs(tmp_path / "a", 40, metadata=made_by)
    write_packs(tmp_path / "other", 4, capacity=40)
    write_packs(tmp_path / "foreign", 4, metadata={"tokenizer": {"fingerprint": "strange"}})
    options = {"blend": (["P"], None), "split": "1,0,0", **options}
    if options["blend"] is not None:
        paths, weights = options["blend"]
        options["blend"] = ([prefix if path == "P" else str(tmp_path / path) for path in paths], weights)
    with pytest.raises(SFTIndexError, match=message):
        config_of(**options)


def test_a_split_without_a_whole_pair_is_refused_before_any_rank_waits(tmp_path: Path) -> None:
    write_samples(tmp_path / "a", [sample_of([3, 3], lambda p: 1, lambda p: p + 1)] * 10, capacity=16, pad_id=0)
    pairs = np.array([[number // 2, number % 2] for number in range(20)], np.uint32)
    write_column(tmp_path / "a", "pair", pairs, per="sequence")
    options = {"sequence_length": 16, "index_only_packing": True, "columns": ("pair",)}
    assert len(train_of(config_of(str(tmp_path / "a"), split="80,10,10", **options), 4)) == 4
    with pytest.raises(FormatError, match=r"the valid split is empty, 0.9 to 0.95 of 20 sequences"):
        config_of(str(tmp_path / "a"), split="90,5,5", **options)


@pytest.mark.parametrize("lost", [".idx", ".seq.idx"])
def test_a_rebuilt_shard_trains_as_the_one_that_was_lost(tmp_path: Path, lost: str) -> None:
    prefix = write_packs(tmp_path / "a", 40, pad_id=3, sequence_multiple=2)

    def batches() -> list[str]:
        dataset = train_of(config_of(prefix), 100)
        return [digest_of(dataset.rows.__getitems__(range(start, start + 20)).whole()) for start in range(0, 100, 20)]

    wanted = batches()
    os.unlink(prefix + lost)
    rebuild(prefix, GivenFacts(capacity=CAPACITY, sequence_multiple=2, pad_id=3))
    assert Shard(prefix).header.rebuilt == (lost == ".seq.idx")
    assert batches() == wanted


def test_indices_that_are_no_range(prefix: str) -> None:
    config = config_of(prefix)
    low = PackedSFTDataset.build_low_level_dataset(prefix, config)
    assert PackedSFTDataset.numel_low_level_dataset(low) == 40
    for indices, message in (([], "split is empty"), ([1, 3], "not a range"), ([2, 1], "not a range")):
        with pytest.raises(FormatError, match=message):
            PackedSFTDataset(low, prefix, np.array(indices, np.int32), 3, Split.train, config)
    everything = PackedSFTDataset(low, prefix, None, None, Split.train, config)
    assert len(everything) == 40


def test_a_dataloader_takes_whole_batches(prefix: str) -> None:
    dataset = train_of(config_of(prefix), 40)
    wanted = [dataset.rows.__getitems__(range(start, start + 8)).whole() for start in range(0, 40, 8)]
    for collate in (whole_batch, None):
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, collate_fn=collate)
        for batch, expected in zip(loader, wanted, strict=True):
            assert batch.keys() == expected.keys()
            assert all(torch.equal(batch[key], expected[key]) for key in expected)
    filled = dataset.__getitems__([0, -1]).whole()
    assert filled["loss_mask"][0].any()
    assert not filled["loss_mask"][1].any()


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_padding_mask_is_true_where_no_token_lies(tmp_path: Path, multiple: int) -> None:
    packs = packs_of(9)
    write_samples(tmp_path / "x", packs, capacity=32, sequence_multiple=multiple)
    config = config_of(str(tmp_path / "x"), padding_mask=True, sequence_multiple=multiple)
    rows = pickle.loads(pickle.dumps(build(config, (9, 0, 0))[0]))
    plain = build(config_of(str(tmp_path / "x"), sequence_multiple=multiple), (9, 0, 0))[0]
    for chosen in ([0, 1, 2], [3, 8, 4, 5]):
        batch = rows.__getitems__(chosen).whole()
        assert batch["padding_mask"].dtype == torch.bool
        for row, i in enumerate(chosen):
            expected = np.ones(32, np.bool_)
            own = plain[i]
            begins = own["cu_seqlens_padded" if multiple > 1 else "cu_seqlens"].tolist()
            sample = next(p for p in packs if p.tokens == own["tokens"][~batch["padding_mask"][row]].tolist())
            for begin, (start, stop) in zip(begins, pairwise(sample.bounds), strict=False):
                expected[begin : begin + stop - start] = False
            assert np.array_equal(batch["padding_mask"][row].numpy(), expected)
            assert all(torch.equal(batch[name][row], own[name]) for name in own)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"packing_method": "bfd"}, "need index_only_packing"),
        ({"max_sequences_per_pack": 1}, "need index_only_packing"),
        ({"pad_id": -5}, "pad_id -5: not in the model's vocabulary"),
        ({"pad_id": 2000, "vocab_size": 2000}, "pad_id 2000: not in the model's vocabulary of 2000"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        config_of(write_packs(tmp_path / "x", 4), **options)
