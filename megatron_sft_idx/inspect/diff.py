"""Differences between two shards: pack by pack and, if there are many, as sets of sequences.

This shows whether a change of options, data or version changed the training data. ``here`` is the first shard,
``there`` the second. Ids and masks are compared by value, so shards with different dtypes can be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.inspect.summary import column_kind, locate_sequence
from megatron_sft_idx.inspect.tally import HashSample
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.media_layout import Items
from megatron_sft_idx.lines import counted, shortened
from megatron_sft_idx.packs.run import Window, read_window, windows
from megatron_sft_idx.packs.run_media import Blobs, RunMedia
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.columns import ShardColumn
from megatron_sft_idx.shard.media_reader import ShardMedia
from megatron_sft_idx.storage.progress import Update

_MAX_HASHES = 1 << 20  # maximum number of hashes to keep for the sequences of a shard
_UPPER = np.uint64(0xFFFFFFFF00000000)
_MAX_FIELDS = 40
# Number of bytes of a column to compare at a time.
_CHUNK_NBYTES = 1 << 22
# Number of packs whose images and audio are compared at a time.
_CHUNK_PACKS = 1 << 12


class Difference(NamedTuple):
    """One difference between packs of the same number.

    Attributes:
        what: ``token``, ``mask``, ``boundaries`` or ``length``.
        pack: number of both packs.
        sequence: number of the sequence in the pack; None if the packs differ in length or boundaries.
        token: number of the token in the sequence; None likewise.
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
    """The difference of the sequences of two shards as multisets, independent of order and packs.

    Attributes:
        share: the fraction of all sequences that was counted; below 1, a sample by hash, the same in both shards.
        shared: number of sequences in both, with the same ids and the same mask.
        other_mask: number of sequences with the same ids in both but different masks.
        only_here: number of sequences that the second shard lacks, or has fewer copies of; compared only by ids.
        only_there: number of sequences that the first shard lacks, or has fewer copies of; likewise.
        first_here: the first few sequences whose ids or mask the second shard lacks: (pack, number in the pack).
        first_there: the first few sequences whose ids or mask the first shard lacks.
        with_media: whether one of the shards has images or audio. Then sequences with other items, or with items at
            other positions, count as having other masks.
    """

    share: float
    shared: int
    other_mask: int
    only_here: int
    only_there: int
    first_here: list[tuple[int, int]]
    first_there: list[tuple[int, int]]
    with_media: bool = False

    @property
    def same(self) -> bool:
        """Whether both have the same sequences, each equally often, as far as the sample shows."""
        return not (self.other_mask or self.only_here or self.only_there)


@dataclass(slots=True)
class Comparison:
    """All differences between two shards.

    Attributes:
        header: fields and metadata that differ, by name: the values here and there.
        packs: number of packs, here and there.
        differing_packs: number of packs of the same number that differ in any way.
        tokens: number of different ids in packs with the same boundaries.
        masks: number of different mask values in packs with the same boundaries.
        reshaped: number of packs of the same number that differ in length or boundaries.
        first: the first few differences.
        sequences: the sequences compared as sets; None if only single values differ.
        columns: differences in columns, by name, as short text.
        media: differences in images and audio, as short text; "" if there are none.
    """

    header: dict[str, tuple[Any, Any]]
    packs: tuple[int, int]
    differing_packs: int = 0
    tokens: int = 0
    masks: int = 0
    reshaped: int = 0
    first: list[Difference] = field(default_factory=list)
    sequences: SetDifference | None = None
    columns: dict[str, str] = field(default_factory=dict)
    media: str = ""

    @property
    def same(self) -> bool:
        """Whether packs, ids, masks, boundaries, columns and media are equal. Headers may still differ."""
        return not (self.differing_packs or self.columns or self.media) and self.packs[0] == self.packs[1]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return asdict(self) | {"same": self.same, "first": [difference._asdict() for difference in self.first]}


