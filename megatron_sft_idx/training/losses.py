"""Losses over packed batches: by source, of preference pairs, and weighted.

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

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, pad

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.files import RESERVED_NAMES, no_column
from megatron_sft_idx.lines import shown_by_fields
from megatron_sft_idx.training.batch import Tensors, segments_of


def _column(batch: Tensors, name: str) -> Tensor:
    """A column of a batch. FormatError: the batch does not have it."""
    if name not in batch:
        columns = [key for key in batch if key not in RESERVED_NAMES]
        raise FormatError(f"batch: {no_column(name, columns)}; ask for it in columns")
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


@shown_by_fields
class PairLosses(NamedTuple):
    """One value per pair that is trained on, in the order of the batch, float32 or wider [pairs].

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
        FormatError: a sequence that is trained on is not next to its partner: the pair was torn, or there is none.
    """
    pair, reference = _column(batch, "pair").to(torch.int64), _column(batch, "ref_logp")
    own = sequence_logp(logp, batch)[:, : pair.shape[1]]
    trained = sequence_logp(torch.ones_like(logp, dtype=torch.float32), batch)[:, : pair.shape[1]] > 0
    return _losses_of_pairs(own, reference, pair, trained, beta)


def _losses_of_pairs(own: Tensor, reference: Tensor, pair: Tensor, trained: Tensor, beta: float) -> PairLosses:
    """The loss of every pair, from log-probabilities of sequences.

    Args:
        own: of the model that learns, [B, n].
        reference: of the reference model, [B, n].
        pair: number of the pair and 0 for chosen, 1 for rejected, int64 [B, n, 2].
        trained: whether a sequence has trained tokens, bool [B, n].
        beta: as for ``dpo_losses``, and so are the errors.
    """
    number, rejected = pair.unbind(-1)
    # Where a chosen sequence is next to its rejected one; what fills the column up behind the last is no pair.
    whole = (number[:, :-1] == number[:, 1:]) & (rejected[:, :-1] == 0) & (rejected[:, 1:] == 1)
    paired = pad(whole, (0, 1)) | pad(whole, (1, 0))
    if bool((trained & ~paired).any()):
        row, at = (trained & ~paired).nonzero()[0].tolist()
        raise FormatError(
            f"row {row}: sequence {at} (pair {int(number[row, at])}) is not next to its partner; pack by pairs:"
            " pack_sequences(groups=...), or megatron-sft-idx preprocess --row-kind preference"
        )
    whole &= trained[:, :-1] | trained[:, 1:]  # rows that only fill up the batch hold pairs too, which do not count
    rewards = beta * (own - reference)
    chosen, others = rewards[:, :-1][whole], rewards[:, 1:][whole]
    return PairLosses(-logsigmoid(chosen - others), chosen.detach(), others.detach())


# ---- from the logits of a batch of as_torch ----


# What ``collate`` of ``as_torch`` puts into a batch for these losses; models have no arguments for it.
_FOR_LOSSES = ("loss_weights", "pair")


@shown_by_fields
class DpoLoss(NamedTuple):
    """What ``dpo_loss`` gives.

    Attributes:
        loss: the mean over the pairs of the batch, with gradients; 0 where there is none.
        metrics: means over the pairs, without gradients, under the names that TRL uses: ``rewards/chosen``,
            ``rewards/rejected``, ``rewards/accuracies`` and ``rewards/margins``.
        pairs: the same of each pair. For a mean over several batches, sum ``pairs.losses`` and divide by all pairs.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    pairs: PairLosses


