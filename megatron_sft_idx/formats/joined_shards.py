"""Several shards read as one: what ``JoinedReader`` is to other formats, without a file held open for each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.formats.base import PackedSpec
from megatron_sft_idx.formats.joined import joined_spec
from megatron_sft_idx.formats.sft_idx import FORMAT, spec_of
from megatron_sft_idx.shard.reader import Pack, Shard
from megatron_sft_idx.shards import ShardSet
from megatron_sft_idx.storage import BackendName, ReadOptions

__all__ = ["JoinedShards"]


class JoinedShards:
    """Shards side by side, held open as a ``ShardSet`` holds them; it also pickles as one.

    Args:
        prefixes: of the shards.
        backend: of ``ShardSet``.
        copy: hand out writable copies instead of read-only views.
        reading: ``cache_bytes``, ``advice`` and ``huge_pages`` of ``Shard``.

    Raises:
        ShardNotFoundError: a shard is not there.
        FormatError: a header breaks a rule.
    """

    name = FORMAT

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        backend: BackendName | ReadOptions = "mmap",
        copy: bool = False,
        **reading: Any,
    ) -> None:
        options = ReadOptions.of(os.fspath(prefixes[0]), backend, **reading)
        self._shards = ShardSet(prefixes, backend=options, alike=False)
        self._copy = copy
        self.notes: list[str] = []

    @property
    def paths(self) -> tuple[str, ...]:
        """Prefixes, in order."""
        return self._shards.prefixes

    @property
    def lengths(self) -> tuple[int, ...]:
        """Packs of each."""
        return tuple(header.num_packs for header in self._shards.headers)

    @property
    def spec(self) -> PackedSpec:
        """What is known of all of them together. FormatError: they come from different tokenizers."""
        return joined_spec(self.paths[0], [spec_of(header) for header in self._shards.headers])

    def schedule(self, indices: NDArray[np.int64] | Sequence[int]) -> None:
        """Say which packs come next, counted through all shards; see ``ShardSet.schedule``."""
        self._shards.schedule(indices)

    def read(self, number: int, index: int) -> Pack:
        """Pack ``index`` of shard ``number``."""
        pack = self._shards.pack(number, index)
        if self._copy:
            pack["input_ids"], pack["loss_mask"] = np.array(pack["input_ids"]), np.array(pack["loss_mask"])
        return pack

    def shard(self, number: int) -> Shard:
        """Shard ``number``, open."""
        return self._shards.shard(number)
