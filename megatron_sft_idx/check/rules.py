"""The rules of FORMAT.md as checks of files, and the findings that say which file breaks which rule.

``check_header`` (H1 to H8), ``check_sizes`` (F2), ``check_array_ends`` (O1, O2, H5, I1) and ``check_pack_ends`` (I1,
P2, P4, P6) read only headers and the ends of arrays, which takes milliseconds for any size. ``add_breaches`` turns the
kernel's results about packs (O1, O2, P1 to P7) into findings. ``check_ids`` (P8, P9) reads every token, and
``check_column`` (C1 to C10) one column. No check trusts the data that it reads, and none changes a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.check.pack_walk import CheckedFile, Meter, Stream
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import HEADER_FIXED_NBYTES, MASK_DTYPES, TOKEN_DTYPES, ShardPaths, align
from megatron_sft_idx.layout.column import (
    COLUMN,
    FIXED_NBYTES,
    PAIR,
    ColumnHeader,
    is_source,
    num_rows_in,
    torn_pairs,
)
from megatron_sft_idx.layout.doubts import doubts
from megatron_sft_idx.layout.files import (
    CHECKSUM_NBYTES,
    FLAG_REBUILT,
    IDX_HEADER_NBYTES,
    MAX_CAPACITY,
    MAX_COUNT,
    SEQ_IDX,
    MediaChecksums,
    data_nbytes,
    idx_places,
    listed_columns,
    listed_media,
    pack_idx_header,
    vocab_size_of,
)

_INDEX = "restore it from a copy, or rebuild it from the other files: megatron-sft-idx rebuild PREFIX"
DATA_REMEDY = (
    "restore it from a copy, or make the shard again with --overwrite: no other file of the shard contains this data"
)
_ATTACHED = "restore it from a copy, or remove it and attach it again; if it is not a column, rename it"
_DOUBTED = (
    "the .seq.idx was derived from the data, so the data may have changed instead: compare all files with a copy, or"
    " make the shard again with --overwrite; remove the column only if it belongs to another shard"
)
_UPGRADE = "upgrade megatron-sft-idx, or restore the file from a copy"

# Number of rows of a column that are checked at once.
_CHUNK_ROWS = 1 << 16

# Function from a token's number to that of its pack; returns None if the token offsets are damaged.
PackOf = Callable[[int], int | None]


# ---- findings ----


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule.

    Attributes:
        path: the file that breaks it.
        offset: byte offset in the file; None if the file is missing, or if its checksum does not match.
        pack: number of the pack there; None if the rule is not about one pack, or the token offsets are damaged.
        rule: number of the rule in FORMAT.md.
        found: the value in the file, or the whole error if no value is expected.
        expected: the value that the rule requires; empty if there is none, for example because the file is missing.
        remedy: what the user can do about it.
    """

    path: str
    offset: int | None
    pack: int | None
    rule: str
    found: str
    expected: str
    remedy: str

    @property
    def what(self) -> str:
        """Return expected and found values and the rule, without the file, the offset and the remedy."""
        pack = "" if self.pack is None else f"pack {self.pack}: "
        what = f"expected {self.expected}, found {self.found}" if self.expected else self.found
        return f"{pack}{what} (rule {self.rule})"

    @property
    def where(self) -> str:
        """Return the file, and the offset if there is one."""
        return self.path if self.offset is None else f"{self.path}: byte {self.offset}"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


class Findings:
    """Collects findings.

    Args:
        prefix: prefix of the shard, for remedies.
        most: maximum number of findings to keep per rule.

    Attributes:
        kept: the first ``most`` findings of each rule.
        counts: number of findings per rule, kept or not.
        notes: information for the user that breaks no rule.
    """

    def __init__(self, prefix: str, most: int) -> None:
        self._prefix = prefix
        self.most = most
        self.kept: list[Finding] = []
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()

    def add(
        self,
        rule: str,
        path: str,
        offset: int | None,
        found: object,
        expected: object,
        *,
        pack: int | None = None,
        remedy: str | None = None,
    ) -> None:
        """Add a finding. Without a ``remedy`` it gets the usual one for the file."""
        self.counts[rule] += 1
        if self.counts[rule] <= self.most:
            remedy = (remedy or self.remedy(path)).replace("PREFIX", self._prefix)
            self.kept.append(Finding(path, offset, pack, rule, str(found), str(expected), remedy))

    @staticmethod
    def remedy(path: str) -> str:
        """Return the usual remedy for a damaged file: an index can be derived from other files, data cannot."""
        return _INDEX if path.endswith(".idx") else DATA_REMEDY

    def omitted(self) -> dict[str, int]:
        """Return how many findings were counted but not kept, by rule."""
        kept = Counter(finding.rule for finding in self.kept)
        return {rule: count - kept[rule] for rule, count in sorted(self.counts.items()) if count > kept[rule]}


