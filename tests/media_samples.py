"""Random packs with images and audio, damage with all checksums corrected, and the rules in slow, plain Python."""

from __future__ import annotations

import hashlib
import os
import random
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from reseal import Files, reseal
from sample_packs import Sample, five_files, sample_of

from megatron_sft_idx.layout import FIELDS
from megatron_sft_idx.layout.files import MEDIA_SUFFIXES
from megatron_sft_idx.layout.media_layout import MEDIA, MediaItem
from megatron_sft_idx.shard import ShardWriter

SEQ_IDX_SUMS = ("tokens_checksum", "loss_checksum", "idx_checksum", "starts_checksum")


@dataclass(frozen=True)
class MediaSample:
    """One pack as plain lists, and its images and audio in order."""

    pack: Sample
    items: list[MediaItem]


def item_of(kind: Any, start: int, length: int, data: bytes = b"\xff\xd8 an image") -> MediaItem:
    return MediaItem(kind, start, length, data)


def media_sample(lengths: Sequence[int], items: Sequence[MediaItem], *, first_id: int = 0) -> MediaSample:
    """Return a pack of sequences of these lengths. All tokens except placeholders are trained."""
    placeholders = {position for each in items for position in range(each.start, each.start + each.length)}
    pack = sample_of(lengths, lambda p: int(p not in placeholders), lambda p: first_id + p)
    return MediaSample(pack, list(items))


