"""A stock Megatron dataset, ``X.bin`` and ``X.idx``: one sequence per item, and no loss masks.

The caller must choose what is trained on: ``mask_rule="all"`` for every token, or ``mask_path`` for a second dataset of
the same lengths, whose items are the masks. Each item becomes a pack of one sequence; the command ``pack`` packs them
afterwards. ``layout.files`` has the layout of the index.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import (
    MaskRule,
    PackedReader,
    file_identity,
    first_bad_range,
    joined_ranges,
    recogniser,
)
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import IDX_HEADER, IDX_HEADER_NBYTES, IDX_MAGIC, idx_nbytes
from megatron_sft_idx.lines import shown_by_fields
from megatron_sft_idx.packs.run import PackRun, first_true, run_of_sequences
from megatron_sft_idx.storage import open_array, open_regular

# Megatron's dtype codes (megatron.core.datasets.indexed_dataset.DType).
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@recogniser
def recognise(path: str) -> bool:
    """Return whether there is a stock dataset at this prefix, or the path is one of its files."""
    paths = ShardPaths.of(path)
    with open_regular(paths.idx) as file:
        head = file.read(len(IDX_MAGIC))
    # With any of the other three files, it is a complete or incomplete shard.
    return head == IDX_MAGIC and not any(map(os.path.lexists, (paths.seq_idx, paths.loss, paths.starts)))


@dataclass(frozen=True)
class _StockItems:
    """An open stock dataset: its mapped ``.bin``, and length and first byte of each item, int64 [items]."""

    raw: NDArray[np.uint8]
    dtype: np.dtype[Any]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def open(cls, paths: ShardPaths) -> _StockItems:
        """Open both files. FormatError: one is missing or incomplete, or an item is not inside the ``.bin``."""
        for path in (paths.idx, paths.tokens):
            if not os.path.isfile(path):
                raise FormatError(f"{path}: not found; a stock Megatron dataset is a pair of files, .idx and .bin")
        dtype, *columns = open_idx(paths.idx)
        lengths, pointers = (np.asarray(column, np.int64) for column in columns)
        size = os.path.getsize(paths.tokens)
        if (item := first_true(lengths < 0)) is not None:
            raise FormatError(f"{paths.idx}: item {item} has {lengths[item]} tokens; the file is damaged")
        if (item := first_bad_range(pointers, lengths * dtype.itemsize, size)) is not None:
            raise FormatError(
                f"{paths.idx}: item {item} has {lengths[item]} tokens at byte {pointers[item]} of {paths.tokens},"
                f" which overlaps the previous item or exceeds the file of {size} bytes; one of the two files was"
                " truncated or changed: restore them"
            )
        raw: Any = open_array(paths.tokens, np.dtype("u1"), size, nbytes=size)
        return cls(raw, dtype, lengths, pointers)

    def values(self, first: int, last: int) -> NDArray[Any]:
        """Return the values of the items ``first`` up to ``last``, concatenated."""
        starts = self.offsets[first:last]
        return joined_ranges(self.raw, starts, starts + self.lengths[first:last] * self.dtype.itemsize).view(self.dtype)


@shown_by_fields
class StockIndex(NamedTuple):
    """The contents of an ``.idx`` about the items in the ``.bin`` next to it.

    Attributes:
        dtype: dtype of their values.
        lengths: number of values of each item, int32 [items].
        pointers: byte offset of each item, int64 [items].
    """

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]


def open_idx(path: str) -> StockIndex:
    """Map an index.

    Raises:
        FormatError: the file is not an index of Megatron, is incomplete, or belongs to a multimodal dataset.
    """
    size = os.path.getsize(path)
    with open_regular(path) as file:
        head = file.read(IDX_HEADER_NBYTES)
    if len(head) < IDX_HEADER_NBYTES or head[: len(IDX_MAGIC)] != IDX_MAGIC:
        raise FormatError(f"{path}: begins with {head[:9]!r}, expected {IDX_MAGIC!r}; it is not a Megatron index")
    _, version, code, items, documents = IDX_HEADER.unpack(head)
    if version != 1 or code not in _DTYPES:
        raise FormatError(f"{path}: version {version} and dtype code {code}, expected version 1 and a code from 1 to 8")
    # Python integers do not overflow, so a count of any size fails here, before memory is allocated for it.
    expected = idx_nbytes(items) + 8 * (documents - items - 1)
    if size != expected:
        raise FormatError(
            f"{path}: {size} bytes, expected {expected} for {items} items and {documents} document entries; the file"
            " was truncated or changed, or belongs to a multimodal dataset, which is not supported"
        )
    raw: Any = open_array(path, np.dtype("u1"), size, nbytes=size)
    pointers_begin = IDX_HEADER_NBYTES + 4 * items
    lengths = raw[IDX_HEADER_NBYTES:pointers_begin].view("<i4")
    return StockIndex(np.dtype(_DTYPES[code]), lengths, raw[pointers_begin : pointers_begin + 8 * items].view("<i8"))


class Reader(PackedReader):
    """A stock dataset whose items are sequences, one per pack.

    Args:
        path: its prefix, or one of its two files.
        mask_alignment: alignment of the masks at ``mask_path``.
        mask_rule: ``all`` trains every token.
        mask_path: prefix of a dataset of the same lengths with the masks: 0 and 1, or weights. Exactly one of
            ``mask_rule`` and ``mask_path`` must be given.
    """

    def _open(self, *, mask_rule: MaskRule | None = None, mask_path: str | os.PathLike[str] | None = None) -> None:
        paths = ShardPaths.of(self.path)
        self.path = paths.prefix
        if (mask_rule is None) == (mask_path is None) or mask_rule not in (None, "all"):
            raise FormatError(
                f"{self.path}: a stock dataset has no loss masks; pass either mask_rule 'all' (--mask-rule all) to"
                " train on every token, or a dataset of masks of the same lengths (--mask-path PREFIX)"
            )
        self._items = _StockItems.open(paths)
        if self._items.dtype.kind == "f":
            raise FormatError(f"{self.path}: items of {self._items.dtype}, expected integer token ids")
        if (item := first_true(self._items.lengths == 0)) is not None:
            raise SequenceError(
                self.path, item, "has no tokens, but a sequence needs at least one (rule P3); leave it out"
            )
        self.num_packs, files = len(self._items.lengths), [paths.idx, paths.tokens]
        self._masks: _StockItems | None = None
        self.notes.append(
            "one sequence per pack, because the format only has items; pack them with megatron-sft-idx pack"
        )
        if os.path.isfile(paths.seq_idx):
            self.notes.append(
                f"{paths.seq_idx} exists, so this is a packed SFT shard: its packs are read as sequences, without"
                " masks and columns; read it as sft-idx to get everything"
            )
        if mask_path is None:
            self.notes.append("every token is trained on (mask rule)")
            self.alignment, self._states_alignment = "label", True  # the masks are made here
        else:
            mask_paths = ShardPaths.of(mask_path)
            self._masks = _StockItems.open(mask_paths)
            files += [mask_paths.idx, mask_paths.tokens]
            if len(self._masks.lengths) != len(self):
                raise FormatError(
                    f"{mask_paths.prefix}: {len(self._masks.lengths)} masks for the {len(self)} items of {self.path}"
                )
            if (item := first_true(self._masks.lengths != self._items.lengths)) is not None:
                reason = f"{self._masks.lengths[item]} mask values for {self._items.lengths[item]} tokens"
                raise SequenceError(mask_paths.prefix, item, reason)
            self._take_alignment()
        self.identity = file_identity(*files)
        self._token_offsets = np.append(0, np.cumsum(self._items.lengths))
        small = self._items.dtype in (np.uint8, np.uint16)
        weights = self._masks is not None and self._masks.dtype.kind == "f"
        self._dtypes = np.dtype(np.uint16 if small else np.int32), np.dtype(np.float32 if weights else np.uint8)
        longest = int(self._items.lengths.max(initial=0))
        self.spec = self._make_spec(self.num_packs, int(self._token_offsets[-1]), longest)

    def _run(self, first: int, last: int) -> PackRun:
        run = run_of_sequences(self._items.values(first, last), self._items.lengths[first:last])
        if self._masks is not None:
            run = dataclasses.replace(run, loss_mask=self._masks.values(first, last))
        return self._checked(first, run)
