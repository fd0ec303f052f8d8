"""Make micro-batches the slow and obvious way: one Python list per row, one position at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Row:
    """One row of a batch."""

    tokens: list[int]
    labels: list[int]
    position_ids: list[int]
    loss_mask: list[float]
    cu_seqlens: list[int]
    cu_seqlens_padded: list[int]
    max_seqlen: int


def slow_row(
    sequences: list[tuple[list[int], list[float]]], seq_length: int, width: int, multiple: int, pad_id: int
) -> Row:
    """Return a row of sequences, given as ids and label-aligned mask.

    ``cu_seqlens_padded`` is used only if multiple > 1.
    """
    row = Row([], [], [], [], [0], [0], 0)
    for ids, mask in sequences:
        own = len(ids)
        padding = 0
        while (own + padding) % multiple:
            padding += 1
        row.tokens += ids + [pad_id] * padding
        row.labels += [*ids[1:], pad_id] + [pad_id] * padding
        row.position_ids += range(own + padding)
        row.loss_mask += [*mask[:-1], 0.0] + [0.0] * padding
        row.cu_seqlens.append(row.cu_seqlens[-1] + own)
        row.cu_seqlens_padded.append(len(row.tokens))
        row.max_seqlen = max(row.max_seqlen, own + padding)
    tail = seq_length - len(row.tokens)
    row.tokens += [pad_id] * tail
    row.labels += [pad_id] * tail
    row.position_ids += range(tail)
    row.loss_mask += [0.0] * tail
    row.max_seqlen = max(row.max_seqlen, tail)
    if multiple == 1:
        row.cu_seqlens += [seq_length] * (width - len(row.cu_seqlens))
    else:
        row.cu_seqlens += [row.cu_seqlens[-1]] * (width - len(row.cu_seqlens))
    row.cu_seqlens_padded += [seq_length] * (width - len(row.cu_seqlens_padded))
    return row


def slow_batch(
    rows: list[list[tuple[list[int], list[float]]]], seq_length: int, width: int, multiple: int, pad_id: int
) -> dict[str, list[Any]]:
    """Return the tensors of a batch as lists, by name."""
    made = [slow_row(row, seq_length, width, multiple, pad_id) for row in rows]
    names = [name for name in Row.__annotations__ if multiple > 1 or name != "cu_seqlens_padded"]
    return {name: [getattr(row, name) for row in made] for name in names}


def slow_column(per: str, rows: list[Any], seq_length: int, width: int, multiple: int, zero: Any) -> list[Any]:
    """Return a column of a batch. ``rows`` has the values of each row, in the form for columns of ``per``."""
    if per == "pack":
        return rows
    out = []
    for row in rows:
        made: list[Any] = []
        for sequence in row:
            if per == "sequence":
                made.append(sequence)
                continue
            made += sequence
            while len(made) % multiple:
                made.append(zero)
        while len(made) < (seq_length if per == "token" else width - 1):
            made.append(zero)
        out.append(made)
    return out
