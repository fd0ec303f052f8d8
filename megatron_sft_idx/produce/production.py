"""A producer: makes shards of the input, one after the other, until the input ends.

The bytes of a shard depend on the input, the options and the seed alone. Its header holds the position in the input
behind it (its cursor), so shards and position can never disagree: however a producer ends, the next one begins behind
the last shard that is there, and makes anew what was half done.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from megatron_sft_idx.chat.inputs import InputFile, total_bytes
from megatron_sft_idx.chat.tokenizer import COMPARED_ROWS, comparing_all_texts
from megatron_sft_idx.chat.types import Piece
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import BUILDING, SUFFIXES
from megatron_sft_idx.lines import joined
from megatron_sft_idx.live import END, PRODUCER, Catalog, Limits, ProducerState, Record
from megatron_sft_idx.produce.feed import (
    Files,
    GrowingFolder,
    PieceOrigin,
    Position,
    TakenFiles,
    feed,
    fixed_files,
    standard_input,
)
from megatron_sft_idx.produce.keeper import ENDED, Backpressure, StateKeeper
from megatron_sft_idx.shard import read_header
from megatron_sft_idx.shard.publication import finish_interrupted, job_folder
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.building import Building
from megatron_sft_idx.storage.publish import describe, require_space, resolve
from megatron_sft_idx.tokenize import (
    BadRowLimit,
    CorpusReport,
    EncodedPiece,
    EncodingOptions,
    Local,
    MadePart,
    NotYet,
    PackOptions,
    PackReport,
    PartInfo,
    PartsReader,
    PartsSoFar,
    PartsTable,
    RowEncoder,
    ToPack,
    encode_piece,
    make_packs,
    noted_differences,
    num_kept_tokens,
    remember_encoder,
    require_decided_rows,
    row_files,
    write_part,
)

# About how many bytes of text become one token, and how many pieces of the input a shard is to be made of.
_BYTES_OF_A_TOKEN = 4
_PIECES_OF_A_SHARD = 8
_MIN_PIECE_NBYTES, _MAX_PIECE_NBYTES = 1 << 10, 1 << 20
# Next to the shards: the building folder of the one producer, with its lock and the parts of the shard in the making;
# and the list of files taken.
_WORK, _INPUTS = "_producer", "_inputs.jsonl"
# The key under which the JSON block of a shard's header holds its cursor.
_CURSOR = "cursor"

_Encoded: TypeAlias = tuple[PieceOrigin, PartInfo, EncodedPiece]


@dataclass(frozen=True, slots=True)
class ProduceOptions:
    """The options of a producer. The first two groups decide over the bytes of the shards, the third does not.

    Attributes:
        inputs: files, globs and ``save_to_disk`` folders, or ``-`` alone for JSON lines on standard input.
        watch: a folder whose files are the input, as they appear; ``inputs`` must be empty then. Else None.
        catalog: the folder of the shards.

        encoding: how rows become sequences.
        packing: how sequences become packs; ``max_sequences_per_pack`` must be set, since consumers rely on it.
        tokens_per_shard: a shard ends with the first piece of the input at which it has so many tokens.

        workers: how many processes tokenise; with 0 this one does.
        max_ahead_shards: the most published shards that some consumer has not completed; None for no limit.
        max_ahead_nbytes: the most bytes of such shards; None for no limit.
        consumers: how many training jobs will read the catalog.
        keep_recent: how many of the completed shards are kept, the newest; older ones are removed. None keeps all.
        ack_dir: the folder where consumers acknowledge; None for the one in the catalog.
        end_after: after how many seconds without anything new in ``watch`` the input ends; None waits for ``_END``.
        settle: how long, in seconds, a file in ``watch`` must have stayed the same to count as whole.
        max_bad_rows: how many rows of the whole catalog may be skipped; None for no limit. A share is judged before
            each shard is published, over all rows so far, and at the end of the input.
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
    max_bad_rows: BadRowLimit | None = None

    def __post_init__(self) -> None:
        for path, role in (
            (self.catalog, "a live catalog"),
            (self.watch, "a folder that is watched"),
            (self.ack_dir, "a folder of acknowledgements"),
        ):
            if path is not None:
                require_local(path, role)
        if (acks := self.ack_dir) and os.path.lexists(acks) and not os.path.isdir(acks):
            raise FormatError(f"{acks}: {describe(acks)} is here, expected a folder; name another one")
        if self.packing.max_sequences_per_pack is None:
            raise FormatError("max_sequences_per_pack must be set: the width of every batch of a live catalog")
        for name, value, minimum in (
            ("max_ahead_shards", self.max_ahead_shards, 1),
            ("max_ahead_nbytes", self.max_ahead_nbytes, 1),
            ("consumers", self.consumers, 1),
            ("keep_recent", self.keep_recent, 0),
        ):
            if value is not None and value < minimum:
                raise FormatError(f"{name} {value}, expected {minimum} or more, as a catalog could not be read again")
        if self.tokens_per_shard < self.packing.capacity:
            raise FormatError(
                f"--tokens-per-shard {self.tokens_per_shard} is below --seq-length {self.packing.capacity}: a shard"
                " would be less than a pack; raise it, a thousand packs are a good shard"
            )

    @property
    def from_stdin(self) -> bool:
        """Whether the input is a pipe on standard input."""
        return self.watch is None and list(self.inputs) == ["-"]

    @property
    def sharding(self) -> dict[str, int]:
        """What decides where a shard ends: the tokens of a shard, and the bytes of a piece of the input."""
        nbytes = self.tokens_per_shard * _BYTES_OF_A_TOKEN // _PIECES_OF_A_SHARD
        nbytes = min(max(nbytes, _MIN_PIECE_NBYTES), _MAX_PIECE_NBYTES)
        return {"tokens_per_shard": self.tokens_per_shard, "piece_nbytes": nbytes}

    def describe(self, encoder: RowEncoder, num_files: int) -> dict[str, Any]:
        """All options that decide over the bytes of the shards, as plain values."""
        source = "a growing folder" if self.watch is not None else "a pipe" if self.from_stdin else f"{num_files} files"
        described = {"packing": self.packing.describe(), "sharding": self.sharding, "input": {"input": source}}
        return encoder.describe() | described

    def limits(self, encoder: RowEncoder) -> Limits:
        """The limits that consumers may rely on."""
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


