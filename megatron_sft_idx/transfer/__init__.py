"""Whole shards from place to place: local folders and object stores, held to their checksums on the way.

What arrives has the bytes that were sent, or does not become a shard. Nothing here looks inside one or mends it.
"""

from megatron_sft_idx.transfer.buckets import STAGING, StagedOutput, upload
from megatron_sft_idx.transfer.copying import check_destinations, copy_shard, destinations, download
from megatron_sft_idx.transfer.source import Copied, Source, shard_nbytes

__all__ = [
    "STAGING",
    "Copied",
    "Source",
    "StagedOutput",
    "check_destinations",
    "copy_shard",
    "destinations",
    "download",
    "shard_nbytes",
    "upload",
]
