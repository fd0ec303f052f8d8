"""What is at a prefix: its header, read by itself, and which of the five files are there."""

from __future__ import annotations

import os

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import HEADER_FIXED_NBYTES, Header, ShardPaths
from megatron_sft_idx.layout.header import peek_nbytes
from megatron_sft_idx.shard import remote
from megatron_sft_idx.shard.remains import where_to_look
from megatron_sft_idx.storage import is_remote, open_regular

__all__ = ["missing_files", "not_found", "read_header", "read_raw_header", "require_same"]


def read_header(prefix: str | os.PathLike[str] | ShardPaths) -> Header:
    """The header of a shard; reads nothing else.

    Raises:
        ShardNotFoundError: no ``.seq.idx``.
        CorruptShardError, UnsupportedVersionError: see ``Header.decode``.
    """
    paths = ShardPaths.of(prefix)
    return Header.decode(read_raw_header(paths), paths.seq_idx)


def missing_files(prefix: str | os.PathLike[str]) -> list[str]:
    """Which of a shard's five files are not there, locally or in an object store."""
    paths = ShardPaths.of(prefix)
    return remote.find_missing(paths) if is_remote(paths.prefix) else paths.missing()


def read_raw_header(paths: ShardPaths) -> bytes:
    """The header's bytes, as many as are there; ShardNotFoundError where there is no ``.seq.idx``."""
    if is_remote(paths.prefix):
        return remote.read_raw_header(paths)
    if not os.path.isfile(paths.seq_idx):  # whoever opens a pipe waits for its other end
        raise not_found(paths)
    try:
        with open_regular(paths.seq_idx) as file:
            raw = file.read(HEADER_FIXED_NBYTES)
            size = min(peek_nbytes(raw, paths.seq_idx), os.fstat(file.fileno()).st_size)
            return raw + file.read(size - len(raw))
    except FileNotFoundError:
        raise not_found(paths) from None


def not_found(paths: ShardPaths) -> ShardNotFoundError:
    """What is missing at a prefix, and what would help."""
    missing = paths.missing()
    if paths.seq_idx in missing and os.path.exists(paths.journal):
        remedy = (
            "a build was interrupted here: go on with it (preprocess --resume), recover its packs (megatron-sft-idx"
            f" rebuild {paths.prefix}), or start anew with overwrite (--overwrite)"
        )
    elif len(missing) == len(paths.all):
        remedy = where_to_look(paths)
    elif missing == [paths.seq_idx] or paths.loss in missing:
        remedy = "the files beside them may be a stock Megatron dataset without loss masks, or a shard copied in part"
    else:
        remedy = "copy all five files"
    return ShardNotFoundError(paths.prefix, missing or [paths.seq_idx], remedy)


def require_same(prefix: str, found: bytes, expected: bytes) -> None:
    """FormatError unless the shard that is at a prefix now is the one that a dataset was made from."""
    if found != expected:
        raise FormatError(
            f"{prefix}: shard {found.hex()} is here now, this dataset was made from {expected.hex()};"
            " another shard was published over it: start again"
        )
