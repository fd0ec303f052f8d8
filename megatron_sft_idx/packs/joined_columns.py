"""Columns of shards that are merged: whether they are compatible, and how their numbers are changed.

Rows of ``source`` have the number of a file in a table, rows of ``pair`` the number of a pair. Both numberings are
local to one shard, so the merged shard has other numbers. All other columns are copied unchanged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import PAIR, ColumnHeader, ColumnSpec, is_source
from megatron_sft_idx.layout.files import CHECKSUM_NBYTES, listed_columns, no_column
from megatron_sft_idx.packs.provenance import SplitOutput, common_entries
from megatron_sft_idx.packs.run import Column, PackRun
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.opening import columns_beside, has_column
from megatron_sft_idx.shard.shard_set import kind_in_words

if TYPE_CHECKING:
    from megatron_sft_idx.check.rules import Finding

_FILES = "files"
_MAX_NUMBER = int(np.iinfo(np.uint32).max)


class _FileTable:
    """One table of files made from those of several shards, with one entry per file as in the metadata of ``source``.

    Files of the same name and fingerprint are one file. A file without a fingerprint may be any file of its name, so it
    is treated as the same file only if its whole table is equal.
    """

    def __init__(self) -> None:
        self.files: list[dict[str, Any]] = []
        self._numbers: dict[tuple[str, str], int] = {}  # by name and fingerprint
        self._tables: dict[bytes, NDArray[np.uint32]] = {}  # by the hash of a table that was added

    def add(self, table: list[dict[str, Any]]) -> NDArray[np.uint32]:
        """Add the table of another shard. Return the numbers of its files in this table, uint32 [files]."""
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


class _Found(NamedTuple):
    """A column of one of the merged shards. The metadata of its spec does not have the table of files.

    ``files`` are the numbers of its files in the merged shard, uint32 [files]; None if it has no files.
    """

    prefix: str
    spec: ColumnSpec
    nbytes: int
    header_checksum: bytes
    files: NDArray[np.uint32] | None


class JoinedColumns:
    """The columns of shards that are merged, by prefixes and headers. Call ``renumber`` for each shard, in order.

    ``lossy`` omits columns that are incompatible, or are among the ``broken`` ones of their shard, instead of raising
    an error.

    Attributes:
        specs: the columns of the merged shard, by name.
        nbytes: bytes of all their rows.
        notes: what was omitted, one sentence each.

    Raises:
        FormatError: a shard lacks a column of another shard, or has it in another kind; or the table of all files does
            not fit in a header.
        ShardNotFoundError, CorruptShardError: an error of a shard's column.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        headers: Sequence[Header],
        broken: Sequence[Mapping[str, Finding]],
        *,
        lossy: bool,
    ) -> None:
        self._allow_loss = lossy
        self._reasons: dict[str, str] = {}  # why a column is omitted, by its name
        self._table = _FileTable()
        self._first_pair = 0  # added to the pair numbers of this shard
        self._next_pair = 0  # greater than every number given so far
        self._split: SplitOutput | None = None  # of the shard before
        beside = columns_beside(prefixes)
        self._found: list[dict[str, _Found]] = []
        for prefix, header, findings in zip(prefixes, headers, broken, strict=True):
            self._reasons = {name: f"{found.path}: {found.what}" for name, found in findings.items()} | self._reasons
            columns, paths = {}, ShardPaths.of(prefix)
            for name in sorted({*beside[prefix], *listed_columns(header.metadata)}):
                try:
                    if has_column(paths, header, name):
                        columns[name] = self._find(paths, name, header)
                except SFTIndexError as error:
                    if not lossy:
                        raise
                    self._reasons.setdefault(name, f"{error}")
            self._found.append(columns)
        self.specs: dict[str, ColumnSpec] = {}
        self.nbytes = 0
        differing: list[str] = []
        for name in sorted({name for columns in self._found for name in columns} - self._reasons.keys()):
            of_shards = [columns[name] for columns in self._found if name in columns]
            if why := self._why_not(name, of_shards, prefixes):
                self._leave_out(name, why)
                continue
            metadata, keys = common_entries([found.spec.metadata for found in of_shards])
            if keys:
                kept = (
                    f"values that differ between shards, left out of the column's metadata: {', '.join(sorted(keys))}"
                )
                differing.append(f"column {name}: {kept}")
            files = {_FILES: self._table.files} if of_shards[0].files is not None else {}
            self.specs[name] = ColumnSpec(*of_shards[0].spec.kind, metadata | files)
            self.nbytes += sum(found.nbytes for found in of_shards)
        self.notes = [f"column {name} left out (--lossy): {why}" for name, why in sorted(self._reasons.items())]
        self.notes += differing

    def _find(self, paths: ShardPaths, name: str, header: Header) -> _Found:
        column = open_column(paths, name, header, "pread").header
        spec = column.spec
        files = None
        if name == "source" and is_source(spec):
            files = self._table.add(spec.metadata[_FILES])
            metadata = {key: value for key, value in spec.metadata.items() if key != _FILES}
            spec = dataclasses.replace(spec, metadata=metadata)
        return _Found(paths.prefix, spec, column.rows * spec.row_nbytes, _header_checksum(column), files)

    def _why_not(self, name: str, of_shards: Sequence[_Found], prefixes: Sequence[str]) -> str | None:
        """Return why a column of some shards cannot be in the merged shard, or None if it can."""
        first, like = of_shards[0].prefix, of_shards[0].spec
        for prefix, columns in zip(prefixes, self._found, strict=True):
            if (found := columns.get(name)) is None:
                return f"{prefix}: {no_column(name, columns)}; {first} has column {name}"
            if found.spec.kind != like.kind:
                return (
                    f"{prefix}: column {name} is {kind_in_words(found.spec)}, but in {first} it is"
                    f" {kind_in_words(like)}"
                )
            if (found.files is None) != (of_shards[0].files is None):
                return (
                    f"{prefix}: column {name} lists input files and the one of {first} does not, or the other way round"
                )
        return None

    def _leave_out(self, name: str, why: str) -> None:
        if not self._allow_loss:
            raise FormatError(
                f"{why}; a merged shard can only have columns that all shards have. Add the column there"
                " (write_column), or pass lossy (--lossy) to leave it out"
            )
        self._reasons[name] = why

    def renumber(self, number: int, shard: Shard) -> Callable[[PackRun], PackRun]:
        """Return a function that converts the columns of runs of shard ``number`` to the merged shard's numbers.

        FormatError: another column was attached to the shard since its headers were compared.
        """
        found = self._found[number]
        for name in self.specs:
            if _header_checksum(shard.columns.open(name).header) != found[name].header_checksum:
                path = ShardPaths.of(shard.prefix).column(name)
                raise FormatError(
                    f"{path}: this column was replaced while shards were being merged; run the command again"
                )
        changes: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {}
        if "source" in self.specs and (files := found["source"].files) is not None:
            changes["source"] = lambda rows: _renumber_files(shard, files, rows)
        if "pair" in self.specs and self.specs["pair"].kind == PAIR.kind:
            split = SplitOutput.of(shard.header) if "pair" in listed_columns(shard.header.metadata) else None
            # An output of a split keeps its numbers after the previous output: both have the numbers of the original
            # shard.
            if split is None or not split.follows(self._split):
                self._first_pair = self._next_pair
            self._split = split
            changes["pair"] = lambda rows: self._renumber_pairs(shard, rows)

        def changed(run: PackRun) -> PackRun:
            values = {name: change(run.columns[name].values) for name, change in changes.items()}
            renumbered = {name: Column(self.specs[name], rows) for name, rows in values.items()}
            return dataclasses.replace(run, columns={**run.columns, **renumbered})

        return changed

    def _renumber_pairs(self, shard: Shard, rows: NDArray[Any]) -> NDArray[Any]:
        """Shift pair numbers above the numbers of the previous shards."""
        largest = int(rows[:, 0].max(initial=0)) + self._first_pair
        if largest > _MAX_NUMBER:
            path = ShardPaths.of(shard.prefix).column("pair")
            raise FormatError(
                f"{path}: pair number {largest:,}, counted over all shards, exceeds the maximum of {_MAX_NUMBER:,};"
                " merge fewer shards"
            )
        self._next_pair = max(self._next_pair, largest + 1)
        return rows + np.array([self._first_pair, 0], np.uint32)


def _renumber_files(shard: Shard, numbers: NDArray[np.uint32], rows: NDArray[Any]) -> NDArray[Any]:
    if (largest := int(rows[:, 0].max(initial=0))) >= len(numbers):
        path, spec = ShardPaths.of(shard.prefix).column("source"), shard.columns["source"].spec
        detail = f"file number {largest} is not below the number of files, {len(numbers)}; restore the file from a copy"
        raise CorruptShardError(path, spec.header_nbytes, "C9", detail)
    return np.stack([numbers[rows[:, 0]], rows[:, 1]], axis=1)


def _header_checksum(column: ColumnHeader) -> bytes:
    return column.encode()[-CHECKSUM_NBYTES:]
