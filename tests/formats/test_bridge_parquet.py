"""Megatron-Bridge's packed data set reads the output of ``convert``, compared with its own preparation of the chats.

``make test-megatron`` installs Bridge for the one Python that it supports. MEGATRON_BRIDGE is a checkout to test
instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bridge_modules import CHECKOUT, MISSING, bridge_folder, forget, make_bare
from chats import CHATS, TOKENIZER, command, preprocess, write_rows

from megatron_sft_idx import SFTIndexedDataset
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.sources import StoredPacks

pytestmark = pytest.mark.skipif(bridge_folder() is None, reason=MISSING)

CAPACITY, MULTIPLE = 512, 8


class Bridge:
    """Bridge's modules, and its tokenizer made from the bundled one."""

    def __init__(self) -> None:
        self.builder = import_module("megatron.bridge.data.builders.gpt_sft")
        self.offline = import_module("megatron.bridge.data.packing.offline")
        self.algorithms = import_module("megatron.bridge.data.packing.algorithms")
        self.specs = import_module("megatron.bridge.data.packing.config").PackedSequenceSpecs

    @cached_property
    def tokenizer(self) -> Any:
        config = import_module("megatron.bridge.training.tokenizers.config").TokenizerConfig
        build = import_module("megatron.bridge.training.tokenizers.tokenizer").build_tokenizer
        return build(config(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(TOKENIZER)))

    def dataset(self, path: Path, metadata: Path | None = None, padded: bool = True, **options: Any) -> Any:
        """Return the training data set, built from a path as in Bridge's recipes, without user code."""
        specs = self.specs(
            packed_sequence_size=CAPACITY,
            packed_train_data_path=str(path),
            packed_metadata_path=metadata,
            pad_cu_seqlens=metadata is not None,
            pad_seq_to_mult=options.pop("multiple", 1),
        )
        config = self.builder.GPTSFTDatasetConfig(
            dataset_root=path.parent,
            seq_length=CAPACITY,
            enable_offline_packing=True,
            offline_packing_specs=specs,
            do_validation=False,
            do_test=False,
            dataset_kwargs={"pad_to_max_length": padded},
            **options,
        )
        return self.builder.GPTSFTDatasetBuilder(config, self.tokenizer).build()[0]

    def prepare(self, rows: Path, path: Path, multiple: int, algorithm: str = "first_fit_shuffle") -> Any:
        """Run Bridge's own preparation of chats, and return the entry of the metadata that it writes."""
        metadata = path.with_suffix(".theirs.json")
        self.offline.prepare_gpt_sft_packed_data(
            input_path=rows,
            output_path=path,
            output_metadata_path=metadata,
            packed_sequence_size=CAPACITY,
            tokenizer=self.tokenizer,
            max_seq_length=CAPACITY,
            packing_algorithm=algorithm,
            dataset_kwargs={"chat": True, "use_hf_tokenizer_chat_template": True},
            pad_seq_to_mult=multiple,
            dataset_builder=self.builder.build_gpt_sft_split,
        )
        return json.loads(metadata.read_text())


@pytest.fixture(scope="module")
def bridge() -> Iterator[Bridge]:
    before = set(sys.modules)
    make_bare()
    yield Bridge()
    forget(before)


