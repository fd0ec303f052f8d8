"""The measured process: it reads two epochs of a shard with one setting, and ends.

Each measurement uses a new process, so that no memory map or cache of an earlier measurement affects it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage import Advice, Backend, ReadOptions

# Number of packs that are announced at once, about a few batches: while packs 0 to 31 are read, 32 to 63 are announced.
AHEAD = 32

Order = Literal["shuffled", "sequential"]


@dataclass(frozen=True)
class Setting:
    """A way of reading: options of ``Shard``, and whether the next packs are announced to the shard.

    Attributes:
        backend: how bytes are read.
        advice: advice to the kernel about the order.
        schedule: whether ``Shard.schedule`` is called.
        huge_pages: whether the kernel is asked to map with huge pages.
    """

    backend: Backend = "mmap"
    advice: Advice = "normal"
    schedule: bool = False
    huge_pages: bool = False

    @property
    def name(self) -> str:
        """Readable name, such as ``mmap, random, schedule``."""
        advice = [self.advice] * (self.advice != "normal")
        return ", ".join([self.backend, *advice, *["schedule"] * self.schedule, *["huge pages"] * self.huge_pages])

    @property
    def options(self) -> list[str]:
        """The options that differ from the defaults, as Python arguments."""
        values = {"backend": self.backend, "advice": self.advice, "huge_pages": self.huge_pages}
        return [f"{name}={value!r}" for name, value in values.items() if value != getattr(Setting, name)]

    @property
    def call(self) -> str:
        """The Python call for this setting."""
        opened = f"Shard({', '.join(['prefix', *self.options])})"
        return f"{opened}, with schedule() ahead of use" if self.schedule else opened

    @property
    def training(self) -> str:
        """The configuration for this setting in training; its loaders call ``schedule`` themselves."""
        return f"PackedSFTDatasetConfig(..., read=ReadOptions({', '.join(self.options)}))"


# The simplest setting first: if several settings are equally good, the first one is recommended.
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
class ReadRequest:
    """A request to read and time two epochs of one shard in a process.

    Attributes:
        prefix: prefix of the shard.
        packs: the numbers of the packs.
        setting: how the packs are read.
        order: order of the packs in each epoch.
        max_seconds: seconds after which an epoch ends, even if packs are left.
        group: folder of the control group that the process enters first; None to stay in the current one.
    """

    prefix: str
    packs: range
    setting: Setting
    order: Order = "shuffled"
    max_seconds: float = float("inf")
    group: str | None = None

    def in_order(self, packs: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return packs in the order of an epoch, int64 [packs]."""
        return np.random.default_rng(epoch).permutation(packs) if self.order == "shuffled" else np.sort(packs)


@dataclass(frozen=True)
class Epoch:
    """One pass over the packs.

    Attributes:
        packs: number of packs read; fewer than requested if time ran out.
        seconds: time that reading them took.
        nbytes: bytes of these packs.
        disk_nbytes: bytes that the process made the storage read, including read-ahead; 0 if the kernel does not count
            them.
    """

    packs: int
    seconds: float
    nbytes: int
    disk_nbytes: int

    @property
    def rate(self) -> float:
        """Packs per second."""
        return self.packs / self.seconds

    @property
    def amplification(self) -> float:
        """Bytes read from the disk per byte of a pack."""
        return self.disk_nbytes / max(self.nbytes, 1)


class ReadTimes(NamedTuple):
    """The epoch after the page cache was dropped, and a second epoch over the packs that were read in the first."""

    first: Epoch
    second: Epoch


class ShardReader:
    """The reader in a measured process: it copies tokens and mask of each pack of a ``Shard``, as for a batch."""

    def __init__(self, request: ReadRequest) -> None:
        setting = request.setting
        self._shard = Shard(request.prefix, backend=ReadOptions(setting.backend, setting.advice, setting.huge_pages))
        header = self._shard.header
        longest = min(header.longest_pack, header.num_tokens)
        self._ids, self._mask = np.zeros(longest, header.token_dtype), np.zeros(longest, header.mask_dtype)

    def schedule(self, packs: NDArray[np.int64]) -> None:
        """Announce packs that will be read soon, in this order."""
        self._shard.schedule(packs)

    def read(self, pack: int) -> int:
        """Copy a pack and return the number of bytes of its tokens, mask and boundaries."""
        found = self._shard[pack]
        ids, mask = found["input_ids"], found["loss_mask"]
        self._ids[: len(ids)], self._mask[: len(ids)] = ids, mask
        return ids.nbytes + mask.nbytes + 4 * (len(found["seq_boundaries"]) - 1)


