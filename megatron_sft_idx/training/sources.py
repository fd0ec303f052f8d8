"""Sources of packs to train on: stored packs, packs planned when training starts, or a legacy file.

A source returns each pack as a list of sequences with their locations in shards. Batches are assembled from these
lists. Nothing here copies a token.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SequenceError, brief
from megatron_sft_idx.formats.npy import read_legacy
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.media_layout import NO_ITEMS, Items
from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.packing import csr_rows, pack_sequences
from megatron_sft_idx.shard import pair_numbers
from megatron_sft_idx.shard.shard_set import OPENED_AT_ONCE, ShardSet, columns_of_sets, running_sums
from megatron_sft_idx.storage import Array
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.training.plan_file import PlacedPlan, load_or_make

# ---- packs as lists of sequences ----


# The tokens and the label-aligned loss mask of a shard, then its columns.
Arrays: TypeAlias = tuple[Array, ...]
# The index arrays of a shard: CSR offsets of its sequences by pack, token offsets of its packs, starts of sequences in
# their packs, and its number of tokens.
Index: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32], int]


@shown_by_fields
class WholeRows(NamedTuple):
    """Packs that are complete rows instead of sequences in shards, such as rows of pretraining data.

    Such a row is one segment from its first position to its last, and every position of it is trained on.

    Attributes:
        packs: int64 [rows], the positions of these packs among the requested packs.
        shards: int32 [rows], the shard of each row, as in ``Segments.shards``; used for the column ``source``.
        numbers: int64 [rows], the number of each row in its shard.
        read: returns tokens and labels of a row, int64 [seq_length] each, for its entries in ``shards`` and
            ``numbers``.
    """

    packs: NDArray[np.int64]
    shards: NDArray[np.int32]
    numbers: NDArray[np.int64]
    read: Callable[[int, int], tuple[Any, Any]]


@shown_by_fields
@dataclass(frozen=True, slots=True)
class Segments:
    """The sequences of some packs, in order.

    Attributes:
        offsets: int64 [packs + 1], CSR: pack i holds segments offsets[i] to offsets[i + 1].
        shards: int32 [segments], the shard of each sequence, as a number for ``PackSource.arrays``.
        starts: int64 [segments], the position of its first token in those arrays.
        lengths: int64 [segments], its number of tokens.
        used: the distinct values of ``shards``, ascending; None if they were not determined.
        sequences: int64 [segments], the number of each sequence in its shard, needed to find its columns; None if the
            source has no columns of sequences.
        packs: int64 [packs], the number of each pack in its shard; None if these are not packs of shards.
        whole: the packs that are complete rows and have no segments; None if there are none.
    """

    offsets: NDArray[np.int64]
    shards: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    used: list[int] | None = None
    sequences: NDArray[np.int64] | None = None
    packs: NDArray[np.int64] | None = None
    whole: WholeRows | None = None


class ItemFinder(Protocol):
    """Find the images and audio of sequences by token position, in one set of arrays."""

    def of_ranges(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], Items]:
        """Return the items of some sequences, in order.

        Args:
            starts: position of the first token of each sequence, int64 [sequences].
            lengths: number of tokens of each sequence, int64 [sequences].

        Returns:
            For each item the number of its sequence, int64 [items], ascending; and the items. Their ``starts`` are
                counted from the first token of the sequence.
        """
        ...

    def bytes_of_each(self, numbers: Sequence[int]) -> Mapping[int, bytes | memoryview]:
        """Return the encoded files for numbers of ``Items.blobs``."""
        ...

    def will_need(self, numbers: Sequence[int]) -> None:
        """Ask the kernel to read these files in the background, if they are on disk."""
        ...


class PackSource(Protocol):
    """Packs to train on, numbered from 0.

    Attributes:
        num_packs: number of packs.
        capacity: the maximum number of token positions in a pack.
        sequence_multiple: packs fit the capacity even if each sequence is rounded up to a multiple of this.
        most_sequences: the maximum number of sequences in a pack.
        pad_id: the padding id of the tokenizer; None if unknown.
        fingerprint: hash of content and options, hex.
        columns: the columns in ``arrays``, in order, each with its specs in all shards. The specs differ only in
            metadata.
        media_prefix: a shard that has images or audio; None if no shard has media or this is unknown.
    """

    num_packs: int
    capacity: int
    sequence_multiple: int
    most_sequences: int
    pad_id: int | None
    fingerprint: str
    columns: dict[str, list[ColumnSpec]]
    media_prefix: str | None

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Return the locations of the sequences of packs, int64 [packs], or [packs, 2] for live shards."""
        ...

    def arrays(self, shard: int) -> Arrays:
        """Return all tokens, label-aligned loss masks and column values for a number of ``Segments.shards``.

        They are numpy arrays if the shard is mapped, else arrays that read the requested slices. Several shards can
        share one set of arrays. Columns are one-dimensional, with one item per row. Columns of sequences and packs are
        in memory or mapped.
        """
        ...

    def items(self, shard: int) -> ItemFinder | None:
        """Return the finder of images and audio for a number of ``Segments.shards``; None if there are none."""
        ...


