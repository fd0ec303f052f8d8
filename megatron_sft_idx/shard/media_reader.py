"""Images and audio of an open shard: their positions, and their encoded files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import listed_media
from megatron_sft_idx.layout.media_layout import (
    ARRAYS,
    KIND_NAMES,
    MEDIA,
    NO_ITEMS,
    Items,
    MediaHeader,
    MediaItem,
    blob_hash,
)
from megatron_sft_idx.packing import csr_rows
from megatron_sft_idx.packs.run_media import RunMedia
from megatron_sft_idx.shard.opening import FileStart, open_items, read_header, read_start, require_same
from megatron_sft_idx.storage import Array, Backend, check_size, is_remote
from megatron_sft_idx.storage.local import StreamHash, digest_file, part_of, stamp_of
from megatron_sft_idx.storage.remote import RemoteArray, open_store
from megatron_sft_idx.storage.remote.store import read_ahead
from megatron_sft_idx.storage.remote.transport import request_pool

_Part = TypeVar("_Part")
_Read = TypeVar("_Read")

_IS_KIND = np.isin(np.arange(256), [*KIND_NAMES])  # for each uint8 whether it is the code of a kind
_RESTORE = "restore the file from a copy: images and audio cannot be made again from tokens"


class ShardMedia:
    """The images and audio of an open shard. Identical files are stored once, so several items can show one *blob*.

    Attributes:
        header: header of ``.media.items``.
        arrays: its arrays, by name (``ARRAYS``).
        data_bytes: ``.media.data``, uint8 [data_nbytes].
    """

    def __init__(self, paths: ShardPaths, header: MediaHeader, arrays: dict[str, Array], data: Array) -> None:
        self.paths, self.header, self.arrays, self.data_bytes = paths, header, arrays, data

    def __len__(self) -> int:
        return self.header.num_blobs

    def check_ends(self) -> None:
        """Raise CorruptShardError unless the items cover all packs (M5) and the blobs cover all data (M10)."""
        for rule, name, at, expected in self.header.offset_ends():
            if (found := int(self.arrays[name][at : at + 1][0])) != expected:
                raise self._error(name, at, rule, f"{found} as entry {at} of {name}, expected {expected}")

    def _error(self, array: str, at: int, rule: str, detail: str) -> CorruptShardError:
        begin = self.header.places()[array][0]
        itemsize = next(each.dtype.itemsize for each in ARRAYS if each.name == array)
        return CorruptShardError(self.paths.media_items, begin + at * itemsize, rule, f"{detail}; {_RESTORE}")

    def data(self, number: int) -> memoryview:
        """Return the bytes of a blob, as a view if the file is mapped.

        CorruptShardError: its offsets are outside the file (M10), or its hash does not match (M11).
        """
        found = self._bytes(number)
        if blob_hash(found) != self.hash(number):
            begin = int(self.arrays["blob_offsets"][number : number + 1][0])
            detail = f"blob {number} does not match its hash; the file was changed or damaged: {_RESTORE}"
            raise CorruptShardError(self.paths.media_data, begin, "M11", detail)
        return found

    def _bytes(self, number: int) -> memoryview:
        return self.bytes_of_each([number])[number]

    def bytes_of_each(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        """Return read-only bytes of several blobs, by number. Adjacent blobs are read at once.

        CorruptShardError: offsets are outside the file (M10).
        """
        found: dict[int, memoryview] = {}
        stretches = self._stretches_of(numbers)
        self._advise(stretches)
        for stretch in self._at_once(self._stretch, stretches):
            found |= stretch
        return found

    def will_need(self, numbers: Sequence[int]) -> None:
        """Make the kernel read these blobs from disk in the background. Does nothing for a remote shard.

        CorruptShardError: offsets are outside the file (M10).
        """
        if isinstance(self.data_bytes, np.ndarray):
            self._advise(self._stretches_of(numbers))

    def _stretches_of(self, numbers: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return the runs of adjacent blobs: the first number of each run, and the offsets of the run."""
        of_blobs = list(_stretches(sorted({*numbers})))
        offsets_of_each = self._at_once(lambda stretch: self._offsets(*stretch), of_blobs)
        return [(first, offsets) for (first, _), offsets in zip(of_blobs, offsets_of_each, strict=True)]

    def _advise(self, stretches: Sequence[tuple[int, list[int]]]) -> None:
        """Ask the disk for all of them at once, not for one page after another."""
        if isinstance(self.data_bytes, np.ndarray):
            begins, ends = ([offsets[at] for _, offsets in stretches] for at in (0, -1))
            _native.will_need(self.data_bytes, np.array(begins, np.int64), np.array(ends, np.int64))

    def _offsets(self, first: int, last: int) -> list[int]:
        """Return the offsets of blobs ``[first, last)`` and the end of the last.

        CorruptShardError: outside the file (M10).
        """
        offsets: list[int] = self.arrays["blob_offsets"][first : last + 1].tolist()
        for number, (begin, end) in enumerate(pairwise(offsets), first):
            if not 0 <= begin < end <= self.header.data_nbytes:
                detail = (
                    f"blob {number} is from {begin} to {end}, expected ascending offsets of at most"
                    f" {self.header.data_nbytes}"
                )
                raise self._error("blob_offsets", number, "M10", detail)
        return offsets

    def _stretch(self, stretch: tuple[int, list[int]]) -> dict[int, memoryview]:
        """Return the bytes of a run of adjacent blobs with these offsets, by number."""
        first, offsets = stretch
        data = self.data_bytes[offsets[0] : offsets[-1]].data.toreadonly()
        of_blobs = enumerate(pairwise(offsets), first)
        return {number: data[begin - offsets[0] : end - offsets[0]] for number, (begin, end) in of_blobs}

    def _at_once(self, read: Callable[[_Part], _Read], parts: Sequence[_Part]) -> Iterable[_Read]:
        """Apply ``read`` to each part and return the results in order.

        Each takes a request; requests run in parallel.
        """
        is_remote_file = isinstance(self.data_bytes, RemoteArray)
        return request_pool().map(read, parts) if is_remote_file and len(parts) > 1 else map(read, parts)

    def nbytes(self, number: int) -> int:
        """Return the size of a blob in bytes. CorruptShardError: its offsets are outside the file (M10)."""
        begin, end = self._offsets(number, number + 1)
        return end - begin

    def hash(self, number: int) -> bytes:
        """Return the stored hash of a blob."""
        return bytes(self.arrays["blob_hashes"][number : number + 1].tobytes())

    def items_checksum(self) -> bytes:
        """Read the arrays in ``.media.items``, and return their xxh3_128."""
        path, begin = self.paths.media_items, self.header.header_nbytes
        if not is_remote(path):
            return digest_file(path, begin).checksum
        store, key = open_store(path)
        hashed = StreamHash()
        if (info := store.head(key)) is not None:
            for chunk in read_ahead(store, info, offset=begin):
                hashed.update(chunk)
        return hashed.checksum()

    def items(self, first: int, last: int) -> tuple[NDArray[np.int64], Items]:
        """Return the items of packs ``[first, last)``: counts per pack, int64 [packs], and positions in the packs.

        CorruptShardError: the offsets are outside the file (M5), or an item shows a blob that does not exist (M9).
        """
        offsets = self.arrays["item_offsets"][first : last + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        if begin < 0 or end > self.header.num_items or (offsets[1:] < offsets[:-1]).any():
            detail = f"item offsets of packs {first} to {last - 1} do not ascend, or exceed {self.header.num_items}"
            raise self._error("item_offsets", first, "M5", detail)
        counts = offsets[1:] - offsets[:-1]
        if begin == end:
            return counts, NO_ITEMS
        items = Items(*self._at_once(lambda name: self.arrays[name][begin:end], Items._fields))
        if (wrong := items.blobs >= self.header.num_blobs).any():
            at = int(np.argmax(wrong))
            detail = f"blob {items.blobs[at]}, expected less than {self.header.num_blobs}"
            raise self._error("blobs", begin + at, "M9", detail)
        return counts, items

    @cached_property
    def _item_ends(self) -> NDArray[np.int64]:
        _, items = self.items(0, self.header.num_packs)
        offsets = self.arrays["blob_offsets"][:]
        if (wrong := offsets[1:] <= offsets[:-1]).any():
            at = int(np.argmax(wrong)) + 1
            raise self._error(
                "blob_offsets", at, "M10", f"{offsets[at]} follows {offsets[at - 1]}, expected a larger offset"
            )
        return np.append(0, np.cumsum(np.diff(offsets)[items.blobs]))

    def nbytes_before(self, pack: int) -> int:
        """Return the bytes of the items of all packs before this one, each counted with its own encoded file.

        CorruptShardError: an error of ``items``, or blobs are not adjacent (M10).
        """
        return int(self._item_ends[self._first_item(pack)])

    def of_pack(self, pack: int, length: int) -> list[MediaItem]:
        """Return the items of one pack of ``length`` tokens, in order.

        CorruptShardError: a broken rule prevents reading an item: M5, M6, M8 to M10.
        """
        _, items = self.items(pack, pack + 1)
        if not len(items.starts):
            return []

        self._require_known_kinds(pack, items)
        starts, lengths, codes, blobs = (values.tolist() for values in items)
        for at, (start, size) in enumerate(zip(starts, lengths, strict=True)):
            if not (size and start + size <= length):
                detail = f"pack {pack} has {length} tokens, but an item at positions {start} to {start + size - 1}"
                raise self._error("starts", self._first_item(pack) + at, "M6", detail)
        data = self.bytes_of_each(blobs)
        each = zip(starts, lengths, codes, blobs, strict=True)
        return [MediaItem(KIND_NAMES[code], start, size, data[blob]) for start, size, code, blob in each]

    def of_ranges(
        self, token_offsets: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], Items]:
        """Return the items of several sequences, in order. See ``ShardItems``.

        Args:
            token_offsets: offsets of the shard's packs, int64 [packs + 1].
            starts: position of the first token of each sequence in the shard, int64 [sequences].
            lengths: number of tokens of each sequence, int64 [sequences].

        Returns:
            The number of the sequence of each item, int64 [items]; and the items, with ``starts`` counted from the
            first token of the sequence.

        CorruptShardError: a broken rule prevents finding an item: M5 to M9.
        """
        arrays, packs = self._item_arrays, np.searchsorted(token_offsets, starts, "right") - 1
        offsets = arrays["item_offsets"]
        firsts, counts = offsets[packs], offsets[packs + 1] - offsets[packs]
        if (wrong := (counts < 0) | (firsts < 0) | (firsts + counts > self.header.num_items)).any():
            pack = int(packs[np.argmax(wrong)])
            raise self._error("item_offsets", pack, "M5", f"the items of pack {pack} are not among all of them")
        if not counts.any():
            return np.zeros(0, np.int64), NO_ITEMS
        sequences, entries = np.repeat(np.arange(len(starts)), counts), csr_rows(firsts, counts)[1]
        items = Items(*(arrays[name][entries] for name in Items._fields))
        begins = token_offsets[packs][sequences] + items.starts - starts[sequences]
        stops = begins + items.lengths
        own = np.flatnonzero((begins < lengths[sequences]) & ((begins >= 0) | (stops > 0)))
        sequences, entries, begins, stops = (each[own] for each in (sequences, entries, begins, stops))
        items = Items(begins, *(values[own] for values in items[1:]))
        behind = np.append(True, (begins[1:] >= stops[:-1]) | (sequences[1:] > sequences[:-1]))[: len(own)]
        for rule, name, broken, expected in (
            ("M6", "starts", (begins < 0) | (stops > lengths[sequences]) | (begins == stops), "inside one sequence"),
            ("M7", "starts", ~behind, "a position after the previous item"),
            ("M8", "kinds", ~_IS_KIND[items.kinds], " or ".join(map(str, KIND_NAMES))),
            ("M9", "blobs", items.blobs >= self.header.num_blobs, f"less than {self.header.num_blobs}"),
        ):
            if broken.any():
                entry = int(entries[np.argmax(broken)])
                found = int(arrays[name][entry])
                raise self._error(name, entry, rule, f"{found} as entry {entry} of {name}, expected {expected}")
        return sequences, items

    @cached_property
    def _item_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of items.

        For a remote shard they are read completely, because batches need entries from everywhere.
        """
        return {name: self.arrays[name][:] for name in ("item_offsets", *Items._fields)}

    def _first_item(self, pack: int) -> int:
        return int(self.arrays["item_offsets"][pack : pack + 1][0])

    def _require_known_kinds(self, pack: int, items: Items) -> None:
        """Raise CorruptShardError if the kind of an item is unknown (M8). The first item belongs to ``pack``."""
        if not (known := _IS_KIND[items.kinds]).all():
            at, expected = int(np.argmin(known)), " or ".join(map(str, KIND_NAMES))
            detail = f"kind {items.kinds[at]}, expected {expected}"
            raise self._error("kinds", self._first_item(pack) + at, "M8", detail)

    def of_sequences(self, first: int, sequence_offsets: NDArray[np.int64], seq_starts: NDArray[np.int64]) -> RunMedia:
        """Return the items of the packs from ``first`` on, by sequence.

        Args:
            first: number of the first pack.
            sequence_offsets: CSR offsets of the sequences by pack, int64 [packs + 1]; the first is 0.
            seq_starts: start of each sequence in its pack, int64 [sequences].

        CorruptShardError: an error of ``items``, or an unknown kind (M8).
        """
        counts, items = self.items(first, first + len(sequence_offsets) - 1)
        self._require_known_kinds(first, items)
        packs = np.repeat(np.arange(len(counts)), counts)
        return RunMedia.of_packs(items, packs, sequence_offsets, seq_starts, self)


class ShardItems:
    """Finds the images and audio of a shard's sequences by the positions of their tokens.

    Args:
        media: the images and audio of the shard.
        token_offsets: start of each pack and end of the last one: int64 [packs + 1].
    """

    def __init__(self, media: ShardMedia, token_offsets: NDArray[np.int64]) -> None:
        self._media, self._token_offsets = media, token_offsets
        self.bytes_of_each, self.will_need = media.bytes_of_each, media.will_need

    def of_ranges(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], Items]:
        """Return the items of several sequences. See ``ShardMedia.of_ranges``."""
        return self._media.of_ranges(self._token_offsets, starts, lengths)


def items_start(paths: ShardPaths) -> FileStart | None:
    """Return the header of ``.media.items`` at a prefix, unchecked, or None if the file does not exist."""
    path = paths.media_items
    return read_start(path, MEDIA) if is_remote(path) or os.path.isfile(path) else None


def _stretches(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end (exclusive) of each run of consecutive numbers; ``numbers`` ascend."""
    first = last = -1
    for number in numbers:
        if number != last:
            if last >= 0:
                yield first, last
            first = number
        last = number + 1
    if last >= 0:
        yield first, last


