"""What the shard sets of one process hold together: maps, which some file systems refuse, and memory."""

from __future__ import annotations

import weakref

__all__ = ["MAPPED_SHARDS", "MEMORY_NBYTES", "Budget"]


class Budget:
    """An amount that holders share, first come first served.

    Args:
        most: of all holders together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # By the holder's id. No lock that a fork could catch in a thread's hands: of threads that ask at once each may
        # be granted what is left.
        self._granted: dict[int, int] = {}

    def grant(self, holder: object, amount: int) -> bool:
        """Whether ``holder`` may take ``amount``; if so, it is taken until the holder is collected."""
        if sum(list(self._granted.values())) + amount > self.most:
            return False
        self._granted[id(holder)] = amount
        weakref.finalize(holder, self._granted.pop, id(holder), None).atexit = False
        return True


# An open shard holds four maps, or five descriptors where it is read with pread. Some cluster file systems refuse a
# process more than about 590 maps, of which torch and Megatron take their part; 256 descriptors is a common limit.
MAPPED_SHARDS = Budget(32)
# Tokens, masks and index arrays of the shards that are held in memory because there are too many of them to map.
MEMORY_NBYTES = Budget(1 << 30)
