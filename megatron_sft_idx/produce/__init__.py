"""What ``produce`` does: an input that may still grow to a catalog of shards that training reads meanwhile."""

from megatron_sft_idx.produce.options import AheadLimits, ProduceOptions
from megatron_sft_idx.produce.production import ProduceSummary, own_files, produce

__all__ = ["AheadLimits", "ProduceOptions", "ProduceSummary", "own_files", "produce"]
