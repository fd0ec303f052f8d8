"""Opening a shard: its header, and five arrays, each read the way that was chosen; packs as ranges of them.

Of a shard in an object store the index files come through a local cache, tokens and masks by ranges. There as on disk,
whoever replaces a shard removes its ``.seq.idx`` first and puts the new one last (rules W2, W3). So ``.seq.idx`` is
looked at first, and again when all is open: what was found in between belongs to it. From then on every range of an
object is read under the etag that it had.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.column import listed_columns
from megatron_sft_idx.layout.files import SEQ_IDX, HeaderForm
from megatron_sft_idx.shard.publication import is_journal
from megatron_sft_idx.storage import (
    Array,
    Backend,
    Extents,
    FirstReadHints,
    ReadOptions,
    ReopenedArray,
    advise_order,
    check_size,
    is_remote,
    open_array,
)
from megatron_sft_idx.storage.local import HashedFile, has_digest, name_in_errors, open_descriptor
from megatron_sft_idx.storage.publish import Kind, new_file
from megatron_sft_idx.storage.remote import ObjectInfo, RemoteArray, open_store
from megatron_sft_idx.storage.remote.store import object_exists, read_ahead
from megatron_sft_idx.storage.remote.transport import request_pool

# ---- files, wherever they lie ----

# One request reads the whole header of nearly every shard: 256 bytes and a few KiB of JSON.
_HEADER_NBYTES = 16 << 10


class Start(NamedTuple):
    """The header of a file or an object, as far as that reaches, and its size in bytes.

    Of an object what the store says of it, of a local file what tells it from another one under its name.
    """

    raw: bytes
    nbytes: int
    info: ObjectInfo | None
    stamp: tuple[int, ...] = ()


def read_start(path: str, form: HeaderForm) -> Start | None:
    """The header of a file or an object, as far as it is one of this form; None where there is nothing."""
    if is_remote(path):
        store, key = open_store(path)
        if (info := store.head(key)) is None:
            return None
        raw = bytes(store.read(key, 0, min(_HEADER_NBYTES, info.nbytes), etag=info.etag))
        if len(raw) < (size := min(form.peek(raw), info.nbytes)):
            raw += store.read(key, len(raw), size - len(raw), etag=info.etag)
        return Start(raw[:size], info.nbytes, info)
    try:
        fd, status = open_descriptor(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        with name_in_errors(path):
            raw = os.pread(fd, _HEADER_NBYTES, 0)
            if len(raw) < (size := min(form.peek(raw), status.st_size)):
                raw += os.pread(fd, size - len(raw), len(raw))
        return Start(raw[:size], status.st_size, None, _stamp(status))
    finally:
        os.close(fd)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_items(
    path: str, dtype: np.dtype[Any], count: int, nbytes: int, backend: Backend, same: Callable[[], None], begin: int
) -> Array:
    """Items of a local file, read the way that was chosen; ``same`` raises where others are there by now."""
    if backend == "reopen":
        return ReopenedArray(path, dtype, count, nbytes, same, begin)
    return open_array(path, dtype, count, nbytes=nbytes, offset=begin, backend=backend)


def read_header(prefix: str | os.PathLike[str] | ShardPaths) -> Header:
    """The header of a shard; reads nothing else.

    Raises:
        ShardNotFoundError: no ``.seq.idx``.
        CorruptShardError, UnsupportedVersionError: see ``Header.decode``.
    """
    paths = ShardPaths.of(prefix)
    return Header.decode(_look(paths).raw, paths.seq_idx)


def _look(paths: ShardPaths) -> Start:
    """``.seq.idx``, its header not yet checked; ShardNotFoundError where there is none."""
    # Whoever opens a pipe waits for its other end.
    there = is_remote(paths.prefix) or os.path.isfile(paths.seq_idx)
    if not there or (start := read_start(paths.seq_idx, SEQ_IDX)) is None:
        raise _not_found(paths)
    return start


def missing_files(prefix: str | os.PathLike[str]) -> list[str]:
    """Which of a shard's files are not there, locally or in an object store: the five, and columns that it lists."""
    paths = ShardPaths.of(prefix)
    with contextlib.suppress(FormatError, ShardNotFoundError):
        paths = paths.with_columns(listed_columns(read_header(paths).metadata))
    return _missing(paths)


def _missing(paths: ShardPaths) -> list[str]:
    # One after another: headers of many shards are read by the threads, which must not wait for each other.
    return [path for path in paths.all if not object_exists(path)] if is_remote(paths.prefix) else paths.missing()


