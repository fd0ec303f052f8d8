"""Losses over packed batches: by source, of preference pairs, and weighted.

The loss by source is the mean loss of the trained tokens from each input file. Batches need the column ``source``,
which has the file of each sequence. In a training loop::

    files = files_of(batch)                                     # [B, S], like the loss mask; slice both in the same way
    sums += sums_by_file(losses, loss_mask, files, len(names))  # of every micro-batch of a step
    torch.distributed.all_reduce(sums, group=...)               # of the ranks that read different tokens
    print(mean_by_file(sums, names))

where ``names`` is ``file_names(assembler.source_files)``.

Direct preference optimization needs packs in which each pair is complete. The loss is equation 7 of Rafailov et al.,
"Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (2023):
``-log sigmoid(beta * ((log p_c - log ref_c) - (log p_r - log ref_r)))`` for each pair. p is the probability of the
trained tokens of a sequence under the model, ref their probability under the reference model.
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
    """Return a column of a batch. FormatError: the batch does not have it."""
    if name not in batch:
        columns = [key for key in batch if key not in RESERVED_NAMES]
        raise FormatError(f"batch: {no_column(name, columns)}; request it with columns=")
    return batch[name]


# ---- loss by source ----


def files_of(batch: Tensors) -> Tensor:
    """Return for each position the number of the file that its sequence was made from, int64 [B, S]; 0 on padding.

    Args:
        batch: a batch of an assembler, with the column ``source`` [B, width - 1, 2] and boundaries.

    Example:
        >>> batch = {
        ...     "source": torch.tensor([[[1, 17], [0, 4], [0, 0]]]),  # row 17 of file 1, row 4 of file 0, padding
        ...     "cu_seqlens": torch.tensor([[0, 2, 5, 6]]),
        ...     "loss_mask": torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 0.0]]),
        ... }
        >>> files_of(batch)
        tensor([[1, 1, 0, 0, 0, 0]])
    """
    return _column(batch, "source")[..., 0].long().gather(1, segments_of(batch))


def sums_by_file(losses: Tensor, loss_mask: Tensor, files: Tensor, count: int) -> Tensor:
    """Return for each file the weighted sum of its losses and the sum of the weights, float64 [count, 2].

    Args:
        losses: the loss of each position, [B, S] or any other shape.
        loss_mask: the weight of each position, in the same order; its shape may differ.
        files: the result of ``files_of``, in the same order.
        count: number of files.

    Example:
        >>> losses = torch.tensor([2.0, 3.0, 4.0, 9.0])
        >>> loss_mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
        >>> files = torch.tensor([0, 0, 1, 1])  # from files_of
        >>> sums_by_file(losses, loss_mask, files, count=2)
        tensor([[5., 2.],
                [4., 1.]], dtype=torch.float64)
    """
    weights = loss_mask.reshape(-1).double()
    both = torch.stack([losses.detach().reshape(-1).double().masked_fill(weights == 0, 0) * weights, weights], 1)
    return both.new_zeros(count, 2).index_add_(0, files.reshape(-1), both)


def mean_by_file(sums: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Return the mean loss of each file that was trained on, by its name.

    Args:
        sums: the results of ``sums_by_file``, added over micro-batches, steps or ranks: [files, 2].
        names: the name of each file.

    Example:
        >>> sums = torch.tensor([[5.0, 2.0], [4.0, 1.0], [0.0, 0.0]])  # from sums_by_file
        >>> mean_by_file(sums, ["chats.jsonl", "code.jsonl", "math.jsonl"])
        {'chats.jsonl': 2.5, 'code.jsonl': 4.0}
    """
    return {name: total / weight for name, (total, weight) in zip(names, sums.tolist(), strict=True) if weight}


