"""Sequences read from parts, in the order of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.preprocess.distributed.parts import Part
from megatron_sft_idx.preprocess.overlong import Selection
from megatron_sft_idx.shard.writer import MaskAlignment

__all__ = ["PartsReader"]


class PartsReader:
    """The sequences of all parts.

    A plan takes sequences from anywhere, so any window of it touches most parts. Windows are large, and each part is
    opened once a window and read from its beginning to its end; one is open at a time.

    Args:
        paths: of the parts.
        bounds: number of the first sequence of each part, and that of all, int64 [parts + 1].
        mask_dtype: of the masks given; float32 where any part has such.
    """

    mask_alignment: MaskAlignment = "token"
    window_tokens = 1 << 24

    def __init__(self, paths: Sequence[str], bounds: NDArray[np.int64], mask_dtype: str) -> None:
        self._paths, self._bounds, self._mask_dtype = paths, bounds, np.dtype(mask_dtype)

    def read(self, selection: Selection) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and masks of the selection, end to end."""
        order = np.argsort(selection.sequences, kind="stable")
        sequences, lengths = selection.sequences[order], selection.lengths[order].astype(np.int64)
        begins = np.zeros(len(order), np.int64) if selection.begins is None else selection.begins[order]
        ends = np.cumsum(lengths)
        ids: NDArray[Any] | None = None
        mask = np.empty(ends[-1], self._mask_dtype)
        cuts = np.searchsorted(sequences, self._bounds)
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            first, last = cuts[number : number + 2].tolist()
            part = self._open(number)
            where = slice(ends[first] - lengths[first], ends[last - 1])
            local = sequences[first:last] - self._bounds[number]
            if (begins[first:last] + lengths[first:last] > part.lengths[local]).any():
                raise self._changed(part)
            starts = part.starts[local] + begins[first:last]
            if ids is None:
                ids = np.empty(ends[-1], part.ids.dtype)
            stops, all_of_them = starts + lengths[first:last], np.arange(last - first)
            _native.gather_sequences(part.ids, starts, stops, all_of_them, ids[where])
            found = np.empty(where.stop - where.start, part.mask.dtype)
            _native.gather_sequences(part.mask, starts, stops, all_of_them, found)
            mask[where] = found
        assert ids is not None
        # From the order of the parts to the order of the plan.
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        given = np.empty_like(ids), np.empty_like(mask)
        for source, out in zip((ids, mask), given, strict=True):
            _native.gather_sequences(source, ends - lengths, ends, place, out)
        return given

    def _open(self, number: int) -> Part:
        part = Part(self._paths[number])
        if len(part.lengths) != self._bounds[number + 1] - self._bounds[number]:
            raise self._changed(part)
        return part

    def _changed(self, part: Part) -> FormatError:
        return FormatError(f"{part.path}: changed since its lengths were read; pass --resume, which makes it anew")
