"""File names, dtypes, limits, Megatron's index and the header of ``.seq.idx``: everything that all code must agree on.

Nothing here opens a file. FORMAT.md is the specification; the rule numbers are the same in both.

``X.seq.idx`` is a header and two arrays. The header consists of 256 bytes of fixed fields (``FIELDS``), a JSON block,
zeros up to a multiple of 64, and a checksum of 16 bytes: the xxh3_128 of all bytes before it. The array
``sequence_offsets`` directly follows the header. ``token_offsets`` starts at the next multiple of 64. Both are
int64 [packs + 1], and the file ends with the second. The header of a column has the same form (``HeaderForm``).
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, UnsupportedVersionError, brief

_Stated = TypeVar("_Stated")

# ---- names ----

# The data files, in the order of their digests in the header. The shard id is a hash of the checksums in these four
# digests, and of the two checksums of images and audio if there are any.
DATA_SUFFIXES = (".bin", ".loss.bin", ".idx", ".seq.bin")
# All five files, in the order of publication: a shard exists once its .seq.idx exists.
SUFFIXES = (".bin", ".loss.bin", ".seq.bin", ".idx", ".seq.idx")
# The two files of a shard with images or audio, in the order of publication.
MEDIA_SUFFIXES = (".media.data", ".media.items")
# Suffix of the folder next to an output that holds all unfinished work for it (``storage.building``).
BUILDING = ".building"
_COLUMN = re.compile(r"(.*)\.([a-z][a-z0-9_]*)\.col", re.DOTALL)
_COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
# Names that a column cannot have: parts of the five files' names, keys of packs and keys of batches.
RESERVED_NAMES = frozenset(
    {"loss", "seq", "media"}
    | {"input_ids", "loss_mask", "seq_boundaries"}
    | {"tokens", "labels", "position_ids", "attention_mask", "padding_mask"}
    | {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "packed_seq_params", "local_cp_size"}
)


def column_of(path: str) -> tuple[str, str] | None:
    """Return prefix and column name for a path like ``X.source.col``, and None for any other path."""
    match = _COLUMN.fullmatch(path)
    return (match[1], match[2]) if match else None


def _may_name_column(name: str) -> bool:
    return _COLUMN_NAME.fullmatch(name) is not None and name not in RESERVED_NAMES


def check_column_name(name: str) -> str:
    """Return ``name`` if it is a valid column name. FormatError: it is not."""
    if _may_name_column(name):
        return name
    if name in RESERVED_NAMES:
        raise FormatError(f"column {name!r}: this name has another meaning in packs or batches; choose another name")
    raise FormatError(
        f"column {name!r}: expected a name of at most 64 lower-case letters, digits and _, beginning with a letter"
    )


def no_column(name: str, columns: Iterable[str]) -> str:
    """Return the text that every error about a missing column uses: its name, and the names of the existing columns."""
    return f"has no column {name}; it has {', '.join(sorted(columns)) or 'none'}"


class _PathWithSuffix:
    """An attribute of ``ShardPaths``: the path of the file with a fixed suffix."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix

    def __get__(self, paths: ShardPaths, owner: type) -> str:
        return paths.prefix + self._suffix


