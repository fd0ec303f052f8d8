"""Open a shard on disk or in an object store: its header, the names of its columns, and the arrays of its files.

The index files of a remote shard are copied into a local cache. Tokens and masks are read from the store in ranges,
when they are needed.

A writer that replaces a shard removes ``.seq.idx`` first and writes the new one last (rules W2, W3), on disk and in
stores. Therefore ``open_files`` reads ``.seq.idx`` first, and checks it again when all files are open. If it has not
changed, all files belong to it. After that, every range of an object is read under the etag that the object had.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import FileDigest, Header, ShardPaths
from megatron_sft_idx.layout.column import COLUMN, COLUMN_MAGIC, ColumnHeader
from megatron_sft_idx.layout.files import BUILDING, SEQ_IDX, HeaderForm, column_of, listed_columns
from megatron_sft_idx.shard.at_prefix import is_building
from megatron_sft_idx.shard.index_cache import cached_copy
from megatron_sft_idx.storage import (
    Advice,
    Array,
    Backend,
    ReadOptions,
    ReopenedArray,
    advise_order,
    check_size,
    is_remote,
    open_array,
)
from megatron_sft_idx.storage.building_files import building_of
from megatron_sft_idx.storage.local import name_in_errors, open_descriptor, stamp_of
from megatron_sft_idx.storage.remote import ObjectInfo, RemoteArray, open_store
from megatron_sft_idx.storage.remote.store import object_exists, read_ahead
from megatron_sft_idx.storage.remote.transport import request_pool

# ---- files and objects ----

# Number of bytes to read first. Nearly every header is shorter: 256 bytes and a few KiB of JSON.
_HEADER_NBYTES = 16 << 10


class FileStart(NamedTuple):
    """The beginning of a file, or of an object in a store, and the total size.

    ``raw`` is the header, or the whole file if it is shorter than its header should be. ``info`` is the store's
    information about an object. ``stamp`` distinguishes a file on disk from a file that replaces it (``stamp_of``).
    """

    raw: bytes
    nbytes: int
    info: ObjectInfo | None
    stamp: tuple[int, ...] = ()


def read_start(path: str, form: HeaderForm) -> FileStart | None:
    """Read the header of a file or object; ``form`` determines its length. Return None if the path does not exist."""
    if is_remote(path):
        store, key = open_store(path)
        if (info := store.head(key)) is None:
            return None
        raw = bytes(store.read(key, 0, min(_HEADER_NBYTES, info.nbytes), etag=info.etag))
        if len(raw) < (size := min(form.stated_nbytes(raw), info.nbytes)):
            raw += store.read(key, len(raw), size - len(raw), etag=info.etag)
        return FileStart(raw[:size], info.nbytes, info)
    try:
        fd, status = open_descriptor(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        with name_in_errors(path):
            raw = os.pread(fd, _HEADER_NBYTES, 0)
            if len(raw) < (size := min(form.stated_nbytes(raw), status.st_size)):
                raw += os.pread(fd, size - len(raw), len(raw))
        return FileStart(raw[:size], status.st_size, None, stamp_of(status))
    finally:
        os.close(fd)


def open_items(
    path: str, dtype: np.dtype[Any], count: int, nbytes: int, backend: Backend, confirm: Callable[[], None], begin: int
) -> Array:
    """Return ``count`` items of a local file, starting at byte ``begin``, as an array of a backend.

    ``nbytes`` is the required size of the file. The backend ``reopen`` calls ``confirm`` if the file at the path was
    replaced or changed. ``confirm`` must raise an error if the shard was replaced.
    """
    if backend == "reopen":
        return ReopenedArray(path, dtype, count, nbytes, confirm, begin)
    return open_array(path, dtype, count, nbytes=nbytes, offset=begin, backend=backend)


def read_header(prefix: str | os.PathLike[str] | ShardPaths) -> Header:
    """Read the header of a shard, but none of its other files.

    Raises:
        ShardNotFoundError: there is no ``.seq.idx``.
        CorruptShardError, UnsupportedVersionError: see ``Header.decode``.
    """
    paths = ShardPaths.of(prefix)
    return Header.decode(_seq_idx_start(paths).raw, paths.seq_idx)


def _seq_idx_start(paths: ShardPaths) -> FileStart:
    """Read the header of ``.seq.idx`` without checking it. ShardNotFoundError: the file does not exist."""
    # Open only a regular file: opening a pipe would wait for its other end.
    may_open = is_remote(paths.prefix) or os.path.isfile(paths.seq_idx)
    if not may_open or (start := read_start(paths.seq_idx, SEQ_IDX)) is None:
        raise _not_found(paths)
    return start


def missing_files(prefix: str | os.PathLike[str]) -> list[str]:
    """Return the paths of a shard's missing files: of the five, and of the columns and media that it lists."""
    paths = ShardPaths.of(prefix)
    with contextlib.suppress(FormatError, ShardNotFoundError):
        paths = paths.with_listed(read_header(paths).metadata)
    return _missing(paths)


