"""The lengths of all packs, read from an index, even a damaged one, or inferred from the data.

No file is trusted: each source is checked from end to end when it is opened; only then does it give lengths.

Inference from the data (``infer_lengths``): ``.seq.bin`` tells how many packs there are and where each sequence starts
in its pack, so only the length of each pack's last sequence is missing. A pack may begin at token ``p`` only if a
sequence may end before ``p`` and before each later start of the pack. Packs follow one another, and a pack is longer
than its last start. So pack k begins at one of a set of tokens, and ``begin[k + 1] > begin[k] + last_start[k]``. If two
lists of begins satisfy this, then so do their smaller begins, pack by pack, and their larger begins. Hence there is an
earliest solution and a latest one; each is found by a greedy pass over the tokens. The lengths are certain if and only
if the two are equal. Nothing is guessed, and memory does not grow with the shard.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import TOKEN_DTYPES, ShardPaths
from megatron_sft_idx.layout.files import IDX_HEADER, IDX_HEADER_NBYTES, MAX_CAPACITY, idx_places, pack_idx_header
from megatron_sft_idx.shard.writer import CHUNK_PACKS, PackChunk
from megatron_sft_idx.storage import Array, OutputFile, PreadArray, as_bytes, open_array, open_regular
from megatron_sft_idx.storage.progress import Advance, Watch

_CHUNK = 1 << 16  # sequences
_SPAN = 1 << 18  # tokens whose flags are held at once
_T = TypeVar("_T")
# Of some whole packs: the starts of their sequences, uint32, and int64 [packs + 1] offsets of each pack's first start.
_PackStarts: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64]]
# From (begin, end) to bool [end - begin]: whether a sequence may end right before token begin + i; true at token 0.
_MayEnd: TypeAlias = Callable[[int, int], NDArray[np.bool_]]


class RepeatableChunks(Generic[_T]):
    """Chunks about all packs, in order, to be iterated over many times; ``origin`` names their source in messages."""

    def __init__(self, origin: str, num_packs: int, chunks: Callable[[], Iterator[_T]]) -> None:
        self.origin, self.num_packs, self._chunks = origin, num_packs, chunks

    def __iter__(self) -> Iterator[_T]:
        return self._chunks()


# Lengths in tokens, int64.
PackLengths: TypeAlias = RepeatableChunks[NDArray[np.int64]]


def idx_lengths(path: str, tokens_nbytes: int) -> tuple[PackLengths, np.dtype[Any]]:
    """The lengths in a ``.idx``, whether this package or Megatron wrote it, and the dtype of the tokens.

    Raises:
        CorruptShardError: it is not the index of a ``.bin`` of ``tokens_nbytes`` bytes (rules I1, P1, F2).
    """
    nbytes = os.stat(path).st_size

    def corrupt(offset: int, what: str, rule: str = "I1") -> CorruptShardError:
        detail = f"{what}; this file of {nbytes} bytes is damaged, or not the index of the .bin beside it"
        return CorruptShardError(path, offset, rule, detail)

    with open_regular(path) as file:
        raw = file.read(IDX_HEADER_NBYTES)
    if len(raw) < IDX_HEADER_NBYTES:
        raise corrupt(len(raw), f"file ends after {len(raw)} bytes, an index has {IDX_HEADER_NBYTES} or more")
    _, _, code, num_packs, documents = IDX_HEADER.unpack(raw)
    if code not in TOKEN_DTYPES:
        raise corrupt(17, f"dtype code {code}, expected 4 (int32) or 8 (uint16)")
    if raw[:17] != pack_idx_header(code, 0)[:17]:
        raise corrupt(0, f"begins with {raw[:17]!r}, which is not Megatron's index of version 1")
    # Python's numbers do not overflow, so a damaged count near 2^63 is an error here like any other.
    if nbytes != (expected := IDX_HEADER_NBYTES + 12 * num_packs + 8 * documents):
        raise corrupt(18, f"{num_packs} packs and {documents} documents take {expected} bytes")
    _, base, _ = idx_places(num_packs)
    stored, pointers = (
        open_array(path, np.dtype(dtype), num_packs, nbytes=nbytes, offset=offset, backend="pread")
        for dtype, offset in (("<i4", IDX_HEADER_NBYTES), ("<i8", base))
    )

    def chunks() -> Iterator[NDArray[np.int64]]:
        for first in range(0, num_packs, CHUNK_PACKS):
            yield stored[first : first + CHUNK_PACKS].astype(np.int64)

    first = end = 0
    for lengths in chunks():
        for bad in np.flatnonzero(lengths <= 0)[:1].tolist():
            at, what = IDX_HEADER_NBYTES + 4 * (first + bad), f"pack {first + bad} has length {lengths[bad]}"
            raise corrupt(at, f"{what}, expected 1 or more", "P1")
        begins = _native.offsets_from_lengths(lengths, TOKEN_DTYPES[code].itemsize, end)
        found = pointers[first : first + len(lengths)]
        for bad in np.flatnonzero(found != begins[:-1])[:1].tolist():
            what = f"pack {first + bad} begins at byte {found[bad]}, by the lengths before it at {begins[bad]}"
            raise corrupt(base + 8 * (first + bad), what)
        first, end = first + len(lengths), int(begins[-1])
    if end != tokens_nbytes:
        raise corrupt(IDX_HEADER_NBYTES, f"packs of {end} bytes in all, .bin has {tokens_nbytes}", "F2")
    return RepeatableChunks(".idx", num_packs, chunks), TOKEN_DTYPES[code]


def offset_lengths(path: str, offset: int, num_packs: int) -> PackLengths:
    """The differences of the ``num_packs`` + 1 offsets from byte ``offset`` of a ``.seq.idx`` on.

    Raises:
        CorruptShardError: the offsets do not begin with 0 or do not ascend (rule O2), or the file ends before them.
    """
    nbytes = os.stat(path).st_size
    if offset + 8 * (num_packs + 1) > nbytes:
        raise CorruptShardError(path, nbytes, "F2", "the file ends before its token offsets do")
    offsets = open_array(path, np.dtype("<i8"), num_packs + 1, nbytes=nbytes, offset=offset, backend="pread")
    if (first := int(offsets[:1][0])) != 0:
        raise CorruptShardError(path, offset, "O2", f"token offsets begin with {first}, expected 0")

    def chunks() -> Iterator[NDArray[np.int64]]:
        for first in range(0, num_packs, CHUNK_PACKS):
            lengths = np.diff(offsets[first : min(first + CHUNK_PACKS, num_packs) + 1])
            for bad in np.flatnonzero((lengths <= 0) | (lengths > MAX_CAPACITY))[:1].tolist():
                detail = f"token offsets give pack {first + bad} a length of {lengths[bad]}"
                raise CorruptShardError(path, offset + 8 * (first + bad), "O2", detail)
            yield lengths

    for _ in chunks():
        pass
    return RepeatableChunks(".seq.idx", num_packs, chunks)


class StartsFile:
    """A ``.seq.bin``, whose zeros are the begins of packs: the first sequence of a pack starts at 0, no other one does.

    Raises:
        CorruptShardError: the size is no multiple of 4, the first start is not 0, or the starts of a pack do not ascend
            (rules F2, P2, P3).
    """

    def __init__(self, path: str) -> None:
        nbytes = os.stat(path).st_size
        if nbytes % 4:
            raise CorruptShardError(path, nbytes, "F2", f"file has {nbytes} bytes, starts have 4 each; restore it")
        self.path, self.num_sequences, self.num_packs = path, nbytes // 4, 0
        self.array: Array = open_array(path, np.dtype("<u4"), self.num_sequences, nbytes=nbytes, backend="pread")
        before = np.zeros(1, np.uint32)
        for first in range(0, self.num_sequences, _CHUNK):
            starts = np.concatenate([before, self.array[first : first + _CHUNK]])
            if not first and starts[1]:
                raise CorruptShardError(path, 0, "P2", f"the first start is {starts[1]}, expected 0; restore the file")
            for at in np.flatnonzero((starts[1:] != 0) & (starts[1:] <= starts[:-1]))[:1].tolist():
                what = f"a start of {starts[at + 1]} after {starts[at]}, expected a larger one or 0; restore the file"
                raise CorruptShardError(path, 4 * (first + at), "P3", what)
            self.num_packs += int((starts[1:] == 0).sum())
            before = starts[-1:]

    def packs(self) -> Iterator[_PackStarts]:
        """All packs, some at a time."""
        unfinished = np.empty(0, np.uint32)
        for first in range(0, self.num_sequences, _CHUNK):
            starts = np.concatenate([unfinished, self.array[first : first + _CHUNK]], dtype=np.uint32)
            offsets = np.flatnonzero(starts == 0)
            yield starts, offsets
            unfinished = starts[offsets[-1] :]
        yield unfinished, np.array([0, len(unfinished)] if len(unfinished) else [0])

    def backwards(self) -> Iterator[_PackStarts]:
        """All packs mirrored: the last pack first, and each start counted back from the last start of its pack."""
        unfinished = np.empty(0, np.uint32)
        for stop in range(self.num_sequences, 0, -_CHUNK):
            starts = np.concatenate([self.array[max(0, stop - _CHUNK) : stop], unfinished], dtype=np.uint32)
            edges = np.flatnonzero(starts == 0)
            unfinished = starts
            if len(edges):
                whole, offsets = starts[edges[0] :], np.append(edges, len(starts)) - edges[0]
                last_starts = np.repeat(whole[offsets[1:] - 1], np.diff(offsets))
                yield (last_starts - whole)[::-1].copy(), (len(whole) - offsets)[::-1].copy()
                unfinished = starts[: edges[0]]


def join_starts(lengths: PackLengths, starts: StartsFile) -> RepeatableChunks[PackChunk]:
    """Packs by their lengths and their numbers of sequences. CorruptShardError if the two differ in number of packs."""
    if lengths.num_packs != starts.num_packs:
        raise CorruptShardError(
            starts.path,
            0,
            "P2",
            f"{starts.num_packs} packs begin here (starts of 0), {lengths.num_packs} by {lengths.origin};"
            " one of the two is damaged or of another shard: restore it",
        )

    def chunks() -> Iterator[PackChunk]:
        counts, num_sequences = (np.diff(offsets) for _, offsets in starts.packs()), np.empty(0, np.int64)
        for chunk in lengths:
            while len(num_sequences) < len(chunk):
                num_sequences = np.concatenate([num_sequences, next(counts)])
            yield PackChunk(chunk, num_sequences[: len(chunk)])
            num_sequences = num_sequences[len(chunk) :]

    return RepeatableChunks(lengths.origin, lengths.num_packs, chunks)


# ---- from the data alone ----


def infer_lengths(
    paths: ShardPaths, starts: StartsFile, dtypes: tuple[np.dtype[Any], np.dtype[Any]], eod_id: int | None, watch: Watch
) -> PackLengths:
    """Lengths from the data, if only one way to split the tokens is possible: a sequence ends on a mask of 0 (rule P6).

    Args:
        paths: of the shard, whose tokens and masks must be there.
        starts: of all packs.
        dtypes: of tokens and masks.
        eod_id: the id that every sequence ends with, and that may stand elsewhere too; None if it is not known.
        watch: shows the progress of both passes.

    Raises:
        FormatError: there is no way to split the tokens, or more than one.
    """
    prefix, num_packs, num_tokens = paths.prefix, starts.num_packs, os.stat(paths.tokens).st_size // dtypes[0].itemsize
    tokens, loss = (
        open_array(path, dtype, num_tokens, nbytes=os.stat(path).st_size, backend="pread")
        for path, dtype in zip((paths.tokens, paths.loss), dtypes, strict=True)
    )
    if num_tokens and not num_packs:
        raise FormatError(f"{prefix}: .bin has {num_tokens} tokens and .seq.bin no sequence (rule P2); restore it")

    def may_end(start: int, stop: int) -> NDArray[np.bool_]:
        before = slice(max(start - 1, 0), stop - 1)
        flags: NDArray[np.bool_] = loss[before] == 0
        if eod_id is not None:
            flags &= tokens[before] == eod_id
        return flags if start else np.concatenate([[True], flags])

    remedy = (
        "all that is known is that the mask is 0 where a sequence ends. Pass --eod-id where every sequence ends with"
        " the same id, or restore .idx or .seq.idx from a copy"
    )
    if eod_id is not None:
        remedy = f"every sequence was taken to end with id {eod_id} and mask 0. Restore .idx or .seq.idx from a copy"
        remedy += ", or build the shard again"
    pack = after = 0
    with tempfile.NamedTemporaryFile() as named, contextlib.closing(OutputFile(named.name, append=True)) as spill:
        with watch("placing packs", num_tokens) as advance:
            for earliest, last_starts in _earliest_begins(may_end, starts.packs(), num_tokens):
                if not pack and earliest[0]:
                    break  # the first pack begins where the file does, or nowhere
                spill.write(as_bytes(earliest))
                pack, before, after = pack + len(earliest), after, int(earliest[-1] + last_starts[-1]) + 1
                advance(after - before)
        if pack < num_packs:
            raise FormatError(f"{prefix}: pack {pack} can begin nowhere from token {after} on; {remedy}")
        if after > num_tokens or (after and not may_end(num_tokens, num_tokens + 1)[0]):
            raise FormatError(f"{prefix}: the last pack cannot end at token {num_tokens}, where .bin does; {remedy}")
        # The temporary file is removed with the block; its open descriptor goes on reading it.
        begins = PreadArray(named.name, np.dtype(np.int64), num_packs, 0)
    with watch("placing packs from the end", num_tokens) as advance:
        num_uncertain, example = _uncertain(begins, starts, num_tokens, may_end, advance)
    if example:
        pack, first, last = example
        raise FormatError(
            f"{prefix}: pack {pack - 1} may end at token {first}, at token {last} and perhaps between them, and"
            f" {num_uncertain} of {num_packs - 1} ends between packs are not certain; {remedy}"
        )

    def chunks() -> Iterator[NDArray[np.int64]]:
        for first in range(0, num_packs, CHUNK_PACKS):
            edges = begins[first : first + CHUNK_PACKS + 1]
            lengths = np.diff(edges if first + CHUNK_PACKS < num_packs else np.append(edges, num_tokens))
            if (longest := int(lengths.max())) > MAX_CAPACITY:
                raise FormatError(f"{prefix}: a pack of {longest} tokens, at most {MAX_CAPACITY} fit (rule H6)")
            yield lengths

    return RepeatableChunks("masks" if eod_id is None else f"masks and end-of-sequence id {eod_id}", num_packs, chunks)


def _uncertain(
    begins: PreadArray, starts: StartsFile, num_tokens: int, may_end: _MayEnd, advance: Advance
) -> tuple[int, tuple[int, int, int] | None]:
    """How many packs can begin later than their earliest begins; of the first such pack number, earliest and latest.

    In the mirrored file the latest begins are the earliest ones, so the same search finds them. The first pack is left
    out: it can begin nowhere else.
    """

    def may_end_mirrored(start: int, stop: int) -> NDArray[np.bool_]:
        return np.ascontiguousarray(may_end(num_tokens + 1 - stop, num_tokens + 1 - start)[::-1])

    stop, end, num_uncertain = starts.num_packs, num_tokens, 0
    example: tuple[int, int, int] | None = None
    for mirrored, last_starts in _earliest_begins(may_end_mirrored, starts.backwards(), num_tokens, 1):
        latest = (num_tokens - mirrored - last_starts)[: stop - 1]
        if not len(latest):
            break
        earliest = begins[stop - len(latest) : stop][::-1]
        if len(unlike := np.flatnonzero(latest != earliest)):
            num_uncertain += len(unlike)
            example = stop - 1 - int(unlike[-1]), int(earliest[unlike[-1]]), int(latest[unlike[-1]])
        stop -= len(latest)
        advance(end - int(latest[-1]))
        end = int(latest[-1])
    assert stop <= 1, "the earliest split is one too"
    return num_uncertain, example


def _earliest_begins(
    may_end: _MayEnd, packs: Iterable[_PackStarts], num_tokens: int, least: int = 0
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Earliest begins of consecutive packs, the first at token ``least`` or later, and with them their last starts.

    It ends before the first pack that can begin nowhere.
    """
    base, flags = 0, np.empty(0, np.bool_)  # of the tokens from ``base`` on
    for starts, offsets in packs:
        last_starts, placed = starts[offsets[1:] - 1].astype(np.int64), 0
        while placed < len(last_starts):
            begins = base + _native.first_fits(flags, starts, offsets[placed:], least - base)
            if len(begins):
                of_these = last_starts[placed : placed + len(begins)]
                placed, least = placed + len(begins), int(begins[-1] + of_these[-1]) + 1
                yield begins, of_these
            if placed < len(last_starts):
                # The next pack does not fit into the flags: go on with flags from its first possible begin on.
                last_start = int(last_starts[placed])
                least = max(least, base + len(flags) - last_start)
                if least + last_start >= num_tokens:
                    return
                base, flags = least, may_end(least, min(least + max(_SPAN, last_start + 1), num_tokens))
