"""The columns of a shard, held against rules C1 to C10 of FORMAT.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.check.pack_walk import CheckedFile, Meter, Stream
from megatron_sft_idx.check.rules import Claims, Findings
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import (
    FIXED_NBYTES,
    PAIR,
    ColumnHeader,
    broken_column,
    column_count,
    is_source,
    torn_pairs,
)
from megatron_sft_idx.layout.files import CHECKSUM_NBYTES, column_of
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.remote import open_store

__all__ = ["check_columns", "column_paths"]

_RESTORE = "restore it from a copy, or remove it and attach it anew"
_LISTED = "restore it from a copy, or write the shard again: nothing else holds what it held"


def column_paths(paths: ShardPaths) -> dict[str, str]:
    """Files whose names are those of columns of a shard, whatever they hold, by the name of the column."""
    folder, base = os.path.split(paths.prefix)
    if is_remote(paths.prefix):
        store, base = open_store(paths.prefix)
        names: Iterator[str] = (info.key for info in store.list(base + "."))
    else:
        names = iter(os.listdir(folder or ".") if os.path.isdir(folder or ".") else ())
    found = (column_of(name) for name in names)
    return {column[1]: paths.column(column[1]) for column in found if column and column[0] == base}


def check_columns(paths: ShardPaths, claims: Claims | None, findings: Findings, meter: Meter | None) -> None:
    """Look at every column that is there, and at those that the shard lists.

    Args:
        paths: of the shard.
        claims: what its header says; None where there is none that can be read.
        findings: where breaches go.
        meter: told of every byte, where all values are to be read.
    """
    listed = {} if claims is None else claims.listed
    there = column_paths(paths)
    for name in sorted(listed.keys() - there.keys()):
        path = paths.column(name)
        findings.add("C8", path, 0, "no such file", "the column that .seq.idx lists", remedy=_LISTED)
    for name, path in sorted(there.items()):
        remedy = _LISTED if name in listed else _RESTORE
        with ExitStack() as stack:
            try:
                file = stack.enter_context(CheckedFile(path))
            except (FileNotFoundError, NotADirectoryError):
                findings.add("C1", path, 0, "something that is no regular file", "a column", remedy=remedy)
                continue
            _check_column(file, name, claims, findings, meter, remedy)


def _check_column(
    file: CheckedFile, name: str, claims: Claims | None, findings: Findings, meter: Meter | None, remedy: str
) -> None:
    def add(rule: str, offset: int, found: object, expected: object) -> None:
        findings.add(rule, file.path, offset, found, expected, remedy=remedy)

    raw = file.read(0, FIXED_NBYTES)
    raw += file.read(len(raw), ColumnHeader.peek(raw) - len(raw))
    if broken := list(broken_column(raw)):
        for breach in broken:
            add(breach.rule, breach.offset, breach.found, breach.expected)
        return
    column = ColumnHeader.decode(raw, file.path)
    if file.nbytes != column.nbytes:
        add("C2", min(file.nbytes, column.nbytes), f"{file.nbytes} bytes", f"{column.nbytes} by its header")
    if claims is not None and claims.sound:
        if column.shard_id != claims.values["shard_id"]:
            found, expected = f"a column of shard {column.shard_id.hex()}", claims.values["shard_id"].hex()
            add("C6", 16, found, expected)
        rows = column_count(column.spec.per, claims.num_tokens, claims.num_sequences, claims.num_packs)
        if column.rows != rows:
            add("C5", 40, f"{column.rows} rows", f"{rows}: one a {column.spec.per}")
        checksum, listed = raw[-CHECKSUM_NBYTES:].hex(), claims.listed.get(name)
        if listed is not None and listed != checksum:
            add("C8", len(raw) - CHECKSUM_NBYTES, f"header checksum {checksum}", f"{listed}, as .seq.idx lists it")
    if name == "source" and not is_source(column.spec):
        add(
            "C9",
            FIXED_NBYTES,
            "a source that names no files",
            "uint32 x 2 a sequence, and files with names in its JSON",
        )
        name = ""
    if name == "pair" and column.spec.kind != PAIR.kind:
        add("C10", FIXED_NBYTES, f"a column of {column.spec.kind[:3]}", "uint32 x 2 a sequence")
        name = ""
    if meter is not None:
        _check_values(Stream(file, meter, len(raw)), column, name, findings, add)


def _check_values(
    stream: Stream, column: ColumnHeader, name: str, findings: Findings, add: Callable[[str, int, object, object], None]
) -> None:
    """C7; C9: each row of ``source`` is of a file that is named; C10: sequences are chosen and rejected in turn."""
    begin = stream.position
    if name == "source":
        files, row = len(column.spec.metadata["files"]), 0
        for items in stream.pieces("<u8"):
            numbers = items & 0xFFFFFFFF  # of a row, the first of two little-endian uint32
            bad = np.flatnonzero(numbers >= files)
            for i in bad[: findings.most].tolist():
                add("C9", begin + 8 * (row + i), f"file {numbers[i]}", f"less than {files}")
            findings.add_uncounted("C9", len(bad[findings.most :]))
            row += len(items)
    if name == "pair":
        row, rest = 0, np.empty((0, 2), np.uint32)
        for items in stream.pieces("<u8"):
            rows = np.concatenate([rest, items.view("<u4").reshape(-1, 2)])
            whole = len(rows) // 2 * 2
            _tell_torn(rows[:whole], row, begin, findings, add)
            row, rest = row + whole, rows[whole:]
        _tell_torn(rest, row, begin, findings, add)
    found = stream.finish()
    if stream.file.nbytes == column.nbytes and stream.file.shrunk is None and found != column.checksum:
        add("C7", begin, f"checksum {found.hex()} of the values", column.checksum.hex())


def _tell_torn(
    rows: NDArray[Any], row: int, begin: int, findings: Findings, add: Callable[[str, int, object, object], None]
) -> None:
    torn = torn_pairs(rows)
    for i in torn[: findings.most].tolist():
        add("C10", begin + 8 * (row + i), f"rows {rows[i : i + 2].tolist()}", "[n, 0] and [n, 1], chosen and rejected")
    findings.add_uncounted("C10", len(torn[findings.most :]))
