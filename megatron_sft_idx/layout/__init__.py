"""Bytes of the format, version 1. FORMAT.md is the specification; this package is the same thing in Python.

``files`` has the names of the files and the bytes of both indexes, ``column`` the bytes of columns. The package turns
bytes into values and values into bytes: nothing here opens or writes a file.
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
