"""Where the rows to train on come from: packs as they are stored, packed when training starts, or of a legacy file.

A source gives each pack as a list of sequences that lie somewhere in shards: what batches are assembled from.

The plan of packs that are made when training starts may be kept in a file, which is made once, published whole and
memory-mapped by everyone: ``sft-plan-KEY.bin`` is a JSON header padded with spaces to 4096 bytes, then the arrays of
``PlacedPlan`` end to end, little-endian. KEY is a hash over the shards' ids, the range and all packing options, so a
file never goes stale: other data or options have another name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.npy import read_legacy
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.packing import pack_sequences
from megatron_sft_idx.shard import pair_numbers
from megatron_sft_idx.shard.shard_set import OPENED_AT_ONCE, ShardSet, joined_columns, running_sums
from megatron_sft_idx.storage import Array, open_array, open_regular
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.publish import Kind, head_of, lock_file, new_file

logger = logging.getLogger(__name__)

# ---- packs as lists of sequences ----


# Tokens and label-aligned loss mask of a shard, then its columns.
Arrays: TypeAlias = tuple[Array, ...]
# CSR offsets of a shard's sequences by pack, its packs' offsets in tokens, starts of sequences, and how many tokens
# there are.
Index: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32], int]


@dataclass(frozen=True, slots=True)
class Segments:
    """The sequences of some packs, in order.

    Attributes:
        offsets: int64 [packs + 1], CSR: pack i holds segments offsets[i] to offsets[i + 1].
        shards: int32 [segments], which of the source's ``arrays`` each sequence lies in.
        starts: int64 [segments], its first token there.
        lengths: int64 [segments], its tokens.
        used: the values of ``shards``, ascending, where they are known already; None where nobody looked.
        sequences: int64 [segments], the number of each sequence in its shard; None where columns cannot be found.
        packs: int64 [packs], the number of each pack in its shard; None where these are no packs of shards.
    """

    offsets: NDArray[np.int64]
    shards: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    used: list[int] | None = None
    sequences: NDArray[np.int64] | None = None
    packs: NDArray[np.int64] | None = None


class PackSource(Protocol):
    """Rows to train on: packs as stored, or planned at start-up over tokenised sequences.

    Attributes:
        num_packs: rows.
        capacity: most token positions a row may hold.
        sequence_multiple: each sequence rounded up to this still fits the capacity.
        most_sequences: sequences in the row that has most.
        pad_id: the tokenizer's padding id, None where unknown.
        fingerprint: hex; equal content and options, equal fingerprint.
        columns: that ``arrays`` gives, in their order: what each is in every shard, alike but for metadata.
    """

    num_packs: int
    capacity: int
    sequence_multiple: int
    most_sequences: int
    pad_id: int | None
    fingerprint: str
    columns: dict[str, list[ColumnSpec]]

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of these packs lie; the first axis is of packs."""
        ...

    def arrays(self, shard: int) -> Arrays:
        """Tokens, label-aligned loss mask and columns of a shard, whole: numpy's where mapped, or read by slices.

        A number is what ``segments`` says; several shards may lie in one set of arrays. Columns are one-dimensional,
        an item a row; those of sequences and of packs are in memory or mapped.
        """
        ...


def in_slots(shards: NDArray[Any], used: list[int] | None = None) -> tuple[list[int], NDArray[Any]]:
    """The shards that are named, ascending (``used``, where that is known), and for each entry which of these it names.

    Lists of what there is of each shard stay short that way.
    """
    if used is None:
        used = sorted(set(shards.tolist()))
    own = used == list(range(len(used)))  # 0, 1, ... to the last: their own slots
    return used, shards if own else np.searchsorted(np.array(used), shards).astype(shards.dtype)