def compare_shards(here: Shard, there: Shard, *, max_named: int = 20, on_progress: Update | None = None) -> Comparison:
    """Compare every byte of two shards in bounded memory. Open them with ``pread``: mapped pages count as memory.

    If packs of the same number differ in shape, or in more than ``max_named`` ids, both shards are read again and
    compared as sets of sequences.

    Args:
        here: the first shard.
        there: the second.
        max_named: maximum number of listed differences; all are counted.
        on_progress: called after each window with its tokens and packs.

    Raises:
        FormatError: the indexes of a shard do not divide its tokens.
    """
    result = Comparison(_header_differences(here.header, there.header), (len(here), len(there)))
    result.columns = _column_differences(here, there)
    result.media = _media_difference(here.media, there.media)
    here.files.check_ends()
    there.files.check_ends()
    shared, first = min(len(here), len(there)), 0
    while first < shared:
        # As many packs as fit in a window of both shards.
        window = read_window(here.files, first, shared)
        other = read_window(there.files, first, first + len(window))
        if len(other) < len(window):
            window = read_window(here.files, first, first + len(other))
        _compare_windows(window, other, result, max_named)
        if on_progress:
            on_progress(window.num_tokens, len(window))
        first += len(window)
    if result.reshaped or result.tokens > max_named or len(here) != len(there):
        result.sequences = set_difference(here, there, max_named)
    return result


def _compare_windows(here: Window, there: Window, result: Comparison, max_named: int) -> None:
    """Add the differences between the packs of two windows, which must have the same numbers, to ``result``."""
    contents, others = here.content(), there.content()
    pairs = ((here.bounds, there.bounds), (here.pack_bounds, there.pack_bounds), *zip(contents, others, strict=True))
    if all(np.array_equal(ours, theirs, equal_nan=True) for ours, theirs in pairs):
        return
    for i in range(len(here)):
        begin, other_begin = int(here.pack_bounds[i]), int(there.pack_bounds[i])
        bounds, other_bounds = _bounds_of(here, i), _bounds_of(there, i)
        pack, length = here.first_pack + i, int(bounds[-1])
        found: list[Difference] = []
        if length != other_bounds[-1]:
            found.append(Difference("length", pack, None, None, None, length, int(other_bounds[-1])))
        elif not np.array_equal(bounds, other_bounds):
            starts, other_starts = bounds[:-1][:9].tolist(), other_bounds[:-1][:9].tolist()
            found.append(Difference("boundaries", pack, None, None, None, starts, other_starts))
        num_before = result.reshaped + result.tokens + result.masks
        if found:
            result.reshaped += 1
        else:
            for what, content, other in zip(("token", "mask"), contents, others, strict=True):
                ours, theirs = content[begin : begin + length], other[other_begin : other_begin + length]
                # If both have NaN, both are damaged in the same way.
                unequal = np.flatnonzero((ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs)))
                if what == "token":
                    result.tokens += len(unequal)
                else:
                    result.masks += len(unequal)
                for position in unequal[:max_named].tolist():
                    sequence = int(np.searchsorted(bounds, position, "right")) - 1
                    token, values = position - int(bounds[sequence]), (ours[position].item(), theirs[position].item())
                    found.append(Difference(what, pack, sequence, token, position, *values))
            found.sort(key=lambda one: one.position or 0)
        result.differing_packs += result.reshaped + result.tokens + result.masks > num_before
        result.first += found[: max_named - len(result.first)]


def _bounds_of(window: Window, i: int) -> NDArray[np.int64]:
    """Return the starts of the sequences of the window's pack ``i``, and its length."""
    first, last = window.sequence_offsets[i : i + 2].tolist()
    bounds: NDArray[np.int64] = window.bounds[first : last + 1] - window.pack_bounds[i]
    return bounds


def _header_differences(here: Header, there: Header) -> dict[str, tuple[Any, Any]]:
    """Return fields and metadata in which two headers differ, by name: both values, None for a missing one."""
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
    """Describe the differences in the columns of two shards, by name; values are compared bit by bit."""
    texts = {}
    for name in sorted({*here.columns, *there.columns}):
        left, right = here.columns.get(name), there.columns.get(name)
        if left is None or right is None:
            texts[name] = f"only {'there' if left is None else 'here'}"
        elif left.spec.kind != right.spec.kind:
            texts[name] = f"{column_kind(left.spec)} here, {column_kind(right.spec)} there"
        elif len(left) != len(right):
            texts[name] = f"{counted(len(left), 'row')} here, {len(right):,} there"
        elif text := _value_difference(left, right):
            texts[name] = text
        elif left.spec.metadata != right.spec.metadata:
            texts[name] = "same values, different metadata"
    return texts


