"""Wrong Megatron arguments are errors with an explanation; Megatron's packing scheduler gets single sequences."""

from __future__ import annotations

import json
import linecache
import pickle
import shutil
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from chats import TOKENIZER, preprocess
from sample_packs import sample_of, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.training.megatron_arguments import RELEASE, require_arguments
from megatron_sft_idx.training.provider import build_datasets, train_valid_test_datasets_provider

# The result of Megatron-LM's parser if all required arguments are given.
GOOD = {
    "sft": True,
    "create_attention_mask_in_dataloader": False,
    "calculate_per_token_loss": True,
    "micro_batch_size": 1,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "hybrid_context_parallel": False,
    "seq_length": 32,
    "seed": 5,
    "split": "1,0,0",
    "data_path": None,
    "data_cache_path": None,
}
SCHEDULED = {"use_varlen_dataset": True, "sequence_packing_scheduler": "dp_balanced", "sft": False}
DYNAMIC = {**SCHEDULED, "sequence_packing_scheduler": "default_dynamic_cp", "dynamic_context_parallel": True}
OLD, NEW = (0, 16), (0, 19)


def given(**changed: Any) -> Namespace:
    return Namespace(**{**GOOD, **changed})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"sft": False}, "--sft is missing: .* add --sft"),
        ({"create_attention_mask_in_dataloader": True}, "hangs .* add --no-create-attention-mask-in-dataloader"),
        ({"calculate_per_token_loss": False}, "the same weight.* add --calculate-per-token-loss"),
        (
            {"hybrid_context_parallel": True},
            "--hybrid-context-parallel .* loses sequences; use --context-parallel-size",
        ),
        ({"use_varlen_dataset": True}, "--sequence-packing-scheduler None: .* use .* dp_balanced, or leave"),
        ({"sequence_packing_scheduler": "other"}, "--sequence-packing-scheduler other: .* dp_balanced"),
        (
            {**SCHEDULED, "max_seqlen_per_dp_cp_rank": 8},
            r"allows 8 tokens \(ranks that share a sequence: 1\), .* --seq-length 32 tokens; raise",
        ),
        ({**SCHEDULED, "dynamic_context_parallel": True}, "-scheduler dp_balanced: .* use .* default_dynamic_cp, or"),
        ({**DYNAMIC, "dynamic_context_parallel": False}, "-scheduler default_dynamic_cp: .* use .* dp_balanced, or"),
        (
            {**DYNAMIC, "data_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 8},
            r"16 tokens \(ranks that share a sequence: 2\), .*; raise",
        ),
        ({**DYNAMIC, "data_parallel_size": 3, "context_parallel_size": 2}, "size is 6; .* a power of two"),
        (
            {"eval_micro_batch_size": 4, "tensor_model_parallel_size": 2},
            "--eval-micro-batch-size 4: .* make them equal",
        ),
    ],
)
def test_what_goes_wrong_is_refused_with_the_remedy(changed: dict[str, Any], sentence: str) -> None:
    require_arguments(given(), NEW)
    with pytest.raises(FormatError, match=sentence):
        require_arguments(given(**changed), NEW)


@pytest.mark.parametrize(
    ("changed", "sentence", "since"),
    [
        ({"micro_batch_size": 2}, "--micro-batch-size 2: Megatron 0.* use --micro-batch-size 1, or", (0, 19)),
        (
            {"context_parallel_size": 2},
            "--context-parallel-size 2: Megatron 0.* use --context-parallel-size 1",
            (0, 18),
        ),
        ({"pipeline_model_parallel_size": 4}, "--pipeline-model-parallel-size 4: .* the first and the last", (0, 17)),
    ],
)
def test_releases_differ_in_what_they_can(changed: dict[str, Any], sentence: str, since: tuple[int, int]) -> None:
    require_arguments(given(**changed), since)
    with pytest.raises(FormatError, match=sentence):
        require_arguments(given(**changed), (since[0], since[1] - 1))


