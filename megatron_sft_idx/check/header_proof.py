"""What a damaged header of ``.seq.idx`` still proves.

Most fields of a header follow from the data files. ``DamagedHeader.prove`` puts them right in the damaged header and
compares its checksum with the stored one, which stands at the header's end. If they are equal, the other fields are
proven to be what was written: capacity, sequence multiple, pad id, flags and the JSON block. Two kinds of damage are
overcome besides:

- The stored checksum differs in a few of its 128 bits only: then the damage is in the checksum itself, because the
  checksums of different contents differ in about 64 bits.
- One bit is flipped in the fields that do not follow from the data: flipping each bit in turn finds it.

Whatever no checksum proves stays unproven, however plausible it looks.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import Any

import xxhash

from megatron_sft_idx.check.lengths import PackLengths, offset_lengths
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import FIELDS, HEADER_FIXED_NBYTES, Header, align
from megatron_sft_idx.layout.files import CHECKSUM_NBYTES, MAX_HEADER_NBYTES, decode_metadata
from megatron_sft_idx.storage.local import digest_file

# Fields that no other file tells.
HEADER_ONLY = ("capacity", "sequence_multiple", "pad_id")
_UNDERIVED = {"flags", *HEADER_ONLY}
_FIELDS = {field.name: (field.offset, struct.Struct("<" + field.format)) for field in FIELDS}
# Two checksums of different contents are this close once in 10^26 times.
_MAX_CHECKSUM_BITS = 8
# Flipping every bit takes time by the square of the header's size.
_MAX_SEARCHED_NBYTES = 1 << 15


class DamagedHeader:
    """The header of a ``.seq.idx`` that breaks a rule.

    Args:
        path: of the ``.seq.idx``.
        raw: its first bytes, with all of the header; empty if the file is missing, which proves nothing.
        num_packs: the number of packs, by ``.seq.bin``.
    """

    def __init__(self, path: str, raw: bytes, num_packs: int) -> None:
        self._path, self._raw, self._num_packs = path, raw, num_packs
        self._sizes: list[int] = []
        if raw:
            # By the header's own field, and by what the two arrays of so many packs leave of the file.
            file_nbytes, array_nbytes = os.stat(path).st_size, 8 * (num_packs + 1)
            claimed = self._field("header_nbytes") if len(raw) >= HEADER_FIXED_NBYTES else 0
            smallest, largest = HEADER_FIXED_NBYTES + CHECKSUM_NBYTES, min(MAX_HEADER_NBYTES, file_nbytes, len(raw))
            sizes = dict.fromkeys((claimed, file_nbytes - array_nbytes - align(array_nbytes)))
            self._sizes = [size for size in sizes if size % 64 == 0 and smallest <= size <= largest]

    def _field(self, name: str) -> Any:
        offset, form = _FIELDS[name]
        return form.unpack_from(self._raw, offset)[0]

    def pack_lengths(self) -> PackLengths | None:
        """Pack lengths by the token offsets behind the header; None if the arrays do not match their checksum."""
        for size in self._sizes:
            if digest_file(self._path, size).checksum == self._field("arrays_checksum"):
                return offset_lengths(self._path, align(size + 8 * (self._num_packs + 1)), self._num_packs)
        return None

    def prove(self, derived: Header) -> Header | None:
        """The header as it was written; None if it cannot be proven.

        ``derived`` must have the right values in all fields that follow from the data.
        """
        for size in self._sizes:
            stored = self._raw[size - CHECKSUM_NBYTES : size]
            for filled, json_end in self._filled(size, derived.encode()):
                if _proves(filled, stored, json_end):
                    # A header that is proven and breaks a rule is of no writer that keeps the rules.
                    with contextlib.suppress(FormatError):
                        return Header.decode(bytes(filled) + xxhash.xxh3_128_digest(filled), self._path)
        return None

    def _filled(self, size: int, derived: bytes) -> Iterator[tuple[bytearray, int]]:
        """Headers of a size, without their checksums, in which all fields are right that follow from the data.

        There is one for each size that the JSON block may have; with it comes the byte where the block ends.
        """
        body = self._raw[: size - CHECKSUM_NBYTES]
        without_padding = len(body[HEADER_FIXED_NBYTES:].rstrip(b"\0"))
        for json_nbytes in {without_padding, self._field("json_nbytes")}:
            json_end = HEADER_FIXED_NBYTES + json_nbytes
            if json_end > len(body):
                continue
            filled = bytearray(body[:json_end].ljust(len(body), b"\0"))
            for name, (offset, form) in _FIELDS.items():
                if name not in _UNDERIVED:
                    filled[offset : offset + form.size] = derived[offset : offset + form.size]
            for name, value in (("header_nbytes", size), ("json_nbytes", json_nbytes)):
                offset, form = _FIELDS[name]
                form.pack_into(filled, offset, value)
            yield filled, json_end

    def unproven_values(self) -> dict[str, Any]:
        """The metadata and ``HEADER_ONLY`` fields, right or wrong; empty if the JSON block cannot be read."""
        for size in self._sizes:
            block = self._raw[HEADER_FIXED_NBYTES : size - CHECKSUM_NBYTES].rstrip(b"\0")
            if (metadata := decode_metadata(block)) is not None:
                return {"metadata": metadata} | {name: self._field(name) for name in sorted(HEADER_ONLY)}
        return {}


def _proves(filled: bytearray, stored: bytes, json_end: int) -> bool:
    """Whether the stored checksum, which may be damaged itself, is that of a header without its checksum.

    If flipping one bit of the header makes them equal, that bit is left flipped. ``json_end`` is where its JSON block
    ends, in bytes.
    """
    difference = int.from_bytes(stored, "big") ^ int.from_bytes(xxhash.xxh3_128_digest(filled), "big")
    if difference.bit_count() <= _MAX_CHECKSUM_BITS:
        return True
    if len(filled) > _MAX_SEARCHED_NBYTES:
        return False
    underived = [_FIELDS[name] for name in _UNDERIVED]
    offsets = [at for offset, form in underived for at in range(offset, offset + form.size)]
    for at in (*offsets, *range(HEADER_FIXED_NBYTES, json_end)):
        for bit in range(8):
            filled[at] ^= 1 << bit
            if xxhash.xxh3_128_digest(filled) == stored:
                return True
            filled[at] ^= 1 << bit
    return False
