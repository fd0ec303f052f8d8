"""Reading one shard.

A pack is found by its offsets, in constant time for a shard of any size, and returned as views.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import check_column_name, counts_text
from megatron_sft_idx.layout.media_layout import MediaItem
from megatron_sft_idx.lines import Shown
from megatron_sft_idx.shard.columns import ShardColumns
from megatron_sft_idx.shard.media_reader import ShardItems, ShardMedia, copied_items, open_media
from megatron_sft_idx.shard.opening import MAX_SINGLE_READS, REGION_SHIFT, OpenFiles, open_files, require_same
from megatron_sft_idx.storage import (
    Advice,
    Backend,
    BackendName,
    Extents,
    ReadOptions,
    announce,
    drop_pages,
    huge_nbytes_of,
    is_remote,
)


class _TextPack(TypedDict):
    input_ids: NDArray[Any]
    loss_mask: NDArray[Any]
    seq_boundaries: NDArray[np.int32]


class Pack(_TextPack, total=False):
    """One pack.

    ``input_ids`` is uint16 or int32 [length]. ``loss_mask`` is uint8 or float32 [length] and label-aligned: position j
    says whether predicting token j + 1 counts. ``seq_boundaries`` is int32 [sequences + 1]: the start of each sequence,
    then the pack's length. Each column that the shard was opened with adds a key. ``media`` is present if the shard was
    written with images or audio: a list of the items in the order of their positions, empty if the pack has none.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> pack: Pack = Shard("data/chats")[6]
        >>> for name, values in pack.items():
        ...     print(name, values)
        input_ids [60 61 62 63 64 65 66 67 68]
        loss_mask [1 0 1 0 0 0 1 0 0]
        seq_boundaries [0 2 5 9]
    """

    media: list[MediaItem]


class Shard(Shown):
    """One shard, open for reading.

    Opening takes the same time for any number of packs: it reads the header and checks the sizes of the five files.
    ``shard[i]`` is a ``Pack`` of read-only views into the memory maps. The views stay valid after the shard object is
    gone, and after another shard is published at the same prefix. A shard pickles as its path and id; after unpickling,
    it opens its files on first use. Threads can share a shard.

    For a shard at ``s3://`` or ``msc://``, opening fetches the index files unless the cache has them. Reading a pack
    then takes two requests, for tokens and mask. It is an error if the shard has been replaced. Images and audio take a
    few more requests, for their positions and for the encoded files of this pack only.

    Args:
        prefix: the path that the five files share, or ``ShardPaths`` for a shard that is not published yet.
        backend: how to read bytes. ``mmap``, also called ``os``, maps the files. ``pread`` is for file systems on which
            mapping is slow or not allowed; slices are then copies. ``reopen`` is for thousands of shards: it holds
            neither maps nor descriptors and opens a file for each slice; it also reads the index arrays into memory, in
            time proportional to the number of packs. A ``ReadOptions`` object replaces this argument and the next two.
        advice: the access pattern that the kernel should expect: ``normal``, ``sequential`` or ``random``.
        huge_pages: ask for huge pages; the method ``huge_pages`` returns how many the kernel provided.
        copy: return writable copies instead of read-only views, and encoded images and audio as ``bytes``.
        index_cache: local folder for copies of the index files of a remote shard. None uses the environment variable
            ``SFT_IDX_CACHE``, or else ``megatron-sft-idx`` in the user's cache folder.
        columns: names of the columns to read with each pack. ``shard[i]["source"]`` has one row per token or sequence
            of the pack, or the one row of the pack, depending on the unit of the column's rows.

    Raises:
        ShardNotFoundError: some of the five files, or a requested column, are missing.
        FormatError: the header or the sizes break a rule of FORMAT.md, or an option is invalid.
        StorageError: an object store does not answer, or rejects the credentials.

    Example:
        >>> shard = Shard("data/chats")
        >>> shard
        <Shard data/chats: 7 packs of up to 12 tokens, 16 sequences, 47 tokens, 29.8% trained; backend mmap>
        >>> shard[6]["input_ids"]
        array([60, 61, 62, 63, 64, 65, 66, 67, 68], dtype=int32)
        >>> shard[6]["seq_boundaries"]
        array([0, 2, 5, 9], dtype=int32)
    """

    @checked
    def __init__(
        self,
        prefix: str | os.PathLike[str] | ShardPaths,
        *,
        backend: BackendName | ReadOptions = "mmap",
        advice: Advice = "normal",
        huge_pages: bool = False,
        copy: bool = False,
        index_cache: str | None = None,
        columns: Iterable[str] = (),
    ) -> None:
        self._paths = ShardPaths.of(prefix)
        options = ReadOptions.of(self._paths.prefix, backend, advice=advice, huge_pages=huge_pages)
        self._options, self._copy, self._index_cache, self._chosen = options, copy, index_cache, tuple(columns)
        self._files: OpenFiles | None = open_files(self._paths, options, index_cache)
        self._shard_id = self._files.header.shard_id
        _ = self.media  # raise its errors now
        for name in self._chosen:
            self.columns.open(check_column_name(name))

    def __getstate__(self) -> tuple[Any, ...]:
        return self._paths.prefix, tuple(self._options), self._copy, self._shard_id, self._index_cache, self._chosen

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        prefix, options, self._copy, self._shard_id, self._index_cache, self._chosen = state
        self._paths, self._options, self._files = ShardPaths(prefix), ReadOptions(*options), None

    @property
    def files(self) -> OpenFiles:
        """The open files. After unpickling they are opened on first use; two threads may both do that."""
        files = self._files
        if files is None:
            files = open_files(self._paths, self._options, self._index_cache)
            require_same(self._paths.prefix, files.header.shard_id, self._shard_id)
            self._files = files
        return files

    @cached_property
    def columns(self) -> ShardColumns:
        """The columns by name: columns in the header of the shard, and columns attached later."""
        return ShardColumns(self._paths, self.header, self.backend)

    @cached_property
    def media(self) -> ShardMedia | None:
        """Images and audio of the packs; None if the shard was written without. See ``open_media`` for errors."""
        return open_media(self._paths, self.header, self.backend)

    @cached_property
    def items(self) -> ShardItems | None:
        """Lookup of the images and audio of sequences; None if the shard was written without."""
        return None if self.media is None else ShardItems(self.media, self.token_offsets)

    @property
    def prefix(self) -> str:
        """The path the files share."""
        return self._paths.prefix

    @property
    def backend(self) -> Backend:
        """How bytes are read: ``mmap``, ``pread`` or ``reopen``."""
        return self._options.backend

    @property
    def header(self) -> Header:
        """Counts, dtypes, capacity, checksums and metadata."""
        return self.files.header

    @property
    def shard_id(self) -> bytes:
        """16 bytes derived from the content: equal content has an equal id."""
        return self._shard_id

    @cached_property
    def index(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32], int]:
        """Sequence offsets, token offsets, starts, number of tokens.

        Arrays that are not mapped are cached in memory.
        """
        files = self.files
        return files.sequence_offsets[:], files.token_offsets[:], files.starts[:], files.num_tokens

    @property
    def sequence_offsets(self) -> NDArray[np.int64]:
        """Start of each pack's sequences, int64 [packs + 1]; a view if the file is mapped, else a full copy."""
        return self.files.sequence_offsets[:]

    @property
    def token_offsets(self) -> NDArray[np.int64]:
        """Start of each pack's tokens, int64 [packs + 1]; a view if the file is mapped, else a full copy."""
        return self.files.token_offsets[:]

    def __len__(self) -> int:
        return self.files.num_packs

    def _shown(self) -> str:
        counts = f": {counts_text(self._files.header)}" if self._files is not None else ""
        return f"{self.prefix}{counts}; backend {self.backend}"

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pack]: ...
    def __getitem__(self, index: int | np.integer[Any] | slice) -> Pack | list[Pack]:
        """Return one pack, or a list of packs for a slice of step 1.

        Raises:
            IndexError: the pack does not exist.
            ValueError: the slice has another step.
            CorruptShardError: the offsets of the pack point outside the files (rules O1, O2).
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"{self.prefix}: slice step {step} is not supported; use step 1")
            return [self[i] for i in range(start, stop)]
        files = self._files or self.files
        i = operator.index(index)
        if not 0 <= i < files.num_packs:
            i = self._normalise(files, i)
        start, stop = files.token_range_of(i)
        first, last = files.sequence_range_of(i)
        if not (0 <= start < stop <= files.num_tokens and 0 <= first < last <= files.num_sequences):
            raise self._corrupt(files, i)
        hints = files.first_reads
        if hints is not None and hints.read_counts[start >> REGION_SHIFT] < MAX_SINGLE_READS:
            hints.before_read(start, stop)
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = files.starts[first:last]
        boundaries[-1] = stop - start
        tokens, loss = files.tokens[start:stop], files.loss[start:stop]
        if self._copy:
            tokens, loss = tokens.copy(), loss.copy()
        pack: Pack = {"input_ids": tokens, "loss_mask": loss, "seq_boundaries": boundaries}
        if self._chosen:
            spans = {"token": slice(start, stop), "sequence": slice(first, last), "pack": slice(i, i + 1)}
            for name in self._chosen:
                column = self.columns.open(name)
                rows = column.values[spans[column.spec.per]]
                rows = rows[0] if column.spec.per == "pack" else rows
                pack[name] = rows.copy() if self._copy else rows  # type: ignore[literal-required]
        if (media := self.media) is not None:
            items = media.of_pack(i, stop - start)
            pack["media"] = copied_items(items) if self._copy else items
        return pack

    def __iter__(self) -> Iterator[Pack]:
        return (self[i] for i in range(len(self)))

    def get(self, index: int | np.integer[Any], offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return tokens ``[offset, offset + length)`` of pack ``index``, or all tokens from ``offset`` on.

        Raises:
            IndexError: the pack does not exist, or the range is not inside it.

        Example:
            >>> Shard("data/chats").get(6, offset=2, length=3)
            array([62, 63, 64], dtype=int32)
        """
        files = self.files
        start, stop = self.token_range(index)
        # As Python ints: Megatron passes int32 offsets, and a shard may have more than 2^31 tokens.
        offset = operator.index(offset)
        end = stop if length is None else start + offset + operator.index(length)
        if offset < 0 or not start + offset <= end <= stop:
            raise IndexError(
                f"{self.prefix}: offset {offset} and length {length} exceed pack {index}, which has {stop - start}"
                " tokens"
            )
        tokens = files.tokens[start + offset : end]
        return tokens.copy() if self._copy else tokens

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes ``[offset, offset + nbytes)`` of the token file, as a view if it is mapped.

        IndexError: the range is not inside the file.
        """
        files = self.files
        offset, nbytes = operator.index(offset), operator.index(nbytes)
        itemsize = files.header.token_dtype.itemsize
        if offset < 0 or nbytes < 0 or offset + nbytes > files.num_tokens * itemsize:
            raise IndexError(
                f"{self._paths.tokens}: {nbytes} bytes at offset {offset} exceed the file, which has"
                f" {files.num_tokens * itemsize} bytes"
            )
        first = offset // itemsize
        raw = files.tokens[first : -(-(offset + nbytes) // itemsize)].view(np.uint8)
        raw = raw[offset - first * itemsize :][:nbytes]
        return raw.copy() if self._copy else raw

    def token_range(self, index: int | np.integer[Any]) -> tuple[int, int]:
        """Return where a pack begins and ends among all tokens of the shard. See ``__getitem__`` for errors."""
        files = self.files
        i = self._normalise(files, operator.index(index))
        start, stop = files.token_range_of(i)
        if not 0 <= start < stop <= files.num_tokens:
            raise self._corrupt(files, i)
        return start, stop

    def sequences(self, index: int | np.integer[Any]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return ``(input_ids, loss_mask)`` of each sequence of pack ``index``, in order. Masks are label-aligned.

        Example:
            >>> for ids, mask in Shard("data/chats").sequences(6):
            ...     print(ids, mask)
            [60 61] [1 0]
            [62 63 64] [1 0 0]
            [65 66 67 68] [0 1 0 0]
        """
        pack = self[operator.index(index)]
        bounds = pack["seq_boundaries"].tolist()
        ids, mask = pack["input_ids"], pack["loss_mask"]
        return [(ids[a:b], mask[a:b]) for a, b in pairwise(bounds)]

    def pack_bounds(self) -> NDArray[np.int64]:
        """Return ``token_offsets`` after a check.

        CorruptShardError: they do not divide all tokens into packs of at most ``longest_pack`` tokens (O1, O2).
        """
        self.files.check_ends()
        offsets, longest = self.token_offsets, self.header.longest_pack
        lengths = np.diff(offsets)
        if len(wrong := np.flatnonzero((lengths < 1) | (lengths > longest))):
            reason = f"token offsets give it {lengths[wrong[0]]} tokens, expected 1 to {longest}"
            raise self.files.pack_error(f"shard 0, pack {wrong[0]}: {reason} (rule O2)")
        return offsets

    def sequence_bounds(self) -> NDArray[np.int64]:
        """Return the start of each sequence among all tokens, then the end of the last one: int64 [sequences + 1].

        FormatError: offsets or starts do not divide all tokens (rules O1, O2, P2 to P4).
        """
        arrays = self.sequence_offsets, self.pack_bounds(), self.files.starts[:]
        try:
            return _native.absolute_offsets(*arrays)
        except ValueError as error:
            raise self.files.pack_error(str(error)) from None

    def schedule(self, indices: Iterable[int | np.integer[Any]] | NDArray[np.int64]) -> None:
        """Ask the kernel to read packs in the background, because they will be read soon. Return at once.

        Args:
            indices: numbers of the packs, in the order in which they will be read. Another order works, but is slower.

        Raises:
            IndexError: a pack does not exist.

        Example:
            >>> shard = Shard("data/chats", advice="random")
            >>> batch = [6, 0, 3]
            >>> shard.schedule(batch)
            >>> [len(shard[pack]["input_ids"]) for pack in batch]
            [9, 1, 12]
        """
        packs = checked_packs(indices, len(self), self.prefix)
        if len(packs):
            announce(extents_of([self.files], np.zeros(len(packs), np.int64), packs))

    def willneed(self, start: int, stop: int) -> None:
        """Ask the kernel to read packs ``[start, stop)`` in the background. IndexError: a pack does not exist."""
        files = self.files
        if not 0 <= start <= stop <= files.num_packs:
            raise IndexError(f"{self.prefix}: packs {start} to {stop} requested, but there are {files.num_packs}")
        first, last = self._token_span(start, stop)
        if first < last:
            announce(Extents([files.tokens, files.loss], np.arange(2), np.full(2, first), np.full(2, last - first)))

    def dontneed(self, start: int = 0, stop: int | None = None) -> None:
        """Drop packs ``[start, stop)`` from the memory of this process and from the page cache of the machine.

        Numbers are as in a slice. If the range has all packs, the index arrays are dropped too. The next read comes
        from the disk, unless another process has the pages mapped. Views that were returned before stay valid. The call
        has no effect on a shard in an object store or on the pages of files that were removed.
        """
        files, paths = self.files, self._paths
        start, stop, _ = slice(start, stop).indices(files.num_packs)
        if start >= stop or is_remote(paths.prefix):
            return
        first, last = self._token_span(start, stop)
        drop_pages(paths.tokens, files.tokens, first, last)
        drop_pages(paths.loss, files.loss, first, last)
        if (start, stop) == (0, files.num_packs):
            drop_pages(paths.starts, files.starts)
            drop_pages(paths.seq_idx, files.token_offsets)  # the map holds both arrays of offsets

    def _token_span(self, start: int, stop: int) -> tuple[int, int]:
        """Return where packs ``[start, stop)`` begin and end among all tokens.

        Inside the file even with damaged offsets.
        """
        files = self.files
        bounds = (int(files.token_offsets[pack : pack + 1][0]) for pack in (start, stop))
        first, last = (min(max(bound, 0), files.num_tokens) for bound in bounds)
        return first, last

    def huge_pages(self) -> int:
        """Return how many bytes of tokens and masks are currently mapped with huge pages, according to the kernel."""
        return huge_nbytes_of([self.files.tokens, self.files.loss])

    def _normalise(self, files: OpenFiles, index: int) -> int:
        i = index + files.num_packs if index < 0 else index
        if not 0 <= i < files.num_packs:
            raise IndexError(f"{self.prefix}: there is no pack {index}; the shard has {files.num_packs}")
        return i

    def _corrupt(self, files: OpenFiles, i: int) -> FormatError:
        """Return the error about the offsets of pack ``i``."""
        first, last = files.token_range_of(i)
        reason = f"token offsets are {first}, {last}, expected ascending and at most {files.num_tokens} (rule O2)"
        if 0 <= first < last <= files.num_tokens:
            first, last = files.sequence_range_of(i)
            reason = (
                f"sequence offsets are {first}, {last}, expected ascending and at most {files.num_sequences} (rule O1)"
            )
        return self.files.pack_error(f"shard 0, pack {i}: {reason}")


