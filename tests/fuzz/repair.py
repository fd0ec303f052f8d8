"""Correct checksums and sizes of mutated bytes, so that a fuzzer gets past these checks."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator

import numpy as np
import xxhash

from megatron_sft_idx.formats.memmap import npy_header_bytes
from megatron_sft_idx.layout.files import (
    FIELDS,
    IDX_HEADER,
    MAGIC,
    MASK_DTYPES,
    MAX_HEADER_NBYTES,
    SUFFIXES,
    TOKEN_DTYPES,
    align,
    idx_nbytes,
)

_OFFSETS = {field.name: field.offset for field in FIELDS}
_FORMATS = {field.name: "<" + field.format for field in FIELDS}
_LEAST_NBYTES = 320


def field_of(raw: bytes | bytearray, name: str) -> int:
    """Return one number of a header."""
    return int(struct.unpack_from(_FORMATS[name], raw, _OFFSETS[name])[0])


def put_field(raw: bytearray, name: str, value: int | bytes) -> None:
    struct.pack_into(_FORMATS[name], raw, _OFFSETS[name], value)


def repair_header(data: bytes) -> bytes:
    """Return a header with valid magic, version, shard id and checksum, and otherwise unchanged."""
    raw = bytearray(data.ljust(_LEAST_NBYTES, b"\0"))
    put_field(raw, "magic", MAGIC)
    put_field(raw, "version", 1)
    size = field_of(raw, "header_nbytes")
    if size % 64 or not _LEAST_NBYTES <= size <= min(len(raw), MAX_HEADER_NBYTES):
        size = _LEAST_NBYTES
        put_field(raw, "header_nbytes", size)
    digests = [raw[_OFFSETS[f"{name}_checksum"] :][:16] for name in ("tokens", "loss", "idx", "starts")]
    put_field(raw, "shard_id", xxhash.xxh3_128_digest(b"".join(digests)))
    raw[size - 16 : size] = xxhash.xxh3_128_digest(bytes(raw[: size - 16]))
    return bytes(raw)


def repair_shard(files: dict[str, bytes], most_nbytes: int = 1 << 14) -> dict[str, bytes]:
    """Truncate or pad all five files to the sizes that follow from the header's counts, if these are small."""
    raw = bytearray(repair_header(files[".seq.idx"]))
    packs, sequences, tokens = (field_of(raw, name) for name in ("num_packs", "num_sequences", "num_tokens"))
    token = TOKEN_DTYPES.get(field_of(raw, "token_dtype"))
    mask = MASK_DTYPES.get(field_of(raw, "mask_dtype"))
    if token is None or mask is None or max(packs, sequences, tokens) * 20 > most_nbytes:
        return {**files, ".seq.idx": bytes(raw)}
    first = field_of(raw, "header_nbytes")
    nbytes = {
        ".bin": tokens * token.itemsize,
        ".loss.bin": tokens * mask.itemsize,
        ".seq.bin": sequences * 4,
        ".idx": idx_nbytes(packs),
        ".seq.idx": align(first + 8 * (packs + 1)) + 8 * (packs + 1),
    }
    for name, suffix in (("tokens", ".bin"), ("loss", ".loss.bin"), ("idx", ".idx"), ("starts", ".seq.bin")):
        put_field(raw, f"{name}_nbytes", nbytes[suffix])
    whole = {**files, ".seq.idx": repair_header(bytes(raw))}
    return {suffix: whole[suffix][: nbytes[suffix]].ljust(nbytes[suffix], b"\0") for suffix in SUFFIXES}


_BLOCK = struct.Struct("<4sIQ")


def repair_log(data: bytes) -> bytes:
    """Return a log of packs with the checksum of every complete block corrected."""
    out, at = [], 0
    while at + _BLOCK.size <= len(data):
        _, count, _ = _BLOCK.unpack_from(data, at)
        body = data[at + _BLOCK.size :][: 8 * count]
        if len(body) != 8 * count:
            break
        out += [_BLOCK.pack(b"PACK", count, xxhash.xxh3_64_intdigest(body)), body]
        at += _BLOCK.size + len(body)
    return b"".join(out) + data[at:]


_BEGIN = b'{"sft-building": 1'


def repair_json(data: bytes) -> bytes:
    """Return the data with the beginning by which our files are recognised."""
    return data if data.startswith(_BEGIN) else _BEGIN + b", " + data.lstrip(b"{")


def repair_pbin(data: bytes) -> Iterator[bytes]:
    """Yield the data with each kind of header, for the bytes before the first possible start of a pickle."""
    body, index = data[12:].split(b"\x80", 1) if b"\x80" in data[12:] else (data[12:], b"\x04].")
    size = (1, 2, 4)[len(body) % 3]
    for form, token_nbytes in (("<QI", size), (">QI", size), (">Q", 4)):
        kept = body[: len(body) - len(body) % token_nbytes]
        numbers = (len(kept), token_nbytes)[: len(form) - 1]
        yield struct.pack(form, *numbers) + kept + b"\x80" + index.removesuffix(b".") + b"."


_DTYPE = re.compile(rb"'descr': '([<>|][iufb][1248])'")


def repair_arrays(files: dict[str, bytes], most: int = 16) -> dict[str, bytes]:
    """Return a memmap folder with arrays of the shapes in its manifest, if these are small."""
    try:
        manifest = json.loads(files["manifest.json"])
        packs, width = (abs(int(manifest[name])) % most for name in ("num_bins", "pack_size"))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        packs, width = 2, 4
    manifest = {"format": "memmap_padded_v1", "num_bins": packs, "pack_size": width}
    out = {"manifest.json": json.dumps(manifest).encode()}
    shapes = {"input_ids": (packs, width), "loss_mask": (packs, width), "packed_len": (packs,)}
    shapes |= {"seq_offsets": (packs + 1,), "seq_starts": (-1,)}
    for name, expected in shapes.items():
        head, _, body = files[f"{name}.npy"].partition(b"\n")
        named = _DTYPE.search(head)
        try:
            dtype = np.dtype(named[1].decode() if named else "<u4")
        except TypeError:
            dtype = np.dtype("<u4")
        shape = (len(body) // dtype.itemsize,) if expected == (-1,) else expected
        nbytes = int(np.prod(shape)) * dtype.itemsize
        out[f"{name}.npy"] = npy_header_bytes(dtype, shape) + body[:nbytes].ljust(nbytes, b"\0")
    return out


def repair_idx(idx: bytes, data: bytes, most: int = 64) -> tuple[bytes, bytes]:
    """Return a stock index truncated or padded to the size for its count, with its items contiguous."""
    _, _, code, items, _ = IDX_HEADER.unpack(idx[: IDX_HEADER.size].ljust(IDX_HEADER.size, b"\0"))
    code, items = 1 + (code - 1) % 8, items % most
    itemsize = (1, 1, 2, 4, 8, 8, 4, 2)[code - 1]
    lengths = np.frombuffer(idx[IDX_HEADER.size :][: 4 * items].ljust(4 * items, b"\1"), "<i4") % 8 + 1
    nbytes = lengths.astype("<i8") * itemsize
    pointers = np.cumsum(nbytes, dtype="<i8") - nbytes
    header = IDX_HEADER.pack(b"MMIDIDX\0\0", 1, code, items, items + 1)
    size = int(nbytes.sum())
    documents = np.arange(items + 1, dtype="<i8")
    whole = header + lengths.astype("<i4").tobytes() + pointers.tobytes() + documents.tobytes()
    return whole, data[:size].ljust(size, b"\0")
