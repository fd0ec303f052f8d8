"""Write the images and audio of a shard: each encoded file once, and the items that show it.

Encoded files are appended to ``.media.data`` when an item first uses them. Two logs of blocks (``pack_log``) record
what was written: ``X.building/blobs`` with ``_BLOB`` records, and ``X.building/items`` with ``_ITEM`` records. At the
end, ``.media.items`` is made from them. Memory holds only the hashes of the files, 24 to 32 bytes each.

Each block of items ends with a record of kind ``_NOTED``. Its pack is the number of packs whose items are all logged.
After a power failure, the end of this log may be missing. Packs after that number must not be mistaken for packs
without items.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import brief
from megatron_sft_idx.layout.files import MAX_CAPACITY
from megatron_sft_idx.layout.media_layout import (
    ARRAYS,
    HASH_NBYTES,
    KINDS,
    Items,
    MediaHeader,
    MediaItem,
    blob_hash,
    broken_items,
)
from megatron_sft_idx.packs.run import PackRun, label_aligned
from megatron_sft_idx.packs.run_media import Blobs, BlobsInMemory, BlobTable, RunMedia
from megatron_sft_idx.shard.pack_log import CHUNK_PACKS, append_records, read_records
from megatron_sft_idx.shard.publication import Publication
from megatron_sft_idx.storage import OutputFile, open_regular
from megatron_sft_idx.storage.building_files import BLOBS, ITEMS
from megatron_sft_idx.storage.local import HashedFile

_ITEM = np.dtype([("pack", "<u8"), ("start", "<u4"), ("length", "<u4"), ("blob", "<u4"), ("kind", "u1")])
_BLOB = np.dtype([("nbytes", "<u8"), ("hash", f"V{HASH_NBYTES}")])
_ITEM_MAGIC, _BLOB_MAGIC = b"ITEM", b"BLOB"
_NOTED = 0


class PlacedMedia(NamedTuple):
    """Images and audio of a run of packs, checked against the rules.

    Attributes:
        items: the items in order; ``starts`` are counted from the first token of the pack.
        packs: number of each item's pack in the run, int64 [items].
        num_packs: number of packs in the run.
        blobs: the files that the items show.
    """

    items: Items
    packs: NDArray[np.int64]
    num_packs: int
    blobs: Blobs


def placed_media(
    run: PackRun,
    media: RunMedia | Sequence[MediaItem],
    first_pack: int,
    mask_alignment: Literal["label", "token"] = "label",
) -> PlacedMedia | None:
    """Check the images and audio of a run. For one pack, they may be a list. Errors count packs from ``first_pack``.

    Returns None if the sequences do not divide the packs (rules P1 to P4), because then items have no valid positions.

    ValueError: an item breaks a rule, or the list holds something else.
    """
    if not _is_divided(run):
        return None
    run = label_aligned(run, mask_alignment)
    if isinstance(media, RunMedia):
        packs = np.repeat(np.arange(len(run)), run.sums_by_pack(media.counts))
        items = media.items._replace(starts=media.starts_in_packs(run.seq_starts))
        blobs = media.blobs
    elif isinstance(media, Sequence) and len(run) == 1:
        items, blobs = _items_of(media, f"pack {first_pack}: media")
        packs = np.zeros(len(media), np.int64)
    else:
        raise ValueError(f"pack {first_pack}: media: {brief(media)}, expected a list of MediaItem objects")
    if broken := next(broken_items(items, packs, run.token_offsets, run.bounds, run.loss_mask), None):
        pack = first_pack + int(packs[broken.item])
        raise ValueError(f"pack {pack}: {broken.found}, expected {broken.expected} (rule {broken.rule})")
    return PlacedMedia(items, packs, len(run), blobs)


def _is_divided(run: PackRun) -> bool:
    """Return whether all packs of a run have tokens and are divided by their sequences."""
    lengths, sequences, starts = run.pack_lengths, run.pack_sequences, run.seq_starts
    if len(lengths) != len(sequences) or lengths.min(initial=1) < 1 or sequences.min(initial=1) < 1:
        return False
    if lengths.sum() != len(run.tokens) or sequences.sum() != len(starts):
        return False
    return bool((starts[run.sequence_offsets[:-1]] == 0).all() and (np.diff(run.bounds) > 0).all())


def _items_of(media: Sequence[MediaItem], what: str) -> tuple[Items, BlobsInMemory]:
    """Return the items of one pack.

    ValueError, which begins with ``what``: one is not an image or recording at tokens.
    """
    rows, blobs = np.empty((len(media), 4), np.int64), BlobsInMemory()
    for number, item in enumerate(media):
        if not isinstance(item, MediaItem) or item.kind not in [*KINDS]:
            raise ValueError(f"{what}: {brief(item)}, expected MediaItem objects of kind {' or '.join(KINDS)}")
        start, length, data = item.start, item.length, item.data
        integers = all(isinstance(each, int | np.integer) for each in (start, length))
        if not integers or not 0 <= start < MAX_CAPACITY or not 0 < length < MAX_CAPACITY:
            raise ValueError(f"{what}: start {brief(start)}, length {brief(length)}, expected positions of the pack")
        if not isinstance(data, bytes | bytearray | memoryview) or not memoryview(data).contiguous or not len(data):
            raise ValueError(f"{what}: the {item.kind} at position {start} is {brief(data)}, expected bytes of a file")
        rows[number] = start, length, KINDS[item.kind], number
        blobs.append(memoryview(data).cast("B"))
    return Items(*rows.T), blobs


class MediaWriter:
    """Writes ``.media.data`` and ``.media.items`` of a shard while its packs are added.

    Args:
        publication: publication of the shard, whose paths include both files.
    """

    def __init__(self, publication: Publication) -> None:
        self._publication, self._paths = publication, publication.paths
        self._data = HashedFile(publication.open(self._paths.media_data, keep=publication.is_resumed))
        self._item_log, self._blob_log = publication.open_log(ITEMS), publication.open_log(BLOBS)
        self._table = BlobTable()
        self._staged_items: list[NDArray[Any]] = []
        self._staged_blobs: list[tuple[int, bytes]] = []
        # Number of packs taken over from an interrupted build. Later log entries are ignored.
        self._most_packs: int | None = None
        # The blobs of the most recent source: for each, its number here + 1, or 0 if it is not known yet.
        self._numbers: tuple[Blobs, NDArray[np.uint32]] | None = None
        self.num_items = 0

    def add(self, placed: PlacedMedia, num_packs: int) -> None:
        """Add the items of the last packs, when there are ``num_packs`` in total. New files are written at once.

        CorruptShardError: a file read from another shard does not have its hash.
        """
        items, packs, of, blobs = placed
        if self._numbers is None or self._numbers[0] is not blobs:
            self._numbers = blobs, np.zeros(len(blobs), np.uint32)
        numbers = self._numbers[1]
        for number in dict.fromkeys(items.blobs.tolist()):
            if not numbers[number]:
                numbers[number] = self._number_of(blobs, number) + 1
        records = np.empty(len(packs), _ITEM)
        for name, values in zip(("pack", "start", "length", "kind"), (num_packs - of + packs, *items[:3]), strict=True):
            records[name] = values
        records["blob"] = numbers[items.blobs] - 1
        self._staged_items.append(records)

    def _number_of(self, blobs: Blobs, number: int) -> int:
        hashed, known = blobs.hash(number), len(self._table)
        if (new := self._table.number(hashed)) == known:
            data = blobs.data(number)
            self._data.write(data)
            self._staged_blobs.append((len(data), hashed))
        return new

    def flush(self, num_packs: int) -> None:
        """Log what was added, when there are ``num_packs`` in total. The packs must be logged after this."""
        assert self._most_packs is None
        if self._staged_blobs:
            append_records(self._blob_log, _BLOB_MAGIC, np.array(self._staged_blobs, _BLOB))
            self._staged_blobs.clear()
        noted = np.array([(num_packs, 0, 0, 0, _NOTED)], _ITEM)
        records = np.concatenate([*self._staged_items, noted])
        append_records(self._item_log, _ITEM_MAGIC, records)
        self.num_items += len(records) - 1
        self._staged_items.clear()

    def _logged(self, name: str, magic: bytes, record: np.dtype[Any]) -> Iterator[NDArray[Any]]:
        with open_regular(self._publication.building.path(name)) as stream:
            yield from read_records(stream, magic, record)

    def _logged_items(self) -> Iterator[NDArray[Any]]:
        """Yield the items of the packs that count, in nonempty arrays."""
        for records in self._logged(ITEMS, _ITEM_MAGIC, _ITEM):
            kept = records["kind"] != _NOTED
            if self._most_packs is not None:
                kept &= records["pack"] < self._most_packs
            if kept.any():
                yield records[kept]

    def _logged_blobs(self) -> Iterator[NDArray[Any]]:
        """Yield the blobs that these items show, in nonempty arrays."""
        remaining = len(self._table)
        for records in self._logged(BLOBS, _BLOB_MAGIC, _BLOB):
            if not remaining:
                return
            yield records[:remaining]
            remaining -= len(records[:remaining])

    def write_items(self, file: OutputFile, num_packs: int) -> MediaHeader:
        """Write ``.media.items`` from the logs. Return its header, which is written once the shard id is known."""
        self._data.file.truncate(self._data.nbytes)
        media = MediaHeader(
            bytes(16),
            num_packs,
            self.num_items,
            len(self._table),
            self._data.nbytes,
            bytes(HASH_NBYTES),
            self._data.checksum(),
        )
        file.write(bytes(media.header_nbytes))
        out, places = HashedFile(file), media.places()
        fields = {"starts": "start", "lengths": "length", "kinds": "kind", "blobs": "blob"}
        for name, dtype, _, _ in ARRAYS:
            out.write(bytes(places[name][0] - file.nbytes))
            if name in fields:
                for records in self._logged_items():
                    out.write(records[fields[name]].astype(dtype))
            elif name == "item_offsets":
                for offsets in self._item_offsets(num_packs):
                    out.write(offsets)
            elif name == "blob_offsets":
                end = 0
                out.write(np.zeros(1, dtype))
                for records in self._logged_blobs():
                    ends = end + np.cumsum(records["nbytes"].astype(dtype))
                    out.write(ends)
                    end = int(ends[-1])
            else:
                for records in self._logged_blobs():
                    out.write(records["hash"].tobytes())
        assert file.nbytes == media.nbytes
        return dataclasses.replace(media, arrays_checksum=out.checksum())

    def _item_offsets(self, num_packs: int) -> Iterator[NDArray[np.int64]]:
        """Yield ``item_offsets``: the number of items before each pack, then the total."""
        next_pack = num_before = 0
        for records in self._logged_items():
            packs = records["pack"].astype(np.int64)
            last = int(packs[-1]) + 1
            for first in range(next_pack, last, CHUNK_PACKS):
                numbers = np.arange(first, min(first + CHUNK_PACKS, last))
                yield num_before + np.searchsorted(packs, numbers)
            next_pack, num_before = max(next_pack, last), num_before + len(records)
        for first in range(next_pack, num_packs + 1, CHUNK_PACKS):
            yield np.full(min(first + CHUNK_PACKS, num_packs + 1) - first, num_before)

    # ---- resuming an interrupted build ----

    def whole_packs(self, num_packs: int) -> int:
        """Return how many of the first packs of an interrupted build have all their items and the files of these items.

        For the other packs, data or log entries were lost.
        """
        num_blobs = num_noted = 0
        for nbytes, hashed, begin in self._noted_blobs():
            data = self._data.file.read_at(begin, nbytes)
            if len(data) != nbytes or blob_hash(data) != hashed:
                break
            num_blobs += 1
        for records in self._logged(ITEMS, _ITEM_MAGIC, _ITEM):
            is_item = records["kind"] != _NOTED
            num_noted = max(num_noted, int(records["pack"][~is_item].max(initial=0)))
            lost = records["pack"][is_item & (records["blob"] >= num_blobs)]
            num_packs = min(num_packs, int(lost.min(initial=num_packs)))
        return min(num_packs, num_noted)

    def resume(self, num_packs: int) -> None:
        """Take over the items of the first packs and the files that they show. After this, no others can be added.

        The logs stay unchanged, so a recovery that is killed can be repeated.
        """
        self._most_packs, num_blobs = num_packs, 0
        for records in self._logged_items():
            self.num_items += len(records)
            num_blobs = max(num_blobs, int(records["blob"].max()) + 1)
        for nbytes, hashed, begin in itertools.islice(self._noted_blobs(), num_blobs):
            self._data.update(self._data.file.read_at(begin, nbytes))
            self._table.number(hashed)

    def _noted_blobs(self) -> Iterator[tuple[int, bytes, int]]:
        """Yield all logged blobs: size in bytes, hash, and offset in ``.media.data``."""
        begin = 0
        for records in self._logged(BLOBS, _BLOB_MAGIC, _BLOB):
            for nbytes, hashed in records.tolist():
                yield nbytes, bytes(hashed), begin
                begin += nbytes
