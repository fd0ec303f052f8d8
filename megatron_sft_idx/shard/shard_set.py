"""Many shards read as one: ``find_prefixes`` finds the shards at a path, ``ShardSet`` reads all their packs."""

from __future__ import annotations

import errno
import glob
import operator
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import BUILDING, MEDIA_SUFFIXES, SUFFIXES, check_column_name, column_of
from megatron_sft_idx.lines import Shown, counted
from megatron_sft_idx.shard.at_prefix import holds_shard_files, is_building
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.opening import read_header, require_same, what_a_folder_holds
from megatron_sft_idx.shard.reader import Pack, Shard, checked_packs, extents_of
from megatron_sft_idx.storage import BackendName, ReadOptions, announce, is_remote
from megatron_sft_idx.storage.remote import RemotePath
from megatron_sft_idx.storage.remote.store import matching_objects, object_exists, objects_in_folder
from megatron_sft_idx.storage.remote.transport import request_pool

# Maximum number of mapped shards. An open shard holds four maps, or five descriptors with pread, and two more of either
# with images or audio. Some cluster file systems allow a process only about 590 maps, and torch and Megatron need some
# of them; 256 descriptors is a common limit.
MAPPED_SHARDS = 32
# A set of more shards is read into memory if its tokens, masks and index arrays have at most this many bytes.
MEMORY_NBYTES = 1 << 30
# Number of remote shards that are opened at once, each with a few requests.
OPENED_AT_ONCE = 16

Source: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
# A complete shard is found by its .seq.idx. An incomplete shard or an interrupted build is found by any of the other
# files, except .bin and .idx, because stock datasets have these too.
_WHOLE_SUFFIXES, _PARTIAL_SUFFIXES = (".seq.idx",), (".seq.idx", ".seq.bin", ".loss.bin", BUILDING)

_State: TypeAlias = tuple[str, tuple[Any, ...], bytes, "str | None", tuple[str, ...]]


# ---- finding shards ----


def natural_key(path: str) -> tuple[list[str | int], str]:
    """Sort key that compares runs of digits as numbers: ``part-9`` comes before ``part-10``."""
    texts_and_numbers: list[str | int] = list(re.split(r"(\d+)", path))
    texts_and_numbers[1::2] = map(int, texts_and_numbers[1::2])
    return texts_and_numbers, path


