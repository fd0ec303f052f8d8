"""A look at what a run would do, before hours of it: at the first rows of every input, or at all of them."""

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
from megatron_sft_idx.tokenize.begin import PreprocessOptions
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input, read_pieces
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.tokenize.gather import output_prefixes
from megatron_sft_idx.tokenize.local import Local, available_cpus
from megatron_sft_idx.tokenize.parts import encode_piece, remember_encoder
from megatron_sft_idx.tokenize.plan import plan_packs

# Of all files together, and at most of one: about a second of tokenising.
_SAMPLE_NBYTES, _MOST_NBYTES = 1 << 22, 1 << 18
_LISTED = 20

# Ids of a sequence, and its label-aligned mask.
Marked: TypeAlias = tuple[NDArray[Any], NDArray[Any]]


@dataclass(slots=True)
class _Looked:
    """What some rows of one file become.

    Attributes:
        number: of the file.
        num_bytes: of the file, that hold them.
        rows: how many, bad ones included.
        bad: how many cannot be used.
        bad_rows: the first of these, as messages.
        lengths: tokens of each sequence they make, int64 [sequences].
        trained_tokens: how many of those tokens are trained on.
        first: ids of the first sequence, and its label-aligned mask; None where there is none.
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
    def of(cls, looks: Sequence[_Looked]) -> _Looked:
        """All looks at one file as one."""
        nbytes, rows, bad, trained = (
            sum(getattr(look, name) for look in looks) for name in ("num_bytes", "rows", "bad", "trained_tokens")
        )
        bad_rows = [error for look in looks for error in look.bad_rows][:_LISTED]
        first = next((look.first for look in looks if look.first), None)
        lengths = np.concatenate([look.lengths for look in looks])
        return cls(looks[0].number, nbytes, rows, bad, bad_rows, lengths, trained, first)


def preview(
    options: PreprocessOptions, *, full: bool = False
) -> tuple[list[str], Marked | None, Callable[[Sequence[int]], str]]:
    """Check everything a run needs, and encode the first rows of every input.

    Args:
        options: of the run.
        full: encode all rows, on this machine, to know every bad row, all lengths and the packs.

    Returns:
        What would become of them, in lines for people; the first sequence; and what decodes its ids.

    Raises:
        SFTIndexError: an input, an option, or something in the way at the prefix.
    """
    files = expand_inputs(options.inputs)
    encoder = RowEncoder(replace(options.encoding_of(files), on_bad_row="skip", content=False))
    for prefix in output_prefixes(options.prefix, options.output_shards, valid=options.has_valid):
        check_free(ShardPaths.of(prefix), overwrite=options.overwrite)
    looks = [[_Looked(number)] for number in range(len(files))]
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
            for found in pool.map_in_order(_look_at, shared, stretches, name_of=str):
                progress.update(found.num_bytes, found.rows)
                looks[found.number].append(found)
    finally:
        remember_encoder(None)
    looked = [_Looked.of(each) for each in looks]
    lines = [line for file, each in zip(files, looked, strict=True) for line in _told(file, each, full=full)]
    lines += [f"bad row         {error}" for error in [error for each in looked for error in each.bad_rows][:_LISTED]]
    lines += _outlook(options, looked, full=full)
    return lines, next((each.first for each in looked if each.first), None), encoder.tokenizer.decode


def _told(file: InputFile, looked: _Looked, *, full: bool) -> Iterator[str]:
    """What was seen of a file."""
    which, lengths = "all rows" if full else "first rows", looked.lengths
    bad = f" ({looked.bad:,} cannot be used)" if looked.bad else ""
    yield f"input           {file.path}: {file.kind}, {file.num_bytes:,} bytes"
    yield (
        f"  {which:<14}{looked.rows:,}{bad}: {len(lengths):,} sequences, {lengths.sum():,} tokens,"
        f" {looked.trained_tokens:,} trained"
    )
    if len(lengths):
        yield f"  lengths       {lengths.min():,} to {lengths.max():,}"


def _first_rows(files: Sequence[InputFile]) -> Iterator[Stretch]:
    nbytes = min(_SAMPLE_NBYTES // len(files), _MOST_NBYTES)
    for number, file in enumerate(files):
        if dealt := tuple(islice(iter_pieces([file], piece_nbytes=max(nbytes, 1)), 1)):
            yield Stretch(file, file.path, number, dealt=dealt)


def _look_at(shared: tuple[EncodingOptions, Cutting], stretch: Stretch) -> _Looked:
    encoding, cutting = shared
    looks = [_Looked(stretch.number)]
    for piece in read_pieces(stretch, cutting):
        done = encode_piece(encoding, piece, stretch.number)
        look = _Looked(stretch.number, piece.num_bytes, done.rows, len(done.bad_rows), lengths=done.lengths)
        look.bad_rows = [str(error) for error in done.bad_rows[:_LISTED]]
        look.trained_tokens = int(np.count_nonzero(done.loss_mask))
        if len(done.lengths):
            mask = done.loss_mask[: done.lengths[0]]
            look.first = done.input_ids[: len(mask)].copy(), np.append(mask[1:], mask.dtype.type(0))
        looks.append(look)
    return _Looked.of(looks)


def _outlook(options: PreprocessOptions, looked: Sequence[_Looked], *, full: bool) -> Iterator[str]:
    """What packing would make, where all rows were looked at, and why a run would stop."""
    bad, lengths = sum(each.bad for each in looked), np.concatenate([each.lengths for each in looked])
    stops: list[str] = []
    if bad and options.encoding.on_bad_row == "error":
        stops.append(f"{bad:,} rows cannot be used; --on-bad-row skip goes on without them")
    if not full or not len(lengths):
        longest = options.packing.longest_sequence
        if (overlong := int((lengths > longest).sum())) and options.packing.overlong == "error":
            stops.append(
                f"{overlong:,} of {len(lengths):,} sequences are longer than {longest:,} tokens; choose --overlong"
                " drop, truncate or split, or a larger --seq-length"
            )
    elif options.packing.selection is None:
        pairs = np.arange(len(lengths)) // 2 if options.encoding.rows.kind == "preference" else None
        try:
            shards, prefix = options.output_shards, options.prefix
            plan = plan_packs(lengths, options.packing, shards=shards, source=prefix, groups=pairs).plan
            yield f"packs           {plan.num_packs:,} ({plan.method}), {100 * plan.fill:.3f}% filled"
        except SFTIndexError as error:
            stops.append(str(error))
    for reason in stops:
        yield f"would stop      {reason}"
