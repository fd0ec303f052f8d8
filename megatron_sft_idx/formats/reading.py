"""Small things that readers of several formats need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.formats.base import RUN_TOKENS

__all__ = ["file_identity", "run_bounds"]


def file_identity(*paths: str) -> str:
    """Size and time of change of files, which differ where a file was written anew."""
    stats = (os.stat(path) for path in paths)
    return " ".join(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in stats)


def run_bounds(token_offsets: NDArray[Any], tokens: int = RUN_TOKENS) -> Iterator[tuple[int, int]]:
    """First and last + 1 pack of runs of some ``tokens`` tokens, at least one pack each.

    Args:
        token_offsets: where each pack begins, and the last one ends, ascending [packs + 1].
        tokens: in a run, at most, unless a single pack has more.
    """
    first, packs = 0, len(token_offsets) - 1
    while first < packs:
        last = int(np.searchsorted(token_offsets, token_offsets[first] + tokens, side="right")) - 1
        last = min(max(last, first + 1), packs)
        yield first, last
        first = last
