"""``SFTIndexedDataset``: a ``Shard`` with the interface of Megatron's ``IndexedDataset``.

``MMapIndexedDataset``, the name of the memory-mapped reader in older versions of Megatron, is an alias.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from numpy.typing import NDArray

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.lines import Shown
from megatron_sft_idx.shard import Pack, Shard
from megatron_sft_idx.shard.opening import missing_files
from megatron_sft_idx.storage import Advice, BackendName, ReadOptions, is_remote


class _Index:
    """The attributes of ``IndexedDataset.index`` that Megatron's code reads. Arrays are created on first use."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.dtype = shard.header.token_dtype.type
        self.dtype_size = DType.size(self.dtype)
        self.sequence_count = len(shard)
        self.document_count = len(shard) + 1
        self.sequence_modes = None

    def __len__(self) -> int:
        return self.sequence_count

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        return np.diff(self._shard.token_offsets).astype(np.int32)

    @property
    def sequence_pointers(self) -> NDArray[np.int64]:
        pointers: NDArray[np.int64] = self._shard.token_offsets[:-1] * self.dtype_size
        return pointers

    @cached_property
    def document_indices(self) -> NDArray[np.int64]:
        return np.arange(self.document_count, dtype=np.int64)

    def __getitem__(self, idx: int) -> tuple[np.int64, np.int32, None]:
        start, stop = self._shard.token_range(idx)
        return np.int64(start * self.dtype_size), np.int32(stop - start), None


