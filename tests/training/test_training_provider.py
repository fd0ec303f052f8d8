"""The provider builds the data sets that Megatron's arguments request."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gpt_model import model_inputs
from megatron.core import utils as megatron_utils
from megatron.core.packed_seq_params import PackedSeqParams
from sample_packs import demo_samples, write_samples
from torch.utils.data import DataLoader
from training_twin import lone_process

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.training.provider import config_from_args, train_valid_test_datasets_provider
from megatron_sft_idx.training.sft_dataset import PackedSFTDataset


@pytest.fixture(scope="module", autouse=True)
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name, count in (("a", 40), ("b", 20)):
        write_samples(tmp_path / name, demo_samples(count), capacity=32)
    return tmp_path


def arguments(**given: Any) -> Namespace:
    """Return arguments like Megatron-LM's parser: missing ones are None."""
    unset = dict.fromkeys(
        [
            *("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path"),
            *("per_split_data_args_path", "data_cache_path"),
        ]
    )
    per_split = any(f"{split}_data_path" in given for split in ("train", "valid", "test"))
    split = None if per_split or "per_split_data_args_path" in given else "90,10,0"
    return Namespace(**{**unset, "seed": 5, "seq_length": 32, "split": split, "global_batch_size": 4, **given})


def test_one_path_is_split(shards: Path) -> None:
    built = train_valid_test_datasets_provider([100, 8, 0], args=arguments(data_path=[str(shards / "a")]))
    train, valid, test = built
    assert isinstance(train, PackedSFTDataset)
    assert (len(train), len(valid), test) == (100, 8, None)
    assert (train.source.num_packs, valid.source.num_packs) == (36, 4)
    assert train[0]["tokens"].shape == (32,)
    assert train_valid_test_datasets_provider.is_distributed  # type: ignore[attr-defined]


def test_a_blend_with_weights(shards: Path) -> None:
    paths = ["0.75", str(shards / "a"), "0.25", str(shards / "b")]
    train, *_ = train_valid_test_datasets_provider([80, 0, 0], args=arguments(data_path=paths, split="1,0,0"))
    assert [train[i]["dataset_id"] for i in range(80)].count(0) == 60


@pytest.mark.parametrize("as_file", [False, True])
def test_a_blend_for_each_split(shards: Path, as_file: bool) -> None:
    if as_file:
        file = shards / "blends.json"
        file.write_text(json.dumps({"train": str(shards / "a"), "valid": [str(shards / "b")], "test": None}))
        args = arguments(per_split_data_args_path=str(file))
    else:
        args = arguments(train_data_path=[str(shards / "a")], valid_data_path=[str(shards / "b")])
    train, valid, test = train_valid_test_datasets_provider([None, None, None], args=args)
    assert (len(train), len(valid), test) == (40, 20, None)


def test_paths_from_a_file(shards: Path) -> None:
    (shards / "paths").write_text(f"3 {shards / 'a'}\n1 {shards / 'b'}\n")
    config = config_from_args(arguments(data_args_path=str(shards / "paths")))
    assert config.blend == ([str(shards / "a"), str(shards / "b")], [3.0, 1.0])


def test_parallel_sizes_decide_how_sequences_are_padded(shards: Path) -> None:
    sizes = {"context_parallel_size": 2, "tensor_model_parallel_size": 4}
    path = {"data_path": [str(shards / "a")]}
    packed_at_start = {"index_only_packing": True}
    assert config_from_args(arguments(**path, **sizes), **packed_at_start).sequence_multiple == 4
    sizes["sequence_parallel"] = True
    assert config_from_args(arguments(**path, **sizes), **packed_at_start).sequence_multiple == 16


