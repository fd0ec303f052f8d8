"""The origin of a shard's packs, from the entries ``origin`` and ``split`` of the header's JSON block.

A merged shard lists the shards that it was made from. A shard made by ``split`` lists its packs of the original shards,
and which output of the split it is. A JSON block is untrusted, so entries that do not fit the header are ignored.
Nothing here reads or writes a file.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.column import WEIGHTED_BY, weighted_by
from megatron_sft_idx.layout.doubts import DOUBTS
from megatron_sft_idx.layout.files import MEDIA_ENTRY

ORIGIN, SPLIT = "origin", "split"
# An entry takes about 250 bytes, and the JSON block of a header has room for 16 MiB.
MAX_RUNS = 50_000
PER_SHARD = frozenset({"columns", MEDIA_ENTRY, "notes", "packing", "sources", ORIGIN, SPLIT})
"""Keys of the JSON block that count or name what is in one shard: they hold neither of a merged nor of a split one."""

_COUNTS = ("num_packs", "num_sequences", "num_tokens")
Spans = Callable[[int, int], tuple[tuple[int, int], tuple[int, int]]]
"""Of packs ``[first, stop)``: first and last of their tokens, and first and last of their sequences."""


@dataclasses.dataclass(frozen=True, slots=True)
class OriginRun:
    """Consecutive packs of one shard. As a dict, it is an entry of ``origin`` in the JSON block.

    Attributes:
        shard_id: id of that shard, hex.
        source: fingerprint of the rows that it was made from; None if the shard has none.
        first_pack: number of the first of these packs in that shard.
        num_packs: number of packs.
        num_sequences: number of sequences in these packs.
        num_tokens: number of tokens in these packs.
    """

    shard_id: str
    source: str | None
    first_pack: int
    num_packs: int
    num_sequences: int
    num_tokens: int


def common_entries(objects: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """Return the entries that are equal in all JSON objects, and the keys of the entries that are not."""
    first = objects[0]
    differing = {key for each in objects for key in each.keys() | first if each.get(key) != first.get(key)}
    return {key: value for key, value in first.items() if key not in differing}, differing


def joined_metadata(objects: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """Return the JSON block for the packs of several shards, and the keys of other entries, which differ.

    Most entries are kept only if all shards have them. Marks of damage, and the columns that masks were multiplied by,
    are kept if one shard has them.
    """
    aside = PER_SHARD | DOUBTS.keys() | {WEIGHTED_BY}
    common, differing = common_entries([{k: value for k, value in each.items() if k not in aside} for each in objects])
    for key in DOUBTS:
        stated = [each[key] for each in objects if key in each]
        entries = [entry for value in stated for entry in (value if isinstance(value, list) else [value])]
        if stated:
            common[key] = [*{json.dumps(entry, sort_keys=True): entry for entry in entries}.values()]
    if weights := sorted({name for each in objects for name in weighted_by(each)}):
        common[WEIGHTED_BY] = weights
    return common, differing


def own_run(header: Header) -> OriginRun:
    """Return all packs of a shard, as a run of packs of the shard itself."""
    counts = header.num_packs, header.num_sequences, header.num_tokens
    return OriginRun(header.shard_id.hex(), header.source, 0, *counts)


def origin_runs(header: Header) -> list[OriginRun]:
    """Return the runs that make up a shard: its ``origin`` if that fits the header's counts, else the shard itself."""
    try:
        runs = [OriginRun(**entry) for entry in header.metadata[ORIGIN]]
        counts = [[run.first_pack, *(getattr(run, name) for name in _COUNTS)] for run in runs]
        fits = all(type(value) is int and value >= 0 for row in counts for value in row)
        fits = fits and all(type(run.shard_id) is str and isinstance(run.source, str | None) for run in runs)
        sums = list(map(sum, zip(*counts, strict=True)))[1:]
        fits = fits and sums == [getattr(header, name) for name in _COUNTS]
    except (KeyError, TypeError):
        fits = False
    return runs if fits else [own_run(header)]


def extend_runs(runs: list[OriginRun], more: Iterable[OriginRun]) -> None:
    """Append runs to a list. A run that continues the last one is joined to it; an empty run is skipped."""
    for run in more:
        last = runs[-1] if runs else None
        start = run.shard_id, run.source, run.first_pack
        if last and (last.shard_id, last.source, last.first_pack + last.num_packs) == start:
            sums = {name: getattr(last, name) + getattr(run, name) for name in _COUNTS}
            runs[-1] = dataclasses.replace(last, **sums)
        elif run.num_packs:
            runs.append(run)


class Origin:
    """The origin of a shard that is split. Each output gets its share.

    Args:
        header: header of the shard.
        spans: function that returns the spans of the shard's packs.
    """

    def __init__(self, header: Header, spans: Spans) -> None:
        self._runs, self._spans = origin_runs(header), spans
        self._ends = list(accumulate(run.num_packs for run in self._runs))

    def of_packs(self, first: int, stop: int) -> list[OriginRun]:
        """Return the runs of the packs ``[first, stop)``, in order."""
        runs: list[OriginRun] = []
        begin = first
        at = bisect.bisect_right(self._ends, first)
        while begin < stop:
            run, end = self._runs[at], min(stop, self._ends[at])
            (token, last_token), (sequence, last_sequence) = self._spans(begin, end)
            counts = end - begin, last_sequence - sequence, last_token - token
            first_pack = run.first_pack + run.num_packs - (self._ends[at] - begin)
            if end > begin:
                runs.append(OriginRun(run.shard_id, run.source, first_pack, *counts))
            begin, at = end, at + 1
        return runs


class SplitOutput(NamedTuple):
    """Identifies an output of a split: id of the split shard (hex), number of the output from 0, number of outputs."""

    shard_id: str
    number: int
    outputs: int

    @classmethod
    def of(cls, header: Header) -> SplitOutput | None:
        """Return the entry in a shard's JSON block; None if it was not split off, or the entry is invalid."""
        entry: Any = header.metadata.get(SPLIT)
        if not isinstance(entry, dict):
            return None
        output = cls(entry.get("shard_id", ""), entry.get("part", -1), entry.get("parts", -1))
        return output if [type(value) for value in output] == [str, int, int] else None

    def follows(self, other: SplitOutput | None) -> bool:
        """Return whether this is the next output after another one of the same split."""
        return other is not None and self == other._replace(number=other.number + 1)
