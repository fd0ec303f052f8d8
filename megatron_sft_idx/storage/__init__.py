"""Bytes in files and object stores: read, hashed, locked, and put in place.

Nothing here knows what the bytes mean: no module may tell a token from a mask. ``local`` opens local files, ``remote``
objects in stores, and ``advice`` tells the kernel what is read next. Whatever is put at a place that a user named goes
through ``publish``. ``progress`` shows how far work is.
"""

from megatron_sft_idx.storage.advice import (
    Extents,
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