def stock_inputs(batch: dict[str, Any]) -> tuple[dict[str, Any], PackedSeqParams]:
    """Return a micro-batch and its boundaries like get_batch of pretrain_gpt.py in the installed release."""
    if flatten := getattr(megatron_utils, "flatten_batch_for_packed_sequences", None):
        batch = flatten(batch)
        cu_seqlens, longest = batch.pop("cu_seqlens").squeeze(0), int(batch.pop("max_seqlen").item())
        sizes = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, **sizes)
        return batch, params
    cu_seqlens, max_seqlen = batch.pop("cu_seqlens"), batch.pop("max_seqlen")
    assert max_seqlen.dim() == 1
    made: tuple[dict[str, Any], PackedSeqParams] = megatron_utils.get_thd_batch_on_this_cp_rank(
        batch, cu_seqlens.squeeze(0), None, max_seqlen
    )
    return made


def test_stock_megatron_trains_on_it_with_the_line_the_readme_adds(script: ModuleType, shards: Path) -> None:
    options = ["--data-path", str(shards / "a"), "--seq-length", "32", "--vocab-size", "512"]
    args = script.parse_arguments(options)
    model = script.build_model(args).module
    train, *_ = train_valid_test_datasets_provider([8, 0, 0], args=args)
    # Like Megatron-LM: torch's collate, micro-batches of one, then get_batch.
    for stock in DataLoader(train, batch_size=1):
        inputs, _ = model_inputs(stock, "thd")
        expected = model(**inputs)
        batch, params = stock_inputs(dict(stock))
        found = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
        assert torch.equal(found, expected)


def test_options_of_the_configuration_go_through_the_provider(shards: Path) -> None:
    args = arguments(data_path=[str(shards / "a")])
    train, *_ = train_valid_test_datasets_provider([20, 0, 0], args=args, index_only_packing=True, padding_mask=True)
    assert train.config.index_only_packing
    assert "padding_mask" in train[0]
    with pytest.raises(FormatError, match="no option 'index_only'; it takes index_only_packing, "):
        train_valid_test_datasets_provider([20, 0, 0], args=args, index_only=True)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("fim_data", True, "--fim-data splits"),
        ("eod_mask_loss", True, "--eod-mask-loss would"),
        ("dataloader_type", "cyclic", "--dataloader-type cyclic does"),
        ("dataloader_type", "external", "--dataloader-type external does"),
        ("varlen_sbhd_validation", True, "--varlen-sbhd-validation validates"),
    ],
)
def test_arguments_that_would_train_on_something_else_are_refused(
    shards: Path, name: str, value: Any, shown: str
) -> None:
    args = arguments(data_path=[str(shards / "a")], **{name: value})
    with pytest.raises(FormatError, match=shown):
        train_valid_test_datasets_provider([20, 0, 0], args=args)
    for harmless in (None, False, "single"):
        if (harmless == "single") == (name == "dataloader_type") or harmless is None:
            setattr(args, name, harmless)
            train_valid_test_datasets_provider([20, 0, 0], args=args)


def test_splits_of_which_no_row_is_asked_for_are_left_out(shards: Path) -> None:
    """This happens with Megatron's default split: one percent of forty packs is none."""
    args = arguments(data_path=[str(shards / "a")], split="969,30,1")
    train, valid, test = train_valid_test_datasets_provider([100, 4, 0], args=args)
    assert (len(train), len(valid), test) == (100, 4, None)
    # The other splits stay at their places.
    assert (train.source.num_packs, valid.source.num_packs) == (39, 1)
    with pytest.raises(FormatError, match=r"the test split is empty, .* such as --split 99,1,0"):
        train_valid_test_datasets_provider([100, 4, 4], args=args)
    blends = {
        f"{split}_data_path": [str(shards / name)]
        for split, name in zip(("train", "valid", "test"), "abb", strict=True)
    }
    train, valid, test = train_valid_test_datasets_provider([None, 0, 5], args=arguments(**blends))
    assert (len(train), valid, len(test)) == (40, None, 5)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            {"split": "1,0,0", "eval_iters": 2},
            "--eval-iters 2: there is no validation data, .* --split 99,1,0, or .* 0",
        ),
        ({"split": "99,1,0", "eval_iters": 2}, "the valid split is empty, .*, or turn evaluation off: --eval-iters 0"),
        (
            {"split": "1,0,0", "full_validation": True},
            "--full-validation: there is no validation data, .* --split 99,1,0, or leave it out",
        ),
        ({"train_data_path": ["{}"]}, "there is no validation data, .* --valid-data-path, or .* --eval-iters 0"),
        ({"split": "0,90,10"}, "nothing to train on: assign a part of --split to it, .*, or add --skip-train"),
        ({"valid_data_path": ["{}"]}, "nothing to train on: pass shards with --train-data-path"),
    ],
)
def test_a_split_that_is_asked_for_has_data(shards: Path, given: dict[str, Any], shown: str) -> None:
    path = str(shards / "a")
    given = {name: [path] if value == ["{}"] else value for name, value in given.items()}
    args = arguments(**({} if any("data_path" in name for name in given) else {"data_path": [path]}), **given)
    with pytest.raises(FormatError, match=shown):
        train_valid_test_datasets_provider([20, None if args.__dict__.get("full_validation") else 8, 0], args=args)