@dataclass(frozen=True, slots=True)
class ShardPaths:
    """Paths of the files of one shard: the five files of every shard, its columns, and its images and audio.

    Attributes:
        prefix: the path that all files share, as ``--data-path`` takes it.
        columns: names of the columns whose files are included.
        media: whether the two files of images and audio are included.
        tokens: the file of all tokens.
        loss: the file of the loss masks.
        starts: the file of the start positions of sequences in their packs.
        idx: Megatron's index.
        seq_idx: header and offsets; written last.
        media_data: the encoded images and audio, if the shard has any.
        media_items: the positions of images and audio in the packs.
    """

    prefix: str
    columns: tuple[str, ...] = ()
    media: bool = False

    tokens, loss, starts = _PathWithSuffix(".bin"), _PathWithSuffix(".loss.bin"), _PathWithSuffix(".seq.bin")
    idx, seq_idx = _PathWithSuffix(".idx"), _PathWithSuffix(".seq.idx")
    media_data, media_items = _PathWithSuffix(".media.data"), _PathWithSuffix(".media.items")

    @classmethod
    def of(cls, prefix: str | os.PathLike[str] | ShardPaths) -> ShardPaths:
        """Return the paths for a prefix, for the path of one of the shard's files, or for ``ShardPaths``.

        Raises:
            FormatError: the prefix is empty or consists of a folder only.
        """
        if isinstance(prefix, ShardPaths):
            return prefix
        path = os.fspath(prefix)
        if column := column_of(path):
            path = column[0]
        elif suffix := max((each for each in (*SUFFIXES, *MEDIA_SUFFIXES) if path.endswith(each)), key=len, default=""):
            path = path[: -len(suffix)]
        if os.path.basename(path) in ("", ".", ".."):
            raise FormatError(f"{os.fspath(prefix)!r}: not a prefix; pass a shard inside a folder, such as data/train")
        return cls(path)

    def require_own_names(self) -> None:
        """Raise FormatError if a file name also belongs to another shard (``a.loss.bin``: ``a.loss`` and ``a``)."""
        if any(ShardPaths.of(path).prefix != self.prefix for path in (self.prefix, *ShardPaths(self.prefix).all)):
            raise FormatError(f"{self.prefix}: a prefix must not end like one of a shard's files; choose another name")

    @property
    def index_remedy(self) -> str:
        """The remedy given in errors about a missing or wrong index."""
        return f"restore it from a copy, or rebuild it from the other files: megatron-sft-idx rebuild {self.prefix}"

    @property
    def folder(self) -> Path:
        """The folder that holds the shard."""
        return Path(self.prefix).parent

    def column(self, name: str) -> str:
        """``X.<name>.col``: the file of a column."""
        return f"{self.prefix}.{name}.col"

    def with_columns(self, names: Iterable[str]) -> ShardPaths:
        """Return these paths, extended by the columns of these names."""
        return replace(self, columns=tuple(sorted({*self.columns, *names})))

    def with_media(self, present: bool = True) -> ShardPaths:
        """Return these paths, with or without the two files of images and audio."""
        return replace(self, media=self.media or present)

    def with_listed(self, metadata: Mapping[str, Any]) -> ShardPaths:
        """Return these paths, extended by the columns, images and audio that a shard's JSON block lists."""
        return self.with_columns(listed_columns(metadata)).with_media(listed_media(metadata) is not None)

    def with_files_of(self, paths: Iterable[str]) -> ShardPaths:
        """Return these paths, extended by the files in ``paths`` that are columns, images or audio of this prefix."""
        given = set(paths)
        columns = [column[1] for column in map(column_of, given) if column and column[0] == self.prefix]
        return self.with_columns(columns).with_media(not given.isdisjoint((self.media_data, self.media_items)))

    @property
    def all(self) -> tuple[str, ...]:
        """The five files, the columns, and the files of images and audio, in the order of publication."""
        files = [self.prefix + suffix for suffix in SUFFIXES]
        media = (self.media_data, self.media_items) if self.media else ()
        return (*files[:-1], *map(self.column, self.columns), *media, files[-1])

    @property
    def data(self) -> tuple[str, ...]:
        """The four files whose digests the header holds, in the header's order."""
        return tuple(self.prefix + suffix for suffix in DATA_SUFFIXES)

    def suffix(self, path: str) -> str:
        """Return the suffix that one of these paths adds to the prefix. Unpublished files have it as their name."""
        return path.removeprefix(self.prefix)

    @property
    def building(self) -> str:
        """``X.building``: the folder of unfinished work for the prefix."""
        return self.prefix + BUILDING

    @property
    def unpublished(self) -> ShardPaths:
        """The paths of the same files before they are published."""
        return replace(self, prefix=self.building + "/")

    def missing(self) -> list[str]:
        """Return the paths in ``all`` that are not a regular file."""
        return [path for path in self.all if not os.path.isfile(path)]

    def present(self) -> list[str]:
        """Return the paths in ``all`` at which anything exists, including a dangling link."""
        return [path for path in self.all if os.path.lexists(path)]


# ---- Megatron's index ----

# Magic, version, code of the token dtype, number of sequences (packs), length of the array of documents.
IDX_HEADER = struct.Struct("<9sQBQQ")
IDX_HEADER_NBYTES = IDX_HEADER.size
IDX_MAGIC = b"MMIDIDX\x00\x00"


def pack_idx_header(dtype_code: int, num_packs: int) -> bytes:
    """The first 34 bytes of ``.idx``, before its arrays."""
    return IDX_HEADER.pack(IDX_MAGIC, 1, dtype_code, num_packs, num_packs + 1)


def idx_nbytes(num_packs: int) -> int:
    """Size of the whole ``.idx`` in bytes."""
    return IDX_HEADER_NBYTES + num_packs * (4 + 8) + (num_packs + 1) * 8


def idx_places(num_packs: int) -> tuple[int, int, int]:
    """Return the byte offsets in ``.idx`` at which the arrays of lengths, positions and documents begin."""
    positions = IDX_HEADER_NBYTES + 4 * num_packs
    return IDX_HEADER_NBYTES, positions, positions + 8 * num_packs


