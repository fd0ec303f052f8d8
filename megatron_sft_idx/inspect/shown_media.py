"""Images and audio of a shard for people: counts, one line for each item of a pack, and thumbnails for the page.

Sizes come from the heads of files. An image is decoded only for its thumbnail, and only if its head shows that it is
not too large. A file that cannot be decoded is described like any other, with the reason.
"""

from __future__ import annotations

import base64
import io
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.media_files import MediaLimits, open_image, stored_size
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.inspect.text import shown_nbytes
from megatron_sft_idx.layout.media_layout import KINDS, Kind
from megatron_sft_idx.lines import counted
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.media_reader import ShardMedia

# A larger image is described, but not decoded for a thumbnail.
_LIMITS: Final = MediaLimits(max_pixels=1 << 25)
# Longest side in pixels, and JPEG quality, of thumbnails: the first one that is small enough is used.
_SIZES: Final = ((160, 75), (160, 50), (96, 50), (48, 40))
MAX_THUMBNAIL_NBYTES: Final = 8 << 10
# For all thumbnails of a page: their size as data URIs in bytes, and the number of decoded pixels.
MAX_THUMBNAILS_NBYTES: Final = 400_000
_MAX_DECODED_PIXELS: Final = 1 << 29
_CHUNK_ITEMS = 1 << 20
_UNITS: Final[Mapping[Kind, tuple[str, str]]] = {"image": ("image", "images"), "audio": ("recording", "recordings")}


class MediaCounts(NamedTuple):
    """The amount of images and audio in a shard.

    Attributes:
        images: number of image items.
        recordings: number of audio items.
        positions: number of their placeholder tokens.
        files: number of distinct files.
        nbytes: size of the distinct files in bytes.
        repeats: number of items whose file also belongs to an earlier item.
    """

    images: int
    recordings: int
    positions: int
    files: int
    nbytes: int
    repeats: int

    @property
    def line(self) -> str:
        """Return all counts in one line."""
        kinds = [(self.images, _UNITS["image"]), (self.recordings, _UNITS["audio"])]
        named = [counted(count, *units) for count, units in kinds if count]
        if not named:
            return "none"
        items = self.images + self.recordings
        files = f"{counted(self.files, 'distinct file')}, {self.nbytes:,} bytes"
        repeats = f"{self.repeats:,} of {counted(items, 'item')} {'repeats' if self.repeats == 1 else 'repeat'} a file"
        return f"{' and '.join(named)} at {counted(self.positions, 'position')}; {files}; {repeats}"


def count_media(media: ShardMedia) -> MediaCounts:
    """Return the counts of a shard, from its index arrays."""
    by_kind, positions = np.zeros(256, np.int64), 0
    for begin in range(0, media.header.num_items, _CHUNK_ITEMS):
        by_kind += np.bincount(media.arrays["kinds"][begin : begin + _CHUNK_ITEMS], minlength=256)
        positions += int(media.arrays["lengths"][begin : begin + _CHUNK_ITEMS].sum(dtype=np.int64))
    images, recordings = (int(by_kind[KINDS[kind]]) for kind in _UNITS)
    files, items = media.header.num_blobs, media.header.num_items
    return MediaCounts(images, recordings, positions, files, media.header.data_nbytes, items - files)


# ---- one item ----


