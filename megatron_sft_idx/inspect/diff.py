"""What differs between two shards: pack by pack and, where much differs, as sets of packs and of sequences.

``here`` is the first shard in what is printed, and ``there`` the second. Ids and masks are compared by value, so that
shards of different dtypes can be equal.
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

# The most hashes of sequences, and of packs, that are kept of a shard.
_MAX_SEQUENCE_HASHES, _MAX_PACK_HASHES = 1 << 20, 1 << 18
_UPPER = np.uint64(0xFFFFFFFF00000000)
_MAX_FIELDS = 40
# Bytes of a column that are compared at a time.
_CHUNK_NBYTES = 1 << 22


class Difference(NamedTuple):
    """One difference between packs of the same number.

    Attributes:
        what: ``token``, ``mask``, ``boundaries`` or ``length``.
        pack: number of both packs.
        sequence: its number in the pack; None where the packs differ as a whole.
        token: its number in the sequence; None likewise.
        position: number of the same token in the pack; None likewise.
        here: value in the first shard.
        there: value in the second.
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
    """How the packs of two shards, or their sequences, differ as multisets, whatever their order.

    Two packs are the same if ids, masks and boundaries are, two sequences if ids and masks are.

    Attributes:
        share: the part of all packs or sequences that was counted; below 1, a sample by hash, the same in both shards.
        shared: how many are in both.
        only_here: how many the second shard lacks, or has fewer copies of; sequences are
            compared by ids alone.
        only_there: how many the first shard lacks, or has fewer copies of; likewise.
        first_here: the first few that the second shard does not have at all: numbers of packs, or for sequences their
            pack and number in it. A sequence is listed where its ids or its mask are not there.
        first_there: the first few that the first shard does not have at all.
        other_mask: of sequences, how many have the same ids in both and different masks; None of packs.
    """

    share: float
    shared: int
    only_here: int
    only_there: int
    first_here: tuple[Any, ...]
    first_there: tuple[Any, ...]
    other_mask: int | None = None

    @property
    def same(self) -> bool:
        """Whether both hold the same, copies counted, as far as the sample shows."""
        return not (self.other_mask or self.only_here or self.only_there)


