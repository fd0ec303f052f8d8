"""Find the input line from which a sequence was made, and the sequences made from an input line.

This uses the column ``source``. An origin is an input file and the number of a row in it. Files have the names in the
column's metadata. Lines are counted from 1, as in editors and errors: ``chats.jsonl:1`` is row 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.inspect.tally import HashSample
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.files import no_column
from megatron_sft_idx.packs.run import Window, windows
from megatron_sft_idx.packs.source_names import SOURCE, find_name, origin_name, source_names
from megatron_sft_idx.shard import Shard

# The lowest 16 bits of a hash have the number of the file; files from this number on are counted together.
_MAX_FILES = (1 << 16) - 1


def sources_of(shard: Shard, pack: int) -> list[str]:
    """Return the origins of a pack's sequences, such as ``chats.jsonl:1``; [] without a column ``source``."""
    if (names := source_names(shard.columns)) is None:
        return []
    first, last = shard.files.sequence_offsets[pack : pack + 2].tolist()
    return [origin_name(names, origin) for origin in shard.columns[SOURCE].values[first:last].tolist()]


def sequence_titles(shard: Shard, pack: int) -> list[str]:
    """Return the origins of a pack's sequences for headings; of a pair also ``pair 17, chosen``. [] if unknown."""
    titles = [[origin] for origin in sources_of(shard, pack)]
    if "pair" in shard.columns:
        first, last = shard.files.sequence_offsets[pack : pack + 2].tolist()
        pairs = shard.columns["pair"].values[first:last].tolist()
        words = [[f"pair {number}", "rejected" if rejected else "chosen"] for number, rejected in pairs]
        titles = [[*title, *more] for title, more in zip(titles or [[] for _ in words], words, strict=True)]
    return [", ".join(title) for title in titles]


def parse_origin(shard: Shard, text: str) -> tuple[int, int]:
    """Parse an origin such as ``chats.jsonl:1``. See ``find_name`` for the spelling of the file.

    Raises:
        FormatError: no file matches, or several do, or no line follows it.
    """
    names = source_names(shard.columns)
    if names is None and SOURCE not in shard.columns:
        raise FormatError(
            f"{shard.prefix}: {no_column(SOURCE, shard.columns)}; preprocess writes it, but not with --no-source"
        )
    if not names:
        raise FormatError(f"{shard.prefix}: its column {SOURCE} names no input files to look a line up in")
    name, _, line = text.rpartition(":")
    if not name or not re.fullmatch("[0-9]{1,18}", line) or int(line) < 1:
        raise FormatError(f"--row {brief(text)}: expected a file and a line of it, such as {names[0]}:1")
    return find_name(name, names, f"--row {text}"), int(line) - 1


def find_row(
    shard: Shard, file: int, row: int, *, selected: NDArray[np.bool_] | None = None
) -> Iterator[tuple[int, int]]:
    """Yield pack, and number in the pack, of every sequence made from a row; only ``selected`` ones, if given."""
    for window in windows(shard.files, columns={SOURCE: shard.columns.open(SOURCE)}):
        values = window.columns[SOURCE].values
        is_of_row = (values[:, 0] == file) & (values[:, 1] == row)
        if selected is not None:
            is_of_row &= selected[window.first_sequence : window.first_sequence + len(values)]
        for number in np.flatnonzero(is_of_row).tolist():
            yield window.locate(number)


def last_row(shard: Shard, file: int) -> int:
    """Return the number of the last row of a file from which a sequence was made; -1 if there is none."""
    last = -1
    for window in windows(shard.files, columns={SOURCE: shard.columns.open(SOURCE)}):
        values = window.columns[SOURCE].values
        if len(rows := values[values[:, 0] == file, 1]):
            last = max(last, int(rows.max()))
    return last


