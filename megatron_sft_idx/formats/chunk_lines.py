"""A folder's pre-packed chunks in the order of their numbers, their lines, and the pack that a line holds."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.formats.checks import checked_run
from megatron_sft_idx.storage import open_regular

__all__ = [
    "COMPLETED",
    "FIELDS",
    "UNTRAINED",
    "ChunkFile",
    "Line",
    "chunk_name",
    "chunk_numbers",
    "chunk_paths",
    "ends_whole",
    "is_chunk_name",
    "line_bounds",
    "parse",
    "read_line",
    "run_of",
]

# What a consumer leaves beside a chunk that it is done with, the chunk's name and this; the producer may delete both.
COMPLETED = ".completed"
_NAME = re.compile(r"chunk_([0-9]+)\.jsonl")
_CONSUMED = f".jsonl{COMPLETED}"
_BLOCK_NBYTES = 1 << 20
_LISTED = 10
_BLANK = b" \t\r\n"  # JSON's white space
# Lines up to this are looked at, as they may be blank: the names of a pack's fields alone are longer.
_MOST_BLANK_NBYTES = 64

FIELDS = ("input_ids", "labels", "position_ids", "lengths", "pack_length", "num_samples")
# What labels hold where nothing is trained: PyTorch's index to ignore.
UNTRAINED = -100


def chunk_name(number: int) -> str:
    """The file name of a chunk: five digits, more from 100000 on."""
    return f"chunk_{number:05d}.jsonl"


def is_chunk_name(name: str) -> bool:
    """Whether it is the name that a chunk's number gives."""
    match = _NAME.fullmatch(name)
    return match is not None and name == chunk_name(int(match[1]))


def chunk_numbers(folder: str) -> list[int]:
    """Numbers of the chunks in a folder, ascending: past 99999 their names no longer sort that way.

    Raises:
        FormatError: a name that its number does not give, such as ``chunk_3.jsonl``: it could be there twice.
    """
    numbers = []
    for name in os.listdir(folder):
        if match := _NAME.fullmatch(name):
            number = int(match[1])
            if name != chunk_name(number):
                raise FormatError(f"{os.path.join(folder, name)}: expected the name {chunk_name(number)}; rename it")
            numbers.append(number)
    return sorted(numbers)


def chunk_paths(folder: str, *, allow_gaps: bool) -> tuple[list[str], list[str]]:
    """Paths of a folder's chunks in order, and notes on those that are not there any more.

    A producer deletes chunks that were consumed, from the first one on. So what is missing before the first chunk is
    said in a note; a gap after it is an error unless it is allowed.

    Raises:
        FormatError: no chunks, a gap, or a name that is not a chunk's.
    """
    numbers = chunk_numbers(folder)
    if not numbers:
        raise FormatError(f"{folder}: no chunks in it, expected files named {chunk_name(0)} and on")
    notes = []
    if numbers[0]:
        consumed = sum(name.endswith(_CONSUMED) for name in os.listdir(folder))
        notes.append(
            f"chunks 0 to {numbers[0] - 1} are not here: freed by their producer, as it seems ({consumed} of those"
            " here are marked as consumed)"
        )
    gaps = [(a + 1, b - 1) for a, b in pairwise(numbers) if b != a + 1]
    if gaps:
        listed = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gaps[:_LISTED])
        listed += ", ..." if len(gaps) > _LISTED else ""
        if not allow_gaps:
            raise FormatError(
                f"{folder}: chunks {listed} are missing between others; copy them, or pass allow_gaps where their"
                " producer freed them"
            )
        notes.append(f"chunks {listed} are not here; gaps were allowed")
    return [os.path.join(folder, chunk_name(number)) for number in numbers], notes


