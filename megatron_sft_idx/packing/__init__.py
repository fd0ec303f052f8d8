"""Lengths to packs: which sequences share a training row."""

from .order import attention_cost, group_by_cost, reorder
from .pack import METHODS, pack_sequences
from .plan import PackPlan
from .window import WindowPacker

__all__ = [
    "METHODS",
    "PackPlan",
    "WindowPacker",
    "attention_cost",
    "group_by_cost",
    "pack_sequences",
    "reorder",
]
