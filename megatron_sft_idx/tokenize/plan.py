"""The plan of a job: how sequences are cut, and the pack of each cut, determined before anything is written.

A plan refers to sequences by number. Sequences of parts are counted through all parts in the order of the input,
sequences of a shard in the order of the shard. Each has token ids, a mask, and values in columns, which a
``SequenceReader`` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SequenceError, check_options
from megatron_sft_idx.lines import counted
from megatron_sft_idx.packing import Effort, Method, PackPlan, pack_sequences
from megatron_sft_idx.packs.conditions import Condition
from megatron_sft_idx.packs.run_media import RunMedia
from megatron_sft_idx.shard.writer import MaskAlignment
from megatron_sft_idx.tokenize.column_weights import Weights, weighted, wrong_weight
from megatron_sft_idx.tokenize.report import MAX_NAMED, named_rows
from megatron_sft_idx.tokenize.selection import Selection

PackingMethod: TypeAlias = Literal[Method, "none"]
Overlong: TypeAlias = Literal["error", "drop", "truncate", "split"]

# Returns images and audio of the sequences with these numbers, in this order.
MediaOf: TypeAlias = Callable[[NDArray[np.int64]], "RunMedia | None"]
# Returns the name of the sequence with this number in errors and reports.
PlaceOf: TypeAlias = Callable[[int], str]
# Number of overlong sequences whose places are looked up.
_MAX_LISTED = 1000
# Options that headers only have if they are set.
_IF_SET = ("selection", "where", "loss_weight_column")
# A mask is summed in windows of about this many tokens, 8 bytes of memory each.
_SUMMED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How sequences become packs.

    Attributes:
        capacity: maximum number of token positions in a pack.
        method: method of ``pack_sequences``, or ``none`` for one sequence or pair per pack in the order of the input.
        effort: see ``pack_sequences``.
        overlong: what to do with sequences longer than the capacity.
        sequence_multiple: each sequence takes its length rounded up to this many positions.
        max_sequences_per_pack: maximum number of sequences in a pack; None for no limit.
        seed: seed of every shuffle and random selection.
        selection: selection of rows and sequences; None takes all.
        where: conditions on columns, such as ``score >= 0.5``. Only sequences that meet all of them are packed.
        loss_weight_column: name of a column to multiply loss masks by; None for none.

    Raises:
        FormatError: an option is invalid or out of range, no sequence would fit in a pack, ``effort`` cannot be
            combined with ``method``, or a condition is invalid.
    """

    capacity: int
    method: PackingMethod = "auto"
    effort: Effort = "normal"
    overlong: Overlong = "error"
    sequence_multiple: int = 1
    max_sequences_per_pack: int | None = None
    seed: int = 0
    selection: Selection | None = None
    where: tuple[str, ...] = ()
    loss_weight_column: str | None = None

    def __post_init__(self) -> None:
        check_options(self, seed=(0, 2**64 - 1), max_sequences_per_pack=(1, 2**63 - 1))
        object.__setattr__(self, "where", tuple(str(Condition.parse(text)) for text in self.where))
        if self.sequence_multiple > self.capacity:
            raise FormatError(
                f"--seq-length {self.capacity} is below --sequence-multiple {self.sequence_multiple}, so no sequence"
                " fits; raise --seq-length"
            )
        if self.effort == "high" and self.method != "auto":
            raise FormatError(
                f"--packing-effort high needs --packing auto, not {self.method}; leave one of the two out"
            )

    def describe(self) -> dict[str, Any]:
        """Return all attributes for headers.

        Attributes that select or weight sequences are left out if they are not set.
        """
        described = asdict(self) | {"where": [*self.where]}
        return {name: value for name, value in described.items() if name not in _IF_SET or value}

    def by_name(self) -> dict[str, Any]:
        """Like ``describe``, with None for omitted attributes."""
        return dict.fromkeys(_IF_SET) | self.describe()

    @property
    def longest_sequence(self) -> int:
        """Number of tokens of the longest sequence that fits in a pack after rounding up."""
        return self.capacity // self.sequence_multiple * self.sequence_multiple


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRun:
    """Consecutive packs of a plan, and their cuts. A cut is a whole sequence or consecutive tokens of one.

    Attributes:
        offsets: pack ``p`` holds the cuts ``[offsets[p], offsets[p + 1])``, int64 [packs + 1].
        sequences: number of each cut's sequence, int64 [cuts].
        begins: start of each cut in its sequence, in tokens, int64 [cuts]; None if all begin at 0.
        lengths: number of tokens of each cut, uint32 or int64 [cuts].
        longest: maximum number of tokens in a pack.
    """

    offsets: NDArray[np.int64]
    sequences: NDArray[np.int64]
    begins: NDArray[np.int64] | None
    lengths: NDArray[np.integer[Any]]
    longest: int

    def window(self, first: int, last: int) -> PlannedRun:
        """Return the packs from ``first`` up to ``last`` (exclusive)."""
        offsets = self.offsets[first : last + 1]
        cuts = slice(int(offsets[0]), int(offsets[-1]))
        begins = None if self.begins is None else self.begins[cuts]
        return PlannedRun(offsets - offsets[0], self.sequences[cuts], begins, self.lengths[cuts], self.longest)


