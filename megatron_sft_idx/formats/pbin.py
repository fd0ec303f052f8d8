"""The byte layout of a ``.pbin``, Modalities' file of tokenised documents, in its four generations.

::

    header | data: the tokens of all documents end to end | index: pickled [(offset, length), ...], in bytes

The header begins with the length of the data in bytes (8 bytes). From the second generation on, the size of a token
follows (4 bytes with the number 1, 2 or 4). There is no magic, no version and no checksum: the layout must be inferred.
The project's history (Modalities/modalities, ``create_packed_data.py``) has four layouts:

=== ============== ====== ========== =============== ============================== ========
no. written from   header byte order token           offsets count from             first is
=== ============== ====== ========== =============== ============================== ========
1   December 2023  8      big        4 bytes         the file's start               8
2   January 2024   12     big        1, 2 or 4 bytes the file's start               12
3   April 2024     12     little     1, 2 or 4 bytes the file's start               12
4   June 2024      12     little     1, 2 or 4 bytes the data's start               0
=== ============== ====== ========== =============== ============================== ========

With the right header size and byte order, the data ends inside the file, followed by a pickle up to the end of the
file. Wrong ones give astronomical lengths, or no pickle (``possible_framings``). Generations 3 and 4 differ in the
first offset in the index. A file with an empty index counts as generation 4.

Two kinds of files are not supported: files of the first experiments of November 2023, with a header of 4 bytes; and
files with tokens of 3 bytes. A few development versions of December 2024 wrote these for large vocabularies, but no
version ever read them.

Every writer of the format only appends, so documents tile the data in the order of the index. This reveals the damage
of Modalities' merge tool, which shifts the index entries of each further file by 12 bytes (a header) too little
(``DocumentIndex``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import (
    MaskRule,
    PackedReader,
    PackedSpec,
    PackedWriter,
    file_identity,
    first_bad_range,
    joined_ranges,
    recogniser,
)
from megatron_sft_idx.formats.pickles import read_pairs, write_pairs
from megatron_sft_idx.layout.files import MAX_CAPACITY
from megatron_sft_idx.packs.run import PackRun, first_true, run_of_sequences
from megatron_sft_idx.storage import as_bytes, open_array, open_regular
from megatron_sft_idx.storage.publish import Kind, head_of

ByteOrder = Literal["big", "little"]

# The beginning of a pickled list: in protocol 2 and later, 0, and 1.
_LIST_HEADS = (b"\x80", b"(l", b"]")
_LENGTH_NBYTES = 8
_HEADER_NBYTES = 12  # of all generations but the first
_TOKEN_NBYTES = (1, 2, 4)
# The generation for each possible offset of a first document, by byte order and size of the header, newest first.
_GENERATIONS: dict[tuple[ByteOrder, int], dict[int, int]] = {
    ("little", _HEADER_NBYTES): {0: 4, _HEADER_NBYTES: 3},
    ("big", _HEADER_NBYTES): {_HEADER_NBYTES: 2},
    ("big", _LENGTH_NBYTES): {_LENGTH_NBYTES: 1},
}


class Framing(NamedTuple):
    """The positions of header, data and index in a file, which are known without reading the index.

    Attributes:
        byte_order: byte order of the header and the tokens.
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
        """Byte offset of the end of the data and the beginning of the index."""
        return self.header_nbytes + self.data_nbytes

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the data."""
        return self.data_nbytes // self.token_nbytes

    def __str__(self) -> str:
        return (
            f"a {self.header_nbytes}-byte {self.byte_order}-endian header states {self.data_nbytes} bytes of data with"
            f" {self.token_nbytes} bytes per token, followed by a pickle up to the end"
        )

    def open_tokens(self, path: str) -> NDArray[Any]:
        """Map the data as unsigned integers in the file's byte order, [tokens]."""
        # Not with newbyteorder(): kernels would reject its dtype, which contains an explicit byte order.
        dtype = np.dtype(f"{'<' if self.byte_order == 'little' else '>'}u{self.token_nbytes}")
        return np.asarray(open_array(path, dtype, self.num_tokens, nbytes=self.file_nbytes, offset=self.header_nbytes))


def encode_header(data_nbytes: int, token_nbytes: int) -> bytes:
    """Encode the header of the current generation."""
    return data_nbytes.to_bytes(_LENGTH_NBYTES, "little") + token_nbytes.to_bytes(4, "little")


