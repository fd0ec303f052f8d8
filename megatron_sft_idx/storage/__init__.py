"""Where bytes lie: on local disks (``local``) or in object stores (``remote``); and how they are read."""

from megatron_sft_idx.storage.advice import Runs, advise_order, announce, drop_cached, drop_file, drop_pages
from megatron_sft_idx.storage.block_cache import BlockCache, CachedArray
from megatron_sft_idx.storage.huge_pages import ask_huge_pages, huge_nbytes_of
from megatron_sft_idx.storage.local import (
    Array,
    OutputFile,
    PreadArray,
    as_bytes,
    check_size,
    naming,
    open_array,
    open_regular,
    read_most,
    sync_folder,
)
from megatron_sft_idx.storage.options import CACHE_NBYTES, Advice, Backend, BackendName, ReadOptions
from megatron_sft_idx.storage.remote.paths import is_remote, require_local
from megatron_sft_idx.storage.reopened import ReopenedArray, read_runs

__all__ = [
    "CACHE_NBYTES",
    "Advice",
    "Array",
    "Backend",
    "BackendName",
    "BlockCache",
    "CachedArray",
    "OutputFile",
    "PreadArray",
    "ReadOptions",
    "ReopenedArray",
    "Runs",
    "advise_order",
    "announce",
    "as_bytes",
    "ask_huge_pages",
    "check_size",
    "drop_cached",
    "drop_file",
    "drop_pages",
    "huge_nbytes_of",
    "is_remote",
    "naming",
    "open_array",
    "open_regular",
    "read_most",
    "read_runs",
    "require_local",
    "sync_folder",
]
