"""What differs between two shards: pack by pack, and where much does, as sets of packs and of sequences.

Ids and masks are compared by value, so that shards of different dtypes can be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.inspect.summary import locate_sequence
from megatron_sft_idx.inspect.tally import HashSample
from megatron_sft_idx.inspect.text import counted, shortened
from megatron_sft_idx.layout import Header
from megatron_sft_idx.packs.run import Window, read_window, windows
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.columns import ShardColumn
from megatron_sft_idx.storage.progress import Update

# Hashes that are held of a shard: of its sequences, and of its packs.
_MOST, _MOST_PACKS = 1 << 20, 1 << 18
_UPPER = np.uint64(0xFFFFFFFF00000000)
_MOST_FIELDS = 40
# Of columns, compared at a time.
_PIECE_NBYTES = 1 << 22


class Difference(NamedTuple):
    """One difference between packs of the same number.

    Attributes:
        what: ``token``, ``mask``, ``boundaries`` or ``length``.
        pack: its number.
        sequence: in the pack; None where the packs differ as a whole.
        token: in the sequence.
        position: the same in the pack.
        here: value in the first shard.
        there: value in the other.
    """

    what: str
    pack: int
    sequence: int | None
    token: int | None
    position: int | None
    here: Any
    there: Any


@dataclass(frozen=True)
class SetDifference:
    """How two shards' packs differ, or their sequences, copies counted, whatever their order.

    Attributes:
        share: of all that the counts are of; below 1 they are a sample, chosen by hash, the same in both.
        shared: in both: the same ids and masks, and of packs the same boundaries.
        only_here: what the other does not have, or not so often; of sequences by their ids.
        only_there: the same, the other way round.
        first_here: the first of those that the other does not have at all, of sequences with this mask: numbers of
            packs, or for sequences their pack and number in it.
        first_there: the same of the other.
        other_mask: of sequences: those in both whose masks differ.
    """

    share: float
    shared: int
    only_here: int
    only_there: int
    first_here: tuple[Any, ...]
    first_there: tuple[Any, ...]
    other_mask: int = 0

    @property
    def same(self) -> bool:
        """Whether both hold the same, as far as the sample tells."""
        return not (self.other_mask or self.only_here or self.only_there)


@dataclass(slots=True)
class Comparison:
    """All that differs.

    Attributes:
        header: fields and metadata that differ, by name: values here and there.
        packs: numbers of packs, here and there.
        differing_packs: packs of the same number that differ in any way.
        tokens: ids that differ in packs of the same boundaries.
        masks: the same of mask values.
        reshaped: packs of the same number whose lengths or boundaries differ.
        first: the first few differences.
        pack_set: of shards that differ by more than single values: the packs as a set.
        sequences: of the same: the sequences as a set.
        columns: what differs in columns, by name, in a few words.
    """

    header: dict[str, tuple[Any, Any]]
    packs: tuple[int, int]
    differing_packs: int = 0
    tokens: int = 0
    masks: int = 0
    reshaped: int = 0
    first: list[Difference] = field(default_factory=list)
    pack_set: SetDifference | None = None
    sequences: SetDifference | None = None
    columns: dict[str, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether packs, ids, masks, boundaries and columns are equal; headers may still say other things."""
        return not self.differing_packs and self.packs[0] == self.packs[1] and not self.columns

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        rest = {"same": self.same, "first": [difference._asdict() for difference in self.first]}
        return asdict(self) | rest


def compare_shards(here: Shard, there: Shard, *, most: int = 20, tell: Update | None = None) -> Comparison:
    """Compares every byte of two shards, in bounded memory; open them with the backend ``pread``.

    Where packs of the same number differ in shape, or in more ids than are named, both are read again as sets: of
    packs, and of sequences.

    Args:
        here: one shard.
        there: another.
        most: differences that are named; all are counted.
        tell: is given how many tokens and packs of ``here`` more are done.

    Raises:
        FormatError: indexes that do not divide the tokens.
    """
    result = Comparison(_header_differences(here.header, there.header), (len(here), len(there)))
    result.columns = _column_differences(here, there)
    here.check_ends()
    there.check_ends()
    shared, first = min(len(here), len(there)), 0
    while first < shared:
        # As many packs as fit a window of either.
        window = read_window(here, first, shared)
        other = read_window(there, first, first + len(window))
        if len(other) < len(window):
            window = read_window(here, first, first + len(other))
        _compare_windows(window, other, result, most)
        if tell:
            tell(window.num_tokens, len(window))
        first += len(window)
    if result.reshaped or result.tokens > most or len(here) != len(there):
        result.pack_set, result.sequences = set_differences(here, there, most)
    return result


