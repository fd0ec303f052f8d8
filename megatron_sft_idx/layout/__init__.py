"""The byte layout of the format, version 1. All Python code takes it from here; FORMAT.md is the specification.

Because readers, writers and ``verify`` share this code, they cannot disagree. ``files`` has the file names and the
layout of both indexes, ``column`` the layout of columns, ``media_layout`` that of images and audio, ``doubts`` marks of
damage. This package never opens or writes a file.
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
