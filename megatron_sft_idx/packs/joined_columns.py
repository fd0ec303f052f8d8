"""The columns of shards that are merged: whether they go together, and how their numbers are told apart.

Rows of ``source`` name a file by its number in a table, rows of ``pair`` name a pair by its number. Both count within
one shard, so the merged shard has other numbers. All other columns are copied as they are.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import PAIR, ColumnHeader, ColumnSpec, is_source
from megatron_sft_idx.layout.files import listed_columns
from megatron_sft_idx.packs.copying import Renumber, SourceColumn, SourceShard
from megatron_sft_idx.packs.provenance import SplitOutput
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.opening import column_names

_FILES = "files"
_MAX_NUMBER = int(np.iinfo(np.uint32).max)


class CommonEntries:
    """The entries that several JSON objects agree on, and the keys of those that they do not."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] | None = None
        self.differing: set[str] = set()

    def add(self, entries: Mapping[str, Any]) -> None:
        """Take one more object."""
        before = dict(entries) if self.entries is None else self.entries
        self.differing |= {key for key in entries.keys() | before if entries.get(key) != before.get(key)}
        self.entries = {key: value for key, value in before.items() if key not in self.differing}


class _FileTable:
    """One table of files out of those of several shards; an entry a file, as the metadata of ``source`` has them.

    Files of the same name and fingerprint are one file. A file without a fingerprint may be any file of its name, so it
    is the same file only where it stands in a table that is equal as a whole.
    """

    def __init__(self) -> None:
        self.files: list[dict[str, Any]] = []
        self._numbers: dict[tuple[str, str], int] = {}  # by name and fingerprint
        self._tables: dict[bytes, NDArray[np.uint32]] = {}  # by the hash of a table that was added

    def add(self, table: list[dict[str, Any]]) -> NDArray[np.uint32]:
        """Take the table of one more shard; returns the numbers that its files have in this one, uint32 [files]."""
        key = xxhash.xxh3_128_digest(json.dumps(table, sort_keys=True).encode())
        if key not in self._tables:
            numbers = range(len(table)) if table == self.files else map(self._number_of, table)
            self._tables[key] = np.fromiter(numbers, np.uint32, len(table))
        return self._tables[key]

    def _number_of(self, file: dict[str, Any]) -> int:
        number, fingerprint = len(self.files), file.get("fingerprint")
        if fingerprint is not None:
            number = self._numbers.setdefault((file["name"], str(fingerprint)), number)
        if number == len(self.files):
            self.files.append(file)
        return number


@dataclass(slots=True)
class _JoinedColumn:
    """A column that all shards so far have: the first one that has it, its spec there, and what all agree on."""

    first: str
    spec: ColumnSpec
    metadata: CommonEntries = field(default_factory=CommonEntries)
    nbytes: int = 0


