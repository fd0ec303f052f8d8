"""Indexes brought back without a good header: derived from the data, marked where something is no longer known."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError, UnsupportedVersionError
from megatron_sft_idx.layout import FileDigest, Header, token_dtype_of
from megatron_sft_idx.rebuild.data import DataFiles, dtypes_by_size
from megatron_sft_idx.rebuild.ends import EndLengths
from megatron_sft_idx.rebuild.lengths import IdxLengths, Lengths
from megatron_sft_idx.rebuild.options import Known
from megatron_sft_idx.rebuild.packs import StartedPacks
from megatron_sft_idx.rebuild.replace import Replacement
from megatron_sft_idx.rebuild.salvage import damaged_values, header_sizes, prove, proven_lengths
from megatron_sft_idx.rebuild.survey import Survey
from megatron_sft_idx.rebuild.watch import Watch
from megatron_sft_idx.shard.build import FORMAT_WRITER
from megatron_sft_idx.shard.index import write_idx, write_seq_idx
from megatron_sft_idx.storage import OutputFile

__all__ = ["derive"]

# What only the header knew.
_KNOWN = ("capacity", "sequence_multiple", "pad_id")


def derive(found: Survey, known: Known, new: Replacement, watch: Watch) -> tuple[Header, dict[str, str]]:
    """Write both indexes from the data files and whatever else can be believed.

    Returns:
        The header, and how each file came back, by path. An ``.idx`` that is right already is not among them.

    Raises:
        FormatError: the files that are left do not tell all that has to be known; says what is missing.
    """
    paths = found.paths
    idx, fault = _idx_lengths(found, known)
    token_dtype, mask_dtype = dtypes_by_size(paths, idx.token_dtype if idx else known.token_dtype, known.mask_dtype)
    files = DataFiles(paths, token_dtype, mask_dtype)
    sizes = _header_sizes(found, files)
    lengths = _stored_lengths(found, sizes, files) or idx or _found_lengths(files, fault, known, watch)
    packs = StartedPacks(lengths, files.starts)

    with watch("checking", files.num_tokens) as advance:
        stage = files.measure(
            packs, capacity=known.capacity, sequence_multiple=known.sequence_multiple or 1, advance=advance
        )
    done = {}
    code = token_dtype_of(token_dtype)[0]
    idx_digest = write_idx(new.create(paths.idx), packs, code, token_dtype.itemsize, stage.num_packs)
    if idx_digest == found.digests[paths.idx]:
        new.drop(paths.idx)
    else:
        done[paths.idx] = f"from {lengths.origin}"

    header = _header(files, stage, {**found.digests, paths.idx: idx_digest}, known)
    # Written nowhere first: what is stored is held against the checksum of the arrays too.
    header = write_seq_idx(OutputFile(os.devnull, keep=True), packs, header)
    stored = found.raw_header or b""
    if proven := prove(stored, header, sizes, paths.seq_idx):
        _require_same(paths.seq_idx, proven, known)
        header, what = proven, "byte for byte, its own checksums prove it"
    elif isinstance(found.header_fault, UnsupportedVersionError):
        raise found.header_fault  # it may well be good
    else:
        header = _marked(header, lengths.origin, known, damaged_values(stored, sizes))
        what = _in_words(header)
    header = write_seq_idx(new.create(paths.seq_idx), packs, header)
    done[paths.seq_idx] = f"from {lengths.origin} and the data; {what}"
    return header, done


def _idx_lengths(found: Survey, known: Known) -> tuple[IdxLengths | None, CorruptShardError | None]:
    """The lengths of ``.idx``, or what is wrong with it."""
    path, tokens = found.paths.idx, found.digests[found.paths.tokens]
    if found.digests[path] is None or tokens is None:
        return None, None
    try:
        lengths = IdxLengths(path, tokens.nbytes)
    except CorruptShardError as error:
        return None, error
    if known.token_dtype not in (None, lengths.token_dtype):
        raise FormatError(f"{path}: says that tokens are {lengths.token_dtype}, --token-dtype {known.token_dtype}")
    return lengths, None


def _header_sizes(found: Survey, files: DataFiles) -> list[int]:
    if found.raw_header is None:
        return []
    return header_sizes(found.raw_header, os.stat(found.paths.seq_idx).st_size, files.starts.num_packs)


def _stored_lengths(found: Survey, sizes: list[int], files: DataFiles) -> Lengths | None:
    if found.raw_header is None:
        return None
    return proven_lengths(found.paths.seq_idx, found.raw_header, sizes, files.starts.num_packs)


def _found_lengths(files: DataFiles, fault: CorruptShardError | None, known: Known, watch: Watch) -> Lengths:
    try:
        return EndLengths(files, known.eod_id, watch)
    except FormatError as error:
        raise FormatError(f"{error}" if fault is None else f"{fault}. Without it: {error}") from None


def _header(
    files: DataFiles, stage: _native.PackStage, digests: Mapping[str, FileDigest | None], known: Known
) -> Header:
    """All that follows from the data, and what is known besides."""
    tokens, loss, idx, starts = (digest for digest in digests.values() if digest is not None)
    return Header(
        num_packs=stage.num_packs,
        num_sequences=stage.num_sequences,
        num_tokens=stage.num_tokens,
        num_trained_tokens=stage.num_trained_tokens,
        num_masked_packs=stage.num_masked_packs,
        token_dtype=files.token_dtype,
        mask_dtype=files.mask_dtype,
        sequence_multiple=known.sequence_multiple or 1,
        capacity=known.capacity or stage.longest_padded_pack,
        longest_pack=stage.longest_pack,
        most_sequences=stage.most_sequences,
        pad_id=known.pad_id,
        digests=(tokens, loss, idx, starts),
        arrays_checksum=bytes(16),
    )


def _require_same(path: str, proven: Header, known: Known) -> None:
    for name in _KNOWN:
        said, stored = getattr(known, name), getattr(proven, name)
        if said not in (None, stored):
            option = "--" + name.replace("_", "-")
            raise FormatError(f"{path}: its header proves {name} {stored}, {option} is {said}; leave the option out")


def _marked(header: Header, origin: str, known: Known, unproven: Mapping[str, Any]) -> Header:
    """The header that says what is no longer known."""
    rebuilt: dict[str, Any] = {
        "pack_lengths": origin,
        "unknown": sorted(["metadata", *(name for name in _KNOWN if getattr(known, name) is None)]),
    }
    if unproven:
        rebuilt["unproven"] = unproven
    return dataclasses.replace(header, metadata={"format_writer": FORMAT_WRITER, "rebuilt": rebuilt}, rebuilt=True)


def _in_words(header: Header) -> str:
    rebuilt = header.metadata["rebuilt"]
    unknown = set(rebuilt["unknown"])
    words = [
        f"capacity {header.capacity}" + (", the longest pack" if "capacity" in unknown else ""),
        f"sequence multiple {header.sequence_multiple}" + (", not known" if "sequence_multiple" in unknown else ""),
        "pad id not known" if header.pad_id is None else f"pad id {header.pad_id}",
        "metadata lost",
    ]
    said = ", ".join(f"{name} {rebuilt['unproven'][name]}" for name in _KNOWN) if "unproven" in rebuilt else ""
    return "; ".join(words) + (f" (the damaged header says, unproven: {said})" if said else "")
