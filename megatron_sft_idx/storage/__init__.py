"""Where bytes lie, on local disks or in object stores (``remote``), how they are read, hashed, locked and put in place.

Bytes have no meaning here: nothing knows a token from a mask. What a user finds appears whole, through ``publish``, or
through ``shard.publication`` where five files belong together.
"""

from megatron_sft_idx.storage.advice import (
    Extents,
    FirstReadHints,
    advise_order,
    announce,
    drop_cached,
    drop_pages,
    huge_nbytes_of,
)
from megatron_sft_idx.storage.local import (
    Advice,
    Array,
    Backend,
    BackendName,
    OutputFile,
    PreadArray,
    ReadOptions,
    ReopenedArray,
    as_bytes,
    check_size,
    is_remote,
    name_in_errors,
    open_array,
    open_regular,
    read_beginning,
    read_extents,
    require_local,
    sync_folder,
)
