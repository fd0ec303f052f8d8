"""``preprocess --dry-run``: what a job would make, from the first rows of every file of the input or from all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs import InputFile, expand_inputs, iter_pieces, total_bytes
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import check_free
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.tokenize.begin import PartsFolder, PreprocessOptions
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input, read_pieces
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.tokenize.gather import output_prefixes
from megatron_sft_idx.tokenize.local import Local, available_cpus
from megatron_sft_idx.tokenize.parts import encode_piece, remember_encoder
from megatron_sft_idx.tokenize.plan import plan_packs

# Bytes of first rows, of all files together and at most of one: about a second of tokenising.
_SAMPLE_NBYTES, _MAX_FILE_NBYTES = 1 << 22, 1 << 18
# Bad rows that are shown.
_MAX_SHOWN = 20

# Ids of a sequence, and its label-aligned mask.
Marked: TypeAlias = tuple[NDArray[Any], NDArray[Any]]


@dataclass(slots=True)
class _FilePreview:
    """What some or all rows of one file become.

    Attributes:
        number: of the file.
        num_bytes: bytes of the file that hold the rows.
        rows: how many, bad ones included.
        bad: how many cannot be used.
        bad_rows: messages of the first of these.
        lengths: tokens of each sequence, int64 [sequences].
        trained_tokens: how many of these tokens are trained on.
        first: ids of the first sequence, and its label-aligned mask; None where there is no sequence.
    """

    number: int
    num_bytes: int = 0
    rows: int = 0
    bad: int = 0
    bad_rows: list[str] = field(default_factory=list)
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    trained_tokens: int = 0
    first: Marked | None = None

    @classmethod
    def of(cls, previews: Sequence[_FilePreview]) -> _FilePreview:
        """The previews of consecutive rows of one file as one."""
        nbytes, rows, bad, trained = (
            sum(getattr(each, name) for each in previews) for name in ("num_bytes", "rows", "bad", "trained_tokens")
        )
        bad_rows = [error for each in previews for error in each.bad_rows][:_MAX_SHOWN]
        first = next((each.first for each in previews if each.first), None)
        lengths = np.concatenate([each.lengths for each in previews])
        return cls(previews[0].number, nbytes, rows, bad, bad_rows, lengths, trained, first)


def preview(
    options: PreprocessOptions, *, full: bool = False
) -> tuple[list[str], Marked | None, Callable[[Sequence[int]], str]]:
    """Check all that a job needs, and encode the first rows of every file; writes nothing.

    Args:
        options: of the job.
        full: encode all rows, on this machine, which finds every bad row, and plan the packs.

    Returns:
        What the rows become, in lines for people; the first sequence, None where there is none; and the function that
        decodes its ids.

    Raises:
        SFTIndexError: an input or an option that cannot be used, or files at the prefix that may not be replaced.
    """
    files = expand_inputs(options.inputs)
    options.require_outputs(files)
    options = replace(options, packing=options.packing_of(files))
    encoder = RowEncoder(replace(options.encoding_of(files), on_bad_row="skip", content=False))
    for prefix in output_prefixes(options.prefix, options.output_shards, valid=options.has_valid):
        check_free(ShardPaths.of(prefix).with_columns(encoder.options.columns), overwrite=options.overwrite)
    PartsFolder.of(options.prefix).check_is_ours()
    by_file = [[_FilePreview(number)] for number in range(len(files))]
    shared = encoder.options, (cutting := Cutting.of(files))
    stretches, workers, total, log_interval = _first_rows(files), 0, 0, 0
    if full:
        workers = available_cpus() if options.workers is None else options.workers
        stretches, total, log_interval = cut_input(files, cutting), total_bytes(files), options.log_interval
    remember_encoder(encoder.options, encoder)
    try:
        with (
            Local(workers) as pool,
            Progress("looking", total, unit="B", log_interval=log_interval, items="rows") as progress,
        ):
            for preview in pool.map_in_order(_preview_stretch, shared, stretches, name_of=str):
                progress.update(preview.num_bytes, preview.rows)
                by_file[preview.number].append(preview)
    finally:
        remember_encoder(None)
    previews = [_FilePreview.of(each) for each in by_file]
    lines = [line for file, each in zip(files, previews, strict=True) for line in _file_lines(file, each, full=full)]
    bad_rows = [error for each in previews for error in each.bad_rows]
    lines += [f"bad row         {error}" for error in bad_rows[:_MAX_SHOWN]]
    lines += _outlook(options, previews, full=full)
    return lines, next((each.first for each in previews if each.first), None), encoder.tokenizer.decode


def _file_lines(file: InputFile, preview: _FilePreview, *, full: bool) -> Iterator[str]:
    """The preview of a file in lines for people."""
    which, lengths = "all rows" if full else "first rows", preview.lengths
    bad = f" ({preview.bad:,} cannot be used)" if preview.bad else ""
    yield f"input           {file.path}: {file.kind}, {file.num_bytes:,} bytes"
    yield (
        f"  {which:<14}{preview.rows:,}{bad}: {len(lengths):,} sequences, {lengths.sum():,} tokens,"
        f" {preview.trained_tokens:,} trained"
    )
    if len(lengths):
        yield f"  lengths       {lengths.min():,} to {lengths.max():,}"


def _first_rows(files: Sequence[InputFile]) -> Iterator[Stretch]:
    """A stretch of each file, of one piece with its first rows."""
    nbytes = min(_SAMPLE_NBYTES // len(files), _MAX_FILE_NBYTES)
    for number, file in enumerate(files):
        if dealt := tuple(islice(iter_pieces([file], piece_nbytes=max(nbytes, 1)), 1)):
            yield Stretch(file, file.path, number, dealt=dealt)


def _preview_stretch(shared: tuple[EncodingOptions, Cutting], stretch: Stretch) -> _FilePreview:
    """The task that encodes a stretch and keeps no tokens but those of the first sequence."""
    encoding, cutting = shared
    previews = [_FilePreview(stretch.number)]
    for piece in read_pieces(stretch, cutting):
        encoded = encode_piece(encoding, piece, stretch.number)
        bad, lengths = len(encoded.bad_rows), encoded.lengths
        preview = _FilePreview(stretch.number, piece.num_bytes, encoded.rows, bad, lengths=lengths)
        preview.bad_rows = [str(error) for error in encoded.bad_rows[:_MAX_SHOWN]]
        # As labels: nothing predicts a first token.
        labels = np.append(encoded.loss_mask, encoded.loss_mask.dtype.type(0))[1:]
        labels[np.cumsum(lengths) - 1] = 0
        preview.trained_tokens = int(np.count_nonzero(labels))
        if len(lengths):
            preview.first = encoded.input_ids[: lengths[0]].copy(), labels[: lengths[0]].copy()
        previews.append(preview)
    return _FilePreview.of(previews)


def _outlook(options: PreprocessOptions, previews: Sequence[_FilePreview], *, full: bool) -> Iterator[str]:
    """In lines for people: the packs, where all rows were encoded, and the reasons why the job would stop."""
    bad, lengths = sum(each.bad for each in previews), np.concatenate([each.lengths for each in previews])
    reasons: list[str] = []
    if bad and options.encoding.on_bad_row == "error":
        reasons.append(f"{bad:,} rows cannot be used; --on-bad-row skip goes on without them")
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
            shards, prefix = options.output_shards, options.prefix
            plan = plan_packs(lengths, options.packing, shards=shards, name=prefix, groups=pairs).plan
            yield f"packs           {plan.num_packs:,} ({plan.method}), {100 * plan.fill:.3f}% filled"
        except SFTIndexError as error:
            reasons.append(str(error))
    yield from (f"would stop      {reason}" for reason in reasons)
