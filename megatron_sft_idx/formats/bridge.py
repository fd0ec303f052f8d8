"""Support for Megatron-Bridge's packed files: stored padding, and a JSON summary next to the file.

For context parallelism and CUDA graphs, Bridge's packed dataset has the options ``pad_seq_to_mult`` and
``pad_cu_seqlens``. Neither of them pads while reading. The sequences must be stored padded with the tokenizer's
end-of-sequence id (``Padding``), and a summary must have the longest sequence and the largest number of sequences per
pack (``PackMeasure``). Both count positions of Bridge's batches, which drop the last token of every sequence: a
sequence of n tokens takes n - 1 positions.

Only ``convert`` pads, and only for Parquet output. Each ``.npy`` gets a summary, because Bridge's builder opens none
without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PackedSpec, recogniser
from megatron_sft_idx.packs.run import Column, PackRun, first_true
from megatron_sft_idx.storage.outputs import may_replace
from megatron_sft_idx.storage.publish import Kind, check_place, head_of, resolve

# The key of ``PackedSpec.metadata`` for packs stored with padding (``Padding``).
BRIDGE_PADDING_KEY = "bridge_padding"


@dataclass(frozen=True)
class Padding:
    """How to store sequences for Bridge.

    Attributes:
        multiple: each sequence takes a multiple of this many positions of a batch: 2 x context parallel size, times the
            tensor parallel size under sequence parallelism. 1 stores sequences without padding.
        eod_id: the padding id, which is the tokenizer's end of sequence; Bridge uses it to find the start of padding.
            It may be None only if ``multiple`` is 1.
    """

    multiple: int
    eod_id: int | None = None

    def positions(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the batch positions of sequences of these lengths, including padding: int64, like ``lengths``."""
        return -(-(lengths - 1) // self.multiple) * self.multiple

    def pad(self, run: PackRun) -> PackRun:
        """Return the same packs with every sequence padded. In padding, the mask and columns of tokens are 0."""
        lengths = run.sequence_lengths()
        padded_lengths = self.positions(lengths) + 1
        padded_starts = np.cumsum(padded_lengths) - padded_lengths
        moved_by = padded_starts - (np.cumsum(lengths) - lengths)
        targets = np.arange(len(run.tokens)) + np.repeat(moved_by, lengths)
        tokens = np.full(int(padded_lengths.sum()), self.eod_id or 0, run.tokens.dtype)
        tokens[targets] = run.tokens

        def spread(values: NDArray[Any]) -> NDArray[Any]:
            padded = np.zeros((len(tokens), *values.shape[1:]), values.dtype)
            padded[targets] = values
            return padded

        columns = {
            name: Column(spec, spread(values) if spec.per == "token" else values)
            for name, (spec, values) in run.columns.items()
        }
        pack_lengths = run.sums_by_pack(padded_lengths)
        starts = padded_starts - np.repeat(np.cumsum(pack_lengths) - pack_lengths, run.pack_sequences)
        return PackRun(tokens, spread(run.loss_mask), starts, pack_lengths, run.pack_sequences, run.unplaced, columns)


class _Summary(NamedTuple):
    """The values that Bridge reads next to a packed file, under its names, in positions of its batches."""

    dataset_max_seqlen: int
    max_samples_per_bin: int
    packing_factor: float
    packing_efficiency: float
    pack_size: int
    min_packed_seqlen: int

    def encode(self) -> bytes:
        return orjson.dumps([self._asdict()]) + b"\n"


class PackMeasure:
    """Measures packs, run by run, in positions of Bridge's batches.

    Args:
        path: path of the packs' source, for errors.
        padding: padding that will be applied; the packs are measured before that.
        capacity: maximum number of positions in a pack; None uses the length of the longest one.

    Attributes:
        num_positions: number of positions of all packs so far, including padding.
        longest_pack: number of tokens of the longest pack so far, including padding.
    """

    def __init__(self, path: str, padding: Padding, capacity: int | None) -> None:
        self._path, self._padding, self._capacity = path, padding, capacity
        self._num_packs = self._num_sequences = self._longest_sequence = self._most_sequences = 0
        self._most_positions, self._fewest_positions = 0, np.iinfo(np.int64).max
        self.num_positions = self.longest_pack = 0

    def add(self, run: PackRun) -> None:
        """Measure the next packs. SequenceError: one does not fit in the capacity after padding."""
        positions = self._padding.positions(run.sequence_lengths())
        of_packs = run.sums_by_pack(positions)
        if self._capacity is not None and (pack := first_true(of_packs > self._capacity)) is not None:
            multiple = self._padding.multiple
            raise SequenceError(
                self._path,
                self._num_packs + pack,
                f"{of_packs[pack]} positions with sequences padded to multiples of {multiple}, but the capacity is"
                f" {self._capacity}; pack again with --sequence-multiple {multiple}",
            )
        self._longest_sequence = max(self._longest_sequence, int(positions.max(initial=0)))
        self._most_sequences = max(self._most_sequences, int(run.pack_sequences.max(initial=0)))
        self._most_positions = max(self._most_positions, int(of_packs.max(initial=0)))
        self._fewest_positions = int(of_packs.min(initial=self._fewest_positions))
        self.longest_pack = max(self.longest_pack, int((of_packs + run.pack_sequences).max(initial=0)))
        self.num_positions += int(positions.sum())
        self._num_packs += len(run)
        self._num_sequences += len(positions)

    def summary(self) -> bytes | None:
        """Return the summary for Bridge; None without packs, because Bridge does not read such a file."""
        if not self._num_packs:
            return None
        size = self._capacity or self._most_positions
        return _Summary(
            dataset_max_seqlen=self._longest_sequence,
            max_samples_per_bin=self._most_sequences,
            packing_factor=round(self._num_sequences / self._num_packs, 2),
            packing_efficiency=round(self.num_positions / self._num_packs / max(size, 1) * 100, 2),
            pack_size=size,
            min_packed_seqlen=self._fewest_positions,
        ).encode()


def measure_padded(
    path: str, runs: Iterable[PackRun], padding: Padding, spec: PackedSpec
) -> tuple[PackedSpec, bytes | None]:
    """Measure packs as they will be stored with padding. Return their spec, and the bytes of the summary for Bridge.

    Stored packs may be longer than the capacity of a batch. With multiple 1, the spec is the given one.

    Args:
        path: path of the source, for errors.
        runs: all of its packs, without padding.
        padding: padding that will be applied.
        padding: how they will be padded.
        spec: spec of the packs without padding.

    Raises:
        FormatError: there are no packs, or no id to pad with.
        SequenceError: a pack does not fit in the capacity after padding.
    """
    multiple, eod_id = padding.multiple, padding.eod_id
    if not spec.num_packs:
        raise FormatError(f"{path}: the file has no packs, and Megatron-Bridge cannot read an empty file")
    if multiple > 1 and (eod_id is None or not 0 <= eod_id <= np.iinfo(spec.token_dtype).max):
        raise FormatError(
            f"{path}: padding needs the tokenizer's end-of-sequence id, expected one that fits into"
            f" {spec.token_dtype}, found {eod_id}; pass --eod-id"
        )
    measure = PackMeasure(path, padding, spec.capacity)
    for run in runs:
        measure.add(run)
    if multiple > 1:
        spec = dataclasses.replace(
            spec,
            num_tokens=measure.num_positions + spec.num_sequences,
            longest_pack=measure.longest_pack,
            capacity=max(spec.capacity, measure.longest_pack),
            sequence_multiple=1,
            metadata={**spec.metadata, BRIDGE_PADDING_KEY: dataclasses.asdict(padding)},
        )
    return spec, measure.summary()


# ---- the summary as a file ----


SUMMARY_SUFFIX = ".json"


def summary_path(destination: str) -> str:
    """Return the path of a file's summary. It is the value for Bridge's option ``packed_metadata_path``."""
    return destination + SUMMARY_SUFFIX


_MAX_SUMMARY_NBYTES = 4096  # six numbers take far less


@recogniser
def _is_summary(path: str) -> bool:
    """Return whether a file has exactly the form of ``_Summary.encode``. Bridge's own has the same keys, but spaces."""
    content = head_of(path, _MAX_SUMMARY_NBYTES)
    (entry,) = orjson.loads(content)
    summary = _Summary(*map(entry.get, _Summary._fields))
    return all(type(value) in (int, float) for value in summary) and content == summary.encode()


SUMMARY_KIND = Kind("a summary of packs that convert writes for Megatron-Bridge", _is_summary)


def check_summary_place(destination: str, *, overwrite: bool, written: bool) -> None:
    """Raise FormatError if the summary of a file may not be written, or an older one may not be removed.

    For a file without a summary, an unrelated file at that path is ignored.
    """
    path = summary_path(destination)
    if written or _is_summary(path):
        check_place(resolve(path), SUMMARY_KIND, overwrite=may_replace(resolve(destination), overwrite=overwrite))