@checked
def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model in a batch of ``as_torch``: all but what the losses of this module take.

    Example:
        >>> sorted(model_inputs({"input_ids": 1, "position_ids": 2, "loss_weights": 3}))
        ['input_ids', 'position_ids']
    """
    return {name: value for name, value in batch.items() if name not in _FOR_LOSSES}


@checked
def weighted_loss(logits: Tensor, batch: Mapping[str, Any], *, divisor: Tensor | float | None = None) -> Tensor:
    """The mean loss of a batch of ``as_torch(..., loss_weights=True)``, weighted by its loss masks.

    Args:
        logits: of a model of transformers, [rows, positions, vocabulary]; at position j they predict token j + 1.
        batch: with ``input_ids`` and ``loss_weights``, both [rows, positions].
        divisor: what the weighted sum of the losses is divided by. None is the sum of the weights in this batch; where
            several batches make a step, the sum over all of them weighs each token alike.

    Returns:
        A scalar with gradients, float32 or wider; 0 where all weights are 0.

    Raises:
        FormatError: the batch has no weights, ``logits`` are not of this batch, or an argument is of another type.

    Example:
        >>> batch = {"input_ids": torch.tensor([[3, 1, 0]]), "loss_weights": torch.tensor([[0, 0.5, 1.5]])}
        >>> weighted_loss(torch.zeros(1, 3, 4), batch)  # log 4
        tensor(1.3863)
    """
    if isinstance(divisor, Tensor):
        if divisor.numel() != 1:
            raise FormatError(f"divisor: shape {[*divisor.shape]}, expected one number")
    elif divisor is not None:
        divisor = _number("divisor", divisor)
    logp, weights, _ = _trained_logp("logits", logits, batch)
    total = -(logp * weights).sum()
    if divisor is None:
        divisor = weights.sum()
        divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    return total / divisor


@checked
def dpo_loss(
    policy_logits: Tensor, reference_logits: Tensor, batch: Mapping[str, Any], *, beta: float = 0.1
) -> DpoLoss:
    """The loss of direct preference optimization for a batch of ``as_torch(..., preferences=True)``.

    The batch may be of any layout and any number of packs. The log-probability of a sequence is the sum over its
    trained tokens, in float32 or wider, weighted by the loss mask.

    Args:
        policy_logits: of the model that learns, [rows, positions, vocabulary], as models of transformers return them.
        reference_logits: of the reference model, for the same batch; no gradients flow into them.
        batch: as ``collate`` of the dataset made it: with ``input_ids``, ``loss_weights`` and ``pair``.
        beta: how strongly the model is held to the reference.

    Raises:
        FormatError: the batch has no pairs, a sequence is not next to its partner, logits are not of this batch, or an
            argument is of another type.

    Example:
        >>> batch = {
        ...     "input_ids": torch.tensor([[1, 2], [1, 3]]),  # two rows of the layout "padded"
        ...     "loss_weights": torch.tensor([[0.0, 1.0], [0.0, 1.0]]),
        ...     "pair": torch.tensor([[0, 0], [0, 1]]),
        ... }
        >>> policy = torch.zeros(2, 2, 4)
        >>> policy[0, 0, 2] = 9.0  # the model that learns prefers the chosen answer
        >>> found = dpo_loss(policy, torch.zeros(2, 2, 4), batch)
        >>> found.loss, found.metrics["rewards/accuracies"]
        (tensor(0.6263), tensor(1.))
    """
    beta = _number("beta", beta)
    if "pair" not in batch:
        raise FormatError("batch: has no preference pairs; make it with as_torch(..., preferences=True)")
    pair = _whole_numbers(batch, "pair")
    if pair.shape[1] != 2:
        raise FormatError(f"batch: pair: shape {[*pair.shape]}, expected [sequences, 2]")
    own, trained = _sequence_sums("policy_logits", policy_logits, batch, len(pair))
    with torch.no_grad():
        reference, _ = _sequence_sums("reference_logits", reference_logits, batch, len(pair))
    pairs = _losses_of_pairs(own[None], reference[None], pair[None], trained[None], beta)
    losses, chosen, rejected = pairs
    count = max(1, len(losses))
    means = {
        "chosen": chosen,
        "rejected": rejected,
        "accuracies": (chosen > rejected).to(chosen.dtype),
        "margins": chosen - rejected,
    }
    metrics = {f"rewards/{name}": values.sum() / count for name, values in means.items()}
    return DpoLoss(losses.sum() / count, metrics, pairs)


def _number(name: str, value: Any) -> float:
    """A number as a float. FormatError: it is none, or no finite one."""
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise FormatError(f"{name}: {brief(value)}, expected a number")
    return number


def _whole_numbers(batch: Mapping[str, Any], name: str) -> Tensor:
    """A tensor of whole numbers of a batch, int64 and of two dimensions. FormatError: it is none."""
    value = batch.get(name)
    if not isinstance(value, Tensor) or value.ndim != 2 or value.is_floating_point() or value.is_complex():
        found = f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else brief(value)
        raise FormatError(f"batch: {name}: {found}, expected a tensor of whole numbers with two dimensions")
    return value.to(torch.int64)


def _range_of(numbers: Tensor) -> tuple[int, int]:
    """The least and the largest of one or more whole numbers. Both come at once: a GPU is waited for once."""
    lowest, highest = torch.stack(torch.aminmax(numbers)).tolist()
    return lowest, highest


def _trained_logp(name: str, logits: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of trained tokens, their weights, and where they are in ``input_ids[:, 1:]``, as a mask.

    ``name`` is what errors call the logits.
    """
    if "loss_weights" not in batch:
        raise FormatError("batch: has no loss_weights; make it with as_torch(..., loss_weights=True)")
    ids, weights = _whole_numbers(batch, "input_ids"), batch["loss_weights"]
    for shown, value in (("batch: loss_weights", weights), (name, logits)):
        if not isinstance(value, Tensor) or value.is_complex():
            raise FormatError(f"{shown}: {brief(value)}, expected a tensor of real numbers")
        if value.device != ids.device:
            raise FormatError(f"{shown}: on {value.device}, input_ids on {ids.device}; move them to one device")
    if weights.shape != ids.shape:
        raise FormatError(f"batch: loss_weights: shape {[*weights.shape]}, input_ids have {[*ids.shape]}")
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise FormatError(f"{name}: shape {[*logits.shape]}, expected [{', '.join(map(str, ids.shape))}, vocabulary]")
    is_trained = weights[:, 1:] != 0
    labels = ids[:, 1:][is_trained]
    if len(labels):
        lowest, highest = _range_of(labels)
        if not 0 <= lowest <= highest < logits.shape[2]:
            raise FormatError(
                f"{name}: a vocabulary of {logits.shape[2]}, input_ids from {lowest} to {highest} are trained on; take"
                " the model and the tokenizer that belong together"
            )
    # Only logits that are needed are converted: those of all positions are the largest tensor of a step.
    predicted = logits[:, :-1][is_trained]
    predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
    return -cross_entropy(predicted, labels, reduction="none"), weights[:, 1:][is_trained], is_trained


