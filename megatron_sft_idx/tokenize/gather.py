"""Sequences where they lie, and the shards that are made of them in the order of the plan.

A run makes one shard at the prefix, or several that share it, each consecutive packs of one plan, and publishes them
together. Sequences are read from parts, or from a shard.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packs.run import fewer_tokens
from megatron_sft_idx.packs.split import output_prefix, refuse_other_splits
from megatron_sft_idx.shard import Shard, ShardWriter, check_free, pair_numbers, read_header
from megatron_sft_idx.shard.publication import (
    is_set_aside,
    lock_journal,
    outputs_held,
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
from megatron_sft_idx.tokenize.local import Local
from megatron_sft_idx.tokenize.parts import PartsReader, PartsTable
from megatron_sft_idx.tokenize.plan import Packing, PackOptions, PlannedRun, Selected, plan_packs, sequences_of
from megatron_sft_idx.tokenize.ray import Cluster
from megatron_sft_idx.tokenize.report import PackReport

_LOCK_SECONDS = 60.0


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

    def read(self, run: PlannedRun) -> tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]:
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
        self, sequences: NDArray[np.int64], begins: NDArray[np.int64], lengths: NDArray[np.integer[Any]]
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


# ---- the shards of a run ----


def output_prefixes(prefix: str, shards: int, *, valid: bool = False) -> list[str]:
    """Where the shards of a run go: the prefix itself, or ``PREFIX-00000-of-00008`` and so on.

    ``valid`` adds the one of the conversations that are kept apart, ``PREFIX.valid``.
    """
    trained = [prefix] if shards == 1 else [output_prefix(prefix, number, shards) for number in range(shards)]
    return [*trained, f"{prefix}.valid"] if valid else trained


def require_outputs_apart(prefixes: Sequence[str], reads: Iterable[Place], columns: Iterable[str] = ()) -> None:
    """FormatError where shards at these prefixes, with these columns, would replace what is read for them."""
    paths = [ShardPaths.of(prefix).with_columns(columns) for prefix in prefixes]
    require_apart([place for each in paths for place in places_of(each, "the output", written=True)], reads)


class PlannedShard(NamedTuple):
    """One shard of a run; picklable.

    Attributes:
        prefix: of the shard.
        settings: what its ``ShardWriter`` is told, by name.
        run: its packs: twelve bytes a sequence, which may be sent elsewhere.
    """

    prefix: str
    settings: dict[str, Any]
    run: PlannedRun

    @property
    def paths(self) -> ShardPaths:
        """Its files."""
        return ShardPaths.of(self.prefix)

    def found(self) -> Header | None:
        """The header of this very shard, where it is set aside, or published and not to be replaced."""
        if is_set_aside(self.paths):
            header = complete_header(self.paths)
        elif self.settings["overwrite"] or self.paths.missing():
            return None
        else:
            header = read_header(self.prefix)
        written: dict[str, Any] = {"format_writer": None, "columns": None}
        return header if header.metadata | written == self.settings["metadata"] | written else None


def outputs_of(
    prefix: str, packing: Packing, shards: int, metadata: Mapping[str, Any], **settings: Any
) -> list[PlannedShard]:
    """The shards that a plan is cut into, of as many packs each, give or take one.

    Args:
        prefix: what their prefixes begin with.
        packing: the plan.
        shards: how many.
        metadata: what their headers say beside it.
        settings: what else all writers are told.
    """
    made, packs = [], packing.plan.num_packs
    for number, path in enumerate(output_prefixes(prefix, shards)):
        first, last = packs * number // shards, packs * (number + 1) // shards
        part = {"part": number, "parts": shards, "first_pack": first, "num_packs": last - first}
        said = packing.said | ({"part": part} if shards > 1 else {})
        run = packing.run.window(first, last)
        made.append(PlannedShard(path, {**settings, "metadata": {**metadata, "packing": said}}, run))
    return made


def write_packs(
    reader: CorpusReader | PartsReader,
    run: PlannedRun,
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
    reader: CorpusReader | PartsReader, output: PlannedShard, progress: Update = lambda units, items: None
) -> Header:
    """Write one output shard, and set it aside until all of them are whole."""
    with ShardWriter(output.prefix, **output.settings) as writer:
        write_packs(reader, output.run, writer, progress)
        return writer.set_aside()


def gather_shard(table: PartsTable, output: PlannedShard) -> Header:
    """``write_shard`` from parts, on any machine; what an attempt that died left is dropped, what it made is found."""
    # An attempt on a node that was given up may live for some seconds longer; then this one takes its place.
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
    if (header := output.found()) is not None:
        return header
    drop_build(output.paths)
    return write_shard(PartsReader(table), output)


def drop_build(paths: ShardPaths) -> None:
    """Remove what an interrupted build left at a prefix; of other work nothing."""
    if (head := read_journal(paths)) is not None and head.work == "build":
        remove_remains(paths)


def publish_shards(
    prefix: str,
    outputs: Sequence[PlannedShard],
    write: Callable[[Sequence[PlannedShard]], Iterable[Header]],
    *,
    keep: bool,
) -> list[Header]:
    """Write all output shards of a run and publish them together: what they replace stays until all are whole.

    Args:
        prefix: what the prefixes of several begin with.
        outputs: all shards.
        write: makes these, in their order, and sets them aside (``write_shard``).
        keep: go on with an interrupted run: leave shards that are there and are the very ones that would be made, and
            drop what is half made.

    Raises:
        FormatError: a shard is there that is another one, and may not be replaced.
    """
    with outputs_held(prefix) if len(outputs) > 1 else contextlib.nullcontext():
        headers: dict[int, Header] = {}
        for number, output in enumerate(outputs):
            if keep and (found := output.found()) is not None:
                headers[number] = found
            else:
                written = output.paths.with_columns(output.settings["columns"])
                check_free(written, overwrite=output.settings["overwrite"])
        missing = [number for number in range(len(outputs)) if number not in headers]
        for number in missing if keep else ():
            drop_build(outputs[number].paths)
        try:
            headers |= zip(missing, write([outputs[number] for number in missing]), strict=True)
        except Exception:  # what is interrupted can be gone on with
            for number in missing:
                with contextlib.suppress(FormatError):  # a task elsewhere is at it still
                    if is_set_aside(outputs[number].paths):
                        remove_remains(outputs[number].paths)
            raise
        publish_all([output.paths for output in outputs if is_set_aside(output.paths)])
    return [headers[number] for number in range(len(outputs))]


def make_packs(
    reader: CorpusReader | PartsReader,
    lengths: NDArray[np.int64],
    prefix: str,
    options: PackOptions,
    *,
    metadata: Mapping[str, Any],
    identity: str,
    settings: Mapping[str, Any],
    source: str = "",
    shards: int = 1,
    groups: NDArray[np.integer[Any]] | None = None,
    selected: Selected | None = None,
    said: Mapping[str, Any] | None = None,
    keep: bool = False,
    engine: Local | Cluster | None = None,
    log_interval: int = 0,
) -> list[Header]:
    """Plan, gather, publish: by one plan what is trained on, and by one of its own what is kept apart to validate with.

    Arguments are as of ``pack_shard``, ``plan_packs`` and ``publish_shards``. Headers say ``metadata`` of the
    sequences, and of the packing what is ``said`` besides and the ``identity`` of its source: the id of a shard, or
    the fingerprint of the input, which does not depend on how that was shared out. ``settings`` are what all writers
    are told: ``token_dtype``, ``mask_dtype``, ``pad_id``, ``overwrite`` and ``columns``. An ``engine`` makes several
    shards at a time, of parts; without one they are made here. Errors call the sequences ``source``, or by the prefix.

    Raises:
        SequenceError, FormatError: as of ``plan_packs`` and ``publish_shards``.
    """
    shares = [(prefix, shards, None if selected is None else selected.train)]
    if selected is not None and len(selected.valid):
        shares.append((output_prefixes(prefix, 1, valid=True)[-1], 1, selected.valid))
    settings = {**settings, "capacity": options.capacity, "sequence_multiple": options.sequence_multiple}
    outputs: list[PlannedShard] = []
    counts = {} if selected is None else selected.counts
    for name, number, chosen in shares:
        packing = plan_packs(
            lengths,
            options,
            shards=number,
            source=source or prefix,
            groups=groups,
            chosen=chosen,
            selected=counts,
            reader=reader,
        )
        packing.said.update(said or {}, source=identity)
        outputs += outputs_of(name, packing, number, metadata, **settings)
    total = sum(len(output.run.lengths) for output in outputs)
    with Progress("packing", total, unit="seq", log_interval=log_interval, items="sequences") as progress:

        def write(missing: Sequence[PlannedShard]) -> Iterable[Header]:
            # One alone is written here, where its progress can be seen; a cluster's disks are for its nodes.
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

        return publish_shards(prefix, outputs, write, keep=keep)


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
    # Packed shards call the sequences by their input where they were tokenised from it, else by their id.
    identity = (None if "packing" in header.metadata else header.source) or header.shard_id.hex()
    left_out = {} if taken is None else {"sources": sorted(sources), "left_out": header.num_sequences - len(taken)}
    headers = make_packs(
        reader,
        reader.lengths,
        prefix,
        options,
        metadata=header.metadata,
        identity=identity,
        settings={
            "token_dtype": header.token_dtype,
            "mask_dtype": header.mask_dtype,
            "pad_id": header.pad_id,
            "overwrite": overwrite,
            "columns": {name: column.spec for name, column in reader.columns.items()},
        },
        source=source.prefix,
        shards=shards,
        groups=groups,
        said=left_out,
        keep=keep,
        log_interval=log_interval,
    )
    return replace(PackReport.of(headers), lost_columns=reader.lost)
