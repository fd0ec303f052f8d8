"""A rendered text cut at the edges of its spans, for tokenising span by span."""

from __future__ import annotations

from typing import NamedTuple

from megatron_sft_idx.chat.types import Rendered

__all__ = ["Piece", "cut_at_spans"]


class Piece(NamedTuple):
    """Text that is wholly trained on with ``weight``, or not at all.

    Attributes:
        row: which rendered text it is from.
        text: never empty.
        weight: 0 outside spans.
        literals: the text's literals as far as they fall into the piece.
        middle: whether the text before it runs on into it, so that a tokenizer that begins texts with a space
            of its own must not. After a control token it does what it always does there.
    """

    row: int
    text: str
    weight: float
    literals: list[tuple[int, int]]
    middle: bool


def cut_at_spans(index: int, row: Rendered, added_tokens: tuple[str, ...]) -> list[Piece]:
    """The pieces of one text, in order.

    Raises:
        ValueError: spans descend, overlap or end past the text.
    """
    cuts: list[tuple[int, int, float]] = []
    done = 0
    for span in row.spans:
        if not done <= span.start <= span.stop <= len(row.text):
            raise ValueError(f"row {index}: span [{span.start}, {span.stop}) descends, overlaps or ends past the text")
        cuts += [(done, span.start, 0.0), (span.start, span.stop, span.weight)]
        done = span.stop
    cuts.append((done, len(row.text), 0.0))
    pieces = []
    for start, stop, weight in cuts:
        if start == stop:
            continue
        inside = [(max(a, start) - start, min(b, stop) - start) for a, b in row.literals if a < stop and b > start]
        middle = start > 0 and not row.text.endswith(added_tokens, 0, start)
        pieces.append(Piece(index, row.text[start:stop], weight, inside, middle))
    return pieces