def _compare_windows(here: Window, there: Window, result: Comparison, most: int) -> None:
    """The same packs of both: shapes of all, then values of those that have one shape."""
    lengths, others = np.diff(here.pack_bounds), np.diff(there.pack_bounds)
    reshaped, found = np.zeros(len(here), np.bool_), []
    if not (np.array_equal(lengths, others) and np.array_equal(here.bounds, there.bounds)):
        reshaped = (lengths != others) | (_shape_hashes(here) != _shape_hashes(there))
    for i in np.flatnonzero(reshaped)[:most].tolist():
        pair: tuple[str, Any, Any] = "length", int(lengths[i]), int(others[i])
        if lengths[i] == others[i]:
            pair = "boundaries", _starts(here, i), _starts(there, i)
        found.append(Difference(pair[0], here.first_pack + i, None, None, None, *pair[1:]))
    # The tokens of packs of one shape: where they lie here and there.
    kept, other_kept = (
        np.flatnonzero(np.repeat(~reshaped, np.diff(window.pack_bounds))) if reshaped.any() else slice(None)
        for window in (here, there)
    )
    changed = reshaped.copy()
    for what, ours, theirs in zip(("token", "mask"), here.content(), there.content(), strict=True):
        values, others_values = ours[kept], theirs[other_kept]
        differs = values != others_values
        if values.dtype.kind == others_values.dtype.kind == "f" and differs.any():
            differs &= ~(np.isnan(values) & np.isnan(others_values))  # damage, but the same in both
        if not len(unequal := np.flatnonzero(differs)):
            continue
        if what == "token":
            result.tokens += len(unequal)
        else:
            result.masks += len(unequal)
        at, other_at = (unequal if isinstance(some, slice) else some[unequal] for some in (kept, other_kept))
        changed[np.searchsorted(here.pack_bounds, at, "right") - 1] = True
        for i, j in zip(at[:most].tolist(), other_at[:most].tolist(), strict=True):
            number = int(np.searchsorted(here.bounds, i, "right")) - 1
            pack, sequence = here.locate(number)
            token, position = i - int(here.bounds[number]), i - int(here.pack_bounds[pack - here.first_pack])
            found.append(Difference(what, pack, sequence, token, position, ours[i].item(), theirs[j].item()))
    result.reshaped += int(np.count_nonzero(reshaped))
    result.differing_packs += int(np.count_nonzero(changed))
    if (room := most - len(result.first)) > 0:
        result.first += sorted(found, key=lambda one: (one.pack, one.position or 0))[:room]


def _starts(window: Window, i: int) -> list[int]:
    """The first few starts of the window's pack ``i``."""
    first, last = window.sequence_offsets[i : i + 2].tolist()
    starts: list[int] = (window.bounds[first : min(last, first + 9)] - window.pack_bounds[i]).tolist()
    return starts


def _header_differences(here: Header, there: Header) -> dict[str, tuple[Any, Any]]:
    """Fields and metadata that two headers do not share, by name; what only one has is None in the other."""
    found = {}
    names = ("num_packs", "num_sequences", "num_tokens", "num_trained_tokens", "num_masked_packs", "capacity")
    for name in (*names, "sequence_multiple", "pad_id", "rebuilt"):
        found[name.replace("_", " ")] = (getattr(here, name), getattr(there, name))
    found["shard id"] = (here.shard_id.hex(), there.shard_id.hex())
    for name in ("token_dtype", "mask_dtype"):
        found[name.replace("_", " ")] = (getattr(here, name).name, getattr(there, name).name)
    left, right = _flat(here.metadata), _flat(there.metadata)
    found |= {name: (left.get(name), right.get(name)) for name in sorted({*left, *right})}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def _column_differences(here: Shard, there: Shard) -> dict[str, str]:
    """What differs in the columns of two shards, by name; values bit by bit."""
    found = {}
    for name in sorted({*here.columns, *there.columns}):
        left, right = here.columns.get(name), there.columns.get(name)
        if left is None or right is None:
            found[name] = f"only {'there' if left is None else 'here'}"
        elif left.spec.kind != right.spec.kind:
            found[name] = f"{_kind(left)} here, {_kind(right)} there"
        elif len(left) != len(right):
            found[name] = f"{counted(len(left), 'row')} here, {len(right):,} there"
        elif said := _value_difference(left, right):
            found[name] = said
        elif left.spec.metadata != right.spec.metadata:
            found[name] = "the same values, other metadata"
    return found