@shown_by_fields
class FoundItems(NamedTuple):
    """Images and audio of ``Segments``, ordered by sequence and by position in the sequence.

    Attributes:
        segments: the number of each item's sequence in ``Segments``, int64 [items].
        items: the items; ``starts`` are counted from the first token of the sequence.
        finders: the finders of the items, which also read their files.
        slots: the position in ``finders`` of the finder of each item, int64 [items].
    """

    segments: NDArray[np.int64]
    items: Items
    finders: list[ItemFinder]
    slots: NDArray[np.int64]


def find_items(source: PackSource, segments: Segments) -> FoundItems:
    """Find the images and audio of sequences.

    Raises:
        CorruptShardError: positions of items break a rule of FORMAT.md.
        StorageError: the object store of a remote shard does not answer.
    """
    used, slots = in_slots(segments.shards, segments.used)
    finders, found = list[ItemFinder](), []
    for slot, shard in enumerate(used):
        if (finder := source.items(shard)) is None:
            continue
        rows = np.flatnonzero(slots == slot)
        of_row, items = finder.of_ranges(segments.starts[rows], segments.lengths[rows])
        found.append((rows[of_row], items))
        finders.append(finder)
    numbers = np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in found)])
    owners = np.repeat(np.arange(len(found)), [len(rows) for rows, _ in found])
    order = np.argsort(numbers, kind="stable")
    columns = zip(*(items for _, items in found), strict=True)
    items = Items(*(np.concatenate(column)[order] for column in columns)) if found else NO_ITEMS
    return FoundItems(numbers[order], items, finders, owners[order])


def blend_weights(names: Sequence[str], weights: Sequence[Any]) -> list[float]:
    """Return the weights of a blend as floats.

    Args:
        names: names of the members, for errors.
        weights: one weight per member.

    Raises:
        FormatError: a weight is not a number above 0, or the sum of the weights overflows a float.
    """
    values = []
    for name, weight in zip(names, weights, strict=True):
        try:
            value = float(weight) if isinstance(weight, Real) and not isinstance(weight, bool) else None
        except OverflowError:
            value = None
        if value is None:
            raise FormatError(f"{name}: blend weight {brief(weight)}, expected a number above zero")
        if not (math.isfinite(value) and value > 0):
            raise FormatError(f"{name}: blend weight {value}, expected a number above zero; leave the path out")
        values.append(value)
    if math.isinf(sum(values)):
        raise FormatError(
            "blend: the sum of the weights is too large for a float; divide all weights by the same number"
        )
    return values


# Remedies for a shard with images or audio: if batches cannot carry them, and if they can.
TEXT_ALONE: Final = "pass ignore_media=True (--ignore-media) to train on the text only"
CARRIED_BY: Final = f"pass media=MediaInputs(FOLDER) to include them in batches (docs/media.md), or {TEXT_ALONE}"


