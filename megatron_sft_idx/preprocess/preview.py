"""What a run would do, shown on its first rows; writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs.files import InputFile, expand_inputs
from megatron_sft_idx.chat.inputs.pieces import iter_pieces
from megatron_sft_idx.errors import SequenceError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.preprocess.encoding import RowEncoder
from megatron_sft_idx.preprocess.outputs import output_prefixes
from megatron_sft_idx.preprocess.pipeline import PreprocessOptions
from megatron_sft_idx.shard import check_free

__all__ = ["Preview", "preview"]

_SAMPLE_NBYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Preview:
    """A run's first rows.

    Attributes:
        files: all inputs.
        rows: rows looked at: those in the first quarter MiB of input.
        bad_rows: which of them cannot be used, and why.
        lengths: tokens of each sequence they make, int64 [sequences].
        trained_tokens: how many of those tokens are trained on.
        overlong: sequences longer than the capacity.
        first_ids: ids of the first sequence.
        first_mask: its label-aligned mask.
        decode: ids to text.
    """

    files: Sequence[InputFile]
    rows: int
    bad_rows: Sequence[SequenceError]
    lengths: NDArray[np.int64]
    trained_tokens: int
    overlong: int
    first_ids: NDArray[Any]
    first_mask: NDArray[Any]
    decode: Callable[[Sequence[int]], str]


def preview(options: PreprocessOptions) -> Preview:
    """Check everything a run needs, and encode its first rows.

    Raises:
        SFTIndexError: an input, an option, or something in the way at the prefix.
    """
    files = expand_inputs(options.inputs)
    encoder = RowEncoder(options.encoding)
    for prefix in output_prefixes(options.prefix, options.output_shards):
        check_free(ShardPaths.of(prefix), overwrite=options.overwrite)
    pieces = [encoder.encode(piece) for piece in islice(iter_pieces(files, piece_nbytes=_SAMPLE_NBYTES), 1)]
    lengths = np.concatenate([np.empty(0, np.int64), *(piece.lengths for piece in pieces)])
    first = int(lengths[0]) if len(lengths) else 0
    mask = pieces[0].loss_mask if pieces else np.empty(0, np.uint8)
    return Preview(
        files=files,
        rows=sum(piece.rows for piece in pieces),
        bad_rows=[error for piece in pieces for error in piece.bad_rows],
        lengths=lengths,
        trained_tokens=int(np.count_nonzero(mask)),
        overlong=int((lengths > options.packing.longest_sequence).sum()),
        first_ids=pieces[0].input_ids[:first] if first else np.empty(0, np.int32),
        first_mask=np.append(mask[1:first], mask.dtype.type(0)) if first else mask,
        decode=encoder.tokenizer.decode,
    )
