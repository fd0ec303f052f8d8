"""``as_torch``: packs as tensors for anybody's own loop, as models of transformers take them.

A mask of ours is aligned with labels: entry j is about predicting token j + 1. The models shift labels themselves, and
take at token j + 1 what is to be predicted there, or -100. So labels are the ids one to the right of a mask that is
set. The mask of a sequence's last position is 0, hence no label ever lies on the first token of the next.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.formats.packed_dataset import PackedDataset, open_dataset
from megatron_sft_idx.formats.registry import Source, open_reader, options_of_reader
from megatron_sft_idx.shard import Pack, Shard
from megatron_sft_idx.training.sources import require_judged, require_shard_judged

Layout = Literal["padded", "flattened", "flash"]
_IGNORED = -100


class _Packs(Protocol):
    """Anything with packs by number: ``open_dataset``'s, a ``Shard``, a ``SFTIndexedDataset``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Pack: ...


class TorchPacks(Dataset[dict[str, Tensor]]):
    """Packs as dicts of tensors, and ``collate``, which makes a batch of some; ``as_torch`` makes one."""

    def __init__(self, packs: _Packs, layout: Layout) -> None:
        self.packs, self.layout = packs, layout

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One pack: ``input_ids`` and ``labels`` int64 [length], ``seq_boundaries`` int64 [sequences + 1].

        Raises:
            FormatError: its mask has weights, which labels have no place for.
        """
        pack = self.packs[index]
        ids, mask = torch.from_numpy(pack["input_ids"].astype(np.int64)), pack["loss_mask"]
        if mask.dtype.kind == "f" and not ((mask == 0) | (mask == 1)).all():
            raise FormatError(
                f"pack {index}: weights other than 0 and 1, which labels have no place for; weigh the losses yourself"
                " by ds[i]['loss_mask'], or preprocess the chats without a weight"
            )
        labels = torch.full_like(ids, _IGNORED)
        labels[1:] = torch.where(torch.from_numpy(mask[:-1] != 0), ids[1:], _IGNORED)
        return {"input_ids": ids, "labels": labels, "seq_boundaries": torch.from_numpy(pack["seq_boundaries"]).long()}

    def collate(self, packs: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """A batch of these packs, in the layout of this dataset; ``collate_fn`` of a ``DataLoader``."""
        lengths = torch.cat([pack["seq_boundaries"].diff() for pack in packs])
        ids, labels = (torch.cat([pack[key] for pack in packs]) for key in ("input_ids", "labels"))
        if self.layout == "padded":
            each = lengths.tolist()
            return {
                "input_ids": pad_sequence(list(torch.split(ids, each)), batch_first=True),
                "labels": pad_sequence(list(torch.split(labels, each)), batch_first=True, padding_value=_IGNORED),
                "attention_mask": pad_sequence(list(torch.split(torch.ones_like(ids), each)), batch_first=True),
            }
        ends = lengths.cumsum(0)
        positions = torch.arange(len(ids)) - (ends - lengths).repeat_interleave(lengths)
        batch: dict[str, Any] = {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}
        # With a cache, which models make unasked, transformers does not look for sequences in the positions.
        batch["use_cache"] = False
        if self.layout == "flash":
            bounds, longest = torch.cat([ends.new_zeros(1), ends]).int(), int(lengths.max())
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return batch


@checked
def as_torch(source: Source | _Packs, layout: Layout = "flattened") -> TorchPacks:
    """Packs for a plain ``DataLoader``, and batches that models of transformers take as they are.

    In every layout a token attends to its own sequence alone, and the loss that a model returns is the mean over the
    tokens that our masks train on. Checksums are not compared: run ``verify --full`` before a long training.

    Args:
        source: what ``open_dataset`` takes, or what it returned; or a ``Shard`` or ``SFTIndexedDataset``.
        layout: ``flattened`` puts all sequences of a batch into one row and says where they begin by ``position_ids``,
            all int64 [1, tokens], with ``use_cache`` False; ``flash`` adds what flash attention is told besides:
            ``cu_seq_lens_q`` and ``_k`` int32 [sequences + 1], ``max_length_q`` and ``_k``; ``padded`` gives every
            sequence a row of its own, int64 [sequences, longest], filled up with id 0 where ``attention_mask`` is 0
            and ``labels`` -100.

    Raises:
        FormatError: no such layout, or packs whose answers are judged by a column; or as ``open_dataset``.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> ds = as_torch("data/chats")
        >>> for batch in DataLoader(ds, batch_size=4, collate_fn=ds.collate):
        ...     print(batch["input_ids"].shape)
        torch.Size([1, 30])
        torch.Size([1, 17])
    """
    if layout not in get_args(Layout):
        raise FormatError(f"layout {layout!r}: choose one of {', '.join(get_args(Layout))}")
    packs = open_dataset(source) if isinstance(source, (str, os.PathLike, Sequence)) else source
    if isinstance(packs, Mapping | np.ndarray) or not (hasattr(packs, "__len__") and hasattr(packs, "__getitem__")):
        raise FormatError(f"source: {brief(source)}, expected a path, a list of paths, or a dataset of this package")
    _require_not_judged(packs)
    return TorchPacks(packs, layout)


def _require_not_judged(packs: _Packs) -> None:
    """FormatError where a column of the shards or files that have these packs judges the answers."""
    remedy = "as_torch hands out none: take BatchAssembler and training.losses.dpo_losses"
    if not isinstance(packs, PackedDataset):
        shard = getattr(packs, "shard", packs)  # that of a SFTIndexedDataset
        headers = [(shard.prefix, shard.header)] if isinstance(shard, Shard) else []
    else:
        headers = list(zip(packs.paths, packs.headers, strict=False))
        if not headers and "columns" in options_of_reader(packs.format):
            for path in packs.paths:
                reader = open_reader(path, packs.format, columns=None)
                metadata = reader.spec.metadata if reader.columns else {}
                require_judged(path, reader.columns, reader.columns.__getitem__, metadata, (), remedy)
    for prefix, header in headers:
        require_shard_judged(prefix, header, (), remedy)