def _missing(paths: ShardPaths) -> list[str]:
    # One request after another: this may run in a thread of the request pool, whose threads must not wait for each
    # other.
    return [path for path in paths.all if not object_exists(path)] if is_remote(paths.prefix) else paths.missing()


# Suffixes of files that hold rows.
_ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")


def _not_found(paths: ShardPaths) -> ShardNotFoundError:
    """Return the error about a prefix without a complete shard: the missing files, and a remedy."""
    missing = _missing(paths)
    lacks_header = not missing or paths.seq_idx in missing
    remedy = "copy all five files, .seq.idx last"
    if is_remote(paths.prefix):
        remedy = "check the path; a prefix does not include .seq.idx" if len(missing) == len(paths.all) else remedy
    elif lacks_header and is_building(paths):
        remedy = (
            f"a command was interrupted here, or is still running ({paths.building}): run it again to continue, or"
            f" recover its packs: megatron-sft-idx rebuild {paths.prefix}"
        )
    elif len(missing) == len(paths.all):
        remedy = where_to_look(paths)
    elif lacks_header and (len(missing) == 1 or paths.loss in missing):
        remedy = "the other files may be a stock Megatron dataset without loss masks, or an incomplete copy of a shard"
    elif missing == [paths.idx]:
        remedy = paths.index_remedy
    return ShardNotFoundError(paths.prefix, missing or [paths.seq_idx], remedy)


def where_to_look(paths: ShardPaths) -> str:
    """Return the remedy for errors about a prefix at which nothing exists.

    If there is unfinished work at a longer prefix, such as one of several outputs, the remedy names it.
    """
    beside = sorted(glob.glob(f"{glob.escape(paths.prefix)}[.-]*{BUILDING}"))
    for unfinished in (folder.removesuffix(BUILDING) for folder in beside):
        if building_of(unfinished) is not None:
            return (
                f"the command that builds {unfinished} was interrupted, or is still running: run it again to continue,"
                f" or recover its packs: megatron-sft-idx rebuild {unfinished}"
            )
    return _other_file(paths.prefix) or "check the prefix; it does not include .seq.idx"


def _other_file(path: str) -> str:
    """Return advice for a path that is a file instead of a prefix; "" if it is not a file."""
    if not os.path.isfile(path):
        return ""
    bare = path.removesuffix(".gz").removesuffix(".zst")
    stem, _ = os.path.splitext(bare)
    if not bare.endswith(_ROWS):
        return f"this file is not a shard; if it contains packs: megatron-sft-idx convert {path} {stem}"
    return (
        f"this file has rows, not packs; {_preprocess(path, stem)}; if it contains packs: megatron-sft-idx"
        f" convert {path} {stem}"
    )


def _preprocess(rows: str, output: str) -> str:
    return (
        f"make a shard from it: megatron-sft-idx preprocess --input {rows} --tokenizer PATH --seq-length N"
        f" --output-prefix {output}"
    )


