"""Damage every region of the media files, with and without correct checksums, and mix in files of other shards.

Each damage is a complete set of files. An entry can also be a link, a folder or a pipe instead of bytes.
"""

from __future__ import annotations

import os
import random
import re
import struct
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

from media_samples import (
    MediaSample,
    array_places,
    array_values,
    item_of,
    media_field,
    media_sample,
    media_samples,
    reseal_media,
    seven_files,
    with_entry,
    write_media,
)
from reseal import Files
from sample_packs import write_samples

from megatron_sft_idx.layout.files import MEDIA_SUFFIXES
from megatron_sft_idx.layout.media_layout import ARRAYS, MEDIA

DATA, ITEMS = MEDIA_SUFFIXES
Placed = dict[str, bytes | str]


class MediaDamage(NamedTuple):
    """One damaged copy.

    Attributes:
        name: what was done, for messages.
        files: by suffix: bytes, or another kind of entry (``SPECIAL``); missing files are left out.
        is_found: whether a full verification must find it. With all checksums corrected, some damage gives just another
            valid shard.
    """

    name: str
    files: Placed
    is_found: bool


class Shards(NamedTuple):
    """Files of the shards from which damaged copies are made.

    Attributes:
        whole: the shard to damage.
        foreign: another shard with media files of the same sizes.
        older: a shard of the same packs and sizes in which one item had another kind.
        text: a shard of the same packs, without images and audio.
    """

    whole: Files
    foreign: Files
    older: Files
    text: Files


def _samples() -> list[MediaSample]:
    """Return packs of all sorts, including two files of equal size and, at the end, a pack without items."""
    twins = [item_of("image", 0, 2, b"one of two"), item_of("image", 3, 1, b"two of two")]
    return [*media_samples(3, 9), media_sample([5, 2], twins), media_sample([3], [], first_id=7)]


def media_shards(folder: Path) -> Shards:
    """Write the shards that damaged copies are made of, and read their files."""
    samples = _samples()
    # Every media file has other bytes, and every item is at the same place, so that all sizes are the same.
    other = [
        MediaSample(s.pack, [each.__class__(each.kind, each.start, each.length, bytes(b ^ 1 for b in each.data))
                             for each in s.items])
        for s in samples
    ]  # fmt: skip
    last = next(number for number in reversed(range(len(samples))) if samples[number].items)
    changed = samples[last].items[0]
    kind = "audio" if changed.kind == "image" else "image"
    older = list(samples)
    renamed = changed.__class__(kind, changed.start, changed.length, changed.data)
    older[last] = MediaSample(samples[last].pack, [renamed, *samples[last].items[1:]])
    for name, packs in (("whole", samples), ("foreign", other), ("older", older)):
        write_media(folder / name, packs, capacity=64)
    write_samples(folder / "text", [each.pack for each in samples], capacity=64)
    whole, foreign, earlier = (seven_files(folder / name) for name in ("whole", "foreign", "older"))
    text = {suffix: (folder / f"text{suffix}").read_bytes() for suffix in whole if suffix not in MEDIA_SUFFIXES}
    assert all(len(files[suffix]) == len(whole[suffix]) for files in (foreign, earlier) for suffix in MEDIA_SUFFIXES)
    return Shards(whole, foreign, earlier, text)


# ---- entries that are not files with bytes ----

SPECIAL = ("a folder", "a pipe", "a dangling link")


def put_placed(prefix: str, files: Placed) -> None:
    """Put files at a prefix, and nothing else."""
    for suffix in (".bin", ".loss.bin", ".seq.bin", ".idx", *MEDIA_SUFFIXES, ".seq.idx"):
        path = Path(prefix + suffix)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        content = files.get(suffix)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content == "a folder":
            path.mkdir()
        elif content == "a pipe":
            os.mkfifo(path)
        elif content is not None:
            path.symlink_to("nothing")


# ---- the matrix ----


def media_damages(shards: Shards) -> list[MediaDamage]:
    """Return all damages in a fixed order."""
    whole = shards.whole
    made = [*_in_header(whole), *_in_arrays(whole), *_in_data(whole), *_other_files(shards), *_exchanged(whole)]
    assert len({each.name for each in made}) == len(made), Counter(each.name for each in made).most_common(3)
    return made


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x11]) + data[at + 1 :]


