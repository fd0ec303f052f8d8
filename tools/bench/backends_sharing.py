"""How much memory several processes take that read the same shard."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.managers import SyncManager
from threading import Barrier

from report import MIB, Bench

from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage import BackendName

__all__ = ["sharing"]

READERS = 4
BACKENDS: tuple[BackendName, ...] = ("mmap", "pread")


def proportional() -> tuple[int, int]:
    """Bytes this process has in memory, and its share of them: a page that n processes map counts as one n-th."""
    with open("/proc/self/smaps_rollup") as file:
        found = {line.split(":")[0]: line.split() for line in file if line.startswith(("Rss:", "Pss:"))}
    return int(found["Rss"][1]) * 1024, int(found["Pss"][1]) * 1024


def reader(prefix: str, backend: BackendName, together: Barrier) -> tuple[int, int]:
    """Reads every pack, and says what that added, while all the others hold what they have read."""
    together.wait()
    before = proportional()
    together.wait()
    shard = Shard(prefix, backend=backend)
    for pack in shard:
        pack["input_ids"].max()
        pack["loss_mask"].max()
    together.wait()
    after = proportional()
    together.wait()
    return after[0] - before[0], after[1] - before[1]


def measured(manager: SyncManager, prefix: str, backend: BackendName) -> list[tuple[int, int]]:
    together = manager.Barrier(READERS)
    with ProcessPoolExecutor(READERS, mp_context=get_context("spawn")) as pool:
        works = [pool.submit(reader, prefix, backend, together) for _ in range(READERS)]
        return [work.result() for work in works]


def sharing(bench: Bench, prefix: str) -> None:
    """A section of the report."""
    header = Shard(prefix, backend="pread").header
    nbytes = sum(digest.nbytes for digest in header.digests[:2])
    with get_context("spawn").Manager() as manager:
        found = {backend: measured(manager, prefix, backend) for backend in BACKENDS}
    bench.section("Shared between processes")
    bench.say(
        f"{READERS} processes have each read all {nbytes / MIB:,.0f} MiB of a shard: the memory that added. A page that"
        " several map counts in each, and once in all (`Rss` and `Pss` of `/proc/self/smaps_rollup`)."
    )
    rows = []
    for backend, sizes in found.items():
        each, total = sum(rss for rss, _ in sizes) / READERS / MIB, sum(pss for _, pss in sizes) / MIB
        rows.append((f"`{backend}`", f"{each:,.0f}", f"{total:,.0f}"))
    bench.table(("", "MiB in each", "MiB in all"), rows)
