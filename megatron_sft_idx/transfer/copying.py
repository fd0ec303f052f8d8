"""A shard from any place to any other."""

from __future__ import annotations

from collections.abc import Callable

from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.transfer.download import download
from megatron_sft_idx.transfer.report import Copied
from megatron_sft_idx.transfer.source import open_source
from megatron_sft_idx.transfer.upload import upload

__all__ = ["copy_shard"]


def copy_shard(
    source: str, target: str, *, overwrite: bool = False, on_progress: Callable[[int], None] = lambda nbytes: None
) -> Copied:
    """Copy the shard at a prefix to another, either of them local or remote; see ``upload`` and ``download``."""
    copy = upload if is_remote(target) else download
    return copy(open_source(source), target, overwrite=overwrite, on_progress=on_progress)
