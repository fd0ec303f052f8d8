"""What is at a prefix: each file's checksum, and the header where it can be believed."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.header import MAX_HEADER_NBYTES
from megatron_sft_idx.rebuild.lengths import IdxLengths
from megatron_sft_idx.rebuild.watch import Watch
from megatron_sft_idx.storage import read_most
from megatron_sft_idx.storage.hashing import digest_file

__all__ = ["Survey", "survey"]

# Read of any header; more only where it says that it is larger.
_USUAL_HEADER_NBYTES = 1 << 16


@dataclass(frozen=True)
class Survey:
    """The state of the five files.

    Attributes:
        paths: theirs.
        digests: of each of the four data files, None where it is missing.
        raw_header: the first bytes of ``.seq.idx``, the header and mostly more; None where missing.
        header: None where ``.seq.idx`` is missing or its header breaks a rule; else every field of it is right.
        header_fault: why there is no header where ``.seq.idx`` is there.
        faults: what is wrong, by path; a path that is not in it is good.
        arrays_good: whether the arrays of ``.seq.idx`` are those that a good header was written with.
    """

    paths: ShardPaths
    digests: dict[str, FileDigest | None]
    raw_header: bytes | None
    header: Header | None
    header_fault: SFTIndexError | None
    faults: dict[str, str]
    arrays_good: bool


def survey(paths: ShardPaths, watch: Watch) -> Survey:
    """Read every byte at a prefix.

    Raises:
        FormatError: something else than a file has the name of one.
    """
    for path in paths.present():
        if not os.path.isfile(path):
            raise FormatError(f"{path}: not a file; remove what is there, or choose the right prefix")
    sizes = sum(os.stat(path).st_size for path in paths.present())
    with watch("reading", sizes) as advance:
        digests = {path: digest_file(path, advance=advance) if os.path.exists(path) else None for path in paths.data}
        raw, header, header_fault = _read_header(paths)
        faults, arrays_good = ({paths.seq_idx: _detail(header_fault)} if header_fault else {}), False
        if header is not None:
            faults = _unlike(paths, header, digests)
            found = digest_file(paths.seq_idx, header.nbytes, advance=advance)
            nbytes = header.seq_idx_nbytes - header.nbytes
            arrays_good = found == FileDigest(nbytes, header.arrays_checksum)
            if not arrays_good:
                faults[paths.seq_idx] = (
                    f"arrays have {found.nbytes} bytes and checksum {found.checksum.hex()},"
                    f" the header says {nbytes} and {header.arrays_checksum.hex()} (rule F3)"
                )
        elif digests[paths.idx] and digests[paths.tokens]:
            faults |= _ill_formed(paths)
    faults |= {path: "missing (rule F1)" for path in paths.all if path not in paths.present()}
    return Survey(paths, digests, raw, header, header_fault, faults, arrays_good)


def _unlike(paths: ShardPaths, header: Header, digests: dict[str, FileDigest | None]) -> dict[str, str]:
    """The data files that are not what a good header says."""
    faults = {}
    for path, said in zip(paths.data, header.digests, strict=True):
        found = digests[path]
        if found is not None and found != said:
            faults[path] = (
                f"{found.nbytes} bytes with checksum {found.checksum.hex()},"
                f" .seq.idx says {said.nbytes} and {said.checksum.hex()} (rule F3)"
            )
    return faults


def _ill_formed(paths: ShardPaths) -> dict[str, str]:
    """What is wrong with ``.idx`` in itself, where no header says what it should be."""
    try:
        IdxLengths(paths.idx, os.stat(paths.tokens).st_size)
    except CorruptShardError as error:
        return {paths.idx: _detail(error)}
    return {}


def _read_header(paths: ShardPaths) -> tuple[bytes | None, Header | None, SFTIndexError | None]:
    try:
        said = int.from_bytes(read_most(paths.seq_idx, 16)[12:], "little")
        raw = read_most(paths.seq_idx, min(max(said, _USUAL_HEADER_NBYTES), MAX_HEADER_NBYTES))
    except FileNotFoundError:
        return None, None, None
    try:
        return raw, Header.decode(raw, paths.seq_idx), None
    except SFTIndexError as error:
        return raw, None, error


def _detail(error: SFTIndexError) -> str:
    """What is wrong, without the path and the remedy that stand in the message."""
    if isinstance(error, CorruptShardError):
        return f"byte {error.offset}: {error.detail.split(';')[0]} (rule {error.rule})"
    return str(error).split(": ", 1)[-1].split(";")[0]
