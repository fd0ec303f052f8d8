"""Cuts a stream of bytes into runs of whole rows: JSON lines, or the elements of one JSON array.

Where the cuts fall depends on the bytes and on ``piece_nbytes`` alone, not on how the bytes arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx._native import scan_json_array
from megatron_sft_idx.errors import FormatError

__all__ = ["MAX_ROW_NBYTES", "Run", "cut_array", "cut_lines"]

# No chat is this long; a file without line ends must not fill the memory before it is found out.
MAX_ROW_NBYTES = 1 << 30

_JSON_SPACE = b" \t\r\n"

Blocks = Iterator[tuple[bytes, int]]
# A block, where rows end in it (at these separator bytes), and the bytes of the file read so far.
_Marked = Iterator[tuple[bytes, NDArray[np.int64], int]]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Rows end to end with one separator byte between them.

    Attributes:
        payload: the rows' bytes.
        ends: where each row ends in ``payload``, int64 [rows]; the next one starts a byte later.
        position: bytes of the file read when the run was cut.
    """

    payload: bytes
    ends: NDArray[np.int64]
    position: int


def cut_lines(blocks: Blocks, *, path: str, piece_nbytes: int, max_row_nbytes: int) -> Iterator[Run]:
    """Cuts at newlines; blank lines are rows too. The last line may lack its newline."""
    marked = ((block, np.flatnonzero(np.frombuffer(block, np.uint8) == 10), at) for block, at in blocks)
    return _cut(marked, path=path, piece_nbytes=piece_nbytes, max_row_nbytes=max_row_nbytes)


def cut_array(blocks: Blocks, *, path: str, piece_nbytes: int, max_row_nbytes: int) -> Iterator[Run]:
    """Cuts between the elements of the one JSON array that the stream holds.

    Only brackets and strings are followed: what stands between two commas may be anything, blank included.

    Raises:
        FormatError: no array, or it is never closed, or something follows it.
    """
    marked = _mark_elements(blocks, path)
    runs = _cut(marked, path=path, piece_nbytes=piece_nbytes, max_row_nbytes=max_row_nbytes)
    first = next(runs)
    # ``[]`` looks like one blank element. A blank one before others is a comma too many.
    if len(first.ends) == 1 and not first.payload.strip(_JSON_SPACE):
        if (second := next(runs, None)) is None:
            return
        yield first
        first = second
    yield first
    yield from runs


def _mark_elements(blocks: Blocks, path: str) -> _Marked:
    depth, in_string, escaped = 0, False, False
    offset = 0
    for whole, at in blocks:
        block = whole
        if depth == 0:
            block = whole.lstrip(_JSON_SPACE)
            if block and not block.startswith(b"["):
                raise FormatError(f"{path}: expected a JSON array, it starts with {block[:20]!r}")
            depth, block = int(bool(block)), block[1:]
        if depth:
            ends, depth, in_string, escaped = scan_json_array(np.frombuffer(block, np.uint8), depth, in_string, escaped)
            if depth == 0:
                close = int(ends[-1])
                if block[close : close + 1] != b"]":
                    raise FormatError(f"{path}: the JSON array ends with '}}', expected ']'; a bracket is missing")
                position = _require_blank(block[close + 1 :], blocks, path, at)
                yield block[: close + 1], ends, position
                return
            yield block, ends, at
        offset += len(whole)
    raise FormatError(
        f"{path}: the JSON array is not closed after {offset} bytes; the file was cut short, or a quote or "
        "bracket is missing"
    )


def _require_blank(rest: bytes, blocks: Blocks, path: str, position: int) -> int:
    while not (found := rest.strip(_JSON_SPACE)):
        following = next(blocks, None)
        if following is None:
            return position
        rest, position = following
    raise FormatError(
        f"{path}: something follows the end of the JSON array: {found[:20]!r}; keep one array a file, "
        "or write one object a line (.jsonl)"
    )


def _cut(marked: _Marked, *, path: str, piece_nbytes: int, max_row_nbytes: int) -> Iterator[Run]:
    buffer = bytearray()
    start = 0  # of the buffer, in the stream
    ends = np.empty(0, np.int64)  # of the rows in the buffer, in the stream
    num_cut = 0
    position = 0

    def cut_one() -> Run:
        """As many rows as fit a piece, or one that does not fit."""
        nonlocal start, ends, num_cut
        take = max(1, int(np.searchsorted(ends, start + piece_nbytes, side="right")))
        chosen, ends = ends[:take] - start, ends[take:]
        cut = int(chosen[-1])
        if cut > max(piece_nbytes, max_row_nbytes):
            raise _too_long(path, num_cut, max_row_nbytes)
        with memoryview(buffer) as view:
            payload = bytes(view[:cut])
        del buffer[: cut + 1]
        start += cut + 1
        num_cut += take
        return Run(payload, chosen, position)

    for block, marks, at in marked:
        position = at
        ends = np.concatenate([ends, marks + (start + len(buffer))])
        buffer += block
        while len(buffer) > piece_nbytes and ends.size:
            yield cut_one()
        if len(buffer) > max_row_nbytes and not ends.size:
            raise _too_long(path, num_cut, max_row_nbytes)
    end = start + len(buffer)
    if buffer and (not ends.size or ends[-1] != end - 1):
        ends = np.append(ends, end)
    while ends.size:
        yield cut_one()


def _too_long(path: str, num_before: int, limit: int) -> FormatError:
    return FormatError(
        f"{path}: row {num_before + 1} is longer than {limit} bytes; expected one JSON object a line, "
        "or one array of objects"
    )