def require_text(where: str, has_media: bool, ignore_media: bool, remedy: str = TEXT_ALONE) -> None:
    """Raise FormatError if packs with images or audio would go into text-only batches without ``ignore_media``.

    All code that makes batches without images and audio calls this for each shard or file that it takes packs from.

    Args:
        where: the shard or file, for the error.
        has_media: whether its packs have images or audio.
        ignore_media: allow it; placeholder tokens then count as ordinary tokens with a loss mask of 0.
        remedy: what the user can do, for the error.
    """
    if has_media and not ignore_media:
        raise FormatError(
            f"{where}: contains images or audio, but these batches have only text, so the model would see placeholder"
            f" tokens without content; {remedy}"
        )


def in_slots(shards: NDArray[Any], used: list[int] | None = None) -> tuple[list[int], NDArray[Any]]:
    """Renumber the shards that occur from 0, so that lists with one entry per shard stay short.

    Returns:
        The shards that occur, ascending (``used``, if the caller passes it), and for each entry of ``shards`` its
            position in this list.
    """
    if used is None:
        used = sorted(set(shards.tolist()))
    are_slots = used == list(range(len(used)))  # 0, 1, ..., so that each number is its position
    return used, shards if are_slots else np.searchsorted(np.array(used), shards).astype(shards.dtype)


# ---- packs of shards ----


class _ShardPacks(Shown):
    """Base class of sources over a ``ShardSet``: everything of a ``PackSource`` except ``segments``.

    A source uses the range ``first`` to ``last`` of ``total`` packs or sequences; ``unit`` says which of the two.
    """

    num_packs: int
    capacity: int

    def __init__(
        self,
        shards: ShardSet,
        unit: str,
        total: int,
        first: int,
        last: int | None,
        **options: Any,
    ) -> None:
        end = total if last is None else last
        if not 0 <= first < end <= total:
            raise FormatError(f"{shards.prefixes[0]}: {unit} {first} to {end} of {total}; select at least one")
        self.shards, self.first, self.last, self.columns = shards, first, end, shards.columns
        of_shards = zip(shards.prefixes, shards.headers, strict=True)
        self.media_prefix = next((prefix for prefix, header in of_shards if header.has_media), None)
        self._numbered = any(specs[0].per == "sequence" for specs in self.columns.values())
        self.pad_id = next((header.pad_id for header in shards.headers if header.pad_id is not None), None)
        chosen = [shards.fingerprint, {unit: [first, end], **options}]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(chosen, sort_keys=True).encode())

    def _shown(self) -> str:
        more = f" and {len(self.shards.prefixes) - 1:,} more" if len(self.shards.prefixes) > 1 else ""
        counts = f"{self.num_packs:,} packs of up to {self.capacity:,} tokens"
        return f"{self.shards.prefixes[0]}{more}: {counts}"

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, self.state()

    @property
    def content(self) -> str:
        """Hash of the content of all shards, hex; independent of their location and of the range that is used."""
        return self.shards.fingerprint

    def state(self) -> tuple[Any, ...]:
        """Return the arguments for ``reopen`` to open this source in another process: a few plain values."""
        return self.shards.__getstate__(), self.first, self.last

    def arrays(self, shard: int) -> Arrays:
        """Return tokens, label-aligned loss mask and columns of one shard; see ``PackSource``."""
        if (held := self.shards.in_memory) is not None:
            return held.tokens, held.loss
        opened = self.shards.shard(shard)
        columns = (opened.columns.open(name) for name in self.columns)
        beside = (column.items if column.spec.per == "token" else column.items_in_memory for column in columns)
        return opened.files.tokens, opened.files.loss, *beside

    def items(self, shard: int) -> ItemFinder | None:
        """Return the finder of images and audio of one shard; see ``PackSource``."""
        return None if self.shards.in_memory is not None else self.shards.shard(shard).items

    def _by_prefix(self, shards: NDArray[Any], numbers: NDArray[np.int64]) -> dict[str, set[int]]:
        """Return numbers of packs in shards, by the prefix of the shard; ``shards`` has the shard of each number."""
        return {self.shards.prefixes[shard]: {*numbers[shards == shard].tolist()} for shard in set(shards.tolist())}


