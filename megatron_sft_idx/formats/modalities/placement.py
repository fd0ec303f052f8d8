"""Where the documents of a ``.pbin`` lie: its index, checked, and the damage that merging does to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.modalities.layout import GENERATIONS, HEADER_NBYTES, Framing, Generation, find_framing
from megatron_sft_idx.formats.modalities.pickled_pairs import read_pairs

__all__ = ["Placement", "place_documents"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Documents of one file, in tokens from the data's start.

    ``modalities data merge_packed_data`` joins files and gets the index wrong: it moves the entries of each further
    file by the data before it *less 12 bytes* a file, the size of a header that is not there. So every file but the
    first seems to begin inside the last document of the one before. The lengths are right and so is the data; since
    documents tile the data, their places follow from the lengths alone.

    Attributes:
        framing: of the file.
        generation: of the file.
        starts: int64 [documents].
        lengths: int64 [documents]; 0 is possible.
        num_moved: documents whose place in the file was wrong and is set right here.
        num_unused: tokens of the data that no document holds.
    """

    framing: Framing
    generation: Generation
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_moved: int
    num_unused: int


def place_documents(path: str, *, repair_merge: bool = False) -> Placement:
    """Read and check the index, in one pass and some 60 bytes of memory a document.

    Args:
        path: the file.
        repair_merge: place the documents of a file with merge damage by their lengths, instead of refusing it.

    Raises:
        FormatError: no ``.pbin``; an index of anything but documents that lie in the data, in order; merge damage.
        OSError: the file cannot be read.
    """
    refusals = []
    for framing in find_framing(path):
        try:
            return _place(path, framing, repair_merge)
        except FormatError as error:
            refusals.append(error)
    # The newest framing that is believable; a second one hardly ever is.
    raise refusals[0]


def _place(path: str, framing: Framing, repair_merge: bool) -> Placement:
    pairs = read_pairs(path, framing.open_index(path))
    generation = _generation(path, framing, pairs)
    lengths = pairs[:, 1]
    # Every length is at most the data's before they are added, and the sum is first taken in floats: no overflow.
    too_long = (lengths < 0) | (lengths > framing.data_nbytes)
    total = float(lengths.sum(dtype=np.float64))
    if too_long.any() or total > 2 * framing.data_nbytes:
        document = int(np.argmax(too_long))
        raise FormatError(
            f"{path}: document {document} has {lengths[document]} bytes and all together {total:.0f}, the data has"
            f" {framing.data_nbytes}; the index is not of this file, make it again"
        )
    tiled = np.cumsum(lengths) - lengths
    starts = pairs[:, 0]
    num_moved = 0
    if _merge_damage(framing, generation, starts, lengths, tiled):
        num_moved = int(np.count_nonzero(starts - generation.first_offset != tiled))
        if not repair_merge:
            raise FormatError(_damage_message(path, generation, starts, tiled))
        starts = tiled
    else:
        starts = _checked_starts(path, framing, generation, starts, lengths)
    if ((starts % framing.token_nbytes) | (lengths % framing.token_nbytes)).any():
        document = int(np.argmax((starts % framing.token_nbytes) | (lengths % framing.token_nbytes)))
        raise FormatError(
            f"{path}: document {document} has {lengths[document]} bytes from {starts[document]} on, no whole tokens of"
            f" {framing.token_nbytes} bytes"
        )
    unused = (framing.data_nbytes - int(lengths.sum())) // framing.token_nbytes
    return Placement(
        framing, generation, starts // framing.token_nbytes, lengths // framing.token_nbytes, num_moved, unused
    )


def _generation(path: str, framing: Framing, pairs: NDArray[np.int64]) -> Generation:
    """The generation, by the header and the first offset."""
    candidates = [
        each
        for each in GENERATIONS
        if (each.byte_order, each.header_nbytes) == (framing.byte_order, framing.header_nbytes)
    ]
    if not len(pairs):
        return candidates[-1]
    first = int(pairs[0, 0])
    for generation in candidates:
        if first == generation.first_offset:
            return generation
    # A merge whose first files are empty moves its first document, too.
    if candidates[-1].number == 4 and first < 0 and first % HEADER_NBYTES == 0:
        return candidates[-1]
    expected = " or ".join(str(each.first_offset) for each in candidates)
    raise FormatError(f"{path}: its first document is at {first}, expected {expected}; the index is not of this file")


def _merge_damage(
    framing: Framing,
    generation: Generation,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tiled: NDArray[np.int64],
) -> bool:
    """Whether the lengths fill the data exactly and every place is whole headers too early, some at least one.

    No sound index looks so: a document that begins before the one before it ends shares bytes with it.
    """
    if int(lengths.sum()) != framing.data_nbytes:
        return False
    # Bounds first, so that the difference cannot overflow.
    if ((starts < -framing.file_nbytes) | (starts > framing.file_nbytes)).any():
        return False
    early = tiled - (starts - generation.first_offset)
    return bool(early.any()) and bool(((early >= 0) & (early % HEADER_NBYTES == 0)).all())


def _damage_message(path: str, generation: Generation, starts: NDArray[np.int64], tiled: NDArray[np.int64]) -> str:
    early = tiled - (starts - generation.first_offset)
    first = int(np.argmax(early != 0))
    return (
        f"{path}: an index damaged by merging: document {first} is said to begin {early[first]} bytes before the one in"
        f" front ends, and {np.count_nonzero(early)} documents in all are too early, by at most {early.max()} bytes."
        f" Modalities' merge_packed_data loses {HEADER_NBYTES} bytes a file in the index; data and lengths are whole:"
        " pass repair_merge=True (--repair-merge) to place the documents by their lengths, or merge with another tool"
    )


def _checked_starts(
    path: str, framing: Framing, generation: Generation, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Offsets from the data's start, of documents that lie in it in order and apart."""
    outside = (offsets < generation.first_offset) | (offsets > framing.data_nbytes + generation.first_offset)
    starts = np.where(outside, 0, offsets - generation.first_offset)
    bad = outside | (starts + lengths > framing.data_nbytes)
    bad[1:] |= starts[1:] < starts[:-1] + lengths[:-1]
    if bad.any():
        document = int(np.argmax(bad))
        raise FormatError(
            f"{path}: document {document} has {lengths[document]} bytes at offset {offsets[document]}; expected to"
            f" follow the one before and to end within {framing.data_nbytes} bytes of data; the index is damaged"
            " or not of this file, make it again"
        )
    return starts
