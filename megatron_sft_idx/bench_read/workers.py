"""Giving jobs to measured processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from megatron_sft_idx.bench_read.worker import Job, Run
from megatron_sft_idx.errors import FormatError

__all__ = ["SHARD_WORKERS", "Workers"]

# ``-c`` puts the current folder first on the path. It is taken out before anything else is imported, and the package
# is imported from where it was found here, wherever that is.
_START = """import sys
sys.path[:] = filter(None, sys.path)
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("megatron_sft_idx", sys.argv[1])
sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
from megatron_sft_idx.bench_read.worker import main
main()"""
SHARD_WORKERS = (sys.executable, "-c", _START, str(Path(__file__).parents[1] / "__init__.py"))


class Workers:
    """Measured processes, one for each setting, which take one job after the other.

    Args:
        command: what starts them; it is to call ``serve``.
    """

    def __init__(self, command: Sequence[str] = SHARD_WORKERS) -> None:
        self._errors = os.memfd_create("errors")
        # A session of their own: Ctrl-C is for whoever gives the jobs, and all can be ended at once.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
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
            raise OSError(f"the measured processes ended with code {self._process.wait()}{self._said()}")
        answer = json.loads(line)
        if "bad" in answer:
            raise FormatError(answer["bad"])
        if "refused" in answer:
            raise OSError(answer["refused"] + self._said())
        return Run.of(answer["run"])

    def _said(self) -> str:
        """What the processes last complained of on standard error: of a traceback, the line that says what it is."""
        lines = os.pread(self._errors, os.fstat(self._errors).st_size, 0).decode(errors="replace").strip().splitlines()
        os.ftruncate(self._errors, 0)
        os.lseek(self._errors, 0, os.SEEK_SET)  # theirs too: it is one open file
        return f": {lines[-1]}" if lines else ""

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
        os.close(self._errors)