class SFTIndexedDataset(Shown, IndexedDataset):  # type: ignore[misc]
    """A packed SFT shard, read by pointer arithmetic over memory maps.

    ``ds[i]`` is one pack, ``{"input_ids", "loss_mask", "seq_boundaries"}``. The ids (in the on-disk dtype) and the
    label-aligned mask are read-only views that stay valid after the dataset is gone. ``seq_boundaries`` is a new int32
    array ``[0, start_1, ..., length]``. A shard with images or audio adds ``media``: a list of the items of the pack,
    each with its encoded file as a read-only view. Indexing is the only method whose meaning differs from the parent's,
    where ``ds[i]`` is only the tokens; ``get`` returns these. Opening takes the same time for any number of packs.

    Args:
        path_prefix: the path that the five files share.
        multimodal: not supported; must be False.
        mmap: use memory maps; False reads with pread, for file systems on which mapping is slow or not allowed.
        object_storage_config: Megatron's, for ``s3://`` and ``msc://`` prefixes. Index files are cached in its
            ``path_to_idx_cache``; None uses the default folder. Tokens and masks are read by exact ranges, so
            ``bin_chunk_nbytes`` has no effect, and ``mmap`` affects only the cached index files.
        s3_config: the parent's older name for ``object_storage_config``.
        fast_cache_load: accepted, but without effect, because only the header is parsed.
        sequences_per_dataset: see ``fast_cache_load``.
        dtype_code: see ``fast_cache_load``.
        copy: return writable copies instead of read-only views, and encoded files as ``bytes``.
        backend: such as ``"pread"``; see ``Shard``. With None, ``mmap`` decides.
        advice: see ``Shard``. ``ds.shard`` has the methods ``schedule``, ``willneed`` and ``dontneed``.
        huge_pages: see ``Shard``.
        columns: names of the columns to return with each pack.

    Raises:
        ShardNotFoundError: some of the five files, or a column, are missing.
        FormatError: a rule of FORMAT.md is broken, or an argument is not supported.

    Example:
        >>> ds = SFTIndexedDataset("data/chats")
        >>> ds.get(6, offset=2, length=3)  # as in the parent class
        array([62, 63, 64], dtype=int32)
        >>> ds[6]["loss_mask"]
        array([1, 0, 1, 0, 0, 0, 1, 0, 0], dtype=uint8)
        >>> ds[6]["seq_boundaries"]
        array([0, 2, 5, 9], dtype=int32)
    """

    @checked
    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: Any = None,
        s3_config: Any = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
        *,
        copy: bool = False,
        backend: BackendName | ReadOptions | None = None,
        advice: Advice = "normal",
        huge_pages: bool = False,
        columns: Sequence[str] = (),
    ) -> None:
        ours: dict[str, Any] = {"copy": copy, "backend": backend, "advice": advice, "huge_pages": huge_pages}
        config = object_storage_config or s3_config
        self.initialize(path_prefix, multimodal, mmap, config, columns=columns, **ours)

    def initialize(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: Any = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
        *,
        copy: bool = False,
        backend: BackendName | ReadOptions | None = None,
        advice: Advice = "normal",
        huge_pages: bool = False,
        columns: Sequence[str] = (),
    ) -> None:
        """Open the shard. See the constructor for the arguments."""
        if multimodal:
            raise FormatError(
                f"{path_prefix}: multimodal=True, but packed SFT shards have no modes; pass False, and read images and"
                " audio from ds[i]['media']"
            )
        if object_storage_config and not is_remote(path_prefix):
            raise FormatError(
                f"{path_prefix}: object storage is configured, but this is a local path; leave the configuration out"
            )
        cache = object_storage_config.path_to_idx_cache if object_storage_config else None
        name = backend or ("mmap" if mmap else "pread")
        read = ReadOptions.of(path_prefix, name, advice=advice, huge_pages=huge_pages)
        shard = Shard(path_prefix, backend=read, copy=copy, index_cache=cache, columns=columns)
        self.__setstate__((shard, object_storage_config))

    def __getstate__(self) -> tuple[Shard, Any]:
        return self.shard, self.object_storage_config

    def __setstate__(self, state: tuple[Shard, Any]) -> None:
        """Set every attribute, for a new object (called by ``initialize``) and for an unpickled one."""
        self.shard, self.object_storage_config = state
        self.path_prefix, self.multimodal, self.mmap = self.shard.prefix, False, self.shard.backend == "mmap"

    def __del__(self) -> None:
        # The parent deletes its reader and index here. The maps of a shard close with their last view.
        return

    @property
    def header(self) -> Header:
        """Counts, dtypes, capacity, checksums and metadata."""
        return self.shard.header

    @cached_property
    def index(self) -> _Index:
        """Lengths, pointers and documents, like the parent's ``index``; created on first use."""
        return _Index(self.shard)

    def __len__(self) -> int:
        return len(self.shard)

    def _shown(self) -> str:
        return repr(self.shard).removeprefix("<Shard ").removesuffix(">")

    @overload
    def __getitem__(self, idx: int | np.integer[Any]) -> Pack: ...

    @overload
    def __getitem__(self, idx: slice) -> list[Pack]: ...

    def __getitem__(self, idx: int | np.integer[Any] | slice) -> Pack | list[Pack]:
        """Return one pack, or a list of packs for a slice of step 1. Negative indices count from the end."""
        return self.shard[idx]

    def get(self, idx: int, offset: int = 0, length: int | None = None, *, copy: bool = False) -> NDArray[Any]:
        """Return tokens ``[offset, offset + length)`` of a pack, like the parent.

        With ``copy``, the array is writable.
        """
        tokens = self.shard.get(idx, offset, length)
        return tokens.copy() if copy else tokens

    def sequences(self, idx: int, *, copy: bool = False) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return ``(input_ids, loss_mask)`` of each sequence of a pack, in order.

        With ``copy``, arrays are writable.
        """
        found = self.shard.sequences(idx)
        return [(ids.copy(), mask.copy()) for ids, mask in found] if copy else found

    def get_document_indices(self) -> NDArray[np.int64]:
        """0, 1, ..., packs: each pack is a document."""
        return self.index.document_indices

    def set_document_indices(self, document_indices: NDArray[np.int64]) -> None:
        """Make this object report other document indices, like the parent."""
        self.index.document_indices = document_indices

    @property
    def sequence_modes(self) -> NDArray[np.int8]:
        """Not supported: packed SFT shards have no modes."""
        raise FormatError(f"{self.path_prefix}: packed SFT shards have no sequence modes")

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Return whether all five files exist. A stock ``.bin`` and ``.idx`` without the others is not a shard."""
        return not missing_files(path_prefix)


MMapIndexedDataset = SFTIndexedDataset
