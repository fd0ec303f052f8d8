"""The writer of runs, on top of the writer of packs."""

from __future__ import annotations

import os

import numpy as np

from megatron_sft_idx.formats.base import PackedSpec, PackedWriter, PackRun
from megatron_sft_idx.formats.memmap.shard_writer import MemmapShardWriter
from megatron_sft_idx.formats.runs import BinaryMasks, Counts

__all__ = ["STATED", "Writer"]

# The manifest's key for what the plain one does not say.
STATED = "megatron_sft_idx"


class Writer(PackedWriter):
    """Writes a memmap folder; its rows are as wide as the capacity.

    Args:
        path: the folder.
        spec: what is going to be written.
        overwrite: replace a folder that is not empty.
        allow_loss: write loss weights above 0 as 1.
        pack_size: width of the rows where not the capacity, such as the longest pack, to save space.

    Raises:
        FormatError: sizes that the format does not have, or something is at ``path``.
        OSError: no space for the whole of it, among others.
    """

    format = "memmap"

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec,
        *,
        overwrite: bool = False,
        allow_loss: bool = False,
        pack_size: int | None = None,
    ) -> None:
        self._path, self._spec = os.fspath(path), spec
        self._counts, self._masks = Counts(), BinaryMasks(self._path, allow_loss=allow_loss)
        self.lost = self._masks.lost
        stated = {
            "capacity": spec.capacity,
            "num_tokens": spec.num_tokens,
            "longest_pack": spec.longest_pack,
            "sequence_multiple": spec.sequence_multiple,
            "pad_id": spec.pad_id,
            "metadata": dict(spec.metadata),
        }
        self._writer = MemmapShardWriter(
            path,
            spec.num_packs,
            max(spec.capacity, 1) if pack_size is None else pack_size,  # an empty shard's capacity may be 0
            spec.num_sequences,
            np.uint16 if spec.token_dtype == np.uint16 else np.int32,
            mask_alignment="label",
            overwrite=overwrite,
            extra={STATED: stated},
        )

    def write(self, run: PackRun) -> None:
        """Append packs.

        Raises:
            FormatError: loss weights that are neither 0 nor 1, without ``allow_loss``.
            SequenceError: a pack is longer than a row.
        """
        mask = self._masks.of(run, self._counts.packs)
        self._writer.write_run(run, mask)
        self._counts.add(run)

    def finalize(self) -> None:
        """Write the manifest, and put the folder in its place. FormatError where packs are missing."""
        try:
            self._counts.require(self._path, self._spec)
            self._writer.finalize()
        except BaseException:
            self._writer.abandon()
            raise

    def abandon(self) -> None:
        """Remove what was written; nothing where it is finalized or abandoned already."""
        self._writer.abandon()
