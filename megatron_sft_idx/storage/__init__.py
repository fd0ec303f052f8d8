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
from megatron_sft_idx.storage.reopened import ReopenedArray, advise_runs, read_runs

__all__ = [
    "Array",
    "Backend",
    "OutputFile",
    "PreadArray",
    "ReopenedArray",
    "advise_runs",
    "as_bytes",
    "check_size",
    "is_remote",
    "open_array",
    "read_runs",
    "require_local",
    "sync_folder",
]