def copied_items(items: Sequence[MediaItem]) -> list[MediaItem]:
    """Return the same items with copies of their encoded files, as ``bytes`` that depend on no open file."""
    return [replace(item, data=bytes(item.data)) for item in items]


def open_media(paths: ShardPaths, header: Header, backend: Backend = "mmap") -> ShardMedia | None:
    """Open the images and audio of the shard at ``paths`` with this header; None if it has none.

    Raises:
        ShardNotFoundError: one of the two files is missing.
        CorruptShardError: a rule of FORMAT.md is broken (M1 to M5, M10).
        StorageError: an object store does not answer.
    """
    if (listed := listed_media(header.metadata)) is None:
        return None
    paths = paths.with_media()
    path = paths.media_items
    if (file := items_start(paths)) is None:
        raise ShardNotFoundError(paths.prefix, [path], f"the shard was written with images or audio (M1): {_RESTORE}")
    media = MediaHeader.decode(file.raw, path)
    if media.checksums != listed:
        detail = f"checksums {media.checksums.encode()}, but .seq.idx lists {listed.encode()}; {_RESTORE}"
        raise CorruptShardError(path, MEDIA.offsets["arrays_checksum"], "M1", detail)
    if media.shard_id != header.shard_id:
        detail = (
            f"the file belongs to shard {media.shard_id.hex()}, but this is shard {header.shard_id.hex()}; {_RESTORE}"
        )
        raise CorruptShardError(path, 16, "M4", detail)
    if media.num_packs != header.num_packs:
        raise CorruptShardError(path, 32, "M4", f"{media.num_packs} packs, expected {header.num_packs}; {_RESTORE}")
    check_size(path, file.nbytes, media.nbytes)

    def confirm() -> None:
        require_same(paths.prefix, read_header(paths).shard_id, header.shard_id)
        if (present := items_start(paths)) is None or present.raw != file.raw:
            raise FormatError(f"{path}: the file was replaced after it was opened; open the shard again")

    whole, data = np.dtype("u1"), paths.media_data
    items_file: Array
    data_file: Array
    if file.info is not None:
        store, key = open_store(data)
        if (info := store.head(key)) is None:
            raise ShardNotFoundError(paths.prefix, [data], _RESTORE)
        check_size(data, info.nbytes, media.data_nbytes)
        data_file = RemoteArray(store, key, whole, info.nbytes, info.etag)
        store, key = open_store(path)
        items_file = RemoteArray(store, key, whole, file.nbytes, file.info.etag)
    else:
        if not os.path.isfile(data):
            raise ShardNotFoundError(paths.prefix, [data], _RESTORE)
        check_size(data, os.stat(data).st_size, media.data_nbytes)
        items_file = open_items(path, whole, file.nbytes, file.nbytes, backend, confirm, 0)
        data_file = open_items(data, whole, media.data_nbytes, media.data_nbytes, backend, confirm, 0)
        if not os.path.exists(path) or stamp_of(os.stat(path)) != file.stamp:
            confirm()
    # All arrays are parts of one file, so one map or one descriptor is enough.
    arrays = {
        each.name: part_of(path, items_file, each.dtype, entries, begin)
        for each, (begin, entries) in zip(ARRAYS, media.places().values(), strict=True)
    }
    opened = ShardMedia(paths, media, arrays, data_file)
    opened.check_ends()
    return opened
