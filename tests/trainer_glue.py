"""Check the code of docs/trainers.md as far as possible without the trainers, against the masks of a shard."""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from doc_blocks import Block
from sample_packs import demo_samples, write_samples
from trainer_shards import Trained, trained_of

from megatron_sft_idx.training.adapters import AutomodelPacks, VerlDataset


def shard_for(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    """Write the shard that the block reads. Return the trained tokens of its sequences."""
    (folder / "data").mkdir()
    write_samples(folder / "data/chats", demo_samples(8))
    monkeypatch.chdir(folder)
    return trained_of("data/chats")


def names_of(block: Block) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "glue"}
    exec(compile(block.text, block.place, "exec"), names)
    return names


def check_verl(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = shard_for(block, tmp_path, monkeypatch)
    given = dict(option.split("=") for option in names_of(block)["options"])
    assert given["data.custom_cls.path"] == f"pkg://{VerlDataset.__module__}"
    assert given["data.custom_cls.name"] == VerlDataset.__name__
    dataset = VerlDataset(parquet_files=[given["data.train_files"]], config={"pad_mode": "no_padding"})
    items = [dataset[i] for i in range(len(dataset))]
    assert [Trained(i["input_ids"].tolist(), [v > 0 for v in i["loss_mask"].tolist()]) for i in items] == expected


def check_automodel(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = shard_for(block, tmp_path, monkeypatch)
    recipe = yaml.safe_load(block.text)
    target = recipe["dataset"].pop("_target_")
    assert target == f"{AutomodelPacks.__module__}.{AutomodelPacks.__name__}"
    assert recipe["packed_sequence"]["packed_sequence_size"] == recipe["dataset"]["seq_length"]
    dataset = AutomodelPacks(**recipe["dataset"])
    found = []
    for number in range(len(dataset)):
        item = dataset[number]
        assert sum(item["seq_lens_padded"]) == len(item["labels"]) == len(item["position_ids"])
        bounds = np.cumsum([0, *item["seq_lens"]]).tolist()
        for start, stop in pairwise(bounds):
            learnt = [label != -100 for label in item["labels"][start : stop - 1]]
            found.append(Trained(item["input_ids"][start:stop], [False, *learnt]))
    assert found == expected


def check_nemo_rl(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = shard_for(block, tmp_path, monkeypatch)
    datums = names_of(block)["ShardDatums"]("data/chats")
    found = []
    for number in range(len(datums)):
        log = datums[number]["message_log"]
        ids = [token for message in log for token in message["token_ids"].tolist()]
        assert datums[number]["length"] == len(ids)
        learnt = [message["role"] == "assistant" for message in log for _ in message["token_ids"]]
        found.append(Trained(ids, learnt))
    assert found == expected


@dataclass
class Sample:
    """The fields of slime's class that the code sets."""

    index: int
    group_index: int
    tokens: list[int]
    reward: float
    loss_mask: list[int] = field(default_factory=list)
    response_length: int = 0


def check_slime(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = shard_for(block, tmp_path, monkeypatch)
    for name, member in (("slime.rollout.data_source", ("DataSource", ABC)), ("slime.utils.types", ("Sample", Sample))):
        for parent in (name.partition(".")[0], name.rpartition(".")[0]):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        setattr(module, *member)
        monkeypatch.setitem(sys.modules, name, module)
    glue = names_of(block)
    args = SimpleNamespace(prompt_data="data/chats", save="run", load="run", rollout_batch_size=2)
    source = glue["ShardSource"](args)
    assert len(source) == len(expected)
    samples = glue["generate_rollout"](args, 0, source)
    source.save(0)
    source = glue["ShardSource"](args)
    source.load(0)
    expected = [each for each in expected if any(each.learnt)]
    samples += source.get_samples(len(expected) - 2)
    found = []
    for (sample,) in samples:
        assert len(sample.loss_mask) == sample.response_length < len(sample.tokens)
        prompt = len(sample.tokens) - sample.response_length
        found.append(Trained(sample.tokens, [*[False] * prompt, *(value > 0 for value in sample.loss_mask)]))
    assert found == expected


def check_mcore_adapter(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = shard_for(block, tmp_path, monkeypatch)
    glue = names_of(block)
    batch = glue["collate"]([glue["packs"][number] for number in range(len(glue["packs"]))])
    found = []
    for ids, labels, numbers in zip(
        *(batch[n].tolist() for n in ("input_ids", "labels", "attention_mask")), strict=True
    ):
        assert numbers == sorted(n for n in numbers if n) + [0] * numbers.count(0)
        for number in range(1, max(numbers) + 1):
            start, length = numbers.index(number), numbers.count(number)
            learnt = [label != -100 for label in labels[start : start + length - 1]]
            found.append(Trained(ids[start : start + length], [False, *learnt]))
    assert found == expected


def check_compiles(block: Block, _folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that code that ``make test-trainers`` runs compiles."""
    compile(block.text, block.place, "exec")


def check_llamafactory(block: Block, _folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the block has the same keys as the test of LLaMA-Factory."""
    assert yaml.safe_load(block.text)["neat_packing"] is True


GLUE: dict[str, Callable[[Block, Path, pytest.MonkeyPatch], None]] = {
    "python verl": check_verl,
    "yaml automodel": check_automodel,
    "yaml llamafactory": check_llamafactory,
    "python torchtitan": check_compiles,
    "python trl": check_compiles,
    "python nemo-rl": check_nemo_rl,
    "python slime": check_slime,
    "python mcore_adapter": check_mcore_adapter,
}
