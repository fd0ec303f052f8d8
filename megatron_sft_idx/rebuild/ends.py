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
from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.rebuild.data import DataFiles
from megatron_sft_idx.rebuild.packs import Starts
from megatron_sft_idx.rebuild.watch import Advance, Watch
from megatron_sft_idx.shard.index import CHUNK_PACKS
from megatron_sft_idx.storage import PreadArray

__all__ = ["EndLengths"]

_SPAN = 1 << 18  # tokens whose flags are held at once
_STEP = 1 << 8  # tokens searched at first; doubled while nothing is found
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
            with watch("placing packs", self.num_tokens) as advance:
                for begins in _chunks(self._earliest(advance)):
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

    def _earliest(self, advance: Advance) -> Iterator[int]:
        """The first place where each pack can begin."""
        begin = least = 0
        for pack, starts in enumerate(_forwards(self._starts)):
            found = self._ends.first_fit(least, starts) if pack else self._ends.fit_at(0, starts)
            if found is None:
                raise self._no_split(pack, least)
            yield found
            advance(found - begin)
            begin, least = found, found + int(starts[-1]) + 1
        if least > self.num_tokens or (least and not self._ends.flags(self.num_tokens, self.num_tokens + 1)[0]):
            raise self._no_split(self.num_packs, least)

    def _require_only_one(self, advance: Advance) -> None:
        """FormatError where a pack can also begin later than at its earliest place."""
        end, pack, unlike = self.num_tokens, self.num_packs, 0
        first: tuple[int, int, int, NDArray[np.int64]] | None = None
        held, held_from = np.empty(0, np.int64), self.num_packs
        for starts in _backwards(self._starts):
            pack -= 1
            if not pack:
                break
            if pack < held_from:
                held_from = max(0, pack + 1 - CHUNK_PACKS)
                held = self._begins[held_from : pack + 1]
            latest = self._ends.last_fit(end - int(starts[-1]) - 1, starts)
            earliest = int(held[pack - held_from])
            assert latest is not None, "the earliest split is one too"
            if latest != earliest:
                unlike += 1
                first = pack, earliest, latest, starts
            advance(end - latest)
            end = latest
        if first:
            raise self._ambiguous(unlike, *first)

    def _ambiguous(self, unlike: int, pack: int, earliest: int, latest: int, starts: NDArray[np.int64]) -> FormatError:
        candidates, place = 0, self._ends.first_fit(earliest, starts)
        while place is not None and place <= latest and candidates < _MOST_CANDIDATES:
            candidates, place = candidates + 1, self._ends.first_fit(place + 1, starts)
        many = f"{candidates}" if candidates < _MOST_CANDIDATES else f"{candidates} or more"
        return FormatError(
            f"{self._prefix}: pack {pack - 1} may end at {many} places, token {earliest} to {latest}, and {unlike} of"
            f" {self.num_packs - 1} ends between packs are not certain; {self._evidence()} {self._remedy()}"
        )

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


class _Ends:
    """Flags by position: 1 at ``p`` where a sequence may end right before token ``p``."""

    def __init__(self, files: DataFiles, eod_id: int | None) -> None:
        self._files, self._eod_id = files, eod_id
        self._base, self._flags = 0, np.empty(0, np.bool_)

    def flags(self, start: int, stop: int, *, backwards: bool = False) -> NDArray[np.bool_]:
        """Those of positions ``[start, stop)``, which lie within 1 and the number of tokens."""
        if start < self._base or stop > self._base + len(self._flags):
            if backwards:
                self._load(max(1, min(start, stop - _SPAN)), stop)
            else:
                self._load(start, min(max(stop, start + _SPAN), self._files.num_tokens + 1))
        return self._flags[start - self._base : stop - self._base]

    def _load(self, start: int, stop: int) -> None:
        self._base, self._flags = start, self._files.loss[start - 1 : stop - 1] == 0
        if self._eod_id is not None:
            self._flags &= self._files.tokens[start - 1 : stop - 1] == self._eod_id

    def fit_at(self, begin: int, starts: NDArray[np.int64]) -> int | None:
        """``begin`` where a pack of these starts fits there but for what stands before it."""
        inner = starts[1:]
        if begin + int(starts[-1]) >= self._files.num_tokens:
            return None
        fits = not len(inner) or self.flags(begin + 1, begin + int(inner[-1]) + 1)[inner - 1].all()
        return begin if fits else None

    def first_fit(self, least: int, starts: NDArray[np.int64]) -> int | None:
        """The first place from ``least`` on where a pack of these starts can begin."""
        last, step = int(starts[-1]), _STEP
        limit = self._files.num_tokens - last  # a pack is longer than its last start
        while least < limit:
            stop = min(least + step, limit)
            flags = self.flags(least, stop + last)
            for place in _places(flags[: stop - least]):
                if flags[place + starts].all():
                    return least + place
            least, step = stop, min(2 * step, _SPAN)
        return None

    def last_fit(self, most: int, starts: NDArray[np.int64]) -> int | None:
        """The last place up to ``most`` where a pack of these starts can begin."""
        last, step = int(starts[-1]), _STEP
        while most > 0:
            start = max(1, most + 1 - step)
            flags = self.flags(start, most + last + 1, backwards=True)
            for distance in _places(flags[: most + 1 - start][::-1]):
                if flags[most - distance - start + starts].all():
                    return most - distance
            most, step = start - 1, min(2 * step, _SPAN)
        return None


def _places(flags: NDArray[np.bool_]) -> Iterator[int]:
    """Where flags are set, found one by one: mostly the first will do."""
    at = 0
    while at < len(flags):
        at += int(flags[at:].argmax())
        if not flags[at]:
            return
        yield at
        at += 1


def _forwards(starts: Starts) -> Iterator[NDArray[np.int64]]:
    """The starts of each pack."""
    held = np.empty(0, np.int64)
    for first in range(0, starts.num_sequences, _CHUNK):
        held = np.concatenate([held, starts.array[first : first + _CHUNK]], dtype=np.int64)
        *edges, begun = np.flatnonzero(held == 0).tolist()
        for begin, end in pairwise([*edges, begun]):
            yield held[begin:end]
        held = held[begun:]
    if len(held):
        yield held


def _backwards(starts: Starts) -> Iterator[NDArray[np.int64]]:
    """The starts of each pack, the last pack first."""
    held = np.empty(0, np.int64)
    for stop in range(starts.num_sequences, 0, -_CHUNK):
        held = np.concatenate([starts.array[max(0, stop - _CHUNK) : stop], held], dtype=np.int64)
        edges = [*np.flatnonzero(held == 0).tolist(), len(held)]
        for begin, end in reversed([*pairwise(edges)]):
            yield held[begin:end]
        held = held[: edges[0]]


def _chunks(values: Iterator[int]) -> Iterator[NDArray[np.int64]]:
    while held := list(islice(values, CHUNK_PACKS)):
        yield np.array(held, np.int64)
