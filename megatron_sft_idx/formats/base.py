"""What all formats of packed SFT data have in common: packs in, packs out.

A format is a module that knows how to recognise a path, read it (``PackedReader``) and, for most, write it
(``PackedWriter``). Readers hand out packs by number and all packs in order, in runs that bound memory; writers take
runs. Everything between the two, from masks to progress, is the same for every pair of formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage.publish import New

__all__ = ["RUN_TOKENS", "PackRun", "PackedReader", "PackedSpec", "PackedWriter"]

# Tokens in a run, about: large enough that what is done once a run does not count, small enough to stay in cache.
RUN_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class PackRun:
    """Some packs end to end, in the form ``ShardWriter.add_packs`` takes.

    Attributes:
        tokens: ids [sum of pack lengths], integers.
        loss_mask: uint8 (0 or 1) or float32 (weights) [sum of pack lengths], label-aligned.
        seq_starts: where each sequence begins in its pack, int64 [sum of sequence counts].
        pack_lengths: tokens in each pack, int64 [packs].
        pack_sequences: sequences in each pack, int64 [packs].
        unplaced: set mask values of the file that had no place in a label-aligned mask and were left out.
    """

    tokens: NDArray[Any]
    loss_mask: NDArray[Any]
    seq_starts: NDArray[np.int64]
    pack_lengths: NDArray[np.int64]
    pack_sequences: NDArray[np.int64]
    unplaced: int = 0

    def sequence_lengths(self) -> NDArray[np.int64]:
        """Tokens in each sequence, of all packs end to end: int64 [sum of sequence counts]."""
        pack_begins = np.cumsum(self.pack_lengths) - self.pack_lengths
        return np.diff(self.seq_starts + np.repeat(pack_begins, self.pack_sequences), append=len(self.tokens))


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """What is known of packed data before its first pack is read.

    Attributes:
        num_packs: packs.
        num_sequences: sequences in all of them.
        num_tokens: tokens in all of them, without padding.
        longest_pack: tokens in the longest.
        token_dtype: uint16 or int32.
        mask_dtype: uint8 or float32.
        capacity: most token positions a pack may hold; at least ``longest_pack``.
        sequence_multiple: sequences rounded up to this still fit the capacity.
        pad_id: the tokenizer's padding id, None where unknown.
        metadata: what else the file says of itself, JSON-able.
    """

    num_packs: int
    num_sequences: int
    num_tokens: int
    longest_pack: int
    token_dtype: np.dtype[Any]
    mask_dtype: np.dtype[Any]
    capacity: int
    sequence_multiple: int = 1
    pad_id: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def stated(self) -> dict[str, Any]:
        """What files of other formats say of their packs in a place of ours, JSON-able."""
        return {
            "capacity": self.capacity,
            "num_tokens": self.num_tokens,
            "longest_pack": self.longest_pack,
            "sequence_multiple": self.sequence_multiple,
            "pad_id": self.pad_id,
            "metadata": dict(self.metadata),
        }


class PackedReader(ABC):
    """One file, folder or shard of packed data, open for reading. Not pickled: each process opens its own.

    Attributes:
        format: the format's name, as ``--to`` takes it.
        path: what was opened.
        notes: what the file does not say and was understood, or was set right on the way, as sentences for people.
    """

    format: ClassVar[str]
    path: str
    notes: list[str]

    @property
    @abstractmethod
    def spec(self) -> PackedSpec:
        """Counts and dtypes; may cost one pass over the lengths the first time."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Differs where the content does, as far as can be told without reading it all: an id, or sizes and times."""

    @abstractmethod
    def __len__(self) -> int:
        """Packs."""

    @abstractmethod
    def read(self, index: int) -> Pack:
        """Pack ``index``, which is within 0 and ``len(self) - 1``; arrays are read-only where they are views."""

    @abstractmethod
    def runs(self) -> Iterator[PackRun]:
        """All packs in order, some ``RUN_TOKENS`` tokens at a time and at least one pack."""


class PackedWriter(ABC):
    """Packed data being written; a context manager: a clean exit finalizes, an exception leaves nothing behind.

    Attributes:
        format: the format's name, as ``--to`` takes it.
        lost: what of these packs the format has no place for, and was let go as ``allow_loss`` was given: a sentence
            for each of ``"masks"`` and ``"packs"`` (which sequences share one) that it is true of.
    """

    format: ClassVar[str]
    _output: New
    lost: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def write(self, run: PackRun) -> None:
        """Append packs."""

    @abstractmethod
    def complete(self) -> None:
        """Write what is missing behind the last pack, so that ``reread`` finds it whole; may be called twice."""

    @abstractmethod
    def reread(self) -> PackedReader:
        """A reader of all that was written, which is complete and not in its place yet."""

    def publish(self) -> None:
        """Put what is complete in its place, on disk."""
        self._output.publish()

    def finalize(self) -> None:
        """Complete it and put it in its place; where that fails, remove what was written.

        Raises:
            FormatError: other packs were written than announced, or something has appeared at the place.
            OSError: the disk says no.
        """
        try:
            self.complete()
            self.publish()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove what was written; nothing where it is finalized or abandoned already."""
        self._output.abandon()

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abandon()
