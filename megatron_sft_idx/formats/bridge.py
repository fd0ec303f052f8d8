"""What Megatron-Bridge wants beside a packed Parquet file: padding inside its packs, and a summary of the packing.

Under context parallelism, and for CUDA graphs, Bridge's packed data set takes ``pad_seq_to_mult`` and
``pad_cu_seqlens``. Neither pads anything as it reads: sequences have to be stored padded, with the tokenizer's
end-of-sequence id, and a JSON file has to say the longest sequence and the most sequences of a pack. All of it counts
positions of its batches, which cut the last token off every sequence: one of n tokens takes n - 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PADDED, PackedSpec
from megatron_sft_idx.packs.run import Column, PackRun
from megatron_sft_idx.storage.publish import Kind, head_of

__all__ = ["METADATA_KIND", "PaddedPacks", "Padding"]

_FIELDS = ("dataset_max_seqlen", "max_samples_per_bin", "min_packed_seqlen")


def _is_metadata(path: str) -> bool:
    try:
        entries = orjson.loads(head_of(path, 1 << 20))
    except (OSError, ValueError):
        return False
    return isinstance(entries, list) and all(isinstance(entry, dict) and {*_FIELDS} <= {*entry} for entry in entries)


METADATA_KIND = Kind("a summary of packs for Megatron-Bridge", _is_metadata)


@dataclass(frozen=True)
class Padding:
    """How sequences are stored for Bridge.

    Attributes:
        multiple: each takes a multiple of so many positions of a batch, 2 x context parallel size, times the tensor
            parallel size under sequence parallelism; 1 stores them as they are.
        eos_id: the id they are filled up with, the tokenizer's end of sequence, by which Bridge finds where padding
            begins; None only where ``multiple`` is 1.
    """

    multiple: int
    eos_id: int | None = None

    def positions(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of a batch that sequences of so many tokens take, padding included: int64, as ``lengths``."""
        return -(-(lengths - 1) // self.multiple) * self.multiple

    def pad(self, run: PackRun) -> PackRun:
        """The same packs with every sequence filled up; padding is not trained on, and 0 in columns of the tokens."""
        lengths = run.sequence_lengths()
        stored = self.positions(lengths) + 1
        begins = np.cumsum(stored) - stored
        places = np.arange(len(run.tokens)) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
        tokens = np.full(int(stored.sum()), self.eos_id or 0, run.tokens.dtype)
        tokens[places] = run.tokens

        def spread(values: NDArray[Any]) -> NDArray[Any]:
            padded = np.zeros((len(tokens), *values.shape[1:]), values.dtype)
            padded[places] = values
            return padded

        columns = {
            name: Column(per, spread(values) if per == "token" else values)
            for name, (per, values) in run.columns.items()
        }
        pack_lengths = _by_pack(stored, run)
        starts = begins - np.repeat(np.cumsum(pack_lengths) - pack_lengths, run.pack_sequences)
        return PackRun(tokens, spread(run.loss_mask), starts, pack_lengths, run.pack_sequences, run.unplaced, columns)


def _by_pack(values: NDArray[np.int64], run: PackRun) -> NDArray[np.int64]:
    """Sums of the values of each pack's sequences: int64 [packs]."""
    sums: NDArray[np.int64] = np.diff(np.append(0, np.cumsum(values))[run.sequence_offsets])
    return sums


@dataclass
class PaddedPacks:
    """What a pass over packs finds of them as Bridge will see them.

    Attributes:
        path: of the source, for errors.
        padding: as they will be stored.
        spec: of the packs as they are.
    """

    path: str
    padding: Padding
    spec: PackedSpec
    _longest: int = field(default=0, init=False)
    _most_sequences: int = field(default=0, init=False)
    _shortest_pack: int = field(default=0, init=False)
    _positions: int = field(default=0, init=False)
    _longest_pack: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not self.spec.num_packs:
            raise FormatError(f"{self.path}: it has no packs, and Megatron-Bridge reads no file without any")
        multiple, eos_id = self.padding.multiple, self.padding.eos_id
        if multiple > 1 and (eos_id is None or not 0 <= eos_id <= np.iinfo(self.spec.token_dtype).max):
            raise FormatError(
                f"{self.path}: padding needs the tokenizer's end-of-sequence id, found {eos_id}, expected one that"
                f" {self.spec.token_dtype} holds; pass --eos-id"
            )
        self._shortest_pack = self.spec.capacity

    def measure(self, runs: Iterable[PackRun]) -> None:
        """Take in the lengths of all packs.

        Raises:
            SequenceError: a pack does not fit the capacity once its sequences are padded.
        """
        first = 0
        for run in runs:
            positions = self.padding.positions(run.sequence_lengths())
            packs = _by_pack(positions, run)
            if (over := packs > self.spec.capacity).any():
                pack = int(np.argmax(over))
                raise SequenceError(
                    self.path,
                    first + pack,
                    f"{packs[pack]} positions with sequences padded to multiples of {self.padding.multiple}, the"
                    f" capacity is {self.spec.capacity}; pack again with --sequence-multiple {self.padding.multiple}",
                )
            self._longest = max(self._longest, int(positions.max(initial=0)))
            self._most_sequences = max(self._most_sequences, int(run.pack_sequences.max(initial=0)))
            self._shortest_pack = min(self._shortest_pack, int(packs.min(initial=self.spec.capacity)))
            self._longest_pack = max(self._longest_pack, int((packs + run.pack_sequences).max(initial=0)))
            self._positions += int(positions.sum())
            first += len(packs)

    def padded_spec(self) -> PackedSpec:
        """The spec of the packs as they will be stored, which may be longer than the capacity of a batch.

        Where nothing is padded it is that of the packs as they are.
        """
        if self.padding.multiple == 1:
            return self.spec
        return dataclasses.replace(
            self.spec,
            num_tokens=self._positions + self.spec.num_sequences,
            longest_pack=self._longest_pack,
            capacity=max(self.spec.capacity, self._longest_pack),
            sequence_multiple=1,
            metadata={**self.spec.metadata, PADDED: dataclasses.asdict(self.padding)},
        )

    def metadata(self) -> bytes:
        """The JSON that Bridge reads with ``pad_cu_seqlens``: what its own preparation says of such packs."""
        spec = self.spec
        entry: dict[str, Any] = {
            "dataset_max_seqlen": self._longest,
            "max_samples_per_bin": self._most_sequences,
            "packing_factor": round(spec.num_sequences / spec.num_packs, 2),
            "packing_efficiency": round(self._positions / spec.num_packs / spec.capacity * 100, 2),
            "pack_size": spec.capacity,
            "min_packed_seqlen": self._shortest_pack,
        }
        return orjson.dumps([entry]) + b"\n"
