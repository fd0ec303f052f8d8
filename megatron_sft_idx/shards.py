"""Many shards read as one dataset: a shard, a folder, a glob, or a list of these."""

from __future__ import annotations

import glob
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.fingerprints import tokenizer_of
from megatron_sft_idx.shard.reader import Pack, read_header, require_same
from megatron_sft_idx.storage import Backend, is_remote
from megatron_sft_idx.storage.remote.listing import exists, folders_matching, in_folder, matching
from megatron_sft_idx.storage.remote.threads import threads

__all__ = ["ShardSet", "Source", "find_prefixes"]

Source: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
_State: TypeAlias = tuple[tuple[str, ...], Backend, bytes, "str | None"]

# Each open shard holds four maps, and some cluster file systems refuse a process more than about 590 of them.
_MAX_OPEN = 100
_ID_NBYTES = 16


def natural_key(path: str) -> tuple[list[str | int], str]:
    """Sort key that compares runs of digits as numbers: ``part-9`` comes before ``part-10``."""
    parts: list[str | int] = list(re.split(r"(\d+)", path))
    parts[1::2] = map(int, parts[1::2])
    return parts, path


def find_prefixes(source: Source) -> list[str]:
    """Prefixes of the shards that ``source`` names.

    A folder stands for the shards right in it, a glob for those whose prefix or one of whose files it matches; both
    are in numeric-aware order of their names. A list keeps its own order.

    Raises:
        ShardNotFoundError: a folder or a glob without any shard. A prefix that does not exist is given back: who
            opens it says what is missing.
        FormatError: an empty list.
    """
    if not isinstance(source, str | os.PathLike):
        if not len(source):
            raise FormatError("an empty list of shards; name at least one")
        return [prefix for entry in source for prefix in find_prefixes(entry)]
    path = os.fspath(source)
    if is_remote(path):
        return _find_remote(path)
    if os.path.isdir(path):
        found = _in_folder(path)
        if not found:
            raise ShardNotFoundError(path, [os.path.join(path, "*.seq.idx")], "the folder holds no shard of its own")
        return found
    prefix = ShardPaths.of(path).prefix
    if not glob.has_magic(path) or os.path.exists(prefix + ".seq.idx"):
        return [prefix]
    found = _matching(path)
    if not found:
        raise ShardNotFoundError(path, [path + ".seq.idx"], "no shard and no folder of shards matches the pattern")
    return found


def _in_folder(folder: str) -> list[str]:
    names = (entry.name for entry in os.scandir(folder) if entry.name.endswith(".seq.idx"))
    return sorted((os.path.join(folder, ShardPaths.of(name).prefix) for name in names), key=natural_key)


def _matching(pattern: str) -> list[str]:
    """Files are taken for their prefixes, so ``data/*`` and ``data/train-*`` both work; folders for what they hold."""
    found = {ShardPaths.of(path).prefix for path in glob.glob(pattern + ".seq.idx")}
    for path in glob.glob(pattern):
        if os.path.isdir(path):
            found.update(_in_folder(path))
        elif path.endswith(SUFFIXES) and os.path.exists(ShardPaths.of(path).seq_idx):
            found.add(ShardPaths.of(path).prefix)
    return sorted(found, key=natural_key)


def _find_remote(path: str) -> list[str]:
    """As ``find_prefixes``, in an object store, where a folder is nothing but the start of some keys."""
    is_folder = path.endswith("/")
    if not is_folder:
        prefix = ShardPaths.of(path).prefix
        if exists(prefix + ".seq.idx"):
            return [prefix]
    if glob.has_magic(path):
        paths = matching(path + ".seq.idx") + matching(path)
        paths += [entry for folder in folders_matching(path) for entry in in_folder(folder)]
        wanted, why = path + ".seq.idx", "no shard and no folder of shards matches the pattern"
    else:
        paths = in_folder(path)
        wanted, why = path.rstrip("/") + "/*.seq.idx", "the folder holds no shard of its own"
    found = {ShardPaths.of(entry).prefix for entry in paths if entry.endswith(".seq.idx")}
    if found:
        return sorted(found, key=natural_key)
    if is_folder or glob.has_magic(path):
        raise ShardNotFoundError(path, [wanted], why)
    return [prefix]