# ---- dtypes and limits ----

# The dtypes allowed in each file, by Megatron's codes (megatron.core.datasets.indexed_dataset.DType).
TOKEN_DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
MASK_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 7: np.dtype("<f4")}

# Lengths are int32 in .idx.
MAX_CAPACITY = 2**31 - 1
# Counts, and sizes in bytes, must be below this, so that products and sums of a few of them do not overflow int64.
MAX_COUNT = 2**56

ARRAY_ALIGNMENT = 64


def align(offset: int, alignment: int = ARRAY_ALIGNMENT) -> int:
    """Return the first multiple of ``alignment`` that is not below ``offset``, in bytes."""
    return -(-offset // alignment) * alignment


def token_dtype_for_vocabulary(vocab_size: int) -> np.dtype[Any]:
    """Return the token dtype that Megatron would choose: uint16 for vocabularies below 65500 ids, else int32."""
    return TOKEN_DTYPES[8 if vocab_size < 65500 else 4]


def token_dtype_of(dtype: Any) -> tuple[int, np.dtype[Any]]:
    """Return code and little-endian dtype for tokens of a dtype. FormatError unless it is uint16 or int32."""
    return _coded_dtype(dtype, TOKEN_DTYPES, "token dtype", "uint16 or int32")


def mask_dtype_of(dtype: Any) -> tuple[int, np.dtype[Any]]:
    """Return code and little-endian dtype for a loss mask of a dtype. FormatError unless it is uint8 or float32."""
    return _coded_dtype(dtype, MASK_DTYPES, "mask dtype", "uint8 (0/1) or float32 (weights)")


def _coded_dtype(dtype: Any, by_code: dict[int, np.dtype[Any]], role: str, allowed: str) -> tuple[int, np.dtype[Any]]:
    given = require_dtype(role, dtype)
    for code, candidate in by_code.items():
        if candidate == given:
            return code, candidate
    raise FormatError(f"{role} {given}: the format only stores {allowed}; pass one of these")


def require_dtype(role: str, dtype: Any) -> np.dtype[Any]:
    """Convert a value to a numpy dtype. FormatError, whose message begins with ``role``: numpy cannot convert it."""
    try:
        converted: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError):
        raise FormatError(f"{role} {dtype}: numpy has no such dtype; pass one such as 'uint16'") from None
    return converted


# ---- arrays for the native kernels: one-dimensional, contiguous, of a few dtypes ----

# Any other dtype is converted to the last one listed. ValueError: another kind or shape, or a value too large.
_TOKENS = tuple(map(np.dtype, (np.uint16, np.int32, np.int64)))
_FLAGS = tuple(map(np.dtype, (np.bool_, np.uint8, np.int64)))
_WEIGHTS = tuple(map(np.dtype, (np.float32, np.float64)))
# Half of the smallest positive float32. float32 rounds it to 0.
_TOO_SMALL = 2.0**-150


def token_array(values: ArrayLike) -> NDArray[Any]:
    """Return ids as uint16, int32 or int64."""
    return _native_form(values, _TOKENS, "iu", "integers")


def integer_array(values: ArrayLike) -> NDArray[np.int64]:
    """Return positions as int64."""
    return _native_form(values, _TOKENS[-1:], "iu", "integers")


def plain_array(values: Any) -> NDArray[Any]:
    """Convert values to a numpy array. ValueError for a masked array, because its masked values would count."""
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError("is a masked array; pass its values, with filled() or compressed()")
    return np.asarray(values)


def rounds_to_zero(weights: NDArray[Any]) -> bool:
    """Return whether float32 would round one of these nonzero weights to 0."""
    return weights.dtype.itemsize > 4 and bool(((weights != 0) & (np.abs(weights) <= _TOO_SMALL)).any())


def mask_array(values: ArrayLike) -> NDArray[Any]:
    """Return a mask as bool, uint8, int64, float32 or float64."""
    array = plain_array(values)
    if array.dtype.kind == "f":
        if rounds_to_zero(array):
            raise ValueError("has a weight that is rounded to 0 in float32; use 0, or 1e-40 or more")
        return _native_form(array, _WEIGHTS, "f", "numbers")
    return _native_form(array, _FLAGS, "iub", "numbers or booleans")