def test_ranks_that_make_no_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = given(tensor_model_parallel_size=2)
    require_arguments(args, OLD)  # such a script is unknown
    room = "    max_seqlen = torch.empty(1, dtype=torch.int32){}\n"
    hybrid = "    local = torch.empty(1) if args.hybrid_context_parallel else None\n"
    for how, refused in (("if args.hybrid_context_parallel else None", True), ("", False)):
        utils = ModuleType("megatron.training.utils")
        source = f"def get_batch_on_this_tp_rank(args):\n{room.format(' ' + how)}{hybrid}"
        file = f"refused-{refused}.py"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), vars(utils))
        monkeypatch.setitem(sys.modules, "megatron.training.utils", utils)
        if refused:
            with pytest.raises(FormatError, match=r"--tensor-model-parallel-size 2: .* docs/megatron.md"):
                require_arguments(args, OLD)
        else:
            require_arguments(args, OLD)


def test_what_a_release_needs_not_is_not_asked_for() -> None:
    require_arguments(given(sft=False), OLD)
    require_arguments(given(**SCHEDULED, max_seqlen_per_dp_cp_rank=16, context_parallel_size=2), NEW)
    require_arguments(Namespace(seq_length=32), RELEASE)  # a user's script, which has other arguments


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", [sample_of([3, 4], lambda p: 1, lambda p: p)], capacity=32)
    wrong = given(sft=False, calculate_per_token_loss=False, create_attention_mask_in_dataloader=True)
    wrong.data_path = [str(tmp_path / "x")]
    with pytest.raises(FormatError) as caught:
        train_valid_test_datasets_provider([1, 0, 0], args=wrong)
    assert str(caught.value).count("missing") == (3 if RELEASE >= (0, 17) else 2)


# ---- tokenizers ----


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("chats") / "chats"
    assert preprocess(prefix, capacity=544).code == 0
    return str(prefix)