@dataclass(frozen=True, slots=True)
class Cursor(Record):
    """How much of the input has become shards.

    Attributes:
        position: a position in the input, up to which all is in shards.
        rows: how many rows lie before it.
        skipped: how many of these could not be used.
    """

    position: Position = field(default_factory=Position)
    rows: int = 0
    skipped: int = 0


def own_files(folder: str) -> list[str]:
    """The folder of a catalog, and the files in it, other than shards, that a producer may write."""
    return [folder, *(os.path.join(folder, name) for name in (PRODUCER, END, _INPUTS, _WORK + BUILDING))]


def produce(options: ProduceOptions, log: Callable[[str], None] = lambda line: None) -> str:
    """Make a catalog, or go on with one; see ``ProduceOptions``.

    Returns:
        A report for people: how many shards and rows there are, and what this job did.

    Raises:
        SFTIndexError: an input, a row or an option is bad, another producer is at work, or the catalog was made from
            other input or with other options.
        OSError: the disk says no.
    """
    begin = time.monotonic()
    if (kind := options.encoding.rows.kind) in ("preference", "kto"):
        raise FormatError(f"--row-kind {kind}: the shards of a catalog have no columns; make one with preprocess")
    catalog = Catalog(options.catalog)
    encoder = RowEncoder(replace(options.encoding, source=False))
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(_held(catalog))
        taken = stack.enter_context(contextlib.closing(TakenFiles(os.path.join(catalog.folder, _INPUTS))))
        files = [] if options.watch is not None or options.from_stdin else row_files(options.inputs)
        require_decided_rows(files, options.encoding.rows)
        state, cursor = _find_start(catalog, options, encoder, len(files))
        if not state.published:
            taken.clear()
        source = _input(options, files, taken, cursor.position.file, log)
        keeper = StateKeeper(catalog, state)
        backpressure = Backpressure(catalog, keeper, options.ack_dir, log)
        if is_complete := catalog.end() is not None:
            log(f"{catalog.folder}: complete already, with the same input and options")
            keeper.state = replace(state, **ENDED)
            backpressure.finish_removals()
            backpressure.free_completed()
        else:
            if state.published:
                log(f"{catalog.folder}: going on behind {state.published:,} shards, {cursor.rows:,} rows")
            sizes = total_bytes(files), total_bytes(files[cursor.position.file :])
            cursor = _Production(options, catalog, work, encoder, keeper, backpressure, sizes, log).run(source, cursor)
    shards, new = keeper.state.published, keeper.state.published - state.published
    lines = [
        f"{'found' if is_complete else 'wrote'} {catalog.folder}",
        f"shards          {shards:,} ({new:,} made by this run, {backpressure.removed:,} removed by it)",
        f"rows            {cursor.rows:,}",
        *([f"  skipped       {cursor.skipped:,}"] if cursor.skipped else []),
        f"seconds         {time.monotonic() - begin:.1f}",
    ]
    return joined(lines)


