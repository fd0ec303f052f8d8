"""The processes that are measured: each opens a shard in one way and reads epochs, job by job.

They are processes of their own so that their faults and their memory are the reading's alone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.bench_read.counters import Counters, private_nbytes
from megatron_sft_idx.bench_read.epochs import Epoch, Reader, Sample, read_epoch
from megatron_sft_idx.bench_read.settings import Setting
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage import CACHE_NBYTES, ReadOptions

__all__ = ["AHEAD", "Job", "Run", "ShardReader", "main", "serve"]

# Packs that the kernel is told of before they are read, and as many again while they are: some batches' worth.
AHEAD = 32


@dataclass(frozen=True)
class Job:
    """Two epochs of one shard.

    Attributes:
        prefix: of the shard.
        sample: the packs.
        setting: how they are read.
        most_seconds: of one epoch.
        cache_nbytes: of a cache that the backend may have.
        group: folder of the control group the process is to be in; None to stay where it is.
    """

    prefix: str
    sample: Sample
    setting: Setting
    most_seconds: float
    cache_nbytes: int = CACHE_NBYTES
    group: str | None = None

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that ``to_json`` wrote."""
        found = json.loads(text)
        return cls(**found | {"sample": Sample(**found["sample"]), "setting": Setting(**found["setting"])})

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Run:
    """What a job found.

    Attributes:
        first: the epoch after the page cache was dropped.
        second: the one after it, when all packs of the sample had been read, or time was over.
        seen_nbytes: of the packs that were read before the second epoch.
        private_nbytes: what reading added to the memory that is the process's own.
        huge_nbytes: bytes of the shard that were mapped by huge pages in the end.
    """

    first: Epoch
    second: Epoch
    seen_nbytes: int
    private_nbytes: int
    huge_nbytes: int

    @classmethod
    def of(cls, found: dict[str, Any]) -> Run:
        """From plain values."""
        first, second = (
            Epoch(**found[name] | {"counters": Counters(**found[name]["counters"])}) for name in ("first", "second")
        )
        return cls(first, second, found["seen_nbytes"], found["private_nbytes"], found["huge_nbytes"])


class ShardReader:
    """``Shard`` as a reader: tokens and mask of a pack are copied into arrays that are there already."""

    def __init__(self, job: Job) -> None:
        setting = job.setting
        options = ReadOptions(setting.backend, job.cache_nbytes, setting.advice, setting.huge_pages)
        self._shard = Shard(job.prefix, backend=options)
        if len(self._shard) < job.sample.stop:
            raise FormatError(
                f"{job.prefix}: {len(self._shard)} packs, the shard that was to be measured had more: another one was"
                " published over it; measure again"
            )
        header = self._shard.header
        longest = min(header.longest_pack, header.num_tokens)
        self._ids, self._mask = np.zeros(longest, header.token_dtype), np.zeros(longest, header.mask_dtype)
        self._coming, self._read = np.empty(0, np.int64), 0

    def schedule(self, packs: NDArray[np.int64]) -> None:
        """The cache of a process takes a whole epoch; the kernel is told of a few packs at a time."""
        if self._shard.backend == "process":
            self._shard.schedule(packs)
            return
        self._coming, self._read = packs, 0
        self._shard.schedule(packs[:AHEAD])

    def read(self, pack: int) -> int:
        """Tokens, mask and boundaries; FormatError where the pack is longer than the header says."""
        if self._read % AHEAD == 0 and (coming := self._coming[self._read + AHEAD :][:AHEAD]).size:
            self._shard.schedule(coming)
        self._read += 1
        found = self._shard[pack]
        ids, mask = found["input_ids"], found["loss_mask"]
        if len(ids) > len(self._ids):
            raise FormatError(
                f"{self._shard.prefix}: pack {pack} has {len(ids)} tokens, the header says at most {len(self._ids)};"
                f" see what else is wrong: megatron-sft-idx verify --full {self._shard.prefix}"
            )
        self._ids[: len(ids)], self._mask[: len(ids)] = ids, mask
        return ids.nbytes + mask.nbytes + 4 * (len(found["seq_boundaries"]) - 1)

    def huge_nbytes(self) -> int:
        """Mapped by huge pages."""
        return self._shard.huge_pages()

    def close(self) -> None:
        """With the shard go its maps, without which the page cache can be dropped."""
        del self._shard


def run_job(job: Job, open_reader: Callable[[Job], Reader]) -> Run:
    """Both epochs of a job."""
    if job.group is not None:
        Path(job.group, "cgroup.procs").write_text("0")  # 0 is whoever writes
    before = private_nbytes()
    reader = open_reader(job)
    try:
        packs = job.sample.first()
        rules: dict[str, Any] = {"scheduled": job.setting.schedule, "most_seconds": job.most_seconds}
        first = read_epoch(reader, packs, **rules)
        seen = np.concatenate([packs[: first.packs], _read_on(job, packs[first.packs :])])
        second = read_epoch(reader, job.sample.again(seen), **rules)
        private = private_nbytes() - before
        huge = reader.huge_nbytes()
    finally:
        reader.close()
    return Run(first, second, first.nbytes * len(seen) // first.packs, max(private, 0), huge)


def _read_on(job: Job, packs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read what a first epoch had no time for, in the plainest way, in order; the packs that there was time for.

    Otherwise the second epoch of a slow setting would be one of fewer packs, which a small cache holds.
    """
    end = time.monotonic() + job.most_seconds
    shard = Shard(job.prefix, backend="pread")
    done, packs = 0, np.sort(packs)
    while done < len(packs) and time.monotonic() < end:
        shard[packs[done]]
        done += 1
    return packs[:done]


def serve(open_reader: Callable[[Job], Reader]) -> None:
    """Do the jobs that come in on standard input; what each found goes out on standard output, as JSON on a line.

    Each setting has a process of its own, forked before any shard was open: it starts at once, having imported all.
    """
    children: dict[Setting, tuple[int, Connection]] = {}
    for line in sys.stdin:
        setting = Job.from_json(line).setting
        if setting not in children:
            children[setting] = _fork(open_reader)
        pid, connection = children[setting]
        try:
            connection.send(line)
            answer = connection.recv()
        except (EOFError, OSError):
            del children[setting]
            answer = {"refused": f"its process {_ending(os.waitpid(pid, 0)[1])}"}
        print(json.dumps(answer), flush=True)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"ended with code {code}" if code >= 0 else f"was killed: {signal.strsignal(-code)}"


def _fork(open_reader: Callable[[Job], Reader]) -> tuple[int, Connection]:
    """A process that answers the jobs sent to it; its id, and the way to it."""
    ours, its = Pipe()
    if pid := os.fork():
        its.close()
        return pid, ours
    ours.close()
    try:
        while True:
            its.send(_answer(Job.from_json(its.recv()), open_reader))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _answer(job: Job, open_reader: Callable[[Job], Reader]) -> dict[str, Any]:
    try:
        return {"run": asdict(run_job(job, open_reader))}
    except SFTIndexError as error:
        return {"bad": str(error)}
    except OSError as error:
        return {"refused": str(error)}


def main() -> None:
    """Measure ``Shard``."""
    logging.disable(logging.WARNING)  # of what came of huge pages: that is counted
    serve(ShardReader)
