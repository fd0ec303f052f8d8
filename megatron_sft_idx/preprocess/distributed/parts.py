"""A part: the sequences of some pieces of input in one file, with what they were made from.

::

    magic, version     8 bytes
    size of the JSON   uint64
    checksum of it     xxh3_128, 16 bytes
    JSON               what it was made from, counts, and the checksum of all that follows
    lengths            uint32 [sequences], from the next multiple of 64 bytes on
    ids                uint16 or int32 [tokens], likewise
    masks              token-aligned, uint8 or float32 [tokens], likewise

A part is written under a name of its own and renamed: one that has its name is complete. Two tasks that make the same
part, as when a node was only thought dead, write the same bytes; the later rename wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.preprocess.encoding import EncodedPiece
from megatron_sft_idx.storage import OutputFile, as_bytes, open_array, sync_folder
from megatron_sft_idx.storage.hashing import StreamHash

__all__ = ["Part", "PartInfo", "write_part"]

_MAGIC = b"SFTPART\x01"
_HEAD = struct.Struct("<8sQ16s")
_ALIGNMENT = 64
_MAX_JSON_NBYTES = 1 << 28
_MASK_DTYPES = ("uint8", "float32")
_TOKEN_DTYPES = ("uint16", "int32")


@dataclass(slots=True)
class PartInfo:
    """What a part is made from and what is in it, but for its sequences.

    Attributes:
        options: digest of all that decides over tokens and masks.
        pieces: fingerprints of the pieces.
        num_bytes: of the input file, for progress.
        lines: rows, blank lines included: how far the numbers of the rows that follow are away.
        rows: rows read, bad ones included.
        skipped: rows that could not be used.
        bad_rows: their positions and reasons, in order.
        notes: counts by name.
        token_dtype: name of the ids' dtype.
        mask_dtype: name of the masks' dtype.
        sequences: how many there are.
        tokens: in all of them.
        checksum: of what follows the JSON: xxh3_128 in hex.
    """

    options: str
    pieces: list[str]
    num_bytes: int = 0
    lines: int = 0
    rows: int = 0
    skipped: int = 0
    bad_rows: list[tuple[int, str]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    token_dtype: str = "int32"
    mask_dtype: str = "uint8"
    sequences: int = 0
    tokens: int = 0
    checksum: str = ""

    def is_of(self, options: str, pieces: Sequence[str]) -> bool:
        """Whether it was made from these pieces by these options."""
        return self.options == options and self.pieces == list(pieces)

    def _is_valid(self) -> bool:
        counts = (self.num_bytes, self.lines, self.rows, self.skipped, self.sequences, self.tokens)
        return (
            all(type(count) is int and 0 <= count < 2**48 for count in counts)
            and all(type(text) is str for text in (self.options, self.checksum))
            and isinstance(self.pieces, list)
            and all(type(piece) is str for piece in self.pieces)
            and isinstance(self.notes, dict)
            and all(type(count) is int for count in self.notes.values())
            and isinstance(self.bad_rows, list)
            and all(isinstance(row, list) and list(map(type, row)) == [int, str] for row in self.bad_rows)
            and self.token_dtype in _TOKEN_DTYPES
            and self.mask_dtype in _MASK_DTYPES
        )

    @classmethod
    def decode(cls, raw: bytes) -> PartInfo | None:
        """From JSON; None where that is not what ``write_part`` writes."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            info = cls(**json.loads(raw))
            if info._is_valid():
                info.bad_rows = [(position, reason) for position, reason in info.bad_rows]
                return info
        return None