def _value_difference(left: ShardColumn, right: ShardColumn) -> str | None:
    """Describe how many rows of two columns of one kind and length differ, and the first one; None if none."""
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


def _media_difference(here: ShardMedia | None, there: ShardMedia | None) -> str:
    """Describe in which packs of the same number images and audio differ; files are compared by hash."""
    if here is None or there is None:
        return "" if here is there else f"only {'there' if here is None else 'here'}"
    first, differing = -1, 0
    for begin in range(0, min(here.header.num_packs, there.header.num_packs), _CHUNK_PACKS):
        end = min(begin + _CHUNK_PACKS, here.header.num_packs, there.header.num_packs)
        pairs = zip(_items_of(here, begin, end), _items_of(there, begin, end), strict=True)
        unequal = [at for at, (ours, theirs) in enumerate(pairs) if ours != theirs]
        first = begin + unequal[0] if unequal and first < 0 else first
        differing += len(unequal)
    if not differing:
        return ""
    items, others = (int(media.items(first, first + 1)[0][0]) for media in (here, there))
    packs = f"{counted(differing, 'pack')} with the same number {'differs' if differing == 1 else 'differ'}"
    return f"{packs}, the first is pack {first}: {counted(items, 'item')} here, {others:,} there"


def _items_of(media: ShardMedia, begin: int, end: int) -> list[bytes]:
    """Return for each pack from ``begin`` to ``end`` its items as bytes: position, and hash of the file."""
    counts, items = media.items(begin, end)
    records = _records(media, items)
    bounds = np.append(0, np.cumsum(counts)).tolist()
    return [b"".join(records[first:last]) for first, last in pairwise(bounds)]


def _records(blobs: Blobs, items: Items) -> list[bytes]:
    """Return each item as bytes: position, and hash of its file."""
    places = np.stack([items.starts, items.lengths, items.kinds], 1).astype("<u4")
    return [place.tobytes() + blobs.hash(blob) for place, blob in zip(places, items.blobs.tolist(), strict=True)]


def _flat(values: Mapping[str, Any], prefix: str = "metadata") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix} {key}"
        flat |= _flat(value, name) if isinstance(value, Mapping) and value else {name: value}
    return flat


# ---- as sets ----


def set_difference(here: Shard, there: Shard, max_named: int) -> SetDifference:
    """Return how two shards differ as sets of sequences; at most ``max_named`` of each shard are listed."""
    (ids, whole), (other_ids, other_whole) = _hash_samples(here), _hash_samples(there)
    bits = max(sample.bits for sample in (ids, whole, other_ids, other_whole))
    for sample in (ids, whole, other_ids, other_whole):
        sample.thin(bits)
    same_ids, only_here, only_there, *_ = _compare_samples(ids, other_ids)
    shared, _, _, first_here, first_there = _compare_samples(whole, other_whole)
    return SetDifference(
        0.5**bits,
        shared,
        max(0, same_ids - shared),
        only_here,
        only_there,
        [locate_sequence(here, number)[:2] for number in first_here[:max_named].tolist()],
        [locate_sequence(there, number)[:2] for number in first_there[:max_named].tolist()],
        here.media is not None or there.media is not None,
    )


def _hash_samples(shard: Shard) -> tuple[HashSample, HashSample]:
    """Return hashes of the ids of a shard's sequences, and of their ids and masks together."""
    ids, whole = HashSample(_MAX_HASHES), HashSample(_MAX_HASHES)
    for window in windows(shard.files, media=shard.media):
        tokens, loss = window.content()
        hashes, masks = _native.hash_runs(tokens, window.bounds), _native.hash_runs(loss, window.bounds)
        if window.media is not None:
            masks ^= _media_hashes(window.media)
        ids.add(hashes, window.first_sequence)
        # ``HashSample`` uses the upper half. It depends only on the ids, so both samples keep the same sequences.
        whole.add(hashes & _UPPER | (hashes ^ masks) & ~_UPPER, window.first_sequence)
    return ids, whole


def _media_hashes(media: RunMedia) -> NDArray[np.uint64]:
    """Return a hash of the images and audio of each sequence, 0 if it has none: uint64 [sequences]."""
    records, bounds = _records(media.blobs, media.items), media.offsets.tolist()
    pairs = pairwise(bounds)
    hashes = [xxhash.xxh3_64_intdigest(b"".join(records[first:last])) if last > first else 0 for first, last in pairs]
    return np.array(hashes, np.uint64)