# ---- the header ----


class HeaderClaims:
    """The contents of a header, which may be wrong.

    Counts are clipped to the limits of the format, so that sums and products of a few of them fit in 63 bits.

    Args:
        values: the header's fixed fields by name, as stored.
        sound: whether the header breaks no rule. Its contents are then as its writer wrote them.
        vocab_size: the tokenizer's, from the JSON block; None if the block has none.
        listed: checksums, in hex, of the columns that the shard was written with, by name.
        media: checksums of its images and audio; None if it has none.

    Attributes:
        token_dtype: dtype of ``.bin``; None if the code in the header is invalid.
        mask_dtype: dtype of ``.loss.bin``, likewise.
        sequence_offsets: byte offset of the sequence offsets in ``.seq.idx``.
        token_offsets: byte offset of the token offsets in ``.seq.idx``.
        nbytes: sizes of the files that follow from the counts, by suffix, without files of unknown dtype.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        sound: bool = True,
        vocab_size: int | None = None,
        listed: Mapping[str, str] | None = None,
        media: MediaChecksums | None = None,
    ) -> None:
        self.values, self.sound, self.vocab_size = values, sound, vocab_size
        self.listed, self.media = listed or {}, media
        counts = {name: min(int(values[name]), MAX_COUNT) for name in ("num_packs", "num_sequences", "num_tokens")}
        self.num_packs, self.num_sequences, self.num_tokens = counts.values()
        self.capacity = min(int(values["capacity"]), MAX_CAPACITY)
        self.sequence_multiple = max(1, min(int(values["sequence_multiple"]), MAX_CAPACITY))
        self.token_dtype = TOKEN_DTYPES.get(values["token_dtype"])
        self.mask_dtype = MASK_DTYPES.get(values["mask_dtype"])
        array_nbytes = 8 * (self.num_packs + 1)
        self.sequence_offsets = int(values["header_nbytes"])
        self.token_offsets = align(self.sequence_offsets + array_nbytes)
        self.nbytes = data_nbytes({**values, **counts}) | {".seq.idx": self.token_offsets + array_nbytes}

    def kernel(self, most: int) -> _native.PackWalk:
        """Return a new kernel for walking the packs of this shard. It keeps ``most`` violations of each rule."""
        return _native.PackWalk(
            sequences=self.num_sequences,
            tokens=self.num_tokens,
            capacity=self.capacity,
            multiple=self.sequence_multiple,
            most=most,
        )


def check_header(file: CheckedFile, findings: Findings) -> HeaderClaims | None:
    """Check the header of ``.seq.idx`` against rules H1 to H8, and return its claims; None if it is unreadable."""
    raw = file.read(0, HEADER_FIXED_NBYTES)
    raw += file.read(len(raw), SEQ_IDX.stated_nbytes(raw) - len(raw))
    broken = list(SEQ_IDX.broken_rules(raw))
    for each in broken:
        remedy = _UPGRADE if each.rule == "H2" else None
        findings.add(each.rule, file.path, each.offset, each.found, each.expected, remedy=remedy)
    if SEQ_IDX.broken_outline(raw) or len(raw) < SEQ_IDX.stated_nbytes(raw):
        return None
    values = SEQ_IDX.values(raw)
    metadata = SEQ_IDX.metadata(raw)
    if metadata is not None and type(metadata.get("format_writer")) is not int:
        findings.add("H7", file.path, HEADER_FIXED_NBYTES, "no whole number format_writer in the JSON block", "")
    vocab_size = None
    try:
        vocab_size = vocab_size_of(metadata or {})
    except FormatError:
        found = f"tokenizer.vocab_size {(metadata or {})['tokenizer']['vocab_size']!r:.40} in the JSON block"
        findings.add("P9", file.path, HEADER_FIXED_NBYTES, found, "a whole number of at least 1")
    listed = listed_columns(metadata or {})
    if "columns" in (metadata or {}) and (not listed or len(listed) != len((metadata or {})["columns"])):
        found = "columns in the JSON block is not an object of names and checksums"
        findings.add("C8", file.path, HEADER_FIXED_NBYTES, found, "")
    findings.notes += doubts(metadata or {})
    media = listed_media(metadata or {})
    return HeaderClaims(values, sound=not broken, vocab_size=vocab_size, listed=listed, media=media)


# ---- sizes, and the ends of arrays ----


def check_sizes(files: Mapping[str, CheckedFile], claims: HeaderClaims, findings: Findings) -> None:
    """Check each file against the size that follows from the header's counts (F2)."""
    for suffix, file in files.items():
        expected = claims.nbytes.get(suffix)
        if expected is not None and file.nbytes != expected:
            offset = min(file.nbytes, expected)
            findings.add("F2", file.path, offset, f"{file.nbytes} bytes", f"{expected}, from the counts in the header")


