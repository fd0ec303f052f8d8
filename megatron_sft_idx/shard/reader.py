"""Reading one shard by pointer arithmetic."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import CorruptShardError, FormatError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.shard.index_cache import IndexCache
from megatron_sft_idx.shard.published import not_found, read_header, read_raw_header, require_same
from megatron_sft_idx.shard.remote import open_remote
from megatron_sft_idx.storage import Array, Backend, ReopenedArray, check_size, is_remote, open_array

__all__ = ["Pack", "Shard", "read_header", "require_same"]


class Pack(TypedDict):
    """One pack.

    ``input_ids`` uint16 or int32 [length]; ``loss_mask`` uint8 or float32 [length], label-aligned: position j says
    whether predicting token j + 1 counts; ``seq_boundaries`` int32 [sequences + 1]: 0, the other starts, length.
    """

    input_ids: NDArray[Any]
    loss_mask: NDArray[Any]
    seq_boundaries: NDArray[np.int32]


class _Files(NamedTuple):
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

    @classmethod
    def of(
        cls, header: Header, tokens: Array, loss: Array, starts: Array, sequence_offsets: Array, token_offsets: Array
    ) -> _Files:
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


class Shard:
    """One shard, opened for reading.

    Opening costs the same for any number of packs: the header is read and the sizes of the five files are checked.
    ``shard[i]`` is a ``Pack`` of read-only views into the memory maps; they stay valid when the shard is gone, and
    when another shard is published over it. A shard pickles as its path and id, and whoever unpickles it opens the
    files again on first use. Threads may share one.

    Of a shard at ``s3://`` or ``msc://`` the index files are fetched when it is opened, unless the cache has them; a
    pack is two requests, for its tokens and its mask. Where the shard is replaced after that, reading is an error.

    Args:
        prefix: the path the five files share.
        backend: ``mmap``; ``pread`` where mapping is slow or refused (slices are then copies); ``reopen`` to hold
            neither maps nor descriptors, where shards are thousands: the index arrays are read into memory, which
            takes as long as there are packs, and tokens and masks are copies, their files opened for each slice.
        copy: hand out writable copies instead of read-only views.
        index_cache: local folder for the index files of a remote shard; None for the usual one, see ``IndexCache``.

    Raises:
        ShardNotFoundError: some of the five files are missing.
        FormatError: a rule of FORMAT.md is broken in the header or the sizes.
        StorageError: an object store does not answer, or not to these credentials.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        backend: Backend = "mmap",
        copy: bool = False,
        index_cache: str | None = None,
    ) -> None:
        self._paths = ShardPaths.of(prefix)
        self._backend: Backend = backend
        self._copy = copy
        self._index_cache = index_cache
        self._files: _Files | None = self._open_files()
        self._shard_id = self._files.header.shard_id

    def __getstate__(self) -> tuple[str, Backend, bool, bytes, str | None]:
        return self._paths.prefix, self._backend, self._copy, self._shard_id, self._index_cache

    def __setstate__(self, state: tuple[str, Backend, bool, bytes, str | None]) -> None:
        prefix, self._backend, self._copy, self._shard_id, self._index_cache = state
        self._paths = ShardPaths(prefix)
        self._files = None

    def _open_files(self) -> _Files:
        paths = self._paths
        if is_remote(paths.prefix):
            return _Files.of(*open_remote(paths, IndexCache(self._index_cache), self._backend))
        try:
            return self._open_local(paths)
        except ShardNotFoundError:
            raise
        except FileNotFoundError:  # gone since it was looked for, as when another shard is being published
            raise not_found(paths) from None

    def _open_local(self, paths: ShardPaths) -> _Files:
        raw = read_raw_header(paths)
        header = Header.decode(raw, paths.seq_idx)
        if missing := paths.missing():
            if paths.seq_idx in missing:
                raise not_found(paths)
            remedy = paths.index_remedy if missing == [paths.idx] else "copy all five files"
            raise ShardNotFoundError(paths.prefix, missing, remedy)
        nbytes = dict(zip(paths.data, (digest.nbytes for digest in header.digests), strict=True))
        # Megatron's index is not read here, only held to its size.
        check_size(paths.idx, os.stat(paths.idx).st_size, nbytes[paths.idx])

        def array(path: str, dtype: np.dtype[Any], count: int) -> Array:
            return self._open_array(header, path, dtype, count, nbytes[path])

        starts = array(paths.starts, np.dtype("<u4"), header.num_sequences)
        files = _Files.of(
            header,
            array(paths.tokens, header.token_dtype, header.num_tokens),
            array(paths.loss, header.mask_dtype, header.num_tokens),
            starts[:] if self._backend == "reopen" else starts,
            *self._open_offsets(header),
        )
        # Whoever replaces a shard removes its .seq.idx first (rule W3). Where it is still the same one, every file
        # opened in between belongs to it; sizes alone would not tell, a shuffled shard has the same.
        if read_raw_header(paths) != raw:
            raise FormatError(f"{paths.prefix}: another shard was published here while it was opened; open it again")
        return files

    def _open_array(self, header: Header, path: str, dtype: np.dtype[Any], count: int, nbytes: int) -> Array:
        """All of a file."""
        if self._backend == "reopen":
            prefix, own = self._paths.prefix, header.shard_id
            return ReopenedArray(
                path, dtype, count, nbytes, lambda: require_same(prefix, read_header(prefix).shard_id, own)
            )
        return open_array(path, dtype, count, nbytes=nbytes, backend=self._backend)

    def _open_offsets(self, header: Header) -> tuple[Array, Array]:
        path, int64, count = self._paths.seq_idx, np.dtype("<i8"), header.num_packs + 1
        first, second, nbytes = header.nbytes, header.token_offsets_offset, header.seq_idx_nbytes
        if self._backend != "pread":
            # Both arrays live in one file: one map, or one read, serves them.
            whole = self._open_array(header, path, np.dtype("u1"), nbytes, nbytes)[:]
            return whole[first : first + 8 * count].view(int64), whole[second:].view(int64)
        return (
            open_array(path, int64, count, nbytes=nbytes, offset=first, backend=self._backend),
            open_array(path, int64, count, nbytes=nbytes, offset=second, backend=self._backend),
        )

    @property
    def files(self) -> _Files:
        """The open files. Two threads that come first both open them; either result serves."""
        files = self._files
        if files is None:
            files = self._open_files()
            require_same(self._paths.prefix, files.header.shard_id, self._shard_id)
            self._files = files
        return files

    @property
    def prefix(self) -> str:
        """The path the five files share."""
        return self._paths.prefix

    @property
    def backend(self) -> Backend:
        """How bytes are read."""
        return self._backend

    @property
    def header(self) -> Header:
        """Counts, dtypes, capacity, checksums and metadata."""
        return self.files.header

    @property
    def shard_id(self) -> bytes:
        """16 bytes derived from the content; equal content, equal id."""
        return self._shard_id

    @property
    def sequence_offsets(self) -> NDArray[np.int64]:
        """CSR offsets of the sequences by pack, int64 [packs + 1]; a view where mapped, else a copy of the whole."""
        return self.files.sequence_offsets[:]

    @property
    def token_offsets(self) -> NDArray[np.int64]:
        """Where each pack begins, in tokens, int64 [packs + 1]; a view where mapped, else a copy of the whole."""
        return self.files.token_offsets[:]

    def __len__(self) -> int:
        return self.files.num_packs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prefix!r}, backend={self.backend!r})"

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pack]: ...
    def __getitem__(self, index: int | np.integer[Any] | slice) -> Pack | list[Pack]:
        """One pack, or a list of packs for a slice of step 1.

        Raises:
            IndexError: no such pack.
            ValueError: a slice with another step.
            CorruptShardError: the offsets of the pack point outside the files (rules O1, O2).
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"{self.prefix}: slice step {step}, slices of packs are contiguous: use step 1")
            return [self[i] for i in range(start, stop)]
        files = self._files or self.files
        i = operator.index(index)
        if not 0 <= i < files.num_packs:
            i = self._normalise(files, i)
        start, stop = files.token_pair(i)
        first, last = files.sequence_pair(i)
        if not (0 <= start < stop <= files.num_tokens and 0 <= first < last <= files.num_sequences):
            raise self._corrupt(files, i)
        boundaries = np.empty(last - first + 1, np.int32)
        boundaries[:-1] = files.starts[first:last]
        boundaries[-1] = stop - start
        tokens, loss = files.tokens[start:stop], files.loss[start:stop]
        if self._copy:
            tokens, loss = tokens.copy(), loss.copy()
        return {"input_ids": tokens, "loss_mask": loss, "seq_boundaries": boundaries}

    def __iter__(self) -> Iterator[Pack]:
        return (self[i] for i in range(len(self)))

    def get(self, index: int | np.integer[Any], offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens ``[offset, offset + length)`` of a pack, or all from ``offset`` on.

        Raises:
            IndexError: no such pack, or the range reaches outside it.
        """
        files = self.files
        start, stop = self.token_range(index)
        # As Python ints: Megatron hands in int32 offsets, and a shard may hold more than 2^31 tokens.
        offset = operator.index(offset)
        end = stop if length is None else start + offset + operator.index(length)
        if offset < 0 or not start + offset <= end <= stop:
            raise IndexError(
                f"{self.prefix}: offset {offset}, length {length} reach outside pack {index},"
                f" which has {stop - start} tokens"
            )
        tokens = files.tokens[start + offset : end]
        return tokens.copy() if self._copy else tokens

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes ``[offset, offset + nbytes)`` of the token file: by pointer and size, without a copy where mapped.

        Raises:
            IndexError: the range reaches outside the file.
        """
        files = self.files
        offset, nbytes = operator.index(offset), operator.index(nbytes)
        itemsize = files.header.token_dtype.itemsize
        if offset < 0 or nbytes < 0 or offset + nbytes > files.num_tokens * itemsize:
            raise IndexError(
                f"{self._paths.tokens}: {nbytes} bytes at offset {offset} reach outside the file, which has"
                f" {files.num_tokens * itemsize}"
            )
        first = offset // itemsize
        raw = files.tokens[first : -(-(offset + nbytes) // itemsize)].view(np.uint8)
        raw = raw[offset - first * itemsize :][:nbytes]
        return raw.copy() if self._copy else raw

    def token_range(self, index: int | np.integer[Any]) -> tuple[int, int]:
        """Where a pack begins and ends among all tokens. IndexError, CorruptShardError as in ``__getitem__``."""
        files = self.files
        i = self._normalise(files, operator.index(index))
        start, stop = files.token_pair(i)
        if not 0 <= start < stop <= files.num_tokens:
            raise self._corrupt(files, i)
        return start, stop

    def sequences(self, index: int | np.integer[Any]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """``(input_ids, loss_mask)`` of each sequence of a pack, in order; the mask label-aligned."""
        pack = self[operator.index(index)]
        bounds = pack["seq_boundaries"].tolist()
        ids, mask = pack["input_ids"], pack["loss_mask"]
        return [(ids[a:b], mask[a:b]) for a, b in pairwise(bounds)]

    def check_ends(self) -> None:
        """CorruptShardError unless the offsets cover the files from end to end; two values of each are read."""
        header = self.header
        for rule, what, offsets, total, base in (
            ("O1", "sequence", self.files.sequence_offsets, header.num_sequences, header.nbytes),
            ("O2", "token", self.files.token_offsets, header.num_tokens, header.token_offsets_offset),
        ):
            first, last = int(offsets[:1][0]), int(offsets[header.num_packs :][0])
            if (first, last) != (0, total):
                raise CorruptShardError(
                    self._paths.seq_idx,
                    base,
                    rule,
                    f"{what} offsets go from {first} to {last}, expected 0 to {total}; {self._paths.index_remedy}",
                )

    def sequence_bounds(self) -> NDArray[np.int64]:
        """Where each sequence begins among all tokens, then where the last one ends: int64 [sequences + 1].

        Raises:
            FormatError: offsets or starts that do not divide the tokens from end to end (rules O1, O2, P2 to P4).
        """
        self.check_ends()
        arrays = self.sequence_offsets, self.token_offsets, self.files.starts[:]
        try:
            return _native.absolute_offsets(*arrays)
        except ValueError as error:
            raise FormatError(f"{self.prefix}: {error}; {self._paths.index_remedy}") from None

    def _normalise(self, files: _Files, index: int) -> int:
        i = index + files.num_packs if index < 0 else index
        if not 0 <= i < files.num_packs:
            raise IndexError(f"{self.prefix}: pack {index}, the shard has {files.num_packs}")
        return i

    def _corrupt(self, files: _Files, i: int) -> CorruptShardError:
        """What is wrong with the offsets of pack ``i``."""
        rule, what, base, pair, most = (
            "O2",
            "token",
            files.header.token_offsets_offset,
            files.token_pair(i),
            files.num_tokens,
        )
        if 0 <= pair[0] < pair[1] <= most:
            rule, what, base, pair = "O1", "sequence", files.header.nbytes, files.sequence_pair(i)
            most = files.num_sequences
        return CorruptShardError(
            self._paths.seq_idx,
            base + 8 * i,
            rule,
            f"{what} offsets {pair[0]}, {pair[1]} of pack {i}, expected ascending and at most {most};"
            f" {self._paths.index_remedy}",
        )
