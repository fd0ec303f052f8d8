"""The layout of images and audio: ``X.media.items`` has their positions, ``X.media.data`` the encoded files.

An *item* is one occurrence of an image or recording in a pack: a run of placeholder tokens inside one sequence. A
*blob* is the encoded file that the item shows, byte for byte as it was given. Identical files are stored once, in the
order in which items first use them. A shard with the same packs therefore always has the same two files.

``X.media.items`` begins with a header of the same form as that of ``.seq.idx``, with 128 bytes of fixed fields
(``MEDIA``). Seven arrays follow, each at a multiple of 64 (``ARRAYS``), and the file ends with the last. The header
holds the checksum of the arrays and that of ``X.media.data``. ``.seq.idx`` lists both, and the shard id is a hash of
them too, so a shard with another image is another shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.layout.files import MAX_COUNT, Check, HeaderForm, MediaChecksums, align
from megatron_sft_idx.lines import shown_by_fields

Kind = Literal["image", "audio"]
KINDS: dict[Kind, int] = {"image": 1, "audio": 2}
KIND_NAMES = {code: kind for kind, code in KINDS.items()}
HASH_NBYTES = 16
MAX_BLOBS = 1 << 32


def _checks(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> Iterator[Check]:
    """Rule M3, about the fixed fields of the header of ``.media.items``."""
    items, blobs, nbytes = values["num_items"], values["num_blobs"], values["data_nbytes"]
    yield from (
        ("num_packs", "M3", values["num_packs"] < MAX_COUNT, f"below {MAX_COUNT}"),
        ("num_items", "M3", items < MAX_COUNT, f"below {MAX_COUNT}"),
        ("num_blobs", "M3", blobs <= min(items, MAX_BLOBS) and (blobs > 0) == (items > 0), f"1 to num_items {items}"),
        ("data_nbytes", "M3", blobs <= nbytes < MAX_COUNT, f"at least num_blobs {blobs}, and below {MAX_COUNT}"),
        ("zeros", "M3", not any(values["zeros"]), "zeros"),
        ("reserved", "M3", not any(values["reserved"]), "zeros"),
    )


MEDIA = HeaderForm(
    "the .media.items",
    b"\x89SFTMED\n",
    1,
    "magic 8s, version I, header_nbytes I, shard_id 16s, num_packs Q, num_items Q, num_blobs Q, data_nbytes Q,"
    "json_nbytes I, zeros 4s, arrays_checksum 16s, data_checksum 16s, reserved 24s",
    ["M2", "M2", "M2", "M2", "M3", "M3"],
    _checks,
)
MEDIA_MAGIC = MEDIA.magic


class ItemArray(NamedTuple):
    """An array of ``.media.items``: name, dtype, the count that gives its length, and how many extra entries it has."""

    name: str
    dtype: np.dtype[Any]
    entries: str
    more: int = 0


ARRAYS = (
    ItemArray("item_offsets", np.dtype("<i8"), "num_packs", 1),
    ItemArray("starts", np.dtype("<u4"), "num_items"),
    ItemArray("lengths", np.dtype("<u4"), "num_items"),
    ItemArray("kinds", np.dtype("u1"), "num_items"),
    ItemArray("blobs", np.dtype("<u4"), "num_items"),
    ItemArray("blob_offsets", np.dtype("<i8"), "num_blobs", 1),
    ItemArray("blob_hashes", np.dtype((np.void, HASH_NBYTES)), "num_blobs"),
)


def blob_hash(data: bytes | memoryview) -> bytes:
    """Return the hash used to detect identical files: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(data, digest_size=HASH_NBYTES).digest()


