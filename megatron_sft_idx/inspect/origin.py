"""Where sequences came from, as the column ``source`` tells: names of places, places of rows, counts by input file.

Files are named as their column names them, lines as editors and errors count them: ``chats.jsonl:1`` is the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.tally import HashSample
from megatron_sft_idx.inspect.text import shortened
from megatron_sft_idx.layout import Header
from megatron_sft_idx.packs.run import Window, windows
from megatron_sft_idx.shard import Shard

SOURCE = "source"
# A hash ends with the number of the file; files from here on are counted together.
_MOST_FILES = (1 << 16) - 1
_MOST_CHARACTERS = 200


def source_names(shard: Shard) -> list[str] | None:
    """Names of the input files by number, told apart where two are alike; None where the shard does not say."""
    column = shard.columns.get(SOURCE)
    if column is None or column.spec.kind[:3] != ("sequence", "<u4", 2):
        return None
    files = column.spec.metadata.get("files")
    listed = files if isinstance(files, list) else []
    # Anybody may write anything into the metadata.
    found = [str(one["name"] if isinstance(one, dict) and "name" in one else "a file") for one in listed]
    found = [shortened(name, _MOST_CHARACTERS) for name in found]
    times = Counter(found)
    return [name if times[name] == 1 else f"{name} ({number})" for number, name in enumerate(found)]


def place_name(names: Sequence[str], place: Sequence[int]) -> str:
    """``chats.jsonl:1`` of file 0 and row 0."""
    file, row = place
    return f"{names[file] if file < len(names) else f'file {file}'}:{row + 1}"


def sources_of(shard: Shard, pack: int) -> list[str]:
    """Where the sequences of a pack came from; nothing where the shard does not say."""
    if (names := source_names(shard)) is None:
        return []
    first, last = shard.files.sequence_offsets[pack : pack + 2].tolist()
    return [place_name(names, place) for place in shard.columns[SOURCE].values[first:last].tolist()]


def parse_place(shard: Shard, text: str) -> tuple[int, int]:
    """File and row of a place as ``place_name`` writes it. FormatError: the shard names no such file."""
    names = source_names(shard)
    if names is None:
        raise FormatError(f"{shard.prefix}: has no column {SOURCE}; preprocess writes it, but not with --no-source")
    name, _, line = text.rpartition(":")
    if name not in names or not line.isdecimal() or int(line) < 1:
        known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise FormatError(f"{text}: expected a file and a line of it, such as {names[0]}:1; files are {known}")
    return names.index(name), int(line) - 1


def find_row(shard: Shard, file: int, row: int) -> Iterator[tuple[int, int]]:
    """Pack, and number in it, of every sequence that was made from a row."""
    for window in windows(shard, columns=[SOURCE]):
        values = window.columns[SOURCE].values
        for number in np.flatnonzero((values[:, 0] == file) & (values[:, 1] == row)).tolist():
            yield window.locate(number)


def cut_length(header: Header) -> int | None:
    """Tokens of a sequence that was cut; 0 where none was, None where the shard does not say."""
    packing = header.metadata.get("packing")
    if not isinstance(packing, dict) or "overlong" not in packing:
        return None
    cuts = packing["overlong"] in ("split", "truncate")
    return header.capacity // header.sequence_multiple * header.sequence_multiple if cuts else 0


class FileCounts(NamedTuple):
    """What one file became.

    Attributes:
        name: of the file.
        rows: that sequences were made from.
        sequences: made from it.
        tokens: in them.
        trained: share of the tokens that is trained on; None where none was looked at.
        cut: sequences as long as one can be, where longer ones were split or truncated.
        copies: sequences that an earlier one of the file equals, token by token.
        elsewhere: different sequences that another file has too.
    """

    name: str
    rows: int
    sequences: int
    tokens: int
    trained: float | None
    cut: int
    copies: int
    elsewhere: int


class SourceCounts:
    """Counts by file, which grow by a window at a time.

    Args:
        names: of the files.
        header: of the shard.
    """

    def __init__(self, names: Sequence[str], header: Header) -> None:
        self._names = [*names[:_MOST_FILES]]
        size = len(self._names) + 1  # the last is for what the column names no file for
        self._sequences, self._tokens, self._cut, self._read, self._trained = np.zeros((5, size), np.int64)
        self._rows, self._ids = HashSample(), HashSample()
        self._longest = cut_length(header)

    @property
    def exact(self) -> bool:
        """Whether rows and copies were counted one by one, in what was read."""
        return not (self._rows.bits or self._ids.bits)

    def _file_of(self, window: Window) -> NDArray[np.int64]:
        files: NDArray[np.int64] = np.minimum(window.columns[SOURCE].values[:, 0], len(self._names)).astype(np.int64)
        return files

    def add_index(self, window: Window) -> None:
        """What the indexes tell of a window."""
        files, lengths = self._file_of(window), np.diff(window.bounds)
        self._sequences += self._counted(files)
        self._tokens += self._counted(files, lengths)
        self._cut += self._counted(files, lengths == self._longest)
        places = window.columns[SOURCE].values.astype(np.uint64)
        self._rows.add(_with_file(_mixed(places[:, 0] << np.uint64(32) | places[:, 1]), files), window.first_sequence)

    def add_content(self, window: Window, trained: NDArray[np.int64], hashes: NDArray[np.uint64]) -> None:
        """Trained tokens, and hashes of ids, one a sequence."""
        files = self._file_of(window)
        self._trained += self._counted(files, trained)
        self._read += self._counted(files, np.diff(window.bounds))
        self._ids.add(_with_file(hashes, files), window.first_sequence)

    def _counted(self, files: NDArray[np.int64], weights: NDArray[Any] | None = None) -> NDArray[np.int64]:
        return np.bincount(files, weights, len(self._sequences)).astype(np.int64)

    def table(self) -> list[FileCounts]:
        """The files that sequences were made from, in their order."""
        rows, ids = self._rows.counted(), self._ids.counted()
        file_of_id = _file_of(ids.hashes)
        same = np.append(ids.hashes[1:] >> np.uint64(16) == ids.hashes[:-1] >> np.uint64(16), False)
        shared = same | np.append(False, same[:-1])
        counts = [
            self._counted(_file_of(rows.hashes)) << self._rows.bits,
            self._sequences,
            self._tokens,
            self._trained,
            self._read,
            self._cut,
            self._counted(file_of_id, ids.times - 1) << self._ids.bits,
            self._counted(file_of_id, shared) << self._ids.bits,
        ]
        found = []
        for name, values in zip([*self._names, "files not named"], np.stack(counts, 1).tolist(), strict=True):
            num_rows, sequences, tokens, trained, read, *rest = values
            if sequences:
                found.append(FileCounts(name, num_rows, sequences, tokens, trained / read if read else None, *rest))
        return found


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes of numbers: the finalizer of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ values >> np.uint64(shift)) * np.uint64(factor)
    return values ^ values >> np.uint64(31)


def _with_file(hashes: NDArray[np.uint64], files: NDArray[np.int64]) -> NDArray[np.uint64]:
    low = np.uint64(_MOST_FILES)
    return hashes & ~low | files.astype(np.uint64)


def _file_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (hashes & np.uint64(_MOST_FILES)).astype(np.int64)
