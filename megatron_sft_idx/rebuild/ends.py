"""Where packs end, found without any index: only the last sequence of each pack has a length that nobody wrote down.

``.seq.bin`` tells how many packs there are and where the sequences start inside each. A pack may begin at token ``p``
only where a sequence ends before ``p`` and before every inner start of the pack; a sequence may end only on a token
whose mask is 0 (rule P6) and, where the user knows it, whose id is the end-of-sequence id. The packs follow one
another, and each is longer than its last start.

So pack k begins in a set of places of its own, and beginnings keep their distance: ``b[k + 1] > b[k] + last start``.
Of two solutions of such a system the smaller beginning everywhere is a solution too, and so is the larger. Hence there
is an earliest solution and a latest one, each found greedily in one pass over the tokens, and the split is the only
possible one exactly if the two are equal. Nothing is guessed, and memory does not grow with the shard.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.rebuild.data import DataFiles
from megatron_sft_idx.rebuild.packs import Starts
from megatron_sft_idx.rebuild.watch import Advance, Watch
from megatron_sft_idx.shard.index import CHUNK_PACKS
from megatron_sft_idx.storage import PreadArray, naming

__all__ = ["EndLengths"]

_SPAN = 1 << 18  # tokens whose flags are held at once
_CHUNK = 1 << 16
_MOST_CANDIDATES = 1000


class EndLengths:
    """Lengths of all packs, where the data leaves no choice.

    Args:
        files: tokens, masks and starts.
        eod_id: the id that every sequence ends with, and that may stand elsewhere too; None where there is none.
        watch: is told how far the search is.

    Raises:
        FormatError: there is more than one way to split the tokens, or none.
    """

    def __init__(self, files: DataFiles, eod_id: int | None, watch: Watch) -> None:
        self.origin = "masks" if eod_id is None else f"masks and end-of-sequence id {eod_id}"
        self.num_packs, self.num_tokens = files.starts.num_packs, files.num_tokens
        self._prefix, self._eod_id, self._starts = files.prefix, eod_id, files.starts
        self._ends = _Ends(files, eod_id)
        if self.num_tokens and not self.num_packs:
            raise FormatError(
                f"{self._prefix}: .bin has {self.num_tokens} tokens and .seq.bin no sequence (rule P2); restore it"
            )
        with tempfile.NamedTemporaryFile() as spill:
            with naming(spill.name), watch("placing packs", self.num_tokens) as advance:
                for begins in self._earliest(advance):
                    spill.write(begins.data)
                spill.flush()
            # The name goes with the block, the open file stays.
            self._begins = PreadArray(spill.name, np.dtype(np.int64), self.num_packs, 0)
        with watch("placing packs from the end", self.num_tokens) as advance:
            self._require_only_one(advance)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        for first in range(0, self.num_packs, CHUNK_PACKS):
            begins = self._begins[first : first + CHUNK_PACKS + 1]
            if first + CHUNK_PACKS >= self.num_packs:
                begins = np.append(begins, self.num_tokens)
            lengths = np.diff(begins)
            if (longest := int(lengths.max())) > MAX_CAPACITY:
                raise FormatError(f"{self._prefix}: a pack of {longest} tokens, at most {MAX_CAPACITY} fit (rule H6)")
            yield lengths

    def _earliest(self, advance: Advance) -> Iterator[NDArray[np.int64]]:
        """The first place where each pack can begin."""
        search, pack, done = _Search(self._ends.forwards, self.num_tokens), 0, 0
        for begins, _ in search.follow(_forwards(self._starts)):
            if not pack and begins[0]:
                raise self._no_split(0, 0)  # the first pack has no other place than the file's beginning
            yield begins
            advance(int(begins[-1]) - done)
            pack, done = pack + len(begins), int(begins[-1])
        last = search.after
        if pack < self.num_packs or last > self.num_tokens:
            raise self._no_split(pack, last)
        if last and not self._ends.forwards(self.num_tokens, self.num_tokens + 1)[0]:
            raise self._no_split(pack, last)

    def _require_only_one(self, advance: Advance) -> None:
        """FormatError where a pack can also begin later than at its earliest place.

        Seen from the end, packs stand by their last starts as they stand by their begins from the beginning, so that
        the latest places are the first ones of this search. Nothing else is left for the first pack.
        """
        stop, end, unlike = self.num_packs, self.num_tokens, 0
        first: tuple[int, int, int] | None = None
        search = _Search(self._ends.backwards, self.num_tokens)
        for lasts, reaches in search.follow(_backwards(self._starts), least=1):
            latest = (self.num_tokens - lasts - reaches)[: stop - 1]
            if not len(latest):
                break
            earliest = self._begins[stop - len(latest) : stop][::-1]
            if len(bad := np.flatnonzero(latest != earliest)):
                unlike += len(bad)
                first = stop - 1 - int(bad[-1]), int(earliest[bad[-1]]), int(latest[bad[-1]])
            stop -= len(latest)
            advance(end - int(latest[-1]))
            end = int(latest[-1])
        assert stop <= 1, "the earliest split is one too"
        if first:
            raise self._ambiguous(unlike, *first)

    def _ambiguous(self, unlike: int, pack: int, earliest: int, latest: int) -> FormatError:
        starts = self._starts_of(pack)
        search, candidates = _Search(self._ends.forwards, self.num_tokens), 0
        place = search.first(earliest, starts)
        while place is not None and place <= latest and candidates < _MOST_CANDIDATES:
            candidates, place = candidates + 1, search.first(place + 1, starts)
        many = f"{candidates}" if candidates < _MOST_CANDIDATES else f"{candidates} or more"
        return FormatError(
            f"{self._prefix}: pack {pack - 1} may end at {many} places, token {earliest} to {latest}, and {unlike} of"
            f" {self.num_packs - 1} ends between packs are not certain; {self._evidence()} {self._remedy()}"
        )

    def _starts_of(self, pack: int) -> NDArray[np.uint32]:
        for starts, offsets in _forwards(self._starts):
            if pack < len(offsets) - 1:
                return starts[offsets[pack] : offsets[pack + 1]]
            pack -= len(offsets) - 1
        raise IndexError(pack)

    def _no_split(self, pack: int, least: int) -> FormatError:
        what = f"pack {pack} can begin nowhere from token {least} on"
        if pack == self.num_packs:
            what = f"the last pack cannot end at token {self.num_tokens}, where .bin does"
        return FormatError(f"{self._prefix}: {what}; {self._evidence()} {self._remedy()}")

    def _evidence(self) -> str:
        if self._eod_id is None:
            return "all that is known is that the mask is 0 where a sequence ends."
        return f"every sequence was taken to end with id {self._eod_id} and mask 0."

    def _remedy(self) -> str:
        if self._eod_id is None:
            return "Pass --eod-id where every sequence ends with the same id, or restore .idx or .seq.idx from a copy"
        return "Restore .idx or .seq.idx from a copy, or build the shard again"


class _Packs(NamedTuple):
    """Whole packs: the uint32 starts of all, and int64 offsets of each one's."""

    starts: NDArray[np.uint32]
    offsets: NDArray[np.int64]


