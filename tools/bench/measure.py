"""How benches measure: in turns, in separate processes, from files that are in the page cache or not."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron_sft_idx import _native
from megatron_sft_idx.shard import ShardWriter

CHUNK_TOKENS = 1 << 22
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Time(NamedTuple):
    """Seconds, by the processor and by the clock."""

    cpu: float
    wall: float


def timed(work: Callable[[], Any]) -> Time:
    """Time one call, after collecting garbage."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Time(time.process_time() - cpu, time.perf_counter() - wall)


def processed(work: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """Return the result of a call, and its processor seconds."""
    begin = time.process_time()
    result = work(*arguments, **options)
    return result, time.process_time() - begin


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
    """Return the median of each work, for both clocks."""
    return [Time(*map(median, zip(*column, strict=True))) for column in times]


def in_turns(works: Mapping[K, Callable[[int], T]], rounds: int) -> dict[K, list[T]]:
    """Run all works in turn, round by round, each with the number of the round. Return their results."""
    found: dict[K, list[T]] = {name: [] for name in works}
    for number in range(rounds):
        for name, work in works.items():
            found[name].append(work(number))
    return found


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function, run in a process that has imported only its module."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def indexed_dataset() -> Any:
    """Megatron's module of that name; without what it warns of, that it falls back to its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset as module
    return module


def memory(field: str, process: int | str = "self", file: str = "status") -> int:
    """Bytes that Linux counts of a process, such as ``VmRSS``, or ``RssAnon`` (all except mapped files).

    In ``smaps_rollup``, sum all fields with this prefix, such as ``Pss:`` or ``Private``.
    """
    with open(f"/proc/{process}/{file}") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> None:
    """Reset ``VmHWM`` of this process to its resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def read_from_disk() -> int:
    """Bytes that the disk has given this process so far."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def require_cold(files: Iterable[Path]) -> None:
    """Raise SystemExit if more than a twentieth of some files is in the page cache."""
    resident = nbytes = 0
    for path in files:
        mapped = np.memmap(path, np.uint8, "r")
        resident += _native.resident_nbytes(mapped)
        nbytes += len(mapped)
    if resident * 20 > nbytes:
        raise SystemExit(f"{resident:,} of {nbytes:,} bytes stay in the page cache: {files}")


def write_equal_packs(
    prefix: str | os.PathLike[str],
    packs: int,
    length: int,
    sequences: int = 1,
    *,
    seed: int | None = 0,
    token_dtype: Any = np.int32,
    mask_dtype: Any = np.uint8,
    **options: Any,
) -> None:
    """A shard of packs of one length, each of sequences of one length; all is trained on but their last positions.

    Args:
        prefix: of the shard.
        packs: how many.
        length: tokens of each.
        sequences: of each.
        seed: of random ids; None has them ascend.
        token_dtype: of the ids, which are below 60,000.
        mask_dtype: of the masks.
        **options: of ``ShardWriter``.
    """
    random = np.random.default_rng(seed)
    step, short = max(CHUNK_TOKENS // length, 1), length // sequences
    with ShardWriter(prefix, token_dtype=token_dtype, mask_dtype=mask_dtype, durable=False, **options) as writer:
        for first in range(0, packs, step):
            count = min(step, packs - first)
            total = count * length
            ids = np.arange(total) % 60_000 if seed is None else random.integers(0, 60_000, total)
            mask = np.ones(total, mask_dtype)
            mask[short - 1 :: short] = 0
            starts = np.tile(np.arange(0, length, short), count)
            writer.add_packs(ids.astype(token_dtype), mask, starts, np.full(count, length), np.full(count, sequences))
