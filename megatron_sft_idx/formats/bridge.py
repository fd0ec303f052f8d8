"""What Megatron-Bridge wants beside a packed Parquet file: padding inside its packs, and a summary of the packing.

Under context parallelism, and for CUDA graphs, Bridge's packed data set takes ``pad_seq_to_mult`` and
``pad_cu_seqlens``. Neither pads anything as it reads: sequences have to be stored padded, with the tokenizer's
end-of-sequence id, and a JSON file has to say the longest sequence and the most sequences of a pack. All of it counts
positions of its batches, which cut the last token off every sequence: one of n tokens takes n - 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PADDED, PackedSpec, PackedWriter
from megatron_sft_idx.packs.run import Column, PackRun
from megatron_sft_idx.storage.publish import Identity, Kind, check_place, head_of, identity, new_file, remove, resolve

__all__ = ["PaddedPacks", "Padding", "check_packs_summary", "publish_with_summary"]

# What a summary says, in the order of ``PaddedPacks.metadata``.
_FIELDS = [
    "dataset_max_seqlen",
    "max_samples_per_bin",
    "packing_factor",
    "packing_efficiency",
    "pack_size",
    "min_packed_seqlen",
]
_MOST_NBYTES = 4096  # of a summary: six numbers


def _encoded(entry: dict[str, Any]) -> bytes:
    return orjson.dumps([entry]) + b"\n"


def _is_summary(path: str) -> bool:
    """Whether a file is, byte by byte, as ``_encoded`` writes one: Bridge's own, of the same fields, is spaced."""
    content = head_of(path, _MOST_NBYTES)
    try:
        (entry,) = orjson.loads(content)
    except (ValueError, TypeError):
        return False
    return (
        isinstance(entry, dict)
        and [*entry] == _FIELDS
        and all(type(value) in (int, float) for value in entry.values())
        and content == _encoded(entry)
    )


_KIND = Kind("a summary of packs as convert writes it for Megatron-Bridge", _is_summary)


def check_packs_summary(path: str, *, overwrite: bool, padded: bool, summary: bytes | None = None) -> Identity | None:
    """Refuse what stands where the summary of a Parquet file goes, if it may not be replaced or removed.

    Args:
        path: of the summary.
        overwrite: an older summary may go.
        padded: a summary is going to be written; without one a stranger's file at its place is nobody's concern.
        summary: what is going to be written, once it is known. Before that, and where it is there already, as a
            killed run leaves it, an older one is no error.

    Returns:
        What is there and goes with the file that it is of; None for nothing, or a stranger's.

    Raises:
        FormatError: a stranger's file is here, or an older summary that may not go.
    """
    if padded:
        path = resolve(path)
        known = summary is not None and head_of(path, _MOST_NBYTES) != summary
        return check_place(path, _KIND, overwrite=overwrite or not known)
    return check_place(path, _KIND, overwrite=overwrite) if _is_summary(path) else None


def publish_with_summary(writer: PackedWriter, path: str, summary: bytes | None, *, overwrite: bool) -> None:
    """Put a Parquet file in its place, and its summary, so that it never stands beside the summary of another.

    A kill on the way leaves the file without a summary, or the summary without its file, and the same command finishes.

    Args:
        writer: of the file, complete and synced.
        path: of the summary.
        summary: what it says; None for a file without one.
        overwrite: an older file and its summary may be replaced. The summary goes first, and the new one comes last.

    Raises:
        FormatError: something else has appeared at one of the places.
        OSError: the disk says no.
    """
    found = check_packs_summary(path, overwrite=overwrite, padded=summary is not None, summary=summary)
    if summary is None:
        if found is not None:
            remove(resolve(path), found)
        writer.finalize()
        return
    path = resolve(path)
    if overwrite:
        with new_file(path, _KIND, overwrite=True) as new:
            new.open().write(summary)
            new.sync()
            remove(path, found)
            writer.finalize()
            new.publish()
    elif head_of(path, _MOST_NBYTES) == summary:
        writer.finalize()  # a run that was killed left it
    else:
        # First: nothing is beside it yet. Behind the file, a kill would leave one that the same command refuses.
        with new_file(path, _KIND, overwrite=False) as new:
            new.open().write(summary)
            new.publish()
        made = identity(path)
        try:
            writer.finalize()
        except BaseException:
            with contextlib.suppress(FormatError, OSError):
                remove(path, made)
            raise


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
            name: Column(spec, spread(values) if spec.per == "token" else values)
            for name, (spec, values) in run.columns.items()
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
        return _encoded(entry)
