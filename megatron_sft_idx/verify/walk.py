"""The walk over all packs: offsets, ``.idx``, sequence starts and masks in step, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.layout.header import FIELDS
from megatron_sft_idx.layout.mmididx import IDX_HEADER_NBYTES
from megatron_sft_idx.verify.claims import Claims
from megatron_sft_idx.verify.files import CheckedFile, Stream
from megatron_sft_idx.verify.findings import Findings
from megatron_sft_idx.verify.quick import IdxPlaces

__all__ = ["Walk", "pack_of"]

_RUN_PACKS = 1 << 15
_PIECE_SEQUENCES = 1 << 15
_PLACES = {field.name: field.offset for field in FIELDS}


def pack_of(seq_idx: CheckedFile, claims: Claims, token: int) -> int | None:
    """Which pack holds a token, by the offsets; None where they do not tell."""
    low, high = 0, claims.num_packs
    while high - low > 1:
        middle = (low + high) // 2
        found = seq_idx.array("<i8", claims.token_offsets_offset + 8 * middle, 1)
        if not len(found):
            return None
        low, high = (middle, high) if found[0] <= token else (low, middle)
    pair = seq_idx.array("<i8", claims.token_offsets_offset + 8 * low, 2)
    return low if len(pair) == 2 and pair[0] <= token < pair[1] else None


class Walk:
    """One pass over the packs of a shard, and one over the positions in ``.idx``.

    Args:
        streams: what is there, by suffix; ``.seq.idx`` is, at its arrays.
        claims: what the header says.
        findings: where broken rules go.
    """

    def __init__(self, streams: Mapping[str, Stream], claims: Claims, findings: Findings) -> None:
        self._streams, self._claims, self._findings = streams, claims, findings
        self._seq_idx = streams[".seq.idx"].file
        self._idx = streams.get(".idx") if claims.token_dtype is not None else None
        self._masks = streams.get(".loss.bin") if claims.mask_dtype is not None else None
        self._native = _native.PackWalk(
            sequences=claims.num_sequences,
            tokens=claims.num_tokens,
            capacity=claims.capacity,
            multiple=claims.sequence_multiple,
            most=findings.most,
        )

    def run(self) -> None:
        """Walk."""
        self._walk_packs()
        self._check_positions()
        for mask in self._masks.pieces(self._claims.mask_dtype) if self._masks else ():
            self._native.mask(mask)
        self._report()

    def _walk_packs(self) -> None:
        walk, num_packs = self._native, self._claims.num_packs
        if self._idx:
            self._idx.take(np.uint8, IDX_HEADER_NBYTES)
        sequences = np.empty(0, np.int64)
        for first in range(0, num_packs, _RUN_PACKS):
            # One offset more than the run needs, where there is one: see PackWalk.packs.
            wanted = min(_RUN_PACKS + 2, num_packs + 1 - first)
            sequences = np.concatenate([sequences, self._streams[".seq.idx"].take("<i8", wanted - len(sequences))])
            tokens = self._token_offsets(first, wanted)
            given = min(len(tokens), len(sequences))
            count = min(_RUN_PACKS, num_packs - first, given - 1)
            if count < 1:
                break
            walk.packs(tokens[:given], sequences[:given], count)
            self._compare("length", "<i4", first, np.diff(tokens[: count + 1]))
            self._take_starts()
            sequences = sequences[count:]

    def _token_offsets(self, first: int, count: int) -> NDArray[np.int64]:
        return self._seq_idx.array("<i8", self._claims.token_offsets_offset + 8 * first, count)

    def _take_starts(self) -> None:
        """The starts of the packs handed in last, and the masks of all tokens they make known."""
        walk, starts, masks, dtype = self._native, self._streams.get(".seq.bin"), self._masks, self._claims.mask_dtype
        while starts and (wanted := walk.wanted_sequences - walk.next_sequence) > 0:
            piece = starts.take("<u4", min(wanted, _PIECE_SEQUENCES))
            if not len(piece):
                return  # the file ends here, which its size or its reader says
            walk.starts(piece)
            if masks:
                itemsize = np.dtype(dtype).itemsize
                for mask in masks.pieces(dtype, walk.known - masks.position // itemsize):
                    walk.mask(mask)

    def _check_positions(self) -> None:
        """The two last arrays of ``.idx``."""
        claims, num_packs = self._claims, self._claims.num_packs
        if not self._idx or self._idx.position != IdxPlaces(num_packs).pointers:
            return
        assert claims.token_dtype is not None
        for first in range(0, num_packs, _RUN_PACKS):
            tokens = self._token_offsets(first, min(_RUN_PACKS, num_packs - first))
            self._compare("position", "<i8", first, tokens, scale=claims.token_dtype.itemsize)
        # The last document ends where all packs do.
        numbers = np.arange(min(_RUN_PACKS, num_packs + 1))
        for first in range(0, num_packs + 1, _RUN_PACKS):
            self._compare("document", "<i8", first, numbers[: num_packs + 1 - first], shift=first)

    def _compare(
        self, what: str, dtype: str, first: int, values: NDArray[np.int64], *, scale: int = 1, shift: int = 0
    ) -> None:
        """Rule I1 for the next items of ``.idx``, of packs ``first`` on: ``shift + scale * values``."""
        if not self._idx:
            return
        for found in self._idx.pieces(dtype, len(values)):
            these, values = values[: len(found)], values[len(found) :]
            if not _native.is_scaled(found, these, scale, shift):
                self._add_unlike(what, first, found, shift + scale * these)
            first += len(found)

    def _add_unlike(self, what: str, first: int, found: NDArray[Any], expected: NDArray[np.int64]) -> None:
        assert self._idx is not None
        bad, most = np.flatnonzero(found != expected), self._findings.most
        base = self._idx.position - found.nbytes
        for i in bad[:most].tolist():
            offset = base + found.itemsize * i
            self._findings.add("I1", self._idx.file.path, offset, f"{what} {found[i]}", expected[i], pack=first + i)
        self._findings.add_uncounted("I1", len(bad[most:]))

    def _report(self) -> None:
        walk, claims, findings = self._native, self._claims, self._findings
        kept: dict[str, int] = {}
        for breach in walk.breaches:
            self._add(*breach)
            kept[breach[0]] = kept.get(breach[0], 0) + 1
        for rule, count in walk.counts.items():
            findings.add_uncounted(rule, count - kept[rule])
        whole = walk.num_packs == claims.num_packs
        dtype = claims.mask_dtype
        seen = self._masks and dtype and self._masks.position == claims.num_tokens * dtype.itemsize
        for name, comparable in (
            ("num_trained_tokens", seen),
            ("num_masked_packs", seen and whole),
            ("longest_pack", whole),
            ("most_sequences", whole),
        ):
            said, counted = claims.values[name], getattr(walk, name)
            if comparable and said != counted:
                path = self._seq_idx.path
                findings.add("H9", path, _PLACES[name], f"{name} {said}", f"{counted} by the data")

    def _add(self, rule: str, pack: int, at: int, found: int, expected: int) -> None:
        """One of the kernel's breaches as a finding; see csrc/verify.h for its numbers."""
        claims = self._claims
        ascends = found > expected
        if rule in ("O1", "O2"):
            base = claims.sequence_offsets_offset if rule == "O1" else claims.token_offsets_offset
            wanted = f"at most {expected}" if ascends else f"more than the {expected} before it"
            self._found(rule, ".seq.idx", base + 8 * at, pack, f"offset {found}", wanted)
        elif rule in ("P1", "P5"):
            what = "tokens" if rule == "P1" else f"positions, sequences rounded up to {claims.sequence_multiple},"
            offset = claims.token_offsets_offset + 8 * at
            self._found(rule, ".seq.idx", offset, pack, f"{found} {what}", f"at most the capacity {expected}")
        elif rule in ("P2", "P3", "P4"):
            wanted = {"P2": "0", "P3": f"{expected} or more", "P4": f"{expected} or less"}[rule]
            self._found(rule, ".seq.bin", 4 * at, pack, f"a sequence that starts at {found}", wanted)
        else:
            dtype = claims.mask_dtype
            assert dtype is not None
            value: Any = np.array([found], "<u8").view(dtype)[0]
            owner = pack_of(self._seq_idx, claims, at)
            weights = dtype.kind == "f"
            what, wanted = (
                (f"mask {value} at a sequence's end", "0")
                if rule == "P6"
                else (f"mask {value}", "a finite weight of 0 or more" if weights else "0 or 1")
            )
            self._found(rule, ".loss.bin", at * dtype.itemsize, owner, what, wanted)

    def _found(self, rule: str, suffix: str, offset: int, pack: int | None, found: str, expected: str) -> None:
        self._findings.add(rule, self._streams[suffix].file.path, offset, found, expected, pack=pack)
