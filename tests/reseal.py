"""Damage shards and correct the checksums, so that only one rule is broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_sft_idx.layout import FIELDS, align

_PLACES = {field.name: field for field in FIELDS}
_DIGESTS = {".bin": "tokens", ".loss.bin": "loss", ".idx": "idx", ".seq.bin": "starts"}

Files = dict[str, bytes]


def put(folder: Path, files: Files, name: str = "x") -> str:
    """Write a shard's files, given by suffix, and return the prefix."""
    prefix = str(folder / name)
    for suffix, data in files.items():
        Path(prefix + suffix).write_bytes(data)
    return prefix


def field(raw: bytes, name: str) -> Any:
    """Return one field of a header."""
    place = _PLACES[name]
    return struct.unpack_from("<" + place.format, raw, place.offset)[0]


def set_fields(raw: bytes, **fields: Any) -> bytes:
    """Return a ``.seq.idx`` with these fields and a corrected header checksum."""
    size, out = field(raw, "header_nbytes"), bytearray(raw)
    for name, value in fields.items():
        struct.pack_into("<" + _PLACES[name].format, out, _PLACES[name].offset, value)
    out[size - 16 : size] = xxhash.xxh3_128_digest(bytes(out[: size - 16]))
    return bytes(out)


def set_item(data: bytes, dtype: str, index: int, value: Any, offset: int = 0) -> bytes:
    """Replace one item of an array that begins at ``offset``, and return the bytes."""
    item, out = np.array([value], dtype).tobytes(), bytearray(data)
    at = offset + len(item) * index
    assert len(out[at : at + len(item)]) == len(item)
    out[at : at + len(item)] = item
    return bytes(out)


def arrays_of(raw: bytes) -> tuple[int, int]:
    """Return the byte offsets of ``sequence_offsets`` and ``token_offsets``."""
    first = field(raw, "header_nbytes")
    return first, align(first + 8 * (field(raw, "num_packs") + 1))


def reseal(files: Files, **fields: Any) -> Files:
    """Correct all sizes, checksums and the shard id for the present files, then set these fields of the header."""
    raw = files[".seq.idx"]
    sums = {suffix: xxhash.xxh3_128_digest(files[suffix]) for suffix in _DIGESTS}
    values = {f"{name}_checksum": sums[suffix] for suffix, name in _DIGESTS.items()}
    values |= {f"{name}_nbytes": len(files[suffix]) for suffix, name in _DIGESTS.items()}
    values["shard_id"] = xxhash.xxh3_128_digest(b"".join(sums.values()))
    values["arrays_checksum"] = xxhash.xxh3_128_digest(raw[field(raw, "header_nbytes") :])
    return {**files, ".seq.idx": set_fields(raw, **{**values, **fields})}
