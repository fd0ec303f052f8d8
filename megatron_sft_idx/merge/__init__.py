"""Many shards to one, one to many: bytes are copied and held to their checksums, packs are not looked at."""

from megatron_sft_idx.merge.merging import MergeReport, ProgressCallback, merge

__all__ = ["MergeReport", "ProgressCallback", "merge"]
