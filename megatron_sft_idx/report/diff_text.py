"""What differs between two shards, for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from megatron_sft_idx.report.diff import Comparison, Difference
from megatron_sft_idx.report.sequence_diff import SequenceDifference

__all__ = ["diff_lines"]

_MOST_FIELDS = 40
_OTHER = {"here": "there", "there": "here"}


def diff_lines(comparison: Comparison, here: str, there: str) -> list[str]:
    """As lines; ``here`` and ``there`` are the shards' prefixes."""
    lines = [f"here   {here}", f"there  {there}", ""]
    fields = comparison.header
    for name, (value, other) in islice(fields.items(), _MOST_FIELDS):
        lines.append(f"header: {name}: {_short(value)} here, {_short(other)} there")
    if len(fields) > _MOST_FIELDS:
        lines.append(f"header: {len(fields) - _MOST_FIELDS:,} fields more")
    if comparison.same:
        lines.append(f"the packs are equal: {comparison.packs[0]:,} packs, ids, masks and boundaries")
        return lines
    if not fields:
        lines.append(
            "the headers are equal, the data are not: one was changed after it was written; verify --full says which"
        )
    return [*lines, *_pack_lines(comparison), *_sequence_lines(comparison.sequences)]


def _pack_lines(comparison: Comparison) -> Iterator[str]:
    count, other = comparison.packs
    if count != other:
        yield f"{count:,} packs here, {other:,} there; the first {min(count, other):,} are compared by number"
    yield (
        f"{comparison.differing_packs:,} packs differ: {comparison.masks:,} mask values and {comparison.tokens:,} ids"
        f" in packs of equal boundaries, {comparison.reshaped:,} packs of other boundaries"
    )
    yield from (f"  {difference_text(one)}" for one in comparison.first)
    named = sum(one.what in ("token", "mask") for one in comparison.first)
    if (more := comparison.tokens + comparison.masks - named) > 0:
        yield f"  ... and {more:,} ids and mask values more"


def difference_text(one: Difference) -> str:
    """One difference in a line."""
    if one.what == "length":
        return f"pack {one.pack}: {one.here:,} tokens here, {one.there:,} there"
    if one.what == "boundaries":
        return f"pack {one.pack}: sequences begin at {one.here} here, at {one.there} there"
    assert one.token is not None
    place = f"pack {one.pack}, sequence {one.sequence}, token {one.token} (position {one.position} of the pack)"
    if one.what == "token":
        return f"{place}: id {one.here} here, {one.there} there"
    told = f"whether token {one.token + 1} is trained on"
    return f"{place}: mask {one.here:g} here, {one.there:g} there: {told}"


def _sequence_lines(found: SequenceDifference | None) -> Iterator[str]:
    if found is None:
        return
    of = (
        ""
        if found.share == 1
        else f", of a sample of {100 * found.share:.3g}% of them, chosen by hash, the same in both"
    )
    if found.same:
        yield f"both hold the same {found.shared:,} sequences, packed otherwise{of}"
        return
    yield (
        f"as sequences, whatever their packs{of}: {found.shared:,} are in both, {found.other_mask:,} in both with other"
        f" masks, {found.only_here:,} only here, {found.only_there:,} only there"
    )
    for where, places in (("here", found.first_here), ("there", found.first_there)):
        yield from (
            f"  pack {pack}, sequence {sequence} {where}: not {_OTHER[where]} like this" for pack, sequence in places
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:99] + "…"
