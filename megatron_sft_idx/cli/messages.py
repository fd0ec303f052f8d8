"""What people read when something goes wrong."""

from __future__ import annotations

from megatron_sft_idx.errors import SFTIndexError

__all__ = ["message_of"]


def message_of(error: Exception) -> str:
    """An error in one line; of the disk's errors, the path first and no number."""
    ours = isinstance(error, SFTIndexError)  # one of them is an OSError too, with arguments of its own
    if isinstance(error, OSError) and not ours and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
