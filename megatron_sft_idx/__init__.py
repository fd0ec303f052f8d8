"""Packed SFT data for Megatron: five memory-mapped files a shard, exact loss masks."""

__version__ = "0.1.0"
