"""Where bytes lie: on local disks (``local``) or in object stores (``remote``)."""

from megatron_sft_idx.storage.local import (
    Array,
    Backend,
    OutputFile,
    PreadArray,
    as_bytes,
    check_size,
    open_array,
    sync_folder,
)
from megatron_sft_idx.storage.remote.paths import is_remote, require_local

__all__ = [
    "Array",
    "Backend",
    "OutputFile",
    "PreadArray",
    "as_bytes",
    "check_size",
    "is_remote",
    "open_array",
    "require_local",
    "sync_folder",
]
