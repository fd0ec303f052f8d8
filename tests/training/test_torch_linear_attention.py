"""Models with linear attention: the layout that separates their sequences, and the one that does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sample_packs import demo_samples, write_samples
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from megatron_sft_idx import Shard, as_torch


def test_linear_attention_needs_the_layout_padded(tmp_path: Path) -> None:
    """``flattened`` is wrong for these models, as documented. This test fails when transformers repairs it."""
    torch.manual_seed(0)
    write_samples(tmp_path / "x", demo_samples())
    shard = Shard(tmp_path / "x")
    config = Qwen3NextConfig(
        vocab_size=int(max(pack["input_ids"].max() for pack in shard)) + 1,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )
    model = Qwen3NextForCausalLM(config).eval()
    pack = next(number for number in range(len(shard)) if len(shard[number]["seq_boundaries"]) > 3)
    alone = []
    for ids, _ in shard.sequences(pack):
        row = torch.from_numpy(ids.astype(np.int64))[None]
        alone.append(model(row, use_cache=False).logits[0])
    expected = torch.cat(alone)
    differences = {}
    for layout in ("padded", "flattened"):
        packs = as_torch(shard, layout)
        batch = packs.collate([packs[pack]])
        batch.pop("labels")
        logits = model(**{"use_cache": False, **batch}).logits
        found = logits[batch["attention_mask"] == 1] if layout == "padded" else logits[0]
        differences[layout] = float((found - expected).abs().max() / expected.abs().max())
    assert differences["padded"] < 1e-5
    assert differences["flattened"] > 1e-3
