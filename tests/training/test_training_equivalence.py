"""Packed rows give the same loss and gradient per token as single sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gpt_model import SegmentAttention, model_inputs, seed_everything
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from training_twin import Pair, batch_of, lone_process, random_sequences

from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.sources import StoredPacks

VOCABULARY, LENGTH, WIDTH = 256, 96, 8
TOLERANCE = 5e-6
ROWS = [[17, 1, 40, 23], [96], [5, 5, 5, 60], [2, 31]]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


def model_of(script: ModuleType, attention: str) -> GPTModel:
    """Return a model with the same weights for every way to attend."""
    seed_everything(1)
    options = ["--data-path", "-", "--seq-length", LENGTH, "--vocab-size", VOCABULARY, "--attention", attention]
    args = script.parse_arguments([str(option) for option in [*options, "--init-method-std", 0.2]])
    return script.build_model(args).module


def learn(model: GPTModel, inputs: dict[str, Any], loss_mask: torch.Tensor) -> torch.Tensor:
    """Return per-token losses, and add the gradients of the sum over trained tokens to the model's."""
    losses = model(**inputs)
    (losses * loss_mask).sum().backward()
    return losses.detach()


def gradients(model: GPTModel) -> list[torch.Tensor]:
    # Megatron's wrapper sums gradients in this attribute.
    return [parameter.main_grad.clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def rows() -> list[list[Pair]]:
    rng = np.random.default_rng(0)
    return [random_sequences(rng, lengths, VOCABULARY) for lengths in ROWS]


@pytest.fixture(scope="module")
def alone(script: ModuleType, rows: list[list[Pair]]) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return losses of each row's sequences and the gradient, with one sequence in the model at a time."""
    model = model_of(script, "mask")
    losses = []
    for row in rows:
        losses.append([])
        for ids, mask in row:
            batch = batch_of([[(ids, mask)]], len(ids), 2)
            ahead = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)[None, None]
            inputs = {"input_ids": batch["tokens"], "position_ids": batch["position_ids"], "labels": batch["labels"]}
            losses[-1].append(learn(model, {**inputs, "attention_mask": ahead}, batch["loss_mask"])[0])
    return losses, gradients(model)


def differences(
    script: ModuleType, attention: str, batch: dict[str, torch.Tensor], alone: Any, multiple: int = 1
) -> tuple[float, float]:
    """Return the largest relative differences of losses and of gradients between packed and single sequences."""
    expected, expected_gradient = alone
    model = model_of(script, attention)
    inputs, loss_mask = model_inputs(batch, attention)
    losses = learn(model, inputs, loss_mask)
    loss, rows_taken = 0.0, 0
    for number, row in enumerate(expected):
        start = 0
        for wanted in row:
            if attention == "unpacked":
                got = losses[rows_taken]
                rows_taken += 1
            else:
                got = losses.reshape(-1, LENGTH)[number, start:]
            loss = max(loss, float(((got[: len(wanted)] - wanted).abs() / wanted.abs()).max()))
            start += -(-len(wanted) // multiple) * multiple
        rows_taken += start < LENGTH  # the padding at the end is a separate row
    pairs = zip(gradients(model), expected_gradient, strict=True)
    return loss, max(float((got - wanted).abs().max() / wanted.abs().max()) for got, wanted in pairs)


ATTENTION = pytest.mark.parametrize("attention", ["thd", "mask", "unpacked"])


@ATTENTION
def test_packed_trains_like_each_sequence_alone(
    script: ModuleType, rows: list[list[Pair]], alone: Any, attention: str
) -> None:
    loss, gradient = differences(script, attention, batch_of(rows, LENGTH, WIDTH), alone)
    print(f"{attention}: loss {loss:.1e}, gradient {gradient:.1e}")
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


@ATTENTION
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_shard_trains_like_each_sequence_alone(
    script: ModuleType, rows: list[list[Pair]], alone: Any, attention: str, multiple: int, tmp_path: Path
) -> None:
    with ShardWriter(tmp_path / "x", capacity=LENGTH, sequence_multiple=multiple, durable=False) as writer:
        for row, lengths in zip(rows, ROWS, strict=True):
            ids, masks = (np.concatenate(parts) for parts in zip(*row, strict=True))
            writer.add_pack(ids, masks, np.cumsum([0, *lengths[:-1]]))
        writer.finalize()
    source = StoredPacks(ShardSet.open(tmp_path / "x"))
    batch = BatchAssembler(source, LENGTH, sequence_multiple=multiple).assemble(range(len(rows)))
    assert ("cu_seqlens_padded" in batch) == (multiple > 1)
    loss, gradient = differences(script, attention, batch, alone, multiple)
    print(f"shard, multiple {multiple}, {attention}: loss {loss:.1e}, gradient {gradient:.1e}")
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


@pytest.mark.parametrize("attention", ["thd", "mask"])
def test_forgotten_boundaries_fail_the_same_check(
    script: ModuleType, rows: list[list[Pair]], alone: Any, attention: str
) -> None:
    batch = batch_of(rows, LENGTH, WIDTH)
    batch["cu_seqlens"] = torch.tensor([[0] + [LENGTH] * (WIDTH - 1)] * len(rows), dtype=torch.int32)
    batch["max_seqlen"] = torch.full((len(rows),), LENGTH, dtype=torch.int32)
    loss, gradient = differences(script, attention, batch, alone)
    print(f"forgotten, {attention}: loss {loss:.1e}, gradient {gradient:.1e}")
    assert loss > 1000 * TOLERANCE
    assert gradient > 1000 * TOLERANCE


def test_attention_drops_out_where_the_model_is_told_to_and_trains() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.5)
    attention = SegmentAttention(config, 1, None, "self")
    query = torch.randn(16, 2, 4)
    bounds = torch.tensor([0, 9, 16], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    attended = [attention(query, query, query, None, packed_seq_params=packed) for _ in range(2)]
    assert not torch.equal(*attended)
    attention.eval()
    attended = [attention(query, query, query, None, packed_seq_params=packed) for _ in range(2)]
    assert torch.equal(*attended)
