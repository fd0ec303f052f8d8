"""What Modalities' users know by its name: its files, and the two ways that it trains on a ``.pbin``.

Those read its token stream in blocks of one size, documents end to end: for who moves over and wants to see what the
model saw. Both know no masks and let blocks cross documents; training on chats wants ``open_dataset``.
"""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from array import array
from typing import Any

from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
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
    """Blocks of ``block_size`` tokens of one file.

    Pickled as path and options; whoever unpickles it, such as a DataLoader's worker, opens the file on first use.
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int) -> None:
        self.path = os.fspath(path)
        self.block_size = operator.index(block_size)
        if self.block_size < 2:
            raise FormatError(f"{self.path}: block_size {block_size}, expected at least 2: an input and its target")
        self._identity = _identity(self.path)
        self._tokens: NDArray[Any] | None = None
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}

    def __len__(self) -> int:
        self._open()
        return self._count()

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Block ``index``, from the end where negative: ``{"input_ids": uint16 or int32 [block_size]}``, read-only."""
        tokens = self._open()
        number = operator.index(index)
        count = self._count()
        if not -count <= number < count:
            raise IndexError(f"{self.path}: block {number} of {count}")
        number %= count
        start = self._start(number)
        ids = native_tokens(self.path, number, tokens[start : start + self.block_size])
        ids.flags.writeable = False
        return {"input_ids": ids}

    def _open(self) -> NDArray[Any]:
        if self._tokens is None:
            if (found := _identity(self.path)) != self._identity:
                raise FormatError(
                    f"{self.path}: {found[0]} bytes and another time of change than when the dataset was made"
                    f" ({self._identity[0]} bytes); start again"
                )
            framing = self._place()
            if framing.num_tokens < self.block_size:
                raise FormatError(
                    f"{self.path}: {framing.num_tokens} tokens in all, not one block of {self.block_size}"
                )
            self._tokens = framing.open_tokens(self.path)
        return self._tokens

    @abstractmethod
    def _place(self) -> Framing:
        """Find where the blocks begin."""

    @abstractmethod
    def _count(self) -> int: ...

    @abstractmethod
    def _start(self, number: int) -> int: ...


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
        self._num_tokens = 0
        super().__init__(path, block_size)

    def _place(self) -> Framing:
        found = find_framing(self.path)
        # The index, which is costly, is needed only where the header can be read in two ways.
        framing = found[0] if len(found) == 1 else place_documents(self.path).framing
        self._num_tokens = framing.num_tokens
        return framing

    @property
    def _stride(self) -> int:
        return self.block_size - bool(self.reuse_last_target)

    def _count(self) -> int:
        return (self._num_tokens - self.block_size) // self._stride + 1

    def _start(self, number: int) -> int:
        return number * self._stride


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
        self._starts: array[int] = array("q")
        super().__init__(path, block_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_starts": array("q")}

    def _place(self) -> Framing:
        placement = place_documents(self.path, repair_merge=self.repair_merge)
        self._starts = array("q")
        block_start = filled = 0
        for start, length in zip(placement.starts.tolist(), placement.lengths.tolist(), strict=True):
            if filled + length < self.block_size:
                filled += length
                continue
            self._starts.append(block_start)
            if filled + length == self.block_size or length > self.block_size:
                block_start, filled = block_start + self.block_size, 0
            else:
                block_start, filled = start, length
        return placement.framing

    def _count(self) -> int:
        return len(self._starts)

    def _start(self, number: int) -> int:
        return self._starts[number]


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
