"""Packs as JSON lines in numbered chunks, in the form planned for Megatron-SWIFT's sharded loading.

A folder of ``chunk_00000.jsonl``, ``chunk_00001.jsonl``, ...; one pack per line:

================  ===================================================================================
``input_ids``     ids of all sequences end to end
``labels``        the id at the same place where it is trained on, else -100: token-aligned, not shifted
``position_ids``  0, 1, 2, ... from the start of every sequence
``lengths``       tokens in each sequence
``pack_length``   their sum
``num_samples``   how many sequences
================  ===================================================================================

Other fields are ignored. The format cannot store loss weights, capacity or padding id.

Columns of a shard are in a field ``columns``, an object. By name, it has one value for each token, each sequence, or
the pack, or a list of values if the column is wider than 1. Floats that JSON cannot represent are the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. A file ``columns.json`` next to the chunks has the specs of the columns.

The reader needs a folder with complete chunks. ``live.chunks`` trains on a growing folder, with the same ``ChunkFile``,
``parse_line`` and ``run_of_lines``.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import (
    PackCounts,
    PackedReader,
    PackedSpec,
    PackedWriter,
    column_specs_of,
    encode_json,
    file_identity,
    read_json_object,
    recogniser,
)
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.packs.run import RUN_TOKENS, Column, PackRun, checked_run, first_true, run_bounds
from megatron_sft_idx.storage import OutputFile, open_regular
from megatron_sft_idx.storage.publish import Kind

# The suffix of the marker file for a consumed chunk; the producer may delete both.
COMPLETED = ".completed"
_NAME = re.compile(r"chunk_([0-9]+)\.jsonl")
_BLOCK_NBYTES = 1 << 20
_MAX_LISTED = 10
# A digit and a comma for an id, a label and a position.
_LEAST_TOKEN_NBYTES = 6
_BLANK = b" \t\r\n"  # JSON's white space
# A longer line counts as a pack without being parsed, because white space of this length is unlikely.
_MAX_BLANK_NBYTES = 64

FIELDS = ("input_ids", "labels", "position_ids", "lengths", "pack_length", "num_samples")
# The file next to the chunks with the specs of their columns, if they have any.
COLUMNS_FILE = "columns.json"
_NONFINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_NONFINITE_NAMES = tuple(_NONFINITE.values())
# The label of a token that is not trained on: PyTorch's ``ignore_index``.
UNTRAINED = -100


def chunk_name(number: int) -> str:
    """The file name of a chunk: five digits, more from 100000 on."""
    return f"chunk_{number:05d}.jsonl"


def chunk_numbers(folder: str) -> list[int]:
    """Return the numbers of the chunks in a folder, ascending. The order of their names differs from 100000 on.

    Raises:
        FormatError: a name is not the ``chunk_name`` of its number, such as ``chunk_3.jsonl``; both could exist.
    """
    numbers = []
    for name in os.listdir(folder):
        if match := _NAME.fullmatch(name):
            number = int(match[1])
            if name != chunk_name(number):
                raise FormatError(f"{os.path.join(folder, name)}: expected the name {chunk_name(number)}; rename it")
            numbers.append(number)
    return sorted(numbers)


def _chunk_paths(folder: str) -> tuple[list[str], list[str]]:
    """Return the paths of a folder's chunks in order, and notes for ``PackedReader.notes``.

    A producer deletes consumed chunks, beginning with the first. If they are missing, there is a note.

    Raises:
        FormatError: there are no chunks, a gap between chunks, or a bad name (``chunk_numbers``).
    """
    numbers = chunk_numbers(folder)
    if not numbers:
        raise FormatError(f"{folder}: no chunks, expected files named {chunk_name(0)}, {chunk_name(1)}, ...")
    if gaps := [(a + 1, b - 1) for a, b in pairwise(numbers) if b != a + 1]:
        listed = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gaps[:_MAX_LISTED])
        listed += ", ..." if len(gaps) > _MAX_LISTED else ""
        raise FormatError(f"{folder}: chunks {listed} are missing; copy them, or make them again")
    note = f"chunks 0 to {numbers[0] - 1} are missing: their producer has probably deleted them"
    return [os.path.join(folder, chunk_name(number)) for number in numbers], [note] if numbers[0] else []


def line_bounds(path: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return begin and end of every line of a chunk in bytes, int64 [lines] each, without blank lines.

    Raises:
        FormatError: the last line is incomplete.
    """
    ends: list[int] = []
    size, block = 0, bytearray(_BLOCK_NBYTES)
    with open_regular(path) as file:
        while nbytes := file.readinto(block):
            # Lines are long, so searching for one newline after another is several times as fast as comparing every
            # byte.
            position = 0
            while position := block.find(b"\n", position, nbytes) + 1:
                ends.append(size + position)
            size += nbytes
        stops = np.array(ends, np.int64)
        starts = np.append(0, stops)
        starts, complete = starts[:-1], int(starts[-1])
        filled = np.ones(len(starts), np.bool_)
        for line in np.flatnonzero(stops - starts <= _MAX_BLANK_NBYTES):
            raw = os.pread(file.fileno(), int(stops[line] - starts[line]), int(starts[line]))
            filled[line] = bool(raw.strip(_BLANK))
        file.seek(complete)
        last = file.read()
        if not _is_whole_line(last):
            raise FormatError(
                f"{path}:{len(stops) + 1}: the last line is incomplete; either the chunk is still being written, or"
                " its producer died: wait, or write it again"
            )
        if not last.strip(_BLANK):
            return starts[filled], stops[filled]
    return np.append(starts[filled], complete), np.append(stops[filled], size)