def line_bounds(path: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First byte of every line, and the byte after its last one; blank lines are left out.

    Raises:
        FormatError: the last line is half a line.
    """
    ends: list[int] = []
    size, block = 0, bytearray(_BLOCK_NBYTES)
    with open_regular(path) as file:
        while nbytes := file.readinto(block):
            # Lines are long: finding one newline after the other is several times as fast as comparing every byte.
            after = 0
            while after := block.find(b"\n", after, nbytes) + 1:
                ends.append(size + after)
            size += nbytes
        stops = np.array(ends, np.int64)
        starts = np.append(0, stops)
        starts, complete = starts[:-1], int(starts[-1])
        filled = np.ones(len(starts), np.bool_)
        for line in np.flatnonzero(stops - starts <= _MOST_BLANK_NBYTES):
            raw = os.pread(file.fileno(), int(stops[line] - starts[line]), int(starts[line]))
            filled[line] = bool(raw.strip(_BLANK))
        file.seek(complete)
        last = file.read()
        _require_whole(last, path, len(stops) + 1)
        if not last.strip(_BLANK):
            return starts[filled], stops[filled]
    return np.append(starts[filled], complete), np.append(stops[filled], size)


def read_line(fd: int, path: str, start: int, stop: int) -> bytes:
    """The bytes of a line of an open chunk.

    Raises:
        FormatError: the chunk is shorter than when its lines were found.
    """
    raw = b""
    while len(raw) < stop - start and (more := os.pread(fd, stop - start - len(raw), start + len(raw))):
        raw += more
    if len(raw) != stop - start:
        raise FormatError(f"{path}: it was cut short since it was opened; open it again")
    return raw


def ends_whole(path: str) -> bool:
    """Whether a chunk ends with a whole line, or is empty; reads its last line alone."""
    with open_regular(path) as file:
        end, last = file.seek(0, os.SEEK_END), b""
        while end and b"\n" not in last:
            begin = max(end - _BLOCK_NBYTES, 0)
            last, end = os.pread(file.fileno(), end - begin, begin) + last, begin
    return _is_whole(last.rpartition(b"\n")[2])


def _is_whole(last: bytes) -> bool:
    """Whether what follows the last newline is whole: no beginning of an object is an object."""
    if not last.strip(_BLANK):
        return True
    try:
        orjson.loads(last)
    except ValueError:
        return False
    return True


def _require_whole(last: bytes, path: str, number: int) -> None:
    if not _is_whole(last):
        raise FormatError(
            f"{path}:{number}: the last line ends in the middle; the chunk is still being written, or was torn when"
            " its producer died: wait for it, or write it again"
        )


class ChunkFile:
    """An open chunk. Opening reads it once to find its lines; 16 bytes a line are kept of them.

    Args:
        path: the chunk.

    Raises:
        FormatError: its last line is half a line, or it changed while it was read.
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
        """Line ``index``, blank ones not counted.

        Raises:
            FormatError: the chunk is not as long as when it was opened.
        """
        self._require_unchanged()
        return read_line(self._fd, self.path, int(self._starts[index]), int(self._stops[index]))

    def line_number(self, index: int) -> int:
        """What an editor calls line ``index``: from 1, blank ones counted. Reads all that is before it."""
        newlines, at, start = 0, 0, int(self._starts[index])
        while at < start:
            block = os.pread(self._fd, min(1 << 20, start - at), at)
            newlines, at = newlines + block.count(b"\n"), at + max(len(block), 1)
        return newlines + 1

    def _require_unchanged(self) -> None:
        if (now := os.fstat(self._fd).st_size) != self._nbytes:
            raise FormatError(
                f"{self.path}: it has {now:,} bytes and had {self._nbytes:,} when it was taken as whole; its producer"
                " was still writing it: give it more time to settle (--settle), and go on from the last checkpoint"
            )

    def __del__(self) -> None:
        # A constructor that failed has no descriptor to close.
        if (fd := self.__dict__.pop("_fd", None)) is not None:
            os.close(fd)


class Line(NamedTuple):
    """One pack.

    Attributes:
        tokens: ids, integers [length].
        trained: token-aligned mask, bool [length].
        lengths: tokens in each sequence, int64 [sequences].
    """

    tokens: NDArray[Any]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each sequence begins."""
        return np.cumsum(self.lengths) - self.lengths


def parse(raw: bytes) -> Line:
    """The pack in one line. ValueError says which field is wrong, and how."""
    row = orjson.loads(raw)
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}, expected an object with {', '.join(FIELDS)}")
    if missing := [name for name in FIELDS if name not in row]:
        chats = "; chats that are not tokenised yet go through preprocess, live ones need --tokenizer-model"
        remedy = chats if "messages" in row else ""
        raise ValueError(f"no {', '.join(missing)}; every line has {', '.join(FIELDS)}{remedy}")
    tokens, labels, positions, lengths = (_integers(row[name], name) for name in FIELDS[:4])
    _check_counts(row, len(tokens), len(labels), len(positions), lengths)
    expected = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if (wrong := positions != expected).any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"position_ids[{at}] is {positions[at]}, expected {expected[at]}: they start again at 0 with every"
            " sequence of lengths"
        )
    trained = labels != UNTRAINED
    if (wrong := trained & (labels != tokens)).any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"labels[{at}] is {labels[at]} where input_ids has {tokens[at]}; a label is -100 or the id at its own"
            " place, labels that are shifted already have to be shifted back"
        )
    return Line(tokens, trained, lengths)


def run_of(path: str, first_pack: int, lines: Sequence[Line]) -> PackRun:
    """The packs of one or more lines as a checked run; path and number of the first pack are for errors.

    Raises:
        SequenceError: a rule is broken, with the number of the pack.
    """
    return checked_run(
        path,
        first_pack,
        np.concatenate([line.tokens for line in lines]),
        np.concatenate([line.trained for line in lines]),
        np.concatenate([line.starts for line in lines]),
        [len(line.tokens) for line in lines],
        [len(line.lengths) for line in lines],
        mask_alignment="token",
        token_dtype=np.int32,
    )


def _check_counts(row: dict[str, Any], tokens: int, labels: int, positions: int, lengths: NDArray[np.int64]) -> None:
    """ValueError unless everything that can be counted is the same."""
    if not len(lengths) or (lengths < 1).any() or (lengths > tokens).any():
        raise ValueError(f"lengths {lengths[:20].tolist()}, expected one or more sequences of 1 to {tokens} tokens")
    total = int(lengths.sum())
    counts = {"input_ids": tokens, "labels": labels, "position_ids": positions, "pack_length": row["pack_length"]}
    for name, count in counts.items():
        if type(count) is not int or count != total:
            what = "is" if name == "pack_length" else "has as many entries:"
            raise ValueError(f"{name} {what} {count!r}, the sum of lengths is {total}")
    if type(row["num_samples"]) is not int or row["num_samples"] != len(lengths):
        raise ValueError(f"num_samples is {row['num_samples']!r}, there are {len(lengths)} lengths")


def _integers(value: Any, name: str) -> NDArray[np.int64]:
    # Types first: numpy takes true for 1 among numbers.
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{name} is no list of whole numbers")
    try:
        return np.fromiter(value, np.int64, len(value))  # several times faster than numpy.array on a list
    except OverflowError:
        raise ValueError(f"{name} holds numbers that are far outside any id or length") from None
