"""What Megatron-Bridge wants of a packed Parquet file: padding stored in its packs, and a JSON summary beside it.

Under context parallelism, and for CUDA graphs, Bridge's packed data set takes the options ``pad_seq_to_mult`` and
``pad_cu_seqlens``. Neither pads anything as it reads. Sequences have to be stored padded with the tokenizer's
end-of-sequence id (``Padding``), and a summary has to say the longest sequence and the most sequences of a pack
(``measure_padded``). Both count positions of Bridge's batches, which cut the last token off every sequence: a sequence
of n tokens takes n - 1 positions.

Only ``convert`` pads, and only where it writes Parquet.
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

# The key of ``PackedSpec.metadata`` where packs are stored with padding (``Padding``).
BRIDGE_PADDING_KEY = "bridge_padding"


@dataclass(frozen=True)
class Padding:
    """How sequences are stored for Bridge.

    Attributes:
        multiple: each sequence takes a multiple of so many positions of a batch: 2 x context parallel size, times the
            tensor parallel size under sequence parallelism. 1 stores sequences as they are.
        eod_id: the id that sequences are filled up with, the tokenizer's end of sequence, by which Bridge finds where
            padding begins. It may be None only where ``multiple`` is 1.
    """

    multiple: int
    eod_id: int | None = None

    def positions(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of a batch that sequences of so many tokens take, padding included: int64, as ``lengths``."""
        return -(-(lengths - 1) // self.multiple) * self.multiple

    def pad(self, run: PackRun) -> PackRun:
        """The same packs with every sequence filled up; in padding, the mask and columns of tokens are 0."""
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
    """What Bridge reads beside a Parquet file, under its names of the values, in positions of its batches."""

    dataset_max_seqlen: int
    max_samples_per_bin: int
    packing_factor: float
    packing_efficiency: float
    pack_size: int
    min_packed_seqlen: int

    def encode(self) -> bytes:
        return orjson.dumps([self._asdict()]) + b"\n"


def measure_padded(path: str, runs: Iterable[PackRun], padding: Padding, spec: PackedSpec) -> tuple[PackedSpec, bytes]:
    """Measure packs as they will be stored with padding: their spec, and the bytes of the summary that Bridge reads.

    Stored packs may be longer than the capacity of a batch. With multiple 1 the spec is the one that was given.

    Args:
        path: the source's, for errors.
        runs: all of its packs, without padding.
        padding: how they will be padded.
        spec: of the packs without padding.

    Raises:
        FormatError: there are no packs, or no id to pad with.
        SequenceError: a pack does not fit the capacity once its sequences are padded.
    """
    multiple, eod_id = padding.multiple, padding.eod_id
    if not spec.num_packs:
        raise FormatError(f"{path}: it has no packs, and Megatron-Bridge reads no file without any")
    if multiple > 1 and (eod_id is None or not 0 <= eod_id <= np.iinfo(spec.token_dtype).max):
        raise FormatError(
            f"{path}: padding needs the tokenizer's end-of-sequence id, found {eod_id}, expected one that"
            f" {spec.token_dtype} holds; pass --eod-id"
        )
    num_packs = num_positions = longest = longest_pack = max_sequences = 0
    shortest_pack = spec.capacity
    for run in runs:
        positions = padding.positions(run.sequence_lengths())
        pack_positions = run.sums_by_pack(positions)
        if (pack := first_true(pack_positions > spec.capacity)) is not None:
            raise SequenceError(
                path,
                num_packs + pack,
                f"{pack_positions[pack]} positions with sequences padded to multiples of {multiple}, the capacity is"
                f" {spec.capacity}; pack again with --sequence-multiple {multiple}",
            )
        longest = max(longest, int(positions.max(initial=0)))
        max_sequences = max(max_sequences, int(run.pack_sequences.max(initial=0)))
        shortest_pack = min(shortest_pack, int(pack_positions.min(initial=spec.capacity)))
        longest_pack = max(longest_pack, int((pack_positions + run.pack_sequences).max(initial=0)))
        num_positions += int(positions.sum())
        num_packs += len(run)
    summary = _Summary(
        dataset_max_seqlen=longest,
        max_samples_per_bin=max_sequences,
        packing_factor=round(spec.num_sequences / spec.num_packs, 2),
        packing_efficiency=round(num_positions / spec.num_packs / spec.capacity * 100, 2),
        pack_size=spec.capacity,
        min_packed_seqlen=shortest_pack,
    )
    if multiple > 1:
        spec = dataclasses.replace(
            spec,
            num_tokens=num_positions + spec.num_sequences,
            longest_pack=longest_pack,
            capacity=max(spec.capacity, longest_pack),
            sequence_multiple=1,
            metadata={**spec.metadata, BRIDGE_PADDING_KEY: dataclasses.asdict(padding)},
        )
    return spec, summary.encode()


# ---- the summary as a file ----


SUMMARY_SUFFIX = ".json"


def summary_path(destination: str) -> str:
    """Where the summary of a Parquet file goes; Bridge takes this path as its option ``packed_metadata_path``."""
    return destination + SUMMARY_SUFFIX


_MAX_SUMMARY_NBYTES = 4096  # six numbers take far less


@recogniser
def _is_summary(path: str) -> bool:
    """Whether a file is, byte by byte, as ``_Summary.encode`` writes it; Bridge's own has the same keys, but spaces."""
    content = head_of(path, _MAX_SUMMARY_NBYTES)
    (entry,) = orjson.loads(content)
    summary = _Summary(*map(entry.get, _Summary._fields))
    return all(type(value) in (int, float) for value in summary) and content == summary.encode()


SUMMARY_KIND = Kind("a summary of packs as convert writes it for Megatron-Bridge", _is_summary)


def check_summary_place(destination: str, *, overwrite: bool, padded: bool) -> None:
    """FormatError where the summary of a Parquet file may not be written, or an older one not be removed.

    For a Parquet file without padding, a file at that path that is no such summary is ignored.
    """
    path = summary_path(destination)
    if padded or _is_summary(path):
        check_place(resolve(path), SUMMARY_KIND, overwrite=may_replace(resolve(destination), overwrite=overwrite))