@dataclass(slots=True)
class Comparison:
    """All that differs between two shards.

    Attributes:
        header: fields and metadata that differ, by name: the values here and there.
        packs: how many packs there are, here and there.
        differing_packs: how many packs of the same number differ in any way.
        tokens: how many ids differ in packs of the same boundaries.
        masks: how many mask values differ in packs of the same boundaries.
        reshaped: how many packs of the same number differ in length or boundaries.
        first: the first few differences.
        pack_set: the packs compared as sets; None where only single values differ.
        sequences: the sequences compared as sets; None likewise.
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
        values = asdict(self) | {"same": self.same, "first": [difference._asdict() for difference in self.first]}
        if self.pack_set is not None:
            del values["pack_set"]["other_mask"]
        return values


def compare_shards(here: Shard, there: Shard, *, max_named: int = 20, on_progress: Update | None = None) -> Comparison:
    """Compares every byte of two shards in bounded memory. Open them with the backend ``pread``: maps would count.

    Where packs of the same number differ in shape, or in more than ``max_named`` ids, both shards are read again and
    compared as sets of packs, and of sequences.

    Args:
        here: the first shard.
        there: the second.
        max_named: how many differences are named; all are counted.
        on_progress: called after each window with its tokens and packs.

    Raises:
        FormatError: the indexes of a shard do not divide its tokens.
    """
    result = Comparison(_header_differences(here.header, there.header), (len(here), len(there)))
    result.columns = _column_differences(here, there)
    here.check_ends()
    there.check_ends()
    shared, first = min(len(here), len(there)), 0
    while first < shared:
        # As many packs as fit into a window of both shards.
        window = read_window(here, first, shared)
        other = read_window(there, first, first + len(window))
        if len(other) < len(window):
            window = read_window(here, first, first + len(other))
        _compare_windows(window, other, result, max_named)
        if on_progress:
            on_progress(window.num_tokens, len(window))
        first += len(window)
    if result.reshaped or result.tokens > max_named or len(here) != len(there):
        result.pack_set, result.sequences = set_differences(here, there, max_named)
    return result


def _compare_windows(here: Window, there: Window, result: Comparison, max_named: int) -> None:
    """Adds to ``result`` how the packs of two windows differ, which must be those of the same numbers."""
    lengths, others = np.diff(here.pack_bounds), np.diff(there.pack_bounds)
    reshaped, differences = np.zeros(len(here), np.bool_), []
    if not (np.array_equal(lengths, others) and np.array_equal(here.bounds, there.bounds)):
        reshaped = (lengths != others) | (_shape_hashes(here) != _shape_hashes(there))
    for i in np.flatnonzero(reshaped)[:max_named].tolist():
        pair: tuple[str, Any, Any] = "length", int(lengths[i]), int(others[i])
        if lengths[i] == others[i]:
            pair = "boundaries", _starts(here, i), _starts(there, i)
        differences.append(Difference(pair[0], here.first_pack + i, None, None, None, *pair[1:]))
    # Where the tokens of packs of equal shape are in each window.
    comparable, other_comparable = (
        np.flatnonzero(np.repeat(~reshaped, np.diff(window.pack_bounds))) if reshaped.any() else slice(None)
        for window in (here, there)
    )
    changed = reshaped.copy()
    for what, ours, theirs in zip(("token", "mask"), here.content(), there.content(), strict=True):
        values, others_values = ours[comparable], theirs[other_comparable]
        differs = values != others_values
        if values.dtype.kind == others_values.dtype.kind == "f" and differs.any():
            differs &= ~(np.isnan(values) & np.isnan(others_values))  # damaged, but equally
        if not len(unequal := np.flatnonzero(differs)):
            continue
        if what == "token":
            result.tokens += len(unequal)
        else:
            result.masks += len(unequal)
        at, other_at = (
            unequal if isinstance(some, slice) else some[unequal] for some in (comparable, other_comparable)
        )
        changed[np.searchsorted(here.pack_bounds, at, "right") - 1] = True
        for i, j in zip(at[:max_named].tolist(), other_at[:max_named].tolist(), strict=True):
            number = int(np.searchsorted(here.bounds, i, "right")) - 1
            pack, sequence = here.locate(number)
            token, position = i - int(here.bounds[number]), i - int(here.pack_bounds[pack - here.first_pack])
            differences.append(Difference(what, pack, sequence, token, position, ours[i].item(), theirs[j].item()))
    result.reshaped += int(np.count_nonzero(reshaped))
    result.differing_packs += int(np.count_nonzero(changed))
    if (room := max_named - len(result.first)) > 0:
        result.first += sorted(differences, key=lambda one: (one.pack, one.position or 0))[:room]


def _starts(window: Window, i: int) -> list[int]:
    """The first few starts of the window's pack ``i``."""
    first, last = window.sequence_offsets[i : i + 2].tolist()
    starts: list[int] = (window.bounds[first : min(last, first + 9)] - window.pack_bounds[i]).tolist()
    return starts


