"""Data sets for other trainers: verl, NeMo Automodel and torchtitan; docs/trainers.md has a section for each.

Trainers represent trained tokens in different ways. The loss mask of a shard is aligned with labels: entry j says
whether predicting token j + 1 is trained. ``pack_row`` converts the mask to labels of the next token, with -100 where
nothing is trained. ``ShardSequences`` converts it to a mask aligned with tokens, in which entry j says whether token j
is trained. All ids and labels are int64, because uint16, the dtype of many shards, cannot hold -100.

Nothing here imports a trainer. If a class must derive from a class of the trainer, docs/trainers.md shows the code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.packing.permutation import shuffled
from megatron_sft_idx.packs.run import has_weights
from megatron_sft_idx.shard import Pack
from megatron_sft_idx.shard.judged import require_shard_judged
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.sources import require_text

_IGNORED = -100
_REMEDY = "train on them with one of the losses of docs/preferences.md"


@shown_by_fields
class PackRow(NamedTuple):
    """One pack as a row of fixed length, padded with id 0; made by ``pack_row``.

    Attributes:
        input_ids: int64 [length].
        labels: int64 [length]: entry j is token j + 1 if it is trained, else -100. Padding has -100.
        position_ids: int64 [length]; they restart at 0 in every sequence and in the padding at the end of the row.
        lengths: tokens in each sequence, int64 [sequences].
        padded_lengths: tokens in each sequence including the padding after it, int64 [sequences]. The padding at the
            end of the row is not counted.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> from megatron_sft_idx.training.adapters import pack_row
        >>> row = pack_row(Shard("data/chats")[6], 16, sequence_multiple=4)
        >>> row.lengths, row.padded_lengths
        (array([2, 3, 4]), array([4, 4, 4]))
        >>> row.input_ids
        array([60, 61,  0,  0, 62, 63, 64,  0, 65, 66, 67, 68,  0,  0,  0,  0])
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    padded_lengths: NDArray[np.int64]


