"""What can be told in milliseconds whatever a shard's size: which files are there, their sizes, the ends of the arrays.

Rules F1, F2, H5 between the arrays, and the corner values of O1, O2, I1, P2, P4 and P6.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.layout.mmididx import IDX_HEADER, IDX_HEADER_NBYTES, idx_nbytes, pack_idx_header
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.verify.claims import Claims
from megatron_sft_idx.verify.files import CheckedFile
from megatron_sft_idx.verify.findings import Findings
from megatron_sft_idx.verify.remote import RemoteFile

__all__ = ["IdxPlaces", "check_arrays", "check_corners", "check_idx_alone", "check_sizes", "open_files", "remains"]


class IdxPlaces:
    """Where the arrays of ``.idx`` begin, in bytes, for a number of packs."""

    def __init__(self, num_packs: int) -> None:
        self.lengths = IDX_HEADER_NBYTES
        self.pointers = self.lengths + 4 * num_packs
        self.documents = self.pointers + 8 * num_packs


def open_files(paths: ShardPaths, findings: Findings) -> dict[str, CheckedFile]:
    """The files that are there, by suffix; the others break rule F1."""
    files: dict[str, CheckedFile] = {}
    recover = "megatron-sft-idx rebuild PREFIX recovers what the build left" if os.path.exists(paths.journal) else None
    for suffix, path in zip(SUFFIXES, paths.all, strict=True):
        try:
            files[suffix] = RemoteFile(path) if is_remote(path) else CheckedFile(path)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.lexists(path):
                found, remedy = "something that is no regular file", f"remove it, then {findings.remedy(path)}"
            else:
                found, remedy = "no such file", recover or findings.remedy(path)
            findings.add("F1", path, 0, found, "one of the five files of a shard", remedy=remedy)
    return files


def remains(paths: ShardPaths) -> list[str]:
    """Names of what a build leaves when it is killed."""
    folder, name = os.path.split(paths.prefix)
    ours = tuple(f"{name}{suffix}.tmp" for suffix in SUFFIXES)
    try:
        entries = os.listdir(folder or ".")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(entry for entry in entries if entry == f"{name}.journal" or entry.startswith(ours))


def check_sizes(files: Mapping[str, CheckedFile], claims: Claims, findings: Findings) -> None:
    """Rule F2: each file has the size that follows from the counts."""
    for suffix, file in files.items():
        expected = claims.nbytes(suffix)
        if expected is not None and file.nbytes != expected:
            offset = min(file.nbytes, expected)
            findings.add("F2", file.path, offset, f"{file.nbytes} bytes", f"{expected} by the header")


def check_arrays(files: Mapping[str, CheckedFile], claims: Claims, findings: Findings) -> None:
    """The ends of both arrays of ``.seq.idx`` (O1, O2), the zeros between them (H5), the head of ``.idx`` (I1)."""
    file = files[".seq.idx"]
    for rule, what, base, total in (
        ("O1", "sequence_offsets", claims.sequence_offsets_offset, claims.num_sequences),
        ("O2", "token_offsets", claims.token_offsets_offset, claims.num_tokens),
    ):
        for which, index, expected in (("first", 0, 0), ("last", claims.num_packs, total)):
            offset = base + 8 * index
            for found in file.array("<i8", offset, 1):
                if found != expected:
                    findings.add(rule, file.path, offset, f"{found} as {which} of {what}", expected)
    gap = claims.sequence_offsets_offset + 8 * (claims.num_packs + 1)
    if any(file.read(gap, claims.token_offsets_offset - gap)):
        findings.add("H5", file.path, gap, "bytes between the two arrays", "zeros")
    if idx := files.get(".idx"):
        _check_idx_head(idx, pack_idx_header(claims.values["token_dtype"], claims.num_packs), findings)


def _check_idx_head(idx: CheckedFile, expected: bytes, findings: Findings) -> None:
    found = idx.read(0, IDX_HEADER_NBYTES)
    if found != expected:
        offset = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
        findings.add("I1", idx.path, offset, f"head {found.hex()}", expected.hex())


def check_idx_alone(idx: CheckedFile, findings: Findings) -> None:
    """Rule I1 as far as ``.idx`` tells by itself."""
    raw = idx.read(0, IDX_HEADER_NBYTES)
    if len(raw) < IDX_HEADER_NBYTES:
        findings.add("I1", idx.path, len(raw), f"{len(raw)} bytes", f"at least {IDX_HEADER_NBYTES}")
        return
    _, _, code, num_packs, _ = IDX_HEADER.unpack(raw)
    # Nothing else has this many packs, so the multiplication is of Python's unbounded numbers.
    if num_packs + 1 >= 1 << 64 or raw != pack_idx_header(code, num_packs):
        findings.add("I1", idx.path, 0, f"head {raw.hex()}", "Megatron's: MMIDIDX, version 1, packs, packs + 1")
    elif idx.nbytes != idx_nbytes(num_packs):
        found, expected = f"{idx.nbytes} bytes", f"{idx_nbytes(num_packs)} for the {num_packs} packs it says"
        findings.add("I1", idx.path, min(idx.nbytes, idx_nbytes(num_packs)), found, expected)


def check_corners(files: Mapping[str, CheckedFile], claims: Claims, findings: Findings) -> None:
    """The first and last values of ``.idx`` (I1), ``.seq.bin`` (P2, P4) and ``.loss.bin`` (P6)."""
    if not claims.num_packs:
        return
    last = claims.num_packs - 1
    if idx := files.get(".idx"):
        places = IdxPlaces(claims.num_packs)
        for pack in sorted({0, last}):
            _check_idx_entry(files[".seq.idx"], idx, claims, places, pack, findings)
    starts, loss = files.get(".seq.bin"), files.get(".loss.bin")
    if starts:
        for found in starts.array("<u4", 0, 1):
            if found != 0:
                findings.add("P2", starts.path, 0, f"a first sequence that starts at {found}", 0, pack=0)
        offset = 4 * (claims.num_sequences - 1)
        lengths = files[".seq.idx"].array("<i8", claims.token_offsets_offset + 8 * last, 2)
        length = int(lengths[1]) - int(lengths[0]) if len(lengths) == 2 else 0
        for found in starts.array("<u4", offset, 1):
            if found >= length > 0:
                expected = f"less than the {length} tokens of the pack"
                findings.add("P4", starts.path, offset, f"a sequence that starts at {found}", expected, pack=last)
    if loss and claims.mask_dtype is not None:
        offset = claims.mask_dtype.itemsize * (claims.num_tokens - 1)
        for found in loss.array(claims.mask_dtype, offset, 1):
            if found != 0:
                findings.add("P6", loss.path, offset, f"mask {found} at a sequence's end", 0, pack=last)


def _check_idx_entry(
    seq_idx: CheckedFile, idx: CheckedFile, claims: Claims, places: IdxPlaces, pack: int, findings: Findings
) -> None:
    offsets = seq_idx.array("<i8", claims.token_offsets_offset + 8 * pack, 2)
    if len(offsets) < 2 or claims.token_dtype is None:
        return
    begin, end = map(int, offsets)
    for what, base, dtype, number, expected in (
        ("length", places.lengths, "<i4", pack, end - begin),
        ("position", places.pointers, "<i8", pack, begin * claims.token_dtype.itemsize),
        ("document", places.documents, "<i8", pack, pack),
        ("document", places.documents, "<i8", pack + 1, pack + 1),
    ):
        offset = base + int(dtype[-1]) * number
        for found in idx.array(dtype, offset, 1):
            if found != expected:
                findings.add("I1", idx.path, offset, f"{what} {found}", expected, pack=pack)
