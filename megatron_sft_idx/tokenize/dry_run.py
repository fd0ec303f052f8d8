"""``preprocess --dry-run``: preview a job's result from the first rows of every input file or from all rows."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs import InputFile, iter_pieces, total_bytes
from megatron_sft_idx.chat.types import EncodedItem
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.lines import counted
from megatron_sft_idx.packs.conditions import Condition, bind_all, holding, whole_pairs
from megatron_sft_idx.packs.run_media import BlobsInMemory, RunMedia
from megatron_sft_idx.packs.source_names import shortest_names
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.tokenize.bad_rows import TooManyBadRowsError
from megatron_sft_idx.tokenize.begin import Job, PreprocessOptions
from megatron_sft_idx.tokenize.column_weights import wrong_weight
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input, read_pieces
from megatron_sft_idx.tokenize.encoding import EncodedPiece, EncodingOptions, RowEncoder, items_of
from megatron_sft_idx.tokenize.local import Local, available_cpus
from megatron_sft_idx.tokenize.parts import MadePart, PartInfo, PartsSoFar, encode_piece, remember_encoder
from megatron_sft_idx.tokenize.plan import chosen_where, find_overlong, plan_packs
from megatron_sft_idx.tokenize.report import CorpusReport, named_rows
from megatron_sft_idx.tokenize.row_files import look_at_rows
from megatron_sft_idx.tokenize.selection import select_rows

# Bytes of first rows, in total and maximum per file: about a second of tokenization.
_SAMPLE_NBYTES, _MAX_FILE_NBYTES = 1 << 22, 1 << 18
# Number of bad rows to show of the first rows; of all rows, as many as a report lists.
_MAX_SHOWN = 20

# Stored like a column, under an impossible name: the smallest and largest nonzero mask value of each sequence.
_EXTREMES = "extremes of the mask"


class Preview(NamedTuple):
    """The result of a dry run.

    Attributes:
        lines: a description in lines for people.
        would_stop: whether the job would stop with an error.
        first: the first sequence; None if there is none.
        decode: the function that decodes its ids.
    """

    lines: list[str]
    would_stop: bool
    first: FirstSequence | None
    decode: Callable[[Sequence[int]], str]


class FirstSequence(NamedTuple):
    """The first sequence of a job.

    Attributes:
        ids: its ids, [length].
        loss_mask: its label-aligned mask, [length].
        media: positions of its images and recordings.
    """

    ids: NDArray[Any]
    loss_mask: NDArray[Any]
    media: Sequence[EncodedItem] = ()


class _Looked(NamedTuple):
    """The result for the rows of a stretch.

    Attributes:
        stretch: without its pieces, unless a number of rows is taken.
        part: the part that these rows would make; it is not written.
        trained_tokens: number of trained tokens.
        first: the first sequence; None if there is none.
        columns: values of the requested columns, by name; rows in ``source`` are counted from the first of the stretch.
        media: positions of images and audio in the sequences, without their files; None if none are read.
    """

    stretch: Stretch
    part: MadePart
    trained_tokens: int
    first: FirstSequence | None
    columns: Mapping[str, NDArray[Any]]
    media: RunMedia | None


def preview(options: PreprocessOptions, *, full: bool = False) -> Preview:
    """Encode the first rows of every file, and report what would stop the job. Writes nothing.

    Args:
        options: options of the job.
        full: encode all rows, on this machine; this finds every bad row, and selects rows and plans packs like the job.

    Raises:
        SFTIndexError: an input or an option is unusable.
    """
    files, options = options.expanded()
    look_at_rows(files, replace(options.encoding, on_bad_row="skip"), options.max_rows)
    content = full and options.encoding.content
    encoder = RowEncoder(replace(options.encoding_of(files), on_bad_row="skip", content=content))
    job = Job(options, files, encoder, Cutting.of(files), lambda line: None)
    by_file = [PartsSoFar(CorpusReport(), "skip") for _ in files]
    trained, first, missing = [0] * len(files), None, options.max_rows
    names = tuple(_needed(options, encoder.options) - {"pair"})
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    media: list[RunMedia] = []
    shared = encoder.options, job.cutting, missing, names
    stretches, workers, total, log_interval = _first_rows(files), 0, 0, 0
    if full:
        workers = available_cpus() if options.workers is None else options.workers
        stretches, total, log_interval = cut_input(files, job.cutting), total_bytes(files), options.log_interval
    remember_encoder(encoder.options, encoder)
    try:
        with (
            Local(workers) as pool,
            Progress("looking", total, unit="B", log_interval=log_interval, items="rows") as progress,
            closing(pool.map_in_order(_look, shared, stretches, name_of=str)) as results,
        ):
            for each in results:
                looked, number = each, each.stretch.number
                if missing is not None:
                    if not looked.part.info.has_rows_for(missing):
                        looked = _look((encoder.options, job.cutting, missing, names), looked.stretch)
                    missing -= looked.part.info.usable
                info = looked.part.info
                progress.update(info.num_bytes, info.rows)
                parts = by_file[number]
                before = np.array([0, parts.lines[0]], np.uint32)
                for name, values in looked.columns.items():
                    columns[name].append(values + before if name == "source" else values)
                media += [] if looked.media is None else [looked.media]
                parts.add(looked.part, files[number].path, first=looked.stretch.before(parts.lines[0]))
                trained[number] += looked.trained_tokens
                first = first or looked.first
                if missing == 0:
                    break
    finally:
        remember_encoder(None)
    reports, lengths = [each.report for each in by_file], [_end_to_end(each.lengths) for each in by_file]
    which = "all rows" if full else "first rows"
    lines = [line for each in zip(files, reports, lengths, trained, strict=True) for line in _file_lines(which, *each)]
    read = _joined_report(by_file)
    lines += _bad_row_lines(read, full=full)
    lines += read.note_lines()
    lines += [f"kept field      {name}, {dtype}" for name, dtype in options.encoding.keep_fields.items()]
    reasons: list[str] = []
    lines += _outlook(options, read, _Sequences.of(options, files, lengths, columns, media), reasons, full=full)
    reasons += _in_the_way(job)
    lines += [f"would stop      {reason}" for reason in dict.fromkeys(reasons)]
    return Preview(lines, bool(reasons), first, encoder.tokenizer.decode)


def _joined_report(by_file: Sequence[PartsSoFar]) -> CorpusReport:
    """Return the counts of all files."""
    joined, notes = CorpusReport(), Counter[str]()
    for parts in by_file:
        joined.rows += parts.report.rows
        joined.skipped += parts.report.skipped
        joined.bad_rows += parts.report.bad_rows
        joined.first_rows = parts.report.first_rows | joined.first_rows
        notes.update(parts.notes)
    joined.notes = dict(sorted(notes.items()))
    return joined


def _needed(options: PreprocessOptions, encoding: EncodingOptions) -> set[str]:
    """Return the columns needed to name and select sequences, and to check weights of masks."""
    needed = {Condition.parse(text).column for text in options.packing.where}
    needed |= {"source"} & {*encoding.columns}
    if encoding.content:
        needed.add("content")
    if options.packing.loss_weight_column is not None:
        needed |= {options.packing.loss_weight_column, _EXTREMES}
    return needed


def _in_the_way(job: Job) -> Iterator[str]:
    """Yield reasons why the job could not write at its prefix."""
    options = job.options
    if not options.prefix:
        return
    encoder = copy.copy(job.encoder)
    # The dry run itself skips bad rows, and hashes none.
    given = options.encoding
    encoder.options = replace(encoder.options, on_bad_row=given.on_bad_row, content=given.content)
    job = job._replace(encoder=encoder)
    checks: list[Callable[[], Any]] = [
        partial(options.check_outputs, job.files),
        job.check_outputs,
    ]
    for check in checks:
        try:
            check()
        except (SFTIndexError, OSError) as error:
            yield str(error)


def _end_to_end(lengths: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *lengths])


def _file_lines(
    which: str, file: InputFile, report: CorpusReport, lengths: NDArray[np.int64], trained_tokens: int
) -> Iterator[str]:
    """Yield lines for people about the result of ``which`` rows of a file."""
    bad = f" ({report.skipped:,} cannot be used)" if report.skipped else ""
    yield f"input           {file.path}: {file.kind}, {file.num_bytes:,} bytes"
    yield (
        f"  {which:<14}{report.rows:,}{bad}: {counted(len(lengths), 'sequence')}, {counted(lengths.sum(), 'token')},"
        f" {trained_tokens:,} trained"
    )
    if len(lengths):
        yield f"  lengths       {lengths.min():,} to {lengths.max():,}"


def _bad_row_lines(read: CorpusReport, *, full: bool) -> Iterator[str]:
    """Yield lines for people about the unusable rows."""
    shown = read.bad_rows if full else read.bad_rows[:_MAX_SHOWN]
    for error in shown:
        yield f"bad row         {error}"
    if read.skipped > len(shown):
        remedy = "only the first ones are listed" if full else "--full lists all bad rows of the input"
        yield f"bad row         {counted(read.skipped - len(shown), 'more bad row')}; {remedy}"


def _first_rows(files: Sequence[InputFile]) -> Iterator[Stretch]:
    """Yield a stretch of each file, with one piece of its first rows."""
    nbytes = min(_SAMPLE_NBYTES // len(files), _MAX_FILE_NBYTES)
    for number, file in enumerate(files):
        if dealt := tuple(islice(iter_pieces([file], piece_nbytes=max(nbytes, 1)), 1)):
            yield Stretch(file, file.path, number, dealt=dealt)


def _look(shared: tuple[EncodingOptions, Cutting, int | None, Sequence[str]], stretch: Stretch) -> _Looked:
    """The task that encodes a stretch, up to a number of usable rows. Keeps only the tokens of the first sequence."""
    encoding, cutting, max_rows, names = shared
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    info, lengths, trained_tokens, first = PartInfo("", []), [np.empty(0, np.uint32)], 0, None
    media: list[RunMedia] = []
    for piece in read_pieces(stretch, cutting):
        missing = None if max_rows is None else max_rows - info.usable
        encoded = encode_piece(encoding, piece, stretch.file.path, stretch.number, missing)
        info.add(piece, encoded)
        lengths.append(encoded.lengths.astype(np.uint32))
        if "source" in columns:
            encoded.columns["source"][:, 0] = stretch.number
        for name, values in columns.items():
            values.append(_extremes(encoded) if name == _EXTREMES else encoded.columns[name])
        # As labels, because nothing predicts a first token.
        labels = np.append(encoded.loss_mask, encoded.loss_mask.dtype.type(0))[1:]
        labels[np.cumsum(encoded.lengths) - 1] = 0
        trained_tokens += int(np.count_nonzero(labels))
        media += [_places_of(encoded)] if encoding.processor is not None else []
        if first is None and len(encoded.lengths):
            end = encoded.lengths[0]
            items = encoded.media[0] if encoded.media else ()
            first = FirstSequence(encoded.input_ids[:end].copy(), labels[:end].copy(), items)
        if info.usable == max_rows:
            info.max_rows = max_rows
            break
    part = MadePart("", info, np.concatenate(lengths))
    # The pieces of the last stretch may be needed again.
    stretch = stretch if max_rows is not None else replace(stretch, dealt=())
    joined = {name: np.concatenate(values) for name, values in columns.items() if values}
    return _Looked(stretch, part, trained_tokens, first, joined, RunMedia.joined(media) if media else None)


def _places_of(encoded: EncodedPiece) -> RunMedia:
    """Return the positions of images and audio in the sequences of a piece, without their files."""
    counts, items = items_of(encoded.media)
    return RunMedia(counts, items._replace(blobs=np.zeros_like(items.blobs)), BlobsInMemory())


def _extremes(encoded: EncodedPiece) -> NDArray[np.float32]:
    """Return the smallest and largest nonzero mask value of each sequence, or 0: float32 [sequences, 2].

    A weight is valid for a mask if it is valid for these two.
    """
    if not len(encoded.lengths):
        return np.empty((0, 2), np.float32)
    starts, mask = np.cumsum(encoded.lengths) - encoded.lengths, encoded.loss_mask.astype(np.float32)
    largest = np.maximum.reduceat(mask, starts)
    least = np.minimum.reduceat(np.where(mask == 0, np.float32(np.inf), mask), starts)
    return np.stack([np.minimum(least, largest), largest], 1)


class _Sequences(NamedTuple):
    """All encoded sequences, in the order of the input.

    Attributes:
        files: files of the input.
        numbers: number of each sequence's file, int64 [sequences].
        lengths: number of tokens of each, int64 [sequences].
        columns: values of the needed columns, by name.
        kept: the sequences for which all conditions hold, bool [sequences]; None without conditions.
        media: positions of their images and audio; None if none are read.
    """

    files: Sequence[InputFile]
    numbers: NDArray[np.int64]
    lengths: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]
    kept: NDArray[np.bool_] | None
    media: RunMedia | None = None

    @classmethod
    def of(
        cls,
        options: PreprocessOptions,
        files: Sequence[InputFile],
        lengths: Sequence[NDArray[np.int64]],
        parts: Mapping[str, Sequence[NDArray[Any]]],
        media: Sequence[RunMedia],
    ) -> _Sequences:
        """Combine the sequences of these files, with their lengths by file and the parts of columns and of media."""
        numbers, every = np.repeat(np.arange(len(files)), [*map(len, lengths)]), _end_to_end(lengths)
        columns = {name: np.concatenate(some) for name, some in parts.items() if some}
        kept = None
        if options.packing.where:
            tests = bind_all(map(Condition.parse, options.packing.where), options.column_specs(files), "--where")
            places = np.arange(len(every))
            pairs = np.stack([places // 2, places % 2], 1).astype(np.uint32)
            kept = holding(tests if len(every) else [], {**columns, "pair": pairs}, len(every))
            kept = whole_pairs(kept) if options.encoding.rows.kind == "preference" else kept
        return cls(files, numbers, every, columns, kept, RunMedia.joined(media) if media else None)

    def of_conditions(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequences among these for which all conditions hold."""
        return chosen if self.kept is None else chosen[self.kept[chosen]]

    def require_weights(self, column: str, chosen: NDArray[np.int64]) -> None:
        """See ``SequenceReader.weigh_by``: FormatError if the mask of a sequence cannot be multiplied by a column."""
        masks, weights = self.columns[_EXTREMES][chosen], self.columns[column][chosen]
        if (wrong := wrong_weight(masks.reshape(-1), np.repeat(weights, 2))) is None:
            return
        at, what = wrong
        raise FormatError(f"{self.place_of(int(chosen[at // 2]))}: --loss-weight-column {column}: {what}")

    def place_of(self, number: int) -> str:
        """Return the input line from which a sequence was made, if the column ``source`` is written."""
        if "source" not in self.columns:
            return f"sequence {number}"
        file, row = self.columns["source"][number].tolist()
        return f"{shortest_names([each.path for each in self.files])[file]}:{row + 1}"


