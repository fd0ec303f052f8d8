"""Giving jobs to measured processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from megatron_sft_idx.bench_read.worker import Job, Run
from megatron_sft_idx.errors import FormatError

__all__ = ["SHARD_WORKERS", "Workers"]

SHARD_WORKERS = (sys.executable, "-c", "from megatron_sft_idx.bench_read.worker import main; main()")


class Workers:
    """Measured processes, one for each setting, which take one job after the other.

    Args:
        command: what starts them; it is to call ``serve``.
    """

    def __init__(self, command: Sequence[str] = SHARD_WORKERS) -> None:
        # A session of their own: Ctrl-C is for whoever gives the jobs, and all can be ended at once.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, job: Job) -> Run:
        """Do a job.

        Raises:
            FormatError: the shard is bad.
            OSError: the system does not let it be read in this way, or ends the process.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the measured processes ended with code {self._process.wait()}")
        answer = json.loads(line)
        if "bad" in answer:
            raise FormatError(answer["bad"])
        if "refused" in answer:
            raise OSError(answer["refused"])
        return Run.of(answer["run"])

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them, whatever they do: they hold nothing that could be lost."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):  # a job that nobody took
            self._process.__exit__(kind, error, trace)
        self._process.wait()