def _shard_ranges(bounds: NDArray[np.int64], first: int, last: int) -> list[tuple[int, int, int]]:
    """Return the shards that a range covers: the number of each, and the begin and end of the range within it."""
    edges = enumerate(itertools.pairwise(bounds.tolist()))
    ranges = ((number, max(first, begin) - begin, min(last, end) - begin) for number, (begin, end) in edges)
    return [each for each in ranges if each[1] < each[2]]


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
    """Find the sequences of packs with the index arrays of their shards, in one native call.

    Args:
        indexes: index arrays of some shards; None for a shard without any of the packs.
        slots: [packs], for each pack the position of its shard in ``indexes``.
        packs: int64 [packs], the number of each pack in its shard.
        limits: capacity, sequence multiple and maximum number of sequences; every pack must respect these.
        broken: makes the error for a pack that breaks a rule, from its position in ``packs`` and the reason.
        numbers: the numbers for ``Segments.shards`` of the shards in ``indexes``; None for 0, 1, ...
        numbered: whether to return ``Segments.sequences``.
    """
    try:
        offsets, shards, starts, lengths = _native.pack_segments(indexes, slots, packs, limits)
    except ValueError:
        for i in range(len(packs)):  # find the pack that breaks the rule
            try:
                _native.pack_segments(indexes, slots[i : i + 1], packs[i : i + 1], limits)
            except ValueError as error:
                raise broken(i, str(error)) from None
        raise
    sequences = None
    if numbered:
        firsts = np.empty(len(packs), np.int64)
        for slot, index in enumerate(indexes):
            rows = slots == slot
            if index is not None:
                firsts[rows] = index[0][packs[rows]]
        sequences = csr_rows(firsts, np.diff(offsets))[1]
    if numbers is not None and numbers != list(range(len(numbers))):
        shards = np.array(numbers, np.int32)[shards]
    return Segments(offsets, shards, starts, lengths, numbers if len(packs) else None, sequences, packs)


