"""A part: one file with the sequences of several pieces of input, the task that makes it, and the reader of all parts.

::

    magic, version     8 bytes
    size of the JSON   uint64
    checksum of it     xxh3_128, 16 bytes
    JSON               ``PartInfo``: what the part was made from, counts, and the checksum of all that follows
    lengths            uint32 [sequences], from the next multiple of 64 bytes on
    ids                uint16 or int32 [tokens], likewise
    masks              token-aligned, uint8 or float32 [tokens], likewise
    columns            values of each sequence [sequences, width], likewise, in the order of their names; the JSON
                       adds a suffix to each name
    media              only if a processor expands images and audio: number of items per sequence [sequences]; first
                       position in the sequence, length, kind and file number per item [items]; size and hash per file
                       [files]; and all files, concatenated [bytes]

The name of a part is a digest of its pieces and of the options that determine its tokens and masks. So a later job, or
a second attempt at a task, finds exactly the part that it would make. It uses the part if the file is complete and its
checksum matches; otherwise it makes it again. Therefore parts are not synced to disk: a part truncated by a power
failure is not complete.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs import JsonPiece
from megatron_sft_idx.chat.separated import SeparatedPiece
from megatron_sft_idx.chat.tokenizer import DifferentIdsError
from megatron_sft_idx.chat.types import EncodedItem, Piece
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout.media_layout import HASH_NBYTES, Items, blob_hash
from megatron_sft_idx.packs.run_media import RunMedia, SpilledBlobs
from megatron_sft_idx.shard.writer import MaskAlignment
from megatron_sft_idx.storage import OutputFile, as_bytes, open_array, open_regular
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.tokenize.bad_rows import BadRowLimit
from megatron_sft_idx.tokenize.column_weights import Weights
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, read_pieces
from megatron_sft_idx.tokenize.encoding import EncodedPiece, EncodingOptions, RowEncoder, items_of
from megatron_sft_idx.tokenize.plan import FileSequences, GatheredCuts, PlannedRun, SequenceReader, changed_error
from megatron_sft_idx.tokenize.report import CorpusReport

PART_MAGIC = b"SFTPART"
_VERSIONED_MAGIC = PART_MAGIC + b"\x03"
_HEAD = struct.Struct("<8sQ16s")
_ALIGNMENT = 64
_MAX_JSON_NBYTES = 1 << 28
_SUFFIX = ".part"
# Suffix of column names among the arrays of a part, so that a column can have any name.
_COLUMN = ".col"
# Number of bad rows whose messages are kept, and number that are logged when they occur.
_MAX_LISTED, _MAX_SHOWN = 10_000, 20
# Number of parts that stay open while packs are gathered from them.
_MAX_OPEN_PARTS = 256
# Approximate number of tokens to read from a part each time it is opened, so that opening it pays off.
_TOKENS_PER_OPENED_PART = 8192


@dataclass(slots=True)
class PartInfo:
    """The source of a part and the counts of its rows: the JSON of its file.

    Attributes:
        options: digest of all options that determine tokens and masks.
        pieces: fingerprints of the pieces.
        media: if a processor expands images and audio, their hash for each piece (``PieceMedia.digest``).
        num_bytes: number of bytes of the input file that contain the pieces, for progress.
        lines: number of rows, including blank lines; added to the row numbers of the next part.
        rows: number of rows read, including bad ones.
        skipped: number of unusable rows.
        max_rows: number of usable rows that were requested, if there are that many; rows after them are not counted.
            None if the part has all rows.
        bad_rows: position and reason of each unusable row, in order.
        notes: counts by name.
        first_rows: position of the first row of each note, by name.
        straddling: text of a trained token that begins in a header; "" if there is none.
        mask_dtype: name of the masks' dtype.
        arrays: dtype and shape of the arrays that follow, in order: lengths, ids, masks, columns, media.
        checksum: xxh3_128 of the arrays, in hex.
    """

    options: str
    pieces: list[str]
    media: list[str] = field(default_factory=list)
    num_bytes: int = 0
    lines: int = 0
    rows: int = 0
    skipped: int = 0
    max_rows: int | None = None
    bad_rows: list[tuple[int, str]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    first_rows: dict[str, int] = field(default_factory=dict)
    straddling: str = ""
    mask_dtype: str = "uint8"
    arrays: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    checksum: str = "0" * 32  # as long as every checksum: the size of the JSON determines where the arrays begin

    @property
    def content(self) -> str:
        """All hashed content of the pieces."""
        return "".join(map("".join, zip_longest(self.pieces, self.media, fillvalue="")))

    @property
    def usable(self) -> int:
        """Number of usable rows."""
        return self.rows - self.skipped

    def has_rows_for(self, max_rows: int | None) -> bool:
        """Return whether these are the rows up to the last of ``max_rows`` usable ones, or all if there are fewer."""
        if self.max_rows is not None or max_rows is None:
            return self.max_rows == max_rows
        return self.usable < max_rows

    def add(self, piece: Piece, encoded: EncodedPiece) -> None:
        """Count the rows of a piece and their results.

        The column ``source`` of the piece is changed: its rows are then counted from the first row of the part.
        """
        if "source" in encoded.columns:
            encoded.columns["source"][:, 1] += self.lines
        self.num_bytes += encoded.num_bytes
        self.lines += len(piece.ends) if isinstance(piece, JsonPiece | SeparatedPiece) else encoded.rows
        self.rows += encoded.rows
        self.skipped += len(encoded.bad_rows)
        listed = encoded.bad_rows[: _MAX_LISTED - len(self.bad_rows)]
        self.bad_rows += [(error.position or 0, error.reason) for error in listed]
        self.straddling = self.straddling or encoded.straddling
        if encoded.loss_mask.dtype == np.float32:
            self.mask_dtype = "float32"
        self.notes = dict(Counter(self.notes) + encoded.notes)
        self.first_rows = encoded.first_rows | self.first_rows

    def offsets(self, json_nbytes: int) -> list[int]:
        """Return the byte offset of each array, and of the end, in a file with this size of JSON."""
        offsets, end = [], _HEAD.size + json_nbytes
        for dtype, shape in self.arrays.values():
            offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = offsets[-1] + math.prod(shape) * np.dtype(dtype).itemsize
        return [*offsets, end]


class Part:
    """A part, open for reading. Its arrays are mapped.

    Args:
        path: path of the file.
        verify: also compare the checksum of the arrays.

    Attributes:
        info: the source and counts of the part.
        lengths: number of tokens of each sequence, uint32 [sequences].
        starts: start of each sequence among the tokens, int64 [sequences].
        ids: uint16 or int32 [tokens].
        mask: token-aligned, uint8 or float32 [tokens].
        columns: values by name, [sequences] or [sequences, width]; row numbers count from the first row of the part.
        media: images and audio of the sequences; None if no processor expanded any.

    Raises:
        FormatError: the file is not as ``write_part`` wrote it.
        FileNotFoundError: the file does not exist.
    """

    def __init__(self, path: str, *, verify: bool = False) -> None:
        self.path = path
        size = os.stat(path).st_size
        whole = open_array(path, np.dtype("u1"), size, nbytes=size)[:]
        magic, nbytes, checksum = _HEAD.unpack(whole[: _HEAD.size].tobytes().ljust(_HEAD.size, b"\0"))
        if magic != _VERSIONED_MAGIC or nbytes > min(size - _HEAD.size, _MAX_JSON_NBYTES):
            raise self._broken("it does not begin like one")
        raw = whole[_HEAD.size : _HEAD.size + nbytes].tobytes()
        if xxhash.xxh3_128_digest(raw) != checksum:
            raise self._broken("its description is damaged")
        try:
            self.info = info = PartInfo(**json.loads(raw))
            offsets = info.offsets(int(nbytes))
        except (ValueError, TypeError):
            raise self._broken("it was written by another version") from None
        info.bad_rows = [(position, reason) for position, reason in info.bad_rows]
        if size != offsets[-1]:
            raise self._broken(f"it has {size} bytes, expected {offsets[-1]}")
        if verify and xxhash.xxh3_128_hexdigest(whole[offsets[0] :].data) != info.checksum:
            raise self._broken("its checksum does not match")
        arrays: dict[str, NDArray[Any]] = {}
        for offset, (name, (dtype, shape)) in zip(offsets, info.arrays.items(), strict=False):
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            arrays[name] = whole[offset : offset + nbytes].view(dtype).reshape(shape)
        self.lengths, self.ids, self.mask = map(arrays.pop, ("lengths", "ids", "masks"))
        # The encoded images and audio are the last array.
        self.media = _media_of({name: arrays.pop(name) for name in _MEDIA if name in arrays}, path, offsets[-2])
        self.columns = {name.removesuffix(_COLUMN): values for name, values in arrays.items()}
        ends = np.cumsum(self.lengths, dtype=np.int64)
        self.starts = ends - self.lengths
        if not int(self.lengths.sum(dtype=np.int64)) == len(self.ids) == len(self.mask) or not self.lengths.all():
            raise self._broken("its lengths do not add up to its number of tokens")

    def _broken(self, why: str) -> FormatError:
        return FormatError(
            f"{self.path}: not a valid part of a tokenised corpus: {why}; run the command again to make this part again"
        )


def write_part(
    path: str, info: PartInfo, encoded: Sequence[EncodedPiece], blobs: SpilledBlobs | None = None
) -> MadePart:
    """Write a part, completely or not at all.

    Args:
        path: path of the file; its folder must exist. An existing file is replaced.
        info: the source and counts of the part; ``arrays`` and ``checksum`` are filled in.
        encoded: the pieces, all with the same columns.
        blobs: the encoded files of their images and audio; None if no processor expanded any.

    Raises:
        OSError: an error of the file system.
    """
    arrays: dict[str, list[NDArray[Any]]] = {
        "lengths": [piece.lengths.astype("<u4") for piece in encoded],
        "ids": [piece.input_ids for piece in encoded],
        "masks": [piece.loss_mask.astype(info.mask_dtype, copy=False) for piece in encoded],
        **{name + _COLUMN: [piece.columns[name] for piece in encoded] for name in sorted(encoded[0].columns)},
    }
    if blobs is not None:
        arrays |= _media_arrays([of for piece in encoded for of in piece.media], blobs)
    info.arrays = {
        name: (chunks[0].dtype.name, [sum(map(len, chunks)), *chunks[0].shape[1:]]) for name, chunks in arrays.items()
    }
    if blobs is not None:
        info.arrays[_FILES] = ("uint8", [int(blobs.sizes.sum())])
    offsets = info.offsets(len(json.dumps(asdict(info)).encode()))
    stream = StreamHash()
    for data in _body(offsets, arrays, blobs):
        stream.update(data)
    info.checksum = stream.hex()
    raw = json.dumps(asdict(info)).encode()
    head = _HEAD.pack(_VERSIONED_MAGIC, len(raw), xxhash.xxh3_128_digest(raw)) + raw
    _write_whole(path, chain([head.ljust(offsets[0], b"\0")], _body(offsets, arrays, blobs)))
    return MadePart(path, info, np.concatenate(arrays["lengths"]))


def _body(
    offsets: Sequence[int], arrays: Mapping[str, Sequence[NDArray[Any]]], blobs: SpilledBlobs | None
) -> Iterator[bytes | memoryview]:
    """Yield everything after the JSON: arrays at these offsets, then the files of ``blobs``, read one by one."""
    end = offsets[0]
    for offset, chunks in zip(offsets, arrays.values(), strict=False):
        yield bytes(offset - end)
        yield from map(as_bytes, chunks)
        end = offset + sum(chunk.nbytes for chunk in chunks)
    if blobs is not None:
        yield bytes(offsets[len(arrays)] - end)
        yield from map(blobs.data, range(len(blobs)))


def _write_whole(path: str, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file that need not survive a power failure. It becomes visible only when it is complete."""
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"  # another task may be making the same part
    file = OutputFile(temporary, durable=False)
    try:
        for data in chunks:
            file.write(data)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        file.close()