def test_nothing_is_missing_where_nothing_is_asked_for(shards: Path) -> None:
    args = arguments(data_path=[str(shards / "a")], split="1,0,0", eval_iters=0)
    assert [each and len(each) for each in train_valid_test_datasets_provider([20, 0, 0], args=args)] == [
        20,
        None,
        None,
    ]
    args.split, args.skip_train, args.eval_iters = "0,1,0", True, 2
    assert [each and len(each) for each in train_valid_test_datasets_provider([20, 8, 8], args=args)] == [None, 8, None]
    # Megatron evaluates after the last step for any value of this flag.
    args.split, args.skip_train, args.start_eval_at_iter = "90,10,0", False, 100
    with pytest.raises(FormatError, match=r"--start-eval-at-iter 100 is after the last .* --eval-iters 0"):
        train_valid_test_datasets_provider([20, 0, 8], args=args)


def test_paths_without_weights_have_rows_enough_for_all_steps(shards: Path) -> None:
    paths = [str(shards / "a"), str(shards / "b")]
    args = arguments(data_path=paths, split="1,0,0")
    assert len(train_valid_test_datasets_provider([60, 0, 0], args=args)[0]) == 60
    with pytest.raises(FormatError, match=r"the train split has 60 rows, but Megatron will request 61: .* WEIGHT PATH"):
        train_valid_test_datasets_provider([61, 0, 0], args=args)
    args.data_path = ["2", paths[0], "1", paths[1]]
    assert len(train_valid_test_datasets_provider([61, 0, 0], args=args)[0]) >= 61


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("0.3 A B", "B has no weight"),
        ("0.3 A B C", "B has no weight"),
        ("0.3 A 0.7", "no path follows the weight 0.7"),
        ("A 0.3 B 0.7", "0.3 comes after a path; write each weight in front of its path"),
        ("A 0.3 B", "0.3 comes after a path; write each weight in front of its path"),
    ],
)
def test_every_path_of_a_blend_has_a_weight_or_none(shards: Path, words: str, shown: str) -> None:
    names = {"A": str(shards / "a"), "B": str(shards / "b"), "C": str(shards / "b")}
    paths = [names.get(word, word) for word in words.split()]
    for given in ({"data_path": paths}, {"train_data_path": paths, "split": None}):
        with pytest.raises(FormatError) as caught:
            config_from_args(arguments(**given))
        assert shown.replace("B has", f"{shards / 'b'} has") in str(caught.value)


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet", "chats.json.gz", "packs.npy"])
def test_a_file_in_place_of_a_prefix_says_what_makes_a_shard_of_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"{}")
    with pytest.raises(ShardNotFoundError) as caught:
        config_from_args(arguments(data_path=[str(path)]))
    verbs = ["convert"] if name == "packs.npy" else ["preprocess --input", "convert"]
    for verb in verbs:
        assert f"megatron-sft-idx {verb} {path} " in str(caught.value)