def possible_framings(path: str) -> list[Framing]:
    """Return the framings with which a file could be a ``.pbin``, newest first: usually one, for other files none.

    This takes only a few reads.

    Raises:
        FormatError: it is not a regular file.
        OSError: it cannot be read.
    """
    framings = []
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
                framings.append(Framing(order, header_nbytes, token_nbytes, data_nbytes, size))
    return framings


def require_framings(path: str) -> list[Framing]:
    """Return ``possible_framings``, at least one. FormatError: there is none; describes the actual content."""
    if framings := possible_framings(path):
        return framings
    raise FormatError(
        f"{path}: not a .pbin of any generation: {os.path.getsize(path)} bytes that begin with"
        f" {head_of(path, _HEADER_NBYTES)!r}, expected a header with the length of the data, and a pickled index after"
        " the data; the file is truncated, its writer was stopped, or it is another kind of file"
    )


class DocumentIndex(NamedTuple):
    """The checked index of one file: the positions of its documents, in tokens from the start of the data.

    ``modalities data merge_packed_data`` joins files and writes a wrong index: it shifts the entries of each further
    file by the preceding data *minus 12 bytes* per file, the size of a header that is not there. So every file except
    the first seems to begin inside the last document of the previous one. The lengths and the data are right. Documents
    tile the data, so their starts follow from the lengths.

    Attributes:
        framing: framing of the file.
        first_offset: the offset in the index for the data's first byte.
        starts: int64 [documents].
        lengths: int64 [documents]; a document may be empty.
        num_moved: number of documents whose start was wrong in the file and is corrected here.
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
        """Yield sentences for ``PackedReader.notes``."""
        yield f".pbin of generation {self.generation} of 4: {self.framing}"
        yield "the file has no loss masks: as requested, every token except the first of each document is trained on"
        if self.num_moved:
            yield f"{self.num_moved} documents were located by their lengths, because merging had damaged the index"
        if empty := int(np.count_nonzero(self.lengths == 0)):
            yield f"{empty} documents without tokens were left out"
        if unused := self.framing.num_tokens - int(self.lengths.sum()):
            yield f"{unused} tokens outside all documents were left out"


def read_document_index(path: str, *, repair_merge: bool = False) -> DocumentIndex:
    """Read and check the index, in one pass and with about 60 bytes of memory per document.

    Args:
        path: path of the file.
        repair_merge: for a file with merge damage, find documents by their lengths, instead of raising an error.

    Raises:
        FormatError: not a ``.pbin``; an index that is not a list of documents inside the data, in order; or merge
            damage without ``repair_merge``.
        OSError: the file is unreadable.
    """
    errors = []
    for framing in require_framings(path):
        try:
            return _checked_index(path, framing, repair_merge)
        except FormatError as error:
            errors.append(error)
    raise errors[0]  # of the newest framing; there is hardly ever another


def _checked_index(path: str, framing: Framing, repair_merge: bool) -> DocumentIndex:
    """Do the work of ``read_document_index`` for a file with this framing."""
    begin, size, data_nbytes = framing.index_offset, framing.file_nbytes, framing.data_nbytes
    index = open_array(path, np.dtype(np.uint8), size - begin, nbytes=size, offset=begin)
    pairs = read_pairs(path, np.asarray(index))
    offsets, lengths = pairs[:, 0], pairs[:, 1]
    base = _first_offset(path, framing, offsets)
    # No sum may overflow: each length is checked before the addition, and the total is first computed in floats.
    too_long = (lengths < 0) | (lengths > data_nbytes)
    total = float(lengths.sum(dtype=np.float64))
    if too_long.any() or total > 2 * data_nbytes:
        document = int(np.argmax(too_long))
        longest = f"document {document} has {lengths[document]} bytes and " if too_long.any() else ""
        raise FormatError(
            f"{path}: {longest}all documents together have {total:.0f} bytes, but the data has {data_nbytes}; the"
            " index belongs to another file: create it again"
        )
    tiled_starts = np.cumsum(lengths) - lengths
    early_by = None
    if int(lengths.sum()) == data_nbytes:
        early_by = _merge_damage(framing, offsets, tiled_starts + base)
    if early_by is None:
        starts = offsets - base
        if (misplaced := first_bad_range(starts, lengths, data_nbytes)) is not None:
            raise FormatError(
                f"{path}: document {misplaced} has {lengths[misplaced]} bytes at offset {offsets[misplaced]}; expected"
                f" to begin after the previous one and to end within {data_nbytes} bytes of data; the index is damaged"
                " or belongs to another file: create it again"
            )
    elif repair_merge:
        starts = tiled_starts
    else:
        first = int(np.argmax(early_by != 0))
        raise FormatError(
            f"{path}: the index was damaged by merging: according to it, document {first} begins {early_by[first]}"
            f" bytes before the end of the previous one, and {np.count_nonzero(early_by)} documents in total begin too"
            f" early, by at most {early_by.max()} bytes. Modalities' merge_packed_data loses {_HEADER_NBYTES} bytes"
            " per file in the index, but data and lengths are intact: pass repair_merge=True (--repair-merge) to"
            " locate the documents by their lengths, or merge with another tool"
        )
    nbytes = framing.token_nbytes
    if (uneven := first_true((starts % nbytes) | (lengths % nbytes) != 0)) is not None:
        raise FormatError(
            f"{path}: document {uneven} has {lengths[uneven]} bytes from {starts[uneven]} on, which is not a multiple"
            f" of the {nbytes} bytes of a token"
        )
    num_moved = 0 if early_by is None else int(np.count_nonzero(early_by))
    return DocumentIndex(framing, base, starts // nbytes, lengths // nbytes, num_moved)


def _first_offset(path: str, framing: Framing, offsets: NDArray[np.int64]) -> int:
    """Return the index's offset for the data's first byte. FormatError: no generation uses this offset."""
    generations = _GENERATIONS[framing.byte_order, framing.header_nbytes]
    newest = next(iter(generations))
    if not len(offsets):
        return newest
    first = int(offsets[0])
    if first in generations:
        return first
    # If the first files of a merge are empty, its first document is shifted as well.
    if newest == 0 and first < 0 and first % _HEADER_NBYTES == 0:
        return newest
    expected = " or ".join(map(str, generations))
    raise FormatError(
        f"{path}: its first document is at {first}, expected {expected}; the index belongs to another file"
    )


def _merge_damage(
    framing: Framing, offsets: NDArray[np.int64], tiled_offsets: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return by how many bytes each document begins too early in an index damaged by merging; None for any other.

    In a damaged index, every offset is zero or more headers before the one that follows from the lengths, and some
    offset at least one header. This is impossible in a good index: two of its documents would share bytes.
    """
    # Within these bounds the difference cannot overflow.
    if ((offsets < -framing.file_nbytes) | (offsets > framing.file_nbytes)).any():
        return None
    early_by = tiled_offsets - offsets
    is_damage = early_by.any() and ((early_by >= 0) & (early_by % _HEADER_NBYTES == 0)).all()
    return early_by if is_damage else None


