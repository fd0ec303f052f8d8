"""Writing packed Parquet, a row group at a time."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.base import PackedSpec, PackedWriter, PackRun
from megatron_sft_idx.formats.runs import BinaryMasks, Counts, IndexedRun
from megatron_sft_idx.storage.publish import Kind, new_file

if TYPE_CHECKING:
    import pyarrow as pa
from megatron_sft_idx.formats.parquet import COLUMNS, KEY, VERSION, Reader, pyarrow_errors, recognise
from megatron_sft_idx.storage import naming

__all__ = ["KIND", "Writer"]

KIND = Kind("a Parquet file of packs", lambda path: recognise(path) is not None)

# A row group is what a writer holds in memory and a random read decodes: 1000 packs of 4096, however long packs are.
# pyarrow's encoder takes 25 bytes a token of it beside the 5 that are held.
_MOST_GROUP_TOKENS = 4 << 20

# Codecs that Parquet has.
_CODECS = ("zstd", "snappy", "gzip", "lz4", "brotli")


def _metadata(spec: PackedSpec) -> bytes:
    """The schema's metadata, JSON, for a file that is going to hold what the spec says; the same for the same spec."""
    stated = {
        "format": "packed-sft",
        "version": VERSION,
        "mask_alignment": "label",
        "token_dtype": spec.token_dtype.name,
        "capacity": spec.capacity,
        "longest_pack": spec.longest_pack,
        "sequence_multiple": spec.sequence_multiple,
        "pad_id": spec.pad_id,
        "num_packs": spec.num_packs,
        "num_sequences": spec.num_sequences,
        "num_tokens": spec.num_tokens,
        "metadata": dict(spec.metadata),
    }
    return orjson.dumps(stated, option=orjson.OPT_SORT_KEYS)


def _list_array(values: NDArray[Any], lengths: NDArray[np.int64], kind: pa.DataType) -> pa.ListArray:
    """An Arrow list column over a numpy array."""
    import pyarrow as pa

    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values)), type=kind)


class Writer(PackedWriter):
    """Writes one packed Parquet file: int32 ids, uint8 masks, int32 starts, what Nemotron writes and Bridge reads.

    The same packs give the same bytes with the same release of pyarrow, which names itself in the file.

    Args:
        path: the file; it appears when it is whole.
        spec: what is going to be written; kept in the schema's metadata, and held against what came in the end.
        overwrite: replace a Parquet file of packs.
        allow_loss: write loss weights above 0 as 1.
        row_group_size: most packs in a row group; fewer where packs are long. Small groups make random reads quick,
            large ones the file small.
        compression: as pyarrow calls it.

    Raises:
        FormatError: something is at ``path``, or an option is not what pyarrow takes.
        SFTIndexError: pyarrow is not installed.
    """

    format = "parquet"

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec,
        *,
        overwrite: bool = False,
        allow_loss: bool = False,
        row_group_size: int = 1000,
        compression: str = "zstd",
    ) -> None:
        name = os.fspath(path)
        if row_group_size < 1:
            raise FormatError(f"{name}: row group size {row_group_size}, expected at least 1 pack")
        self._spec, self._row_group_size = spec, row_group_size
        self._counts, self._masks = Counts(), BinaryMasks(name, allow_loss=allow_loss)
        self.lost = self._masks.lost
        self._held: list[PackRun] = []
        self._held_packs = self._held_tokens = 0
        with pyarrow_errors(name):
            import pyarrow as pa
            import pyarrow.parquet as pq

            if compression != "none" and not (compression in _CODECS and pa.Codec.is_available(compression)):
                raise FormatError(f"{name}: compression {compression!r}, choose none, {', '.join(_CODECS)}")
        self._types = [pa.list_(pa.int32()), pa.list_(pa.uint8()), pa.list_(pa.int32())]
        self._schema = pa.schema(list(zip(COLUMNS, self._types, strict=True)), metadata={KEY: _metadata(spec)})
        self._output, self._complete = new_file(path, KIND, overwrite=overwrite), False
        try:
            with naming(self._output.temporary):
                self._writer: Any = pq.ParquetWriter(self._output.temporary, self._schema, compression=compression)
        except BaseException:
            self._output.abandon()
            raise

    def write(self, run: PackRun) -> None:
        """Append packs.

        Raises:
            FormatError: loss weights that are neither 0 nor 1, without ``allow_loss``.
        """
        mask = self._masks.of(run, self._counts.packs)
        self._counts.add(run)
        rest = IndexedRun(PackRun(run.tokens, mask, run.seq_starts, run.pack_lengths, run.pack_sequences))
        first = 0
        while first < len(rest):
            # Row groups are cut by packs and tokens alone: runs of any size give the same file.
            last = rest.fitting(first, self._row_group_size - self._held_packs, _MOST_GROUP_TOKENS - self._held_tokens)
            if last == first and not self._held:
                last = first + 1  # one pack that is longer than a group may be
            self._hold(rest.part(first, last))
            if last < len(rest) or self._held_packs == self._row_group_size:
                self._write_group()
            first = last

    def _hold(self, part: PackRun) -> None:
        if not len(part.pack_lengths):
            return
        # Copies: a view would keep a whole run, and whoever handed it in may fill its arrays anew.
        copies = (np.array(part.tokens, np.int32), part.loss_mask.copy(), part.seq_starts.copy())
        self._held.append(PackRun(*copies, part.pack_lengths.copy(), part.pack_sequences.copy()))
        self._held_packs += len(part.pack_lengths)
        self._held_tokens += len(part.tokens)

    def _write_group(self) -> None:
        import pyarrow as pa

        held, self._held, self._held_packs, self._held_tokens = self._held, [], 0, 0
        if not held:
            return
        lengths = np.concatenate([part.pack_lengths for part in held])
        columns = (
            (np.concatenate([part.tokens for part in held]), lengths),
            (np.concatenate([part.loss_mask for part in held]), lengths),
            (
                np.concatenate([part.seq_starts for part in held]).astype(np.int32),
                np.concatenate([part.pack_sequences for part in held]),
            ),
        )
        held.clear()  # the encoder needs several times as much: not both at once
        arrays = [_list_array(*column, kind) for column, kind in zip(columns, self._types, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        with naming(self._output.temporary):
            self._writer.write_table(table, row_group_size=len(lengths))
        pa.default_memory_pool().release_unused()

    def complete(self) -> None:
        """Write the last row group and the footer.

        Raises:
            FormatError: other packs were written than the spec announced.
        """
        if self._complete:
            return
        self._counts.require(self._output.path, self._spec)
        self._write_group()
        with naming(self._output.temporary):
            self._writer.close()
        self._complete = True

    def reread(self) -> Reader:
        """A reader of all of it."""
        return Reader(self._output.temporary)

    def abandon(self) -> None:
        """Remove what was written; nothing where it is finalized or abandoned already."""
        with contextlib.suppress(Exception):  # on a full disk the footer cannot be written either
            self._writer.close()
        super().abandon()
