"""``as_torch``: read packs as tensors for a plain PyTorch loop or the ``Trainer`` of transformers.

The loss mask of a shard is aligned with labels: entry j says whether predicting token j + 1 is trained. Models of
transformers shift labels themselves: they expect at position j + 1 the id of token j + 1 if it is trained, else -100.
So ``labels[j + 1]`` is ``input_ids[j + 1]`` where ``loss_mask[j]`` is set. The mask is 0 at the last position of each
sequence, so the first token of a sequence never has a label.

The loss that a model computes itself ignores weights, and would train on rejected answers. Batches with weights or
preference pairs therefore have no ``labels``, so that this loss cannot be used by mistake.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, Dataset, Subset

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.formats.base import PackedReader
from megatron_sft_idx.formats.packed_dataset import PackedDataset, open_dataset
from megatron_sft_idx.formats.registry import Source, open_reader, options_of_reader, require_one_tokenizer
from megatron_sft_idx.layout import Header
from megatron_sft_idx.lines import Shown
from megatron_sft_idx.packs.run import has_weights
from megatron_sft_idx.shard import Pack, Shard
from megatron_sft_idx.shard.judged import require_judged, require_shard_judged
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.media import (
    BatchItem,
    MediaBatch,
    MediaStep,
    check_media_options,
    run_step,
    text_positions,
)
from megatron_sft_idx.training.sources import CARRIED_BY, blend_weights, require_text

Layout = Literal["padded", "flattened", "flash"]
_IGNORED = -100
# The remedy in the error message for a shard with one of these columns.
_REMEDIES = {
    "pair": "pass preferences=True and use dpo_loss (docs/preferences.md)",
    "label": "use BatchAssembler with columns=['label'] and a loss that needs this column (docs/preferences.md)",
}


class Packs(Protocol):
    """Anything that returns packs by number: the result of ``open_dataset``, a ``Shard``, a ``SFTIndexedDataset``."""

    def __len__(self) -> int:
        """Return the number of packs."""
        ...

    def __getitem__(self, index: int, /) -> Pack:
        """Return one pack."""
        ...


# A list of paths or packs, with a weight before each.
Blend: TypeAlias = Sequence[float | str | os.PathLike[str] | Packs]
# A blend stores the order of its packs, 12 bytes for each; creating it temporarily takes three times as much.
_MOST_PACKS = 10**8


class TorchPack(Mapping[str, Any]):
    """The tensors of one pack, by name, and its images and audio.

    It is a mapping but not a ``dict``. From a ``dict``, the ``Trainer`` of transformers would remove all keys that are
    not arguments of the model's ``forward``, such as the boundaries of the sequences, which ``collate`` needs.
    """

    __slots__ = ("_tensors",)

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        try:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self._tensors.items())
        except AttributeError:
            shapes = "empty"
        return f"<{type(self).__name__} {shapes}>"


class WeightedPacks(Shown):
    """Packs of several data sets in proportion to weights, evenly mixed, in a fixed order.

    Args:
        members: the data sets.
        weights: one for each data set, above 0; only their ratios matter.
        num_packs: total number of packs. None for the smallest number with which every pack of every data set occurs
            at least once. Data sets with fewer packs than their share are repeated.

    Raises:
        FormatError: a weight is not a number above 0; a data set has no packs; or the number of packs, given or
            computed from very different weights, is not from 1 to 10^8.
    """

    def __init__(self, members: Sequence[Packs], weights: Sequence[float], num_packs: int | None = None) -> None:
        weights = blend_weights([_name(member) for member in members], weights)
        for member in members:
            if not len(member):
                raise FormatError(f"{_name(member)}: has no packs; leave it out of the blend")
        self.members, self._shares = members, np.array(weights, np.float64) / math.fsum(weights)
        sizes = np.array([len(member) for member in members])
        if num_packs is None:
            with np.errstate(divide="ignore", over="ignore"):  # a share can be almost 0
                each = sizes / self._shares
            if (needed := float(each.max()) * (1 - 1e-12)) > _MOST_PACKS:
                raise FormatError(
                    f"{_name(members[int(each.argmax())])}: with this blend weight, {needed:.2g} packs are needed to"
                    f" use each pack once, but at most {_MOST_PACKS:,} are supported; raise the weight, or pass"
                    " num_packs"
                )
            num_packs = math.ceil(needed)
        if not 1 <= num_packs <= _MOST_PACKS:
            raise FormatError(f"num_packs {brief(num_packs)}: expected at least one pack, at most {_MOST_PACKS:,}")
        # Largest remainders: the counts are whole, add up, and differ from the shares by less than one pack.
        exact = self._shares * num_packs
        counts = np.floor(exact + 1e-9).astype(np.int64)
        for member in np.argsort(counts - exact, kind="stable")[: num_packs - counts.sum()]:
            counts[member] += 1
        self._members = np.repeat(np.arange(len(members), dtype=np.int32), counts)
        packs = [np.arange(count) % size for count, size in zip(counts.tolist(), sizes.tolist(), strict=True)]
        places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts.tolist()])
        order = np.argsort(places, kind="stable")
        self._members, self._packs = self._members[order], np.concatenate(packs)[order]
        self.counts: list[int] = counts.tolist()

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> Pack:
        return self.members[int(self._members[index])][int(self._packs[index])]

    def _shown(self) -> str:
        return f"{len(self):,} packs: {_name(self)}"


class TorchPacks(Shown, Dataset[TorchPack]):
    """A data set of packs as tensors, with the ``collate`` function that makes batches; created by ``as_torch``.

    Args:
        packs: the source of the packs.
        layout: layout of the batches. See ``as_torch`` for this and all other arguments.

    Raises:
        FormatError: ``layout`` is ``flash`` and ``media`` is given.
    """

    def __init__(
        self,
        packs: Packs,
        layout: Layout,
        *,
        pad_to_multiple_of: int = 1,
        loss_weights: bool = False,
        preferences: bool = False,
        media: MediaStep | None = None,
        ignore_media: bool = False,
    ) -> None:
        check_media_options(media, ignore_media)
        if layout == "flash" and media is not None:
            # LlavaModel, for example, passes the boundaries to the image encoder too, and its attention would use them.
            raise FormatError(
                "layout 'flash' cannot be combined with media, because some models also pass cu_seq_lens_q to their"
                " image encoder, which then mixes up images; use 'flattened', in which flash attention finds the"
                " sequences through position_ids"
            )
        self.packs, self.layout, self.media = packs, layout, media
        self.pad_to_multiple_of, self.preferences, self.ignore_media = pad_to_multiple_of, preferences, ignore_media
        self.loss_weights = loss_weights or preferences

    def __len__(self) -> int:
        return len(self.packs)

    def _shown(self) -> str:
        options = [f"pad_to_multiple_of={self.pad_to_multiple_of}"] * (self.pad_to_multiple_of > 1)
        options += ["preferences"] * self.preferences
        options += ["media"] * (self.media is not None)
        options += ["ignore_media"] * self.ignore_media
        options += ["loss_weights"] * (self.loss_weights and not self.preferences)
        return f"{', '.join([self.layout, *options])}: {len(self):,} packs of {_name(self.packs)}"

    def __getitem__(self, index: int) -> TorchPack:
        """Return the tensors of one pack, by name.

        Returns:
            ``input_ids`` int64 [length] and ``seq_boundaries`` int64 [sequences + 1]. Also ``labels`` int64 [length],
                or, with the options ``loss_weights`` or ``preferences``, ``loss_weights`` float32 [length] instead.
                With ``preferences`` also ``pair`` int64 [sequences, 2], and with ``media`` also ``media``, the list of
                the pack's images and audio.

        Raises:
            FormatError: the mask has weights other than 0 and 1, without the option ``loss_weights``; there is no
                column ``pair``, with ``preferences``; or the pack has images or audio, without ``media`` or
                ``ignore_media``.

        Example:
            >>> from megatron_sft_idx import as_torch
            >>> pack = as_torch("data/chats")[6]
            >>> pack["input_ids"]
            tensor([60, 61, 62, 63, 64, 65, 66, 67, 68])
            >>> pack["labels"]
            tensor([-100,   61, -100,   63, -100, -100, -100,   67, -100])
        """
        pack = self.packs[index]
        if self.media is None:
            require_text(f"pack {index}", "media" in pack, self.ignore_media, CARRIED_BY)  # packs of any class
        ids, mask = torch.from_numpy(pack["input_ids"].astype(np.int64)), pack["loss_mask"]
        tensors: dict[str, Any] = {"input_ids": ids, "seq_boundaries": torch.from_numpy(pack["seq_boundaries"]).long()}
        if self.media is not None:
            tensors["media"] = pack.get("media", [])
        if self.loss_weights:
            tensors["loss_weights"] = torch.zeros(len(ids))
            tensors["loss_weights"][1:] = torch.from_numpy(mask[:-1].astype(np.float32))
        else:
            if has_weights(mask):
                raise FormatError(
                    f"pack {index}: its loss mask has weights other than 0 and 1, which labels cannot represent; pass"
                    " loss_weights=True and use training.losses.weighted_loss"
                )
            tensors["labels"] = torch.full_like(ids, _IGNORED)
            tensors["labels"][1:] = torch.where(torch.from_numpy(mask[:-1] != 0), ids[1:], _IGNORED)
        if self.preferences:
            tensors["pair"] = torch.from_numpy(_pair_of(pack, index).astype(np.int64))
        return TorchPack(tensors)

    def collate(self, packs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch of these packs in the layout of this data set; pass it to ``DataLoader`` as ``collate_fn``.

        Example:
            >>> from megatron_sft_idx import as_torch
            >>> packs = as_torch("data/chats")
            >>> packs.collate([packs[5], packs[6]])["position_ids"]  # the five sequences of two packs in one row
            tensor([[0, 0, 1, 0, 1, 0, 1, 2, 0, 1, 2, 3]])
        """
        lengths = torch.cat([pack["seq_boundaries"].diff() for pack in packs])
        key, filler = ("loss_weights", 0.0) if self.loss_weights else ("labels", _IGNORED)
        ids, marks = (torch.cat([pack[name] for pack in packs]) for name in ("input_ids", key))
        batch: dict[str, Any]
        if self.layout == "padded":
            batch = self._padded(ids, marks, lengths, key, filler)
        else:
            batch = self._flattened(ids, marks, lengths, key, filler)
        if self.preferences:
            batch["pair"] = torch.cat([pack["pair"] for pack in packs])
        if self.media is not None:
            self._add_media(self.media, batch, packs, lengths.numpy())
        return batch

    def _add_media(
        self, step: MediaStep, batch: dict[str, Any], packs: Sequence[Mapping[str, Any]], lengths: NDArray[np.int64]
    ) -> None:
        """Add the output of the media step for the images and audio of packs whose sequences have ``lengths``."""
        numbers, ends = np.arange(len(lengths)), np.cumsum(lengths)
        rows, starts = np.zeros_like(numbers), ends - lengths
        if self.layout == "padded":
            rows, starts = numbers, np.zeros_like(numbers)
        items, first = list[BatchItem](), 0
        for pack in packs:
            bounds = pack["seq_boundaries"]
            for item in pack["media"]:
                in_pack = int(torch.searchsorted(bounds, item.start, right=True)) - 1
                sequence = first + in_pack
                start = int(starts[sequence]) + item.start - int(bounds[in_pack])
                items.append(BatchItem(item.kind, start, item.length, item.data, int(rows[sequence]), sequence))
            first += len(bounds) - 1
        ids, positions = batch["input_ids"], batch.get("position_ids")
        if positions is None:
            positions = text_positions(ids.shape, rows, starts, lengths)
        batch |= run_step(step, MediaBatch(ids, positions, rows, starts, lengths, items), batch)
        if (of_model := batch.pop("mrope_position_ids", None)) is not None:
            # Models use the first of the four as text positions, from which they find the sequences of a row.
            is_padded = self.layout == "padded"
            batch["position_ids"] = of_model if is_padded else torch.cat([positions[None], of_model])

    def _padded(self, ids: Tensor, marks: Tensor, lengths: Tensor, key: str, filler: float) -> dict[str, Any]:
        each = lengths.tolist()
        missing = -max(each) % self.pad_to_multiple_of

        def rows(values: Tensor, padding: float) -> Tensor:
            padded = pad_sequence(list(torch.split(values, each)), batch_first=True, padding_value=padding)
            return pad(padded, (0, missing), value=padding)

        return {"input_ids": rows(ids, 0), key: rows(marks, filler), "attention_mask": rows(torch.ones_like(ids), 0)}

    def _flattened(self, ids: Tensor, marks: Tensor, lengths: Tensor, key: str, filler: float) -> dict[str, Any]:
        if missing := -len(ids) % self.pad_to_multiple_of:  # padding is a separate sequence without labels
            ids, marks = pad(ids, (0, missing)), pad(marks, (0, missing), value=filler)
            lengths = pad(lengths, (0, 1), value=missing)
        ends = lengths.cumsum(0)
        positions = torch.arange(len(ids)) - (ends - lengths).repeat_interleave(lengths)
        batch: dict[str, Any] = {"input_ids": ids[None], key: marks[None], "position_ids": positions[None]}
        # Models use a cache by default, and with a cache transformers does not derive sequences from positions.
        batch["use_cache"] = False
        if self.layout == "flash":
            bounds, longest = torch.cat([ends.new_zeros(1), ends]).int(), int(lengths.max())
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return batch


