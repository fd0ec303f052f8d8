"""Many shards read as one: which of them a path stands for, and how their packs are held and found."""

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
from megatron_sft_idx.layout.column import ColumnSpec, check_name
from megatron_sft_idx.shard.columns import open_column
from megatron_sft_idx.shard.opening import checked_packs, extents_of, read_header, require_same
from megatron_sft_idx.shard.publication import is_journal
from megatron_sft_idx.shard.reader import Pack, Shard
from megatron_sft_idx.storage import BackendName, ReadOptions, announce, is_remote
from megatron_sft_idx.storage.remote.store import matching_objects, object_exists, objects_in_folder
from megatron_sft_idx.storage.remote.transport import request_pool

# An open shard holds four maps, or five descriptors where it is read with pread. Some cluster file systems refuse a
# process more than about 590 maps, of which torch and Megatron take their part; 256 descriptors is a common limit.
MAPPED_SHARDS = 32
# Tokens, masks and index arrays of a set that is held in memory because its shards are too many to map.
MEMORY_NBYTES = 1 << 30
# Remote shards that are being opened at a time; a few requests of each are under way.
OPENED_AT_ONCE = 16

Source: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
# What a shard has, and what only one of ours, or a build of one, leaves where files are missing: stock datasets have
# .bin and .idx too.
_JOURNAL = ".journal"
_WHOLE, _IN_PART = (".seq.idx",), (".seq.idx", ".seq.bin", ".loss.bin", _JOURNAL)

_State: TypeAlias = tuple[str, tuple[Any, ...], bytes, "str | None", tuple[str, ...]]


# ---- which shards ----


def natural_key(path: str) -> tuple[list[str | int], str]:
    """Sort key that compares runs of digits as numbers: ``part-9`` comes before ``part-10``."""
    parts: list[str | int] = list(re.split(r"(\d+)", path))
    parts[1::2] = map(int, parts[1::2])
    return parts, path


def find_prefixes(source: Source, *, incomplete: bool = False) -> list[str]:
    """Prefixes of the shards that ``source`` names: a prefix, a folder, a glob, or a list of these.

    A folder stands for the shards right in it, a glob for those whose prefix or one of whose files it matches, and for
    those in folders that it matches; both are in numeric-aware order of their names. A list keeps its own order. In an
    object store a folder is nothing but the start of some keys, and may be named without a slash at its end.

    Args:
        source: what names them.
        incomplete: also find what has only some of the files, and on a disk what a build left that was interrupted.

    Raises:
        ShardNotFoundError: a folder or a glob without any shard. A prefix that does not exist is given back: who
            opens it says what is missing.
        FormatError: an empty list.
    """
    if not isinstance(source, str | os.PathLike):
        if not len(source):
            raise FormatError("an empty list of shards; name at least one")
        return [prefix for entry in source for prefix in find_prefixes(entry, incomplete=incomplete)]
    path, marks = os.fspath(source), _IN_PART if incomplete else _WHOLE
    remote, is_glob = is_remote(path), glob.has_magic(path)
    is_folder = path.endswith("/") if remote else os.path.isdir(path)
    if not is_folder:
        prefix = _prefix(path) if incomplete else ShardPaths.of(path).prefix
        files = [prefix + mark for mark in marks]
        if any(request_pool().map(object_exists, files)) if remote else not is_glob or any(map(os.path.exists, files)):
            return [prefix]
    if not remote:
        paths = [entry.path for entry in os.scandir(path)] if is_folder else _matching_local(path, marks)
    elif is_glob:
        paths = matching_objects(path + "*") if is_folder else matching_objects(path, "/*", *marks)
    else:
        paths = objects_in_folder(path)
    marked = (entry for entry in paths if entry.endswith(marks))
    # A build is on a disk, and so is its journal.
    if found := {_prefix(entry) for entry in marked if not entry.endswith(_JOURNAL) or is_journal(entry)}:
        return sorted(found, key=natural_key)
    if is_glob and not (is_folder and not remote):
        raise ShardNotFoundError(path, [path + ".seq.idx"], "no shard and no folder of shards matches the pattern")
    if is_folder:
        raise ShardNotFoundError(path, [path.rstrip("/") + "/*.seq.idx"], "the folder holds no shard of its own")
    return [prefix]