@dataclass(frozen=True)
class MediaHeader:
    """The contents of the header of ``X.media.items``.

    Attributes:
        shard_id: id of the shard that the items belong to, 16 bytes.
        num_packs: number of packs in the shard.
        num_items: number of items in all packs.
        num_blobs: number of different files that they show.
        data_nbytes: size of ``X.media.data`` in bytes.
        arrays_checksum: xxh3_128 of all bytes after the header, 16 bytes.
        data_checksum: xxh3_128 of ``X.media.data``, 16 bytes.
        metadata: the JSON block.
    """

    shard_id: bytes
    num_packs: int
    num_items: int
    num_blobs: int
    data_nbytes: int
    arrays_checksum: bytes
    data_checksum: bytes
    metadata: dict[str, Any] = field(default_factory=dict)

    def places(self) -> dict[str, tuple[int, int]]:
        """Byte offset in the file and number of entries of each array, in the order of ``ARRAYS``."""
        places, end = {}, MEDIA.nbytes(self.metadata)
        for name, dtype, of, more in ARRAYS:
            begin, entries = align(end), getattr(self, of) + more
            places[name] = begin, entries
            end = begin + entries * dtype.itemsize
        return places

    @property
    def header_nbytes(self) -> int:
        """Size of the file before the arrays, in bytes."""
        return MEDIA.nbytes(self.metadata)

    @property
    def nbytes(self) -> int:
        """Size of the whole ``.media.items`` in bytes."""
        begin, entries = self.places()[ARRAYS[-1].name]
        return begin + entries * ARRAYS[-1].dtype.itemsize

    def offset_ends(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield the required first and last values of the offset arrays: rule, array name, entry number, value."""
        for rule, name, last, total in (
            ("M5", "item_offsets", self.num_packs, self.num_items),
            ("M10", "blob_offsets", self.num_blobs, self.data_nbytes),
        ):
            yield rule, name, 0, 0
            yield rule, name, last, total

    def encode(self) -> bytes:
        """Encode the header with its checksum."""
        names = MEDIA.offsets.keys() & self.__dataclass_fields__.keys()
        return MEDIA.encode({name: getattr(self, name) for name in names}, self.metadata)

    @property
    def checksums(self) -> MediaChecksums:
        """The two checksums, as ``.seq.idx`` lists them."""
        return MediaChecksums(self.data_checksum, self.arrays_checksum)

    @classmethod
    def decode(cls, raw: bytes, path: str) -> MediaHeader:
        """Decode the header at the start of a file. See ``HeaderForm.broken_rules`` for ``raw``.

        Raises:
            CorruptShardError: a rule of FORMAT.md is broken (M2, M3).
            UnsupportedVersionError: another version.
        """
        MEDIA.require_sound(raw, path, "restore it")
        values = MEDIA.values(raw)
        plain = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**plain, metadata=MEDIA.metadata(raw) or {})


# ---- items, and the rules about them ----


@shown_by_fields
@dataclass(frozen=True)
class MediaItem:
    """One occurrence of an image or recording in a pack.

    Attributes:
        kind: ``image`` or ``audio``.
        start: its first position in the pack.
        length: number of positions of its placeholder tokens.
        data: the encoded file (JPEG, PNG, WAV, ...), byte for byte as it was given. In a pack read from a shard it is a
            read-only view, or ``bytes`` if copies were requested.

    Example:
        >>> from megatron_sft_idx import Shard, ShardWriter
        >>> picture = MediaItem("image", start=1, length=2, data=b"the bytes of a PNG file")
        >>> with ShardWriter("data/drawings", media=True) as writer:
        ...     writer.add_pack([5, 90, 90, 7], [0, 0, 1, 0], [0], media=[picture])  # 90: placeholder token
        >>> Shard("data/drawings")[0]["media"]
        [MediaItem(kind='image', start=1, length=2, data=23 bytes)]
    """

    kind: Kind
    start: int
    length: int
    data: bytes | memoryview

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data": bytes(self.data)}  # a view cannot be pickled


class Items(NamedTuple):
    """Items of several packs, in order, as integer arrays of shape [items].

    Attributes:
        starts: first position of each item, counted from the first token of its pack, or in runs from that of its
            sequence.
        lengths: number of positions of each item.
        kinds: codes from ``KINDS``.
        blobs: number of the blob that each item shows.
    """

    starts: NDArray[Any]
    lengths: NDArray[Any]
    kinds: NDArray[Any]
    blobs: NDArray[Any]


NO_ITEMS = Items(*(np.empty(0, each.dtype) for each in ARRAYS if each.name in Items._fields))


class BrokenItem(NamedTuple):
    """An item that breaks a rule: its number among those given, the rule, the value found, and the value expected."""

    item: int
    rule: str
    found: str
    expected: str


def broken_items(
    items: Items,
    packs: NDArray[np.int64],
    pack_bounds: NDArray[np.int64],
    bounds: NDArray[np.int64],
    mask: NDArray[Any] | None,
) -> Iterator[BrokenItem]:
    """For each of the rules M6, M7, M8 and M12, yield the first item that breaks it.

    Args:
        items: items of several packs, with starts counted from the first token of the pack.
        packs: number of the pack of each item, ascending, int64 [items].
        pack_bounds: the start of each pack and the end of the last one, among the tokens of all packs: int64 [packs +
            1].
        bounds: the same for sequences: int64 [sequences + 1].
        mask: loss mask, label-aligned [tokens]; None if it is not known.

    Example:
        >>> two = Items(*(np.array(each) for each in ([1, 3], [2, 2], [1, 1], [0, 0])))
        >>> bounds = np.array([0, 6])  # one sequence of six tokens
        >>> list(broken_items(two, np.array([0, 0]), bounds, bounds, np.array([0, 0, 0, 0, 1, 0])))
        []
    """
    if not len(items.starts):
        return
    begins = pack_bounds[packs] + items.starts.astype(np.int64)
    ends = begins + items.lengths
    sequences = np.searchsorted(bounds, np.minimum(begins, bounds[-1] - 1), "right")
    inside = (items.lengths > 0) & (ends <= bounds[sequences]) & (begins < pack_bounds[packs + 1])
    behind = np.append(True, (begins[1:] >= ends[:-1]) | (packs[1:] > packs[:-1]))
    kinds = " or ".join(f"{code} ({name})" for name, code in KINDS.items())
    checks: list[tuple[str, NDArray[np.bool_], str]] = [
        ("M6", inside, "positions inside one sequence"),
        ("M7", behind, "positions after the previous item"),
        ("M8", np.isin(items.kinds, [*KINDS.values()]), kinds),
    ]
    if mask is not None and inside.all():
        # The labels of an item are at begin - 1 to end - 2. The position before a sequence is the end of another one,
        # whose mask is 0 by rule P6.
        trained = np.append(0, np.cumsum(mask != 0))
        untrained = trained[ends - 1] == trained[np.maximum(begins - 1, 0)]
        checks.append(("M12", untrained, "a loss mask of 0 on its labels"))
    for rule, kept, expected in checks:
        if not kept.all():
            at = int(np.argmin(kept))
            first, length = int(items.starts[at]), int(items.lengths[at])
            place = f"an item at positions {first} to {first + length - 1}"
            yield BrokenItem(at, rule, f"kind {items.kinds[at]}" if rule == "M8" else place, expected)


class FirstUse:
    """Check that blob numbers follow the order of first use, while items arrive in order (rule M9).

    Example:
        >>> order = FirstUse()
        >>> order.broken(np.array([0, 1, 0, 2]), num_blobs=3) is None
        True
        >>> order.broken(np.array([4]), num_blobs=5)
        BrokenItem(item=0, rule='M9', found='blob 4', expected='at most 3, in the order of first use')
    """

    def __init__(self) -> None:
        self.num_used = 0

    def broken(self, blobs: NDArray[Any], num_blobs: int) -> BrokenItem | None:
        """Return the first of the next items with a blob number that is too large, or None."""
        used = np.maximum.accumulate(np.append(self.num_used, blobs.astype(np.int64) + 1))
        self.num_used = int(used[-1])
        if (kept := (blobs <= used[:-1]) & (blobs < num_blobs)).all():
            return None
        at = int(np.argmin(kept))
        most = min(int(used[at]), num_blobs - 1)
        return BrokenItem(at, "M9", f"blob {blobs[at]}", f"at most {most}, in the order of first use")
