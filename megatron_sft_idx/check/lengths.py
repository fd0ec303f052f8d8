"""The lengths of all packs, read from an index (even a damaged one), or inferred from the data.

No file is trusted: each source is checked completely before its lengths are used. Lengths and the starts of sequences
are held in memory, 8 bytes per pack and 12 per sequence.

Lengths are inferred from the data (``infer_lengths``) only if there is exactly one possible result. ``.seq.bin`` gives
the number of sequences. A sequence can end only where the mask is 0. If there are as many such positions as sequences,
they are the ends.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout import TOKEN_DTYPES, ShardPaths
from megatron_sft_idx.layout.files import IDX_HEADER, IDX_HEADER_NBYTES, MAX_CAPACITY, idx_places, pack_idx_header
from megatron_sft_idx.storage import open_array, open_regular
from megatron_sft_idx.storage.progress import Watch

_CHUNK_TOKENS = 1 << 18


def _read_items(path: str, dtype: str, offset: int, count: int, nbytes: int) -> NDArray[Any]:
    """Read ``count`` items from byte ``offset`` of a file of ``nbytes`` bytes."""
    return open_array(path, np.dtype(dtype), count, nbytes=nbytes, offset=offset, backend="pread")[:]


def idx_lengths(path: str, tokens_nbytes: int) -> tuple[NDArray[np.int64], np.dtype[Any]]:
    """Return pack lengths in tokens from a ``.idx`` (ours or Megatron's), int64 [packs], and the token dtype.

    Raises:
        CorruptShardError: it is not the index of a ``.bin`` of ``tokens_nbytes`` bytes (rules I1, P1, F2).
    """
    nbytes = os.stat(path).st_size

    def corrupt(offset: int, what: str, rule: str = "I1") -> CorruptShardError:
        detail = f"{what}; this file of {nbytes} bytes is damaged, or not the index of the .bin next to it"
        return CorruptShardError(path, offset, rule, detail)

    with open_regular(path) as file:
        raw = file.read(IDX_HEADER_NBYTES)
    if len(raw) < IDX_HEADER_NBYTES:
        raise corrupt(len(raw), f"file ends after {len(raw)} bytes, but an index has at least {IDX_HEADER_NBYTES}")
    _, _, code, num_packs, documents = IDX_HEADER.unpack(raw)
    if code not in TOKEN_DTYPES:
        raise corrupt(17, f"dtype code {code}, expected 4 (int32) or 8 (uint16)")
    if raw[:17] != pack_idx_header(code, 0)[:17]:
        raise corrupt(0, f"begins with {raw[:17]!r}, so it is not a Megatron index of version 1")
    # Python integers do not overflow, so a damaged count near 2^63 is an error here like any other.
    if nbytes != (expected := IDX_HEADER_NBYTES + 12 * num_packs + 8 * documents):
        raise corrupt(18, f"an index of {num_packs} packs and {documents} documents has {expected} bytes")
    _, base, _ = idx_places(num_packs)
    lengths = _read_items(path, "<i4", IDX_HEADER_NBYTES, num_packs, nbytes).astype(np.int64)
    pointers = _read_items(path, "<i8", base, num_packs, nbytes)
    for bad in np.flatnonzero(lengths <= 0)[:1].tolist():
        what = f"pack {bad} has length {lengths[bad]}, expected 1 or more"
        raise corrupt(IDX_HEADER_NBYTES + 4 * bad, what, "P1")
    begins = _native.offsets_from_lengths(lengths, TOKEN_DTYPES[code].itemsize, 0)
    for bad in np.flatnonzero(pointers != begins[:-1])[:1].tolist():
        what = f"pack {bad} begins at byte {pointers[bad]}, expected {begins[bad]} from the lengths before it"
        raise corrupt(base + 8 * bad, what)
    if begins[-1] != tokens_nbytes:
        raise corrupt(
            IDX_HEADER_NBYTES, f"the packs have {begins[-1]} bytes in total, but .bin has {tokens_nbytes}", "F2"
        )
    return lengths, TOKEN_DTYPES[code]


def offset_lengths(path: str, offset: int, num_packs: int) -> NDArray[np.int64]:
    """Return the differences of the ``num_packs`` + 1 offsets from byte ``offset`` of a ``.seq.idx`` on, int64 [packs].

    Raises:
        CorruptShardError: the offsets do not begin with 0 or do not ascend (rule O2), or the file ends before them.
    """
    nbytes = os.stat(path).st_size
    if offset + 8 * (num_packs + 1) > nbytes:
        raise CorruptShardError(path, nbytes, "F2", "the file ends inside its token offsets")
    offsets = _read_items(path, "<i8", offset, num_packs + 1, nbytes)
    if offsets[0] != 0:
        raise CorruptShardError(path, offset, "O2", f"token offsets begin with {offsets[0]}, expected 0")
    lengths = np.diff(offsets)
    for bad in np.flatnonzero((lengths <= 0) | (lengths > MAX_CAPACITY))[:1].tolist():
        detail = f"token offsets give pack {bad} a length of {lengths[bad]}"
        raise CorruptShardError(path, offset + 8 * bad, "O2", detail)
    return lengths


def read_starts(path: str) -> NDArray[np.uint32]:
    """Read a ``.seq.bin``, uint32 [sequences]. The first sequence of a pack, and no other, starts at 0.

    Raises:
        CorruptShardError: the size is not a multiple of 4, the first start is not 0, or the starts of a pack do not
            ascend (rules F2, P2, P3).
    """
    nbytes = os.stat(path).st_size
    if nbytes % 4:
        raise CorruptShardError(
            path, nbytes, "F2", f"file has {nbytes} bytes, which is not a multiple of 4; restore it"
        )
    starts = _read_items(path, "<u4", 0, nbytes // 4, nbytes)
    if len(starts) and starts[0]:
        raise CorruptShardError(path, 0, "P2", f"the first start is {starts[0]}, expected 0; restore the file")
    for at in np.flatnonzero((starts[1:] != 0) & (starts[1:] <= starts[:-1]))[:1].tolist():
        what = f"start {starts[at + 1]} follows start {starts[at]}, expected a larger one or 0; restore the file"
        raise CorruptShardError(path, 4 * (at + 1), "P3", what)
    return starts


def first_sequences(starts: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the number of the first sequence of each pack, then the number of sequences, int64 [packs + 1]."""
    return np.append(np.flatnonzero(starts == 0), len(starts))


def infer_lengths(
    paths: ShardPaths,
    starts: NDArray[np.uint32],
    dtypes: tuple[np.dtype[Any], np.dtype[Any]],
    eod_id: int | None,
    watch: Watch,
) -> NDArray[np.int64]:
    """Infer pack lengths, int64 [packs], if exactly as many tokens can end a sequence as there are sequences.

    Args:
        paths: paths of the shard; its tokens and masks must exist.
        starts: starts of all packs, from ``read_starts``.
        dtypes: dtypes of tokens and masks.
        eod_id: the id at the end of every sequence; None if it is not known.
        watch: reports the progress of reading.

    Raises:
        FormatError: sequences could also end elsewhere, or the starts contradict the ends.
    """
    nbytes = os.stat(paths.tokens).st_size
    num_tokens = nbytes // dtypes[0].itemsize
    tokens = open_array(paths.tokens, dtypes[0], num_tokens, nbytes=nbytes, backend="pread")
    loss_nbytes = os.stat(paths.loss).st_size
    loss = open_array(paths.loss, dtypes[1], num_tokens, nbytes=loss_nbytes, backend="pread")
    num_ends, found = 0, [np.zeros(1, np.int64)]
    with watch("looking for ends of sequences", num_tokens) as advance:
        for first in range(0, num_tokens, _CHUNK_TOKENS):
            chunk = slice(first, min(first + _CHUNK_TOKENS, num_tokens))
            may_end = loss[chunk] == 0
            if eod_id is not None:
                may_end &= tokens[chunk] == eod_id
            ends = first + 1 + np.flatnonzero(may_end)
            num_ends += len(ends)
            if num_ends <= len(starts):  # otherwise they are only counted
                found.append(ends)
            advance(len(may_end))
    begins = np.concatenate(found)  # of all sequences, then the end of the last one
    is_certain = num_ends == len(starts) and begins[-1] == num_tokens
    if is_certain:
        pack_begins = begins[first_sequences(starts)]
        lengths = np.diff(pack_begins)
        num_sequences = np.diff(first_sequences(starts))
        is_certain = np.array_equal(begins[:-1] - np.repeat(pack_begins[:-1], num_sequences), starts)
    if not is_certain:
        where = "the mask is 0" if eod_id is None else f"the mask is 0 and the id is {eod_id}"
        raise FormatError(
            f"{paths.prefix}: the ends of packs cannot be determined: {num_ends} tokens could end a sequence"
            f" ({where}), but there are {len(starts)} sequences; pass --eod-id if every sequence ends with an id that"
            " occurs nowhere else, or restore .idx or .seq.idx from a copy"
        )
    return lengths