def _check_item(
    file: CheckedFile,
    dtype: Any,
    offset: int,
    expected: int,
    rule: str,
    what: str,
    findings: Findings,
    pack: Any = None,
) -> None:
    """Check one item of a file against its expected value. A file that ends before the item gives no finding here.

    ``what`` is the text of the finding, with {} in place of the item's value.
    """
    for found in file.array(dtype, offset, 1):
        if found != expected:
            findings.add(rule, file.path, offset, what.format(found), expected, pack=pack)


def check_array_ends(files: Mapping[str, CheckedFile], claims: HeaderClaims, findings: Findings) -> None:
    """Check both ends of the arrays of ``.seq.idx`` (O1, O2), zeros between them (H5), the head of ``.idx`` (I1)."""
    file, last = files[".seq.idx"], 8 * claims.num_packs
    for rule, what, base, total in (
        ("O1", "sequence_offsets", claims.sequence_offsets, claims.num_sequences),
        ("O2", "token_offsets", claims.token_offsets, claims.num_tokens),
    ):
        _check_item(file, "<i8", base, 0, rule, f"{{}} as first of {what}", findings)
        _check_item(file, "<i8", base + last, total, rule, f"{{}} as last of {what}", findings)
    gap = claims.sequence_offsets + last + 8
    if any(file.read(gap, claims.token_offsets - gap)):
        findings.add("H5", file.path, gap, "bytes between the two arrays are not zero", "")
    if idx := files.get(".idx"):
        head, expected = idx.read(0, IDX_HEADER_NBYTES), pack_idx_header(claims.values["token_dtype"], claims.num_packs)
        if head != expected:
            offset = next((i for i, (a, b) in enumerate(zip(head, expected, strict=False)) if a != b), len(head))
            findings.add("I1", idx.path, offset, f"head {head.hex()}", expected.hex())


def check_pack_ends(files: Mapping[str, CheckedFile], claims: HeaderClaims, findings: Findings) -> None:
    """Check the first and last values of ``.idx`` (I1), ``.seq.bin`` (P2, P4) and ``.loss.bin`` (P6)."""
    if not claims.num_packs:
        return
    last = claims.num_packs - 1
    token_dtype = claims.token_dtype

    def ends(pack: int) -> list[int]:
        """Return the first token of a pack and one past its last, or fewer items if the file ends before them."""
        return [*map(int, files[".seq.idx"].array("<i8", claims.token_offsets + 8 * pack, 2))]

    idx = files.get(".idx")
    lengths, positions, documents = idx_places(claims.num_packs)
    for pack in sorted({0, last}):
        span = ends(pack)
        if not idx or token_dtype is None or len(span) < 2:
            continue
        _check_item(idx, "<i4", lengths + 4 * pack, span[1] - span[0], "I1", "length {}", findings, pack)
        _check_item(
            idx, "<i8", positions + 8 * pack, span[0] * token_dtype.itemsize, "I1", "position {}", findings, pack
        )
        for document in (pack, pack + 1):
            _check_item(idx, "<i8", documents + 8 * document, document, "I1", "document {}", findings, pack)
    if starts := files.get(".seq.bin"):
        _check_item(starts, "<u4", 0, 0, "P2", "a first sequence that starts at {}", findings, 0)
        offset = 4 * (claims.num_sequences - 1)
        span = ends(last)
        length = span[1] - span[0] if len(span) == 2 else 0
        for found in starts.array("<u4", offset, 1):
            if found >= length > 0:
                expected = f"a start below the {length} tokens of the pack"
                findings.add("P4", starts.path, offset, f"a sequence that starts at {found}", expected, pack=last)
    if (loss := files.get(".loss.bin")) and claims.mask_dtype is not None:
        offset = claims.mask_dtype.itemsize * (claims.num_tokens - 1)
        _check_item(loss, claims.mask_dtype, offset, 0, "P6", "mask {} at a sequence's end", findings, last)