def _kind(column: ShardColumn) -> str:
    per, dtype, width, alignment = column.spec.kind
    labels = ", aligned with labels" if alignment == "label" else ""
    return f"{np.dtype(dtype).name} x {width} a {per}{labels}"


def _value_difference(left: ShardColumn, right: ShardColumn) -> str | None:
    """The first row of two columns that differs, and how many do."""
    at_once, first, count = max(1, _PIECE_NBYTES // left.spec.row_nbytes), 0, 0
    for begin in range(0, len(left), at_once):
        pieces = [column.items[begin : begin + at_once].view(np.uint8) for column in (left, right)]
        differs = (pieces[0] != pieces[1]).reshape(-1, left.spec.row_nbytes).any(axis=1)
        if differs.any():
            first = first if count else begin + int(np.argmax(differs))
            count += int(np.count_nonzero(differs))
    if not count:
        return None
    values = [_short(column.values[first : first + 1].tolist()[0]) for column in (left, right)]
    return f"{counted(count, 'row')} of {len(left):,} differ, the first is {first}: {values[0]} here, {values[1]} there"


def _flat(values: Mapping[str, Any], prefix: str = "metadata") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix} {key}"
        found |= _flat(value, name) if isinstance(value, Mapping) and value else {name: value}
    return found


# ---- as sets ----


def set_differences(here: Shard, there: Shard, most: int) -> tuple[SetDifference, SetDifference]:
    """How the packs of two shards differ whatever their order, and their sequences whatever packs these are in.

    Args:
        here: one shard.
        there: another.
        most: packs, and sequences, of each that are named.
    """
    left, right = _hash_samples(here), _hash_samples(there)
    (packs, ids, whole), (other_packs, other_ids, other_whole) = left, right
    pack_bits, bits = _thin_alike(packs, other_packs), _thin_alike(ids, whole, other_ids, other_whole)
    same_ids, only_here, only_there, *_ = _compare_samples(ids, other_ids, 0)
    shared, _, _, *first = _compare_samples(whole, other_whole, most)
    places, other_places = (
        tuple(locate_sequence(shard, number)[:2] for number in numbers)
        for shard, numbers in zip((here, there), first, strict=True)
    )
    return (
        SetDifference(0.5**pack_bits, *_compare_samples(packs, other_packs, most)),
        SetDifference(0.5**bits, shared, only_here, only_there, places, other_places, max(0, same_ids - shared)),
    )


def _hash_samples(shard: Shard) -> tuple[HashSample, HashSample, HashSample]:
    """Hashes of a shard's packs, of its sequences' ids, and of their ids and mask together."""
    packs, ids, whole = HashSample(_MOST_PACKS), HashSample(_MOST), HashSample(_MOST)
    for window in windows(shard):
        tokens, loss = window.content()
        both = [_native.hash_runs(values, window.pack_bounds) for values in (tokens, loss)]
        packs.add(both[0] ^ both[1] * np.uint64(3) ^ _shape_hashes(window) * np.uint64(5), window.first_pack)
        hashes, masks = _native.hash_runs(tokens, window.bounds), _native.hash_runs(loss, window.bounds)
        ids.add(hashes, window.first_sequence)
        # The upper half decides what is kept, and must do so alike whatever the mask.
        whole.add(hashes & _UPPER | (hashes ^ masks) & ~_UPPER, window.first_sequence)
    return packs, ids, whole


