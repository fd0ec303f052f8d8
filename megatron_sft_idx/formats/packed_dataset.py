"""``open_dataset``: packed data of any format, several files of one format read as one."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.base import PackedReader, PackedSpec, PackRun
from megatron_sft_idx.formats.checks import MaskAlignment
from megatron_sft_idx.formats.registry import Source, find, open_reader
from megatron_sft_idx.formats.sft_idx import FORMAT, spec_of
from megatron_sft_idx.formats.sft_idx import Reader as ShardReader
from megatron_sft_idx.shard.reader import Pack, Shard
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import Advice, BackendName, ReadOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from megatron_sft_idx.formats.parquet import Opener
    from megatron_sft_idx.formats.stock import MaskRule

__all__ = ["MAX_OPEN", "JoinedReader", "JoinedShards", "PackedDataset", "joined_spec", "open_dataset"]


# An open reader may hold five maps, and some cluster file systems refuse a process more than about 590 of them.
MAX_OPEN = 64


class _Held:
    """What one process holds open. A forked process must not use it: file positions and locks would be shared."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.readers: dict[int, PackedReader] = {}
        self.said: dict[str, None] = {}  # notes of readers closed by now, each once and in order


class JoinedReader:
    """Readers of one format side by side, opened when needed, the one unused for longest closed first.

    Each process opens its own; threads may share one, and then read one after the other. It pickles as paths, options
    and identities, and finds the same content when it is unpickled, or says that it is not the same.

    Args:
        name: the format.
        paths: of one or more.
        mask_alignment: of the loss masks in them.
        max_open: how many are held open at once.
        options: of the format's reader.

    Raises:
        FormatError: they do not go together, or one is not what its format says.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        *,
        mask_alignment: MaskAlignment = "label",
        max_open: int = MAX_OPEN,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if max_open < 1:
            raise FormatError(f"max_open {max_open}: at least one file has to be open to be read")
        self.name, self.paths, self.mask_alignment, self.max_open = name, tuple(paths), mask_alignment, max_open
        self.options = dict(options or {})
        self._held = _Held()
        self._identities: tuple[str, ...] = ()
        readers = (self.reader(number) for number in range(len(self.paths)))
        found = [(reader.identity, len(reader)) for reader in readers]
        self._identities = tuple(identity for identity, _ in found)
        self.lengths = tuple(length for _, length in found)

    def __getstate__(self) -> dict[str, Any]:
        # What was learned of the content (``spec``) is found again where it is asked for.
        return {key: value for key, value in self.__dict__.items() if key not in ("_held", "spec")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._held = _Held()

    def reader(self, number: int) -> PackedReader:
        """Reader ``number``, open; it belongs to this process. FormatError where its file is another one by now."""
        held = self._here()
        with held.lock:
            return self._opened(held, number)

    def read(self, number: int, index: int) -> Pack:
        """Pack ``index`` of file ``number``."""
        held = self._here()
        with held.lock:
            return self._opened(held, number).read(index)

    def _here(self) -> _Held:
        if self._held.process != os.getpid():
            self._held = _Held()
        return self._held

    def _opened(self, held: _Held, number: int) -> PackedReader:
        reader = held.readers.pop(number, None)
        if reader is None:
            reader = open_reader(self.paths[number], self.name, mask_alignment=self.mask_alignment, **self.options)
            if self._identities and (reader.identity, len(reader)) != (self._identities[number], self.lengths[number]):
                raise FormatError(
                    f"{reader.path}: the content is another one than when this dataset was opened"
                    f" ({reader.identity}, then {self._identities[number]}); it was written anew: start again"
                )
            while len(held.readers) >= self.max_open:
                oldest = held.readers.pop(next(iter(held.readers)))
                held.said.update(dict.fromkeys(oldest.notes))
        held.readers[number] = reader  # last: in the order of their use
        return reader

    @cached_property
    def spec(self) -> PackedSpec:
        """What is known of all of them together.

        Raises:
            FormatError: they come from different tokenizers.
        """
        return joined_spec(self.paths[0], [self.reader(number).spec for number in range(len(self.paths))])

    @property
    def notes(self) -> list[str]:
        """What was understood of the files opened so far; each sentence once."""
        held = self._here()
        with held.lock:
            return list(
                {**held.said, **dict.fromkeys(note for reader in held.readers.values() for note in reader.notes)}
            )

    def runs(self) -> Iterator[PackRun]:
        """All packs of all files in order, each file closed before the next is opened."""
        for number in range(len(self.paths)):
            yield from self.reader(number).runs()


def joined_spec(path: str, specs: Sequence[PackedSpec]) -> PackedSpec:
    """What is known of files together, the first of which is at ``path``. FormatError: of different tokenizers."""
    first = specs[0]
    pads = {spec.pad_id for spec in specs} - {None}
    tokenizers = {_tokenizer_of(spec) for spec in specs} - {None}
    for what, values in (("pad ids", pads), ("tokenizers", tokenizers)):
        if len(values) > 1:
            listed = ", ".join(sorted(map(str, values)))
            raise FormatError(f"{path} and others: different {what} ({listed}); keep them apart")
    return dataclasses.replace(
        first,
        num_packs=sum(spec.num_packs for spec in specs),
        num_sequences=sum(spec.num_sequences for spec in specs),
        num_tokens=sum(spec.num_tokens for spec in specs),
        longest_pack=max(spec.longest_pack for spec in specs),
        token_dtype=np.result_type(*{spec.token_dtype for spec in specs}),
        mask_dtype=np.result_type(*{spec.mask_dtype for spec in specs}),
        capacity=max(spec.capacity for spec in specs),
        sequence_multiple=math.gcd(*(spec.sequence_multiple for spec in specs)),
        pad_id=next(iter(pads), None),
        metadata={key: value for key, value in first.metadata.items() if _said_by_all(key, value, specs)},
    )


def _tokenizer_of(spec: PackedSpec) -> str | None:
    tokenizer = spec.metadata.get("tokenizer")
    fingerprint = tokenizer.get("fingerprint") if isinstance(tokenizer, Mapping) else None
    return fingerprint if isinstance(fingerprint, str) else None


def _said_by_all(key: str, value: Any, specs: Sequence[PackedSpec]) -> bool:
    return all(spec.metadata.get(key, _NOTHING) == value for spec in specs)


_NOTHING = object()


class JoinedShards:
    """Shards side by side, held open as a ``ShardSet`` holds them; it also pickles as one.

    Args:
        prefixes: of the shards.
        backend: of ``ShardSet``.
        copy: hand out writable copies instead of read-only views.
        reading: ``advice`` and ``huge_pages`` of ``Shard``.

    Raises:
        ShardNotFoundError: a shard is not there.
        FormatError: a header breaks a rule.
    """

    name = FORMAT

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        backend: BackendName | ReadOptions = "mmap",
        copy: bool = False,
        **reading: Any,
    ) -> None:
        options = ReadOptions.of(os.fspath(prefixes[0]), backend, **reading)
        self._shards = ShardSet(prefixes, backend=options, alike=False)
        self._copy = copy
        self.notes: list[str] = []

    @property
    def paths(self) -> tuple[str, ...]:
        """Prefixes, in order."""
        return self._shards.prefixes

    @property
    def lengths(self) -> tuple[int, ...]:
        """Packs of each."""
        return tuple(header.num_packs for header in self._shards.headers)

    @property
    def spec(self) -> PackedSpec:
        """What is known of all of them together. FormatError: they come from different tokenizers."""
        return joined_spec(self.paths[0], [spec_of(header) for header in self._shards.headers])

    def schedule(self, indices: NDArray[np.int64] | Sequence[int]) -> None:
        """Say which packs come next, counted through all shards; see ``ShardSet.schedule``."""
        self._shards.schedule(indices)

    def read(self, number: int, index: int) -> Pack:
        """Pack ``index`` of shard ``number``."""
        pack = self._shards.pack(number, index)
        if self._copy:
            pack["input_ids"], pack["loss_mask"] = np.array(pack["input_ids"]), np.array(pack["loss_mask"])
        return pack

    def shard(self, number: int) -> Shard:
        """Shard ``number``, open."""
        return self._shards.shard(number)


# What several shards read as one understand.
_SHARED_OPTIONS = {"backend", "copy", *ReadOptions._fields}


class Options(TypedDict, total=False):
    """What readers of the one or the other format take besides; ``Reader`` of each format says what it means."""

    advice: Advice
    allow_gaps: bool
    backend: BackendName | ReadOptions
    cache_nbytes: int
    capacity: int | None
    copy: bool
    huge_pages: bool
    index_cache: str | None
    mask_path: str | os.PathLike[str] | None
    mask_rule: MaskRule | None
    opener: Opener | None


def open_dataset(
    source: Source,
    *,
    format: str | None = None,
    mask_alignment: MaskAlignment = "label",
    max_open: int = MAX_OPEN,
    **options: Unpack[Options],
) -> PackedDataset:
    """Open packed data of any format this package reads.

    Args:
        source: a path, a shard's prefix, a folder, a glob, or a list of these; several of one format are read as one.
        format: its name, such as ``"parquet"``; None has it recognised by content.
        mask_alignment: of the loss masks in the files, where a format does not say: ``"label"``, ``"token"`` or
            ``"rolled-right"``. What ``ds[i]`` hands out is label-aligned in any case.
        max_open: how many files or folders are held open at once; shards take care of themselves (``ShardSet``).
        options: of the format's reader; for shards ``backend``, ``advice`` and ``huge_pages`` of ``Shard``.

    Raises:
        FormatError: nothing known is there, a path could be two things, paths are of different formats, or what is
            there breaks a rule of its format.
        SequenceError: a pack breaks a rule; also later, when it is read.

    Example:
        >>> ds = open_dataset("data/train-*.parquet")
        >>> ds[-1]["loss_mask"], len(ds), ds.capacity
    """
    name, paths = find(source, format)
    if name == FORMAT and len(paths) > 1 and mask_alignment == "label" and options.keys() <= _SHARED_OPTIONS:
        return PackedDataset(JoinedShards(paths, **options))
    return PackedDataset(
        JoinedReader(name, paths, mask_alignment=mask_alignment, max_open=max_open, options=options),
    )


class PackedDataset:
    """Packs by number, whatever they are stored in; ``open_dataset`` makes one.

    ``ds[i]`` is a ``Pack``: ``input_ids`` uint16 or int32, ``loss_mask`` uint8 or float32 and label-aligned,
    ``seq_boundaries`` int32 with 0 and the pack's length. Negative indices count from the end of the last file; a
    slice of step 1 is a list. It pickles as paths and identities, a few hundred bytes; every process opens the files
    for itself, and a file that is another one by then is an error. Threads may share one.

    Args:
        parts: the files.
    """

    def __init__(self, parts: JoinedReader | JoinedShards) -> None:
        self._parts = parts
        self._take()

    def _take(self) -> None:
        # One shard of ours is asked directly: nothing to find, and it is safe in threads and forks by itself.
        self._only: Shard | None = None

    @cached_property
    def _before(self) -> list[int]:
        return [0, *accumulate(self._parts.lengths)]

    def __getstate__(self) -> JoinedReader | JoinedShards:
        return self._parts

    def __setstate__(self, parts: JoinedReader | JoinedShards) -> None:
        self._parts = parts
        self._take()

    @property
    def format(self) -> str:
        """The format's name."""
        return self._parts.name

    @property
    def paths(self) -> tuple[str, ...]:
        """Files, folders or prefixes, in order."""
        return self._parts.paths

    @property
    def capacity(self) -> int:
        """Most token positions a pack may hold: the largest of all files."""
        return self._parts.spec.capacity

    @property
    def num_sequences(self) -> int:
        """Sequences in all packs."""
        return self._parts.spec.num_sequences

    @property
    def notes(self) -> list[str]:
        """What the files do not say and was understood, or was set right, as sentences."""
        return self._parts.notes

    def __len__(self) -> int:
        return self._before[-1]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.format}, {list(self.paths)!r})"

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pack]: ...
    def __getitem__(self, index: int | np.integer[Any] | slice) -> Pack | list[Pack]:
        """One pack, or a list of packs for a slice of step 1.

        Raises:
            IndexError: no such pack.
            ValueError: a slice with another step.
            SequenceError, FormatError: what is stored breaks a rule.
        """
        if self._only is not None:
            return self._only[index]
        if isinstance(index, slice):
            start, stop, step = index.indices(self._before[-1])
            if step != 1:
                raise ValueError(f"{self.paths[0]}: slice step {step}, slices of packs are contiguous: use step 1")
            return [self[i] for i in range(start, stop)]
        i = operator.index(index)
        if i < 0:
            i += self._before[-1]
        if not 0 <= i < self._before[-1]:
            raise IndexError(f"{self.paths[0]}: pack {operator.index(index)}, the dataset has {self._before[-1]}")
        if len(self._before) == 2 and (shard := self._shard(0)) is not None:
            self._only = shard
            return shard[i]
        number = bisect_right(self._before, i) - 1
        return self._parts.read(number, i - self._before[number])

    def __iter__(self) -> Iterator[Pack]:
        return (self[i] for i in range(self._before[-1]))

    def schedule(self, indices: NDArray[np.int64] | Sequence[int]) -> None:
        """Say which packs come next, in order, as of ``Shard.schedule``; of other formats nothing is read ahead.

        Raises:
            IndexError: no such pack.
        """
        if isinstance(self._parts, JoinedShards):
            self._parts.schedule(indices)
        elif len(self.paths) == 1 and (shard := self._shard(0)) is not None:
            shard.schedule(indices)

    def read(self, offset: int, nbytes: int, *, part: int = 0) -> NDArray[np.uint8]:
        """Bytes ``[offset, offset + nbytes)`` of the token file of shard number ``part``, without a copy where mapped.

        Raises:
            IndexError: the range reaches outside the file, or there is no such shard.
            FormatError: this format has no token file to point into.
        """
        number = operator.index(part)
        if not 0 <= number < len(self.paths):
            raise IndexError(f"{self.paths[0]}: part {number}, the dataset has {len(self.paths)}")
        shard = self._shard(number)
        if shard is None:
            raise FormatError(
                f"{self.paths[number]}: {self.format} has no token file to point into; convert it to sft-idx"
            )
        return shard.read(offset, nbytes)

    def _shard(self, number: int) -> Shard | None:
        if isinstance(self._parts, JoinedShards):
            return self._parts.shard(number)
        reader = self._parts.reader(number)
        return reader.shard if isinstance(reader, ShardReader) else None