def cut_length(header: Header) -> int | None:
    """Return the length in tokens to which overlong sequences were cut; 0 if none were, None if it is unknown."""
    packing = header.metadata.get("packing")
    if not isinstance(packing, dict) or "overlong" not in packing:
        return None
    cuts = packing["overlong"] in ("split", "truncate")
    return header.capacity // header.sequence_multiple * header.sequence_multiple if cuts else 0


class FileCounts(NamedTuple):
    """Counts for one input file.

    Attributes:
        name: name of the file.
        rows: number of rows from which sequences were made.
        sequences: number of sequences made from them.
        tokens: number of tokens of these sequences.
        trained: fraction of trained tokens.
        cut: number of sequences with the length to which longer ones were split or truncated.
        copies: number of sequences whose ids equal those of an earlier sequence of the file.
        elsewhere: number of sequences, without copies, whose ids also occur in a sequence of another file.
    """

    name: str
    rows: int
    sequences: int
    tokens: int
    trained: float
    cut: int
    copies: int
    elsewhere: int


class SourceCounts:
    """Counts of sequences by input file. Each window of a shard is added.

    Args:
        names: names of the input files, by number.
        header: header of the shard.
    """

    def __init__(self, names: Sequence[str], header: Header) -> None:
        self._names = [*names[:_MAX_FILES]]
        size = len(self._names) + 1  # the last is for sequences of files without a name
        self._sequences, self._tokens, self._cut, self._trained = np.zeros((4, size), np.int64)
        self._rows, self._ids = HashSample(), HashSample()
        self._longest = cut_length(header)

    @property
    def exact(self) -> bool:
        """Whether the numbers of rows and copies are exact, not estimates from a sample of hashes."""
        return not (self._rows.bits or self._ids.bits)

    def add(self, window: Window, trained: NDArray[np.int64], hashes: NDArray[np.uint64]) -> None:
        """Add the sequences of a window, with the number of trained tokens and the hash of the ids of each."""
        origins = window.columns[SOURCE].values
        files = np.minimum(origins[:, 0], len(self._names)).astype(np.int64)
        lengths = np.diff(window.bounds)
        self._sequences += self._counted(files)
        self._tokens += self._counted(files, lengths)
        self._cut += self._counted(files, lengths == self._longest)
        self._trained += self._counted(files, trained)
        rows = _native.hash_runs(origins.view(np.int32).reshape(-1), np.arange(0, origins.size + 1, 2))
        self._rows.add(_with_file(rows, files), window.first_sequence)
        self._ids.add(_with_file(hashes, files), window.first_sequence)

    def _counted(self, files: NDArray[np.int64], weights: NDArray[Any] | None = None) -> NDArray[np.int64]:
        return np.bincount(files, weights, len(self._sequences)).astype(np.int64)

    def table(self) -> list[FileCounts]:
        """Return the counts of each file from which sequences were made, by the number of the file."""
        rows, ids = self._rows.merged(), self._ids.merged()
        file_of_id = _file_of(ids.hashes)
        same = np.append(ids.hashes[1:] >> np.uint64(16) == ids.hashes[:-1] >> np.uint64(16), False)
        shared = same | np.append(False, same[:-1])
        counts = [
            self._counted(_file_of(rows.hashes)) << self._rows.bits,
            self._sequences,
            self._tokens,
            self._trained,
            self._cut,
            self._counted(file_of_id, ids.times - 1) << self._ids.bits,
            self._counted(file_of_id, shared) << self._ids.bits,
        ]
        files = []
        for name, values in zip([*self._names, "files not named"], np.stack(counts, 1).tolist(), strict=True):
            rows_of_file, sequences, tokens, trained, *rest = values
            if sequences:
                files.append(FileCounts(name, rows_of_file, sequences, tokens, trained / tokens, *rest))
        return files


def _with_file(hashes: NDArray[np.uint64], files: NDArray[np.int64]) -> NDArray[np.uint64]:
    low = np.uint64(_MAX_FILES)
    return hashes & ~low | files.astype(np.uint64)


def _file_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (hashes & np.uint64(_MAX_FILES)).astype(np.int64)
