"""Multiply loss masks by the values of a column (``--loss-weight-column``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import no_column


class Weights(NamedTuple):
    """Weights for the masks of several sequences of a file.

    Attributes:
        values: one per sequence, or one per token of the file, of any numeric dtype.
        of_sequences: whether there is one per sequence.
        shift: for values per token, mask value j is multiplied by value j + shift.
    """

    values: NDArray[Any]
    of_sequences: bool = True
    shift: int = 0

    def gather(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], places: NDArray[np.int64], out: NDArray[Any]
    ) -> None:
        """Write the weight of each mask value of sequences to ``out``. Positions without a weight keep their value.

        Args:
            starts: start of each sequence among the tokens of the file.
            lengths: lengths of the sequences, in tokens.
            places: start of each sequence in ``out``.
            out: array with the dtype of the values.
        """
        if self.of_sequences:
            values, firsts, counts = np.repeat(self.values, lengths), np.cumsum(lengths) - lengths, lengths
        else:
            # The last position has none, because it predicts nothing.
            values, firsts, counts = self.values, np.minimum(starts + self.shift, len(self.values)), lengths - 1
        # As bytes: values may be of any dtype.
        first, nbytes, place = (each * out.itemsize for each in (firsts, counts, places))
        _native.gather_sequences(values.view(np.uint8), first, nbytes, place, out.view(np.uint8))

    def are_set(self, first: int, last: int) -> NDArray[np.bool_]:
        """For values per token: return whether the mask values ``[first, last)`` of the file have weights above 0."""
        known = self.values[first + self.shift : last + self.shift] != 0
        return np.append(known, np.ones(last - first - len(known), bool))


def weighted(mask: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float32]:
    """Return the products of mask values and weights, float32."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.multiply(mask.astype(np.float32), weights.astype(np.float32))


def wrong_weight(mask: NDArray[Any], weights: NDArray[Any]) -> tuple[int, str] | None:
    """Return the first value with an invalid weight, and the problem; None if all are valid."""
    with np.errstate(over="ignore", under="ignore"):
        bad = ~np.isfinite(weights.astype(np.float32)) | (weights < 0)
    if bad.any():
        at = int(np.argmax(bad))
        return at, f"the weight is {weights[at]:g}, expected a number of 0 or more that fits into float32"
    products = weighted(mask, weights)
    lost = ((products == 0) & (mask != 0) & (weights != 0)) | ~np.isfinite(products)
    if not lost.any():
        return None
    at = int(np.argmax(lost))
    return at, f"{mask[at]:g} times {weights[at]:g} becomes {products[at]:g} in float32; use another weight"


def require_weight_column(name: str, columns: Mapping[str, ColumnSpec], where: str) -> None:
    """Raise FormatError if ``where`` has no column of this name, or it does not hold weights."""
    if name not in columns:
        raise FormatError(f"{where}: {no_column(name, columns)}; --loss-weight-column {name} needs it")
    if (width := columns[name].width) != 1:
        raise FormatError(f"{where}: column {name} has {width} values per row, but --loss-weight-column needs one")