# Opens the reader of a measured process: an object with a method ``read``, and ``schedule`` for settings that call it.
Opener = Callable[[ReadRequest], Any]

# ---- in the measured process ----


def read_epoch(reader: Any, packs: NDArray[np.int64], *, scheduled: bool, max_seconds: float) -> Epoch:
    """Read packs in the given order until all are read or the time is over; at least one pack is read.

    Args:
        reader: the result of an ``Opener``.
        packs: int64 [packs], not empty.
        scheduled: whether to announce the next ``AHEAD`` packs with ``reader.schedule`` before the current ones are
            read.
        max_seconds: seconds after which no further pack is started.
    """
    nbytes = count = 0
    disk = _disk_nbytes()
    begin = time.perf_counter()
    if scheduled:
        reader.schedule(packs[:AHEAD])
    for pack in packs.tolist():
        if scheduled and count % AHEAD == 0 and count + AHEAD < len(packs):
            reader.schedule(packs[count + AHEAD : count + 2 * AHEAD])
        nbytes += reader.read(pack)
        count += 1
        seconds = time.perf_counter() - begin
        if seconds > max_seconds:
            break
    return Epoch(count, seconds, nbytes, _disk_nbytes() - disk)


def _disk_nbytes() -> int:
    """Return the bytes that this process has made the storage read so far; 0 if the kernel does not count them."""
    with suppress(OSError, StopIteration), open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return 0


def _answer(request: ReadRequest, open_reader: Opener, connection: Connection) -> None:
    """Run a request in the measured process, and send its ``ReadTimes`` or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent process, which kills this one
    logging.disable(logging.WARNING)  # otherwise each round would warn if huge pages are refused
    answer: ReadTimes | FormatError | OSError
    try:
        if request.group is not None:
            Path(request.group, "cgroup.procs").write_text("0")  # 0 stands for the process that writes it
        reader, scheduled = open_reader(request), request.setting.schedule
        packs = request.in_order(np.array(request.packs), epoch=1)
        first = read_epoch(reader, packs, scheduled=scheduled, max_seconds=request.max_seconds)
        packs = request.in_order(packs[: first.packs], epoch=2)
        answer = ReadTimes(first, read_epoch(reader, packs, scheduled=scheduled, max_seconds=request.max_seconds))
    except SFTIndexError as error:
        answer = FormatError(str(error))
    except Exception as error:
        answer = OSError(str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")
    connection.send(answer)


# ---- in the measuring process ----


def run_request(request: ReadRequest, open_reader: Opener = ShardReader) -> ReadTimes:
    """Run a request in a new process. It starts fast, because it is forked from a server that has the package loaded.

    Args:
        request: the request.
        open_reader: opens the reader; it is pickled, so it must be a name in a module.

    Raises:
        FormatError: the shard is bad.
        OSError: the system does not allow this way of reading, or ended the process.
    """
    context = get_context("forkserver")
    # Not this module: the server does not search the folder of the program that started it.
    context.set_forkserver_preload(["megatron_sft_idx.shard"])
    _start_server()
    answers, child_end = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(request, open_reader, child_end), daemon=True)
    child.start()
    child_end.close()
    try:
        answer: ReadTimes | FormatError | OSError = answers.recv()
    except EOFError:
        child.join()
        code = child.exitcode or 0
        ending = f"ended with code {code}" if code >= 0 else f"was killed: {signal.strsignal(-code)}"
        raise OSError(f"its process {ending}") from None
    finally:
        child.kill()  # safe: it has nothing to write
        child.join()
        answers.close()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _start_server() -> None:
    """Start multiprocessing's fork server and its resource tracker, unless they are running.

    Python starts them with the current folder first on their path, and a file there could shadow any module. This
    process therefore changes to the root folder for the start, where only an administrator can create files.
    """
    before = os.open(os.curdir, os.O_PATH | os.O_CLOEXEC)  # O_PATH: the folder need not be readable
    try:
        os.chdir(os.sep)
        forkserver.ensure_running()
    finally:
        os.fchdir(before)
        os.close(before)