class StoredPacks(_ShardPacks):
    """A ``PackSource`` with the packs of shards as they are stored.

    Args:
        shards: the shards.
        first: the first pack to use, counted over all shards.
        last: the end of the range of packs, exclusive; None for the end of the last shard.

    Raises:
        FormatError: the range is empty, or not inside the shards.

    Example:
        >>> from megatron_sft_idx.shard.shard_set import ShardSet
        >>> packs = StoredPacks(ShardSet.open("data/chats"))
        >>> packs
        <StoredPacks data/chats: 7 packs of up to 12 tokens>
        >>> StoredPacks(ShardSet.open("data/chats"), first=5).num_packs  # the last two packs, for validation
        2
    """

    def __init__(self, shards: ShardSet, first: int = 0, last: int | None = None) -> None:
        super().__init__(shards, "packs", len(shards), first, last)
        headers = shards.headers
        self.num_packs = self.last - self.first
        self.capacity = max(header.capacity for header in headers)
        self.sequence_multiple = math.gcd(*(header.sequence_multiple for header in headers))
        self.most_sequences = max(header.most_sequences for header in headers)

    def stored(self, packs: NDArray[np.int64]) -> dict[str, set[int]]:
        """Return the numbers of these packs in their shards, by the prefix of the shard."""
        return self._by_prefix(*self.shards.locate(packs + self.first))

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Return the locations of the sequences of these packs; see ``PackSource``.

        Raises:
            FormatError: the index entries of a pack break a rule of the format.
        """
        in_set = packs + self.first
        shards, local = self.shards.locate(in_set)
        if (held := self.shards.in_memory) is not None:  # all shards share one set of arrays
            self.shards.read_into_memory(held, set(shards.tolist()))
            numbers, slots, local = [0], np.zeros_like(shards), in_set
            indexes = [(held.sequence_offsets, held.token_offsets, held.starts, len(held.tokens))]
        else:
            numbers, slots = in_slots(shards)
            indexes = [shard.index for shard in self.shards.open_shards(numbers)]

        def broken(at: int, reason: str) -> FormatError:
            number, pack = (int(each[0]) for each in self.shards.locate(in_set[at : at + 1]))
            return self.shards.shard(number).files.pack_error(reason, pack)

        limits = self.capacity, self.sequence_multiple, self.most_sequences
        return located(indexes, slots, local, limits, broken, numbers=numbers, numbered=self._numbered)

    def num_tokens(self) -> int:
        """Return the number of tokens of all packs. For a partly used shard, this reads two offsets."""
        total = 0
        for number, begin, end in _shard_ranges(self.shards.packs_before, self.first, self.last):
            header = self.shards.headers[number]
            if end - begin == header.num_packs:
                total += header.num_tokens
            else:
                offsets = self.shards.shard(number).files.token_offsets
                total += int(offsets[end : end + 1][0]) - int(offsets[begin : begin + 1][0])
        return total


@shown_by_fields
@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options for packing when training starts: the arguments of ``pack_sequences``.

    Attributes:
        capacity: the maximum number of token positions in a pack.
        sequence_multiple: each sequence counts as its length rounded up to a multiple of this.
        method: see ``pack_sequences``.
        max_sequences_per_pack: the maximum number of sequences in a pack; None for no limit.
        seed: seed of the random numbers that packing uses.

    Example:
        >>> from megatron_sft_idx.shard.shard_set import ShardSet
        >>> from megatron_sft_idx.training.sources import PlannedPacks
        >>> options = PlanOptions(capacity=16, max_sequences_per_pack=4)
        >>> PlannedPacks(ShardSet.open("data/chats"), options).num_packs
        4
    """

    capacity: int
    sequence_multiple: int = 1
    method: str = "auto"
    max_sequences_per_pack: int | None = None
    seed: int = 0