@contextlib.contextmanager
def _held(catalog: Catalog) -> Iterator[Building]:
    """Make the catalog's folder, if it is missing, and hold it for this producer alone.

    Yields the producer's building folder, for the parts of the shard in the making.

    Raises:
        FormatError: something else is in their place, or another producer is at work.
    """
    folder = resolve(catalog.folder, folder=True)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise FormatError(f"{catalog.folder}: {describe(folder)} is here, expected a folder; name another one")
    is_new = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        require_space(folder, 0, len(SUFFIXES) + 4)  # for a shard, and a part
        busy = f"{catalog.folder}: another producer is at work here now; wait for it, or name another folder"
        work = Building.take(os.path.join(catalog.folder, _WORK), durable=False, busy=busy)
        try:
            work.clear()
            work.begin({"work": "produce"})
            yield work
        finally:
            work.discard()
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # where it is not empty
                os.rmdir(folder)


def _input(
    options: ProduceOptions, files: Sequence[InputFile], taken: TakenFiles, first: int, log: Callable[[str], None]
) -> Files:
    """For each file of the input its pieces, from the file ``first`` on."""
    nbytes = options.sharding["piece_nbytes"]
    if options.from_stdin:
        return iter([standard_input(nbytes)][first:])
    if options.watch is None:
        return fixed_files(files, nbytes, taken, first)
    if os.path.realpath(options.watch) == os.path.realpath(options.catalog):
        raise FormatError(f"{options.catalog}: input and shards in one folder; name another one for the catalog")
    settle, end_after = options.settle, options.end_after
    return GrowingFolder(options.watch, nbytes, taken, settle=settle, end_after=end_after, log=log).files(first)


def _encode(encoding: EncodingOptions, item: tuple[PieceOrigin, Piece]) -> _Encoded:
    """Tokenise a piece; what workers do."""
    (origin, piece), info = item, PartInfo("", [])
    with comparing_all_texts(origin.behind.file == 0 and origin.first <= COMPARED_ROWS):
        encoded = encode_piece(encoding, piece)
    info.add(piece, encoded)
    return origin, info, encoded


