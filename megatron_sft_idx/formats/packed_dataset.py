"""``open_dataset``: packed data of any format, several files of one format read as one."""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypedDict, get_type_hints, overload

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.arguments import checked, require_type
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.formats.base import MaskRule, PackedSpec
from megatron_sft_idx.formats.registry import MAX_OPEN, JoinedReader, Source, joined_spec, resolve_source
from megatron_sft_idx.formats.sft_idx import spec_of
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import counts_text
from megatron_sft_idx.lines import Shown
from megatron_sft_idx.packs.run import MaskAlignment
from megatron_sft_idx.shard.media_reader import copied_items
from megatron_sft_idx.shard.opening import column_names, read_header
from megatron_sft_idx.shard.reader import Pack, Shard
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import Advice, BackendName, ReadOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class JoinedShards:
    """One or more shards, read by a ``ShardSet``, with the ``JoinedReader`` methods that ``PackedDataset`` uses.

    It pickles like the ``ShardSet``.

    Args:
        prefixes: prefixes of the shards.
        backend: see ``ShardSet``.
        copy: return writable copies instead of read-only views.
        columns: names of the columns to read with packs; None for all of the first shard.
        index_cache: see ``Shard``.
        read_options: ``advice`` and ``huge_pages`` of ``Shard``.

    Attributes:
        shards: the set.
        copy: as given.

    Raises:
        ShardNotFoundError: a shard, or a column of it, does not exist.
        FormatError: a header breaks a rule, or columns of one name are of different kinds.
    """

    name = "sft-idx"

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        backend: BackendName | ReadOptions = "mmap",
        copy: bool = False,
        columns: Sequence[str] | None = (),
        index_cache: str | None = None,
        **read_options: Any,
    ) -> None:
        options = ReadOptions.of(os.fspath(prefixes[0]), backend, **read_options)
        if columns is None:
            first = ShardPaths.of(prefixes[0])
            columns = column_names(first, read_header(first))
        self.shards = ShardSet(prefixes, backend=options, alike=False, index_cache=index_cache, columns=columns)
        self.copy = copy
        self.notes: list[str] = []

    @property
    def paths(self) -> tuple[str, ...]:
        """The prefixes, in order."""
        return self.shards.prefixes

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of packs of each shard."""
        return tuple(header.num_packs for header in self.shards.headers)

    @property
    def spec(self) -> PackedSpec:
        """The spec of all shards together. FormatError: they have different tokenizers."""
        return joined_spec(self.paths[0], [spec_of(header) for header in self.shards.headers])

    def read(self, number: int, index: int) -> Pack:
        """Pack ``index`` of shard ``number``."""
        pack = self.shards.pack(number, index)
        if self.copy:
            items = pack.pop("media", None)
            pack.update({name: np.array(values) for name, values in pack.items()})  # type: ignore[typeddict-item]
            if items is not None:
                pack["media"] = copied_items(items)
        return pack


# The options of ``JoinedShards``. A ``JoinedReader`` rejects any other, as for every format.
_SHARD_OPTIONS = {"backend", "columns", "copy", "index_cache", *ReadOptions._fields}


class Options(TypedDict, total=False):
    """Options of the formats' readers, for type checkers. See ``open_dataset`` for which format has which."""

    advice: Advice
    backend: BackendName | ReadOptions
    capacity: int | None
    columns: Sequence[str] | None
    copy: bool
    huge_pages: bool
    index_cache: str | None
    mask_path: str | os.PathLike[str] | None
    mask_rule: MaskRule | None