def _outlook(
    options: PreprocessOptions, read: CorpusReport, sequences: _Sequences, reasons: list[str], *, full: bool
) -> Iterator[str]:
    """Yield lines for people about the packs, if all rows were encoded. Reasons to stop are added to ``reasons``."""
    if (kept := sequences.kept) is not None:
        yield f"left out        {int((~kept).sum()):,} of {counted(len(kept), 'sequence')} left out by --where"
    if read.skipped and options.encoding.on_bad_row == "error":
        rows = counted(read.skipped, "row")
        reasons.append(f"{rows} cannot be used; correct the input, or pass --on-bad-row skip")
    elif options.max_bad_rows is not None:
        try:
            options.max_bad_rows.require(read, read.rows if full else None, "the input")
        except TooManyBadRowsError as error:
            reasons.append(str(error))
    if full and not len(sequences.lengths) and not reasons:
        reasons.append(str(read.no_usable_row(sequences.files[0].path)))
    if full and len(sequences.lengths):
        try:
            yield from _planned(options, sequences, reasons)
        except SFTIndexError as error:
            reasons.append(str(error))
    elif not full:
        reasons += _first_reasons(options, sequences)


def _first_reasons(options: PreprocessOptions, sequences: _Sequences) -> Iterator[str]:
    """Yield reasons why a job would stop at the first rows."""
    packing = options.packing
    chosen = sequences.of_conditions(np.arange(len(sequences.lengths)))
    # If rows are selected, it is unknown which ones.
    selects = packing.selection is not None and packing.selection.of_rows
    if packing.loss_weight_column is not None and len(chosen) and not selects:
        try:
            sequences.require_weights(packing.loss_weight_column, chosen)
        except FormatError as error:
            yield str(error)
    pairs = chosen // 2 if options.encoding.rows.kind == "preference" else None
    try:
        find_overlong(sequences.lengths[chosen], pairs, packing, _name_of(options), sequences.place_of, chosen)
    except SFTIndexError as error:
        yield str(error)


