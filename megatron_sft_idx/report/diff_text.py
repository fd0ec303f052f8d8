"""What differs between two shards, for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from megatron_sft_idx.report.diff import Comparison, Difference
from megatron_sft_idx.report.marked import shortened
from megatron_sft_idx.report.odd import counted
from megatron_sft_idx.report.set_diff import PackDifference, SequenceDifference

__all__ = ["diff_lines"]

_MOST_FIELDS = 40
_OTHER = {"here": "there", "there": "here"}


def diff_lines(comparison: Comparison, here: str, there: str) -> list[str]:
    """As lines; ``here`` and ``there`` are the shards' prefixes."""
    lines = [f"here   {here}", f"there  {there}", ""]
    fields = comparison.header
    for name, (value, other) in islice(fields.items(), _MOST_FIELDS):
        lines.append(f"header: {shortened(name, 100)}: {_short(value)} here, {_short(other)} there")
    if len(fields) > _MOST_FIELDS:
        lines.append(f"header: {len(fields) - _MOST_FIELDS:,} fields more")
    if comparison.same:
        lines.append(f"the packs are equal: {counted(comparison.packs[0], 'pack')}, ids, masks and boundaries")
        return lines
    if "shard id" not in fields:
        lines.append(
            "both say they hold the same bytes, and do not: one was changed after it was written; verify --full says"
            " which"
        )
    return [*lines, *_pack_lines(comparison), *_set_lines(comparison)]


def _pack_lines(comparison: Comparison) -> Iterator[str]:
    count, other = comparison.packs
    if shared := min(count, other):
        of = f" of the first {shared:,}, which are compared by number," if count != other else ""
        verb = "differs" if comparison.differing_packs == 1 else "differ"
        yield (
            f"{counted(comparison.differing_packs, 'pack')}{of} {verb}:"
            f" {counted(comparison.masks, 'mask value')} and {counted(comparison.tokens, 'id')} in packs of equal"
            f" boundaries, {counted(comparison.reshaped, 'pack')} of other boundaries"
        )
    yield from (f"  {difference_text(one)}" for one in comparison.first)
    named = sum(one.what in ("token", "mask") for one in comparison.first)
    if (more := comparison.tokens + comparison.masks - named) > 0:
        yield f"  ... and {counted(more, 'more id or mask value', 'more ids and mask values')}"
    if (more := comparison.reshaped - (len(comparison.first) - named)) > 0:
        yield f"  ... and {counted(more, 'more pack')} of other boundaries"


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


def _set_lines(comparison: Comparison) -> Iterator[str]:
    packs, sequences = comparison.pack_set, comparison.sequences
    if packs is None or sequences is None:
        return
    if packs.same:
        yield f"both hold the same {counted(packs.shared, 'pack')}, in another order{_sampled(packs.share)}"
        return
    yield from _pack_set_lines(packs)
    yield from _sequence_lines(sequences)


def _pack_set_lines(found: PackDifference) -> Iterator[str]:
    of = _sampled(found.share)
    yield (
        f"as packs, whatever their order{of}: {found.shared:,} {'is' if found.shared == 1 else 'are'} in both,"
        f" {found.only_here:,} only here, {found.only_there:,} only there"
    )
    for where, numbers, count in (
        ("here", found.first_here, found.only_here),
        ("there", found.first_there, found.only_there),
    ):
        yield from (f"  pack {number} {where}: not {_OTHER[where]}" for number in numbers)
        if count and not numbers:
            yield f"  {where}: more copies of packs that are {_OTHER[where]} too"


def _sequence_lines(found: SequenceDifference) -> Iterator[str]:
    of = _sampled(found.share)
    if found.same:
        yield f"both hold the same {counted(found.shared, 'sequence')}, packed otherwise{of}"
        return
    yield (
        f"as sequences, whatever their packs{of}: {found.shared:,} {'is' if found.shared == 1 else 'are'} in both,"
        f" {found.other_mask:,} in both with other masks, {found.only_here:,} only here,"
        f" {found.only_there:,} only there"
    )
    for where, places in (("here", found.first_here), ("there", found.first_there)):
        yield from (
            f"  pack {pack}, sequence {sequence} {where}: not {_OTHER[where]} like this" for pack, sequence in places
        )


def _sampled(share: float) -> str:
    return "" if share == 1 else f", of a sample of {100 * share:.3g}% of them, chosen by hash, the same in both"


def _short(value: Any) -> str:
    return shortened(value if isinstance(value, str) else repr(value), 100)