@checked
def as_torch(
    source: Source | Packs | Blend,
    layout: Layout = "flattened",
    *,
    pad_to_multiple_of: int = 1,
    num_packs: int | None = None,
    loss_weights: bool = False,
    preferences: bool = False,
    media: MediaStep | None = None,
    ignore_media: bool = False,
) -> TorchPacks:
    """Return packs as a data set for a ``DataLoader`` or ``Trainer``; models of transformers accept its batches.

    In every layout, a token attends only to its own sequence, and the loss that the model returns is the mean over the
    trained tokens. ``labels[i]`` is ``input_ids[i]``, or -100 if token i is not trained on. Labels are not shifted:
    compare the logits at i with the label at i + 1, as models of transformers do.

    Models with layers other than attention, such as linear attention or Mamba, need the layout ``padded``: in a row
    with several sequences, these layers would carry their state from one sequence to the next. Checksums are not
    compared; run ``verify --full`` before a long training.

    Args:
        source: an argument or result of ``open_dataset``; a ``Shard`` or ``SFTIndexedDataset``; or a blend: a list of
            these with a weight before each, such as ``[0.8, "data/chats", 0.2, "data/code"]``.
        layout: ``flattened`` puts all sequences of a batch into one row. ``input_ids``, ``labels`` and
            ``position_ids``, which restart at 0 in each sequence, are int64 [1, tokens]; ``use_cache`` is False.
            ``flash`` adds the arguments of flash attention: ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32 [sequences +
            1], and the integers ``max_length_q`` and ``max_length_k``. ``padded`` puts each sequence into its own row:
            ``input_ids``, ``labels`` and ``attention_mask`` are int64 [sequences, longest]; padding has id 0, label
            -100 and mask 0.
        pad_to_multiple_of: pad rows to a multiple of this many positions. In a row with all sequences, the padding
            becomes one more sequence without labels.
        num_packs: number of packs of a blend; None for the smallest number with which each pack occurs at least once.
        loss_weights: accept masks with weights other than 0 and 1. Batches then have no ``labels`` but
            ``loss_weights`` float32, in the same shape: the weight of predicting the token at each position. Compute
            the loss with ``training.losses.weighted_loss``.
        preferences: accept preference pairs. Batches then have no ``labels`` but ``loss_weights``, and ``pair`` int64
            [sequences, 2]. Compute the loss with ``dpo_loss``.
        media: accept images and audio, and add model inputs for them to each batch: ``training.media.MediaInputs``, or
            another function of a ``MediaBatch``. For models that count positions in three dimensions (M-RoPE),
            ``position_ids`` are int64 [4, 1, tokens], with the positions of the text first; in the layout ``padded``
            they are int64 [3, sequences, longest].
        ignore_media: accept images and audio, and train as if their placeholder tokens were text. Their labels are
            -100.

    Raises:
        FormatError: ``layout`` is unknown, or ``flash`` together with ``media``; a weight of a blend is not above 0;
            packs come from different tokenizers; they have preference pairs or KTO labels that the options do not
            fit; or they have images or audio, without ``media`` or ``ignore_media``.
        ShardNotFoundError: there is nothing at a path.
        SequenceError: see ``open_dataset``.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> ds = as_torch("data/chats")
        >>> ds
        <TorchPacks flattened: 7 packs of data/chats>
        >>> for batch in DataLoader(ds, batch_size=4, collate_fn=ds.collate):
        ...     print(batch["input_ids"].shape)
        torch.Size([1, 30])
        torch.Size([1, 17])
        >>> as_torch([0.75, "data/chats", 0.25, "data/chats"], "padded", pad_to_multiple_of=8)
        <TorchPacks padded, pad_to_multiple_of=8: 28 packs of 21 of data/chats and 7 of data/chats>
    """
    if layout not in get_args(Layout):
        raise FormatError(f"unknown layout {layout!r}; choose one of {', '.join(get_args(Layout))}")
    if pad_to_multiple_of < 1:
        raise FormatError(f"pad_to_multiple_of {pad_to_multiple_of}: expected a whole number of at least 1")
    columns = ("pair",) if preferences else ()
    takes_media = ignore_media or media is not None
    packs: Packs
    if isinstance(source, Sequence) and any(_is_weight(each) for each in source):
        packs = _blended(source, num_packs, columns, takes_media)
    elif num_packs is not None:
        raise FormatError("num_packs: only for a blend, a list with a weight before each path; leave it out")
    else:
        packs = _opened(source, columns)
        _require_trainable([packs], columns, takes_media)
    return TorchPacks(
        packs,
        layout,
        pad_to_multiple_of=pad_to_multiple_of,
        loss_weights=loss_weights,
        preferences=preferences,
        media=media,
        ignore_media=ignore_media,
    )


