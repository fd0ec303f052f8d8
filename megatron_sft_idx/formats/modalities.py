"""What Modalities' users know by its name: its files, and the two ways that it trains on a ``.pbin``.

Those read its token stream in blocks of one size, documents end to end: for who moves over and wants to see what the
model saw. Both know no masks and let blocks cross documents; training on chats wants ``open_dataset``.
"""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.base import file_identity
from megatron_sft_idx.formats.pbin import (
    FORMAT,
    Framing,
    Reader,
    Writer,
    find_framing,
    native_tokens,
    place_documents,
    recognise,
)
from megatron_sft_idx.formats.raw_index import RawRows, RowRange, create_raw_index

__all__ = [
    "FORMAT",
    "PackedMemMapDatasetContinuous",
    "PackedMemMapDatasetMegatron",
    "RawRows",
    "Reader",
    "RowRange",
    "Writer",
    "create_raw_index",
    "recognise",
]


class _Blocks(ABC):
    """Blocks of ``block_size`` tokens of one file, each by the position of its first token.

    Pickled as path and options; whoever unpickles it, such as a DataLoader's worker, opens the file on first use.
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int) -> None:
        self.path = os.fspath(path)
        self.block_size = operator.index(block_size)
        if self.block_size < 2:
            raise FormatError(f"{self.path}: block_size {block_size}, expected at least 2: an input and its target")
        self._identity = file_identity(self.path)
        self._opened: tuple[NDArray[Any], Sequence[int]] | None = None
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __len__(self) -> int:
        return len(self._open()[1])

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Block ``index``, from the end where negative: ``{"input_ids": uint16 or int32 [block_size]}``, read-only."""
        tokens, starts = self._open()
        number = operator.index(index)
        if not -len(starts) <= number < len(starts):
            raise IndexError(f"{self.path}: block {number} of {len(starts)}")
        number %= len(starts)
        ids = native_tokens(self.path, number, tokens[starts[number] : starts[number] + self.block_size])
        ids.flags.writeable = False
        return {"input_ids": ids}

    def _open(self) -> tuple[NDArray[Any], Sequence[int]]:
        """All tokens, and where blocks start."""
        if self._opened is None:
            if (found := file_identity(self.path)) != self._identity:
                raise FormatError(
                    f"{self.path}: another size or time of change ({found}) than when the dataset was made"
                    f" ({self._identity}); start again"
                )
            framing, starts = self._place()
            if framing.num_tokens < self.block_size:
                raise FormatError(
                    f"{self.path}: {framing.num_tokens} tokens in all, not one block of {self.block_size}"
                )
            self._opened = framing.open_tokens(self.path), starts
        return self._opened

    @abstractmethod
    def _place(self) -> tuple[Framing, Sequence[int]]:
        """Find the tokens, and where blocks start among them."""


class PackedMemMapDatasetContinuous(_Blocks):
    """The stream cut every ``block_size`` tokens, wherever that falls; what is left at the end is not used.

    Args:
        path: a ``.pbin`` of any generation.
        block_size: tokens in a block.
        reuse_last_target: the last token of a block is also the first of the next, so that every token but the very
            first is a target once. Without, the first token of each block is no target.

    Raises:
        FormatError: no ``.pbin``; a block of less than 2 tokens, or of more than there are.
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int, reuse_last_target: bool = True) -> None:
        self.reuse_last_target = reuse_last_target
        super().__init__(path, block_size)

    def _place(self) -> tuple[Framing, Sequence[int]]:
        found = find_framing(self.path)
        # The index, which is costly, is needed only where the header can be read in two ways.
        framing = found[0] if len(found) == 1 else place_documents(self.path).framing
        stride = self.block_size - bool(self.reuse_last_target)
        return framing, range(0, framing.num_tokens - self.block_size + 1, stride)


class PackedMemMapDatasetMegatron(_Blocks):
    """Blocks that begin with a document where they can: one that does not fit begins the next block too.

    Documents are collected until one fills the block or goes past its end. That one is cut off, and begins the next
    block again as a whole; only where it is longer than a block, the next block goes on right behind this one. What is
    left at the end is not used.

    The arithmetic is that of Modalities up to June 2024. Its later versions count blocks in the same way but read them
    from the wrong place: offsets of the file and of the data, bytes and tokens got mixed.

    Args:
        path: a ``.pbin`` of any generation.
        block_size: tokens in a block.
        repair_merge: see ``Reader``.

    Raises:
        FormatError: no ``.pbin``, a broken index, or a block of less than 2 tokens or more than there are.
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int, *, repair_merge: bool = False) -> None:
        self.repair_merge = repair_merge
        super().__init__(path, block_size)

    def _place(self) -> tuple[Framing, Sequence[int]]:
        placement = place_documents(self.path, repair_merge=self.repair_merge)
        starts = array("q")
        block_start = filled = 0
        for start, length in zip(placement.starts.tolist(), placement.lengths.tolist(), strict=True):
            if filled + length < self.block_size:
                filled += length
                continue
            starts.append(block_start)
            if filled + length == self.block_size or length > self.block_size:
                block_start, filled = block_start + self.block_size, 0
            else:
                block_start, filled = start, length
        return placement.framing, starts