@recogniser
def recognise(path: str) -> bool:
    """Return whether a file may be a ``.pbin``, from its framing."""
    return bool(possible_framings(path))


@recogniser
def _is_readable(path: str) -> bool:
    """Return whether a file is a ``.pbin`` with an index that fits its data; the format has no magic."""
    return bool(read_document_index(path, repair_merge=True))


def native_tokens(path: str, position: int, tokens: NDArray[Any]) -> NDArray[Any]:
    """Return tokens of a file as uint16 or int32 in native byte order; a view if nothing has to be converted.

    Args:
        path: path of the file, for errors.
        position: number of the pack or block, for errors.
        tokens: tokens as in the file.
        tokens: as they are in the file.

    Raises:
        SequenceError: an id does not fit in int32.
    """
    if tokens.dtype.itemsize <= 2:
        return tokens.astype(np.uint16, copy=False)
    native = tokens.astype(np.uint32, copy=False).view(np.int32)
    if len(native) and native.min() < 0:
        raise SequenceError(
            path, position, f"has id {tokens.max()}, expected at most {2**31 - 1}, because no vocabulary is larger"
        )
    return native


class Reader(PackedReader):
    """The documents of a ``.pbin`` of any generation.

    Args:
        mask_alignment: must be "label", because the file has no masks.
        mask_rule: which tokens are trained on. "all" trains every token of a document except its first, which nothing
            predicts. There is no default, because training the questions of chats like their answers is rarely
            intended.
        repair_merge: read a file whose index was damaged by ``merge_packed_data`` (see ``DocumentIndex``).
    """

    label_only = "a .pbin has no masks, so mask alignment {} does not apply; leave it out"

    def _open(self, *, mask_rule: MaskRule | None = None, repair_merge: bool = False) -> None:
        if mask_rule != "all":
            raise FormatError(
                f"{self.path}: a .pbin has no loss masks{'' if mask_rule is None else f', and no rule {mask_rule!r}'};"
                ' pass mask_rule="all" (--mask-rule all) to train on every token, including the questions, or convert'
                " the original data instead"
            )
        index = read_document_index(self.path, repair_merge=repair_merge)
        if len(index.lengths) and index.lengths.max() > MAX_CAPACITY:
            longest = int(np.argmax(index.lengths))
            reason = f"has {index.lengths[longest]} tokens, expected at most {MAX_CAPACITY} (rule P1)"
            raise SequenceError(self.path, longest, reason)
        # Packs hold at least one token.
        self._starts = index.starts[index.lengths > 0]
        self._lengths = index.lengths[index.lengths > 0]
        self.num_packs, self._token_offsets = len(self._lengths), np.append(0, np.cumsum(self._lengths))
        self._tokens = index.framing.open_tokens(self.path)
        small = self._tokens.dtype.itemsize <= 2
        self._dtypes = np.dtype(np.uint16 if small else np.int32), np.dtype(np.uint8)
        self.identity = file_identity(self.path) + " repaired" * (index.num_moved > 0)
        self.notes += index.notes()
        longest, metadata = int(self._lengths.max(initial=0)), {"generation": index.generation, "mask_rule": "all"}
        counts = self.num_packs, int(self._token_offsets[-1]), longest
        self.spec = self._make_spec(*counts, metadata={"pbin": metadata})

    def _run(self, first: int, last: int) -> PackRun:
        lengths, starts = self._lengths[first:last], self._starts[first:last]
        tokens = native_tokens(self.path, first, joined_ranges(self._tokens, starts, starts + lengths))
        return run_of_sequences(tokens, lengths)