def _is_weight(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _opened(source: Any, columns: tuple[str, ...]) -> Packs:
    """Return the packs of a source of ``as_torch`` that is not a blend."""
    is_path = isinstance(source, (str, os.PathLike, Sequence))
    packs: Any = source
    if is_path:
        packs = open_dataset(source, columns=columns) if columns else open_dataset(source)
    if isinstance(packs, Mapping | np.ndarray) or not (hasattr(packs, "__len__") and hasattr(packs, "__getitem__")):
        raise FormatError(f"source: {brief(source)}, expected a path, a list of paths, or a dataset of this package")
    return packs  # type: ignore[no-any-return]


def _blended(
    source: Sequence[Any], num_packs: int | None, columns: tuple[str, ...], takes_media: bool
) -> WeightedPacks:
    """Return the packs of a list with a weight before each member."""
    weights, members = source[::2], source[1::2]
    alternate = len(weights) == len(members) and all(map(_is_weight, weights)) and not any(map(_is_weight, members))
    if not alternate:
        raise FormatError(f'source: {brief(source)}, expected a weight before each path: [0.8, "a", 0.2, "b"]')
    opened = [_opened(each, columns) for each in members]
    _require_trainable(opened, columns, takes_media)
    return WeightedPacks(opened, weights, num_packs)


def _pair_of(pack: Mapping[str, Any], index: int) -> NDArray[Any]:
    """Return the column ``pair`` of a pack. FormatError: it was opened without this column."""
    if (pair := pack.get("pair")) is None:
        raise FormatError(f"pack {index}: has no column 'pair'; open the dataset with columns=['pair']")
    return pair  # type: ignore[no-any-return]


def _name(packs: Any) -> str:
    """Return the name of the source of packs, for a ``repr``."""
    if isinstance(packs, WeightedPacks):
        each = [f"{count:,} of {_name(member)}" for member, count in zip(packs.members, packs.counts, strict=True)]
        return " and ".join(each)
    if paths := getattr(packs, "paths", None):
        return str(paths[0]) + (f" and {len(paths) - 1:,} more" if len(paths) > 1 else "")
    prefix = getattr(packs, "prefix", None) or getattr(packs, "path_prefix", None)
    return str(prefix or type(packs).__name__)


def _require_trainable(members: Sequence[Packs], columns: tuple[str, ...], takes_media: bool) -> None:
    """Raise FormatError if packs cannot be trained on with these options.

    Reasons are a column that marks bad answers, images or audio, and different tokenizers.

    Args:
        members: all packs that are trained on together.
        columns: names of the columns that the loss uses.
        takes_media: whether packs may have images and audio.
    """
    first, stated = "", list[tuple[int | None, Mapping[str, Any]]]()
    for path, file in (each for member in members for each in _files_of(member)):
        first = first or path
        require_text(path, file.has_media, takes_media, CARRIED_BY)
        if isinstance(file, Header):
            require_shard_judged(path, file, columns, _REMEDIES)
            stated.append((file.pad_id, file.metadata))
        else:
            require_judged(path, file.columns, file.columns.__getitem__, file.stated[1], columns, _REMEDIES)
            stated.append(file.stated)
    require_one_tokenizer(first, stated)
    if columns:
        for member in members:
            if len(member):
                _pair_of(member[0], 0)


def _files_of(packs: Any) -> Iterator[tuple[str, Header | PackedReader]]:
    """Yield the path of each file that packs come from: of a shard with its header, of another file with its reader.

    Files of formats that store neither columns nor a tokenizer are omitted. So are packs of unknown classes.
    """
    if isinstance(packs, TorchPacks | WeightedPacks):
        raise FormatError(f"source: {packs!r} is already a result of as_torch; pass its original source")
    if isinstance(packs, Subset):
        yield from _files_of(packs.dataset)
    elif isinstance(packs, ConcatDataset):
        for each in packs.datasets:
            yield from _files_of(each)
    elif isinstance(packs, ShardSet):
        yield from zip(packs.prefixes, packs.headers, strict=True)
    elif not isinstance(packs, PackedDataset):
        shard = getattr(packs, "shard", packs)  # that of a SFTIndexedDataset
        if isinstance(shard, Shard):
            yield shard.prefix, shard.header
    elif packs.headers:
        yield from zip(packs.paths, packs.headers, strict=True)
    elif "columns" in options_of_reader(packs.format):
        for path in packs.paths:
            yield path, open_reader(path, packs.format, columns=None)
