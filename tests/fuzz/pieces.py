"""Several files as one input: the sizes of all except the last as uint16, then their bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def join(files: Sequence[bytes]) -> bytes:
    """Return an input of these files."""
    return struct.pack(f"<{len(files) - 1}H", *map(len, files[:-1])) + b"".join(files)


def split(data: bytes, count: int) -> list[bytes]:
    """Return any input as ``count`` files. The last file is the rest."""
    sizes = struct.Struct(f"<{count - 1}H")
    data = data.ljust(sizes.size, b"\0")
    files, at = [], sizes.size
    for size in (*sizes.unpack_from(data), len(data)):
        files.append(data[at : at + size])
        at += size
    return files
