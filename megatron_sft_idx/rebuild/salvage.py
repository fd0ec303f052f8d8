"""What a damaged ``.seq.idx`` still proves.

Of the header's fields all but a few follow from the data. Those that do are filled in anew; if the header's own
checksum, 128 bits that stand apart at its end, then fits what is there, the rest is proven to be what was written:
capacity, sequence multiple, pad id, flags and the JSON block. The checksum also fits where only it was damaged, for no
other content comes as close to it as a few bits, and where one bit of the rest was flipped, which is found by trying.
What fits nowhere stays unproven, however plausible it looks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import xxhash

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import FIELDS, HEADER_FIXED_NBYTES, Header, align
from megatron_sft_idx.layout.header import CHECKSUM_NBYTES, MAX_HEADER_NBYTES, encode_metadata
from megatron_sft_idx.rebuild.lengths import OffsetLengths
from megatron_sft_idx.storage.hashing import digest_file

__all__ = ["damaged_values", "header_sizes", "prove", "proven_lengths"]

# Fields that the data does not tell, and the two sizes that are found by trying.
_UNDERIVED = {"flags", "sequence_multiple", "capacity", "pad_id"}
_SIZES = {"header_nbytes", "json_nbytes"}
_PLACES = {field.name: (field.offset, struct.calcsize("<" + field.format)) for field in FIELDS}
# Checksums of unlike contents differ in 64 bits or so; in 8 or fewer once in 10^26 times.
_MOST_CHECKSUM_BITS = 8
# Trying every bit takes time by the square of the header's size.
_MOST_TRIED_NBYTES = 1 << 15


def header_sizes(raw: bytes, file_nbytes: int, num_packs: int) -> list[int]:
    """Sizes the header may have had: by its own field, and by what the arrays of so many packs leave of the file."""
    arrays = 8 * (num_packs + 1)
    said = struct.unpack_from("<I", raw, _PLACES["header_nbytes"][0])[0] if len(raw) >= HEADER_FIXED_NBYTES else 0
    smallest = HEADER_FIXED_NBYTES + CHECKSUM_NBYTES
    sizes = {said: None, file_nbytes - arrays - align(arrays): None}
    return [n for n in sizes if n % 64 == 0 and smallest <= n <= min(MAX_HEADER_NBYTES, file_nbytes, len(raw))]


def prove(raw: bytes, derived: Header, sizes: list[int], path: str) -> Header | None:
    """The header as it was written, or None where that is not proven.

    Args:
        raw: the file's first bytes.
        derived: a header with all that follows from the data; the rest of it is not looked at.
        sizes: header sizes to try.
        path: of the file, for messages.
    """
    template = derived.encode()
    for size in sizes:
        body, stored = bytearray(raw[: size - CHECKSUM_NBYTES]), raw[size - CHECKSUM_NBYTES : size]
        stripped = len(body[HEADER_FIXED_NBYTES:].rstrip(b"\0"))
        for json_nbytes in {stripped, _read(raw, "json_nbytes")}:
            if HEADER_FIXED_NBYTES + json_nbytes > len(body):
                continue
            filled = _filled(body, template, size, json_nbytes)
            if _fits(filled, stored, json_nbytes):
                try:
                    return Header.decode(bytes(filled) + xxhash.xxh3_128_digest(filled), path)
                except FormatError:  # the checksum is right and a rule broken: not written by a writer that keeps them
                    continue
    return None


def _filled(body: bytearray, template: bytes, size: int, json_nbytes: int) -> bytearray:
    """The header without its checksum, where everything that can be derived is."""
    filled = bytearray(body)
    for name, (offset, nbytes) in _PLACES.items():
        if name not in _UNDERIVED | _SIZES:
            filled[offset : offset + nbytes] = template[offset : offset + nbytes]
    struct.pack_into("<I", filled, _PLACES["header_nbytes"][0], size)
    struct.pack_into("<I", filled, _PLACES["json_nbytes"][0], json_nbytes)
    end = HEADER_FIXED_NBYTES + json_nbytes
    filled[end:] = bytes(len(filled) - end)
    return filled


def _fits(filled: bytearray, stored: bytes, json_nbytes: int) -> bool:
    """Whether the checksum proves the bytes, at once or with one bit of them flipped, which is then done."""
    unlike = int.from_bytes(stored, "big") ^ int.from_bytes(xxhash.xxh3_128_digest(filled), "big")
    if unlike.bit_count() <= _MOST_CHECKSUM_BITS:
        return True
    if len(filled) > _MOST_TRIED_NBYTES:
        return False
    for at in _underived_bytes(json_nbytes):
        for bit in range(8):
            filled[at] ^= 1 << bit
            if xxhash.xxh3_128_digest(filled) == stored:
                return True
            filled[at] ^= 1 << bit
    return False


def _underived_bytes(json_nbytes: int) -> Iterator[int]:
    for name in _UNDERIVED:
        offset, nbytes = _PLACES[name]
        yield from range(offset, offset + nbytes)
    yield from range(HEADER_FIXED_NBYTES, HEADER_FIXED_NBYTES + json_nbytes)


def _read(raw: bytes, name: str) -> int:
    field = next(field for field in FIELDS if field.name == name)
    return int(struct.unpack_from("<" + field.format, raw, field.offset)[0])


def damaged_values(raw: bytes, sizes: list[int]) -> dict[str, Any]:
    """What an unproven header says of the things that only it knew; empty where its JSON block is unreadable."""
    for size in sizes:
        block = raw[HEADER_FIXED_NBYTES : size - CHECKSUM_NBYTES].rstrip(b"\0")
        try:
            metadata = json.loads(block)
            canonical = isinstance(metadata, dict) and encode_metadata(metadata) == block
        except (ValueError, RecursionError):
            continue
        if canonical:
            return {"metadata": metadata} | {name: _read(raw, name) for name in sorted(_UNDERIVED - {"flags"})}
    return {}


def proven_lengths(path: str, raw: bytes, sizes: list[int], num_packs: int) -> OffsetLengths | None:
    """Lengths by the arrays of a ``.seq.idx`` whose header is damaged, where its checksum of the arrays still fits."""
    if len(raw) < HEADER_FIXED_NBYTES:
        return None
    for size in sizes:
        if digest_file(path, size).checksum == raw[slice(*_place("arrays_checksum"))]:
            return OffsetLengths(path, align(size + 8 * (num_packs + 1)), num_packs)
    return None


def _place(name: str) -> tuple[int, int]:
    offset, nbytes = _PLACES[name]
    return offset, offset + nbytes
