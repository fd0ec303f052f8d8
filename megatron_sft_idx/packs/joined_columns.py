"""Columns of many shards as those of one: alike in all of them, and their numbers told apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import PAIR, ColumnHeader, ColumnSpec, is_source, listed_columns
from megatron_sft_idx.packs.copying import Renumber, SourceColumn, SourceShard
from megatron_sft_idx.shard.columns import column_names, open_column

__all__ = ["JoinedColumns"]

_FILES = "files"
_MAX_NUMBER = int(np.iinfo(np.uint32).max)


class _Files:
    """Tables of files, of which one is made.

    Attributes:
        table: a row each, as the JSON of ``source`` has them.
    """

    def __init__(self) -> None:
        self.table: list[dict[str, Any]] = []
        self._places: dict[tuple[str, str], int] = {}

    def add(self, table: list[dict[str, Any]]) -> NDArray[np.uint32]:
        """Take one more table; returns the numbers that its files have now, uint32 [files].

        A file without a fingerprint is the same as another only where the tables are the same.
        """
        if table == self.table or not self.table:
            for number, file in enumerate(table):
                self._places.setdefault((file["name"], str(file.get("fingerprint"))), number)
            self.table = list(table)
            return np.arange(len(table), dtype=np.uint32)
        numbers = []
        for file in table:
            key = file["name"], str(file.get("fingerprint"))
            number = len(self.table) if file.get("fingerprint") is None else self._places.get(key, len(self.table))
            if number == len(self.table):
                self.table.append(file)
                self._places[key] = number
            numbers.append(number)
        return np.array(numbers, np.uint32)


class JoinedColumns:
    """Takes the columns of the shards that are to be one, in order: first what they are, then their numbers.

    Args:
        allow_loss: leave out what does not go together.
    """

    def __init__(self, *, allow_loss: bool) -> None:
        self._allow_loss = allow_loss
        self._first: str | None = None
        self._found: dict[str, tuple[str, ColumnSpec]] = {}  # where a column was found first, and what it is there
        self._metadata: dict[str, dict[str, Any]] = {}  # what is the same everywhere
        self._differ: dict[str, set[str]] = {}  # keys of what is not
        self._lost: dict[str, str] = {}  # why a column is left out
        self._nbytes: Counter[str] = Counter()
        self._files, self._files_again = _Files(), _Files()
        self._pairs = _Pairs()

    def add(self, prefix: str, header: Header, beside: Collection[str]) -> None:
        """Take one more shard; ``beside`` are names of the columns that lie there.

        Raises:
            FormatError: it lacks a column that another has, or has one of another kind.
            ShardNotFoundError, CorruptShardError: of a column that it has.
        """
        first, self._first = self._first or prefix, self._first or prefix
        paths, columns = ShardPaths.of(prefix), {}
        for name in column_names(paths, header, beside):
            try:
                columns[name] = open_column(paths, name, header, "pread").header
            except SFTIndexError as error:
                if not self._allow_loss:
                    raise
                self._lose(name, f"{error}")
        for name in sorted((self._found.keys() | columns.keys()) - self._lost.keys()):
            if name not in columns:
                self._lose(name, f"{prefix}: no column {name}, which {self._found[name][0]} has")
            elif name not in self._found and prefix != first:
                self._lose(name, f"{first}: no column {name}, which {prefix} has")
            else:
                self._take(prefix, name, columns[name])

    def _take(self, prefix: str, name: str, column: ColumnHeader) -> None:
        """A column that all shards so far have."""
        spec = column.spec
        where, like = self._found.setdefault(name, (prefix, spec))
        if spec.kind != like.kind:
            self._lose(name, f"{prefix}: column {name} is {_said(spec)}, in {where} {_said(like)}")
            return
        if name == "source" and is_source(spec) != is_source(like):
            self._lose(name, f"{prefix}: column {name} does not name its files as that of {where} does, or the other")
            return
        own = dict(spec.metadata)
        if name == "source" and is_source(spec):
            self._files.add(own.pop(_FILES))
        metadata = self._metadata.setdefault(name, own)
        differ = {key for key in own.keys() | metadata.keys() if own.get(key) != metadata.get(key)}
        self._differ.setdefault(name, set()).update(differ)
        self._metadata[name] = {key: value for key, value in metadata.items() if key not in differ}
        self._nbytes[name] += column.rows * spec.row_nbytes

    def _lose(self, name: str, why: str) -> None:
        if not self._allow_loss:
            raise FormatError(
                f"{why}; a merged shard has the columns that all have: attach it there (write_column), or pass"
                " allow_loss (--allow-loss) to leave it out"
            )
        self._lost.setdefault(name, why)
        self._found.pop(name, None)

    def specs(self) -> dict[str, ColumnSpec]:
        """The columns of the one shard. FormatError where a table of all files fits no header."""
        specs = {}
        for name, (_, spec) in self._found.items():
            metadata = dict(self._metadata[name])
            if name == "source" and is_source(spec):
                metadata[_FILES] = self._files.table
            specs[name] = ColumnSpec(*spec.kind, metadata)
        return specs

    def nbytes(self) -> int:
        """Bytes of all their values."""
        return sum(self._nbytes[name] for name in self._found)

    def renumber(self, source: SourceShard) -> Renumber:
        """What becomes of the numbers of one shard; asked for in the order in which they were added."""
        changes: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {}
        column = source.columns.get("source")
        if column is not None and is_source(column.spec):
            changes["source"] = _renumber_files(column, self._files_again.add(column.spec.metadata[_FILES]))
        column = source.columns.get("pair")
        if column is not None and column.spec.kind == PAIR.kind:
            changes["pair"] = self._pairs.renumber(source, column)
        return changes

    def require_same(self) -> None:
        """FormatError where the tables of files were other ones when the numbers were made."""
        if "source" in self._found and self._files_again.table != self._files.table:
            raise FormatError(f"{self._first}: a column source was replaced while the shards were merged; start again")

    def notes(self) -> list[str]:
        """What was left out: a sentence each."""
        notes = [f"column {name} left out, as was allowed: {why}" for name, why in sorted(self._lost.items())]
        for name in sorted(self._found):
            if differ := self._differ[name]:
                keys = ", ".join(sorted(differ))
                notes.append(f"column {name}: not the same in all shards, so left out of its metadata: {keys}")
        return notes


def _said(spec: ColumnSpec) -> str:
    aligned = f", aligned with {spec.alignment}s" if spec.per == "token" else ""
    return f"{spec.dtype} x {spec.width} a {spec.per}{aligned}"


def _renumber_files(column: SourceColumn, numbers: NDArray[np.uint32]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def renumber(rows: NDArray[Any]) -> NDArray[Any]:
        if len(rows) and (most := int(rows[:, 0].max())) >= len(numbers):
            detail = f"file {most}, expected less than {len(numbers)}; restore the file"
            raise CorruptShardError(column.rows.path, column.spec.header_nbytes, "C9", detail)
        return np.stack([numbers[rows[:, 0]], rows[:, 1]], axis=1)

    return renumber


class _Pairs:
    """Numbers of pairs, shard by shard."""

    def __init__(self) -> None:
        self._first = 0  # what is added to the numbers of this shard
        self._next = 0  # above all that were given
        self._split: Mapping[str, Any] = {}  # what the shard before says that it is a part of

    def renumber(self, source: SourceShard, column: SourceColumn) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """What becomes of the numbers of the next shard: they begin above those of the shards before.

        A part of a split that goes on where the one before it ends has its numbers from the same shard.
        """
        metadata = source.header.metadata
        split = metadata.get("split") if "pair" in listed_columns(metadata) else None
        before, self._split = self._split, split if isinstance(split, dict) else {}
        if not _goes_on(before, self._split):
            self._first = self._next

        def renumber(rows: NDArray[Any]) -> NDArray[Any]:
            if not len(rows):
                return rows
            most = int(rows[:, 0].max()) + self._first
            if most > _MAX_NUMBER:
                raise FormatError(f"{column.rows.path}: pair {most:,} of all shards, there is room for {_MAX_NUMBER:,}")
            self._next = max(self._next, most + 1)
            return rows + np.array([self._first, 0], np.uint32)

        return renumber


def _goes_on(part: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two parts of one split follow each other."""
    if not part or any(part.get(key) != other.get(key) for key in ("shard_id", "parts")):
        return False
    return bool(other.get("part") == part.get("part", -1) + 1)
