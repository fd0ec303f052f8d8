"""Batches with images for the vision-language training step of Megatron-Bridge.

This step expects one row with all sequences of a batch, as Bridge's own data sets make it with
``enable_in_batch_packing``. It differs from the batches of ``BatchAssembler``:

- ``cu_seqlens_q`` has one entry per sequence and one more. Padding is not a sequence, and no sequence is empty.
- Sequences are padded to a multiple, and ``cu_seqlens_q_padded`` has the start of each sequence in the row.
- Labels are -100 at positions that are not trained. They are shifted, like the labels of ``BatchAssembler``.
- Pixels are in ``visual_inputs``, an object with one attribute per tensor.

``bridge_vlm_batch`` converts a batch. ``VLMPacks`` is a data set for Bridge's loader with such batches;
``bridge_config.BridgeVLMConfig`` creates it from shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.lines import Shown
from megatron_sft_idx.training.batch import BatchAssembler

# The tensors of a batch that the packed row is made from, or that follow from it.
_TEXT = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "mrope_position_ids")
_BOUNDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
_IGNORED = -100
# The position of padding in three-dimensional positions, as in Bridge's own models.
_PADDING_POSITION = 1


def bridge_vlm_batch(
    batch: Mapping[str, Any], *, sequence_multiple: int = 1, length: int | None = None, pad_id: int = 0
) -> dict[str, Any]:
    """Convert a batch to the form that ``megatron.bridge.training.vlm_step`` reads from its data iterator.

    The sequences of all rows are put into one row, in order. The padding of the rows is left out.

    Args:
        batch: a batch of ``BatchAssembler`` or ``BatchLoader`` in the form ``wide``, made with ``padding_mask=True``
            and, for images, with ``media=MediaInputs(...)``. Its sequences may be padded to any multiple.
        sequence_multiple: each sequence is padded to a multiple of this: 2 x context parallel size, times tensor
            parallel size under sequence parallelism.
        length: number of positions in the row, which is padded at the end. None for as many as the sequences need.
            Pipeline and expert parallelism need rows of the same length.
        pad_id: a valid token id for padding.

    Returns:
        A dictionary; T is the length of the row, n the number of sequences:

        - ``input_ids``, ``labels`` int64 [1, T], ``loss_mask`` float32 [1, T]. Labels and mask are shifted: entry j is
          about token j + 1.
        - ``position_ids`` int64: [3, 1, T] if the batch has ``mrope_position_ids``; else [1, T], from 0 in each
          sequence.
        - ``cu_seqlens_q``, ``cu_seqlens_kv`` int32 [n + 1]: running sums of the unpadded lengths.
        - ``cu_seqlens_q_padded``, ``cu_seqlens_kv_padded`` int32 [n + 1]: the start of each sequence in the row, then
          T. Both are missing if nothing is padded.
        - ``max_seqlen_q``, ``max_seqlen_kv`` int32, 0-D: the largest padded length.
        - ``total_tokens``: T, an integer. ``attention_mask``: None.
        - ``visual_inputs``: Bridge's ``GenericVisualInputs`` with the tensors of the processor; all None for text.

    Raises:
        FormatError: the batch has no padding mask or is narrow; it has no tokens; or it has entries for which
            ``GenericVisualInputs`` has no attribute, such as columns, recordings or encoded files.
        ValueError: the sequences do not fit ``length``, or an argument is below 1.
        ImportError: Megatron-Bridge is not installed.

    Example:
        >>> from megatron_sft_idx.shard.shard_set import ShardSet
        >>> from megatron_sft_idx.training import BatchAssembler
        >>> from megatron_sft_idx.training.sources import StoredPacks
        >>> packs = StoredPacks(ShardSet.open("data/chats"))
        >>> batch = BatchAssembler(packs, 16, padding_mask=True).assemble([5, 6])
        >>> made = bridge_vlm_batch(batch)  # the five sequences of both rows in one row, without padding
        >>> made["input_ids"].shape, made["cu_seqlens_q"]
        (torch.Size([1, 12]), tensor([ 0,  1,  3,  5,  8, 12], dtype=torch.int32))
    """
    for name, value in (("sequence_multiple", sequence_multiple), ("length", length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value}: expected a whole number of at least 1")
    _require_complete(batch)
    visual = _visual_inputs(batch)
    starts, lengths = _sequences(batch)
    padded = -(-lengths // sequence_multiple) * sequence_multiple
    needed = int(padded.sum())
    if length is not None:
        if needed > length:
            raise ValueError(
                f"length {length}: the sequences of this batch need {needed} positions, each padded to a multiple of"
                f" {sequence_multiple}; raise it, or put fewer packs into a batch"
            )
        padded[-1] += length - needed
    begins = padded.cumsum(0) - padded
    total = needed if length is None else length
    offsets = torch.arange(total) - begins.repeat_interleave(padded)
    outside = offsets >= lengths.repeat_interleave(padded)
    taken = (starts.repeat_interleave(padded) + offsets).masked_fill(outside, 0)

    def row(name: str, filler: float) -> Tensor:
        values: Tensor = batch[name]
        return values.reshape(-1)[taken].masked_fill(outside, filler)[None]

    loss_mask = row("loss_mask", 0)
    made: dict[str, Any] = {
        "input_ids": row("tokens", pad_id),
        "labels": row("labels", _IGNORED).masked_fill(loss_mask == 0, _IGNORED),
        "loss_mask": loss_mask,
        "position_ids": offsets[None],
        "attention_mask": None,
    }
    if "mrope_position_ids" in batch:
        axes = batch["mrope_position_ids"].flatten(1)[:, taken].masked_fill(outside, _PADDING_POSITION)
        made["position_ids"] = axes[:, None]
    made["cu_seqlens_q"] = made["cu_seqlens_kv"] = _running_sums(lengths)
    if not torch.equal(lengths, padded):
        made["cu_seqlens_q_padded"] = made["cu_seqlens_kv_padded"] = _running_sums(padded)
    made["max_seqlen_q"] = made["max_seqlen_kv"] = padded.max().int()
    return {**made, "total_tokens": total, "visual_inputs": visual}


def _require_complete(batch: Mapping[str, Any]) -> None:
    """Raise FormatError if a batch lacks a tensor that the packed row is made from."""
    for name, remedy in (
        ("tokens", "pass a batch of BatchAssembler or BatchLoader"),
        ("labels", 'make batches with form="wide"'),
        ("cu_seqlens", "pass whole batches, not single rows"),
        ("padding_mask", "make batches with padding_mask=True, which marks the ends of sequences"),
    ):
        if name not in batch:
            raise FormatError(f"batch: has no {name!r}; {remedy}")


def _sequences(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the start of each sequence among the positions of all rows, and its number of tokens, both int64 [n]."""
    padding, bounds = batch["padding_mask"], batch.get("cu_seqlens_padded", batch["cu_seqlens"]).long()
    count, width = padding.shape
    tokens_before = torch.nn.functional.pad((~padding).cumsum(1), (1, 0))
    lengths = tokens_before.gather(1, bounds).diff(dim=1)
    starts = bounds[:, :-1] + torch.arange(count)[:, None] * width
    kept = lengths > 0  # a sequence without tokens is padding
    if not kept.any():
        raise FormatError("batch: has no tokens; Megatron-Bridge does not support packed rows without a sequence")
    return starts[kept], lengths[kept]


