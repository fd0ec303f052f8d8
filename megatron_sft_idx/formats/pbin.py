"""The bytes of a ``.pbin``, Modalities' file of tokenised documents, in its four generations.

::

    header | data: the tokens of all documents end to end | index: pickled [(offset, length), ...], in bytes

The header begins with the length of the data in bytes (8 bytes); from the second generation on, the bytes of a token
follow (4 bytes, the number 1, 2 or 4). There is no magic, no version and no checksum: what a file is can only be told
from what fits. The project's history (Modalities/modalities, ``create_packed_data.py``) knows four layouts:

=== ============== ====== ========== =============== ============================== ========
no. written from   header byte order token           offsets count from             first is
=== ============== ====== ========== =============== ============================== ========
1   December 2023  8      big        4 bytes         the file's start               8
2   January 2024   12     big        1, 2 or 4 bytes the file's start               12
3   April 2024     12     little     1, 2 or 4 bytes the file's start               12
4   June 2024      12     little     1, 2 or 4 bytes the data's start               0
=== ============== ====== ========== =============== ============================== ========

Evidence that tells them apart: a header of the right size and byte order gives a data length that ends inside the
file, where a pickle begins that ends with the file; the wrong ones give astronomical lengths, or no pickle. Between 3
and 4, and for certainty everywhere, the first offset decides. Where an index is empty nothing can differ: it is a 4.

Not read: what the first experiments of November 2023 wrote (a header of 4 bytes), and tokens of 3 bytes, which a few
development versions of December 2024 chose for large vocabularies and no version's reader ever took.

Documents tile the data in the order of the index: every writer of the format only appends. That is what makes the
damage of its merge tool visible: it moves the index entries of each further file by 12 bytes, a header, too little (see
``DocumentIndex``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx._native import parse_pickled_pairs
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import (
    PackedReader,
    PackedSpec,
    PackedWriter,
    all_trained_mask,
    file_identity,
    first_bad_range,
    joined_ranges,
    pickle_opcodes,
)
from megatron_sft_idx.layout.files import MAX_CAPACITY
from megatron_sft_idx.packs.run import PackRun
from megatron_sft_idx.storage import as_bytes, open_array, open_regular
from megatron_sft_idx.storage.publish import Kind

MaskRule = Literal["all"]
ByteOrder = Literal["big", "little"]

# What a pickled list begins with: protocol 2 and later, then 0, then 1.
_LIST_HEADS = (b"\x80", b"(l", b"]")
_LENGTH_NBYTES = 8
_HEADER_NBYTES = 12  # of all generations but the first
_TOKEN_NBYTES = (1, 2, 4)
# By byte order and bytes of the header, newest first: what the index says of the data's first byte, and which
# generation says so.
_GENERATIONS: dict[tuple[ByteOrder, int], dict[int, int]] = {
    ("little", _HEADER_NBYTES): {0: 4, _HEADER_NBYTES: 3},
    ("big", _HEADER_NBYTES): {_HEADER_NBYTES: 2},
    ("big", _LENGTH_NBYTES): {_LENGTH_NBYTES: 1},
}


class Framing(NamedTuple):
    """Where the three parts of a file are: all that can be told without the index.

    Attributes:
        byte_order: of the header and the tokens.
        header_nbytes: 8 or 12.
        token_nbytes: 1, 2 or 4.
        data_nbytes: a multiple of ``token_nbytes``.
        file_nbytes: size of the file.
    """

    byte_order: ByteOrder
    header_nbytes: int
    token_nbytes: int
    data_nbytes: int
    file_nbytes: int

    @property
    def index_offset(self) -> int:
        """Where the data ends and the index begins, in bytes."""
        return self.header_nbytes + self.data_nbytes

    @property
    def num_tokens(self) -> int:
        """Tokens in the data."""
        return self.data_nbytes // self.token_nbytes

    def __str__(self) -> str:
        return (
            f"a {self.header_nbytes}-byte {self.byte_order}-endian header says {self.data_nbytes} bytes of data in"
            f" tokens of {self.token_nbytes}, and a pickle goes from there to the end"
        )

    def open_tokens(self, path: str) -> NDArray[Any]:
        """The data, mapped, as it is on disk: unsigned tokens in the file's byte order."""
        # Not newbyteorder(), which spells this machine's own order out: kernels take such a dtype for a foreign one.
        dtype = np.dtype(f"{'<' if self.byte_order == 'little' else '>'}u{self.token_nbytes}")
        return np.asarray(open_array(path, dtype, self.num_tokens, nbytes=self.file_nbytes, offset=self.header_nbytes))


