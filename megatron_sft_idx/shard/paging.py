"""Packs as ranges of files: what comes next, and what may go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard.opening import Files
from megatron_sft_idx.storage import BlockCache, Runs, announce, drop_pages, huge_nbytes_of

__all__ = ["announce_packs", "drop_packs", "huge_nbytes"]


def announce_packs(
    files: Files, indices: Iterable[int | np.integer[Any]] | NDArray[np.int64], prefix: str, *, more: bool = False
) -> None:
    """Have packs read in the background, in this order where it matters.

    Args:
        files: of the shard.
        indices: of the packs; negative ones count from the end.
        prefix: of the shard, for the error.
        more: after those announced before, rather than instead of them.

    Raises:
        IndexError: no such pack.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, np.int64)
    packs = np.where(indices < 0, indices + files.num_packs, indices).astype(np.int64)
    if (outside := (packs < 0) | (packs >= files.num_packs)).any():
        raise IndexError(f"{prefix}: pack {indices[outside][0]}, the shard has {files.num_packs}")
    if not len(packs):
        return
    first = int(packs.min())
    offsets = files.token_offsets[first : int(packs.max()) + 2]
    starts, stops = offsets[packs - first], offsets[packs - first + 1]
    # Offsets that point outside are an error of whoever reads the pack.
    sound = (starts >= 0) & (starts < stops) & (stops <= files.num_tokens)
    starts, counts = np.repeat(starts[sound], 2), np.repeat((stops - starts)[sound], 2)
    announce(Runs([files.tokens, files.loss], np.arange(len(starts)) % 2, starts, counts), more=more)


def drop_packs(files: Files, paths: ShardPaths, start: int, stop: int) -> None:
    """Let go of packs ``[start, stop)``, numbers as in a slice; of all of them also what index arrays take."""
    start, stop, _ = slice(start, stop).indices(files.num_packs)
    if start >= stop:
        return
    bounds = int(files.token_offsets[start : start + 1][0]), int(files.token_offsets[stop : stop + 1][0])
    first, last = (min(max(bound, 0), files.num_tokens) for bound in bounds)
    drop_pages(paths.tokens, files.tokens, first, last)
    drop_pages(paths.loss, files.loss, first, last)
    if (start, stop) == (0, files.num_packs):
        drop_pages(paths.starts, files.starts, 0, files.num_sequences)
        for offsets in files.sequence_offsets, files.token_offsets:
            drop_pages(paths.seq_idx, offsets, 0, len(offsets))


def huge_nbytes(files: Files, cache: BlockCache | None) -> int:
    """Bytes of tokens and masks, or of the cache they are read through, that are mapped by huge pages."""
    return huge_nbytes_of([cache.memory] if cache is not None else [files.tokens, files.loss])
