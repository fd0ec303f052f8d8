"""How benches measure: in turns, in processes of their own, from files that are in the page cache or not."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

__all__ = [
    "Time",
    "alternated",
    "in_own_process",
    "medians",
    "memory",
    "read_from_disk",
    "reset_peak",
    "timed",
]


class Time(NamedTuple):
    """Seconds, by the processor and by the clock."""

    cpu: float
    wall: float


def timed(work: Callable[[], Any]) -> Time:
    """Of one call, garbage of others collected before it."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Time(time.process_time() - cpu, time.perf_counter() - wall)


def alternated(
    works: Sequence[Callable[[], Any]], rounds: int, after: Callable[[], None] = lambda: None
) -> list[list[Time]]:
    """Each work in turn, ``rounds`` times, after one round that does not count.

    Args:
        works: what is timed.
        rounds: how often.
        after: called after every round.

    Returns:
        For each work its times, one a round.
    """
    times = []
    for _ in range(rounds + 1):
        times.append([timed(work) for work in works])
        after()
    return [list(column) for column in zip(*times[1:], strict=True)]


def medians(times: Iterable[Sequence[Time]]) -> list[Time]:
    """The median of each work, by either clock."""
    return [Time(*map(median, zip(*column, strict=True))) for column in times]


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns in a process that has imported that and nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def memory(field: str, process: int | str = "self") -> int:
    """Bytes that Linux counts of a process, such as ``VmRSS``, or ``RssAnon``: what it holds beside mapped files."""
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))


def reset_peak() -> None:
    """Let ``VmHWM`` of this process begin anew, at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def read_from_disk() -> int:
    """Bytes that the disk has given this process so far."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
