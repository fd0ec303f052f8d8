"""``.pbin``, Modalities' packed data, as packs: every document one sequence, every sequence a pack of its own.

The format knows tokens and documents. It has no loss masks, so reading needs to be told what to train on, and no packs:
its own readers cut the token stream into blocks (``views``). Writing loses both, and says so first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import PackedReader, PackedSpec, PackedWriter, PackRun
from megatron_sft_idx.formats.checks import MaskAlignment, checked_alignment
from megatron_sft_idx.formats.modalities.layout import encode_header, framings
from megatron_sft_idx.formats.modalities.pickled_pairs import write_pairs
from megatron_sft_idx.formats.modalities.placement import Placement, place_documents
from megatron_sft_idx.formats.runs import file_identity, run_bounds
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import as_bytes
from megatron_sft_idx.storage.publish import Kind, new_file, require_space

__all__ = ["FORMAT", "KIND", "MaskRule", "Reader", "Writer", "native_tokens", "recognise"]

FORMAT = "pbin"

MaskRule = Literal["all"]


def recognise(path: str) -> str | None:
    """What makes this a ``.pbin``, as a sentence; None for other files."""
    try:
        found = framings(path)
    except (OSError, FormatError):
        return None
    return f"Modalities .pbin: {found[0]}" if found else None


def _is_whole(path: str) -> bool:
    """Whether the reader opens a file: it has no magic, but an index that fits its data."""
    try:
        place_documents(path, repair_merge=True)
    except Exception:  # whatever a stranger's bytes do to the reader
        return False
    return True


KIND = Kind("a Modalities .pbin", _is_whole)


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
        path: the file.
        mask_alignment: of masks in the file; there are none, so that only "label" makes sense.
        mask_rule: what to train on. "all" trains every token of a document but its first, which nothing predicts.
            There is no default: a chat whose questions are trained like its answers is rarely what is wanted.
        repair_merge: read a file with an index that ``merge_packed_data`` damaged (see ``Placement``).

    Raises:
        FormatError: no mask rule; no ``.pbin``; an index that is not of this file.
        OSError: the file cannot be read.
    """

    format = FORMAT

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mask_alignment: MaskAlignment = "label",
        mask_rule: MaskRule | None = None,
        repair_merge: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        if checked_alignment(self.path, mask_alignment) != "label":
            raise FormatError(f"{self.path}: a .pbin has no masks that could be {mask_alignment}-aligned; leave it out")
        if mask_rule != "all":
            raise FormatError(
                f"{self.path}: a .pbin has no loss masks{'' if mask_rule is None else f', and no rule {mask_rule!r}'};"
                ' pass mask_rule="all" (--mask-rule all) to train every token, questions too, or convert from what it'
                " was made of"
            )
        placement = place_documents(self.path, repair_merge=repair_merge)
        if len(placement.lengths) and placement.lengths.max() > MAX_CAPACITY:
            longest = int(np.argmax(placement.lengths))
            raise SequenceError(
                self.path,
                longest,
                f"has {placement.lengths[longest]} tokens, expected at most {MAX_CAPACITY} (rule P1)",
            )
        # Packs hold at least one token.
        self._starts = placement.starts[placement.lengths > 0]
        self._lengths = placement.lengths[placement.lengths > 0]
        self._tokens = placement.framing.open_tokens(self.path)
        self._identity = file_identity(self.path) + " repaired" * (placement.num_moved > 0)
        self._generation = placement.generation.number
        self.notes = list(_notes(placement))

    @property
    def spec(self) -> PackedSpec:
        """Counts and dtypes; the capacity is the longest document."""
        longest = int(self._lengths.max()) if len(self) else 0
        return PackedSpec(
            num_packs=len(self),
            num_sequences=len(self),
            num_tokens=int(self._lengths.sum()),
            longest_pack=longest,
            token_dtype=np.dtype(np.uint16 if self._tokens.dtype.itemsize <= 2 else np.int32),
            mask_dtype=np.dtype(np.uint8),
            capacity=max(longest, 1),
            metadata={"pbin": {"generation": self._generation, "mask_rule": "all"}},
        )

    @property
    def identity(self) -> str:
        """Size and time of change, and whether the index was set right."""
        return self._identity

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, index: int) -> Pack:
        """Document ``index`` of those that hold a token."""
        tokens = self._documents(index, index + 1)
        tokens.flags.writeable = False
        return {
            "input_ids": tokens,
            "loss_mask": _all_trained(self._lengths[index : index + 1]),
            "seq_boundaries": np.array([0, len(tokens)], np.int32),
        }

    def runs(self) -> Iterator[PackRun]:
        """All documents in order."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths)])
        for first, last in run_bounds(offsets):
            lengths = self._lengths[first:last]
            ones = np.ones(last - first, np.int64)
            yield PackRun(self._documents(first, last), _all_trained(lengths), ones - 1, lengths, ones)

    def _documents(self, first: int, stop: int) -> NDArray[Any]:
        """Tokens of some documents end to end; a view where they lie so."""
        starts, stops = self._starts[first:stop], self._starts[first:stop] + self._lengths[first:stop]
        if (starts[1:] == stops[:-1]).all():
            tokens = self._tokens[starts[0] : stops[-1]]
        else:
            tokens = np.concatenate([self._tokens[a:b] for a, b in zip(starts, stops, strict=True)])
        return native_tokens(self.path, first, tokens)


def _all_trained(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Label-aligned: 1 at every token that has a next one."""
    mask = np.ones(int(lengths.sum()), np.uint8)
    mask[np.cumsum(lengths) - 1] = 0
    return mask


