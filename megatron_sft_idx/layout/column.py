"""A column: ``X.<name>.col``, values that travel beside the tokens of a shard; one row a token, a sequence or a pack.

128 bytes of fixed fields (``_FIELDS``), a JSON block, zeros up to a multiple of 64, and in the last 16 bytes of the
header the xxh3_128 of all that stands before them. The values follow: rows x width items, row by row, to the end of
the file. The header names the shard that they belong to. That checksum stands for the whole file: the shard that was
written with a column lists it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, UnsupportedVersionError
from megatron_sft_idx.layout.header import (
    CHECKSUM_NBYTES,
    MAX_COUNT,
    Broken,
    Header,
    align,
    decode_metadata,
    encode_metadata,
)

__all__ = [
    "COLUMN_DTYPES",
    "COLUMN_MAGIC",
    "MAX_WIDTH",
    "PAIR",
    "PER",
    "Alignment",
    "ColumnHeader",
    "ColumnSpec",
    "Per",
    "broken_column",
    "check_name",
    "column_count",
    "column_rows",
    "is_source",
    "listed_columns",
    "torn_pairs",
]

Per = Literal["token", "sequence", "pack"]
Alignment = Literal["token", "label"]

COLUMN_MAGIC = b"\x89SFTCOL\n"
COLUMN_VERSION = 1
FIXED_NBYTES = 128
MAX_COLUMN_HEADER_NBYTES = 16 << 20
MAX_WIDTH = 1 << 16
PER: dict[Per, int] = {"token": 1, "sequence": 2, "pack": 3}
# That of the loss mask is "label".
_ALIGNMENTS: dict[Alignment, int] = {"label": 1, "token": 2}
# Megatron's own codes (megatron.core.datasets.indexed_dataset.DType), and two that it has none for.
COLUMN_DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2", "<u4", "<f2"), 1)
}

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Names of the five files, and of what packs and batches hold besides.
_TAKEN = frozenset(
    {"loss", "seq"}
    | {"input_ids", "loss_mask", "seq_boundaries"}
    | {"tokens", "labels", "position_ids", "attention_mask", "padding_mask"}
    | {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "packed_seq_params", "local_cp_size"}
)


def check_name(name: str) -> str:
    """The name of a column, or FormatError."""
    if _NAME.fullmatch(name) and name not in _TAKEN:
        return name
    raise FormatError(
        f"column {name!r}: a name is of small letters, digits and _, begins with a letter, has at most 64 of them, and"
        f" is none of {', '.join(sorted(_TAKEN))}"
    )


@dataclass(frozen=True)
class ColumnSpec:
    """What a column is, without its values.

    Attributes:
        per: what has one row.
        dtype: of the items, one of ``COLUMN_DTYPES``.
        width: items of a row: values are [rows] where it is 1, else [rows, width].
        alignment: what row j of a token column belongs to: ``token`` j, or the ``label`` there, which is token j + 1.
            It is only said; nothing is shifted. Of other columns it says nothing, and is ``token``.
        metadata: JSON object that travels with the column.

    Raises:
        FormatError: a value that the format does not allow.
    """

    per: Per
    dtype: Any
    width: int = 1
    alignment: Alignment = "token"
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value, choices in (
            ("per", self.per, get_args(Per)),
            ("alignment", self.alignment, get_args(Alignment)),
        ):
            if value not in choices:
                raise FormatError(f"column: {what} {value!r}, choose one of {', '.join(choices)}")
        dtype = np.dtype(self.dtype)
        if dtype.newbyteorder("<") not in COLUMN_DTYPES.values():
            raise FormatError(f"column: dtype {dtype}, choose one of {', '.join(map(str, COLUMN_DTYPES.values()))}")
        object.__setattr__(self, "dtype", dtype.newbyteorder("<"))
        object.__setattr__(self, "alignment", self.alignment if self.per == "token" else "token")
        if isinstance(self.width, bool) or not isinstance(self.width, int) or not 1 <= self.width <= MAX_WIDTH:
            raise FormatError(f"column: width {self.width!r}: expected a whole number from 1 to {MAX_WIDTH}")
        if self.header_nbytes > MAX_COLUMN_HEADER_NBYTES:
            raise FormatError(f"column: its metadata make a header of more than {MAX_COLUMN_HEADER_NBYTES} bytes")

    @classmethod
    def of(
        cls,
        per: Per,
        values: NDArray[Any],
        *,
        alignment: Alignment = "token",
        metadata: Mapping[str, Any] | None = None,
    ) -> ColumnSpec:
        """What an array of values [rows] or [rows, width] is."""
        return cls(per, values.dtype, values.shape[1] if values.ndim > 1 else 1, alignment, metadata or {})

    @property
    def header_nbytes(self) -> int:
        """Where the values begin in the file."""
        return align(FIXED_NBYTES + len(encode_metadata(self.metadata)) + CHECKSUM_NBYTES)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return int(self.dtype.itemsize) * self.width

    @property
    def kind(self) -> tuple[Per, str, int, Alignment]:
        """Without the metadata: what must be alike where columns of one name come together."""
        return self.per, self.dtype.str, self.width, self.alignment

    def shape(self, rows: int) -> tuple[int, ...]:
        """Of so many rows."""
        return (rows,) if self.width == 1 else (rows, self.width)

    def array(self, name: str, values: ArrayLike, rows: int) -> NDArray[Any]:
        """Values as they are stored, in an array of the column's shape. ValueError where they are other values then."""
        given = np.asarray(values)
        if given.shape != self.shape(rows):
            raise ValueError(
                f"column {name} has shape {given.shape}; expected {self.shape(rows)}: one row a {self.per}"
            )
        if given.dtype == self.dtype:
            return np.ascontiguousarray(given, self.dtype)
        whole = self.dtype.kind in "iu"
        if given.dtype.kind not in ("iub" if whole else "iubf"):
            raise ValueError(f"column {name} has dtype {given.dtype}; expected {self.dtype}")
        stored = np.ascontiguousarray(given, self.dtype)
        if whole and not np.array_equal(stored, given):
            raise ValueError(f"column {name} holds values that {self.dtype} does not; declare a wider dtype")
        return stored

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        code = next(code for code, dtype in COLUMN_DTYPES.items() if dtype == self.dtype)
        return {"per": self.per, "dtype": code, "width": self.width, "alignment": self.alignment,
                "metadata": dict(self.metadata)}  # fmt: skip

    @classmethod
    def decode(cls, value: Any) -> ColumnSpec:
        """From JSON values. ValueError where they are none that ``encode`` gives."""
        try:
            metadata = value["metadata"]
            if not isinstance(metadata, dict):
                raise ValueError("no metadata")
            return cls(value["per"], COLUMN_DTYPES[value["dtype"]], value["width"], value["alignment"], metadata)
        except (FormatError, KeyError, TypeError) as error:
            raise ValueError(f"no column: {error}") from None


