"""What a copy did."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Copied"]


class Copied(NamedTuple):
    """One shard, copied.

    Attributes:
        prefix: where it is now.
        nbytes_sent: bytes of the files that were written.
        nbytes_found: bytes of those that were there already.
        uploads_aborted: unfinished uploads of earlier attempts that were removed.
    """

    prefix: str
    nbytes_sent: int
    nbytes_found: int
    uploads_aborted: int