def file_names(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a unique name for each file: its own name, with the file number added if two files share a name.

    Example:
        >>> file_names([{"name": "chats.jsonl"}, {"name": "code.jsonl"}, {"name": "chats.jsonl"}])
        ['chats.jsonl (0)', 'code.jsonl', 'chats.jsonl (2)']
    """
    names = [str(file.get("name")) for file in files]
    counts, numbered = Counter(names), [f"{name} ({number})" for number, name in enumerate(names)]
    chosen = [name if counts[name] == 1 else with_number for name, with_number in zip(names, numbered, strict=True)]
    return chosen if len({*chosen}) == len(chosen) else numbered


# ---- losses of preference pairs ----


@shown_by_fields
class PairLosses(NamedTuple):
    """One value per trained pair, in the order of the batch, float32 or wider [pairs].

    The number of pairs differs between packs: divide the sum over a global batch by the number of all its pairs. Do not
    average the means of packs.

    Attributes:
        losses: the losses, with gradients.
        chosen_rewards: beta times the difference of the chosen answer's log-probability under the model and under the
            reference model.
        rejected_rewards: the same for the rejected answer.
    """

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def sequence_logp(logp: Tensor, batch: Tensors) -> Tensor:
    """Return the log-probability of the trained tokens of each sequence, weighted by the loss mask.

    Args:
        logp: log-probability of each label, [B, S] or a shape that can be reshaped to it: the negated losses that
            ``GPTModel`` returns if it gets labels.
        batch: a batch with ``loss_mask`` [B, S], ``cu_seqlens`` [B, width] and, if present, ``cu_seqlens_padded``.

    Returns:
        [B, width - 1]: entry k belongs to the sequence that begins at ``cu_seqlens[:, k]``; 0 if there is none. The
            result for the reference model, without gradients, is the sequence column ``ref_logp``.

    Example:
        >>> from megatron_sft_idx.shard.shard_set import ShardSet
        >>> from megatron_sft_idx.training import BatchAssembler
        >>> from megatron_sft_idx.training.sources import StoredPacks
        >>> batch = BatchAssembler(StoredPacks(ShardSet.open("data/pairs", columns=["pair"])), 16).assemble([0])
        >>> logp = -2 * torch.ones(1, 16)  # minus the losses of the model
        >>> sequence_logp(logp, batch)  # four sequences; the third has two trained tokens
        tensor([[-2., -2., -4., -2.,  0.]])
    """
    mask, (rows, width) = batch["loss_mask"], batch["cu_seqlens"].shape
    weighted = logp.reshape(mask.shape).masked_fill(mask == 0, 0) * mask  # a log-probability may be minus infinity
    return weighted.new_zeros(rows, width - 1).scatter_add(1, segments_of(batch), weighted)


def dpo_losses(logp: Tensor, batch: Tensors, *, beta: float = 0.1) -> PairLosses:
    """Return the loss of every pair in a packed batch, except pairs in masked rows.

    Args:
        logp: log-probability of each label under the model that is trained; see ``sequence_logp``.
        batch: the batch for ``sequence_logp``, with two sequence columns aligned with ``cu_seqlens``: ``pair`` [B, n,
            2], number of the pair and 0 for chosen, 1 for rejected; ``ref_logp`` [B, n], of the reference model. n is
            at least the number of sequences in each row and at most width - 1.
        beta: strength of the regularization towards the reference model.

    Raises:
        FormatError: a trained sequence is not next to its partner: the pair was separated, or there is no partner.

    Example:
        >>> batch = {
        ...     "loss_mask": torch.tensor([[1.0, 0.0, 1.0, 0.0]]),  # a pair: two sequences of two tokens
        ...     "cu_seqlens": torch.tensor([[0, 2, 4, 4]]),
        ...     "pair": torch.tensor([[[0, 0], [0, 1], [0, 0]]]),
        ...     "ref_logp": torch.tensor([[-1.0, -1.0, 0.0]]),
        ... }
        >>> logp = torch.tensor([[-0.5, 0.0, -2.5, 0.0]])  # the chosen answer became more likely, the other one less
        >>> losses, chosen_rewards, rejected_rewards = dpo_losses(logp, batch, beta=0.1)
        >>> losses, chosen_rewards, rejected_rewards
        (tensor([0.5981]), tensor([0.0500]), tensor([-0.1500]))
    """
    pair, reference = _column(batch, "pair").to(torch.int64), _column(batch, "ref_logp")
    own = sequence_logp(logp, batch)[:, : pair.shape[1]]
    trained = sequence_logp(torch.ones_like(logp, dtype=torch.float32), batch)[:, : pair.shape[1]] > 0
    return _losses_of_pairs(own, reference, pair, trained, beta)


def _losses_of_pairs(own: Tensor, reference: Tensor, pair: Tensor, trained: Tensor, beta: float) -> PairLosses:
    """Return the loss of every pair, from log-probabilities of sequences.

    Args:
        own: log-probabilities under the model that is trained, [B, n].
        reference: log-probabilities under the reference model, [B, n].
        pair: number of the pair and 0 for chosen, 1 for rejected, int64 [B, n, 2].
        trained: whether a sequence has trained tokens, bool [B, n].
        beta: see ``dpo_losses``; the errors are the same too.
    """
    number, rejected = pair.unbind(-1)
    # True where a chosen sequence is followed by its rejected one. The fill values after the last pair are not a pair.
    whole = (number[:, :-1] == number[:, 1:]) & (rejected[:, :-1] == 0) & (rejected[:, 1:] == 1)
    paired = pad(whole, (0, 1)) | pad(whole, (1, 0))
    if bool((trained & ~paired).any()):
        row, at = (trained & ~paired).nonzero()[0].tolist()
        raise FormatError(
            f"row {row}: sequence {at} (pair {int(number[row, at])}) is not next to its partner; keep pairs together"
            " in packs: pack_sequences(groups=...), or megatron-sft-idx preprocess --row-kind preference"
        )
    whole &= trained[:, :-1] | trained[:, 1:]  # pairs in rows that only fill up the batch do not count
    rewards = beta * (own - reference)
    chosen, others = rewards[:, :-1][whole], rewards[:, 1:][whole]
    return PairLosses(-logsigmoid(chosen - others), chosen.detach(), others.detach())


# ---- losses from the logits of a batch of as_torch ----


# Entries that ``collate`` of ``as_torch`` puts into a batch for these losses; models have no arguments for them.
_FOR_LOSSES = ("loss_weights", "pair")


@shown_by_fields
class DpoLoss(NamedTuple):
    """The result of ``dpo_loss``.

    Attributes:
        loss: the mean over the pairs of the batch, with gradients; 0 if there are no pairs.
        metrics: means over the pairs, without gradients, under the names that TRL uses: ``rewards/chosen``,
            ``rewards/rejected``, ``rewards/accuracies`` and ``rewards/margins``.
        pairs: the values per pair. For a mean over several batches, divide the sum of ``pairs.losses`` by the number of
            all pairs.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    pairs: PairLosses


@checked
def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's arguments in a batch of ``as_torch``: all entries except those for the losses of this module.

    Example:
        >>> sorted(model_inputs({"input_ids": 1, "position_ids": 2, "loss_weights": 3}))
        ['input_ids', 'position_ids']
    """
    return {name: value for name, value in batch.items() if name not in _FOR_LOSSES}


@checked
def weighted_loss(logits: Tensor, batch: Mapping[str, Any], *, divisor: Tensor | float | None = None) -> Tensor:
    """Return the mean loss of a batch of ``as_torch(..., loss_weights=True)``, weighted by its loss masks.

    Args:
        logits: logits of a transformers model, [rows, positions, vocabulary]; at position j they predict token j + 1.
        batch: a batch with ``input_ids`` and ``loss_weights``, both [rows, positions].
        divisor: divisor of the weighted sum of the losses. None is the sum of the weights in this batch. If a step has
            several batches, pass the sum over all of them, so that all tokens have equal weight.

    Returns:
        A scalar with gradients, float32 or wider; 0 if all weights are 0.

    Raises:
        FormatError: the batch has no weights, ``logits`` do not fit the batch, or an argument has the wrong type.

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
    """Return the loss of direct preference optimization for a batch of ``as_torch(..., preferences=True)``.

    The batch can have any layout and any number of packs. The log-probability of a sequence is the sum over its trained
    tokens, in float32 or wider, weighted by the loss mask.

    Args:
        policy_logits: logits of the model that is trained, [rows, positions, vocabulary], as transformers models return
            them.
        reference_logits: logits of the reference model for the same batch; they get no gradients.
        batch: a batch from ``collate`` of the dataset, with ``input_ids``, ``loss_weights`` and ``pair``.
        beta: strength of the regularization towards the reference model.

    Raises:
        FormatError: the batch has no pairs, a sequence is not next to its partner, logits do not fit the batch, or an
            argument has the wrong type.

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
    """Return a number as a float. FormatError: it is not a finite number."""
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise FormatError(f"{name}: {brief(value)}, expected a number")
    return number


def _whole_numbers(batch: Mapping[str, Any], name: str) -> Tensor:
    """Return a tensor of a batch as int64. FormatError: it is not a two-dimensional tensor of integers."""
    value = batch.get(name)
    if not isinstance(value, Tensor) or value.ndim != 2 or value.is_floating_point() or value.is_complex():
        found = f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else brief(value)
        raise FormatError(f"batch: {name}: {found}, expected a tensor of whole numbers with two dimensions")
    return value.to(torch.int64)


def _range_of(numbers: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest of one or more integers, with a single GPU synchronization."""
    lowest, highest = torch.stack(torch.aminmax(numbers)).tolist()
    return lowest, highest


def _trained_logp(name: str, logits: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities and weights of trained tokens, and the mask of their places in ``input_ids[:, 1:]``.

    ``name`` is the name of the logits in errors.
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
        raise FormatError(f"batch: loss_weights: shape {[*weights.shape]}, input_ids: {[*ids.shape]}")
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise FormatError(f"{name}: shape {[*logits.shape]}, expected [{', '.join(map(str, ids.shape))}, vocabulary]")
    is_trained = weights[:, 1:] != 0
    labels = ids[:, 1:][is_trained]
    if len(labels):
        lowest, highest = _range_of(labels)
        if not 0 <= lowest <= highest < logits.shape[2]:
            raise FormatError(
                f"{name}: a vocabulary of {logits.shape[2]}, but input_ids from {lowest} to {highest} are trained on;"
                " use the tokenizer that belongs to the model"
            )
    # Convert only the needed logits: the logits of all positions are the largest tensor of a step.
    predicted = logits[:, :-1][is_trained]
    predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
    return -cross_entropy(predicted, labels, reduction="none"), weights[:, 1:][is_trained], is_trained


def _sequence_sums(name: str, logits: Tensor, batch: Mapping[str, Any], count: int) -> tuple[Tensor, Tensor]:
    """Return the trained log-probability of ``count`` sequences, and whether each has trained tokens; both [count]."""
    logp, weights, is_trained = _trained_logp(name, logits, batch)
    if "position_ids" in batch:  # all sequences are in one row, each with positions from 0; padding may be one more
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
        raise FormatError(
            f"batch: pair has {count} sequences, but input_ids have a different number; use a batch from collate"
            " unchanged"
        )
    sums = logp.new_zeros(count).index_add(0, numbers, logp * weights)
    trained = torch.zeros(count, dtype=torch.bool, device=weights.device).index_fill(0, numbers, True)
    return sums, trained
