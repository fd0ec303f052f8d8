"""Read, hash, lock and publish files and objects.

Nothing here knows what the bytes mean; no module may distinguish a token from a mask. ``local`` opens local files,
``remote`` objects in stores, and ``advice`` gives the kernel hints about reads. All output to paths that a user gave
goes through ``publish``. ``progress`` shows the progress of work.
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
