"""Bytes of the format, version 1: the one place in Python that knows where which byte lies, as FORMAT.md specifies it.

Readers, writers and ``verify`` all take it from here, so they cannot disagree. ``files`` has the names of the files and
the bytes of both indexes, ``column`` the bytes of columns. Nothing here opens or writes a file.
"""

from megatron_sft_idx.layout.files import (
    FIELDS,
    HEADER_FIXED_NBYTES,
    MASK_DTYPES,
    TOKEN_DTYPES,
    FileDigest,
    Header,
    ShardPaths,
    align,
    mask_dtype_of,
    token_dtype_for_vocabulary,
    token_dtype_of,
)
