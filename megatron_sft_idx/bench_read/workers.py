"""Giving jobs to measured processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from megatron_sft_idx.bench_read.worker import Job, Run
from megatron_sft_idx.errors import FormatError

__all__ = ["SHARD_WORKER", "Worker"]

SHARD_WORKER = (sys.executable, "-c", "from megatron_sft_idx.bench_read.worker import main; main()")


class Worker:
    """A measured process, which takes one job after the other.

    Args:
        command: what to start; it is to call ``serve``.
    """

    def __init__(self, command: Sequence[str] = SHARD_WORKER) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, job: Job) -> Run:
        """Do a job.

        Raises:
            FormatError: the shard is bad.
            OSError: the system does not let it be read in this way, or ends the process.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise OSError(f"the measured process ended with code {self._process.wait()}")
        answer = json.loads(line)
        if "bad" in answer:
            raise FormatError(answer["bad"])
        if "refused" in answer:
            raise OSError(answer["refused"])
        return Run.of(answer["run"])

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process, whatever it does: it holds nothing that could be lost."""
        self._process.kill()
        self._process.__exit__(kind, error, trace)