def _shape_hashes(window: Window) -> NDArray[np.uint64]:
    """Hashes of the sequences' starts in their packs, by pack."""
    return _native.hash_runs(window.starts().astype(np.int32), window.sequence_offsets)


def _thin_alike(*samples: HashSample) -> int:
    """Gives all the limit of the one with the lowest; returns their bits."""
    bits = max(sample.bits for sample in samples)
    for sample in samples:
        sample.thin(bits)
    return bits


def _compare_samples(
    here: HashSample, there: HashSample, most: int
) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]:
    """Two multisets: how many elements they share and how many only one has; numbers of the first that only one has."""
    left, right = here.counted(), there.counted()
    _, at, other = np.intersect1d(left.hashes, right.hashes, assume_unique=True, return_indices=True)
    shared = int(np.minimum(left.times[at], right.times[other]).sum())
    alone, other_alone = (np.sort(np.delete(one.numbers, some))[:most] for one, some in ((left, at), (right, other)))
    only_here, only_there = (int(one.times.sum()) - shared for one in (left, right))
    return shared, only_here, only_there, tuple(alone.tolist()), tuple(other_alone.tolist())


# ---- for people ----


def diff_lines(comparison: Comparison, here: str, there: str) -> list[str]:
    """A comparison as lines; ``here`` and ``there`` are the shards' prefixes."""
    lines = [f"here   {here}", f"there  {there}", ""]
    fields = comparison.header
    for name, (value, other) in islice(fields.items(), _MOST_FIELDS):
        lines.append(f"header: {shortened(name, 100)}: {_short(value)} here, {_short(other)} there")
    if len(fields) > _MOST_FIELDS:
        lines.append(f"header: {len(fields) - _MOST_FIELDS:,} fields more")
    lines += [f"column {name}: {said}" for name, said in comparison.columns.items()]
    if not comparison.differing_packs and comparison.packs[0] == comparison.packs[1]:
        lines.append(f"the packs are equal: {counted(comparison.packs[0], 'pack')}, ids, masks and boundaries")
        return lines
    if "shard id" not in fields:
        lines.append(
            "both say they hold the same bytes, and do not: one was changed after it was written; verify --full says"
            " which"
        )
    lines += _pack_lines(comparison)
    if comparison.pack_set is not None and comparison.sequences is not None:
        lines += _set_lines(comparison.pack_set, comparison.sequences)
    return lines


def _short(value: Any) -> str:
    return shortened(value if isinstance(value, str) else repr(value), 100)


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
    yield from (f"  {_difference_text(one)}" for one in comparison.first)
    named = sum(one.what in ("token", "mask") for one in comparison.first)
    if (more := comparison.tokens + comparison.masks - named) > 0:
        yield f"  ... and {counted(more, 'more id or mask value', 'more ids and mask values')}"
    if (more := comparison.reshaped - (len(comparison.first) - named)) > 0:
        yield f"  ... and {counted(more, 'more pack')} of other boundaries"


def _difference_text(one: Difference) -> str:
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


def _set_lines(packs: SetDifference, sequences: SetDifference) -> Iterator[str]:
    for what, within, otherwise, found in (
        ("pack", "order", "in another order", packs),
        ("sequence", "packs", "packed otherwise", sequences),
    ):
        of = ""
        if found.share < 1:
            of = f", of a sample of {100 * found.share:.3g}% of them, chosen by hash, the same in both"
        if found.same:
            yield f"both hold the same {counted(found.shared, what)}, {otherwise}{of}"
            return
        masks = f" {found.other_mask:,} in both with other masks," if what == "sequence" else ""
        yield (
            f"as {what}s, whatever their {within}{of}: {found.shared:,} {'is' if found.shared == 1 else 'are'} in both,"
            f"{masks} {found.only_here:,} only here, {found.only_there:,} only there"
        )
        for where, other, places, count in (
            ("here", "there", found.first_here, found.only_here),
            ("there", "here", found.first_there, found.only_there),
        ):
            if what == "sequence":
                yield from (
                    f"  pack {pack}, sequence {number} {where}: not {other} like this" for pack, number in places
                )
            elif places:
                yield from (f"  pack {place} {where}: not {other}" for place in places)
            elif count:
                yield f"  {where}: more copies of packs that are {other} too"