class ShardSet:
    """Shards read as one: pack ``i`` counts through all of them in order.

    Opening reads one header a shard. A shard's files are opened when first needed, and no more than a hundred shards
    are held open. It pickles as its paths and ids; whoever unpickles it finds the same content or an error. Threads
    may share one.

    Args:
        prefixes: of the shards, in order.
        backend: ``mmap``, or ``pread`` where mapping is slow or refused.
        same_capacity: refuse packs of different capacities. Not for corpora that are packed later, where the capacity
            is that of the longest sequence.
        index_cache: local folder for the index files of remote shards; None for the usual one.

    Attributes:
        prefixes: of the shards, in order.

    Raises:
        ShardNotFoundError: a shard is not there.
        FormatError: a header breaks a rule, or the shards do not go together.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        backend: Backend = "mmap",
        same_capacity: bool = True,
        index_cache: str | None = None,
    ) -> None:
        if not prefixes:
            raise FormatError("an empty list of shards; name at least one")
        self._take(tuple(ShardPaths.of(prefix).prefix for prefix in prefixes), backend, None, index_cache)
        self._ids = b"".join(header.shard_id for header in self.headers)
        self._check(same_capacity)

    @classmethod
    def open(
        cls,
        source: Source,
        *,
        backend: Backend = "mmap",
        same_capacity: bool = True,
        index_cache: str | None = None,
    ) -> ShardSet:
        """Open what ``find_prefixes`` finds; arguments and errors as there and in the constructor."""
        found = find_prefixes(source)
        return cls(found, backend=backend, same_capacity=same_capacity, index_cache=index_cache)

    def _take(
        self, prefixes: tuple[str, ...], backend: Backend, ids: bytes | None, index_cache: str | None = None
    ) -> None:
        self.prefixes = prefixes
        self._backend: Backend = backend
        self._index_cache = index_cache
        self._ids = ids or b""
        # Replaced, never changed: no lock that a fork could catch in a thread's hands.
        self._shards: dict[int, Shard] = {}

    def __getstate__(self) -> _State:
        return self.prefixes, self._backend, self._ids, self._index_cache

    def __setstate__(self, state: _State) -> None:
        self._take(*state)

    @classmethod
    def reopen(cls, state: _State) -> ShardSet:
        """The set that ``__getstate__`` gave ``state`` of."""
        found = cls.__new__(cls)
        found._take(*state)
        return found

    def _check(self, same_capacity: bool) -> None:
        self._same("tokens are", lambda header: header.token_dtype, "write all shards of a dataset with one dtype")
        self._same("pad id is", lambda header: header.pad_id, "they come from different tokenizers")
        self._same("tokenizer is", tokenizer_of, "they come from different tokenizers")
        if same_capacity:
            remedy = "pack them again for one --seq-length, or let training pack them when it starts"
            self._same("capacity is", lambda header: header.capacity, remedy)

    def _same(self, what: str, value_of: Callable[[Header], Any], remedy: str) -> None:
        """FormatError where two shards that both know a value differ in it."""
        first: tuple[str, Any] | None = None
        for prefix, header in zip(self.prefixes, self.headers, strict=True):
            value = value_of(header)
            if value is None:
                continue
            first = first or (prefix, value)
            if value != first[1]:
                raise FormatError(f"{prefix}: {what} {value}, in {first[0]} {first[1]}; {remedy}")

    @cached_property
    def headers(self) -> list[Header]:
        """Header of each shard."""
        # Remote ones take a request or two each, local ones no time worth a thread.
        each = threads().map if any(map(is_remote, self.prefixes)) else map
        headers = list(each(read_header, self.prefixes))
        for i, header in enumerate(headers if self._ids else ()):
            require_same(self.prefixes[i], header.shard_id, self._id(i))
        return headers

    @cached_property
    def fingerprint(self) -> str:
        """Hex; equal shards in equal order, equal fingerprint, wherever they lie."""
        return xxhash.xxh3_128_hexdigest(self._ids)

    @cached_property
    def packs_before(self) -> NDArray[np.int64]:
        """Packs in all shards before each one, and in all of them: int64 [shards + 1]."""
        return _running([header.num_packs for header in self.headers])

    @cached_property
    def sequences_before(self) -> NDArray[np.int64]:
        """As ``packs_before``, of sequences."""
        return _running([header.num_sequences for header in self.headers])

    @property
    def num_sequences(self) -> int:
        """Sequences in all shards."""
        return int(self.sequences_before[-1])

    def total(self, count: str) -> int:
        """Sum over the shards of a header's count, such as ``num_tokens``."""
        return sum(int(getattr(header, count)) for header in self.headers)

    def shard(self, number: int) -> Shard:
        """Shard ``number``, open."""
        if (shard := self._shards.get(number)) is not None:
            return shard
        shard = Shard(self.prefixes[number], backend=self._backend, index_cache=self._index_cache)
        require_same(shard.prefix, shard.shard_id, self._id(number))
        # The oldest ones are let go; their views outlive them, so they may still be in use.
        kept = list(self._shards.items())[1 - _MAX_OPEN :]
        self._shards = {**dict(kept), number: shard}
        return shard

    def _id(self, number: int) -> bytes:
        return self._ids[number * _ID_NBYTES :][:_ID_NBYTES]

    def locate(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shard of each pack, and its number inside that shard; ``packs`` are 0 to ``len(self) - 1``."""
        # Sizes are uneven and may be zero: right of all boundaries that a pack is not before.
        shards = np.searchsorted(self.packs_before, packs, side="right") - 1
        return shards, packs - self.packs_before[shards]

    def __len__(self) -> int:
        return int(self.packs_before[-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.prefixes)!r})"

    def __getitem__(self, index: int | np.integer[Any]) -> Pack:
        """One pack; negative indices count from the end of the last shard. IndexError where there is none."""
        i = operator.index(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.prefixes[0]}: pack {i}, the {len(self.prefixes)} shards have {len(self)}")
        shards, local = self.locate(np.array([i % len(self)]))
        pack: Pack = self.shard(int(shards[0]))[int(local[0])]
        return pack

    def __iter__(self) -> Iterator[Pack]:
        return (self[i] for i in range(len(self)))


def _running(counts: list[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
