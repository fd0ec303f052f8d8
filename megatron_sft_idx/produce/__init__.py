"""What ``produce`` does: an input that may still grow to a catalog of shards that training reads meanwhile."""

from megatron_sft_idx.produce.production import ProduceSummary, own_files, produce
from megatron_sft_idx.produce.start import AheadLimits, ProduceOptions

__all__ = ["AheadLimits", "ProduceOptions", "ProduceSummary", "own_files", "produce"]