def what_a_folder_holds(folder: str) -> str:
    """Return advice for a folder without shards. It may hold rows, or shards in subfolders."""
    stem = folder.rstrip("/")
    nothing = "the folder directly contains no shard"
    if is_remote(folder):
        return nothing
    names = sorted(os.listdir(folder))
    if "dataset_info.json" in names or "dataset_dict.json" in names:
        return f"{nothing}, but rows written by save_to_disk; {_preprocess(stem, stem + '-sft')}"
    for name in names:
        compressed = name[len(name.removesuffix(".gz").removesuffix(".zst")) :]
        ending = os.path.splitext(name.removesuffix(compressed))[1]
        if ending in _ROWS and ending != ".json":  # the folder of a model has .json files too
            rows = f"'{stem}/*{ending}{compressed}'"
            return f"{nothing}, but files of rows; {_preprocess(rows, stem + '-sft')}"
    below = [name for name in names if glob.glob(f"{glob.escape(os.path.join(folder, name))}/*.seq.idx")]
    return f"{nothing}; use the folder that contains shards: {os.path.join(stem, below[0])}" if below else nothing


def require_same(prefix: str, present_id: bytes, expected_id: bytes) -> None:
    """Raise FormatError if the shard at a prefix now has another id than the shard that was there before."""
    if present_id != expected_id:
        raise FormatError(
            f"{prefix}: the shard is now {present_id.hex()}, but this dataset was opened with {expected_id.hex()};"
            " another shard has replaced it: start again"
        )


# ---- columns of a shard ----


def _shard_of(path: str) -> bytes | None:
    """Return the id of the shard to which the column at a path belongs, or None if there is no column.

    See ``ColumnHeader.decode`` for errors.
    """
    start = read_start(path, COLUMN)
    return ColumnHeader.decode(start.raw, path).shard_id if start and start.raw.startswith(COLUMN_MAGIC) else None


def is_of_another_shard(path: str, shard_id: bytes) -> bool:
    """Return whether a path has a column that belongs to another shard or is too damaged to tell."""
    try:
        return _shard_of(path) not in (None, shard_id)
    except FormatError:
        return True


def column_names(paths: ShardPaths, header: Header, beside: Collection[str] | None = None) -> list[str]:
    """Return the names of a shard's columns: the columns in its header, and attached ones.

    ``beside`` are the names from ``columns_beside`` at this prefix. With None, this function looks for them.

    Raises:
        CorruptShardError: a file with the name of a column of the shard cannot be read as one. A damaged column looks
            like an unrelated file, so such files are never ignored.
        StorageError: an object store does not answer.
    """
    names = columns_beside([paths.prefix])[paths.prefix] if beside is None else beside
    return sorted(name for name in {*names, *listed_columns(header.metadata)} if has_column(paths, header, name))


def has_column(paths: ShardPaths, header: Header, name: str) -> bool:
    """Return whether ``column_names`` contains a column. See there for errors."""
    if name in listed_columns(header.metadata):
        return True
    path = paths.column(name)
    if (start := read_start(path, COLUMN)) is None:
        return False
    shard_id = ColumnHeader.decode(start.raw, path).shard_id
    if shard_id != header.shard_id:
        detail = (
            f"the column belongs to shard {shard_id.hex()}, but this is shard {header.shard_id.hex()}; put it next to"
            " the right shard, or move it away"
        )
        raise CorruptShardError(path, 16, "C6", detail)
    return True


def columns_beside(prefixes: Iterable[str]) -> dict[str, set[str]]:
    """Return the column names in file names ``PREFIX.NAME.col`` for each prefix. Scans each local folder once.

    The files are not read. They may not be columns, or may be columns of another shard.
    """
    names: dict[str, set[str]] = {prefix: set() for prefix in prefixes}
    local: dict[str, dict[str, str]] = {}  # prefixes, by folder and file name
    for prefix, own_names in names.items():
        if is_remote(prefix):
            store, key = open_store(prefix)
            columns = (column_of(info.key) for info in store.list(key + "."))
            own_names.update(column[1] for column in columns if column and column[0] == key)
        else:
            folder, name = os.path.split(prefix)
            local.setdefault(folder, {})[name] = prefix
    for folder, prefix_of in local.items():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder or ".") as entries:
            for entry in entries:
                if (column := column_of(entry.name)) and column[0] in prefix_of and entry.is_file():
                    names[prefix_of[column[0]]].add(column[1])
    return names


