"""Packs in memory: the one form in which they go from reader to writer, and windows of a shard's indexes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import ColumnSpec

if TYPE_CHECKING:
    from megatron_sft_idx.shard.columns import ShardColumn
    from megatron_sft_idx.shard.reader import Pack, Shard

# Tokens in a run, about: large enough that what is done once a run does not count, small enough to stay in cache.
RUN_TOKENS = 1 << 20
# What a window of a shard holds at most, or one pack where that is larger: some 50 MiB with what is computed from it.
WINDOW_PACKS, WINDOW_SEQUENCES, WINDOW_TOKENS = 1 << 15, 1 << 18, 1 << 22


class Column(NamedTuple):
    """Values that travel beside the tokens.

    Attributes:
        spec: what has one row, and the rest of what the column is.
        values: [rows], or [rows, width].
    """

    spec: ColumnSpec
    values: NDArray[Any]


# Columns by name.
Columns = Mapping[str, Column]


def require_rows(columns: Columns, **rows: int) -> None:
    """ValueError unless each column has as many rows as there are of what it has one row for."""
    for name, (spec, values) in columns.items():
        if len(values) != rows[spec.per]:
            raise ValueError(f"column {name}: {len(values)} rows, expected {rows[spec.per]}: one a {spec.per}")


def sliced(columns: Mapping[str, Column | ShardColumn], **rows: slice) -> Columns:
    """The rows of columns that belong to some tokens, sequences and packs: views, or read now where none is mapped."""
    return {name: Column(column.spec, column.values[rows[column.spec.per]]) for name, column in columns.items()}


@dataclass(frozen=True)
class PackRun:
    """Some packs end to end, in the form ``ShardWriter.add_packs`` takes.

    Attributes:
        tokens: ids [sum of pack lengths], integers.
        loss_mask: uint8 (0 or 1) or float32 (weights) [sum of pack lengths], label-aligned.
        seq_starts: where each sequence begins in its pack, int64 [sum of sequence counts].
        pack_lengths: tokens in each pack, int64 [packs].
        pack_sequences: sequences in each pack, int64 [packs].
        unplaced: set mask values of the file that had no place in a label-aligned mask and were left out.
        columns: values of these tokens, sequences or packs, in their order.

    Raises:
        ValueError: a column has another number of rows than there are tokens, sequences or packs.
    """

    tokens: NDArray[Any]
    loss_mask: NDArray[Any]
    seq_starts: NDArray[np.int64]
    pack_lengths: NDArray[np.int64]
    pack_sequences: NDArray[np.int64]
    unplaced: int = 0
    columns: Columns = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_rows(self.columns, token=len(self.tokens), sequence=len(self.seq_starts), pack=len(self))

    def __len__(self) -> int:
        return len(self.pack_lengths)

    @cached_property
    def token_offsets(self) -> NDArray[np.int64]:
        """Where each pack begins, and the last one ends: int64 [packs + 1]."""
        return np.append(0, np.cumsum(self.pack_lengths))

    @cached_property
    def sequence_offsets(self) -> NDArray[np.int64]:
        """CSR offsets of the sequences by pack: int64 [packs + 1]."""
        return np.append(0, np.cumsum(self.pack_sequences))

    @property
    def nbytes(self) -> int:
        """Memory that the arrays take."""
        arrays = (self.tokens, self.loss_mask, self.seq_starts, self.pack_lengths, self.pack_sequences)
        beside = (column.values for column in self.columns.values())
        return sum(array.nbytes for array in (*arrays, *beside, self.token_offsets, self.sequence_offsets))

    def sequence_lengths(self) -> NDArray[np.int64]:
        """Tokens in each sequence, of all packs end to end: int64 [sum of sequence counts]."""
        begins = np.repeat(self.token_offsets[:-1], self.pack_sequences)
        return np.diff(self.seq_starts + begins, append=len(self.tokens))

    def pack(self, index: int) -> Pack:
        """Pack ``index`` of the run with its columns; but for the boundaries, as read-only views."""
        if len(self) == 1 and index == 0:  # as readers of one pack have it: no offsets to sum up
            start, stop, first, last = 0, len(self.tokens), 0, len(self.seq_starts)
        else:
            start, stop = self.token_offsets[index : index + 2].tolist()
            first, last = self.sequence_offsets[index : index + 2].tolist()
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = self.seq_starts[first:last]
        boundaries[-1] = stop - start
        tokens, mask = self.tokens[start:stop], self.loss_mask[start:stop]
        tokens.flags.writeable = mask.flags.writeable = False
        pack: Pack = {"input_ids": tokens, "loss_mask": mask, "seq_boundaries": boundaries}
        rows: dict[str, slice | int] = {"token": slice(start, stop), "sequence": slice(first, last), "pack": index}
        for name, (spec, values) in self.columns.items():
            pack[name] = values[rows[spec.per]]  # type: ignore[literal-required]
        return pack

    def part(self, first: int, last: int) -> PackRun:
        """Packs ``first`` up to ``last``, as views; what had no place in a mask is not counted again."""
        tokens = slice(*self.token_offsets[[first, last]].tolist())
        sequences, packs = slice(*self.sequence_offsets[[first, last]].tolist()), slice(first, last)
        return PackRun(
            self.tokens[tokens],
            self.loss_mask[tokens],
            self.seq_starts[sequences],
            self.pack_lengths[packs],
            self.pack_sequences[packs],
            columns=sliced(self.columns, token=tokens, sequence=sequences, pack=packs),
        )

    @classmethod
    def joined(cls, runs: Sequence[PackRun]) -> PackRun:
        """The packs of one or more runs as copies. ValueError where one has other columns than the first."""
        specs = {name: column.spec for name, column in runs[0].columns.items()}
        if any({name: column.spec for name, column in run.columns.items()} != specs for run in runs):
            raise ValueError("runs with different columns")
        return cls(
            np.concatenate([run.tokens for run in runs]),
            np.concatenate([run.loss_mask for run in runs]),
            np.concatenate([run.seq_starts for run in runs]),
            np.concatenate([run.pack_lengths for run in runs]),
            np.concatenate([run.pack_sequences for run in runs]),
            sum(run.unplaced for run in runs),
            {
                name: Column(spec, np.concatenate([run.columns[name].values for run in runs]))
                for name, spec in specs.items()
            },
        )


def fewer_tokens(tokens: int, columns: Mapping[str, ColumnSpec]) -> int:
    """So many tokens, or as many as take the memory of those with their columns: at least one."""
    return max(1, 8 * tokens // (8 + sum(spec.row_nbytes for spec in columns.values() if spec.per == "token")))


def run_bounds(token_offsets: NDArray[Any], tokens: int = RUN_TOKENS) -> Iterator[tuple[int, int]]:
    """First and last + 1 pack of runs of at most ``tokens`` tokens, or of one pack, by the packs' offsets."""
    first, packs = 0, len(token_offsets) - 1
    while first < packs:
        last = first + max(1, fitting(token_offsets[first:], tokens))
        yield first, last
        first = last


