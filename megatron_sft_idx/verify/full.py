"""Every byte of a shard: checksums (F3), the arrays (O1, O2, I1), every pack (P1 to P9) and the counts (H9).

What is read is checked and hashed while it is in the processor's cache: tokens in one thread, all else in another. Only
the offsets of tokens are read twice: the packs need them in step with those of sequences, and their checksum one after
the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megatron_sft_idx import _native
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
    begins = {".seq.idx": claims.sequence_offsets_offset}
    streams = {suffix: Stream(file, meter, begins.get(suffix, 0)) for suffix, file in files.items()}
    with ThreadPoolExecutor(1) as pool:
        try:
            tokens = pool.submit(_check_tokens, streams.get(".bin"), files[".seq.idx"], claims, findings, vocab_size)
            # Offsets are where the header says only if it can be trusted; a wrong place would be a finding a pack.
            if claims.sound or files[".seq.idx"].nbytes == claims.seq_idx_nbytes:
                Walk(streams, claims, findings).run()
            else:
                findings.notes.append("where the offsets of the packs are is not known, so the packs were not checked")
            tokens.result()
        except BaseException:
            meter.stop()  # or the pool would wait for the thread to read all tokens
            raise
    for suffix, stream in streams.items():
        _check_sum(suffix, stream, claims, findings)
    for file in files.values():
        if file.shrunk is not None:
            findings.add(
                "F2", file.path, file.shrunk, "the end of the file, which was cut while it was read", file.nbytes
            )


def _check_tokens(
    stream: Stream | None, seq_idx: CheckedFile, claims: Claims, findings: Findings, vocab_size: int | None
) -> None:
    dtype = claims.token_dtype
    if stream is None or dtype is None:
        return
    holds = int(np.iinfo(dtype).max) + 1
    limit = min(vocab_size or holds, holds)
    first = 0
    for ids in stream.pieces(dtype):
        count, positions = _native.find_bad_ids(ids, limit, findings.most)
        if count:
            beyond, _ = _native.find_bad_ids(ids, holds, findings.most)
            kept = {"P8": 0, "P9": 0}
            for position in positions.tolist():
                found, at = int(ids[position]), first + position
                rule = "P8" if found < 0 else "P9"
                kept[rule] += 1
                pack = pack_of(seq_idx, claims, at)
                offset = at * dtype.itemsize
                findings.add(rule, stream.file.path, offset, f"id {found}", f"0 to {limit - 1}", pack=pack)
            for rule, total in (("P8", beyond), ("P9", count - beyond)):
                findings.add_uncounted(rule, total - kept[rule])
        first += len(ids)


def _check_sum(suffix: str, stream: Stream, claims: Claims, findings: Findings) -> None:
    """Rule F3, where the file has the size that its checksum was taken of."""
    found, file = stream.finish(), stream.file
    if suffix == ".seq.idx":
        begin, what, nbytes, expected = (
            claims.sequence_offsets_offset, " of the arrays", claims.seq_idx_nbytes, claims.values["arrays_checksum"]
        )  # fmt: skip
    else:
        name = _NAMES[suffix]
        begin, what, nbytes, expected = 0, "", claims.values[f"{name}_nbytes"], claims.values[f"{name}_checksum"]
    if file.nbytes == nbytes and file.shrunk is None and found != expected:
        findings.add("F3", file.path, begin, f"checksum {found.hex()}{what}", expected.hex())