def _native_form(values: ArrayLike, dtypes: tuple[np.dtype[Any], ...], kinds: str, expected: str) -> NDArray[Any]:
    array = plain_array(values)
    if array.dtype in dtypes and array.ndim == 1 and array.flags.c_contiguous and array.flags.aligned:
        # A dtype may contain an explicit byte order ("<" instead of "="). For numpy both are the same, for the kernels
        # not.
        return array if array.dtype.byteorder in "=|" else array.view(array.dtype.newbyteorder("="))
    if array.ndim != 1:
        raise ValueError(f"has shape {array.shape}; expected one dimension")
    if array.size == 0:
        return np.empty(0, dtypes[-1])
    if array.dtype.kind not in kinds:
        raise ValueError(f"has dtype {array.dtype}; expected {expected}")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"has {array.max()}, which is too large for an id, a position or a mask")
    return np.require(array, dtypes[-1], ("C", "ALIGNED"))


# ---- the form of a header ----

# A header has a few KiB. The limit prevents a damaged file from making a reader allocate any amount of memory.
MAX_HEADER_NBYTES = 16 << 20
CHECKSUM_NBYTES = 16


class Field(NamedTuple):
    """One fixed field of a header: its name, offset in bytes, and ``struct`` format (little-endian)."""

    name: str
    offset: int
    format: str


class FileDigest(NamedTuple):
    """Size in bytes and xxh3_128 (16 bytes, canonical big-endian form) of one data file."""

    nbytes: int
    checksum: bytes


class BrokenRule(NamedTuple):
    """A rule that a header breaks: byte offset, number of the rule, value found, value expected."""

    offset: int
    rule: str
    found: str
    expected: str


# One rule about one fixed field: name of the field, number of the rule, whether the field satisfies it, expected value.
Check = tuple[str, str, bool, str]
Checks = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterable[Check]]

