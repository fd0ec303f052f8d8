"""Rows that come tokenised: ids with a mask or labels."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.rows.checks import RowError, is_filled, kind_of, name_of
from megatron_sft_idx.chat.types import TokenizedRow

__all__ = ["MASK_COLUMNS", "MaskAlignment", "read_tokenized"]

# What says which tokens are trained on; the first of these that is there counts.
MASK_COLUMNS = ("loss_mask", "labels", "assistant_masks", "completion_mask")

MaskAlignment = Literal["token", "label"]

_NOT_TRAINED = -100
_MOST_ID = (1 << 31) - 1


def read_tokenized(row: dict[str, Any], alignment: MaskAlignment) -> TokenizedRow:
    """Checks ids and mask against each other; a mask or labels one position early are shifted back.

    Labels follow transformers: the token's own id where it is trained on, -100 elsewhere, at the token's own
    position (``token``) or at the one before it (``label``).
    """
    ids = _integers(row.get("input_ids"), "input_ids")
    if not ids.size:
        raise RowError("input_ids is empty")
    if ids.min() < 0 or ids.max() > _MOST_ID:
        raise RowError(f"input_ids holds {name_of(int(ids[(ids < 0) | (ids > _MOST_ID)][0]))}, no token's id")
    if is_filled(row.get("attention_mask")) and not _numbers(row["attention_mask"], "attention_mask").all():
        raise RowError("attention_mask has zeros: the row is padded; hand in rows without padding")
    column = next((name for name in MASK_COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise RowError(f"input_ids without any of {', '.join(MASK_COLUMNS)}: nothing says what is trained on")
    read = _mask_of_labels if column == "labels" else _mask_of_numbers
    return TokenizedRow(ids, read(row[column], ids, column, alignment))


def _mask_of_numbers(values: Any, ids: NDArray[np.int64], column: str, alignment: MaskAlignment) -> NDArray[np.float32]:
    mask = _numbers(values, column)
    _require_length(mask, ids, column)
    with np.errstate(over="ignore"):
        mask = mask.astype(np.float32)
    wrong = ~np.isfinite(mask) | (mask < 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise RowError(f"{column}[{at}] is {mask[at]}, expected a finite number >= 0")
    if alignment == "token":
        return mask
    if mask[-1]:
        raise RowError(f"{column} is set at the last position, where no next token is predicted; token-aligned?")
    return np.concatenate([np.zeros(1, np.float32), mask[:-1]])


def _mask_of_labels(values: Any, ids: NDArray[np.int64], column: str, alignment: MaskAlignment) -> NDArray[np.float32]:
    given = _integers(values, column)
    _require_length(given, ids, column)
    labels = given
    if alignment == "label":
        if given[-1] != _NOT_TRAINED:
            raise RowError(f"labels end with {given[-1]}, expected -100: no token follows; token-aligned?")
        labels = np.concatenate([np.full(1, _NOT_TRAINED, np.int64), given[:-1]])
    trained: NDArray[np.bool_] = labels != _NOT_TRAINED
    wrong = trained & (labels != ids)
    if not wrong.any():
        return trained.astype(np.float32)
    at = int(np.argmax(wrong))
    reason = f"labels: {labels[at]} stands for the token {ids[at]} at {at}; expected that id or -100"
    shifted = given[:-1] != _NOT_TRAINED
    if alignment == "token" and (given[:-1] == ids[1:])[shifted].all():
        reason += "; they look shifted by one: hand them in as label-aligned"
    raise RowError(reason)


def _numbers(values: Any, column: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise RowError(f"{column} is not a flat list of numbers") from None
    if array.ndim != 1:
        what = kind_of(values) if array.ndim == 0 else f"{array.ndim}-dimensional"
        raise RowError(f"{column} is {what}, expected a flat list of numbers")
    if array.size and array.dtype.kind not in "biuf":
        raise RowError(f"{column} is not a flat list of numbers")
    return array


def _integers(values: Any, column: str) -> NDArray[np.int64]:
    array = _numbers(values, column)
    if array.size and array.dtype.kind not in "iu":
        raise RowError(f"{column} is not a flat list of integers")
    if array.size and array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise RowError(f"{column} holds {array.max()}, no token's id")
    return array.astype(np.int64)


def _require_length(values: NDArray[Any], ids: NDArray[np.int64], column: str) -> None:
    if len(values) != len(ids):
        raise RowError(f"{column} has {len(values)} entries for {len(ids)} input_ids")
