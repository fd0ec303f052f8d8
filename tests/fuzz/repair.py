"""Makes checksums and sizes of mutated bytes right again: behind them is where a fuzzer has to get."""

from __future__ import annotations

import struct

import xxhash

from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.layout.header import FIELDS, MAGIC, MAX_HEADER_NBYTES
from megatron_sft_idx.layout.mmididx import idx_nbytes
from megatron_sft_idx.layout.values import MASK_DTYPES, TOKEN_DTYPES, align

_OFFSETS = {field.name: field.offset for field in FIELDS}
_FORMATS = {field.name: "<" + field.format for field in FIELDS}
_LEAST_NBYTES = 320


def field_of(raw: bytes | bytearray, name: str) -> int:
    """One number of a header."""
    return int(struct.unpack_from(_FORMATS[name], raw, _OFFSETS[name])[0])


def put_field(raw: bytearray, name: str, value: int | bytes) -> None:
    struct.pack_into(_FORMATS[name], raw, _OFFSETS[name], value)


def repair_header(data: bytes) -> bytes:
    """With magic, version, shard id and checksum as readers want them; all else is as the fuzzer left it."""
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
    """All five files cut or filled up to the sizes that the header's counts ask for, where those are small."""
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


_HEAD = struct.Struct("<8sII")
_BLOCK = struct.Struct("<4sIQ")


def repair_journal(data: bytes) -> bytes:
    """With the checksums of the head and of every whole block made right."""
    if len(data) < _HEAD.size:
        return data
    _, size, reserved = _HEAD.unpack_from(data)
    end = align(_HEAD.size + size, 8)
    if end + 8 > len(data):
        return data
    head = _HEAD.pack(b"SFTJRNL1", size, reserved) + data[_HEAD.size : end]
    out = [head, struct.pack("<Q", xxhash.xxh3_64_intdigest(head))]
    at = end + 8
    while at + _BLOCK.size <= len(data):
        kind, count, _ = _BLOCK.unpack_from(data, at)
        body = data[at + _BLOCK.size :][: 8 * count]
        if len(body) != 8 * count:
            break
        out += [_BLOCK.pack(kind, count, xxhash.xxh3_64_intdigest(body)), body]
        at += _BLOCK.size + len(body)
    return b"".join(out) + data[at:]
