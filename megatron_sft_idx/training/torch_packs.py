"""``as_torch``: packs as tensors for a plain PyTorch loop or the ``Trainer`` of transformers.

A mask of ours is aligned with labels: entry j is about predicting token j + 1. The models shift labels themselves, and
take at token j + 1 what is to be predicted there, or -100. So labels are the ids one to the right of a mask that is
set. The mask of a sequence's last position is 0, hence no label ever lies on the first token of the next.

A model's own loss has no place for weights, and would train on rejected answers. Batches with weights or preference
pairs therefore have no ``labels``: a loss that ignores what they hold cannot be computed by mistake.
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
# What to do about a shard whose answers are judged by one of these columns.
_REMEDIES = {
    "pair": "pass preferences=True and use dpo_loss (docs/preferences.md)",
    "label": "use BatchAssembler with columns=['label'] and a loss that needs this column (docs/preferences.md)",
}


class Packs(Protocol):
    """Anything with packs by number: ``open_dataset``'s, a ``Shard``, a ``SFTIndexedDataset``."""

    def __len__(self) -> int:
        """How many packs there are."""
        ...

    def __getitem__(self, index: int, /) -> Pack:
        """One pack."""
        ...


# Paths or packs, and a blend of these: a list with a weight in front of each.
Blend: TypeAlias = Sequence[float | str | os.PathLike[str] | Packs]
# A blend holds the order of its packs, 12 bytes each; making it takes three times as many.
_MOST_PACKS = 10**8


