"""One shard to many."""

from __future__ import annotations

import bisect
import dataclasses
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.mmididx import idx_nbytes
from megatron_sft_idx.merge.agreement import PER_SHARD, SPLIT
from megatron_sft_idx.merge.merging import ProgressCallback, counting, refuse_shared
from megatron_sft_idx.merge.origin import ORIGIN, Origin, extend_runs, origin_entry, runs_of
from megatron_sft_idx.merge.source import SourceShard, nbytes_of
from megatron_sft_idx.merge.target import CopyWriter
from megatron_sft_idx.merge.trained import TrainedCount
from megatron_sft_idx.shard import Shard, check_free, read_header

__all__ = ["Parts", "SplitReport", "part_prefix", "split"]

# Their names have five digits, and each is five files.
_MAX_PARTS = 99_999
# A pack's length, position and document in .idx, and its two offsets in .seq.idx.
_INDEX_NBYTES = idx_nbytes(1) - idx_nbytes(0) + 16


@dataclass(frozen=True, slots=True)
class Parts:
    """How a shard is split; exactly one of these is given.

    Attributes:
        packs: most packs in a part; the last has what is left.
        nbytes: most bytes of the five files of a part, headers not counted; a larger pack is a part of its own.
        shards: how many parts; their packs differ by one at most, and some are empty where there are fewer packs.
    """

    packs: int | None = None
    nbytes: int | None = None
    shards: int | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in ("packs", "nbytes", "shards") if (value := getattr(self, name)) is not None}
        if len(given) != 1 or any(value < 1 for value in given.values()):
            raise FormatError(f"split by {given or 'nothing'}; give one of packs, nbytes and shards, 1 or more")


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What splitting did.

    Attributes:
        prefixes: of the parts, in order.
        headers: of the parts.
        num_skipped: parts that were there already.
    """

    prefixes: list[str]
    headers: list[Header]
    num_skipped: int
