"""Loss masks of other people's files, brought to the one alignment of this package.

*Label*: value j says whether predicting token j + 1 of the same sequence counts; 0 at every sequence's end. *Token*:
value j says whether token j itself is trained on. *Rolled right*: a token mask that its writer moved one place to the
right over the whole pack, with 0 in front, meaning to align it with labels. That is the wrong way round, and across
sequences; files of such writers are read by undoing it. What the roll pushed out at the end of a pack, whether its
last token is trained on, is not in the file any more: it counts as untrained.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["MASK_ALIGNMENTS", "MaskAlignment", "alignment_note", "label_aligned", "unplaced_note"]

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
