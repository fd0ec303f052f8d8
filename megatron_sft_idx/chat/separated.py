"""Rows of comma- or tab-separated values according to RFC 4180: a header, then one record per row.

All values are text. An empty field is null. A quoted field may contain delimiters, line ends, and quotes that
are written twice. Python's csv module parses the records; a record that it would split differently is rejected.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.types import InputRow, Piece
from megatron_sft_idx.errors import FormatError, SequenceError

# Longer than any field; the csv module's own limit is 128 KiB.
csv.field_size_limit((1 << 31) - 1)


class ColumnNames(NamedTuple):
    """Information from the first record of a file.

    Attributes:
        names: names of the columns.
        delimiter: delimiter between fields.
    """

    names: tuple[str, ...]
    delimiter: str


@dataclass(frozen=True, slots=True, eq=False)
class SeparatedPiece(Piece):
    """Consecutive records of one file.

    Attributes:
        ends: end of each record in the payload, int64 [records]; one separator byte follows each.
        header: header of the file. The first record of the file is the header itself, which is not a row.
    """

    ends: NDArray[np.int64]
    header: ColumnNames

    def rows(self) -> Iterator[InputRow]:
        """See ``Piece.rows``."""
        start = 0
        for position, end in enumerate(self.ends.tolist(), self.first):
            raw, start = self.payload[start:end], end + 1
            if position == 1 or raw in (b"", b"\r"):
                continue
            try:
                fields = _fields_of(raw, self.header.delimiter)
                if len(fields) != len(self.header.names):
                    raise ValueError(f"{len(fields)} fields, but the header has {len(self.header.names)}")
            except ValueError as error:
                yield InputRow(position, SequenceError(self.path, position, str(error)))
            else:
                pairs = zip(self.header.names, fields, strict=True)
                yield InputRow(position, {name: value or None for name, value in pairs})

    def fingerprint(self) -> str:
        """See ``Piece.fingerprint``."""
        return xxhash.xxh3_128_hexdigest(repr(self.header).encode("utf-8", "surrogatepass") + self.payload)


def read_column_names(raw: bytes, delimiter: str, path: str) -> ColumnNames:
    """Parse the header of a file.

    Args:
        raw: its first record.
        delimiter: delimiter between fields.
        path: path of the file, for errors.

    Raises:
        FormatError: the record has no names, a duplicate name, or another delimiter.
    """
    try:
        names = tuple(_fields_of(raw, delimiter))
    except ValueError as error:
        raise FormatError(f"{path}: header: {error}") from None
    if not names:
        raise FormatError(f"{path}: the first line is empty, expected column names; remove the empty line")
    if not all(name.strip() for name in names[1:]):  # pandas writes the index first, without a name
        raise FormatError(f"{path}: the header has a column without a name; name it")
    if repeated := {name for name in names if names.count(name) > 1}:
        raise FormatError(f"{path}: the header has {min(repeated)!r:.60} twice; rename one")
    others = [other for other in (",", ";", "\t", "|") if other != delimiter and other in names[0]]
    if len(names) == 1 and others:
        raise FormatError(
            f"{path}: the header is one column, {names[0]!r:.60}; expected {'tabs' if delimiter != ',' else 'commas'}"
            f" between columns, found {others[0]!r}"
        )
    return ColumnNames(names, delimiter)


def _fields_of(raw: bytes, delimiter: str) -> list[str]:
    """Return the fields of one record. ValueError: it is invalid; the text is the reason."""
    try:
        text = raw.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8: {error.reason}; convert the file to UTF-8") from None
    try:
        records = list(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"not a valid record of separated values: {error}; quote fields that contain quotes or line breaks"
        ) from None
    if len(records) != 1:
        raise ValueError("a quote in a field that is not quoted; quote the field, and write the quote twice")
    return records[0]