_as_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class HeaderForm:
    """The header layout of one kind of file (``.seq.idx`` or columns): its fixed fields and their rules.

    Args:
        kind: the name of the file kind in error messages.
        magic: the first eight bytes.
        version: the version to write, and the only one to accept when reading.
        fields: names and ``struct`` formats of the fixed fields, in their order.
        rules: numbers of the rules of FORMAT.md about magic, version, size, checksum, the bytes between JSON block and
            checksum, and the JSON block.
        checks: function of the values of the fixed fields by name and of the JSON block, which is empty if it is
            damaged. Returns one ``Check`` per rule about them.

    Attributes:
        fields: the fixed fields with their offsets.
        fixed_nbytes: size of the fixed fields in bytes.
        offsets: offsets of the fixed fields by name.
    """

    def __init__(self, kind: str, magic: bytes, version: int, fields: str, rules: list[str], checks: Checks) -> None:
        self.kind, self.magic, self.version, self.rules, self._checks = kind, magic, version, rules, checks
        self.fields: tuple[Field, ...] = ()
        self.fixed_nbytes = 0
        for entry in fields.split(","):
            name, code = entry.split()
            self.fields += (Field(name, self.fixed_nbytes, code),)
            self.fixed_nbytes += struct.calcsize("<" + code)
        self.offsets = {each.name: each.offset for each in self.fields}
        self._struct = struct.Struct("<" + "".join(each.format for each in self.fields))

    def nbytes(self, metadata: Mapping[str, Any]) -> int:
        """Return the size of a header with this JSON block, in bytes. FormatError: larger than readers accept."""
        size = align(self.fixed_nbytes + len(encode_metadata(metadata)) + CHECKSUM_NBYTES)
        if size > MAX_HEADER_NBYTES:
            raise FormatError(
                f"metadata: the header would have {size} bytes, expected at most {MAX_HEADER_NBYTES} (rule"
                f" {self.rules[2]}); store less metadata"
            )
        return size

    def encode(self, values: Mapping[str, Any], metadata: Mapping[str, Any]) -> bytes:
        """Encode a header.

        ``values`` has the fixed fields by name, without magic, version and sizes. Missing fields become zeros.
        """
        block, size = encode_metadata(metadata), self.nbytes(metadata)
        own = {"magic": self.magic, "version": self.version, "header_nbytes": size, "json_nbytes": len(block)}
        zeros = {each.name: b"" if each.format.endswith("s") else 0 for each in self.fields}
        fixed = self._struct.pack(*(zeros | dict(values) | own).values())
        raw = (fixed + block).ljust(size - CHECKSUM_NBYTES, b"\0")
        return raw + xxhash.xxh3_128_digest(raw)

    def values(self, raw: bytes) -> dict[str, Any]:
        """Return the values of the fixed fields in a header, by name."""
        return dict(zip(self.offsets, self._struct.unpack_from(raw), strict=True))

    def metadata(self, raw: bytes) -> dict[str, Any] | None:
        """Return a new copy of the object in a header's JSON block, or None if the block is not in canonical form."""
        block = raw[self.fixed_nbytes :][: self.values(raw)["json_nbytes"]]
        return dict(json.loads(block)) if _is_canonical(block) else None

    def broken_outline(self, raw: bytes) -> BrokenRule | None:
        """Return the first rule about magic, version or size of the header that a file breaks, or None.

        ``raw`` must hold at least the first ``fixed_nbytes`` bytes of the file, or the whole file if it is shorter.
        """
        magic, version, rule = self.rules[:3]
        if raw[: len(self.magic)] != self.magic:
            return BrokenRule(0, magic, f"magic {raw[:8]!r}", f"{self.magic!r} of {self.kind} of a packed SFT shard")
        if len(raw) < self.fixed_nbytes:
            found = f"a file that ends after {len(raw)} bytes"
            return BrokenRule(len(raw), rule, found, f"at least {self.fixed_nbytes}")
        values, least = self.values(raw), self.fixed_nbytes + CHECKSUM_NBYTES
        if (given := values["version"]) != self.version:
            return BrokenRule(self.offsets["version"], version, f"format version {given}", str(self.version))
        if (size := values["header_nbytes"]) % ARRAY_ALIGNMENT or not least <= size <= MAX_HEADER_NBYTES:
            expected = f"a multiple of {ARRAY_ALIGNMENT} from {align(least)} to {MAX_HEADER_NBYTES}"
            return BrokenRule(self.offsets["header_nbytes"], rule, f"header size {size}", expected)
        return None

    def stated_nbytes(self, raw: bytes) -> int:
        """Return the header size stored in the header, or ``fixed_nbytes`` if ``broken_outline`` finds an error."""
        return self.fixed_nbytes if self.broken_outline(raw) else int(self.values(raw)["header_nbytes"])

    def broken_rules(self, raw: bytes) -> Iterator[BrokenRule]:
        """Yield all rules that a header breaks.

        If ``broken_outline`` finds a broken rule or the header is truncated, yield only that rule.

        ``raw`` must hold at least the first ``stated_nbytes`` bytes of the file, or the whole file if it is shorter.
        """
        if outline := self.broken_outline(raw):
            yield outline
            return
        _, _, size_rule, checksum_rule, zeros_rule, json_rule = self.rules
        values = self.values(raw)
        if len(raw) < (size := values["header_nbytes"]):
            yield BrokenRule(len(raw), size_rule, "a file that ends inside the header", f"{size} bytes")
            return
        raw = raw[:size]
        stored, computed = raw[-CHECKSUM_NBYTES:], xxhash.xxh3_128_digest(raw[:-CHECKSUM_NBYTES])
        if stored != computed:
            found = f"header checksum {stored.hex()}"
            yield BrokenRule(
                len(raw) - CHECKSUM_NBYTES, checksum_rule, found, f"{computed.hex()}, computed from its bytes"
            )
        for name, rule, ok, expected in self._checks(values, self.metadata(raw) or {}):
            if not ok:
                shown = values[name].hex() if isinstance(values[name], bytes) else values[name]
                yield BrokenRule(self.offsets[name], rule, f"{name} {shown}", expected)
        end = self.fixed_nbytes + values["json_nbytes"]
        if align(end + CHECKSUM_NBYTES) != len(raw):
            found = f"json_nbytes {values['json_nbytes']}"
            yield BrokenRule(self.offsets["json_nbytes"], json_rule, found, f"a block that fills {len(raw)} bytes")
            return
        if any(raw[end:-CHECKSUM_NBYTES]):
            yield BrokenRule(end, zeros_rule, "non-zero bytes between JSON block and checksum", "zeros")
        if self.metadata(raw) is None:
            expected = "a canonical object: UTF-8, keys sorted, no spaces, no NaN"
            yield BrokenRule(self.fixed_nbytes, json_rule, "another JSON block", expected)

    def require_sound(self, raw: bytes, path: str, remedy: str) -> None:
        """Raise UnsupportedVersionError or CorruptShardError for the first of the ``broken_rules``, if there is one."""
        if (broken := next(self.broken_rules(raw), None)) is None:
            return
        # A file can also end right before the version.
        is_version = (broken.offset, broken.rule) == (self.offsets["version"], self.rules[1])
        if is_version and len(raw) >= self.fixed_nbytes:
            raise UnsupportedVersionError(path, self.values(raw)["version"], [self.version])
        detail = f"{broken.found}, expected {broken.expected}; the file was truncated or changed: {remedy}"
        raise CorruptShardError(path, broken.offset, broken.rule, detail)


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Encode canonical JSON: keys sorted, no spaces, UTF-8. FormatError: a value has no JSON form."""
    if not isinstance(metadata, Mapping):
        raise FormatError(f"metadata: {brief(metadata)}, expected a dict")
    try:
        # Twice, because the first pass sorts numeric keys as numbers and turns them into text.
        return _as_json(json.loads(_as_json(metadata))).encode()
    except RecursionError:
        raise FormatError("metadata: nested too deeply for JSON; flatten it") from None
    except (TypeError, ValueError) as error:
        raise FormatError(
            f"metadata: {error}; it is stored as JSON, so use only strings, finite numbers, lists and dicts"
        ) from None


# Cache the last result: a block is decoded once to check it and once to use it, and shards often have the same block.
@lru_cache(maxsize=1)
def _is_canonical(block: bytes) -> bool:
    try:
        metadata = json.loads(block.decode())
        return isinstance(metadata, dict) and _as_json(metadata).encode() == block
    except (ValueError, RecursionError):
        return False


def listed_columns(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns in a shard's JSON block: checksums of their headers, by column name."""
    listed = metadata.get("columns")
    if not isinstance(listed, dict):
        return {}
    return {name: str(value) for name, value in listed.items() if _may_name_column(name)}