def _not_found(paths: ShardPaths) -> ShardNotFoundError:
    """What is missing at a prefix, and what would help."""
    missing = _missing(paths)
    headless, remedy = not missing or paths.seq_idx in missing, "copy all five files, .seq.idx last"
    if is_remote(paths.prefix):
        remedy = "check the path: the prefix without .seq.idx" if len(missing) == len(paths.all) else remedy
    elif headless and is_journal(paths.journal):
        remedy = (
            "a build was interrupted here: go on with it (preprocess --resume), recover its packs (megatron-sft-idx"
            f" rebuild {paths.prefix}), or start anew with overwrite (--overwrite)"
        )
    elif len(missing) == len(paths.all):
        remedy = where_to_look(paths)
    elif headless and (len(missing) == 1 or paths.loss in missing):
        remedy = "the files beside them may be a stock Megatron dataset without loss masks, or a shard copied in part"
    elif missing == [paths.idx]:
        remedy = paths.index_remedy
    return ShardNotFoundError(paths.prefix, missing or [paths.seq_idx], remedy)


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


def require_same(prefix: str, found: bytes, expected: bytes) -> None:
    """FormatError unless the shard that is at a prefix now is the one that a dataset was made from."""
    if found != expected:
        raise FormatError(
            f"{prefix}: shard {found.hex()} is here now, this dataset was made from {expected.hex()};"
            " another shard was published over it: start again"
        )


# ---- an open shard ----


@dataclass(frozen=True, slots=True)
class Files:
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
    first_reads: FirstReadHints | None = None  # where the kernel decides what is read ahead


def _files(
    header: Header, tokens: Array, loss: Array, starts: Array, offsets: Iterable[Array], first: FirstReadHints | None
) -> Files:
    """``offsets`` are those of sequences, then those of tokens."""
    sequences, packs = offsets
    counts = header.num_packs, header.num_sequences, header.num_tokens
    return Files(header, *counts, tokens, loss, starts, sequences, packs, _pair(sequences), _pair(packs), first)


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
    """The files of a shard, wherever it lies; of a remote one in seven small requests, and what the cache lacks.

    Arguments and errors as of ``Shard``.
    """
    seq_idx = _look(paths)
    header = Header.decode(seq_idx.raw, paths.seq_idx)
    try:
        if seq_idx.info is None:
            files = _open_local(paths, header, options)
            same = _stamp(os.stat(paths.seq_idx)) == seq_idx.stamp or _look(paths).raw == seq_idx.raw
        else:
            files = _open_remote(paths, header, seq_idx.info, index_cache, options.backend)
            same = (now := _object_at(paths.seq_idx)) is not None and now.etag == seq_idx.info.etag
    except ShardNotFoundError:
        raise
    except (OSError, FormatError) as error:  # gone, as when another shard is being published, or what is no file
        if isinstance(error, FileNotFoundError) or (seq_idx.info is None and paths.missing()):
            raise _not_found(paths) from None
        raise
    # Sizes alone would not tell: a shuffled shard has the same.
    if not same:
        raise FormatError(f"{paths.prefix}: another shard was published here while it was opened; open it again")
    return files


def _open_local(paths: ShardPaths, header: Header, options: ReadOptions) -> Files:
    sizes = header.sizes(paths)
    # Megatron's index is not read here, only held to its size.
    check_size(paths.idx, os.stat(paths.idx).st_size, sizes[paths.idx])

    def same() -> None:
        require_same(paths.prefix, read_header(paths.prefix).shard_id, header.shard_id)

    def array(path: str, dtype: Any, count: int, offset: int = 0) -> Array:
        return open_items(path, np.dtype(dtype), count, sizes[path], options.backend, same, offset)

    begins, count = (header.nbytes, header.token_offsets_offset), header.num_packs + 1
    if options.backend == "pread":
        offsets = [array(paths.seq_idx, "<i8", count, begin) for begin in begins]
    else:
        # Both arrays live in one file: one map, or one read, serves them.
        whole = array(paths.seq_idx, "u1", sizes[paths.seq_idx])[:]
        offsets = [whole[begin : begin + 8 * count].view("<i8") for begin in begins]
    tokens = array(paths.tokens, header.token_dtype, header.num_tokens)
    loss = array(paths.loss, header.mask_dtype, header.num_tokens)
    starts = array(paths.starts, "<u4", header.num_sequences)
    for data in (tokens, loss):
        advise_order(data, options.advice, huge_pages=options.huge_pages)
    first = None
    if options.advice == "normal" and isinstance(tokens, np.ndarray) and isinstance(loss, np.ndarray):
        first = FirstReadHints(tokens, loss)
    return _files(header, tokens, loss, starts[:] if options.backend == "reopen" else starts, offsets, first)


