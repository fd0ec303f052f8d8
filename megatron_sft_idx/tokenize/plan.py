"""The plan: what becomes of sequences that are too long or train nothing, and the packs that the rest makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.packing import PackPlan, pack_sequences
from megatron_sft_idx.tokenize.selection import Selection

if TYPE_CHECKING:
    from megatron_sft_idx.tokenize.gather import CorpusReader
    from megatron_sft_idx.tokenize.parts import PartsReader

__all__ = ["PackOptions", "PackedRun", "Packing", "plan_packs"]


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How sequences become packs.

    Attributes:
        capacity: most token positions a pack may hold.
        method: of ``pack_sequences``, or ``none`` for one sequence or pair a pack in the order of the input.
        effort: of ``pack_sequences``.
        overlong: what becomes of sequences longer than the capacity.
        sequence_multiple: count each sequence as its length rounded up to this.
        max_sequences_per_pack: at most so many; None for no limit.
        seed: of every shuffle and lot.
        selection: of rows, and of what trains nothing; None takes all.
    """

    capacity: int
    method: str = "auto"
    effort: Literal["normal", "high"] = "normal"
    overlong: Literal["error", "drop", "truncate", "split"] = "error"
    sequence_multiple: int = 1
    max_sequences_per_pack: int | None = None
    seed: int = 0
    selection: Selection | None = None

    def describe(self) -> dict[str, Any]:
        """For headers: a selection only where there is one."""
        return {name: value for name, value in asdict(self).items() if name != "selection" or value is not None}

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that fits a pack, rounded up as it is; 0 where none does."""
        return self.capacity // self.sequence_multiple * self.sequence_multiple


@dataclass(frozen=True, slots=True, eq=False)
class PackedRun:
    """Consecutive packs, of a shard or of a window of it, and the cuts in them.

    Attributes:
        offsets: pack ``p`` holds the cuts ``[offsets[p], offsets[p + 1])``, int64 [packs + 1].
        sequences: number of the sequence each is cut from, int64 [cuts].
        begins: where in that sequence it begins, in tokens, int64 [cuts]; None where all begin at 0.
        lengths: tokens of each, uint32 or int64 [cuts].
        longest: tokens of the longest pack, or more.
    """

    offsets: NDArray[np.int64]
    sequences: NDArray[np.int64]
    begins: NDArray[np.int64] | None
    lengths: NDArray[np.integer[Any]]
    longest: int

    def window(self, first: int, last: int) -> PackedRun:
        """Its packs from ``first`` to before ``last``."""
        offsets = self.offsets[first : last + 1]
        cuts = slice(int(offsets[0]), int(offsets[-1]))
        begins = None if self.begins is None else self.begins[cuts]
        return PackedRun(offsets - offsets[0], self.sequences[cuts], begins, self.lengths[cuts], self.longest)


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """A plan for all sequences, and what its shards' headers say of it.

    Attributes:
        plan: how the packs were found.
        run: all of them.
        shards: into how many shards, of as many packs each, give or take one.
        said: for the headers: options, counts of what was selected, and what became of overlong sequences.
    """

    plan: PackPlan
    run: PackedRun
    shards: int
    said: dict[str, Any]

    def packs_of(self, number: int) -> tuple[int, int]:
        """The first pack of a shard, and that behind its last."""
        return self.plan.num_packs * number // self.shards, self.plan.num_packs * (number + 1) // self.shards


def plan_packs(
    lengths: NDArray[np.int64],
    options: PackOptions,
    *,
    shards: int,
    source: str,
    groups: NDArray[np.integer[Any]] | None = None,
    chosen: NDArray[np.int64] | None = None,
    selected: Mapping[str, int] | None = None,
    reader: CorpusReader | PartsReader | None = None,
) -> Packing:
    """Plan all packs, global over the lengths of all sequences.

    Args:
        lengths: tokens of each sequence, int64 [sequences].
        options: how they are packed.
        shards: into how many shards.
        source: what errors call the sequences.
        groups: of pairs, which stay together and are dropped together, as for ``pack_sequences``.
        chosen: numbers of the sequences to pack, int64, some of them more than once; None for all.
        selected: counts of rows, for the header.
        reader: of the sequences, to know what trains nothing, and which labels cuts lose; None to plan without.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: groups that would be parted, no sequence fits or is left, or fewer packs than shards.
    """
    if chosen is not None:
        lengths, groups = lengths[chosen], None if groups is None else groups[chosen]
    cuts = _cut(lengths, _overlong(lengths, groups, options, source), options)
    groups = None if groups is None else groups[cuts.sequences]
    if chosen is not None:
        cuts = cuts._replace(sequences=chosen[cuts.sequences], parted=chosen[cuts.parted])
    counts, why = dict(selected or {}), f"{cuts.overlong} were longer than the capacity"
    if options.selection is not None and options.selection.drop_untrained and reader is not None:
        trains = _which_train(reader, cuts, groups)
        counts["untrained_sequences"] = int((~trains).sum())
        counts["untrained_tokens"] = int(cuts.lengths[~trains].sum())
        why += f", {counts['untrained_sequences']} have no token to train on"
        groups, begins = None if groups is None else groups[trains], cuts.begins
        begins = None if begins is None else begins[trains]
        cuts = cuts._replace(lengths=cuts.lengths[trains], sequences=cuts.sequences[trains], begins=begins)
    if not len(cuts.lengths):
        raise FormatError(f"{source}: no sequence is left to pack ({why})")
    one_a_pack, most = options.method == "none", options.max_sequences_per_pack
    plan = pack_sequences(
        cuts.lengths,
        options.capacity,
        method="sequential" if one_a_pack else options.method,
        effort=options.effort,
        max_sequences_per_pack=most if not one_a_pack else 1 if groups is None else 2,
        sequence_multiple=options.sequence_multiple,
        seed=options.seed,
        groups=groups,
    )
    if plan.num_packs < shards:
        raise FormatError(
            f"{source}: {plan.num_packs} packs cannot fill --output-shards {shards}: stock Megatron opens no empty"
            f" shard; ask for {plan.num_packs} or fewer"
        )
    order, begins = plan.sequences, None if cuts.begins is None else cuts.begins[plan.sequences]
    run = PackedRun(plan.offsets, cuts.sequences[order], begins, cuts.lengths[order].astype(np.uint32), plan.longest)
    said = options.describe() | {
        "overlong_sequences": cuts.overlong,
        "dropped_tokens": cuts.dropped_tokens,
        "untrained_by_cut": 0 if reader is None else reader.count_trained(cuts.parted, cuts.parted_at),
        "lower_bound": plan.lower_bound,
        "chosen": plan.method,
    }
    return Packing(plan, run, shards, said | ({} if options.selection is None else {"selected": counts}))


def _overlong(
    lengths: NDArray[np.int64], groups: NDArray[np.integer[Any]] | None, options: PackOptions, source: str
) -> NDArray[np.bool_]:
    """Which sequences do not fit a pack, alone or with the others of their group; errors as of ``plan_packs``."""
    longest, multiple = options.longest_sequence, options.sequence_multiple
    if not longest:
        raise FormatError(
            f"--seq-length {options.capacity} is below --sequence-multiple {multiple}: no sequence fits; raise it"
        )
    rooms, what, together, remedies = lengths, "sequences", 1, "drop, truncate or split"
    if groups is not None:
        if options.overlong in ("truncate", "split"):
            raise FormatError(
                f"{source}: --overlong {options.overlong} would part a pair or compare answers that are cut; choose"
                " --overlong drop, which drops both"
            )
        if options.max_sequences_per_pack == 1:
            raise FormatError(f"{source}: --max-sequences-per-pack 1 would part every pair; choose 2 or more")
        starts, what, together, remedies = _group_starts(groups), "pairs", 2, "drop"
        sizes = np.add.reduceat(-(-lengths // multiple) * multiple, starts)
        rooms = np.repeat(sizes, np.diff(starts, append=len(lengths)))
    long: NDArray[np.bool_] = rooms > longest
    if options.overlong == "error" and long.any():
        raise SequenceError(
            source,
            None,
            f"{long.sum() // together} of {len(lengths) // together} {what} are longer than {longest} tokens, the"
            f" longest has {rooms.max()}; choose --overlong {remedies}, or a larger --seq-length",
        )
    return long


def _which_train(
    reader: CorpusReader | PartsReader, cuts: _Cuts, groups: NDArray[np.integer[Any]] | None
) -> NDArray[np.bool_]:
    """Which cuts have a token to train on, bool [cuts]; of a group all have where one has."""
    begins = np.zeros_like(cuts.sequences) if cuts.begins is None else cuts.begins
    trains = reader.are_trained(cuts.sequences, begins, cuts.lengths)
    if groups is None or not len(trains):
        return trains
    starts = _group_starts(groups)
    return np.repeat(np.logical_or.reduceat(trains, starts), np.diff(starts, append=len(trains)))


def _group_starts(groups: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    return np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))


class _Cuts(NamedTuple):
    """Whole sequences, or runs of tokens cut from them: where each is from, and what is lost behind the cuts.

    Attributes:
        lengths: tokens of each, int64 [cuts].
        sequences: number of the sequence each is cut from, int64 [cuts].
        begins: where in that sequence each begins, int64 [cuts]; None where all begin at 0.
        overlong: sequences that were longer than a pack.
        dropped_tokens: of dropped sequences, or behind the cut of truncated ones.
        parted: sequences that go on behind a cut, int64; one entry a cut.
        parted_at: the position in the sequence behind that cut, int64: whether its token is trained on decides
            whether the cut loses a label.
    """

    lengths: NDArray[np.int64]
    sequences: NDArray[np.int64]
    begins: NDArray[np.int64] | None = None
    overlong: int = 0
    dropped_tokens: int = 0
    parted: NDArray[np.int64] = np.empty(0, np.int64)
    parted_at: NDArray[np.int64] = np.empty(0, np.int64)


def _cut(lengths: NDArray[np.int64], long: NDArray[np.bool_], options: PackOptions) -> _Cuts:
    """Do with overlong sequences as is asked."""
    longest, numbers, count = options.longest_sequence, np.arange(len(lengths)), int(long.sum())
    if not count:
        return _Cuts(lengths, numbers)
    if options.overlong == "drop":
        return _Cuts(lengths[~long], numbers[~long], None, count, int(lengths[long].sum()))
    if options.overlong == "truncate":
        dropped, at = int((lengths[long] - longest).sum()), np.full(count, longest, np.int64)
        return _Cuts(np.minimum(lengths, longest), numbers, None, count, dropped, numbers[long], at)
    parts = -(-lengths // longest)
    sequences = np.repeat(numbers, parts)
    begins = (np.arange(len(sequences)) - np.repeat(np.cumsum(parts) - parts, parts)) * longest
    inner, each = begins > 0, np.minimum(lengths[sequences] - begins, longest)
    return _Cuts(each, sequences, begins, count, 0, sequences[inner], begins[inner])