# ---- packs as ranges ----


def checked_packs(
    indices: Iterable[int | np.integer[Any]] | NDArray[np.int64], total: int, prefix: str
) -> NDArray[np.int64]:
    """Convert pack numbers to int64 [packs], and resolve negative numbers, which count from the end.

    IndexError: a number is outside the ``total`` packs. The message contains ``prefix``.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, np.int64)
    packs = indices.astype(np.int64)  # before the sum below, which could overflow a narrower dtype
    packs[packs < 0] += total
    if (outside := (packs < 0) | (packs >= total)).any():
        raise IndexError(f"{prefix}: there is no pack {indices[outside][0]}; the number of packs is {total}")
    return packs


def extents_of(shards: Sequence[OpenFiles], slots: NDArray[np.int64], packs: NDArray[np.int64]) -> Extents:
    """Return the positions of packs in their files, in reading order: for each pack first the tokens, then the mask.

    Packs whose offsets point outside the files are omitted; reading one is an error.

    Args:
        shards: the open files of shards; each holds at least one of the packs.
        slots: index into ``shards`` of the shard that holds each pack, int64 [packs].
        packs: the number of each pack in its shard, int64 [packs].
    """
    starts, counts = np.empty(len(packs), np.int64), np.empty(len(packs), np.int64)
    by_shard = np.split(np.argsort(slots, kind="stable"), np.cumsum(np.bincount(slots, minlength=len(shards)))[:-1])
    for files, positions in zip(shards, by_shard, strict=True):
        numbers = packs[positions]
        first = int(numbers.min())
        offsets = files.token_offsets[first : int(numbers.max()) + 2]
        begins, ends = offsets[numbers - first], offsets[numbers - first + 1]
        inside = (begins >= 0) & (begins < ends) & (ends <= files.num_tokens)
        starts[positions], counts[positions] = begins, np.where(inside, ends - begins, 0)
    readable = counts > 0
    array_numbers = np.repeat(2 * slots[readable], 2)
    array_numbers[1::2] += 1
    arrays = [array for files in shards for array in (files.tokens, files.loss)]
    return Extents(arrays, array_numbers, np.repeat(starts[readable], 2), np.repeat(counts[readable], 2))
