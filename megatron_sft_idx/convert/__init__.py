"""Packed data of one format to another: ``megatron-sft-idx convert``."""

from megatron_sft_idx.convert.conversion import ConvertOptions, ConvertReport, convert

__all__ = ["ConvertOptions", "ConvertReport", "convert"]
