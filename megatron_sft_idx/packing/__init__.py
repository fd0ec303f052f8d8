"""Lengths to packs: which sequences share a training row."""

from megatron_sft_idx.packing.pack import METHODS, pack_sequences
from megatron_sft_idx.packing.plan import PackPlan, attention_cost, group_by_cost, reorder
from megatron_sft_idx.packing.window import WindowPacker

__all__ = [
    "METHODS",
    "PackPlan",
    "WindowPacker",
    "attention_cost",
    "group_by_cost",
    "pack_sequences",
    "reorder",
]
