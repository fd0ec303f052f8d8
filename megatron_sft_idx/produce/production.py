"""Input in, shards out, one after the other, until the input ends.

A shard's bytes depend on the input, the options and the seed alone. Its header holds the place in the input behind it,
so there is no moment at which the shards and that place disagree: whatever ends a producer, the next one begins
behind the last shard that is there and makes anew what was half made.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_sft_idx.chat.inputs import InputFile, expand_inputs, total_bytes
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.live import END, PRODUCER, Catalog, Limits, ProducerState, Record
from megatron_sft_idx.produce.feed import (
    INPUTS,
    Feed,
    FixedFiles,
    GrowingFolder,
    Input,
    InputLog,
    Position,
    StandardInput,
)
from megatron_sft_idx.produce.keeper import Room, StateKeeper, ended
from megatron_sft_idx.shard import Shard, ShardWriter, check_free, read_header, remove_shard
from megatron_sft_idx.shard.publication import name_held, read_journal, remove_remains, with_present
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.publish import describe, resolve
from megatron_sft_idx.tokenize import (
    CorpusReport,
    EncodedPiece,
    EncodingOptions,
    Local,
    NotYet,
    PackOptions,
    RowEncoder,
    differences,
    encode_piece,
    option_differences,
    pack_shard,
    packing_differences,
    remember_encoder,
)

# Of text that becomes one token, about: a shard is then some eight pieces.
_BYTES_OF_A_TOKEN = 4
_PIECES_OF_A_SHARD = 8
_LEAST_PIECE_NBYTES, _MOST_PIECE_NBYTES = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class ProduceOptions:
    """One producer. The first two groups decide over the bytes of the shards, the third does not.

    Attributes:
        inputs: files, globs and ``save_to_disk`` folders, or ``-`` alone for JSON lines on standard input.
        watch: a folder whose files are the input, as they appear; ``inputs`` is empty then.
        catalog: the folder of shards.

        encoding: rows to sequences.
        packing: sequences to packs; ``max_sequences_per_pack`` is set, since consumers rely on it.
        tokens_per_shard: a shard ends with the first piece of input at which it holds as many.

        workers: tokenising processes; 0 tokenises in this one.
        max_ahead_shards: most published shards that some consumer has not completed; None for no limit.
        max_ahead_nbytes: most bytes of these; None for no limit.
        consumers: training runs that are to read the catalog.
        keep_recent: remove completed shards but for so many, the newest; None removes nothing.
        ack_dir: where consumers acknowledge, when that is not in the catalog.
        end_after: seconds without new input in ``watch`` that end it; None waits for its ``_END``.
        settle: seconds for which the size of a file in ``watch`` must stay the same until it counts as whole.
    """

    inputs: Sequence[str]
    watch: str | None
    catalog: str
    encoding: EncodingOptions
    packing: PackOptions
    tokens_per_shard: int
    workers: int = 0
    max_ahead_shards: int | None = None
    max_ahead_nbytes: int | None = None
    consumers: int = 1
    keep_recent: int | None = None
    ack_dir: str | None = None
    end_after: float | None = None
    settle: float = 5.0

    def __post_init__(self) -> None:
        for path, what in (
            (self.catalog, "a live catalog"),
            (self.watch, "a folder that is watched"),
            (self.ack_dir, "a folder of acknowledgements"),
        ):
            if path is not None:
                require_local(path, what)
        if (acks := self.ack_dir) and os.path.lexists(acks) and not os.path.isdir(acks):
            raise FormatError(f"{acks}: {describe(acks)} is here, expected a folder; name another one")
        if self.packing.max_sequences_per_pack is None:
            raise FormatError("max_sequences_per_pack must be set: the width of every batch of a live catalog")
        if self.tokens_per_shard < self.packing.capacity:
            raise FormatError(
                f"--tokens-per-shard {self.tokens_per_shard} is below --seq-length {self.packing.capacity}: a shard"
                " would be less than a pack; raise it, a thousand packs are a good shard"
            )

    @property
    def from_stdin(self) -> bool:
        """Whether the input comes in a pipe."""
        return self.watch is None and list(self.inputs) == ["-"]

    @property
    def piece_nbytes(self) -> int:
        """Bytes of input that are tokenised at a time, and between which a shard may end."""
        nbytes = self.tokens_per_shard * _BYTES_OF_A_TOKEN // _PIECES_OF_A_SHARD
        return min(max(nbytes, _LEAST_PIECE_NBYTES), _MOST_PIECE_NBYTES)

    def describe(self, encoder: RowEncoder, num_files: int) -> dict[str, Any]:
        """All that decides over the bytes of the shards, but for the content of the input."""
        source = "a growing folder" if self.watch is not None else "a pipe" if self.from_stdin else f"{num_files} files"
        return encoder.describe() | {
            "packing": self.packing.describe(),
            "sharding": {"tokens_per_shard": self.tokens_per_shard, "piece_nbytes": self.piece_nbytes},
            "input": {"input": source},
        }

    def limits(self, encoder: RowEncoder) -> Limits:
        """What consumers may rely on."""
        assert self.packing.max_sequences_per_pack is not None
        return Limits(
            capacity=self.packing.capacity,
            max_sequences_per_pack=self.packing.max_sequences_per_pack,
            sequence_multiple=self.packing.sequence_multiple,
            token_dtype="uint16" if encoder.token_dtype.name == "uint16" else "int32",
            consumers=self.consumers,
            max_ahead_shards=self.max_ahead_shards,
            max_ahead_nbytes=self.max_ahead_nbytes,
            keep_recent=self.keep_recent,
        )


# The tokenised sequences of the shard in the making, without weights and with; thrown away with each.
_WORK, _CORPUS, _WEIGHTED = "_work", "corpus", "weighted"
_DROPPED = "first_token_masks_dropped"
# Locked by the one producer of a catalog.
_LOCK = "_producer"


@dataclass(slots=True)
class ProduceSummary:
    """What is in the catalog, and what this run did for it.

    Attributes:
        catalog: its folder.
        shards: published, by all runs.
        rows: read, by all runs, bad ones included.
        skipped: of these, rows that could not be used.
        made: shards that this run published.
        removed: shards that this run removed.
        seconds: that this run took.
        found: the catalog was complete already.
    """

    catalog: str
    shards: int
    rows: int
    skipped: int
    made: int = 0
    removed: int = 0
    seconds: float = 0.0
    found: bool = False

    def lines(self) -> list[str]:
        """The summary as a person reads it."""
        return [
            f"{'found' if self.found else 'wrote'} {self.catalog}",
            f"shards          {self.shards:,} ({self.made:,} made by this run, {self.removed:,} removed by it)",
            f"rows            {self.rows:,}",
            *([f"  skipped       {self.skipped:,}"] if self.skipped else []),
            f"seconds         {self.seconds:.1f}",
        ]


def produce(options: ProduceOptions, log: Callable[[str], None] = lambda line: None) -> ProduceSummary:
    """Make the catalog, or go on with it; see ``ProduceOptions``.

    Raises:
        SFTIndexError: an input, a row, an option, another producer at work, or a catalog made from something else.
        OSError: the disk says no.
    """
    begin = time.monotonic()
    if (kind := options.encoding.rows.kind) in ("preference", "kto"):
        raise FormatError(f"--row-kind {kind}: the shards of a catalog have no columns; make one with preprocess")
    catalog = Catalog(options.catalog)
    encoder = RowEncoder(replace(options.encoding, source=False))
    with _held(catalog), contextlib.closing(InputLog(os.path.join(catalog.folder, INPUTS))) as taken:
        files = [] if options.watch is not None or options.from_stdin else expand_inputs(options.inputs)
        state, cursor = find_start(catalog, options, encoder, len(files))
        if not state.published:
            taken.clear()
        source = _input(options, files, taken, log)
        summary = ProduceSummary(catalog.folder, state.published, cursor.rows, cursor.skipped)
        _clear_work(catalog)
        if catalog.end() is not None:
            log(f"{catalog.folder}: complete already, with the same input and options")
            room = Room(catalog, StateKeeper(catalog, ended(state)), options.ack_dir, log)
            room.remove_remains()
            room.free_completed()
            summary.found, summary.removed = True, room.removed
        else:
            if state.published:
                log(f"{catalog.folder}: going on behind {state.published:,} shards, {cursor.rows:,} rows")
            of_files = [total_bytes(files[first:]) for first in (0, cursor.position.file)]
            _Production(options, catalog, encoder, source, state, cursor, of_files, log).run(summary)
    summary.seconds = time.monotonic() - begin
    return summary


@contextlib.contextmanager
def _held(catalog: Catalog) -> Iterator[None]:
    """The catalog's folder, made where it is missing, for this producer alone; what is not its own there is refused."""
    folder = resolve(catalog.folder, folder=True)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise FormatError(f"{catalog.folder}: {describe(folder)} is here, expected a folder; name another one")
    made = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    busy = f"{catalog.folder}: another producer is at work here now; wait for it, or name another folder"
    try:
        with name_held(os.path.join(catalog.folder, f"{_LOCK}.journal"), busy):
            _check_work(catalog)
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(folder)