class PlannedPacks(_ShardPacks):
    """A ``PackSource`` that packs the sequences of shards when training starts (index-only packing).

    The shards may be a tokenised corpus (one sequence per pack) or have packs of another capacity. A plan says which
    sequences share a pack. If ``pair`` is among the columns, the two sequences of a pair share a pack, and a range that
    would begin or end inside a pair begins or ends before it. With a cache folder, one process makes the plan and all
    processes map it. Without one, every process makes its own plan, and all plans are identical.

    Args:
        shards: the shards with the sequences.
        options: how sequences are packed.
        cache: the folder for the file of the plan; None keeps the plan in memory.
        first: the first sequence of the range that is used, counted over all shards.
        last: the end of the range; None for the end of the last shard.

    Raises:
        SequenceError: sequences do not fit the capacity; the message gives their number.
        FormatError: the range is empty, a column has one value per pack, or the file of the plan is truncated.

    Example:
        >>> from megatron_sft_idx.shard.shard_set import ShardSet
        >>> from megatron_sft_idx.training.sources import PlanOptions
        >>> shards = ShardSet.open("data/chats", same_capacity=False)
        >>> PlannedPacks(shards, PlanOptions(capacity=16))  # seven packs in the shard fit into three longer ones
        <PlannedPacks data/chats: 3 packs of up to 16 tokens>
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
        # Every shard with this column has only complete pairs (rule C10), so pairs begin at even numbers.
        group = 2 if "pair" in shards.columns else 1
        first, last = first // group * group, None if last is None else last // group * group
        super().__init__(shards, "sequences", shards.num_sequences, first, last, plan=asdict(options))
        self.options, self.cache = options, None if cache is None else os.fspath(cache)
        key = self.fingerprint + "-numbered" * self._numbered + "-pairs" * (group - 1)
        self.plan = load_or_make(self.cache, key, self._make)
        self.num_packs, self.most_sequences = len(self.plan.offsets) - 1, self.plan.most_sequences
        self.capacity, self.sequence_multiple = options.capacity, options.sequence_multiple

    def state(self) -> tuple[Any, ...]:
        """Return the arguments for ``reopen``."""
        return *super().state(), self.cache, *asdict(self.options).values()

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Return the locations of the sequences of these packs; see ``PackSource``."""
        plan = self.plan
        begins = plan.offsets[packs]
        offsets, entries = csr_rows(begins, plan.offsets[packs + 1] - begins)
        shards, starts, lengths = plan.shards[entries], plan.starts[entries], plan.lengths[entries].astype(np.int64)
        sequences = plan.sequences[entries] if self._numbered else None
        if (held := self.shards.in_memory) is not None:
            self.shards.read_into_memory(held, set(shards.tolist()))
            return Segments(offsets, np.zeros_like(shards), starts + held.tokens_before[shards], lengths)
        if self.shards.remote:
            self.shards.open_shards(in_slots(shards)[0])
        return Segments(offsets, shards, starts, lengths, None, sequences)

    def stored(self, packs: NDArray[np.int64]) -> dict[str, set[int]]:
        """Return the numbers of the stored packs that have the sequences of these packs, by the prefix of the shard."""
        begins = self.plan.offsets[packs]
        entries = csr_rows(begins, self.plan.offsets[packs + 1] - begins)[1]
        shards, numbers = self.plan.shards[entries], self.plan.starts[entries]
        for shard in set(shards.tolist()):
            rows = shards == shard
            numbers[rows] = self.shards.shard(shard).token_offsets.searchsorted(numbers[rows], side="right") - 1
        return self._by_prefix(shards, numbers)

    def _make(self) -> PlacedPlan:
        """Pack the sequences. The plan is in the order of the packs, so that reading a pack touches few pages of it."""
        by_shard, lengths = _starts(self.shards, self.first, self.last)
        require_fit(self.shards, self.options, lengths)
        groups = None
        if "pair" in self.columns:
            groups = np.arange(len(lengths)) // 2
            for number, _ in by_shard:
                pair_numbers(self.shards.shard(number))  # raises if these are not pairs
        packed = pack_sequences(lengths, groups=groups, **asdict(self.options))
        starts = _joined([starts[:-1] for _, starts in by_shard])
        plan = PlacedPlan.of(packed.num_packs, len(lengths), packed.most_sequences, self._numbered)
        plan.offsets[:] = packed.offsets
        bounds = self.shards.sequences_before
        for begin in range(0, len(lengths), 1 << 20):  # bounds the memory that fancy indexing takes
            block = slice(begin, begin + (1 << 20))
            chosen = packed.sequences[block]
            plan.starts[block], plan.lengths[block] = starts[chosen], lengths[chosen]
            plan.shards[block] = np.searchsorted(bounds, chosen + self.first, side="right") - 1
            if self._numbered:
                plan.sequences[block] = chosen + self.first - bounds[plan.shards[block]]
        return plan

    def num_tokens(self) -> int:
        """Return the number of tokens of all packs; reads the whole plan unless it has all sequences."""
        if self.last - self.first == self.shards.num_sequences:
            return self.shards.total("num_tokens")
        return int(self.plan.lengths.sum(dtype=np.int64))


