"""verl: our data in its own data set, loader, collator and SFT loss."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_shards import Trained, told, trained_of

pytest.importorskip("verl", reason="verl is not installed; make test-trainers has an environment for it")

from omegaconf import OmegaConf
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
from verl.workers.utils.losses import sft_loss


def batches(prefix: Path) -> Any:
    custom = {"path": "pkg://megatron_sft_idx.training.adapters", "name": "VerlDataset"}
    config = OmegaConf.create({"custom_cls": custom, "pad_mode": "no_padding", "max_length": 8})
    dataset = create_sft_dataset(str(prefix), config, tokenizer=None, processor=None)
    sampler = DistributedSampler(dataset, shuffle=False, num_replicas=1, rank=0)
    collate = SFTTensorCollator(DatasetPadMode.NO_PADDING)
    return StatefulDataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate, num_workers=0)


def learnt_by_the_loss(batch: dict[str, Any]) -> list[list[bool]]:
    """Return the tokens that the loss depends on: it has a gradient for their log-probability.

    verl's model returns at each position the log-probability of the next token.
    """
    log_probs = torch.zeros_like(batch["input_ids"].values(), dtype=torch.float32).requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(log_probs, batch["input_ids"].offsets())
    data = tensordict_utils.get_tensordict(
        {"loss_mask": batch["loss_mask"]},
        {"dp_size": 1, "batch_num_tokens": batch["loss_mask"].values().sum(), "pad_mode": DatasetPadMode.NO_PADDING},
    )
    loss, _ = sft_loss(None, {"log_probs": nested}, data)
    loss.backward()
    of_next = (log_probs.grad != 0).tolist()
    bounds = batch["input_ids"].offsets().tolist()
    assert not any(of_next[stop - 1] for stop in bounds[1:])
    return [[False, *of_next[start : stop - 1]] for start, stop in pairwise(bounds)]


def found(prefix: Path) -> list[Trained]:
    sequences = []
    for batch in batches(prefix):
        learnt = learnt_by_the_loss(batch)
        for ids, positions, each in zip(
            *(batch[n].unbind() for n in ("input_ids", "position_ids")), learnt, strict=True
        ):
            assert ids.dtype == torch.int64
            assert positions.tolist() == list(range(len(ids)))
            sequences.append(Trained(ids.tolist(), each))
    return sequences


def test_verl_trains_what_the_shard_says(shards: tuple[Path, Path]) -> None:
    train, later = shards
    assert found(train) == trained_of(train)
    assert found(later) != trained_of(train)
    told("verl", trained_of(train))