def own_files(folder: str) -> list[str]:
    """The folder of a catalog, and what a producer writes in it under names that it always has."""
    corpus = ShardPaths.of(os.path.join(folder, _WORK, _CORPUS))
    names = (PRODUCER, END, INPUTS, f"{_LOCK}.journal", _WORK)
    return [folder, *(os.path.join(folder, name) for name in names), *corpus.all, corpus.journal]


def _check_work(catalog: Catalog) -> None:
    """FormatError where something is called like the folder of the shard in the making, and is not such a folder."""
    work = os.path.join(catalog.folder, _WORK)
    if not os.path.lexists(work):
        return
    if os.path.islink(work) or not os.path.isdir(work):
        raise FormatError(f"{work}: {describe(work)} is here, where a producer works; move it away")
    corpora = [ShardPaths.of(os.path.join(work, name)) for name in (_CORPUS, _WEIGHTED)]
    there = [with_present(paths, read_journal(paths)) for paths in corpora]
    ours = {path for paths in there for path in (*paths.all, *paths.unpublished.all, paths.journal)}
    for name in sorted(os.listdir(work)):
        if os.path.join(work, name) not in ours:
            raise FormatError(f"{work}: holds {name}, which no producer made; move it away, or name another catalog")
    for paths in corpora:
        check_free(paths, overwrite=True)