def _open_remote(
    paths: ShardPaths, header: Header, seq_idx: ObjectInfo, index_cache: str | None, backend: Backend
) -> Files:
    sizes, (store, _) = header.sizes(paths), open_store(paths.prefix)
    check_size(paths.seq_idx, seq_idx.nbytes, sizes[paths.seq_idx])
    found: dict[str, ObjectInfo] = {}
    for path, info in zip(paths.data, request_pool().map(_object_at, paths.data), strict=True):
        if info is not None:
            check_size(path, info.nbytes, sizes[path])
            found[path] = info
    if len(found) < len(paths.data):
        raise _not_found(paths)

    def index(digest: FileDigest, info: ObjectInfo, offset: int, source: str) -> NDArray[np.uint8]:
        local = _local_copy(index_cache, digest, lambda: read_ahead(store, info, offset=offset), source)
        # The copies of pread need no open file.
        how: Backend = "mmap" if backend == "mmap" else "pread"
        return open_array(local, np.dtype("u1"), digest.nbytes, nbytes=digest.nbytes, backend=how)[:]

    behind = FileDigest(header.seq_idx_nbytes - header.nbytes, header.arrays_checksum)
    both = index(behind, seq_idx, header.nbytes, paths.seq_idx)
    begins, nbytes = (0, header.token_offsets_offset - header.nbytes), 8 * (header.num_packs + 1)
    offsets = [both[begin : begin + nbytes].view("<i8") for begin in begins]
    starts = index(header.digests[3], found[paths.starts], 0, paths.starts).view("<u4")
    tokens, loss = (
        RemoteArray(store, found[path].key, dtype, header.num_tokens, found[path].etag)
        for path, dtype in ((paths.tokens, header.token_dtype), (paths.loss, header.mask_dtype))
    )
    return _files(header, tokens, loss, starts, offsets, None)


def _object_at(path: str) -> ObjectInfo | None:
    store, key = open_store(path)
    return store.head(key)


# ---- packs as ranges ----


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


def extents_of(shards: Sequence[Files], slots: NDArray[np.int64], packs: NDArray[np.int64]) -> Extents:
    """Where packs lie, in their order: of each its tokens, then its mask, as they are read.

    Packs whose offsets point outside the files are left out: whoever reads one is told. ``slots`` int64 [packs] says
    which of the shards each lies in, ``packs`` int64 [packs] which one it is there; every shard has some.
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
    return Extents(arrays, both, np.repeat(starts[some], 2), np.repeat(counts[some], 2))


# ---- copies of index files, by their checksums, in a folder that processes share ----

_VARIABLE = "SFT_IDX_CACHE"
_KIND = Kind("an index file of a shard", lambda path: False)
_COPY = re.compile(r"([0-9a-f]{32})(\.\d+)?\.index")
_DAY = 86_400
_KEPT_DAYS = 30
# Copies that were found good: their paths and checksums, and what the system said of the files then.
_found_good: set[tuple[Any, ...]] = set()


def _local_copy(
    named: str | None, digest: FileDigest, fetch: Callable[[], Iterable[bytes | memoryview]], source: str
) -> str:
    """The path of a local copy of some bytes, whole and checked.

    Args:
        named: folder where copies are kept; None for what ``SFT_IDX_CACHE`` names, else one in the user's cache folder.
        digest: of the bytes.
        fetch: gives them, piece by piece, where there is no good copy.
        source: where they are from, for messages.

    Raises:
        CorruptShardError: what was fetched has another checksum (rule F3).
        FormatError: the folder cannot be written, or is full.
    """
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(named or os.environ.get(_VARIABLE) or Path(users) / "megatron-sft-idx")
    # Something else under the name may be anybody's: it is passed over.
    names = (f"{digest.checksum.hex()}{f'.{number}' if number else ''}.index" for number in count())
    for local in map(folder.joinpath, names):
        if _is_good(local, digest):
            return str(local)
        if not os.path.lexists(local):
            break
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with new_file(local, _KIND, overwrite=False) as new:
            file = HashedFile(new.open(durable=False))
            for piece in fetch():
                file.write(piece)
            if file.digest() != digest:
                raise CorruptShardError(
                    source, 0, "F3", f"checksum is not {digest.checksum.hex()}, which the header expects; restore it"
                )
            new.publish()
        _prune(folder)
    except OSError as error:
        raise FormatError(
            f"{folder}: index files of remote shards cannot be kept here ({error.strerror}); name another folder with"
            f" {_VARIABLE}, or --object-storage-cache-path in training"
        ) from None
    except FormatError:
        if not _is_good(local, digest):  # else another process's, which was faster
            raise
    return str(local)


def _prune(folder: Path) -> None:
    """Remove copies that were not opened for a month; what has such a name and other content is not ours."""
    for path in folder.iterdir():
        named = _COPY.fullmatch(path.name)
        with contextlib.suppress(OSError, FormatError):  # another process may remove it too
            stat = path.lstat()
            old = S_ISREG(stat.st_mode) and time.time() - stat.st_mtime > _KEPT_DAYS * _DAY
            if named and old and has_digest(str(path), FileDigest(stat.st_size, bytes.fromhex(named[1]))):
                path.unlink()


def _is_good(path: Path, digest: FileDigest) -> bool:
    """Whether a copy is there and whole; it is read once in a process, unless the system says that it changed."""
    try:
        stat = path.stat()
        stamp = path, digest, _stamp(stat)
        if stamp not in _found_good and not has_digest(str(path), digest):
            return False
    except (OSError, FormatError):
        return False
    if time.time() - stat.st_mtime > _DAY:
        with contextlib.suppress(OSError):  # a folder that is only read is not pruned either
            os.utime(path)
    _found_good.add(stamp)
    return True
