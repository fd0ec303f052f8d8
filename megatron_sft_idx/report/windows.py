"""A shard read from end to end in bounded memory: windows of consecutive packs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import Shard

__all__ = ["Window", "locate_sequence", "read_window", "windows"]

# What a window holds at most, or one pack where that is larger: some 50 MiB with all that is computed from it.
_PACKS, _SEQUENCES, _TOKENS = 1 << 15, 1 << 18, 1 << 22


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive packs.

    Attributes:
        first: number of the first pack.
        token: number of its first token, among all of the shard.
        sequence: number of its first sequence, among all of the shard.
        pack_bounds: where packs begin and the last one ends, in tokens of the window: int64 [packs + 1].
        sequence_offsets: the same in sequences of the window: int64 [packs + 1].
        bounds: where sequences begin and the last one ends, in tokens of the window: int64 [sequences + 1].
    """

    first: int
    token: int
    sequence: int
    pack_bounds: NDArray[np.int64]
    sequence_offsets: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pack_bounds) - 1

    @property
    def tokens(self) -> slice:
        """The window's tokens among all of the shard."""
        return slice(self.token, self.token + int(self.pack_bounds[-1]))

    def by_pack(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums by pack of values by sequence."""
        sums: NDArray[Any] = np.add.reduceat(values, self.sequence_offsets[:-1])
        return sums

    def place(self, sequence: int) -> tuple[int, int]:
        """Pack, and number inside it, of the window's sequence ``sequence``."""
        pack = int(np.searchsorted(self.sequence_offsets, sequence, "right")) - 1
        return self.first + pack, sequence - int(self.sequence_offsets[pack])


def windows(shard: Shard) -> Iterator[Window]:
    """All packs in order.

    Raises:
        FormatError: offsets or starts that do not divide the tokens (rules O1, O2, P2 to P4).
    """
    shard.check_ends()
    first = 0
    while first < len(shard):
        window = read_window(shard, first, first + _PACKS)
        yield window
        first += len(window)


def read_window(shard: Shard, first: int, stop: int) -> Window:
    """Packs from ``first`` on, before ``stop``: as many as fit a window, and at least one. Raises as ``windows``."""
    files = shard.files
    stop = min(stop, len(shard))
    tokens, sequences = files.token_offsets[first : stop + 1], files.sequence_offsets[first : stop + 1]
    count = max(1, min(_fitting(tokens, _TOKENS), _fitting(sequences, _SEQUENCES)))
    tokens, sequences = tokens[: count + 1], sequences[: count + 1]
    token, sequence, last = int(tokens[0]), int(sequences[0]), int(sequences[-1])
    try:
        if token < 0 or not (0 <= sequence <= last <= files.num_sequences and tokens[-1] <= files.num_tokens):
            raise ValueError(f"offsets of packs {first} to {first + count} leave the files")
        pack_bounds, sequence_offsets = tokens - token, sequences - sequence
        bounds = _native.absolute_offsets(sequence_offsets, pack_bounds, files.starts[sequence:last])
    except ValueError as error:
        where = f"{shard.prefix}: packs from {first} on: {error}"
        raise FormatError(f"{where} (rules O1, O2, P2 to P4); megatron-sft-idx verify says what is wrong") from None
    return Window(first, token, sequence, pack_bounds, sequence_offsets, bounds)


def _fitting(offsets: NDArray[np.int64], most: int) -> int:
    """How many packs have at most so many tokens, or sequences, together."""
    return min(int(np.searchsorted(offsets, offsets[0] + most, "right")), len(offsets)) - 1


def locate_sequence(shard: Shard, number: int) -> tuple[int, int, int]:
    """Of sequence ``number`` among all of a shard: its pack, its number in that, its tokens."""
    offsets = shard.files.sequence_offsets
    low, high = 0, len(shard)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if offsets[middle : middle + 1][0] <= number else (low, middle)
    sequence = number - int(offsets[low : low + 1][0])
    start, stop = shard[low]["seq_boundaries"][sequence : sequence + 2].tolist()
    return low, sequence, stop - start