class ShownItem(NamedTuple):
    """The description of an image or recording.

    Attributes:
        kind: ``image`` or ``audio``.
        start: its first position in the pack.
        length: number of its positions.
        nbytes: size of its file.
        size: height and width in pixels, or number of samples and their rate in hertz; None if unknown.
        problem: why its file cannot be shown; "" if no problem is known.
        same_as: numbers of the pack and of the item in it with the first use of the same file; None if this is the
            first.
    """

    kind: Kind
    start: int
    length: int
    nbytes: int
    size: tuple[int, int] | None
    problem: str
    same_as: tuple[int, int] | None

    @property
    def facts(self) -> str:
        """Return ``image, 640 x 480 pixels, 12.3 KiB``."""
        return ", ".join([self.kind, *self._extent(), shown_nbytes(self.nbytes)])

    def _extent(self) -> list[str]:
        """Return its pixels or seconds as text; empty if unknown."""
        if self.size is not None and self.kind == "image":
            return [f"{self.size[1]:,} x {self.size[0]:,} pixels"]
        return [] if self.seconds is None else [f"{self.seconds:,.2f} seconds"]

    @property
    def seconds(self) -> float | None:
        """Return the length of a recording; None for an image, or if it is unknown."""
        return self.size[0] / self.size[1] if self.size is not None and self.kind == "audio" else None

    def as_dict(self, sequence: int) -> dict[str, Any]:
        """Return it as plain values; ``sequence`` is the number of its sequence."""
        described: dict[str, Any] = {"kind": self.kind, "sequence": sequence, "start": self.start}
        described |= {"length": self.length, "nbytes": self.nbytes}
        if self.size is not None and self.kind == "image":
            described |= {"width": self.size[1], "height": self.size[0]}
        if (seconds := self.seconds) is not None:
            described["seconds"] = round(seconds, 6)
        if self.problem:
            described["problem"] = self.problem
        if self.same_as is not None:
            described["same_as"] = {"pack": self.same_as[0], "item": self.same_as[1]}
        return described

    def line(self, number: int, sequence: int) -> str:
        """Return one line about it; ``number`` is its number in the pack, ``sequence`` that of its sequence."""
        last = self.start + self.length - 1
        parts = [f"item {number}: {self.kind}", f"sequence {sequence}", f"positions {self.start} to {last}"]
        parts += [*self._extent(), f"{self.nbytes:,} bytes"]
        if self.same_as is not None:
            parts.append(f"the same file as item {self.same_as[1]} of pack {self.same_as[0]}")
        return ", ".join([*parts, self.problem] if self.problem else parts)


def shown_items(shard: Shard, pack: int, stop: int | None = None) -> list[ShownItem]:
    """Return descriptions of a pack's images and audio, or of the first ``stop``, from the heads of their files.

    CorruptShardError: their positions break a rule (M5, M6, M8, M9). A damaged file is described as damaged.
    """
    media = shard.media
    if media is None:
        return []
    begin, blobs, found = int(media.arrays["item_offsets"][pack : pack + 1][0]), blobs_of(media, pack)[:stop], []
    firsts = _first_items(media, blobs, begin)
    for number, (item, blob) in enumerate(zip(shard[pack]["media"][:stop], blobs.tolist(), strict=True)):
        size, problem = _looked_at(media, item.kind, blob)
        first = firsts[blob]
        same_as = None if first == begin + number else _place_of(media, first)
        found.append(ShownItem(item.kind, item.start, item.length, len(item.data), size, problem, same_as))
    return found


def blobs_of(media: ShardMedia, pack: int) -> NDArray[np.uint32]:
    """Return the file numbers of the items of a pack, uint32 [items]."""
    return media.items(pack, pack + 1)[1].blobs


def _first_items(media: ShardMedia, blobs: NDArray[np.uint32], begin: int) -> dict[int, int]:
    """Return for each blob shown by the items from ``begin`` on the number of the first item that shows it."""
    firsts: dict[int, int] = {}
    wanted = np.unique(blobs)
    for first in range(0, begin + len(blobs), _CHUNK_ITEMS):
        chunk = media.arrays["blobs"][first : min(first + _CHUNK_ITEMS, begin + len(blobs))]
        for at in np.flatnonzero(np.isin(chunk, wanted)).tolist():
            firsts.setdefault(int(chunk[at]), first + at)
        wanted = np.setdiff1d(wanted, [*firsts])
        if not len(wanted):
            break
    return firsts


def _place_of(media: ShardMedia, item: int) -> tuple[int, int]:
    """Return the pack of an item (numbered among all items), and its number in the pack."""
    offsets, num_packs = media.arrays["item_offsets"], media.header.num_packs
    pack = bisect_right(range(num_packs), item, key=lambda i: int(offsets[i : i + 1][0])) - 1
    return pack, item - int(offsets[pack : pack + 1][0])


