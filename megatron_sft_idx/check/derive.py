"""Derive both indexes of a shard from its data if there is no good header of ``.seq.idx``.

Pack lengths come from ``.idx``, or else from masks. Values that no file contains are marked as unknown in the new
header. If several shards could have the same data, none is chosen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.check.lengths import idx_lengths, infer_lengths, read_starts
from megatron_sft_idx.check.pack_walk import CheckedFile, Meter, OffsetRun, Stream, walk_packs
from megatron_sft_idx.check.restore import Repair, inferred_in_words, joined_packs
from megatron_sft_idx.check.rules import Findings, HeaderClaims, add_breaches, check_ids
from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import (
    MASK_DTYPES,
    TOKEN_DTYPES,
    FileDigest,
    Header,
    ShardPaths,
    mask_dtype_of,
    token_dtype_of,
)
from megatron_sft_idx.layout.files import MAX_CAPACITY, MEDIA_ENTRY, MediaChecksums
from megatron_sft_idx.layout.media_layout import MediaHeader
from megatron_sft_idx.shard import BuildOptions
from megatron_sft_idx.shard.media_reader import items_start
from megatron_sft_idx.shard.pack_log import PackChunk
from megatron_sft_idx.shard.writer import FORMAT_WRITER, header_of, write_idx, write_seq_idx
from megatron_sft_idx.storage.local import digest_file

# Fields of the header that no other file contains.
_HEADER_ONLY = ("capacity", "pad_id", "sequence_multiple")


def derive_indexes(repair: Repair) -> tuple[dict[str, str], Header]:
    """Write both indexes from the data files, and from ``.idx`` if that is good.

    Returns:
        The method used to restore each file, by path (without an ``.idx`` that is already right); and the new header.

    Raises:
        FormatError: the remaining files do not contain everything needed. The message says what is missing.
    """
    paths, facts, watch = repair.paths, repair.facts, repair.watch
    if missing := [path for path in (paths.tokens, paths.loss, paths.starts) if path in repair.faults]:
        raise FormatError(
            f"{paths.prefix}: missing files that cannot be derived without a valid .seq.idx: {', '.join(missing)};"
            " restore them from a copy (rule F1)"
        )
    media = _media_beside(paths)
    present = [path for path in paths.data if os.path.exists(path)]
    with watch("reading", sum(os.stat(path).st_size for path in present)) as advance:
        digests = {path: digest_file(path, advance=advance) for path in present}
    lengths, dtypes, idx_fault = _index_and_dtypes(repair, digests)
    starts = read_starts(paths.starts)
    origin = ".idx"
    if lengths is None:
        origin = inferred_in_words(facts.eod_id)
        try:
            lengths = infer_lengths(paths, starts, dtypes, facts.eod_id, watch)
        except FormatError as ambiguous:
            raise FormatError(f"{idx_fault}{ambiguous}") from None
    packs = joined_packs(paths, lengths, starts, origin)
    walk = _measured(repair, dtypes, packs)
    how_restored: dict[str, str] = {}
    digest = write_idx(repair.create(paths.idx), [packs], dtypes[0], walk.num_packs)
    if digest == digests.get(paths.idx):
        repair.reject(paths.idx)
    else:
        how_restored[paths.idx] = f"from {origin}"
    digests[paths.idx] = digest
    tokens, loss, index, begins = (digests[path] for path in paths.data)
    unknown = [name for name in _HEADER_ONLY if getattr(facts, name) is None]
    rebuilt = {"pack_lengths": origin, "unknown": sorted(["metadata", *unknown])}
    metadata: dict[str, Any] = {"format_writer": FORMAT_WRITER, "rebuilt": rebuilt}
    if media is not None:
        metadata[MEDIA_ENTRY] = media.encode()
    options = BuildOptions(*dtypes, facts.capacity, facts.sequence_multiple or 1, facts.pad_id, metadata)
    header = header_of(walk, options, (tokens, loss, index, begins), rebuilt=True)
    header = write_seq_idx(repair.create(paths.seq_idx), [packs], header)
    how_restored[paths.seq_idx] = f"from {origin} and the data; {_what_is_known(header, unknown)}"
    return how_restored, header


def _media_beside(paths: ShardPaths) -> MediaChecksums | None:
    """Return the checksums in ``.media.items`` of the images and audio at a prefix, or None if there are none.

    FormatError: the file is missing or damaged, or it is not certain that it belongs to the shard.
    """
    if (start := items_start(paths)) is not None:
        return MediaHeader.decode(start.raw, paths.media_items).checksums
    if os.path.lexists(paths.media_data):
        raise FormatError(
            f"{paths.media_data}: it may contain the images and audio of this shard, but {paths.media_items}, with"
            " their positions, is missing: restore that file from a copy; if the shard has no images or audio, move"
            " this file away"
        )
    return None


def _index_and_dtypes(
    repair: Repair, digests: Mapping[str, FileDigest]
) -> tuple[NDArray[np.int64] | None, tuple[np.dtype[Any], np.dtype[Any]], str]:
    """Return pack lengths from ``.idx`` (or None), the dtypes of tokens and masks, and the fault of ``.idx``."""
    paths, facts = repair.paths, repair.facts
    idx, token_dtype, fault = None, facts.token_dtype, ""
    if paths.idx in digests:
        try:
            idx, token_dtype = idx_lengths(paths.idx, digests[paths.tokens].nbytes)
        except CorruptShardError as corrupt:
            fault = f"{corrupt}. Without it: "
        if idx is not None and facts.token_dtype not in (None, token_dtype):
            raise FormatError(
                f"{paths.idx}: its tokens are {token_dtype}, but --token-dtype is {facts.token_dtype}; leave the"
                " option out if the file is right"
            )
    return idx, _dtypes_by_size(paths, token_dtype, facts.mask_dtype), fault


def _dtypes_by_size(
    paths: ShardPaths, token_dtype: np.dtype[Any] | None, mask_dtype: np.dtype[Any] | None
) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Infer the dtypes of ``.bin`` and ``.loss.bin`` from their sizes. FormatError unless exactly one pair fits.

    A token has 2 or 4 bytes and its mask 1 or 4. The four ratios differ, so the choice is ambiguous only for empty
    files.
    """
    tokens_nbytes, loss_nbytes = os.stat(paths.tokens).st_size, os.stat(paths.loss).st_size
    fitting = [
        (tokens, mask)
        for tokens in TOKEN_DTYPES.values()
        for mask in MASK_DTYPES.values()
        if tokens_nbytes % tokens.itemsize == 0
        and tokens_nbytes // tokens.itemsize * mask.itemsize == loss_nbytes
        and token_dtype in (None, tokens)
        and mask_dtype in (None, mask)
    ]
    if len(fitting) == 1:
        return fitting[0]
    sizes = f"{paths.prefix}: .bin has {tokens_nbytes} bytes, .loss.bin has {loss_nbytes}"
    if fitting:
        raise FormatError(f"{sizes}, from which the dtypes cannot be determined; pass --token-dtype and --mask-dtype")
    given = ", ".join(str(dtype) for dtype in (token_dtype, mask_dtype) if dtype is not None)
    expected = given or "uint16 or int32 tokens with uint8 or float32 masks"
    raise FormatError(f"{sizes}, which does not match {expected} (rule F2); restore the truncated file")