# ---- readers of the sequences of a plan ----


class FileSequences(NamedTuple):
    """The n sequences of a request that are in one file, ascending by number.

    Attributes:
        path: path of the file.
        indices: their positions in the request, int64 [n]. For a request for sequences 7, 900 and 5, where 900 is in
            another file, they are [2, 0].
        starts, lengths: start of each sequence among the tokens of the file, and its number of tokens, [n].
        ids, mask: ids and mask of all tokens of the file.
        columns: values of each sequence, by name, [n] or [n, width].
        weights: weights for the masks; None for none.
    """

    path: str
    indices: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.integer[Any]]
    ids: NDArray[Any]
    mask: NDArray[Any]
    columns: Mapping[str, NDArray[Any]]
    weights: Weights | None = None


class GatheredCuts(NamedTuple):
    """The cuts of several packs, in order.

    Attributes:
        ids, mask: ids and mask of all cuts, concatenated [tokens].
        columns: by name, one row per cut or token.
        media: images and audio of each cut; None if there are none.
    """

    ids: NDArray[Any]
    mask: NDArray[Any]
    columns: dict[str, NDArray[Any]]
    media: RunMedia | None


class SequenceReader(ABC):
    """Reads sequences by their numbers.

    Attributes:
        mask_alignment, mask_dtype: alignment and dtype of the masks returned by ``read``.
        stored_dtype: dtype of the masks before weighting: the dtype in the files, or a wider one.
        window_tokens: approximate number of tokens to read at a time.
        weighted_by: name of the column to multiply masks by; None for none.
    """

    mask_alignment: MaskAlignment
    mask_dtype: np.dtype[Any]
    stored_dtype: np.dtype[Any]
    window_tokens: int
    weighted_by: str | None = None

    @abstractmethod
    def _by_file(self, sequences: NDArray[np.int64]) -> Iterator[FileSequences]:
        """Yield the sequences with these numbers (in any order, with repetitions) file by file."""

    def place_of(self, sequence: int) -> str:
        """Return the name of a sequence in errors."""
        return f"sequence {sequence}"

    def media_of(self, sequences: NDArray[np.int64]) -> RunMedia | None:
        """Return images and audio of the sequences with these numbers, in this order; None if no sequence has any."""
        return None

    def read(self, run: PlannedRun) -> GatheredCuts:
        """Return the contents of packs, including images and audio."""
        ids, mask, weights, columns = self._gather(run)
        if weights is not None:
            mask = weighted(mask, weights)
        if (media := self.media_of(run.sequences)) is not None:
            media = media.cut(np.zeros(len(run.sequences), np.int64) if run.begins is None else run.begins, run.lengths)
        return GatheredCuts(ids, mask.astype(self.mask_dtype, copy=False), columns, media)

    def weigh_by(
        self, column: str, sequences: NDArray[np.int64], lengths: NDArray[np.int64], *, per_token: bool = False
    ) -> None:
        """Multiply masks by a column from now on. ``mask_dtype`` becomes uint8 if the results are only 0 and 1.

        Args:
            column: name of the column.
            sequences: numbers of the sequences that will be read.
            lengths: number of tokens of each of them.
            per_token: whether the column has one row per token.

        Raises:
            FormatError: a value is negative or not finite, or a product does not fit in float32.
        """
        self.weighted_by, ends, first, only_flags = column, np.cumsum(lengths), 0, True
        while first < len(sequences):
            tokens = self.window_tokens + int(ends[first] - lengths[first])
            last = max(first + 1, int(np.searchsorted(ends, tokens, "right")))
            some = slice(first, last)
            run = PlannedRun(
                np.arange(last - first + 1), sequences[some], None, lengths[some], int(lengths[some].max())
            )
            _, mask, weights, _ = self._gather(run, masks_alone=True)
            assert weights is not None
            if wrong := wrong_weight(mask, weights):
                at, what = wrong
                ends_of_run = np.cumsum(run.lengths)
                number = int(np.searchsorted(ends_of_run, at, "right"))
                token = at - int(ends_of_run[number] - run.lengths[number]) + (self.mask_alignment == "label")
                place = self.place_of(int(run.sequences[number])) + f", token {token}" * per_token
                raise FormatError(f"{place}: --loss-weight-column {column}: {what}")
            product = weighted(mask, weights)
            only_flags = only_flags and bool(((product == 0) | (product == 1)).all())
            first = last
        self.mask_dtype = np.dtype(np.uint8 if only_flags else np.float32)

    def _gather(
        self, run: PlannedRun, *, masks_alone: bool = False
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, dict[str, NDArray[Any]]]:
        """Do the same as ``read``, with unweighted masks, and with weights for each of their values, or None."""
        cuts, lengths = len(run.sequences), run.lengths.astype(np.int64)
        begins = np.zeros(cuts, np.int64) if run.begins is None else run.begins
        ends = np.cumsum(lengths)
        places, columns = ends - lengths, dict[str, NDArray[Any]]()
        ids, mask, weights = np.empty(0), np.empty(ends[-1], self.stored_dtype), None
        for number, file in enumerate(self._by_file(run.sequences)):
            if not number and not masks_alone:
                ids = np.empty(ends[-1], file.ids.dtype)
                columns = {name: np.empty((cuts, *of.shape[1:]), of.dtype) for name, of in file.columns.items()}
            begin, length, place = (each[file.indices] for each in (begins, lengths, places))
            if (begin + length > file.lengths).any():
                raise changed_error(file.path)
            starts = file.starts + begin
            _native.gather_sequences(file.mask.astype(self.stored_dtype, copy=False), starts, length, place, mask)
            if file.weights is not None:
                weights = np.ones(ends[-1], file.weights.values.dtype) if weights is None else weights
                file.weights.gather(starts, length, place, weights)
            if not masks_alone:
                _native.gather_sequences(file.ids, starts, length, place, ids)
                for name, values in file.columns.items():
                    columns[name][file.indices] = values
        return ids, mask, weights, columns

    def count_trained(
        self, sequences: NDArray[np.int64], begins: NDArray[np.int64], lengths: NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        """Return the number of trained tokens in each stretch, int64 [stretches].

        A stretch is ``lengths`` tokens of a sequence from ``begins`` on. ``begins`` is at least 1, because nothing
        predicts the first token of a sequence.
        """
        counts = np.empty(len(sequences), np.int64)
        # In a label-aligned mask, the value for a token is one position earlier.
        shift = self.mask_alignment == "label"
        for file in self._by_file(sequences):
            starts = file.starts + begins[file.indices] - shift
            ends = starts + lengths[file.indices]
            windows = np.flatnonzero(np.diff(starts // _SUMMED_TOKENS)) + 1
            for some in filter(len, np.split(np.arange(len(starts)), windows)):
                low, high = int(starts[some].min()), int(ends[some].max())
                trained = file.mask[low:high] != 0
                if file.weights is not None and not file.weights.of_sequences:
                    trained &= file.weights.are_set(low, high)
                sums = np.cumsum(np.append(0, trained))
                counts[file.indices[some]] = sums[ends[some] - low] - sums[starts[some] - low]
                if file.weights is not None and file.weights.of_sequences:
                    counts[file.indices[some]] *= file.weights.values[some] != 0
        return counts

    def are_trained(
        self, sequences: NDArray[np.int64], begins: NDArray[np.int64], lengths: NDArray[np.integer[Any]]
    ) -> NDArray[np.bool_]:
        """Return whether each cut has a trained token besides its first, which nothing predicts, bool [cuts].

        The cuts are given as in ``PlannedRun``.
        """
        return self.count_trained(sequences, begins + 1, lengths - 1) > 0


def changed_error(path: str) -> FormatError:
    """Return the error about a file whose sequences are not the planned ones, and the remedy."""
    return FormatError(
        f"{path}: changed since its lengths were read; run the command again, which makes this part again"
    )


# ---- the plan of all packs ----


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """A plan for all sequences, and its metadata for headers.

    Attributes:
        plan: the plan from ``pack_sequences``, with cuts numbered from 0 on.
        run: all packs.
        metadata: for headers: options, counts of selected rows, and what was done with overlong sequences.
        overlong: place and number of tokens of the longest overlong sequences or pairs, longest first.
    """

    plan: PackPlan
    run: PlannedRun
    metadata: dict[str, Any]
    overlong: list[tuple[str, int]]


def plan_packs(
    lengths: NDArray[np.int64],
    options: PackOptions,
    *,
    shards: int,
    name: str,
    groups: NDArray[np.integer[Any]] | None = None,
    chosen: NDArray[np.int64] | None = None,
    selected: Mapping[str, int] | None = None,
    reader: SequenceReader | None = None,
    media: RunMedia | None = None,
    place_of: PlaceOf | None = None,
) -> Packing:
    """Plan all packs of a job at once, from the lengths of its sequences.

    Args:
        lengths: number of tokens of each sequence, int64 [sequences].
        options: options for packing.
        shards: number of shards; each must get at least one pack.
        name: name of the sequences in errors.
        groups: numbers of pairs, int64 [sequences]; sequences of a pair stay together, and are dropped together.
        chosen: numbers of the sequences to pack, int64, possibly with repetitions; None for all.
        selected: counts of selected rows, for headers.
        reader: reader of the sequences, for the trained tokens in cuts and sequences; None ignores ``drop_untrained``.
        media: positions of images and audio of all sequences, if there is no reader for that.
        place_of: names sequences by their numbers, if there is no reader for that.

    Raises:
        SequenceError: sequences are longer than the capacity, and must not be dropped, truncated or split.
        FormatError: pairs would be separated, no sequence is left, or there are fewer packs than shards.
    """
    if chosen is not None:
        lengths, groups = lengths[chosen], None if groups is None else groups[chosen]
    place_of = place_of or "sequence {}".format if reader is None else reader.place_of
    long, overlong = find_overlong(lengths, groups, options, name, place_of, chosen)
    cuts = _cut(lengths, long, options)
    media_of: MediaOf | None = None if media is None else media.taken
    media_of = media_of if reader is None else reader.media_of
    cuts, parted = _without_parted_media(cuts, lengths, media_of, chosen)
    if groups is not None and cuts.sequences is not None:
        groups = groups[cuts.sequences]
    if chosen is not None:
        sequences = chosen if cuts.sequences is None else chosen[cuts.sequences]
        cuts = cuts._replace(sequences=sequences, lost=cuts.lost._replace(sequences=chosen[cuts.lost.sequences]))
    counts, why = dict(selected or {}), f"{cuts.overlong:,} longer than the capacity"
    if options.selection is not None and options.selection.drop_untrained and reader is not None:
        trains = _which_train(reader, cuts, groups)
        counts["untrained_sequences"] = int((~trains).sum())
        counts["untrained_tokens"] = int(cuts.lengths[~trains].sum())
        why += f", {counts['untrained_sequences']:,} without a token to train on"
        groups, cuts = None if groups is None else groups[trains], cuts.only(np.flatnonzero(trains))
    if not len(cuts.lengths):
        raise FormatError(f"{name}: no sequence is left to pack ({why})")
    one_per_pack, max_sequences = options.method == "none", options.max_sequences_per_pack
    plan = pack_sequences(
        cuts.lengths,
        options.capacity,
        method="sequential" if one_per_pack else options.method,
        effort=options.effort,
        max_sequences_per_pack=max_sequences if not one_per_pack else 1 if groups is None else 2,
        sequence_multiple=options.sequence_multiple,
        seed=options.seed,
        groups=groups,
    )
    if plan.num_packs < shards:
        raise FormatError(
            f"{name}: {plan.num_packs} packs are too few for --output-shards {shards}: stock Megatron cannot open an"
            f" empty shard; use at most {plan.num_packs} shards"
        )
    cuts = cuts._replace(lengths=cuts.lengths.astype(np.uint32)).only(plan.sequences)
    run = PlannedRun(plan.offsets, cuts.numbers, cuts.begins, cuts.lengths, plan.longest)
    metadata = options.describe() | {
        "overlong_sequences": cuts.overlong,
        "dropped_tokens": cuts.dropped_tokens,
        **({"dropped_media_sequences": parted} if parted else {}),
        "lost_trained_tokens": 0 if reader is None else int(reader.count_trained(*cuts.lost).sum()),
        "lower_bound": plan.lower_bound,
        "chosen": plan.method,
    }
    metadata |= {} if options.selection is None else {"selected": counts}
    return Packing(plan, run, metadata, overlong)


def chosen_where(
    numbers: NDArray[np.int64], kept: NDArray[np.bool_], options: PackOptions, name: str
) -> NDArray[np.int64]:
    """Return the numbers of sequences for which the conditions of ``options`` hold, ``kept``. FormatError: none."""
    chosen = numbers[kept[numbers]]
    if not len(chosen):
        conditions = " --where ".join(options.where)
        raise FormatError(f"{name}: none of {counted(len(numbers), 'sequence')} matches --where {conditions}")
    return chosen


def num_kept_tokens(lengths: NDArray[np.int64], options: PackOptions, reader: SequenceReader) -> int:
    """Return how many tokens ``plan_packs`` would pack, for sequences that are not pairs. Same arguments and errors."""
    cuts = _cut(lengths, find_overlong(lengths, None, options, "lengths", reader.place_of)[0], options)
    cuts, _ = _without_parted_media(cuts, lengths, reader.media_of, None)
    if options.selection is not None and options.selection.drop_untrained:
        cuts = cuts.only(np.flatnonzero(_which_train(reader, cuts, None)))
    return int(cuts.lengths.sum())


def find_overlong(
    lengths: NDArray[np.int64],
    groups: NDArray[np.integer[Any]] | None,
    options: PackOptions,
    name: str,
    place_of: PlaceOf,
    chosen: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.bool_], list[tuple[str, int]]]:
    """Return which sequences do not fit in a pack, by themselves or with their pair, and the longest of them.

    See ``plan_packs`` for arguments and errors, and ``Packing.overlong`` for the second value.
    """
    longest, multiple = options.longest_sequence, options.sequence_multiple
    positions, unit, per_unit, remedies = lengths, "sequence", 1, "drop, truncate or split"
    if groups is not None:
        if options.overlong in ("truncate", "split"):
            raise FormatError(
                f"{name}: --overlong {options.overlong} would separate a pair or compare truncated answers; use"
                " --overlong drop, which drops both"
            )
        if options.max_sequences_per_pack == 1:
            raise FormatError(f"{name}: --max-sequences-per-pack 1 would separate every pair; use 2 or more")
        unit, per_unit, remedies = "pair", 2, "drop"
        positions = _of_groups(np.add, -(-lengths // multiple) * multiple, groups)
    long: NDArray[np.bool_] = positions > longest
    numbers = np.flatnonzero(long)[::per_unit]
    longest_first = numbers[np.argsort(-positions[numbers], kind="stable")][:_MAX_LISTED].tolist()
    places = [place_of(number if chosen is None else int(chosen[number])) for number in longest_first]
    rows: dict[str, int] = {}  # a row with several overlong sequences is named once
    for place, number in zip(places, longest_first, strict=True):
        rows.setdefault(place, int(positions[number]))
    if options.overlong == "error" and len(numbers):
        count, total = len(numbers), counted(len(lengths) // per_unit, unit)
        rest = count - sum(map(places.count, [*rows][:MAX_NAMED]))
        more = f" and {rest:,} more" if rest else ""
        raise SequenceError(
            name,
            None,
            f"{count:,} of {total} {'is' if count == 1 else 'are'} longer than {counted(longest, 'token')}:"
            f" {named_rows([*rows.items()])}{more}; choose --overlong {remedies}, or a larger --seq-length",
        )
    return long, [*rows.items()]


def _without_parted_media(
    cuts: _Cuts, lengths: NDArray[np.int64], media_of: MediaOf | None, chosen: NDArray[np.int64] | None
) -> tuple[_Cuts, int]:
    """Drop the cuts of sequences that are cut inside an image or recording. Return the rest, and the number dropped.

    See ``plan_packs`` for arguments; without ``sequences``, cuts are of the ``chosen`` ones. ``media_of`` is that of
    ``SequenceReader``, or None if there are none.
    """
    if media_of is None or not cuts.overlong:
        return cuts, 0
    begins = np.zeros(len(cuts.lengths), np.int64) if cuts.begins is None else cuts.begins
    shorter = np.flatnonzero(cuts.lengths < lengths[cuts.numbers])
    of = cuts.numbers[shorter]
    if not len(of) or (media := media_of(of if chosen is None else chosen[of])) is None:
        return cuts, 0
    parted = np.unique(of[media.are_parted(begins[shorter], cuts.lengths[shorter])])
    if not len(parted):
        return cuts, 0
    kept = np.flatnonzero(~np.isin(cuts.numbers, parted))
    whole = _Lost(parted, np.ones(len(parted), np.int64), lengths[parted] - 1)
    others = ~np.isin(cuts.lost.sequences, parted)
    lost = _Lost(*(np.append(each[others], more) for each, more in zip(cuts.lost, whole, strict=True)))
    # The tokens already dropped by truncation are included in all tokens of these sequences.
    dropped = cuts.dropped_tokens + int(cuts.lengths[np.isin(cuts.numbers, parted)].sum())
    return cuts.only(kept)._replace(dropped_tokens=dropped, lost=lost), len(parted)


def _which_train(reader: SequenceReader, cuts: _Cuts, groups: NDArray[np.integer[Any]] | None) -> NDArray[np.bool_]:
    """Return which cuts have a trained token, bool [cuts]. If one answer of a pair has one, both count."""
    begins = np.zeros(len(cuts.lengths), np.int64) if cuts.begins is None else cuts.begins
    trains = reader.are_trained(cuts.numbers, begins, cuts.lengths)
    return trains if groups is None or not len(trains) else _of_groups(np.logical_or, trains, groups)


def _of_groups(reduce: np.ufunc, values: NDArray[Any], groups: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """Return for each value the reduction of all values of its group."""
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    return np.repeat(reduce.reduceat(values, starts), np.diff(starts, append=len(values)))


class _Lost(NamedTuple):
    """Stretches of tokens on which a shard no longer trains, in the form for ``SequenceReader.count_trained``."""

    sequences: NDArray[np.int64]
    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]


_NOTHING_LOST = _Lost(*(np.empty(0, np.int64) for _ in range(3)))


class _Cuts(NamedTuple):
    """The cuts to pack (whole sequences or consecutive tokens of one), and what cutting lost.

    Attributes:
        lengths: number of tokens of each cut, [cuts].
        sequences: number of each cut's sequence, int64 [cuts]; None if cut ``i`` belongs to sequence ``i``.
        begins: start of each cut in its sequence, int64 [cuts]; None if all begin at 0.
        overlong: number of sequences longer than a pack.
        dropped_tokens: number of tokens of dropped sequences, and of truncated ones after their cut.
        lost: tokens that are not stored, and first tokens of cuts, which nothing predicts there.
    """

    lengths: NDArray[np.integer[Any]]
    sequences: NDArray[np.int64] | None = None
    begins: NDArray[np.int64] | None = None
    overlong: int = 0
    dropped_tokens: int = 0
    lost: _Lost = _NOTHING_LOST

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Return ``sequences``, always as an array."""
        return np.arange(len(self.lengths)) if self.sequences is None else self.sequences

    def only(self, which: NDArray[np.int64]) -> _Cuts:
        """Return the cuts with these indices, in this order."""
        return self._replace(
            lengths=self.lengths[which],
            sequences=which if self.sequences is None else self.sequences[which],
            begins=None if self.begins is None else self.begins[which],
        )


def _cut(lengths: NDArray[np.int64], long: NDArray[np.bool_], options: PackOptions) -> _Cuts:
    """Return the cuts of all sequences. Too long ones are dropped, truncated or split according to the options."""
    longest, count = options.longest_sequence, int(long.sum())
    if not count:
        return _Cuts(lengths)
    numbers = np.flatnonzero(long)
    if options.overlong == "drop":
        lost = _Lost(numbers, np.ones(count, np.int64), lengths[long] - 1)
        return _Cuts(lengths[~long], np.flatnonzero(~long), None, count, int(lengths[long].sum()), lost)
    if options.overlong == "truncate":
        lost = _Lost(numbers, np.full(count, longest, np.int64), lengths[long] - longest)
        return _Cuts(np.minimum(lengths, longest), None, None, count, int(lost.lengths.sum()), lost)
    assert options.overlong == "split", options.overlong
    counts = -(-lengths // longest)
    sequences = np.repeat(np.arange(len(lengths)), counts)
    begins = (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
    inner, cut_lengths = begins > 0, np.minimum(lengths[sequences] - begins, longest)
    lost = _Lost(sequences[inner], begins[inner], np.ones(int(inner.sum()), np.int64))
    return _Cuts(cut_lengths, sequences, begins, count, 0, lost)