def _clear_work(catalog: Catalog) -> None:
    """Remove the folder of the shard in the making."""
    for name in (_CORPUS, _WEIGHTED):
        paths = ShardPaths.of(os.path.join(catalog.folder, _WORK, name))
        remove_remains(paths)
        remove_shard(paths)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.join(catalog.folder, _WORK))


def _input(options: ProduceOptions, files: Sequence[InputFile], taken: InputLog, log: Callable[[str], None]) -> Input:
    if options.watch is None:
        nbytes = options.piece_nbytes
        return StandardInput(nbytes) if options.from_stdin else FixedFiles(files, nbytes, taken)
    if os.path.realpath(options.watch) == os.path.realpath(options.catalog):
        raise FormatError(f"{options.catalog}: input and shards in one folder; name another one for the catalog")
    settle, end_after = options.settle, options.end_after
    return GrowingFolder(options.watch, options.piece_nbytes, taken, settle=settle, end_after=end_after, log=log)


class _Production:
    """One run over what is left of the input."""

    def __init__(
        self,
        options: ProduceOptions,
        catalog: Catalog,
        encoder: RowEncoder,
        source: Input,
        state: ProducerState,
        cursor: Cursor,
        of_files: Sequence[int],
        log: Callable[[str], None],
    ) -> None:
        self._options, self._catalog, self._encoder, self._log = options, catalog, encoder, log
        self._corpus = os.path.join(catalog.folder, _WORK, _CORPUS)
        self._keeper = StateKeeper(catalog, state)
        self._room = Room(catalog, self._keeper, options.ack_dir, log)
        self._feed = Feed(source, cursor.position, catalog.folder)
        self._cursor = cursor
        self._report = CorpusReport(cursor.rows, cursor.skipped)
        # Bytes of the whole input and of the files that are left, 0 where nobody knows; and what this run has done.
        self._total_nbytes, self._left_nbytes = of_files
        self._begin, self._tokens, self._nbytes = time.monotonic(), 0, 0

    def run(self, summary: ProduceSummary) -> None:
        """Make shards until the input ends; then say how many there are."""
        encoding = self._encoder.options
        remember_encoder(encoding, self._encoder)
        with (
            self._keeper as keeper,
            Local(self._options.workers) as pool,
            contextlib.closing(
                pool.map_in_order(encode_piece, encoding, self._feed, name_of="{0.path}:{0.first}".format)
            ) as results,
        ):
            self._room.remove_remains()
            while self._tokenise(results):
                self._publish()
                summary.made += 1
            _clear_work(self._catalog)
            self._room.free_completed()
            if not keeper.state.published:
                raise FormatError(
                    f"{self._catalog.folder}: no usable row in the input ({self._report.rows} rows,"
                    f" {self._report.skipped} skipped)"
                )
            keeper.end()
            self._catalog.write_end(keeper.state.published)
        summary.shards, summary.removed = keeper.state.published, self._room.removed
        summary.rows, summary.skipped = self._report.rows, self._report.skipped

    def _tokenise(self, results: Iterator[EncodedPiece | NotYet]) -> bool:
        """Fill the corpus of one shard; False where the input has nothing left to fill one with."""
        before = self._cursor
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(self._writer(_CORPUS, np.uint8))
            notes: Counter[str] = Counter()
            kept = 0
            while kept < self._options.tokens_per_shard and (piece := self._next(results)) is not None:
                if piece.loss_mask.dtype == np.float32 and writer.mask_dtype != np.float32:
                    notes[_DROPPED] += writer.dropped_first_tokens
                    writer = stack.enter_context(self._with_weights(writer))
                ones = np.ones(len(piece.lengths), np.int64)
                writer.add_packs(
                    piece.input_ids, piece.loss_mask, np.zeros_like(ones), piece.lengths, ones, mask_alignment="token"
                )
                on_bad_row = self._options.encoding.on_bad_row
                self._report.add(piece.rows, piece.bad_rows, piece.straddling, on_bad_row, self._log)
                notes.update(piece.notes)
                position, path, first = self._feed.done()
                kept += self._tokens_kept(piece, path, first)
                self._cursor = Cursor(position, self._report.rows, self._report.skipped)
                self._tokens, self._nbytes = self._tokens + len(piece.input_ids), self._nbytes + piece.num_bytes
            if not kept:
                writer.abandon()
                return False
            notes[_DROPPED] += writer.dropped_first_tokens
            writer.metadata = self._encoder.describe() | {
                "sources": {
                    "fingerprint": self._cursor.position.fingerprint,
                    "rows": self._cursor.rows - before.rows,
                    "skipped": self._cursor.skipped - before.skipped,
                },
                "notes": {name: count for name, count in sorted(notes.items()) if count},
                "sharding": self._options.describe(self._encoder, 0)["sharding"],
                CURSOR: self._cursor.to_json(),
            }
        return True

    def _writer(self, name: str, mask_dtype: type[np.generic]) -> ShardWriter:
        """Begin the corpus of a shard."""
        self._corpus = os.path.join(self._catalog.folder, _WORK, name)
        return ShardWriter(
            self._corpus,
            token_dtype=self._encoder.token_dtype,
            mask_dtype=mask_dtype,
            pad_id=self._encoder.tokenizer.pad_id,
            overwrite=True,
            durable=False,
        )

    def _with_weights(self, flags: ShardWriter) -> ShardWriter:
        """A corpus whose masks hold weights, which holds what is in one of flags, in the place of it."""
        flags.complete()
        writer = self._writer(_WEIGHTED, np.float32)
        writer.add_shard(Shard(flags.paths.unpublished))
        flags.abandon()
        return writer

    def _next(self, results: Iterator[EncodedPiece | NotYet]) -> EncodedPiece | None:
        """The next piece, as soon as there is one; None at the end of the input."""
        if not isinstance(piece := next(results, None), NotYet):
            return piece
        so_far = f"{self._report.rows:,} rows so far"
        waits = self._keeper.waits("waiting for input", self._log, lambda: so_far, longest=0.25)
        with contextlib.closing(waits):
            for _ in waits:
                if not isinstance(piece := next(results, None), NotYet):
                    return piece
        raise AssertionError("looks never end by themselves")

    def _tokens_kept(self, piece: EncodedPiece, path: str, first: int) -> int:
        """Tokens of a piece that packing will keep, where it drops what is too long; an error where it would be one."""
        lengths, packing = piece.lengths, self._options.packing
        long = lengths > packing.longest_sequence
        if packing.overlong == "error" and long.any():
            raise SequenceError(
                path,
                first,
                f"among the {piece.rows} rows from this one on, {long.sum()} are longer than"
                f" {packing.longest_sequence} tokens, the longest has {lengths.max()}; choose --overlong drop, truncate"
                " or split, or a larger --seq-length",
            )
        return int(lengths[~long].sum() if packing.overlong == "drop" else lengths.sum())

    def _publish(self) -> None:
        """Pack the corpus into the next shard, once there is room for it."""
        number = self._keeper.state.published
        paths = ShardPaths.of(self._corpus)
        # About what the packed shard will take: the tokens are the same, and its indexes are shorter.
        self._room.wait_for(sum(os.path.getsize(path) for path in paths.all))
        report = pack_shard(
            Shard(self._corpus), self._catalog.shard_prefix(number), self._options.packing, overwrite=True
        )
        self._keeper.update(published=number + 1, input=self._cursor.to_json())
        self._log(
            f"shard {number}: {report.packs:,} packs, {report.sequences:,} sequences, {report.tokens:,} tokens,"
            f" fill {100 * report.fill:.1f}%; {self._report.rows:,} rows so far, {self._pace()}"
        )

    def _pace(self) -> str:
        """The rate, and the time left where the end is known; what was read again was done by an earlier run."""
        seconds = max(time.monotonic() - self._begin, 1e-9)
        rate = f"{self._tokens / seconds:,.0f} tokens/s"
        if not self._total_nbytes or not self._nbytes:
            return rate
        left = max(self._left_nbytes - self._feed.skipped_nbytes - self._nbytes, 0)
        share = 100 * (1 - left / self._total_nbytes)
        return f"{rate}, {share:.1f}% of the input, {left * seconds / self._nbytes:,.0f} s left"


