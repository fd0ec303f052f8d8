"""``verify_shard``: one shard against every rule of FORMAT.md that files at rest can be held to."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard.opening import where_to_look
from megatron_sft_idx.verify.claims import Claims, check_header
from megatron_sft_idx.verify.files import CheckedFile, Meter
from megatron_sft_idx.verify.findings import Findings, Report
from megatron_sft_idx.verify.full import check_all
from megatron_sft_idx.verify.quick import (
    check_arrays,
    check_corners,
    check_idx_alone,
    check_sizes,
    open_files,
    remains,
)

__all__ = ["OnProgress", "verify_shard"]

OnProgress = Callable[[int, int], None]

_MOST = 10


def verify_shard(
    prefix: str | os.PathLike[str],
    *,
    full: bool = False,
    vocab_size: int | None = None,
    most: int = _MOST,
    on_progress: OnProgress | None = None,
) -> Report:
    """Hold the files at a prefix against the rules of FORMAT.md, and say all that is wrong.

    Goes on as far as what is left allows: opens what ``Shard`` refuses. Memory stays at a few MiB for any size.

    Args:
        prefix: the path that the five files share.
        full: read every byte: checksums, every pack, ``.idx`` byte for byte. Otherwise headers, sizes and ends, which
            takes milliseconds for any size.
        vocab_size: with ``full``, every id must be below it; None takes it from the JSON block where that says it.
        most: findings kept of each rule; the others are counted.
        on_progress: called with bytes read so far and in all, about once a MiB; with ``full`` by two threads in turn.

    Raises:
        FormatError: an argument that cannot be.
        ShardNotFoundError: nothing of a shard, or of a build of one, is at the prefix.
        OSError: a file cannot be read.
    """
    paths = ShardPaths.of(prefix)
    if vocab_size is not None and vocab_size < 1:
        raise FormatError(f"vocab_size {vocab_size}: expected 1 or more, or None where unknown")
    findings = Findings(paths.prefix, most)
    claims = None
    left = remains(paths)
    with ExitStack() as stack:
        files = open_files(paths, findings)
        for file in files.values():
            stack.enter_context(file)
        if not files and not left:
            raise ShardNotFoundError(paths.prefix, list(paths.all), where_to_look(paths))
        if left:
            findings.notes.append(
                f"{', '.join(left)}: left by a build that was killed, or of one that is under way; preprocess --resume"
                f" goes on with it, megatron-sft-idx rebuild {paths.prefix} recovers its packs, --overwrite drops it"
            )
        if ".seq.idx" in files:
            claims = check_header(files[".seq.idx"], findings)
        if claims is not None:
            total = sum(file.nbytes for file in files.values()) - claims.sequence_offsets_offset
            meter = Meter(total, on_progress)
            _check_against(files, claims, findings, full=full, vocab_size=vocab_size, meter=meter)
        elif files:
            if idx := files.get(".idx"):
                check_idx_alone(idx, findings)
            findings.notes.append("there is no header that can be read, so the other files could not be held to it")
    return _report(paths, findings, claims, full)


def _check_against(
    files: dict[str, CheckedFile],
    claims: Claims,
    findings: Findings,
    *,
    full: bool,
    vocab_size: int | None,
    meter: Meter,
) -> None:
    check_sizes(files, claims, findings)
    if claims.sound or files[".seq.idx"].nbytes == claims.seq_idx_nbytes:
        check_arrays(files, claims, findings)
        if not full:
            check_corners(files, claims, findings)
    if full:
        vocab_size = vocab_size or claims.vocab_size
        if vocab_size is None:
            findings.notes.append(
                "ids are only held to their dtype: the header names no vocabulary, --vocab-size N does"
            )
        check_all(files, claims, findings, vocab_size=vocab_size, meter=meter)


def _report(paths: ShardPaths, findings: Findings, claims: Claims | None, full: bool) -> Report:
    order = {path: number for number, path in enumerate((paths.seq_idx, *paths.data))}
    assert len(order) == len(SUFFIXES)
    kept = sorted(findings.kept, key=lambda finding: (order[finding.path], finding.offset))
    counts = {}
    if claims is not None:
        counts = {"packs": claims.num_packs, "sequences": claims.num_sequences, "tokens": claims.num_tokens}
    return Report(paths.prefix, full, tuple(kept), findings.omitted(), tuple(findings.notes), counts)