class JoinedColumns:
    """Takes the columns of the shards that are merged: the headers of all first (``add``), their rows later.

    The caller must call ``renumber`` for each shard in the order in which they were added, and ``require_same`` behind
    the last.

    Args:
        allow_loss: leave out columns that do not go together, instead of an error.
    """

    def __init__(self, *, allow_loss: bool) -> None:
        self._allow_loss = allow_loss
        self._first: str | None = None
        self._joined: dict[str, _JoinedColumn] = {}
        self._reasons: dict[str, str] = {}  # why a column is left out, by its name
        self._files, self._files_again = _FileTable(), _FileTable()
        self._first_pair = 0  # what is added to the numbers of pairs of this shard
        self._next_pair = 0  # greater than every number given so far
        self._split: SplitOutput | None = None  # of the shard before

    def add(self, prefix: str, header: Header, beside: Collection[str]) -> None:
        """Take the headers of one more shard's columns; ``beside`` are names of the columns that lie at its prefix.

        Raises:
            FormatError: it lacks a column that another has, or has one of another kind.
            ShardNotFoundError, CorruptShardError: of a column that it has.
        """
        first = self._first = self._first or prefix
        paths, columns = ShardPaths.of(prefix), {}
        for name in column_names(paths, header, beside):
            try:
                columns[name] = open_column(paths, name, header, "pread").header
            except SFTIndexError as error:
                if not self._allow_loss:
                    raise
                self._leave_out(name, f"{error}")
        for name in sorted((self._joined.keys() | columns.keys()) - self._reasons.keys()):
            if name not in columns:
                self._leave_out(name, f"{prefix}: no column {name}, which {self._joined[name].first} has")
            elif name not in self._joined and prefix != first:
                self._leave_out(name, f"{first}: no column {name}, which {prefix} has")
            else:
                self._join(prefix, name, columns[name])

    def _join(self, prefix: str, name: str, column: ColumnHeader) -> None:
        """Join a column that all shards before have too."""
        spec, metadata = column.spec, dict(column.spec.metadata)
        joined = self._joined.setdefault(name, _JoinedColumn(prefix, spec))
        first, like = joined.first, joined.spec
        if spec.kind != like.kind:
            self._leave_out(name, f"{prefix}: column {name} is {_described(spec)}, in {first} {_described(like)}")
            return
        if name == "source" and is_source(spec) != is_source(like):
            why = f"{prefix}: column {name} does not name its files as that of {first} does, or the other"
            self._leave_out(name, why)
            return
        if name == "source" and is_source(spec):
            self._files.add(metadata.pop(_FILES))
        joined.metadata.add(metadata)
        joined.nbytes += column.rows * spec.row_nbytes

    def _leave_out(self, name: str, why: str) -> None:
        if not self._allow_loss:
            raise FormatError(
                f"{why}; a merged shard has the columns that all have: attach it there (write_column), or pass"
                " allow_loss (--allow-loss) to leave it out"
            )
        self._reasons.setdefault(name, why)
        self._joined.pop(name, None)

    def specs(self) -> dict[str, ColumnSpec]:
        """The columns of the merged shard. FormatError where a table of all files does not fit a header."""
        specs = {}
        for name, joined in self._joined.items():
            metadata = dict(joined.metadata.entries or {})
            if name == "source" and is_source(joined.spec):
                metadata[_FILES] = self._files.files
            specs[name] = ColumnSpec(*joined.spec.kind, metadata)
        return specs

    def nbytes(self) -> int:
        """Bytes of all rows of the merged shard's columns."""
        return sum(joined.nbytes for joined in self._joined.values())

    def renumber(self, source: SourceShard) -> Renumber:
        """What becomes of the rows of one shard's ``source`` and ``pair``."""
        changes: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {}
        column = source.columns.get("source")
        if column is not None and is_source(column.spec):
            numbers = self._files_again.add(column.spec.metadata[_FILES])
            changes["source"] = functools.partial(_renumber_files, column, numbers)
        column = source.columns.get("pair")
        if column is not None and column.spec.kind == PAIR.kind:
            header = source.header
            split = SplitOutput.of(header) if "pair" in listed_columns(header.metadata) else None
            # An output of a split keeps its numbers behind the output before it: both are those of the shard they were.
            if split is None or not split.follows(self._split):
                self._first_pair = self._next_pair
            self._split = split
            changes["pair"] = functools.partial(self._renumber_pairs, column)
        return changes

    def _renumber_pairs(self, column: SourceColumn, rows: NDArray[Any]) -> NDArray[Any]:
        """Numbers of pairs that begin above those of the shards before."""
        if not len(rows):
            return rows
        largest = int(rows[:, 0].max()) + self._first_pair
        if largest > _MAX_NUMBER:
            raise FormatError(f"{column.rows.path}: pair {largest:,} of all shards, there is room for {_MAX_NUMBER:,}")
        self._next_pair = max(self._next_pair, largest + 1)
        return rows + np.array([self._first_pair, 0], np.uint32)

    def require_same(self) -> None:
        """FormatError where the tables of files were other ones when the rows were read."""
        if "source" in self._joined and self._files_again.files != self._files.files:
            raise FormatError(f"{self._first}: a column source was replaced while the shards were merged; start again")

    def notes(self) -> list[str]:
        """What was left out: a sentence each."""
        notes = [f"column {name} left out, as was allowed: {why}" for name, why in sorted(self._reasons.items())]
        for name, joined in sorted(self._joined.items()):
            if keys := ", ".join(sorted(joined.metadata.differing)):
                notes.append(f"column {name}: not the same in all shards, so left out of its metadata: {keys}")
        return notes


def _described(spec: ColumnSpec) -> str:
    aligned = f", aligned with {spec.alignment}s" if spec.per == "token" else ""
    return f"{spec.dtype} x {spec.width} a {spec.per}{aligned}"


def _renumber_files(column: SourceColumn, numbers: NDArray[np.uint32], rows: NDArray[Any]) -> NDArray[Any]:
    if len(rows) and (largest := int(rows[:, 0].max())) >= len(numbers):
        detail = f"file {largest}, expected less than {len(numbers)}; restore the file"
        raise CorruptShardError(column.rows.path, column.spec.header_nbytes, "C9", detail)
    return np.stack([numbers[rows[:, 0]], rows[:, 1]], axis=1)
