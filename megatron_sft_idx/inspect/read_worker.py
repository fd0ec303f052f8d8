"""The processes that are measured: each opens a shard in one way and reads epochs of it, job by job.

They are processes of their own so that their faults and their memory are the reading's alone.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage import Advice, Backend, ReadOptions

# Packs that the kernel is told of before they are read, and as many again while they are: some batches' worth.
AHEAD = 32

Order = Literal["shuffled", "sequential"]


@dataclass(frozen=True)
class Setting:
    """A way of reading: options of ``Shard``, and whether it is told which packs come next.

    Attributes:
        backend: how bytes are read.
        advice: what the kernel is told of the order.
        schedule: whether ``Shard.schedule`` is called.
        huge_pages: whether the kernel is asked to map by huge pages.
    """

    backend: Backend = "mmap"
    advice: Advice = "normal"
    schedule: bool = False
    huge_pages: bool = False

    @property
    def name(self) -> str:
        """For people, such as ``mmap, random, schedule``."""
        advice = [self.advice] * (self.advice != "normal")
        return ", ".join([self.backend, *advice, *["schedule"] * self.schedule, *["huge pages"] * self.huge_pages])

    @property
    def options(self) -> list[str]:
        """Those that are not as they are by default, as a program writes them."""
        given = {"backend": self.backend, "advice": self.advice, "huge_pages": self.huge_pages}
        return [f"{name}={value!r}" for name, value in given.items() if value != getattr(Setting, name)]

    @property
    def call(self) -> str:
        """How a program asks for it."""
        opened = f"Shard({', '.join(['prefix', *self.options])})"
        return f"{opened}, with schedule() ahead of use" if self.schedule else opened

    @property
    def training(self) -> str:
        """How training asks for it, whose loaders say what comes next by themselves."""
        return f"PackedSFTDatasetConfig(..., read=ReadOptions({', '.join(self.options)}))"


# From the simplest on: of settings that are as good as each other, the first one is recommended.
SETTINGS = (
    Setting(),
    Setting(advice="random"),
    Setting(advice="sequential"),
    Setting("pread"),
    Setting("pread", "random"),
    Setting(schedule=True),
    Setting(advice="random", schedule=True),
    Setting("pread", "random", schedule=True),
    Setting(huge_pages=True),
)


@dataclass(frozen=True)
class Sample:
    """Which packs are read: every ``step``-th from ``start`` on, below ``stop``.

    Attributes:
        order: of both epochs.
        seed: of the shuffles.
    """

    start: int
    stop: int
    step: int = 1
    order: Order = "shuffled"
    seed: int = 0

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def first(self) -> NDArray[np.int64]:
        """Packs of the first epoch, int64."""
        return self.again(np.arange(self.start, self.stop, self.step, dtype=np.int64), epoch=1)

    def again(self, packs: NDArray[np.int64], epoch: int = 2) -> NDArray[np.int64]:
        """Packs that were read, as int64 in the order of another epoch."""
        packs = np.sort(packs)
        shuffled = self.order == "shuffled"
        return np.random.default_rng([self.seed, epoch]).permutation(packs) if shuffled else packs


@dataclass(frozen=True)
class ReadJob:
    """Two epochs of one shard.

    Attributes:
        prefix: of the shard.
        sample: the packs.
        setting: how they are read.
        most_seconds: of one epoch.
        group: folder of the control group the process is to be in; None to stay where it is.
    """

    prefix: str
    sample: Sample
    setting: Setting
    most_seconds: float
    group: str | None = None


@dataclass(frozen=True)
class Epoch:
    """What one pass over the sample took, and what Linux counted of the process meanwhile.

    Attributes:
        packs: how many were read; fewer than the sample has where time ran out.
        seconds: in all.
        nbytes: of the packs.
        median_us: microseconds to read a pack, the median.
        p99_us: 99 of 100 packs took at most this long.
        soft_faults: pages that were mapped from memory.
        hard_faults: faults that waited for a disk.
        disk_nbytes: bytes the process made the storage read, ahead of use or not; None where that is not counted.
    """

    packs: int
    seconds: float
    nbytes: int
    median_us: float
    p99_us: float
    soft_faults: int
    hard_faults: int
    disk_nbytes: int | None

    @property
    def rate(self) -> float:
        """Packs a second."""
        return self.packs / self.seconds

    @property
    def amplification(self) -> float | None:
        """Bytes read from the disk for each byte of a pack; None where they are not counted."""
        return None if self.disk_nbytes is None else self.disk_nbytes / max(self.nbytes, 1)


@dataclass(frozen=True)
class ReadTimes:
    """What a job found.

    Attributes:
        first: the epoch after the page cache was dropped.
        second: the one after it, when all packs of the sample had been read, or time was over.
        seen_nbytes: of the packs that were read before the second epoch.
        private_nbytes: what reading, in this job and those before it, added to the memory that is the process's own.
        huge_nbytes: bytes of the shard that were mapped by huge pages in the end.
    """

    first: Epoch
    second: Epoch
    seen_nbytes: int
    private_nbytes: int
    huge_nbytes: int


class TimedReader:
    """An open data set whose packs are copied out, as into a batch; files, maps and caches go with it."""

    def schedule(self, packs: NDArray[np.int64]) -> None:
        """These packs are read next, in this order; who cannot use that leaves it."""

    def read(self, pack: int) -> int:
        """Copy a pack out; returns its bytes."""
        raise NotImplementedError

    def huge_nbytes(self) -> int:
        """Bytes of the data set that are mapped by huge pages."""
        return 0


class ShardReader(TimedReader):
    """``Shard`` as a reader: tokens and mask of a pack are copied into arrays that are there already."""

    def __init__(self, job: ReadJob) -> None:
        setting = job.setting
        options = ReadOptions(setting.backend, setting.advice, setting.huge_pages)
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
        """The kernel is told of a few packs at a time."""
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
        """By what the kernel counts."""
        return self._shard.huge_pages()


# ---- in the measured process ----


def read_epoch(reader: TimedReader, packs: NDArray[np.int64], *, scheduled: bool, most_seconds: float) -> Epoch:
    """Read packs in the order given until they, or the time, are at their end; at least one.

    Args:
        reader: what they are read by.
        packs: int64 [packs], at least one.
        scheduled: tell the reader what comes next.
        most_seconds: when no further pack is begun.
    """
    times = np.empty(len(packs))
    nbytes = done = 0
    clock = time.perf_counter
    disk, usage = _proc_value("io", "read_bytes:"), resource.getrusage(resource.RUSAGE_SELF)
    begin = last = clock()
    if scheduled:
        reader.schedule(packs)
    for pack in packs.tolist():
        nbytes += reader.read(pack)
        now = clock()
        times[done] = now - last
        done, last = done + 1, now
        if now - begin > most_seconds:
            break
    after, read = resource.getrusage(resource.RUSAGE_SELF), _proc_value("io", "read_bytes:")
    soft, hard = after.ru_minflt - usage.ru_minflt, after.ru_majflt - usage.ru_majflt
    median, p99 = np.percentile(times[:done] * 1e6, [50, 99]).tolist()
    counted = None if disk is None or read is None else read - disk
    return Epoch(done, last - begin, nbytes, median, p99, soft, hard, counted)


def _proc_value(file: str, key: str) -> int | None:
    """A number that the kernel keeps of this process; None where it does not account for it."""
    with suppress(OSError, StopIteration), open(f"/proc/self/{file}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key))
    return None


def _private_nbytes() -> int:
    return 1024 * (_proc_value("status", "RssAnon:") or 0)  # mapped files left out


def _run_job(job: ReadJob, open_reader: Callable[[ReadJob], TimedReader], begun_with: int) -> ReadTimes:
    """Both epochs. What the first had no time for is read between them, in the plainest way, in order.

    Otherwise the second epoch of a slow setting would be one of fewer packs, which a small cache holds.
    """
    if job.group is not None:
        Path(job.group, "cgroup.procs").write_text("0")  # 0 is whoever writes
    reader = open_reader(job)
    packs, scheduled = job.sample.first(), job.setting.schedule
    first = read_epoch(reader, packs, scheduled=scheduled, most_seconds=job.most_seconds)
    end, shard = time.monotonic() + job.most_seconds, Shard(job.prefix, backend="pread")
    done, late = 0, np.sort(packs[first.packs :])
    while done < len(late) and time.monotonic() < end:
        shard[late[done]]
        done += 1
    seen = np.concatenate([packs[: first.packs], late[:done]])
    second = read_epoch(reader, job.sample.again(seen), scheduled=scheduled, most_seconds=job.most_seconds)
    private = _private_nbytes() - begun_with
    # With the reader go its maps, without which the page cache can be dropped.
    return ReadTimes(first, second, first.nbytes * len(seen) // first.packs, max(private, 0), reader.huge_nbytes())


# ---- processes ----


def _serve(open_reader: Callable[[ReadJob], TimedReader], jobs: Connection) -> None:
    """Do the jobs that come in; the run of each, or its error, goes back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever gives the jobs, and ends this process
    logging.disable(logging.WARNING)  # of what came of huge pages: that is counted
    begun_with = _private_nbytes()  # not job by job: what is freed after one may stay the process's, for the next
    with suppress(EOFError):
        while True:
            job = jobs.recv()
            answer: ReadTimes | FormatError | OSError
            try:
                answer = _run_job(job, open_reader, begun_with)
            except SFTIndexError as error:
                answer = FormatError(str(error))
            except Exception as error:
                answer = OSError(str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")
            jobs.send(answer)


def _start_server() -> None:
    """Start multiprocessing's fork server where it does not run, and the tracker that comes with it.

    Python starts them with the current folder first on their path, where a file may have the name of any module. So
    the current folder is another one meanwhile, in which only an administrator can leave a file.
    """
    here = os.open(os.curdir, os.O_PATH | os.O_CLOEXEC)  # it may be one that cannot be listed
    try:
        os.chdir(os.sep)
        forkserver.ensure_running()
    finally:
        os.fchdir(here)
        os.close(here)


class Workers(ExitStack):
    """Measured processes, one for each setting, which take one job after the other; they end with the ``with`` block.

    They are forked from a server that has imported all and opened nothing, so each starts at once.

    Args:
        open_reader: opens the data set of a job; a name in a module, as processes are told of it.
    """

    def __init__(self, open_reader: Callable[[ReadJob], TimedReader] = ShardReader) -> None:
        super().__init__()
        self._open_reader = open_reader
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._children: dict[Setting, tuple[BaseProcess, Connection]] = {}

    def run(self, job: ReadJob) -> ReadTimes:
        """Do a job.

        Raises:
            FormatError: the shard is bad.
            OSError: the system does not let it be read in this way, or ends the process.
        """
        if job.setting not in self._children:
            self._children[job.setting] = self._start()
        process, connection = self._children[job.setting]
        try:
            connection.send(job)
            answer: ReadTimes | FormatError | OSError = connection.recv()
        except (EOFError, OSError):
            del self._children[job.setting]
            process.join()
            code = process.exitcode or 0
            ending = f"ended with code {code}" if code >= 0 else f"was killed: {signal.strsignal(-code)}"
            raise OSError(f"its process {ending}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> tuple[BaseProcess, Connection]:
        """A process that waits for jobs. It holds nothing that could be lost, so it is killed in the end."""
        _start_server()
        ours, its = self._context.Pipe()
        child = self._context.Process(target=_serve, args=(self._open_reader, its), daemon=True)
        child.start()
        its.close()
        for end in (ours.close, child.join, child.kill):  # the last one first
            self.callback(end)
        return child, ours