class Part:
    """A part, opened for reading.

    Attributes:
        info: what is in it.
        lengths: tokens of each sequence, uint32 [sequences].
        starts: where each begins among the tokens, int64 [sequences].
        ids: uint16 or int32 [tokens].
        mask: token-aligned, uint8 or float32 [tokens].

    Raises:
        FormatError: it is not what ``write_part`` wrote.
        FileNotFoundError: there is none.
    """

    def __init__(self, path: str, *, verify: bool = False) -> None:
        self.path = path
        size = os.stat(path).st_size
        whole = open_array(path, np.dtype("u1"), size, nbytes=size)[:]
        head = whole[: _HEAD.size].tobytes().ljust(_HEAD.size, b"\0")
        magic, nbytes, checksum = _HEAD.unpack(head)
        if magic != _MAGIC or nbytes > min(size - _HEAD.size, _MAX_JSON_NBYTES):
            raise self._broken("it does not begin as one")
        raw = whole[_HEAD.size : _HEAD.size + nbytes].tobytes()
        info = PartInfo.decode(raw) if xxhash.xxh3_128_digest(raw) == checksum else None
        if info is None:
            raise self._broken("its description is damaged")
        self.info = info
        offsets = _offsets(info, int(nbytes))
        if size != offsets[-1]:
            raise self._broken(f"it has {size} bytes, expected {offsets[-1]}")
        if verify and xxhash.xxh3_128_hexdigest(whole[offsets[0] :].data) != info.checksum:
            raise self._broken("its bytes have another checksum")
        lengths, ids, mask = (
            whole[offset : offset + count * dtype.itemsize].view(dtype)
            for offset, (count, dtype) in zip(offsets, _shapes(info), strict=False)
        )
        self.lengths, self.ids, self.mask = lengths, ids, mask
        ends = np.cumsum(lengths, dtype=np.int64)
        self.starts = ends - lengths
        if int(lengths.sum(dtype=np.int64)) != info.tokens or (len(lengths) and not lengths.all()):
            raise self._broken("its lengths do not add up to its tokens")

    def _broken(self, why: str) -> FormatError:
        return FormatError(f"{self.path}: not a part of a tokenised corpus: {why}; pass --resume, which makes it anew")


def _shapes(info: PartInfo) -> tuple[tuple[int, np.dtype[Any]], ...]:
    return (
        (info.sequences, np.dtype("<u4")),
        (info.tokens, np.dtype(info.token_dtype)),
        (info.tokens, np.dtype(info.mask_dtype)),
    )


def _offsets(info: PartInfo, json_nbytes: int) -> list[int]:
    """Where the three arrays begin, and where the last one ends."""
    offsets, end = [], _HEAD.size + json_nbytes
    for count, dtype in _shapes(info):
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(begin)
        end = begin + count * dtype.itemsize
    return [*offsets, end]


def write_part(path: str, info: PartInfo, encoded: Sequence[EncodedPiece]) -> PartInfo:
    """Write a part, durably and all at once; what was at its path is replaced.

    Args:
        path: where it goes; the folder is there.
        info: what it is made from and the counts of its rows; the rest is filled in.
        encoded: its pieces.

    Returns:
        The whole description.

    Raises:
        OSError: the disk says no.
    """
    arrays = [
        [piece.lengths.astype("<u4") for piece in encoded],
        [piece.input_ids for piece in encoded],
        [piece.loss_mask.astype(info.mask_dtype, copy=False) for piece in encoded],
    ]
    info.sequences = sum(len(piece.lengths) for piece in encoded)
    info.tokens = sum(len(piece.input_ids) for piece in encoded)
    # A checksum has one length, so what comes behind the JSON does not depend on it.
    info.checksum = "0" * 32
    offsets = _offsets(info, len(_encode(info)))
    body: list[bytes | memoryview] = []
    end = offsets[0]
    for offset, chunks in zip(offsets, arrays, strict=False):
        body += [bytes(offset - end), *(as_bytes(chunk) for chunk in chunks)]
        end = offset + sum(chunk.nbytes for chunk in chunks)
    stream = StreamHash()
    for data in body:
        stream.update(data)
    info.checksum = stream.hex()
    raw = _encode(info)
    head = _HEAD.pack(_MAGIC, len(raw), xxhash.xxh3_128_digest(raw)) + raw
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    file = OutputFile(temporary)
    try:
        for data in (head.ljust(offsets[0], b"\0"), *body):
            file.write(data)
        file.sync()
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        file.close()
    sync_folder(Path(path).parent)
    return info


def _encode(info: PartInfo) -> bytes:
    return json.dumps(asdict(info)).encode()