class _Ends:
    """Flags by position: set at ``p`` where a sequence may end right before token ``p``, and at the beginning."""

    def __init__(self, files: DataFiles, eod_id: int | None) -> None:
        self._files, self._eod_id = files, eod_id

    def forwards(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Those of positions ``[start, stop)``, at most the number of tokens."""
        tokens = slice(max(start - 1, 0), stop - 1)
        flags: NDArray[np.bool_] = self._files.loss[tokens] == 0
        if self._eod_id is not None:
            flags &= self._files.tokens[tokens] == self._eod_id
        return flags if start else np.concatenate([[True], flags])

    def backwards(self, start: int, stop: int) -> NDArray[np.bool_]:
        """The same, with positions counted from the end."""
        num_tokens = self._files.num_tokens
        return np.ascontiguousarray(self.forwards(num_tokens + 1 - stop, num_tokens + 1 - start)[::-1])


class _Search:
    """Places of packs behind one another, each the first that is left.

    Args:
        flags: the flags of positions from one to another.
        num_tokens: in the shard.

    Attributes:
        after: the least place behind the last start of the last pack.
    """

    def __init__(self, flags: Callable[[int, int], NDArray[np.bool_]], num_tokens: int) -> None:
        self._load, self._num_tokens = flags, num_tokens
        self._base, self._flags = 0, np.empty(0, np.bool_)
        self.after = 0

    def follow(self, packs: Iterable[_Packs], least: int = 0) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Where each pack begins and how far it reaches, its last start; ends before one that has no place."""
        for starts, offsets in packs:
            reaches, done = starts[offsets[1:] - 1].astype(np.int64), 0
            while done < len(reaches):
                begins, least = _native.first_fits(
                    self._flags, self._base, self._num_tokens, starts, offsets[done:], least
                )
                if len(begins):
                    reached = reaches[done : done + len(begins)]
                    self.after = int(begins[-1] + reached[-1]) + 1
                    done += len(begins)
                    yield begins, reached
                if done < len(reaches):
                    reach = int(reaches[done])
                    if least + reach >= self._num_tokens:
                        return
                    stop = min(least + max(_SPAN, reach + 1), self._num_tokens + 1)
                    self._base, self._flags = least, self._load(least, stop)

    def first(self, least: int, starts: NDArray[np.uint32]) -> int | None:
        """The first place from ``least`` on for one pack."""
        for begins, _ in self.follow([_Packs(starts, np.array([0, len(starts)]))], least):
            return int(begins[0])
        return None


def _forwards(starts: Starts) -> Iterator[_Packs]:
    """All packs; the starts of each are known to ascend."""
    held = np.empty(0, np.uint32)
    for first in range(0, starts.num_sequences, _CHUNK):
        piece = starts.array[first : first + _CHUNK]
        held = np.concatenate([held, piece], dtype=np.uint32)
        offsets = np.flatnonzero(held == 0)
        yield _Packs(held, offsets)
        held = held[offsets[-1] :]
    yield _Packs(held, np.array([0, len(held)]) if len(held) else np.zeros(1, np.int64))


def _backwards(starts: Starts) -> Iterator[_Packs]:
    """The same packs from the end: the last one first, and starts counted back from each one's last."""
    held = np.empty(0, np.uint32)
    for stop in range(starts.num_sequences, 0, -_CHUNK):
        held = np.concatenate([starts.array[max(0, stop - _CHUNK) : stop], held], dtype=np.uint32)
        edges = np.flatnonzero(held == 0)
        if len(edges):
            whole, offsets = held[edges[0] :], np.append(edges, len(held)) - edges[0]
            reaches = np.repeat(whole[offsets[1:] - 1], np.diff(offsets))
            yield _Packs((reaches - whole)[::-1].copy(), (len(whole) - offsets)[::-1].copy())
            held = held[: edges[0]]
