"""From a plan to shards: sequences are read where they lie, and written in the order of their packs."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packs.split import refuse_other_splits
from megatron_sft_idx.shard import Shard, ShardWriter, check_free
from megatron_sft_idx.shard.fingerprints import source_of
from megatron_sft_idx.shard.prefix import (
    drop_remains,
    is_set_aside,
    lock_journal,
    parts_held,
    places_of,
    publish_all,
    read_journal,
)
from megatron_sft_idx.shard.writer import MaskAlignment
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.storage.publish import require_apart
from megatron_sft_idx.tokenize.outcome import PackReport
from megatron_sft_idx.tokenize.parts import Part
from megatron_sft_idx.tokenize.plan import Output, PackedRun, PackOptions, Selection, output_prefixes, plan_packs

__all__ = [
    "CorpusReader",
    "GatherTask",
    "Parted",
    "PartsReader",
    "PartsTable",
    "SequenceReader",
    "count_trained",
    "drop_build",
    "gather_shard",
    "pack_shard",
    "parted_by_part",
    "publish_shards",
    "write_packs",
    "write_shard",
]

_LOCK_SECONDS = 60.0
# Parts that stay mapped while packs are gathered from them.
_MAX_OPEN = 256
# About as many tokens are read of a part when it is opened.
_TOKENS_A_PART = 8192
_Advance = Callable[[int, int], None]


class SequenceReader(Protocol):
    """Tokenised sequences, wherever they lie.

    Attributes:
        mask_alignment: of the masks it gives.
        window_tokens: about how many it is best asked for at once.
    """

    mask_alignment: MaskAlignment
    window_tokens: int

    def read(self, selection: Selection) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and masks of the selection, end to end."""
        ...


class CorpusReader:
    """The sequences of a shard, whatever its packs are."""

    mask_alignment: MaskAlignment = "label"
    window_tokens = 1 << 20

    def __init__(self, source: Shard) -> None:
        self._tokens, self._loss = source.files.tokens[:], source.files.loss[:]
        self._bounds = source.sequence_bounds()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.diff(self._bounds)

    def read(self, selection: Selection) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and masks of the selection, end to end."""
        starts = self._bounds[selection.sequences]
        if selection.begins is not None:
            starts = starts + selection.begins
        lengths = selection.lengths.astype(np.int64)
        in_order = np.arange(len(starts))
        ids, mask = (np.empty(int(lengths.sum()), array.dtype) for array in (self._tokens, self._loss))
        for array, out in ((self._tokens, ids), (self._loss, mask)):
            _native.gather_sequences(array, starts, starts + lengths, in_order, out)
        # Where a sequence was cut its last label is gone; elsewhere this is zero already (rule P6).
        mask[np.cumsum(lengths) - 1] = 0
        return ids, mask

    def count_trained(self, sequences: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """How many of the tokens at these positions of these sequences are trained on; none is a first one."""
        labels = (self._bounds[sequences] + positions - 1).tolist()
        return sum(int(self._loss[label : label + 1][0] != 0) for label in labels)


@dataclass(frozen=True, slots=True, eq=False)
class PartsTable:
    """Where the sequences of all parts are.

    Attributes:
        paths: of the parts.
        bounds: number of the first sequence of each part, and that of all, int64 [parts + 1].
        mask_dtype: of the masks that are to come of it: float32 where any part has such.
    """

    paths: Sequence[str]
    bounds: NDArray[np.int64]
    mask_dtype: str


class PartsReader:
    """The sequences of all parts.

    A plan takes sequences from anywhere, so any window of it touches most parts. Windows are large, and each part is
    read once a window, from its beginning to its end; some stay open, the others are opened for it, one at a time.

    Args:
        table: of the parts.
    """

    mask_alignment: MaskAlignment = "token"

    def __init__(self, table: PartsTable) -> None:
        # 5 to 10 bytes of memory each, twice; of many parts, enough that opening each is worth it.
        self.window_tokens = min(max(_TOKENS_A_PART * len(table.paths), 1 << 22), 1 << 24)
        self._paths, self._bounds, self._mask_dtype = table.paths, table.bounds, np.dtype(table.mask_dtype)
        self._held: dict[int, Part] = {}

    def read(self, selection: Selection) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and masks of the selection, end to end."""
        order = np.argsort(selection.sequences, kind="stable")
        sequences, lengths = selection.sequences[order], selection.lengths[order].astype(np.int64)
        begins = np.zeros(len(order), np.int64) if selection.begins is None else selection.begins[order]
        ends = np.cumsum(lengths)
        ids: NDArray[Any] | None = None
        mask = np.empty(ends[-1], self._mask_dtype)
        cuts = np.searchsorted(sequences, self._bounds)
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            first, last = cuts[number : number + 2].tolist()
            part = self._open(number)
            where = slice(ends[first] - lengths[first], ends[last - 1])
            local = sequences[first:last] - self._bounds[number]
            if (begins[first:last] + lengths[first:last] > part.lengths[local]).any():
                raise self._changed(part)
            starts = part.starts[local] + begins[first:last]
            if ids is None:
                ids = np.empty(ends[-1], part.ids.dtype)
            stops, all_of_them = starts + lengths[first:last], np.arange(last - first)
            _native.gather_sequences(part.ids, starts, stops, all_of_them, ids[where])
            found = np.empty(where.stop - where.start, part.mask.dtype)
            _native.gather_sequences(part.mask, starts, stops, all_of_them, found)
            mask[where] = found
        assert ids is not None
        # From the order of the parts to the order of the plan.
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        given = np.empty_like(ids), np.empty_like(mask)
        for source, out in zip((ids, mask), given, strict=True):
            _native.gather_sequences(source, ends - lengths, ends, place, out)
        return given

    def _open(self, number: int) -> Part:
        if (held := self._held.get(number)) is not None:
            return held
        part = Part(self._paths[number])
        if len(part.lengths) != self._bounds[number + 1] - self._bounds[number]:
            raise self._changed(part)
        if len(self._held) < _MAX_OPEN:
            self._held[number] = part
        return part

    def _changed(self, part: Part) -> FormatError:
        return FormatError(f"{part.path}: changed since its lengths were read; pass --resume, which makes it anew")


