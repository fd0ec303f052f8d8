"""Lengths of packs as files tell them: an index, even a damaged one, or, where none is left, the data alone.

Nothing in these files is trusted. Each source is checked from end to end when it is made, and streams afterwards.

From the data: only the last sequence of each pack has a length that nobody wrote down. ``.seq.bin`` tells how many
packs there are and where the sequences start inside each. A pack may begin at token ``p`` only where a sequence may end
before ``p`` and before every inner start of the pack; the packs follow one another, and each is longer than its last
start. So pack k begins in a set of places of its own, and beginnings keep their distance: ``b[k + 1] > b[k] + last
start``. Of two solutions of such a system the smaller beginning everywhere is a solution too, and so is the larger.
Hence there is an earliest solution and a latest one, each found greedily in one pass over the tokens, and the split is
the only possible one exactly if the two are equal. Nothing is guessed, and memory does not grow with the shard.
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
# Starts of whole packs, uint32, and int64 offsets of each one's.
_Packs: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64]]
# Flags of positions from one to another: set at p where a sequence may end right before token p, and at 0.
_MayEnd: TypeAlias = Callable[[int, int], NDArray[np.bool_]]


class Repeated(Generic[_T]):
    """Chunks that speak of all packs in order, again and again; ``origin`` says whence they come, for people."""

    def __init__(self, origin: str, num_packs: int, chunks: Callable[[], Iterator[_T]]) -> None:
        self.origin, self.num_packs, self._chunks = origin, num_packs, chunks

    def __iter__(self) -> Iterator[_T]:
        return self._chunks()


# In tokens, int64.
Lengths: TypeAlias = Repeated[NDArray[np.int64]]


def idx_lengths(path: str, tokens_nbytes: int) -> tuple[Lengths, np.dtype[Any]]:
    """The lengths in a ``.idx`` made by this package, or by Megatron itself for the same packs; and the token dtype.

    CorruptShardError: it is no index of a ``.bin`` of ``tokens_nbytes`` bytes (rules I1, P1, F2).
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
    # Python's numbers do not overflow, so a count near 2^63 is only one that does not fit the file.
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
    return Repeated(".idx", num_packs, chunks), TOKEN_DTYPES[code]


def offset_lengths(path: str, offset: int, num_packs: int) -> Lengths:
    """The lengths between ``num_packs`` + 1 offsets from byte ``offset`` of a ``.seq.idx`` on, which may be damaged.

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
    return Repeated(".seq.idx", num_packs, chunks)


class Starts:
    """``.seq.bin``: every pack's first sequence starts at 0 and no other one does, so its zeros are the packs.

    Raises:
        CorruptShardError: a size that is not of uint32, a first start that is not 0, or one that is not above the one
            before it in its pack (rules F2, P2, P3).
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

    def packs(self) -> Iterator[_Packs]:
        """All packs: starts of some, which are known to ascend in each, and int64 offsets of each one's."""
        held = np.empty(0, np.uint32)
        for first in range(0, self.num_sequences, _CHUNK):
            held = np.concatenate([held, self.array[first : first + _CHUNK]], dtype=np.uint32)
            offsets = np.flatnonzero(held == 0)
            yield held, offsets
            held = held[offsets[-1] :]
        yield held, np.array([0, len(held)] if len(held) else [0])

    def backwards(self) -> Iterator[_Packs]:
        """The same packs from the end: the last one first, and starts counted back from each one's last."""
        held = np.empty(0, np.uint32)
        for stop in range(self.num_sequences, 0, -_CHUNK):
            held = np.concatenate([self.array[max(0, stop - _CHUNK) : stop], held], dtype=np.uint32)
            edges = np.flatnonzero(held == 0)
            if len(edges):
                whole, offsets = held[edges[0] :], np.append(edges, len(held)) - edges[0]
                reaches = np.repeat(whole[offsets[1:] - 1], np.diff(offsets))
                yield (reaches - whole)[::-1].copy(), (len(whole) - offsets)[::-1].copy()
                held = held[: edges[0]]


def started(lengths: Lengths, starts: Starts) -> Repeated[PackChunk]:
    """Packs by lengths from one file and starts of another. CorruptShardError where they differ in number."""
    if lengths.num_packs != starts.num_packs:
        raise CorruptShardError(
            starts.path,
            0,
            "P2",
            f"{starts.num_packs} packs begin here (starts of 0), {lengths.num_packs} by {lengths.origin};"
            " one of the two is damaged or of another shard: restore it",
        )

    def chunks() -> Iterator[PackChunk]:
        counts, held = (np.diff(offsets) for _, offsets in starts.packs()), np.empty(0, np.int64)
        for some in lengths:
            while len(held) < len(some):
                held = np.concatenate([held, next(counts)])
            yield PackChunk(some, held[: len(some)])
            held = held[len(some) :]

    return Repeated(lengths.origin, lengths.num_packs, chunks)


