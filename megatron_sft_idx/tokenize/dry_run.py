"""``preprocess --dry-run``: what a job would make, from the first rows of every file of the input or from all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs import InputFile, iter_pieces, total_bytes
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.packs.conditions import BoundCondition, Condition, bind_all, holding, whole_pairs
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.tokenize.bad_rows import TooManyBadRowsError
from megatron_sft_idx.tokenize.begin import Job, PreprocessOptions
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input, read_pieces
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.tokenize.local import Local, available_cpus
from megatron_sft_idx.tokenize.parts import MadePart, PartInfo, PartsSoFar, encode_piece, remember_encoder
from megatron_sft_idx.tokenize.plan import plan_packs
from megatron_sft_idx.tokenize.report import CorpusReport
from megatron_sft_idx.tokenize.row_files import look_at_rows

# Bytes of first rows, of all files together and at most of one: about a second of tokenising.
_SAMPLE_NBYTES, _MAX_FILE_NBYTES = 1 << 22, 1 << 18
# Bad rows that are shown.
_MAX_SHOWN = 20

# Ids of a sequence, and its label-aligned mask.
Marked: TypeAlias = tuple[NDArray[Any], NDArray[Any]]


class _Looked(NamedTuple):
    """What the rows of a stretch become.

    Attributes:
        stretch: without its pieces, unless a number of rows is taken.
        part: what would be the part of these rows; it is not written.
        trained_tokens: how many of the tokens are trained on.
        first: ids of the first sequence, and its label-aligned mask; None where there is no sequence.
        columns: values of the columns that conditions are on, by name.
    """

    stretch: Stretch
    part: MadePart
    trained_tokens: int
    first: Marked | None
    columns: Mapping[str, NDArray[Any]]


def preview(
    options: PreprocessOptions, *, full: bool = False
) -> tuple[list[str], Marked | None, Callable[[Sequence[int]], str]]:
    """Encode the first rows of every file, and say what would stop the job; writes nothing.

    Args:
        options: of the job.
        full: encode all rows, on this machine, which finds every bad row, and plan the packs.

    Returns:
        What the rows become, in lines for people; the first sequence, None where there is none; and the function that
        decodes its ids.

    Raises:
        SFTIndexError: an input or an option that cannot be used.
    """
    files, options = options.expanded()
    look_at_rows(files, options.encoding.rows, options.max_rows)
    encoder = RowEncoder(replace(options.encoding_of(files), on_bad_row="skip", content=False))
    job = Job(options, files, encoder, Cutting.of(files), lambda line: None)
    by_file = [PartsSoFar(CorpusReport(), "skip") for _ in files]
    trained, first, missing = [0] * len(files), None, options.max_rows
    conditions = bind_all(map(Condition.parse, options.packing.where), options.column_specs(files), "--where")
    names = tuple({condition.column for condition in conditions} - {"pair"})
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
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
                parts.add(looked.part, files[number].path, first=looked.stretch.before(parts.lines[0]))
                trained[number] += looked.trained_tokens
                for name, values in looked.columns.items():
                    columns[name].append(values)
                first = first or looked.first
                if missing == 0:
                    break
    finally:
        remember_encoder(None)
    reports, lengths = [each.report for each in by_file], [_end_to_end(each.lengths) for each in by_file]
    which = "all rows" if full else "first rows"
    lines = [line for each in zip(files, reports, lengths, trained, strict=True) for line in _file_lines(which, *each)]
    bad_rows = [error for report in reports for error in report.bad_rows]
    lines += [f"bad row         {error}" for error in bad_rows[:_MAX_SHOWN]]
    rows, skipped = sum(report.rows for report in reports), sum(report.skipped for report in reports)
    read = CorpusReport(rows, skipped, bad_rows)
    lines += [f"kept field      {name}, {dtype}" for name, dtype in options.encoding.keep_fields.items()]
    taken = _end_to_end(lengths)
    if conditions:
        kept = _kept(conditions, columns, len(taken), is_pairs=options.encoding.rows.kind == "preference")
        lines.append(f"left out        {int((~kept).sum()):,} of {len(kept):,} sequences left out by --where")
        taken = taken[kept]
    lines += _outlook(options, read, taken, full=full)
    lines += [f"would stop      {reason}" for reason in _in_the_way(job)]
    return lines, first, encoder.tokenizer.decode


def _kept(
    conditions: Sequence[BoundCondition], columns: Mapping[str, Sequence[NDArray[Any]]], count: int, *, is_pairs: bool
) -> NDArray[np.bool_]:
    """Which sequences all conditions hold for, bool [count]; ``columns`` are values by name, end to end."""
    if not count:
        return np.ones(0, bool)
    numbers, values = np.arange(count), {name: np.concatenate(some) for name, some in columns.items()}
    values["pair"] = np.stack([numbers // 2, numbers % 2], 1).astype(np.uint32)
    kept = holding(conditions, values, count)
    return whole_pairs(kept) if is_pairs else kept


def _in_the_way(job: Job) -> Iterator[str]:
    """Why the job could not write at its prefix."""
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
    """What ``which`` rows of a file become, in lines for people."""
    bad = f" ({report.skipped:,} cannot be used)" if report.skipped else ""
    yield f"input           {file.path}: {file.kind}, {file.num_bytes:,} bytes"
    yield (
        f"  {which:<14}{report.rows:,}{bad}: {len(lengths):,} sequences, {lengths.sum():,} tokens,"
        f" {trained_tokens:,} trained"
    )
    if len(lengths):
        yield f"  lengths       {lengths.min():,} to {lengths.max():,}"


def _first_rows(files: Sequence[InputFile]) -> Iterator[Stretch]:
    """A stretch of each file, of one piece with its first rows."""
    nbytes = min(_SAMPLE_NBYTES // len(files), _MAX_FILE_NBYTES)
    for number, file in enumerate(files):
        if dealt := tuple(islice(iter_pieces([file], piece_nbytes=max(nbytes, 1)), 1)):
            yield Stretch(file, file.path, number, dealt=dealt)


def _look(shared: tuple[EncodingOptions, Cutting, int | None, Sequence[str]], stretch: Stretch) -> _Looked:
    """The task that encodes a stretch, up to so many usable rows; it keeps the tokens of the first sequence alone."""
    encoding, cutting, max_rows, names = shared
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    info, lengths, trained_tokens, first = PartInfo("", []), [np.empty(0, np.uint32)], 0, None
    for piece in read_pieces(stretch, cutting):
        encoded = encode_piece(encoding, piece, stretch.number, None if max_rows is None else max_rows - info.usable)
        info.add(piece, encoded)
        lengths.append(encoded.lengths.astype(np.uint32))
        if "source" in columns:
            encoded.columns["source"][:, 0] = stretch.number
        for name, values in columns.items():
            values.append(encoded.columns[name])
        # As labels: nothing predicts a first token.
        labels = np.append(encoded.loss_mask, encoded.loss_mask.dtype.type(0))[1:]
        labels[np.cumsum(encoded.lengths) - 1] = 0
        trained_tokens += int(np.count_nonzero(labels))
        if first is None and len(encoded.lengths):
            end = encoded.lengths[0]
            first = encoded.input_ids[:end].copy(), labels[:end].copy()
        if info.usable == max_rows:
            info.max_rows = max_rows
            break
    part = MadePart("", info, np.concatenate(lengths))
    # The pieces of the last stretch may be needed again.
    stretch = stretch if max_rows is not None else replace(stretch, dealt=())
    joined = {name: np.concatenate(values) for name, values in columns.items() if values}
    return _Looked(stretch, part, trained_tokens, first, joined)


def _outlook(
    options: PreprocessOptions, read: CorpusReport, lengths: NDArray[np.int64], *, full: bool
) -> Iterator[str]:
    """In lines for people: the packs, where all rows were encoded, and the reasons why the job would stop."""
    reasons: list[str] = []
    if read.skipped and options.encoding.on_bad_row == "error":
        reasons.append(f"{read.skipped:,} rows cannot be used; --on-bad-row skip goes on without them")
    elif options.max_bad_rows is not None:
        try:
            options.max_bad_rows.require(read, read.rows if full else None, "the input")
        except TooManyBadRowsError as error:
            reasons.append(str(error))
    if not full or not len(lengths):
        longest = options.packing.longest_sequence
        if (overlong := int((lengths > longest).sum())) and options.packing.overlong == "error":
            reasons.append(
                f"{overlong:,} of {len(lengths):,} sequences are longer than {longest:,} tokens; choose --overlong"
                " drop, truncate or split, or a larger --seq-length"
            )
    elif options.packing.selection is None:
        pairs = np.arange(len(lengths)) // 2 if options.encoding.rows.kind == "preference" else None
        try:
            shards, prefix = options.output_shards, options.prefix or "the output"
            plan = plan_packs(lengths, options.packing, shards=shards, name=prefix, groups=pairs).plan
            yield f"packs           {plan.num_packs:,} ({plan.method}), {100 * plan.fill:.3f}% filled"
        except SFTIndexError as error:
            reasons.append(str(error))
    yield from (f"would stop      {reason}" for reason in reasons)