def write_packs(
    reader: SequenceReader,
    run: PackedRun,
    writer: ShardWriter,
    progress: _Advance = lambda units, items: None,
) -> None:
    """Write the packs, some at a time; another thread reads the next ones meanwhile."""
    # As many packs as surely hold no more than the window, and one at least.
    at_once = max(1, reader.window_tokens // max(run.longest, 1))
    windows = [run.offsets[first : first + at_once + 1] for first in range(0, len(run.offsets) - 1, at_once)]

    def read(bounds: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        return reader.read(run.selection.window(int(bounds[0]), int(bounds[-1])))

    with ThreadPoolExecutor(1, "gather") as thread:
        following = deque(thread.submit(read, bounds) for bounds in windows[:1])
        for number, bounds in enumerate(windows):
            following.extend(thread.submit(read, after) for after in windows[number + 1 : number + 2])
            ids, mask = following.popleft().result()
            each = run.selection.lengths[bounds[0] : bounds[-1]].astype(np.int64)
            ends, counts = np.cumsum(each), np.diff(bounds)
            pack_ends = ends[np.cumsum(counts) - 1]
            pack_lengths = np.diff(pack_ends, prepend=0)
            starts = ends - each - np.repeat(pack_ends - pack_lengths, counts)
            writer.add_packs(ids, mask, starts, pack_lengths, counts, mask_alignment=reader.mask_alignment)
            progress(len(each), len(each))


def write_shard(
    reader: SequenceReader,
    output: Output,
    run: PackedRun,
    *,
    overwrite: bool,
    progress: _Advance = lambda units, items: None,
) -> Header:
    """Write one output shard, and set it aside until all of them are whole."""
    with output.writer(overwrite=overwrite) as writer:
        write_packs(reader, run, writer, progress)
        return writer.set_aside()


@dataclass(frozen=True, slots=True)
class GatherTask:
    """One output shard, the packs that go into it, and whether it may replace another one."""

    output: Output
    run: PackedRun
    overwrite: bool


def gather_shard(table: PartsTable, task: GatherTask) -> Header:
    """``write_shard`` from parts, on any machine; what an attempt that died left is dropped, what it made is found."""
    paths = ShardPaths.of(task.output.prefix)
    _wait_for_lock(paths)
    if (header := task.output.found(published=False)) is not None:
        return header
    drop_build(paths)
    return write_shard(PartsReader(table), task.output, task.run, overwrite=task.overwrite)


def drop_build(paths: ShardPaths) -> None:
    """Remove what an interrupted build left at a prefix; of other work nothing."""
    if (head := read_journal(paths)) is not None and head.work == "build":
        drop_remains(paths)


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


@dataclass(frozen=True, slots=True, eq=False)
class Parted:
    """Sequences of one part that go on behind a cut.

    Attributes:
        path: of the part.
        sequences: their numbers in it, int64 [cuts].
        positions: behind the cuts, in tokens, int64 [cuts].
    """

    path: str
    sequences: NDArray[np.int64]
    positions: NDArray[np.int64]


def parted_by_part(table: PartsTable, sequences: NDArray[np.int64], positions: NDArray[np.int64]) -> Iterator[Parted]:
    """Cuts of sequences, part by part; arguments as in ``Cuts.parted`` and ``Cuts.parted_at``."""
    order = np.argsort(sequences, kind="stable")
    sequences, positions = sequences[order], positions[order]
    cuts = np.searchsorted(sequences, table.bounds)
    for part in np.flatnonzero(np.diff(cuts)).tolist():
        inside = slice(cuts[part], cuts[part + 1])
        yield Parted(table.paths[part], sequences[inside] - table.bounds[part], positions[inside])


def count_trained(_: None, cut: Parted) -> int:
    """How many of the tokens behind the cuts are trained on."""
    part = Part(cut.path)
    return int(np.count_nonzero(part.mask[part.starts[cut.sequences] + cut.positions]))


def publish_shards(
    prefix: str,
    outputs: Sequence[Output],
    write: Callable[[Sequence[int]], Iterable[Header]],
    *,
    overwrite: bool,
    keep: bool,
) -> list[Header]:
    """Write all output shards of a run and publish them together: what they replace stays until all are whole.

    Args:
        prefix: what the prefixes of several begin with.
        outputs: all shards.
        write: makes those of these numbers, in their order, and sets them aside (``write_shard``).
        overwrite: whether shards may be replaced.
        keep: go on with an interrupted run: leave shards that are there and are the very ones that would be made, and
            drop what is half made.

    Raises:
        FormatError: a shard is there that is another one, and may not be replaced.
    """
    with parts_held(prefix) if len(outputs) > 1 else contextlib.nullcontext():
        headers: dict[int, Header] = {}
        for number, output in enumerate(outputs):
            if keep and (found := output.found(published=not overwrite)) is not None:
                headers[number] = found
            else:
                check_free(ShardPaths.of(output.prefix), overwrite=overwrite)
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
                        drop_remains(paths)
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

    Raises:
        SequenceError: sequences longer than the capacity, where they are not to be dropped, truncated or split.
        FormatError: an option that cannot be, nothing left to pack, or ``prefix`` is that of the source.
    """
    _require_apart(source, prefix, shards)
    reader, header = CorpusReader(source), source.header
    packing = plan_packs(reader.lengths, options, shards=shards, source=source.prefix)
    outputs = list(
        packing.outputs(
            prefix,
            header.metadata,
            _identity(header),
            reader.count_trained(packing.cuts.parted, packing.cuts.parted_at),
            token_dtype=header.token_dtype.name,
            mask_dtype=header.mask_dtype.name,
            pad_id=header.pad_id,
        )
    )
    total = len(packing.cuts.lengths)
    with Progress("packing", total, unit="seq", log_interval=log_interval, items="sequences") as progress:

        def write(numbers: Sequence[int]) -> Iterator[Header]:
            for number in numbers:
                yield write_shard(
                    reader, outputs[number], packing.run(number), overwrite=overwrite, progress=progress.update
                )

        return PackReport.of(publish_shards(prefix, outputs, write, overwrite=overwrite, keep=keep))


def _require_apart(source: Shard, prefix: str, shards: int) -> None:
    """FormatError where the output would replace its source, or lie beside shards that it could be taken for."""
    for path in (source.prefix, prefix):
        require_local(path, "packing")
    prefixes = output_prefixes(prefix, shards)
    written = [place for path in prefixes for place in places_of(path, "the output", written=True)]
    require_apart(written, places_of(source.prefix, "the shard to be packed"))
    if shards > 1:
        refuse_other_splits(prefix, shards)


def _identity(source: Header) -> str:
    """What packed shards call the sequences: by their input where they were tokenised from it, else by their id."""
    tokenised = "packing" not in source.metadata
    return (source_of(source) if tokenised else None) or source.shard_id.hex()
