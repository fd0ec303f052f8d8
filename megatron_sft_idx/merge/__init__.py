"""Many shards to one, one to many: bytes are copied and held to their checksums, packs are not looked at."""

from megatron_sft_idx.merge.merging import MergeReport, ProgressCallback, merge
from megatron_sft_idx.merge.splitting import Parts, SplitReport, part_prefix, refuse_other_splits, split

__all__ = [
    "MergeReport",
    "Parts",
    "ProgressCallback",
    "SplitReport",
    "merge",
    "part_prefix",
    "refuse_other_splits",
    "split",
]