def _sequence_sums(name: str, logits: Tensor, batch: Mapping[str, Any], count: int) -> tuple[Tensor, Tensor]:
    """The log-probability of what is trained in each of ``count`` sequences, and whether it is any; both [count]."""
    logp, weights, is_trained = _trained_logp(name, logits, batch)
    if "position_ids" in batch:  # all sequences in one row, each of which counts from 0; padding may be one more
        sequences = (_whole_numbers(batch, "position_ids") == 0).cumsum(1) - 1
        is_of_batch = sequences.shape == batch["input_ids"].shape
    else:
        is_of_batch = len(is_trained) == count
        sequences = torch.arange(len(is_trained), device=weights.device)[:, None].expand(batch["input_ids"].shape)
    if is_of_batch:
        numbers = sequences[:, 1:][is_trained]
        lowest, highest = _range_of(numbers) if len(numbers) else (0, count - 1)
        is_of_batch = 0 <= lowest <= highest < count
    if not is_of_batch:
        raise FormatError(f"batch: pair has {count} sequences, input_ids have others; take a batch as collate makes it")
    sums = logp.new_zeros(count).index_add(0, numbers, logp * weights)
    trained = torch.zeros(count, dtype=torch.bool, device=weights.device).index_fill(0, numbers, True)
    return sums, trained