def _name_of(options: PreprocessOptions) -> str:
    """Return the name of the sequences in errors."""
    return options.prefix or "the output"


def _planned(options: PreprocessOptions, sequences: _Sequences, reasons: list[str]) -> Iterator[str]:
    """Yield lines about the packs of all rows, planned like ``make_packs``. Reasons to stop are added to ``reasons``.

    Raises:
        FormatError: no row is selected.
    """
    packing, name, lengths = options.packing, _name_of(options), sequences.lengths
    shards = [(np.arange(len(lengths)), options.output_shards)]
    if packing.selection is not None and packing.selection.of_rows:
        selected = select_rows(sequences.columns["content"], sequences.numbers, packing.selection, packing.seed)
        shards = [(selected.train, options.output_shards)] + [(selected.valid, 1)] * bool(len(selected.valid))
    if packing.loss_weight_column is not None:
        every = np.unique(np.concatenate([numbers for numbers, _ in shards]))
        try:
            sequences.require_weights(packing.loss_weight_column, sequences.of_conditions(every))
        except FormatError as error:
            reasons.append(str(error))
    pairs = np.arange(len(lengths)) // 2 if options.encoding.rows.kind == "preference" else None
    for label, (numbers, count) in zip(("packs", "valid packs"), shards, strict=False):
        try:
            chosen = numbers if sequences.kept is None else chosen_where(numbers, sequences.kept, packing, name)
            packed = plan_packs(
                lengths,
                packing,
                shards=count,
                name=name,
                groups=pairs,
                chosen=chosen,
                media=sequences.media,
                place_of=sequences.place_of,
            )
        except SFTIndexError as error:
            reasons.append(str(error))
            continue
        # Sequences without trained tokens are unknown here.
        if packing.selection is None or not packing.selection.drop_untrained:
            plan = packed.plan
            yield f"{label:<15} {plan.num_packs:,} ({plan.method}), {100 * plan.fill:.3f}% filled"
        if packed.overlong:
            overlong = counted(packed.metadata["overlong_sequences"], "sequence")
            yield f"  overlong      {overlong}, the longest: {named_rows(packed.overlong)}"
        if parted := packed.metadata.get("dropped_media_sequences"):
            yield f"  dropped       {counted(parted, 'sequence')}: the cut would go through an image or recording"
