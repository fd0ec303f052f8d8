"""The header of ``X.seq.idx``.

256 bytes of fixed fields (``FIELDS``), a JSON block, zeros up to a multiple of 64, and in the last 16 bytes of
the header the xxh3_128 of all that stands before them. The arrays follow: ``sequence_offsets`` right after the
header, ``token_offsets`` at the next multiple of 64, both int64 [packs + 1]; the file ends with the second.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash

from megatron_sft_idx.errors import CorruptShardError, FormatError, UnsupportedVersionError
from megatron_sft_idx.layout.files import DATA_SUFFIXES, ShardPaths, idx_nbytes

__all__ = [
    "ARRAY_ALIGNMENT",
    "FIELDS",
    "FORMAT_VERSION",
    "HEADER_FIXED_NBYTES",
    "LABEL_ALIGNED",
    "MASK_DTYPES",
    "MAX_CAPACITY",
    "MAX_COUNT",
    "MAX_HEADER_NBYTES",
    "TOKEN_DTYPES",
    "Broken",
    "Field",
    "FileDigest",
    "Header",
    "align",
    "mask_dtype_of",
    "token_dtype_for_vocabulary",
    "token_dtype_of",
]


FORMAT_VERSION = 1

# Megatron's own dtype codes (megatron.core.datasets.indexed_dataset.DType), for what each file may hold.
TOKEN_DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
MASK_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 7: np.dtype("<f4")}

# loss_mask[j] says whether predicting token j + 1 of the same sequence counts. The only alignment on disk.
LABEL_ALIGNED = 1

# Lengths are int32 in .idx.
MAX_CAPACITY = 2**31 - 1
# Counts and byte sizes stay below this, so that no product or sum of a few of them overflows int64.
MAX_COUNT = 2**56

ARRAY_ALIGNMENT = 64

# Megatron writes uint16 for vocabularies below this (DType.optimal_dtype).
_UINT16_VOCABULARY = 65500


def align(offset: int, alignment: int = ARRAY_ALIGNMENT) -> int:
    """The first multiple of ``alignment`` at or after ``offset``, in bytes."""
    return -(-offset // alignment) * alignment


def token_dtype_for_vocabulary(vocab_size: int) -> np.dtype[Any]:
    """The token dtype Megatron itself would choose for a vocabulary: uint16 below 65500 ids, else int32."""
    return TOKEN_DTYPES[8] if vocab_size < _UINT16_VOCABULARY else TOKEN_DTYPES[4]


def token_dtype_of(dtype: Any) -> tuple[int, np.dtype[Any]]:
    """Code and little-endian dtype of the tokens; FormatError unless uint16 or int32."""
    return _lookup(dtype, TOKEN_DTYPES, "token dtype", "uint16 or int32")


def mask_dtype_of(dtype: Any) -> tuple[int, np.dtype[Any]]:
    """Code and little-endian dtype of the loss mask; FormatError unless uint8 or float32."""
    return _lookup(dtype, MASK_DTYPES, "mask dtype", "uint8 (0/1) or float32 (weights)")


def _lookup(dtype: Any, table: dict[int, np.dtype[Any]], what: str, allowed: str) -> tuple[int, np.dtype[Any]]:
    wanted = np.dtype(dtype)
    for code, candidate in table.items():
        if candidate == wanted:
            return code, candidate
    raise FormatError(f"{what} {wanted}: the format stores {allowed}; pass one of these")


MAGIC = b"\x89SFTIDX\n"
HEADER_FIXED_NBYTES = 256
CHECKSUM_NBYTES = 16
RESERVED_NBYTES = 40
# A header is a few KiB; the limit keeps a hostile size from becoming an allocation.
MAX_HEADER_NBYTES = 16 << 20
FLAG_REBUILT = 1


class Field(NamedTuple):
    """One fixed field: its name, position in bytes, and ``struct`` format (little-endian)."""

    name: str
    offset: int
    format: str


def _place(*fields: tuple[str, str]) -> tuple[Field, ...]:
    placed, offset = [], 0
    for name, code in fields:
        placed.append(Field(name, offset, code))
        offset += struct.calcsize("<" + code)
    assert offset == HEADER_FIXED_NBYTES, offset
    return tuple(placed)


FIELDS = _place(
    ("magic", "8s"),
    ("version", "I"),
    ("header_nbytes", "I"),
    ("shard_id", "16s"),
    ("num_packs", "Q"),
    ("num_sequences", "Q"),
    ("num_tokens", "Q"),
    ("num_trained_tokens", "Q"),
    ("num_masked_packs", "Q"),
    ("token_dtype", "B"),
    ("mask_dtype", "B"),
    ("mask_alignment", "B"),
    ("flags", "B"),
    ("sequence_multiple", "I"),
    ("capacity", "I"),
    ("longest_pack", "I"),
    ("most_sequences", "I"),
    ("json_nbytes", "I"),
    ("pad_id", "q"),
    ("tokens_nbytes", "Q"),
    ("tokens_checksum", "16s"),
    ("loss_nbytes", "Q"),
    ("loss_checksum", "16s"),
    ("idx_nbytes", "Q"),
    ("idx_checksum", "16s"),
    ("starts_nbytes", "Q"),
    ("starts_checksum", "16s"),
    ("arrays_checksum", "16s"),
    ("reserved", "40s"),
)
_STRUCT = struct.Struct("<" + "".join(f.format for f in FIELDS))
_OFFSETS = {f.name: f.offset for f in FIELDS}
_DIGESTS = ("tokens", "loss", "idx", "starts")


class FileDigest(NamedTuple):
    """Size in bytes and xxh3_128 (16 bytes, canonical big-endian digest) of one data file."""

    nbytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What ``X.seq.idx`` says of its shard.

    Attributes:
        num_packs: rows of the shard.
        num_sequences: sequences in all packs.
        num_tokens: tokens in all packs, padding not counted since none is stored.
        num_trained_tokens: positions whose loss mask is above zero.
        num_masked_packs: packs in which no position is trained on.
        token_dtype: dtype of ``X.bin``: uint16 or int32.
        mask_dtype: dtype of ``X.loss.bin``: uint8 or float32.
        sequence_multiple: packing counted each sequence as its length rounded up to this.
        capacity: most token positions a pack may hold, each sequence rounded up.
        longest_pack: tokens in the longest pack.
        most_sequences: sequences in the pack that has most.
        pad_id: the tokenizer's padding id; None where unknown.
        digests: of ``.bin``, ``.loss.bin``, ``.idx`` and ``.seq.bin``, in this order.
        arrays_checksum: xxh3_128 of the file behind the header.
        metadata: the JSON block: fingerprints, options, counts.
        rebuilt: the header was derived from the data, and the JSON block says what is no longer known.
    """

    num_packs: int
    num_sequences: int
    num_tokens: int
    num_trained_tokens: int
    num_masked_packs: int
    token_dtype: np.dtype[Any]
    mask_dtype: np.dtype[Any]
    sequence_multiple: int
    capacity: int
    longest_pack: int
    most_sequences: int
    pad_id: int | None
    digests: tuple[FileDigest, FileDigest, FileDigest, FileDigest]
    arrays_checksum: bytes
    metadata: dict[str, Any] = field(default_factory=dict)
    rebuilt: bool = False

    @property
    def shard_id(self) -> bytes:
        """16 bytes derived from the content: xxh3_128 over the four data checksums."""
        return xxhash.xxh3_128_digest(b"".join(digest.checksum for digest in self.digests))

    @property
    def nbytes(self) -> int:
        """Size of the header: where ``sequence_offsets`` begin."""
        return header_nbytes(self.metadata)

    @property
    def token_offsets_offset(self) -> int:
        """Where ``token_offsets`` begin, in bytes."""
        return align(self.nbytes + 8 * (self.num_packs + 1))

    @property
    def seq_idx_nbytes(self) -> int:
        """Size of the whole ``.seq.idx``."""
        return self.token_offsets_offset + 8 * (self.num_packs + 1)

    @property
    def index_nbytes(self) -> int:
        """Memory that the index arrays take: two offsets a pack, and those behind the last one, and the starts."""
        return 16 * (self.num_packs + 1) + 4 * self.num_sequences

    # What the JSON block says of where the tokens come from; None where it says nothing.

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer that made the ids."""
        return self._fingerprint("tokenizer", "fingerprint")

    @property
    def vocab_size(self) -> int | None:
        """The largest id of that tokenizer + 1."""
        block: Any = self.metadata.get("tokenizer")
        size = block.get("vocab_size") if isinstance(block, dict) else None
        return size if type(size) is int else None

    @property
    def template(self) -> str | None:
        """Fingerprint of the chat template that rendered the text, and of another one for rows with tools, if any."""
        text = self._fingerprint("chat_template", "fingerprint")
        tools = self._fingerprint("chat_template", "tools_fingerprint")
        return f"{text}, with tools {tools}" if tools else text

    @property
    def source(self) -> str | None:
        """Fingerprint of the rows the shard was made from."""
        return self._fingerprint("sources", "fingerprint")

    def _fingerprint(self, block: str, name: str) -> str | None:
        # Anybody may write anything into the block.
        found: Any = self.metadata.get(block)
        value = found.get(name) if isinstance(found, dict) else None
        return value if isinstance(value, str) else None

    def encode(self) -> bytes:
        """The header's bytes, checksum included."""
        block = encode_metadata(self.metadata)
        values: dict[str, Any] = {name: getattr(self, name) for name in _OFFSETS if hasattr(type(self), name)}
        values |= {
            "magic": MAGIC,
            "version": FORMAT_VERSION,
            "header_nbytes": self.nbytes,
            "token_dtype": token_dtype_of(self.token_dtype)[0],
            "mask_dtype": mask_dtype_of(self.mask_dtype)[0],
            "mask_alignment": LABEL_ALIGNED,
            "flags": FLAG_REBUILT if self.rebuilt else 0,
            "json_nbytes": len(block),
            "pad_id": -1 if self.pad_id is None else self.pad_id,
            "reserved": bytes(RESERVED_NBYTES),
        }
        for name, digest in zip(_DIGESTS, self.digests, strict=True):
            values[f"{name}_nbytes"], values[f"{name}_checksum"] = digest
        raw = _STRUCT.pack(*(values[f.name] for f in FIELDS)) + block
        raw = raw.ljust(self.nbytes - CHECKSUM_NBYTES, b"\0")
        return raw + xxhash.xxh3_128_digest(raw)

    @classmethod
    def decode(cls, raw: bytes, path: str) -> Header:
        """A header from its bytes; ``raw`` holds at least ``peek_nbytes(raw)`` bytes.

        Raises:
            CorruptShardError: a rule of FORMAT.md is broken; says which, where, found and expected.
            UnsupportedVersionError: another format version.
        """
        size = peek_nbytes(raw, path)
        if len(raw) < size:
            raise _error(path, Broken(len(raw), "H3", "a file that ends inside the header", f"{size} bytes of it"))
        for broken in broken_rules(raw[:size]):
            raise _error(path, broken)
        return _header_of(field_values(raw), raw)


