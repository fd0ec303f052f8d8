"""Writing pre-packed JSONL chunks, as a packing producer does."""

from __future__ import annotations

import os

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.base import PackedSpec, PackedWriter, PackRun
from megatron_sft_idx.formats.jsonl_chunks.chunks import chunk_name
from megatron_sft_idx.formats.jsonl_chunks.lines import UNTRAINED
from megatron_sft_idx.formats.jsonl_chunks.reader import KIND, Reader
from megatron_sft_idx.formats.runs import BinaryMasks, Counts
from megatron_sft_idx.storage import OutputFile
from megatron_sft_idx.storage.publish import new_folder, require_space

__all__ = ["Writer"]


class Writer(PackedWriter):
    """Writes a folder of chunks; it appears when the last one is written. Without packs, its one chunk is empty.

    Args:
        path: the folder.
        spec: what is going to be written; held against what came in the end.
        overwrite: replace a folder of chunks.
        allow_loss: write loss weights above 0 as 1.
        samples_per_chunk: packs in a chunk, the last one may have fewer; what the consumer has to be told.

    Raises:
        FormatError: something is at ``path``, or there are no packs in a chunk.
    """

    format = "jsonl-chunks"

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec,
        *,
        overwrite: bool = False,
        allow_loss: bool = False,
        samples_per_chunk: int = 100,
    ) -> None:
        self._path, self._spec, self._samples_per_chunk = os.fspath(path), spec, samples_per_chunk
        if samples_per_chunk < 1:
            raise FormatError(f"{self._path}: samples_per_chunk {samples_per_chunk}, expected at least 1 pack")
        self._counts, self._masks = Counts(), BinaryMasks(self._path, allow_loss=allow_loss)
        self.lost = self._masks.lost
        self._num_chunks = self._num_lines = 0
        # A digit and a comma for every id, label and position.
        require_space(self._path, 6 * spec.num_tokens, -(-spec.num_packs // samples_per_chunk))
        self._output, self._complete = new_folder(path, KIND, overwrite=overwrite), False
        self._chunk = self._next_chunk()

    def _next_chunk(self) -> OutputFile:
        name = chunk_name(self._num_chunks)
        self._num_chunks, self._num_lines = self._num_chunks + 1, 0
        return self._output.open(name)

    def write(self, run: PackRun) -> None:
        """Append packs.

        Raises:
            FormatError: loss weights that are neither 0 nor 1, without ``allow_loss``.
        """
        mask = self._masks.of(run, self._counts.packs)
        self._counts.add(run)
        tokens = run.tokens.astype(np.int64)
        # A label mask is 0 at every sequence's end, so that one shift right is right in all sequences at once.
        trained = np.zeros(len(mask), np.bool_)
        trained[1:] = mask[:-1]
        labels = np.where(trained, tokens, UNTRAINED)
        lengths = run.sequence_lengths()
        positions = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        token = sequence = 0
        for length, count in zip(run.pack_lengths.tolist(), run.pack_sequences.tolist(), strict=True):
            here, sequences = slice(token, token + length), slice(sequence, sequence + count)
            token, sequence = here.stop, sequences.stop
            self._write_line(
                {
                    "input_ids": tokens[here],
                    "labels": labels[here],
                    "position_ids": positions[here],
                    "lengths": lengths[sequences],
                    "pack_length": length,
                    "num_samples": count,
                }
            )

    def _write_line(self, pack: dict[str, NDArray[np.int64] | int]) -> None:
        if self._num_lines == self._samples_per_chunk:
            self._chunk.close()
            self._chunk = self._next_chunk()
        self._chunk.write(orjson.dumps(pack, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        self._num_lines += 1

    def complete(self) -> None:
        """Close the last chunk.

        Raises:
            FormatError: other packs were written than the spec announced.
        """
        if not self._complete:
            self._counts.require(self._path, self._spec)
            self._chunk.close()
            self._complete = True

    def reread(self) -> Reader:
        """A reader of all of it."""
        return Reader(self._output.temporary)

    def publish(self) -> None:
        """Put the folder in its place."""
        self._output.publish()

    def abandon(self) -> None:
        """Remove what was written; nothing where it is finalized or abandoned already."""
        self._chunk.close()
        self._output.abandon()