class _Production:
    """The job that makes shards of the rest of the input.

    ``sizes`` are two numbers of bytes: of all files, and of those that this job reads. Both are 0 for other input.
    """

    def __init__(
        self,
        options: ProduceOptions,
        catalog: Catalog,
        work: Building,
        encoder: RowEncoder,
        keeper: StateKeeper,
        backpressure: Backpressure,
        sizes: tuple[int, int],
        log: Callable[[str], None],
    ) -> None:
        self._options, self._catalog, self._encoder, self._log = options, catalog, encoder, log
        self._keeper, self._backpressure, self._sizes = keeper, backpressure, sizes
        self._work = work
        # Bytes that were read count those of pieces that are in shards already, which are read again to compare them.
        self._begin, self._num_tokens, self._new_nbytes, self._read_nbytes = time.monotonic(), 0, 0, 0

    def run(self, source: Files, cursor: Cursor) -> Cursor:
        """Make shards until the input ends; returns the cursor behind the last of them."""
        encoding, folder = self._encoder.options, self._catalog.folder
        remember_encoder(encoding, self._encoder)
        pieces = feed(source, cursor.position, folder)
        report = CorpusReport(cursor.rows, cursor.skipped)
        with (
            self._keeper as keeper,
            Local(self._options.workers) as pool,
            contextlib.closing(
                pool.map_in_order(_encode, encoding, pieces, name_of="{0[0].path}:{0[0].first}".format)
            ) as results,
        ):
            self._backpressure.finish_removals()
            while (behind := self._make(results, report, cursor)) is not None:
                cursor = behind
            self._backpressure.free_completed()
            if not keeper.state.published:
                raise FormatError(
                    f"{folder}: no usable row in the input ({report.rows} rows, {report.skipped} skipped)"
                )
            keeper.end()
            self._catalog.write_end(keeper.state.published)
        return replace(cursor, rows=report.rows, skipped=report.skipped)

    def _make(self, results: Iterator[_Encoded | NotYet], report: CorpusReport, before: Cursor) -> Cursor | None:
        """Make the next shard; returns the cursor behind it, None where the input has no tokens left."""
        self._work.remove_parts()
        os.mkdir(self._work.parts)
        cursor, num_tokens, options = before, 0, self._options
        parts = PartsSoFar(report, options.encoding.on_bad_row, self._log, limit=options.max_bad_rows)
        while num_tokens < options.tokens_per_shard and (result := self._next(results, report)) is not None:
            origin, info, encoded = result
            path = os.path.join(self._work.parts, f"{len(parts.paths):032x}.part")
            write_part(path, info, [encoded])
            parts.add(MadePart(path, info, encoded.lengths.astype(np.uint32)), origin.path)
            self._require_fit(origin, encoded)
            part = PartsTable([path], np.array([0, len(encoded.lengths)]), info.mask_dtype)
            num_tokens += num_kept_tokens(encoded.lengths, options.packing, PartsReader(part))
            cursor = Cursor(origin.behind, report.rows, report.skipped)
            self._num_tokens += len(encoded.input_ids)
            self._new_nbytes += encoded.num_bytes
            self._read_nbytes = origin.nbytes
        parts.require_few_bad_rows(self._catalog.folder, at_end=True)
        if not num_tokens:
            return None
        # The packed shard takes about as many bytes as its parts, but for the tokens that packing leaves out.
        all_tokens = sum(int(each.sum()) for each in parts.lengths)
        self._backpressure.wait_for(sum(map(os.path.getsize, parts.paths)) * num_tokens // all_tokens)
        counts = {"rows": cursor.rows - before.rows, "skipped": cursor.skipped - before.skipped}
        self._publish(parts, {"fingerprint": cursor.position.fingerprint, **counts}, cursor)
        return cursor

    def _next(self, results: Iterator[_Encoded | NotYet], report: CorpusReport) -> _Encoded | None:
        """The next piece, tokenised, as soon as there is one; None at the end of the input."""
        so_far = f"{report.rows:,} rows so far"
        return self._keeper.wait_for(
            lambda: next(results, None), "waiting for input", self._log, lambda: so_far, longest=0.25
        )

    def _require_fit(self, origin: PieceOrigin, encoded: EncodedPiece) -> None:
        """SequenceError where a sequence of a piece is too long, and the options say that this is an error."""
        lengths, packing = encoded.lengths, self._options.packing
        if packing.overlong == "error" and (is_too_long := lengths > packing.longest_sequence).any():
            raise SequenceError(
                origin.path,
                origin.first,
                f"among the {encoded.rows} rows from this one on, {is_too_long.sum()} are longer than"
                f" {packing.longest_sequence} tokens, the longest has {lengths.max()}; choose --overlong drop, truncate"
                " or split, or a larger --seq-length",
            )

    def _publish(self, parts: PartsSoFar, sources: dict[str, Any], cursor: Cursor) -> None:
        """Pack the sequences of parts into the next shard; ``sources`` as of ``ToPack.of_parts``."""
        number = self._keeper.state.published
        prefix = self._catalog.shard_prefix(number)
        described = {"sharding": self._options.sharding, _CURSOR: cursor.to_json()}
        sequences = ToPack.of_parts(parts, self._encoder, prefix, sources, **described)
        with job_folder(prefix, {"work": "produce"}, overwrite=True) as job:
            made = make_packs(sequences, job, self._options.packing, work="produce", overwrite=True)
        report = PackReport.of(made.headers)
        self._keeper.update(published=number + 1, input=cursor.to_json())
        self._log(
            f"shard {number}: {report.packs:,} packs, {report.sequences:,} sequences, {report.tokens:,} tokens,"
            f" fill {100 * report.fill:.1f}%; {cursor.rows:,} rows so far, {self._pace()}"
        )

    def _pace(self) -> str:
        """The rate for a message; of files also how much of the input is read, and the seconds that remain."""
        seconds, (total, to_read) = max(time.monotonic() - self._begin, 1e-9), self._sizes
        rate = f"{self._num_tokens / seconds:,.0f} tokens/s"
        if not total or not self._new_nbytes:
            return rate
        rest = max(to_read - self._read_nbytes, 0)
        return f"{rate}, {100 * (1 - rest / total):.1f}% of the input, {rest * seconds / self._new_nbytes:,.0f} s left"


# ---- where a producer begins ----


def _find_start(
    catalog: Catalog, options: ProduceOptions, encoder: RowEncoder, num_files: int
) -> tuple[ProducerState, Cursor]:
    """The state and the cursor to go on from: of an empty folder, or of a catalog that is not finished.

    Shards that were published after the state was last written count too, since each holds its own cursor. While there
    is no shard, the options may differ from those before.

    Raises:
        FormatError: the folder holds shards that no producer made, or was made with other options; says which.
    """
    limits, described = options.limits(encoder), options.describe(encoder, num_files)
    state = catalog.producer()
    if state is None and ((present := catalog.present()) or catalog.end() is not None):
        raise FormatError(
            f"{catalog.folder}: {len(present)} shards are here, and no _producer.json that says how they were made;"
            " name another folder"
        )
    if state is None or (not state.published and not catalog.is_published(0) and catalog.end() is None):
        beat = 0 if state is None else state.beat
        return ProducerState(limits, beat, options=described, input=Cursor().to_json()), Cursor()
    differs = noted_differences(state.options, described | {"packing": asdict(options.packing)})
    if state.limits.token_dtype != limits.token_dtype:
        differs.append(f"token dtype was {state.limits.token_dtype}, is {limits.token_dtype}")
    if differs:
        raise FormatError(
            f"{catalog.folder}: this catalog was begun with other options: {'; '.join(differs)}; give the same ones to"
            " go on with it, or name another folder"
        )
    cursor = Cursor.parse(os.path.join(catalog.folder, PRODUCER), state.input, f"{_CURSOR}.")
    published = state.published
    while True:
        paths = ShardPaths.of(catalog.shard_prefix(published))
        finish_interrupted(paths)  # of a producer that was killed while it renamed
        if not catalog.is_published(published):
            break
        metadata = read_header(paths).metadata
        if "recovered" in metadata:
            raise FormatError(
                f"{paths.seq_idx}: recovered from an interrupted build, so it may lack packs of rows that it counts;"
                f" remove the files {paths.prefix}.*, and they are made anew"
            )
        if not isinstance(content := metadata.get(_CURSOR), dict):
            raise FormatError(
                f"{paths.seq_idx}: not a shard that this producer made, its header has no cursor; name another folder"
            )
        cursor = Cursor.parse(paths.seq_idx, content, f"{_CURSOR}.")
        published += 1
    state = ProducerState(limits, state.beat, "running", None, published, state.freed, described, cursor.to_json())
    return state, cursor
