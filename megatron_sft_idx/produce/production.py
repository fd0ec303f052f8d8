"""A producer: makes shards from the input, one after another, until the input ends.

A shard is made as in ``tokenize``: its pieces become parts in a building folder, a report counts their rows, and
``make_packs`` plans, writes and publishes. The differences are:

- Workers write each piece to a part, which is removed when its shard is published.
- A shard ends with the first piece at which it has enough tokens (``_Production``), and the next one begins there.
- The input may still grow. It is a stream of pieces (``feed``), with ``NOT_YET`` in place of a piece that does not
  exist yet.
- The producer publishes that it is alive, and waits for its consumers (``keeper``).

The bytes of a shard depend only on the input, the options and the seed. Its header has the position in the input after
it (``cursor``). However a producer ends, the next one begins after the last existing shard and repeats unfinished work.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from megatron_sft_idx.chat.inputs import InputFile, total_bytes
from megatron_sft_idx.chat.tokenizer import COMPARED_ROWS, comparing_all_texts
from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout.files import BUILDING, SUFFIXES
from megatron_sft_idx.lines import found_unread, joined
from megatron_sft_idx.live import END, PRODUCER, Catalog
from megatron_sft_idx.produce.cursor import CURSOR, Cursor, find_start
from megatron_sft_idx.produce.feed import Files, PieceOrigin, feed
from megatron_sft_idx.produce.input_kinds import open_input
from megatron_sft_idx.produce.keeper import ENDED, Backpressure, StateKeeper
from megatron_sft_idx.produce.produce_options import ProduceOptions
from megatron_sft_idx.produce.taken_files import TakenFiles
from megatron_sft_idx.shard.publication import job_folder
from megatron_sft_idx.storage.building import Building
from megatron_sft_idx.storage.publish import describe, require_space, resolve
from megatron_sft_idx.tokenize import (
    CorpusReport,
    EncodingOptions,
    Local,
    MadePart,
    NotYet,
    PackReport,
    PartsSoFar,
    RowEncoder,
    ToPack,
    encode_to_part,
    look_at_rows,
    make_packs,
    num_kept_tokens,
    remember_encoder,
    row_files,
)

# Next to the shards: the building folder of the one producer, with its lock and the parts of the unfinished shard; and
# the list of files taken.
_WORK, _INPUTS = "_producer", "_inputs.jsonl"

_Made: TypeAlias = tuple[PieceOrigin, MadePart]


def own_files(folder: str) -> list[str]:
    """Return the folder of a catalog, and the files in it, other than shards, that a producer may write."""
    return [folder, *(os.path.join(folder, name) for name in (PRODUCER, END, _INPUTS, _WORK + BUILDING))]


def produce(options: ProduceOptions, log: Callable[[str], None] = lambda line: None) -> str:
    """Create or continue a catalog. See ``ProduceOptions``.

    Returns:
        A report for people: the numbers of shards and rows, and what this job did.

    Raises:
        SFTIndexError: an input, a row or an option is invalid, another producer is active, or the catalog was made from
            other input or with other options.
        OSError: an error of the disk.
    """
    begin = time.monotonic()
    if (kind := options.encoding.rows.kind) in ("preference", "kto"):
        raise FormatError(
            f"--row-kind {kind} needs columns, which the shards of a catalog do not have; use preprocess instead"
        )
    if options.packing.where or options.packing.loss_weight_column is not None or options.encoding.keep_fields:
        raise FormatError(
            "where, loss_weight_column and keep_fields need columns, which the shards of a catalog do not have; leave"
            " them out"
        )
    catalog = Catalog(options.catalog)
    encoder = RowEncoder(replace(options.encoding, source=False))
    inputs = os.path.join(catalog.folder, _INPUTS)
    with _held(catalog) as work, contextlib.closing(TakenFiles(inputs)) as taken:
        files = [] if options.watch is not None or options.from_stdin else row_files(options.inputs)
        look_at_rows(files, options.encoding)
        state, cursor = find_start(catalog, options, encoder, len(files))
        if not state.published:
            taken.clear()
        source = open_input(options, files, taken, cursor.position.file, log)
        keeper = StateKeeper(catalog, state)
        backpressure = Backpressure(catalog, keeper, options.ack_dir, log)
        if is_complete := catalog.end() is not None:
            keeper.state = replace(state, **ENDED)
            backpressure.finish_removals()
            backpressure.free_completed()
        else:
            if state.published:
                log(f"{catalog.folder}: continuing after {state.published:,} shards, {cursor.rows:,} rows")
            pace = _Pace(files, files[cursor.position.file :])
            cursor = _Production(options, catalog, work, encoder, keeper, backpressure, pace, log).run(source, cursor)
    shards, new = keeper.state.published, keeper.state.published - state.published
    lines = [
        f"found {catalog.folder}: {found_unread(catalog.folder)}" if is_complete else f"wrote {catalog.folder}",
        f"shards          {shards:,} ({new:,} made by this run, {backpressure.removed:,} removed by it)",
        *CorpusReport(cursor.rows, cursor.skipped).lines(),
        f"seconds         {time.monotonic() - begin:.1f}",
    ]
    return joined(lines)


@contextlib.contextmanager
def _held(catalog: Catalog) -> Iterator[Building]:
    """Create the catalog's folder if necessary, and lock it for this producer.

    Yields the producer's building folder, for the parts of the unfinished shard.

    Raises:
        FormatError: something else is in their place, or another producer is active.
    """
    folder = resolve(catalog.folder, folder=True)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise FormatError(f"{catalog.folder}: expected a folder, found {describe(folder)}; choose another path")
    is_new = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        require_space(folder, 0, len(SUFFIXES) + 4)  # for a shard, and a part
        busy = f"{catalog.folder}: another producer is writing here; wait for it, or choose another folder"
        work = Building.take(os.path.join(catalog.folder, _WORK), durable=False, busy=busy)
        try:
            work.clear()
            work.begin({"work": "produce"})
            yield work
        finally:
            work.discard()
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # if it is not empty
                os.rmdir(folder)


# ---- one shard after another ----


def _make_part(shared: tuple[EncodingOptions, str], item: tuple[PieceOrigin, Piece]) -> _Made:
    """Tokenise a piece, and write it to a part in a folder. Runs in workers."""
    (encoding, folder), (origin, piece) = shared, item
    path = os.path.join(folder, f"{origin.behind.file:016x}{origin.behind.pieces:016x}.part")
    with comparing_all_texts(origin.behind.file == 0 and origin.first <= COMPARED_ROWS):
        return origin, encode_to_part(encoding, piece, origin.path, path)


class _Production:
    """The job that makes shards from the rest of the input."""

    def __init__(
        self,
        options: ProduceOptions,
        catalog: Catalog,
        work: Building,
        encoder: RowEncoder,
        keeper: StateKeeper,
        backpressure: Backpressure,
        pace: _Pace,
        log: Callable[[str], None],
    ) -> None:
        self._options, self._catalog, self._work, self._encoder = options, catalog, work, encoder
        self._keeper, self._backpressure, self._pace, self._log = keeper, backpressure, pace, log

    def run(self, source: Files, cursor: Cursor) -> Cursor:
        """Make shards until the input ends. Return the cursor after the last one."""
        encoding, folder = self._encoder.options, self._catalog.folder
        remember_encoder(encoding, self._encoder)
        os.mkdir(self._work.parts)
        pieces = feed(source, cursor.position, folder)
        report = CorpusReport(cursor.rows, cursor.skipped)
        with (
            self._keeper as keeper,
            Local(self._options.workers) as pool,
            contextlib.closing(
                pool.map_in_order(
                    _make_part, (encoding, self._work.parts), pieces, name_of="{0[0].path}:{0[0].first}".format
                )
            ) as results,
        ):
            self._backpressure.finish_removals()
            while (behind := self._make(results, report, cursor)) is not None:
                cursor = behind
            self._backpressure.free_completed()
            if not keeper.state.published:
                raise report.no_usable_row(folder)
            keeper.end()
            self._catalog.write_end(keeper.state.published)
        return replace(cursor, rows=report.rows, skipped=report.skipped)

    def _make(self, results: Iterator[_Made | NotYet], report: CorpusReport, before: Cursor) -> Cursor | None:
        """Make the next shard. Return the cursor after it, or None if the input has no tokens left."""
        parts, num_tokens, cursor = self._gather(results, report, before)
        parts.require_few_bad_rows(self._catalog.folder, at_end=True)
        if not num_tokens:
            return None
        # The packed shard has about the size of its parts, except for tokens that packing drops.
        all_tokens = sum(int(each.sum()) for each in parts.lengths)
        self._backpressure.wait_for(sum(map(os.path.getsize, parts.paths)) * num_tokens // all_tokens)
        self._publish(parts, before, cursor)
        for path in parts.paths:
            os.unlink(path)
        return cursor

    def _gather(
        self, results: Iterator[_Made | NotYet], report: CorpusReport, cursor: Cursor
    ) -> tuple[PartsSoFar, int, Cursor]:
        """Collect the parts of the pieces after a cursor, until they have enough tokens or the input ends.

        Returns:
            The parts, the number of their tokens that will be packed, and the cursor after them.
        """
        options, num_tokens = self._options, 0
        parts = PartsSoFar(report, options.encoding.on_bad_row, self._log, limit=options.max_bad_rows)
        while num_tokens < options.tokens_per_shard:
            result = self._next(results, report)
            if result is None:
                break
            origin, part = result
            parts.add(part, origin.path)
            self._require_fit(origin, part)
            reader = part.reader(media=options.encoding.processor is not None)
            num_tokens += num_kept_tokens(part.lengths.astype(np.int64), options.packing, reader)
            cursor = Cursor(origin.behind, report.rows, report.skipped)
            self._pace.add(origin, part)
        return parts, num_tokens, cursor

    def _next(self, results: Iterator[_Made | NotYet], report: CorpusReport) -> _Made | None:
        """Return the next tokenised piece as soon as there is one; None at the end of the input."""
        so_far = f"{report.rows:,} rows so far"
        return self._keeper.wait_for(
            lambda: next(results, None), "waiting for input", self._log, lambda: so_far, longest=0.25
        )

    def _require_fit(self, origin: PieceOrigin, part: MadePart) -> None:
        """Raise SequenceError if a sequence of a piece is too long and the options make this an error.

        Packing would report it too, but without the position in the input.
        """
        lengths, packing = part.lengths, self._options.packing
        if packing.overlong == "error" and (is_too_long := lengths > packing.longest_sequence).any():
            raise SequenceError(
                origin.path,
                origin.first,
                f"{is_too_long.sum()} of the {part.info.rows} rows that begin here are longer than"
                f" {packing.longest_sequence} tokens, the longest has {lengths.max()}; choose --overlong drop,"
                " truncate or split, or a larger --seq-length",
            )

    def _publish(self, parts: PartsSoFar, before: Cursor, cursor: Cursor) -> None:
        """Pack the sequences of parts into the next shard, which has the input between two cursors."""
        number = self._keeper.state.published
        prefix = self._catalog.shard_prefix(number)
        sources = {
            "fingerprint": cursor.position.fingerprint,
            "rows": cursor.rows - before.rows,
            "skipped": cursor.skipped - before.skipped,
        }
        described = {"sharding": self._options.sharding, CURSOR: cursor.to_json()}
        sequences = ToPack.of_parts(parts, self._encoder, prefix, sources, **described)
        with job_folder(prefix, {"work": "produce"}, overwrite=True) as job:
            made = make_packs(sequences, job, self._options.packing, work="produce", overwrite=True)
        report = PackReport.of(made.headers)
        self._keeper.update(published=number + 1, input=cursor.to_json())
        self._log(
            f"shard {number}: {report.packs:,} packs, {report.sequences:,} sequences, {report.tokens:,} tokens,"
            f" fill {100 * report.fill:.1f}%; {cursor.rows:,} rows so far, {self._pace}"
        )


class _Pace:
    """The tokenization rate of this job, for messages; for files, also how much of the input is read and remains.

    Args:
        files: files of the whole input; empty if it is not known in advance.
        to_read: the files that this job reads.
    """

    def __init__(self, files: Sequence[InputFile], to_read: Sequence[InputFile]) -> None:
        self._begin, self._total, self._to_read = time.monotonic(), total_bytes(files), total_bytes(to_read)
        # Bytes read include pieces that are already in shards, which are read again for comparison.
        self._num_tokens = self._new_nbytes = self._read_nbytes = 0

    def add(self, origin: PieceOrigin, part: MadePart) -> None:
        """Count a tokenised piece."""
        self._num_tokens += int(part.lengths.sum())
        self._new_nbytes += part.info.num_bytes
        self._read_nbytes = origin.nbytes

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._begin, 1e-9)
        rate = f"{self._num_tokens / seconds:,.0f} tokens/s"
        if not self._total or not self._new_nbytes:
            return rate
        rest = max(self._to_read - self._read_nbytes, 0)
        percent = 100 * (1 - rest / self._total)
        return f"{rate}, {percent:.1f}% of the input, {rest * seconds / self._new_nbytes:,.0f} s left"
