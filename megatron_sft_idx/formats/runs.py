"""What readers and writers of several formats do with runs: windows of a shard, packs out of a run, counts, masks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.base import RUN_TOKENS, PackedSpec, PackRun
from megatron_sft_idx.formats.checks import MaskAlignment, unplaced_note
from megatron_sft_idx.layout.header import MAX_CAPACITY
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.reader import Pack

__all__ = [
    "BinaryMasks",
    "Counts",
    "IndexedRun",
    "Window",
    "file_identity",
    "note_unplaced",
    "read_window",
    "run_bounds",
    "stated_alignment",
    "stated_int",
    "stated_of",
    "windows",
]

# What a window of a shard holds at most, or one pack where that is larger: some 50 MiB with what is computed from it.
WINDOW_PACKS, WINDOW_SEQUENCES, WINDOW_TOKENS = 1 << 15, 1 << 18, 1 << 22


def file_identity(*paths: str) -> str:
    """Size and time of change of files, which differ where a file was written anew."""
    stats = (os.stat(path) for path in paths)
    return " ".join(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in stats)


def run_bounds(token_offsets: NDArray[Any], tokens: int = RUN_TOKENS) -> Iterator[tuple[int, int]]:
    """First and last + 1 pack of runs of some ``tokens`` tokens, at least one pack each.

    Args:
        token_offsets: where each pack begins, and the last one ends, ascending [packs + 1].
        tokens: in a run, at most, unless a single pack has more.
    """
    first, packs = 0, len(token_offsets) - 1
    while first < packs:
        last = first + max(1, _fitting(token_offsets[first:], tokens))
        yield first, last
        first = last


def _fitting(offsets: NDArray[Any], most: int) -> int:
    """How many packs, from the first one on, have at most so many tokens or sequences together."""
    return min(int(np.searchsorted(offsets, offsets[0] + most, side="right")), len(offsets)) - 1


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive packs of a shard by its indexes, which divide them into sequences; ids and masks are read when asked.

    Attributes:
        shard: whose packs they are.
        first: number of the first pack.
        token: number of its first token, among all of the shard.
        sequence: number of its first sequence, among all of the shard.
        pack_bounds: where packs begin and the last one ends, in tokens of the window: int64 [packs + 1].
        sequence_offsets: the same in sequences of the window: int64 [packs + 1].
        bounds: where sequences begin and the last one ends, in tokens of the window: int64 [sequences + 1].
    """

    shard: Shard
    first: int
    token: int
    sequence: int
    pack_bounds: NDArray[np.int64]
    sequence_offsets: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pack_bounds) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all its packs."""
        return int(self.pack_bounds[-1])

    def content(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and label-aligned mask, each [tokens]: views where the shard is mapped, else read now."""
        tokens = slice(self.token, self.token + self.num_tokens)
        return self.shard.files.tokens[tokens], self.shard.files.loss[tokens]

    def starts(self) -> NDArray[np.int64]:
        """Where each sequence begins in its pack, int64 [sequences]."""
        starts: NDArray[np.int64] = self.bounds[:-1] - np.repeat(self.pack_bounds[:-1], np.diff(self.sequence_offsets))
        return starts

    def place(self, sequence: int) -> tuple[int, int]:
        """Pack, and number inside it, of the window's sequence ``sequence``."""
        pack = int(np.searchsorted(self.sequence_offsets, sequence, "right")) - 1
        return self.first + pack, sequence - int(self.sequence_offsets[pack])


def windows(shard: Shard, tokens: int | None = None) -> Iterator[Window]:
    """All packs of a shard in order, in memory that does not grow with it.

    Args:
        shard: opened with any backend; with ``pread`` no page of it is mapped.
        tokens: of a window at most, unless a single pack has more; None for ``WINDOW_TOKENS``.

    Raises:
        FormatError: offsets or starts that do not divide the tokens (rules O1, O2, P2 to P4).
    """
    shard.check_ends()
    first = 0
    while first < len(shard):
        window = read_window(shard, first, first + WINDOW_PACKS, tokens)
        yield window
        first += len(window)