def media_samples(seed: int, count: int = 12) -> list[MediaSample]:
    """Return random packs, without items and with several per sequence.

    Items can be next to each other, and at the first or last token of a sequence. There are few files, so most are used
    more than once, sometimes as the other kind.
    """
    draw = random.Random(seed)
    files = [draw.randbytes(draw.choice([1, 2, 7, 64, 300])) for _ in range(max(2, count // 2))]
    return [_drawn(draw, files) for _ in range(count)]


def _drawn(draw: random.Random, files: list[bytes]) -> MediaSample:
    lengths = [draw.randint(1, 12) for _ in range(draw.randint(1, 4))]
    items: list[MediaItem] = []
    begin = 0
    for length in lengths:
        position = begin + draw.choice([0, 0, 1, 3])
        while draw.random() < 0.7 and position < begin + length:
            taken = draw.choice([1, 2, 4, begin + length - position])  # the last: to the end of the sequence
            taken = min(taken, begin + length - position)
            number = min(draw.randrange(len(files)), draw.randrange(len(files)))
            audio = (number % 2 == 0) != (draw.random() < 0.1)
            items.append(MediaItem("audio" if audio else "image", position, taken, files[number]))
            position += taken + draw.choice([0, 0, 1, 2])
        begin += length
    placeholders = {position for each in items for position in range(each.start, each.start + each.length)}
    pack = sample_of(lengths, lambda p: 0 if p in placeholders else draw.randint(0, 1), lambda p: draw.randint(0, 300))
    return MediaSample(pack, items)


def write_media(prefix: str | os.PathLike[str], samples: Sequence[MediaSample], **options: Any) -> Any:
    """Write label-aligned packs without waiting for the disk, and return the header."""
    with ShardWriter(prefix, media=True, **{"durable": False, **options}) as writer:
        for sample in samples:
            pack = sample.pack
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts, media=sample.items)
        return writer.finalize()


def seven_files(prefix: str | os.PathLike[str]) -> Files:
    """Return the files of a shard with images and audio, by suffix."""
    media = {suffix: Path(os.fspath(prefix) + suffix).read_bytes() for suffix in MEDIA_SUFFIXES}
    return {**five_files(prefix), **media}


def as_plain(items: Sequence[MediaItem]) -> list[tuple[str, int, int, bytes]]:
    return [(each.kind, each.start, each.length, bytes(each.data)) for each in items]


# ---- the arrays in the file, and damage to them ----

# Name, struct format of an entry, the count that determines the length, and how many entries more. See FORMAT.md.
_ARRAYS = [
    ("item_offsets", "q", "num_packs", 1),
    ("starts", "I", "num_items", 0),
    ("lengths", "I", "num_items", 0),
    ("kinds", "B", "num_items", 0),
    ("blobs", "I", "num_items", 0),
    ("blob_offsets", "q", "num_blobs", 1),
    ("blob_hashes", "16s", "num_blobs", 0),
]


def media_field(raw: bytes, name: str) -> Any:
    """Return one field of the header of ``.media.items``."""
    place = next(each for each in MEDIA.fields if each.name == name)
    return struct.unpack_from("<" + place.format, raw, place.offset)[0]


def array_places(raw: bytes) -> dict[str, tuple[int, str, int]]:
    """Return offset, entry format and number of entries of each array of ``.media.items``."""
    places, end = {}, media_field(raw, "header_nbytes")
    for name, code, of, more in _ARRAYS:
        begin, count = (end + 63) // 64 * 64, media_field(raw, of) + more
        places[name] = begin, code, count
        end = begin + count * struct.calcsize("<" + code)
    return places


def array_values(raw: bytes, name: str) -> list[Any]:
    """Return the entries of one array of ``.media.items``."""
    begin, code, count = array_places(raw)[name]
    size = struct.calcsize("<" + code)
    return [struct.unpack_from("<" + code, raw, begin + size * at)[0] for at in range(count)]


def with_entry(files: Files, name: str, at: int, value: Any) -> Files:
    """Replace one entry of one array of ``.media.items``, without changing the checksums."""
    raw = bytearray(files[".media.items"])
    begin, code, count = array_places(bytes(raw))[name]
    assert 0 <= at < count
    struct.pack_into("<" + code, raw, begin + struct.calcsize("<" + code) * at, value)
    return {**files, ".media.items": bytes(raw)}


def set_media_fields(raw: bytes, **fields: Any) -> bytes:
    """Return a ``.media.items`` with these fields and a corrected header checksum."""
    out, size = bytearray(raw), media_field(raw, "header_nbytes")
    for name, value in fields.items():
        place = next(each for each in MEDIA.fields if each.name == name)
        struct.pack_into("<" + place.format, out, place.offset, value)
    out[size - 16 : size] = xxhash.xxh3_128_digest(bytes(out[: size - 16]))
    return bytes(out)


def reseal_media(
    files: Files, *, media: Mapping[str, Any] | None = None, sums: Mapping[str, bytes] | None = None, **fields: Any
) -> Files:
    """Correct all sizes, checksums and ids of a shard with images and audio, according to its present files.

    Args:
        files: the seven files, by suffix.
        media: fields of the header of ``.media.items`` to set at the end; may be wrong.
        sums: checksums to store for ``data`` and ``items`` instead of the right ones, in all places.
        fields: fields of the header of ``.seq.idx`` to set at the end; may be wrong.
    """
    raw = files[".media.items"]
    right = {
        "data": xxhash.xxh3_128_digest(files[".media.data"]),
        "items": xxhash.xxh3_128_digest(raw[media_field(raw, "header_nbytes") :]),
    }
    listed = {**right, **(sums or {})}
    entry = f'"media":{{"data":"{listed["data"].hex()}","items":"{listed["items"].hex()}"}}'
    seq_idx, count = re.subn(rb'"media":\{"data":"\w{32}","items":"\w{32}"\}', entry.encode(), files[".seq.idx"])
    assert count == 1
    sealed = reseal({**files, ".seq.idx": seq_idx})
    of = {each.name: each for each in FIELDS}
    checksums = [sealed[".seq.idx"][of[name].offset :][:16] for name in SEQ_IDX_SUMS]
    shard_id = xxhash.xxh3_128_digest(b"".join([*checksums, listed["data"], listed["items"]]))
    sealed = reseal(sealed, **{"shard_id": shard_id, **fields})
    own = {"shard_id": shard_id, "data_checksum": listed["data"], "arrays_checksum": listed["items"]}
    return {**sealed, ".media.items": set_media_fields(raw, **{**own, **(media or {})})}


# ---- the rules ----


@dataclass(frozen=True)
class Places:
    """The data that the rules refer to, as plain lists.

    Attributes:
        arrays: arrays of ``.media.items``, by name.
        data: content of ``.media.data``.
        packs: for each pack the boundaries of its sequences, from 0 to its length.
        masks: loss mask of each pack.
    """

    arrays: Mapping[str, list[Any]]
    data: bytes
    packs: list[list[int]]
    masks: list[list[Any]]

    @classmethod
    def of(cls, files: Files, samples: Sequence[MediaSample], mask_dtype: Any = np.uint8) -> Places:
        """Read the files; boundaries and lengths of packs come from the samples."""
        arrays = {name: array_values(files[".media.items"], name) for name, *_ in _ARRAYS}
        mask, masks = np.frombuffer(files[".loss.bin"], mask_dtype).tolist(), []
        for sample in samples:
            masks.append(mask[: len(sample.pack.tokens)])
            mask = mask[len(sample.pack.tokens) :]
        return cls(arrays, files[".media.data"], [sample.pack.bounds for sample in samples], masks)


def broken_media_rules(places: Places) -> set[str]:
    """Return which of the rules M5 to M12 are broken. Each rule is checked independently, as written in FORMAT.md."""
    broken: set[str] = set()
    offsets, items = places.arrays["item_offsets"], len(places.arrays["starts"])
    if offsets[0] != 0 or offsets[-1] != items or any(b < a for a, b in pairwise(offsets)):
        broken.add("M5")
    used: list[int] = []  # blobs in the order of first use
    for pack, bounds in enumerate(places.packs):
        # Python's slices would count negative numbers from the end.
        first, last = (min(max(offset, 0), items) for offset in offsets[pack : pack + 2])
        of_pack = {name: places.arrays[name][first:last] for name in ("starts", "lengths", "kinds", "blobs")}
        broken |= _broken_in_pack(of_pack, bounds, places.masks[pack])
        for blob in of_pack["blobs"]:
            if blob not in used:
                if blob != len(used):
                    broken.add("M9")
                used.append(blob)
    if sorted(used) != list(range(len(places.arrays["blob_hashes"]))):
        broken.add("M9")
    return broken | _broken_blobs(places)


def _broken_in_pack(items: Mapping[str, list[int]], bounds: list[int], mask: list[Any]) -> set[str]:
    """Return which of M6, M7, M8 and M12 are broken in one pack."""
    broken, taken = set(), -1  # the last position of the previous item
    for start, length, kind in zip(items["starts"], items["lengths"], items["kinds"], strict=True):
        is_inside = any(a <= start and start + length <= b for a, b in pairwise(bounds))
        if length == 0 or not is_inside:
            broken.add("M6")
        if start <= taken:
            broken.add("M7")
        taken = start + length - 1
        if kind not in (1, 2):
            broken.add("M8")
        for position in range(start - 1, min(start + length - 1, len(mask))):
            if 0 <= position < len(mask) and mask[position] != 0:
                broken.add("M12")
    return broken


def _broken_blobs(places: Places) -> set[str]:
    """Return which of M10 and M11 are broken."""
    broken, offsets, hashes = set(), places.arrays["blob_offsets"], places.arrays["blob_hashes"]
    if offsets[0] != 0 or offsets[-1] != len(places.data):
        broken.add("M10")
    for a, b in pairwise(offsets):
        if b <= a:
            broken.add("M10")
    for blob, expected in enumerate(hashes):
        a, b = (min(max(offset, 0), len(places.data)) for offset in offsets[blob : blob + 2])
        if hashlib.blake2b(places.data[a:b], digest_size=16).digest() != expected:
            broken.add("M11")
        for other in hashes[:blob]:
            if other == expected:
                broken.add("M11")
    return broken
