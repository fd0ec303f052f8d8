"""Loss masks of other people's files, brought to the one alignment of this package.

*Label*: value j says whether predicting token j + 1 of the same sequence counts; 0 at every sequence's end. *Token*:
value j says whether token j itself is trained on. *Rolled right*: a token mask that its writer moved one place to the
right over the whole pack, with 0 in front, meaning to align it with labels. That is the wrong way round, and across
sequences; files of such writers are read by undoing it. What the roll pushed out at the end of a pack, whether its
last token is trained on, is not in the file any more: it counts as untrained.

The rules of packs (FORMAT.md, P1 to P8), held against what was read from a file that anybody may have written.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_sft_idx._native import packs_are_sound
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.layout.values import MAX_CAPACITY
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


# What the kernel takes, and packs are handed out as.
_IDS = (np.dtype(np.uint16), np.dtype(np.int32))
_MASKS = (np.dtype(np.uint8), np.dtype(np.float32))


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
    unchanged = mask_alignment == "label" and _keeps(ids, _IDS, token_dtype) and _keeps(mask, _MASKS, mask_dtype)
    if unchanged and packs_are_sound(ids, mask, starts, lengths, sequences, MAX_CAPACITY):
        return PackRun(ids, mask, starts, lengths, sequences)
    run = _Run(path, first_pack, lengths, sequences)
    run.check_shape(len(ids), len(mask), len(starts))
    run.check_starts(starts)
    ids = run.checked_ids(ids, token_dtype)
    mask = run.checked_mask(mask, mask_dtype)
    if mask_alignment == "rolled-right":
        run.check_rolled(mask)
    mask, unplaced = label_aligned(mask, starts, lengths, sequences, mask_alignment)
    return PackRun(ids, mask, starts, lengths, sequences, unplaced)


def _keeps(values: NDArray[Any], dtypes: tuple[np.dtype[Any], ...], wanted: Any) -> bool:
    """Whether values have one of these dtypes, and nobody wants another."""
    return values.dtype in dtypes and (wanted is None or values.dtype == wanted)


def require_same_length(path: str, pack: int, **columns: int) -> None:
    """SequenceError unless the columns of a pack, handed in by their names, are equally long."""
    if len(set(columns.values())) > 1:
        found = ", ".join(f"{count} in {name}" for name, count in columns.items())
        raise SequenceError(path, pack, f"{found}; they have one entry a token each")


class _Run:
    """Lengths of the packs of a run, and from them the pack that a position belongs to."""

    def __init__(self, path: str, first_pack: int, lengths: NDArray[np.int64], sequences: NDArray[np.int64]) -> None:
        self._path, self._first, self._lengths, self._sequences = path, first_pack, lengths, sequences

    def _fail(self, pack: int, reason: str) -> NoReturn:
        raise SequenceError(self._path, self._first + pack, reason)

    def _fail_at(self, position: int, reason: str) -> NoReturn:
        """The same, for the pack that holds this token of the run."""
        ends = np.cumsum(self._lengths)
        pack = int(np.searchsorted(ends, position, side="right"))
        self._fail(pack, f"position {position - int(ends[pack] - self._lengths[pack])} {reason}")

    def check_shape(self, num_tokens: int, num_masks: int, num_starts: int) -> None:
        """Counts are within bounds and add up."""
        packs = len(self._lengths)
        if len(self._sequences) != packs:
            raise FormatError(f"{self._path}: {packs} pack lengths and {len(self._sequences)} sequence counts")
        for counts, total, what, rule in (
            (self._lengths, min(num_tokens, MAX_CAPACITY), "tokens", "P1"),
            (self._sequences, num_starts, "sequences", "P2"),
        ):
            # Each is below the size of an array in memory, so the sums further down cannot overflow.
            bad = (counts < 1) | (counts > total)
            if bad.any():
                pack = int(np.argmax(bad))
                self._fail(pack, f"has {counts[pack]} {what}, expected 1 to {total} (rule {rule})")
        sums = (int(self._lengths.sum()), int(self._lengths.sum()), int(self._sequences.sum()))
        if sums != (num_tokens, num_masks, num_starts):
            raise FormatError(
                f"{self._path}: packs {self._first} to {self._first + packs - 1} should have {sums[0]} ids, {sums[1]}"
                f" loss mask values and {sums[2]} sequence starts; found {num_tokens}, {num_masks} and {num_starts}"
            )

    def check_starts(self, starts: NDArray[np.int64]) -> None:
        """Rules P2 to P4."""
        if not len(starts):
            return
        firsts = np.cumsum(self._sequences) - self._sequences
        if starts[firsts].any():
            pack = int(np.argmax(starts[firsts] != 0))
            self._fail(pack, f"its first sequence starts at {starts[firsts[pack]]}, expected 0 (rule P2)")
        lengths = np.repeat(self._lengths, self._sequences)
        ends = np.append(starts[1:], 0)
        ends[np.append(firsts[1:], len(starts)) - 1] = self._lengths
        bad = (starts >= ends) | (ends > lengths)
        if bad.any():
            i = int(np.argmax(bad))
            pack = int(np.searchsorted(firsts, i, side="right")) - 1
            self._fail(
                pack,
                f"sequence {i - firsts[pack]} goes from {starts[i]} to {ends[i]} in {lengths[i]} tokens;"
                " starts ascend and are below the length (rules P3, P4)",
            )

    def checked_ids(self, ids: NDArray[Any], dtype: Any) -> NDArray[Any]:
        """Rule P8."""
        wanted = np.dtype(dtype or (np.uint16 if ids.dtype == np.uint16 else np.int32))
        largest = np.iinfo(wanted).max
        if len(ids) and (ids.min() < 0 or ids.max() > largest):
            at = int(np.argmax((ids < 0) | (ids > largest)))
            self._fail_at(at, f"has id {ids[at]}, expected 0 to {largest} (rule P8)")
        return ids.astype(wanted, copy=False)

    def checked_mask(self, mask: NDArray[Any], dtype: Any) -> NDArray[Any]:
        """Rule P7."""
        wanted = np.dtype(dtype or (np.float32 if mask.dtype.kind == "f" else np.uint8))
        if wanted == np.uint8:
            good, expected = (mask == 0) | (mask == 1), "0 or 1"
        else:
            good, expected = (mask >= 0) & (mask <= np.finfo(np.float32).max), "a finite weight of 0 or more"
        if not good.all():
            at = int(np.argmin(good))
            self._fail_at(at, f"has loss mask {mask[at]}, expected {expected} (rule P7)")
        return mask.astype(wanted, copy=False)

    def check_rolled(self, mask: NDArray[Any]) -> None:
        """A mask that was rolled right begins with 0 in every pack."""
        firsts = np.cumsum(self._lengths) - self._lengths
        if mask[firsts].any():
            self._fail(
                int(np.argmax(mask[firsts] != 0)),
                "its loss mask begins with a value above 0, which a mask that was rolled right never does;"
                " say mask alignment label or token",
            )