# ---- an open shard ----

# ``FirstReadHints`` divides maps into regions of 2**REGION_SHIFT items. That is a few MiB, about as much as the kernel
# reads around a page fault on disks that are configured for large reads.
REGION_SHIFT = 20
# After this many reads in one region, the whole region is requested. This takes as long as about twenty single reads,
# but most of it overlaps with the reader's work.
MAX_SINGLE_READS = 8


class FirstReadHints:
    """Asks the kernel for ranges of two maps that are about to be read and were not announced with ``schedule``.

    Without a hint, a page fault makes the kernel read megabytes around the page on disks that are configured for large
    reads. The first ``MAX_SINGLE_READS`` ranges of a region are therefore requested exactly, in both maps at once. With
    the last of them the whole region is requested, because large reads are faster if most of a region is read anyway. A
    range that begins at the end of the previous one needs no hint.

    ``read_counts`` has one byte per region: the number of ranges that were read in it, up to ``MAX_SINGLE_READS``. A
    caller may skip ``before_read`` once that number is reached.
    """

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self._arrays = arrays
        # numpy's zeros use no memory until they are written to.
        self.read_counts = np.zeros((len(arrays[0]) >> REGION_SHIFT) + 1, np.uint8).data
        self._last_stop = -1

    def before_read(self, start: int, stop: int) -> None:
        """Give the hints for items ``[start, stop)``.

        Two threads may call this at once; their reads may count as one.
        """
        region = start >> REGION_SHIFT
        count = self.read_counts[region] = min(self.read_counts[region] + 1, MAX_SINGLE_READS)
        is_sequential, self._last_stop = start == self._last_stop, stop
        if not is_sequential:
            self._ask(start, stop)
            if count == MAX_SINGLE_READS:
                first = region << REGION_SHIFT
                self._ask(first, min(first + (1 << REGION_SHIFT), len(self._arrays[0])))

    def _ask(self, start: int, stop: int) -> None:
        for array in self._arrays:
            _native.will_need(array, np.array([start]), np.array([stop]))


