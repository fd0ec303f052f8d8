"""The loss by source: of packed batches, how much of it, and of what they train, comes from each input file.

Batches need the column ``source``, which names the file of each sequence. In a training loop::

    files = files_of(batch)                                     # [B, S], as the loss mask: cut where that is cut
    sums += sums_by_file(losses, loss_mask, files, len(names))  # of every micro-batch of a step
    torch.distributed.all_reduce(sums, group=...)               # of the ranks that read different tokens
    print(mean_by_file(sums, names))

where ``names`` is ``file_names(assembler.source_files)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_sft_idx.training.batch import Tensors, segments_of

__all__ = ["file_names", "files_of", "mean_by_file", "sums_by_file"]


def files_of(batch: Tensors) -> Tensor:
    """The number of the file that each position's sequence was made from, int64 [B, S]; 0 on padding.

    Args:
        batch: with the column ``source`` [B, width - 1, 2] and boundaries, as an assembler gives it.
    """
    return batch["source"][..., 0].long().gather(1, segments_of(batch))


def sums_by_file(losses: Tensor, loss_mask: Tensor, files: Tensor, count: int) -> Tensor:
    """Of each file the sum of its losses, and what that is divided by for a mean: float64 [count, 2].

    Args:
        losses: of each position.
        loss_mask: of each position, in the same shape but for its dimensions; the weights of the losses.
        files: as of ``files_of``, laid out in the same way.
        count: how many files there are.
    """
    weights = loss_mask.reshape(-1).double()
    both = torch.stack([losses.detach().reshape(-1).double() * weights, weights], 1)
    return both.new_zeros(count, 2).index_add_(0, files.reshape(-1), both)


def mean_by_file(sums: Tensor, names: Sequence[str]) -> dict[str, float]:
    """The mean loss of each file that was trained on, by its name."""
    return {name: total / weight for name, (total, weight) in zip(names, sums.tolist(), strict=True) if weight}


def file_names(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each file: its own, and where two have one, its number besides."""
    names = [str(file.get("name")) for file in files]
    often = Counter(names)
    return [name if often[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]