def _compare_samples(here: HashSample, there: HashSample) -> tuple[int, int, int, NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of sequences in both, only here, only there; then the sequences only here and only there."""
    left, right = here.merged(), there.merged()
    _, at, other = np.intersect1d(left.hashes, right.hashes, assume_unique=True, return_indices=True)
    shared = int(np.minimum(left.times[at], right.times[other]).sum())
    alone, other_alone = np.sort(np.delete(left.numbers, at)), np.sort(np.delete(right.numbers, other))
    return shared, int(left.times.sum()) - shared, int(right.times.sum()) - shared, alone, other_alone


# ---- output for people ----


def diff_lines(comparison: Comparison, here: str, there: str) -> list[str]:
    """Return a comparison as lines; ``here`` and ``there`` are the shards' prefixes."""
    lines = [f"here   {here}", f"there  {there}", ""]
    fields = comparison.header
    for name, (value, other) in islice(fields.items(), _MAX_FIELDS):
        lines.append(f"header: {shortened(name, 100)}: {_short(value)} here, {_short(other)} there")
    if len(fields) > _MAX_FIELDS:
        lines.append(f"header: {len(fields) - _MAX_FIELDS:,} more fields")
    lines += [f"column {name}: {text}" for name, text in comparison.columns.items()]
    lines += [f"images and audio: {comparison.media}"] if comparison.media else []
    if not comparison.differing_packs and comparison.packs[0] == comparison.packs[1]:
        different = ["columns"] * bool(comparison.columns) + ["images and audio"] * bool(comparison.media)
        rest = f"; the shards are not, because {' and '.join(different)} differ" if different else ""
        lines.append(f"the packs are equal: {counted(comparison.packs[0], 'pack')}, ids, masks and boundaries{rest}")
        return lines
    if "shard id" not in fields:
        lines.append(
            "both shards have the same id, but not the same content, so one of them was changed after it was written;"
            " verify --full shows which one"
        )
    packs = list(_pack_lines(comparison))
    sets = [] if comparison.sequences is None else list(_set_lines(comparison.sequences))
    # The counts of both first, then the single differences.
    return [*lines, *packs[:1], *sets[:1], *packs[1:], *sets[1:]]


def _short(value: Any) -> str:
    return shortened(value if isinstance(value, str) else repr(value), 100)


def _pack_lines(comparison: Comparison) -> Iterator[str]:
    count, other = comparison.packs
    if shared := min(count, other):
        of = f" of the first {shared:,} (packs are compared by number)" if count != other else ""
        verb = "differs" if comparison.differing_packs == 1 else "differ"
        yield (
            f"{counted(comparison.differing_packs, 'pack')}{of} {verb}: {counted(comparison.masks, 'mask value')} and"
            f" {counted(comparison.tokens, 'id')} in packs with the same boundaries,"
            f" {counted(comparison.reshaped, 'pack')} with different boundaries"
        )
    yield from (f"  {_difference_text(one)}" for one in comparison.first)
    named = sum(one.what in ("token", "mask") for one in comparison.first)
    if (more := comparison.tokens + comparison.masks - named) > 0:
        yield f"  ... and {counted(more, 'more id or mask value', 'more ids and mask values')}"
    if (more := comparison.reshaped - (len(comparison.first) - named)) > 0:
        yield f"  ... and {counted(more, 'more pack')} with different boundaries"


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


def _set_lines(sequences: SetDifference) -> Iterator[str]:
    of = ""
    if sequences.share < 1:
        of = f", in a sample of {100 * sequences.share:.3g}% of them, chosen by hash, the same in both"
    if sequences.same:
        yield f"both contain the same {counted(sequences.shared, 'sequence')}, packed differently{of}"
        return
    masks = "masks or media" if sequences.with_media else "masks"
    yield (
        f"sequences, compared independently of their packs{of}: {sequences.shared:,} in both, {sequences.other_mask:,}"
        f" in both with different {masks}, {sequences.only_here:,} only here, {sequences.only_there:,} only there"
    )
    yield from (
        f"  pack {pack}, sequence {number} here: no equal sequence there" for pack, number in sequences.first_here
    )
    yield from (
        f"  pack {pack}, sequence {number} there: no equal sequence here" for pack, number in sequences.first_there
    )