class OpenFiles:
    """The files of an open shard: header and counts, five arrays, and functions that return the offsets of one pack.

    Attributes:
        paths: paths of the files.
        tokens: ids [tokens].
        loss: label-aligned mask [tokens].
        starts: start of each sequence in its pack, uint32 [sequences].
        sequence_offsets: start of each pack's sequences, int64 [packs + 1].
        token_offsets: start of each pack's tokens, int64 [packs + 1].
        sequence_range_of, token_range_of: functions that map a pack's number to its two offsets as ints.
        first_reads: hints to the kernel about packs that are about to be read; None unless the tokens are mapped and
            ``advice`` is ``normal``.
    """

    def __init__(
        self, paths: ShardPaths, header: Header, data: Iterable[Array], offsets: Iterable[Array], advice: Advice
    ) -> None:
        self.paths, self.header = paths, header
        self.tokens, self.loss, self.starts = tokens, loss, _ = data
        self.num_packs, self.num_sequences, self.num_tokens = header.num_packs, header.num_sequences, header.num_tokens
        self.sequence_offsets, self.token_offsets = offsets
        self.sequence_range_of = _range_of(self.sequence_offsets)
        self.token_range_of = _range_of(self.token_offsets)
        self.first_reads: FirstReadHints | None = None
        if advice == "normal" and isinstance(tokens, np.ndarray) and isinstance(loss, np.ndarray):
            self.first_reads = FirstReadHints(tokens, loss)

    def check_ends(self) -> None:
        """Raise CorruptShardError unless the offsets cover the files completely. Reads two values of each array."""
        header = self.header
        for rule, unit, offsets, total, base in (
            ("O1", "sequence", self.sequence_offsets, header.num_sequences, header.nbytes),
            ("O2", "token", self.token_offsets, header.num_tokens, header.token_offsets_offset),
        ):
            first, last = int(offsets[:1][0]), int(offsets[header.num_packs :][0])
            if (first, last) != (0, total):
                detail = f"{unit} offsets go from {first} to {last}, expected 0 to {total}; {self.paths.index_remedy}"
                raise CorruptShardError(self.paths.seq_idx, base, rule, detail)

    def pack_error(self, reason: str, pack: int | None = None, first_pack: int = 0) -> FormatError:
        """Return the error about a pack that breaks a rule, with file and byte offset.

        Args:
            reason: the message of a native kernel, such as ``shard 0, pack 7: what is wrong (rule O2)``.
            pack: number of the pack in this shard; None to take it from ``reason``.
            first_pack: added to the pack number in ``reason``.
        """
        match = re.fullmatch(r"shard \d+, pack (\d+): (.*) \(rules? (.*)\)", reason)
        if match is None:
            return FormatError(f"{self.paths.prefix}: {reason}; {self.paths.index_remedy}")
        number = first_pack + int(match[1]) if pack is None else pack
        breach, rule = match[2], match[3]
        if rule.startswith("O"):
            header = self.header
            base = header.nbytes if rule == "O1" else header.token_offsets_offset
            path, offset = self.paths.seq_idx, base + 8 * number
            remedy = self.paths.index_remedy
        else:
            path, offset = self.paths.starts, 4 * self.sequence_range_of(number)[0]
            remedy = "find the damaged file with megatron-sft-idx verify, and restore it from a copy"
        return CorruptShardError(path, offset, rule, f"pack {number}: {breach}; {remedy}")


def _range_of(offsets: Array) -> Callable[[int], tuple[int, int]]:
    """Return a function that maps i to ``offsets[i], offsets[i + 1]`` as ints."""
    if isinstance(offsets, np.ndarray):
        item = offsets.data  # a memoryview returns ints several times faster than an array
        return lambda i: (item[i], item[i + 1])

    def read(i: int) -> tuple[int, int]:
        start, stop = offsets[i : i + 2].tolist()
        return start, stop

    return read


def open_files(paths: ShardPaths, options: ReadOptions, index_cache: str | None) -> OpenFiles:
    """Open the files of a shard. See ``Shard`` for arguments and errors.

    A remote shard takes seven small requests, plus the download of the index files that are not in the cache.
    """
    seq_idx = _seq_idx_start(paths)
    header = Header.decode(seq_idx.raw, paths.seq_idx)
    try:
        if seq_idx.info is None:
            files = _open_local(paths, header, options)
        else:
            files = _open_remote(paths, header, seq_idx.info, index_cache, options.backend)
        # The sizes are not enough: a shard with the packs in another order has the same sizes.
        if _is_still(paths, seq_idx):
            return files
    except ShardNotFoundError:
        raise
    # While another shard is being published, files are missing for a moment. Or one of the paths is not a regular file.
    except (OSError, FormatError) as error:
        if isinstance(error, FileNotFoundError) or (seq_idx.info is None and paths.missing()):
            raise _not_found(paths) from None
        if _is_still(paths, seq_idx):
            raise
    raise FormatError(f"{paths.prefix}: another shard was published here during opening; open it again")


def _is_still(paths: ShardPaths, seq_idx: FileStart) -> bool:
    """Return whether the ``.seq.idx`` at a prefix is unchanged. ShardNotFoundError: it no longer exists on disk."""
    if seq_idx.info is None:
        with contextlib.suppress(FileNotFoundError):
            if stamp_of(os.stat(paths.seq_idx)) == seq_idx.stamp:
                return True
        return _seq_idx_start(paths).raw == seq_idx.raw
    return (info := object_at(paths.seq_idx)) is not None and info.etag == seq_idx.info.etag


