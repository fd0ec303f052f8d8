"""Whole shards from place to place: local folders and object stores, held to their checksums on the way."""

from megatron_sft_idx.transfer.copying import copy_shard
from megatron_sft_idx.transfer.download import download
from megatron_sft_idx.transfer.places import check_destinations, destinations, shard_nbytes
from megatron_sft_idx.transfer.report import Copied
from megatron_sft_idx.transfer.source import Source, open_source
from megatron_sft_idx.transfer.staging import StagedOutput
from megatron_sft_idx.transfer.upload import upload

__all__ = [
    "Copied",
    "Source",
    "StagedOutput",
    "check_destinations",
    "copy_shard",
    "destinations",
    "download",
    "open_source",
    "shard_nbytes",
    "upload",
]
