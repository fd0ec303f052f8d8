"""Bytes of the format, version 1. FORMAT.md is the specification; this package is the same thing in Python.

``files`` names the files and has the bytes of both indexes, ``column`` those of columns, ``journal`` the record of a
build in progress. From bytes to values and back: nothing here writes a file.
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
