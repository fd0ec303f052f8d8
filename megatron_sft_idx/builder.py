"""``SFTIndexedDatasetBuilder``: a ``ShardWriter`` with the interface of Megatron's ``IndexedDatasetBuilder``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from numpy.typing import ArrayLike

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.lines import Shown
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.writer import MaskAlignment


class SFTIndexedDatasetBuilder(Shown, IndexedDatasetBuilder):  # type: ignore[misc]
    """Builds a shard pack by pack in bounded memory. The shard is published completely or not at all.

    Use it as a context manager: a clean exit finalizes, an exception publishes nothing. The parent's constructor is
    not called, because it would truncate a ``.bin`` that another process may be reading.

    Args:
        bin_path: ``PREFIX.bin``, as in the parent class.
        dtype: np.int32, or np.uint16 for vocabularies below 65500.
        multimodal: not supported; must be False.
        capacity: maximum number of token positions in a pack; None sets it to the longest pack.
        mask_dtype: np.uint8 for masks of 0 and 1, np.float32 for weights.
        sequence_multiple: count each sequence as its length rounded up to this against the capacity.
        pad_id: the tokenizer's padding id, stored for readers.
        overwrite: replace an existing shard at the prefix.
        metadata: JSON object for the header.
        columns: columns to write, by name. See ``ShardWriter``.

    Raises:
        FormatError: the format does not allow an argument, or the prefix already exists.

    Example:
        >>> from megatron_sft_idx import SFTIndexedDataset
        >>> with SFTIndexedDatasetBuilder("data/built.bin", dtype=np.uint16, capacity=8) as builder:
        ...     builder.add_pack([5, 6, 7, 5, 8], [1, 1, 0, 1, 0], [0, 3])  # two sequences, of three and two tokens
        >>> SFTIndexedDataset("data/built")
        <SFTIndexedDataset data/built: 1 packs of up to 8 tokens, 2 sequences, 5 tokens, 60.0% trained; backend mmap>
    """

    @checked
    def __init__(
        self,
        bin_path: str,
        dtype: Any = np.int32,
        multimodal: bool = False,
        *,
        capacity: int | None = None,
        mask_dtype: Any = np.uint8,
        sequence_multiple: int = 1,
        pad_id: int | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        columns: Mapping[str, ColumnSpec] | None = None,
    ) -> None:
        path = os.fspath(bin_path)
        if multimodal:
            raise FormatError(f"{path}: multimodal=True, but packed SFT shards have no sequence modes; pass False")
        if not path.endswith(".bin") or path.endswith((".loss.bin", ".seq.bin")):
            raise FormatError(f"{path}: expected the path of the token file, PREFIX.bin")
        if (prefix := ShardPaths.of(path).prefix) != path[: -len(".bin")] or ShardPaths.of(prefix).prefix != prefix:
            raise FormatError(f"{path}: a prefix must not end like one of the five files; choose another name")
        self.dtype = dtype
        self.multimodal = False
        self.writer = ShardWriter(
            path[: -len(".bin")],
            token_dtype=dtype,
            mask_dtype=mask_dtype,
            capacity=capacity,
            sequence_multiple=sequence_multiple,
            pad_id=pad_id,
            overwrite=overwrite,
            metadata=metadata,
            columns=columns,
        )

    def _shown(self) -> str:
        return repr(self.writer).removeprefix("<ShardWriter ").removesuffix(">")

    def __enter__(self) -> SFTIndexedDatasetBuilder:
        return self

    def __exit__(self, *error: Any) -> None:
        self.writer.__exit__(*error)

    def add_pack(
        self,
        tokens: ArrayLike,
        loss_mask: ArrayLike,
        seq_starts: ArrayLike,
        *,
        mask_alignment: MaskAlignment = "label",
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Add one pack; see ``ShardWriter.add_pack``."""
        self.writer.add_pack(tokens, loss_mask, seq_starts, mask_alignment=mask_alignment, columns=columns)

    def add_item(self, tensor: Any, mode: int = 0) -> NoReturn:
        """Not supported: an item has no loss mask."""
        self._refuse("add_item", "tokens without a loss mask and sequence starts are not enough")

    def add_document(self, tensor: Any, lengths: list[int], modes: list[int] | None = None) -> NoReturn:
        """Not supported: a document has no loss mask."""
        self._refuse("add_document", "tokens without a loss mask are not enough")

    def end_document(self) -> NoReturn:
        """Not supported: every pack is one document."""
        self._refuse("end_document", "every pack is one document, which ends with add_pack")

    def _refuse(self, method: str, reason: str) -> NoReturn:
        raise FormatError(f"{self.writer.prefix}: {method} is not for packed SFT data: {reason}; use add_pack")

    def add_index(self, path_prefix: str) -> None:
        """Append all packs of another shard. Its files must match the checksums in its header.

        Raises:
            ShardNotFoundError: there is no packed SFT shard at the prefix.
            FormatError: its token dtype or its columns differ from this builder's.
            CorruptShardError: its files do not match the checksums; nothing is published.
            SequenceError: its packs do not fit this builder's capacity or mask dtype.

        Example:
            >>> from megatron_sft_idx import SFTIndexedDataset
            >>> with SFTIndexedDatasetBuilder("data/both.bin") as builder:
            ...     builder.add_index("data/chats")
            ...     builder.add_pack([5, 6, 7], [1, 1, 0], [0])
            >>> len(SFTIndexedDataset("data/both"))  # seven packs and one
            8
        """
        shard = Shard(path_prefix)
        if shard.header.token_dtype != np.dtype(self.dtype):
            raise FormatError(
                f"{path_prefix}: tokens are {shard.header.token_dtype}, but this builder writes"
                f" {np.dtype(self.dtype)}; open the builder with the same dtype"
            )
        self.writer.add_shard(shard)

    def finalize(self, idx_path: str | None = None) -> Header:
        """Write the indexes and publish the shard. ``idx_path``, if given, must be ``PREFIX.idx``."""
        expected = self.writer.prefix + ".idx"
        if idx_path is not None and os.path.abspath(idx_path) != os.path.abspath(expected):
            raise FormatError(
                f"{idx_path}: all five files have the same prefix, so the index must be {expected}; leave the"
                " argument out"
            )
        return self.writer.finalize()
