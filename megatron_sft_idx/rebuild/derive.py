"""Indexes brought back without a good header: derived from the data, marked where something is no longer known."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError, UnsupportedVersionError
from megatron_sft_idx.layout import FileDigest, Header, token_dtype_of
from megatron_sft_idx.rebuild.data import DataFiles, dtypes_by_size
from megatron_sft_idx.rebuild.ends import EndLengths
from megatron_sft_idx.rebuild.lengths import IdxLengths, Lengths
from megatron_sft_idx.rebuild.options import Known
from megatron_sft_idx.rebuild.packs import StartedPacks
from megatron_sft_idx.rebuild.replace import Replacement
from megatron_sft_idx.rebuild.salvage import damaged_values, header_sizes, proven_lengths, prove
from megatron_sft_idx.rebuild.survey import Survey
from megatron_sft_idx.rebuild.watch import Watch
from megatron_sft_idx.shard.index import write_idx, write_seq_idx
from megatron_sft_idx.shard.writer import FORMAT_WRITER
from megatron_sft_idx.storage import OutputFile

__all__ = ["derive"]


def derive(found: Survey, known: Known, new: Replacement, watch: Watch) -> tuple[Header, dict[str, str]]:
    """Write both indexes from the data files and whatever else can be believed.

    Returns:
        The header, and how each file came back, by path. An ``.idx`` that is right already is not among them.

    Raises:
        FormatError: the files that are left do not tell all that has to be known; says what is missing.
    """
    paths = found.paths
    idx, fault = _idx_lengths(found)
    token_dtype, mask_dtype = dtypes_by_size(paths, idx.token_dtype if idx else known.token_dtype, known.mask_dtype)
    files = DataFiles(paths, token_dtype, mask_dtype)
    lengths = _lengths(found, files, idx, fault, known, watch)
    packs, num_packs = StartedPacks(lengths, files.starts), lengths.num_packs

    with watch("checking", files.num_tokens) as advance:
        stage = files.measure(
            packs, capacity=known.capacity, sequence_multiple=known.sequence_multiple or 1, advance=advance
        )
    done = {}
    code = token_dtype_of(token_dtype)[0]
    idx_digest = write_idx(new.create(paths.idx), packs, code, token_dtype.itemsize, num_packs)
    if idx_digest == found.digests[paths.idx]:
        new.drop(paths.idx)
    else:
        done[paths.idx] = f"from {lengths.origin}"

    digests = {**found.digests, paths.idx: idx_digest}
    header = _header(files, stage, [digests[path] for path in paths.data], known)
    header = _settled(found, packs, header, lengths, known)
    header = write_seq_idx(new.create(paths.seq_idx), packs, header)
    what = f"{known_in_words(header)}" if header.rebuilt else "byte for byte, proven by its own checksums"
    done[paths.seq_idx] = f"from {lengths.origin}, .seq.bin, .bin and .loss.bin; {what}"
    return header, done
