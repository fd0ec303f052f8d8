"""Shards are written in the order of a plan, from sequences that lie in parts or in another shard.

Plans know sequences by numbers alone: those of all parts are counted in the order of the input, those of a shard in its
order. Each is token ids, a mask, and values in columns.

A job makes one shard at its prefix, or several whose prefixes begin with it, each with consecutive packs of one plan.
They are published together: none appears before all are whole.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import listed_columns
from megatron_sft_idx.packs.run import fewer_tokens
from megatron_sft_idx.packs.split import output_prefix, refuse_other_splits
from megatron_sft_idx.shard import Shard, ShardWriter, check_free, pair_numbers, read_header
from megatron_sft_idx.shard.journal import lock_journal, locked_outputs, read_journal
from megatron_sft_idx.shard.publication import is_set_aside, places_of, publish_all, remove_remains
from megatron_sft_idx.shard.recovery import complete_header
from megatron_sft_idx.shard.writer import MaskAlignment
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.progress import Progress, Update
from megatron_sft_idx.storage.publish import Place, require_apart
from megatron_sft_idx.tokenize.local import Local
from megatron_sft_idx.tokenize.parts import Part
from megatron_sft_idx.tokenize.plan import Packing, PackOptions, PlannedRun, Selected, plan_packs, sequences_of
from megatron_sft_idx.tokenize.ray import Cluster
from megatron_sft_idx.tokenize.report import PackReport

# Parts that stay open while packs are gathered from them.
_MAX_OPEN_PARTS = 256
# About as many tokens are read of a part each time it is opened, so that opening it is worth it.
_TOKENS_PER_OPENED_PART = 8192
# A mask is summed in windows of about this many tokens, 8 bytes of memory each.
_SUMMED_TOKENS = 1 << 20
# How long a shard may be locked by an earlier attempt at it.
_LOCK_SECONDS = 60.0


# ---- sequences by their numbers ----


class _FileSequences(NamedTuple):
    """Those of the sequences asked for that lie in one file, ascending by number.

    Attributes:
        path: of the file.
        indices: which of the sequences asked for these are, int64 [n].
        starts, lengths: where each begins among the tokens of the file, and its tokens, [n].
        ids, mask: of all tokens of the file.
        columns: values of each sequence, by name, [n] or [n, width].
    """

    path: str
    indices: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.integer[Any]]
    ids: NDArray[Any]
    mask: NDArray[Any]
    columns: Mapping[str, NDArray[Any]]


class SequenceReader(ABC):
    """Reads sequences by their numbers.

    Attributes:
        mask_alignment, mask_dtype: of the masks that ``read`` gives.
        window_tokens: about how many tokens to read at a time.
    """

    mask_alignment: MaskAlignment
    mask_dtype: np.dtype[Any]
    window_tokens: int

    @abstractmethod
    def _by_file(self, sequences: NDArray[np.int64]) -> Iterator[_FileSequences]:
        """The sequences of these numbers, in any order and some more than once, file by file."""

    def read(self, run: PlannedRun) -> tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]:
        """Ids and masks of the tokens of these packs, end to end, and columns by name, a row for each cut or token."""
        cuts, lengths = len(run.sequences), run.lengths.astype(np.int64)
        begins = np.zeros(cuts, np.int64) if run.begins is None else run.begins
        ends = np.cumsum(lengths)
        places, columns = ends - lengths, dict[str, NDArray[Any]]()
        ids, mask = np.empty(0), np.empty(ends[-1], self.mask_dtype)
        for number, file in enumerate(self._by_file(run.sequences)):
            if not number:
                ids = np.empty(ends[-1], file.ids.dtype)
                columns = {name: np.empty((cuts, *of.shape[1:]), of.dtype) for name, of in file.columns.items()}
            begin, length, place = (each[file.indices] for each in (begins, lengths, places))
            if (begin + length > file.lengths).any():
                raise _changed(file.path)
            starts = file.starts + begin
            _native.gather_sequences(file.ids, starts, length, place, ids)
            _native.gather_sequences(file.mask.astype(self.mask_dtype, copy=False), starts, length, place, mask)
            for name, values in file.columns.items():
                columns[name][file.indices] = values
        return ids, mask, columns

    def count_trained(self, sequences: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """How many of the tokens at these positions of these sequences are trained on; no position may be 0."""
        return int(np.count_nonzero(self.are_trained(sequences, positions - 1, np.full(len(positions), 2))))

    def are_trained(
        self, sequences: NDArray[np.int64], begins: NDArray[np.int64], lengths: NDArray[np.integer[Any]]
    ) -> NDArray[np.bool_]:
        """Whether any token but the first, which nothing predicts, is trained on in each cut, bool [cuts].

        The cuts are given as in ``PlannedRun``.
        """
        are_trained = np.empty(len(sequences), bool)
        # A mask of labels holds what is said of a token one position earlier.
        shift = self.mask_alignment == "label"
        for file in self._by_file(sequences):
            second = file.starts + begins[file.indices] + 1 - shift
            ends = second - 1 + lengths[file.indices]
            windows = np.flatnonzero(np.diff(second // _SUMMED_TOKENS)) + 1
            for some in filter(len, np.split(np.arange(len(second)), windows)):
                low = second[some].min()
                sums = np.cumsum(np.append(0, file.mask[low : ends[some].max()] != 0))
                are_trained[file.indices[some]] = sums[ends[some] - low] > sums[second[some] - low]
        return are_trained


@dataclass(frozen=True, slots=True, eq=False)
class PartsTable:
    """Where the sequences of all parts are; picklable.

    Attributes:
        paths: of the parts.
        bounds: number of the first sequence of each part, and at the end the count of all, int64 [parts + 1].
        mask_dtype: of the masks to be written: float32 where any part has float32.
        bases: by name of a column to be written, what is added to the values of each part, [parts] or [parts, width].
        pairs: whether sequences 2k and 2k + 1 are a pair, which the column ``pair`` then says.
    """

    paths: Sequence[str]
    bounds: NDArray[np.int64]
    mask_dtype: str
    bases: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    pairs: bool = False


class PartsReader(SequenceReader):
    """The sequences of all parts.

    A plan takes sequences from anywhere, so any window of it touches most parts. So windows are large, and each part is
    opened at most once a window and read from its beginning to its end. Some parts stay open.
    """

    mask_alignment: MaskAlignment = "token"

    def __init__(self, table: PartsTable) -> None:
        # 3 to 10 bytes of memory a token, in each of two windows.
        self.window_tokens = min(max(_TOKENS_PER_OPENED_PART * len(table.paths), 1 << 22), 1 << 24)
        self.mask_dtype = np.dtype(table.mask_dtype)
        self.table = table
        self._open_parts: dict[int, Part] = {}

    def read(self, run: PlannedRun) -> tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]:
        """As ``SequenceReader.read``, and the column ``pair`` where sequences are pairs."""
        ids, mask, columns = super().read(run)
        if self.table.pairs:
            columns["pair"] = np.stack([run.sequences // 2, run.sequences % 2], 1)
        return ids, mask, columns

    def column(self, name: str, width: int) -> NDArray[np.uint32]:
        """One column of all sequences, as it is in the parts, uint32 [sequences, width]."""
        values = np.empty((int(self.table.bounds[-1]), width), np.uint32)
        for number, (first, last) in enumerate(pairwise(self.table.bounds.tolist())):
            values[first:last] = self._part(number).columns[name]
        return values

    def _by_file(self, sequences: NDArray[np.int64]) -> Iterator[_FileSequences]:
        order = np.argsort(sequences, kind="stable")
        ascending = sequences[order]
        bounds = np.searchsorted(ascending, self.table.bounds)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            first, last = bounds[number : number + 2].tolist()
            part, in_part = self._part(number), ascending[first:last] - self.table.bounds[number]
            columns = {name: part.columns[name][in_part] + base[number] for name, base in self.table.bases.items()}
            starts, lengths = part.starts[in_part], part.lengths[in_part]
            yield _FileSequences(part.path, order[first:last], starts, lengths, part.ids, part.mask, columns)

    def _part(self, number: int) -> Part:
        if (part := self._open_parts.get(number)) is not None:
            return part
        part = Part(self.table.paths[number])
        if len(part.lengths) != self.table.bounds[number + 1] - self.table.bounds[number]:
            raise _changed(part.path)
        if len(self._open_parts) < _MAX_OPEN_PARTS:
            self._open_parts[number] = part
        return part


def _changed(path: str) -> FormatError:
    return FormatError(f"{path}: changed since its lengths were read; pass --resume, which makes it anew")


class CorpusReader(SequenceReader):
    """The sequences of a shard, whatever its packs are.

    Args:
        source: the shard.
        chosen: numbers in the shard of the sequences that the reader calls 0, 1 and so on; None for all.
        allow_loss: leave out columns with a row a pack; without it they are an error.

    Attributes:
        lengths: tokens of each sequence, int64 [sequences].
        columns: the columns with a row for each sequence or token, by name.
        lost_columns: names of the columns that are left out.
    """

    mask_alignment: MaskAlignment = "label"
    window_tokens = 1 << 20

    def __init__(self, source: Shard, chosen: NDArray[np.int64] | None = None, *, allow_loss: bool = False) -> None:
        self._prefix, self._tokens, self._loss = source.prefix, source.files.tokens[:], source.files.loss[:]
        self.mask_dtype = self._loss.dtype
        self._bounds, lengths = source.sequence_bounds(), np.diff(source.sequence_bounds())
        self._chosen = np.arange(len(lengths)) if chosen is None else chosen
        self.lengths = lengths[self._chosen]
        columns = dict(source.columns)
        self.lost_columns = sorted(name for name, column in columns.items() if column.spec.per == "pack")
        if self.lost_columns and not allow_loss:
            raise FormatError(
                f"{source.prefix}: columns {', '.join(self.lost_columns)}: they have a row a pack, and these packs will"
                " be others; pass allow_loss (--allow-loss) to leave them out"
            )
        self.columns = {name: column for name, column in columns.items() if name not in self.lost_columns}
        specs = {name: column.spec for name, column in self.columns.items()}
        self.window_tokens = fewer_tokens(self.window_tokens, specs)

    def read(self, run: PlannedRun) -> tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]:
        """As ``SequenceReader.read``; columns in the order of their names in the shard."""
        ids, mask, of_sequences = super().read(run)
        lengths = run.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        # Behind a cut its last label is gone; at the end of a whole sequence it is 0 already (rule P6).
        mask[ends - 1] = 0
        columns = {}
        for name, column in self.columns.items():
            spec, values = column.spec, of_sequences.get(name)
            if values is None:
                values = np.empty(len(ids), column.items_in_memory.dtype)
                starts = self._bounds[self._chosen[run.sequences]] + (0 if run.begins is None else run.begins)
                # As bytes: rows may be of any width.
                first, nbytes, place = (each * spec.row_nbytes for each in (starts, lengths, ends - lengths))
                _native.gather_sequences(
                    column.items_in_memory.view(np.uint8), first, nbytes, place, values.view(np.uint8)
                )
            columns[name] = values.view(spec.dtype).reshape(spec.shape(len(values)))
        return ids, mask, columns

    def _by_file(self, sequences: NDArray[np.int64]) -> Iterator[_FileSequences]:
        order = np.argsort(sequences, kind="stable")
        ascending = sequences[order]
        numbers = self._chosen[ascending]
        of_sequences = {name: each for name, each in self.columns.items() if each.spec.per == "sequence"}
        columns = {name: column.items_in_memory[numbers] for name, column in of_sequences.items()}
        starts, lengths = self._bounds[numbers], self.lengths[ascending]
        yield _FileSequences(self._prefix, order, starts, lengths, self._tokens, self._loss, columns)


# ---- the shards of a job ----


def output_prefixes(prefix: str, shards: int, *, valid: bool = False) -> list[str]:
    """Prefixes of the shards of a job: the prefix itself, or ``PREFIX-00000-of-00008`` and so on.

    ``valid`` adds ``PREFIX.valid``, the shard to validate with.
    """
    trained = [prefix] if shards == 1 else [output_prefix(prefix, number, shards) for number in range(shards)]
    return [*trained, f"{prefix}.valid"] if valid else trained


def require_outputs_apart(prefixes: Sequence[str], reads: Iterable[Place], columns: Iterable[str] = ()) -> None:
    """FormatError where shards at these prefixes, with these columns, would replace a file that is read for them."""
    paths = [ShardPaths.of(prefix).with_columns(columns) for prefix in prefixes]
    require_apart([place for each in paths for place in places_of(each, "the output", written=True)], reads)


class PlannedShard(NamedTuple):
    """One shard that a job is to write; picklable, and small enough to be sent to another machine.

    Attributes:
        prefix: of the shard.
        settings: arguments of its ``ShardWriter``, by name.
        run: its packs, about twelve bytes a sequence.
    """

    prefix: str
    settings: dict[str, Any]
    run: PlannedRun

    @property
    def paths(self) -> ShardPaths:
        """Its files."""
        return ShardPaths.of(self.prefix)

    def existing_header(self) -> Header | None:
        """The header of this very shard, where it is set aside, or published and not to be replaced; else None."""
        if is_set_aside(self.paths):
            header = complete_header(self.paths)
        elif self.settings["overwrite"] or self.paths.missing():
            return None
        else:
            header = read_header(self.prefix)
        written: dict[str, Any] = {"format_writer": None, "columns": None}
        same = header.metadata | written == self.settings["metadata"] | written
        return header if same and listed_columns(header.metadata).keys() == self.settings["columns"].keys() else None


def planned_shards(
    prefix: str, packing: Packing, shards: int, metadata: Mapping[str, Any], **settings: Any
) -> list[PlannedShard]:
    """The shards that a plan is cut into; their numbers of packs differ by one at most.

    Args:
        prefix: what their prefixes begin with.
        packing: the plan.
        shards: how many.
        metadata: for their headers, beside that of the packing.
        settings: other arguments of all their writers.
    """
    planned, packs = [], packing.plan.num_packs
    for number, path in enumerate(output_prefixes(prefix, shards)):
        first, last = packs * number // shards, packs * (number + 1) // shards
        share = {"part": number, "parts": shards, "first_pack": first, "num_packs": last - first}
        described = {**metadata, "packing": packing.metadata | ({"part": share} if shards > 1 else {})}
        run = packing.run.window(first, last)
        planned.append(PlannedShard(path, {**settings, "metadata": described}, run))
    return planned


def write_packs(
    reader: SequenceReader, run: PlannedRun, writer: ShardWriter, progress: Update = lambda units, items: None
) -> None:
    """Write the packs, a window of them at a time; another thread reads the next window meanwhile."""
    # As many packs as surely hold no more tokens than the window may, and one at least.
    packs_per_window = max(1, reader.window_tokens // max(run.longest, 1))
    firsts = deque(range(0, len(run.offsets) - 1, packs_per_window))
    with ThreadPoolExecutor(1, "gather") as thread:
        reading: deque[Any] = deque()
        while firsts or reading:
            while firsts and len(reading) < 2:
                window = run.window(first := firsts.popleft(), first + packs_per_window)
                reading.append((window, thread.submit(reader.read, window)))
            window, future = reading.popleft()
            ids, mask, columns = future.result()
            lengths, counts = window.lengths.astype(np.int64), np.diff(window.offsets)
            ends = np.cumsum(lengths)
            pack_ends = ends[window.offsets[1:] - 1]
            pack_lengths = np.diff(pack_ends, prepend=0)
            starts = ends - lengths - np.repeat(pack_ends - pack_lengths, counts)
            alignment = reader.mask_alignment
            writer.add_packs(ids, mask, starts, pack_lengths, counts, mask_alignment=alignment, columns=columns)
            progress(len(lengths), len(lengths))


def write_shard(reader: SequenceReader, output: PlannedShard, progress: Update = lambda units, items: None) -> Header:
    """Write one shard, and set it aside until all shards of the job are whole."""
    with ShardWriter(output.prefix, **output.settings) as writer:
        write_packs(reader, output.run, writer, progress)
        return writer.set_aside()


def gather_shard(table: PartsTable, output: PlannedShard) -> Header:
    """The task that writes one shard from parts, on any machine.

    A shard that an earlier attempt finished is not written again; one that it left unfinished is removed.
    """
    # An attempt on a node that was given up may go on for some seconds.
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            os.close(lock_journal(output.paths, create=False))
            break
        except FileNotFoundError:
            break
        except FormatError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    if (header := output.existing_header()) is not None:
        return header
    drop_build(output.paths)
    return write_shard(PartsReader(table), output)


def drop_build(paths: ShardPaths) -> None:
    """Remove what an interrupted writer of a new shard left at a prefix; remains of other work stay."""
    if (head := read_journal(paths)) is not None and head.work == "build":
        remove_remains(paths)


def publish_shards(
    prefix: str,
    outputs: Sequence[PlannedShard],
    write: Callable[[Sequence[PlannedShard]], Iterable[Header]],
    *,
    resume: bool,
) -> list[Header]:
    """Write all shards of a job and publish them together; shards that they replace stay until all are whole.

    Args:
        prefix: what the prefixes of several shards begin with.
        outputs: all shards.
        write: writes the shards it is given, in their order, and sets each aside (``write_shard``).
        resume: go on with an interrupted job: shards that it finished are not written again, unfinished ones removed.

    Raises:
        FormatError: another shard is at a prefix, and may not be replaced.
    """
    with locked_outputs(prefix) if len(outputs) > 1 else contextlib.nullcontext():
        headers = [output.existing_header() if resume else None for output in outputs]
        missing = [output for output, header in zip(outputs, headers, strict=True) if header is None]
        for output in missing:
            settings = output.settings
            check_free(output.paths.with_columns(settings["columns"]), overwrite=settings["overwrite"])
        for output in missing if resume else ():
            drop_build(output.paths)
        try:
            written = iter([*write(missing)])
        except Exception:  # a KeyboardInterrupt leaves what is set aside, for --resume
            for output in missing:
                with contextlib.suppress(FormatError):  # a task on another machine still writes it
                    if is_set_aside(output.paths):
                        remove_remains(output.paths)
            raise
        publish_all([output.paths for output in outputs if is_set_aside(output.paths)])
    return [next(written) if header is None else header for header in headers]


def make_packs(
    reader: SequenceReader,
    lengths: NDArray[np.int64],
    prefix: str,
    options: PackOptions,
    *,
    metadata: Mapping[str, Any],
    packing_metadata: Mapping[str, Any],
    settings: Mapping[str, Any],
    name: str = "",
    shards: int = 1,
    groups: NDArray[np.integer[Any]] | None = None,
    selected: Selected | None = None,
    resume: bool = False,
    engine: Local | Cluster | None = None,
    log_interval: int = 0,
) -> list[Header]:
    """Plan packs, write them into shards and publish these: the shards to train on, and the one to validate with.

    Headers say ``metadata`` of the sequences and ``packing_metadata`` of the packing: its ``source`` is the id of the
    shard they come from or the fingerprint of the input. ``settings`` are arguments of all writers: ``token_dtype``,
    ``mask_dtype``, ``pad_id``, ``overwrite`` and ``columns``. An ``engine`` writes several shards at a
    time, and needs a ``PartsReader``; without one they are written in this process, one by one. Errors call the
    sequences ``name``, or by the prefix. Arguments else: as of ``pack_shard``, ``plan_packs``, ``publish_shards``.

    Raises:
        SequenceError, FormatError: as of ``plan_packs`` and ``publish_shards``.
    """
    shares = [(prefix, shards, None if selected is None else selected.train)]
    if selected is not None and len(selected.valid):
        shares.append((output_prefixes(prefix, 1, valid=True)[-1], 1, selected.valid))
    settings = {**settings, "capacity": options.capacity, "sequence_multiple": options.sequence_multiple}
    outputs: list[PlannedShard] = []
    counts = {} if selected is None else selected.counts
    for share_prefix, share_shards, chosen in shares:
        packing = plan_packs(
            lengths,
            options,
            shards=share_shards,
            name=name or prefix,
            groups=groups,
            chosen=chosen,
            selected=counts,
            reader=reader,
        )
        packing.metadata.update(packing_metadata)
        outputs += planned_shards(share_prefix, packing, share_shards, metadata, **settings)
    total = sum(len(output.run.lengths) for output in outputs)
    with Progress("packing", total, unit="seq", log_interval=log_interval, items="sequences") as progress:

        def write(missing: Sequence[PlannedShard]) -> Iterable[Header]:
            # A single shard is written in this process, which can show its progress; on a cluster its nodes write.
            if engine is None or (isinstance(engine, Local) and (len(missing) == 1 or not engine.workers)):
                return (write_shard(reader, output, progress.update) for output in missing)
            assert isinstance(reader, PartsReader)
            return engine.map_in_order(
                gather_shard,
                reader.table,
                missing,
                name_of=lambda output: output.prefix,
                on_result=lambda header: progress.update(header.num_sequences, header.num_sequences),
            )

        return publish_shards(prefix, outputs, write, resume=resume)


def pack_shard(
    source: Shard,
    prefix: str,
    options: PackOptions,
    *,
    shards: int = 1,
    overwrite: bool = False,
    resume: bool = False,
    log_interval: int = 0,
    sources: Sequence[str] = (),
    allow_loss: bool = False,
) -> PackReport:
    """Pack the sequences of a shard into a new shard at ``prefix``, or into several.

    Memory: some 40 bytes a sequence for the plan, and a few MiB for the tokens.

    Args:
        source: a tokenised corpus, or packs.
        prefix: of the new shard, or what the prefixes of several begin with.
        options: how the sequences are packed.
        shards: how many shards; their packs differ by one at most.
        overwrite: replace shards at the prefixes.
        resume: go on with an interrupted job; shards that it finished are not written again.
        log_interval: sequences between two lines of progress where there is no terminal; 0 for silence.
        sources: names of input files; sequences made from other files are left out. Empty for all sequences.
        allow_loss: leave out columns with a row a pack; without it they are an error.

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: an option that cannot be, a source that the shard does not name, no sequence to pack, a column
            with a row a pack, or ``prefix`` is that of the source.
    """
    for path in (source.prefix, prefix):
        require_local(path, "packing")
    chosen, header = sequences_of(source, sources) if sources else None, source.header
    reader, groups = CorpusReader(source, chosen, allow_loss=allow_loss), pair_numbers(source)
    if chosen is not None and groups is not None:
        groups = groups[chosen]
    reads = places_of(ShardPaths.of(source.prefix).with_columns(reader.columns), "the shard to be packed")
    require_outputs_apart(output_prefixes(prefix, shards), reads, reader.columns)
    if shards > 1:
        refuse_other_splits(prefix, shards)
    # A tokenised corpus is identified by the fingerprint of its input, a packed shard by its id.
    identity = (None if "packing" in header.metadata else header.source) or header.shard_id.hex()
    left_out = {} if chosen is None else {"sources": sorted(sources), "left_out": header.num_sequences - len(chosen)}
    headers = make_packs(
        reader,
        reader.lengths,
        prefix,
        options,
        metadata=header.metadata,
        packing_metadata={**left_out, "source": identity},
        settings={
            "token_dtype": header.token_dtype,
            "mask_dtype": header.mask_dtype,
            "pad_id": header.pad_id,
            "overwrite": overwrite,
            "columns": {name: column.spec for name, column in reader.columns.items()},
        },
        name=source.prefix,
        shards=shards,
        groups=groups,
        resume=resume,
        log_interval=log_interval,
    )
    return replace(PackReport.of(headers), lost_columns=reader.lost_columns)