def _read_line(fd: int, path: str, start: int, stop: int) -> bytes:
    """Return the bytes ``start`` to ``stop`` of an open chunk. FormatError: it is shorter now."""
    raw = b""
    while len(raw) < stop - start and (block := os.pread(fd, stop - start - len(raw), start + len(raw))):
        raw += block
    if len(raw) != stop - start:
        raise FormatError(f"{path}: the file was truncated after it was opened; open it again")
    return raw


def ends_with_whole_line(path: str) -> bool:
    """Return whether a chunk is empty or ends with a complete line. Reads only its last line."""
    with open_regular(path) as file:
        end, blocks = file.seek(0, os.SEEK_END), [b""]  # the last block first
        while end and b"\n" not in blocks[-1]:
            begin = max(end - _BLOCK_NBYTES, 0)
            blocks.append(os.pread(file.fileno(), end - begin, begin))
            end = begin
    return _is_whole_line(b"".join(reversed(blocks)).rpartition(b"\n")[2])


def _is_whole_line(last: bytes) -> bool:
    """Return whether the text after the last newline of a chunk is blank or a complete line.

    A complete line is valid JSON; an incomplete object is not.
    """
    if not last.strip(_BLANK):
        return True
    try:
        orjson.loads(last)
    except ValueError:
        return False
    return True


