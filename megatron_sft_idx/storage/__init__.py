"""Where bytes lie: on local disks (``local``)."""

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
    "open_array",
    "read_runs",
    "sync_folder",
]