def _notes(placement: Placement) -> Iterator[str]:
    generation = placement.generation
    offsets = "the data" if generation.first_offset == 0 else "the file"
    yield (
        f".pbin of generation {generation.number} (since {generation.since}): {placement.framing}; its first offset"
        f" is counted from the start of {offsets}"
    )
    yield "no loss masks in the file: as asked, every token is trained on but the first of each document"
    if placement.num_moved:
        yield f"{placement.num_moved} documents placed by their lengths: the index was damaged by merging"
    if empty := int(np.count_nonzero(placement.lengths == 0)):
        yield f"{empty} documents without a token left out"
    if placement.num_unused:
        yield f"{placement.num_unused} tokens that no document holds left out"


class Writer(PackedWriter):
    """A ``.pbin`` of the current generation, as Modalities' own ``TokenizedFileWriter`` makes it, byte for byte.

    Every sequence becomes a document. Keeps 8 bytes a sequence in memory until the index is written.

    Args:
        path: the file.
        spec: of the packs to come.
        overwrite: replace a ``.pbin``.
        allow_loss: write, though loss masks and which sequences shared a pack are lost.
        token_nbytes: bytes of a token, 1, 2 or 4; None for 2 with uint16 tokens and 4 with int32.

    Raises:
        FormatError: no leave to lose; a size of another number; the file exists.
        OSError: the disk says no.
    """

    format = FORMAT

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: PackedSpec,
        *,
        overwrite: bool = False,
        allow_loss: bool = False,
        token_nbytes: int | None = None,
    ) -> None:
        name = os.fspath(path)
        if not allow_loss:
            raise FormatError(
                f"{name}: a .pbin keeps neither loss masks nor packs, every sequence becomes a document trained as a"
                " whole; pass allow_loss=True (--allow-loss) if that is what you want"
            )
        token_nbytes = token_nbytes or np.dtype(spec.token_dtype).itemsize
        if token_nbytes not in (1, 2, 4):
            raise FormatError(f"{name}: tokens of {token_nbytes} bytes, Modalities reads 1, 2 or 4")
        self._path = name
        self._dtype = np.dtype(f"<u{token_nbytes}")
        self._lost = {"masks": "loss masks: the format has none, every token would be trained on"}
        self.lost = self._lost
        self._num_packs = 0
        self._lengths: list[NDArray[np.int64]] = []
        require_space(name, token_nbytes * spec.num_tokens + 8 * spec.num_sequences)
        self._output = new_file(path, KIND, overwrite=overwrite)
        self._file, self._complete = self._output.open(), False
        try:
            self._file.write(encode_header(0, token_nbytes))
        except BaseException:
            self.abandon()
            raise

    def write(self, run: PackRun) -> None:
        """Append packs.

        Raises:
            SequenceError: an id that does not fit the token size.
        """
        largest = np.iinfo(self._dtype).max
        tokens = np.asarray(run.tokens)
        if len(tokens) and (tokens.min() < 0 or tokens.max() > largest):
            at = int(np.argmax((tokens < 0) | (tokens > largest)))
            pack = int(np.searchsorted(np.cumsum(run.pack_lengths), at, side="right"))
            raise SequenceError(
                self._path,
                self._num_packs + pack,
                f"has id {tokens[at]}, expected 0 to {largest} in {self._dtype.itemsize} bytes; pass token_nbytes=4",
            )
        self._file.write(as_bytes(np.ascontiguousarray(tokens, self._dtype)))
        self._lengths.append(run.sequence_lengths())
        self._num_packs += len(run.pack_lengths)
        if (run.pack_sequences > 1).any():
            self._lost["packs"] = "which sequences share a pack: every sequence is a document of its own"

    def complete(self) -> None:
        """Write the index and the data's length."""
        if self._complete:
            return
        data_nbytes = self._file.nbytes - len(encode_header(0, 1))
        write_pairs(self._file.write, sum(map(len, self._lengths)), self._pairs())
        # Last, as the real writer: a file without its length is one that was not finished.
        self._file.write_at(encode_header(data_nbytes, self._dtype.itemsize), 0)
        self._file.close()
        self._complete = True

    def reread(self) -> Reader:
        """A reader of all of it; what its masks are made of by a rule is not what was written."""
        return Reader(self._output.temporary, mask_rule="all")

    def _pairs(self) -> Iterator[NDArray[np.int64]]:
        offset = 0
        for lengths in self._lengths:
            nbytes = lengths * self._dtype.itemsize
            ends = np.cumsum(nbytes) + offset
            yield np.stack([ends - nbytes, nbytes], axis=1)
            offset = int(ends[-1]) if len(ends) else offset
