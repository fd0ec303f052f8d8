"""``BatchAssembler`` converts packs of any source to the batches of tensors that Megatron trains on.

A row of S = ``seq_length`` positions holds the concatenated sequences of one pack, then padding. Labels are the tokens
shifted left inside each sequence. At the last position of a sequence and on padding, the label is the pad id and the
loss mask is 0. The padding at the end (the tail) is a separate segment: it has an entry in ``cu_seqlens``, its
positions count from 0, no sequence attends to it, and ``max_seqlen`` covers it.

With ``sequence_multiple`` m > 1, for context parallelism, each sequence is padded to a multiple of m when it is read.
There are then two kinds of boundaries, and Transformer Engine takes both (``cu_seqlens_q`` and
``cu_seqlens_q_padded``):

- ``cu_seqlens_padded``: the start of each sequence in the row and of the tail; the remaining entries are S.
- ``cu_seqlens``: running sums of the unpadded lengths. Sequence k has ``cu_seqlens[k + 1] - cu_seqlens[k]`` tokens from
  position ``cu_seqlens_padded[k]`` on. The tail and all entries after it have length 0. The last value is therefore
  the number of tokens, not S; with S there, a sequence would extend past the end of the row.

Requested columns are additional tensors, filled up with zeros. Columns of tokens have the layout of the loss mask.
Columns of sequences have one entry per boundary: entry k belongs to the sequence that begins there. Columns of packs
have one entry per row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate, get_worker_info

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import PER, ColumnSpec, Per
from megatron_sft_idx.layout.files import no_column
from megatron_sft_idx.layout.media_layout import KIND_NAMES
from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.storage.remote import RemoteArray
from megatron_sft_idx.training.fetch import BUDGET_NBYTES, Fetcher, Placed, advise, place
from megatron_sft_idx.training.media import (
    BatchItem,
    MediaBatch,
    MediaStep,
    check_media_options,
    run_step,
    text_positions,
)
from megatron_sft_idx.training.sources import (
    CARRIED_BY,
    Arrays,
    PackSource,
    Segments,
    WholeRows,
    find_items,
    in_slots,
    require_text,
)

# ---- tensors and their memory layout ----


Form = Literal["wide", "narrow", "narrow-weighted"]
# By name. A media step may add values that are not tensors.
Tensors = dict[str, torch.Tensor]

# A cache line: every tensor of a batch begins on one.
_ALIGNMENT = 64


@shown_by_fields
class BatchColumn(NamedTuple):
    """A column of batches. With ``width`` > 1 items per row, ``width`` is the last dimension of its tensor."""

    name: str
    per: Per
    dtype: str
    width: int


@shown_by_fields
@dataclass(frozen=True)
class BatchLayout:
    """The tensors of a micro-batch.

    Attributes:
        rows: number of rows; each row is one pack.
        seq_length: positions in a row.
        width: entries in a row of ``cu_seqlens``.
        padded: whether sequences are padded inside the row; if so, there is a ``cu_seqlens_padded``.
        form: ``wide`` is the form that Megatron takes: tokens, labels and position_ids int64, loss_mask float32.
            ``narrow`` has only int32 tokens and a uint8 loss_mask; in ``narrow-weighted`` the loss_mask is float32.
            ``widen`` makes the wide form from these.
        padding_mask: whether there is a padding mask: bool, True on padding inside the row and at its end.
        columns: the columns. Their shape is [rows, seq_length] for tokens, [rows, width - 1] for sequences and [rows]
            for packs.
    """

    rows: int
    seq_length: int
    width: int
    padded: bool = False
    form: Form = "wide"
    padding_mask: bool = False
    columns: tuple[BatchColumn, ...] = ()

    @cached_property
    def _fields(self) -> tuple[list[tuple[str, torch.dtype, tuple[int, ...], int]], int]:
        """Name, dtype, shape and offset of each tensor, and the total number of bytes."""
        row, bounds = (self.rows, self.seq_length), (self.rows, self.width)
        tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]
        if self.form == "wide":
            tensors = [(name, torch.int64, row) for name in ("tokens", "labels", "position_ids")]
        else:
            tensors = [("tokens", torch.int32, row)]
        loss = torch.uint8 if self.form == "narrow" else torch.float32
        tensors += [("loss_mask", loss, row), ("cu_seqlens", torch.int32, bounds)]
        if self.padded:
            tensors.append(("cu_seqlens_padded", torch.int32, bounds))
        tensors.append(("max_seqlen", torch.int32, (self.rows,)))
        if self.padding_mask:
            tensors.append(("padding_mask", torch.bool, row))
        places = {"token": row, "sequence": (self.rows, self.width - 1), "pack": (self.rows,)}
        for column in self.columns:
            items = () if column.width == 1 else (column.width,)
            dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
            tensors.append((column.name, dtype, (*places[column.per], *items)))
        fields, nbytes = [], 0
        for name, dtype, shape in tensors:
            offset = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            fields.append((name, dtype, shape, offset))
            nbytes = offset + math.prod(shape) * dtype.itemsize
        return fields, nbytes

    @property
    def nbytes(self) -> int:
        """Size in bytes of the storage that holds all tensors."""
        return self._fields[1]

    def carve(self, storage: torch.Tensor) -> Tensors:
        """Return the tensors as views of a storage, uint8 [nbytes] or longer."""
        whole, tensors = storage.untyped_storage(), {}
        for name, dtype, shape, offset in self._fields[0]:
            strides = tuple(math.prod(shape[axis:]) for axis in range(1, len(shape) + 1))
            # One call of set_ takes half the time of slicing and viewing.
            tensors[name] = torch.empty(0, dtype=dtype).set_(whole, offset // dtype.itemsize, shape, strides)
        return tensors


_layout = lru_cache(maxsize=64)(BatchLayout)


class Batch(Shown):
    """The reusable buffer of one micro-batch; as a sequence, its rows.

    ``__getitems__`` of a data set returns one. The collate function ``whole_batch`` takes it as a whole. Other collate
    functions get single rows, so a DataLoader without ``whole_batch`` works too, but is slower.

    Args:
        layout: the tensors of the batch.
        pin_memory: whether to pin the memory for copies to a GPU, if there is a GPU.
        shared: whether to use shared memory, to pass the batch to another process.
        storage: the storage of another batch, uint8 [nbytes]; None allocates one.

    Attributes:
        tensors: views of the storage, by name.
        arrays: the same as numpy arrays.
        media: the output of the media step for the images and audio in the batch, by name; None without a media step.
    """

    def __init__(
        self,
        layout: BatchLayout,
        *,
        pin_memory: bool = False,
        shared: bool = False,
        storage: torch.Tensor | None = None,
    ) -> None:
        if storage is None:
            storage = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pin_memory and torch.cuda.is_available())
        if shared:
            storage.share_memory_()  # type: ignore[no-untyped-call]
        self.layout, self.storage, self.tensors, self._shared = layout, storage, layout.carve(storage), shared
        self.arrays: dict[str, NDArray[Any]] = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self.media: dict[str, Any] | None = None

    def _shown(self) -> str:
        return f"{self.layout.rows} x {self.layout.seq_length:,} tokens: {', '.join(self.tensors)}"

    def __len__(self) -> int:
        return self.layout.rows

    def __getitem__(self, row: int) -> Tensors:
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {row}; the number of rows is {len(self)}")
        if self.media is not None:
            # torch would stack rows by the names in the first one, and tensors by their numbers of images.
            raise FormatError(
                "rows with images or audio are returned as whole batches; pass collate_fn=whole_batch to the"
                " DataLoader, and rows_of(dataset) if the dataset is a blend"
            )
        return {name: tensor[row] for name, tensor in self.tensors.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as one tensor. In another process it unpickles as the dictionary of all tensors."""
        return _unpickled, (self.layout, self.storage, self.media or {})

    def whole(self) -> Tensors | Batch:
        """Return the tensors by name, or the batch itself if it is in shared memory, because it pickles faster."""
        return self if self._shared else {**self.tensors, **(self.media or {})}

    def head(self, rows: int) -> Batch:
        """Return a batch with fewer rows in the same storage: the last batch of an epoch may be smaller."""
        if rows == self.layout.rows:
            return self
        if not 0 <= rows < self.layout.rows:
            raise ValueError(f"a batch of {rows} rows does not fit the buffers of {self.layout.rows} rows")
        return Batch(replace(self.layout, rows=rows), storage=self.storage)


