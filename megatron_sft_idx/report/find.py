"""Text in the sequences of a shard."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from numpy.typing import NDArray

from megatron_sft_idx.report.marked import Decode
from megatron_sft_idx.report.windows import windows
from megatron_sft_idx.shard import Shard

__all__ = ["Match", "find_text"]

_CONTEXT = 40
# Tokens that are decoded together when a place is looked for, and of the longest character.
_PIECE, _LONGEST_CHARACTER = 512, 8


class Match(NamedTuple):
    """Where a text begins: pack, sequence in it, token in that; and the text before, itself, and after.

    ``trained`` is whether the token that the text begins in is trained on.
    """

    pack: int
    sequence: int
    token: int
    trained: bool
    before: str
    text: str
    after: str


def find_text(
    shard: Shard, text: str, decode: Decode, *, tell: Callable[[int, int], None] | None = None
) -> Iterator[Match]:
    """Every place of a text in the decoded sequences, in order, as they are found; no match crosses a sequence.

    Args:
        shard: the shard.
        text: what is looked for, as it is; not empty.
        decode: ids to text.
        tell: as in ``survey_shard``.
    """
    for window in windows(shard):
        ids, loss = shard.files.tokens[window.tokens], shard.files.loss[window.tokens]
        bounds = window.bounds.tolist()
        for number in range(len(bounds) - 1):
            some = ids[bounds[number] : bounds[number + 1]]
            decoded = decode(some.tolist())
            at, places = decoded.find(text), None
            while at >= 0:
                places = places or _Places(some, decoded, decode)
                token, end = places.token_at(at), at + len(text)
                trained = token > 0 and bool(loss[bounds[number] + token - 1])
                before, after = decoded[max(0, at - _CONTEXT) : at], decoded[end : end + _CONTEXT]
                yield Match(*window.place(number), token, trained, before, text, after)
                at = decoded.find(text, end)
        if tell:
            tell(int(window.pack_bounds[-1]), len(window))


class _Places:
    """Which token a character of a sequence's text belongs to: the first whose text reaches past it.

    A long sequence is decoded once more in pieces, so that a search decodes a piece again and again, not all before
    it. Where the texts of the pieces do not make up the whole, the sequence is one piece.
    """

    def __init__(self, ids: NDArray[Any], decoded: str, decode: Decode) -> None:
        self._ids, self._decode = ids, decode
        bounds, texts = [0], []
        while bounds[-1] < len(ids):
            stop, text = self._piece(bounds[-1])
            bounds.append(stop)
            texts.append(text)
        if "".join(texts) != decoded:
            bounds, texts = [0, len(ids)], [decoded]
        self._bounds, self._ends = bounds, list(accumulate(map(len, texts), initial=0))

    def _piece(self, begin: int) -> tuple[int, str]:
        """Where a piece ends and its text: a little later where its last character is not whole."""
        for stop in range(begin + _PIECE, begin + _PIECE + _LONGEST_CHARACTER):
            text = self._decode(self._ids[begin:stop].tolist())
            if stop >= len(self._ids) or not text.endswith("\ufffd"):
                break
        return min(stop, len(self._ids)), text

    def token_at(self, at: int) -> int:
        """The number of the token that character ``at`` belongs to."""
        piece = bisect_right(self._ends, at) - 1
        begin, at = self._bounds[piece], at - self._ends[piece]
        low, high = begin, self._bounds[piece + 1] - 1
        while low < high:
            middle = (low + high) // 2
            reaches = len(self._decode(self._ids[begin : middle + 1].tolist())) > at
            low, high = (low, middle) if reaches else (middle + 1, high)
        return low
