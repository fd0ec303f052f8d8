"""From lengths to shards: what becomes of overlong sequences, the plan of all packs, and the shards it is cut into.

A run makes one shard at the prefix, or several that share it, each consecutive packs of one plan. Sequences are read
where they lie, in parts or in a shard, and written in the order of their packs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.packing import PackPlan, pack_sequences
from megatron_sft_idx.packs.run import fewer_tokens
from megatron_sft_idx.packs.split import part_prefix, refuse_other_splits
from megatron_sft_idx.shard import Shard, ShardWriter, check_free, pair_numbers, read_header
from megatron_sft_idx.shard.publication import (
    is_set_aside,
    lock_journal,
    parts_held,
    places_of,
    publish_all,
    read_journal,
    remove_remains,
)
from megatron_sft_idx.shard.recovery import complete_header
from megatron_sft_idx.shard.writer import MaskAlignment
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.progress import Progress, Update
from megatron_sft_idx.storage.publish import Place, require_apart
from megatron_sft_idx.tokenize.parts import PartsReader, PartsTable
from megatron_sft_idx.tokenize.selection import Cuts, Selection, cut_overlong, group_sizes, sequences_of, which_train

__all__ = [
    "CorpusReader",
    "Output",
    "PackOptions",
    "PackReport",
    "PackedRun",
    "Packing",
    "drop_build",
    "gather_shard",
    "output_prefixes",
    "pack_shard",
    "plan_packs",
    "publish_shards",
    "require_outputs_apart",
    "write_packs",
    "write_shard",
]

_LOCK_SECONDS = 60.0


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


@dataclass(slots=True)
class PackReport:
    """What packing did.

    Attributes:
        sequences: sequences in the packs.
        packs: packs written.
        tokens: tokens in them.
        trained_tokens: positions trained on.
        masked_packs: packs with no trained position.
        fill: tokens over packs times capacity.
        lower_bound: no packing has fewer packs.
        longest: tokens in the longest pack.
        most_sequences: sequences in the pack that has most.
        method: the method whose plan was taken.
        overlong: sequences longer than the capacity.
        dropped_tokens: tokens of dropped sequences, or behind the cut of truncated ones.
        untrained_by_cut: positions that were trained on and whose label now lies behind a cut.
        left_out: sequences of input files that were not to be taken.
        selected: rows by what became of them, where some were selected; and what was left out as it trains nothing.
        lost_columns: columns of the source that were left out, as was allowed.
    """

    sequences: int
    packs: int
    tokens: int
    trained_tokens: int
    masked_packs: int
    fill: float
    lower_bound: int
    longest: int
    most_sequences: int
    method: str
    overlong: int
    dropped_tokens: int
    untrained_by_cut: int
    left_out: int = 0
    selected: dict[str, int] = field(default_factory=dict)
    lost_columns: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, headers: Sequence[Header]) -> PackReport:
        """What the headers of a run's shards say of how they were packed."""
        capacity, packing = headers[0].capacity, headers[0].metadata["packing"]
        packs, tokens = (sum(getattr(header, name) for header in headers) for name in ("num_packs", "num_tokens"))
        return cls(
            sequences=sum(header.num_sequences for header in headers),
            packs=packs,
            tokens=tokens,
            trained_tokens=sum(header.num_trained_tokens for header in headers),
            masked_packs=sum(header.num_masked_packs for header in headers),
            fill=tokens / (packs * capacity),
            lower_bound=packing["lower_bound"],
            longest=max(header.longest_pack for header in headers),
            most_sequences=max(header.most_sequences for header in headers),
            method=packing["chosen"],
            overlong=packing["overlong_sequences"],
            dropped_tokens=packing["dropped_tokens"],
            untrained_by_cut=packing["untrained_by_cut"],
            left_out=packing.get("left_out", 0),
            selected=packing.get("selected", {}),
        )


# ---- plan ----


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


def output_prefixes(prefix: str, shards: int, *, valid: bool = False) -> list[str]:
    """Where the shards of a run go: the prefix itself, or ``PREFIX-00000-of-00008`` and so on.

    ``valid`` adds the one of the conversations that are kept apart, ``PREFIX.valid``.
    """
    trained = [prefix] if shards == 1 else [part_prefix(prefix, number, shards) for number in range(shards)]
    return [*trained, f"{prefix}.valid"] if valid else trained


def require_outputs_apart(prefixes: Sequence[str], reads: Iterable[Place], columns: Iterable[str] = ()) -> None:
    """FormatError where shards at these prefixes, with these columns, would replace what is read for them."""
    paths = [ShardPaths.of(prefix).with_columns(columns) for prefix in prefixes]
    require_apart([place for each in paths for place in places_of(each, "the output", written=True)], reads)