def fitting(offsets: NDArray[Any], most: int) -> int:
    """How many packs, from the first one on, have at most so many tokens or sequences together."""
    return min(int(np.searchsorted(offsets, offsets[0] + most, side="right")), len(offsets)) - 1


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive packs of a shard by its indexes, which divide them into sequences; ids and masks are read when asked.

    Attributes:
        shard: whose packs they are.
        first: number of the first pack.
        token: number of its first token, among all of the shard.
        sequence: number of its first sequence, among all of the shard.
        pack_bounds: where packs begin and the last one ends, in tokens of the window: int64 [packs + 1].
        sequence_offsets: the same in sequences of the window: int64 [packs + 1].
        bounds: where sequences begin and the last one ends, in tokens of the window: int64 [sequences + 1].
        columns: values of these tokens, sequences or packs.
    """

    shard: Shard
    first: int
    token: int
    sequence: int
    pack_bounds: NDArray[np.int64]
    sequence_offsets: NDArray[np.int64]
    bounds: NDArray[np.int64]
    columns: Columns = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pack_bounds) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all its packs."""
        return int(self.pack_bounds[-1])

    def content(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and label-aligned mask, each [tokens]: views where the shard is mapped, else read now."""
        tokens = slice(self.token, self.token + self.num_tokens)
        return self.shard.files.tokens[tokens], self.shard.files.loss[tokens]

    def starts(self) -> NDArray[np.int64]:
        """Where each sequence begins in its pack, int64 [sequences]."""
        starts: NDArray[np.int64] = self.bounds[:-1] - np.repeat(self.pack_bounds[:-1], np.diff(self.sequence_offsets))
        return starts

    def place(self, sequence: int) -> tuple[int, int]:
        """Pack, and number inside it, of the window's sequence ``sequence``."""
        pack = int(np.searchsorted(self.sequence_offsets, sequence, "right")) - 1
        return self.first + pack, sequence - int(self.sequence_offsets[pack])


def windows(shard: Shard, tokens: int | None = None, columns: Iterable[str] = ()) -> Iterator[Window]:
    """All packs of a shard in order, in memory that does not grow with it.

    Args:
        shard: opened with any backend; with ``pread`` no page of it is mapped.
        tokens: of a window at most, unless a single pack has more; None for ``WINDOW_TOKENS``.
        columns: names of those whose values the windows have.

    Raises:
        ShardNotFoundError: the shard has no such column.
        FormatError: offsets or starts that do not divide the tokens (rules O1, O2, P2 to P4).
    """
    shard.check_ends()
    first, columns = 0, tuple(columns)
    while first < len(shard):
        window = read_window(shard, first, first + WINDOW_PACKS, tokens, columns)
        yield window
        first += len(window)


def read_window(shard: Shard, first: int, stop: int, tokens: int | None = None, columns: Iterable[str] = ()) -> Window:
    """Packs from ``first`` on, before ``stop``: as many as fit a window, and at least one. Raises as ``windows``."""
    files, stop = shard.files, min(stop, len(shard))
    pack_bounds, sequence_offsets = files.token_offsets[first : stop + 1], files.sequence_offsets[first : stop + 1]
    most = WINDOW_TOKENS if tokens is None else tokens
    count = max(1, min(fitting(pack_bounds, most), fitting(sequence_offsets, WINDOW_SEQUENCES)))
    pack_bounds, sequence_offsets = pack_bounds[: count + 1], sequence_offsets[: count + 1]
    token, sequence, last = int(pack_bounds[0]), int(sequence_offsets[0]), int(sequence_offsets[-1])
    try:
        if token < 0 or not (0 <= sequence <= last <= files.num_sequences and pack_bounds[-1] <= files.num_tokens):
            raise ValueError(f"offsets of packs {first} to {first + count} leave the files")
        pack_bounds, sequence_offsets = pack_bounds - token, sequence_offsets - sequence
        bounds = _native.absolute_offsets(sequence_offsets, pack_bounds, files.starts[sequence:last])
    except ValueError as error:
        where = f"{shard.prefix}: packs from {first} on: {error}"
        raise FormatError(f"{where} (rules O1, O2, P2 to P4); megatron-sft-idx verify says what is wrong") from None
    here = sliced(
        {name: shard.columns.open(name) for name in columns},
        token=slice(token, token + int(pack_bounds[-1])),
        sequence=slice(sequence, last),
        pack=slice(first, first + count),
    )
    return Window(shard, first, token, sequence, pack_bounds, sequence_offsets, bounds, here)
