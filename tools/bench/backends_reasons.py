"""Why each option of reading is on or off by default, in the figures of the run: nothing here is written beforehand."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from report import MIB, Bench

from megatron_sft_idx.inspect.bench_read import Measured, Which

Found = Mapping[str, Measured]
# Rates that differ by less are called equal.
EVEN = 1.1


def ratio(found: Found, name: str, other: str, which: Which) -> float | None:
    """How many times the rate of another way one has, the median of the rounds; None where one was refused."""
    pairs = zip(found[name].epochs(which), found[other].epochs(which), strict=False)
    rates = [one.rate / another.rate for one, another in pairs]
    return statistics.median(rates) if rates else None


def beside(found: Found, name: str, other: str, which: Which) -> str:
    """Such as ``3.1 times as fast as `pread` ``."""
    times = ratio(found, name, other, which)
    if times is None:
        return f"not to be compared with `{other}`, of which one was refused"
    if 1 / EVEN <= times <= EVEN:
        return f"as fast as `{other}`"
    return f"{times:.1f} times as fast as `{other}`" if times > 1 else f"{1 / times:.1f} times slower than `{other}`"


def fastest(found: Found, which: Which) -> str:
    """Of our ways."""
    ours = [one for one in found.values() if one.runs and found.get(one.setting.name) is one]
    return max(ours, key=lambda one: one.rate(which)).setting.name


def reasons(bench: Bench, cold: Found, memory: Found, limited: Found | None) -> None:
    """A section of the report.

    Args:
        bench: the report.
        cold: shuffled, on a disk, in memory's reach.
        memory: shuffled, in a file system in memory.
        limited: shuffled, over a memory limit; None where none could be set.
    """
    bench.section("Defaults, and why")
    bench.say(
        f"Fastest of ours: cold `{fastest(cold, 'first')}`, warm `{fastest(cold, 'second')}`"
        + (f", over the limit `{fastest(limited, 'first')}`." if limited else "; the limit was not measured.")
    )
    announced, huge = "mmap, random, schedule", "mmap, huge pages"
    rows = [
        ("`backend`", '`"mmap"`', backend(cold, limited, announced)),
        ("`advice`", '`"normal"`', advice(cold, limited)),
        ("`schedule()`", "not called", schedule(cold, limited, announced)),
        ("`huge_pages`", "`False`", huge_pages(cold, memory, limited, announced, huge)),
    ]
    bench.table(("option", "default", "in this run"), [(*row, "; ".join(parts) + ".") for *row, parts in rows])


def backend(cold: Found, limited: Found | None, announced: str) -> Iterator[str]:
    yield f"warm, `mmap` is {beside(cold, 'mmap', 'pread', 'second')}"
    yield f"cold, it is {beside(cold, 'mmap', 'pread', 'first')}"
    if limited:
        yield f"over the limit, `{announced}` is {beside(limited, announced, 'pread, random, schedule', 'first')}"


def advice(cold: Found, limited: Found | None) -> Iterator[str]:
    yield f"cold, where memory keeps the shard, `normal` is {beside(cold, 'mmap', 'mmap, random', 'first')}"
    if limited:
        yield f"over the limit `random` is {beside(limited, 'mmap, random', 'mmap', 'first')}"
        read = limited["mmap"].amplification("first")
        yield f"there `normal` reads {read or 0:,.0f} bytes from the disk for each that is asked for"
        if (ratio(limited, "mmap, random", "mmap", "first") or 0) > EVEN:
            yield "so `random` is for shards that memory does not keep: `bench-read` says which yours is"


def schedule(cold: Found, limited: Found | None, announced: str) -> Iterator[str]:
    yield "`Shard` cannot know what comes; whoever does calls it, as batch loaders do"
    for found, where in ((cold, "cold"), (limited, "over the limit")):
        if found is not None:
            yield f"{where}, `{announced}` is {beside(found, announced, 'mmap, random', 'first')}"
    yield f"warm, `mmap, schedule` is {beside(cold, 'mmap, schedule', 'mmap', 'second')}"


def huge_pages(cold: Found, memory: Found, limited: Found | None, announced: str, name: str) -> Iterator[str]:
    yield f"cold, asking for them is {beside(cold, name, 'mmap', 'first')}"
    yield f"warm, it is {beside(cold, name, 'mmap', 'second')}"
    if limited:
        yield f"over the limit, it is {beside(limited, name, 'mmap', 'first')}"
        yield f"there `{announced}`, which needs none, is {beside(limited, announced, name, 'first')}"
    if (ratio(cold, name, "mmap", "second") or 0) <= EVEN:
        yield "they gain nothing in warm epochs, which are most of them"
    given = [max((run.huge_nbytes for run in found[name].runs), default=0) for found in (cold, memory)]
    yield f"{given[0] / MIB:,.0f} MiB were mapped by them on the disk, {given[1] / MIB:,.0f} MiB in memory"
