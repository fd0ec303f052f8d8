r"""Megatron's own index, ``X.idx`` (MMIDIDX version 1): one sequence, one document, one pack.

::

    byte 0   9 bytes   b"MMIDIDX\0\0"
    byte 9   uint64    version, 1
    byte 17  uint8     dtype code of X.bin
    byte 18  uint64    number of sequences: packs
    byte 26  uint64    number of document indices: packs + 1
    byte 34  int32  [packs]      length of each pack, in tokens
             int64  [packs]      position of each pack in X.bin, in bytes
             int64  [packs + 1]  0, 1, ..., packs

The arrays begin at byte 34 and are never aligned: load them by copy, never through a typed pointer.
"""

from __future__ import annotations

import struct

__all__ = ["IDX_HEADER", "IDX_HEADER_NBYTES", "idx_nbytes", "idx_places", "pack_idx_header"]

IDX_HEADER = struct.Struct("<9sQBQQ")
IDX_HEADER_NBYTES = IDX_HEADER.size
_MAGIC = b"MMIDIDX\x00\x00"


def pack_idx_header(dtype_code: int, num_packs: int) -> bytes:
    """The 34 bytes before the arrays."""
    return IDX_HEADER.pack(_MAGIC, 1, dtype_code, num_packs, num_packs + 1)


def idx_nbytes(num_packs: int) -> int:
    """Size of the whole ``.idx`` in bytes."""
    return IDX_HEADER_NBYTES + num_packs * (4 + 8) + (num_packs + 1) * 8


def idx_places(num_packs: int) -> tuple[int, int, int]:
    """Where lengths, positions and documents begin in ``.idx``, in bytes."""
    positions = IDX_HEADER_NBYTES + 4 * num_packs
    return IDX_HEADER_NBYTES, positions, positions + 8 * num_packs