@dataclass(frozen=True, slots=True)
class Output:
    """One shard of a run: what a writer of it is told; picklable.

    Attributes:
        prefix: of the shard.
        token_dtype: name of its ids' dtype.
        mask_dtype: name of its masks' dtype.
        pad_id: the tokenizer's.
        options: how its packs came about.
        metadata: of its header.
        overwrite: whether it may replace another one.
        columns: that are beside its tokens, by name.
    """

    prefix: str
    token_dtype: str
    mask_dtype: str
    pad_id: int | None
    options: PackOptions
    metadata: dict[str, Any]
    overwrite: bool
    columns: Mapping[str, ColumnSpec]

    def found(self) -> Header | None:
        """The header of this very shard, where it is set aside, or published and not to be replaced."""
        paths = ShardPaths.of(self.prefix)
        if is_set_aside(paths):
            header = complete_header(paths)
        elif self.overwrite or paths.missing():
            return None
        else:
            header = read_header(self.prefix)
        written: dict[str, Any] = {"format_writer": None, "columns": None}
        same = header.metadata | written == self.metadata | written
        return header if same else None

    def writer(self) -> ShardWriter:
        """Begin to write it."""
        return ShardWriter(
            self.prefix,
            token_dtype=np.dtype(self.token_dtype),
            mask_dtype=np.dtype(self.mask_dtype),
            capacity=self.options.capacity,
            sequence_multiple=self.options.sequence_multiple,
            pad_id=self.pad_id,
            overwrite=self.overwrite,
            metadata=self.metadata,
            columns=self.columns,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """A plan for all sequences, and what its shards' headers say of it.

    Attributes:
        options: what was asked for.
        selected: rows by what became of them, where some were selected.
        cuts: what is packed.
        plan: into which packs.
        shards: into how many shards, of as many packs each, give or take one.
    """

    options: PackOptions
    selected: Mapping[str, int]
    cuts: Cuts
    plan: PackPlan
    shards: int

    def _packs(self, number: int) -> tuple[int, int]:
        return self.plan.num_packs * number // self.shards, self.plan.num_packs * (number + 1) // self.shards

    def run(self, number: int) -> PackedRun:
        """The packs of one shard: twelve bytes a sequence, which may be sent to another machine."""
        first, last = self._packs(number)
        bounds = self.plan.offsets[first : last + 1]
        order = self.plan.sequences[bounds[0] : bounds[-1]]
        cuts = self.cuts
        return PackedRun(
            bounds - bounds[0],
            order if cuts.sequences is None else cuts.sequences[order],
            None if cuts.begins is None else cuts.begins[order],
            cuts.lengths[order].astype(np.uint32),
            self.plan.longest,
        )

    def outputs(
        self, prefix: str, metadata: Mapping[str, Any], source: str, untrained_by_cut: int, **common: Any
    ) -> list[Output]:
        """All shards.

        Args:
            prefix: what their prefixes begin with.
            metadata: what their headers say beside the packing.
            source: identity of the sequences: the id of the shard they were packed from, or the fingerprint of the
                input they were tokenised from, which does not depend on how that was shared out.
            untrained_by_cut: trained tokens right behind a cut.
            common: the other fields of ``Output``.
        """
        made = []
        selected = {} if self.options.selection is None else {"selected": dict(self.selected)}
        for number, path in enumerate(output_prefixes(prefix, self.shards)):
            packing: dict[str, Any] = (
                self.options.describe()
                | selected
                | {
                    "source": source,
                    "overlong_sequences": self.cuts.overlong,
                    "dropped_tokens": self.cuts.dropped_tokens,
                    "untrained_by_cut": untrained_by_cut,
                    "lower_bound": self.plan.lower_bound,
                    "chosen": self.plan.method,
                }
            )
            if self.shards > 1:
                first, last = self._packs(number)
                part = {"part": number, "parts": self.shards, "first_pack": first, "num_packs": last - first}
                packing["part"] = part
            made.append(Output(path, options=self.options, metadata={**metadata, "packing": packing}, **common))
        return made


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
        groups: of pairs, which stay together, as for ``pack_sequences``, and are dropped together.
        chosen: numbers of the sequences to pack, int64, some of them more than once; None for all.
        selected: counts of rows, for the header.
        reader: of the sequences, where what trains nothing is left out.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: groups that would be truncated or split, no sequence fits or is left to pack, or there are fewer
            packs than shards.
    """
    if chosen is not None:
        lengths, groups = lengths[chosen], None if groups is None else groups[chosen]
    cuts = _cuts_of(lengths, groups, options, source)
    if groups is not None and cuts.sequences is not None:
        groups = groups[cuts.sequences]
    if chosen is not None:
        numbers = chosen if cuts.sequences is None else chosen[cuts.sequences]
        cuts = replace(cuts, sequences=numbers, parted=chosen[cuts.parted])
    counts, why = dict(selected or {}), f"{cuts.overlong} were longer than the capacity"
    if options.selection is not None and options.selection.drop_untrained and reader is not None:
        trains = which_train(cuts, groups, reader.are_trained)
        counts["untrained_sequences"] = int((~trains).sum())
        counts["untrained_tokens"] = int(cuts.lengths[~trains].sum())
        cuts, groups = cuts.only(trains), None if groups is None else groups[trains]
        why += f", {counts['untrained_sequences']} have no token to train on"
    if not len(cuts.lengths):
        raise FormatError(f"{source}: no sequence is left to pack ({why})")
    one_a_pack = options.method == "none"
    plan = pack_sequences(
        cuts.lengths,
        options.capacity,
        method="sequential" if one_a_pack else options.method,
        effort=options.effort,
        max_sequences_per_pack=(1 if groups is None else 2) if one_a_pack else options.max_sequences_per_pack,
        sequence_multiple=options.sequence_multiple,
        seed=options.seed,
        groups=groups,
    )
    if plan.num_packs < shards:
        raise FormatError(
            f"{source}: {plan.num_packs} packs cannot fill --output-shards {shards}: stock Megatron opens no empty"
            f" shard; ask for {plan.num_packs} or fewer"
        )
    return Packing(options, counts, cuts, plan, shards)


def _cuts_of(
    lengths: NDArray[np.int64], groups: NDArray[np.integer[Any]] | None, options: PackOptions, source: str
) -> Cuts:
    """What is left of sequences once those longer than a pack are dealt with; errors as of ``plan_packs``."""
    longest = options.longest_sequence
    if not longest:
        raise FormatError(
            f"--seq-length {options.capacity} is below --sequence-multiple {options.sequence_multiple}: no sequence"
            " fits; raise it"
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
        rooms, what, together, remedies = group_sizes(lengths, groups, options.sequence_multiple), "pairs", 2, "drop"
    long = rooms > longest
    count = int(long.sum())
    if count and options.overlong == "error":
        raise SequenceError(
            source,
            None,
            f"{count // together} of {len(lengths) // together} {what} are longer than {longest} tokens, the longest"
            f" has {rooms.max()}; choose --overlong {remedies}, or a larger --seq-length",
        )
    return cut_overlong(lengths, long, longest, options.overlong)


# ---- sequences, where they lie ----


class CorpusReader:
    """The sequences of a shard, whatever its packs are.

    Args:
        source: the shard.
        taken: numbers of the sequences that are read, which are called 0, 1 and so on then; None for all.
        allow_loss: leave out columns of packs, which are an error else.

    Attributes:
        lengths: tokens of each sequence, int64 [sequences].
        columns: what is known of each, and of its tokens, besides, by name.
        lost: columns that are left out, by name: those of packs.
    """

    mask_alignment: MaskAlignment = "label"
    window_tokens = 1 << 20  # are read at a time

    def __init__(self, source: Shard, taken: NDArray[np.int64] | None = None, *, allow_loss: bool = False) -> None:
        self._tokens, self._loss = source.files.tokens[:], source.files.loss[:]
        self._bounds, lengths = source.sequence_bounds(), np.diff(source.sequence_bounds())
        self._taken = np.arange(len(lengths)) if taken is None else taken
        self.lengths = lengths[self._taken]
        columns = dict(source.columns)
        self.lost = sorted(name for name, column in columns.items() if column.spec.per == "pack")
        if self.lost and not allow_loss:
            raise FormatError(
                f"{source.prefix}: columns {', '.join(self.lost)}: they have a row a pack, and these packs will be"
                " others; pass allow_loss (--allow-loss) to leave them out"
            )
        self.columns = {name: column for name, column in columns.items() if name not in self.lost}
        specs = {name: column.spec for name, column in self.columns.items()}
        self.window_tokens = fewer_tokens(self.window_tokens, specs)

    def read(self, run: PackedRun) -> tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]:
        """Ids and label-aligned masks of these packs, end to end, and columns by name, a row a sequence or token."""
        sequences = self._taken[run.sequences]
        starts = self._bounds[sequences]
        if run.begins is not None:
            starts = starts + run.begins
        lengths = run.lengths.astype(np.int64)
        in_order = np.arange(len(starts))
        ids, mask = (np.empty(int(lengths.sum()), array.dtype) for array in (self._tokens, self._loss))
        for array, out in ((self._tokens, ids), (self._loss, mask)):
            _native.gather_sequences(array, starts, starts + lengths, in_order, out)
        # Where a sequence was cut its last label is gone; elsewhere this is zero already (rule P6).
        mask[np.cumsum(lengths) - 1] = 0
        columns = {}
        for name, column in self.columns.items():
            items, spec = column.held_items, column.spec
            if spec.per == "sequence":
                found = items[sequences]
            else:
                found = np.empty(len(ids), items.dtype)
                # As bytes: rows may be of any width.
                begins, nbytes = starts * spec.row_nbytes, lengths * spec.row_nbytes
                _native.gather_sequences(items.view(np.uint8), begins, begins + nbytes, in_order, found.view(np.uint8))
            columns[name] = found.view(spec.dtype).reshape(spec.shape(len(found)))
        return ids, mask, columns

    def count_trained(self, sequences: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """How many of the tokens at these positions of these sequences are trained on; none is a first one."""
        labels = (self._bounds[self._taken[sequences]] + positions - 1).tolist()
        return sum(int(self._loss[label : label + 1][0] != 0) for label in labels)

    def are_trained(
        self, sequences: NDArray[np.int64], begins: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether any label is trained on in each of these cuts, which ascend, bool [cuts]."""
        starts = self._bounds[self._taken[sequences]] + begins
        found = np.empty(len(starts), bool)
        # As many at a time as hold about a window of tokens; the label behind a cut is not of it.
        for some in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(starts // self.window_tokens)) + 1):
            low, ends = starts[some[0]], starts[some] + lengths[some]
            before = np.cumsum(np.append(0, self._loss[low : ends.max()] != 0))
            found[some] = before[ends - 1 - low] > before[starts[some] - low]
        return found


# ---- packs, written ----


def write_packs(
    reader: CorpusReader | PartsReader,
    run: PackedRun,
    writer: ShardWriter,
    progress: Update = lambda units, items: None,
) -> None:
    """Write the packs, some at a time; another thread reads the next ones meanwhile."""
    # As many packs as surely hold no more than the window, and one at least.
    at_once = max(1, reader.window_tokens // max(run.longest, 1))
    firsts = deque(range(0, len(run.offsets) - 1, at_once))
    with ThreadPoolExecutor(1, "gather") as thread:
        reading: deque[Any] = deque()
        while firsts or reading:
            while firsts and len(reading) < 2:
                window = run.window(first := firsts.popleft(), first + at_once)
                reading.append((window, thread.submit(reader.read, window)))
            window, future = reading.popleft()
            ids, mask, columns = future.result()
            each, counts = window.lengths.astype(np.int64), np.diff(window.offsets)
            ends = np.cumsum(each)
            pack_ends = ends[window.offsets[1:] - 1]
            pack_lengths = np.diff(pack_ends, prepend=0)
            starts = ends - each - np.repeat(pack_ends - pack_lengths, counts)
            alignment = reader.mask_alignment
            writer.add_packs(ids, mask, starts, pack_lengths, counts, mask_alignment=alignment, columns=columns)
            progress(len(each), len(each))


def write_shard(
    reader: CorpusReader | PartsReader,
    output: Output,
    run: PackedRun,
    progress: Update = lambda units, items: None,
) -> Header:
    """Write one output shard, and set it aside until all of them are whole."""
    with output.writer() as writer:
        write_packs(reader, run, writer, progress)
        return writer.set_aside()


def gather_shard(table: PartsTable, task: tuple[Output, PackedRun]) -> Header:
    """``write_shard`` from parts, on any machine; what an attempt that died left is dropped, what it made is found."""
    output, run = task
    paths = ShardPaths.of(output.prefix)
    _wait_for_lock(paths)
    if (header := output.found()) is not None:
        return header
    drop_build(paths)
    return write_shard(PartsReader(table), output, run)


def drop_build(paths: ShardPaths) -> None:
    """Remove what an interrupted build left at a prefix; of other work nothing."""
    if (head := read_journal(paths)) is not None and head.work == "build":
        remove_remains(paths)


def _wait_for_lock(paths: ShardPaths) -> None:
    """An attempt on a node that was given up may live for some seconds longer; then this one takes its place."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            os.close(lock_journal(paths, create=False))
        except FileNotFoundError:
            return
        except FormatError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def publish_shards(
    prefix: str, outputs: Sequence[Output], write: Callable[[Sequence[int]], Iterable[Header]], *, keep: bool
) -> list[Header]:
    """Write all output shards of a run and publish them together: what they replace stays until all are whole.

    Args:
        prefix: what the prefixes of several begin with.
        outputs: all shards.
        write: makes those of these numbers, in their order, and sets them aside (``write_shard``).
        keep: go on with an interrupted run: leave shards that are there and are the very ones that would be made, and
            drop what is half made.

    Raises:
        FormatError: a shard is there that is another one, and may not be replaced.
    """
    with parts_held(prefix) if len(outputs) > 1 else contextlib.nullcontext():
        headers: dict[int, Header] = {}
        for number, output in enumerate(outputs):
            if keep and (found := output.found()) is not None:
                headers[number] = found
            else:
                check_free(ShardPaths.of(output.prefix).with_columns(output.columns), overwrite=output.overwrite)
        missing = [number for number in range(len(outputs)) if number not in headers]
        for number in missing if keep else ():
            drop_build(ShardPaths.of(outputs[number].prefix))
        try:
            headers |= zip(missing, write(missing), strict=True)
        except Exception:  # what is interrupted can be gone on with
            for number in missing:
                paths = ShardPaths.of(outputs[number].prefix)
                with contextlib.suppress(FormatError):  # a task elsewhere is at it still
                    if is_set_aside(paths):
                        remove_remains(paths)
            raise
        publish_all([paths for output in outputs if is_set_aside(paths := ShardPaths.of(output.prefix))])
    return [headers[number] for number in range(len(outputs))]


def pack_shard(
    source: Shard,
    prefix: str,
    options: PackOptions,
    *,
    shards: int = 1,
    overwrite: bool = False,
    keep: bool = False,
    log_interval: int = 0,
    sources: Sequence[str] = (),
    allow_loss: bool = False,
) -> PackReport:
    """Pack the sequences of ``source`` into a new shard at ``prefix``, or several.

    Memory: some 40 bytes a sequence for the plan, and a few MiB for the tokens.

    Args:
        source: a tokenised corpus, or packs.
        prefix: of the packed shard, or what the prefixes of several begin with.
        options: how its sequences are packed.
        shards: how many shards; their packs differ by one at most.
        overwrite: replace what is at the prefixes.
        keep: leave shards that are there and are the very ones that would be made.
        log_interval: sequences between two lines of progress where there is no terminal; 0 for silence.
        sources: names of input files; sequences of others are left out. None for all.
        allow_loss: leave out columns of packs; those of sequences and tokens go with their sequences.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: an option that cannot be, a file that the shard does not name, nothing left to pack, a column of
            packs without leave to lose it, or ``prefix`` is that of the source.
    """
    for path in (source.prefix, prefix):
        require_local(path, "packing")
    taken, header = sequences_of(source, sources) if sources else None, source.header
    reader, groups = CorpusReader(source, taken, allow_loss=allow_loss), pair_numbers(source)
    if taken is not None and groups is not None:
        groups = groups[taken]
    reads = places_of(ShardPaths.of(source.prefix).with_columns(reader.columns), "the shard to be packed")
    require_outputs_apart(output_prefixes(prefix, shards), reads, reader.columns)
    if shards > 1:
        refuse_other_splits(prefix, shards)
    packing = plan_packs(reader.lengths, options, shards=shards, source=source.prefix, groups=groups, reader=reader)
    # Packed shards call the sequences by their input where they were tokenised from it, else by their id.
    identity = (None if "packing" in header.metadata else header.source) or header.shard_id.hex()
    outputs = packing.outputs(
        prefix,
        header.metadata,
        identity,
        reader.count_trained(packing.cuts.parted, packing.cuts.parted_at),
        token_dtype=header.token_dtype.name,
        mask_dtype=header.mask_dtype.name,
        pad_id=header.pad_id,
        overwrite=overwrite,
        columns={name: column.spec for name, column in reader.columns.items()},
    )
    if taken is not None:
        for output in outputs:
            output.metadata["packing"] |= {"sources": sorted(sources), "left_out": header.num_sequences - len(taken)}
    total = len(packing.cuts.lengths)
    with Progress("packing", total, unit="seq", log_interval=log_interval, items="sequences") as progress:
        headers = publish_shards(
            prefix,
            outputs,
            lambda numbers: (write_shard(reader, outputs[n], packing.run(n), progress.update) for n in numbers),
            keep=keep,
        )
    return replace(PackReport.of(headers), lost_columns=reader.lost)