def _measured(repair: Repair, dtypes: tuple[np.dtype[Any], np.dtype[Any]], packs: PackChunk) -> _native.PackWalk:
    """Walk all packs to get their counts. FormatError: they break a rule."""
    paths, facts = repair.paths, repair.facts
    num_tokens = os.stat(paths.tokens).st_size // dtypes[0].itemsize
    values = {
        "num_packs": len(packs.lengths),
        "num_sequences": int(packs.sequences.sum()),
        "num_tokens": num_tokens,
        "capacity": facts.capacity or MAX_CAPACITY,
        "sequence_multiple": facts.sequence_multiple or 1,
        "token_dtype": token_dtype_of(dtypes[0])[0],
        "mask_dtype": mask_dtype_of(dtypes[1])[0],
        "header_nbytes": 0,
    }
    claims, findings = HeaderClaims(values), Findings(paths.prefix, 1)
    walk = claims.kernel(1)

    token_offsets = _native.offsets_from_lengths(packs.lengths, 1, 0)
    sequence_offsets = _native.offsets_from_lengths(packs.sequences, 1, 0)
    run = OffsetRun(token_offsets, sequence_offsets, len(packs.lengths))

    def pack_of(token: int) -> int | None:
        return int(np.searchsorted(token_offsets, token, side="right")) - 1

    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(contextlib.closing(CheckedFile(path)))
            for path in (paths.tokens, paths.loss, paths.starts)
        ]
        advance = stack.enter_context(repair.watch("checking", sum(file.nbytes for file in files)))
        meter = Meter(advance)
        tokens, loss, starts = (Stream(file, meter) for file in files)
        walk_packs(walk, [run], starts, loss, dtypes[1])
        add_breaches(walk, paths, claims, findings, pack_of)
        check_ids(tokens, dtypes[0], 1 << 32, findings, pack_of)
    for finding in findings.kept:
        if finding.path == paths.seq_idx:  # not written yet, so only its limits can be wrong
            remedy = "pass the --seq-length and --sequence-multiple that it was packed with, or leave both out"
            raise FormatError(f"{paths.prefix}: {finding.what}; {remedy}")
        raise FormatError(
            f"{finding.where}: {finding.what}; the files belong to different shards, or one is damaged: restore it"
        )
    return walk


def _what_is_known(header: Header, unknown: Sequence[str]) -> str:
    """Describe which header values the files do not contain; ``unknown`` are names in ``_HEADER_ONLY``."""
    words = [
        f"capacity {header.capacity}" + (" (the longest pack)" if "capacity" in unknown else ""),
        f"sequence multiple {header.sequence_multiple}" + (" (unknown)" if "sequence_multiple" in unknown else ""),
        "pad id unknown" if header.pad_id is None else f"pad id {header.pad_id}",
        "metadata lost",
    ]
    return "; ".join(words)