def _header_differences(here: Header, there: Header) -> dict[str, tuple[Any, Any]]:
    """Fields and metadata in which two headers differ, by name; None for the one that lacks it."""
    pairs: dict[str, tuple[Any, Any]] = {}
    names = ("num_packs", "num_sequences", "num_tokens", "num_trained_tokens", "num_masked_packs", "capacity")
    for name in (*names, "sequence_multiple", "pad_id", "rebuilt"):
        pairs[name.replace("_", " ")] = (getattr(here, name), getattr(there, name))
    pairs["shard id"] = (here.shard_id.hex(), there.shard_id.hex())
    for name in ("token_dtype", "mask_dtype"):
        pairs[name.replace("_", " ")] = (getattr(here, name).name, getattr(there, name).name)
    left, right = _flat(here.metadata), _flat(there.metadata)
    pairs |= {name: (left.get(name), right.get(name)) for name in sorted({*left, *right})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _column_differences(here: Shard, there: Shard) -> dict[str, str]:
    """What differs in the columns of two shards, by name, in a few words; values are compared bit by bit."""
    texts = {}
    for name in sorted({*here.columns, *there.columns}):
        left, right = here.columns.get(name), there.columns.get(name)
        if left is None or right is None:
            texts[name] = f"only {'there' if left is None else 'here'}"
        elif left.spec.kind != right.spec.kind:
            texts[name] = f"{_kind(left)} here, {_kind(right)} there"
        elif len(left) != len(right):
            texts[name] = f"{counted(len(left), 'row')} here, {len(right):,} there"
        elif text := _value_difference(left, right):
            texts[name] = text
        elif left.spec.metadata != right.spec.metadata:
            texts[name] = "the same values, other metadata"
    return texts


def _kind(column: ShardColumn) -> str:
    per, dtype, width, alignment = column.spec.kind
    labels = ", aligned with labels" if alignment == "label" else ""
    return f"{np.dtype(dtype).name} x {width} a {per}{labels}"


def _value_difference(left: ShardColumn, right: ShardColumn) -> str | None:
    """How many rows of two columns of one kind and length differ, and the first; None where none does."""
    num_rows, first, count = max(1, _CHUNK_NBYTES // left.spec.row_nbytes), 0, 0
    for begin in range(0, len(left), num_rows):
        chunks = [column.items[begin : begin + num_rows].view(np.uint8) for column in (left, right)]
        differs = (chunks[0] != chunks[1]).reshape(-1, left.spec.row_nbytes).any(axis=1)
        if differs.any():
            first = first if count else begin + int(np.argmax(differs))
            count += int(np.count_nonzero(differs))
    if not count:
        return None
    values = [_short(column.values[first : first + 1].tolist()[0]) for column in (left, right)]
    return f"{counted(count, 'row')} of {len(left):,} differ, the first is {first}: {values[0]} here, {values[1]} there"


def _flat(values: Mapping[str, Any], prefix: str = "metadata") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix} {key}"
        flat |= _flat(value, name) if isinstance(value, Mapping) and value else {name: value}
    return flat


# ---- as sets ----


def set_differences(here: Shard, there: Shard, max_named: int) -> tuple[SetDifference, SetDifference]:
    """How two shards differ as sets of packs, and as sets of sequences whatever packs these are in.

    Args:
        here: the first shard.
        there: the second.
        max_named: how many packs, and sequences, of each shard are named.
    """
    left, right = _hash_samples(here), _hash_samples(there)
    (packs, ids, whole), (other_packs, other_ids, other_whole) = left, right
    pack_bits, bits = _thin_alike(packs, other_packs), _thin_alike(ids, whole, other_ids, other_whole)
    same_ids, only_here, only_there, *_ = _compare_samples(ids, other_ids, 0)
    shared, _, _, *first = _compare_samples(whole, other_whole, max_named)
    located, other_located = (
        tuple(locate_sequence(shard, number)[:2] for number in numbers)
        for shard, numbers in zip((here, there), first, strict=True)
    )
    return (
        SetDifference(0.5**pack_bits, *_compare_samples(packs, other_packs, max_named)),
        SetDifference(0.5**bits, shared, only_here, only_there, located, other_located, max(0, same_ids - shared)),
    )


def _hash_samples(shard: Shard) -> tuple[HashSample, HashSample, HashSample]:
    """Hashes of a shard's packs, of its sequences' ids, and of their ids and mask together."""
    packs, ids, whole = map(HashSample, (_MAX_PACK_HASHES, _MAX_SEQUENCE_HASHES, _MAX_SEQUENCE_HASHES))
    for window in windows(shard):
        tokens, loss = window.content()
        both = [_native.hash_runs(values, window.pack_bounds) for values in (tokens, loss)]
        packs.add(both[0] ^ both[1] * np.uint64(3) ^ _shape_hashes(window) * np.uint64(5), window.first_pack)
        hashes, masks = _native.hash_runs(tokens, window.bounds), _native.hash_runs(loss, window.bounds)
        ids.add(hashes, window.first_sequence)
        # The upper half decides what is kept. Without the mask in it, ``ids`` and ``whole`` keep the same sequences.
        whole.add(hashes & _UPPER | (hashes ^ masks) & ~_UPPER, window.first_sequence)
    return packs, ids, whole


def _shape_hashes(window: Window) -> NDArray[np.uint64]:
    """Hashes of the sequences' starts in their packs, by pack."""
    return _native.hash_runs(window.starts().astype(np.int32), window.sequence_offsets)


def _thin_alike(*samples: HashSample) -> int:
    """Thins all samples to the lowest limit among them; returns their ``bits``."""
    bits = max(sample.bits for sample in samples)
    for sample in samples:
        sample.thin(bits)
    return bits


def _compare_samples(
    here: HashSample, there: HashSample, max_named: int
) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]:
    """Two multisets: how many they share, how many only each has, and numbers of the first that only each has."""
    left, right = here.merged(), there.merged()
    _, at, other = np.intersect1d(left.hashes, right.hashes, assume_unique=True, return_indices=True)
    shared = int(np.minimum(left.times[at], right.times[other]).sum())
    alone, other_alone = (
        np.sort(np.delete(one.numbers, some))[:max_named] for one, some in ((left, at), (right, other))
    )
    only_here, only_there = (int(one.times.sum()) - shared for one in (left, right))
    return shared, only_here, only_there, tuple(alone.tolist()), tuple(other_alone.tolist())


