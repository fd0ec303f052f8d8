"""Packs as ranges of files: what comes next, and what may go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard.opening import Files
from megatron_sft_idx.storage import (
    BlockCache,
    CachedArray,
    Runs,
    announce,
    drop_file,
    drop_pages,
    huge_nbytes_of,
    is_remote,
)

__all__ = ["announce_packs", "checked_packs", "drop_packs", "huge_nbytes", "runs_of", "will_need_packs"]


def checked_packs(
    indices: Iterable[int | np.integer[Any]] | NDArray[np.int64], total: int, prefix: str
) -> NDArray[np.int64]:
    """Numbers of packs, negative ones counted from the end. IndexError, which names ``prefix``: no such pack."""
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, np.int64)
    packs = indices.astype(np.int64)  # first: sums of narrow integers would not fit
    packs[packs < 0] += total
    if (outside := (packs < 0) | (packs >= total)).any():
        raise IndexError(f"{prefix}: pack {indices[outside][0]}, there are {total}")
    return packs


def runs_of(shards: Sequence[Files], slots: NDArray[np.int64], packs: NDArray[np.int64]) -> Runs:
    """Where packs lie, in their order: of each its tokens, then its mask, as they are read.

    Packs whose offsets point outside the files are left out: whoever reads one is told.

    Args:
        shards: open files, of each some packs.
        slots: int64 [packs], which of the shards each pack lies in.
        packs: int64 [packs], its number there.
    """
    starts, counts = np.empty(len(packs), np.int64), np.empty(len(packs), np.int64)
    by_shard = np.split(np.argsort(slots, kind="stable"), np.cumsum(np.bincount(slots, minlength=len(shards)))[:-1])
    for files, mine in zip(shards, by_shard, strict=True):
        own = packs[mine]
        first = int(own.min())
        offsets = files.token_offsets[first : int(own.max()) + 2]
        begins, ends = offsets[own - first], offsets[own - first + 1]
        sound = (begins >= 0) & (begins < ends) & (ends <= files.num_tokens)
        starts[mine], counts[mine] = begins, np.where(sound, ends - begins, 0)
    some = counts > 0
    both = np.repeat(2 * slots[some], 2)
    both[1::2] += 1
    arrays = [array for files in shards for array in (files.tokens, files.loss)]
    return Runs(arrays, both, np.repeat(starts[some], 2), np.repeat(counts[some], 2))


def announce_packs(files: Files, indices: Iterable[int | np.integer[Any]] | NDArray[np.int64], prefix: str) -> None:
    """Have packs of one shard, in the order of their use, read in the background. IndexError: no such pack."""
    packs = checked_packs(indices, files.num_packs, prefix)
    if len(packs):
        announce(runs_of([files], np.zeros(len(packs), np.int64), packs))


def will_need_packs(files: Files, start: int, stop: int, prefix: str) -> None:
    """Have the kernel read packs ``[start, stop)`` in the background. IndexError, which names ``prefix``: no such."""
    if not 0 <= start <= stop <= files.num_packs:
        raise IndexError(f"{prefix}: packs {start} to {stop}, there are {files.num_packs}")
    first, last = _token_span(files, start, stop)
    if first < last:
        # Not into a cache of this process.
        sources = [array.source if isinstance(array, CachedArray) else array for array in (files.tokens, files.loss)]
        announce(Runs(sources, np.arange(2), np.full(2, first), np.full(2, last - first)))


def drop_packs(files: Files, paths: ShardPaths, start: int, stop: int | None) -> None:
    """Let go of packs ``[start, stop)``, numbers as in a slice; of all of them also what index arrays take."""
    start, stop, _ = slice(start, stop).indices(files.num_packs)
    if start >= stop or is_remote(paths.prefix):
        return
    first, last = _token_span(files, start, stop)
    drop_pages(paths.tokens, files.tokens, first, last)
    drop_pages(paths.loss, files.loss, first, last)
    if (start, stop) == (0, files.num_packs):
        drop_file(paths.starts, files.starts)
        drop_file(paths.seq_idx, files.token_offsets)  # both offsets are of one map


def _token_span(files: Files, start: int, stop: int) -> tuple[int, int]:
    """The tokens of packs ``[start, stop)``, within the file whatever the index says."""
    bounds = (int(files.token_offsets[pack : pack + 1][0]) for pack in (start, stop))
    first, last = (min(max(bound, 0), files.num_tokens) for bound in bounds)
    return first, last


def huge_nbytes(files: Files, cache: BlockCache | None) -> int:
    """Bytes of tokens and masks, or of the cache they are read through, that are mapped by huge pages."""
    return huge_nbytes_of([cache.memory] if cache is not None else [files.tokens, files.loss])
