"""What a shard holds, shown to people."""

from megatron_sft_idx.report.marked import mark_pack

__all__ = ["mark_pack"]
