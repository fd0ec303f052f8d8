"""``verify --full`` beside plain checksumming of the same bytes with the xxhash package.

    python tools/bench/verify.py [--rounds 5] [--mib 1024]

Writes tools/bench/results/verify.md. Both sides run in turn, in one process, over files in the page cache; figures are
medians. Checksumming is xxh3_128 over the five files, read with readinto in buffers of the size given: what a tool such
as xxhsum does, in one thread. Verifying reads tokens in a second one: where a core is free that saves time, not cpu.
Heap is the growth of the peak of private memory, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.verify import verify_shard

RESULTS = Path(__file__).parent / "results" / "verify.md"
MIB = 1 << 20
CHUNK_PACKS_TOKENS = 1 << 22


@dataclass(frozen=True)
class Kind:
    """What a shard holds: packs of equal length, made of sequences of equal length."""

    name: str
    token_dtype: Any
    mask_dtype: Any
    pack: int
    sequence: int

    @property
    def token_nbytes(self) -> float:
        """Bytes a token costs in all five files."""
        itemsizes: int = np.dtype(self.token_dtype).itemsize + np.dtype(self.mask_dtype).itemsize
        return itemsizes + 36 / self.pack + 4 / self.sequence


KINDS = (
    Kind("packed, uint16, masks uint8", np.uint16, np.uint8, 4096, 256),
    Kind("packed, int32, masks uint8", np.int32, np.uint8, 4096, 256),
    Kind("packed, int32, masks float32", np.int32, np.float32, 4096, 256),
    Kind("unpacked, int32, masks uint8, 600 tokens each", np.int32, np.uint8, 600, 600),
    Kind("unpacked, uint16, masks uint8, 60 tokens each", np.uint16, np.uint8, 60, 60),
    Kind("unpacked, uint16, masks uint8, 20 tokens each", np.uint16, np.uint8, 20, 20),
)


def write(prefix: str, kind: Kind, nbytes: int) -> None:
    """A shard of about this many bytes."""
    packs = int(nbytes / kind.token_nbytes / kind.pack)
    with ShardWriter(
        prefix, token_dtype=kind.token_dtype, mask_dtype=kind.mask_dtype, sequence_multiple=2, durable=False
    ) as writer:
        step = max(CHUNK_PACKS_TOKENS // kind.pack, 1)
        for first in range(0, packs, step):
            count = min(step, packs - first)
            tokens = np.arange(count * kind.pack, dtype=np.int64) % 60_000
            mask = np.ones(count * kind.pack, np.dtype(kind.mask_dtype))
            mask[kind.sequence - 1 :: kind.sequence] = 0
            starts = np.tile(np.arange(0, kind.pack, kind.sequence), count)
            sequences = np.full(count, kind.pack // kind.sequence)
            writer.add_packs(tokens, mask, starts, np.full(count, kind.pack), sequences)


def checksum(prefix: str, buffer_nbytes: int) -> None:
    """Plain xxh3_128 of each of the five files."""
    buffer = memoryview(bytearray(buffer_nbytes))
    for path in ShardPaths.of(prefix).all:
        digest = xxhash.xxh3_128()
        with open(path, "rb", buffering=0) as file:
            while got := file.readinto(buffer):
                digest.update(buffer[:got])
        digest.digest()


def verify(prefix: str) -> None:
    report = verify_shard(prefix, full=True, vocab_size=60_000)
    assert report.ok, report


def medians(works: Sequence[Callable[[], None]], rounds: int) -> list[tuple[float, float]]:
    """Wall and processor seconds of each work, which take turns; the first round does not count."""
    times: list[list[tuple[float, float]]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for work, column in zip(works, times, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            column.append((time.perf_counter() - wall, time.process_time() - cpu))
    return [
        (statistics.median(wall for wall, _ in column[1:]), statistics.median(cpu for _, cpu in column[1:]))
        for column in times
    ]


def peak() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def heap(warm: str, prefix: str) -> int:
    """Growth of the peak by a full verification, once another one has loaded all code."""
    verify(warm)
    before = peak()
    verify(prefix)
    return peak() - before


def report(folder: Path, rounds: int, mib: int) -> Iterator[str]:
    columns = ("shard", "GB", "checksum, 64 KiB buffer, ms", "512 KiB buffer, ms", "verify --full, ms", "of the faster")
    yield "| " + " | ".join(columns) + " |"
    yield "|---|---|---|---|---|---|"
    rows = []
    for kind in KINDS:
        prefix, warm = str(folder / "x"), str(folder / "warm")
        write(prefix, kind, mib * MIB)
        write(warm, kind, MIB)
        nbytes = sum(os.path.getsize(path) for path in ShardPaths.of(prefix).all)
        works = (partial(checksum, prefix, 64 << 10), partial(checksum, prefix, 512 << 10), partial(verify, prefix))
        found = medians(works, rounds)
        yield (
            f"| {kind.name} | {nbytes / 1e9:.2f} | "
            + " | ".join(f"{wall * 1e3:.0f}" for wall, _ in found)
            + (f" | {found[2][0] / min(found[0][0], found[1][0]):.2f} |")
        )
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            grown = pool.submit(heap, warm, prefix).result()
        quick = statistics.median(timed_quick(prefix) for _ in range(20))
        cpu = (found[1][1] * 1e3, found[2][1] * 1e3)
        rows.append(f"| {kind.name} | {cpu[0]:.0f} | {cpu[1]:.0f} | {quick * 1e3:.2f} | {grown / MIB:.1f} |")
        for path in (*ShardPaths.of(prefix).all, *ShardPaths.of(warm).all):
            os.unlink(path)
    yield ""
    yield "| shard | checksum, cpu ms | verify --full, cpu ms | verify, ms | heap of verify --full, MiB |"
    yield "|---|---|---|---|---|"
    yield from rows


def timed_quick(prefix: str) -> float:
    begin = time.perf_counter()
    assert verify_shard(prefix).ok
    return time.perf_counter() - begin


def machine() -> str:
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--mib", type=int, default=1024, help="size of each shard")
    parser.add_argument("--folder", help="where shards are written and removed again (default: the system's)")
    options = parser.parse_args()
    lines = ["# Verifying every byte beside plain checksumming", "", f"{machine()}; medians of {options.rounds}.", ""]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for line in report(Path(name), options.rounds, options.mib):
            print(line, flush=True)
            lines.append(line)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
