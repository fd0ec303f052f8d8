"""Where packs come from, through any number of merges and splits.

The JSON block of a merged shard, and of a part of a split one, has an ``origin``: a list of runs, each a range of
packs of a shard that was neither. Runs are in the order of the packs, and two that continue each other are one. So a
merge of merges lists the first sources, and merging the parts of a split gives back what was split, origin included.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from megatron_sft_idx.layout import Header
from megatron_sft_idx.shard.fingerprints import source_of

__all__ = ["MAX_RUNS", "ORIGIN", "Origin", "Run", "extend_runs", "origin_entry", "own_run", "runs_of"]

ORIGIN = "origin"
# Some 250 bytes each: a header holds 16 MiB.
MAX_RUNS = 50_000

_COUNTS = ("num_packs", "num_sequences", "num_tokens")
_Spans = Callable[[int, int], tuple[tuple[int, int], tuple[int, int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Packs of one shard that follow each other.

    Attributes:
        shard_id: of the shard, hex.
        source: fingerprint of the rows it was made from, where it says so.
        first_pack: number of the first pack in that shard.
        num_packs: how many.
        num_sequences: in these packs.
        num_tokens: in these packs.
    """

    shard_id: str
    source: str | None
    first_pack: int
    num_packs: int
    num_sequences: int
    num_tokens: int

    def continued_by(self, other: Run) -> bool:
        """Whether the other run begins where this one ends."""
        same = (self.shard_id, self.source) == (other.shard_id, other.source)
        return same and self.first_pack + self.num_packs == other.first_pack

    def __add__(self, other: Run) -> Run:
        return dataclasses.replace(
            self,
            num_packs=self.num_packs + other.num_packs,
            num_sequences=self.num_sequences + other.num_sequences,
            num_tokens=self.num_tokens + other.num_tokens,
        )


def own_run(header: Header) -> Run:
    """All packs of a shard, as its own."""
    counts = header.num_packs, header.num_sequences, header.num_tokens
    return Run(header.shard_id.hex(), source_of(header), 0, *counts)


def runs_of(header: Header) -> list[Run]:
    """Runs that make up a shard: its origin where it has one that fits its counts, else itself."""
    try:
        runs = [Run(**entry) for entry in header.metadata[ORIGIN]]
        counts = [[getattr(run, name) for name in _COUNTS] for run in runs]
        plain = all(type(value) is int and value >= 0 for row in counts for value in row)
        fits = plain and list(map(sum, zip(*counts, strict=True))) == [getattr(header, name) for name in _COUNTS]
    except (KeyError, TypeError):
        fits = False
    return runs if fits else [own_run(header)]


class Origin:
    """Runs of one shard, to be looked up by its packs.

    Args:
        runs: of all its packs, in order.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._begins = list(accumulate((run.num_packs for run in runs), initial=0))

    def slice(self, first: int, stop: int, spans: _Spans) -> list[Run]:
        """The runs of the packs ``[first, stop)``; ``spans`` gives the tokens and sequences that packs cover."""
        found = []
        number = bisect_right(self._begins, first) - 1
        while first < stop:
            run, begin = self._runs[number], self._begins[number]
            end = min(begin + run.num_packs, stop)
            tokens, sequences = spans(first, end)
            counts = end - first, sequences[1] - sequences[0], tokens[1] - tokens[0]
            found.append(Run(run.shard_id, run.source, run.first_pack + first - begin, *counts))
            first, number = end, number + 1
        return found


def extend_runs(runs: list[Run], more: Iterable[Run]) -> None:
    """Append runs to a list; one that continues the last becomes part of it, an empty one is left out."""
    for run in more:
        if runs and runs[-1].continued_by(run):
            runs[-1] += run
        elif run.num_packs:
            runs.append(run)


def origin_entry(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """What the JSON block has under ``ORIGIN``."""
    return [dataclasses.asdict(run) for run in runs]