def _looked_at(media: ShardMedia, kind: Kind, blob: int) -> tuple[tuple[int, int] | None, str]:
    """Return the size of a file, or why it is unknown: "" if the required library is not installed."""
    try:
        return stored_size(kind, media.data(blob), MediaLimits()), ""
    except (FormatError, RowError) as error:
        return None, _problem_of(error)


def _problem_of(error: FormatError | RowError) -> str:
    """Return why a file cannot be shown; "" if the only problem is a library that is not installed."""
    if isinstance(error, CorruptShardError):
        return f"damaged: its bytes do not have their hash (rule {error.rule})"
    return str(error) if isinstance(error, RowError) else ""


# ---- thumbnails ----


class Thumbnail(NamedTuple):
    """A thumbnail: its address, which contains all its data, and its width and height in pixels."""

    uri: str
    width: int
    height: int


@dataclass
class Thumbnails:
    """Makes the thumbnails of a page, as long as they fit in its budget.

    Attributes:
        nbytes: remaining size of their addresses in bytes.
        pixels: remaining number of pixels that may be decoded for them.
    """

    nbytes: int = MAX_THUMBNAILS_NBYTES
    pixels: int = _MAX_DECODED_PIXELS
    _made: dict[int, Thumbnail | str | None] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin another page, with a new budget for thumbnails."""
        self.nbytes = MAX_THUMBNAILS_NBYTES

    def of(self, media: ShardMedia, blob: int, allowance: int) -> Thumbnail | str | None:
        """Return the thumbnail of an image, or why there is none, or None if pillow is not installed.

        Args:
            media: media of the shard.
            blob: the number of the file.
            allowance: how much of ``nbytes`` it may use.
        """
        if blob not in self._made:
            try:
                self._made[blob] = self._make(media, blob)
            except (FormatError, RowError) as error:
                self._made[blob] = _problem_of(error) or None
        made = self._made[blob]
        if isinstance(made, Thumbnail):
            if len(made.uri) > min(allowance, self.nbytes):
                return _NO_ROOM
            self.nbytes -= len(made.uri)
        return made

    def _make(self, media: ShardMedia, blob: int) -> Thumbnail | str:
        with open_image(media.data(blob), _LIMITS) as image:
            pixels = image.width * image.height
            if pixels > self.pixels:
                return _NO_ROOM
            self.pixels -= pixels
            small = _small(image, _SIZES[0][0])
            for side, quality in _SIZES:
                small.thumbnail((side, side))
                stream = io.BytesIO()
                small.save(stream, "JPEG", quality=quality)
                if stream.tell() <= MAX_THUMBNAIL_NBYTES:
                    uri = f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
                    return Thumbnail(uri, small.width, small.height)
        return "its small picture is too large"


_NO_ROOM: Final = "no room left for its small picture"


def _small(image: Any, side: int) -> Any:
    """Return a pillow image in RGB, at most of this side, with transparent parts on white."""
    from PIL import Image, ImageOps

    image.draft(None, (2 * side, 2 * side))  # a large JPEG is decoded at a fraction of its size
    ImageOps.exif_transpose(image, in_place=True)
    small = image
    if small.mode.startswith(("I", "F")):  # more than 8 bits: from the darkest value to the brightest
        values = np.asarray(small, np.float64)
        low, high = float(values.min()), float(values.max())
        small = Image.fromarray(((values - low) * (255 / max(high - low, 1e-9))).astype(np.uint8))
    elif small.mode not in ("L", "RGB", "RGBA"):
        small = small.convert("RGBA" if small.has_transparency_data else "RGB")
    small.thumbnail((side, side))
    if small.mode == "RGBA":
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
    return small.convert("RGB")


def sequence_of(bounds: Sequence[int], position: int) -> int:
    """Return the number of the sequence at a position of a pack with boundaries ``bounds``."""
    return bisect_right(bounds, position) - 1