def shown_counts(of: Any) -> str:
    """What a header, or what is known of data of another format, counts, for people; trained tokens may be unknown."""
    trained = of.num_trained_tokens
    share = "" if trained is None else f", {100 * trained / max(1, of.num_tokens):.1f}% trained"
    return (
        f"{of.num_packs:,} packs of up to {of.capacity:,} tokens, {of.num_sequences:,} sequences,"
        f" {of.num_tokens:,} tokens{share}"
    )


def data_nbytes(values: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the data files by a header's fields, by suffix; without those whose dtype code means nothing."""
    sizes = {".idx": idx_nbytes(values["num_packs"]), ".seq.bin": 4 * values["num_sequences"]}
    for suffix, name, dtypes in ((".bin", "token_dtype", TOKEN_DTYPES), (".loss.bin", "mask_dtype", MASK_DTYPES)):
        if values[name] in dtypes:
            sizes[suffix] = values["num_tokens"] * dtypes[values[name]].itemsize
    return sizes


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Canonical JSON: keys sorted, no spaces, UTF-8. FormatError where a value has no JSON form."""
    try:
        text = json.dumps(
            metadata,
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
            check_circular=True,
        )
        return text.encode()
    except RecursionError:
        raise FormatError("metadata: nested too deeply to be stored as JSON; flatten it") from None
    except (TypeError, ValueError) as error:
        raise FormatError(
            f"metadata: {error}; it is stored as JSON: use strings, finite numbers, lists, dicts"
        ) from error


def header_nbytes(metadata: Mapping[str, Any]) -> int:
    """Size of the header that holds this JSON block. FormatError where it is larger than readers accept."""
    size = align(HEADER_FIXED_NBYTES + len(encode_metadata(metadata)) + CHECKSUM_NBYTES)
    if size > MAX_HEADER_NBYTES:
        raise FormatError(
            f"metadata: the header would have {size} bytes, at most {MAX_HEADER_NBYTES} (rule H3); store less in it"
        )
    return size


class Broken(NamedTuple):
    """A rule that a header breaks: where, in bytes, what was found, and what should be there."""

    offset: int
    rule: str
    found: str
    expected: str


def _error(path: str, broken: Broken) -> CorruptShardError:
    remedy = ShardPaths(path.removesuffix(".tmp").removesuffix(".seq.idx")).index_remedy
    detail = f"{broken.found}, expected {broken.expected}; the file was cut short or changed: {remedy}"
    return CorruptShardError(path, broken.offset, broken.rule, detail)


def peek_nbytes(raw: bytes, path: str) -> int:
    """Header size said by the first 256 bytes, once magic and version are known to be right."""
    if broken := broken_outline(raw):
        if broken.rule == "H2":
            raise UnsupportedVersionError(path, field_values(raw)["version"], [FORMAT_VERSION])
        raise _error(path, broken)
    return int(field_values(raw)["header_nbytes"])


def broken_outline(raw: bytes) -> Broken | None:
    """What keeps the first 256 bytes of a file from being read as a header: rules H1 to H3."""
    if raw[: len(MAGIC)] != MAGIC:
        return Broken(0, "H1", f"magic {raw[:8]!r}", f"{MAGIC!r} of the .seq.idx of a packed SFT shard")
    if len(raw) < HEADER_FIXED_NBYTES:
        return Broken(len(raw), "H3", f"a file that ends after {len(raw)} bytes", f"at least {HEADER_FIXED_NBYTES}")
    values = field_values(raw)
    if values["version"] != FORMAT_VERSION:
        return Broken(_OFFSETS["version"], "H2", f"format version {values['version']}", str(FORMAT_VERSION))
    size = values["header_nbytes"]
    if size % 64 or not HEADER_FIXED_NBYTES + CHECKSUM_NBYTES <= size <= MAX_HEADER_NBYTES:
        expected = f"a multiple of 64 from 320 to {MAX_HEADER_NBYTES}"
        return Broken(_OFFSETS["header_nbytes"], "H3", f"header size {size}", expected)
    return None


def field_values(raw: bytes) -> dict[str, Any]:
    """The fixed fields by name, as they stand in the first 256 bytes."""
    return dict(zip(_OFFSETS, _STRUCT.unpack_from(raw), strict=True))


def broken_rules(raw: bytes) -> Iterator[Broken]:
    """What is wrong with a header whose outline is right: rules H4 to H8, and F2 of what it says."""
    values = field_values(raw)
    stored, computed = raw[-CHECKSUM_NBYTES:], xxhash.xxh3_128_digest(raw[:-CHECKSUM_NBYTES])
    if stored != computed:
        found = f"header checksum {stored.hex()}"
        yield Broken(len(raw) - CHECKSUM_NBYTES, "H4", found, f"{computed.hex()} by its bytes")
    for name, rule, ok, expected in chain(_codes(values), _counts(values), _sizes(values)):
        if not ok:
            shown = values[name].hex() if isinstance(values[name], bytes) else values[name]
            yield Broken(_OFFSETS[name], rule, f"{name} {shown}", expected)
    yield from _broken_block(values, raw)


def _header_of(values: dict[str, Any], raw: bytes) -> Header:
    """The header of fields that break no rule."""
    plain = {name: values[name] for name in Header.__dataclass_fields__ if name in values}
    plain |= {
        "token_dtype": TOKEN_DTYPES[values["token_dtype"]],
        "mask_dtype": MASK_DTYPES[values["mask_dtype"]],
        "pad_id": None if values["pad_id"] < 0 else values["pad_id"],
        "digests": tuple(FileDigest(values[f"{n}_nbytes"], values[f"{n}_checksum"]) for n in _DIGESTS),
        "metadata": decode_metadata(raw[HEADER_FIXED_NBYTES : HEADER_FIXED_NBYTES + values["json_nbytes"]]),
        "rebuilt": values["flags"] == FLAG_REBUILT,
    }
    return Header(**plain)


# Field, rule, whether it is kept, what was expected.
_Checks = Iterator[tuple[str, str, bool, str]]


def _codes(values: dict[str, Any]) -> _Checks:
    yield "token_dtype", "H5", values["token_dtype"] in TOKEN_DTYPES, "4 (int32) or 8 (uint16)"
    yield "mask_dtype", "H5", values["mask_dtype"] in MASK_DTYPES, "1 (uint8) or 7 (float32)"
    yield "mask_alignment", "H5", values["mask_alignment"] == LABEL_ALIGNED, "1 (label)"
    yield "flags", "H5", values["flags"] in (0, FLAG_REBUILT), "0 or 1 (rebuilt)"
    yield "reserved", "H5", values["reserved"] == bytes(RESERVED_NBYTES), "zeros"
    yield "pad_id", "H5", -1 <= values["pad_id"] <= MAX_CAPACITY, "an id, or -1 where unknown"


def _counts(values: dict[str, Any]) -> _Checks:
    packs, sequences, tokens = values["num_packs"], values["num_sequences"], values["num_tokens"]
    longest, most = values["longest_pack"], values["most_sequences"]
    yield "num_packs", "H6", packs <= sequences, f"at most num_sequences {sequences}"
    yield "num_sequences", "H6", sequences <= tokens, f"at most num_tokens {tokens}"
    few = tokens < MAX_COUNT and (packs > 0) == (tokens > 0)
    yield "num_tokens", "H6", few, f"below {MAX_COUNT}, and 0 only with 0 packs"
    yield "num_trained_tokens", "H6", values["num_trained_tokens"] <= tokens - sequences, "at most tokens - sequences"
    yield "num_masked_packs", "H6", values["num_masked_packs"] <= packs, f"at most num_packs {packs}"
    yield "sequence_multiple", "H6", 1 <= values["sequence_multiple"] <= MAX_CAPACITY, "1 or more"
    yield "capacity", "H6", values["capacity"] <= MAX_CAPACITY, f"at most {MAX_CAPACITY}"
    yield "longest_pack", "H6", longest <= values["capacity"] and (longest > 0) == (packs > 0), "1 to capacity"
    yield "most_sequences", "H6", most <= longest and (most > 0) == (packs > 0), "1 to longest_pack"


def _sizes(values: dict[str, Any]) -> _Checks:
    derived = data_nbytes(values)
    for name, suffix in zip(_DIGESTS, DATA_SUFFIXES, strict=True):
        if suffix in derived:
            ok = values[f"{name}_nbytes"] == derived[suffix]
            yield f"{name}_nbytes", "F2", ok, f"{derived[suffix]} by the counts for {suffix}"
    shard_id = xxhash.xxh3_128_digest(b"".join(values[f"{name}_checksum"] for name in _DIGESTS))
    yield "shard_id", "H8", values["shard_id"] == shard_id, f"{shard_id.hex()} by the checksums"


def _broken_block(values: dict[str, Any], raw: bytes) -> Iterator[Broken]:
    end = HEADER_FIXED_NBYTES + values["json_nbytes"]
    if align(end + CHECKSUM_NBYTES) != len(raw):
        found, expected = f"json_nbytes {values['json_nbytes']}", f"a block that fills {len(raw)} bytes"
        yield Broken(_OFFSETS["json_nbytes"], "H7", found, expected)
        return
    if any(raw[end:-CHECKSUM_NBYTES]):
        yield Broken(end, "H5", "bytes between JSON block and checksum", "zeros")
    if decode_metadata(raw[HEADER_FIXED_NBYTES:end]) is None:
        expected = "a canonical object: UTF-8, keys sorted, no spaces, no NaN"
        yield Broken(HEADER_FIXED_NBYTES, "H7", "another JSON block", expected)


# A header's block is checked and then taken, and shards of one dataset often have the same.
@lru_cache(maxsize=1)
def decode_metadata(block: bytes) -> dict[str, Any] | None:
    """The JSON block's object, not to be changed; None where it is not one in canonical form."""
    try:
        metadata = json.loads(block.decode("utf-8"))
        return metadata if isinstance(metadata, dict) and encode_metadata(metadata) == block else None
    except (ValueError, RecursionError):
        return None
