"""Inputs to the model for each way to attend, compared with brute force; and cleanup after the CPU replacement."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
from gpt_model import (
    block_mask,
    current_device,
    layer_spec,
    megatron_device,
    model_inputs,
    packed_seq_params,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from training_twin import batch_of, random_sequences

from megatron_sft_idx.errors import FormatError

LENGTH = 24
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5).filter(lambda lengths: sum(lengths) <= LENGTH)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(LENGTHS, min_size=1, max_size=3), seed=st.integers(0, 9))
def test_every_way_sees_the_same_sequences(rows: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [random_sequences(rng, lengths, 50) for lengths in rows]
    batch = batch_of(sequences, LENGTH, 8)
    ends = [[*np.cumsum(lengths).tolist(), LENGTH] for lengths in rows]

    mask = block_mask(batch)
    for row, bounds in enumerate(ends):
        segment = [sum(end <= position for end in bounds) for position in range(LENGTH)]
        for i in range(LENGTH):
            for j in range(LENGTH):
                assert bool(mask[row, 0, i, j]) == (j > i or segment[i] != segment[j])

    params = packed_seq_params(batch)
    wanted = [0] + [row * LENGTH + end for row, bounds in enumerate(ends) for end in bounds]
    assert params.cu_seqlens_q.unique_consecutive().tolist() == sorted(set(wanted))
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.max_seqlen_q == max(b - a for a, b in pairwise(sorted(set(wanted))))
    assert params.cu_seqlens_q_padded is None

    inputs, loss_mask = model_inputs(batch, "unpacked")
    real = [pair for row in sequences for pair in row]
    kept = [row for row, ids in enumerate(inputs["input_ids"]) if loss_mask[row].any()]
    trained = [(ids.tolist(), mask.tolist()) for ids, mask in real if mask.any()]
    assert len(kept) == len(trained)
    for row, (ids, weights) in zip(kept, trained, strict=True):
        assert inputs["input_ids"][row, : len(ids)].tolist() == ids
        assert loss_mask[row].tolist() == weights + [0] * (loss_mask.shape[1] - len(weights))


def test_logical_and_padded_boundaries_are_laid_end_to_end() -> None:
    batch = {
        "tokens": torch.zeros(2, 16, dtype=torch.int64),
        "cu_seqlens": torch.tensor([[0, 3, 8, 8], [0, 1, 1, 1]], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([[0, 4, 12, 16], [0, 4, 16, 16]], dtype=torch.int32),
        "max_seqlen": torch.tensor([8, 12], dtype=torch.int32),
    }
    params = packed_seq_params(batch)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 3, 8, 8, 9, 9, 9]
    assert params.cu_seqlens_q_padded.tolist() == [0, 4, 12, 16, 20, 32, 32]
    assert params.max_seqlen_kv == 12


def use_the_shim_and_fail() -> None:
    with megatron_device():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.ones(1).cuda().type() == "torch.cuda.FloatTensor"
        torch.cuda.synchronize()
        raise ZeroDivisionError


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing where CUDA exists")
def test_the_shim_is_there_inside_and_gone_outside() -> None:
    before = torch.cuda.current_device, torch.cuda.synchronize
    with pytest.raises(ZeroDivisionError):
        use_the_shim_and_fail()
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    assert current_device().type == "cpu"


def test_a_way_to_attend_that_is_none_is_refused() -> None:
    batch = batch_of([random_sequences(np.random.default_rng(1), [5], 50)], LENGTH, 8)
    for use in (layer_spec, lambda attention: model_inputs(batch, attention)):
        with pytest.raises(FormatError, match="attention: 'flash', choose one of thd, mask, unpacked, te"):
            use("flash")


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_te_without_transformer_engine_says_what_to_install() -> None:
    with pytest.raises(ImportError, match="pip install 'transformer-engine"):
        layer_spec("te")