def _prefix(path: str) -> str:
    return ShardPaths.of(path.removesuffix(_JOURNAL)).prefix


def _matching_local(pattern: str, marks: tuple[str, ...]) -> list[str]:
    """Files are taken for their shards, so ``data/*`` and ``data/train-*`` both work; folders for what they hold."""
    found = [path for mark in marks for path in glob.glob(pattern + mark)]
    for path in glob.glob(pattern):
        if os.path.isdir(path):
            found += [entry.path for entry in os.scandir(path)]
        else:
            found += [file for mark in marks if os.path.exists(file := _prefix(path) + mark)]
    return found


# ---- as one ----


def running_sums(counts: Iterable[int]) -> NDArray[np.int64]:
    """What comes before each count, and the sum of all: int64 [counts + 1]."""
    return np.cumsum([0, *counts], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class HeldArrays:
    """Shards in memory, end to end, as if they were one; read-only, and each there once it is marked as read.

    Attributes:
        tokens: of all packs.
        loss: label-aligned mask of all tokens.
        starts: uint32, where each sequence begins in its pack.
        sequence_offsets: int64 [packs + 1], CSR, through all shards.
        token_offsets: int64 [packs + 1], where each pack begins in ``tokens``.
        tokens_before: int64 [shards + 1], tokens in all shards before each one.
        items: the two offsets again, whose single values are read several times faster so.
        is_read: a byte a shard.
    """

    tokens: NDArray[Any]
    loss: NDArray[Any]
    starts: NDArray[np.uint32]
    sequence_offsets: NDArray[np.int64]
    token_offsets: NDArray[np.int64]
    tokens_before: NDArray[np.int64]
    items: tuple[memoryview, memoryview]
    is_read: bytearray


class ShardSet:
    """Shards read as one: pack ``i`` counts through all of them in order.

    Opening reads one header a shard; the other files are opened when first needed. How they are held depends on the
    set alone:

    - shards of a set that is small in number are mapped, as long as the system allows one map more;
    - of one that is small in bytes, each is read into memory when it is first needed (``held``), unless columns are
      asked for;
    - of any other only the index arrays are; tokens and masks are read from files that are opened for each read and
      closed again.

    So thousands of shards take no map and no descriptor. A set pickles as its paths and a fingerprint; whoever
    unpickles it finds the same content or an error. Threads may share one.

    Args:
        prefixes: of the shards, in order.
        backend: of ``Shard``. ``mmap`` and ``pread`` are for shards that are few; ``reopen`` is for sets that shall
            hold no more than index arrays, whatever their size. Or ``ReadOptions``, which say more.
        same_capacity: refuse packs of different capacities. Not for corpora that are packed later, where the capacity
            is that of the longest sequence.
        index_cache: local folder for the index files of remote shards; None for the usual one.
        alike: refuse shards that cannot be trained on together, of different tokenizers or dtypes of tokens.
        columns: names of columns that packs and batches come with; every shard has them, and of one kind.

    Attributes:
        prefixes: of the shards, in order.
        remote: whether some lie in an object store.

    Raises:
        ShardNotFoundError: a shard is not there.
        FormatError: a header breaks a rule, or the shards do not go together.
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
            raise FormatError("an empty list of shards; name at least one")
        options = ReadOptions.of(os.fspath(prefixes[0]), backend)
        named = tuple(ShardPaths.of(prefix).prefix for prefix in prefixes)
        self._set_fields(named, options, b"", index_cache, tuple(columns))
        different = "they come from different tokenizers"
        if alike:
            self.agree_on("tokens are", lambda header: header.token_dtype, "write all shards with one dtype")
            self.agree_on("pad id is", lambda header: header.pad_id, different)
            self.agree_on("tokenizer is", lambda header: header.tokenizer, different)
        if alike and same_capacity:
            remedy = "pack them again for one --seq-length, or let training pack them when it starts"
            self.agree_on("capacity is", lambda header: header.capacity, remedy)
        _ = self.headers, self.columns  # looked at now

    @classmethod
    def open(cls, source: Source, **options: Any) -> ShardSet:
        """Open what ``find_prefixes`` finds; arguments and errors as there and in the constructor."""
        return cls(find_prefixes(source), **options)

    def _set_fields(
        self,
        prefixes: tuple[str, ...],
        options: ReadOptions,
        fingerprint: bytes,
        index_cache: str | None,
        columns: tuple[str, ...],
    ) -> None:
        self.prefixes, self._options, self._index_cache, self._chosen = prefixes, options, index_cache, columns
        self.remote = any(map(is_remote, prefixes))
        self._expected = fingerprint  # empty: whatever is there
        # Entries come one by one, which threads may do at once: no lock that a fork could catch in their hands.
        self._shards: dict[int, Shard] = {}

    def __getstate__(self) -> _State:
        # A path holds no zero byte; thousands of strings would each add their own few.
        return "\0".join(self.prefixes), tuple(self._options), self._fingerprint, self._index_cache, self._chosen

    def __setstate__(self, state: _State) -> None:
        prefixes, options, fingerprint, index_cache, columns = state
        self._set_fields(tuple(prefixes.split("\0")), ReadOptions(*options), fingerprint, index_cache, columns)

    @classmethod
    def reopen(cls, state: _State) -> ShardSet:
        """The set that ``__getstate__`` gave ``state`` of."""
        found = cls.__new__(cls)
        found.__setstate__(state)
        return found

    @classmethod
    def joined(cls, sets: Sequence[ShardSet]) -> ShardSet:
        """The shards of several sets, one set after the other, read as the first one is."""
        found, first = cls.__new__(cls), sets[0]
        prefixes = tuple(prefix for one in sets for prefix in one.prefixes)
        found._set_fields(prefixes, first._options, b"", first._index_cache, first._chosen)
        found.headers = [header for one in sets for header in one.headers]
        found.columns = joined_columns(sets)
        return found

    def agree_on(self, what: str, value_of: Callable[[Header], Any], remedy: str) -> None:
        """FormatError where two shards that both know a value differ in it."""
        require_alike(self.prefixes, map(value_of, self.headers), what, remedy)

    @cached_property
    def headers(self) -> list[Header]:
        """Header of each shard."""
        # Remote ones take a request or two each, local ones no time worth a thread.
        each = request_pool().map if self.remote else map
        headers = list(each(read_header, self.prefixes))
        if self._expected not in (b"", _digest(headers)):
            others = f" and {len(self.prefixes) - 1} others" if len(self.prefixes) > 1 else ""
            raise FormatError(
                f"{self.prefixes[0]}{others}: the content is another one than when this dataset was opened; another"
                " shard was published over one of them: start again"
            )
        return headers

    @cached_property
    def columns(self) -> dict[str, list[ColumnSpec]]:
        """The columns that were asked for, as each shard has them.

        Raises:
            ShardNotFoundError: a shard has no such column.
            FormatError: it is of another kind in another shard.
        """
        names = self._chosen

        def look(prefix: str, header: Header) -> list[ColumnSpec]:
            return [open_column(ShardPaths(prefix), check_name(name), header, "reopen").spec for name in names]

        if not names:
            return {}
        with ThreadPoolExecutor(OPENED_AT_ONCE, "opening") if self.remote else nullcontext() as pool:
            found = list((pool.map if pool else map)(look, self.prefixes, self.headers))
        return alike_columns(self.prefixes, dict(zip(names, map(list, zip(*found, strict=True)), strict=True)))

    @property
    def _fingerprint(self) -> bytes:
        if not self._expected:
            self._expected = _digest(self.headers)
        return self._expected

    @property
    def fingerprint(self) -> str:
        """Hex; equal shards in equal order, equal fingerprint, wherever they lie."""
        return self._fingerprint.hex()

    @cached_property
    def packs_before(self) -> NDArray[np.int64]:
        """Packs in all shards before each one, and in all of them: int64 [shards + 1]."""
        return running_sums(header.num_packs for header in self.headers)

    @cached_property
    def _before(self) -> list[int]:
        before: list[int] = self.packs_before.tolist()
        return before

    @cached_property
    def sequences_before(self) -> NDArray[np.int64]:
        """As ``packs_before``, of sequences."""
        return running_sums(header.num_sequences for header in self.headers)

    @property
    def num_sequences(self) -> int:
        """Sequences in all shards."""
        return int(self.sequences_before[-1])

    def total(self, count: str) -> int:
        """Sum over the shards of a header's count, such as ``num_tokens``."""
        return sum(int(getattr(header, count)) for header in self.headers)

    # ---- how they are held ----

    @cached_property
    def _mapped(self) -> bool:
        return self._options.backend != "reopen" and len(self.prefixes) <= MAPPED_SHARDS

    @cached_property
    def held(self) -> HeldArrays | None:
        """The shards in memory, where that is how they are read; ``need`` reads them."""
        headers = self.headers
        alike = len({(header.token_dtype, header.mask_dtype) for header in headers}) == 1
        if self._mapped or self.remote or self._options.backend == "reopen" or not alike or self._chosen:
            return None
        data = sum(digest.nbytes for header in headers for digest in header.digests[:2])
        if data + sum(header.index_nbytes for header in headers) > MEMORY_NBYTES:
            return None
        tokens_before = running_sums(header.num_tokens for header in headers)
        tokens = int(tokens_before[-1])
        sequence_offsets, token_offsets = (_read_only(np.empty(len(self) + 1, np.int64)) for _ in range(2))
        # Pages of an array that nobody has written to take no memory.
        return HeldArrays(
            _read_only(np.empty(tokens, headers[0].token_dtype)),
            _read_only(np.empty(tokens, headers[0].mask_dtype)),
            _read_only(np.empty(self.num_sequences, np.uint32)),
            sequence_offsets,
            token_offsets,
            tokens_before,
            (sequence_offsets.data, token_offsets.data),
            bytearray(len(headers)),
        )

    def need(self, held: HeldArrays, numbers: Iterable[int]) -> None:
        """Read those of these shards that are not in memory yet; threads that need one shard read it to one place.

        Each is held to every rule of its index then (FormatError), so packs need no check of their own.
        """
        for number in numbers:
            if held.is_read[number]:
                continue
            shard = self._open(number, ReadOptions("reopen"))
            shard.sequence_bounds()  # the rules
            packs = slice(self._before[number], self._before[number + 1] + 1)
            sequences, tokens = slice(*self.sequences_before[number:][:2]), slice(*held.tokens_before[number:][:2])
            for array, part, values in (
                (held.tokens, tokens, shard.files.tokens[:]),
                (held.loss, tokens, shard.files.loss[:]),
                (held.starts, sequences, shard.files.starts[:]),
                (held.sequence_offsets, packs, shard.sequence_offsets + sequences.start),
                (held.token_offsets, packs, shard.token_offsets + tokens.start),
            ):
                assert array.base is not None  # what a read-only view is of
                array.base[part] = values
            held.is_read[number] = 1

    def _open(self, number: int, options: ReadOptions) -> Shard:
        """FormatError where another one was published over it."""
        columns = self._chosen
        shard = Shard(self.prefixes[number], backend=options, index_cache=self._index_cache, columns=columns)
        require_same(shard.prefix, shard.shard_id, self.headers[number].shard_id)
        return shard

    def shard(self, number: int) -> Shard:
        """Shard ``number``, open."""
        if (shard := self._shards.get(number)) is None:
            options = self._options if self._mapped else self._options._replace(backend="reopen")
            try:
                shard = self._open(number, options)
            except OSError as refused:
                # The system refuses the process one more map: other sets of it have as many as there may be.
                if options.backend != "mmap" or refused.errno != errno.ENOMEM:
                    raise
                shard = self._open(number, options._replace(backend="reopen"))
            self._shards[number] = shard
        return shard

    def opened(self, numbers: Sequence[int]) -> list[Shard]:
        """These shards, open; remote ones at once, as each takes several requests one after another."""
        if not self.remote or len({*numbers} - self._shards.keys()) < 2:
            return [self.shard(number) for number in numbers]
        # Not the pool of requests, whose threads must not wait for each other.
        with ThreadPoolExecutor(OPENED_AT_ONCE, "opening") as pool:
            return list(pool.map(self.shard, numbers))

    # ---- packs ----

    def locate(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shard of each pack, and its number inside that shard; ``packs`` are 0 to ``len(self) - 1``."""
        if len(self.prefixes) == 1:
            return np.zeros(len(packs), np.int64), packs
        # Sizes are uneven and may be zero: right of all boundaries that a pack is not before.
        shards = np.searchsorted(self.packs_before, packs, side="right") - 1
        return shards, packs - self.packs_before[shards]

    def schedule(self, indices: NDArray[np.int64] | Sequence[int]) -> None:
        """Say which packs come next, in order, as of ``Shard.schedule``.

        Nothing happens where shards are in memory or in an object store, which a ``BatchLoader`` fetches from.

        Raises:
            IndexError: no such pack.
        """
        packs = checked_packs(indices, len(self), self.prefixes[0])
        if self.remote or self.held is not None or not len(packs):
            return
        shards, local = self.locate(packs)
        numbers, slots = np.unique(shards, return_inverse=True)
        files = [self.shard(number).files for number in numbers.tolist()]
        announce(extents_of(files, slots, local))

    def __len__(self) -> int:
        return int(self.packs_before[-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.prefixes)!r})"

    def __getitem__(self, index: int | np.integer[Any]) -> Pack:
        """One pack; negative indices count from the end of the last shard. IndexError where there is none."""
        i, total = operator.index(index), self._before[-1]
        if not -total <= i < total:
            raise IndexError(f"{self.prefixes[0]}: pack {i}, the {len(self.prefixes)} shards have {total}")
        i %= total
        number = bisect_right(self._before, i) - 1  # several times faster than numpy for one value
        return self.pack(number, i - self._before[number])

    def pack(self, number: int, index: int) -> Pack:
        """Pack ``index`` of shard ``number``; both are there. Read-only views where it is held in memory."""
        held = self.held
        if held is None:
            return self.shard(number)[index]
        if not held.is_read[number]:
            self.need(held, [number])
        i, (sequences, tokens) = self._before[number] + index, held.items
        start, stop, first, last = tokens[i], tokens[i + 1], sequences[i], sequences[i + 1]
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = held.starts[first:last]
        boundaries[-1] = stop - start
        return {"input_ids": held.tokens[start:stop], "loss_mask": held.loss[start:stop], "seq_boundaries": boundaries}

    def __iter__(self) -> Iterator[Pack]:
        return (self[i] for i in range(len(self)))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def joined_columns(sets: Sequence[ShardSet]) -> dict[str, list[ColumnSpec]]:
    """The columns of all shards of several sets. FormatError: one is of another kind in another shard."""
    columns = {name: [spec for one in sets for spec in one.columns[name]] for name in sets[0].columns}
    return alike_columns([prefix for one in sets for prefix in one.prefixes], columns)


def alike_columns(prefixes: Sequence[str], columns: dict[str, list[ColumnSpec]]) -> dict[str, list[ColumnSpec]]:
    """Columns as each of some shards has them. FormatError: one is of another kind in another shard."""
    remedy = "shards that are read together have columns of one kind: attach it anew, or leave it out"
    for name, specs in columns.items():
        require_alike(prefixes, map(_kind, specs), f"column {name} is", remedy)
    return columns


def require_alike(prefixes: Sequence[str], values: Iterable[Any], what: str, remedy: str) -> None:
    """FormatError where a value of one shard is another than that of the first; None is not known."""
    known = [(prefix, value) for prefix, value in zip(prefixes, values, strict=True) if value is not None]
    for prefix, value in known:
        if value != known[0][1]:
            raise FormatError(f"{prefix}: {what} {value}, in {known[0][0]} {known[0][1]}; {remedy}")


def _kind(spec: ColumnSpec) -> str:
    """What a column is, to be read."""
    items = f" x {spec.width}" if spec.width > 1 else ""
    belongs = f", aligned to {spec.alignment}s" if spec.per == "token" else ""
    return f"{spec.dtype}{items} a {spec.per}{belongs}"


def _digest(headers: Sequence[Header]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(header.shard_id for header in headers))