def _in_header(whole: Files) -> Iterator[MediaDamage]:
    """Damage every field of the header: first and last byte with wrong checksums, extreme values with correct ones."""
    raw = whole[ITEMS]
    fixed, nbytes = MEDIA.fixed_nbytes, media_field(raw, "header_nbytes")
    for number, each in enumerate(MEDIA.fields):
        name, size = each.name or f"zeros {number}", struct.calcsize("<" + each.format)
        for at in sorted({each.offset, each.offset + size - 1}):
            yield MediaDamage(f"byte {at}, {name}", {**whole, ITEMS: _flipped(raw, at)}, True)
        if not each.name or each.name in ("magic", "header_nbytes"):
            continue
        value = media_field(raw, each.name)
        if isinstance(value, bytes):
            values: list[bytes | int] = [bytes(size), b"\xff" * size]
        else:
            most = (1 << 8 * size) - 1
            values = [0, value - 1, value + 1, value + 2, 2 * value + 64, most >> 1, most - 1, most, 1 << 56, 1 << 32]
        for new in dict.fromkeys(values):
            if new == value or (isinstance(new, int) and not 0 <= new <= (1 << 8 * size) - 1):
                continue
            yield MediaDamage(
                f"{name} {new!r} in a right header", dict(reseal_media(whole, media={each.name: new})), True
            )
    for at in (fixed, fixed + 1, fixed + 2, nbytes - 17, nbytes - 16, nbytes - 1):
        yield MediaDamage(f"byte {at}, behind the fields", {**whole, ITEMS: _flipped(raw, at)}, True)
    for size in (0, 1, 8, 12, 16, fixed - 1, fixed, nbytes - 1, nbytes, nbytes + 1, len(raw) - 1):
        yield MediaDamage(f"the items cut to {size} bytes", {**whole, ITEMS: raw[:size]}, True)
    for more in (1, 64, 5000):
        yield MediaDamage(f"the items with {more} bytes more", {**whole, ITEMS: raw + bytes(more)}, True)
        longer = {**whole, ITEMS: raw + b"x" * more}
        yield MediaDamage(f"the items with {more} bytes more, right checksums", dict(reseal_media(longer)), True)
    for size in (0, 64, 128, nbytes + 64, nbytes + 128, 1 << 24, (1 << 24) + 64, (1 << 32) - 64):
        changed = raw[:12] + struct.pack("<I", size) + raw[16:]
        yield MediaDamage(f"header_nbytes {size}", {**whole, ITEMS: changed}, True)


_LEAST_MOST = {"q": (-(2**63), 2**63 - 1), "I": (0, 2**32 - 1), "B": (0, 255)}