# ---- for people ----


def diff_lines(comparison: Comparison, here: str, there: str) -> list[str]:
    """A comparison as lines; ``here`` and ``there`` are the shards' prefixes."""
    lines = [f"here   {here}", f"there  {there}", ""]
    fields = comparison.header
    for name, (value, other) in islice(fields.items(), _MAX_FIELDS):
        lines.append(f"header: {shortened(name, 100)}: {_short(value)} here, {_short(other)} there")
    if len(fields) > _MAX_FIELDS:
        lines.append(f"header: {len(fields) - _MAX_FIELDS:,} fields more")
    lines += [f"column {name}: {text}" for name, text in comparison.columns.items()]
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
    position = f"pack {one.pack}, sequence {one.sequence}, token {one.token} (position {one.position} of the pack)"
    if one.what == "token":
        return f"{position}: id {one.here} here, {one.there} there"
    label = f"whether token {one.token + 1} is trained on"
    return f"{position}: mask {one.here:g} here, {one.there:g} there: {label}"


def _set_lines(packs: SetDifference, sequences: SetDifference) -> Iterator[str]:
    for what, within, otherwise, difference in (
        ("pack", "order", "in another order", packs),
        ("sequence", "packs", "packed otherwise", sequences),
    ):
        of = ""
        if difference.share < 1:
            of = f", of a sample of {100 * difference.share:.3g}% of them, chosen by hash, the same in both"
        if difference.same:
            yield f"both hold the same {counted(difference.shared, what)}, {otherwise}{of}"
            return
        verb = "is" if difference.shared == 1 else "are"
        masks = f" {difference.other_mask:,} in both with other masks," if difference.other_mask is not None else ""
        yield (
            f"as {what}s, whatever their {within}{of}: {difference.shared:,} {verb} in both,"
            f"{masks} {difference.only_here:,} only here, {difference.only_there:,} only there"
        )
        for where, other, named, count in (
            ("here", "there", difference.first_here, difference.only_here),
            ("there", "here", difference.first_there, difference.only_there),
        ):
            if what == "sequence":
                yield from (
                    f"  pack {pack}, sequence {number} {where}: not {other} like this" for pack, number in named
                )
            elif named:
                yield from (f"  pack {pack} {where}: not {other}" for pack in named)
            elif count:
                yield f"  {where}: more copies of packs that are {other} too"