def find_prefixes(source: Source, *, incomplete: bool = False) -> list[str]:
    """Return the prefixes of the shards in ``source``: a prefix, a folder, a glob, or a list of these.

    A folder stands for the shards directly in it, not in its subfolders; if it has none, for a shard next to it with
    the folder's name. A glob stands for the shards whose prefix or files it matches, and for those in matching folders.
    Shards of a folder or glob are in the order of ``natural_key``. A list keeps its order, and several files of one
    shard count once (``distinct``). In an object store a folder is a prefix of keys, and the slash at its end is
    optional. A prefix is returned even if no shard exists there; opening it reports what is missing. ``incomplete``
    also finds shards with missing files, and interrupted builds on a disk.

    Raises:
        ShardNotFoundError: a folder or a glob has no shard.
        FormatError: the list is empty, or a name is both a shard and a folder of shards.

    Example:
        >>> find_prefixes("data"), find_prefixes("data/chats*"), find_prefixes("data/chats.seq.idx")
        (['data/chats'], ['data/chats'], ['data/chats'])
    """
    if not isinstance(source, str | os.PathLike):
        if not len(source):
            raise FormatError("an empty list of shards; pass at least one")
        return [prefix for entry in distinct(source) for prefix in find_prefixes(entry, incomplete=incomplete)]
    path, suffixes = os.fspath(source), _PARTIAL_SUFFIXES if incomplete else _WHOLE_SUFFIXES
    remote, is_glob = is_remote(path), glob.has_magic(path)
    is_unfinished = incomplete and path.endswith(BUILDING) and not remote and is_building(ShardPaths.of(_prefix(path)))
    is_folder = path.endswith("/") or not RemotePath.of(path).key if remote else os.path.isdir(path)
    if not is_folder or is_unfinished:
        prefix = _prefix(path) if incomplete else ShardPaths.of(path).prefix
        if not (remote or is_glob):
            return [prefix]
        # A prefix may look like a glob. In a store it may also be the name of a folder.
        files = [prefix + suffix for suffix in suffixes]
        if any(request_pool().map(object_exists, files) if remote else map(os.path.exists, files)):
            return [prefix]
    if not remote:
        paths = [entry.path for entry in os.scandir(path)] if is_folder else _matching_local(path, suffixes)
    elif is_glob:
        paths = matching_objects(path + "*") if is_folder else matching_objects(path, "/*", *suffixes)
    else:
        paths = objects_in_folder(path)

    def is_of_shard(file: str) -> bool:
        # In a building folder, the files are named only by their suffixes. Such folders exist only on disks.
        if not file.endswith(suffixes) or os.path.basename(file) in SUFFIXES:
            return False
        return not file.endswith(BUILDING) or holds_shard_files(ShardPaths.of(_prefix(file)))

    prefixes = {_prefix(file) for file in paths if is_of_shard(file)}
    # A shard may have the name of a folder next to it.
    beside = [path + suffix for suffix in suffixes] if is_folder and not path.endswith("/") else []
    is_beside = any(os.path.exists(file) and is_of_shard(file) for file in beside)
    if is_beside and prefixes:
        raise FormatError(
            f"{path}: both a shard and a folder of shards have this name; pass either {path}.seq.idx or {path}/"
        )
    if is_beside or prefixes:
        return sorted(prefixes or [path], key=natural_key)
    if is_folder and not (remote and is_glob):
        raise ShardNotFoundError(path, [path.rstrip("/") + "/*.seq.idx"], what_a_folder_holds(path))
    if is_glob:
        raise ShardNotFoundError(path, [path + ".seq.idx"], "no shard and no folder of shards matches the pattern")
    return [prefix]