def test_a_stock_dataset_or_a_folder_of_something_else_says_what_helps(shards: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(FormatError) as caught:
            config_from_args(arguments(data_path=[str(path)]))
        return str(caught.value)

    for ending in (".bin", ".idx"):
        (shards / f"stock{ending}").write_bytes((shards / f"a{ending}").read_bytes())
    for path in (shards / "stock", shards / "stock.bin", shards / "stock.idx"):
        assert f"pass --data-path pretrain:{shards / 'stock'}, or " in said(path)
    assert f"convert {shards / 'stock'} {shards / 'stock'}-sft --mask-rule all" in said(shards / "stock")
    for name in ("rows", "arrow", "above/below", "empty"):
        (shards / name).mkdir(parents=True)
    with pytest.raises(ShardNotFoundError, match=r"directly contains no shard$"):
        config_from_args(arguments(data_path=[str(shards / "empty")]))
    (shards / "rows/part-1.jsonl.gz").touch()
    (shards / "arrow/dataset_info.json").touch()
    write_samples(shards / "above/below/a", demo_samples(2), capacity=32)
    for name, remedy in {
        "rows": f"preprocess --input '{shards / 'rows'}/*.jsonl.gz' --tokenizer PATH",
        "arrow": f"preprocess --input {shards / 'arrow'} --tokenizer PATH",
        "above": f"use the folder that contains shards: {shards / 'above/below'}",
    }.items():
        with pytest.raises(ShardNotFoundError) as caught:
            config_from_args(arguments(data_path=[str(shards / name)]))
        assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"train_data_path": ["{}/a"], "split": "90,10,0"}, "--split 90,10,0 applies .* --train-data-path is also"),
        ({"data_path": ["{}/a"], "multiple_validation_sets": True}, "--multiple-validation-sets: .* --full-validation"),
        (
            {"data_path": ["1", "{}/a", "1", "{}/b"], "full_validation": True},
            "--full-validation .* leave the weights out",
        ),
        ({"data_args_path": "{}/none"}, "--data-args-path .*none: No such file"),
        ({"data_args_path": "{}/a.bin"}, "--data-args-path .*a.bin: no text"),
        (
            {"per_split_data_args_path": "{}/words"},
            "--per-split-data-args-path .*words: expected a JSON object with keys of train, valid, test",
        ),
        ({"data_path": ["{}/a"], "mock_data": True}, "--mock-data trains on mock data; leave it out"),
        ({"data_path": ["{}/a"], "fim_rate": 0.4}, "--fim-rate 0.4 is for --fim-data"),
        ({"data_path": ["{}/a"], "data_sharding": False}, "--no-data-sharding is for --dataloader-type cyclic"),
        ({"data_path": ["{}/a"], "dataloader_fast_cache_load": True}, "--data-cache-path must be provided when using"),
    ],
)
def test_what_would_be_ignored_or_end_in_a_traceback_is_refused(
    shards: Path, given: dict[str, Any], shown: str
) -> None:
    (shards / "words").write_text("0.5 a 0.5 b")
    (shards / "a.bin").write_bytes(b"\xff\xfe" + (shards / "a.bin").read_bytes()[2:])
    in_folder = json.loads(json.dumps(given).replace("{}", str(shards)))
    with pytest.raises(FormatError, match=shown):
        train_valid_test_datasets_provider(
            [20, None if given.get("full_validation") else 0, 0], args=arguments(**in_folder)
        )


def test_fields_that_megatron_has_flags_for_are_set(shards: Path) -> None:
    config = config_from_args(
        arguments(data_path=[str(shards / "a")], data_cache_path=str(shards / "cache"), mid_level_dataset_surplus=0.25,
                  dataloader_defer_npy_index_mmap=True)
    )  # fmt: skip
    assert (config.mid_level_dataset_surplus, config.defer_npy_index_mmap) == (0.25, True)


def test_an_index_that_is_opened_late_has_to_be_there(shards: Path) -> None:
    paths = ["1", str(shards / "a"), "1", str(shards / "b")]
    args = arguments(data_path=paths, split="1,0,0", data_cache_path=str(shards / "cache"))
    args.dataloader_defer_npy_index_mmap = True
    with pytest.raises(FormatError, match=r"--dataloader-defer-npy-index-mmap: .* does not exist"):
        train_valid_test_datasets_provider([30, 0, 0], args=args)
