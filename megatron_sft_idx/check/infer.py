"""Lengths of packs from the data alone, where no index tells them.

Only the last sequence of each pack has a length that nobody wrote down. ``.seq.bin`` tells how many packs
there are and where the sequences start inside each. A pack may begin at token ``p`` only where a sequence may end
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
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.check.lengths import Lengths, Repeated, Starts
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import MAX_CAPACITY
from megatron_sft_idx.shard.writer import CHUNK_PACKS
from megatron_sft_idx.storage import OutputFile, PreadArray, as_bytes, open_array
from megatron_sft_idx.storage.progress import Advance, Watch

__all__ = ["infer_lengths"]

_SPAN = 1 << 18  # tokens whose flags are held at once
_CHUNK = 1 << 16

# Starts of whole packs, uint32, and int64 offsets of each one's.
_Packs: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64]]
# Flags of positions from one to another: set at p where a sequence may end right before token p, and at 0.
_MayEnd: TypeAlias = Callable[[int, int], NDArray[np.bool_]]


def infer_lengths(
    paths: ShardPaths, starts: Starts, dtypes: tuple[np.dtype[Any], np.dtype[Any]], eod_id: int | None, watch: Watch
) -> Lengths:
    """Lengths of all packs from the data alone, where it leaves no choice.

    A sequence may end only on a token whose mask is 0 (rule P6).

    Args:
        paths: of the shard, whose tokens and masks are there.
        starts: of all packs.
        dtypes: of tokens and masks.
        eod_id: the id that every sequence ends with, and that may stand elsewhere too; None where it is not known.
        watch: is told how far the search is.

    Raises:
        FormatError: there is more than one way to split the tokens, or none.
    """
    prefix, num_packs, nbytes = paths.prefix, starts.num_packs, os.stat(paths.tokens).st_size
    num_tokens = nbytes // dtypes[0].itemsize
    tokens = open_array(paths.tokens, dtypes[0], num_tokens, nbytes=nbytes, backend="pread")
    loss = open_array(paths.loss, dtypes[1], num_tokens, nbytes=os.stat(paths.loss).st_size, backend="pread")
    if num_tokens and not num_packs:
        raise FormatError(f"{prefix}: .bin has {num_tokens} tokens and .seq.bin no sequence (rule P2); restore it")

    def may_end(start: int, stop: int) -> NDArray[np.bool_]:
        before = slice(max(start - 1, 0), stop - 1)
        flags: NDArray[np.bool_] = loss[before] == 0
        if eod_id is not None:
            flags &= tokens[before] == eod_id
        return flags if start else np.concatenate([[True], flags])

    pack = after = 0
    with tempfile.NamedTemporaryFile() as named, contextlib.closing(OutputFile(named.name, keep=True)) as spill:
        with watch("placing packs", num_tokens) as advance:
            for found, reaches in _places(may_end, starts.packs(), num_tokens):
                if not pack and found[0]:
                    break  # the first pack has no other place than the file's beginning
                spill.write(as_bytes(found))
                pack, before, after = pack + len(found), after, int(found[-1] + reaches[-1]) + 1
                advance(after - before)
        if pack < num_packs:
            raise _refused(prefix, eod_id, f"pack {pack} can begin nowhere from token {after} on")
        if after > num_tokens or (after and not may_end(num_tokens, num_tokens + 1)[0]):
            raise _refused(prefix, eod_id, f"the last pack cannot end at token {num_tokens}, where .bin does")
        # The name goes with the block, the open file stays.
        begins = PreadArray(named.name, np.dtype(np.int64), num_packs, 0)
    with watch("placing packs from the end", num_tokens) as advance:
        unlike, other = _unlike(begins, starts, num_tokens, may_end, advance)
    if other:
        pack, earliest, latest = other
        raise _refused(
            prefix,
            eod_id,
            f"pack {pack - 1} may end at token {earliest}, at token {latest} and perhaps between them, and {unlike} of"
            f" {num_packs - 1} ends between packs are not certain",
        )

    def chunks() -> Iterator[NDArray[np.int64]]:
        for first in range(0, num_packs, CHUNK_PACKS):
            edges = begins[first : first + CHUNK_PACKS + 1]
            lengths = np.diff(edges if first + CHUNK_PACKS < num_packs else np.append(edges, num_tokens))
            if (longest := int(lengths.max())) > MAX_CAPACITY:
                raise FormatError(f"{prefix}: a pack of {longest} tokens, at most {MAX_CAPACITY} fit (rule H6)")
            yield lengths

    return Repeated("masks" if eod_id is None else f"masks and end-of-sequence id {eod_id}", num_packs, chunks)


def _refused(prefix: str, eod_id: int | None, what: str) -> FormatError:
    known = (
        "all that is known is that the mask is 0 where a sequence ends. Pass --eod-id where every sequence ends with"
        " the same id, or restore .idx or .seq.idx from a copy"
    )
    if eod_id is not None:
        known = (
            f"every sequence was taken to end with id {eod_id} and mask 0. Restore .idx or .seq.idx from a copy, or"
            " build the shard again"
        )
    return FormatError(f"{prefix}: {what}; {known}")


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
    for lasts, reaches in _places(from_the_end, _backwards(starts), num_tokens, 1):
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


def _backwards(starts: Starts) -> Iterator[_Packs]:
    """The same packs from the end: the last one first, and starts counted back from each one's last."""
    held = np.empty(0, np.uint32)
    for stop in range(starts.num_sequences, 0, -_CHUNK):
        held = np.concatenate([starts.array[max(0, stop - _CHUNK) : stop], held], dtype=np.uint32)
        edges = np.flatnonzero(held == 0)
        if len(edges):
            whole, offsets = held[edges[0] :], np.append(edges, len(held)) - edges[0]
            reaches = np.repeat(whole[offsets[1:] - 1], np.diff(offsets))
            yield (reaches - whole)[::-1].copy(), (len(whole) - offsets)[::-1].copy()
            held = held[: edges[0]]
