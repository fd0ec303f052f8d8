"""Tokenised rows: ids with a mask, labels or weights, which are converted to one token-aligned mask."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.packed_rows import integers, numbers, read_layout
from megatron_sft_idx.chat.row_options import MaskAlignment
from megatron_sft_idx.chat.types import RowError, TokenizedRow
from megatron_sft_idx.layout.files import rounds_to_zero

# Fields that control which tokens are trained on.
MASKS = ("loss_mask", "labels", "assistant_masks", "completion_mask", "loss_scale", "loss_weights")
_NOT_TRAINED = -100
_MAX_ID = (1 << 31) - 1


def read_tokenized(row: dict[str, Any], alignment: MaskAlignment) -> TokenizedRow:
    """Check ids and mask against each other, and convert a label-aligned mask or labels to token alignment.

    Labels are as in transformers: the id of a token that is trained on, else -100. They are at the position of the
    token itself (``token``), or at the position before, which predicts it (``label``).
    """
    ids = integers(row.get("input_ids"), "input_ids")
    if not ids.size:
        raise RowError("input_ids is empty")
    if ids.min() < 0 or ids.max() > _MAX_ID:
        raise RowError(f"input_ids contains {ids[(ids < 0) | (ids > _MAX_ID)][0]}, which is not a token id")
    masks: dict[str, NDArray[Any]] = {}
    for key in MASKS:
        if row.get(key) is not None:
            masks[key] = (integers if key == "labels" else numbers)(row[key], key)
            if len(masks[key]) != len(ids):
                raise RowError(f"{key} has {len(masks[key])} entries for {len(ids)} input_ids")
    if not masks:
        raise RowError(f"input_ids without {', '.join(MASKS)}: a mask is needed to know which tokens to train on")
    if len(masks) > 1 and "labels" in masks and _NOT_TRAINED not in masks["labels"]:
        del masks["labels"]  # the same ids; another mask selects the trained ones
    nothing = {key: _NOT_TRAINED if key == "labels" else 0 for key in masks}
    trained = np.logical_and.reduce([values != nothing[key] for key, values in masks.items()])
    bounds, notes = read_layout(row, ids, trained, token_aligned=alignment == "token")
    mask = np.ones(len(ids), np.float32)
    for key, values in masks.items():
        if alignment == "label":
            _require_untrained_ends(values, key, nothing[key], bounds)
        mask *= _mask_of_labels(values, ids, alignment) if key == "labels" else _mask_of_numbers(values, key)
    if not mask[trained].all():
        raise RowError(
            f"{', '.join(masks)}: the product of a token's weights is rounded to 0 in float32; use 0 or larger weights"
        )
    if alignment == "label":
        mask = np.roll(mask, 1)
    return TokenizedRow(ids[: bounds[-1]], mask[: bounds[-1]], notes, bounds)


def _require_untrained_ends(values: NDArray[Any], key: str, nothing: int, bounds: NDArray[np.int64]) -> None:
    """Raise RowError if a label-aligned mask trains the label after the last token of a sequence."""
    ends = bounds[1:] - 1
    wrong = np.flatnonzero(values[ends] != nothing)
    if wrong.size:
        at = int(ends[wrong[0]])
        where = f"position {at}, the last of sequence {wrong[0] + 1}" if len(ends) > 1 else "the last position"
        raise RowError(
            f"{key} is {values[at]} at {where}, expected {nothing}, because no token follows that could be predicted;"
            " is the mask token-aligned?"
        )


def _mask_of_numbers(values: NDArray[Any], key: str) -> NDArray[np.float32]:
    if rounds_to_zero(values):
        raise RowError(f"{key} has a weight that is rounded to 0 in float32; use 0, or 1e-40 or more")
    with np.errstate(over="ignore"):
        mask = values.astype(np.float32)
    wrong = ~np.isfinite(mask) | (mask < 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise RowError(f"{key}[{at}] is {mask[at]}, expected a finite number >= 0")
    return mask


def _mask_of_labels(labels: NDArray[np.int64], ids: NDArray[np.int64], alignment: MaskAlignment) -> NDArray[np.float32]:
    trained: NDArray[np.bool_] = labels != _NOT_TRAINED
    targets = np.roll(ids, -1) if alignment == "label" else ids
    wrong = trained & (labels != targets)
    if wrong.any():
        at = int(np.argmax(wrong))
        reason = f"labels[{at}] is {labels[at]}, but the token there is {targets[at]}; expected the same id or -100"
        if trained[:-1].any() and (labels[:-1] == ids[1:])[trained[:-1]].all():
            reason += "; the labels look shifted by one: pass them as label-aligned"
        raise RowError(reason)
    return trained.astype(np.float32)
