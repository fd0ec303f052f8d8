"""How fast the input becomes shards, and when it will be over."""

from __future__ import annotations

import time

from megatron_sft_idx.produce.feed import Feed
from megatron_sft_idx.tokenize import EncodedPiece

__all__ = ["Pace"]


class Pace:
    """Counts what this run does.

    Args:
        total_nbytes: of the whole input; None where nobody knows.
        left_nbytes: of the files that this run reads.
    """

    def __init__(self, total_nbytes: int | None, left_nbytes: int | None) -> None:
        self._total_nbytes, self._left_nbytes = total_nbytes, left_nbytes
        self._begin = time.monotonic()
        self._tokens = self._nbytes = 0

    def add(self, piece: EncodedPiece) -> None:
        """A piece is done."""
        self._tokens += len(piece.input_ids)
        self._nbytes += piece.num_bytes

    def line(self, feed: Feed) -> str:
        """The rate, and the time left where the end is known; what ``feed`` skipped was done by an earlier run."""
        seconds = max(time.monotonic() - self._begin, 1e-9)
        rate = f"{self._tokens / seconds:,.0f} tokens/s"
        if not self._total_nbytes or self._left_nbytes is None or not self._nbytes:
            return rate
        left = max(self._left_nbytes - feed.skipped_nbytes - self._nbytes, 0)
        share = 100 * (1 - left / self._total_nbytes)
        return f"{rate}, {share:.1f}% of the input, {left * seconds / self._nbytes:,.0f} s left"