class ChunkFile:
    """An open chunk with random access to its lines.

    Opening reads the whole file once to find its lines, and keeps 16 bytes for each.

    Args:
        path: path of the chunk.

    Raises:
        FormatError: its last line is incomplete, or its size changed while it was read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open_regular(path) as file:
            self._fd = os.dup(file.fileno())
        self._nbytes = os.fstat(self._fd).st_size
        self._starts, self._stops = line_bounds(path)
        self._require_unchanged()

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, index: int) -> bytes:
        """Return line ``index``, not counting blank ones.

        Raises:
            FormatError: the size of the chunk has changed since it was opened.
        """
        self._require_unchanged()
        return _read_line(self._fd, self.path, int(self._starts[index]), int(self._stops[index]))

    def line_number(self, index: int) -> int:
        """Return the line number of line ``index`` from 1, including blank lines. Reads all bytes before it."""
        newlines, position, start = 0, 0, int(self._starts[index])
        while position < start:
            block = os.pread(self._fd, min(1 << 20, start - position), position)
            newlines, position = newlines + block.count(b"\n"), position + max(len(block), 1)
        return newlines + 1

    def _require_unchanged(self) -> None:
        if (size := os.fstat(self._fd).st_size) != self._nbytes:
            raise FormatError(
                f"{self.path}: it has {size:,} bytes, but had {self._nbytes:,} when it was considered complete; its"
                " producer was still writing: raise --settle, and resume from the last checkpoint"
            )

    def __del__(self) -> None:
        # If the constructor failed, there is no descriptor to close.
        if (fd := self.__dict__.pop("_fd", None)) is not None:
            os.close(fd)


def parse_line(raw: bytes, columns: Mapping[str, ColumnSpec] | None = None) -> PackRun:
    """Parse the pack in one line, with these columns and a token-aligned mask. Checks only counts and positions.

    ValueError or ArithmeticError: the text says which field is wrong, and how.
    """
    fields = orjson.loads(raw)
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object with {', '.join(FIELDS)}, found {type(fields).__name__}")
    if missing := [name for name in FIELDS if name not in fields]:
        chats = "; to tokenize chats, use megatron-sft-idx preprocess, or --tokenizer for live chunks"
        remedy = chats if "messages" in fields else ""
        raise ValueError(f"{', '.join(missing)} missing; every line needs {', '.join(FIELDS)}{remedy}")
    tokens, labels, positions, lengths = (_integers(fields[name], name) for name in FIELDS[:4])
    counts = {"input_ids": len(tokens), "labels": len(labels), "position_ids": len(positions)}
    _check_counts(fields, counts, lengths)
    starts = np.cumsum(lengths) - lengths
    expected = np.arange(len(tokens)) - np.repeat(starts, lengths)
    if (at := first_true(positions != expected)) is not None:
        raise ValueError(
            f"position_ids[{at}] is {positions[at]}, expected {expected[at]}: position_ids start at 0 in every sequence"
        )
    trained = labels != UNTRAINED
    if (at := first_true(trained & (labels != tokens))) is not None:
        raise ValueError(
            f"labels[{at}] is {labels[at]}, but input_ids[{at}] is {tokens[at]}; a label must be -100 or the id at the"
            " same position, so undo any shift of the labels"
        )
    rows = {"token": len(tokens), "sequence": len(lengths), "pack": 1}
    values = {
        name: _column(fields.get("columns"), name, spec, rows[spec.per]) for name, spec in (columns or {}).items()
    }
    return PackRun.of_pack(tokens, trained, starts, values)


def _column(columns_field: Any, name: str, spec: ColumnSpec, count: int) -> Column:
    """Return one column of a line, with ``count`` rows. ValueError or ArithmeticError: the line has no such values."""
    rows = columns_field.get(name) if isinstance(columns_field, dict) else None
    if spec.per == "pack":
        rows = [rows]
    if spec.width > 1 and isinstance(rows, list):
        if any(not isinstance(row, list) or len(row) != spec.width for row in rows):
            raise ValueError(f"column {name} is not a list of {spec.width} values per {spec.per}")
        rows = list(chain.from_iterable(rows))
    if spec.dtype.kind == "f":
        if not isinstance(rows, list) or not all(
            type(value) in (int, float) or value in _NONFINITE_NAMES for value in rows
        ):
            raise ValueError(f"column {name} is not a list of numbers")
        values: NDArray[Any] = np.array([float(value) for value in rows])
    else:
        values = _integers(rows, f"column {name}")
    if len(values) != count * spec.width:
        raise ValueError(f"column {name} has {len(values)} values, expected {count} x {spec.width}: one per {spec.per}")
    with np.errstate(over="raise"):
        return Column(spec, spec.array(name, values.reshape(spec.shape(count)), count))


def _json_values(values: NDArray[Any]) -> Any:
    """Return values of a column in a form for ``orjson``; reading them gives the same values."""
    if values.dtype.kind != "f":
        return values.tolist() if values.ndim == 0 else np.ascontiguousarray(values)
    if np.isfinite(values).all():
        return float(values) if values.ndim == 0 else np.ascontiguousarray(values, np.float64)
    flat = [value if math.isfinite(value) else _NONFINITE[str(value)] for value in values.reshape(-1).tolist()]
    if values.ndim == 2:
        return [flat[i : i + values.shape[1]] for i in range(0, len(flat), values.shape[1])]
    return flat if values.ndim else flat[0]


def read_column_specs(folder: str, chosen: Sequence[str] | None) -> dict[str, ColumnSpec]:
    """Return the specs of the chosen columns of a folder's chunks (None for all).

    See ``column_specs_of`` for errors.
    """
    if chosen is not None and not chosen:
        return {}
    path = os.path.join(folder, COLUMNS_FILE)
    encoded = read_json_object(path)[0] if os.path.exists(path) else {}
    return column_specs_of(encoded, path, chosen)


def run_of_lines(path: str, first_pack: int, lines: Sequence[PackRun]) -> PackRun:
    """Combine parsed lines into a checked run; the path and the number of the first pack are for errors.

    Raises:
        SequenceError: a pack breaks a rule.
    """
    return checked_run(path, first_pack, PackRun.joined(lines), "token", np.int32)


def _check_counts(fields: dict[str, Any], counts: dict[str, int], lengths: NDArray[np.int64]) -> None:
    """Raise ValueError unless all counts of tokens in a line are equal, and both counts of sequences."""
    tokens, total = counts["input_ids"], int(lengths.sum())
    if not len(lengths) or (lengths < 1).any() or (lengths > tokens).any():
        raise ValueError(f"lengths {lengths[:20].tolist()}, expected one or more sequences of 1 to {tokens} tokens")
    for name, count in counts.items():
        if count != total:
            raise ValueError(f"{name} has {count} entries, but the sum of lengths is {total}")
    if type(fields["pack_length"]) is not int or fields["pack_length"] != total:
        raise ValueError(f"pack_length is {fields['pack_length']!r}, but the sum of lengths is {total}")
    if type(fields["num_samples"]) is not int or fields["num_samples"] != len(lengths):
        raise ValueError(f"num_samples is {fields['num_samples']!r}, but there are {len(lengths)} lengths")


def _integers(value: Any, name: str) -> NDArray[np.int64]:
    # Types are checked first, because numpy would accept true as 1.
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{name} is not a list of whole numbers")
    try:
        return np.fromiter(value, np.int64, len(value))  # several times as fast as numpy.array of a list
    except OverflowError:
        raise ValueError(f"{name} has numbers that are too large for an id or a length") from None


# Maximum number of bytes of the first line to read for format detection.
_MAX_HEAD_NBYTES = 32 << 20


@recogniser
def recognise(path: str) -> bool:
    """Return whether a folder or file has pre-packed chunks, from the fields of its first line."""
    if not os.path.isdir(path):
        return _begins_packed(path)
    chunks = [os.path.join(path, chunk_name(number)) for number in chunk_numbers(path)]
    # Chunks may be empty; in a dataset without packs, all are.
    first = next((chunk for chunk in chunks if os.path.getsize(chunk)), None)
    return bool(chunks) if first is None else _begins_packed(first)


def _begins_packed(path: str) -> bool:
    with open_regular(path) as file:
        if file.read(1) != b"{":
            return False
        line = b"{" + file.readline(_MAX_HEAD_NBYTES)
    if len(line) > _MAX_HEAD_NBYTES:  # wide columns, which come after the other fields
        return all(f'"{name}":'.encode() in line for name in FIELDS)
    fields = orjson.loads(line)
    return all(name in fields for name in FIELDS)


@recogniser
def _is_chunk(path: str) -> bool:
    """Return whether a file belongs to a folder of chunks: a chunk by name and first line, a marker, or the specs."""
    name = os.path.basename(path)
    if name == COLUMNS_FILE:
        return bool(read_column_specs(os.path.dirname(path), None))
    match = _NAME.fullmatch(name.removesuffix(COMPLETED))
    if match is None or match[0] != chunk_name(int(match[1])):
        return False
    return not os.path.getsize(path) or (name == match[0] and _begins_packed(path))


class Reader(PackedReader):
    """One folder of chunks, or a single chunk. Each process opens its own reader; threads can share one.

    Opening reads all bytes once to find the lines, and keeps 16 bytes for each.
    """

    label_only = (
        "labels define the trained tokens and are always shifted once on reading; leave mask alignment {!r} out"
    )

    def _open(self, *, columns: Sequence[str] | None = ()) -> None:
        self.alignment = "token"
        self._paths = [self.path]
        if os.path.isdir(self.path):
            self._paths, self.notes = _chunk_paths(self.path)
        try:
            bounds = [line_bounds(chunk) for chunk in self._paths]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FormatError(f"{error.filename}: not found; expected a folder of chunks, or one chunk") from None
        self._starts = np.concatenate([starts for starts, _ in bounds])
        self._stops = np.concatenate([stops for _, stops in bounds])
        self._first_packs = np.cumsum([0, *(len(starts) for starts, _ in bounds)]).tolist()
        self.num_packs = len(self._starts)
        self.columns = read_column_specs(self.path if os.path.isdir(self.path) else os.path.dirname(self.path), columns)
        names = [os.path.basename(chunk) for chunk in self._paths]
        self.identity = xxhash.xxh3_128_hexdigest(f"{names} {file_identity(*self._paths)}".encode())

    @cached_property
    def spec(self) -> PackedSpec:
        """The spec. The first access needs one pass over all packs. Its capacity is the longest pack."""
        counts = PackCounts()
        for run in self.runs():
            counts.add(run)
        return self._make_spec(counts.num_sequences, counts.num_tokens, counts.longest_pack)

    def _run(self, first: int, last: int) -> PackRun:
        return run_of_lines(self.path, first, list(self._lines(first, last)))

    def _runs(self) -> Iterator[PackRun]:
        # The lengths of packs are unknown before parsing, but a token takes at least this many bytes.
        most_tokens = np.append(0, np.cumsum(self._stops - self._starts)) // _LEAST_TOKEN_NBYTES
        return (self._run(first, last) for first, last in run_bounds(most_tokens, RUN_TOKENS))

    def _lines(self, first: int, last: int) -> Iterator[PackRun]:
        """Yield the lines ``first`` up to ``last``; each chunk is opened once. SequenceError: a line is not a pack."""
        while first < last:
            chunk = bisect_right(self._first_packs, first) - 1
            with open_regular(self._paths[chunk]) as file:
                for index in range(first, min(last, self._first_packs[chunk + 1])):
                    start, stop = int(self._starts[index]), int(self._stops[index])
                    raw = _read_line(file.fileno(), self._paths[chunk], start, stop)
                    try:
                        parsed = parse_line(raw, self.columns)
                    except (ArithmeticError, ValueError, RecursionError) as error:
                        number = index - self._first_packs[chunk]
                        line = f"{os.path.basename(self._paths[chunk])}, its pack {number}"
                        raise SequenceError(self.path, index, f"{line}: {error}") from None
                    yield parsed
            first = self._first_packs[chunk + 1]


class Writer(PackedWriter):
    """Writes a folder of chunks, which appears when all are written. Without packs it has one empty chunk.

    Args:
        samples_per_chunk: number of packs in a chunk; the last one may have fewer. A consumer must be given this
            number.
    """

    format = "jsonl-chunks"
    reader, kind = Reader, Kind("a folder of pre-packed JSONL chunks", _is_chunk)
    is_folder = True
    binary_masks = True
    stores_columns = True

    def _begin(self, spec: PackedSpec, *, samples_per_chunk: int = 100) -> None:
        self._samples_per_chunk = samples_per_chunk
        if samples_per_chunk < 1:
            raise FormatError(f"{self._path}: samples_per_chunk {samples_per_chunk}, expected at least 1 pack")
        self._num_chunks = self._num_lines = 0
        nbytes = _LEAST_TOKEN_NBYTES * spec.num_tokens + spec.column_nbytes()
        self._make_output(nbytes, -(-spec.num_packs // samples_per_chunk))
        if spec.columns:
            with contextlib.closing(self._output.open(COLUMNS_FILE)) as file:
                columns = {name: column.encode() for name, column in spec.columns.items()}
                file.write(encode_json(self._path, {"columns": columns}))
        self._chunk = self._next_chunk()

    def _next_chunk(self) -> OutputFile:
        name = chunk_name(self._num_chunks)
        self._num_chunks, self._num_lines = self._num_chunks + 1, 0
        return self._output.open(name)

    def _append(self, run: PackRun) -> None:
        for index in range(len(run)):
            pack = run.pack(index)
            tokens, bounds = pack["input_ids"].astype(np.int64), pack["seq_boundaries"]
            lengths = np.diff(bounds)
            # A label mask is 0 at the end of every sequence, so all sequences can be shifted right at once.
            labels = np.full(len(tokens), UNTRAINED, np.int64)
            labels[1:] = np.where(pack["loss_mask"][:-1], tokens[1:], UNTRAINED)
            line = {
                "input_ids": tokens,
                "labels": labels,
                "position_ids": np.arange(len(tokens)) - np.repeat(bounds[:-1], lengths),
                "lengths": lengths,
                "pack_length": len(tokens),
                "num_samples": len(lengths),
            }
            if run.columns:
                line["columns"] = {name: _json_values(pack[name]) for name in run.columns}  # type: ignore[literal-required]
            if self._num_lines == self._samples_per_chunk:
                self._chunk.close()
                self._chunk = self._next_chunk()
            self._chunk.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            self._num_lines += 1

    def _finish(self) -> None:
        self._chunk.close()
