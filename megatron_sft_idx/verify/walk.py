"""The walk over all packs: offsets, ``.idx``, sequence starts and masks in step, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.layout.header import FIELDS
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
    """One pass over the packs of a shard.

    Args:
        files: what is there, by suffix; ``.seq.idx`` is.
        claims: what the header says.
        findings: where broken rules go.
    """

    def __init__(self, files: Mapping[str, CheckedFile], claims: Claims, findings: Findings) -> None:
        self._files, self._claims, self._findings = files, claims, findings
        self._native = _native.PackWalk(
            sequences=claims.num_sequences,
            tokens=claims.num_tokens,
            capacity=claims.capacity,
            multiple=claims.sequence_multiple,
            most=findings.most,
        )

    def run(self, masks: Stream | None) -> None:
        """Walk; ``masks`` is read to its end, or is None where there is none that could be."""
        walk, claims = self._native, self._claims
        for first in range(0, claims.num_packs, _RUN_PACKS):
            count = min(_RUN_PACKS, claims.num_packs - first)
            # One offset more than the run needs, where there is one: see PackWalk.packs.
            tokens, sequences = (self._offsets(base, first, count + 2) for base in (
                claims.token_offsets_offset, claims.sequence_offsets_offset,
            ))  # fmt: skip
            given = min(len(tokens), len(sequences), claims.num_packs + 1 - first)
            count = min(count, given - 1)
            if count < 1:
                break
            walk.packs(tokens[:given], sequences[:given], count)
            self._check_idx(first, tokens[: count + 1])
            self._take_starts(masks)
        if masks is not None:
            for _, mask in masks.rest():
                walk.mask(mask)
        self._report(masks)

    def _offsets(self, base: int, first: int, count: int) -> NDArray[np.int64]:
        count = min(count, self._claims.num_packs + 1 - first)
        return self._files[".seq.idx"].array("<i8", base + 8 * first, count)

    def _take_starts(self, masks: Stream | None) -> None:
        """The starts of the packs handed in last, and the masks of all tokens they make known."""
        walk, starts = self._native, self._files.get(".seq.bin")
        while starts and (wanted := walk.wanted_sequences - walk.next_sequence) > 0:
            piece = starts.array("<u4", 4 * walk.next_sequence, min(wanted, _PIECE_SEQUENCES))
            if not len(piece):
                return  # the file ends here, which its size or its reader says
            walk.starts(piece)
            if masks is not None:
                for _, mask in masks.upto(walk.known):
                    walk.mask(mask)

    def _check_idx(self, first: int, token_offsets: NDArray[np.int64]) -> None:
        """Rule I1 for a run of packs."""
        idx, dtype = self._files.get(".idx"), self._claims.token_dtype
        if idx is None or dtype is None:
            return
        count, num_packs = len(token_offsets) - 1, self._claims.num_packs
        places = IdxPlaces(num_packs)
        # The last run brings the end of the last document.
        documents = np.arange(first, first + count + (first + count == num_packs))
        self._compare(idx, "length", "<i4", places.lengths, first, np.diff(token_offsets))
        self._compare(idx, "position", "<i8", places.pointers, first, token_offsets[:-1] * dtype.itemsize)
        self._compare(idx, "document", "<i8", places.documents, first, documents)

    def _compare(
        self, idx: CheckedFile, what: str, dtype: str, base: int, first: int, expected: NDArray[np.int64]
    ) -> None:
        itemsize = np.dtype(dtype).itemsize
        found = idx.array(dtype, base + itemsize * first, len(expected))
        differs = found != expected[: len(found)]
        if not differs.any():
            return
        bad, most = np.flatnonzero(differs), self._findings.most
        for i in bad[:most].tolist():
            offset = base + itemsize * (first + i)
            self._findings.add("I1", idx.path, offset, f"{what} {found[i]}", expected[i], pack=first + i)
        self._findings.add_uncounted("I1", len(bad[most:]))

    def _report(self, masks: Stream | None) -> None:
        walk, claims, findings = self._native, self._claims, self._findings
        kept: dict[str, int] = {}
        for breach in walk.breaches:
            self._add(*breach)
            kept[breach[0]] = kept.get(breach[0], 0) + 1
        for rule, count in walk.counts.items():
            findings.add_uncounted(rule, count - kept[rule])
        whole = walk.num_packs == claims.num_packs
        seen = masks is not None and masks.position == claims.num_tokens
        for name, comparable in (
            ("num_trained_tokens", seen),
            ("num_masked_packs", seen and whole),
            ("longest_pack", whole),
            ("most_sequences", whole),
        ):
            said, counted = claims.values[name], getattr(walk, name)
            if comparable and said != counted:
                path = self._files[".seq.idx"].path
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
            owner = pack_of(self._files[".seq.idx"], claims, at)
            weights = dtype.kind == "f"
            what, wanted = (
                (f"mask {value} at a sequence's end", "0")
                if rule == "P6"
                else (f"mask {value}", "a finite weight of 0 or more" if weights else "0 or 1")
            )
            self._found(rule, ".loss.bin", at * dtype.itemsize, owner, what, wanted)

    def _found(self, rule: str, suffix: str, offset: int, pack: int | None, found: str, expected: str) -> None:
        self._findings.add(rule, self._files[suffix].path, offset, found, expected, pack=pack)
