"""Every byte of a shard: checksums (F3), the arrays (O1, O2, I1), every pack (P1 to P9) and the counts (H9).

Tokens and masks are read once, checked and hashed while they are in the processor's cache. The other three files, a
few percent of a shard, are read in step with the masks and then once more in order, for their checksums.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.layout.values import MAX_CAPACITY
from megatron_sft_idx.verify.claims import Claims
from megatron_sft_idx.verify.files import CheckedFile, Meter, Stream
from megatron_sft_idx.verify.findings import Findings
from megatron_sft_idx.verify.walk import Walk, pack_of

__all__ = ["check_all"]

_NAMES = {".bin": "tokens", ".loss.bin": "loss", ".idx": "idx", ".seq.bin": "starts"}


def check_all(
    files: Mapping[str, CheckedFile], claims: Claims, findings: Findings, *, vocab_size: int | None, meter: Meter
) -> None:
    """Read and check every byte of what is there.

    Args:
        files: what is there, by suffix; ``.seq.idx`` is.
        claims: what the header says.
        findings: where broken rules go.
        vocab_size: ids are below it; None where unknown.
        meter: told of every byte read.
    """
    if tokens := files.get(".bin"):
        _check_tokens(tokens, files[".seq.idx"], claims, findings, vocab_size, meter)
    _check_masks(files, claims, findings, meter)
    _check_indexes(files, claims, findings, meter)
    for file in files.values():
        if file.shrunk is not None:
            findings.add(
                "F2", file.path, file.shrunk, "the end of the file, which was cut while it was read", file.nbytes
            )


def _check_tokens(
    tokens: CheckedFile,
    seq_idx: CheckedFile,
    claims: Claims,
    findings: Findings,
    vocab_size: int | None,
    meter: Meter,
) -> None:
    dtype = claims.token_dtype
    stream = Stream(tokens, dtype or np.uint8, 0, tokens.nbytes, meter)
    holds = MAX_CAPACITY + 1 if dtype is None else int(np.iinfo(dtype).max) + 1
    limit = min(vocab_size or holds, holds)
    for first, ids in stream.rest():
        if dtype is None:
            continue
        count, positions = _native.find_bad_ids(ids, limit, findings.most)
        if not count:
            continue
        beyond, _ = _native.find_bad_ids(ids, holds, findings.most)
        kept = {"P8": 0, "P9": 0}
        for position in positions.tolist():
            found, at = int(ids[position]), first + position
            rule = "P8" if found < 0 else "P9"
            kept[rule] += 1
            pack = pack_of(seq_idx, claims, at)
            findings.add(rule, tokens.path, at * dtype.itemsize, f"id {found}", f"0 to {limit - 1}", pack=pack)
        for rule, total in (("P8", beyond), ("P9", count - beyond)):
            findings.add_uncounted(rule, total - kept[rule])
    _check_sum(tokens, ".bin", stream, claims, findings)


def _check_indexes(files: Mapping[str, CheckedFile], claims: Claims, findings: Findings, meter: Meter) -> None:
    for suffix in (".idx", ".seq.bin"):
        if file := files.get(suffix):
            stream = Stream(file, np.uint8, 0, file.nbytes, meter)
            for _ in stream.rest():
                pass
            _check_sum(file, suffix, stream, claims, findings)
    file, begin = files[".seq.idx"], claims.sequence_offsets_offset
    stream = Stream(file, np.uint8, begin, file.nbytes, meter)
    for _ in stream.rest():
        pass
    found, expected = stream.checksum(), claims.values["arrays_checksum"]
    if file.nbytes == claims.seq_idx_nbytes and file.shrunk is None and found != expected:
        findings.add("F3", file.path, begin, f"checksum {found.hex()} of the arrays", expected.hex())


def _check_masks(files: Mapping[str, CheckedFile], claims: Claims, findings: Findings, meter: Meter) -> None:
    loss, dtype = files.get(".loss.bin"), claims.mask_dtype
    stream = Stream(loss, dtype or np.uint8, 0, loss.nbytes, meter) if loss else None
    # Offsets are where the header says only if it can be trusted; a wrong place would be a finding a pack.
    if claims.sound or files[".seq.idx"].nbytes == claims.seq_idx_nbytes:
        Walk(files, claims, findings).run(stream if dtype is not None else None)
    else:
        findings.notes.append("where the offsets of the packs are is not known, so the packs were not checked")
    if stream is not None and loss is not None:
        for _ in stream.rest():
            pass
        _check_sum(loss, ".loss.bin", stream, claims, findings)


def _check_sum(file: CheckedFile, suffix: str, stream: Stream, claims: Claims, findings: Findings) -> None:
    """Rule F3, where the file has the size that its checksum was taken of."""
    name = _NAMES[suffix]
    found, expected = stream.checksum(), claims.values[f"{name}_checksum"]
    if file.nbytes == claims.values[f"{name}_nbytes"] and file.shrunk is None and found != expected:
        findings.add("F3", file.path, 0, f"checksum {found.hex()}", expected.hex())