def test_another_tokenizer_than_the_shards_is_refused(chats: str, tmp_path: Path) -> None:
    args = given(seq_length=544, data_path=[chats], tokenizer_model=str(TOKENIZER))
    train, *_ = train_valid_test_datasets_provider([4, 0, 0], args=args)
    assert len(train) == 4
    shutil.copytree(TOKENIZER, tmp_path, dirs_exist_ok=True)
    other = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    other["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
    args.tokenizer_model = str(tmp_path)
    with pytest.raises(FormatError, match=r"chats: tokenized with \w+, but the tokenizer of this job is \w+; use"):
        train_valid_test_datasets_provider([4, 0, 0], args=args)
    args.tokenizer_model = "somebody/somewhere"  # nothing is downloaded to compare
    train_valid_test_datasets_provider([4, 0, 0], args=args)


def test_a_vocabulary_that_is_too_small_is_refused(chats: str) -> None:
    args = given(seq_length=544, data_path=[chats], padded_vocab_size=2000)
    train_valid_test_datasets_provider([4, 0, 0], args=args)
    args.padded_vocab_size = 1999
    with pytest.raises(FormatError, match=r"2000 tokens, but the model's vocabulary has 1999; raise --vocab-size"):
        train_valid_test_datasets_provider([4, 0, 0], args=args)


# ---- Megatron's packing scheduler ----


Sequence = tuple[tuple[int, ...], tuple[float, ...]]  # ids and label-aligned mask


def sequences_of(prefix: Path) -> list[Sequence]:
    """Return the sequences of a shard, sorted."""
    found = []
    for pack in Shard(prefix):
        bounds = pack["seq_boundaries"].tolist()
        for start, stop in pairwise(bounds):
            found.append((tuple(pack["input_ids"][start:stop].tolist()), tuple(pack["loss_mask"][start:stop].tolist())))
    return sorted(found)


def sequence_in(sample: dict[str, torch.Tensor]) -> Sequence:
    """Check the form of a sample and return its sequence."""
    length, padded = (int(sample[name]) for name in ("original_seq_len", "padded_seq_len"))
    for name in ("tokens", "labels", "position_ids"):
        assert (sample[name].dtype, tuple(sample[name].shape)) == (torch.int64, (padded,))
    assert (sample["loss_mask"].dtype, tuple(sample["loss_mask"].shape)) == (torch.float32, (padded,))
    assert sample["labels"][: length - 1].tolist() == sample["tokens"][1:length].tolist()
    assert sample["position_ids"][:length].tolist() == list(range(length))
    assert not sample["loss_mask"][length - 1 :].any()
    return tuple(sample["tokens"][:length].tolist()), tuple(sample["loss_mask"][:length].tolist())


def write_lengths(prefix: Path, lengths: list[list[int]], seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    packs = [
        sample_of(each, lambda p: int(random.integers(2)), lambda p: int(random.integers(1, 500))) for each in lengths
    ]
    write_samples(prefix, packs, capacity=64)


def scheduled(prefix: Path, **changed: Any) -> Any:
    """Return one epoch from the provider for runs in which Megatron packs, for any release."""
    args = given(**{**SCHEDULED, "data_path": [str(prefix)], "seq_length": 64, **changed})
    train, *_ = build_datasets(args, [None, 0, 0], single_sequences=True)
    return train


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_each_sequence_is_a_sample_padded_to_what_parallelism_needs(tmp_path: Path, multiple: int) -> None:
    write_lengths(tmp_path / "x", [[5, 3], [8], [1, 16, 7]])
    size = {1: {}, 4: {"context_parallel_size": 2}, 8: {"context_parallel_size": 2, "tensor_model_parallel_size": 2}}
    data = scheduled(tmp_path / "x", sequence_parallel=multiple == 8, **size[multiple])
    samples = [data[i] for i in range(len(data))]
    assert sorted(map(sequence_in, samples)) == sequences_of(tmp_path / "x")
    assert sorted(int(sample["padded_seq_len"]) for sample in samples) == sorted(
        -(-length // multiple) * multiple for length in (5, 3, 8, 1, 16, 7)
    )
    assert not data[-1]["loss_mask"].any()
    again = pickle.loads(pickle.dumps(data))
    for sample, other in zip(samples, again.__getitems__(range(len(data))), strict=True):
        assert sample.keys() == other.keys()
        assert all(torch.equal(sample[name], other[name]) for name in sample)


def test_single_sequences_are_split_and_blended(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        write_lengths(tmp_path / name, [[5, 3]] * 10, number)
    args = given(**SCHEDULED, data_path=["0.5", str(tmp_path / "a"), "0.5", str(tmp_path / "b")], split="80,20,0")
    train, valid, _ = train_valid_test_datasets_provider([32, 8, 0], args=args)
    seen = {sequence_in(train[i]) for i in range(32)} | {sequence_in(valid[i]) for i in range(8)}
    assert seen == {*sequences_of(tmp_path / "a"), *sequences_of(tmp_path / "b")}


@pytest.mark.parametrize("collated", [False, True])
def test_megatrons_scheduler_gives_back_every_sequence(tmp_path: Path, collated: bool) -> None:
    utils = pytest.importorskip(
        "megatron.core.datasets.data_schedule_utils",
        reason="this Megatron has no packing scheduler: run with a checkout of main in PYTHONPATH",
    )
    random = np.random.default_rng(3)
    write_lengths(tmp_path / "x", [[5, 3], *(random.integers(1, 20, 3).tolist() for _ in range(100))])
    data = scheduled(tmp_path / "x", context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True)
    expected = [sequence_in(data[i]) for i in range(len(data))]
    assert sorted(expected) == sequences_of(tmp_path / "x")
    for _ in range(1000):
        chosen = random.integers(0, len(data), random.integers(1, 9)).tolist()
        batch = [data[i] for i in chosen]
        if collated:  # the result of torch's default collate for micro-batches of one
            batch = [{name: value[None] for name, value in sample.items()} for sample in batch]
        found = utils._unpack_batch(batch)
        assert [sequence_in(sample) for sample in found] == [expected[i] for i in chosen]
        lengths = [torch.cat([sample[name] for sample in found]) for name in ("padded_seq_len", "original_seq_len")]
        packed = utils._pack_sequences(found, *lengths, torch.device("cpu"))
        begins, sizes = packed["cu_seqlens_padded"].tolist(), lengths[1].tolist()
        again = [tuple(packed["tokens"][a : a + n].tolist()) for a, n in zip(begins, sizes, strict=False)]
        assert again == [expected[i][0] for i in chosen]


@pytest.mark.parametrize(("data", "context", "room"), [(4, 1, 16), (2, 2, 16), (2, 2, 40), (8, 1, 8)])
def test_dynamic_context_parallelism_takes_every_sequence_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: int, context: int, room: int
) -> None:
    """Uses the scheduler of Megatron's branch dev, and its division among ranks."""
    schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
    if not hasattr(schedule, "DefaultDynamicCPScheduler"):
        pytest.skip("this Megatron has no dynamic context parallelism: run with a checkout of dev in PYTHONPATH")
    from megatron.core.datasets import data_schedule_utils as utils
    from megatron_pretrain import partitioned  # instead of Transformer Engine's

    monkeypatch.setattr(utils, "get_thd_partitioned_indices", partitioned)
    random, ranks = np.random.default_rng(data), data * context
    write_lengths(tmp_path / "x", [[int(length)] for length in random.integers(1, 65, 96)])
    same = {"data_path": [str(tmp_path / "x")], "seq_length": 64, "context_parallel_size": context}
    args = given(**DYNAMIC, **same, data_parallel_size=data, max_seqlen_per_dp_cp_rank=room)
    train, *_ = train_valid_test_datasets_provider([96, 0, 0], args=args)
    scheduler = schedule.DefaultDynamicCPScheduler(room, context, data, None)
    keys, divided = ("tokens", "labels", "loss_mask", "position_ids"), set()
    for first in range(0, 96, 16):
        batch = dict(enumerate(utils._unpack_batch([train[first + i] for i in range(16)])))
        taken: list[int] = []
        for step in scheduler.get_groups_and_subsamples([(i, int(batch[i]["padded_seq_len"])) for i in batch]):
            parts: dict[tuple[int, ...], list[dict[str, torch.Tensor]]] = {}
            for rank, numbers in enumerate(step):
                sharing = [other for other in range(ranks) if step[other] == numbers]
                packed = utils.build_packed_microbatches(batch, [step], rank, torch.device("cpu"), True)[0]
                assert int(packed["local_cp_size"]) == len(sharing)
                assert max(packed["tokens"].shape) <= room * len(sharing)
                utils.get_cp_slice_for_thd(packed, group_of(sharing.index(rank), len(sharing)))
                parts.setdefault(tuple(numbers), []).append(packed)
            for numbers, slices in parts.items():
                taken += numbers
                divided.add(len(slices))
                assert len({len(part["tokens"]) for part in slices}) == 1
                assert positions_of(slices, keys) == positions_of([batch[i] for i in numbers], keys)
        assert sorted(taken) == list(range(16))
    assert len(divided) > 1
    # With the padding for dp_balanced, some sequences cannot be divided.
    alone, *_ = train_valid_test_datasets_provider([96, 0, 0], args=given(**SCHEDULED, **same))
    packed = utils.build_packed_microbatches(dict(enumerate(alone)), [[[*range(96)]] * ranks], 0, torch.device("cpu"))
    with pytest.raises(ValueError, match="does not divide"):
        utils.get_cp_slice_for_thd(packed[0], group_of(0, ranks))


def group_of(rank: int, size: int) -> Namespace:
    """Return a replacement for a process group."""
    return Namespace(size=lambda: size, rank=lambda: rank)


def positions_of(parts: list[dict[str, torch.Tensor]], keys: tuple[str, ...]) -> list[tuple[float, ...]]:
    """Return the values at each position of some samples, sorted."""
    return sorted(tuple(column) for part in parts for column in zip(*(part[key].tolist() for key in keys), strict=True))


def test_hybrid_context_parallelism_would_lose_sequences_of_rows(tmp_path: Path) -> None:
    schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
    write_samples(tmp_path / "x", [sample_of([5, 3], lambda p: 1, lambda p: p + 1)], capacity=16, sequence_multiple=8)
    args = given(data_path=[str(tmp_path / "x")], seq_length=16)
    row = build_datasets(args, [1, 0, 0], sequence_multiple=8)[0][0]
    pieces = schedule.HybridCPDataLoaderWrapper.unpack_batch(None, [{**row}])
    assert [piece["tokens"].tolist() for piece in pieces] == [[1, 2, 3, 4, 5], [0, 0, 0]]  # not [6, 7, 8]
