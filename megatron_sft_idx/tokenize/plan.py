"""The plan of a job: which rows are packed and how often, how sequences are cut, and which pack each cut goes into.

Rows are selected by lots. The lot of a row is drawn from the seed and a hash of the row's content: messages, weights,
tools and template variables, or the ids and masks it came with. So it is the same on any machine and in any order, and
does not change as other rows are added; and equal rows share it, so that no copy of a validation row is trained on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.types import Conversation, TokenizedRow
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.packing import PackPlan, csr_rows, pack_sequences
from megatron_sft_idx.shard import Shard

if TYPE_CHECKING:
    from megatron_sft_idx.tokenize.gather import SequenceReader

_MAX_WEIGHT = 1000


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows are packed, and how often; applied in the order of the attributes.

    Attributes:
        max_rows: only the first so many usable rows of the input; None for all.
        dedup: ``exact`` leaves out rows whose content equals that of an earlier row.
        sample: the share of rows to take, by lot.
        valid_fraction: the share of rows that go to the validation shard, by lot.
        weights: how often a row of each file is trained on, by the number of the file; empty for once each.
        shuffle: put the rows into an order drawn by the seed.
        drop_untrained: leave out sequences, and cuts of them, that have no token to train on.
    """

    max_rows: int | None = None
    dedup: Literal["none", "exact"] = "none"
    sample: float = 1.0
    valid_fraction: float = 0.0
    weights: list[float] = field(default_factory=list)
    shuffle: bool = False
    drop_untrained: bool = False

    def __post_init__(self) -> None:
        for name, share in (("sample", self.sample), ("valid_fraction", self.valid_fraction)):
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not is_number or not 0 <= share <= 1 or (name == "sample" and not share):
                raise FormatError(f"--{name.replace('_', '-')} {share}: expected a share of the rows, such as 0.1")
        if self.valid_fraction == 1:
            raise FormatError("--valid-fraction 1: nothing would be left to train on")

    @property
    def of_rows(self) -> bool:
        """Whether rows are selected, for which the hashes of their content are needed."""
        return replace(self, drop_untrained=False) != Selection()


def file_weights(option: str, entries: Sequence[str], files: Sequence[str]) -> list[float]:
    """A weight for each file of the input; 1 for files that no entry names.

    Args:
        option: name of the option in errors.
        entries: ``FILE=WEIGHT``, where FILE is a path as it is in the input, a glob, a folder, or the name of one file.
        files: paths of the input.

    Raises:
        FormatError: an entry that is no such weight, or names no file, several of one name, or a file a second time.
    """
    weights: dict[int, float] = {}
    for entry in entries:
        name, _, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not name or not 0 <= weight <= _MAX_WEIGHT:
            form = f"FILE=WEIGHT, such as chats.jsonl=0.5, from 0 to {_MAX_WEIGHT:,}"
            raise FormatError(f"{option} {entry}: expected {form}")
        folder = name.rstrip("/") + "/"
        matching = [n for n, path in enumerate(files) if path == name or fnmatch(path, name) or path.startswith(folder)]
        if not matching:
            matching = [n for n, path in enumerate(files) if os.path.basename(path) == name]
            if len(matching) > 1:
                several = ", ".join(files[n] for n in matching)
                raise FormatError(f"{option} {entry}: {several} are called so, name one by its path")
        if not matching:
            raise FormatError(f"{option} {entry}: no file of the input is called so; they are {', '.join(files)}")
        if weighted := next((files[n] for n in matching if n in weights), None):
            raise FormatError(f"{option} {entry}: it has a weight already: {weighted}")
        weights |= dict.fromkeys(matching, weight)
    return [weights.get(n, 1.0) for n in range(len(files))]