def _in_arrays(whole: Files) -> Iterator[MediaDamage]:
    """Damage first, middle and last entry of every array, and the zeros before it."""
    raw = whole[ITEMS]
    end = media_field(raw, "header_nbytes")
    for array in ARRAYS:
        begin, code, count = array_places(raw)[array.name]
        for at in sorted({end, begin - 1}) if end < begin else ():
            changed = {**whole, ITEMS: _flipped(raw, at)}
            yield MediaDamage(f"byte {at}, before {array.name}", dict(changed), True)
            yield MediaDamage(f"byte {at}, before {array.name}, right checksums", dict(reseal_media(changed)), True)
        size = struct.calcsize("<" + code)
        end = begin + count * size
        values = array_values(raw, array.name)
        for entry in sorted({0, count // 2, count - 1}):
            at = begin + size * entry
            yield MediaDamage(f"{array.name}[{entry}], byte {at}", {**whole, ITEMS: _flipped(raw, at)}, True)
            value = values[entry]
            if code == "16s":
                others = [bytes(16), _flipped(value, 15), values[entry - 1]]
            else:
                least, most = _LEAST_MOST[code]
                others = [
                    0,
                    1,
                    2,
                    value - 1,
                    value + 1,
                    least,
                    most,
                    most - 1,
                    most // 2,
                    values[entry - 1],
                    len(values),
                ]
                others = [min(max(each, least), most) for each in others]
            for new in dict.fromkeys(others):
                if new != value:
                    files = reseal_media(with_entry(whole, array.name, entry, new))
                    yield MediaDamage(f"{array.name}[{entry}] {new!r}, right checksums", dict(files), False)


def _in_data(whole: Files) -> Iterator[MediaDamage]:
    """Damage first and last byte of every blob; truncate, extend, remove or replace the whole file."""
    data, offsets = whole[DATA], array_values(whole[ITEMS], "blob_offsets")
    for blob, (begin, end) in enumerate(pairwise(offsets)):
        for at in sorted({begin, end - 1}):
            changed = {**whole, DATA: _flipped(data, at)}
            yield MediaDamage(f"blob {blob}, byte {at}", dict(changed), True)
            yield MediaDamage(f"blob {blob}, byte {at}, right checksums", dict(reseal_media(changed)), True)
    for size in sorted({0, 1, offsets[1], offsets[1] + 1, len(data) // 2, offsets[-2], len(data) - 1}):
        changed = {**whole, DATA: data[:size]}
        yield MediaDamage(f"the data cut to {size} bytes", dict(changed), True)
        sealed = reseal_media(changed, media={"data_nbytes": size})
        yield MediaDamage(f"the data cut to {size} bytes, right sizes and checksums", dict(sealed), True)
    for more in (1, 5000):
        changed = {**whole, DATA: data + b"x" * more}
        yield MediaDamage(f"the data with {more} bytes more", dict(changed), True)
        sealed = reseal_media(changed, media={"data_nbytes": len(data) + more})
        yield MediaDamage(f"the data with {more} bytes more, right sizes and checksums", dict(sealed), True)
    for suffix in MEDIA_SUFFIXES:
        yield MediaDamage(f"no {suffix}", {each: raw for each, raw in whole.items() if each != suffix}, True)
        for special in SPECIAL:
            yield MediaDamage(f"{special} for {suffix}", {**whole, suffix: special}, True)
    rest = {each: raw for each, raw in whole.items() if each not in MEDIA_SUFFIXES}
    yield MediaDamage("neither file", dict(rest), True)


def _other_files(shards: Shards) -> Iterator[MediaDamage]:
    """Combine the five files with media files of other shards of the same sizes."""
    whole = shards.whole
    for name in ("foreign", "older"):
        other: Files = getattr(shards, name)
        differing = [suffix for suffix in MEDIA_SUFFIXES if other[suffix] != whole[suffix]]
        for suffix in differing:
            yield MediaDamage(f"the {suffix} of a {name} shard", {**whole, suffix: other[suffix]}, True)
        both = {suffix: other[suffix] for suffix in MEDIA_SUFFIXES}
        yield MediaDamage(f"both files of a {name} shard", {**whole, **both}, True)
        yield MediaDamage(f"the .seq.idx of a {name} shard", {**whole, ".seq.idx": other[".seq.idx"]}, True)
    # From a shard of other packs, so that almost all sizes differ.
    yield MediaDamage("the five files of text, and these beside", {**whole, **shards.text}, False)


def _exchanged(whole: Files) -> Iterator[MediaDamage]:
    """Exchange two blobs of equal size: in the data, in the hashes, in both, and in the items."""
    offsets, hashes = (array_values(whole[ITEMS], name) for name in ("blob_offsets", "blob_hashes"))
    sizes = [b - a for a, b in pairwise(offsets)]
    data = whole[DATA]
    pairs = [(a, b) for a in range(len(sizes)) for b in range(a) if sizes[a] == sizes[b]]
    assert pairs
    for b, a in pairs:
        first, second = (data[offsets[each] : offsets[each + 1]] for each in (a, b))
        swapped = bytearray(data)
        swapped[offsets[a] : offsets[a + 1]], swapped[offsets[b] : offsets[b + 1]] = second, first
        in_data = {**whole, DATA: bytes(swapped)}
        in_hashes = with_entry(with_entry(whole, "blob_hashes", a, hashes[b]), "blob_hashes", b, hashes[a])
        yield MediaDamage(f"blobs {a} and {b} exchanged", dict(in_data), True)
        yield MediaDamage(f"blobs {a} and {b} exchanged, right checksums", dict(reseal_media(in_data)), True)
        yield MediaDamage(f"hashes {a} and {b} exchanged", dict(in_hashes), True)
        yield MediaDamage(f"hashes {a} and {b} exchanged, right checksums", dict(reseal_media(in_hashes)), True)
        both = {**in_hashes, DATA: bytes(swapped)}
        yield MediaDamage(f"blobs {a} and {b} and their hashes exchanged", dict(both), True)
        # A header of items that is valid by itself, but not in this shard, which lists other checksums.
        sealed = reseal_media(both)
        of_media = {suffix: sealed[suffix] for suffix in MEDIA_SUFFIXES}
        yield MediaDamage(f"blobs {a} and {b} exchanged, items right", {**whole, **of_media}, True)


def some_of(damages: list[MediaDamage], count: int, seed: int) -> list[MediaDamage]:
    """Draw ``count`` damages, of as many sorts (names without numbers) as possible."""
    draw, sorts = random.Random(seed), dict[str, list[MediaDamage]]()
    for damage in draw.sample(damages, len(damages)):
        sorts.setdefault(re.sub(r"b'.*'|-?\d+", "", damage.name), []).append(damage)
    by_turns = [each for turn in zip_longest(*sorts.values()) for each in turn if each is not None]
    return by_turns[:count]
