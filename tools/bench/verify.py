"""``verify --full`` compared with plain checksumming of the same bytes with the xxhash package.

    python tools/bench/verify.py [--full]

Both sides run in turn, in one process, over files in the page cache; figures are
medians. Checksumming is xxh3_128 over the five files, read with readinto in buffers of the size given: what a tool such
as xxhsum does, in one thread. Verifying reads tokens in a second one: where a core is free that saves time, not cpu.
Heap is the growth of the peak of private memory, in a separate process.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xxhash
from measure import Time, alternated, in_own_process, medians, memory, timed, write_equal_packs
from plot import Dot, dots
from report import MIB, Bench, cells, run_bench

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.layout import ShardPaths


@dataclass(frozen=True)
class Kind:
    """The content of a shard: packs of equal length, made of sequences of equal length."""

    key: str
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
    Kind("packed16", "packed, uint16, masks uint8", np.uint16, np.uint8, 4096, 256),
    Kind("packed32", "packed, int32, masks uint8", np.int32, np.uint8, 4096, 256),
    Kind("packed-float", "packed, int32, masks float32", np.int32, np.float32, 4096, 256),
    Kind("corpus600", "unpacked, int32, masks uint8, 600 tokens each", np.int32, np.uint8, 600, 600),
    Kind("corpus60", "unpacked, uint16, masks uint8, 60 tokens each", np.uint16, np.uint8, 60, 60),
    Kind("corpus20", "unpacked, uint16, masks uint8, 20 tokens each", np.uint16, np.uint8, 20, 20),
)


def write(prefix: str, kind: Kind, nbytes: int) -> None:
    """A shard of about this many bytes."""
    packs, sequences = int(nbytes / kind.token_nbytes / kind.pack), kind.pack // kind.sequence
    dtypes = {"token_dtype": kind.token_dtype, "mask_dtype": kind.mask_dtype}
    write_equal_packs(prefix, packs, kind.pack, sequences, seed=None, sequence_multiple=2, **dtypes)


def checksum(prefix: str, buffer_nbytes: int) -> None:
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


def heap(warm: str, prefix: str) -> int:
    """Growth of the peak by a full verification, once another one has loaded all code."""
    verify(warm)
    before = memory("VmHWM")
    verify(prefix)
    return memory("VmHWM") - before


def measure(kind: Kind, folder: Path, rounds: int, mib: int) -> tuple[int, list[list[Time]], float, int]:
    """Bytes of the shard; times of both checksums and of verifying; seconds of the quick look; bytes of heap."""
    prefix, warm = str(folder / "x"), str(folder / "warm")
    write(prefix, kind, mib * MIB)
    write(warm, kind, MIB)
    nbytes = sum(os.path.getsize(path) for path in ShardPaths.of(prefix).all)
    works = (partial(checksum, prefix, 64 << 10), partial(checksum, prefix, 512 << 10), partial(verify, prefix))
    times = alternated(works, rounds)
    grown: int = in_own_process(heap, warm, prefix)
    look = median(timed(partial(verify_shard, prefix)).wall for _ in range(20))
    for path in (*ShardPaths.of(prefix).all, *ShardPaths.of(warm).all):
        os.unlink(path)
    return nbytes, times, look, grown


def report(bench: Bench, folder: Path, options: Namespace) -> None:
    clock, processor, marks = [], [], []
    for kind in KINDS:
        nbytes, times, look, grown = measure(kind, folder, options.rounds, options.mib)
        small, large, full = medians(times)
        ms, best = [t.wall * 1e3 for t in (small, large, full)], min(small.wall, large.wall)
        clock.append((kind.name, *cells(".2f .0f .0f .0f .2f", nbytes / 1e9, *ms, full.wall / best)))
        cpu = [t.cpu * 1e3 for t in (large, full)]
        processor.append((kind.name, *cells(".0f .0f .2f .1f", *cpu, look * 1e3, grown / MIB)))
        faster = times[0] if small.wall < large.wall else times[1]
        sides = [[nbytes / 1e9 / t.wall for t in column] for column in (times[2], faster)]
        what = f"`verify --full`, every byte and rule: {kind.name}"
        told: Any = {"peer": "xxh3_128 of the same bytes", "more": True, "short": kind is KINDS[1]}
        bench.headline(kind.key, what, sides[0], "GB/s", theirs=sides[1], **told)
        marks += [Dot(kind.name, sides[0], True), Dot("the same, xxh3_128 alone", sides[1], False)]
    columns = "shard, GB, checksum by 64 KiB ms, by 512 KiB ms, verify --full ms, of the faster"
    bench.table(columns.split(", "), clock)
    columns = "shard, checksum cpu ms, verify --full cpu ms, verify ms, heap of verify --full MiB"
    bench.table(columns.split(", "), processor)
    bench.plot("verify", dots("Checking every byte", "GB a second", marks, more=True))


if __name__ == "__main__":
    sizes = {"mib": (512, 1024, "size of each shard")}
    run_bench("Verifying every byte beside plain checksumming", ("xxhash", "numpy"), report, sizes, rounds=(5, 9))
