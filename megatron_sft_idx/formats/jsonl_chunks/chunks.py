"""A folder's chunks in the order of their numbers, and where the lines of a chunk begin and end."""

from __future__ import annotations

import os
import re
from itertools import pairwise

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import open_regular

__all__ = [
    "COMPLETED",
    "chunk_name",
    "chunk_numbers",
    "chunk_paths",
    "ends_whole",
    "is_chunk_name",
    "line_bounds",
    "read_line",
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
