"""The weights of tokens, from the characters of each; ``spellings`` has the same rule for bytes.

A token is trained if it contains part of a character of a span, as in transformers from 5.24 on. If two spans share a
token, it gets the larger of their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.types import Encoded, Rendered


class Crossing(NamedTuple):
    """A trained token that begins before its span."""

    token: int  # its number in the text
    before: str  # its characters before the span
    text: str  # all of its characters
    begins_in_span: bool  # whether its first character is in an earlier span that is also trained


def weigh_held(edges: NDArray[np.int64], row: Rendered) -> tuple[NDArray[np.float32], list[Crossing]]:
    """Return the weights of a text's tokens. ``edges`` has each token's characters ``[begin, end)``: int64 [tokens, 2].

    Returns:
        The weights, float32 [tokens], and the tokens that begin before the span for which they are trained.
    """
    span_edges(row)
    weights = np.zeros(len(edges), np.float32)
    held = np.flatnonzero(edges[:, 0] < edges[:, 1])  # tokens with at least one character
    begins, ends = edges[held].T
    crossings = []
    trained_up_to = 0
    for span in row.spans:
        first = int(np.searchsorted(ends, span.start, "right"))
        last = int(np.searchsorted(begins, span.stop, "left")) - 1
        if first > last or span.start == span.stop:
            continue  # no token contains a character of it
        begin, end = int(begins[first]), int(ends[first])
        tokens = slice(held[first], held[last] + 1)
        weights[tokens] = np.maximum(weights[tokens], np.float32(span.weight))
        if span.weight and begin < span.start:
            before, text = row.text[begin : span.start], row.text[begin:end]
            crossings.append(Crossing(int(held[first]), before, text, begin < trained_up_to))
        trained_up_to = span.stop if span.weight else trained_up_to
    return weights, crossings


def span_edges(row: Rendered) -> list[int]:
    """Return 0, start and end of each span, and the text's length. ValueError: they are not in ascending order."""
    edges = [0, *(edge for span in row.spans for edge in (span.start, span.stop)), len(row.text)]
    if edges != sorted(edges):
        text = f"the text of {len(row.text)} characters"
        raise ValueError(f"spans descend, overlap or end past {text}: {row.spans!r:.200}")
    return edges


def as_encoded(
    row: Rendered,
    ids: NDArray[np.uint32],
    weights: NDArray[np.float32],
    crossings: Sequence[Crossing],
    straddling: bool,
) -> Encoded:
    """Return a sequence of these ids and weights; without ``straddling``, tokens that begin before their span get 0."""
    input_ids = ids.view(np.int32)
    if not (crossings or row.literals):
        return Encoded(input_ids, weights, row.notes)
    notes = dict(row.notes)
    headers = [crossing for crossing in crossings if crossing.before.strip() and not crossing.begins_in_span]
    if crossings:
        notes["straddling" if straddling else "straddling_left_out"] = len(crossings)
    if headers and straddling:
        notes["straddling_header"] = len(headers)
    if row.literals:
        notes["literals"] = len(row.literals)
    if not straddling:
        weights[[crossing.token for crossing in crossings if not crossing.begins_in_span]] = 0
    return Encoded(input_ids, weights, notes, headers[0].text if headers else "")
