"""The packs a page shows as text: which, and how much of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup, escape

from megatron_sft_idx.report.marked import Decode, marked_runs, trained_tokens
from megatron_sft_idx.report.page.shapes import bar_paths
from megatron_sft_idx.report.survey import Survey
from megatron_sft_idx.shard import Shard

__all__ = ["ShownPack", "ShownSequence", "shown_numbers", "shown_pack", "spread"]

# What a run costs beside its text, in bytes of the page.
_RUN_NBYTES, _SEQUENCE_NBYTES = 24, 260


@dataclass(frozen=True, slots=True)
class ShownSequence:
    """A sequence, or its beginning: ``runs`` of text and weight; ``hidden`` tokens at its end are left out."""

    number: int
    start: int
    stop: int
    trained: int
    runs: Sequence[tuple[str, float]]
    hidden: int


@dataclass(frozen=True, slots=True)
class ShownPack:
    """A pack in the viewer; ``hidden_sequences`` at its end are left out, the others take ``nbytes`` of the page."""

    number: int
    length: int
    trained: int
    bar: Markup
    sequences: Sequence[ShownSequence]
    num_sequences: int
    hidden_sequences: int
    nbytes: int


def spread(count: int, most: int) -> list[int]:
    """Up to ``most`` of the numbers below ``count``, first and last among them, evenly spread."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist())) if count else []


def shown_numbers(survey: Survey, drawn: Iterable[int]) -> list[int]:
    """The first packs, the odd ones, and those drawn, in order."""
    odd = (place.pack for one in survey.odd for place in one.places)
    return sorted({*range(min(survey.header.num_packs, 3)), *odd, *drawn})


def shown_pack(shard: Shard, number: int, decode: Decode, nbytes: int) -> ShownPack:
    """One pack, whose text fills about ``nbytes`` of the page at most."""
    left = nbytes
    pack = shard[number]
    ids, mask = pack["input_ids"], pack["loss_mask"]
    bounds = pack["seq_boundaries"].tolist()
    shown: list[ShownSequence] = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        left -= _SEQUENCE_NBYTES
        if left <= 0:
            break
        weights = trained_tokens(mask[start:stop])
        # A token is a byte of the page at least: more of them are never shown.
        runs, tokens, used = _cut(marked_runs(ids[start:stop][:left], weights[:left], decode), left)
        left -= used
        trained = int(np.count_nonzero(weights))
        shown.append(ShownSequence(index, start, stop, trained, runs, stop - start - tokens))
    return ShownPack(
        number,
        len(ids),
        int(np.count_nonzero(mask)),
        bar_paths(pack, shard.header.capacity),
        shown,
        len(bounds) - 1,
        len(bounds) - 1 - len(shown),
        nbytes - max(left, 0),
    )


def _cut(runs: Iterable[tuple[str, float, int]], nbytes: int) -> tuple[list[tuple[str, float]], int, int]:
    """The runs that fit so many bytes of the page, the tokens in them, the bytes they take.

    Of a run that does not fit, the beginning is kept, and none of its tokens counted.
    """
    kept: list[tuple[str, float]] = []
    tokens = used = 0
    for text, weight, length in runs:
        size = len(str(escape(text)).encode("utf-8", "replace")) + _RUN_NBYTES
        if used + size > nbytes:
            # The longest a character becomes is 5 bytes.
            kept.append((text[: max(0, nbytes - used) // 5], weight))
            return kept, tokens, nbytes
        kept.append((text, weight))
        tokens, used = tokens + length, used + size
    return kept, tokens, used
