"""Loss masks of other people's files, brought to the one alignment of this package.

*Label*: value j says whether predicting token j + 1 of the same sequence counts; 0 at every sequence's end. *Token*:
value j says whether token j itself is trained on. *Rolled right*: a token mask that its writer moved one place to the
right over the whole pack, with 0 in front, meaning to align it with labels. That is the wrong way round, and across
sequences; files of such writers are read by undoing it. What the roll pushed out at the end of a pack, whether its
last token is trained on, is not in the file any more: it counts as untrained.

The rules of packs (FORMAT.md, P1 to P8), held against what was read from a file that anybody may have written.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.layout.header import MAX_CAPACITY
from megatron_sft_idx.shard.writer import integer_array, mask_array, token_array

__all__ = [
    "MASK_ALIGNMENTS",
    "MaskAlignment",
    "alignment_note",
    "checked_alignment",
    "checked_run",
    "label_aligned",
    "require_same_length",
    "unplaced_note",
]

MaskAlignment = Literal["label", "token", "rolled-right"]
MASK_ALIGNMENTS: tuple[MaskAlignment, ...] = ("label", "token", "rolled-right")


def label_aligned(
    mask: NDArray[Any],
    seq_starts: NDArray[np.int64],
    pack_lengths: NDArray[np.int64],
    pack_sequences: NDArray[np.int64],
    alignment: MaskAlignment = "label",
) -> tuple[NDArray[Any], int]:
    """The label-aligned mask of packs end to end, and how many set values had no place in it.

    Those are: of a label mask, values at the end of a sequence, where there is nothing to predict; of a token mask,
    values on the first token of a sequence, which nothing predicts.

    Args:
        mask: [sum of pack lengths], of any dtype; it is not changed, and given back itself where nothing changes.
        seq_starts: where each sequence begins in its pack [sum of sequence counts]; the packs are known to be good.
        pack_lengths: tokens in each pack [packs].
        pack_sequences: sequences in each pack [packs].
        alignment: which of the three ``mask`` is.
    """
    if not len(mask):
        return mask, 0
    pack_ends = np.cumsum(pack_lengths)
    starts = seq_starts + np.repeat(pack_ends - pack_lengths, pack_sequences)
    ends = np.append(starts[1:], len(mask)) - 1
    if alignment == "label":
        unplaced = int(np.count_nonzero(mask[ends]))
        if unplaced:
            mask = mask.copy()
            mask[ends] = 0
        return mask, unplaced
    tokens = mask
    if alignment == "rolled-right":
        tokens = np.zeros_like(mask)
        tokens[:-1] = mask[1:]
        tokens[pack_ends - 1] = 0
    labels = np.zeros_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends] = 0
    return labels, int(np.count_nonzero(tokens[starts]))


def alignment_note(alignment: MaskAlignment) -> str | None:
    """What was done to all masks of a file, as a sentence for ``PackedReader.notes``; None for label masks."""
    if alignment == "token":
        return "loss masks taken as token-aligned: shifted left by one inside every sequence"
    if alignment == "rolled-right":
        return (
            "loss masks taken as rolled right by one over each pack: rolled back, then shifted left inside every"
            " sequence; the value of each pack's last token was lost when it was written and counts as 0"
        )
    return None


def unplaced_note(count: int, alignment: MaskAlignment) -> str:
    """What ``label_aligned`` left out in all, as a sentence for ``PackedReader.notes``."""
    if alignment == "label":
        return f"{count} loss mask values at the end of a sequence, where there is nothing to predict, set to 0"
    return f"{count} loss mask values on the first token of a sequence, which nothing predicts, left out"


def checked_alignment(path: str, alignment: str) -> MaskAlignment:
    """``alignment`` where there is such a one, FormatError else."""
    for known in MASK_ALIGNMENTS:
        if alignment == known:
            return known
    raise FormatError(f"{path}: mask alignment {alignment!r}, choose one of {', '.join(MASK_ALIGNMENTS)}")


def checked_run(
    path: str,
    first_pack: int,
    tokens: ArrayLike,
    loss_mask: ArrayLike,
    seq_starts: ArrayLike,
    pack_lengths: ArrayLike,
    pack_sequences: ArrayLike,
    *,
    mask_alignment: MaskAlignment = "label",
    token_dtype: Any = None,
    mask_dtype: Any = None,
) -> PackRun:
    """A run of packs that keeps every rule, its mask label-aligned.

    Nothing is cast before it is known to fit, no sum overflows, and whatever the arrays hold, nothing outside them is
    touched.

    Args:
        path: of the file, for errors.
        first_pack: number of the first of these packs in the file, for errors.
        tokens: ids [sum of lengths], integers of any kind.
        loss_mask: [sum of lengths], booleans, integers or floats.
        seq_starts: where each sequence begins in its pack [sum of sequence counts], integers.
        pack_lengths: tokens in each pack [packs].
        pack_sequences: sequences in each pack [packs].
        mask_alignment: of ``loss_mask``.
        token_dtype: what the ids come back as, uint16 or int32; None keeps uint16 and makes all else int32.
        mask_dtype: what the mask comes back as, uint8 or float32; None makes floats float32 and all else uint8.

    Raises:
        SequenceError: a rule is broken, with the number of the pack.
        FormatError: the arrays do not go together, so that it cannot be said which pack is wrong.
    """
    try:
        ids, mask = token_array(tokens), mask_array(loss_mask)
        starts, lengths, sequences = map(integer_array, (seq_starts, pack_lengths, pack_sequences))
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"{path}: packs from {first_pack} on: a column {error}") from None
    ids_as = np.dtype(token_dtype or (np.uint16 if ids.dtype == np.uint16 else np.int32))
    mask_as = np.dtype(mask_dtype or (np.float32 if mask.dtype.kind == "f" else np.uint8))
    if len(lengths) != len(sequences):
        raise FormatError(f"{path}: {len(lengths)} pack lengths and {len(sequences)} sequence counts")
    columns = (ids, mask, starts, lengths, sequences)
    try:
        broken = _native.first_breach(*columns, mask_alignment != "label", MAX_CAPACITY, ids_as, mask_as)
    except ValueError:
        sums = (int(lengths.sum()), int(lengths.sum()), int(sequences.sum()))
        raise FormatError(
            f"{path}: packs {first_pack} to {first_pack + len(lengths) - 1} should have {sums[0]} ids, {sums[1]} loss"
            f" mask values and {sums[2]} sequence starts; found {len(ids)}, {len(mask)} and {len(starts)}"
        ) from None
    if broken is not None and broken[0][0] != "P6":
        (_, pack, *_), words = broken
        raise SequenceError(path, first_pack + pack, words)
    ids, mask, unplaced = ids.astype(ids_as, copy=False), mask.astype(mask_as, copy=False), 0
    if mask_alignment == "rolled-right":
        firsts = np.cumsum(lengths) - lengths
        if (wrong := mask[firsts] != 0).any():
            raise SequenceError(
                path,
                first_pack + int(np.argmax(wrong)),
                "its loss mask begins with a value above 0, which a mask that was rolled right never does;"
                " say mask alignment label or token",
            )
    if broken is not None or mask_alignment != "label":
        mask, unplaced = label_aligned(mask, starts, lengths, sequences, mask_alignment)
    return PackRun(ids, mask, starts, lengths, sequences, unplaced)


def require_same_length(path: str, pack: int, **columns: int) -> None:
    """SequenceError unless the columns of a pack, handed in by their names, are equally long."""
    if len(set(columns.values())) > 1:
        found = ", ".join(f"{count} in {name}" for name, count in columns.items())
        raise SequenceError(path, pack, f"{found}; they have one entry a token each")
