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

__all__ = ["Array", "Backend", "OutputFile", "PreadArray", "as_bytes", "check_size", "open_array", "sync_folder"]