def row_hash(row: Sequence[Conversation | TokenizedRow], label: int | None = None) -> NDArray[np.uint32]:
    """A hash of a row's content, not of the names of its fields or of fields that are not read: uint32 [4].

    Args:
        row: its one conversation, or the two of a pair.
        label: of KTO, the lowest bit of the hash. Lots do not depend on that bit: two rows that differ in their label
            alone are no duplicates, but share their lot.
    """
    stream = xxhash.xxh3_128()
    for each in row:
        if isinstance(each, TokenizedRow):
            stream.update(each.input_ids.tobytes() + each.loss_mask.tobytes())
        else:
            content = [each.messages, each.weights, each.tools, each.kwargs]
            try:
                # Values of tables that JSON does not have are hashed as Python shows them.
                text = orjson.dumps(content, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
            except TypeError:  # numbers beyond 64 bits, lone surrogates
                text = json.dumps(content, default=repr, sort_keys=True).encode()
            stream.update(text)
    words = np.frombuffer(stream.digest(), "<u4").copy()
    words[0] = words[0] & 0xFFFFFFFE | (label or 0)
    return words


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """The sequences of selected rows.

    Attributes:
        train: numbers of the sequences to train on, int64, in the order of packing; some more than once.
        valid: numbers of the sequences to validate with, likewise.
        counts: of rows, by name, for the summary.
    """

    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    counts: dict[str, int]


def select_rows(
    contents: NDArray[np.uint32], files: NDArray[np.integer[Any]], selection: Selection, seed: int
) -> Selected:
    """Select among all rows of a job, with about 100 bytes of memory a row.

    Args:
        contents: for each sequence the hash of its row and its number in the row, uint32 [sequences, 5]; in the order
            of the input, sequences of a row end to end.
        files: number of the file of each sequence, [sequences].
        selection: of rows.
        seed: of every lot.

    Raises:
        FormatError: no row is selected to train on, or to validate with.
    """
    starts = np.flatnonzero(contents[:, 4] == 0)
    sizes = np.diff(starts, append=len(contents))
    keys = np.ascontiguousarray(contents[starts, :4]).view("<u8")
    selected = np.arange(min(len(starts), selection.max_rows or len(starts)))
    counts = {} if selection.max_rows is None else {"max_rows": len(selected)}
    if selection.dedup == "exact":
        hashes = keys[selected]
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # which is stable
        repeats = (hashes[order[1:]] == hashes[order[:-1]]).all(1)
        unique = np.sort(selected[order[np.append(np.ones(min(len(order), 1), bool), ~repeats)]])
        counts["duplicates"], selected = len(selected) - len(unique), unique
    if selection.sample < 1:
        sampled = selected[draw_lots(keys[selected], seed, "sample") < selection.sample]
        counts["not_sampled"], selected = len(selected) - len(sampled), sampled
    is_valid = draw_lots(keys[selected], seed, "valid") < selection.valid_fraction
    train, valid = selected[~is_valid], selected[is_valid]
    counts["valid"] = len(valid)
    if selection.weights:
        weights = np.array(selection.weights)[files[starts[train]]]
        whole = np.floor(weights).astype(np.int64)
        times = whole + (draw_lots(keys[train], seed, "weight") < weights - whole)
        counts["weighted_out"] = int((times == 0).sum())
        counts["repeats"] = int(np.maximum(times - 1, 0).sum())
        # Copies of a row are far from each other: all rows once, then those that come twice, and so on.
        train = np.concatenate([train[times > copy] for copy in range(max(times.max(initial=0), 1))])
    counts["train"] = len(train)
    if selection.shuffle:
        train = np.random.default_rng(seed).permutation(train)
    for name, rows in (("train on", train), ("validate with", valid)):
        if not len(rows) and (name == "train on" or selection.valid_fraction):
            raise FormatError(f"no row is left to {name}, of {len(starts)} usable ones: ask for more of them")
    return Selected(_sequences_of(train, starts, sizes), _sequences_of(valid, starts, sizes), counts)


def draw_lots(keys: NDArray[np.uint64], seed: int, purpose: str) -> NDArray[np.float64]:
    """A number from 0 to below 1 for each key, uint64 [rows, 2]; it differs with the seed and the purpose."""
    lots = (keys[:, 0] >> np.uint64(1)) ^ np.uint64(xxhash.xxh3_64_intdigest(f"{purpose} {seed}".encode()))
    # The finalizer of SplitMix64 (Steele, Lea and Flood 2014), with the key's other half mixed in between.
    for half in (np.uint64(0), keys[:, 1]):
        lots = lots ^ half
        lots = (lots ^ (lots >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        lots = (lots ^ (lots >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        lots = lots ^ (lots >> np.uint64(31))
    return np.asarray((lots >> np.uint64(11)) * 2.0**-53)


def _sequences_of(rows: NDArray[np.int64], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of the sequences of these rows, end to end."""
    return csr_rows(starts[rows], sizes[rows])[1]


def sequences_of(source: Shard, names: Iterable[str]) -> NDArray[np.int64]:
    """Numbers of the sequences made from files of these names; FormatError where the column ``source`` has no such."""
    column = source.columns.get("source")
    files = None if column is None else column.spec.metadata.get("files")
    if column is None or column.spec.kind[:3] != ("sequence", "<u4", 2) or not isinstance(files, list):
        raise FormatError(f"{source.prefix}: has no column source, which preprocess writes, and so no files to choose")
    listed = [file.get("name") if isinstance(file, dict) else None for file in files]
    if unknown := sorted({*names} - {*listed}):
        known = ", ".join(map(str, listed[:5])) + (", ..." if len(listed) > 5 else "")
        raise FormatError(f"{source.prefix}: --source {unknown[0]}: no such file in it; it has {known}")
    numbers = [number for number, name in enumerate(listed) if name in {*names}]
    return np.flatnonzero(np.isin(column.values[:][:, 0], numbers))


# ---- the plan ----


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How sequences become packs.

    Attributes:
        capacity: how many token positions a pack may hold.
        method: of ``pack_sequences``, or ``none`` for one sequence or pair a pack in the order of the input.
        effort: of ``pack_sequences``.
        overlong: what becomes of sequences longer than the capacity.
        sequence_multiple: each sequence takes its length rounded up to this many positions.
        max_sequences_per_pack: None for no limit.
        seed: of every shuffle and lot.
        selection: of rows and sequences; None takes all.

    Raises:
        FormatError: no sequence would fit a pack, or ``effort`` does not go with ``method``.
    """

    capacity: int
    method: str = "auto"
    effort: Literal["normal", "high"] = "normal"
    overlong: Literal["error", "drop", "truncate", "split"] = "error"
    sequence_multiple: int = 1
    max_sequences_per_pack: int | None = None
    seed: int = 0
    selection: Selection | None = None

    def __post_init__(self) -> None:
        if self.sequence_multiple > self.capacity:
            raise FormatError(
                f"--seq-length {self.capacity} is below --sequence-multiple {self.sequence_multiple}: no sequence fits;"
                " raise it"
            )
        if self.effort == "high" and self.method != "auto":
            raise FormatError(f"--packing-effort high goes with --packing auto, not {self.method}: leave one out")

    def describe(self) -> dict[str, Any]:
        """All attributes for headers; ``selection`` only where there is one."""
        return {name: value for name, value in asdict(self).items() if name != "selection" or value is not None}

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that fits a pack after rounding up."""
        return self.capacity // self.sequence_multiple * self.sequence_multiple


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRun:
    """Consecutive packs of a plan, and the cuts in them; a cut is a whole sequence or consecutive tokens of one.

    Attributes:
        offsets: pack ``p`` holds the cuts ``[offsets[p], offsets[p + 1])``, int64 [packs + 1].
        sequences: number of the sequence that each cut is of, int64 [cuts].
        begins: where in that sequence each cut begins, in tokens, int64 [cuts]; None where all begin at 0.
        lengths: tokens of each cut, uint32 or int64 [cuts].
        longest: no pack has more tokens.
    """

    offsets: NDArray[np.int64]
    sequences: NDArray[np.int64]
    begins: NDArray[np.int64] | None
    lengths: NDArray[np.integer[Any]]
    longest: int

    def window(self, first: int, last: int) -> PlannedRun:
        """The packs from ``first`` to before ``last``."""
        offsets = self.offsets[first : last + 1]
        cuts = slice(int(offsets[0]), int(offsets[-1]))
        begins = None if self.begins is None else self.begins[cuts]
        return PlannedRun(offsets - offsets[0], self.sequences[cuts], begins, self.lengths[cuts], self.longest)


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """A plan for all sequences, and what headers say of it.

    Attributes:
        plan: as ``pack_sequences`` made it, in which cuts are numbered from 0 on.
        run: all packs.
        metadata: for headers: options, counts of selected rows, and what became of overlong sequences.
    """

    plan: PackPlan
    run: PlannedRun
    metadata: dict[str, Any]


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
) -> Packing:
    """Plan all packs of a job at once, from the lengths of its sequences.

    Args:
        lengths: tokens of each sequence, int64 [sequences].
        options: how they are packed.
        shards: each must get a pack at least.
        name: what errors call the sequences.
        groups: numbers of pairs, int64 [sequences]; sequences of a pair stay together, and are dropped together.
        chosen: numbers of the sequences to pack, int64, some of them more than once; None for all.
        selected: counts of selected rows, for headers.
        reader: of the sequences, which tells what cuts and sequences train; None ignores ``drop_untrained``.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: pairs would be torn, no sequence is left, or there are fewer packs than shards.
    """
    if chosen is not None:
        lengths, groups = lengths[chosen], None if groups is None else groups[chosen]
    cuts = _cut(lengths, _overlong(lengths, groups, options, name), options)
    if groups is not None and cuts.sequences is not None:
        groups = groups[cuts.sequences]
    if chosen is not None:
        sequences = chosen if cuts.sequences is None else chosen[cuts.sequences]
        cuts = cuts._replace(sequences=sequences, parted=chosen[cuts.parted])
    counts, why = dict(selected or {}), f"{cuts.overlong} were longer than the capacity"
    if options.selection is not None and options.selection.drop_untrained and reader is not None:
        trains = _which_train(reader, cuts, groups)
        counts["untrained_sequences"] = int((~trains).sum())
        counts["untrained_tokens"] = int(cuts.lengths[~trains].sum())
        why += f", {counts['untrained_sequences']} have no token to train on"
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
            f"{name}: {plan.num_packs} packs cannot fill --output-shards {shards}: stock Megatron opens no empty"
            f" shard; ask for {plan.num_packs} or fewer"
        )
    cuts = cuts._replace(lengths=cuts.lengths.astype(np.uint32)).only(plan.sequences)
    run = PlannedRun(plan.offsets, cuts.numbers, cuts.begins, cuts.lengths, plan.longest)
    metadata = options.describe() | {
        "overlong_sequences": cuts.overlong,
        "dropped_tokens": cuts.dropped_tokens,
        "untrained_by_cut": 0 if reader is None else reader.count_trained(cuts.parted, cuts.parted_at),
        "lower_bound": plan.lower_bound,
        "chosen": plan.method,
    }
    return Packing(plan, run, metadata | ({} if options.selection is None else {"selected": counts}))


def num_kept_tokens(lengths: NDArray[np.int64], options: PackOptions, reader: SequenceReader) -> int:
    """How many tokens of sequences, none of them of pairs, ``plan_packs`` would pack; arguments as for it."""
    cuts = _cut(lengths, lengths > options.longest_sequence, options)
    if options.selection is not None and options.selection.drop_untrained:
        cuts = cuts.only(np.flatnonzero(_which_train(reader, cuts, None)))
    return int(cuts.lengths.sum())


def _overlong(
    lengths: NDArray[np.int64], groups: NDArray[np.integer[Any]] | None, options: PackOptions, name: str
) -> NDArray[np.bool_]:
    """Which sequences do not fit a pack, alone or with the other one of their pair; errors as of ``plan_packs``."""
    longest, multiple = options.longest_sequence, options.sequence_multiple
    positions, units, per_unit, remedies = lengths, "sequences", 1, "drop, truncate or split"
    if groups is not None:
        if options.overlong in ("truncate", "split"):
            raise FormatError(
                f"{name}: --overlong {options.overlong} would part a pair or compare answers that are cut; choose"
                " --overlong drop, which drops both"
            )
        if options.max_sequences_per_pack == 1:
            raise FormatError(f"{name}: --max-sequences-per-pack 1 would part every pair; choose 2 or more")
        units, per_unit, remedies = "pairs", 2, "drop"
        positions = _of_groups(np.add, -(-lengths // multiple) * multiple, groups)
    long: NDArray[np.bool_] = positions > longest
    if options.overlong == "error" and long.any():
        raise SequenceError(
            name,
            None,
            f"{long.sum() // per_unit} of {len(lengths) // per_unit} {units} are longer than {longest} tokens, the"
            f" longest has {positions.max()}; choose --overlong {remedies}, or a larger --seq-length",
        )
    return long


def _which_train(reader: SequenceReader, cuts: _Cuts, groups: NDArray[np.integer[Any]] | None) -> NDArray[np.bool_]:
    """Which cuts have a token to train on, bool [cuts]; both of a pair have where one has."""
    begins = np.zeros(len(cuts.lengths), np.int64) if cuts.begins is None else cuts.begins
    trains = reader.are_trained(cuts.numbers, begins, cuts.lengths)
    return trains if groups is None or not len(trains) else _of_groups(np.logical_or, trains, groups)


def _of_groups(reduce: np.ufunc, values: NDArray[Any], groups: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """For each value, all values of its group reduced to one."""
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    return np.repeat(reduce.reduceat(values, starts), np.diff(starts, append=len(values)))


class _Cuts(NamedTuple):
    """The cuts to pack, each a whole sequence or consecutive tokens of one, and what cutting lost.

    Attributes:
        lengths: tokens of each cut, [cuts].
        sequences: number of the sequence that each cut is of, int64 [cuts]; None where cut ``i`` is of sequence ``i``.
        begins: where in that sequence each cut begins, int64 [cuts]; None where all begin at 0.
        overlong: how many sequences were longer than a pack.
        dropped_tokens: tokens of dropped sequences, and of truncated ones behind their cut.
        parted: number of the sequence, for each end of a cut within a sequence, int64.
        parted_at: position in that sequence of the token behind this end, int64. Where that token is trained on, the
            cut loses its label.
    """

    lengths: NDArray[np.integer[Any]]
    sequences: NDArray[np.int64] | None = None
    begins: NDArray[np.int64] | None = None
    overlong: int = 0
    dropped_tokens: int = 0
    parted: NDArray[np.int64] = np.empty(0, np.int64)
    parted_at: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """``sequences``, as an array in any case."""
        return np.arange(len(self.lengths)) if self.sequences is None else self.sequences

    def only(self, which: NDArray[np.int64]) -> _Cuts:
        """The cuts of these indices, in this order."""
        return self._replace(
            lengths=self.lengths[which],
            sequences=which if self.sequences is None else self.sequences[which],
            begins=None if self.begins is None else self.begins[which],
        )


def _cut(lengths: NDArray[np.int64], long: NDArray[np.bool_], options: PackOptions) -> _Cuts:
    """The cuts of all sequences, where those that are too long are dropped, truncated or split as the options say."""
    longest, count = options.longest_sequence, int(long.sum())
    if not count:
        return _Cuts(lengths)
    if options.overlong == "drop":
        return _Cuts(lengths[~long], np.flatnonzero(~long), None, count, int(lengths[long].sum()))
    if options.overlong == "truncate":
        dropped, at = int((lengths[long] - longest).sum()), np.full(count, longest, np.int64)
        return _Cuts(np.minimum(lengths, longest), None, None, count, dropped, np.flatnonzero(long), at)
    counts = -(-lengths // longest)
    sequences = np.repeat(np.arange(len(lengths)), counts)
    begins = (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
    inner, cut_lengths = begins > 0, np.minimum(lengths[sequences] - begins, longest)
    return _Cuts(cut_lengths, sequences, begins, count, 0, sequences[inner], begins[inner])
