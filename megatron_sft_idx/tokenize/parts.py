"""A part: the sequences of some pieces of input in one file, with what they were made from.

::

    magic, version     8 bytes
    size of the JSON   uint64
    checksum of it     xxh3_128, 16 bytes
    JSON               what it was made from, counts, and the checksum of all that follows
    lengths            uint32 [sequences], from the next multiple of 64 bytes on
    ids                uint16 or int32 [tokens], likewise
    masks              token-aligned, uint8 or float32 [tokens], likewise
    columns            values of each sequence [sequences, width], likewise, in the order of their names

Each attempt at a part writes under a name of its own, so that two tasks that make the same part, as when a node was
only thought dead, do not meet; the one that reports first is taken. A part counts if it is whole, its checksum holds,
and it names these options and the fingerprints of these pieces of input, which are read again to compare. So nothing
waits for the disk: what a power failure cuts short is made again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import secrets
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.chat.inputs import JsonPiece
from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import OutputFile, as_bytes, open_array
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.publish import move_into_place
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, read_pieces
from megatron_sft_idx.tokenize.encoding import EncodedPiece, EncodingOptions, RowEncoder
from megatron_sft_idx.tokenize.report import MAX_LISTED

if TYPE_CHECKING:
    from megatron_sft_idx.shard.writer import MaskAlignment
    from megatron_sft_idx.tokenize.plan import PlannedRun

# Parts that stay mapped while packs are gathered from them.
_MAX_OPEN = 256
# About as many tokens are read of a part when it is opened.
_TOKENS_A_PART = 8192
PART_MAGIC = b"SFTPART"
_VERSIONED_MAGIC = PART_MAGIC + b"\x02"
_HEAD = struct.Struct("<8sQ16s")
_ALIGNMENT = 64
_MAX_JSON_NBYTES = 1 << 28
_SUFFIX = ".part"


@dataclass(slots=True)
class PartInfo:
    """What a part is made from and what became of its rows.

    Attributes:
        options: digest of all that decides over tokens and masks.
        pieces: fingerprints of the pieces.
        num_bytes: of the input file, for progress.
        lines: rows, blank lines included: how far the numbers of the rows that follow are away.
        rows: rows read, bad ones included.
        skipped: rows that could not be used.
        bad_rows: their positions and reasons, in order.
        notes: counts by name.
        straddling: a token that brings characters of a header into what is trained on; "" where none does.
        mask_dtype: name of the masks' dtype.
        arrays: dtype and shape of what follows, in its order: lengths, ids, masks, and columns by name.
        checksum: of what follows: xxh3_128 in hex.
    """

    options: str
    pieces: list[str]
    num_bytes: int = 0
    lines: int = 0
    rows: int = 0
    skipped: int = 0
    bad_rows: list[tuple[int, str]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    straddling: str = ""
    mask_dtype: str = "uint8"
    arrays: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    checksum: str = "0" * 32  # which is as long as any: where the arrays begin does not depend on it

    def add(self, done: EncodedPiece, lines: int = 0) -> None:
        """Count what became of a piece of so many lines; its rows are counted from the first of the part then."""
        if "source" in done.columns:
            done.columns["source"][:, 1] += self.lines
        self.num_bytes += done.num_bytes
        self.lines += lines
        self.rows += done.rows
        self.skipped += len(done.bad_rows)
        listed = done.bad_rows[: MAX_LISTED - len(self.bad_rows)]
        self.bad_rows += [(error.position or 0, error.reason) for error in listed]
        self.straddling = self.straddling or done.straddling
        if done.loss_mask.dtype == np.float32:
            self.mask_dtype = "float32"
        first = np.cumsum(done.lengths) - done.lengths
        # As the writer of a shard counts them: masks on tokens that nothing predicts.
        dropped = int(np.count_nonzero(done.loss_mask[first]))
        self.notes = dict(Counter(self.notes) + done.notes + Counter(first_token_masks_dropped=dropped))

    def offsets(self, json_nbytes: int) -> list[int]:
        """Where the arrays begin, and where the last one ends."""
        offsets, end = [], _HEAD.size + json_nbytes
        for dtype, shape in self.arrays.values():
            offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = offsets[-1] + math.prod(shape) * np.dtype(dtype).itemsize
        return [*offsets, end]


class Part:
    """A part, opened for reading.

    Attributes:
        info: what it is made from.
        lengths: tokens of each sequence, uint32 [sequences].
        starts: where each begins among the tokens, int64 [sequences].
        ids: uint16 or int32 [tokens].
        mask: token-aligned, uint8 or float32 [tokens].
        columns: by name [sequences] or [sequences, width]; numbers in them are counted from the beginning of the part.

    Raises:
        FormatError: it is not what ``write_part`` wrote.
        FileNotFoundError: there is none.
    """

    def __init__(self, path: str, *, verify: bool = False) -> None:
        self.path = path
        size = os.stat(path).st_size
        whole = open_array(path, np.dtype("u1"), size, nbytes=size)[:]
        magic, nbytes, checksum = _HEAD.unpack(whole[: _HEAD.size].tobytes().ljust(_HEAD.size, b"\0"))
        if magic != _VERSIONED_MAGIC or nbytes > min(size - _HEAD.size, _MAX_JSON_NBYTES):
            raise self._broken("it does not begin as one")
        raw = whole[_HEAD.size : _HEAD.size + nbytes].tobytes()
        if xxhash.xxh3_128_digest(raw) != checksum:
            raise self._broken("its description is damaged")
        try:
            self.info = info = PartInfo(**json.loads(raw))
            offsets = info.offsets(int(nbytes))
        except (ValueError, TypeError):
            raise self._broken("it is of another version") from None
        info.bad_rows = [(position, reason) for position, reason in info.bad_rows]
        if size != offsets[-1]:
            raise self._broken(f"it has {size} bytes, expected {offsets[-1]}")
        if verify and xxhash.xxh3_128_hexdigest(whole[offsets[0] :].data) != info.checksum:
            raise self._broken("its bytes have another checksum")
        self.columns: dict[str, NDArray[Any]] = {}
        for offset, (name, (dtype, shape)) in zip(offsets, info.arrays.items(), strict=False):
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            self.columns[name] = whole[offset : offset + nbytes].view(dtype).reshape(shape)
        self.lengths, self.ids, self.mask = map(self.columns.pop, ("lengths", "ids", "masks"))
        ends = np.cumsum(self.lengths, dtype=np.int64)
        self.starts = ends - self.lengths
        if not int(self.lengths.sum(dtype=np.int64)) == len(self.ids) == len(self.mask) or not self.lengths.all():
            raise self._broken("its lengths do not add up to its tokens")

    def _broken(self, why: str) -> FormatError:
        return FormatError(f"{self.path}: not a part of a tokenised corpus: {why}; pass --resume, which makes it anew")


def write_part(path: str, info: PartInfo, encoded: Sequence[EncodedPiece]) -> None:
    """Write a part, all at once.

    Args:
        path: where it goes; the folder is there, and nothing of this name.
        info: what it is made from and the counts of its rows; the rest is filled in.
        encoded: its pieces, all with the same columns.

    Raises:
        FormatError: something of this name has appeared meanwhile; it stays.
        OSError: the disk says no.
    """
    arrays: dict[str, list[NDArray[Any]]] = {
        "lengths": [piece.lengths.astype("<u4") for piece in encoded],
        "ids": [piece.input_ids for piece in encoded],
        "masks": [piece.loss_mask.astype(info.mask_dtype, copy=False) for piece in encoded],
        **{name: [piece.columns[name] for piece in encoded] for name in sorted(encoded[0].columns)},
    }
    info.arrays = {
        name: (chunks[0].dtype.name, [sum(map(len, chunks)), *chunks[0].shape[1:]]) for name, chunks in arrays.items()
    }
    offsets = info.offsets(len(json.dumps(asdict(info)).encode()))
    body: list[bytes | memoryview] = []
    end, stream = offsets[0], StreamHash()
    for offset, chunks in zip(offsets, arrays.values(), strict=False):
        body += [bytes(offset - end), *(as_bytes(chunk) for chunk in chunks)]
        end = offset + sum(chunk.nbytes for chunk in chunks)
    for data in body:
        stream.update(data)
    info.checksum = stream.hex()
    raw = json.dumps(asdict(info)).encode()
    head = _HEAD.pack(_VERSIONED_MAGIC, len(raw), xxhash.xxh3_128_digest(raw)) + raw
    temporary = f"{path}.tmp"
    file = OutputFile(temporary, durable=False)
    try:
        for data in (head.ljust(offsets[0], b"\0"), *body):
            file.write(data)
        move_into_place(temporary, path, None)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        file.close()


# ---- all parts ----


@dataclass(frozen=True, slots=True, eq=False)
class PartsTable:
    """Where the sequences of all parts are.

    Attributes:
        paths: of the parts.
        bounds: number of the first sequence of each part, and that of all, int64 [parts + 1].
        mask_dtype: of the masks that are to come of it: float32 where any part has such.
        bases: of the columns that are to come of it, by name: what is added to the values of each part, [parts] or
            [parts, width].
        pairs: whether sequences 2k and 2k + 1 are a pair, which the column ``pair`` says then.
    """

    paths: Sequence[str]
    bounds: NDArray[np.int64]
    mask_dtype: str
    bases: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    pairs: bool = False


class PartsReader:
    """The sequences of all parts.

    A plan takes sequences from anywhere, so any window of it touches most parts. Windows are large, and each part is
    read once a window, from its beginning to its end; some stay open, the others are opened for it, one at a time.

    Args:
        table: of the parts.

    Attributes:
        window_tokens: about how many are read at a time.
    """

    mask_alignment: MaskAlignment = "token"

    def __init__(self, table: PartsTable) -> None:
        # 5 to 10 bytes of memory each, twice; of many parts, enough that opening each is worth it.
        self.window_tokens = min(max(_TOKENS_A_PART * len(table.paths), 1 << 22), 1 << 24)
        self.table = table
        self._held: dict[int, Part] = {}

    def read(self, run: PlannedRun) -> tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]:
        """Ids and token-aligned masks of these packs, end to end, and columns by name, a row a sequence."""
        order = np.argsort(run.sequences, kind="stable")
        sequences, lengths = run.sequences[order], run.lengths[order].astype(np.int64)
        begins = np.zeros(len(order), np.int64) if run.begins is None else run.begins[order]
        ends = np.cumsum(lengths)
        ids: NDArray[Any] | None = None
        mask = np.empty(ends[-1], self.table.mask_dtype)
        columns = {name: np.empty((len(order), *base.shape[1:]), base.dtype) for name, base in self.table.bases.items()}
        for number, part, first, last, local in self._by_part(sequences):
            where = slice(ends[first] - lengths[first], ends[last - 1])
            if (begins[first:last] + lengths[first:last] > part.lengths[local]).any():
                raise self._changed(part)
            starts = part.starts[local] + begins[first:last]
            if ids is None:
                ids = np.empty(ends[-1], part.ids.dtype)
            stops, all_of_them = starts + lengths[first:last], np.arange(last - first)
            _native.gather_sequences(part.ids, starts, stops, all_of_them, ids[where])
            found = np.empty(where.stop - where.start, part.mask.dtype)
            _native.gather_sequences(part.mask, starts, stops, all_of_them, found)
            mask[where] = found
            for name, values in columns.items():
                values[order[first:last]] = part.columns[name][local] + self.table.bases[name][number]
        assert ids is not None
        # From the order of the parts to the order of the plan.
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        given = np.empty_like(ids), np.empty_like(mask)
        for source, out in zip((ids, mask), given, strict=True):
            _native.gather_sequences(source, ends - lengths, ends, place, out)
        if self.table.pairs:
            columns["pair"] = np.stack([run.sequences // 2, run.sequences % 2], 1)
        return *given, columns

    def count_trained(self, sequences: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """How many of the tokens at these positions of these sequences are trained on."""
        order = np.argsort(sequences, kind="stable")
        sequences, positions = sequences[order], positions[order]
        return sum(
            int(np.count_nonzero(part.mask[part.starts[local] + positions[first:last]]))
            for _, part, first, last, local in self._by_part(sequences)
        )

    def are_trained(
        self, sequences: NDArray[np.int64], begins: NDArray[np.int64], lengths: NDArray[np.integer[Any]]
    ) -> NDArray[np.bool_]:
        """Whether any token but the first, which nothing predicts, is trained on in each of these cuts, bool [cuts]."""
        order = np.argsort(sequences, kind="stable")
        found = np.empty(len(order), bool)
        for _, part, first, last, local in self._by_part(sequences[order]):
            cuts = order[first:last]
            starts = part.starts[local] + begins[cuts]
            before = np.cumsum(np.append(0, part.mask != 0))
            found[cuts] = before[starts + lengths[cuts]] > before[starts + 1]
        return found

    def column(self, name: str, width: int) -> NDArray[np.uint32]:
        """One column of all sequences, as it is in the parts, uint32 [sequences, width]."""
        values = np.empty((int(self.table.bounds[-1]), width), np.uint32)
        for number, (first, last) in enumerate(pairwise(self.table.bounds.tolist())):
            values[first:last] = self._open(number).columns[name]
        return values

    def _by_part(self, sequences: NDArray[np.int64]) -> Iterator[tuple[int, Part, int, int, NDArray[np.int64]]]:
        """Number and part, the range of these ascending numbers that each holds, and what they are called in it."""
        cuts = np.searchsorted(sequences, self.table.bounds)
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            first, last = cuts[number : number + 2].tolist()
            yield number, self._open(number), first, last, sequences[first:last] - self.table.bounds[number]

    def _open(self, number: int) -> Part:
        if (held := self._held.get(number)) is not None:
            return held
        part = Part(self.table.paths[number])
        if len(part.lengths) != self.table.bounds[number + 1] - self.table.bounds[number]:
            raise self._changed(part)
        if len(self._held) < _MAX_OPEN:
            self._held[number] = part
        return part

    def _changed(self, part: Part) -> FormatError:
        return FormatError(f"{part.path}: changed since its lengths were read; pass --resume, which makes it anew")


# ---- tasks ----


@dataclass(frozen=True, slots=True)
class TokenizingJob:
    """What all tasks that tokenise have in common.

    Attributes:
        folder: of the parts.
        encoding: rows to sequences; paths in it are absolute.
        digest: of all that decides over tokens and masks, as the driver knows it.
        cutting: of the input.
        anew: make parts anew whose input has changed; else that is told.
    """

    folder: str
    encoding: EncodingOptions
    digest: str
    cutting: Cutting
    anew: bool


@dataclass(frozen=True, slots=True)
class MadePart:
    """What the driver hears of a part.

    Attributes:
        path: of the part; empty where there is none.
        info: what it is made from, and counts.
        lengths: tokens of each sequence, uint32 [sequences].
        reused: it was there already.
        changed: where there is none, since an earlier run read something else: the fingerprints then and now.
    """

    path: str
    info: PartInfo
    lengths: NDArray[np.uint32]
    reused: bool = False
    changed: tuple[str, str] | None = None


# The encoder of this process, and what it was made from.
_held: tuple[EncodingOptions, RowEncoder] | None = None


def remember_encoder(options: EncodingOptions | None, encoder: RowEncoder | None = None) -> None:
    """Let tasks that run in this process use an encoder that is there already; None forgets it."""
    global _held  # noqa: PLW0603
    _held = None if options is None or encoder is None else (options, encoder)


def _encoder_of(options: EncodingOptions) -> RowEncoder:
    """Made once a process; that of an earlier run is dropped."""
    if _held is None or _held[0] != options:
        remember_encoder(None)
        remember_encoder(options, RowEncoder(options))
    assert _held is not None
    return _held[1]


def encode_piece(options: EncodingOptions, piece: Piece, file: int = 0) -> EncodedPiece:
    """Encode the rows of one piece, in order; ``file`` is the number of its file."""
    return _encoder_of(options).encode(piece, file)


def parts_of(folder: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """Names of the parts in a folder, by the number of their file and their own in it; all attempts at one."""
    found: dict[tuple[int, int], tuple[str, ...]] = {}
    for entry in sorted(os.listdir(folder)):
        file, _, part = entry.partition(".")[0].partition("-")
        if entry.endswith(_SUFFIX) and file.isdecimal() and part.isdecimal():
            key = int(file), int(part)
            found[key] = (*found.get(key, ()), entry)
    return found


def make_parts(job: TokenizingJob, stretch: Stretch) -> list[MadePart]:
    """Tokenise a stretch, or find what was made of it before: one part, or as many as a whole file makes."""
    pieces = read_pieces(stretch, job.cutting)
    made: list[MadePart] = []
    is_whole_file = stretch.nbytes is None and not stretch.dealt
    # A task that is tried again, after hours over one file, goes on with what it has.
    there = parts_of(job.folder) if is_whole_file else {(stretch.number, stretch.part): stretch.found}
    while group := list(islice(pieces, job.cutting.pieces)):
        if made and not is_whole_file:
            raise FormatError(f"{stretch.name}: was changed while it was read: run again")
        key = stretch.number, stretch.part + len(made)
        made.append(_make_part(job, key, group, there.get(key, ())))
        if not made[-1].path:
            break
    return made


def _make_part(job: TokenizingJob, key: tuple[int, int], pieces: list[Piece], there: Sequence[str]) -> MadePart:
    info = PartInfo(job.digest, [piece.fingerprint() for piece in pieces])
    others: list[list[str]] = []
    for name in there:
        with contextlib.suppress(FileNotFoundError, FormatError):
            part = Part(os.path.join(job.folder, name), verify=True)
            if part.info.options == job.digest and part.info.pieces == info.pieces:
                return MadePart(part.path, part.info, np.array(part.lengths), reused=True)
            if part.info.options == job.digest:
                others.append(part.info.pieces)
    if others and not job.anew:
        then, now = (xxhash.xxh3_128_hexdigest("".join(each).encode()) for each in (others[0], info.pieces))
        return MadePart("", info, np.empty(0, np.uint32), changed=(then, now))
    encoder = _encoder_of(job.encoding)
    if encoder.digest != job.digest:
        raise FormatError(
            f"{job.encoding.tokenizer}: the tokenizer on node {platform.node()} is not the driver's; put it where"
            " every node of the cluster sees it, at the same path"
        )
    encoded: list[EncodedPiece] = []
    for piece in pieces:
        encoded.append(encoder.encode(piece, key[0]))
        info.add(encoded[-1], len(piece.ends) if isinstance(piece, JsonPiece) else encoded[-1].rows)
        if info.bad_rows and job.encoding.on_bad_row == "error":
            return MadePart("", info, np.empty(0, np.uint32))
    path = os.path.join(job.folder, f"{key[0]:06d}-{key[1]:06d}.{secrets.token_hex(4)}{_SUFFIX}")
    write_part(path, info, encoded)
    return MadePart(path, info, np.concatenate([done.lengths for done in encoded]).astype(np.uint32))
