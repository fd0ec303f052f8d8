"""TRL: a step of its SFTTrainer on the folder that ``convert --to save_to_disk`` writes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import loss_alone, tiny_llama
from trainer_shards import ROOT, Trained, told, trained_of

from megatron_sft_idx import Shard
from megatron_sft_idx.formats.convert import ConvertOptions, convert

pytest.importorskip("trl", reason="trl is not installed; make test-trainers has an environment for it")

from datasets import load_from_disk
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer


def trainer(prefix: Path, folder: Path) -> Any:
    convert(str(prefix), str(folder / "hf"), "save_to_disk", ConvertOptions(overwrite=True))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tools/demo/tokenizer")
    arguments = SFTConfig(
        str(folder / "out"),
        padding_free=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=0.01,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    model = tiny_llama(len(tokenizer))
    return SFTTrainer(model, arguments, train_dataset=load_from_disk(str(folder / "hf")), processing_class=tokenizer)


def found(batch: dict[str, Any]) -> list[Trained]:
    """Return the sequences of a batch of one row, including padding."""
    (ids,), (labels,) = batch["input_ids"].tolist(), batch["labels"].tolist()
    bounds = batch["cu_seq_lens_q"].tolist()
    assert batch["position_ids"][0].tolist() == [at for a, b in pairwise(bounds) for at in range(b - a)]
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    return [Trained(ids[a:b], [label != -100 for label in labels[a:b]]) for a, b in pairwise(bounds)]


def without_padding(sequences: list[Trained]) -> list[Trained]:
    return [each for each in sequences if any(each.ids)]


def test_trl_trains_what_the_shard_says(shards: tuple[Path, Path], tmp_path: Path) -> None:
    train, _ = shards
    for prefix in shards:
        runner = trainer(prefix, tmp_path)
        collated = [runner.data_collator([runner.train_dataset[i]]) for i in range(len(runner.train_dataset))]
        sequences = without_padding([each for batch in collated for each in found(batch)])
        assert (sequences == trained_of(train)) == (prefix == train)
    told("trl", trained_of(train))


def test_the_loss_of_trl_is_that_of_the_sequences_alone(shards: tuple[Path, Path], tmp_path: Path) -> None:
    packs = list(Shard(shards[0]))[:2]
    for prefix, is_same in zip(shards, (True, False), strict=True):
        runner = trainer(prefix, tmp_path)
        batch = runner.data_collator([runner.train_dataset[i] for i in range(2)])
        with torch.no_grad():
            expected = loss_alone(runner.model.eval(), packs)
            loss = runner.compute_loss(runner.model, batch)
        assert torch.isclose(loss, expected, rtol=1e-5) == is_same
    assert runner.train().global_step == 2