@checked
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
        format: name of the format, such as ``"parquet"``; None to detect it from the content.
        mask_alignment: alignment of the loss masks in the files, if a format does not define it: ``"label"``,
            ``"token"`` or ``"rolled-right"``. ``ds[i]`` is always label-aligned.
        max_open: maximum number of files or folders held open at once; for shards, the ``ShardSet`` decides.
        options: options of the format's ``Reader``; for shards ``backend``, ``copy``, ``index_cache``, ``advice`` and
            ``huge_pages`` of ``Shard``. Shards, Parquet, memmap folders and JSON lines have ``columns``, the names of
            columns to read with packs; None for all. An option that the format does not have is an error.

    Raises:
        ShardNotFoundError: the path does not exist.
        FormatError: no format or several formats match a path, paths have different formats, or a file breaks a rule of
            its format.
        SequenceError: a pack breaks a rule; also raised later, when it is read.

    Example:
        >>> ds = open_dataset("data/chats")
        >>> len(ds), ds.capacity
        (7, 12)
        >>> ds[-1]["input_ids"]
        array([60, 61, 62, 63, 64, 65, 66, 67, 68], dtype=int32)
        >>> ds[-1]["loss_mask"]
        array([1, 0, 1, 0, 0, 0, 1, 0, 0], dtype=uint8)
        >>> ds[-1]["seq_boundaries"]
        array([0, 2, 5, 9], dtype=int32)
    """
    hints = get_type_hints(Options)
    for key in options.keys() & hints:
        require_type(key, options[key], hints[key])  # type: ignore[literal-required]
    if max_open < 1:
        raise FormatError(f"max_open {max_open}: expected at least 1")
    name, paths = resolve_source(source, format)
    given: dict[str, Any] = dict(options)
    if name == JoinedShards.name:
        if mask_alignment == "label" and given.keys() <= _SHARD_OPTIONS:
            return PackedDataset(JoinedShards(paths, **given))
        given = {key: value for key, value in given.items() if key not in _SHARD_OPTIONS}  # the others are rejected
    return PackedDataset(
        JoinedReader(name, paths, mask_alignment=mask_alignment, max_open=max_open, options=given),
    )


class PackedDataset(Shown):
    """Packs by number, independent of their storage format. Created by ``open_dataset``.

    ``ds[i]`` is a ``Pack``: ``input_ids`` uint16 or int32, ``loss_mask`` uint8 or float32 and label-aligned,
    ``seq_boundaries`` int32, from 0 to the pack's length; for a shard with images and audio also ``media``, the list of
    the pack's items. Negative indices count from the end of the last file; a slice of step 1 returns a list. It pickles
    as paths and identities, a few hundred bytes. Every process opens the files itself; if their content has changed,
    that is an error. Threads can share a dataset.

    Args:
        files: the files, folders or shards, open.

    Example:
        >>> from megatron_sft_idx import open_dataset
        >>> ds = open_dataset("data/chats")
        >>> ds
        <PackedDataset sft-idx data/chats: 7 packs of up to 12 tokens, 16 sequences, 47 tokens, 29.8% trained>
        >>> [len(pack["input_ids"]) for pack in ds[:3]]
        [1, 5, 12]
    """

    # Set if the dataset is one shard, which is used directly: it is safe in threads and forks itself.
    _single_shard: Shard | None = None

    @checked
    def __init__(self, files: JoinedReader | JoinedShards) -> None:
        self._files = files

    @cached_property
    def _first_packs(self) -> list[int]:
        """The number of the first pack of each file, then the number of all packs: [files + 1]."""
        return [0, *accumulate(self._files.lengths)]

    def __getstate__(self) -> JoinedReader | JoinedShards:
        return self._files

    def __setstate__(self, files: JoinedReader | JoinedShards) -> None:
        self._files = files

    @property
    def format(self) -> str:
        """The name of the format."""
        return self._files.name

    @property
    def paths(self) -> tuple[str, ...]:
        """Files, folders or prefixes, in order."""
        return self._files.paths

    @property
    def headers(self) -> list[Header]:
        """The header of each shard; empty if the dataset has another format."""
        return self._files.shards.headers if isinstance(self._files, JoinedShards) else []

    @property
    def spec(self) -> PackedSpec:
        """Counts, dtypes and metadata of all files together. FormatError: they have different tokenizers."""
        return self._files.spec

    @property
    def capacity(self) -> int:
        """The maximum number of token positions in a pack: the largest of all files.

        For a file that does not store its capacity, this is the length of its longest pack.
        """
        return self._files.spec.capacity

    @property
    def num_sequences(self) -> int:
        """The number of sequences in all packs."""
        return self._files.spec.num_sequences

    @property
    def notes(self) -> list[str]:
        """Sentences on missing information that was assumed, and on corrections."""
        return self._files.notes

    def __len__(self) -> int:
        return self._first_packs[-1]

    def _shown(self) -> str:
        more = f" and {len(self.paths) - 1:,} more" if len(self.paths) > 1 else ""
        try:
            counts = counts_text(self._files.spec)
        except SFTIndexError:  # the files have different tokenizers, or are gone
            counts = f"{len(self):,} packs"
        return f"{self.format} {self.paths[0]}{more}: {counts}"

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pack]: ...
    def __getitem__(self, index: int | np.integer[Any] | slice) -> Pack | list[Pack]:
        """Return one pack, or a list of packs for a slice of step 1.

        Raises:
            IndexError: the pack does not exist.
            ValueError: the slice has another step.
            SequenceError: a pack breaks a rule.
            FormatError: a file breaks a rule of its format, or has changed.
        """
        if self._single_shard is not None:
            return self._single_shard[index]
        if isinstance(index, slice):
            start, stop, step = index.indices(self._first_packs[-1])
            if step != 1:
                raise ValueError(f"{self.paths[0]}: slice step {step} is not supported; use step 1")
            return [self[i] for i in range(start, stop)]
        i = operator.index(index)
        if i < 0:
            i += self._first_packs[-1]
        if not 0 <= i < self._first_packs[-1]:
            raise IndexError(
                f"{self.paths[0]}: there is no pack {operator.index(index)}; the dataset has {self._first_packs[-1]}"
            )
        if isinstance(self._files, JoinedShards) and len(self.paths) == 1 and not self._files.copy:
            self._single_shard = self._files.shards.shard(0)
            return self._single_shard[i]
        number = bisect_right(self._first_packs, i) - 1
        return self._files.read(number, i - self._first_packs[number])

    def __iter__(self) -> Iterator[Pack]:
        return (self[i] for i in range(self._first_packs[-1]))

    def schedule(self, indices: NDArray[np.int64] | Sequence[int]) -> None:
        """Announce the next packs to read, in order, like ``Shard.schedule``. Only shards are read ahead.

        Raises:
            IndexError: a pack does not exist.
        """
        if isinstance(self._files, JoinedShards):
            self._files.shards.schedule(indices)

    def read(self, offset: int, nbytes: int, *, part: int = 0) -> NDArray[np.uint8]:
        """Return bytes ``[offset, offset + nbytes)`` of the token file of shard ``part``; a view if it is mapped.

        Raises:
            IndexError: the range is not inside the file, or the shard does not exist.
            FormatError: the dataset has another format, without a token file.
        """
        number = operator.index(part)
        if not 0 <= number < len(self.paths):
            raise IndexError(f"{self.paths[0]}: there is no part {number}; the dataset has {len(self.paths)}")
        if not isinstance(self._files, JoinedShards):
            raise FormatError(
                f"{self.paths[number]}: {self.format} has no token file for offsets; convert it to sft-idx"
            )
        return self._files.shards.shard(number).read(offset, nbytes)
