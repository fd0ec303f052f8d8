"""The processes whose reading is measured: each reads shards by one setting, two epochs a request.

Each setting has a process of its own, so that the page faults and the memory that are counted come from reading alone.
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

# Packs that ``schedule`` is given at a time, those of a few batches: the next ``AHEAD`` while these are read.
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
        """The options that differ from the defaults, as a program writes them."""
        values = {"backend": self.backend, "advice": self.advice, "huge_pages": self.huge_pages}
        return [f"{name}={value!r}" for name, value in values.items() if value != getattr(Setting, name)]

    @property
    def call(self) -> str:
        """How a program asks for this setting."""
        opened = f"Shard({', '.join(['prefix', *self.options])})"
        return f"{opened}, with schedule() ahead of use" if self.schedule else opened

    @property
    def training(self) -> str:
        """How training asks for this setting; its loaders call ``schedule`` themselves."""
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
        order: the order of both epochs.
        seed: the seed of their shuffles.
    """

    start: int
    stop: int
    step: int = 1
    order: Order = "shuffled"
    seed: int = 0

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def first_epoch(self) -> NDArray[np.int64]:
        """All packs of the sample in the order of the first epoch, int64 [packs]."""
        return self._in_order(np.arange(self.start, self.stop, self.step, dtype=np.int64), epoch=1)

    def second_epoch(self, packs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Packs that the first epoch has read in the order of the second, int64 [packs]."""
        return self._in_order(packs, epoch=2)

    def _in_order(self, packs: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        packs = np.sort(packs)
        shuffled = self.order == "shuffled"
        return np.random.default_rng([self.seed, epoch]).permutation(packs) if shuffled else packs


@dataclass(frozen=True)
class ReadRequest:
    """Two epochs of one shard, to be read and timed by a process.

    Attributes:
        prefix: the shard's.
        sample: the packs.
        setting: how the packs are read.
        max_seconds: when an epoch ends, all packs read or not.
        group: folder of the control group that the process enters first; None to stay in its own.
    """

    prefix: str
    sample: Sample
    setting: Setting
    max_seconds: float
    group: str | None = None


@dataclass(frozen=True)
class Epoch:
    """What one pass over the sample took, and what Linux counted of the process meanwhile.

    Attributes:
        packs: how many were read; fewer than the sample has where time ran out.
        seconds: what reading them took.
        nbytes: bytes of these packs.
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
    """The answer to a ``ReadRequest``.

    Attributes:
        first: the epoch after the page cache was dropped.
        second: the next epoch; of the packs that had been read before it, where there was no time to read all.
        seen_nbytes: bytes of the packs that had been read before the second epoch.
        private_nbytes: bytes by which this and all earlier requests made the process's own memory grow, maps left out.
        huge_nbytes: bytes of the shard that were mapped by huge pages in the end.
    """

    first: Epoch
    second: Epoch
    seen_nbytes: int
    private_nbytes: int
    huge_nbytes: int


class TimedReader:
    """An open data set from which a measured process copies packs, as into a batch.

    Nothing else may hold its files, maps and caches: they must be closed when the reader is dropped.
    """

    def schedule(self, packs: NDArray[np.int64]) -> None:
        """Announce the packs that are read next, in this order; a reader that has no use for it does nothing."""

    def read(self, pack: int) -> int:
        """Copy a pack out; returns its bytes."""
        raise NotImplementedError

    def huge_nbytes(self) -> int:
        """Bytes of the data set that are mapped by huge pages."""
        return 0


class ShardReader(TimedReader):
    """``Shard`` as a reader: tokens and mask of a pack are copied into arrays that are made once.

    Raises FormatError where the shard has fewer packs than the request asks for.
    """

    def __init__(self, request: ReadRequest) -> None:
        setting = request.setting
        options = ReadOptions(setting.backend, setting.advice, setting.huge_pages)
        self._shard = Shard(request.prefix, backend=options)
        if len(self._shard) < request.sample.stop:
            raise FormatError(
                f"{request.prefix}: {len(self._shard)} packs, the shard that was to be measured had more: another one"
                " was published over it; measure again"
            )
        header = self._shard.header
        longest = min(header.longest_pack, header.num_tokens)
        self._ids, self._mask = np.zeros(longest, header.token_dtype), np.zeros(longest, header.mask_dtype)
        self._coming, self._read = np.empty(0, np.int64), 0

    def schedule(self, packs: NDArray[np.int64]) -> None:
        """Announce all packs of an epoch, of which the shard is told ``AHEAD`` at a time."""
        self._coming, self._read = packs, 0
        self._shard.schedule(packs[:AHEAD])

    def read(self, pack: int) -> int:
        """Bytes of tokens, mask and boundaries. FormatError: the pack is longer than the header says."""
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
        """As the kernel counts them in ``/proc/self/smaps``."""
        return self._shard.huge_pages()


# ---- in the measured process ----


def read_epoch(reader: TimedReader, packs: NDArray[np.int64], *, scheduled: bool, max_seconds: float) -> Epoch:
    """Read packs in the order given, until all are read or the time is over; one pack is always read.

    Args:
        reader: reads them.
        packs: int64 [packs], not empty.
        scheduled: whether ``reader.schedule`` is called first.
        max_seconds: seconds after which no further pack is begun.
    """
    times = np.empty(len(packs))
    nbytes = count = 0
    clock = time.perf_counter
    disk, usage = _proc_value("io", "read_bytes:"), resource.getrusage(resource.RUSAGE_SELF)
    begin = last = clock()
    if scheduled:
        reader.schedule(packs)
    for pack in packs.tolist():
        nbytes += reader.read(pack)
        now = clock()
        times[count] = now - last
        count, last = count + 1, now
        if now - begin > max_seconds:
            break
    after, read = resource.getrusage(resource.RUSAGE_SELF), _proc_value("io", "read_bytes:")
    soft, hard = after.ru_minflt - usage.ru_minflt, after.ru_majflt - usage.ru_majflt
    median, p99 = np.percentile(times[:count] * 1e6, [50, 99]).tolist()
    disk_nbytes = None if disk is None or read is None else read - disk
    return Epoch(count, last - begin, nbytes, median, p99, soft, hard, disk_nbytes)


def _proc_value(file: str, key: str) -> int | None:
    """A number that the kernel keeps of this process; None where it does not keep it."""
    with suppress(OSError, StopIteration), open(f"/proc/self/{file}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key))
    return None


def _private_nbytes() -> int:
    return 1024 * (_proc_value("status", "RssAnon:") or 0)  # mapped files left out


def _read_twice(request: ReadRequest, open_reader: Callable[[ReadRequest], TimedReader], own_nbytes: int) -> ReadTimes:
    """Read both epochs; ``own_nbytes`` is the process's own memory before its first request.

    Packs that the first epoch had no time for are read between the two by ``pread``, in ascending order: otherwise the
    second epoch of a slow setting would have fewer packs, which a small cache can hold.
    """
    if request.group is not None:
        Path(request.group, "cgroup.procs").write_text("0")  # 0 is whoever writes
    reader = open_reader(request)
    packs, scheduled = request.sample.first_epoch(), request.setting.schedule
    first = read_epoch(reader, packs, scheduled=scheduled, max_seconds=request.max_seconds)
    end, shard = time.monotonic() + request.max_seconds, Shard(request.prefix, backend="pread")
    late, num_late = np.sort(packs[first.packs :]), 0
    while num_late < len(late) and time.monotonic() < end:
        shard[late[num_late]]
        num_late += 1
    seen = np.concatenate([packs[: first.packs], late[:num_late]])
    second = read_epoch(reader, request.sample.second_epoch(seen), scheduled=scheduled, max_seconds=request.max_seconds)
    private = _private_nbytes() - own_nbytes
    # On return the reader is dropped with its maps; while a file is mapped, its pages cannot be dropped.
    return ReadTimes(first, second, first.nbytes * len(seen) // first.packs, max(private, 0), reader.huge_nbytes())


# ---- processes ----


def _serve(open_reader: Callable[[ReadRequest], TimedReader], connection: Connection) -> None:
    """Answer each request that comes in by its ``ReadTimes`` or its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent process, which kills this one
    logging.disable(logging.WARNING)  # a warning that huge pages were refused: ``huge_nbytes`` says so
    # Not taken anew for each request: memory that one frees may stay the process's, and serve the next.
    own_nbytes = _private_nbytes()
    with suppress(EOFError):
        while True:
            request = connection.recv()
            answer: ReadTimes | FormatError | OSError
            try:
                answer = _read_twice(request, open_reader, own_nbytes)
            except SFTIndexError as error:
                answer = FormatError(str(error))
            except Exception as error:
                answer = OSError(str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")
            connection.send(answer)


def _start_server() -> None:
    """Start multiprocessing's fork server, and the resource tracker that comes with it, unless they run already.

    Python starts them with the current folder first on their path, where a file may have the name of any module. So
    this process changes to the root folder meanwhile, in which only an administrator can leave a file.
    """
    before = os.open(os.curdir, os.O_PATH | os.O_CLOEXEC)  # O_PATH: the folder need not be readable
    try:
        os.chdir(os.sep)
        forkserver.ensure_running()
    finally:
        os.fchdir(before)
        os.close(before)


class Workers(ExitStack):
    """The measured processes, one for each setting; they end with the ``with`` block.

    They are forked from a server that has imported this module and opened no shard, so each starts at once.

    Args:
        open_reader: opens the data set of a request; it is pickled, so it must be a name in a module.
    """

    def __init__(self, open_reader: Callable[[ReadRequest], TimedReader] = ShardReader) -> None:
        super().__init__()
        self._open_reader = open_reader
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._children: dict[Setting, tuple[BaseProcess, Connection]] = {}

    def run(self, request: ReadRequest) -> ReadTimes:
        """Have the process of the request's setting answer it; start that process where there is none.

        Raises:
            FormatError: the shard is bad.
            OSError: the system does not let the shard be read in this way, or ended the process.
        """
        if request.setting not in self._children:
            self._children[request.setting] = self._start()
        process, connection = self._children[request.setting]
        try:
            connection.send(request)
            answer: ReadTimes | FormatError | OSError = connection.recv()
        except (EOFError, OSError):
            del self._children[request.setting]
            process.join()
            code = process.exitcode or 0
            ending = f"ended with code {code}" if code >= 0 else f"was killed: {signal.strsignal(-code)}"
            raise OSError(f"its process {ending}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> tuple[BaseProcess, Connection]:
        """Start a process that waits for requests. It has nothing to lose, so it is killed in the end."""
        _start_server()
        parent_end, child_end = self._context.Pipe()
        child = self._context.Process(target=_serve, args=(self._open_reader, child_end), daemon=True)
        child.start()
        child_end.close()
        for end in (parent_end.close, child.join, child.kill):  # the last one is called first
            self.callback(end)
        return child, parent_end