def read_window(shard: Shard, first: int, stop: int, tokens: int | None = None) -> Window:
    """Packs from ``first`` on, before ``stop``: as many as fit a window, and at least one. Raises as ``windows``."""
    files, stop = shard.files, min(stop, len(shard))
    pack_bounds, sequence_offsets = files.token_offsets[first : stop + 1], files.sequence_offsets[first : stop + 1]
    most = WINDOW_TOKENS if tokens is None else tokens
    count = max(1, min(_fitting(pack_bounds, most), _fitting(sequence_offsets, WINDOW_SEQUENCES)))
    pack_bounds, sequence_offsets = pack_bounds[: count + 1], sequence_offsets[: count + 1]
    token, sequence, last = int(pack_bounds[0]), int(sequence_offsets[0]), int(sequence_offsets[-1])
    try:
        if token < 0 or not (0 <= sequence <= last <= files.num_sequences and pack_bounds[-1] <= files.num_tokens):
            raise ValueError(f"offsets of packs {first} to {first + count} leave the files")
        pack_bounds, sequence_offsets = pack_bounds - token, sequence_offsets - sequence
        bounds = _native.absolute_offsets(sequence_offsets, pack_bounds, files.starts[sequence:last])
    except ValueError as error:
        where = f"{shard.prefix}: packs from {first} on: {error}"
        raise FormatError(f"{where} (rules O1, O2, P2 to P4); megatron-sft-idx verify says what is wrong") from None
    return Window(shard, first, token, sequence, pack_bounds, sequence_offsets, bounds)


class IndexedRun:
    """A run whose packs are found by their number.

    Args:
        run: checked packs.
    """

    def __init__(self, run: PackRun) -> None:
        self.run = run
        self._tokens = np.concatenate([[0], np.cumsum(run.pack_lengths)])
        self._sequences = np.concatenate([[0], np.cumsum(run.pack_sequences)])

    def __len__(self) -> int:
        return len(self.run.pack_lengths)

    @property
    def nbytes(self) -> int:
        """Memory that the arrays take."""
        run = self.run
        arrays = (run.tokens, run.loss_mask, run.seq_starts, run.pack_lengths, run.pack_sequences)
        return sum(array.nbytes for array in (*arrays, self._tokens, self._sequences))

    def pack(self, index: int) -> Pack:
        """Pack ``index`` of the run, its ids and mask as read-only views."""
        start, stop = self._tokens[index : index + 2].tolist()
        first, last = self._sequences[index : index + 2].tolist()
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = self.run.seq_starts[first:last]
        boundaries[-1] = stop - start
        tokens, mask = self.run.tokens[start:stop], self.run.loss_mask[start:stop]
        tokens.flags.writeable = mask.flags.writeable = False
        return {"input_ids": tokens, "loss_mask": mask, "seq_boundaries": boundaries}

    def part(self, first: int, last: int) -> PackRun:
        """Packs ``first`` up to ``last``, as views; what had no place in a mask is not counted again."""
        tokens = slice(*self._tokens[[first, last]].tolist())
        sequences = slice(*self._sequences[[first, last]].tolist())
        run = self.run
        return PackRun(
            run.tokens[tokens],
            run.loss_mask[tokens],
            run.seq_starts[sequences],
            run.pack_lengths[first:last],
            run.pack_sequences[first:last],
        )

    def fitting(self, first: int, most_packs: int, most_tokens: int) -> int:
        """The last of the packs from ``first`` on that are so many, with so many tokens, at most; plus one."""
        fits = _fitting(self._tokens[first:], most_tokens)
        return first + max(0, min(fits, most_packs, len(self) - first))