# ---- from the data alone ----


def infer_lengths(
    paths: ShardPaths, starts: Starts, dtypes: tuple[np.dtype[Any], np.dtype[Any]], eod_id: int | None, watch: Watch
) -> Lengths:
    """Lengths of all packs from the data alone, where it leaves no choice: a sequence ends on a mask of 0 (rule P6).

    Args:
        paths: of the shard, whose tokens and masks are there.
        starts: of all packs.
        dtypes: of tokens and masks.
        eod_id: the id that every sequence ends with, and that may stand elsewhere too; None where it is not known.
        watch: is told how far the search is.

    Raises:
        FormatError: there is more than one way to split the tokens, or none.
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
            for found, reaches in _places(may_end, starts.packs(), num_tokens):
                if not pack and found[0]:
                    break  # the first pack has no other place than the file's beginning
                spill.write(as_bytes(found))
                pack, before, after = pack + len(found), after, int(found[-1] + reaches[-1]) + 1
                advance(after - before)
        if pack < num_packs:
            raise FormatError(f"{prefix}: pack {pack} can begin nowhere from token {after} on; {remedy}")
        if after > num_tokens or (after and not may_end(num_tokens, num_tokens + 1)[0]):
            raise FormatError(f"{prefix}: the last pack cannot end at token {num_tokens}, where .bin does; {remedy}")
        # The name goes with the block, the open file stays.
        begins = PreadArray(named.name, np.dtype(np.int64), num_packs, 0)
    with watch("placing packs from the end", num_tokens) as advance:
        unlike, other = _unlike(begins, starts, num_tokens, may_end, advance)
    if other:
        pack, earliest, latest = other
        raise FormatError(
            f"{prefix}: pack {pack - 1} may end at token {earliest}, at token {latest} and perhaps between them, and"
            f" {unlike} of {num_packs - 1} ends between packs are not certain; {remedy}"
        )

    def chunks() -> Iterator[NDArray[np.int64]]:
        for first in range(0, num_packs, CHUNK_PACKS):
            edges = begins[first : first + CHUNK_PACKS + 1]
            lengths = np.diff(edges if first + CHUNK_PACKS < num_packs else np.append(edges, num_tokens))
            if (longest := int(lengths.max())) > MAX_CAPACITY:
                raise FormatError(f"{prefix}: a pack of {longest} tokens, at most {MAX_CAPACITY} fit (rule H6)")
            yield lengths

    return Repeated("masks" if eod_id is None else f"masks and end-of-sequence id {eod_id}", num_packs, chunks)


def _unlike(
    begins: PreadArray, starts: Starts, num_tokens: int, may_end: _MayEnd, advance: Advance
) -> tuple[int, tuple[int, int, int] | None]:
    """How many packs can also begin later than at their earliest places, and of the first one both places.

    Seen from the end, packs stand by their last starts as they stand by their begins from the beginning, so that the
    latest places are the first ones of this search. Nothing else is left for the first pack.
    """

    def from_the_end(start: int, stop: int) -> NDArray[np.bool_]:
        return np.ascontiguousarray(may_end(num_tokens + 1 - stop, num_tokens + 1 - start)[::-1])

    stop, end, unlike = starts.num_packs, num_tokens, 0
    first: tuple[int, int, int] | None = None
    for lasts, reaches in _places(from_the_end, starts.backwards(), num_tokens, 1):
        latest = (num_tokens - lasts - reaches)[: stop - 1]
        if not len(latest):
            break
        earliest = begins[stop - len(latest) : stop][::-1]
        if len(bad := np.flatnonzero(latest != earliest)):
            unlike += len(bad)
            first = stop - 1 - int(bad[-1]), int(earliest[bad[-1]]), int(latest[bad[-1]])
        stop -= len(latest)
        advance(end - int(latest[-1]))
        end = int(latest[-1])
    assert stop <= 1, "the earliest split is one too"
    return unlike, first


def _places(
    load: _MayEnd, packs: Iterable[_Packs], num_tokens: int, least: int = 0
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Packs behind one another, each at the first place that is left: where each begins, and its last start.

    Ends before a pack that has no place.
    """
    base, flags = 0, np.empty(0, np.bool_)
    for starts, offsets in packs:
        reaches, done = starts[offsets[1:] - 1].astype(np.int64), 0
        while done < len(reaches):
            begins = base + _native.first_fits(flags, starts, offsets[done:], least - base)
            if len(begins):
                reached = reaches[done : done + len(begins)]
                done, least = done + len(begins), int(begins[-1] + reached[-1]) + 1
                yield begins, reached
            if done < len(reaches):
                reach = int(reaches[done])
                least = max(least, base + len(flags) - reach)
                if least + reach >= num_tokens:
                    return
                base, flags = least, load(least, min(least + max(_SPAN, reach + 1), num_tokens))