def is_source(spec: ColumnSpec) -> bool:
    """Whether a column says of each sequence which of the files that it names it came from, and which row of that."""
    files = spec.metadata.get("files")
    named = isinstance(files, list) and all(
        isinstance(file, dict) and isinstance(file.get("name"), str) for file in files
    )
    return named and spec.kind[:3] == ("sequence", "<u4", 2)


def column_count(per: Per, tokens: int, sequences: int, packs: int) -> int:
    """Rows of a column of a shard that has so many of each."""
    return {"token": tokens, "sequence": sequences, "pack": packs}[per]


def column_rows(header: Header, per: Per) -> int:
    """Rows of a column of a shard."""
    return column_count(per, header.num_tokens, header.num_sequences, header.num_packs)


def listed_columns(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The columns that a shard was written with, and their checksums in hex, as its JSON block lists them."""
    listed = metadata.get("columns")
    if not isinstance(listed, dict):
        return {}
    return {name: str(value) for name, value in listed.items() if _NAME.fullmatch(name) and name not in _TAKEN}


# The column ``pair``: the number of a pair, and 0 for its chosen sequence or 1 for its rejected one.
PAIR = ColumnSpec("sequence", np.uint32, 2)


def torn_pairs(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Which of these rows of a column ``pair`` [n, 2] begin no pair: chosen, 0, and right behind it its rejected, 1."""
    chosen, rejected = rows[: len(rows) // 2 * 2 : 2], rows[1::2]
    torn = (chosen[:, 0] != rejected[:, 0]) | (chosen[:, 1] != 0) | (rejected[:, 1] != 1)
    return 2 * np.flatnonzero(np.append(torn, np.ones(len(rows) % 2, bool)))


_STRUCT = struct.Struct("<8sII16sBBBBIQI4s16s56s")
_OFFSETS = {"version": 8, "header_nbytes": 12, "shard_id": 16, "per": 32, "dtype": 33, "alignment": 34, "zero": 35,
            "width": 36, "rows": 40, "json_nbytes": 48, "checksum": 56}  # fmt: skip
assert _STRUCT.size == FIXED_NBYTES


@dataclass(frozen=True)
class ColumnHeader:
    """What a column file says of itself.

    Attributes:
        spec: dtype, width, what has a row, metadata.
        shard_id: 16 bytes, of the shard that the rows belong to.
        rows: how many there are.
        checksum: xxh3_128 of all values, 16 bytes.
    """

    spec: ColumnSpec
    shard_id: bytes
    rows: int
    checksum: bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return self.spec.header_nbytes + self.rows * self.spec.row_nbytes

    def encode(self) -> bytes:
        """The header's bytes; the last 16 are its checksum, which stands for the file."""
        spec, block = self.spec, encode_metadata(self.spec.metadata)
        alignment = _ALIGNMENTS[spec.alignment] if spec.per == "token" else 0
        raw = _STRUCT.pack(
            COLUMN_MAGIC, COLUMN_VERSION, spec.header_nbytes, self.shard_id, PER[spec.per], spec.encode()["dtype"],
            alignment, 0, spec.width, self.rows, len(block), bytes(4), self.checksum, bytes(56),
        ) + block  # fmt: skip
        raw = raw.ljust(spec.header_nbytes - CHECKSUM_NBYTES, b"\0")
        return raw + xxhash.xxh3_128_digest(raw)

    @classmethod
    def decode(cls, raw: bytes, path: str) -> ColumnHeader:
        """From the first bytes of a file, of which there are as many as ``peek`` says.

        Raises:
            CorruptShardError: a rule of FORMAT.md is broken (C1 to C4).
            UnsupportedVersionError: another version.
        """
        for broken in broken_column(raw):
            if broken.offset == _OFFSETS["version"] and broken.rule == "C1":
                raise UnsupportedVersionError(path, int.from_bytes(raw[8:12], "little"), [COLUMN_VERSION])
            detail = f"{broken.found}, expected {broken.expected}; the file was cut short or changed: restore it"
            raise CorruptShardError(path, broken.offset, broken.rule, detail)
        _, _, _, shard_id, per, dtype, alignment, _, width, rows, json_nbytes, _, checksum, _ = _STRUCT.unpack_from(raw)
        metadata = decode_metadata(raw[FIXED_NBYTES : FIXED_NBYTES + json_nbytes])
        assert metadata is not None
        per_name = next(name for name, code in PER.items() if code == per)
        named: Alignment = next((name for name, code in _ALIGNMENTS.items() if code == alignment), "token")
        return cls(ColumnSpec(per_name, COLUMN_DTYPES[dtype], width, named, metadata), shard_id, rows, checksum)

    @staticmethod
    def peek(raw: bytes) -> int:
        """How many bytes the header has by its first 128; 128 where they are of no column."""
        size = int.from_bytes(raw[12:16], "little")
        return size if raw[:8] == COLUMN_MAGIC and FIXED_NBYTES <= size <= MAX_COLUMN_HEADER_NBYTES else FIXED_NBYTES


def broken_column(raw: bytes) -> Iterator[Broken]:
    """What is wrong with the header of a column: rules C1 to C4; of C1 and C2 the first breach alone."""
    if raw[:8] != COLUMN_MAGIC:
        yield Broken(0, "C1", f"magic {raw[:8]!r}", f"{COLUMN_MAGIC!r} of a column of a packed SFT shard")
        return
    if len(raw) < FIXED_NBYTES:
        yield Broken(len(raw), "C2", f"a file that ends after {len(raw)} bytes", f"at least {FIXED_NBYTES}")
        return
    _, version, size, _, per, dtype, alignment, zero, width, rows, json_nbytes, zeros, _, more = _STRUCT.unpack_from(
        raw
    )
    if version != COLUMN_VERSION:
        yield Broken(8, "C1", f"version {version}", str(COLUMN_VERSION))
        return
    if size % 64 or not FIXED_NBYTES + CHECKSUM_NBYTES <= size <= MAX_COLUMN_HEADER_NBYTES:
        expected = f"a multiple of 64 from 192 to {MAX_COLUMN_HEADER_NBYTES}"
        yield Broken(12, "C2", f"header size {size}", expected)
        return
    if len(raw) < size:
        yield Broken(len(raw), "C2", "a file that ends inside the header", f"{size} bytes of it")
        return
    raw = raw[:size]
    stored, computed = raw[-CHECKSUM_NBYTES:], xxhash.xxh3_128_digest(raw[:-CHECKSUM_NBYTES])
    if stored != computed:
        yield Broken(size - CHECKSUM_NBYTES, "C3", f"header checksum {stored.hex()}", f"{computed.hex()} by its bytes")
    alignments = tuple(_ALIGNMENTS.values()) if per == PER["token"] else (0,)
    for name, value, ok, expected in (
        ("per", per, per in PER.values(), "1 (token), 2 (sequence) or 3 (pack)"),
        ("dtype", dtype, dtype in COLUMN_DTYPES, f"1 to {len(COLUMN_DTYPES)}"),
        ("alignment", alignment, alignment in alignments, " or ".join(map(str, alignments))),
        ("zero", zero, not zero, "0"),
        ("width", width, 1 <= width <= MAX_WIDTH, f"1 to {MAX_WIDTH}"),
        ("rows", rows, rows < MAX_COUNT, f"below {MAX_COUNT}"),
    ):
        if not ok:
            yield Broken(_OFFSETS[name], "C4", f"{name} {value}", expected)
    if any(zeros) or any(more):
        yield Broken(52 if any(zeros) else 72, "C4", "bytes that mean nothing", "zeros")
    end = FIXED_NBYTES + json_nbytes
    if align(end + CHECKSUM_NBYTES) != size:
        yield Broken(_OFFSETS["json_nbytes"], "C4", f"json_nbytes {json_nbytes}", f"a block that fills {size} bytes")
        return
    if any(raw[end:-CHECKSUM_NBYTES]):
        yield Broken(end, "C4", "bytes between JSON block and checksum", "zeros")
    if decode_metadata(raw[FIXED_NBYTES:end]) is None:
        yield Broken(
            FIXED_NBYTES, "C4", "another JSON block", "a canonical object: UTF-8, keys sorted, no spaces, no NaN"
        )