# ---- inside packs ----


def add_breaches(
    walk: _native.PackWalk, paths: ShardPaths, claims: HeaderClaims, findings: Findings, pack_of: PackOf
) -> None:
    """Add the kernel's violations as findings; see csrc/verify.h for the meaning of their numbers."""
    kept: Counter[str] = Counter()
    multiple, dtype = claims.sequence_multiple, claims.mask_dtype
    for rule, pack, at, found, expected in walk.breaches:
        kept[rule] += 1
        owner: int | None = pack
        if rule in ("O1", "O2"):
            path, offset = paths.seq_idx, (claims.sequence_offsets if rule == "O1" else claims.token_offsets) + 8 * at
            what = f"offset {found}"
            demanded = f"at most {expected}" if found > expected else f"more than the {expected} before it"
        elif rule in ("P1", "P5"):
            path, offset, demanded = paths.seq_idx, claims.token_offsets + 8 * at, f"at most the capacity {expected}"
            unit = "tokens" if rule == "P1" else f"positions with each sequence rounded up to {multiple}"
            what = f"{found} {unit}"
        elif rule in ("P2", "P3", "P4"):
            path, offset, what = paths.starts, 4 * at, f"a sequence that starts at {found}"
            demanded = {"P2": "0", "P3": f"{expected} or more", "P4": f"{expected} or less"}[rule]
        else:
            assert dtype is not None
            path, offset, owner = paths.loss, at * dtype.itemsize, pack_of(at)
            what = f"mask {dtype.type(found)}"
            demanded = "a finite weight of 0 or more" if dtype.kind == "f" else "0 or 1"
            if rule == "P6":
                what, demanded = f"{what} at a sequence's end", "0"
        findings.add(rule, path, offset, what, demanded, pack=owner)
    for rule, count in walk.counts.items():
        findings.counts[rule] += count - kept[rule]


def check_ids(stream: Stream, dtype: np.dtype[Any], limit: int, findings: Findings, pack_of: PackOf) -> None:
    """Read all ids of ``.bin`` and check rules P8 (none is negative) and P9 (each is below ``limit``)."""
    bounds, first = np.iinfo(dtype), 0
    limit = min(limit, int(bounds.max) + 1)
    for ids in stream.chunks(dtype):
        # uint16 ids cannot be wrong unless the limit is smaller. As uint32, a negative int32 is large, so one maximum
        # finds both errors.
        if (bounds.min or limit <= bounds.max) and int(ids.view(f"<u{dtype.itemsize}").max()) >= limit:
            for rule, bad in (("P8", np.flatnonzero(ids < 0)), ("P9", np.flatnonzero(ids >= limit))):
                for position in bad[: findings.most].tolist():
                    offset, pack = (first + position) * dtype.itemsize, pack_of(first + position)
                    findings.add(rule, stream.file.path, offset, f"id {ids[position]}", f"0 to {limit - 1}", pack=pack)
                findings.counts[rule] += len(bad[findings.most :])
        first += len(ids)


# ---- columns ----


def open_columns(
    paths: ShardPaths,
    beside: Collection[str],
    unpublished: Mapping[str, str],
    claims: HeaderClaims | None,
    findings: Findings,
    stack: ExitStack,
) -> dict[str, CheckedFile]:
    """Open every file that has the name of a column of the shard, whatever its content; ``stack`` closes them.

    ``beside`` are the names of columns whose files are at the prefix or will be put there. See ``verify_shard`` for
    ``unpublished``. A listed column without a file breaks rule C8.
    """
    listed = {} if claims is None else claims.listed
    files: dict[str, CheckedFile] = {}
    for name in sorted({*beside, *listed}):
        path = paths.column(name)
        try:
            file = files[name] = stack.enter_context(closing(CheckedFile(unpublished.get(path, path))))
            file.path = path  # the path used in findings
        except (FileNotFoundError, NotADirectoryError):
            if name in listed:
                findings.add("C8", path, None, "file is missing, but .seq.idx lists it", "", remedy=DATA_REMEDY)
    return files