# ---- where a producer begins: an empty catalog, or one that it was making, however it ended ----


# The key of the header's JSON block that holds a shard's cursor: publishing a shard and moving on is one step.
CURSOR = "cursor"


@dataclass(frozen=True, slots=True)
class Cursor(Record):
    """How far the input has become shards.

    Attributes:
        position: in the input.
        rows: before it.
        skipped: of these, rows that could not be used.
    """

    position: Position = field(default_factory=Position)
    rows: int = 0
    skipped: int = 0


def find_start(
    catalog: Catalog, options: ProduceOptions, encoder: RowEncoder, num_files: int
) -> tuple[ProducerState, Cursor]:
    """The state to go on from, and the place in the input.

    Shards that were published after the state was last written are counted, since each holds its own cursor. Where
    there is no shard yet, the options may be others.

    Args:
        catalog: held by this producer.
        options: what it is told.
        encoder: made from them.
        num_files: of the input; 0 where they are not all there yet.

    Raises:
        FormatError: the folder holds shards that no producer made, or was made with other options; says which.
    """
    limits = options.limits(encoder)
    wanted = options.describe(encoder, num_files)
    state = catalog.producer()
    if state is None:
        if (present := catalog.present()) or catalog.end() is not None:
            raise FormatError(
                f"{catalog.folder}: {len(present)} shards are here, and no _producer.json that says how they were made;"
                " name another folder"
            )
        return ProducerState(limits, options=wanted, input=Cursor().to_json()), Cursor()
    if not state.published and not catalog.is_published(0) and catalog.end() is None:
        return ProducerState(limits, state.beat, options=wanted, input=Cursor().to_json()), Cursor()
    differs = option_differences(state.options, encoder) + packing_differences(state.options, options.packing)
    for group in ("sharding", "input"):
        found = state.options.get(group)
        differs += differences(found if isinstance(found, dict) else {}, wanted[group])
    if state.limits.token_dtype != limits.token_dtype:
        differs.append(f"token dtype was {state.limits.token_dtype}, is {limits.token_dtype}")
    if differs:
        raise FormatError(
            f"{catalog.folder}: this catalog was begun with other options: {'; '.join(differs)}; give the same ones to"
            " go on with it, or name another folder"
        )
    path = os.path.join(catalog.folder, "_producer.json")
    cursor = Cursor.parse(path, state.input, f"{CURSOR}.")
    published = state.published
    while catalog.is_published(published):
        prefix = catalog.shard_prefix(published)
        # The last thing to go of a build is its journal.
        remove_remains(prefix)
        paths = ShardPaths.of(prefix)
        content = read_header(prefix).metadata.get(CURSOR)
        if not isinstance(content, dict):
            raise FormatError(
                f"{paths.seq_idx}: not a shard that this producer made, its header has no cursor; name another folder"
            )
        cursor = Cursor.parse(paths.seq_idx, content, f"{CURSOR}.")
        published += 1
    state = ProducerState(limits, state.beat, "running", None, published, state.freed, wanted, cursor.to_json())
    return state, cursor