def chats() -> list[dict[str, Any]]:
    """Return the bundled chats that Bridge accepts unchanged: plain texts, without fields that control training."""
    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    return [
        row
        for row in rows
        if all(
            isinstance(message.get("content"), str)
            and "<|" not in message["content"]
            and not {"train", "weight"} & {*message}
            for message in row.get("messages", [{}])
        )
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the chats as ``rows.jsonl``, tokenised as ``all``, and packed as ``x`` with room for multiples of 8."""
    folder = tmp_path_factory.mktemp("chats")
    rows = chats()
    assert len(rows) > 200
    write_rows(folder / "rows.jsonl", rows)
    source = ("--input", folder / "rows.jsonl")
    assert preprocess(folder / "all", *source, "--packing", "none", capacity=CAPACITY).code == 0
    assert preprocess(folder / "x", *source, "--sequence-multiple", MULTIPLE, capacity=CAPACITY).code == 0
    return folder


def cut(batch: dict[str, torch.Tensor], eos_id: int) -> dict[str, torch.Tensor]:
    """Return our batch in Bridge's form: without the last position of each sequence, and padded again."""
    rows: dict[str, list[torch.Tensor]] = {key: [] for key in ("tokens", "labels", "loss_mask", "position_ids")}
    fill = {"tokens": eos_id, "labels": eos_id, "loss_mask": 0, "position_ids": 0}
    bounds = []
    for row, cu_seqlens in enumerate(batch["cu_seqlens"].tolist()):
        ends = [end for end in cu_seqlens[1:] if end <= int(batch["used"][row])]
        ends = sorted({*ends})
        kept = np.delete(np.arange(ends[-1]), np.array(ends) - 1)
        for key, parts in rows.items():
            values = batch[key][row, kept].long()
            parts.append(torch.nn.functional.pad(values, (0, CAPACITY - len(kept)), value=fill[key]))
        bounds.append([0, *(end - number for number, end in enumerate(ends, 1))])
        bounds[-1] += [CAPACITY] * (bounds[-1][-1] != CAPACITY)
    width = max(map(len, bounds))
    cu = torch.IntTensor([row + [CAPACITY] * (width - len(row)) for row in bounds])
    return {**{key: torch.stack(parts) for key, parts in rows.items()}, "cu_seqlens_q": cu}


def test_batches_of_their_data_set_are_those_of_our_loader(bridge: Bridge, shards: Path) -> None:
    assert command("convert", shards / "x", shards / "x.parquet", "--to", "parquet").code == 0
    theirs, ours = bridge.dataset(shards / "x.parquet"), SFTIndexedDataset(str(shards / "x"))
    assert type(theirs).__name__ == "GPTSFTPackedParquetDataset"
    assert len(theirs) == len(ours) > 10
    for i in range(len(ours)):
        assert {key: values.tolist() for key, values in ours[i].items()} == theirs[i]
    assert not any(theirs[-1]["loss_mask"])

    assembler = BatchAssembler(StoredPacks(ShardSet([str(shards / "x")])), CAPACITY)
    for first in range(0, len(ours) - 3, 4):
        packs = range(first, first + 4)
        batch = assembler.assemble(packs)
        batch["used"] = torch.tensor([len(ours[i]["input_ids"]) for i in packs])
        expected, found = cut(batch, bridge.tokenizer.eos_id), theirs.collate_fn([theirs[i] for i in packs])
        for key, values in expected.items():
            assert torch.equal(found[key], values), key
        assert found["loss_mask"].any()


def test_our_class_reads_the_shard_itself(bridge: Bridge, shards: Path) -> None:
    assert command("convert", shards / "x", shards / "same.parquet", "--to", "parquet").code == 0
    packed_shard = import_module("megatron_sft_idx.training.packed_shard").PackedShard
    options = {"max_seq_length": CAPACITY, "prompt_template": "{input} {output}", "label_key": "output"}
    ours = packed_shard(str(shards / "x"), bridge.tokenizer, truncation_field="input", **options)
    theirs = bridge.dataset(shards / "same.parquet", padded=False)
    for numbers in ([0, 1, 2, 3], [4, -1]):
        batches = [data.collate_fn([data[i] for i in numbers]) for data in (ours, theirs)]
        for key, values in batches[1].items():
            assert torch.equal(batches[0][key], values) if torch.is_tensor(values) else batches[0][key] == values, key


def test_their_epochs_are_of_our_packs(bridge: Bridge, shards: Path) -> None:
    assert command("convert", shards / "x", shards / "epochs.parquet", "--to", "parquet").code == 0
    ours = SFTIndexedDataset(str(shards / "x"))
    theirs = bridge.dataset(shards / "epochs.parquet", max_train_samples=2 * len(ours))
    assert len(theirs) == 2 * len(ours)
    for i, number in enumerate(theirs.samples_mapping.tolist()):
        assert theirs[i]["input_ids"] == ours[number]["input_ids"].tolist()


def padded(folder: Path, source: Path, name: str, bridge: Bridge, *options: object) -> Path:
    padding = ("--pad-seq-to-mult", MULTIPLE, "--eod-id", bridge.tokenizer.eos_id)
    outcome = command("convert", source, folder / name, "--to", "parquet", "--no-columns", *padding, *options)
    assert outcome.code == 0, outcome.err
    return folder / name


def stored(dataset: Any) -> list[tuple[list[int], list[int]]]:
    """Return ids and mask of every sequence, sorted by value."""
    found = []
    for i in range(len(dataset)):
        pack = dataset[i]
        for a, b in zip(pack["seq_boundaries"], pack["seq_boundaries"][1:], strict=False):
            found.append((pack["input_ids"][a:b], pack["loss_mask"][a:b]))
    return sorted(found)


def test_what_they_packed_without_padding_gets_the_padding_of_theirs(
    bridge: Bridge, shards: Path, tmp_path: Path
) -> None:
    for multiple in (1, MULTIPLE):
        bridge.prepare(shards / "rows.jsonl", tmp_path / f"{multiple}.parquet", multiple)
    ours = padded(tmp_path, tmp_path / "1.parquet", "ours.parquet", bridge, "--seq-length", 2 * CAPACITY)
    expected = stored(bridge.dataset(tmp_path / f"{MULTIPLE}.parquet"))
    assert stored(bridge.dataset(ours)) == expected
    assert len(expected) == len(chats())


@pytest.mark.skipif(bool(CHECKOUT), reason="main's preparation marks more than 0.6.2's: docs/bridge.md, its loss")
def test_padding_and_metadata_are_those_of_their_preparation(
    bridge: Bridge, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Bridge prepares and packs the same chats the same way, it has the same sequences in the same places."""
    ours = padded(tmp_path, shards / "x", "ours.parquet", bridge)
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, pack in enumerate(Shard(shards / "all")):
        numbers.setdefault(tuple(pack["input_ids"].tolist()), []).append(number)
    shard = Shard(shards / "x")
    packs = [[numbers[tuple(ids.tolist())].pop() for ids, _ in shard.sequences(i)] for i in range(len(shard))]
    order, rows = [number for pack in packs for number in pack], chats()
    assert sorted(order) == list(range(len(rows)))
    # Sequences of equal length are assigned from the last one on, in a random order; here it is the order of the rows.
    write_rows(tmp_path / "rows.jsonl", [rows[number] for number in reversed(order)])
    monkeypatch.setattr(np.random, "permutation", np.arange)
    lengths = [len(pack["input_ids"]) for pack in Shard(shards / "all")]
    taken = [[-(-(lengths[number] - 1) // MULTIPLE) * MULTIPLE for number in pack] for pack in packs]
    monkeypatch.setattr(bridge.algorithms, "as_ours", lambda lengths, size: taken, raising=False)
    metadata = bridge.prepare(tmp_path / "rows.jsonl", tmp_path / "theirs.parquet", MULTIPLE, "as_ours")

    summary = Path(f"{ours}.json")
    assert json.loads(summary.read_text()) == metadata
    for said in (None, summary):
        one, other = (bridge.dataset(path, said, multiple=MULTIPLE) for path in (ours, tmp_path / "theirs.parquet"))
        assert len(one) == len(other) == len(packs)
        for first in range(0, len(packs), 4):
            batches = [
                data.collate_fn([data[i] for i in range(first, min(first + 4, len(packs)))]) for data in (one, other)
            ]
            assert batches[0].keys() == batches[1].keys() >= {"cu_seqlens_q", "cu_seqlens_q_padded", "loss_mask"}
            for key, values in batches[1].items():
                same = torch.equal(batches[0][key], values) if torch.is_tensor(values) else batches[0][key] == values
                assert same, key
            physical = batches[0]["cu_seqlens_q_padded"]
            assert not (physical % MULTIPLE).any()
            assert (batches[0]["cu_seqlens_q"] < physical).any()