def encode_header(data_nbytes: int, token_nbytes: int) -> bytes:
    """The header of the current generation."""
    return data_nbytes.to_bytes(_LENGTH_NBYTES, "little") + token_nbytes.to_bytes(4, "little")


def possible_framings(path: str) -> list[Framing]:
    """The ways to take a file for a ``.pbin``, newest first: none for other files, one for nearly every real one.

    Costs a few reads.

    Raises:
        FormatError: it is no regular file.
        OSError: it cannot be read.
    """
    found = []
    with open_regular(path) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        if size <= _LENGTH_NBYTES or os.pread(fd, 1, size - 1) != b".":
            return []
        head = os.pread(fd, _HEADER_NBYTES, 0)
        for order, header_nbytes in _GENERATIONS:
            data_nbytes = int.from_bytes(head[:_LENGTH_NBYTES], order)
            token_nbytes = int.from_bytes(head[_LENGTH_NBYTES:], order) if header_nbytes == _HEADER_NBYTES else 4
            # A pickle takes at least a byte to begin and one to stop.
            index = header_nbytes + data_nbytes
            believable = token_nbytes in _TOKEN_NBYTES and not data_nbytes % token_nbytes and index < size - 1
            if believable and os.pread(fd, 2, index).startswith(_LIST_HEADS):
                found.append(Framing(order, header_nbytes, token_nbytes, data_nbytes, size))
    return found


def require_framings(path: str) -> list[Framing]:
    """The same, at least one. FormatError says what was found instead."""
    if found := possible_framings(path):
        return found
    with open_regular(path) as file:
        head = file.read(_HEADER_NBYTES)
        size = file.seek(0, os.SEEK_END)
    little, big = (int.from_bytes(head[:_LENGTH_NBYTES], order) for order in ("little", "big"))
    if len(head) < _HEADER_NBYTES:
        reason = f"{size} bytes, a header alone has {_HEADER_NBYTES}; the file was cut short or is something else"
    elif little == 0:
        reason = "its header says no data, though some follows: its writer was stopped before the end; make it again"
    else:
        token_nbytes = min(int.from_bytes(head[_LENGTH_NBYTES:], order) for order in ("little", "big"))
        reason = (
            f"its header would say {little} bytes of data (little-endian) or {big} (big-endian), in tokens of"
            f" {token_nbytes} bytes; expected 1, 2 or 4, and a pickled index between there and the end of {size} bytes;"
            " the file was cut short or is something else"
        )
    raise FormatError(f"{path}: no .pbin of any generation: {reason}")


class DocumentIndex(NamedTuple):
    """Documents of one file, in tokens from the data's start.

    ``modalities data merge_packed_data`` joins files and gets the index wrong: it moves the entries of each further
    file by the data before it *less 12 bytes* a file, the size of a header that is not there. So every file but the
    first seems to begin inside the last document of the one before. The lengths are right and so is the data; since
    documents tile the data, their places follow from the lengths alone.

    Attributes:
        framing: of the file.
        first_offset: what the index says of the data's first byte.
        starts: int64 [documents].
        lengths: int64 [documents]; 0 is possible.
        num_moved: documents whose place in the file was wrong and is set right here.
    """

    framing: Framing
    first_offset: int
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_moved: int

    @property
    def generation(self) -> int:
        """1 to 4."""
        return _GENERATIONS[self.framing.byte_order, self.framing.header_nbytes][self.first_offset]

    def notes(self) -> Iterator[str]:
        """What was understood, as sentences."""
        yield f".pbin of generation {self.generation} of 4: {self.framing}"
        yield "no loss masks in the file: as asked, every token is trained on but the first of each document"
        if self.num_moved:
            yield f"{self.num_moved} documents placed by their lengths: the index was damaged by merging"
        if empty := int(np.count_nonzero(self.lengths == 0)):
            yield f"{empty} documents without a token left out"
        if unused := self.framing.num_tokens - int(self.lengths.sum()):
            yield f"{unused} tokens that no document holds left out"