def _unpickled(layout: BatchLayout, storage: torch.Tensor, media: dict[str, Any]) -> Tensors:
    return {**layout.carve(storage), **media}


def whole_batch(rows: Any) -> Any:
    """Collate rows of a data set whose ``__getitems__`` returns a ``Batch``; torch stacks all other rows."""
    return rows.whole() if isinstance(rows, Batch) else default_collate(rows)


# ---- packs to tensors ----


def parallel_multiple(context: int | None, sequence: int) -> int:
    """Return the sequence multiple for context and sequence parallel sizes; None, 0 and 1 mean no parallelism."""
    return (2 * context if context and context > 1 else 1) * max(sequence, 1)


class BatchAssembler(Shown, Dataset[Tensors]):
    """Assemble micro-batches from a source of packs, in C++ and without the interpreter's lock.

    The assembler has no buffers. Its pickle is as small as that of its source. It is also a map-style data set of packs
    that returns whole batches to a DataLoader::

        loader = DataLoader(assembler, batch_sampler=batch_sampler, collate_fn=whole_batch, num_workers=2)

    Without workers, these are new tensors. A worker process passes one tensor in shared memory that holds all tensors
    of the batch, and the receiver makes views of it. Passing five tensors would cost more than twice as much.

    Args:
        source: the source of packs.
        seq_length: positions in a row; a multiple of ``sequence_multiple``.
        sequence_multiple: each sequence is padded to a multiple of this: 2 x context parallel size, times tensor
            parallel size under sequence parallelism.
        width: entries in a row of ``cu_seqlens``, the same for all data sets that are trained together; None for
            ``most_sequences + 2`` of the source.
        pad_id: a valid token id; None for the pad id of the source, or 0 if the source has none.
        form: ``wide`` or one of the narrow forms (see ``BatchLayout``).
        padding_mask: whether batches have a padding mask, for MoE routers.
        columns: names of the columns of the source to add to batches.
        files: files that get the first numbers in the column ``source``, so that several assemblers number files in the
            same way.
        media: makes model inputs from the images and audio of a batch, which are added to the batch: ``MediaInputs`` or
            ``keep_items``.
        ignore_media: accept packs with images or audio and treat their placeholder tokens as text.
        fetch_nbytes: how many bytes of remote shards ``will_need`` may fetch ahead.

    Raises:
        ValueError: arguments contradict each other, or packs of the source may not fit a row.
        FormatError: the source has no such column; or its packs have images or audio, and neither ``media`` nor
            ``ignore_media`` was passed.

    Example:
        >>> from megatron_sft_idx.shard.shard_set import ShardSet
        >>> from megatron_sft_idx.training.sources import StoredPacks
        >>> assembler = BatchAssembler(StoredPacks(ShardSet.open("data/chats")), seq_length=16)
        >>> batch = assembler.assemble([5, 6])
        >>> for name, tensor in batch.items():
        ...     print(name, tensor.dtype, list(tensor.shape))
        tokens torch.int64 [2, 16]
        labels torch.int64 [2, 16]
        position_ids torch.int64 [2, 16]
        loss_mask torch.float32 [2, 16]
        cu_seqlens torch.int32 [2, 6]
        max_seqlen torch.int32 [2]
        >>> batch["cu_seqlens"][1]  # sequences of 2, 3 and 4 tokens, then padding up to 16
        tensor([ 0,  2,  5,  9, 16, 16], dtype=torch.int32)
    """

    def __init__(
        self,
        source: PackSource,
        seq_length: int,
        *,
        sequence_multiple: int = 1,
        width: int | None = None,
        pad_id: int | None = None,
        form: Form = "wide",
        padding_mask: bool = False,
        columns: Sequence[str] = (),
        files: Sequence[dict[str, Any]] = (),
        media: MediaStep | None = None,
        ignore_media: bool = False,
        fetch_nbytes: int = BUDGET_NBYTES,
    ) -> None:
        if seq_length % sequence_multiple:
            raise ValueError(
                f"sequence length {seq_length} is not a multiple of the sequence multiple {sequence_multiple}"
            )
        if source.capacity > seq_length:
            raise ValueError(
                f"packs of up to {source.capacity} tokens do not fit a sequence length of {seq_length}; raise it, or"
                " pack again"
            )
        worst = source.capacity + source.most_sequences * (sequence_multiple - 1)
        if source.sequence_multiple % sequence_multiple and worst > seq_length:
            raise ValueError(
                f"the packs were made for a sequence multiple of {source.sequence_multiple} and may not fit"
                f" {seq_length} positions with a multiple of {sequence_multiple}: pack again with a sequence multiple"
                f" of {sequence_multiple}"
            )
        check_media_options(media, ignore_media)
        if media is None:
            require_text(source.media_prefix or "", source.media_prefix is not None, ignore_media, CARRIED_BY)
        for name in columns:
            if name not in source.columns:
                raise FormatError(
                    f"columns: the source {no_column(name, source.columns)}; open its shards with this column"
                )
        self.source, self.seq_length, self.sequence_multiple = source, seq_length, sequence_multiple
        self.width = source.most_sequences + 2 if width is None else width
        self.pad_id = (source.pad_id or 0) if pad_id is None else pad_id
        self.form: Form = form
        self.padding_mask, self._first_files, self.media = padding_mask, files, media
        specs = [(name, source.columns[name][0]) for name in columns]
        self.columns = tuple(BatchColumn(name, spec.per, spec.dtype.str, spec.width) for name, spec in specs)
        # The positions of columns among the arrays of a shard. Columns of tokens are read together with the tokens.
        order = list(source.columns)
        self._positions = {column: 2 + order.index(column.name) for column in self.columns}
        self._per_token = [0, 1, *(position for column, position in self._positions.items() if column.per == "token")]
        self._fetcher = Fetcher(fetch_nbytes)

    def _shown(self) -> str:
        columns = f", columns {', '.join(column.name for column in self.columns)}" if self.columns else ""
        return f"rows of {self.seq_length:,} tokens, {self.form}{columns}, of {self.source!r}"

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except the cached ``_files``."""
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    def layout(self, rows: int, seq_length: int | None = None) -> BatchLayout:
        """Return the layout of a batch of ``rows`` rows; ``seq_length`` overrides that of the assembler."""
        shape, padded = (rows, seq_length or self.seq_length, self.width), self.sequence_multiple > 1
        return _layout(*shape, padded, self.form, self.padding_mask, self.columns)

    @property
    def source_files(self) -> list[dict[str, Any]]:
        """The files to which the numbers in the column ``source`` refer: the merged tables of all shards.

        Raises:
            FormatError: batches do not have this column, or ``preprocess`` did not write it.
        """
        if all(column.name != "source" for column in self.columns):
            raise FormatError(
                "the batch has no column source, which gives the input file of each sequence; request it with columns="
            )
        if self._files is None:
            raise FormatError(
                "column source: expected two uint32 per sequence and a table of files, as written by preprocess"
            )
        return self._files.files

    @cached_property
    def _files(self) -> SourceFiles | None:
        """The renumbering of ``source``; None if it is a column of another kind, which is not changed."""
        return SourceFiles.of(self.source.columns["source"], self._first_files)

    def plan(self, packs: NDArray[np.int64] | Sequence[int]) -> Segments:
        """Return the locations of the sequences of these packs, for ``fill`` and ``will_need``."""
        return self.source.segments(np.asarray(packs, np.int64))

    def fill(
        self,
        segments: Segments,
        out: Batch,
        masked: NDArray[np.bool_] | None = None,
        *,
        seq_length: int | None = None,
    ) -> Tensors:
        """Write a batch into ``out``, which may have more rows, and return views of it.

        Args:
            segments: the result of ``plan``.
            out: the buffer.
            masked: bool [rows], True for rows that only fill up the batch; their loss mask is set to 0.
            seq_length: positions in these rows; None for ``seq_length`` of the assembler.

        Raises:
            ValueError: a row does not fit, or a sequence is outside its shard.
            FormatError: a remote shard was replaced since it was opened.
            StorageError: the object store of a remote shard does not answer.
        """
        out = out.head(len(segments.offsets) - 1)
        if out.layout != (layout := self.layout(out.layout.rows, seq_length)):
            raise ValueError(f"the buffers have {out.layout}, but this assembler fills {layout}")
        arrays = out.arrays
        shards, slots = self._shards(segments)
        token_arrays, in_memory = self._token_arrays(shards), segments
        if _any_remote(token_arrays):
            in_memory, token_arrays = self._fetcher.gather(segments, slots, token_arrays)
        placed = place(token_arrays, slots, in_memory)
        _native.assemble(
            placed.arrays,
            segments.offsets,
            placed.slots,
            placed.starts,
            segments.lengths,
            self.sequence_multiple,
            self.pad_id,
            arrays["tokens"],
            arrays.get("labels"),
            arrays.get("position_ids"),
            arrays["loss_mask"],
            arrays["cu_seqlens"],
            arrays.get("cu_seqlens_padded"),
            arrays["max_seqlen"],
            tuple(self._columns(segments, shards, slots, placed, arrays)) if self.columns else (),
        )
        if "source" in arrays and self._files is not None:
            self._files.renumber(arrays["source"], segments)
        if self.padding_mask:
            arrays["padding_mask"][:] = _padding(segments, layout.seq_length, self.sequence_multiple)
        if segments.whole is not None:
            self._put_whole(segments.whole, out.tensors)
        if masked is not None:
            arrays["loss_mask"][masked] = 0
        if self.media is None:
            return dict(out.tensors)
        out.media = run_step(self.media, self._media_batch(segments, out.tensors), out.tensors)
        return {**out.tensors, **out.media}

    def _media_batch(self, segments: Segments, tensors: Tensors) -> MediaBatch:
        """Return the input of the media step for a batch: its sequences, and its images and audio in order."""
        counts = np.diff(segments.offsets)
        rows, starts = np.repeat(np.arange(len(counts)), counts), _begins(segments, self.sequence_multiple)
        found = find_items(self.source, segments)
        sequences, blobs = found.segments, found.items.blobs
        files = [finder.bytes_of_each(blobs[found.slots == slot].tolist()) for slot, finder in enumerate(found.finders)]
        columns = (
            found.items.kinds,
            starts[sequences] + found.items.starts,
            found.items.lengths,
            found.slots,
            blobs,
            rows[sequences],
            sequences,
        )
        items = [
            BatchItem(KIND_NAMES[kind], start, length, files[slot][blob], row, sequence)
            for kind, start, length, slot, blob, row, sequence in zip(*(each.tolist() for each in columns), strict=True)
        ]
        positions = tensors.get("position_ids")
        if positions is None:
            positions = text_positions(tensors["tokens"].shape, rows, starts, segments.lengths)
        return MediaBatch(tensors["tokens"], positions, rows, starts, segments.lengths, items)

    def assemble(
        self,
        packs: NDArray[np.int64] | Sequence[int],
        out: Batch | None = None,
        *,
        masked: NDArray[np.bool_] | None = None,
    ) -> Tensors:
        """Make a batch with one row per pack.

        Args:
            packs: numbers of packs in the source [B].
            out: the buffer to write into; None for new memory.
            masked: rows that only fill up the batch, bool [B]; their loss mask is set to 0. None if there are none.

        Returns:
            tokens, labels, position_ids int64 [B, S], loss_mask float32 [B, S], cu_seqlens int32 [B, W], max_seqlen
                int32 [B], and with a sequence multiple above 1 also cu_seqlens_padded int32 [B, W]. Columns keep their
                dtypes. Their shape is [B, S], [B, W - 1] or [B]; with w > 1 items per row, w is an additional last
                dimension.

        Example:
            >>> from megatron_sft_idx.shard.shard_set import ShardSet
            >>> from megatron_sft_idx.training.sources import StoredPacks
            >>> batch = BatchAssembler(StoredPacks(ShardSet.open("data/chats")), seq_length=12).assemble([6])
            >>> for name in ("tokens", "labels", "position_ids"):  # of three sequences and three positions of padding
            ...     print(batch[name][0].tolist())
            [60, 61, 62, 63, 64, 65, 66, 67, 68, 0, 0, 0]
            [61, 0, 63, 64, 0, 66, 67, 68, 0, 0, 0, 0]
            [0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
        """
        segments = self.plan(packs)
        return self.fill(segments, Batch(self.layout(len(segments.offsets) - 1)) if out is None else out, masked)

    def sample(self, pack: int, masked: bool = False) -> Tensors:
        """Return one row without the batch dimension; ``masked`` zeroes its loss mask, for filling up a batch.

        FormatError: there is a media step, whose results come in whole batches only.
        """
        batch = Batch(self.layout(1))
        self.assemble([pack], batch, masked=np.array([masked]))
        return batch[0]

    def rows(self, packs: NDArray[np.int64] | Sequence[int], masked: NDArray[np.bool_] | None = None) -> Batch:
        """Return a batch for a DataLoader, in shared memory in worker processes; for ``masked``, see ``fill``."""
        in_worker, segments = get_worker_info() is not None, self.plan(packs)
        if in_worker:
            self.will_need(segments)  # from disk, reading everything at once is faster than one page after another
        batch = Batch(self.layout(len(segments.offsets) - 1), shared=in_worker)
        self.fill(segments, batch, masked)
        return batch

    __getitems__ = rows
    __getitem__ = sample

    def __len__(self) -> int:
        return self.source.num_packs

    def will_need(self, segments: Segments) -> None:
        """Read these sequences in the background; returns immediately.

        The kernel is asked to read sequences of local shards from disk. Sequences of remote shards are fetched, and
        ``fill`` uses the result if it gets the same ``segments`` object.
        """
        shards, slots = self._shards(segments)
        arrays = self._token_arrays(shards)
        if _any_remote(arrays):
            self._fetcher.announce(segments, slots, arrays)
        else:
            advise(arrays, slots, segments)
        if self.media is not None:
            found = find_items(self.source, segments)
            for slot, finder in enumerate(found.finders):
                finder.will_need(found.items.blobs[found.slots == slot].tolist())

    def forget_needs(self) -> None:
        """Drop data that was fetched for batches that will not be filled."""
        self._fetcher.forget()

    def _put_whole(self, whole: WholeRows, out: Tensors) -> None:
        """Put whole rows into a batch that has only padding in their places."""
        if "labels" not in out:
            raise ValueError(f"whole rows cannot be returned in {self.form} batches, which cannot store the last label")
        for row, shard, number in zip(*(column.tolist() for column in whole[:3]), strict=True):
            tokens, labels = whole.read(shard, number)
            out["tokens"][row], out["labels"][row] = tokens, labels
            if "source" in out and self._files is not None:
                out["source"][row, 0] = torch.tensor([self._files.first_of(shard), number], dtype=torch.uint32)
        rows = torch.from_numpy(whole.packs)
        out["loss_mask"][rows] = 1
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            if name in out:
                out[name][rows, 1:] = self.seq_length
        if "padding_mask" in out:
            out["padding_mask"][rows] = False

    def _token_arrays(self, shards: Sequence[Arrays]) -> Sequence[Arrays]:
        """Return the arrays of each shard that have one item per token: tokens, masks and columns of tokens."""
        if not self.columns:
            return shards
        return [tuple(arrays[index] for index in self._per_token) for arrays in shards]

    def _columns(
        self,
        segments: Segments,
        shards: Sequence[Arrays],
        slots: NDArray[np.int32],
        placed: Placed,
        out: dict[str, NDArray[Any]],
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the kernel's arguments for each column: ``PER``, row bytes, arrays, slots and starts, output."""
        for column, index in self._positions.items():
            row_nbytes = np.dtype(column.dtype).itemsize * column.width
            if column.per == "token":
                position = self._per_token.index(index)
                rows, own, starts = [arrays[position] for arrays in placed.arrays], placed.slots, placed.starts
            else:
                by_pack = column.per == "pack"
                numbers = segments.packs if by_pack else segments.sequences
                if numbers is None:
                    raise ValueError(f"column {column.name}: it is unknown which {column.per}s of the shards these are")
                own = slots[segments.offsets[:-1]] if by_pack else slots
                rows, starts = [arrays[index][:] for arrays in shards], numbers
            yield PER[column.per], row_nbytes, tuple(rows), own, starts, out[column.name]

    def _shards(self, segments: Segments) -> tuple[list[Arrays], NDArray[np.int32]]:
        """Return the arrays of the shards that are read, and for each sequence the position of its shard in them."""
        used, slots = in_slots(segments.shards, segments.used)
        if used and used[0] < 0:
            raise ValueError(f"shard {used[0]} of a sequence does not exist")
        return [self.source.arrays(shard) for shard in used], slots


@shown_by_fields
class SourceFiles(NamedTuple):
    """The files in the column ``source``: each shard has its own numbering, batches have one for all shards.

    Attributes:
        files: the files of all shards, each once.
        numbers: int64, the positions in ``files`` for the files of the concatenated tables of all shards; None if these
            equal the numbers in every shard.
        firsts: int64 [shards + 1], the position in ``numbers`` at which the table of each shard begins.
    """

    files: list[dict[str, Any]]
    numbers: NDArray[np.int64] | None
    firsts: NDArray[np.int64]

    @classmethod
    def of(cls, specs: Sequence[ColumnSpec], first: Sequence[dict[str, Any]] = ()) -> SourceFiles | None:
        """Merge the tables in the specs of the column in all shards. The files in ``first``, all distinct, come first.

        Returns None if the column is of another kind or has no table.
        """
        tables = [spec.metadata.get("files") for spec in specs]
        if specs[0].kind[:3] != ("sequence", "<u4", 2) or not all(isinstance(table, list) for table in tables):
            return None
        positions = {json.dumps(file, sort_keys=True): number for number, file in enumerate(first)}
        by_table: dict[str, list[int]] = {}  # thousands of shards usually share one table
        by_shard = []
        for table in tables:
            if (key := json.dumps(table, sort_keys=True)) not in by_table:
                files = [json.dumps(file, sort_keys=True) for file in table or ()]
                by_table[key] = [positions.setdefault(file, len(positions)) for file in files]
            by_shard.append(by_table[key])
        are_positions = all(each == list(range(len(each))) for each in by_table.values())
        numbers = None if are_positions else np.concatenate([np.array(each, np.int64) for each in by_shard])
        return cls([json.loads(file) for file in positions], numbers, np.cumsum([0, *map(len, by_shard)]))

    def first_of(self, shard: int) -> int:
        """Return the position in ``files`` of the first file in the table of a shard."""
        return 0 if self.numbers is None else int(self.numbers[self.firsts[shard]])

    def renumber(self, values: NDArray[np.uint32], segments: Segments) -> None:
        """Replace the file numbers of shards by positions in ``files``, in a batch [packs, width - 1, 2].

        Raises:
            ValueError: a number is not in the table of its shard.
        """
        if self.numbers is None:
            return
        counts = np.diff(segments.offsets)
        in_pack = np.arange(len(segments.shards)) - np.repeat(segments.offsets[:-1], counts)
        cells = np.repeat(np.arange(len(counts)), counts), in_pack, 0
        first, last = self.firsts[segments.shards], self.firsts[segments.shards + 1]
        if ((positions := first + values[cells]) >= last).any():
            raise ValueError("column source refers to files that are not in the table of its shard")
        values[cells] = self.numbers[positions]


def _begins(segments: Segments, multiple: int) -> NDArray[np.int64]:
    """Return the position of the first token of each sequence in its row, int64 [segments]."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(-(-segments.lengths // multiple) * multiple)])
    begins: NDArray[np.int64] = ends[:-1] - np.repeat(ends[segments.offsets[:-1]], np.diff(segments.offsets))
    return begins


def _padding(segments: Segments, seq_length: int, multiple: int) -> NDArray[np.bool_]:
    """Return the padding mask, bool [packs, seq_length]: True at positions without a token of a sequence."""
    counts, begins = np.diff(segments.offsets), _begins(segments, multiple)
    row = np.repeat(np.arange(len(counts)), counts)
    edges = np.zeros((len(counts), seq_length + 1), np.int8)
    edges[row, begins] += 1
    edges[row, begins + segments.lengths] -= 1
    outside: NDArray[np.bool_] = edges[:, :-1].cumsum(axis=1, dtype=np.int8) == 0
    return outside


def _any_remote(shards: Sequence[Arrays]) -> bool:
    return any(isinstance(arrays[0], RemoteArray) for arrays in shards)


def widen(batch: Tensors, pad_id: int, device: torch.device | str | None = None) -> Tensors:
    """Make the wide form of a narrow batch on the device, where this is cheap; bit-identical to that of the assembler.

    Copying a narrow batch to the device moves 5 bytes per position, a wide one 28.

    Args:
        batch: a batch of a narrow form, or its copy on the device.
        pad_id: the pad id of the assembler.
        device: the device to copy the batch to; None does not copy.
    """
    batch = {name: _moved(tensor, device) for name, tensor in batch.items()} if device else dict(batch)
    logical, segment, tokens = batch["cu_seqlens"], segments_of(batch), batch["tokens"].long()
    places = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    positions = places - batch.get("cu_seqlens_padded", logical).gather(1, segment)
    labels = torch.full_like(tokens, pad_id)
    labels[:, :-1] = tokens[:, 1:]
    labels.masked_fill_(positions >= logical.diff(dim=1).gather(1, segment) - 1, pad_id)
    loss_mask = batch["loss_mask"].float()
    wide = {"tokens": tokens, "labels": labels, "position_ids": positions.long(), "loss_mask": loss_mask}
    return {**wide, **{name: tensor for name, tensor in batch.items() if name not in wide}}


def _moved(value: Any, device: torch.device | str) -> Any:
    """Return a tensor on another device; other values are returned unchanged."""
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def segments_of(batch: Tensors) -> torch.Tensor:
    """Return the number of the sequence of each position, int64 [B, S]; padding at the end counts as one more."""
    bounds = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
    shape = batch["loss_mask"].shape
    places = torch.arange(shape[1], dtype=bounds.dtype, device=bounds.device).expand(shape)
    return torch.searchsorted(bounds[:, 1:].contiguous(), places.contiguous(), right=True)
