"""Opening a shard: its header, and five arrays, each read the way that was chosen; packs as ranges of them."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import HEADER_FIXED_NBYTES, Header, ShardPaths
from megatron_sft_idx.layout.column import listed_columns
from megatron_sft_idx.layout.files import peek_nbytes
from megatron_sft_idx.shard import remote
from megatron_sft_idx.shard.publication import is_journal
from megatron_sft_idx.storage import (
    Array,
    FirstReads,
    ReadOptions,
    ReopenedArray,
    Runs,
    advise_order,
    ask_huge_pages,
    check_size,
    is_remote,
    open_array,
    open_regular,
)

__all__ = [
    "Files",
    "checked_packs",
    "missing_files",
    "open_files",
    "read_header",
    "require_same",
    "runs_of",
    "where_to_look",
]


class Files(NamedTuple):
    """What an open shard holds: the header and five arrays, and the two offsets of a pack by its number."""

    header: Header
    num_packs: int
    num_sequences: int
    num_tokens: int
    tokens: Array
    loss: Array
    starts: Array
    sequence_offsets: Array
    token_offsets: Array
    sequence_pair: _Pair
    token_pair: _Pair
    first_reads: FirstReads | None = None  # where the kernel decides what is read ahead

    @classmethod
    def of(
        cls, header: Header, tokens: Array, loss: Array, starts: Array, sequence_offsets: Array, token_offsets: Array
    ) -> Files:
        """What follows from the header and the arrays."""
        counts = header.num_packs, header.num_sequences, header.num_tokens
        pairs = _pair(sequence_offsets), _pair(token_offsets)
        return cls(header, *counts, tokens, loss, starts, sequence_offsets, token_offsets, *pairs)


_Pair = Callable[[int], tuple[int, int]]


def _pair(offsets: Array) -> _Pair:
    """``offsets[i], offsets[i + 1]`` as ints."""
    if isinstance(offsets, np.ndarray):
        item = offsets.data  # gives Python ints, several times faster than numpy's items
        return lambda i: (item[i], item[i + 1])

    def read(i: int) -> tuple[int, int]:
        start, stop = offsets[i : i + 2].tolist()
        return start, stop

    return read


def open_files(paths: ShardPaths, options: ReadOptions, index_cache: str | None) -> Files:
    """The files of a shard, wherever it lies.

    Args:
        paths: of the files.
        options: how they are read.
        index_cache: of a remote shard, as of ``Shard``.

    Raises:
        ShardNotFoundError, FormatError, StorageError: as of ``Shard``.
    """
    if is_remote(paths.prefix):
        return Files.of(*remote.open_remote(paths, index_cache, options.backend))
    try:
        return _open_local(paths, options)
    except ShardNotFoundError:
        raise
    except FileNotFoundError:  # gone since it was looked for, as when another shard is being published
        raise _not_found(paths) from None


def _open_local(paths: ShardPaths, options: ReadOptions) -> Files:
    raw = _read_raw_header(paths)
    header = Header.decode(raw, paths.seq_idx)
    if missing := paths.missing():
        if paths.seq_idx in missing:
            raise _not_found(paths)
        remedy = paths.index_remedy if missing == [paths.idx] else "copy all five files"
        raise ShardNotFoundError(paths.prefix, missing, remedy)
    sizes = dict(zip(paths.data, (digest.nbytes for digest in header.digests), strict=True))
    sizes[paths.seq_idx] = header.seq_idx_nbytes
    # Megatron's index is not read here, only held to its size.
    check_size(paths.idx, os.stat(paths.idx).st_size, sizes[paths.idx])

    def same() -> None:
        require_same(paths.prefix, read_header(paths.prefix).shard_id, header.shard_id)

    def array(path: str, dtype: np.dtype[Any], count: int, offset: int = 0) -> Array:
        if options.backend == "reopen":
            return ReopenedArray(path, dtype, count, sizes[path], same)
        return open_array(path, dtype, count, nbytes=sizes[path], offset=offset, backend=options.backend)

    def data(path: str, dtype: np.dtype[Any]) -> Array:
        found = array(path, dtype, header.num_tokens)
        advise_order(found, options.advice)
        if options.huge_pages:
            ask_huge_pages(path, found)
        return found

    int64, count, second = np.dtype("<i8"), header.num_packs + 1, header.token_offsets_offset
    offsets: tuple[Array, Array]
    if options.backend == "pread":
        offsets = array(paths.seq_idx, int64, count, header.nbytes), array(paths.seq_idx, int64, count, second)
    else:
        # Both arrays live in one file: one map, or one read, serves them.
        whole = array(paths.seq_idx, np.dtype("u1"), sizes[paths.seq_idx])[:]
        offsets = whole[header.nbytes : header.nbytes + 8 * count].view(int64), whole[second:].view(int64)
    starts = array(paths.starts, np.dtype("<u4"), header.num_sequences)
    files = Files.of(
        header,
        data(paths.tokens, header.token_dtype),
        data(paths.loss, header.mask_dtype),
        starts[:] if options.backend == "reopen" else starts,
        *offsets,
    )
    if options.advice == "normal" and isinstance(files.tokens, np.ndarray) and isinstance(files.loss, np.ndarray):
        files = files._replace(first_reads=FirstReads(files.tokens, files.loss))
    # Whoever replaces a shard removes its .seq.idx first (rule W3). Where it is still the same one, every file
    # opened in between belongs to it; sizes alone would not tell, a shuffled shard has the same.
    if _read_raw_header(paths) != raw:
        raise FormatError(f"{paths.prefix}: another shard was published here while it was opened; open it again")
    return files


def checked_packs(
    indices: Iterable[int | np.integer[Any]] | NDArray[np.int64], total: int, prefix: str
) -> NDArray[np.int64]:
    """Numbers of packs, negative ones counted from the end. IndexError, which names ``prefix``: no such pack."""
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, np.int64)
    packs = indices.astype(np.int64)  # first: sums of narrow integers would not fit
    packs[packs < 0] += total
    if (outside := (packs < 0) | (packs >= total)).any():
        raise IndexError(f"{prefix}: pack {indices[outside][0]}, there are {total}")
    return packs


def runs_of(shards: Sequence[Files], slots: NDArray[np.int64], packs: NDArray[np.int64]) -> Runs:
    """Where packs lie, in their order: of each its tokens, then its mask, as they are read.

    Packs whose offsets point outside the files are left out: whoever reads one is told.

    Args:
        shards: open files, of each some packs.
        slots: int64 [packs], which of the shards each pack lies in.
        packs: int64 [packs], its number there.
    """
    starts, counts = np.empty(len(packs), np.int64), np.empty(len(packs), np.int64)
    by_shard = np.split(np.argsort(slots, kind="stable"), np.cumsum(np.bincount(slots, minlength=len(shards)))[:-1])
    for files, mine in zip(shards, by_shard, strict=True):
        own = packs[mine]
        first = int(own.min())
        offsets = files.token_offsets[first : int(own.max()) + 2]
        begins, ends = offsets[own - first], offsets[own - first + 1]
        sound = (begins >= 0) & (begins < ends) & (ends <= files.num_tokens)
        starts[mine], counts[mine] = begins, np.where(sound, ends - begins, 0)
    some = counts > 0
    both = np.repeat(2 * slots[some], 2)
    both[1::2] += 1
    arrays = [array for files in shards for array in (files.tokens, files.loss)]
    return Runs(arrays, both, np.repeat(starts[some], 2), np.repeat(counts[some], 2))


def read_header(prefix: str | os.PathLike[str] | ShardPaths) -> Header:
    """The header of a shard; reads nothing else.

    Raises:
        ShardNotFoundError: no ``.seq.idx``.
        CorruptShardError, UnsupportedVersionError: see ``Header.decode``.
    """
    paths = ShardPaths.of(prefix)
    return Header.decode(_read_raw_header(paths), paths.seq_idx)


def missing_files(prefix: str | os.PathLike[str]) -> list[str]:
    """Which of a shard's files are not there, locally or in an object store: the five, and columns that it lists."""
    paths = ShardPaths.of(prefix)
    with contextlib.suppress(FormatError, ShardNotFoundError):
        paths = paths.with_columns(listed_columns(read_header(paths).metadata))
    return remote.find_missing(paths) if is_remote(paths.prefix) else paths.missing()