def read_document_index(path: str, *, repair_merge: bool = False) -> DocumentIndex:
    """Read and check the index, in one pass and some 60 bytes of memory a document.

    Args:
        path: the file.
        repair_merge: place the documents of a file with merge damage by their lengths, instead of refusing it.

    Raises:
        FormatError: no ``.pbin``; an index of anything but documents that lie in the data, in order; merge damage.
        OSError: the file cannot be read.
    """
    refusals = []
    for framing in require_framings(path):
        try:
            return _checked_index(path, framing, repair_merge)
        except FormatError as error:
            refusals.append(error)
    # The newest framing that is believable; a second one hardly ever is.
    raise refusals[0]


def _checked_index(path: str, framing: Framing, repair_merge: bool) -> DocumentIndex:
    begin, size, data_nbytes = framing.index_offset, framing.file_nbytes, framing.data_nbytes
    index = open_array(path, np.dtype(np.uint8), size - begin, nbytes=size, offset=begin)
    pairs = read_pairs(path, np.asarray(index))
    offsets, lengths = pairs[:, 0], pairs[:, 1]
    base = _first_offset(path, framing, offsets)
    # Every length is at most the data's before they are added, and the sum is first taken in floats: no overflow.
    too_long = (lengths < 0) | (lengths > data_nbytes)
    total = float(lengths.sum(dtype=np.float64))
    if too_long.any() or total > 2 * data_nbytes:
        document = int(np.argmax(too_long))
        raise FormatError(
            f"{path}: document {document} has {lengths[document]} bytes and all together {total:.0f}, the data has"
            f" {data_nbytes}; the index is not of this file, make it again"
        )
    tiled = np.cumsum(lengths) - lengths
    early = _merge_displacements(framing, offsets, tiled + base) if int(lengths.sum()) == data_nbytes else None
    if early is None:
        starts = offsets - base
        if (misplaced := first_bad_range(starts, lengths, data_nbytes)) is not None:
            raise FormatError(
                f"{path}: document {misplaced} has {lengths[misplaced]} bytes at offset {offsets[misplaced]}; expected"
                f" to follow the one before and to end within {data_nbytes} bytes of data; the index is damaged or not"
                " of this file, make it again"
            )
    elif repair_merge:
        starts = tiled
    else:
        first = int(np.argmax(early != 0))
        raise FormatError(
            f"{path}: an index damaged by merging: document {first} is said to begin {early[first]} bytes before the"
            f" one in front ends, and {np.count_nonzero(early)} documents in all are too early, by at most"
            f" {early.max()} bytes. Modalities' merge_packed_data loses {_HEADER_NBYTES} bytes a file in the index;"
            " data and lengths are whole: pass repair_merge=True (--repair-merge) to place the documents by their"
            " lengths, or merge with another tool"
        )
    nbytes = framing.token_nbytes
    if (uneven := (starts % nbytes) | (lengths % nbytes)).any():
        document = int(np.argmax(uneven != 0))
        raise FormatError(
            f"{path}: document {document} has {lengths[document]} bytes from {starts[document]} on, no whole tokens of"
            f" {nbytes} bytes"
        )
    num_moved = 0 if early is None else int(np.count_nonzero(early))
    return DocumentIndex(framing, base, starts // nbytes, lengths // nbytes, num_moved)


def _first_offset(path: str, framing: Framing, offsets: NDArray[np.int64]) -> int:
    """What the index says of the data's first byte, where some generation would say so."""
    known = _GENERATIONS[framing.byte_order, framing.header_nbytes]
    newest = next(iter(known))
    if not len(offsets):
        return newest
    first = int(offsets[0])
    if first in known:
        return first
    # A merge whose first files are empty moves its first document, too.
    if newest == 0 and first < 0 and first % _HEADER_NBYTES == 0:
        return newest
    expected = " or ".join(map(str, known))
    raise FormatError(f"{path}: its first document is at {first}, expected {expected}; the index is not of this file")


def _merge_displacements(
    framing: Framing, offsets: NDArray[np.int64], tiled: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """By how many bytes each document begins too early in an index that was damaged by merging; None for others.

    Every place is whole headers earlier than the lengths before it say, some at least one. No sound index looks so: a
    document that begins before the one before it ends shares bytes with it.
    """
    # Bounds first, so that the difference cannot overflow.
    if ((offsets < -framing.file_nbytes) | (offsets > framing.file_nbytes)).any():
        return None
    early = tiled - offsets
    return early if early.any() and ((early >= 0) & (early % _HEADER_NBYTES == 0)).all() else None


def recognise(path: str) -> bool:
    """Whether a file may be taken for a ``.pbin``."""
    try:
        return bool(possible_framings(path))
    except (OSError, FormatError):
        return False


def _is_readable(path: str) -> bool:
    """Whether the reader opens a file: it has no magic, but an index that fits its data."""
    try:
        read_document_index(path, repair_merge=True)
    except Exception:  # whatever a stranger's bytes do to the reader
        return False
    return True


def native_tokens(path: str, position: int, tokens: NDArray[Any]) -> NDArray[Any]:
    """Tokens as they are on disk as uint16 or int32 of this machine; the same memory where nothing differs.

    Raises:
        SequenceError: an id past int32, with the position given.
    """
    if tokens.dtype.itemsize <= 2:
        return tokens.astype(np.uint16, copy=False)
    native = tokens.astype(np.uint32, copy=False).view(np.int32)
    if len(native) and native.min() < 0:
        raise SequenceError(
            path, position, f"has id {tokens.max()}, expected at most {2**31 - 1}: no vocabulary is so large"
        )
    return native


class Reader(PackedReader):
    """The documents of a ``.pbin`` of any generation.

    Args:
        mask_alignment: of masks in the file; there are none, so that only "label" makes sense.
        mask_rule: what to train on. "all" trains every token of a document but its first, which nothing predicts.
            There is no default: a chat whose questions are trained like its answers is rarely what is wanted.
        repair_merge: read a file with an index that ``merge_packed_data`` damaged (see ``DocumentIndex``).
    """

    label_only = "a .pbin has no masks that could be {}-aligned; leave it out"

    def _open(self, *, mask_rule: MaskRule | None = None, repair_merge: bool = False) -> None:
        if mask_rule != "all":
            raise FormatError(
                f"{self.path}: a .pbin has no loss masks{'' if mask_rule is None else f', and no rule {mask_rule!r}'};"
                ' pass mask_rule="all" (--mask-rule all) to train every token, questions too, or convert from what it'
                " was made of"
            )
        placement = read_document_index(self.path, repair_merge=repair_merge)
        if len(placement.lengths) and placement.lengths.max() > MAX_CAPACITY:
            longest = int(np.argmax(placement.lengths))
            reason = f"has {placement.lengths[longest]} tokens, expected at most {MAX_CAPACITY} (rule P1)"
            raise SequenceError(self.path, longest, reason)
        # Packs hold at least one token.
        self._starts = placement.starts[placement.lengths > 0]
        self._lengths = placement.lengths[placement.lengths > 0]
        self._token_offsets = np.append(0, np.cumsum(self._lengths))
        self._tokens = placement.framing.open_tokens(self.path)
        small = self._tokens.dtype.itemsize <= 2
        self._dtypes = np.dtype(np.uint16 if small else np.int32), np.dtype(np.uint8)
        self.identity = file_identity(self.path) + " repaired" * (placement.num_moved > 0)
        self._generation = placement.generation
        self.notes += placement.notes()

    @property
    def spec(self) -> PackedSpec:
        """Counts and dtypes; the capacity is the longest document."""
        longest = int(self._lengths.max(initial=0))
        made = {"pbin": {"generation": self._generation, "mask_rule": "all"}}
        tokens = int(self._token_offsets[-1])
        return self._make_spec(len(self), tokens, longest, capacity=max(longest, 1), metadata=made)

    def __len__(self) -> int:
        return len(self._lengths)

    def _run(self, first: int, last: int) -> PackRun:
        lengths, starts = self._lengths[first:last], self._starts[first:last]
        tokens = native_tokens(self.path, first, joined_ranges(self._tokens, starts, starts + lengths))
        ones = np.ones(last - first, np.int64)
        return PackRun(tokens, all_trained_mask(lengths), ones - 1, lengths, ones)


class Writer(PackedWriter):
    """A ``.pbin`` of the current generation; every sequence becomes a document.

    Keeps 8 bytes a sequence in memory until the index is written. Without ``allow_loss`` nothing is written at all:
    loss masks and which sequences shared a pack are always lost.
    """

    format = "pbin"
    reread_options: ClassVar[dict[str, Any]] = {"mask_rule": "all"}
    reader, kind = Reader, Kind("a Modalities .pbin", _is_readable)

    def _begin(self) -> None:
        if not self._allow_loss:
            raise FormatError(
                f"{self._path}: a .pbin keeps neither loss masks nor packs, every sequence becomes a"
                " document trained as a whole; pass allow_loss=True (--allow-loss) if that is what you want"
            )
        assert self._spec is not None
        token_nbytes = self._spec.token_dtype.itemsize
        self._dtype = np.dtype(f"<u{token_nbytes}")
        self.lost["masks"] = "loss masks: the format has none, every token would be trained on"
        self._lengths: list[NDArray[np.int64]] = []
        self._file = self._make_output(token_nbytes * self._spec.num_tokens + 8 * self._spec.num_sequences).open()
        self._file.write(encode_header(0, token_nbytes))

    def _append(self, run: PackRun) -> None:
        tokens = np.asarray(run.tokens)
        if len(tokens) and tokens.max() > (largest := np.iinfo(self._dtype).max):
            at = int(np.argmax(tokens))
            raise SequenceError(
                self._path, self._pack_of_token(run, at), f"has id {tokens[at]}, the spec says {largest} at most"
            )
        self._file.write(as_bytes(np.ascontiguousarray(tokens, self._dtype)))
        self._lengths.append(run.sequence_lengths())
        if (run.pack_sequences > 1).any():
            self.lost["packs"] = "which sequences share a pack: every sequence is a document of its own"

    def _finish(self) -> None:
        data_nbytes = self._file.nbytes - _HEADER_NBYTES
        write_pairs(self._file.write, self._pairs())
        # Last, as the real writer: a file without its length is one that was not finished.
        self._file.write_at(encode_header(data_nbytes, self._dtype.itemsize), 0)
        self._file.close()

    def _pairs(self) -> Iterator[NDArray[np.int64]]:
        offset = 0
        for lengths in self._lengths:
            nbytes = lengths * self._dtype.itemsize
            ends = np.cumsum(nbytes) + offset
            yield np.stack([ends - nbytes, nbytes], axis=1)
            offset = int(ends[-1]) if len(ends) else offset


# ---- the index: a pickled list of pairs, read without unpickling ----

# Pairs that are tuples of Python's at once.
_PAIRS_AT_ONCE = 1 << 12


def read_pairs(path: str, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The list in a pickle of any protocol, int64 [pairs, 2].

    Args:
        path: of the file the pickle is in, for the error.
        data: all of the pickle.

    Raises:
        FormatError: anything but one list of pairs of 64-bit integers.
    """
    try:
        return parse_pickled_pairs(data)
    except ValueError as error:
        raise FormatError(
            f"{path}: its index is no pickled list of pairs of integers: {error} of the pickle;"
            " nothing of it was run: do not unpickle the file by other means unless you know who made it"
        ) from None


def write_pairs(write: Callable[[bytes], object], blocks: Iterable[NDArray[np.int64]]) -> None:
    """Write a pickled list of pairs of integers, block by block.

    Args:
        write: takes the bytes in order.
        blocks: the pairs, int64 [some, 2].
    """
    beginning, empty_list = b"\x80\x02", b"]"
    write(beginning + empty_list)
    for block in blocks:
        for i in range(0, len(block), _PAIRS_AT_ONCE):
            pairs = list(zip(*block[i : i + _PAIRS_AT_ONCE].T.tolist(), strict=True))
            # What appends them to the list that is there already.
            write(pickle_opcodes(pairs).removeprefix(empty_list))
    write(b".")
