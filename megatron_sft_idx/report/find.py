"""Text in the sequences of a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray

from megatron_sft_idx.report.marked import Decode
from megatron_sft_idx.report.windows import windows
from megatron_sft_idx.shard import Shard

__all__ = ["Match", "find_text"]

_CONTEXT = 40


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
        tell: as in ``survey``.
    """
    for window in windows(shard):
        ids, loss = shard.files.tokens[window.tokens], shard.files.loss[window.tokens]
        bounds = window.bounds.tolist()
        for number in range(len(bounds) - 1):
            some = ids[bounds[number] : bounds[number + 1]]
            decoded = decode(some.tolist())
            at = decoded.find(text)
            while at >= 0:
                token = _token_at(some, at, decode)
                trained = token > 0 and bool(loss[bounds[number] + token - 1])
                before, after = decoded[max(0, at - _CONTEXT) : at], decoded[at + len(text) :][:_CONTEXT]
                yield Match(*window.place(number), token, trained, before, text, after)
                at = decoded.find(text, at + len(text))
        if tell:
            tell(int(window.pack_bounds[-1]), len(window))


def _token_at(ids: NDArray[Any], at: int, decode: Decode) -> int:
    """The token that character ``at`` of the sequence's text belongs to: the first whose text reaches past it."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(decode(ids[: middle + 1].tolist())) > at else (middle + 1, high)
    return low