def pack_row(pack: Pack, length: int, sequence_multiple: int = 1) -> PackRow:
    """Return a pack as a row of ``length`` positions, with each sequence padded to a multiple of ``sequence_multiple``.

    Raises:
        FormatError: the pack does not fit into the row, or its loss mask has weights other than 0 and 1.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> pack = Shard("data/chats")[-1]
        >>> pack["input_ids"].tolist(), pack["loss_mask"].tolist(), pack["seq_boundaries"].tolist()
        ([60, 61, 62, 63, 64, 65, 66, 67, 68], [1, 0, 1, 0, 0, 0, 1, 0, 0], [0, 2, 5, 9])
        >>> row = pack_row(pack, 12)
        >>> row.labels.tolist()
        [61, -100, 63, -100, -100, -100, 67, -100, -100, -100, -100, -100]
        >>> row.position_ids.tolist()
        [0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    """
    ids, mask, starts = pack["input_ids"].astype(np.int64), pack["loss_mask"], pack["seq_boundaries"][:-1]
    _require_binary(mask)
    lengths = np.diff(pack["seq_boundaries"]).astype(np.int64)
    padded_lengths = -(-lengths // sequence_multiple) * sequence_multiple
    if (used := int(padded_lengths.sum())) > length:
        raise FormatError(
            f"a pack has {used} positions with sequences rounded up to multiples of {sequence_multiple}, but a row has"
            f" {length}; use longer rows, or pack again for this length"
        )
    new_starts = np.cumsum(padded_lengths) - padded_lengths
    places = np.arange(len(ids)) + np.repeat(new_starts - starts, lengths)
    trained = np.flatnonzero(mask)
    input_ids, labels = np.zeros(length, np.int64), np.full(length, _IGNORED, np.int64)
    input_ids[places], labels[places[trained]] = ids, ids[trained + 1]
    segment_starts, segments = np.append(new_starts, used), np.append(padded_lengths, length - used)
    positions = np.arange(length) - np.repeat(segment_starts, segments)
    return PackRow(input_ids, labels, positions, lengths, padded_lengths)


def _require_binary(mask: NDArray[Any]) -> None:
    """Raise FormatError if a loss mask has weights other than 0 and 1."""
    if has_weights(mask):
        raise FormatError(
            "a loss mask has weights other than 0 and 1, which this trainer does not support; train with Megatron, or"
            " with as_torch and weighted_loss (docs/transformers.md)"
        )


def _text_shards(source: Any, ignore_media: bool) -> ShardSet:
    """Open the shards of a source; raise FormatError if these adapters must not train on one of them."""
    shards = ShardSet.open(source, same_capacity=False)
    for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
        require_text(prefix, header.has_media, ignore_media)
        require_shard_judged(prefix, header, (), _REMEDY)
    return shards


class ShardSequences(Shown, Dataset[Any]):
    """The single sequences of shards, for trainers that do the packing themselves.

    An item is a pair of arrays [length]: the ids, int64, and the loss mask aligned with tokens. Entry j of the mask
    says whether token j is trained; entry 0 is always 0. The mask is int64, or float32 with ``loss_weights``.

    Args:
        source: a prefix, a folder or a glob of shards, or a list of these.
        loss_weights: allow weights other than 0 and 1.
        ignore_media: allow shards with images or audio; their placeholder tokens then count as ordinary tokens.

    Raises:
        ShardNotFoundError: there are no such shards.
        FormatError: they hold preference pairs or KTO labels, or images or audio without ``ignore_media``. Reading an
            item raises it if the mask has weights other than 0 and 1, without ``loss_weights``.

    Example:
        >>> sequences = ShardSequences("data/chats")
        >>> sequences
        <ShardSequences data/chats: 16 sequences>
        >>> ids, mask = sequences[-1]
        >>> ids.tolist(), mask.tolist()
        ([65, 66, 67, 68], [0, 0, 1, 0])
    """

    @checked
    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        loss_weights: bool = False,
        ignore_media: bool = False,
    ) -> None:
        self.shards, self.loss_weights = _text_shards(source, ignore_media), loss_weights

    def __len__(self) -> int:
        return self.shards.num_sequences

    def _shown(self) -> str:
        more = f" and {len(self.shards.prefixes) - 1:,} more" if len(self.shards.prefixes) > 1 else ""
        return f"{self.shards.prefixes[0]}{more}: {len(self):,} sequences"

    def __getitem__(self, index: int) -> Any:
        return self.sequence(index)

    def sequence(self, index: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return ids and token-aligned mask of sequence ``index``, counted over all packs.

        Raises:
            IndexError: the sequence does not exist.
        """
        total = self.shards.num_sequences
        if not -total <= index < total:
            raise IndexError(f"{self.shards.prefixes[0]}: there is no sequence {index}; the shards have {total}")
        index %= total
        before = self.shards.sequences_before
        number = int(np.searchsorted(before, index, side="right")) - 1
        local = index - int(before[number])
        offsets = self.shards.shard(number).index[0]
        at = int(np.searchsorted(offsets, local, side="right")) - 1
        pack = self.shards.pack(number, at)
        start, stop = pack["seq_boundaries"][local - int(offsets[at]) :][:2].tolist()
        mask = pack["loss_mask"][start:stop]
        if not self.loss_weights:
            _require_binary(mask)
        token_mask = np.zeros(stop - start, np.float32 if self.loss_weights else np.int64)
        token_mask[1:] = mask[:-1]
        return pack["input_ids"][start:stop].astype(np.int64), token_mask


class VerlDataset(ShardSequences):
    """The data set for verl's SFT trainer, used as ``data.custom_cls``: one sequence per item.

    An item has ``input_ids``, ``position_ids`` and ``loss_mask``, tensors [length]. verl packs sequences itself
    (``data.use_dynamic_bsz``). Items are not whole packs, because most verl engines would not keep the sequences of a
    pack apart.

    Args:
        parquet_files: shards, see ``ShardSequences``: the value of ``data.train_files`` or ``data.val_files``.
        tokenizer: not used; the shard holds ids.
        config: the section ``data`` of the run. ``pad_mode`` must be ``no_padding``, its default. Two keys are defined
            by this class: ``ignore_media``, and ``loss_weights`` for masks with weights. The FSDP engine multiplies the
            loss by these weights; the Megatron engine rounds them.
        processor: not used.
        max_samples: number of sequences to use, beginning with the first one; -1 for all.

    Raises:
        ShardNotFoundError: there are no such shards.
        FormatError: see ``ShardSequences``; also for another ``pad_mode``.

    Example:
        >>> ds = VerlDataset("data/chats", max_samples=10)
        >>> len(ds)
        10
        >>> ds[5]["loss_mask"]  # aligned with tokens
        tensor([0, 0, 1, 0, 1])
    """

    def __init__(
        self,
        parquet_files: Any,
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        del tokenizer, processor
        config = {} if config is None else config
        if (pad_mode := config.get("pad_mode", "no_padding")) != "no_padding":
            raise FormatError(f"data.pad_mode={pad_mode}: sequences are returned without padding; leave the option out")
        source = parquet_files if isinstance(parquet_files, str | os.PathLike) else [*map(str, parquet_files)]
        options = {name: bool(config.get(name, False)) for name in ("loss_weights", "ignore_media")}
        super().__init__(source, **options)
        self._max_samples = max_samples

    def __len__(self) -> int:
        total = super().__len__()
        return total if self._max_samples < 0 else min(self._max_samples, total)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.shards.prefixes[0]}: sequence {index}, expected 0 to {len(self) - 1}")
        ids, mask = self.sequence(index)
        return {
            "input_ids": torch.from_numpy(ids),
            "position_ids": torch.arange(len(ids)),
            "loss_mask": torch.from_numpy(mask),
        }


class AutomodelPacks(Shown, Dataset[dict[str, Any]]):
    """The data set for NeMo Automodel with ``packed_sequence.prepacked`` and ``packed_sequence_thd_collater``.

    An item is a pack as a row of ``seq_length`` positions. ``input_ids``, ``labels`` and ``position_ids`` are lists of
    numbers [seq_length]; a label is the next token. ``seq_lens`` and ``seq_lens_padded`` are lists [sequences]. The
    padding at the end of a row counts as padding of its last sequence.

    Args:
        source: see ``ShardSequences``; Automodel's ``dataset.source``.
        seq_length: positions in a row, the same as ``packed_sequence.packed_sequence_size``.
        sequence_multiple: each sequence is padded to a multiple of this; under context parallelism, twice the parallel
            size. Pack with the same ``--sequence-multiple``, so that the packs fit.
        ignore_media: see ``ShardSequences``.

    Raises:
        ShardNotFoundError: there are no such shards.
        FormatError: see ``ShardSequences``; also if a pack may not fit ``seq_length``, or ``seq_length`` is not a
            multiple of ``sequence_multiple``. Reading an item raises it if the mask has weights other than 0 and 1.

    Example:
        >>> item = AutomodelPacks("data/chats", 16)[6]
        >>> item["seq_lens"], item["seq_lens_padded"]
        ([2, 3, 4], [2, 3, 11])
    """

    @checked
    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        seq_length: int,
        *,
        sequence_multiple: int = 1,
        ignore_media: bool = False,
    ) -> None:
        if seq_length < 1 or sequence_multiple < 1 or seq_length % sequence_multiple:
            raise FormatError(
                f"seq_length {seq_length}, sequence_multiple {sequence_multiple}: seq_length must be a multiple,"
                " and both at least 1"
            )
        self.shards = _text_shards(source, ignore_media)
        _require_rows(self.shards, seq_length, sequence_multiple)
        self.seq_length, self.sequence_multiple = seq_length, sequence_multiple

    def __len__(self) -> int:
        return len(self.shards)

    def _shown(self) -> str:
        return f"{self.shards.prefixes[0]}: {len(self):,} rows of {self.seq_length:,}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = pack_row(self.shards[index], self.seq_length, self.sequence_multiple)
        padded = row.padded_lengths.tolist()
        padded[-1] += self.seq_length - sum(padded)
        return {
            "input_ids": row.input_ids.tolist(),
            "labels": row.labels.tolist(),
            "position_ids": row.position_ids.tolist(),
            "seq_lens": row.lengths.tolist(),
            "seq_lens_padded": padded,
        }


class TorchtitanPacks(Shown, IterableDataset[tuple[dict[str, Tensor], Tensor]]):
    """An endless stream of packs for a torchtitan data loader, with state for its checkpoints.

    A sample is ``({"input": ids, "positions": positions}, labels)``, int64 [seq_length] each. A label is the next
    token. The padding at the end of a row is a separate sequence: its positions start at 0 and it has no labels.
    Each epoch has a different order. Rank r of n takes every nth sample, so all ranks take the same number of samples.

    Args:
        source: see ``ShardSequences``.
        seq_length: positions in a row, torchtitan's ``training.seq_len``.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.
        seed: seed of the epochs' orders.
        ignore_media: see ``ShardSequences``.

    Raises:
        ShardNotFoundError: there are no such shards.
        FormatError: see ``ShardSequences``; also if a pack may not fit ``seq_length``.

    Example:
        >>> inputs, labels = next(iter(TorchtitanPacks("data/chats", 12)))
        >>> inputs["input"].shape, inputs["positions"].shape, labels.shape
        (torch.Size([12]), torch.Size([12]), torch.Size([12]))
    """

    @checked
    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        seq_length: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        ignore_media: bool = False,
    ) -> None:
        self.shards = _text_shards(source, ignore_media)
        _require_rows(self.shards, seq_length)
        self.seq_length, self.rank, self.world_size, self.seed = seq_length, rank, world_size, seed
        self._taken = 0  # samples yielded by this process or data loader worker

    def _shown(self) -> str:
        return f"{self.shards.prefixes[0]}: rows of {self.seq_length:,}, rank {self.rank} of {self.world_size}"

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        worker = get_worker_info()
        part, parts = (self.rank, self.world_size)
        if worker is not None:
            part, parts = part + worker.id * self.world_size, parts * worker.num_workers
        packs, shuffled_epoch, order = len(self.shards), -1, np.empty(0, np.int64)
        while True:
            epoch, at = divmod(self._taken * parts + part, packs)
            if shuffled_epoch != epoch:
                order, shuffled_epoch = shuffled(packs, self.seed, epoch), epoch
            row = pack_row(self.shards[int(order[at])], self.seq_length)
            self._taken += 1
            inputs = {"input": torch.from_numpy(row.input_ids), "positions": torch.from_numpy(row.position_ids)}
            yield inputs, torch.from_numpy(row.labels)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank, and the shards and order that it refers to."""
        order = {"fingerprint": self.shards.fingerprint, "seed": self.seed, "world_size": self.world_size}
        return {"taken": self._taken, **order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a ``state_dict``. FormatError: it is of other shards or another order.

        Example:
            >>> packs = TorchtitanPacks("data/chats", 12)
            >>> samples = iter(packs)
            >>> first, second = next(samples), next(samples)
            >>> state = packs.state_dict()
            >>> resumed = TorchtitanPacks("data/chats", 12)
            >>> resumed.load_state_dict(state)
            >>> (next(iter(resumed))[1] == next(samples)[1]).all()
            tensor(True)
        """
        own = self.state_dict()
        if changed := [name for name in own if name != "taken" and state.get(name) != own[name]]:
            raise FormatError(
                f"{self.shards.prefixes[0]}: the checkpoint is from a run with {changed[0]} {state.get(changed[0])},"
                f" but this run has {own[changed[0]]}, so packs would be repeated or lost; use the same value"
            )
        self._taken = int(state["taken"])


def _require_rows(shards: ShardSet, seq_length: int, sequence_multiple: int = 1) -> None:
    """Raise FormatError if there are no packs, or if one may not fit a row with its sequences rounded up."""
    if not len(shards):
        raise FormatError(f"{shards.prefixes[0]}: has no packs")
    for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
        if header.longest_pack > seq_length:
            raise FormatError(
                f"{prefix}: its longest pack has {header.longest_pack} tokens, more than seq_length {seq_length}"
            )
        longest = header.longest_pack + header.most_sequences * (sequence_multiple - 1)
        if longest > seq_length and (header.sequence_multiple % sequence_multiple or header.capacity > seq_length):
            raise FormatError(
                f"{prefix}: its packs may not fit seq_length {seq_length} with sequences rounded up to multiples of"
                f" {sequence_multiple}; pack it with --sequence-multiple {sequence_multiple}"
            )