def _rows(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """CSR offsets of rows of so many entries, and all the entries, which lie behind each other from ``begins`` on."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return offsets, np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], counts)


# ---- packs of shards ----


class _ShardPacks:
    """What packs of shards have in common: a ``PackSource`` but for ``segments``, over a range of ``total`` things."""

    def __init__(self, shards: ShardSet, what: str, total: int, first: int, last: int | None, **options: Any) -> None:
        end = total if last is None else last
        if not 0 <= first < end <= total:
            raise FormatError(f"{shards.prefixes[0]}: {what} {first} to {end} of {total}; take at least one")
        self.shards, self.first, self.last, self.columns = shards, first, end, shards.columns
        self._numbered = any(specs[0].per == "sequence" for specs in self.columns.values())
        self.pad_id = next((header.pad_id for header in shards.headers if header.pad_id is not None), None)
        chosen = [shards.fingerprint, {what: [first, end], **options}]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(chosen, sort_keys=True).encode())

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, self.state()

    def state(self) -> tuple[Any, ...]:
        """What ``reopen`` makes this source of, in another process; plain values, so that it pickles small."""
        return self.shards.__getstate__(), self.first, self.last

    def arrays(self, shard: int) -> Arrays:
        """Tokens, label-aligned loss mask and columns of one shard, whole."""
        if (held := self.shards.held) is not None:
            return held.tokens, held.loss
        opened = self.shards.shard(shard)
        columns = (opened.columns.open(name) for name in self.columns)
        beside = (column.items if column.spec.per == "token" else column.held_items for column in columns)
        return opened.files.tokens, opened.files.loss, *beside


def _pieces(bounds: NDArray[np.int64], first: int, last: int) -> list[tuple[int, int, int]]:
    """Shards that a range touches: number, where the range begins inside it, and where it ends there."""
    edges = enumerate(itertools.pairwise(bounds.tolist()))
    cut = ((number, max(first, begin) - begin, min(last, end) - begin) for number, (begin, end) in edges)
    return [piece for piece in cut if piece[1] < piece[2]]


def located(
    indexes: list[Index] | list[Index | None],
    slots: NDArray[Any],
    packs: NDArray[np.int64],
    limits: tuple[int, int, int],
    broken: Callable[[int, str], Exception],
    *,
    numbers: list[int] | None = None,
    numbered: bool = False,
) -> Segments:
    """The sequences of packs, by the index arrays of their shards, in one native call.

    Args:
        indexes: of each shard; None for one that no pack is of.
        slots: [packs], which of these each pack is of.
        packs: int64 [packs], its number there.
        limits: capacity, sequence multiple and most sequences that packs keep to.
        broken: makes an error of the position in ``packs`` of one that breaks a rule, and of what is wrong with it.
        numbers: what the slots are called in ``Segments.shards``; None for 0, 1, ...
        numbered: whether to say which sequences of their shards these are.
    """
    try:
        offsets, shards, starts, lengths = _native.pack_segments(indexes, slots, packs, limits)
    except ValueError:
        for i in range(len(packs)):  # which it is
            try:
                _native.pack_segments(indexes, slots[i : i + 1], packs[i : i + 1], limits)
            except ValueError as error:
                raise broken(i, str(error)) from None
        raise
    sequences = None
    if numbered:
        firsts = np.empty(len(packs), np.int64)
        for slot, index in enumerate(indexes):
            here = slots == slot
            if index is not None:
                firsts[here] = index[0][packs[here]]
        sequences = _rows(firsts, np.diff(offsets))[1]
    if numbers is not None and numbers != list(range(len(numbers))):
        shards = np.array(numbers, np.int32)[shards]
    return Segments(offsets, shards, starts, lengths, numbers if len(packs) else None, sequences, packs)


class StoredPacks(_ShardPacks):
    """Packs ``first`` to ``last`` of shards, or to their end, as they lie there: a ``PackSource``."""

    def __init__(self, shards: ShardSet, first: int = 0, last: int | None = None) -> None:
        super().__init__(shards, "packs", len(shards), first, last)
        headers = shards.headers
        self.num_packs = self.last - self.first
        self.capacity = max(header.capacity for header in headers)
        self.sequence_multiple = math.gcd(*(header.sequence_multiple for header in headers))
        self.most_sequences = max(header.most_sequences for header in headers)

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of these packs lie; see ``PackSource``.

        Raises:
            FormatError: a pack's index entries break a rule of the format.
        """
        wanted = packs + self.first
        shards, local = self.shards.locate(wanted)
        if (held := self.shards.held) is not None:  # one shard, as far as arrays go
            self.shards.need(held, set(shards.tolist()))
            numbers, slots, local = [0], np.zeros_like(shards), wanted
            indexes = [(held.sequence_offsets, held.token_offsets, held.starts, len(held.tokens))]
        else:
            numbers, slots = in_slots(shards)
            indexes = [shard.index for shard in self.shards.opened(numbers)]

        def broken(at: int, found: str) -> FormatError:
            number, pack = (int(place[0]) for place in self.shards.locate(wanted[at : at + 1]))
            return self.shards.shard(number).pack_error(found, pack)

        limits = self.capacity, self.sequence_multiple, self.most_sequences
        return located(indexes, slots, local, limits, broken, numbers=numbers, numbered=self._numbered)

    def num_tokens(self) -> int:
        """Tokens of all packs; of a shard that is used in part two offsets are read."""
        total = 0
        for number, begin, end in _pieces(self.shards.packs_before, self.first, self.last):
            header = self.shards.headers[number]
            if end - begin == header.num_packs:
                total += header.num_tokens
            else:
                offsets = self.shards.shard(number).files.token_offsets
                total += int(offsets[end : end + 1][0]) - int(offsets[begin : begin + 1][0])
        return total


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How sequences are packed when training starts; as in ``pack_sequences``.

    Attributes:
        capacity: most token positions a pack may hold.
        sequence_multiple: count each sequence as its length rounded up to this.
        method: of ``pack_sequences``.
        max_sequences_per_pack: at most so many; None for no limit.
        seed: of every shuffle.
    """

    capacity: int
    sequence_multiple: int = 1
    method: str = "auto"
    max_sequences_per_pack: int | None = None
    seed: int = 0


class PlannedPacks(_ShardPacks):
    """Index-only packing: the sequences of shards, packed when training starts. A ``PackSource``.

    The shards may be a tokenised corpus (one sequence a pack) or packs of another capacity; no token is copied or
    rewritten. The plan says which sequences share a row; where ``pair`` is among the columns, those of a pair do, and a
    range that begins or ends inside a pair begins or ends before it. With a cache folder one process makes the plan and
    everyone maps it; without one, every process that needs it makes its own, the same one.

    Args:
        shards: whose sequences.
        options: how they are packed.
        cache: folder for the plan; None keeps it in memory.
        first: the first sequence of the range that is used, counted through all shards.
        last: where the range ends; None is the end of the last shard.

    Raises:
        SequenceError: sequences that do not fit the capacity, with their count.
        FormatError: an empty range, a column of packs, or the cache holds a plan that was cut short.
    """

    def __init__(
        self,
        shards: ShardSet,
        options: PlanOptions,
        cache: str | os.PathLike[str] | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        _refuse_pack_columns(shards)
        # Every shard with the column holds whole pairs (C10), so pairs begin at even numbers.
        together = 2 if "pair" in shards.columns else 1
        first, last = first // together * together, None if last is None else last // together * together
        super().__init__(shards, "sequences", shards.num_sequences, first, last, plan=asdict(options))
        self.options, self.cache = options, None if cache is None else os.fspath(cache)
        key = self.fingerprint + "-numbered" * self._numbered + "-pairs" * (together - 1)
        self.plan = load_or_make(self.cache, key, self._make)
        self.num_packs, self.most_sequences = len(self.plan.offsets) - 1, self.plan.most_sequences
        self.capacity, self.sequence_multiple = options.capacity, options.sequence_multiple

    def state(self) -> tuple[Any, ...]:
        """See ``reopen``."""
        return *super().state(), self.cache, *asdict(self.options).values()

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of these packs lie; see ``PackSource``."""
        plan = self.plan
        begins = plan.offsets[packs]
        offsets, taken = _rows(begins, plan.offsets[packs + 1] - begins)
        shards, starts, lengths = plan.shards[taken], plan.starts[taken], plan.lengths[taken].astype(np.int64)
        sequences = plan.sequences[taken] if self._numbered else None
        if (held := self.shards.held) is not None:
            self.shards.need(held, set(shards.tolist()))
            return Segments(offsets, np.zeros_like(shards), starts + held.tokens_before[shards], lengths)
        if self.shards.remote:
            self.shards.opened(in_slots(shards)[0])
        return Segments(offsets, shards, starts, lengths, None, sequences)

    def _make(self) -> PlacedPlan:
        """Pack, then put every sequence's place in the order of the packs: reading a pack touches one page of each."""
        parts, lengths = _starts(self.shards, self.first, self.last)
        require_fit(self.shards, self.options, lengths)
        groups = None
        if "pair" in self.columns:
            groups = np.arange(len(lengths)) // 2
            for number, _ in parts:
                pair_numbers(self.shards.shard(number))  # refuses what is no pairs
        made = pack_sequences(lengths, groups=groups, **asdict(self.options))
        starts = _joined([starts[:-1] for _, starts in parts])
        plan = PlacedPlan.of(made.num_packs, len(lengths), made.most_sequences, self._numbered)
        plan.offsets[:] = made.offsets
        bounds = self.shards.sequences_before
        for begin in range(0, len(lengths), 1 << 20):  # bounds what fancy indexing allocates
            here = slice(begin, begin + (1 << 20))
            chosen = made.sequences[here]
            plan.starts[here], plan.lengths[here] = starts[chosen], lengths[chosen]
            plan.shards[here] = np.searchsorted(bounds, chosen + self.first, side="right") - 1
            if self._numbered:
                plan.sequences[here] = chosen + self.first - bounds[plan.shards[here]]
        return plan

    def num_tokens(self) -> int:
        """Tokens of all packs; reads the whole plan unless it is of all sequences."""
        if self.last - self.first == self.shards.num_sequences:
            return self.shards.total("num_tokens")
        return int(self.plan.lengths.sum(dtype=np.int64))


class JoinedPacks:
    """Several sources as one, for a blend: a ``PackSource`` whose packs count through theirs, one after the other.

    Stored packs are found in one call, whatever the number of sources; planned ones are asked of each source.
    """

    def __init__(self, sources: Sequence[StoredPacks | PlannedPacks]) -> None:
        self._sources = sources
        self.packs_before = running_sums(source.num_packs for source in sources)
        self.num_packs = int(self.packs_before[-1])
        self.capacity = max(source.capacity for source in sources)
        self.sequence_multiple = math.gcd(*(source.sequence_multiple for source in sources))
        self.most_sequences = max(source.most_sequences for source in sources)
        self.pad_id = next((source.pad_id for source in sources if source.pad_id is not None), None)
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps([source.fingerprint for source in sources]).encode())
        sets = [source.shards for source in sources]
        self.columns = joined_columns(sets)
        self._shards_before = running_sums(len(shards.prefixes) for shards in sets)
        self._stored: StoredPacks | None = None
        if all(isinstance(source, StoredPacks) for source in sources):
            self._stored = StoredPacks(ShardSet.joined(sets))
            begins = running_sums(map(len, sets))[:-1] + np.array([source.first for source in sources], np.int64)
            self._shift: NDArray[np.int64] = begins - self.packs_before[:-1]

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of these packs lie; see ``PackSource``."""
        members = np.searchsorted(self.packs_before, packs, side="right") - 1
        if self._stored is not None:
            return self._stored.segments(packs + self._shift[members])
        if not len(packs):
            return self._sources[0].segments(packs)

        # Each source is asked once, for its packs together; what it says is put where they stand.
        used = np.unique(members).tolist()
        asked = [np.flatnonzero(members == member) for member in used]
        parts = [
            self._sources[member].segments(packs[rows] - self.packs_before[member])
            for member, rows in zip(used, asked, strict=True)
        ]
        places = np.argsort(np.concatenate(asked))  # of each pack among the parts
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets, taken = _rows((np.cumsum(counts) - counts)[places], counts[places])
        moved = [part.shards + np.int32(self._shards_before[member]) for member, part in zip(used, parts, strict=True)]
        shards, starts, lengths = (
            np.concatenate(column)[taken]
            for column in (moved, [part.starts for part in parts], [part.lengths for part in parts])
        )
        numbered = [part.sequences for part in parts if part.sequences is not None]
        sequences = np.concatenate(numbered)[taken] if len(numbered) == len(parts) else None
        return Segments(offsets, shards, starts, lengths, None, sequences)

    def arrays(self, shard: int) -> Arrays:
        """Tokens, label-aligned loss mask and columns of one shard, whole."""
        if self._stored is not None:
            return self._stored.arrays(shard)
        member = int(np.searchsorted(self._shards_before, shard, side="right")) - 1
        return self._sources[member].arrays(shard - int(self._shards_before[member]))


def _starts(shards: ShardSet, first: int, last: int) -> tuple[list[tuple[int, NDArray[np.int64]]], NDArray[np.int64]]:
    """Of sequences ``first`` to ``last``: by shard where each begins and the last one ends, in tokens; all lengths."""
    parts = []
    pieces = _pieces(shards.sequences_before, first, last)
    for at, (number, begin, end) in enumerate(pieces):
        if at % OPENED_AT_ONCE == 0 and shards.remote:
            shards.opened([ahead for ahead, _, _ in pieces[at : at + OPENED_AT_ONCE]])
        shard = shards.shard(number)
        one_a_pack = shard.header.num_sequences == shard.header.num_packs
        starts = shard.pack_bounds() if one_a_pack else shard.sequence_bounds()
        parts.append((number, starts[begin : end + 1]))
    return parts, _joined([np.diff(starts) for _, starts in parts])


def _refuse_pack_columns(shards: ShardSet) -> None:
    for name, (spec, *_) in shards.columns.items():
        if spec.per == "pack":
            raise FormatError(
                f"{shards.prefixes[0]}: column {name} has a value a pack, and packs that are made when training starts"
                " are others; leave it out, or train on the packs as they are stored"
            )


def require_fit(shards: ShardSet, options: PlanOptions, lengths: NDArray[np.int64] | None = None) -> None:
    """SequenceError, with their count, where sequences do not fit a pack of this capacity; FormatError on bad options.

    Without ``lengths`` those of all sequences are read, unless headers alone say that they fit.
    """
    usable = options.capacity // options.sequence_multiple * options.sequence_multiple
    if lengths is None:
        _refuse_pack_columns(shards)
        try:
            pack_sequences(np.zeros(0, np.int64), **asdict(options))
        except (ValueError, TypeError) as error:
            raise FormatError(f"index-only packing: {error}") from None
        if max(header.longest_pack for header in shards.headers) <= usable or not shards.num_sequences:
            return
        lengths = _starts(shards, 0, shards.num_sequences)[1]
    what = "sequences"
    if "pair" in shards.columns:
        rounded = -(-lengths // options.sequence_multiple) * options.sequence_multiple
        lengths, what = rounded[::2] + rounded[1::2], "pairs"
    if (longest := int(lengths.max())) > usable:
        raise SequenceError(
            shards.prefixes[0],
            None,
            f"{int((lengths > usable).sum())} of {len(lengths)} {what} are longer than {usable} tokens, the"
            f" longest has {longest}; raise the sequence length, or cut them first with the pack verb's --overlong",
        )


def reopen(shards: Any, first: int, last: int, cache: str | None = None, *options: Any) -> StoredPacks | PlannedPacks:
    """The source that said this of itself: stored packs, or planned ones where there are options."""
    opened = ShardSet.reopen(shards)
    if not options:
        return StoredPacks(opened, first, last)
    return PlannedPacks(opened, PlanOptions(*options), cache, first, last)


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # as it is where there is one: it may be mapped


# ---- plans as files ----


_REVISION = 1
_HEADER_NBYTES = 4096
_BEGIN = b'{"revision":'
_KIND = Kind("a packing plan", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)


class PlacedPlan(NamedTuple):
    """Packs as sequences with their places, in the order of the packs.

    Attributes:
        most_sequences: sequences in the pack that has most.
        raw: uint8, all of the following end to end.
        offsets: int64 [packs + 1], CSR: pack i holds the entries offsets[i] to offsets[i + 1].
        starts: int64 [sequences], first token in the shard's token file.
        lengths: int32 [sequences], tokens.
        shards: int32 [sequences], which shard.
        sequences: int64 [sequences], the number of each in its shard; [0] where the plan is not ``numbered``.
    """

    most_sequences: int
    raw: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    shards: NDArray[np.int32]
    sequences: NDArray[np.int64]

    @classmethod
    def of(
        cls, packs: int, sequences: int, most: int, numbered: bool = False, raw: NDArray[np.uint8] | None = None
    ) -> PlacedPlan:
        """The plan of so many packs that lies in ``raw``, or one to be filled in. ValueError: that is of another size.

        ``numbered`` is whether it says which sequences of their shards these are.
        """
        counts = (packs + 1, sequences, sequences, sequences, sequences if numbered else 0)
        dtypes = [np.dtype(code) for code in ("<i8", "<i8", "<i4", "<i4", "<i8")]
        ends = running_sums(count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)).tolist()
        if raw is None:
            raw = np.empty(ends[-1], np.uint8)
        if len(raw) != ends[-1]:
            raise ValueError(f"{len(raw)} bytes of arrays, expected {ends[-1]}")
        bounds = zip(itertools.pairwise(ends), dtypes, strict=True)
        return cls(most, raw, *(raw[begin:end].view(dtype) for (begin, end), dtype in bounds))


def plan_path(folder: str, key: str) -> str:
    """The file of a plan."""
    return os.path.join(folder, f"sft-plan-{key}.bin")


def load_or_make(folder: str | None, key: str, make: Callable[[], PlacedPlan]) -> PlacedPlan:
    """The plan of this key: from its file where there is one, else made and, with a folder, published for everyone.

    Processes that come while one makes the plan wait for a file lock, which ends with the process that holds it. There
    is no ``torch.distributed`` barrier here on purpose: Megatron's builder lets rank 0 build while the others wait at
    a barrier of its own, and one more on rank 0 alone would be taken for that.

    A folder that cannot be written costs a warning and time, not the run: one rank that stops here would leave the
    others waiting at that barrier.

    Raises:
        FormatError: the file was cut short or is of another revision.
    """
    if folder is None:
        return make()
    path = plan_path(folder, key)
    if os.path.exists(path):
        return _load(path)
    with contextlib.ExitStack() as held:
        try:
            os.makedirs(folder, exist_ok=True)
            held.callback(os.close, lock_file(path + ".lock", (b"",), create=True, busy=None))
        except (OSError, FormatError) as error:
            # Some network file systems have no locks. Then a plan may be made twice, and the first one stays.
            logger.info("%s: no lock (%s); going on without", path, error)
        if os.path.exists(path):
            return _load(path)
        plan = make()
        fields = {
            "revision": _REVISION,
            "packs": len(plan.offsets) - 1,
            "sequences": len(plan.starts),
            "most_sequences": plan.most_sequences,
            "numbered": len(plan.sequences) > 0,
        }
        try:
            with new_file(path, _KIND, overwrite=False) as new:
                with contextlib.closing(new.open()) as file:
                    file.write(json.dumps(fields).encode().ljust(_HEADER_NBYTES))
                    file.write(plan.raw.data)
                new.publish()
        except (OSError, FormatError) as error:
            if not os.path.exists(path):  # where there are no locks, another process may have been faster
                logger.warning(
                    "%s: the packing plan cannot be cached (%s), so every process packs for itself; name a folder that"
                    " can be written: path_to_cache (--data-cache-path)",
                    path,
                    error,
                )
                return plan
    return _load(path)


def _load(path: str) -> PlacedPlan:
    try:
        with open_regular(path) as file:
            fields = json.loads(file.read(_HEADER_NBYTES))
        if fields["revision"] != _REVISION:
            raise ValueError(f"of revision {fields['revision']}, expected {_REVISION}")
        packs, sequences, most = (int(fields[name]) for name in ("packs", "sequences", "most_sequences"))
        nbytes = os.path.getsize(path)
        raw = open_array(path, np.dtype("u1"), nbytes, nbytes=nbytes)[_HEADER_NBYTES:]
        return PlacedPlan.of(packs, sequences, most, bool(fields.get("numbered")), raw)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        said = f"{path}: not a packing plan, or cut short ({error}); remove it, and it is made anew"
        raise FormatError(said) from None


# ---- packs of a legacy file ----


class LegacySource:
    """Packs of a legacy ``.npy``, all in memory: a ``PackSource``.

    Args:
        path: the file.
        capacity: most token positions a row may hold; None for those of the longest pack.
        pad_id: the tokenizer's padding id, which the file does not know.

    Raises:
        FormatError, SequenceError: see ``read_legacy``.
    """

    def __init__(self, path: str | os.PathLike[str], *, capacity: int | None = None, pad_id: int | None = None) -> None:
        self._packs = packs = read_legacy(path)
        self._starts = packs.seq_starts.astype(np.uint32)
        self.num_packs = len(packs)
        self.capacity = int(packs.pack_lengths.max(initial=0)) if capacity is None else capacity
        self.sequence_multiple = 1
        self.most_sequences = int(packs.pack_sequences.max(initial=0))
        self.pad_id = pad_id
        self.columns: dict[str, list[ColumnSpec]] = {}
        content = StreamHash()
        for array in (packs.tokens, packs.loss_mask, packs.token_offsets, packs.sequence_offsets, self._starts):
            content.update(array)
        self.fingerprint = content.hex()

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Where the sequences of these packs lie; see ``PackSource``."""
        held = self._packs
        index = held.sequence_offsets, held.token_offsets, self._starts, len(held.tokens)
        numbers = np.ascontiguousarray(packs, np.int64)
        return Segments(*_native.pack_segments([index], np.zeros(len(numbers), np.int64), numbers))

    def arrays(self, shard: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens and label-aligned loss mask, whole."""
        return self._packs.tokens, self._packs.loss_mask