def _running_sums(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _visual_inputs(batch: Mapping[str, Any]) -> Any:
    """Return Bridge's object with the outputs of the processor. FormatError: the batch has other entries too."""
    container = import_module("megatron.bridge.training.utils.visual_inputs").GenericVisualInputs
    places = [field.name for field in fields(container)]
    if unknown := sorted(set(batch) - {*_TEXT, *_BOUNDS, *places}):
        raise FormatError(
            f"batch: has {', '.join(map(repr, unknown))}, which Megatron-Bridge's training step for vision-language"
            f" models does not accept; it accepts {', '.join(places)}; make batches without columns, with"
            " media=MediaInputs(...)"
        )
    return container(**{name: batch[name] for name in places if name in batch})


class VLMPacks(Shown, Dataset[int]):
    """Packs with images as a data set for Megatron-Bridge's loader, which calls ``collate_fn`` in its workers.

    Each item is the number of a pack; ``collate_fn`` reads the packs.

    Args:
        assembler: makes the batches for ``bridge_vlm_batch``; rows have its ``seq_length``.
    """

    def __init__(self, assembler: BatchAssembler) -> None:
        self.assembler = assembler

    def _shown(self) -> str:
        return f"of {self.assembler!r}"

    def __len__(self) -> int:
        return len(self.assembler)

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no pack {index}; the number of packs is {len(self)}")
        return int(index)

    def collate_fn(self, packs: Sequence[int]) -> dict[str, Any]:
        """Return the batch of these packs; see ``bridge_vlm_batch``. ValueError: they need more than one row."""
        batch, assembler = self.assembler.assemble(packs), self.assembler
        return bridge_vlm_batch(
            batch,
            sequence_multiple=assembler.sequence_multiple,
            length=assembler.seq_length,
            pad_id=assembler.pad_id,
        )