# ---- images and audio of a part ----

# Names of their arrays, without the suffix of columns. The last one holds the encoded files.
_FILES = "files"
_MEDIA = ("counts", "item starts", "item lengths", "item kinds", "item files", "file sizes", "file hashes", _FILES)


def _media_arrays(media: Sequence[Sequence[EncodedItem]], blobs: SpilledBlobs) -> dict[str, list[NDArray[Any]]]:
    """Return the arrays of images and audio of all sequences of a part, except for the files."""
    counts, items = items_of(media)
    hashes = b"".join(map(blobs.hash, range(len(blobs))))
    of_files = blobs.sizes, np.frombuffer(hashes, np.uint8).reshape(-1, HASH_NBYTES)
    arrays = counts.astype(np.uint32), *items, *of_files
    return {name: [np.ascontiguousarray(array)] for name, array in zip(_MEDIA, arrays, strict=False)}


class _PartBlobs:
    """The encoded files in a part, which is opened for each of them, because a window has files of any number of parts.

    Args:
        path: path of the part.
        begin: byte offset of the first file in it.
        sizes: size of each file in bytes, uint64 [files].
        hashes: hash of each file, uint8 [files, 16].
    """

    def __init__(self, path: str, begin: int, sizes: NDArray[Any], hashes: NDArray[Any]) -> None:
        self._path, self._hashes = path, np.array(hashes)  # a copy, because a view would keep the part mapped
        self._bounds = begin + np.append(0, np.cumsum(sizes, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._hashes)

    def nbytes(self, number: int) -> int:
        """Return the size of a file."""
        return int(self._bounds[number + 1] - self._bounds[number])

    def hash(self, number: int) -> bytes:
        """Return the hash of a file."""
        return bytes(self._hashes[number].tobytes())

    def data(self, number: int) -> bytes:
        """Return the bytes of a file. FormatError: they do not match its hash."""
        with open_regular(self._path) as stream:
            stream.seek(int(self._bounds[number]))
            found = stream.read(self.nbytes(number))
        if blob_hash(found) != self.hash(number):
            raise changed_error(self._path)
        return found


def _media_of(arrays: Mapping[str, NDArray[Any]], path: str, begin: int) -> RunMedia | None:
    """Return images and audio of a part with these arrays. The last array begins at byte ``begin`` of the part.

    None: it has no such arrays. FormatError: they are inconsistent.
    """
    if not arrays:
        return None
    counts, *items, sizes, hashes, data = (arrays[name] for name in _MEDIA)
    if int(counts.sum(dtype=np.int64)) != len(items[0]) or int(sizes.sum(dtype=np.int64)) != len(data):
        raise changed_error(path)
    return RunMedia(counts.astype(np.int64), Items(*items), _PartBlobs(path, begin, sizes, hashes))


# ---- all parts as one ----


@dataclass(frozen=True, slots=True, eq=False)
class PartsTable:
    """The location of the sequences of all parts; picklable.

    Attributes:
        paths: paths of the parts.
        bounds: number of the first sequence of each part, then the total number, int64 [parts + 1].
        mask_dtype: dtype of the masks to write: float32 if any part has float32.
        columns: names of the columns to write.
        places: for each part, the number of its file and the number of the file's rows before it, which are added to
            the column ``source``: uint32 [parts, 2].
        weighted_by: name of the column to multiply masks by; None for none.
        media: whether parts have images and audio.
    """

    paths: Sequence[str]
    bounds: NDArray[np.int64]
    mask_dtype: str
    columns: Sequence[str] = ()
    places: NDArray[np.uint32] | None = None
    weighted_by: str | None = None
    media: bool = False


class PartsReader(SequenceReader):
    """The sequences of all parts.

    A plan takes sequences in any order, so most windows need data from most parts. Windows are therefore large, and
    each part is opened at most once per window and read from beginning to end. Some parts stay open.

    Args:
        table: location of the sequences.
        names: names of the input files, for errors.
    """

    mask_alignment: MaskAlignment = "token"

    def __init__(self, table: PartsTable, names: Sequence[str] = ()) -> None:
        # 3 to 10 bytes of memory per token, in each of two windows.
        self.window_tokens = min(max(_TOKENS_PER_OPENED_PART * len(table.paths), 1 << 22), 1 << 24)
        self.mask_dtype = np.dtype(table.mask_dtype)
        self.stored_dtype = self.mask_dtype if table.weighted_by is None else np.dtype(np.float32)
        self.weighted_by, self.table, self._names = table.weighted_by, table, names
        self._open_parts: dict[int, Part] = {}

    def read(self, run: PlannedRun) -> GatheredCuts:
        """See ``SequenceReader.read``. Adds the column ``pair`` if sequences are pairs."""
        gathered = super().read(run)
        if "pair" in self.table.columns:
            gathered.columns["pair"] = _pairs_of(run.sequences)
        return gathered

    def media_of(self, sequences: NDArray[np.int64]) -> RunMedia | None:
        """See ``SequenceReader.media_of``."""
        if not self.table.media:
            return None
        order = np.argsort(sequences, kind="stable")
        bounds = np.searchsorted(sequences[order], self.table.bounds)
        found: list[RunMedia] = []
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            first, last = bounds[number : number + 2].tolist()
            part = self._part(number)
            if part.media is None:
                raise changed_error(part.path)
            found.append(part.media.taken(sequences[order[first:last]] - self.table.bounds[number]))
        if not found:
            return None
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return RunMedia.joined(found).taken(places)

    def weigh_by(
        self, column: str, sequences: NDArray[np.int64], lengths: NDArray[np.int64], *, per_token: bool = False
    ) -> None:
        """See ``SequenceReader.weigh_by``. Readers of the same ``table`` return these masks, too."""
        super().weigh_by(column, sequences, lengths, per_token=per_token)
        self.table = replace(self.table, mask_dtype=self.mask_dtype.name, weighted_by=column)

    def place_of(self, sequence: int) -> str:
        """Return the input line from which a sequence was made, if the parts have it."""
        part = int(np.searchsorted(self.table.bounds, sequence, "right")) - 1
        columns = self._part(part).columns
        if "source" not in columns:
            return super().place_of(sequence)
        file, row = self._values("source", part, columns["source"][sequence - self.table.bounds[part]]).tolist()
        return f"{self._names[file] if self._names else f'file {file}'}:{row + 1}"

    def column(self, name: str) -> NDArray[Any]:
        """Return one column of all sequences, [sequences] or [sequences, width]."""
        if name == "pair":
            return _pairs_of(np.arange(self.table.bounds[-1]))
        parts = len(self.table.paths)
        return np.concatenate([self._values(name, number, self._part(number).columns[name]) for number in range(parts)])

    def _values(self, name: str, number: int, values: NDArray[Any]) -> NDArray[Any]:
        """Return rows of a column of a part in the form to write."""
        return values + self.table.places[number] if name == "source" and self.table.places is not None else values

    def _by_file(self, sequences: NDArray[np.int64]) -> Iterator[FileSequences]:
        order = np.argsort(sequences, kind="stable")
        ascending = sequences[order]
        bounds = np.searchsorted(ascending, self.table.bounds)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            first, last = bounds[number : number + 2].tolist()
            part, in_part = self._part(number), ascending[first:last] - self.table.bounds[number]
            names = [name for name in self.table.columns if name != "pair"]
            columns = {name: self._values(name, number, part.columns[name][in_part]) for name in names}
            starts, lengths = part.starts[in_part], part.lengths[in_part]
            weights = None if self.weighted_by is None else Weights(part.columns[self.weighted_by][in_part])
            yield FileSequences(part.path, order[first:last], starts, lengths, part.ids, part.mask, columns, weights)

    def _part(self, number: int) -> Part:
        if (part := self._open_parts.get(number)) is not None:
            return part
        part = Part(self.table.paths[number])
        if len(part.lengths) != self.table.bounds[number + 1] - self.table.bounds[number]:
            raise changed_error(part.path)
        if len(self._open_parts) < _MAX_OPEN_PARTS:
            self._open_parts[number] = part
        return part


def _pairs_of(sequences: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the rows of the column ``pair`` for sequences with these numbers, uint32 [sequences, 2]."""
    return np.stack([sequences // 2, sequences % 2], 1).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class MadePart:
    """A task's report about a part.

    Attributes:
        path: path of the part; empty if a bad row prevented it.
        info: the source and counts of the part.
        lengths: number of tokens of each sequence, uint32 [sequences].
        reused: whether an earlier job made it.
    """

    path: str
    info: PartInfo
    lengths: NDArray[np.uint32]
    reused: bool = False

    def reader(self, *, media: bool = False) -> PartsReader:
        """Return a reader of the sequences of this part only, without columns. See ``PartsTable`` for ``media``."""
        bounds = np.array([0, len(self.lengths)])
        return PartsReader(PartsTable([self.path], bounds, self.info.mask_dtype, media=media))


class PartsSoFar:
    """The parts of a job so far, in the order of the input, with the counts of their rows.

    Args:
        report: counts the rows.
        on_bad_row: see ``EncodingOptions``.
        log: takes lines for people.
        files: number of input files.
        max_rows: maximum number of usable rows, None for all; rows after them are ignored.
        limit: maximum number of skipped rows; None for no limit.

    Attributes:
        report: as given.
        paths: paths of the parts.
        lengths: for each part, the number of tokens of each sequence, uint32 [sequences].
        places: for each part, the number of its file, and the number of the file's rows in parts before it.
        lines: number of rows of each file, including blank lines.
        mask_dtype: name of the dtype of their masks: float32 if any part has float32.
        num_reused: number of parts made by an earlier job.
        num_pieces: number of input pieces in them.
        fingerprint: hash of the input in them.
        file_fingerprints: the same for each file.
    """

    def __init__(
        self,
        report: CorpusReport,
        on_bad_row: str,
        log: Callable[[str], None] = lambda line: None,
        *,
        files: int = 1,
        max_rows: int | None = None,
        limit: BadRowLimit | None = None,
    ) -> None:
        self.report, self._on_bad_row, self._log, self._max_rows = report, on_bad_row, log, max_rows
        self._limit = limit
        self.paths: list[str] = []
        self.lengths: list[NDArray[np.uint32]] = []
        self.lines, self.mask_dtype, self._notes = [0] * files, "uint8", Counter[str]()
        self.places: list[tuple[int, int]] = []
        self.num_reused = self.num_pieces = 0
        self._made: set[str] = set()
        self.fingerprint, self.file_fingerprints = StreamHash(), [StreamHash() for _ in range(files)]

    def add(self, part: MadePart, name: str, file: int = 0, first: int = 0) -> None:
        """Add the next part.

        Args:
            part: the part.
            name: the path of its file, for messages.
            file: number of its file.
            first: offset of the numbers of its bad rows in that file.

        Raises:
            SequenceError: it has a bad row, and none may be skipped.
            TooManyBadRowsError: more rows are bad than the limit allows, however many good ones follow.
        """
        info = part.info
        self._report(info, name, first)
        self.require_few_bad_rows(name)
        self._notes.update(info.notes)
        if info.mask_dtype == "float32":
            self.mask_dtype = "float32"
        self.paths.append(part.path)
        self.lengths.append(part.lengths)
        self.places.append((file, self.lines[file]))
        self.lines[file] += info.lines
        for stream in (self.fingerprint, self.file_fingerprints[file]):
            stream.update(info.content.encode())
        self.num_pieces += len(info.pieces)
        # Two equal texts give one part. The second one did not make it either.
        self.num_reused += part.reused and part.path not in self._made
        self._made.add(part.path)

    def _report(self, info: PartInfo, name: str, first: int) -> None:
        report = self.report
        report.rows += info.rows
        for note, position in info.first_rows.items():
            report.first_rows.setdefault(note, f"{name}:{first + position}")
        if info.straddling and not report.straddling:
            report.straddling = info.straddling
            self._log(
                f"warning: tokens such as {info.straddling!r} begin in the text that the chat template writes before"
                " an answer. They are trained on, as in transformers; --straddling exclude leaves them out"
            )
        for skipped, (position, reason) in enumerate(info.bad_rows, report.skipped + 1):
            if self._on_bad_row == "error":
                raise SequenceError(name, first + position, f"{reason}; to skip such rows, pass --on-bad-row skip")
            error = SequenceError(name, first + position, reason)
            if len(report.bad_rows) < _MAX_LISTED:
                report.bad_rows.append(str(error))
            if skipped <= _MAX_SHOWN:
                self._log(f"skipped {error}")
            elif skipped == _MAX_SHOWN + 1:
                self._log("skipped more rows; the file of --summary lists them, and --dry-run --full shows them")
        report.skipped += info.skipped

    def require_few_bad_rows(self, name: str, *, at_end: bool = False) -> None:
        """Raise TooManyBadRowsError if the limit is certain to be exceeded, or ``at_end`` of the input, is exceeded."""
        if self._limit is not None:
            skipped = self.report.skipped
            # With --max-rows, the total is at most that number plus the bad rows.
            most = None if self._max_rows is None else self._max_rows + skipped
            self._limit.require(self.report, self.report.rows if at_end else most, name)

    @property
    def has_enough(self) -> bool:
        """Whether there are ``max_rows`` usable rows."""
        return self.missing == 0

    @property
    def missing(self) -> int | None:
        """The number of usable rows that are still missing; None if all are taken."""
        usable = self.report.rows - self.report.skipped
        return None if self._max_rows is None else max(self._max_rows - usable, 0)

    @property
    def notes(self) -> dict[str, int]:
        """Counts by name, without zeros."""
        return {name: count for name, count in sorted(self._notes.items()) if count}

    def reader(self, columns: Collection[str] = (), names: Sequence[str] = (), *, media: bool = False) -> PartsReader:
        """Return a reader of all sequences with these columns; ``names`` are the input files' names, for errors."""
        places = np.array(self.places, np.uint32).reshape(-1, 2)
        bounds = np.cumsum([0, *map(len, self.lengths)], dtype=np.int64)
        table = PartsTable(self.paths, bounds, self.mask_dtype, tuple(columns), places, media=media)
        return PartsReader(table, names)


# ---- tasks ----


@dataclass(frozen=True, slots=True)
class PartSettings:
    """The common settings of all tasks of a job that make parts; picklable.

    Attributes:
        folder: folder of the parts.
        encoding: how rows become sequences; paths in it are absolute.
        digest: digest of the encoder in the job's process, which the encoder of each task must match.
        cutting: how the input is divided.
        max_rows: maximum number of usable rows from a part; None for all.
    """

    folder: str
    encoding: EncodingOptions
    digest: str
    cutting: Cutting
    max_rows: int | None = None


# The encoder of this process, and its options.
_encoder: tuple[EncodingOptions, RowEncoder] | None = None


def remember_encoder(options: EncodingOptions | None, encoder: RowEncoder | None = None) -> None:
    """Keep an encoder for tasks of this process with the same options; None drops the current one."""
    global _encoder  # noqa: PLW0603
    _encoder = None if options is None or encoder is None else (options, encoder)


def _encoder_of(options: EncodingOptions) -> RowEncoder:
    """Return the encoder of this process; make a new one if the options differ."""
    kept = _encoder  # another thread may be running another job
    if kept is None or kept[0] != options:
        remember_encoder(None)  # frees its memory first
        kept = options, RowEncoder(options)
        remember_encoder(*kept)
    return kept[1]


def encode_piece(
    options: EncodingOptions, piece: Piece, path: str, file: int = 0, max_rows: int | None = None
) -> EncodedPiece:
    """Encode the rows of one piece with this process's encoder, without the files of its images and audio.

    ``path`` is the location of the piece's file. See ``RowEncoder.encode`` for the rest.
    """
    encoder = _encoder_of(options)
    return encoder.encode(piece, file, max_rows, encoder.media_of(path))


def encode_to_part(options: EncodingOptions, piece: Piece, path: str, part_path: str) -> MadePart:
    """Encode the rows of one piece with this process's encoder, and write them to a part, with images and audio.

    Args:
        options: how rows become sequences.
        piece: the rows.
        path: location of the piece's file.
        part_path: path of the part; its folder must exist.

    Raises:
        DifferentIdsError: see ``RowEncoder.encode``.
        OSError: an error of the file system.
    """
    encoder, info = _encoder_of(options), PartInfo("", [])
    with _collected_files(options, os.path.dirname(part_path)) as blobs:
        encoded = encoder.encode(piece, media=encoder.media_of(path, blobs))
        info.add(piece, encoded)
        return write_part(part_path, info, [encoded], blobs)


@contextlib.contextmanager
def _collected_files(options: EncodingOptions, folder: str) -> Iterator[SpilledBlobs | None]:
    """Provide the storage for images and audio until their part is written; None if no processor expands any."""
    if options.processor is None:
        yield None
    else:
        with contextlib.closing(SpilledBlobs(folder)) as blobs:
            yield blobs


def make_parts(settings: PartSettings, stretch: Stretch) -> list[MadePart]:
    """The task that tokenises a stretch: make its part, or the parts of a whole file, or reuse existing ones."""
    pieces = read_pieces(stretch, settings.cutting)
    made: list[MadePart] = []
    is_whole_file = stretch.nbytes is None and not stretch.dealt
    while group := list(islice(pieces, settings.cutting.pieces)):
        if made and not is_whole_file:
            raise FormatError(f"{stretch.name}: changed while it was being read; run the command again")
        with _counted_from(stretch):
            made.append(_make_part(settings, stretch, group))
        if not made[-1].path or made[-1].info.max_rows is not None:
            break
    return made


def make_last_part(settings: PartSettings, stretch: Stretch, number: int) -> MadePart:
    """Make part ``number`` of a stretch again: it has more rows than the job still takes, ``settings.max_rows``."""
    first, pieces = number * settings.cutting.pieces, read_pieces(stretch, settings.cutting)
    group = list(islice(pieces, first, first + settings.cutting.pieces))
    with _counted_from(stretch):
        return _make_part(settings, stretch, group)


@contextlib.contextmanager
def _counted_from(stretch: Stretch) -> Iterator[None]:
    """Add the start of the row numbering to errors, if that is not the beginning of the file."""
    try:
        yield
    except DifferentIdsError as error:
        if stretch.nbytes is None or not stretch.part:
            raise
        raise FormatError(f"{error} (row numbers count from byte {stretch.offset} of the file)") from None


def part_name(info: PartInfo, weight: float) -> str:
    """Return the name of a part: a digest of its options, its pieces, the weight of its file, and ``max_rows``."""
    parts = [_VERSIONED_MAGIC.hex(), info.options, repr(weight), repr(info.max_rows), *info.pieces]
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode()) + _SUFFIX


def _earlier_part(folder: str, info: PartInfo, weight: float, max_rows: int | None) -> MadePart | None:
    """Return the part of these pieces made by an earlier job or attempt; None if there is no usable one."""
    for rows in dict.fromkeys((None, max_rows)):
        path = os.path.join(folder, part_name(replace(info, max_rows=rows), weight))
        with contextlib.suppress(FileNotFoundError, FormatError):
            part = Part(path, verify=True)
            if (part.info.options, part.info.pieces) == (info.options, info.pieces) and part.info.has_rows_for(
                max_rows
            ):
                return MadePart(path, part.info, np.array(part.lengths), reused=True)
    return None


def _make_part(settings: PartSettings, stretch: Stretch, pieces: list[Piece]) -> MadePart:
    """Return the part of these pieces of a stretch, reused or new."""
    info = PartInfo(settings.digest, [piece.fingerprint() for piece in pieces])
    weights, file, path = settings.encoding.loss_weights, stretch.number, stretch.file.path
    weight = weights[file] if weights else 1.0
    earlier = _earlier_part(settings.folder, info, weight, settings.max_rows)
    if earlier is not None and earlier.info.skipped and settings.encoding.on_bad_row != "skip":
        earlier = None
    if earlier is not None and settings.encoding.processor is None:
        return earlier
    encoder = _encoder_of(settings.encoding)
    if encoder.digest != settings.digest:
        raise FormatError(
            f"{settings.encoding.tokenizer}: the tokenizer on node {platform.node()} differs from the driver's; make"
            " the same tokenizer available at this path on every node of the cluster"
        )
    if earlier is not None:
        content = "".join(encoder.content_of_pieces(pieces, earlier.info.rows, path))
        if content == earlier.info.content:
            return earlier
    with _without_collection(), _collected_files(settings.encoding, settings.folder) as blobs:
        encoded = _encode_pieces(settings, info, pieces, file, path, blobs)
        if info.bad_rows and settings.encoding.on_bad_row == "error":
            return MadePart("", info, np.empty(0, np.uint32))
        return write_part(os.path.join(settings.folder, part_name(info, weight)), info, encoded, blobs)


def _encode_pieces(
    settings: PartSettings, info: PartInfo, pieces: Sequence[Piece], file: int, path: str, blobs: SpilledBlobs | None
) -> list[EncodedPiece]:
    """Encode the pieces of a part, up to a row that ends it. ``info`` counts rows, ``blobs`` collects their files."""
    encoder, encoded = _encoder_of(settings.encoding), list[EncodedPiece]()
    for piece in pieces:
        missing = None if settings.max_rows is None else settings.max_rows - info.usable
        media = encoder.media_of(path, blobs)
        encoded.append(encoder.encode(piece, file, missing, media))
        info.add(piece, encoded[-1])
        if blobs is not None:
            info.media.append(media.digest)
        if info.usable == settings.max_rows:
            info.max_rows = settings.max_rows
        is_refused = info.bad_rows and settings.encoding.on_bad_row == "error"
        if is_refused or info.max_rows is not None:
            break
    return encoded


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Disable Python's garbage collector: it would traverse thousands of objects per batch, and rows have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