# The key of a shard's JSON block that holds the checksums of its images and audio.
MEDIA_ENTRY = "media"


class MediaChecksums(NamedTuple):
    """Checksums (xxh3_128) of a shard's images and audio: of ``.media.data``, and of the arrays in ``.media.items``."""

    data: bytes
    items: bytes

    def encode(self) -> dict[str, str]:
        """Return the JSON form in which a shard's JSON block stores them."""
        return {"data": self.data.hex(), "items": self.items.hex()}


def listed_media(metadata: Mapping[str, Any]) -> MediaChecksums | None:
    """Return the checksums of images and audio in a shard's JSON block, or None if the shard has neither."""
    listed = metadata.get(MEDIA_ENTRY)
    if not isinstance(listed, Mapping) or listed.keys() != {"data", "items"}:
        return None
    values = [str(listed[name]) for name in MediaChecksums._fields]
    return MediaChecksums(*map(bytes.fromhex, values)) if all(map(_CHECKSUM.fullmatch, values)) else None


def _shard_id(checksums: Iterable[bytes], metadata: Mapping[str, Any]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join([*checksums, *(listed_media(metadata) or ())]))


def stated_in(metadata: Mapping[str, Any], entry: str, name: str, kind: type[_Stated]) -> _Stated | None:
    """Return ``metadata[entry][name]`` of a JSON block if it has type ``kind``, else None.

    An example is ("tokenizer", "fingerprint"). The block is untrusted input and can hold anything.
    """
    found = metadata.get(entry)
    value = found.get(name) if isinstance(found, dict) else None
    return value if type(value) is kind else None


def vocab_size_of(metadata: Mapping[str, Any]) -> int | None:
    """Return ``tokenizer.vocab_size`` of a JSON block, the upper bound of all ids (rule P9), or None if it has none.

    FormatError: the value is not an integer of at least 1.
    """
    tokenizer = metadata.get("tokenizer")
    value = tokenizer.get("vocab_size") if isinstance(tokenizer, Mapping) else None
    if value is not None and (type(value) is not int or value < 1):
        raise FormatError(
            f"metadata: tokenizer.vocab_size is {value!r:.40}, expected a whole number of at least 1, or None if the"
            " vocabulary is unknown (rule P9)"
        )
    return value


# ---- the header of .seq.idx ----

# The only alignment on disk: loss_mask[j] says whether predicting token j + 1 of the same sequence is trained on.
LABEL_ALIGNED = 1
FLAG_REBUILT = 1