@dataclass
class Counts:
    """What runs hold in all."""

    packs: int = 0
    sequences: int = 0
    tokens: int = 0
    longest: int = 0

    def add(self, run: PackRun) -> None:
        """Count a run in."""
        self.packs += len(run.pack_lengths)
        self.sequences += len(run.seq_starts)
        self.tokens += len(run.tokens)
        self.longest = max(self.longest, int(run.pack_lengths.max(initial=0)))

    def require(self, path: str, spec: PackedSpec) -> None:
        """FormatError unless all that was announced was written, and nothing else.

        Files that begin with their counts would else say what is not true.
        """
        found = (self.packs, self.sequences, self.tokens)
        expected = (spec.num_packs, spec.num_sequences, spec.num_tokens)
        if found != expected:
            raise FormatError(
                f"{path}: {found[0]} packs, {found[1]} sequences and {found[2]} tokens were written, expected"
                f" {expected[0]}, {expected[1]} and {expected[2]}; the source changed while it was read: start again"
            )


class BinaryMasks:
    """Masks as 0 and 1, for formats whose readers know nothing else.

    Args:
        path: of the file being written, for errors.
        allow_loss: make every weight above 0 a 1, and say so.

    Attributes:
        lost: for ``PackedWriter.lost``; grows as weights are let go.
    """

    def __init__(self, path: str, *, allow_loss: bool) -> None:
        self._path, self._allow_loss, self._changed = path, allow_loss, 0
        self.lost: dict[str, str] = {}

    def of(self, run: PackRun, first_pack: int) -> NDArray[np.uint8]:
        """The mask of a run, whose first pack has this number.

        Raises:
            FormatError: the mask holds other weights than 0 and 1, and loss is not allowed.
        """
        mask: NDArray[Any] = run.loss_mask
        if mask.dtype == np.uint8:
            return mask
        weights = (mask != 0) & (mask != 1)
        if weights.any():
            if not self._allow_loss:
                at = int(np.argmax(weights))
                pack = first_pack + int(np.searchsorted(np.cumsum(run.pack_lengths), at, side="right"))
                raise FormatError(
                    f"{self._path}: pack {pack} has a loss weight of {mask[at]}, this format holds 0 and 1; pass"
                    " allow_loss (--allow-loss) to make every weight above 0 a 1"
                )
            self._changed += int(np.count_nonzero(weights))
            self.lost["masks"] = f"{self._changed} loss weights other than 0 and 1 became 1"
        return (mask > 0).astype(np.uint8)


def note_unplaced(notes: list[str], count: int, alignment: MaskAlignment) -> None:
    """Say once, after a whole pass, what had no place in label-aligned masks."""
    if count and (note := unplaced_note(count, alignment)) not in notes:
        notes.append(note)


def stated_alignment(path: str, stated: object, asked: MaskAlignment) -> MaskAlignment:
    """The alignment of a file that may say it itself.

    Raises:
        FormatError: the caller says otherwise than the file: its masks would be shifted twice.
    """
    if stated not in ("label", "token", "rolled-right"):
        return asked
    if asked not in ("label", stated):
        raise FormatError(
            f"{path}: it says that its loss masks are {stated}-aligned, mask alignment {asked!r} would shift them"
            " once more; leave the option out"
        )
    return stated


def stated_int(stated: Mapping[str, Any], key: str, least: int = 1, most: int = MAX_CAPACITY) -> int | None:
    """A whole number within bounds that a file says of itself; None where it says none."""
    value = stated.get(key)
    return value if type(value) is int and least <= value <= most else None


def stated_of(stated: Mapping[str, Any], longest: int, capacity: int) -> dict[str, Any]:
    """What a file may say of its packs beside their counts, as keywords of ``PackedSpec``.

    Args:
        stated: what it says.
        longest: its longest pack, which the capacity is never below.
        capacity: where it says none.
    """
    metadata = stated.get("metadata")
    return {
        "capacity": max(stated_int(stated, "capacity") or capacity, longest),
        "sequence_multiple": stated_int(stated, "sequence_multiple") or 1,
        "pad_id": stated_int(stated, "pad_id", 0),
        "metadata": metadata if isinstance(metadata, dict) else {},
    }