class JoinedPacks(Shown):
    """A ``PackSource`` of several sources, for a blend; packs are numbered one source after the other.

    Stored packs are found in one call for any number of sources. Planned packs need one call per source.
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
        self.media_prefix = next((each.media_prefix for each in sources if each.media_prefix is not None), None)
        self.columns = columns_of_sets(sets)
        self._shards_before = running_sums(len(shards.prefixes) for shards in sets)
        self._stored: StoredPacks | None = None
        if all(isinstance(source, StoredPacks) for source in sources):
            self._stored = StoredPacks(ShardSet.joined(sets))
            begins = running_sums(map(len, sets))[:-1] + np.array([source.first for source in sources], np.int64)
            self._shift: NDArray[np.int64] = begins - self.packs_before[:-1]

    def _shown(self) -> str:
        return f"{len(self._sources)} sources: {self.num_packs:,} packs of up to {self.capacity:,} tokens"

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Return the locations of the sequences of these packs; see ``PackSource``."""
        members = np.searchsorted(self.packs_before, packs, side="right") - 1
        if self._stored is not None:
            return self._stored.segments(packs + self._shift[members])
        if not len(packs):
            return self._sources[0].segments(packs)

        # Each source is asked once for all of its packs; the answers are then put in the order of ``packs``.
        used = np.unique(members).tolist()
        rows_of = [np.flatnonzero(members == member) for member in used]
        answers = [
            self._sources[member].segments(packs[rows] - self.packs_before[member])
            for member, rows in zip(used, rows_of, strict=True)
        ]
        order = np.argsort(np.concatenate(rows_of))  # for each pack its position in the answers
        counts = np.concatenate([np.diff(answer.offsets) for answer in answers])
        offsets, entries = csr_rows((np.cumsum(counts) - counts)[order], counts[order])
        befores = self._shards_before[used].astype(np.int32)
        numbers = [answer.shards + before for before, answer in zip(befores, answers, strict=True)]
        shards, starts, lengths = (
            np.concatenate(arrays)[entries]
            for arrays in (numbers, [answer.starts for answer in answers], [answer.lengths for answer in answers])
        )
        numbered = [answer.sequences for answer in answers if answer.sequences is not None]
        sequences = np.concatenate(numbered)[entries] if len(numbered) == len(answers) else None
        return Segments(offsets, shards, starts, lengths, None, sequences)

    def arrays(self, shard: int) -> Arrays:
        """Return tokens, label-aligned loss mask and columns of one shard; see ``PackSource``."""
        if self._stored is not None:
            return self._stored.arrays(shard)
        member = int(np.searchsorted(self._shards_before, shard, side="right")) - 1
        return self._sources[member].arrays(shard - int(self._shards_before[member]))

    def items(self, shard: int) -> ItemFinder | None:
        """Return the finder of images and audio of one shard; see ``PackSource``."""
        if self._stored is not None:
            return self._stored.items(shard)
        member = int(np.searchsorted(self._shards_before, shard, side="right")) - 1
        return self._sources[member].items(shard - int(self._shards_before[member]))


def _starts(shards: ShardSet, first: int, last: int) -> tuple[list[tuple[int, NDArray[np.int64]]], NDArray[np.int64]]:
    """Find the sequences ``first`` to ``last``.

    Returns:
        For each shard with such sequences its number and, int64, the positions of their first tokens and the position
            after the last token; and the lengths of all sequences, int64.
    """
    by_shard = []
    ranges = _shard_ranges(shards.sequences_before, first, last)
    for at, (number, begin, end) in enumerate(ranges):
        if at % OPENED_AT_ONCE == 0 and shards.remote:
            shards.open_shards([ahead for ahead, _, _ in ranges[at : at + OPENED_AT_ONCE]])
        shard = shards.shard(number)
        one_a_pack = shard.header.num_sequences == shard.header.num_packs
        starts = shard.pack_bounds() if one_a_pack else shard.sequence_bounds()
        by_shard.append((number, starts[begin : end + 1]))
    return by_shard, _joined([np.diff(starts) for _, starts in by_shard])


def _refuse_pack_columns(shards: ShardSet) -> None:
    for name, (spec, *_) in shards.columns.items():
        if spec.per == "pack":
            raise FormatError(
                f"{shards.prefixes[0]}: column {name} has one value per pack, but index-only packing makes new packs;"
                " leave it out, or train on the stored packs"
            )


