"""Losses over packed batches: by source, and of preference pairs.

The loss by source is how much of what a batch trains comes from each input file. Batches need the column ``source``,
which names the file of each sequence. In a training loop::

    files = files_of(batch)                                     # [B, S], as the loss mask: cut where that is cut
    sums += sums_by_file(losses, loss_mask, files, len(names))  # of every micro-batch of a step
    torch.distributed.all_reduce(sums, group=...)               # of the ranks that read different tokens
    print(mean_by_file(sums, names))

where ``names`` is ``file_names(assembler.source_files)``.

Direct preference optimization is of packs that hold each pair whole. The loss is that of Rafailov et al., "Direct
Preference Optimization: Your Language Model is Secretly a Reward Model" (2023), equation 7:
``-log sigmoid(beta * ((log p_c - log ref_c) - (log p_r - log ref_r)))`` for each pair, where p is the probability that
the model gives to the trained tokens of a sequence, and ref what the reference model gives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sft_idx.layout.files import RESERVED_NAMES, no_column
from megatron_sft_idx.training.batch import Tensors, segments_of


def _column(batch: Tensors, name: str) -> Tensor:
    """A column of a batch. ValueError: the batch does not have it."""
    if name not in batch:
        columns = [key for key in batch if key not in RESERVED_NAMES]
        raise ValueError(f"batch: {no_column(name, columns)}; ask for it in columns")
    return batch[name]


# ---- by source ----


def files_of(batch: Tensors) -> Tensor:
    """The number of the file that each position's sequence was made from, int64 [B, S]; 0 on padding.

    Args:
        batch: with the column ``source`` [B, width - 1, 2] and boundaries, as an assembler gives it.
    """
    return _column(batch, "source")[..., 0].long().gather(1, segments_of(batch))


def sums_by_file(losses: Tensor, loss_mask: Tensor, files: Tensor, count: int) -> Tensor:
    """Of each file the sum of its losses, and what that is divided by for a mean: float64 [count, 2].

    Args:
        losses: of each position.
        loss_mask: of each position, in the same shape but for its dimensions; the weights of the losses.
        files: as of ``files_of``, laid out in the same way.
        count: how many files there are.
    """
    weights = loss_mask.reshape(-1).double()
    both = torch.stack([losses.detach().reshape(-1).double().masked_fill(weights == 0, 0) * weights, weights], 1)
    return both.new_zeros(count, 2).index_add_(0, files.reshape(-1), both)


def mean_by_file(sums: Tensor, names: Sequence[str]) -> dict[str, float]:
    """The mean loss of each file that was trained on, by its name."""
    return {name: total / weight for name, (total, weight) in zip(names, sums.tolist(), strict=True) if weight}


def file_names(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each file, all different: its own; where two files share a name, with the number of the file."""
    names = [str(file.get("name")) for file in files]
    counts, numbered = Counter(names), [f"{name} ({number})" for number, name in enumerate(names)]
    chosen = [name if counts[name] == 1 else with_number for name, with_number in zip(names, numbered, strict=True)]
    return chosen if len({*chosen}) == len(chosen) else numbered


# ---- of pairs ----


class PairLosses(NamedTuple):
    """One value a pair that is trained on, in the order of the batch, float32 or wider [pairs].

    Packs differ in how many pairs they hold: divide the sum over a global batch by all its pairs, rather than take the
    mean of means.

    Attributes:
        losses: with gradients.
        chosen_rewards: beta times how much likelier than to the reference model the chosen answer is, logarithmic.
        rejected_rewards: the same for the rejected one.
    """

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def sequence_logp(logp: Tensor, batch: Tensors) -> Tensor:
    """The log-probability of what is trained on in each sequence, weighted by the loss mask.

    Args:
        logp: of each label, [B, S] or what can be reshaped to it: minus the losses that ``GPTModel`` gives back when
            it is handed labels.
        batch: with ``loss_mask`` [B, S] and ``cu_seqlens`` [B, width], and ``cu_seqlens_padded`` where it has that.

    Returns:
        [B, width - 1]: entry k is that of the sequence that begins at ``cu_seqlens[:, k]``, 0 where there is none. The
        reference model's, without gradients, are the sequence column ``ref_logp``.
    """
    mask, (rows, width) = batch["loss_mask"], batch["cu_seqlens"].shape
    weighted = logp.reshape(mask.shape).masked_fill(mask == 0, 0) * mask  # a log-probability may be minus infinity
    return weighted.new_zeros(rows, width - 1).scatter_add(1, segments_of(batch), weighted)


def dpo_losses(logp: Tensor, batch: Tensors, *, beta: float = 0.1) -> PairLosses:
    """The loss of every pair in a packed batch, but for those of rows that are masked.

    Args:
        logp: of each label under the model that learns, as for ``sequence_logp``.
        batch: what ``sequence_logp`` takes, and two sequence columns aligned with ``cu_seqlens``: ``pair`` [B, n, 2],
            number of the pair and 0 for chosen, 1 for rejected; ``ref_logp`` [B, n], of the reference model. n is at
            least the number of sequences in each row and at most width - 1.
        beta: how strongly the model is held to the reference.

    Raises:
        ValueError: a sequence that is trained on has no partner beside it: the pair was torn, or is none.
    """
    pair, reference = _column(batch, "pair").to(torch.int64), _column(batch, "ref_logp")
    own = sequence_logp(logp, batch)[:, : pair.shape[1]]
    trained = sequence_logp(torch.ones_like(logp, dtype=torch.float32), batch)[:, : pair.shape[1]] > 0
    number, rejected = pair.unbind(-1)
    # Where a chosen sequence stands beside its rejected one; what fills the column up behind the last is no pair.
    whole = (number[:, :-1] == number[:, 1:]) & (rejected[:, :-1] == 0) & (rejected[:, 1:] == 1)
    paired = torch.nn.functional.pad(whole, (0, 1)) | torch.nn.functional.pad(whole, (1, 0))
    if bool((trained & ~paired).any()):
        row, at = (trained & ~paired).nonzero()[0].tolist()
        raise ValueError(
            f"row {row}: sequence {at} (pair {int(number[row, at])}) is not beside its partner; pack by pairs:"
            " pack_sequences(groups=...), or megatron-sft-idx preprocess --row-kind preference"
        )
    whole &= trained[:, :-1] | trained[:, 1:]  # rows that only fill up the batch hold pairs too, which do not count
    rewards = beta * (own - reference)
    chosen, others = rewards[:, :-1][whole], rewards[:, 1:][whole]
    return PairLosses(-torch.nn.functional.logsigmoid(chosen - others), chosen.detach(), others.detach())