def _read_raw_header(paths: ShardPaths) -> bytes:
    """The header's bytes, as many as are there; ShardNotFoundError where there is no ``.seq.idx``."""
    if is_remote(paths.prefix):
        return remote.read_raw_header(paths)
    if not os.path.isfile(paths.seq_idx):  # whoever opens a pipe waits for its other end
        raise _not_found(paths)
    try:
        with open_regular(paths.seq_idx) as file:
            raw = file.read(HEADER_FIXED_NBYTES)
            size = min(peek_nbytes(raw, paths.seq_idx), os.fstat(file.fileno()).st_size)
            return raw + file.read(size - len(raw))
    except FileNotFoundError:
        raise _not_found(paths) from None


def _not_found(paths: ShardPaths) -> ShardNotFoundError:
    """What is missing at a prefix, and what would help."""
    missing = paths.missing()
    if paths.seq_idx in missing and is_journal(paths.journal):
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


def where_to_look(paths: ShardPaths) -> str:
    """A remedy where nothing is at a prefix: what a killed run was making there may lie beside it, under a longer name.

    ``preprocess`` tokenises into ``PREFIX.parts``, and makes the corpus that it is to keep at ``PREFIX.unpacked``.
    """
    if os.path.lexists(f"{paths.prefix}.parts/run.json"):
        return f"preprocess was interrupted here, or is at work: preprocess --resume goes on with {paths.prefix}.parts"
    journals = sorted(glob.glob(f"{glob.escape(paths.prefix)}.*.journal"))
    if not journals:
        return "check the prefix: the path without .seq.idx"
    beside = journals[0].removesuffix(".journal")
    return (
        f"a build of {beside} was interrupted, or is at work: preprocess --resume goes on with it,"
        f" megatron-sft-idx rebuild {beside} recovers its packs"
    )
