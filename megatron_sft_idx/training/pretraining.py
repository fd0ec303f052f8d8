"""Pretraining data in a blend: rows of a stock Megatron dataset among packs of chats.

``pretrain:web_text`` in a blend is the dataset ``web_text.bin`` and ``web_text.idx``. Megatron's own ``GPTDataset``
chooses and shuffles its rows. This module gives them the form of packed rows: all tokens are trained, and the row is
one segment. An assembler still reads all packs of the same batch at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.stock import open_idx, recognise
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.lines import Shown, shown_by_fields
from megatron_sft_idx.packs.run import first_true
from megatron_sft_idx.shard.shard_set import running_sums
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.training.sources import (
    Arrays,
    ItemFinder,
    JoinedPacks,
    PlannedPacks,
    Segments,
    StoredPacks,
    WholeRows,
)

PREFIX = "pretrain:"
# Number and size in bytes of the samples of the .bin by which datasets are distinguished.
_SAMPLES, _SAMPLE_NBYTES = 64, 1 << 16
# How many documents are checked at a time.
_BLOCK = 1 << 20


def is_pretraining(path: str) -> bool:
    """Return whether a path of a blend is pretraining data."""
    return path.startswith(PREFIX)


# ---- a dataset on disk ----


@shown_by_fields
@dataclass(frozen=True, slots=True)
class Corpus:
    """A stock Megatron dataset that is complete according to its index.

    Attributes:
        prefix: prefix of its two files.
        content: hash of the lengths of all documents and of samples of the ``.bin``, hex; independent of the path.
    """

    prefix: str
    content: str

    @classmethod
    def open(cls, path: str) -> Corpus:
        """Check the dataset at a path of a blend.

        Raises:
            FormatError: it is not on a local disk, incomplete, truncated or damaged, it does not have token ids, or it
                is packed SFT data.
        """
        prefix = path.removeprefix(PREFIX).removesuffix(".idx").removesuffix(".bin")
        if is_remote(prefix):
            raise FormatError(f"{path}: pretraining data must be on a local or shared disk; copy it there")
        paths = ShardPaths(prefix)
        for file in (paths.idx, paths.tokens):
            if not os.path.isfile(file):
                raise FormatError(
                    f"{path}: {file} does not exist; pass the prefix of a stock Megatron dataset, the path of its .idx"
                    " and .bin without these endings"
                )
        index = open_idx(paths.idx)
        if not recognise(prefix):
            raise FormatError(
                f"{path}: this is packed SFT data, but pretraining would ignore its masks and train on every token;"
                f" leave {PREFIX} out"
            )
        if index.dtype.kind == "f":
            raise FormatError(f"{path}: items of {index.dtype}, expected integer token ids")
        nbytes, content = os.path.getsize(paths.tokens), xxhash.xxh3_128()
        end = 0
        for begin in range(0, len(index.lengths), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            lengths = index.lengths[block].astype(np.int64)
            ends = end + np.cumsum(lengths) * index.dtype.itemsize
            starts = ends - lengths * index.dtype.itemsize
            if (wrong := first_true((lengths < 0) | (index.pointers[block] != starts))) is not None:
                raise FormatError(
                    f"{paths.idx}: document {begin + wrong} has {lengths[wrong]} tokens from byte"
                    f" {index.pointers[block][wrong]} of {paths.tokens}, but the previous document ends at byte"
                    f" {starts[wrong]}; the index is damaged: restore it"
                )
            content.update(lengths.tobytes())
            end = int(ends[-1])
        if not end:
            raise FormatError(f"{path}: {len(index.lengths)} documents without any token; leave it out")
        if end != nbytes:
            raise FormatError(
                f"{path}: {paths.tokens} has {nbytes} bytes, but {end} according to its index; one of the two files"
                " was truncated or changed: restore them"
            )
        with open(paths.tokens, "rb") as tokens:
            for begin in np.linspace(0, max(nbytes - _SAMPLE_NBYTES, 0), _SAMPLES, dtype=np.int64).tolist():
                tokens.seek(begin)
                content.update(tokens.read(_SAMPLE_NBYTES))
        return cls(prefix, content.hexdigest())

    @property
    def source_file(self) -> dict[str, Any]:
        """The entry of this dataset in the table of files of the column ``source``."""
        return {"name": PREFIX + Path(self.prefix).name, "fingerprint": self.content}


class EveryToken(Shown):
    """A stand-in for the tokenizer of ``GPTDataset``, so that it masks no token.

    Args:
        content: hash of the corpus. In the keys of Megatron's caches, it distinguishes corpora at the same path.
    """

    # Megatron replaces padding by 0. These values are not ids, so it finds no padding, and ids below 0 reach ``row``.
    pad, eod = -(1 << 40), -(1 << 41)
    vocab_size = None
    special_tokens_dict: ClassVar[dict[str, int]] = {}

    def __init__(self, content: str) -> None:
        self.unique_identifiers = {"class": "EveryToken", "content": content}

    def _shown(self) -> str:
        return f"of the corpus {self.unique_identifiers['content']}"


# ---- its rows in batches ----


class TokenRows(Protocol):
    """The used part of a ``GPTDataset``: rows with ``tokens`` and ``labels``, int64 [seq_length]."""

    unique_description_hash: str
    document_index: NDArray[Any]
    shuffle_index: NDArray[Any]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


class PretrainingPacks(Shown):
    """A ``PackSource`` of the rows of a ``GPTDataset``, in its order; a pack is a row.

    Args:
        corpus: the dataset on disk.
        dataset: its requested rows, in training order.
        seq_length: tokens in a row.
        columns: names of the requested columns: ``source`` or none.
        vocab_size: rows of the model's embedding; rows with other tokens are refused. None skips this check.
    """

    def __init__(
        self,
        corpus: Corpus,
        dataset: TokenRows,
        seq_length: int,
        columns: Sequence[str] = (),
        vocab_size: int | None = None,
    ) -> None:
        self.corpus, self.dataset, self.vocab_size = corpus, dataset, vocab_size
        self.num_packs, self.capacity = len(dataset), seq_length
        self.sequence_multiple, self.most_sequences = seq_length, 0
        self.pad_id: int | None = None
        self.media_prefix: str | None = None
        self.fingerprint = xxhash.xxh3_128_hexdigest(
            json.dumps([corpus.content, dataset.unique_description_hash]).encode()
        )
        table = {"files": [corpus.source_file]}
        self.columns = {name: [ColumnSpec("sequence", np.uint32, 2, metadata=table)] for name in columns}

    def _shown(self) -> str:
        return f"{self.corpus.prefix}: {self.num_packs:,} rows of {self.capacity:,} tokens"

    @property
    def content(self) -> str:
        """Hash of the dataset on disk, hex; see ``Corpus``."""
        return self.corpus.content

    def num_tokens(self) -> int:
        """Return the number of tokens of all rows."""
        return self.num_packs * self.capacity

    def order(self) -> str:
        """Return a hash of the order of the rows, hex: Megatron's shuffle depends on the number of epochs."""
        order = StreamHash()
        for index in (self.dataset.document_index, self.dataset.shuffle_index):
            order.update(index)
        return order.hex()

    def stored(self, packs: NDArray[np.int64]) -> dict[str, set[int]]:
        """Return the numbers of these rows in Megatron's ``GPTDataset``, by the path of the dataset in the blend."""
        return {PREFIX + self.corpus.prefix: {*packs.tolist()}}

    def row(self, shard: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of a row, int64 [seq_length]; see ``WholeRows.read``.

        FormatError: a token is not in the vocabulary.
        """
        row = self.dataset[number]
        tokens, labels = row["tokens"], row["labels"]
        if len(tokens) != self.capacity:
            raise FormatError(
                f"{self.corpus.prefix}: row {number} has {len(tokens)} tokens, expected {self.capacity}; remove the"
                " indices of this dataset from --data-cache-path; Megatron will create them again"
            )
        least, most = min(int(tokens.min()), int(labels.min())), max(int(tokens.max()), int(labels.max()))
        if least < 0 or (self.vocab_size is not None and most >= self.vocab_size):
            outside = least if least < 0 else most
            raise FormatError(
                f"{self.corpus.prefix}: row {number} has token {outside}, which is not in the model's vocabulary; use"
                " the tokenizer that the chats were made with, or repair the dataset"
            )
        return tokens, labels

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Return the rows; they do not have sequences. See ``PackSource``."""
        whole = WholeRows(np.arange(len(packs)), np.zeros(len(packs), np.int32), packs, self.row)
        none = np.zeros(0, np.int64)
        offsets = np.zeros(len(packs) + 1, np.int64)
        return Segments(offsets, none.astype(np.int32), none, none, [], none, None, whole)

    def arrays(self, shard: int) -> Arrays:
        """Raise IndexError: pretraining data has no sequences."""
        raise IndexError(f"shard {shard}: pretraining data has no shards")

    def items(self, shard: int) -> None:
        """Return None: there are no images or audio."""


class MixedPacks(Shown):
    """A ``PackSource`` of a blend with pretraining data; packs are numbered one source after the other.

    Packs of chats are found and read as in a blend without pretraining data.
    """

    def __init__(self, sources: Sequence[StoredPacks | PlannedPacks | PretrainingPacks]) -> None:
        self.packs_before = running_sums(source.num_packs for source in sources)
        self.num_packs = int(self.packs_before[-1])
        self._rows = {n: source for n, source in enumerate(sources) if isinstance(source, PretrainingPacks)}
        chats = {n: source for n, source in enumerate(sources) if not isinstance(source, PretrainingPacks)}
        self._is_chats = np.array([n in chats for n in range(len(sources))])
        self.chats = JoinedPacks(list(chats.values()))
        begins = np.zeros(len(sources), np.int64)
        begins[self._is_chats] = self.chats.packs_before[:-1]
        self._shift = begins - self.packs_before[:-1]
        self._num_shards = sum(len(source.shards.prefixes) for source in chats.values())
        self._shard_of = np.full(len(sources), -1, np.int32)
        self._shard_of[~self._is_chats] = self._num_shards + np.arange(len(self._rows))
        self.capacity = max(source.capacity for source in sources)
        self.sequence_multiple = self.chats.sequence_multiple
        self.most_sequences, self.pad_id = self.chats.most_sequences, self.chats.pad_id
        self.media_prefix = self.chats.media_prefix
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps([source.fingerprint for source in sources]).encode())
        self.columns = {
            name: [*specs, *(spec for source in self._rows.values() for spec in source.columns[name])]
            for name, specs in self.chats.columns.items()
        }

    def _shown(self) -> str:
        rows = ", ".join(repr(source) for source in self._rows.values())
        return f"{self.chats!r}, and pretraining data: {rows}"

    def segments(self, packs: NDArray[np.int64]) -> Segments:
        """Return the locations of the sequences of packs, and the rows of pretraining data; see ``PackSource``."""
        members = np.searchsorted(self.packs_before, packs, side="right") - 1
        of_chats = self._is_chats[members]
        found = self.chats.segments((packs + self._shift[members])[of_chats])
        if of_chats.all():
            return found
        counts = np.zeros(len(packs), np.int64)
        counts[of_chats] = np.diff(found.offsets)
        rows = np.flatnonzero(~of_chats)
        samples = (packs - self.packs_before[members])[rows]
        whole = WholeRows(rows, self._shard_of[members[rows]], samples, self.row)
        return replace(found, offsets=np.append(0, np.cumsum(counts)), packs=None, whole=whole)

    def row(self, shard: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of a row of pretraining data, int64 [seq_length]; see ``WholeRows.read``."""
        return list(self._rows.values())[shard - self._num_shards].row(0, number)

    def arrays(self, shard: int) -> Arrays:
        """Return tokens, label-aligned loss mask and columns of one shard of chats; see ``PackSource``."""
        return self.chats.arrays(shard)

    def items(self, shard: int) -> ItemFinder | None:
        """Return the finder of images and audio of one shard of chats; see ``PackSource``."""
        return self.chats.items(shard)


def blended(sources: Sequence[StoredPacks | PlannedPacks | PretrainingPacks]) -> JoinedPacks | MixedPacks:
    """Join the sources of all members of a blend; packs are numbered one member after the other."""
    if any(isinstance(source, PretrainingPacks) for source in sources):
        return MixedPacks(sources)
    return JoinedPacks([source for source in sources if not isinstance(source, PretrainingPacks)])