class Writer(PackedWriter):
    """A ``.pbin`` of the current generation; every sequence becomes a document.

    It keeps 8 bytes per sequence in memory until the index is written. ``lossy`` is required, because loss masks and
    the grouping of sequences into packs are always lost.
    """

    format = "pbin"
    reader, kind = Reader, Kind("a Modalities .pbin", _is_readable)

    def _begin(self, spec: PackedSpec) -> None:
        if not self._allow_loss:
            raise FormatError(
                f"{self._path}: a .pbin stores no loss masks and no packs, so every sequence becomes a document that"
                " is trained completely; pass lossy=True (--lossy) if you want that"
            )
        token_nbytes = spec.token_dtype.itemsize
        self._dtype = np.dtype(f"<u{token_nbytes}")
        self.lost["masks"] = "loss masks: the format stores none, so every token will be trained on"
        self._lengths: list[NDArray[np.int64]] = []
        self._file = self._make_output(token_nbytes * spec.num_tokens + 8 * spec.num_sequences).open()
        self._file.write(encode_header(0, token_nbytes))

    def write(self, run: PackRun) -> PackRun:
        """Append packs, and return their sequences as documents. Errors as in ``PackedWriter.write``."""
        super().write(run)
        return run_of_sequences(run.tokens, run.sequence_lengths())

    def _append(self, run: PackRun) -> None:
        self._require_ids_fit(run, self._dtype)
        self._file.write(as_bytes(np.ascontiguousarray(run.tokens, self._dtype)))
        self._lengths.append(run.sequence_lengths())
        if (run.pack_sequences > 1).any():
            self.lost["packs"] = "packs: every sequence becomes a separate document"

    def _finish(self) -> None:
        data_nbytes = self._file.nbytes - _HEADER_NBYTES
        write_pairs(self._file.write, self._pairs())
        # Last, as in Modalities: a header without the length of the data marks an unfinished file.
        self._file.write_at(encode_header(data_nbytes, self._dtype.itemsize), 0)
        self._file.close()

    def reread(self) -> Reader:
        """Return a reader of the output, with every token trained."""
        return Reader(self._output.temporary, mask_rule="all")

    def _pairs(self) -> Iterator[NDArray[np.int64]]:
        offset = 0
        for lengths in self._lengths:
            nbytes = lengths * self._dtype.itemsize
            ends = np.cumsum(nbytes) + offset
            yield np.stack([ends - nbytes, nbytes], axis=1)
            offset = int(ends[-1]) if len(ends) else offset
