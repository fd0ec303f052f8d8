"""The slow twin of the block cache's choices: Belady's rule, spelled out."""

from __future__ import annotations

from collections.abc import Sequence

FAR = 1 << 60


def next_use(uses: Sequence[int], block: int, since: int) -> int:
    """The first use of a block at or after ``since``; FAR where there is none."""
    return next((i for i in range(since, len(uses)) if uses[i] == block), FAR)


def belady_reads(uses: Sequence[int], room: int) -> int:
    """How many blocks are taken in, when all uses come in the announced order.

    A block that is used later than all that are held is not taken in, but read past the cache. Blocks without another
    use give way first, the least recently used of them before the others.
    """
    held: list[int] = []  # least recently used first
    reads = 0
    for now, block in enumerate(uses):
        if block in held:
            held.remove(block)
            held.append(block)
            continue
        if len(held) == room:
            farthest = max(held, key=lambda other: next_use(uses, other, now))
            if next_use(uses, farthest, now) <= now:
                continue
            held.remove(farthest)
        held.append(block)
        reads += 1
    return reads


def lru_reads(uses: Sequence[int], room: int) -> int:
    """How many blocks are read where nothing is announced."""
    held: list[int] = []
    reads = 0
    for block in uses:
        if block in held:
            held.remove(block)
        else:
            reads += 1
            if len(held) == room:
                held.pop(0)
        held.append(block)
    return reads