def _open_local(paths: ShardPaths, header: Header, options: ReadOptions) -> OpenFiles:
    sizes = header.sizes(paths)
    # Megatron's index is not read. Only its size is checked.
    check_size(paths.idx, os.stat(paths.idx).st_size, sizes[paths.idx])

    def confirm() -> None:
        require_same(paths.prefix, read_header(paths.prefix).shard_id, header.shard_id)

    def array(path: str, dtype: Any, count: int, offset: int = 0) -> Array:
        return open_items(path, np.dtype(dtype), count, sizes[path], options.backend, confirm, offset)

    begins = (header.nbytes, header.token_offsets_offset)
    count = header.num_packs + 1
    if options.backend == "pread":
        offsets = [array(paths.seq_idx, "<i8", count, begin) for begin in begins]
    else:
        # Both arrays of offsets are in one file, so one map, or one read, covers both.
        raw = array(paths.seq_idx, "u1", sizes[paths.seq_idx])[:]
        offsets = [raw[begin : begin + 8 * count].view("<i8") for begin in begins]
    tokens = array(paths.tokens, header.token_dtype, header.num_tokens)
    loss = array(paths.loss, header.mask_dtype, header.num_tokens)
    starts = array(paths.starts, "<u4", header.num_sequences)
    if options.advice != "normal" or options.huge_pages:  # the normal order needs no hint
        for data in (tokens, loss):
            advise_order(data, options.advice, huge_pages=options.huge_pages)
    if options.backend == "reopen":
        starts = starts[:]
    return OpenFiles(paths, header, (tokens, loss, starts), offsets, options.advice)


def _open_remote(
    paths: ShardPaths, header: Header, seq_idx: ObjectInfo, index_cache: str | None, backend: Backend
) -> OpenFiles:
    sizes = header.sizes(paths)
    store = open_store(paths.prefix)[0]
    check_size(paths.seq_idx, seq_idx.nbytes, sizes[paths.seq_idx])
    objects: dict[str, ObjectInfo] = {}
    for path, info in zip(paths.data, request_pool().map(object_at, paths.data), strict=True):
        if info is not None:
            check_size(path, info.nbytes, sizes[path])
            objects[path] = info
    if len(objects) < len(paths.data):
        raise _not_found(paths)

    def index_bytes(digest: FileDigest, info: ObjectInfo, offset: int, source: str) -> NDArray[np.uint8]:
        copy = cached_copy(index_cache, digest, lambda: read_ahead(store, info, offset=offset), source)
        # All backends except mmap read the copy into memory and keep no file open.
        local_backend: Backend = "mmap" if backend == "mmap" else "pread"
        return open_array(copy, np.dtype("u1"), digest.nbytes, nbytes=digest.nbytes, backend=local_backend)[:]

    behind_header = FileDigest(header.seq_idx_nbytes - header.nbytes, header.arrays_checksum)
    raw_offsets = index_bytes(behind_header, seq_idx, header.nbytes, paths.seq_idx)
    begins = (0, header.token_offsets_offset - header.nbytes)
    nbytes = 8 * (header.num_packs + 1)
    offsets = [raw_offsets[begin : begin + nbytes].view("<i8") for begin in begins]
    starts = index_bytes(header.digests[3], objects[paths.starts], 0, paths.starts).view("<u4")
    tokens, loss = (
        RemoteArray(store, objects[path].key, dtype, header.num_tokens, objects[path].etag)
        for path, dtype in ((paths.tokens, header.token_dtype), (paths.loss, header.mask_dtype))
    )
    return OpenFiles(paths, header, (tokens, loss, starts), offsets, "normal")


def object_at(path: str) -> ObjectInfo | None:
    """Return a store's information about the object at a path, or None if there is no object."""
    store, key = open_store(path)
    return store.head(key)