def require_fit(shards: ShardSet, options: PlanOptions, lengths: NDArray[np.int64] | None = None) -> None:
    """Check that every sequence, or every pair of sequences, fits a pack.

    Args:
        shards: the shards with the sequences.
        options: how they would be packed.
        lengths: lengths of the sequences; None reads all lengths, unless the headers show that all sequences fit.

    Raises:
        SequenceError: some do not fit; the message gives their number.
        FormatError: the options are wrong, or a column has one value per pack.
    """
    usable = options.capacity // options.sequence_multiple * options.sequence_multiple
    if lengths is None:
        _refuse_pack_columns(shards)
        try:
            pack_sequences(np.zeros(0, np.int64), **asdict(options))
        except (ValueError, TypeError) as error:
            raise FormatError(f"index-only packing: {error}") from None
        # Headers do not have the length of a pair with both sequences rounded up.
        fit = "pair" not in shards.columns and max(header.longest_pack for header in shards.headers) <= usable
        if fit or not shards.num_sequences:
            return
        lengths = _starts(shards, 0, shards.num_sequences)[1]
    unit = "sequences"
    if "pair" in shards.columns:
        rounded = -(-lengths // options.sequence_multiple) * options.sequence_multiple
        lengths, unit = rounded[::2] + rounded[1::2], "pairs"
    if (longest := int(lengths.max())) > usable:
        raise SequenceError(
            shards.prefixes[0],
            None,
            f"{int((lengths > usable).sum())} of {len(lengths)} {unit} are longer than {usable} tokens (the longest"
            f" has {longest}); raise the sequence length, or truncate them first with megatron-sft-idx pack"
            " --overlong",
        )


def reopen(shards: Any, first: int, last: int, cache: str | None = None, *options: Any) -> StoredPacks | PlannedPacks:
    """Open a source from its ``state``: planned packs if there are options, else stored packs."""
    opened = ShardSet.reopen(shards)
    if not options:
        return StoredPacks(opened, first, last)
    return PlannedPacks(opened, PlanOptions(*options), cache, first, last)


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)  # a single array may be mapped and stays mapped


# ---- packs of a legacy file ----


class LegacySource(Shown):
    """A ``PackSource`` of the packs of a legacy ``.npy`` file, which is loaded into memory.

    Args:
        path: path of the file.
        capacity: the maximum number of token positions in a pack; None for the length of the longest pack.
        pad_id: the padding id of the tokenizer, which the file does not have.

    Raises:
        FormatError: the file is unreadable, or not of this format.
        SequenceError: a pack breaks a rule.

    Example:
        >>> from megatron_sft_idx import LegacyPickleWriter
        >>> with LegacyPickleWriter("data/packs.npy") as writer:
        ...     writer.write_bin(0, [5, 6, 7, 5, 8], [1, 1, 0, 1, 0], [0, 3])
        >>> LegacySource("data/packs.npy", capacity=8)
        <LegacySource data/packs.npy: 1 packs of up to 8 tokens>
    """

    def __init__(self, path: str | os.PathLike[str], *, capacity: int | None = None, pad_id: int | None = None) -> None:
        self.path, self._packs = os.fspath(path), (packs := read_legacy(path))
        self._starts = packs.seq_starts.astype(np.uint32)
        self.num_packs = len(packs)
        self.capacity = int(packs.pack_lengths.max(initial=0)) if capacity is None else capacity
        self.sequence_multiple = 1
        self.most_sequences = int(packs.pack_sequences.max(initial=0))
        self.pad_id = pad_id
        self.columns: dict[str, list[ColumnSpec]] = {}
        self.media_prefix: str | None = None
        content = StreamHash()
        for array in (packs.tokens, packs.loss_mask, packs.token_offsets, packs.sequence_offsets, self._starts):
            content.update(array)
        self.fingerprint = content.hex()

    def _shown(self) -> str:
        return f"{self.path}: {self.num_packs:,} packs of up to {self.capacity:,} tokens"

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Return the locations of the sequences of these packs; see ``PackSource``."""
        index = self._packs.sequence_offsets, self._packs.token_offsets, self._starts, len(self._packs.tokens)
        numbers = np.ascontiguousarray(packs, np.int64)
        return Segments(*_native.pack_segments([index], np.zeros(len(numbers), np.int64), numbers))

    def arrays(self, shard: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return all tokens and label-aligned loss masks; see ``PackSource``."""
        return self._packs.tokens, self._packs.loss_mask

    def items(self, shard: int) -> None:
        """Legacy files have no images or audio."""