def check_column(
    file: CheckedFile, name: str, claims: HeaderClaims | None, findings: Findings, meter: Meter | None
) -> None:
    """Check one column against its rules (C1 to C10): its header and size, and with a ``meter`` all its values."""
    remedy = DATA_REMEDY if claims is not None and name in claims.listed else _ATTACHED

    def add(rule: str, offset: int | None, found: object, expected: object, remedy: str = remedy) -> None:
        findings.add(rule, file.path, offset, found, expected, remedy=remedy)

    raw = file.read(0, FIXED_NBYTES)
    raw += file.read(len(raw), COLUMN.stated_nbytes(raw) - len(raw))
    if broken := list(COLUMN.broken_rules(raw)):
        for breach in broken:
            add(breach.rule, breach.offset, breach.found, breach.expected)
        return
    column = ColumnHeader.decode(raw, file.path)
    if file.nbytes != column.nbytes:
        add("C2", min(file.nbytes, column.nbytes), f"{file.nbytes} bytes", f"{column.nbytes}, from its header")
    if claims is not None and claims.sound:
        if column.shard_id != claims.values["shard_id"]:
            found, expected = f"a column of shard {column.shard_id.hex()}", claims.values["shard_id"].hex()
            is_derived = claims.values["flags"] == FLAG_REBUILT
            add("C6", 16, found, expected, _DOUBTED if is_derived else remedy)
        rows = num_rows_in(claims, column.spec.per)
        if column.rows != rows:
            add("C5", 40, f"{column.rows} rows", f"{rows}, one per {column.spec.per}")
        checksum, listed = raw[-CHECKSUM_NBYTES:].hex(), claims.listed.get(name)
        if listed is not None and listed != checksum:
            add("C8", len(raw) - CHECKSUM_NBYTES, f"header checksum {checksum}", f"{listed}, as .seq.idx lists it")
    rows_of = name  # "source" and "pair" have rules for their rows
    if name == "source" and not is_source(column.spec):
        rows_of = ""
        expected = "uint32 x 2 per sequence, and a list of named files in its JSON"
        add("C9", FIXED_NBYTES, "a source column without file names", expected)
    elif name == "pair" and column.spec.kind != PAIR.kind:
        rows_of = ""
        add("C10", FIXED_NBYTES, f"a column of {column.spec.kind[:3]}", "uint32 x 2 per sequence")
    if meter is not None:
        _check_values(Stream(file, meter, len(raw)), column, rows_of, findings, add)


def _check_values(
    stream: Stream,
    column: ColumnHeader,
    name: str,
    findings: Findings,
    add: Callable[[str, int | None, object, object], None],
) -> None:
    """Check ``source`` against its files (C9), ``pair`` for complete pairs (C10), and all values against C7."""
    num_files = len(column.spec.metadata["files"]) if name == "source" else 0
    # The length of a chunk is even, so that both rows of a pair are in the same chunk.
    while name in ("source", "pair") and len(rows := stream.take("<u8", _CHUNK_ROWS).view("<u4").reshape(-1, 2)):
        begin = stream.position - rows.nbytes
        if name == "pair":
            rule, wrong, expected = "C10", torn_pairs(rows), "[n, 0] and [n, 1], chosen and rejected"
        else:
            rule, wrong, expected = "C9", np.flatnonzero(rows[:, 0] >= num_files), f"less than {num_files}"
        for i in wrong[: findings.most].tolist():
            found = f"rows {rows[i : i + 2].tolist()}" if name == "pair" else f"file {rows[i, 0]}"
            add(rule, begin + 8 * i, found, expected)
        findings.counts[rule] += len(wrong[findings.most :])
    checksum = stream.finish()
    if stream.file.nbytes == column.nbytes and checksum != column.checksum:
        add("C7", None, f"checksum {checksum.hex()} for the values", column.checksum.hex())
