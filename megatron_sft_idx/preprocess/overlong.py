"""What becomes of sequences longer than a pack, decided on lengths alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError

__all__ = ["Cuts", "Overlong", "Selection", "cut_sequences"]

Overlong = Literal["error", "drop", "truncate", "split"]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Some cuts, in an order: what one output shard or one window of it is made of.

    Attributes:
        sequences: number of the sequence each is cut from, int64 [cuts].
        begins: where in that sequence it begins, in tokens, int64 [cuts]; None where all begin at 0.
        lengths: tokens of each, uint32 or int64 [cuts].
    """

    sequences: NDArray[np.int64]
    begins: NDArray[np.int64] | None
    lengths: NDArray[np.integer[Any]]

    def __len__(self) -> int:
        return len(self.sequences)

    def window(self, first: int, last: int) -> Selection:
        """Those from ``first`` to before ``last``."""
        begins = None if self.begins is None else self.begins[first:last]
        return Selection(self.sequences[first:last], begins, self.lengths[first:last])


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """What is packed: whole sequences, or runs of tokens cut from them.

    Attributes:
        lengths: tokens of each, int64 [cuts].
        sequences: number of the sequence each is cut from, int64 [cuts]; None where cut ``i`` is all of sequence ``i``.
        begins: where in that sequence each begins, int64 [cuts]; None where all begin at 0.
        overlong: sequences that were longer than a pack.
        dropped_tokens: tokens of dropped sequences, or behind the cut of truncated ones.
        parted: sequences that go on behind a cut, int64; one entry a cut.
        parted_at: the position in the sequence behind that cut, int64: whether its token is trained on decides
            whether the cut loses a label.
    """

    lengths: NDArray[np.int64]
    sequences: NDArray[np.int64] | None
    begins: NDArray[np.int64] | None
    overlong: int
    dropped_tokens: int
    parted: NDArray[np.int64]
    parted_at: NDArray[np.int64]

    def select(self, order: NDArray[np.int64]) -> Selection:
        """The cuts of these numbers."""
        sequences = order if self.sequences is None else self.sequences[order]
        begins = None if self.begins is None else self.begins[order]
        return Selection(sequences, begins, self.lengths[order])


def cut_sequences(
    lengths: NDArray[np.int64], *, capacity: int, sequence_multiple: int, overlong: Overlong, source: str
) -> Cuts:
    """Apply the policy for overlong sequences.

    Args:
        lengths: tokens of each sequence, int64 [sequences].
        capacity: most token positions a pack may hold.
        sequence_multiple: each sequence takes its length rounded up to this.
        overlong: the policy.
        source: what errors call the sequences.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: no sequence fits, or none is left.
    """
    longest = capacity // sequence_multiple * sequence_multiple
    if not longest:
        raise FormatError(
            f"--seq-length {capacity} is below --sequence-multiple {sequence_multiple}: no sequence fits; raise it"
        )
    long = lengths > longest
    count = int(long.sum())
    if count and overlong == "error":
        raise SequenceError(
            source,
            None,
            f"{count} of {len(lengths)} sequences are longer than {longest} tokens, the longest has {lengths.max()};"
            " choose --overlong drop, truncate or split, or a larger --seq-length",
        )
    cuts = _cut(lengths, long, longest, overlong, count)
    if not len(cuts.lengths):
        raise FormatError(f"{source}: no sequence is left to pack ({count} were longer than the capacity)")
    return cuts


def _cut(lengths: NDArray[np.int64], long: NDArray[np.bool_], longest: int, overlong: Overlong, count: int) -> Cuts:
    nothing = np.empty(0, np.int64)
    if not count:
        return Cuts(lengths, None, None, 0, 0, nothing, nothing)
    if overlong == "drop":
        kept = np.flatnonzero(~long)
        return Cuts(lengths[kept], kept, None, count, int(lengths[long].sum()), nothing, nothing)
    if overlong == "truncate":
        parted = np.flatnonzero(long)
        dropped = int((lengths[parted] - longest).sum())
        at = np.full(len(parted), longest, np.int64)
        return Cuts(np.minimum(lengths, longest), None, None, count, dropped, parted, at)
    parts = -(-lengths // longest)
    sequences = np.repeat(np.arange(len(lengths)), parts)
    begins = (np.arange(len(sequences)) - np.repeat(np.cumsum(parts) - parts, parts)) * longest
    inner = begins > 0
    each = np.minimum(lengths[sequences] - begins, longest)
    return Cuts(each, sequences, begins, count, 0, sequences[inner], begins[inner])