def distinct(sources: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the paths of a list without further files of the same shard (shells expand globs to such lists)."""
    paths: list[str] = []
    first_files: dict[str, str] = {}
    for path in [os.fspath(source) for source in sources]:
        is_file = path.endswith((*SUFFIXES, *MEDIA_SUFFIXES)) or column_of(path) is not None
        if not is_file or first_files.setdefault(ShardPaths.of(path).prefix, path) == path:
            paths.append(path)
    return paths


def _prefix(path: str) -> str:
    return ShardPaths.of(path.removesuffix(BUILDING)).prefix


def _matching_local(pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return shard files whose prefix, folder or own path matches the pattern, and all other files of such a folder."""
    paths = [path for suffix in suffixes for path in glob.glob(pattern + suffix)]
    for path in glob.glob(pattern):
        if os.path.isdir(path):
            paths += [entry.path for entry in os.scandir(path)]
        else:
            paths += [file for suffix in suffixes if os.path.exists(file := _prefix(path) + suffix)]
    return paths


# ---- many shards as one ----


def running_sums(counts: Iterable[int]) -> NDArray[np.int64]:
    """Return for each count the sum of the counts before it, then the total: int64 [counts + 1]."""
    return np.cumsum([0, *counts], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ArraysInMemory:
    """The arrays of all shards of a set, concatenated in memory and read-only. Each shard is read on first use.

    Attributes:
        tokens: ids of all packs [tokens].
        loss: label-aligned mask [tokens].
        starts: start of each sequence in its pack, uint32 [sequences].
        sequence_offsets: start of each pack in ``starts``, int64 [packs + 1].
        token_offsets: start of each pack in ``tokens``, int64 [packs + 1].
        tokens_before: number of tokens in all shards before each one, int64 [shards + 1].
        items: both arrays of offsets as memoryviews, because reading single values from them is several times faster.
        is_read: one byte per shard, 1 once its values are in the arrays.
    """

    tokens: NDArray[Any]
    loss: NDArray[Any]
    starts: NDArray[np.uint32]
    sequence_offsets: NDArray[np.int64]
    token_offsets: NDArray[np.int64]
    tokens_before: NDArray[np.int64]
    items: tuple[memoryview, memoryview]
    is_read: bytearray


class ShardSet(Shown):
    """Shards read as one. Packs are numbered consecutively through all shards, in order.

    The constructor reads the header of each shard. The other files of a shard are opened on first use:

    - A few shards are mapped, as long as the system allows one more map.
    - Many small shards are read into memory (``in_memory``), unless columns are requested or they have images or audio.
    - For many large shards, the index arrays are read into memory. Files of tokens and masks are opened for each read
      and then closed.

    So thousands of shards need no maps and no descriptors. A set pickles as its prefixes and a fingerprint. Unpickling
    raises FormatError if other shards are at the prefixes. Threads can share a set.

    Args:
        prefixes: prefixes of the shards, in order.
        backend: see ``Shard``. ``mmap`` and ``pread`` are for a few shards. With ``reopen``, only the index arrays are
            kept in memory, even for a small set. Or a ``ReadOptions`` object.
        same_capacity: reject shards of different capacities. Pass False for sequences that will be packed later.
        alike: reject shards that cannot be trained on together because of different tokenizers or token dtypes.
        index_cache: see ``Shard``.
        columns: names of the columns to read with packs. Every shard must have them, with the same kind.

    Attributes:
        prefixes: prefixes of the shards, in order.
        remote: whether any of the shards is in an object store.

    Raises:
        ShardNotFoundError: a shard is missing.
        FormatError: a header breaks a rule, or the shards cannot be read together.

    Example:
        >>> shards = ShardSet.open("data/chats")  # or a folder, a glob, a list
        >>> shards
        <ShardSet data/chats: 7 packs>
        >>> shards[-1]["input_ids"]
        array([60, 61, 62, 63, 64, 65, 66, 67, 68], dtype=int32)
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        backend: BackendName | ReadOptions = "mmap",
        same_capacity: bool = True,
        alike: bool = True,
        index_cache: str | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        if not prefixes:
            raise FormatError("an empty list of shards; pass at least one")
        options = ReadOptions.of(os.fspath(prefixes[0]), backend)
        named = "\0".join(ShardPaths.of(prefix).prefix for prefix in prefixes)
        self.__setstate__((named, tuple(options), b"", index_cache, tuple(columns)))
        different = "they come from different tokenizers"
        if alike:
            self.agree_on("tokens are", lambda header: header.token_dtype, "write all shards with the same dtype")
            self.agree_on("pad id is", lambda header: header.pad_id, different)
            self.agree_on("tokenizer is", lambda header: header.tokenizer, different)
        if alike and same_capacity:
            remedy = "pack them again with the same --seq-length, or let training pack them when it starts"
            self.agree_on("capacity is", lambda header: header.capacity or None, remedy)  # 0 means that it has no packs
        _ = self.headers, self.columns  # raise their errors now

    @classmethod
    def open(cls, source: Source, **options: Any) -> ShardSet:
        """Open the shards that ``find_prefixes`` finds. See both for other arguments and errors."""
        return cls(find_prefixes(source), **options)

    def __getstate__(self) -> _State:
        # One string, because a path cannot contain a zero byte. Thousands of strings would make a larger pickle.
        return "\0".join(self.prefixes), tuple(self._options), self._fingerprint, self._index_cache, self._chosen

    def __setstate__(self, state: _State) -> None:
        # An empty fingerprint accepts any content.
        prefixes, options, self._expected_fingerprint, self._index_cache, self._chosen = state
        self.prefixes = tuple(prefixes.split("\0"))
        self._options = ReadOptions(*options)
        self.remote = any(map(is_remote, self.prefixes))
        # Open shards by number. Threads may add entries concurrently. A fork could copy a lock while it is held.
        self._shards: dict[int, Shard] = {}

    @classmethod
    def reopen(cls, state: _State) -> ShardSet:
        """Return the set whose ``__getstate__`` returned ``state``."""
        shards = cls.__new__(cls)
        shards.__setstate__(state)
        return shards

    @classmethod
    def joined(cls, sets: Sequence[ShardSet]) -> ShardSet:
        """Join the shards of several sets, one set after the other, with the options of the first set."""
        prefixes = [prefix for each in sets for prefix in each.prefixes]
        first = sets[0]
        shards = cls.reopen(("\0".join(prefixes), tuple(first._options), b"", first._index_cache, first._chosen))
        shards.headers = [header for each in sets for header in each.headers]
        shards.columns = columns_of_sets(sets)
        return shards

    def agree_on(self, subject: str, value_of: Callable[[Header], Any], remedy: str) -> None:
        """Raise FormatError about ``subject`` (``capacity is``) if headers have different values.

        None is not compared.
        """
        require_alike(self.prefixes, map(value_of, self.headers), subject, remedy)

    @cached_property
    def headers(self) -> list[Header]:
        """Header of each shard."""
        # A remote header takes one or two requests. Reading a local one is faster than switching to a thread.
        map_headers = request_pool().map if self.remote else map
        headers = list(map_headers(read_header, self.prefixes))
        if self._expected_fingerprint not in (b"", _digest(headers)):
            others = f" and {counted(len(self.prefixes) - 1, 'other')}" if len(self.prefixes) > 1 else ""
            raise FormatError(
                f"{self.prefixes[0]}{others}: the content has changed since this dataset was opened, because a shard"
                " was replaced: start again"
            )
        return headers

    @cached_property
    def columns(self) -> dict[str, list[ColumnSpec]]:
        """The spec in each shard of each column that is read with packs. See the constructor for errors."""
        names = self._chosen

        def specs_of(prefix: str, header: Header) -> list[ColumnSpec]:
            return [open_column(ShardPaths(prefix), check_column_name(name), header, "reopen").spec for name in names]

        if not names:
            return {}
        with ThreadPoolExecutor(OPENED_AT_ONCE, "opening") if self.remote else nullcontext() as pool:
            of_shards = list((pool.map if pool else map)(specs_of, self.prefixes, self.headers))
        columns = {name: [specs[number] for specs in of_shards] for number, name in enumerate(names)}
        return require_alike_columns(self.prefixes, columns)

    @property
    def _fingerprint(self) -> bytes:
        if not self._expected_fingerprint:
            self._expected_fingerprint = _digest(self.headers)
        return self._expected_fingerprint

    @property
    def fingerprint(self) -> str:
        """Hash of the shards' ids in their order, as hex. It does not depend on the shards' location."""
        return self._fingerprint.hex()

    @cached_property
    def packs_before(self) -> NDArray[np.int64]:
        """The number of packs before each shard, then the number of packs in all shards: int64 [shards + 1]."""
        return running_sums(header.num_packs for header in self.headers)

    @cached_property
    def _packs_before(self) -> list[int]:
        packs: list[int] = self.packs_before.tolist()
        return packs

    @cached_property
    def sequences_before(self) -> NDArray[np.int64]:
        """The counterpart of ``packs_before`` for sequences."""
        return running_sums(header.num_sequences for header in self.headers)

    @property
    def num_sequences(self) -> int:
        """Number of sequences in all shards."""
        return int(self.sequences_before[-1])

    def total(self, count: str) -> int:
        """Return the sum over all shards of a header count, such as ``num_tokens``."""
        return sum(int(getattr(header, count)) for header in self.headers)

    # ---- opening shards ----

    @cached_property
    def _mapped(self) -> bool:
        return self._options.backend != "reopen" and len(self.prefixes) <= MAPPED_SHARDS

    @cached_property
    def in_memory(self) -> ArraysInMemory | None:
        """Arrays for all shards, filled by ``read_into_memory``; None if the set is not read into memory."""
        headers = self.headers
        same_dtypes = len({(header.token_dtype, header.mask_dtype) for header in headers}) == 1
        data = sum(digest.nbytes for header in headers for digest in header.digests[:2])
        fits = data + sum(header.index_nbytes for header in headers) <= MEMORY_NBYTES
        if (
            self._mapped
            or self.remote
            or self._options.backend == "reopen"
            or self._chosen
            or any(header.has_media for header in headers)
            or not same_dtypes
            or not fits
        ):
            return None
        tokens_before = running_sums(header.num_tokens for header in headers)
        tokens = int(tokens_before[-1])
        sequence_offsets, token_offsets = (_read_only(np.empty(len(self) + 1, np.int64)) for _ in range(2))
        # An array uses no memory until values are written to it.
        return ArraysInMemory(
            _read_only(np.empty(tokens, headers[0].token_dtype)),
            _read_only(np.empty(tokens, headers[0].mask_dtype)),
            _read_only(np.empty(self.num_sequences, np.uint32)),
            sequence_offsets,
            token_offsets,
            tokens_before,
            (sequence_offsets.data, token_offsets.data),
            bytearray(len(headers)),
        )

    def read_into_memory(self, arrays: ArraysInMemory, numbers: Iterable[int]) -> None:
        """Read the shards with these numbers into ``arrays``, unless they are there already.

        Threads may call this in parallel.

        FormatError: the index of a shard breaks a rule, or another shard was published at its prefix.
        """
        for number in numbers:
            if arrays.is_read[number]:
                continue
            shard = self._open(number, ReadOptions("reopen"))
            shard.sequence_bounds()  # raises the error if a rule is broken
            packs = slice(self._packs_before[number], self._packs_before[number + 1] + 1)
            sequences, tokens = slice(*self.sequences_before[number:][:2]), slice(*arrays.tokens_before[number:][:2])
            for array, items, values in (
                (arrays.tokens, tokens, shard.files.tokens[:]),
                (arrays.loss, tokens, shard.files.loss[:]),
                (arrays.starts, sequences, shard.files.starts[:]),
                (arrays.sequence_offsets, packs, shard.sequence_offsets + sequences.start),
                (arrays.token_offsets, packs, shard.token_offsets + tokens.start),
            ):
                assert array.base is not None  # the writable array under the read-only view
                array.base[items] = values
            arrays.is_read[number] = 1

    def _open(self, number: int, options: ReadOptions) -> Shard:
        """Open a shard. FormatError: another shard was published at its prefix."""
        columns = self._chosen
        shard = Shard(self.prefixes[number], backend=options, index_cache=self._index_cache, columns=columns)
        require_same(shard.prefix, shard.shard_id, self.headers[number].shard_id)
        return shard

    def shard(self, number: int) -> Shard:
        """Return shard ``number``, open."""
        if (shard := self._shards.get(number)) is None:
            options = self._options if self._mapped else self._options._replace(backend="reopen")
            try:
                shard = self._open(number, options)
            except OSError as error:
                # The operating system or a cluster file system may not allow the process another map.
                if options.backend != "mmap" or error.errno not in (errno.ENOMEM, errno.EPERM, errno.ENODEV):
                    raise
                shard = self._open(number, options._replace(backend="reopen"))
            self._shards[number] = shard
        return shard

    def open_shards(self, numbers: Sequence[int]) -> list[Shard]:
        """Open several shards. Remote ones are opened in parallel, because each takes several requests in a row."""
        if not self.remote or len({*numbers} - self._shards.keys()) < 2:
            return [self.shard(number) for number in numbers]
        # A separate pool, because opening a shard waits for threads of the request pool.
        with ThreadPoolExecutor(OPENED_AT_ONCE, "opening") as pool:
            return list(pool.map(self.shard, numbers))

    # ---- packs ----

    def locate(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of each pack and the pack's number in it. ``packs`` must be from 0 to ``len(self) - 1``."""
        if len(self.prefixes) == 1:
            return np.zeros(len(packs), np.int64), packs
        # "right", because an empty shard starts at the same pack as the next shard, which holds that pack.
        shards = np.searchsorted(self.packs_before, packs, side="right") - 1
        return shards, packs - self.packs_before[shards]

    def schedule(self, indices: NDArray[np.int64] | Sequence[int]) -> None:
        """See ``Shard.schedule``. No effect if the set is read into memory or a shard is in an object store."""
        packs = checked_packs(indices, len(self), self.prefixes[0])
        if self.remote or self.in_memory is not None or not len(packs):
            return
        shards, local = self.locate(packs)
        numbers, slots = np.unique(shards, return_inverse=True)
        files = [self.shard(number).files for number in numbers.tolist()]
        announce(extents_of(files, slots, local))

    def __len__(self) -> int:
        return int(self.packs_before[-1])

    def _shown(self) -> str:
        more = f" and {len(self.prefixes) - 1:,} more" if len(self.prefixes) > 1 else ""
        return f"{self.prefixes[0]}{more}: {len(self):,} packs"

    def __getitem__(self, index: int | np.integer[Any]) -> Pack:
        """Return one pack. Negative indices count from the end of the last shard.

        IndexError: the pack does not exist.
        """
        i, total = operator.index(index), self._packs_before[-1]
        if not -total <= i < total:
            raise IndexError(f"{self.prefixes[0]}: there is no pack {i}; the {len(self.prefixes)} shards have {total}")
        i %= total
        number = bisect_right(self._packs_before, i) - 1  # several times faster than numpy for one value
        return self.pack(number, i - self._packs_before[number])

    def pack(self, number: int, index: int) -> Pack:
        """Return pack ``index`` of shard ``number`` without checking either. Read-only views if ``in_memory``."""
        arrays = self.in_memory
        if arrays is None:
            return self.shard(number)[index]
        if not arrays.is_read[number]:
            self.read_into_memory(arrays, [number])
        i = self._packs_before[number] + index
        sequences, tokens = arrays.items
        start, stop, first, last = tokens[i], tokens[i + 1], sequences[i], sequences[i + 1]
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = arrays.starts[first:last]
        boundaries[-1] = stop - start
        return {
            "input_ids": arrays.tokens[start:stop],
            "loss_mask": arrays.loss[start:stop],
            "seq_boundaries": boundaries,
        }

    def __iter__(self) -> Iterator[Pack]:
        return (self[i] for i in range(len(self)))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def columns_of_sets(sets: Sequence[ShardSet]) -> dict[str, list[ColumnSpec]]:
    """Return the spec of each column in each shard of several sets. FormatError: its kind differs between shards."""
    columns = {name: [spec for shards in sets for spec in shards.columns[name]] for name in sets[0].columns}
    return require_alike_columns([prefix for shards in sets for prefix in shards.prefixes], columns)


def require_alike_columns(prefixes: Sequence[str], columns: dict[str, list[ColumnSpec]]) -> dict[str, list[ColumnSpec]]:
    """Return ``columns``: for each name one spec per prefix. FormatError: the kind of a column differs."""
    remedy = "shards that are read together need columns of the same kind: attach the column again, or leave it out"
    for name, specs in columns.items():
        require_alike(prefixes, map(kind_in_words, specs), f"column {name} is", remedy)
    return columns


def require_alike(prefixes: Sequence[str], values: Iterable[Any], subject: str, remedy: str) -> None:
    """Raise FormatError if two shards have different values. A shard whose value is None is not compared."""
    recorded = [(prefix, value) for prefix, value in zip(prefixes, values, strict=True) if value is not None]
    for prefix, value in recorded:
        if value != recorded[0][1]:
            raise FormatError(f"{prefix}: {subject} {value}, but {recorded[0][1]} in {recorded[0][0]}; {remedy}")


def kind_in_words(spec: ColumnSpec) -> str:
    """Return the kind of a column as text for messages."""
    alignment = f", aligned with {spec.alignment}s" if spec.per == "token" else ""
    return f"{spec.dtype} x {spec.width} per {spec.per}{alignment}"


def _digest(headers: Sequence[Header]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(header.shard_id for header in headers))