def _checks(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> Iterator[Check]:
    """Rules H5, H6, H8 and M1, and F2 for the sizes in the header."""
    packs, sequences, tokens = values["num_packs"], values["num_sequences"], values["num_tokens"]
    longest, most_in_pack, capacity = values["longest_pack"], values["most_sequences"], values["capacity"]
    few = f"below {MAX_COUNT}, and 0 only with 0 packs"
    yield from (
        ("token_dtype", "H5", values["token_dtype"] in TOKEN_DTYPES, "4 (int32) or 8 (uint16)"),
        ("mask_dtype", "H5", values["mask_dtype"] in MASK_DTYPES, "1 (uint8) or 7 (float32)"),
        ("mask_alignment", "H5", values["mask_alignment"] == LABEL_ALIGNED, "1 (label)"),
        ("flags", "H5", values["flags"] in (0, FLAG_REBUILT), "0 or 1 (rebuilt)"),
        ("reserved", "H5", not any(values["reserved"]), "zeros"),
        ("pad_id", "H5", -1 <= values["pad_id"] <= MAX_CAPACITY, "an id, or -1 if unknown"),
        ("num_packs", "H6", packs <= sequences, f"at most num_sequences {sequences}"),
        ("num_sequences", "H6", sequences <= tokens, f"at most num_tokens {tokens}"),
        ("num_tokens", "H6", tokens < MAX_COUNT and (packs > 0) == (tokens > 0), few),
        ("num_trained_tokens", "H6", values["num_trained_tokens"] <= tokens - sequences, "at most tokens - sequences"),
        ("num_masked_packs", "H6", values["num_masked_packs"] <= packs, f"at most num_packs {packs}"),
        ("sequence_multiple", "H6", 1 <= values["sequence_multiple"] <= MAX_CAPACITY, "1 or more"),
        ("capacity", "H6", capacity <= MAX_CAPACITY, f"at most {MAX_CAPACITY}"),
        ("longest_pack", "H6", longest <= capacity and (longest > 0) == (packs > 0), "1 to capacity"),
        ("most_sequences", "H6", most_in_pack <= longest and (most_in_pack > 0) == (packs > 0), "1 to longest_pack"),
    )
    derived = data_nbytes(values)
    for name, suffix in zip(_DIGESTS, DATA_SUFFIXES, strict=True):
        if suffix in derived:
            ok = values[f"{name}_nbytes"] == derived[suffix]
            yield f"{name}_nbytes", "F2", ok, f"{derived[suffix]}, computed from the counts, for {suffix}"
    is_listed = MEDIA_ENTRY not in metadata or listed_media(metadata) is not None
    yield "json_nbytes", "M1", is_listed, "'media' in the JSON block as two checksums, 'data' and 'items'"
    shard_id = _shard_id((values[f"{name}_checksum"] for name in _DIGESTS), metadata)
    yield "shard_id", "H8", values["shard_id"] == shard_id, f"{shard_id.hex()}, computed from the checksums"


SEQ_IDX = HeaderForm(
    "the .seq.idx",
    b"\x89SFTIDX\n",
    1,
    "magic 8s, version I, header_nbytes I, shard_id 16s,"
    "num_packs Q, num_sequences Q, num_tokens Q, num_trained_tokens Q, num_masked_packs Q,"
    "token_dtype B, mask_dtype B, mask_alignment B, flags B,"
    "sequence_multiple I, capacity I, longest_pack I, most_sequences I, json_nbytes I, pad_id q,"
    "tokens_nbytes Q, tokens_checksum 16s, loss_nbytes Q, loss_checksum 16s,"
    "idx_nbytes Q, idx_checksum 16s, starts_nbytes Q, starts_checksum 16s, arrays_checksum 16s, reserved 40s",
    ["H1", "H2", "H3", "H4", "H5", "H7"],
    _checks,
)
FIELDS, MAGIC, HEADER_FIXED_NBYTES = SEQ_IDX.fields, SEQ_IDX.magic, SEQ_IDX.fixed_nbytes
_DIGESTS = ("tokens", "loss", "idx", "starts")


@dataclass(frozen=True)
class Header:
    """The contents of the header of ``X.seq.idx``.

    Attributes:
        num_packs: number of packs.
        num_sequences: number of sequences in all packs.
        num_tokens: number of tokens in all packs; padding is not stored.
        num_trained_tokens: number of positions with a loss mask above zero.
        num_masked_packs: number of packs without such a position.
        token_dtype: dtype of ``X.bin``: uint16 or int32.
        mask_dtype: dtype of ``X.loss.bin``: uint8 or float32.
        sequence_multiple: packing counted each sequence as its length rounded up to this.
        capacity: maximum number of token positions in a pack, with each sequence rounded up.
        longest_pack: number of tokens in the longest pack.
        most_sequences: largest number of sequences in one pack.
        pad_id: the tokenizer's padding id; None if it is unknown.
        digests: digests of ``.bin``, ``.loss.bin``, ``.idx`` and ``.seq.bin``, in this order.
        arrays_checksum: xxh3_128 of the two arrays after the header, including the zeros between them.
        metadata: the JSON block: fingerprints, options, counts.
        rebuilt: whether the header was derived from the data; the JSON block then says what is unknown.
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
        """16 bytes derived from the content: xxh3_128 of the ``digests``' checksums and of media checksums, if any."""
        return _shard_id((digest.checksum for digest in self.digests), self.metadata)

    @property
    def has_media(self) -> bool:
        """Whether the shard has images or audio."""
        return listed_media(self.metadata) is not None

    @cached_property
    def nbytes(self) -> int:
        """Size of the header in bytes; ``sequence_offsets`` directly follow it."""
        return SEQ_IDX.nbytes(self.metadata)

    @property
    def token_offsets_offset(self) -> int:
        """Byte offset of ``token_offsets`` in ``.seq.idx``."""
        return align(self.nbytes + 8 * (self.num_packs + 1))

    @property
    def seq_idx_nbytes(self) -> int:
        """Size of the whole ``.seq.idx`` in bytes."""
        return self.token_offsets_offset + 8 * (self.num_packs + 1)

    def sizes(self, paths: ShardPaths) -> dict[str, int]:
        """Return the size of each of the five files in bytes, by path."""
        nbytes = [*(digest.nbytes for digest in self.digests), self.seq_idx_nbytes]
        return dict(zip((*paths.data, paths.seq_idx), nbytes, strict=True))

    @property
    def index_nbytes(self) -> int:
        """Memory for the index arrays in bytes: both offset arrays, and the starts of all sequences."""
        return 16 * (self.num_packs + 1) + 4 * self.num_sequences

    # The origin of the tokens, from the JSON block. Each value is None if the block does not have it.

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer that produced the ids."""
        return stated_in(self.metadata, "tokenizer", "fingerprint", str)

    @property
    def vocab_size(self) -> int | None:
        """The largest id of the tokenizer + 1."""
        return stated_in(self.metadata, "tokenizer", "vocab_size", int)

    @property
    def template(self) -> str | None:
        """Fingerprint of the chat template and, if there was one, of the separate template for rows with tools."""
        text = stated_in(self.metadata, "chat_template", "fingerprint", str)
        tools = stated_in(self.metadata, "chat_template", "tools_fingerprint", str)
        return f"{text}, with tools {tools}" if tools else text

    @property
    def source(self) -> str | None:
        """Fingerprint of the rows that the shard was made from."""
        return stated_in(self.metadata, "sources", "fingerprint", str)

    def encode(self) -> bytes:
        """Encode the header with its checksum. FormatError: ``metadata`` breaks rule P9 or is not JSON."""
        vocab_size_of(self.metadata)
        values: dict[str, Any] = {name: getattr(self, name) for name in SEQ_IDX.offsets if hasattr(self, name)}
        values |= {
            "token_dtype": token_dtype_of(self.token_dtype)[0],
            "mask_dtype": mask_dtype_of(self.mask_dtype)[0],
            "mask_alignment": LABEL_ALIGNED,
            "flags": FLAG_REBUILT if self.rebuilt else 0,
            "pad_id": -1 if self.pad_id is None else self.pad_id,
        }
        for name, digest in zip(_DIGESTS, self.digests, strict=True):
            values[f"{name}_nbytes"], values[f"{name}_checksum"] = digest
        return SEQ_IDX.encode(values, self.metadata)

    @classmethod
    def decode(cls, raw: bytes, path: str) -> Header:
        """Decode the header at the start of a file. See ``HeaderForm.broken_rules`` for ``raw``.

        Raises:
            CorruptShardError: a rule of FORMAT.md is broken.
            UnsupportedVersionError: another format version.
        """
        remedy = ShardPaths(path.removesuffix(".seq.idx").removesuffix(BUILDING + "/")).index_remedy
        SEQ_IDX.require_sound(raw, path, remedy)
        values = SEQ_IDX.values(raw)
        plain = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        plain |= {
            "token_dtype": TOKEN_DTYPES[values["token_dtype"]],
            "mask_dtype": MASK_DTYPES[values["mask_dtype"]],
            "pad_id": None if values["pad_id"] < 0 else values["pad_id"],
            "digests": tuple(FileDigest(values[f"{n}_nbytes"], values[f"{n}_checksum"]) for n in _DIGESTS),
            "metadata": SEQ_IDX.metadata(raw),
            "rebuilt": values["flags"] == FLAG_REBUILT,
        }
        return cls(**plain)


def counts_text(of: Any) -> str:
    """Return the counts of a ``Header`` (or an object with the same attributes) as text; trained tokens may be None."""
    trained = of.num_trained_tokens
    share = "" if trained is None else f", {100 * trained / max(1, of.num_tokens):.1f}% trained"
    return (
        f"{of.num_packs:,} packs of up to {of.capacity:,} tokens, {of.num_sequences:,} sequences,"
        f" {of.num_tokens:,} tokens{share}"
    )


def data_nbytes(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the data files in bytes, by suffix, from a header's counts.

    Files of unknown dtype are omitted.
    """
    sizes = {".idx": idx_nbytes(values["num_packs"]), ".seq.bin": 4 * values["num_sequences"]}
    for suffix, name, dtypes in ((".bin", "token_dtype", TOKEN_DTYPES), (".loss.bin", "mask_dtype", MASK_DTYPES)):
        if values[name] in dtypes:
            sizes[suffix] = values["num_tokens"] * dtypes[values[name]].itemsize
    return sizes