class TorchPack(Mapping[str, Any]):
    """The tensors of one pack, by name, and its images and audio.

    It is a mapping and not a ``dict``, so it reaches ``collate`` whole: from each dict the ``Trainer`` of transformers
    removes the keys that the model's ``forward`` has no argument for, such as the boundaries of sequences.
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
    """Packs of several data sets in proportion to weights, spread evenly, in an order without randomness.

    Args:
        members: the data sets.
        weights: one for each, above 0; their scale does not matter.
        num_packs: how many packs there are. None is the smallest number by which every pack of every member comes at
            least once; members with fewer packs than their share start over.

    Raises:
        FormatError: a weight is not a number above 0, ``num_packs`` is below 1 or above 10^8, as it may be where it is
            None and weights differ very much, or a member has no packs.
    """

    def __init__(self, members: Sequence[Packs], weights: Sequence[float], num_packs: int | None = None) -> None:
        weights = blend_weights([_name(member) for member in members], weights)
        for member in members:
            if not len(member):
                raise FormatError(f"{_name(member)}: has no packs; leave it out of the blend")
        self.members, self._shares = members, np.array(weights, np.float64) / math.fsum(weights)
        sizes = np.array([len(member) for member in members])
        if num_packs is None:
            with np.errstate(divide="ignore", over="ignore"):  # a share may be as good as none
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
    """Packs as mappings of tensors, and ``collate``, which makes a batch of some; ``as_torch`` makes one.

    Args:
        packs: where the packs come from.
        layout: as for ``as_torch``, and so are all others.

    Raises:
        FormatError: ``layout`` is ``flash``, and ``media`` was passed.
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
            # LlavaModel, for one, passes its arguments on to the image encoder, whose attention obeys them.
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
        """One pack: ``input_ids`` int64 [length], ``seq_boundaries`` int64 [sequences + 1].

        It has ``labels`` int64 [length] too, or ``loss_weights`` float32 [length] where these are asked for, and with
        ``preferences`` also ``pair`` int64 [sequences, 2], and with ``media`` the list of its images and audio.

        Raises:
            FormatError: its mask has weights, and ``loss_weights`` was not asked for; it has no column ``pair``, and
                ``preferences`` was; or its shard has images or audio, and neither ``media`` nor ``ignore_media`` was
                passed.
        """
        pack = self.packs[index]
        if self.media is None:
            require_text(f"pack {index}", "media" in pack, self.ignore_media, CARRIED_BY)  # of packs of any class
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
        """A batch of these packs, in the layout of this dataset; ``collate_fn`` of a ``DataLoader``."""
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
        """Add what the media step makes of the images and audio of these packs, whose sequences have ``lengths``."""
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
            # Models take the first of four for the positions of the text, by which they find sequences in a row.
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
        if missing := -len(ids) % self.pad_to_multiple_of:  # the padding is a sequence by itself, without a label
            ids, marks = pad(ids, (0, missing)), pad(marks, (0, missing), value=filler)
            lengths = pad(lengths, (0, 1), value=missing)
        ends = lengths.cumsum(0)
        positions = torch.arange(len(ids)) - (ends - lengths).repeat_interleave(lengths)
        batch: dict[str, Any] = {"input_ids": ids[None], key: marks[None], "position_ids": positions[None]}
        # With a cache, which models make unasked, transformers does not look for sequences in the positions.
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
    """Packs for a ``DataLoader`` or a ``Trainer``, in batches that models of transformers take as they are.

    In every layout a token attends only to its own sequence, and the loss that a model returns is the mean over the
    tokens that our masks train on. Models with layers other than attention, such as linear attention or Mamba, need
    the layout ``padded``: in a row with several sequences these layers would carry their state from one to the next.
    Checksums are not compared: run ``verify --full`` before a long training.

    Args:
        source: what ``open_dataset`` takes, or what it returned; a ``Shard`` or ``SFTIndexedDataset``; or a blend: a
            list of these with a weight in front of each, ``[0.8, "data/chats", 0.2, "data/code"]``.
        layout: ``flattened`` puts all sequences of a batch into one row and says where they begin by ``position_ids``,
            all int64 [1, tokens], with ``use_cache`` False; ``flash`` adds the arguments of flash attention:
            ``cu_seq_lens_q`` and ``_k`` int32 [sequences + 1], ``max_length_q`` and ``_k``; ``padded`` gives every
            sequence a row to itself, int64 [sequences, longest], filled up with id 0 where ``attention_mask`` is 0
            and ``labels`` -100.
        pad_to_multiple_of: fill up rows to a multiple of so many positions. In one row with all sequences the padding
            is one more sequence, without a label.
        num_packs: how many packs a blend has. None is the smallest number by which every pack comes at least once.
        loss_weights: for masks with weights other than 0 and 1. Batches have ``loss_weights`` float32, the weight of
            predicting the token at each position, and no ``labels``; ``training.losses.weighted_loss`` takes them.
        preferences: for preference pairs. Batches have ``loss_weights`` and ``pair`` int64 [sequences, 2], and no
            ``labels``; ``dpo_loss`` takes them.
        media: for shards with images and audio: makes of these what is added to a batch, with ``MediaInputs`` the
            tensors that the model's processor makes. Of models that count positions in three dimensions (M-RoPE)
            ``position_ids`` are int64 [4, 1, tokens], those of the text first, and [3, sequences, longest] where
            ``padded``.
        ignore_media: for shards with images and audio. Batches are of text: placeholder tokens are as all others, and
            their labels -100.

    Raises:
        FormatError: ``layout`` is unknown, or ``flash`` with ``media``; a weight of a blend is not above 0, packs come
            from different tokenizers, they hold preference pairs or KTO labels and ``preferences`` does not fit, or
            images or audio, and neither ``media`` nor ``ignore_media`` was passed; or as ``open_dataset``.

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
    """The packs of what ``as_torch`` takes, but for a blend."""
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
    """The packs of a list with a weight in front of each member."""
    weights, members = source[::2], source[1::2]
    alternate = len(weights) == len(members) and all(map(_is_weight, weights)) and not any(map(_is_weight, members))
    if not alternate:
        raise FormatError(f'source: {brief(source)}, expected a weight before each path: [0.8, "a", 0.2, "b"]')
    opened = [_opened(each, columns) for each in members]
    _require_trainable(opened, columns, takes_media)
    return WeightedPacks(opened, weights, num_packs)


def _pair_of(pack: Mapping[str, Any], index: int) -> NDArray[Any]:
    """The column ``pair`` of a pack; FormatError where it was opened without."""
    if (pair := pack.get("pair")) is None:
        raise FormatError(f"pack {index}: has no column 'pair'; open the dataset with columns=['pair']")
    return pair  # type: ignore[no-any-return]


def _name(packs: Any) -> str:
    """Where packs come from, for a ``repr``."""
    if isinstance(packs, WeightedPacks):
        each = [f"{count:,} of {_name(member)}" for member, count in zip(packs.members, packs.counts, strict=True)]
        return " and ".join(each)
    if paths := getattr(packs, "paths", None):
        return str(paths[0]) + (f" and {len(paths) - 1:,} more" if len(paths) > 1 else "")
    prefix = getattr(packs, "prefix", None) or getattr(packs, "path_prefix", None)
    return str(prefix or type(packs).__name__)


def _require_trainable(members: Sequence[Packs], columns: tuple[str, ...], takes_media: bool) -> None:
    """FormatError where packs are not to be trained on in this way.

    That is where a column judges their answers, where they have images or audio, and where they come from different
    tokenizers.

    Args:
        members: all packs that are trained on together.
        columns: names of the columns that the loss takes.
        takes_media: whether packs may have images and audio, which batches carry or leave out.
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
    """The path of everything that packs lie in: of each shard with its header, of each other file with its reader.

    Files whose format states no columns and no tokenizer are left out, and so are packs of other classes.
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
